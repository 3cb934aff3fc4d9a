/* SparseStore. The layout of the directory: `_metadata` holds two numbers in lines of their own,
 * the bytes of a file and the bytes of all, and file N, named so, holds the bytes from N times that
 * size on. */
#include "umap/store/SparseStore.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <mutex>
#include <shared_mutex>
#include <system_error>
#include <vector>

namespace Umap {
namespace {

[[noreturn]] void fail(int number, const std::string &what) { throw std::system_error(number, std::generic_category(), what); }

/* Each takes four bytes of memory while the store is open. */
constexpr std::size_t FILES_MAX = std::size_t{1} << 24;

struct Layout {
  std::size_t file_bytes, capacity;

  std::size_t files() const { return (capacity - 1) / file_bytes + 1; }

  /* Throws if no file, no offset or no memory can be that large. */
  void check(const std::string &root) const {
    constexpr std::size_t MAX = std::numeric_limits<off_t>::max();
    if (file_bytes != 0 && file_bytes <= MAX && capacity != 0 && capacity <= MAX && files() <= FILES_MAX) return;
    fail(EINVAL, "a SparseStore of " + std::to_string(capacity) + " bytes in files of " + std::to_string(file_bytes) + " in " + root +
                     ": need sizes from 1 to " + std::to_string(MAX) + ", and " + std::to_string(FILES_MAX) + " files at most");
  }
};

std::string metadata_path(const std::string &root) { return root + "/_metadata"; }

Layout read_layout(const std::string &root) {
  std::ifstream file(metadata_path(root));
  if (!file.is_open()) fail(errno, "cannot open " + metadata_path(root));
  Layout layout{};
  if (!(file >> layout.file_bytes >> layout.capacity)) fail(EINVAL, metadata_path(root) + " does not hold two sizes");
  layout.check(root);
  return layout;
}

}  // namespace

class SparseStore::Files {
 public:
  Files(std::string root, Layout layout, bool read_only)
      : layout(layout), root(std::move(root)), read_only(read_only), fds(layout.files()) {
    for (auto &fd : fds) fd = NOT_OPEN;
  }

  ~Files() { close_all(); }

  /* Calls `io(fd, position, done, bytes)` for the part of the range in each file; fd is NOT_OPEN
   * where there is no file and none is to be made. */
  template <typename Io>
  ssize_t for_each_file(std::size_t nb, off_t off, bool make, Io io) {
    if (off < 0 || static_cast<std::size_t>(off) > layout.capacity || nb > layout.capacity - static_cast<std::size_t>(off)) {
      errno = ENOSPC;
      return -1;
    }
    std::shared_lock<std::shared_mutex> using_files(use);
    std::size_t done = 0;
    while (done < nb) {
      std::size_t at = static_cast<std::size_t>(off) + done, position = at % layout.file_bytes;
      std::size_t bytes = std::min(nb - done, layout.file_bytes - position);
      int fd = open_file(at / layout.file_bytes, make);
      if (fd < 0 && fd != NOT_OPEN) return -1;
      if (!io(fd, static_cast<off_t>(position), done, bytes)) return -1;
      done += bytes;
    }
    return static_cast<ssize_t>(nb);
  }

  int close_all() {
    std::unique_lock<std::shared_mutex> alone(use);
    int number = 0;
    for (auto &fd : fds) {
      if (fd >= 0 && close(fd) != 0) number = errno;
      fd = NOT_OPEN;
    }
    if (number == 0) return 0;
    errno = number;
    return -1;
  }

  const Layout layout;

 private:
  static constexpr int NOT_OPEN = -2;

  const std::string root;
  const bool read_only;
  /* Shared while files are used, exclusive while they are closed. */
  std::shared_mutex use;
  /* Held while a file is opened, so that each is opened once. */
  std::mutex opening;
  std::vector<std::atomic<int>> fds;

  /* NOT_OPEN if there is no such file, -1 with errno if it cannot be opened. */
  int open_file(std::size_t index, bool make) {
    int fd = fds[index];
    if (fd >= 0) return fd;
    std::lock_guard<std::mutex> guard(opening);
    if (fds[index] >= 0) return fds[index];
    std::string path = root + "/" + std::to_string(index);
    int flags = O_CLOEXEC | (read_only ? O_RDONLY : O_RDWR) | (make ? O_CREAT : 0);
    fd = open(path.c_str(), flags, S_IRUSR | S_IWUSR);
    if (fd < 0) return errno == ENOENT && !make ? NOT_OPEN : -1;
    struct stat about;
    bool is_whole = fstat(fd, &about) == 0 && static_cast<std::size_t>(about.st_size) >= layout.file_bytes;
    if (!is_whole && !read_only && ftruncate(fd, static_cast<off_t>(layout.file_bytes)) != 0) {
      int number = errno;
      close(fd);
      errno = number;
      return -1;
    }
    fds[index] = fd;
    return fd;
  }

  friend class SparseStore;
};

SparseStore::SparseStore(std::size_t rsize, std::size_t aligned_size, std::string root_path, std::size_t file_size) {
  // What no size can say is refused as the largest, and 0 as 0.
  std::size_t file_bytes = 0;
  if (file_size != 0 && aligned_size != 0 && __builtin_mul_overflow((file_size - 1) / aligned_size + 1, aligned_size, &file_bytes)) file_bytes = SIZE_MAX;
  Layout layout{file_bytes, rsize == 0 ? 0 : std::max(file_bytes, rsize)};
  layout.check(root_path);
  if (mkdir(root_path.c_str(), S_IRWXU | S_IRWXG | S_IROTH | S_IXOTH) != 0) fail(errno, "cannot make " + root_path);
  std::ofstream metadata(metadata_path(root_path));
  metadata << layout.file_bytes << '\n' << layout.capacity << '\n';
  metadata.close();
  if (!metadata) fail(EIO, "cannot write " + metadata_path(root_path));
  files = std::make_unique<Files>(std::move(root_path), layout, false);
}

SparseStore::SparseStore(std::string root_path, bool read_only) {
  Layout layout = read_layout(root_path);
  files = std::make_unique<Files>(std::move(root_path), layout, read_only);
}

SparseStore::~SparseStore() = default;

ssize_t SparseStore::read_from_store(char *buf, std::size_t nb, off_t off) {
  return files->for_each_file(nb, off, false, [&](int fd, off_t position, std::size_t done, std::size_t bytes) {
    std::size_t got = 0;
    while (fd >= 0 && got < bytes) {
      ssize_t n = pread(fd, buf + done + got, bytes - got, position + static_cast<off_t>(got));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return false;
      if (n == 0) break;
      got += static_cast<std::size_t>(n);
    }
    std::memset(buf + done + got, 0, bytes - got);
    return true;
  });
}

ssize_t SparseStore::write_to_store(char *buf, std::size_t nb, off_t off) {
  if (files->read_only) {
    errno = EROFS;
    return -1;
  }
  return files->for_each_file(nb, off, true, [&](int fd, off_t position, std::size_t done, std::size_t bytes) {
    std::size_t put = 0;
    while (put < bytes) {
      ssize_t n = pwrite(fd, buf + done + put, bytes - put, position + static_cast<off_t>(put));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return false;
      put += static_cast<std::size_t>(n);
    }
    return true;
  });
}

std::size_t SparseStore::get_current_capacity() { return files->layout.capacity; }

std::size_t SparseStore::get_capacity(std::string base_path) { return read_layout(base_path).capacity; }

int SparseStore::close_files() { return files->close_all(); }

}  // namespace Umap
