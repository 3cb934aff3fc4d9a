/* The regions of this process: which addresses are mapped, and on what.
 *
 * The rule it keeps: a region that a call works on is not unmapped under it, and no call waits for
 * another region's. A child made by `fork` starts with none, and never waits for a lock that its
 * parent held. */
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "farpage.h"

namespace Umap::shim {

/* What keeps a region's pages: closes what is behind it. */
class Backing {
 public:
  virtual ~Backing() = default;
  virtual farpage_region *region() = 0;
  /* Writes changes back, if that is meant. */
  virtual farpage_code flush() { return farpage_region_flush(region()); }
  /* Writes back and gives up the addresses. If that fails the region is as it was. */
  virtual farpage_code close() = 0;
};

/* A region of its own: a file's, or a program's store's. */
class OwnRegion : public Backing {
 public:
  OwnRegion(farpage_region *it, bool read_only) : it(it), read_only(read_only) {}
  farpage_region *region() override { return it; }
  farpage_code flush() override { return read_only ? FARPAGE_OK : farpage_region_flush(it); }
  farpage_code close() override { return read_only ? farpage_region_discard(it) : farpage_region_unmap(it); }

 private:
  farpage_region *it;
  bool read_only;
};

struct Mapping {
  std::uintptr_t address;
  std::size_t page_bytes;
  /* As asked for, and up to the end of the last page. */
  std::size_t bytes, mapped_bytes;
  std::unique_ptr<Backing> backing;

  /* Shared by calls that use the region, exclusive for the one that unmaps it. */
  std::shared_mutex use;
  /* Set under the exclusive lock. */
  bool closed = false;

  /* Pins all pages that the range touches and that are not pinned yet, or none. */
  farpage_code pin(std::uint64_t offset, std::uint64_t length);

  Mapping(std::unique_ptr<Backing> backing, std::size_t bytes);

 private:
  std::mutex pinning;
  /* By page; empty before the first pin. farpage counts pins, up to a limit, but programs pin the
   * same pages at each step. */
  std::vector<bool> pinned;
};

/* The runtime of regions without servers; made when first needed. Null when it cannot be made, with
 * the code in `*code`. */
farpage_runtime *runtime(farpage_code *code);

void add(std::shared_ptr<Mapping> mapping);
void remove(const std::shared_ptr<Mapping> &mapping);
/* The region that the address lies in. */
std::shared_ptr<Mapping> find(std::uintptr_t address);
std::vector<std::shared_ptr<Mapping>> all();

}  // namespace Umap::shim
