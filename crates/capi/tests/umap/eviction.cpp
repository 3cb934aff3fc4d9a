/* Eviction, while everything else happens. */
#include "case.hpp"

CASE(unmap_while_evicting) {
  constexpr std::size_t PAGES = 256, WORDS = PAGES * PAGE / 8;
  std::atomic<bool> stop{false};
  int busy_fd = new_file("busy", 4 * PAGES * PAGE);
  auto *busy = map_file<std::uint64_t>(busy_fd, 4 * PAGES * PAGE);
  // Keeps the evictors at work all the time.
  std::thread writer([&] {
    for (std::uint64_t round = 1; !stop; ++round) {
      for (std::size_t at = 0; at < 4 * WORDS; at += PAGE / 8) busy[at] = mix(round + at);
    }
  });
  int fd = new_file("short-lived", PAGES * PAGE);
  for (std::uint64_t round = 1; round <= 30; ++round) {
    auto *words = map_file<std::uint64_t>(fd, PAGES * PAGE);
    for (std::size_t at = 0; at < WORDS; at += 64) words[at] = mix(round << 32 | at);
    CHECK(uunmap(words, PAGES * PAGE) == 0);
    for (std::size_t at = 0; at < WORDS; at += 64) CHECK(word_in_file(fd, at) == mix(round << 32 | at));
  }
  stop = true;
  writer.join();
  CHECK(uunmap(busy, 4 * PAGES * PAGE) == 0);
}

CASE(flush_while_evicting) {
  constexpr std::size_t PAGES = 1024, WORDS = PAGES * PAGE / 8, WRITERS = 2;
  int fd = new_file("pages", PAGES * PAGE);
  auto *words = map_file<std::uint64_t>(fd, PAGES * PAGE);
  std::atomic<std::size_t> running{WRITERS};
  std::vector<std::thread> writers;
  for (std::size_t id = 0; id < WRITERS; ++id) {
    writers.emplace_back([&, id] {
      for (std::uint64_t round = 1; round <= 5; ++round) {
        for (std::size_t at = id; at < WORDS; at += 32) words[at] = mix(round << 32 | at);
      }
      running--;
    });
  }
  while (running > 0) CHECK(umap_flush() == 0);
  for (auto &writer : writers) writer.join();
  CHECK(umap_flush() == 0);
  for (std::size_t at = 0; at < WORDS; at += 32) {
    for (std::size_t id = 0; id < WRITERS; ++id) CHECK(word_in_file(fd, at + id) == mix(std::uint64_t{5} << 32 | (at + id)));
  }
  CHECK(uunmap(words, PAGES * PAGE) == 0);
}

/* The caller sets UMAP_BUFSIZE, down to 1, and more fillers than that. */
CASE(tiny_buffer) {
  constexpr std::size_t PAGES = 128, WORDS = PAGES * PAGE / 8;
  int fd = new_file("pages", PAGES * PAGE);
  auto *words = map_file<std::uint64_t>(fd, PAGES * PAGE);
  std::vector<std::thread> threads;
  for (std::size_t id = 0; id < 4; ++id) {
    threads.emplace_back([&, id] {
      for (std::size_t at = id; at < WORDS; at += 16) words[at] = mix(at);
      for (std::size_t at = id; at < WORDS; at += 16) CHECK(words[at] == mix(at));
    });
  }
  for (auto &thread : threads) thread.join();
  CHECK(uunmap(words, PAGES * PAGE) == 0);
  for (std::size_t at = 0; at < WORDS; at += 16) CHECK(word_in_file(fd, at) == mix(at));
}

CASE(regions_share_the_buffer) {
  constexpr std::size_t PAGES = 4096, WORDS = PAGES * PAGE / 8, REGIONS = 4;
  std::size_t before = status_kib("VmRSS");
  std::vector<int> fds;
  std::vector<std::uint64_t *> regions;
  for (std::size_t i = 0; i < REGIONS; ++i) {
    fds.push_back(new_file("pages" + std::to_string(i), PAGES * PAGE));
    regions.push_back(map_file<std::uint64_t>(fds[i], PAGES * PAGE));
  }
  for (std::size_t at = 0; at < WORDS; at += 256) {
    for (std::size_t i = 0; i < REGIONS; ++i) regions[i][at] = mix(at + i);
  }
  // 64 MiB went through a buffer of 4 MiB; what else there is is words and entries of pages, and
  // stacks.
  std::size_t grown = status_kib("VmRSS") - before;
  CHECK(grown < 16 * 1024);
  for (std::size_t at = 0; at < WORDS; at += 256) {
    for (std::size_t i = 0; i < REGIONS; ++i) CHECK(regions[i][at] == mix(at + i));
  }
  for (std::size_t i = 0; i < REGIONS; ++i) {
    CHECK(uunmap(regions[i], PAGES * PAGE) == 0);
    for (std::size_t at = 0; at < WORDS; at += 256) CHECK(word_in_file(fds[i], at) == mix(at + i));
  }
}

