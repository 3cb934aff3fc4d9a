#include "config.hpp"

#include <strings.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>

namespace Umap::shim {
namespace {

constexpr std::uint64_t PAGE_BYTES_MIN = 4096, PAGE_BYTES_MAX = 2097152, WORKERS_MAX = 64;
/* One instruction may touch two pages. */
constexpr std::uint64_t BUFFER_PAGES_MIN = 2;

void print(const char *level, const std::string &text) {
  // One call, so that lines of several threads do not mix.
  std::fprintf(stderr, "umap %s: %s\n", level, text.c_str());
}

std::uint32_t read_log_level() {
  const char *text = std::getenv("UMAP_LOG_LEVEL");
  if (text == nullptr) return FARPAGE_LOG_WARNING;
  static const char *const NAMES[] = {"ERROR", "WARNING", "INFO", "DEBUG"};
  for (std::uint32_t i = 0; i < 4; ++i) {
    if (strcasecmp(text, NAMES[i]) == 0) return FARPAGE_LOG_ERROR + i;
  }
  print("WARNING", std::string("UMAP_LOG_LEVEL=") + text + ": need ERROR, WARNING, INFO or DEBUG; WARNING is used");
  return FARPAGE_LOG_WARNING;
}

class Environment {
 public:
  explicit Environment(std::uint32_t log_level) : log_level(log_level) {}

  bool has(const char *name) const { return std::getenv(name) != nullptr; }

  std::uint64_t number(const char *name, std::uint64_t otherwise, std::uint64_t min, std::uint64_t max) const {
    const char *text = std::getenv(name);
    if (text == nullptr) return otherwise;
    char *end = nullptr;
    errno = 0;
    std::uint64_t value = std::strtoull(text, &end, 10);
    if (end == text || *end != '\0' || *text == '-' || errno != 0) {
      warn(std::string(name) + "=" + text + " is no number; " + std::to_string(otherwise) + " is used");
      return otherwise;
    }
    std::uint64_t nearest = std::clamp(value, min, max);
    if (nearest != value) {
      warn(std::string(name) + "=" + text + " is not in " + std::to_string(min) + " to " + std::to_string(max) + "; " +
           std::to_string(nearest) + " is used");
    }
    return nearest;
  }

  void warn(const std::string &text) const {
    if (log_level >= FARPAGE_LOG_WARNING) print("WARNING", text);
  }

 private:
  std::uint32_t log_level;
};

Config read_config() {
  Config c{};
  c.log_level = read_log_level();
  Environment env(c.log_level);

  std::uint64_t asked = env.number("UMAP_PAGESIZE", PAGE_BYTES_MIN, PAGE_BYTES_MIN, PAGE_BYTES_MAX);
  c.page_bytes = PAGE_BYTES_MIN;
  while (c.page_bytes * 2 <= asked) c.page_bytes *= 2;
  if (c.page_bytes != asked) {
    env.warn("UMAP_PAGESIZE=" + std::to_string(asked) + " is no power of two; " + std::to_string(c.page_bytes) + " is used");
  }

  std::uint64_t bytes_max = 0, available_bytes = 0;
  farpage_memory(&bytes_max, &available_bytes);
  std::uint64_t pages_max = std::max(bytes_max / c.page_bytes, BUFFER_PAGES_MIN);
  std::uint64_t most = std::clamp(available_bytes / 10 * 9 / c.page_bytes, BUFFER_PAGES_MIN, pages_max);
  c.buffer_pages = env.number("UMAP_BUFSIZE", most, BUFFER_PAGES_MIN, pages_max);

  std::uint64_t cores = std::clamp<std::uint64_t>(std::thread::hardware_concurrency(), 1, WORKERS_MAX);
  // Each filler needs a page of the buffer.
  std::uint64_t fillers_max = std::min(WORKERS_MAX, c.buffer_pages);
  c.fillers = env.number("UMAP_PAGE_FILLERS", std::min(cores, fillers_max), 1, fillers_max);
  c.evictors = env.number("UMAP_PAGE_EVICTORS", cores, 1, WORKERS_MAX);
  c.max_fault_events = env.number("UMAP_MAX_FAULT_EVENTS", 256, 1, UINT64_MAX);
  c.has_read_ahead = env.has("UMAP_READ_AHEAD");
  c.read_ahead = env.number("UMAP_READ_AHEAD", 0, 0, UINT32_MAX - 1);

  c.high_water = env.number("UMAP_EVICT_HIGH_WATER_THRESHOLD", 95, 2, 100);
  c.low_water = env.number("UMAP_EVICT_LOW_WATER_THRESHOLD", std::min<std::uint64_t>(90, c.high_water - 1), 1, 99);
  if (c.low_water >= c.high_water) {
    env.warn("evictors cannot stop at " + std::to_string(c.low_water) + " % when they start at " + std::to_string(c.high_water) +
             " %; they stop one below");
    c.low_water = c.high_water - 1;
  }
  return c;
}

}  // namespace

const Config &config() {
  // Never destroyed: a program's own statics may unmap regions when it ends.
  static const Config *const it = new Config(read_config());
  return *it;
}

void log(std::uint32_t level, const std::string &text) {
  if (level > config().log_level) return;
  static const char *const NAMES[] = {"", "ERROR", "WARNING", "INFO", "DEBUG"};
  print(NAMES[level], text);
}

void log_failure(const std::string &what) { log(FARPAGE_LOG_ERROR, what + ": " + farpage_error_message()); }

farpage_runtime *new_runtime(const std::string &servers, farpage_code *code) {
  const Config &c = config();
  static std::once_flag logging;
  // Fails if the program asked for messages itself: then they are as it wants them.
  std::call_once(logging, [&] { farpage_log_to_stderr(c.log_level); });

  farpage_runtime_options options{};
  options.struct_bytes = sizeof options;
  options.servers = servers.empty() ? nullptr : servers.c_str();
  options.budget_bytes = c.buffer_pages * c.page_bytes;
  options.page_bytes = c.page_bytes;
  options.fillers = static_cast<std::uint32_t>(c.fillers);
  options.evictors = static_cast<std::uint32_t>(c.evictors);
  options.high_water = static_cast<double>(c.high_water) / 100;
  options.low_water = static_cast<double>(c.low_water) / 100;
  if (c.has_read_ahead) {
    options.read_ahead = c.read_ahead == 0 ? FARPAGE_READ_AHEAD_OFF : static_cast<std::uint32_t>(c.read_ahead);
  }
  farpage_runtime *runtime = nullptr;
  *code = farpage_runtime_new(&options, &runtime);
  if (*code == FARPAGE_DENIED) {
    log(FARPAGE_LOG_WARNING, std::string(farpage_error_message()) +
                                 "; going on without: system calls that are given absent memory fail with EFAULT");
    options.user_mode_only = 1;
    *code = farpage_runtime_new(&options, &runtime);
  }
  return runtime;
}

int errno_of(farpage_code code) {
  switch (code) {
    case FARPAGE_OK: return 0;
    case FARPAGE_INVALID:
    case FARPAGE_FORKED: return EINVAL;
    case FARPAGE_DENIED: return EPERM;
    case FARPAGE_UNREACHABLE: return EHOSTUNREACH;
    case FARPAGE_NO_MEMORY: return ENOMEM;
    case FARPAGE_NOT_FOUND: return ENOENT;
    default: return EIO;
  }
}

}  // namespace Umap::shim
