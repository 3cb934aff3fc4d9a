/* Store::make_store: a file behind a descriptor as a store, for programs that build on it. */
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "umap/store/Store.hpp"

namespace {

class StoreFile : public Umap::Store {
 public:
  StoreFile(int fd, std::size_t bytes) : fd(fd), bytes(bytes) {}

  ssize_t read_from_store(char *buf, std::size_t nb, off_t off) override {
    std::size_t done = 0, inside = inside_of(nb, off);
    while (done < inside) {
      ssize_t n = pread(fd, buf + done, inside - done, off + static_cast<off_t>(done));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return -1;
      if (n == 0) break;
      done += static_cast<std::size_t>(n);
    }
    // Beyond the end of the file, or of the region.
    std::memset(buf + done, 0, nb - done);
    return static_cast<ssize_t>(nb);
  }

  ssize_t write_to_store(char *buf, std::size_t nb, off_t off) override {
    std::size_t done = 0, inside = inside_of(nb, off);
    while (done < inside) {
      ssize_t n = pwrite(fd, buf + done, inside - done, off + static_cast<off_t>(done));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return -1;
      done += static_cast<std::size_t>(n);
    }
    return static_cast<ssize_t>(nb);
  }

 private:
  int fd;
  std::size_t bytes;

  std::size_t inside_of(std::size_t nb, off_t off) const {
    auto start = static_cast<std::size_t>(off);
    return start < bytes ? std::min(nb, bytes - start) : 0;
  }
};

}  // namespace

Umap::Store *Umap::Store::make_store(void *, std::size_t rsize, std::size_t, int fd) { return new StoreFile(fd, rsize); }
