/* The program that `farpage-bench versus-umap` builds twice: with LLNL's Umap and with farpage's.
 *
 * The rule it keeps: it knows Umap's public interface alone, and every word that it reads or
 * leaves in a store is verified. What went wrong ends it with status 1.
 *
 *   driver STORE SIZE BUFFER ACCESSES THREADS PARTS FOLDER
 *
 * STORE is `file` (a file in FOLDER) or `own` (a store of the program's own, which copies).
 * SIZE and BUFFER are bytes of data and of local memory, which UMAP_PAGESIZE and UMAP_BUFSIZE tell
 * the library; THREADS and PARTS are lists with commas. It prints a line for each figure:
 * name, threads, value. */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "umap/umap.h"

namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void fail(const std::string &what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

[[noreturn]] void fail_errno(const std::string &what) { fail(what + ": " + std::strerror(errno)); }

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/* CPU time that the kernel has spent for this process. */
double system_seconds() {
  rusage usage;
  if (getrusage(RUSAGE_SELF, &usage) != 0) fail_errno("getrusage");
  return usage.ru_stime.tv_sec + usage.ru_stime.tv_usec / 1e6;
}

void figure(const char *name, unsigned threads, double value) {
  std::printf("%s %u %.6g\n", name, threads, value);
}

/* Word `index` of the data: 48 bits that no other word has, below 16 that count updates. */
constexpr unsigned COUNTER_SHIFT = 48;
constexpr uint64_t IDENTITY = (uint64_t{1} << COUNTER_SHIFT) - 1;
constexpr uint64_t word(uint64_t index) { return (index + 1) * 0x9e3779b97f4a7c15u & IDENTITY; }

class Random {
 public:
  /* Mixed, since neighbouring states give the same sequence, one step apart. */
  explicit Random(uint64_t seed) : state_(mix(~seed)) {}
  /* splitmix64; a product's upper half is even for all that a region can hold. */
  uint64_t below(uint64_t end) {
    const uint64_t z = mix(state_ += 0x9e3779b97f4a7c15u);
    __extension__ using Wide = unsigned __int128;
    return static_cast<uint64_t>(static_cast<Wide>(z) * end >> 64);
  }

 private:
  static uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  uint64_t state_;
};

/* A store of the user's own: memory, copied. */
class OwnStore : public Umap::Store {
 public:
  explicit OwnStore(char *bytes) : bytes_(bytes) {}
  virtual ~OwnStore() = default;
  ssize_t read_from_store(char *buf, std::size_t nb, off_t off) override {
    reads.fetch_add(1, std::memory_order_relaxed);
    std::memcpy(buf, bytes_ + off, nb);
    return static_cast<ssize_t>(nb);
  }
  ssize_t write_to_store(char *buf, std::size_t nb, off_t off) override {
    std::memcpy(bytes_ + off, buf, nb);
    return static_cast<ssize_t>(nb);
  }
  std::atomic<uint64_t> reads{0};

 private:
  char *bytes_;
};

/* The data behind regions: a file or memory, either seen through a mapping of its own as well. */
class Data {
 public:
  Data(bool is_file, const std::string &folder, std::size_t size) : size_(size) {
    if (is_file) {
      const std::string path = folder + "/data";
      file_ = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
      if (file_ < 0) fail_errno(path);
      unlink(path.c_str());
      if (ftruncate(file_, static_cast<off_t>(size)) != 0) fail_errno(path);
    }
    const int flags = is_file ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    void *seen = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, file_, 0);
    if (seen == MAP_FAILED) fail_errno("mmap");
    words = static_cast<uint64_t *>(seen);
    if (!is_file) own = std::make_unique<OwnStore>(static_cast<char *>(seen));
    reset();
  }

  /* Every word as it is at first. */
  void reset() {
    for (std::size_t at = 0; at < size_ / sizeof *words; ++at) words[at] = word(at);
  }

  void *map(int prot) const {
    void *region = own ? Umap::umap_ex(nullptr, size_, prot, UMAP_PRIVATE, -1, 0, own.get())
                       : umap(nullptr, size_, prot, UMAP_PRIVATE, file_, 0);
    if (region == UMAP_FAILED) fail_errno("umap");
    return region;
  }

  void unmap(void *region) const {
    if (uunmap(region, size_) != 0) fail_errno("uunmap");
  }

  /* Whether the store holds each word, and `updates` of them in all. */
  void verify(uint64_t updates) const {
    uint64_t wrong = 0, found = 0;
    for (std::size_t at = 0; at < size_ / sizeof *words; ++at) {
      wrong += (words[at] & IDENTITY) != word(at);
      found += words[at] >> COUNTER_SHIFT;
    }
    if (wrong > 0) fail(std::to_string(wrong) + " words of the store are wrong");
    if (found != updates)
      fail(std::to_string(updates) + " updates were made, the store has " + std::to_string(found));
  }

  uint64_t *words;
  std::unique_ptr<OwnStore> own;

 private:
  std::size_t size_;
  int file_ = -1;
};

