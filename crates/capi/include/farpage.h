/* farpage: memory that lives on other machines, used like ordinary memory.
 *
 * Functions return FARPAGE_OK or a code, and then farpage_error_message() says in words what went
 * wrong. All may be called from any thread. Made by cbindgen: do not edit;
 * `FARPAGE_RENEW=1 cargo test -p farpage-capi --test header` makes it anew. */

#ifndef FARPAGE_H
#define FARPAGE_H

#include <stddef.h>
#include <stdint.h>

/**
 * Level of operations that failed.
 */
#define FARPAGE_LOG_ERROR 1

/**
 * Level that adds states that are not as they should be.
 */
#define FARPAGE_LOG_WARNING 2

/**
 * Level that adds rare events.
 */
#define FARPAGE_LOG_INFO 3

/**
 * Level that adds frequent events.
 */
#define FARPAGE_LOG_DEBUG 4

/**
 * Value of `read_ahead` that switches read-ahead off.
 */
#define FARPAGE_READ_AHEAD_OFF UINT32_MAX

/**
 * Unknown use: sequential runs are found from the faults. Holds for the whole region.
 */
#define FARPAGE_ADVICE_NORMAL 0

/**
 * Sequential use: reads ahead from the first fault on. Holds for the whole region.
 */
#define FARPAGE_ADVICE_SEQUENTIAL 1

/**
 * Random use: never reads ahead. Holds for the whole region.
 */
#define FARPAGE_ADVICE_RANDOM 2

/**
 * The range is needed soon: brought in while there is room. Does not wait.
 */
#define FARPAGE_ADVICE_WILL_NEED 3

/**
 * The range is not needed soon: written back where it changed, and given up. The data stays.
 */
#define FARPAGE_ADVICE_DONT_NEED 4

/**
 * The contents of the range are not needed any more: it becomes zeros, its remote memory is free,
 * and nothing is written back. An allocator means this by `madvise(MADV_DONTNEED)`. A write of
 * another thread lands either before, and is gone, or after, on zeros.
 */
#define FARPAGE_ADVICE_DISCARD 5

/**
 * The kernel will be given the range by a call that keeps references to memory: `vmsplice`, a send
 * with MSG_ZEROCOPY, a zero-copy send of io_uring. Must be given before the call. The call sends
 * the contents of that moment, even if the pages leave meanwhile. Holds until the region ends.
 */
#define FARPAGE_ADVICE_ZERO_COPY 6

/**
 * The environment variable's mode, else threads of the runtime.
 */
#define FARPAGE_FAULTS_DEFAULT 0

/**
 * Threads of the runtime serve faults.
 */
#define FARPAGE_FAULTS_FILLER 1

/**
 * The thread that faults serves it, in a handler of SIGBUS: faster on small pages. A system call
 * that is given absent memory fails with EFAULT. A thread that blocks SIGBUS is killed by its
 * first fault. A handler of SIGBUS that the program installs afterwards has to pass on signals
 * that are not its own. Bytes that a device writes into memory that is not pinned may be lost. So
 * may bytes that other threads write to new mappings at addresses that one thread is just
 * unmapping from a region.
 */
#define FARPAGE_FAULTS_IN_THREAD 2

/**
 * Memory whose pages come and go. Its first byte is at `farpage_region_address`.
 *
 * A program may unmap parts of a region, or map over them. Pages of these parts are gone then, and
 * the store keeps their last written-back bytes. `mremap` moves pages that are in memory; all
 * others read as zeros at the new addresses.
 *
 * All functions of a region may be called from any thread. During and after `farpage_region_unmap`
 * no other function of the region may be called, and its memory may not be touched.
 */
typedef struct farpage_region farpage_region;

/**
 * Connections to memory servers, a budget, and the threads that move pages. All functions of a
 * runtime may be called from any thread.
 */
typedef struct farpage_runtime farpage_runtime;

/**
 * Result of a function: `FARPAGE_OK`, or one of the codes below, with a message from
 * `farpage_error_message`.
 */
typedef int32_t farpage_code;

/**
 * Store of a region's pages: functions of the program. They are called from several threads at
 * once, but never twice at once for the same page, and must not touch the region that they serve.
 * They must not throw exceptions.
 *
 * farpage copies this struct; `context` remains the program's. Set the whole struct to zero, then
 * `struct_bytes`, then other fields.
 */
