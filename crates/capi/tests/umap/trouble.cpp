/* Stores that fail, processes that fork, and programs that take memory away themselves. */
#include <setjmp.h>
#include <signal.h>
#include <sys/wait.h>

#include <stdexcept>

#include "case.hpp"

CASE(page_that_cannot_be_read_raises_sigbus) {
  CountingStore store(4 * PAGE);
  auto *bytes = map_store<volatile char>(&store, 4 * PAGE);
  CHECK(bytes[0] == 0);
  store.fails_reads = true;
  CHECK(raises(SIGBUS, [&] { (void)bytes[PAGE]; }));
  CHECK(bytes[0] == 0);
  errno = 0;
  umap_fetch_and_pin(const_cast<char *>(bytes) + PAGE, PAGE);
  CHECK(errno == EIO);
  // It heals.
  store.fails_reads = false;
  umap_fetch_and_pin(const_cast<char *>(bytes) + PAGE, PAGE);
  CHECK(errno == 0);
  CHECK(bytes[PAGE] == 0);
  CHECK(uunmap(const_cast<char *>(bytes), 4 * PAGE) == 0);
}

CASE(page_that_cannot_be_written_is_reported_and_kept) {
  CountingStore store(64 * PAGE);
  auto *words = map_store<std::uint64_t>(&store, 64 * PAGE);
  store.fails_writes = true;
  words[PAGE / 8] = 5;
  CHECK(umap_flush() == -1 && errno == EIO);
  CHECK(uunmap(words, 64 * PAGE) == -1 && errno == EIO);
  CHECK(words[PAGE / 8] == 5);
  store.fails_writes = false;
  CHECK(umap_flush() == 0);
  CHECK(store.word(PAGE / 8) == 5);
  CHECK(uunmap(words, 64 * PAGE) == 0);
}

CASE(store_that_throws_is_a_store_that_fails) {
  struct Throwing : Umap::Store {
    ssize_t read_from_store(char *, std::size_t, off_t) override { throw std::runtime_error("no"); }
    ssize_t write_to_store(char *, std::size_t, off_t) override { throw 7; }
  } store;
  auto *bytes = map_store<volatile char>(&store, PAGE);
  CHECK(raises(SIGBUS, [&] { (void)bytes[0]; }));
  CHECK(uunmap(const_cast<char *>(bytes), PAGE) == 0);
}

CASE(store_that_returns_less_shows_zeros_and_no_other_pages_bytes) {
  struct Short : Umap::Store {
    ssize_t read_from_store(char *buf, std::size_t, off_t off) override {
      std::memset(buf, 'a' + static_cast<int>(off / static_cast<off_t>(PAGE)) % 20, 10);
      return 10;
    }
    ssize_t write_to_store(char *, std::size_t nb, off_t) override { return static_cast<ssize_t>(nb / 2); }
  } store;
  constexpr std::size_t PAGES = 256;
  auto *bytes = map_store<char>(&store, PAGES * PAGE);
  for (std::size_t page = 0; page < PAGES; ++page) {
    CHECK(bytes[page * PAGE + 9] == 'a' + static_cast<int>(page) % 20);
    for (std::size_t at = 10; at < PAGE; ++at) CHECK(bytes[page * PAGE + at] == 0);
  }
  // Half a page written is a page that is not written.
  bytes[0] = 1;
  CHECK(uunmap(bytes, PAGES * PAGE) == -1 && errno == EIO);
}

/* As stores do that round what they are asked for up to their own blocks. The caller sees the
 * process end. */
class StoreThatWritesTooMuch : public Umap::Store {
 public:
  explicit StoreThatWritesTooMuch(std::size_t too_many) : too_many(too_many) {}
  ssize_t read_from_store(char *buf, std::size_t nb, off_t) override {
    // One byte after the other: the first beyond is what ends it.
    volatile char *at = buf;
    for (std::size_t i = 0; i < nb + too_many; ++i) at[i] = 'x';
    return static_cast<ssize_t>(nb);
  }
  ssize_t write_to_store(char *, std::size_t nb, off_t) override { return static_cast<ssize_t>(nb); }

 private:
  std::size_t too_many;
};

CASE(store_that_writes_too_much_is_named) {
  // A region whose last page is short: the buffer ends there, too.
  constexpr std::size_t BYTES = 3 * PAGE + 100;
  StoreThatWritesTooMuch exact(0), wrong(std::strtoull(std::getenv("TOO_MANY"), nullptr, 10));
  auto *fine = map_store<volatile char>(&exact, BYTES);
  for (std::size_t at = 0; at < BYTES; ++at) CHECK(fine[at] == 'x');
  auto *bytes = map_store<volatile char>(&wrong, BYTES);
  (void)bytes[std::strtoull(std::getenv("TOUCH"), nullptr, 10)];
  CHECK(!"the store's error went unnoticed");
}