struct Driver {
  std::size_t size, page, buffer;
  uint64_t accesses;
  std::vector<unsigned> threads;
  Data data;

  std::size_t count() const { return size / sizeof(uint64_t); }
  std::size_t pages() const { return size / page; }
  std::size_t page_words() const { return page / sizeof(uint64_t); }
  /* What work that goes through everything in order is divided among: a thread per CPU at most. */
  unsigned per_cpu() const {
    unsigned most = 1;
    for (const auto number : threads)
      if (number <= std::thread::hardware_concurrency()) most = std::max(most, number);
    return most;
  }
  /* Below the mark at which both libraries begin to evict. */
  std::size_t resident_pages() const { return std::min(buffer / page * 85 / 100, pages()); }

  /* Runs `work` in threads 0 to `threads - 1`; returns the seconds until all are done. */
  static double run(unsigned threads, const std::function<void(unsigned)> &work) {
    const auto begin = Clock::now();
    std::vector<std::thread> running;
    for (unsigned number = 0; number < threads; ++number) running.emplace_back(work, number);
    for (auto &thread : running) thread.join();
    return seconds_since(begin);
  }

  static void expect(uint64_t wrong) {
    if (wrong > 0) fail(std::to_string(wrong) + " words were read wrong");
  }

  /* Single faults, one after the other, while there is room. */
  void fault() {
    void *region = data.map(PROT_READ | PROT_WRITE);
    const auto *words = static_cast<const volatile uint64_t *>(region);
    std::vector<std::size_t> order(pages());
    for (std::size_t at = 0; at < order.size(); ++at) order[at] = at;
    Random random(1);
    for (std::size_t left = order.size(); left > 1; --left)
      std::swap(order[left - 1], order[random.below(left)]);
    order.resize(std::min<std::size_t>(buffer / page * 6 / 10, std::min<uint64_t>(pages(), accesses)));
    std::vector<float> took;
    uint64_t wrong = 0;
    for (const auto at : order) {
      const auto index = at * page_words() + random.below(page_words());
      const auto begin = Clock::now();
      const auto found = words[index];
      took.push_back(static_cast<float>(seconds_since(begin) * 1e6));
      wrong += found != word(index);
    }
    expect(wrong);
    data.unmap(region);
    figure("fault-p50-us", 1, percentile(took, 50));
    figure("fault-p99-us", 1, percentile(took, 99));
  }