typedef struct farpage_store {
  /**
   * `sizeof(farpage_store)`.
   */
  size_t struct_bytes;
  /**
   * Argument of each function.
   */
  void *context;
  /**
   * Reads exactly `bytes` bytes at `offset`, a multiple of the page size, into `buffer`: one
   * page or several, of which the region's last may be shorter. Returns 0 or an errno, which
   * counts for all of these pages. A page that has not been written since must read the same
   * every time.
   */
  int (*read)(void *context, uint64_t offset, void *buffer, size_t bytes);
  /**
   * Writes all of `buffer` at `offset`. Returns 0 or an errno: then the page stays in memory,
   * and flushing the region fails. May be null if the region is `read_only`.
   */
  int (*write)(void *context, uint64_t offset, const void *buffer, size_t bytes);
  /**
   * Makes all that was written durable. Returns 0 or an errno. May be null.
   */
  int (*flush)(void *context);
  /**
   * Called once when no other call runs or will come, perhaps a moment after the region was
   * unmapped, on any thread; also if the region could not be mapped. May be null.
   */
  void (*release)(void *context);
  /**
   * Name of the store in errors; copied. May be null.
   */
  const char *name;
  /**
   * 1: `read` and `write` never wait, so farpage's own threads may call them.
   */
  uint32_t never_blocks;
} farpage_store;

/**
 * Options of a region. Set the whole struct to zero, then `struct_bytes`, then other fields: zero
 * and null mean the runtime's choice.
 */
typedef struct farpage_region_options {
  /**
   * `sizeof(farpage_region_options)`.
   */
  size_t struct_bytes;
  /**
   * Page size: a power of two, 4096 to 2097152.
   */
  uint64_t page_bytes;
  /**
   * The most pages that are read ahead of sequential access, or FARPAGE_READ_AHEAD_OFF.
   */
  uint32_t read_ahead;
  /**
   * Codec of pages on servers, as in the runtime's options. Not for stores and files.
   */
  const char *codec;
  /**
   * 1: take remote memory when pages need it instead of all of it at once (twice the size for a
   * region with a name); then evictions may fail for lack of it. Not for stores and files.
   */
  uint32_t on_demand;
  /**
   * 1: the program may only read: a write to the region's memory raises SIGSEGV. Not for
   * servers.
   */
  uint32_t read_only;
  /**
   * Name under which the region is published on its servers at each flush and when it is
   * unmapped. A published region outlives the program. Not for stores and files.
   */
  const char *name;
  /**
   * Store that keeps the pages instead of the servers. Copied.
   */
  const struct farpage_store *store;
  /**
   * Address at which the region is mapped, a multiple of its page size. Mappings up to the end
   * of the region's last page are replaced, and nothing beside them. Another region there is not
   * replaced: FARPAGE_INVALID.
   */
  void *address;
  /**
   * 1: `name` may exist already; the version published under it stays until this region is
   * published. 0: mapping fails with FARPAGE_EXISTS if `name` exists.
   */
  uint32_t replace;
  /**
   * 1: the program promises that no device writes into the region's memory (`O_DIRECT` reads,
   * RDMA, registered buffers of io_uring): pages of 4096 bytes then leave as copies, many at
   * once. Bytes that a device writes into a page while it leaves are lost. Default: as
   * FARPAGE_NO_DIRECT_IO says.
   */
  uint32_t no_direct_io;
  /**
   * Protection of pages, as in the runtime's options. Default: those of the runtime for a region
   * without a name, and "none" for one with a name, which is refused with more. Not for stores
   * and files.
   */
  const char *redundancy;
} farpage_region_options;

/**
 * Options of a runtime. Set the whole struct to zero, then `struct_bytes`, then other fields: zero
 * and null mean the environment variable named, else the default.
 */
