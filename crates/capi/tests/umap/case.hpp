/* What these programs share: named cases, one of which a process runs, checks, files, and stores
 * that count.
 *
 * The rule it keeps: a case that returns has passed; a check that fails says where and ends the
 * process. The caller sees to it that nothing runs for ever. */
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "umap/umap.h"

inline std::map<std::string, void (*)()> &cases() {
  static std::map<std::string, void (*)()> all;
  return all;
}

#define CASE(name)                                                         \
  static void name();                                                      \
  [[maybe_unused]] static const bool name##_known = (cases()[#name] = name); \
  static void name()

#define CHECK(what)                                                                                \
  do {                                                                                             \
    if (!(what)) {                                                                                 \
      std::fprintf(stderr, "%s:%d: %s (errno %s)\n", __FILE__, __LINE__, #what, std::strerror(errno)); \
      std::_Exit(1);                                                                               \
    }                                                                                              \
  } while (0)

constexpr std::size_t PAGE = 4096;

/* A value that depends on all bits of `x`; SplitMix64's. */
inline std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

/* A path in the folder of this case, which the caller has emptied. */
inline std::string path(const std::string &name) { return std::string(std::getenv("CASE_FOLDER")) + "/" + name; }

inline int new_file(const std::string &name, std::size_t bytes) {
  int fd = open(path(name).c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
  CHECK(fd >= 0);
  CHECK(ftruncate(fd, static_cast<off_t>(bytes)) == 0);
  return fd;
}

inline std::size_t file_bytes(int fd) {
  struct stat about;
  CHECK(fstat(fd, &about) == 0);
  return static_cast<std::size_t>(about.st_size);
}

template <typename T>
T *map_file(int fd, std::size_t bytes, off_t offset = 0) {
  void *at = umap(nullptr, bytes, PROT_READ | PROT_WRITE, UMAP_PRIVATE, fd, offset);
  CHECK(at != UMAP_FAILED);
  return static_cast<T *>(at);
}

template <typename T>
T *map_store(Umap::Store *store, std::size_t bytes) {
  void *at = Umap::umap_ex(nullptr, bytes, PROT_READ | PROT_WRITE, UMAP_PRIVATE, -1, 0, store);
  CHECK(at != UMAP_FAILED);
  return static_cast<T *>(at);
}

inline std::uint64_t word_in_file(int fd, std::size_t index) {
  std::uint64_t word = 0;
  CHECK(pread(fd, &word, sizeof word, static_cast<off_t>(index * sizeof word)) == sizeof word);
  return word;
}

/* Bytes in this process's memory, with counts of what was asked, and a look at each call first. */
class CountingStore : public Umap::Store {
 public:
  explicit CountingStore(std::size_t bytes) : bytes(bytes) {}

  ssize_t read_from_store(char *buf, std::size_t nb, off_t off) override {
    reads++;
    std::lock_guard<std::mutex> guard(lock);
    if (fails_reads) return fail();
    std::memcpy(buf, &bytes.at(static_cast<std::size_t>(off)), nb);
    return static_cast<ssize_t>(nb);
  }

  ssize_t write_to_store(char *buf, std::size_t nb, off_t off) override {
    writes++;
    std::lock_guard<std::mutex> guard(lock);
    if (fails_writes) return fail();
    std::memcpy(&bytes.at(static_cast<std::size_t>(off)), buf, nb);
    return static_cast<ssize_t>(nb);
  }

  std::uint64_t word(std::size_t index) {
    std::lock_guard<std::mutex> guard(lock);
    std::uint64_t word;
    std::memcpy(&word, &bytes.at(index * sizeof word), sizeof word);
    return word;
  }

  std::atomic<int> reads{0}, writes{0};
  std::atomic<bool> fails_reads{false}, fails_writes{false};

 private:
  std::mutex lock;
  std::vector<char> bytes;

  static ssize_t fail() {
    errno = EIO;
    return -1;
  }
};

/* A figure of /proc/self/status in KiB, or a count of lines or entries. */
std::size_t status_kib(const char *name);
std::size_t mappings();
std::size_t descriptors();

/* Runs `body` in a child; returns its wait status. */
int in_child(const std::function<void()> &body);

/* Whether touching a byte raises the signal; another signal ends the process. */
bool raises(int signal, const std::function<void()> &touch);
