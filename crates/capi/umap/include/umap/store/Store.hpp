/* Where a region's pages are kept: what a program derives from to keep them its own way. */
#ifndef FARPAGE_UMAP_STORE_HPP
#define FARPAGE_UMAP_STORE_HPP

#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace Umap {

class Store {
 public:
  virtual ~Store() = default;

  /* A store over the file behind `fd`, from its beginning, of `rsize` bytes. It is the caller's;
   * `fd` must stay open as long as it lives. */
  static Store *make_store(void *region, std::size_t rsize, std::size_t alignsize, int fd);

  /* Both are called from several threads at once, but never twice at once for the same page, and
   * must not touch the region that they serve. `off` counts from the start of the region and is a
   * multiple of its page size; `nb` is one page, of which the last may be shorter.
   *
   * They return the number of bytes, or -1 with errno. What a read leaves out is zeros; a write
   * that leaves something out has failed. 0 is taken for "all of it", as it always was. An
   * exception is a failure: EIO. `buf` has room for `nb` bytes: a read that goes beyond them ends
   * the program with SIGSEGV, and a message that names the store's type (unless the program
   * installs a handler of SIGSEGV after its first region). */
  virtual ssize_t read_from_store(char *buf, std::size_t nb, off_t off) = 0;
  virtual ssize_t write_to_store(char *buf, std::size_t nb, off_t off) = 0;

  /* Page size of the region that is mapped with this store: a power of two, 4096 to 2097152. 0:
   * UMAP_PAGESIZE. Set it before umap_ex. */
  std::size_t page_size_hint = 0;
};

}  // namespace Umap

#endif /* FARPAGE_UMAP_STORE_HPP */
