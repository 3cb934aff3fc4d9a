/* umap.h: checks arguments, maps, and finds the region that an address belongs to. What pages do is
 * farpage's. */
#include "umap/umap.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <mutex>
#include <sstream>

#include "config.hpp"
#include "network.hpp"
#include "regions.hpp"
#include "store_calls.hpp"

using namespace Umap::shim;

namespace {

constexpr std::uint64_t KERNEL_PAGE_BYTES = 4096;

/* Runs the body of a function: no exception passes. */
template <typename T, typename Body>
T guard(T failed, Body body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc &) {
    errno = ENOMEM;
  } catch (const std::exception &error) {
    log(FARPAGE_LOG_ERROR, error.what());
    errno = EIO;
  }
  return failed;
}

void *refuse(int number, const std::string &why) {
  log(FARPAGE_LOG_ERROR, "umap: " + why);
  errno = number;
  return UMAP_FAILED;
}

/* Addresses that a program would like, held while a region is made of them. */
class Wish {
 public:
  /* Nothing that is mapped is touched: then, and where the kernel is too old to say, nothing is
   * held. */
  Wish(void *addr, std::size_t bytes) : bytes(bytes) {
    void *at = mmap(addr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (at == addr) {
      held = addr;
    } else if (at != MAP_FAILED) {
      munmap(at, bytes);
    }
  }
  ~Wish() {
    if (held != nullptr) munmap(held, bytes);
  }
  Wish(const Wish &) = delete;
  Wish &operator=(const Wish &) = delete;

  void *address() const { return held; }
  /* A region is there now. */
  void granted() { held = nullptr; }

 private:
  void *held = nullptr;
  std::size_t bytes;
};

/* Whether regions have addresses there. */
bool is_occupied(std::uintptr_t start, std::size_t bytes) {
  for (const auto &mapping : all()) {
    if (mapping->address < start + bytes && mapping->address + mapping->mapped_bytes > start) return true;
  }
  return false;
}

/* Makes room for a region that replaces what is mapped there, as mmap does with MAP_FIXED. What
 * regions hold in the range goes to their stores; what is left of them on either side goes on. No
 * other memory comes to the addresses meanwhile. Returns an errno; whatever failed, no bytes are
 * lost. */
int make_room(std::uintptr_t start, std::size_t bytes) {
  std::uintptr_t end = start + bytes;
  std::vector<std::shared_ptr<Mapping>> there;
  for (auto &mapping : all()) {
    std::uintptr_t mapping_end = mapping->address + mapping->mapped_bytes;
    if (mapping->address >= end || mapping_end <= start) continue;
    std::size_t page_bytes = mapping->page_bytes;
    bool is_cut_well = (start <= mapping->address || start % page_bytes == 0) && (end >= mapping_end || end % page_bytes == 0);
    if (!mapping->backing->is_replaceable() || !is_cut_well) {
      std::ostringstream text;
      text << "umap: the region at " << reinterpret_cast<void *>(mapping->address) << " is in the way: ";
      if (is_cut_well) text << "a network store's array keeps its addresses";
      else text << "what is left of it must be whole pages of " << page_bytes << " bytes";
      log(FARPAGE_LOG_ERROR, text.str());
      return EINVAL;
    }
    there.push_back(std::move(mapping));
  }
  for (const auto &mapping : there) {
    std::unique_lock<std::shared_mutex> alone(mapping->use);
    if (mapping->closed) continue;
    std::size_t from = std::max(start, mapping->address) - mapping->address;
    std::size_t to = std::min(end - mapping->address, mapping->mapped_bytes);
    remove(mapping);
    mapping->closed = true;
    std::unique_ptr<Backing> before, inside = std::move(mapping->backing), behind;
    farpage_code code = FARPAGE_OK;
    if (to < mapping->mapped_bytes) code = inside->split(to, &behind);
    if (code == FARPAGE_OK && from > 0) {
      before = std::move(inside);
      code = before->split(from, &inside);
    }
    if (code == FARPAGE_OK) code = inside->vacate();
    if (code != FARPAGE_OK) log_failure("umap: a region that is in the way");
    for (auto *part : {&before, &inside, &behind}) {
      if (*part == nullptr || (*part)->region() == nullptr) continue;
      std::size_t length = farpage_region_bytes((*part)->region());
      auto left = std::make_shared<Mapping>(std::move(*part), length, mapping->origin);
      left->take_pins_of(*mapping);
      add(std::move(left));
    }
    if (code != FARPAGE_OK) return errno_of(code);
  }
  return 0;
}

void *map_region(void *addr, std::size_t length, int prot, int flags, int fd, off_t offset, Umap::Store *store) {
  // 1. What cannot be meant.
  if (length == 0) return refuse(EINVAL, "a length of 0");
  if (length > static_cast<std::size_t>(PTRDIFF_MAX)) return refuse(ENOMEM, "a length of " + std::to_string(length));
  if ((flags & UMAP_PRIVATE) == 0 || (flags & ~(UMAP_PRIVATE | UMAP_FIXED)) != 0) {
    return refuse(EINVAL, "flags of " + std::to_string(flags) + ": need UMAP_PRIVATE, perhaps with UMAP_FIXED");
  }
  if (prot == PROT_NONE || (prot & ~(PROT_READ | PROT_WRITE)) != 0) {
    return refuse(EINVAL, "a protection of " + std::to_string(prot) + ": need PROT_READ, perhaps with PROT_WRITE");
  }
  if (store == nullptr && (offset < 0 || static_cast<std::uint64_t>(offset) % KERNEL_PAGE_BYTES != 0)) {
    return refuse(EINVAL, "an offset of " + std::to_string(offset) + ": need a multiple of 4096");
  }
  std::size_t page_bytes = store != nullptr && store->page_size_hint != 0 ? store->page_size_hint : config().page_bytes;
  bool fixed = (flags & UMAP_FIXED) != 0;
  if (fixed && (addr == nullptr || reinterpret_cast<std::uintptr_t>(addr) % page_bytes != 0)) {
    return refuse(EINVAL, "UMAP_FIXED at an address that is no multiple of the page size, " + std::to_string(page_bytes));
  }

  // As mmap does: where the program would like it, if nothing is there.
  std::size_t mapped_bytes = (length + page_bytes - 1) / page_bytes * page_bytes;
  bool wished = !fixed && addr != nullptr && reinterpret_cast<std::uintptr_t>(addr) % page_bytes == 0;
  Wish wish(wished ? addr : nullptr, wished ? mapped_bytes : 0);
  void *place = fixed ? addr : wish.address();
  std::unique_lock<std::mutex> alone;
  if (fixed) alone = replacing();

  // 2. A server's array is mapped already, or will be by its client's runtime.
  bool read_only = (prot & PROT_WRITE) == 0;
  std::unique_ptr<Backing> backing;
  if (store != nullptr && is_network_store(store)) {
    int number = 0;
    backing = open_array(store, length, place, fixed, &number);
    if (backing == nullptr) return refuse(number, "the network store cannot be mapped");
  } else {
    // 3. A file, or a program's store.
    farpage_code code = FARPAGE_OK;
    farpage_runtime *with = runtime(&code);
    if (with == nullptr) return refuse(errno_of(code), farpage_error_message());
    farpage_region_options options{};
    options.struct_bytes = sizeof options;
    options.page_bytes = page_bytes;
    options.read_only = read_only;
    options.address = place;
    farpage_region *region = nullptr;
    auto map = [&] {
      if (store == nullptr) return farpage_region_map_fd(with, fd, static_cast<std::uint64_t>(offset), length, &options, &region);
      farpage_store table = store_calls(store, page_bytes);
      options.store = &table;
      return farpage_region_map(with, length, &options, &region);
    };
    if (fixed && is_occupied(reinterpret_cast<std::uintptr_t>(addr), mapped_bytes)) {
      // Elsewhere first: what cannot be mapped replaces nothing.
      options.address = nullptr;
      code = map();
      if (code == FARPAGE_OK) {
        farpage_region_discard(region);
        int number = make_room(reinterpret_cast<std::uintptr_t>(addr), mapped_bytes);
        if (number != 0) return refuse(number, "a region that is there cannot be replaced");
        options.address = addr;
        code = map();
      }
    } else {
      code = map();
    }
    if (store == nullptr && code == FARPAGE_DENIED) return refuse(EACCES, farpage_error_message());
    if (store == nullptr && code == FARPAGE_INVALID && fcntl(fd, F_GETFD) < 0) return refuse(EBADF, farpage_error_message());
    if (code != FARPAGE_OK) return refuse(errno_of(code), farpage_error_message());
    backing = std::make_unique<OwnRegion>(region, read_only);
  }
  auto mapping = std::make_shared<Mapping>(std::move(backing), length);
  if (mapping->address == reinterpret_cast<std::uintptr_t>(wish.address())) wish.granted();
  void *address = reinterpret_cast<void *>(mapping->address);
  if (config().log_level >= FARPAGE_LOG_INFO) {
    std::ostringstream text;
    text << length << " bytes mapped at " << address << " in pages of " << page_bytes;
    log(FARPAGE_LOG_INFO, text.str());
  }
  add(std::move(mapping));
  return address;
}

int unmap(const std::shared_ptr<Mapping> &mapping) {
  std::unique_lock<std::shared_mutex> alone(mapping->use);
  if (mapping->closed) {
    errno = EINVAL;
    return -1;
  }
  // It must not be found any more when its addresses are free for the next region.
  remove(mapping);
  farpage_code code = mapping->backing->close();
  if (code != FARPAGE_OK) {
    log_failure("uunmap: the region stays mapped");
    add(mapping);
    errno = errno_of(code);
    return -1;
  }
  mapping->closed = true;
  return 0;
}

int unmap_region(void *addr, std::size_t length) {
  auto address = reinterpret_cast<std::uintptr_t>(addr);
  auto mapping = find(address);
  // Programs pass 0, and lengths that are not rounded up.
  bool is_all = mapping != nullptr && mapping->address == address && (length == 0 || length > mapping->mapped_bytes - mapping->page_bytes);
  if (!is_all) {
    log(FARPAGE_LOG_ERROR, "uunmap: no region begins there, or it goes on behind the length given: a region is unmapped as a whole");
    errno = EINVAL;
    return -1;
  }
  // With what is left of it behind regions that replaced a part: the program's store may end now.
  for (const auto &part : all()) {
    bool is_behind = part->origin == mapping->origin && part->address > address && part->address - address < length;
    if (is_behind && unmap(part) != 0) return -1;
  }
  return unmap(mapping);
}

int flush_all() {
  int number = 0;
  for (const auto &mapping : all()) {
    std::shared_lock<std::shared_mutex> use(mapping->use);
    if (mapping->closed) continue;
    farpage_code code = mapping->backing->flush();
    if (code == FARPAGE_OK) continue;
    log_failure("umap_flush");
    number = errno_of(code);
  }
  if (number == 0) return 0;
  errno = number;
  return -1;
}

/* Calls `use(mapping, offset, bytes)` with the part of the range that lies in a region, for all
 * that it touches. Returns an errno. */
template <typename Use>
int for_each_part(std::uintptr_t address, std::uint64_t bytes, Use use) {
  std::uintptr_t end = address + bytes;
  if (end < address) return EINVAL;
  while (address < end) {
    auto mapping = find(address);
    if (mapping == nullptr) return EINVAL;
    std::shared_lock<std::shared_mutex> lock(mapping->use);
    if (mapping->closed) return EINVAL;
    std::uintptr_t region_end = mapping->address + mapping->mapped_bytes;
    std::uint64_t offset = address - mapping->address;
    std::uint64_t last = std::min<std::uint64_t>(std::min(end, region_end) - mapping->address, mapping->bytes);
    if (offset < last) {
      farpage_code code = use(*mapping, offset, last - offset);
      if (code != FARPAGE_OK) return errno_of(code);
    }
    address = std::min(end, region_end);
  }
  return 0;
}

}  // namespace

