/* StoreNetwork: an array that a farpage runtime pages to its servers, made at its first use. */
#include "umap/StoreNetwork.h"

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>

#include "config.hpp"
#include "network.hpp"

namespace Umap {
namespace {

constexpr const char *DEFAULT_PORT = ":7400";

/* `host` becomes `tcp://host:7400`, and `host:port` `tcp://host:port`. */
std::string endpoints(const std::string &servers) {
  std::istringstream list(servers);
  std::string server, all;
  while (std::getline(list, server, ',')) {
    if (server.find("://") == std::string::npos) {
      server = "tcp://" + server + (server.find(':') == std::string::npos ? DEFAULT_PORT : "");
    }
    all += (all.empty() ? "" : ",") + server;
  }
  return all;
}

}  // namespace

class NetworkClient::Connection {
 public:
  explicit Connection(farpage_runtime *runtime) : runtime(runtime) {}
  ~Connection() { farpage_runtime_free(runtime); }
  farpage_runtime *const runtime;
};

NetworkClient::NetworkClient(const std::string &servers) {
  if (servers.empty()) throw std::runtime_error("a NetworkClient without a server");
  farpage_code code = FARPAGE_OK;
  farpage_runtime *runtime = shim::new_runtime(endpoints(servers), &code);
  if (runtime == nullptr) throw std::runtime_error(farpage_error_message());
  connection = std::make_shared<Connection>(runtime);
}

NetworkClient::~NetworkClient() = default;

class StoreNetwork::Array {
 public:
  Array(std::shared_ptr<NetworkClient::Connection> connection, std::string name, std::size_t length, int mode)
      : connection(std::move(connection)), name(std::move(name)), length(length), mode(mode) {}

  ~Array() {
    if (it != nullptr) farpage_region_discard(it);
  }

  /* Null with an errno if it cannot be made. */
  farpage_region *region(std::size_t page_bytes, void *address, int *number) {
    std::lock_guard<std::mutex> guard(lock);
    if (it == nullptr) {
      farpage_region_options options{};
      options.struct_bytes = sizeof options;
      options.page_bytes = page_bytes;
      options.address = address;
      options.codec = mode == COMPRESS_LZ4 ? "lz4" : "raw";
      farpage_code code = farpage_region_map(connection->runtime, length, &options, &it);
      if (code != FARPAGE_OK) {
        shim::log_failure("network store " + name);
        *number = shim::errno_of(code);
      }
    }
    return it;
  }

  std::shared_ptr<NetworkClient::Connection> connection;
  const std::string name;
  const std::size_t length;
  const int mode;
  std::mutex lock;
  bool is_mapped = false;

 private:
  farpage_region *it = nullptr;
};

namespace {

/* Which stores are network stores, and their arrays. */
struct Known {
  std::mutex lock;
  std::map<const Store *, std::shared_ptr<StoreNetwork::Array>> arrays;
};

Known &known() {
  // Never destroyed: a program's own statics may be stores.
  static Known *const it = new Known;
  return *it;
}

std::shared_ptr<StoreNetwork::Array> array_of(const Store *store) {
  std::lock_guard<std::mutex> guard(known().lock);
  auto at = known().arrays.find(store);
  return at == known().arrays.end() ? nullptr : at->second;
}

/* While it is mapped. Its contents stay when it is unmapped; its pages go back to the servers. */
class MappedArray : public shim::Backing {
 public:
  MappedArray(std::shared_ptr<StoreNetwork::Array> array, farpage_region *it, std::size_t bytes)
      : array(std::move(array)), it(it), bytes(bytes) {}

  farpage_region *region() override { return it; }

  farpage_code close() override {
    farpage_code code = farpage_region_advise(it, 0, bytes, FARPAGE_ADVICE_DONT_NEED);
    if (code == FARPAGE_OK) {
      std::lock_guard<std::mutex> guard(array->lock);
      array->is_mapped = false;
    }
    return code;
  }

 private:
  std::shared_ptr<StoreNetwork::Array> array;
  farpage_region *it;
  std::size_t bytes;
};

/* Copies between a buffer and the array. */
template <typename Copy>
ssize_t transfer(StoreNetwork::Array &array, std::size_t page_bytes, std::size_t nb, off_t off, Copy copy) {
  if (off < 0 || static_cast<std::size_t>(off) > array.length) {
    errno = EINVAL;
    return -1;
  }
  std::size_t inside = std::min(nb, array.length - static_cast<std::size_t>(off));
  int number = 0;
  farpage_region *region = array.region(page_bytes, nullptr, &number);
  // Brought in first: a dead server is an error here and not SIGBUS.
  if (region != nullptr && farpage_region_prefetch(region, static_cast<std::uint64_t>(off), inside) != FARPAGE_OK) {
    shim::log_failure("network store " + array.name);
    number = EIO;
  }
  if (number != 0) {
    errno = number;
    return -1;
  }
  copy(static_cast<char *>(farpage_region_address(region)) + off, inside);
  return static_cast<ssize_t>(inside);
}

std::size_t page_bytes_of(const Store *store) { return store->page_size_hint != 0 ? store->page_size_hint : shim::config().page_bytes; }

}  // namespace

StoreNetwork::StoreNetwork(const std::string &name, std::size_t length, NetworkClient *client, int compression_mode) {
  if (client == nullptr || length == 0) throw std::invalid_argument("a StoreNetwork needs a client and a length");
  if (compression_mode != COMPRESS_NONE && compression_mode != COMPRESS_LZ4) {
    throw std::invalid_argument("a compression mode of " + std::to_string(compression_mode) + ": need one of Umap::CompressionMode");
  }
  array = std::make_shared<Array>(client->connection, name, length, compression_mode);
  std::lock_guard<std::mutex> guard(known().lock);
  known().arrays[this] = array;
}

StoreNetwork::~StoreNetwork() {
  std::lock_guard<std::mutex> guard(known().lock);
  known().arrays.erase(this);
}

ssize_t StoreNetwork::read_from_store(char *buf, std::size_t nb, off_t off) {
  return transfer(*array, page_bytes_of(this), nb, off, [&](char *bytes, std::size_t n) { std::memcpy(buf, bytes, n); });
}

ssize_t StoreNetwork::write_to_store(char *buf, std::size_t nb, off_t off) {
  return transfer(*array, page_bytes_of(this), nb, off, [&](char *bytes, std::size_t n) { std::memcpy(bytes, buf, n); });
}

bool shim::is_network_store(const Store *store) { return array_of(store) != nullptr; }

std::unique_ptr<shim::Backing> shim::open_array(Store *store, std::size_t length, void *address, bool fixed, int *number) {
  auto array = array_of(store);
  if (length > array->length) {
    log(FARPAGE_LOG_ERROR, "network store " + array->name + " has " + std::to_string(array->length) + " bytes, not " + std::to_string(length));
    *number = EINVAL;
    return nullptr;
  }
  farpage_region *region = array->region(page_bytes_of(store), address, number);
  if (region == nullptr) return nullptr;
  if (fixed && farpage_region_address(region) != address) {
    log(FARPAGE_LOG_ERROR, "network store " + array->name + " has its contents at another address: map it there with UMAP_FIXED the first time");
    *number = EINVAL;
    return nullptr;
  }
  std::lock_guard<std::mutex> guard(array->lock);
  if (array->is_mapped) {
    log(FARPAGE_LOG_ERROR, "network store " + array->name + " is mapped already");
    *number = EBUSY;
    return nullptr;
  }
  array->is_mapped = true;
  return std::make_unique<MappedArray>(array, region, length);
}

}  // namespace Umap