typedef struct farpage_runtime_options {
  /**
   * `sizeof(farpage_runtime_options)`.
   */
  size_t struct_bytes;
  /**
   * Memory servers, separated by commas: `shm:///run/farpage.sock` or `tcp://host:7400`.
   * FARPAGE_SERVER. Default: none, so that only regions with a store or a file work.
   */
  const char *servers;
  /**
   * Bytes of pages that may be in local memory at once, over all regions; never exceeded, at
   * most the limit of `farpage_memory`. FARPAGE_BUDGET. Default: a quarter of the available
   * memory.
   */
  uint64_t budget_bytes;
  /**
   * Page size of regions that do not set their own: a power of two, 4096 to 2097152.
   * FARPAGE_PAGE_SIZE. Default: 65536, less for regions below 1 MiB.
   */
  uint64_t page_bytes;
  /**
   * Number of shards into which addresses are divided for fills. FARPAGE_FILLERS. Default: one
   * per CPU, 4 at most.
   */
  uint32_t fillers;
  /**
   * Threads that take pages out. FARPAGE_EVICTORS. Default: as many as keep up, 4 at most.
   */
  uint32_t evictors;
  /**
   * Fraction of the budget above which evictors start. FARPAGE_HIGH_WATER. Default: 0.95.
   */
  double high_water;
  /**
   * Fraction at which evictors stop; set both or none. FARPAGE_LOW_WATER. Default: 0.90.
   */
  double low_water;
  /**
   * The most pages that are read ahead of sequential access, or FARPAGE_READ_AHEAD_OFF.
   * FARPAGE_READ_AHEAD. Default: a megabyte, or more if the link needs it.
   */
  uint32_t read_ahead;
  /**
   * Codec of pages on servers, by name: "raw", "lz4", "shuffle4" (bytes of elements of 2, 4 or 8
   * bytes are sorted before LZ4), "zfp:accuracy=1e-6,f64" (numbers of f32 or f64, each within
   * this error or stored without loss), "zfp:precision=20,f32" (bits), "zfp:rate=8,f32" (bits
   * per value), "zfp:reversible,f32" (nothing is lost; the last three also with i32 and i64),
   * "adaptive,f32" (the lossless codec that makes the program fastest; without the element, of
   * raw and LZ4), or "adaptive:accuracy=1e-6,f64" (the same, and ZFP within this error).
   * FARPAGE_CODEC. Default: "raw".
   */
  const char *codec;
  /**
   * Time for which a page operation is tried before it fails. FARPAGE_DEADLINE. Default: 10.
   */
  double deadline_seconds;
  /**
   * 1: catch only faults of the program's own instructions. Needs no permission, but a system
   * call that is given absent memory fails with EFAULT. FARPAGE_USER_MODE_ONLY. Default: 0.
   */
  uint32_t user_mode_only;
  /**
   * Threads that serve page faults: one of the FARPAGE_FAULTS_ constants. FARPAGE_FAULT_MODE.
   * Default: threads of the runtime.
   */
  uint32_t fault_mode;
  /**
   * The user's key file. Named regions belong to its key. Made when a name is first used.
   * FARPAGE_KEY_FILE. Default: `farpage/key` in `$XDG_CONFIG_HOME` or `~/.config`.
   */
  const char *key_file;
  /**
   * Protection of pages of regions without a name: "none", "copies=2" to "copies=4", or
   * "parity=2+1" to "parity=8+2". With copies, pages are on so many different servers, and
   * outlive the death of all but one of them. With parity, they are spread over so many servers,
   * and outlive the death of as many as the number behind the plus. Regions with a name have one
   * copy.
   * FARPAGE_REDUNDANCY. Default: "none".
   */
  const char *redundancy;
} farpage_runtime_options;

/**
 * Figures of a runtime since it was made. Counts are of pages unless the name says bytes.
 */
typedef struct farpage_stats {
  /**
   * Page faults.
   */
  uint64_t faults;
  /**
   * Pages brought in, for a fault or ahead of one.
   */
  uint64_t fills;
  /**
   * Pages of `fills` that were brought in ahead of need.
   */
  uint64_t prefetches;
  /**
   * Pages taken out.
   */
  uint64_t evictions;
  /**
   * Pages of `evictions` that had not changed.
   */
  uint64_t clean_evictions;
  /**
   * Pages that could not be brought in and raise SIGBUS.
   */
  uint64_t poisoned;
  /**
   * Evictions that failed, so that the page stayed.
   */
  uint64_t failed_evictions;
  /**
   * Bytes of pages that are in local memory now.
   */
  uint64_t resident_bytes;
  /**
   * The most that `resident_bytes` ever was.
   */
  uint64_t peak_resident_bytes;
  /**
   * Budget of the runtime in bytes.
   */
  uint64_t budget_bytes;
  /**
   * Bytes read from servers and stores.
   */
  uint64_t bytes_read;
  /**
   * Bytes written to servers and stores.
   */
  uint64_t bytes_written;
} farpage_stats;