/* What happens to a program that has a handler of its own, from before. */
CASE(segmentation_faults_elsewhere_are_the_programs) {
  static sigjmp_buf back;
  struct sigaction own {};
  own.sa_handler = [](int) { siglongjmp(back, 1); };
  CHECK(sigaction(SIGSEGV, &own, nullptr) == 0);
  CountingStore store(PAGE);
  auto *bytes = map_store<volatile char>(&store, PAGE);
  CHECK(bytes[0] == 0);
  void *nobodys = mmap(nullptr, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(nobodys != MAP_FAILED);
  if (sigsetjmp(back, 1) == 0) {
    *static_cast<volatile char *>(nobodys) = 1;
    CHECK(!"it may not be written");
  }
  CHECK(uunmap(const_cast<char *>(bytes), PAGE) == 0);
}

CASE(slow_store_does_not_stall_other_regions) {
  struct Slow : Umap::Store {
    std::atomic<bool> go{false};
    std::atomic<int> waiting{0};
    ssize_t read_from_store(char *, std::size_t nb, off_t) override {
      waiting++;
      while (!go) std::this_thread::yield();
      return static_cast<ssize_t>(nb);
    }
    ssize_t write_to_store(char *, std::size_t nb, off_t) override { return static_cast<ssize_t>(nb); }
  } slow;
  constexpr std::size_t APART = 128 * PAGE;
  auto *stuck = map_store<volatile char>(&slow, 4 * APART);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < 4; ++i) threads.emplace_back([stuck, i] { (void)stuck[i * APART]; });
  // Several calls at once. (Neighbours come one after the other.)
  while (slow.waiting < 4) std::this_thread::yield();
  CountingStore store(512 * PAGE);
  auto *bytes = map_store<char>(&store, 512 * PAGE);
  for (std::size_t at = 0; at < 512 * PAGE; at += PAGE) bytes[at] = 1;
  CHECK(uunmap(bytes, 512 * PAGE) == 0);
  slow.go = true;
  for (auto &thread : threads) thread.join();
  CHECK(uunmap(const_cast<char *>(stuck), 4 * APART) == 0);
}

CASE(child_after_fork) {
  int fd = new_file("pages", 64 * PAGE);
  auto *bytes = map_file<char>(fd, 64 * PAGE);
  bytes[0] = 1;
  // The parent's region is not there: never zeros, never a hang.
  int status = in_child([&] {
    volatile char byte = bytes[0];
    (void)byte;
  });
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
  status = in_child([&] {
    CHECK(uunmap(bytes, 64 * PAGE) == -1 && errno == EINVAL);
    CHECK(umap_flush() == 0);
    // The child may have its own.
    int own = new_file("child", 64 * PAGE);
    auto *mine = map_file<char>(own, 64 * PAGE);
    for (std::size_t at = 0; at < 64 * PAGE; at += PAGE) mine[at] = 2;
    CHECK(uunmap(mine, 64 * PAGE) == 0);
    char byte = 0;
    CHECK(pread(own, &byte, 1, 63 * PAGE) == 1 && byte == 2);
  });
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(bytes[0] == 1);
  CHECK(uunmap(bytes, 64 * PAGE) == 0);
  char byte = 0;
  CHECK(pread(fd, &byte, 1, 0) == 1 && byte == 1);
}

