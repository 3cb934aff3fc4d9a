/* What may be mapped, and what becomes of it. */
#include "case.hpp"

#include <signal.h>

CASE(file_is_mapped_from_its_offset) {
  int fd = new_file("pages", 8 * PAGE);
  for (std::size_t page = 0; page < 8; ++page) {
    std::uint64_t word = mix(page);
    CHECK(pwrite(fd, &word, sizeof word, static_cast<off_t>(page * PAGE)) == sizeof word);
  }
  auto *words = map_file<std::uint64_t>(fd, 4 * PAGE, 3 * PAGE);
  // The descriptor is no longer needed.
  int other = dup(fd);
  close(fd);
  for (std::size_t page = 0; page < 4; ++page) CHECK(words[page * PAGE / 8] == mix(page + 3));
  words[1] = 7;
  CHECK(uunmap(words, 4 * PAGE) == 0);
  CHECK(word_in_file(other, 3 * PAGE / 8 + 1) == 7);
  CHECK(word_in_file(other, 0) == mix(0) && word_in_file(other, 7 * PAGE / 8) == mix(7));
}

CASE(short_file_reads_as_zeros_and_keeps_its_length) {
  constexpr std::size_t BYTES = 2 * PAGE + 1808;
  int fd = new_file("pages", 0);
  std::string text(BYTES, 'x');
  CHECK(write(fd, text.data(), BYTES) == static_cast<ssize_t>(BYTES));
  auto *bytes = map_file<char>(fd, 5 * PAGE);
  for (std::size_t at = 0; at < 5 * PAGE; ++at) CHECK(bytes[at] == (at < BYTES ? 'x' : 0));
  bytes[BYTES - 1] = 'y';
  CHECK(umap_flush() == 0);
  CHECK(file_bytes(fd) == BYTES);
  // Stored beyond the end: nothing is lost, so the file must grow.
  bytes[3 * PAGE + 9] = 'z';
  CHECK(uunmap(bytes, 5 * PAGE) == 0);
  CHECK(file_bytes(fd) == 3 * PAGE + 10);
  char back[2] = {};
  CHECK(pread(fd, &back[0], 1, BYTES - 1) == 1 && back[0] == 'y');
  CHECK(pread(fd, &back[1], 1, 3 * PAGE + 9) == 1 && back[1] == 'z');
}

CASE(file_that_somebody_cuts_is_an_error_not_zeros) {
  int fd = new_file("pages", 4 * PAGE);
  auto *bytes = map_file<volatile char>(fd, 4 * PAGE);
  CHECK(bytes[0] == 0);
  CHECK(ftruncate(fd, PAGE) == 0);
  CHECK(raises(SIGBUS, [&] { (void)bytes[2 * PAGE]; }));
}

CASE(sizes_that_are_no_multiple_of_a_page) {
  for (std::size_t length : {std::size_t{1}, PAGE - 1, PAGE + 1, 10 * PAGE + 123}) {
    int fd = new_file(std::to_string(length), length);
    auto *bytes = map_file<char>(fd, length);
    for (std::size_t at = 0; at < length; ++at) bytes[at] = static_cast<char>(mix(at));
    CHECK(uunmap(bytes, length) == 0);
    CHECK(file_bytes(fd) == length);
    std::vector<char> back(length);
    CHECK(pread(fd, back.data(), length, 0) == static_cast<ssize_t>(length));
    for (std::size_t at = 0; at < length; ++at) CHECK(back[at] == static_cast<char>(mix(at)));
  }
  // A store's last page is as long as what is left.
  constexpr std::size_t LENGTH = 3 * PAGE + 8;
  CountingStore store(LENGTH);
  auto *words = map_store<std::uint64_t>(&store, LENGTH);
  words[LENGTH / 8 - 1] = 5;
  CHECK(uunmap(words, LENGTH) == 0);
  CHECK(store.word(LENGTH / 8 - 1) == 5);
}

