/* Calls to a program's store.
 *
 * The rule it keeps: a store touches no memory of farpage's. What it reads goes through a buffer of
 * the calling thread that ends at a guard page, so that one that writes beyond the bytes asked for
 * ends the program with a message that names it, before anything else is overwritten. */
#include "store_calls.hpp"

#include <cxxabi.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <string>
#include <typeinfo>

#include "config.hpp"

namespace Umap::shim {
namespace {

constexpr std::size_t KERNEL_PAGE_BYTES = 4096;

/* A call of this thread, for the handler. Plain, so that it is there without being made. */
struct Reading {
  const char *store;
  std::size_t bytes;
  std::uint64_t offset;
  std::uintptr_t guard;
  std::size_t guard_bytes;
};

thread_local Reading reading;

/* Memory of this thread with a guard behind it. */
class Bounce {
 public:
  ~Bounce() { give_up(); }

  /* So many bytes up to the guard; null if there is no memory. */
  char *up_to_guard(std::size_t asked) {
    if (asked > bytes) {
      give_up();
      std::size_t needed = (asked + KERNEL_PAGE_BYTES - 1) / KERNEL_PAGE_BYTES * KERNEL_PAGE_BYTES;
      // As much guard as buffer: what runs over does not do so by more.
      void *at = mmap(nullptr, 2 * needed, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (at == MAP_FAILED) return nullptr;
      start = static_cast<char *>(at);
      bytes = needed;
      if (mprotect(start, bytes, PROT_READ | PROT_WRITE) != 0) {
        give_up();
        return nullptr;
      }
    }
    reading.guard = reinterpret_cast<std::uintptr_t>(start) + bytes;
    reading.guard_bytes = bytes;
    return start + (bytes - asked);
  }

 private:
  char *start = nullptr;
  std::size_t bytes = 0;

  void give_up() {
    if (start != nullptr) munmap(start, 2 * bytes);
    start = nullptr;
    bytes = 0;
  }
};

/* Text out of a signal handler. */
struct Line {
  char text[512];
  std::size_t length = 0;

  Line &operator<<(const char *words) {
    while (*words != '\0' && length < sizeof text) text[length++] = *words++;
    return *this;
  }

  Line &operator<<(std::uint64_t number) {
    char digits[21];
    char *at = digits + sizeof digits;
    *--at = '\0';
    do {
      *--at = static_cast<char>('0' + number % 10);
      number /= 10;
    } while (number != 0);
    return *this << at;
  }
};

struct sigaction previous;

/* A thread has touched what it may not: says so if it is the guard behind a buffer, and leaves
 * everything else to whoever was there before. */
void on_segmentation_fault(int number, siginfo_t *info, void *context) {
  auto at = reinterpret_cast<std::uintptr_t>(info->si_addr);
  if (reading.store != nullptr && at - reading.guard < reading.guard_bytes) {
    Line line;
    line << "umap ERROR: read_from_store of the store " << reading.store << " goes beyond the " << reading.bytes << " bytes that it was asked for at offset "
         << reading.offset << ": it would overwrite other memory, so the program ends here\n";
    ssize_t written = write(STDERR_FILENO, line.text, line.length);
    (void)written;
    // The same access once more, as if there were no handler: the signal, and a core where it
    // happened.
    struct sigaction none {};
    none.sa_handler = SIG_DFL;
    sigaction(SIGSEGV, &none, nullptr);
  } else if ((previous.sa_flags & SA_SIGINFO) != 0) {
    previous.sa_sigaction(number, info, context);
  } else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
    previous.sa_handler(number);
  } else {
    sigaction(SIGSEGV, &previous, nullptr);
  }
}

void watch_guards() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction ours {};
    ours.sa_sigaction = on_segmentation_fault;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &ours, &previous);
  });
}

/* The store's type as its program calls it. */
std::string type_of(const Umap::Store *store) {
  // As typeid finds it, but programs that are compiled without type information have a null there.
  auto table = *reinterpret_cast<const std::type_info *const *const *>(store);
  const std::type_info *type = table[-1];
  if (type == nullptr) return "Umap::Store";
  int status = 0;
  char *name = abi::__cxa_demangle(type->name(), nullptr, nullptr, &status);
  std::string text = status == 0 ? name : type->name();
  std::free(name);
  return text;
}

