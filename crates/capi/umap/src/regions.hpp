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
  /* Null once its addresses are vacated. */
  virtual farpage_region *region() = 0;
  /* Writes changes back, if that is meant. */
  virtual farpage_code flush() { return farpage_region_flush(region()); }
  /* Writes back and gives up the addresses. If that fails the region is as it was. */
  virtual farpage_code close() = 0;
  /* Whether another region may take its addresses, all of them or a part. */
  virtual bool is_replaceable() const { return false; }
  /* Ends before `offset`, a multiple of the page size; what begins there is `*rest`. */
  virtual farpage_code split(std::uint64_t, std::unique_ptr<Backing> *) { return FARPAGE_INVALID; }
  /* As `close`, but no other memory comes to the addresses. */
  virtual farpage_code vacate() { return FARPAGE_INVALID; }
};

/* A region of its own: a file's, or a program's store's. */
class OwnRegion : public Backing {
 public:
  OwnRegion(farpage_region *it, bool read_only) : it(it), read_only(read_only) {}
  farpage_region *region() override { return it; }
  farpage_code flush() override { return read_only ? FARPAGE_OK : farpage_region_flush(it); }
  farpage_code close() override {
    return read_only ? farpage_region_discard(it) : farpage_region_unmap(it);
  }
  bool is_replaceable() const override { return true; }
  farpage_code split(std::uint64_t offset, std::unique_ptr<Backing> *rest) override {
    farpage_region *behind = nullptr;
    farpage_code code = farpage_region_split(&it, offset, &behind);
    if (behind != nullptr) *rest = std::make_unique<OwnRegion>(behind, read_only);
    return code;
  }
  farpage_code vacate() override {
    farpage_code code = farpage_region_vacate(it);
    if (code == FARPAGE_OK) it = nullptr;
    return code;
  }

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

  /* Pins the pages that lie in both regions and that `whole` had pinned, as far as there is
   * room. */
  void take_pins_of(const Mapping &whole);

  /* What a program mapped in one call; the same for what is left of it on either side of another
   * region. */
  const std::uint64_t origin;

  Mapping(std::unique_ptr<Backing> backing, std::size_t bytes);
  Mapping(std::unique_ptr<Backing> backing, std::size_t bytes, std::uint64_t origin);

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
/* Held by the one call that may replace regions. */
std::unique_lock<std::mutex> replacing();

}  // namespace Umap::shim