CASE(wrong_arguments_are_an_errno) {
  int fd = new_file("pages", 8 * PAGE);
  constexpr int RW = PROT_READ | PROT_WRITE;
  auto fails = [&](int number, void *addr, std::size_t length, int prot, int flags, int with, off_t offset) {
    errno = 0;
    return umap(addr, length, prot, flags, with, offset) == UMAP_FAILED && errno == number;
  };
  CHECK(fails(EINVAL, nullptr, 0, RW, UMAP_PRIVATE, fd, 0));
  CHECK(fails(EINVAL, nullptr, PAGE, RW, 0, fd, 0));
  CHECK(fails(EINVAL, nullptr, PAGE, RW, UMAP_PRIVATE | MAP_SHARED, fd, 0));
  CHECK(fails(EINVAL, nullptr, PAGE, PROT_NONE, UMAP_PRIVATE, fd, 0));
  CHECK(fails(EINVAL, nullptr, PAGE, RW | PROT_EXEC, UMAP_PRIVATE, fd, 0));
  CHECK(fails(EINVAL, nullptr, PAGE, RW, UMAP_PRIVATE, fd, 1));
  CHECK(fails(EINVAL, nullptr, PAGE, RW, UMAP_PRIVATE, fd, -static_cast<off_t>(PAGE)));
  CHECK(fails(EINVAL, reinterpret_cast<void *>(PAGE + 1), PAGE, RW, UMAP_PRIVATE | UMAP_FIXED, fd, 0));
  CHECK(fails(ENOMEM, nullptr, SIZE_MAX, RW, UMAP_PRIVATE, fd, 0));
  CHECK(fails(ENOMEM, nullptr, std::size_t{1} << 60, RW, UMAP_PRIVATE, fd, 0));
  CHECK(fails(EBADF, nullptr, PAGE, RW, UMAP_PRIVATE, -1, 0));
  CHECK(fails(EBADF, nullptr, PAGE, RW, UMAP_PRIVATE, 12345, 0));
  int read_only = open(path("pages").c_str(), O_RDONLY), write_only = open(path("pages").c_str(), O_WRONLY);
  CHECK(fails(EACCES, nullptr, PAGE, RW, UMAP_PRIVATE, read_only, 0));
  CHECK(fails(EACCES, nullptr, PAGE, PROT_READ, UMAP_PRIVATE, write_only, 0));
  int ends[2];
  CHECK(pipe(ends) == 0);
  CHECK(fails(EACCES, nullptr, PAGE, RW, UMAP_PRIVATE, ends[0], 0));

  auto *bytes = map_file<char>(fd, 3 * PAGE);
  auto stays = [&](void *addr, std::size_t length) {
    errno = 0;
    return uunmap(addr, length) == -1 && errno == EINVAL;
  };
  CHECK(stays(bytes + PAGE, 2 * PAGE));
  CHECK(stays(bytes, PAGE));
  CHECK(stays(nullptr, PAGE));
  CHECK(stays(&fd, PAGE));
  CHECK(stays(bytes, 2 * PAGE));
  bytes[0] = 1;
  CHECK(uunmap(bytes, 3 * PAGE) == 0);
  CHECK(stays(bytes, 3 * PAGE));
  // All of a region, whatever its length: programs do this.
  for (std::size_t length : {std::size_t{0}, 2 * PAGE + 1, 4 * PAGE}) CHECK(uunmap(map_file<char>(fd, 3 * PAGE), length) == 0);
  umap_prefetch(0, nullptr);
  errno = 0;
  umap_fetch_and_pin(bytes, PAGE);
  CHECK(errno == EINVAL);
}

CASE(region_that_is_read_only_leaves_its_file_alone) {
  int fd = new_file("pages", 4 * PAGE);
  close(fd);
  fd = open(path("pages").c_str(), O_RDONLY);
  void *at = umap(nullptr, 4 * PAGE, PROT_READ, UMAP_PRIVATE, fd, 0);
  CHECK(at != UMAP_FAILED);
  CHECK(static_cast<char *>(at)[3 * PAGE] == 0);
  CHECK(umap_flush() == 0);
  CHECK(uunmap(at, 4 * PAGE) == 0);
}

CASE(write_to_a_read_only_region_is_a_segmentation_fault) {
  int fd = new_file("pages", 256 * PAGE);
  void *at = umap(nullptr, 256 * PAGE, PROT_READ, UMAP_PRIVATE, fd, 0);
  CHECK(at != UMAP_FAILED);
  auto *bytes = static_cast<volatile char *>(at);
  // Pages come and go.
  for (int round = 0; round < 2; ++round) {
    for (std::size_t page = 0; page < 256; ++page) CHECK(bytes[page * PAGE] == 0);
  }
  CHECK(raises(SIGSEGV, [&] { bytes[0] = 1; }));
  CHECK(uunmap(at, 256 * PAGE) == 0);
}