void *Umap::umap_ex(void *addr, std::size_t length, int prot, int flags, int fd, off_t offset, Store *store) {
  return guard(UMAP_FAILED, [&] { return map_region(addr, length, prot, flags, fd, offset, store); });
}

extern "C" {

void *umap(void *addr, size_t length, int prot, int flags, int fd, off_t offset) {
  return Umap::umap_ex(addr, length, prot, flags, fd, offset, nullptr);
}

int uunmap(void *addr, size_t length) {
  return guard(-1, [&] { return unmap_region(addr, length); });
}

int umap_flush(void) { return guard(-1, flush_all); }

void umap_prefetch(int npages, struct umap_prefetch_item *page_array) {
  guard(0, [&] {
    for (int i = 0; i < npages; ++i) {
      // One byte: farpage brings whole pages. What is no region's, or has gone, is no longer needed
      // either.
      auto address = reinterpret_cast<std::uintptr_t>(page_array[i].page_base_addr);
      for_each_part(address, 1, [](Mapping &mapping, std::uint64_t offset, std::uint64_t bytes) {
        return farpage_region_advise(mapping.backing->region(), offset, bytes, FARPAGE_ADVICE_WILL_NEED);
      });
    }
    return 0;
  });
}

void umap_fetch_and_pin(char *paddr, uint64_t size) {
  errno = guard(EIO, [&] {
    int number = for_each_part(reinterpret_cast<std::uintptr_t>(paddr), size, [](Mapping &mapping, std::uint64_t offset, std::uint64_t bytes) {
      return mapping.pin(offset, bytes);
    });
    if (number == EINVAL) log(FARPAGE_LOG_ERROR, "umap_fetch_and_pin: the range does not lie in regions");
    else if (number != 0) log_failure("umap_fetch_and_pin");
    return number;
  });
}

int umap_has_write_support(void) { return 1; }

uint64_t umapcfg_get_umap_page_size(void) { return config().page_bytes; }
uint64_t umapcfg_get_max_fault_events(void) { return config().max_fault_events; }
uint64_t umapcfg_get_num_fillers(void) { return config().fillers; }
uint64_t umapcfg_get_num_evictors(void) { return config().evictors; }
uint64_t umapcfg_get_max_pages_in_buffer(void) { return config().buffer_pages; }
uint64_t umapcfg_get_read_ahead(void) { return config().read_ahead; }
int umapcfg_get_evict_low_water_threshold(void) { return static_cast<int>(config().low_water); }
int umapcfg_get_evict_high_water_threshold(void) { return static_cast<int>(config().high_water); }

}  // extern "C"