CASE(concurrent_map_and_unmap) {
  constexpr std::size_t PAGES = 64, WORDS = PAGES * PAGE / 8;
  std::vector<std::thread> threads;
  for (std::size_t id = 0; id < 8; ++id) {
    threads.emplace_back([id] {
      int fd = new_file("pages" + std::to_string(id), PAGES * PAGE);
      for (std::uint64_t round = 0; round < 40; ++round) {
        auto *words = map_file<std::uint64_t>(fd, PAGES * PAGE);
        for (std::size_t at = 0; at < WORDS; at += 128) {
          CHECK(round == 0 || words[at] == mix((round - 1) << 32 | id << 24 | at));
          words[at] = mix(round << 32 | id << 24 | at);
        }
        CHECK(uunmap(words, PAGES * PAGE) == 0);
      }
      close(fd);
    });
  }
  for (auto &thread : threads) thread.join();
}

CASE(prefetched_pages_need_no_fault_later) {
  constexpr std::size_t PAGES = 16;
  CountingStore store(PAGES * PAGE);
  auto *bytes = map_store<char>(&store, PAGES * PAGE);
  std::vector<umap_prefetch_item> items;
  for (std::size_t page = 0; page < PAGES; ++page) items.push_back({bytes + page * PAGE});
  // What is no region's is passed over.
  items.push_back({&items});
  umap_prefetch(static_cast<int>(items.size()), items.data());
  while (store.reads < static_cast<int>(PAGES)) std::this_thread::yield();
  for (std::size_t page = 0; page < PAGES; ++page) CHECK(bytes[page * PAGE] == 0);
  CHECK(store.reads == static_cast<int>(PAGES));
  CHECK(uunmap(bytes, PAGES * PAGE) == 0);
}

CASE(pinned_pages_stay_though_written_and_pinned_twice) {
  constexpr std::size_t PINNED = 16, PAGES = 1024, WORDS = PAGE / 8;
  CountingStore store(PINNED * PAGE), other(PAGES * PAGE);
  auto *pinned = map_store<std::uint64_t>(&store, PINNED * PAGE);
  auto *rest = map_store<std::uint64_t>(&other, PAGES * PAGE);
  errno = 1;
  umap_fetch_and_pin(reinterpret_cast<char *>(pinned), PINNED * PAGE);
  CHECK(errno == 0);
  umap_fetch_and_pin(reinterpret_cast<char *>(pinned) + PAGE, PAGE);
  CHECK(errno == 0);
  // Programs do this at each step.
  for (int i = 0; i < 300; ++i) umap_fetch_and_pin(reinterpret_cast<char *>(pinned), PINNED * PAGE);
  CHECK(errno == 0);
  int reads = store.reads;
  for (std::uint64_t round = 1; round < 4; ++round) {
    for (std::size_t page = 0; page < PINNED; ++page) pinned[page * WORDS] = mix(round + page);
    // Sixteen times the buffer goes by.
    for (std::size_t page = 0; page < PAGES; ++page) rest[page * WORDS] = round;
    for (std::size_t page = 0; page < PINNED; ++page) CHECK(pinned[page * WORDS] == mix(round + page));
    CHECK(umap_flush() == 0);
    for (std::size_t page = 0; page < PINNED; ++page) CHECK(store.word(page * WORDS) == mix(round + page));
  }
  CHECK(store.reads == reads);
  // All of the buffer cannot be pinned: an error, and no page is pinned for it.
  umap_fetch_and_pin(reinterpret_cast<char *>(rest), PAGES * PAGE);
  CHECK(errno == ENOMEM);
  for (std::size_t page = 0; page < PAGES; ++page) CHECK(rest[page * WORDS] == 3);
  // Unmapping ends it: the buffer is free for others.
  CHECK(uunmap(pinned, PINNED * PAGE) == 0);
  CHECK(uunmap(rest, PAGES * PAGE) == 0);
}