/**
 * Success.
 */
#define FARPAGE_OK 0

/**
 * An argument or an option makes no sense; nothing was done.
 */
#define FARPAGE_INVALID 1

/**
 * The process may not handle its own page faults, or not use the file in this way; the message
 * says how to mend it.
 */
#define FARPAGE_DENIED 2

/**
 * A memory server cannot be reached.
 */
#define FARPAGE_UNREACHABLE 3

/**
 * Shortage: no remote memory, no addresses, or more pinned than the budget allows.
 */
#define FARPAGE_NO_MEMORY 4

/**
 * Unknown name: no server has a region of that name.
 */
#define FARPAGE_NOT_FOUND 5

/**
 * Pages could not be brought in or written back. Changes are still in memory, unless the message
 * says that a page's newest bytes are lost: then `farpage_region_overwrite` brings the page back.
 */
#define FARPAGE_PAGES 6

/**
 * The process is a child of the one that made the runtime: it can read and write copies of the
 * regions, and nothing more.
 */
#define FARPAGE_FORKED 7

/**
 * The operating system refused.
 */
#define FARPAGE_SYSTEM 8

/**
 * A bug in farpage; the message is worth a report.
 */
#define FARPAGE_INTERNAL 9

/**
 * A region of that name exists already: open it, remove it, or set `replace`.
 */
#define FARPAGE_EXISTS 10

/**
 * A region of that name is open, here or in another program, until it is closed there.
 */
#define FARPAGE_IN_USE 11

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Returns the message of the last function of farpage that failed in this thread: the cause and
 * the remedy. Never null; empty if no function has failed.
 *
 * The text belongs to farpage and does not change until the next function fails in this thread.
 */
const char *farpage_error_message(void);

/**
 * Prints messages up to `level`, one of the FARPAGE_LOG_ constants, to standard error from now on.
 * Without a call nothing is printed. Only one call is possible.
 */
farpage_code farpage_log_to_stderr(uint32_t level);

/**
 * Calls `each` for every region that this user has published under a name on the runtime's
 * servers, ordered by name: with `context`, the name, the bytes that the region takes on servers,
 * and whether a program has it open for writing. The name is valid until `each` returns. `each`
 * must not throw exceptions.
 *
 * `runtime` came from `farpage_runtime_new` and has not been freed.
 */
farpage_code farpage_names(const struct farpage_runtime *runtime,
                           void (*each)(void *context,
                                        const char *name,
                                        uint64_t bytes,
                                        uint32_t in_use),
                           void *context);

/**
 * Removes the region that this user has published under `name`, and frees its memory. Programs
 * that have it open to read keep it until they unmap it. Fails with FARPAGE_NOT_FOUND if `name`
 * does not exist, with FARPAGE_IN_USE if a program has it open for writing.
 *
 * `runtime` came from `farpage_runtime_new` and has not been freed; `name` is a string that ends
 * with a zero byte.
 */
farpage_code farpage_name_remove(const struct farpage_runtime *runtime, const char *name);

/**
 * Maps `bytes` bytes, zeroed or with the contents of `options->store`, and puts the region into
 * `*region`, which the caller owns until `farpage_region_unmap`. On failure `*region` is null.
 *
 * `runtime` came from `farpage_runtime_new` and has not been freed; `options` is null or points to
 * as many bytes as it says; `region` may be written.
 */
farpage_code farpage_region_map(const struct farpage_runtime *runtime,
                                uint64_t bytes,
                                const struct farpage_region_options *options,
                                struct farpage_region **region);