CASE(fork_while_other_threads_work) {
  int fd = new_file("pages", 256 * PAGE);
  auto *words = map_file<std::uint64_t>(fd, 256 * PAGE);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (std::size_t id = 0; id < 2; ++id) {
    threads.emplace_back([&, id] {
      while (!stop) {
        for (std::size_t at = id; at < 256 * PAGE / 8; at += PAGE / 8) words[at] = at;
        CHECK(umap_flush() == 0);
      }
    });
  }
  for (int i = 0; i < 20; ++i) {
    int status = in_child([&] { CHECK(umap_flush() == 0); });
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  stop = true;
  for (auto &thread : threads) thread.join();
  CHECK(uunmap(words, 256 * PAGE) == 0);
}

CASE(madvise_dontneed_by_the_application) {
  constexpr std::size_t PAGES = 256, WORDS = PAGE / 8;
  int fd = new_file("pages", PAGES * PAGE);
  auto *words = map_file<std::uint64_t>(fd, PAGES * PAGE);
  for (std::size_t page = 0; page < PAGES; ++page) words[page * WORDS] = 1;
  CHECK(umap_flush() == 0);
  for (std::size_t page = 0; page < 32; ++page) words[page * WORDS] = 2;
  // What changed since the last write-back is given up: the store's bytes show, or, if a page was
  // written back in between, the newer ones.
  CHECK(madvise(words, 32 * PAGE, MADV_DONTNEED) == 0);
  for (std::size_t page = 0; page < PAGES; ++page) {
    std::uint64_t word = words[page * WORDS];
    CHECK(word == 1 || (page < 32 && word == 2));
  }
  for (std::size_t page = 0; page < PAGES; ++page) words[page * WORDS] = 3;
  CHECK(uunmap(words, PAGES * PAGE) == 0);
  for (std::size_t page = 0; page < PAGES; ++page) CHECK(word_in_file(fd, page * WORDS) == 3);
}

CASE(munmap_by_the_application) {
  constexpr std::size_t PAGES = 512, WORDS = PAGE / 8, FROM = 100, TO = 200;
  int fd = new_file("pages", PAGES * PAGE);
  auto *words = map_file<std::uint64_t>(fd, PAGES * PAGE);
  for (std::size_t page = 0; page < PAGES; ++page) words[page * WORDS] = 1;
  CHECK(umap_flush() == 0);
  CHECK(munmap(words + FROM * WORDS, (TO - FROM) * PAGE) == 0);
  CHECK(raises(SIGSEGV, [&] { words[FROM * WORDS] = 2; }));
  // The rest goes on.
  for (std::uint64_t round = 2; round < 6; ++round) {
    for (std::size_t page = 0; page < PAGES; ++page) {
      if (page >= FROM && page < TO) continue;
      CHECK(words[page * WORDS] == round - 1);
      words[page * WORDS] = round;
    }
  }
  CHECK(umap_flush() == 0);
  CHECK(uunmap(words, PAGES * PAGE) == 0);
  for (std::size_t page = 0; page < PAGES; ++page) CHECK(word_in_file(fd, page * WORDS) == (page >= FROM && page < TO ? 1 : 5));
}

/* A page that loses a part is gone: its file keeps what was written back last, and what is left of
 * it raises a signal where it was not in memory. */
CASE(munmap_of_parts_of_pages) {
  constexpr std::size_t BIG = 65536, PAGES = 64;
  CountingStore store(PAGES * BIG);
  store.page_size_hint = BIG;
  auto *bytes = map_store<char>(&store, PAGES * BIG);
  for (std::size_t at = 0; at < PAGES * BIG; at += PAGE) bytes[at] = 1;
  CHECK(umap_flush() == 0);
  // The end of page 10 and the beginning of page 12.
  CHECK(munmap(bytes + 10 * BIG + 8 * PAGE, BIG + 16 * PAGE) == 0);
  CHECK(raises(SIGSEGV, [&] { bytes[11 * BIG] = 2; }));
  for (int round = 0; round < 3; ++round) {
    for (std::size_t page = 0; page < PAGES; ++page) {
      if (page < 10 || page > 12) CHECK(bytes[page * BIG + PAGE] == 1 + round);
      if (page < 10 || page > 12) bytes[page * BIG + PAGE] = static_cast<char>(2 + round);
    }
  }
  CHECK(umap_flush() == 0);
  CHECK(uunmap(bytes, PAGES * BIG) == 0);
  for (std::size_t page = 0; page < PAGES; ++page) {
    for (std::size_t at = 0; at < BIG; at += PAGE) {
      bool changed = (page < 10 || page > 12) && at == PAGE;
      CHECK((store.word((page * BIG + at) / 8) & 255) == (changed ? 4 : 1));
    }
  }
}

/* What moves away is the program's own from then on: what was in memory moves along, pinned pages
 * for certain, and the region has lost it. */
CASE(mremap_by_the_application) {
  constexpr std::size_t PAGES = 512, FROM = 100, MOVED = 16, WORDS = PAGE / 8;
  int fd = new_file("pages", PAGES * PAGE);
  auto *words = map_file<std::uint64_t>(fd, PAGES * PAGE);
  for (std::size_t page = 0; page < PAGES; ++page) words[page * WORDS] = page + 1;
  CHECK(umap_flush() == 0);
  umap_fetch_and_pin(reinterpret_cast<char *>(words + FROM * WORDS), MOVED * PAGE);
  CHECK(errno == 0);
  void *there = mmap(nullptr, MOVED * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(there != MAP_FAILED);
  CHECK(mremap(words + FROM * WORDS, MOVED * PAGE, MOVED * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, there) == there);
  auto *moved = static_cast<std::uint64_t *>(there);
  for (std::size_t page = 0; page < MOVED; ++page) {
    CHECK(moved[page * WORDS] == FROM + page + 1);
    moved[page * WORDS] = 77;
  }
  CHECK(raises(SIGSEGV, [&] { words[FROM * WORDS] = 2; }));
  for (int round = 0; round < 3; ++round) {
    for (std::size_t page = 0; page < PAGES; ++page) {
      if (page < FROM || page >= FROM + MOVED) CHECK(words[page * WORDS] == page + 1);
    }
  }
  CHECK(uunmap(words, PAGES * PAGE) == 0);
  for (std::size_t page = 0; page < MOVED; ++page) CHECK(moved[page * WORDS] == 77);
  for (std::size_t page = 0; page < PAGES; ++page) CHECK(word_in_file(fd, page * WORDS) == page + 1);
}

/* Which thread is faster is chance, each time. */
CASE(application_maps_over_pages_that_are_being_evicted) {
  constexpr std::size_t PAGES = 256, WORDS = PAGE / 8, PART = 16;
  std::atomic<bool> stop{false};
  int busy_fd = new_file("busy", 4 * PAGES * PAGE);
  auto *busy = map_file<std::uint64_t>(busy_fd, 4 * PAGES * PAGE);
  std::thread writer([&] {
    for (std::uint64_t round = 1; !stop; ++round) {
      for (std::size_t page = 0; page < 4 * PAGES; ++page) busy[page * WORDS] = mix(round + page);
    }
  });
  for (int cycle = 0; cycle < 6; ++cycle) {
    int fd = new_file("pages" + std::to_string(cycle), PAGES * PAGE);
    auto *words = map_file<std::uint64_t>(fd, PAGES * PAGE);
    for (std::size_t at = 0; at + PART <= PAGES; at += PART) {
      // On their way out or about to be.
      for (std::size_t page = at; page < PAGES; ++page) words[page * WORDS] = page + 1;
      void *part = words + at * WORDS;
      if (at / PART % 2 == 0) {
        CHECK(mmap(part, PART * PAGE, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == part);
        for (std::size_t page = at; page < at + PART; ++page) {
          CHECK(words[page * WORDS] == 0);
          words[page * WORDS] = ~page;
        }
      } else {
        CHECK(munmap(part, PART * PAGE) == 0);
      }
      for (std::size_t page = 0; page < at + PART; ++page) {
        if (page / PART % 2 == 0) CHECK(words[page * WORDS] == ~page);
      }
    }
    CHECK(umap_flush() == 0);
    CHECK(uunmap(words, PAGES * PAGE) == 0);
    for (std::size_t page = 0; page < PAGES; ++page) {
      if (page / PART % 2 == 0) CHECK(words[page * WORDS] == ~page);
      std::uint64_t stored = word_in_file(fd, page * WORDS);
      CHECK(stored == 0 || stored == page + 1);
    }
    for (std::size_t at = 0; at < PAGES; at += PART * 2) CHECK(munmap(words + at * WORDS, PART * PAGE) == 0);
  }
  stop = true;
  writer.join();
  CHECK(uunmap(busy, 4 * PAGES * PAGE) == 0);
}

CASE(what_the_application_maps_into_a_region_is_its_own) {
  constexpr std::size_t PAGES = 512, FROM = 100, TO = 200;
  int fd = new_file("pages", PAGES * PAGE);
  auto *bytes = map_file<char>(fd, PAGES * PAGE);
  for (std::size_t page = 0; page < PAGES; ++page) bytes[page * PAGE] = 1;
  void *hole = bytes + FROM * PAGE;
  CHECK(mmap(hole, (TO - FROM) * PAGE, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == hole);
  for (std::size_t page = FROM; page < TO; ++page) bytes[page * PAGE] = 7;
  for (int round = 0; round < 3; ++round) {
    for (std::size_t page = 0; page < PAGES; ++page) CHECK(bytes[page * PAGE] == (page >= FROM && page < TO ? 7 : 1));
  }
  CHECK(umap_flush() == 0);
  CHECK(uunmap(bytes, PAGES * PAGE) == 0);
  for (std::size_t page = FROM; page < TO; ++page) CHECK(bytes[page * PAGE] == 7);
  CHECK(raises(SIGSEGV, [&] { bytes[0] = 2; }));
}

/* The caller starts it as a user without privileges. */
CASE(unprivileged_use) {
  CHECK(geteuid() != 0);
  int fd = new_file("pages", 1024 * PAGE);
  auto *words = map_file<std::uint64_t>(fd, 1024 * PAGE);
  for (std::size_t at = 0; at < 1024 * PAGE / 8; at += PAGE / 8) words[at] = mix(at);
  CHECK(uunmap(words, 1024 * PAGE) == 0);
  for (std::size_t at = 0; at < 1024 * PAGE / 8; at += PAGE / 8) CHECK(word_in_file(fd, at) == mix(at));
}
