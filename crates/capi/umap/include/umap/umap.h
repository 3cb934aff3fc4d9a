/* The interface of Umap, served by farpage: mmap for stores of your own, with a page size and a
 * buffer of your own.
 *
 * Functions that return int or a pointer say -1 or UMAP_FAILED and set errno when they fail; they
 * never abort. All may be called from any thread.
 *
 * The environment is read at the first call:
 *   UMAP_PAGESIZE                     bytes of a page: a power of two, 4096 to 2097152;
 *                                     default 4096
 *   UMAP_BUFSIZE                      the most pages in memory at once, over all regions, up to
 *                                     what the process may have; default 90 % of available memory
 *   UMAP_PAGE_FILLERS                 threads that bring pages in, 1 to 64; default one per core
 *   UMAP_PAGE_EVICTORS                threads that take pages out, 1 to 64; default one per core
 *   UMAP_EVICT_HIGH_WATER_THRESHOLD   percent of the buffer at which evictors start; default 95
 *   UMAP_EVICT_LOW_WATER_THRESHOLD    percent of the buffer at which they stop; default 90
 *   UMAP_READ_AHEAD                   the most pages to read ahead of a sequential run, 0 for none;
 *                                     default: farpage's
 *   UMAP_MAX_FAULT_EVENTS             only returned by its getter: farpage reads as many faults at
 *                                     once as there are
 *   UMAP_LOG_LEVEL                    ERROR, WARNING, INFO or DEBUG, to standard error; default
 *                                     WARNING
 * A value that makes no sense is replaced by the nearest one that does, with a warning. */
#ifndef FARPAGE_UMAP_UMAP_H
#define FARPAGE_UMAP_UMAP_H

#ifdef __cplusplus
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "umap/store/Store.hpp"
#else
#include <stddef.h>
#include <stdint.h>
#endif

#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

/* Must be among the flags. Changes go to the store all the same: it is the page buffer that is
 * private. */
#define UMAP_PRIVATE MAP_PRIVATE
/* Map at `addr`, a multiple of the page size, and nowhere else: what is mapped there is replaced,
 * up to the end of the region's last page, and nothing beside it. EINVAL if that is another
 * region. */
#define UMAP_FIXED MAP_FIXED
/* What umap says when it fails. */
#define UMAP_FAILED ((void *)-1)

#ifdef __cplusplus
namespace Umap {

/* As `umap`, but the pages are kept by `store`, which stays the caller's and must live until the
 * region is unmapped; `fd` and `offset` are not used then. Without a store it is `umap`. */
void *umap_ex(void *addr, std::size_t length, int prot, int flags, int fd, off_t offset, Store *store);

}  // namespace Umap

extern "C" {
#endif

/* Maps `length` bytes of the file behind `fd`, from `offset` on (a multiple of 4096). `fd` may be
 * closed afterwards. What lies beyond the end of the file reads as zeros, and is written only where
 * others than zeros are stored. `length` need not be a multiple of the page size.
 *
 * An `addr` that is a multiple of the page size is where the program would like the region: it is
 * there if nothing is mapped there yet, and elsewhere if something is. With UMAP_FIXED it is there
 * or nowhere.
 *
 * With UMAP_FIXED it replaces what is mapped there, also a part of another region. Bytes of that
 * part go to their store first. What is left of the other region on either side is as it was, in
 * whole pages: uunmap takes it by its own first address, and with the first part those behind it as
 * far as `length` reaches. No thread may touch the other region meanwhile, not even outside of the
 * part. Arrays of a network store keep their addresses and are not replaced: EINVAL.
 *
 * errno: EINVAL arguments, EACCES the file is not open for this, EPERM no permission to handle page
 * faults, ENOMEM, EIO. */
void *umap(void *addr, size_t length, int prot, int flags, int fd, off_t offset);

/* What a program does to a region itself: madvise(MADV_DONTNEED) gives up what changed since the
 * last write-back. munmap of a part, or mmap over it, takes the pages away that have addresses
 * there; the rest goes on, their store keeps what was written back last, and uunmap leaves alone
 * what is not the region's any more. mremap does the same; what moves away is the program's own
 * memory, with the bytes of the pages that were in the buffer (umap_fetch_and_pin first, to be
 * sure) and zeros for all others. */

/* Writes a region's changes to its store and unmaps it: all of it, so `length` is 0 or reaches into
 * its last page. When the store fails, -1 and EIO: the region stays mapped with its changes, and
 * this may be called again. */
int uunmap(void *addr, size_t length);

/* Writes the changes of all regions to their stores. -1 and EIO if one failed, after all were
 * tried; what could not be written stays in memory. */
int umap_flush(void);

/* A page that will be needed soon. */
struct umap_prefetch_item {
  void *page_base_addr;
};

/* Starts to bring pages in, while there is room; does not wait. */
void umap_prefetch(int npages, struct umap_prefetch_item *page_array);

/* Brings all pages that hold a byte of the range in, waits, and keeps them in memory until their
 * region is unmapped; pinning a page again changes nothing. errno is 0 after success; ENOMEM if too
 * little of the buffer were left for others, and EIO if a page could not come: then nothing more is
 * pinned than before. */
void umap_fetch_and_pin(char *paddr, uint64_t size);

/* 1: regions may be written. */
int umap_has_write_support(void);

/* What is in force, as the environment asked for or nearest to it. */
uint64_t umapcfg_get_umap_page_size(void);
uint64_t umapcfg_get_max_fault_events(void);
uint64_t umapcfg_get_num_fillers(void);
uint64_t umapcfg_get_num_evictors(void);
uint64_t umapcfg_get_max_pages_in_buffer(void);
uint64_t umapcfg_get_read_ahead(void);
int umapcfg_get_evict_low_water_threshold(void);
int umapcfg_get_evict_high_water_threshold(void);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif /* FARPAGE_UMAP_UMAP_H */