/**
 * Maps the `bytes` bytes at `offset` of the file, or block device, behind the descriptor `fd`,
 * which the caller may close afterwards, and puts the region into `*region`.
 *
 * Bytes beyond the end of the file read as zeros; the file grows only when other bytes than zeros
 * are stored there. `fd` must be open for reading and writing; reading is enough with
 * `options->read_only`.
 *
 * As `farpage_region_map`.
 */
farpage_code farpage_region_map_fd(const struct farpage_runtime *runtime,
                                   int fd,
                                   uint64_t offset,
                                   uint64_t bytes,
                                   const struct farpage_region_options *options,
                                   struct farpage_region **region);

/**
 * Opens the region that was published under `name` and puts it into `*region`. Until it is
 * unmapped, other programs can only open the published version to read it.
 *
 * `runtime` came from `farpage_runtime_new` and has not been freed; `name` is a string that ends
 * with a zero byte; `region` may be written.
 */
farpage_code farpage_region_open(const struct farpage_runtime *runtime,
                                 const char *name,
                                 struct farpage_region **region);

/**
 * Opens the version that is published under `name` now, to read it, and puts it into `*region`.
 * Any number of programs can at a time, also while one has the region open for writing. The region
 * does not change until it is unmapped, whatever is published meanwhile. A write to its memory
 * raises SIGSEGV.
 *
 * As `farpage_region_open`.
 */
farpage_code farpage_region_open_to_read(const struct farpage_runtime *runtime,
                                         const char *name,
                                         struct farpage_region **region);

/**
 * Returns the first byte of the region, aligned to its page size; null for null.
 *
 * `region` is null or came from a function that maps, and has not been unmapped.
 */
void *farpage_region_address(const struct farpage_region *region);

/**
 * Returns the length of the region in bytes, as it was mapped.
 *
 * As `farpage_region_address`.
 */
uint64_t farpage_region_bytes(const struct farpage_region *region);

/**
 * Returns the page size of the region in bytes.
 *
 * As `farpage_region_address`.
 */
uint64_t farpage_region_page_bytes(const struct farpage_region *region);

/**
 * Returns the number of the region's pages in local memory.
 *
 * As `farpage_region_address`.
 */
uint64_t farpage_region_resident_pages(const struct farpage_region *region);

/**
 * Writes all changes back and keeps the pages. Then calls the store's `flush` or `fdatasync`, or
 * publishes the region under its name.
 *
 * As `farpage_region_address`.
 */
farpage_code farpage_region_flush(const struct farpage_region *region);

/**
 * Copies `bytes` bytes from `data` to `offset`. Brings pages back whose newest bytes were lost
 * (the store failed, and the kernel refused the page) and that the copy covers wholly. Until then
 * touching such a page raises SIGBUS, and functions that flush the region fail. FARPAGE_PAGES if
 * such a page is covered in part only: nothing was copied.
 *
 * As `farpage_region_address`; `data` points to `bytes` readable bytes outside the region; nobody
 * else uses the region's bytes meanwhile.
 */
farpage_code farpage_region_overwrite(struct farpage_region *region,
                                      uint64_t offset,
                                      uint64_t bytes,
                                      const void *data);

/**
 * Tells how `bytes` bytes at `offset` will be used: one of the FARPAGE_ADVICE_ constants.
 * FARPAGE_ADVICE_DONT_NEED waits until changes are written back, and fails if the writeback fails.
 * FARPAGE_ADVICE_DISCARD fails with FARPAGE_INVALID on a read-only region.
 *
 * As `farpage_region_address`.
 */
farpage_code farpage_region_advise(const struct farpage_region *region,
                                   uint64_t offset,
                                   uint64_t bytes,
                                   uint32_t advice);

/**
 * Brings `bytes` bytes at `offset` in and waits for them; lost pages are tried again. So a program
 * learns of a dead server by a code instead of SIGBUS.
 *
 * As `farpage_region_address`.
 */
farpage_code farpage_region_prefetch(const struct farpage_region *region,
                                     uint64_t offset,
                                     uint64_t bytes);

/**
 * Brings `bytes` bytes at `offset` in and keeps them in memory until `farpage_region_unpin`, or
 * until the region is unmapped. All pages that the range touches are pinned; pins are counted, up
 * to 255 per page. FARPAGE_NO_MEMORY if too little of the budget would be left for other pages. On
 * failure nothing more is pinned than before.
 *
 * As `farpage_region_address`.
 */