/* Takes free addresses, so that no other thread's memory comes there. */
static bool take(char *at, std::size_t bytes) {
  void *taken = mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  if (taken == at) return true;
  CHECK(taken == MAP_FAILED && errno == EEXIST);
  return false;
}

/* Returns false if another thread's memory came to addresses that were free for a moment. */
static bool region_keeps_its_neighbours(std::size_t page_bytes) {
  constexpr std::size_t PAGES = 300;
  constexpr int RW = PROT_READ | PROT_WRITE;
  std::size_t length = PAGES * page_bytes;
  void *all = mmap(nullptr, length + 3 * page_bytes, RW, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(all != MAP_FAILED);
  auto start = (reinterpret_cast<std::uintptr_t>(all) + page_bytes - 1) / page_bytes * page_bytes;
  char *before = reinterpret_cast<char *>(start), *inside = before + page_bytes, *after = inside + length;
  std::memset(before, 'b', page_bytes);
  std::memset(inside, 'i', page_bytes);
  std::memset(after, 'a', page_bytes);
  auto neighbours_are_intact = [&] {
    for (std::size_t at = 0; at < page_bytes; ++at) {
      if (before[at] != 'b' || after[at] != 'a') return false;
    }
    return true;
  };
  CountingStore store(length), second(length);
  store.page_size_hint = second.page_size_hint = page_bytes;
  auto map = [&](char *at, int flags, CountingStore &with) {
    return static_cast<char *>(Umap::umap_ex(at, length, RW, UMAP_PRIVATE | flags, -1, 0, &with));
  };
  // Maps a region at free addresses that were taken here.
  auto map_there = [&](CountingStore &with) {
    CHECK(munmap(inside, length) == 0);
    char *at = map(inside, 0, with);
    if (at != inside) CHECK(at != UMAP_FAILED && uunmap(at, length) == 0);
    return at == inside;
  };

  CHECK(map(inside, UMAP_FIXED, store) == inside);
  CHECK(neighbours_are_intact());
  // What was there is gone.
  for (std::size_t page = 0; page < PAGES; ++page) {
    CHECK(inside[page * page_bytes] == 0);
    inside[page * page_bytes] = 1;
  }
  CHECK(uunmap(inside, length) == 0);
  CHECK(neighbours_are_intact());
  // Its addresses are free.
  if (!take(inside, length)) return false;
  // An address that is not asked for firmly is a hint.
  char *elsewhere = map(before, 0, store);
  CHECK(elsewhere != UMAP_FAILED && elsewhere != before);
  CHECK(neighbours_are_intact());
  CHECK(elsewhere[0] == 1);
  CHECK(uunmap(elsewhere, length) == 0);
  // Which is taken where nothing is.
  if (!map_there(store)) return false;
  CHECK(neighbours_are_intact());
  CHECK(inside[page_bytes] == 1);
  // Not where another region is, which goes on.
  elsewhere = map(inside, 0, second);
  CHECK(elsewhere != UMAP_FAILED && elsewhere != inside);
  CHECK(inside[2 * page_bytes] == 1 && elsewhere[2 * page_bytes] == 0);
  CHECK(uunmap(elsewhere, length) == 0);
  CHECK(uunmap(inside, length) == 0);
  // A failure gives the addresses back.
  CHECK(umap(inside, length, PROT_READ, UMAP_PRIVATE, -1, 0) == UMAP_FAILED);
  if (!take(inside, length) || !map_there(second)) return false;
  CHECK(uunmap(inside, length) == 0);
  return true;
}

CASE(fixed_region_keeps_its_neighbours) {
  for (std::size_t page_bytes : {PAGE, 16 * PAGE}) {
    int tries = 0;
    while (!region_keeps_its_neighbours(page_bytes)) CHECK(++tries < 10);
  }
}

CASE(fixed_region_replaces_a_part_of_another) {
  constexpr std::size_t PAGES = 96, WORDS = PAGE / 8;
  constexpr int RW = PROT_READ | PROT_WRITE, FIXED = UMAP_PRIVATE | UMAP_FIXED;
  CountingStore old_store(PAGES * PAGE), new_store(PAGES * PAGE);
  auto *words = map_store<std::uint64_t>(&old_store, PAGES * PAGE);
  auto *bytes = reinterpret_cast<char *>(words);
  auto put = [&](std::size_t first, std::size_t end, std::uint64_t seed) {
    for (std::size_t page = first; page < end; ++page) words[page * WORDS + 3] = mix(seed + page);
  };
  auto is = [&](std::size_t first, std::size_t end, std::uint64_t seed) {
    for (std::size_t page = first; page < end; ++page) {
      if (words[page * WORDS + 3] != mix(seed + page)) return false;
    }
    return true;
  };
  put(0, PAGES, 1000);
  umap_fetch_and_pin(bytes + 2 * PAGE, PAGE);
  // What cannot be mapped replaces nothing.
  CHECK(umap(bytes + 32 * PAGE, 8 * PAGE, RW, FIXED, -1, 0) == UMAP_FAILED && errno == EBADF);
  CHECK(is(0, PAGES, 1000));
  // Nor does anything while the old store fails.
  put(0, PAGES, 1500);
  old_store.fails_writes = true;
  CHECK(Umap::umap_ex(bytes + 32 * PAGE, 32 * PAGE, RW, FIXED, -1, 0, &new_store) == UMAP_FAILED && errno == EIO);
  old_store.fails_writes = false;
  CHECK(is(0, PAGES, 1500));
  put(0, PAGES, 2000);

  // In the middle: the old store has what was there, and both sides go on.
  CHECK(Umap::umap_ex(bytes + 32 * PAGE, 32 * PAGE, RW, FIXED, -1, 0, &new_store) == bytes + 32 * PAGE);
  for (std::size_t page = 32; page < 64; ++page) CHECK(words[page * WORDS + 3] == 0);
  CHECK(is(0, 32, 2000) && is(64, PAGES, 2000));
  for (std::size_t page = 32; page < 64; ++page) CHECK(old_store.word(page * WORDS + 3) == mix(2000 + page));
  // Still pinned, on the side where it is left.
  for (int round = 0; round < 3; ++round) put(3, PAGES, 3000);
  int reads = old_store.reads;
  CHECK(words[2 * WORDS + 3] == mix(2002));
  CHECK(old_store.reads == reads);
  put(0, PAGES, 3000);
  CHECK(is(0, PAGES, 3000));
  CHECK(umap_flush() == 0);
  for (std::size_t page = 0; page < PAGES; ++page) {
    bool is_new = 32 <= page && page < 64;
    CHECK(old_store.word(page * WORDS + 3) == mix((is_new ? 2000 : 3000) + page));
    CHECK(new_store.word(page * WORDS + 3) == (page < 32 ? mix(3000 + page + 32) : 0));
  }
  // Each begins where it begins.
  put(0, PAGES, 4000);
  CHECK(uunmap(bytes + 32 * PAGE, 32 * PAGE) == 0);
  CHECK(raises(SIGSEGV, [&] { bytes[40 * PAGE] = 1; }));
  CHECK(is(0, 32, 4000) && is(64, PAGES, 4000));
  CHECK(uunmap(bytes + 64 * PAGE, 32 * PAGE) == 0);
  CHECK(is(0, 32, 4000));
  CHECK(uunmap(bytes, 32 * PAGE) == 0);
  for (std::size_t page = 0; page < PAGES; ++page) {
    CHECK(old_store.word(page * WORDS + 3) == mix((32 <= page && page < 64 ? 2000 : 4000) + page));
  }
  CHECK(new_store.word(3) == mix(4032));

  // A region that is unmapped as it was mapped goes on both sides, and what replaced a part stays.
  // At addresses of its own: a thread's stack may have come to the old ones.
  words = map_store<std::uint64_t>(&old_store, PAGES * PAGE);
  bytes = reinterpret_cast<char *>(words);
  put(0, PAGES, 5000);
  CHECK(Umap::umap_ex(bytes + 90 * PAGE, 2 * PAGE, RW, FIXED, -1, 0, &new_store) == bytes + 90 * PAGE);
  CHECK(uunmap(bytes, PAGES * PAGE) == 0);
  CHECK(uunmap(bytes + 92 * PAGE, 0) == -1 && errno == EINVAL);
  CHECK(words[90 * WORDS + 3] == mix(4032));
  CHECK(uunmap(bytes + 90 * PAGE, 2 * PAGE) == 0);
  for (std::size_t page = 0; page < PAGES; ++page) CHECK(old_store.word(page * WORDS + 3) == mix(5000 + page));

  // Pages of the old region stay whole.
  CountingStore big(4 * 16 * PAGE);
  big.page_size_hint = 16 * PAGE;
  auto *wide = map_store<char>(&big, 4 * 16 * PAGE);
  wide[0] = 7;
  CHECK(Umap::umap_ex(wide + PAGE, PAGE, RW, FIXED, -1, 0, &new_store) == UMAP_FAILED && errno == EINVAL);
  CHECK(wide[0] == 7);
  CHECK(uunmap(wide, 4 * 16 * PAGE) == 0);
}

CASE(fixed_regions_of_several_files_replace_one_from_its_beginning) {
  constexpr std::size_t FILES = 4, PAGES = 48, WORDS = PAGE / 8;
  int whole = new_file("whole", FILES * PAGES * PAGE);
  auto *words = map_file<std::uint64_t>(whole, FILES * PAGES * PAGE);
  for (std::size_t page = 0; page < FILES * PAGES; ++page) words[page * WORDS] = mix(page);
  std::vector<int> files;
  for (std::size_t i = 0; i < FILES; ++i) {
    files.push_back(new_file(std::to_string(i), PAGES * PAGE));
    auto *at = words + i * PAGES * WORDS;
    CHECK(umap(at, PAGES * PAGE, PROT_READ | PROT_WRITE, UMAP_PRIVATE | UMAP_FIXED, files[i], 0) == at);
    // The others' pages are as they were.
    for (std::size_t page = 0; page < FILES * PAGES; ++page) CHECK(words[page * WORDS] == (page < (i + 1) * PAGES ? 0 : mix(page)));
  }
  for (std::size_t page = 0; page < FILES * PAGES; ++page) {
    CHECK(word_in_file(whole, page * WORDS) == mix(page));
    words[page * WORDS] = mix(page + 1);
  }
  for (std::size_t i = 0; i < FILES; ++i) {
    CHECK(uunmap(words + i * PAGES * WORDS, PAGES * PAGE) == 0);
    for (std::size_t page = 0; page < PAGES; ++page) CHECK(word_in_file(files[i], page * WORDS) == mix(i * PAGES + page + 1));
  }
  CHECK(uunmap(words, 0) == -1 && errno == EINVAL);
}

CASE(files_opened_for_appending_and_for_direct_access) {
  constexpr std::size_t BYTES = 40 * PAGE + 100;
  for (int flag : {O_APPEND, O_DIRECT}) {
    close(new_file(std::to_string(flag), BYTES));
    int fd = open(path(std::to_string(flag)).c_str(), O_RDWR | flag);
    // Not all file systems have O_DIRECT.
    if (fd < 0 && errno == EINVAL) continue;
    auto *bytes = map_file<char>(fd, BYTES);
    for (std::size_t at = 0; at < BYTES; at += 50) bytes[at] = static_cast<char>(mix(at));
    CHECK(uunmap(bytes, BYTES) == 0);
    CHECK(file_bytes(fd) == BYTES);
    int plain = open(path(std::to_string(flag)).c_str(), O_RDONLY);
    std::vector<char> back(BYTES);
    CHECK(pread(plain, back.data(), BYTES, 0) == static_cast<ssize_t>(BYTES));
    for (std::size_t at = 0; at < BYTES; at += 50) CHECK(back[at] == static_cast<char>(mix(at)));
  }
}

CASE(ten_thousand_regions) {
  constexpr std::size_t REGIONS = 10'000, LENGTH = 2 * PAGE;
  int fd = new_file("pages", REGIONS * LENGTH);
  std::vector<std::uint64_t *> regions;
  for (std::size_t i = 0; i < REGIONS; ++i) {
    regions.push_back(map_file<std::uint64_t>(fd, LENGTH, static_cast<off_t>(i * LENGTH)));
    regions[i][PAGE / 8] = mix(i);
  }
  for (std::size_t i = 0; i < REGIONS; ++i) CHECK(regions[i][0] == 0 && regions[i][PAGE / 8] == mix(i));
  for (std::size_t i = 0; i < REGIONS; ++i) CHECK(uunmap(regions[i], LENGTH) == 0);
  for (std::size_t i = 0; i < REGIONS; ++i) CHECK(word_in_file(fd, (i * LENGTH + PAGE) / 8) == mix(i));
}

CASE(thousands_of_cycles_without_growth) {
  constexpr std::size_t PAGES = 32;
  int fd = new_file("pages", PAGES * PAGE);
  auto cycle = [&](std::uint64_t round) {
    auto *words = map_file<std::uint64_t>(fd, PAGES * PAGE);
    for (std::size_t page = 0; page < PAGES; page += 8) words[page * PAGE / 8] = round;
    CHECK(uunmap(words, PAGES * PAGE) == 0);
  };
  std::uint64_t round = 1;
  while (round < 200) cycle(round++);
  std::size_t memory = status_kib("VmRSS"), addresses = status_kib("VmSize"), maps = mappings(), fds = descriptors();
  while (round < 3000) cycle(round++);
  // What comes and goes with a store's threads may differ; what each cycle left behind would be far
  // more.
  CHECK(status_kib("VmRSS") < memory + 1024);
  CHECK(status_kib("VmSize") < addresses + 200 * 1024);
  CHECK(mappings() < maps + 100);
  CHECK(descriptors() < fds + 10);
}

CASE(page_size_of_a_region_is_its_stores) {
  constexpr std::size_t BIG = 65536;
  CountingStore store(4 * BIG);
  store.page_size_hint = BIG;
  auto *bytes = map_store<char>(&store, 4 * BIG);
  CHECK(reinterpret_cast<std::uintptr_t>(bytes) % BIG == 0);
  bytes[0] = 1;
  bytes[BIG - 1] = 2;
  CHECK(store.reads == 1);
  CHECK(uunmap(bytes, 4 * BIG) == 0);
  store.page_size_hint = 5000;
  CHECK(Umap::umap_ex(nullptr, 4 * BIG, PROT_READ | PROT_WRITE, UMAP_PRIVATE, -1, 0, &store) == UMAP_FAILED && errno == EINVAL);
}

/* The caller sets the environment. */
CASE(environment_is_told_back) {
  auto expected = [](const char *name) { return std::strtoull(std::getenv(name), nullptr, 10); };
  CHECK(umapcfg_get_umap_page_size() == expected("EXPECT_PAGESIZE"));
  CHECK(umapcfg_get_max_pages_in_buffer() == expected("EXPECT_BUFSIZE"));
  CHECK(umapcfg_get_num_fillers() == expected("EXPECT_FILLERS"));
  CHECK(umapcfg_get_num_evictors() == expected("EXPECT_EVICTORS"));
  CHECK(umapcfg_get_max_fault_events() == expected("EXPECT_EVENTS"));
  CHECK(umapcfg_get_read_ahead() == expected("EXPECT_AHEAD"));
  CHECK(umapcfg_get_evict_high_water_threshold() == static_cast<int>(expected("EXPECT_HIGH")));
  CHECK(umapcfg_get_evict_low_water_threshold() == static_cast<int>(expected("EXPECT_LOW")));
  CHECK(umap_has_write_support() == 1);
  // And a runtime can be made of it.
  int fd = new_file("pages", 1 << 22);
  auto *bytes = map_file<char>(fd, 1 << 22);
  CHECK(bytes[12345] == 0);
  CHECK(uunmap(bytes, 1 << 22) == 0);
}

/* One message of each level; the caller looks for them. */
CASE(messages_up_to_the_level_asked_for) {
  int fd = new_file("pages", 4 * PAGE);
  auto *bytes = map_file<char>(fd, 4 * PAGE);
  CHECK(uunmap(bytes + PAGE, PAGE) == -1 && errno == EINVAL);
  CHECK(uunmap(bytes, 4 * PAGE) == 0);
}
