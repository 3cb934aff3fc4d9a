#include "regions.hpp"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <string>

#include "config.hpp"

namespace Umap::shim {
namespace {

struct Process {
  std::shared_mutex lock;
  std::map<std::uintptr_t, std::shared_ptr<Mapping>> mappings;
  std::mutex replacing;
  std::mutex runtime_lock;
  farpage_runtime *runtime = nullptr;
};

std::atomic<Process *> current{nullptr};

Process &process() {
  // Never destroyed: other threads, and a program's own statics, may be at work until the very end.
  static const bool started = [] {
    current = new Process;
    // The parent's regions are not mapped in a child, and its locks may be held by threads that the
    // child does not have: they are left behind.
    pthread_atfork(nullptr, nullptr, [] { current = new Process; });
    return true;
  }();
  (void)started;
  return *current;
}

std::uint64_t next_origin() {
  static std::atomic<std::uint64_t> next{0};
  return next++;
}

}  // namespace

Mapping::Mapping(std::unique_ptr<Backing> from, std::size_t length) : Mapping(std::move(from), length, next_origin()) {}

Mapping::Mapping(std::unique_ptr<Backing> from, std::size_t length, std::uint64_t origin)
    : address(reinterpret_cast<std::uintptr_t>(farpage_region_address(from->region()))),
      page_bytes(farpage_region_page_bytes(from->region())),
      bytes(length),
      mapped_bytes((bytes + page_bytes - 1) / page_bytes * page_bytes),
      backing(std::move(from)),
      origin(origin) {}

farpage_code Mapping::pin(std::uint64_t offset, std::uint64_t length) {
  std::lock_guard<std::mutex> lock(pinning);
  if (pinned.empty()) pinned.resize(mapped_bytes / page_bytes);
  std::uint64_t first = offset / page_bytes, end = (offset + length + page_bytes - 1) / page_bytes;
  auto part = [&](std::uint64_t page, std::uint64_t pages, auto call) {
    std::uint64_t start = page * page_bytes;
    return call(backing->region(), start, std::min<std::uint64_t>(pages * page_bytes, bytes - start));
  };
  std::vector<std::pair<std::uint64_t, std::uint64_t>> runs;
  for (std::uint64_t page = first; page < end;) {
    std::uint64_t after = page;
    while (after < end && !pinned[after]) ++after;
    if (after > page) {
      farpage_code code = part(page, after - page, farpage_region_pin);
      if (code != FARPAGE_OK) {
        for (auto [at, pages] : runs) part(at, pages, farpage_region_unpin);
        return code;
      }
      runs.emplace_back(page, after - page);
    }
    page = after + 1;
  }
  for (auto [at, pages] : runs) {
    for (std::uint64_t page = at; page < at + pages; ++page) pinned[page] = true;
  }
  return FARPAGE_OK;
}

void Mapping::take_pins_of(const Mapping &whole) {
  for (std::size_t page = 0; page < whole.pinned.size(); ++page) {
    std::uintptr_t at = whole.address + page * page_bytes;
    if (!whole.pinned[page] || at - address >= mapped_bytes) continue;
    if (pin(at - address, 1) != FARPAGE_OK) {
      log_failure("umap: pages beside a new region are not pinned any more");
      return;
    }
  }
}

farpage_runtime *runtime(farpage_code *code) {
  Process &p = process();
  std::lock_guard<std::mutex> lock(p.runtime_lock);
  if (p.runtime == nullptr) p.runtime = new_runtime("", code);
  return p.runtime;
}

void add(std::shared_ptr<Mapping> mapping) {
  Process &p = process();
  std::unique_lock<std::shared_mutex> lock(p.lock);
  std::uintptr_t address = mapping->address;
  p.mappings[address] = std::move(mapping);
}

void remove(const std::shared_ptr<Mapping> &mapping) {
  Process &p = process();
  std::unique_lock<std::shared_mutex> lock(p.lock);
  auto at = p.mappings.find(mapping->address);
  // Its addresses may have become another region's in the meantime.
  if (at != p.mappings.end() && at->second == mapping) p.mappings.erase(at);
}

std::shared_ptr<Mapping> find(std::uintptr_t address) {
  Process &p = process();
  std::shared_lock<std::shared_mutex> lock(p.lock);
  auto next = p.mappings.upper_bound(address);
  if (next == p.mappings.begin()) return nullptr;
  const auto &mapping = std::prev(next)->second;
  return address - mapping->address < mapping->mapped_bytes ? mapping : nullptr;
}

std::vector<std::shared_ptr<Mapping>> all() {
  Process &p = process();
  std::shared_lock<std::shared_mutex> lock(p.lock);
  std::vector<std::shared_ptr<Mapping>> list;
  list.reserve(p.mappings.size());
  for (const auto &entry : p.mappings) list.push_back(entry.second);
  return list;
}

std::unique_lock<std::mutex> replacing() { return std::unique_lock<std::mutex>(process().replacing); }

}  // namespace Umap::shim