farpage_code farpage_region_pin(const struct farpage_region *region,
                                uint64_t offset,
                                uint64_t bytes);

/**
 * Takes back one pin of each page that the range touches; a page without a pin is left alone.
 *
 * As `farpage_region_address`.
 */
farpage_code farpage_region_unpin(const struct farpage_region *region,
                                  uint64_t offset,
                                  uint64_t bytes);

/**
 * Fails with the first error of work in the background since the last call, an eviction or a fill
 * that failed. FARPAGE_OK if there was none.
 *
 * As `farpage_region_address`.
 */
farpage_code farpage_region_error(const struct farpage_region *region);

/**
 * Splits the region in two at `offset`, a multiple of its page size: `*region` ends there, and
 * `*rest` begins there. All bytes keep their addresses, and each part is unmapped for itself. Only
 * a region with a store or a file can be split. Changes are written back first, as
 * `farpage_region_unmap` does. Advice and pins end.
 *
 * On failure `*rest` is null. `*region` is as it was if the arguments were wrong or writing back
 * failed. It is null if the parts could not be mapped (no memory, or too many mappings): then the
 * store has all bytes, and touching the addresses raises SIGSEGV.
 *
 * `*region` came from a function that maps, and has not been unmapped; nobody else uses it or
 * touches its memory meanwhile; `rest` may be written.
 */
farpage_code farpage_region_split(struct farpage_region **region,
                                  uint64_t offset,
                                  struct farpage_region **rest);

/**
 * Writes back changes that outlive the region (in a store, a file or under a name), gives its
 * addresses up and frees it. A store is flushed; a file is not, so call `farpage_region_flush`
 * before if its changes must survive a power failure. If the writeback fails, the region stays
 * unchanged: call this again, or `farpage_region_discard`. Null is allowed.
 *
 * `region` is null or came from a function that maps; if this succeeds, neither it nor its memory
 * may be used again.
 */
farpage_code farpage_region_unmap(struct farpage_region *region);

/**
 * Gives the region up as `farpage_region_unmap` does, but writes nothing back: changes since the
 * last flush are lost. Null is allowed.
 *
 * As `farpage_region_unmap`.
 */
farpage_code farpage_region_discard(struct farpage_region *region);

/**
 * Unmaps the region as `farpage_region_unmap` does, but keeps its addresses: touching them raises
 * SIGSEGV until the program maps memory over them, for example another region, or unmaps them. So
 * no memory of another thread can come there in between.
 *
 * As `farpage_region_unmap`.
 */
farpage_code farpage_region_vacate(struct farpage_region *region);

/**
 * Returns the version of this library, for example "0.1.0".
 */
const char *farpage_version(void);

/**
 * Tells the memory that this process may have, as the machine and its control groups (v1 or v2)
 * allow: in all, and now without swapping. Either pointer may be null.
 *
 * Each pointer is null or may be written.
 */
void farpage_memory(uint64_t *bytes, uint64_t *available_bytes);

/**
 * Connects to the servers, starts the threads and puts the runtime into `*runtime`, which the
 * caller owns until `farpage_runtime_free`. On failure `*runtime` is null.
 *
 * `options` is null (all defaults) or points to as many bytes as it says; `runtime` may be
 * written.
 */
farpage_code farpage_runtime_new(const struct farpage_runtime_options *options,
                                 struct farpage_runtime **runtime);

/**
 * Gives a runtime back. Regions that are still mapped go on working: the runtime's threads end
 * with the last region. Null is allowed; a child made by `fork` frees nothing.
 *
 * `runtime` is null or came from `farpage_runtime_new`; it must not be used after this.
 */
void farpage_runtime_free(struct farpage_runtime *runtime);

/**
 * Puts the figures of a runtime into `*stats`. `stats_bytes` is `sizeof(farpage_stats)` of the
 * program's header: fields that this library does not have become zero.
 *
 * `runtime` came from `farpage_runtime_new` and has not been freed; `stats` may be written.
 */
farpage_code farpage_runtime_stats(const struct farpage_runtime *runtime,
                                   struct farpage_stats *stats,
                                   size_t stats_bytes);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* FARPAGE_H */