class StoreCalls {
 public:
  StoreCalls(Umap::Store *store, std::size_t page_bytes) : store(store), page_bytes(page_bytes), name(type_of(store)) {}

  const char *store_name() const { return name.c_str(); }

  int read(char *buffer, std::size_t bytes, std::uint64_t offset) noexcept {
    return for_each_page(buffer, bytes, offset, &StoreCalls::read_page);
  }

  int write(char *buffer, std::size_t bytes, std::uint64_t offset) noexcept {
    return for_each_page(buffer, bytes, offset, &StoreCalls::write_page);
  }

 private:
  Umap::Store *store;
  std::size_t page_bytes;
  std::string name;

  int for_each_page(char *buffer, std::size_t bytes, std::uint64_t offset, int (StoreCalls::*page)(char *, std::size_t, off_t) noexcept) noexcept {
    for (std::size_t at = 0; at < bytes; at += page_bytes) {
      int code = (this->*page)(buffer + at, std::min(page_bytes, bytes - at), static_cast<off_t>(offset + at));
      if (code != 0) return code;
    }
    return 0;
  }

  int read_page(char *buffer, std::size_t bytes, off_t offset) noexcept {
    static thread_local Bounce bounce;
    char *into = bounce.up_to_guard(bytes);
    if (into == nullptr) return ENOMEM;
    // What the store leaves out must not be another page's bytes.
    std::memset(into, 0, bytes);
    reading.bytes = bytes;
    reading.offset = static_cast<std::uint64_t>(offset);
    reading.store = name.c_str();
    ssize_t got;
    int code = call("read_from_store", [&] { return store->read_from_store(into, bytes, offset); }, &got);
    reading.store = nullptr;
    if (code != 0) return code;
    if (got > 0 && static_cast<std::size_t>(got) < bytes) std::memset(into + got, 0, bytes - static_cast<std::size_t>(got));
    std::memcpy(buffer, into, bytes);
    return 0;
  }

  int write_page(char *buffer, std::size_t bytes, off_t offset) noexcept {
    ssize_t put;
    int code = call("write_to_store", [&] { return store->write_to_store(buffer, bytes, offset); }, &put);
    if (code != 0 || put <= 0 || static_cast<std::size_t>(put) >= bytes) return code;
    log(FARPAGE_LOG_ERROR, "write_to_store wrote " + std::to_string(put) + " of " + std::to_string(bytes) + " bytes at " + std::to_string(offset));
    return EIO;
  }

  template <typename Call>
  static int call(const char *what, Call call, ssize_t *result) noexcept {
    *result = 0;
    errno = 0;
    try {
      *result = call();
    } catch (const std::exception &error) {
      log(FARPAGE_LOG_ERROR, std::string(what) + " threw: " + error.what());
      return EIO;
    } catch (...) {
      log(FARPAGE_LOG_ERROR, std::string(what) + " threw something");
      return EIO;
    }
    if (*result >= 0) return 0;
    return errno != 0 ? errno : EIO;
  }
};

}  // namespace

farpage_store store_calls(Umap::Store *store, std::size_t page_bytes) {
  watch_guards();
  auto calls = new StoreCalls(store, page_bytes);
  farpage_store t{};
  t.struct_bytes = sizeof t;
  t.context = calls;
  t.read = [](void *context, std::uint64_t offset, void *buffer, std::size_t bytes) {
    return static_cast<StoreCalls *>(context)->read(static_cast<char *>(buffer), bytes, offset);
  };
  t.write = [](void *context, std::uint64_t offset, const void *buffer, std::size_t bytes) {
    // Umap's interface has no const, and stores do not write there.
    return static_cast<StoreCalls *>(context)->write(static_cast<char *>(const_cast<void *>(buffer)), bytes, offset);
  };
  t.release = [](void *context) { delete static_cast<StoreCalls *>(context); };
  t.name = calls->store_name();
  return t;
}

}  // namespace Umap::shim