  static double percentile(std::vector<float> &values, unsigned percent) {
    const auto at = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) * percent / 100);
    std::nth_element(values.begin(), at, values.end());
    return *at;
  }

  enum class Pattern { Read, Update, HotCold };

  /* Page `at` of the tenth that takes nine accesses of ten: spread over all. */
  std::size_t hot(std::size_t at) const { return at * 10 + word(at) % 10; }

  std::size_t pick(Pattern pattern, Random &random) const {
    std::size_t page = random.below(pages());
    if (pattern == Pattern::HotCold && pages() >= 10 && random.below(10) != 0)
      page = hot(random.below(pages() / 10));
    return page * page_words() + random.below(page_words());
  }

  /* `accesses` words by `threads` threads; the time of each goes to `took`, if wanted. */
  double access(uint64_t *words, Pattern pattern, unsigned threads, uint64_t seed,
                std::vector<float> *took) {
    const uint64_t share = std::max<uint64_t>(accesses / threads, 1);
    std::vector<std::vector<float>> times(threads);
    std::atomic<uint64_t> wrong{0};
    const double seconds = run(threads, [&](unsigned number) {
      Random random(seed * 64 + number);
      uint64_t mine = 0;
      auto &time = times[number];
      time.reserve(share);
      for (uint64_t done = 0; done < share; ++done) {
        const auto index = pick(pattern, random);
        const auto begin = Clock::now();
        const auto found =
            pattern == Pattern::Update
                ? __atomic_fetch_add(&words[index], uint64_t{1} << COUNTER_SHIFT, __ATOMIC_RELAXED)
                : __atomic_load_n(&words[index], __ATOMIC_RELAXED);
        time.push_back(static_cast<float>(seconds_since(begin) * 1e6));
        mine += (found & IDENTITY) != word(index);
      }
      wrong += mine;
    });
    expect(wrong);
    if (pattern == Pattern::Update) updates += share * threads;
    if (took != nullptr)
      for (const auto &part : times) took->insert(took->end(), part.begin(), part.end());
    return seconds / static_cast<double>(share * threads) * 1e6;
  }
  uint64_t updates = 0;

  void measure(uint64_t *words, Pattern pattern, const std::string &name, bool more) {
    uint64_t seed = 2;
    for (const auto threads : this->threads) {
      std::vector<float> took;
      const auto reads = data.own ? data.own->reads.load() : 0;
      const auto system = system_seconds();
      figure((name + "-us").c_str(), threads, access(words, pattern, threads, seed++, &took));
      const auto count = static_cast<double>(took.size());
      if (!more) continue;
      figure((name + "-system-us").c_str(), threads, (system_seconds() - system) / count * 1e6);
      figure((name + "-p99-us").c_str(), threads, percentile(took, 99));
      if (data.own)
        figure((name + "-store-reads").c_str(), threads,
               static_cast<double>(data.own->reads.load() - reads) / count);
    }
  }

  /* Random accesses to a full buffer. */
  void random() {
    data.reset();
    updates = 0;
    void *region = data.map(PROT_READ | PROT_WRITE);
    auto *words = static_cast<uint64_t *>(region);
    touch(words, std::min(pages(), buffer / page), false);
    measure(words, Pattern::Read, "random-read", true);
    measure(words, Pattern::Update, "random-update", false);
    access(words, Pattern::HotCold, threads.back(), 1, nullptr);
    measure(words, Pattern::HotCold, "hot-cold", true);
    data.unmap(region);
    data.verify(updates);
    data.reset();

    region = data.map(PROT_READ);
    words = static_cast<uint64_t *>(region);
    touch(words, std::min(pages(), buffer / page), false);
    measure(words, Pattern::Read, "read-only-random", false);
    data.unmap(region);
  }

  /* Uses a word of each of the first pages; every one is verified. */
  void touch(uint64_t *words, std::size_t pages, bool update) const {
    uint64_t wrong = 0;
    for (std::size_t at = 0; at < pages; ++at) {
      const auto index = at * page_words();
      wrong += (__atomic_load_n(&words[index], __ATOMIC_RELAXED) & IDENTITY) != word(index);
      if (update) __atomic_fetch_add(&words[index], uint64_t{1} << COUNTER_SHIFT, __ATOMIC_RELAXED);
    }
    expect(wrong);
  }

  /* Reads everything once, in order. */
  void sequential() {
    for (const auto prot : {PROT_READ | PROT_WRITE, PROT_READ}) {
      const char *name = prot == PROT_READ ? "read-only-sequential-mb-per-s" : "sequential-mb-per-s";
      void *region = data.map(prot);
      const auto *words = static_cast<const uint64_t *>(region);
      const auto threads = per_cpu();
      std::atomic<uint64_t> wrong{0};
      const double seconds = run(threads, [&](unsigned number) {
        uint64_t mine = 0;
        const auto end = count() * (number + 1) / threads;
        for (auto at = count() * number / threads; at < end; ++at)
          mine += (words[at] & IDENTITY) != word(at);
        wrong += mine;
      });
      expect(wrong);
      figure(name, threads, static_cast<double>(size) / seconds / 1e6);
      data.unmap(region);
    }
  }

  /* McCalpin's four loops over three arrays, each of which goes through more than the buffer. */
  void stream() {
    const std::size_t n = count() / 3;
    auto first = [](std::size_t at) { return 1.0 + static_cast<double>(at % 8) / 8; };
    auto *stored = reinterpret_cast<double *>(data.words);
    for (std::size_t at = 0; at < n; ++at) {
      stored[at] = first(at);
      stored[n + at] = 2;
      stored[2 * n + at] = 0;
    }
    void *region = data.map(PROT_READ | PROT_WRITE);
    auto *a = static_cast<double *>(region), *b = a + n, *c = b + n;
    const struct {
      const char *name;
      unsigned arrays;
      std::function<void(std::size_t, std::size_t)> loop;
    } kernels[] = {
        {"stream-copy-mb-per-s", 2,
         [=](std::size_t at, std::size_t end) { for (; at < end; ++at) c[at] = a[at]; }},
        {"stream-scale-mb-per-s", 2,
         [=](std::size_t at, std::size_t end) { for (; at < end; ++at) b[at] = 3 * c[at]; }},
        {"stream-add-mb-per-s", 3,
         [=](std::size_t at, std::size_t end) { for (; at < end; ++at) c[at] = a[at] + b[at]; }},
        {"stream-triad-mb-per-s", 3,
         [=](std::size_t at, std::size_t end) { for (; at < end; ++at) a[at] = b[at] + 3 * c[at]; }},
    };
    const auto threads = per_cpu();
    for (const auto &kernel : kernels) {
      const double seconds = run(threads, [&](unsigned number) {
        kernel.loop(n * number / threads, n * (number + 1) / threads);
      });
      const auto bytes = static_cast<double>(kernel.arrays * n * sizeof(double));
      figure(kernel.name, threads, bytes / seconds / 1e6);
    }
    data.unmap(region);
    uint64_t wrong = 0;
    for (std::size_t at = 0; at < n; ++at) {
      const double x = first(at), y = 3 * x, z = x + y;
      wrong += stored[at] != y + 3 * z || stored[n + at] != y || stored[2 * n + at] != z;
    }
    if (wrong > 0) fail(std::to_string(wrong) + " elements of STREAM's arrays are wrong");
    data.reset();
  }

  /* Unmapping resident pages, none or all of them changed. */
  void unmap() {
    data.reset();
    for (const bool changed : {false, true}) {
      void *region = data.map(PROT_READ | PROT_WRITE);
      touch(static_cast<uint64_t *>(region), resident_pages(), changed);
      const auto begin = Clock::now();
      data.unmap(region);
      figure(changed ? "unmap-changed-ms" : "unmap-clean-ms", 1, seconds_since(begin) * 1e3);
      data.verify(changed ? resident_pages() : 0);
    }
    data.reset();
  }
};

std::vector<std::string> split(const char *list) {
  std::stringstream from(list);
  std::vector<std::string> parts;
  for (std::string part; std::getline(from, part, ',');) parts.push_back(part);
  return parts;
}

}  // namespace

int main(int argc, char **argv) {
  if (argc != 8) fail("usage: driver STORE SIZE BUFFER ACCESSES THREADS PARTS FOLDER");
  const auto page = umapcfg_get_umap_page_size();
  const auto size = std::stoull(argv[2]) / page * page;
  std::vector<unsigned> threads;
  for (const auto &number : split(argv[5])) threads.push_back(static_cast<unsigned>(std::stoul(number)));
  Driver driver{size, page, std::stoull(argv[3]), std::stoull(argv[4]), threads,
                Data(argv[1] == std::string("file"), argv[7], size)};
  for (const auto &part : split(argv[6])) {
    if (part == "fault") driver.fault();
    else if (part == "random") driver.random();
    else if (part == "sequential") driver.sequential();
    else if (part == "stream") driver.stream();
    else if (part == "unmap") driver.unmap();
    else fail("no part is named " + part);
  }
}
