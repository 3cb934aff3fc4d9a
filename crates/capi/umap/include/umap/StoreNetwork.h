/* Arrays whose pages are kept by a farpage memory server.
 *
 *   Umap::NetworkClient client("tcp://10.0.0.2:7400");
 *   Umap::StoreNetwork store("a", length, &client, Umap::COMPRESS_LZ4);
 *   double *a = (double *)Umap::umap_ex(NULL, length, PROT_READ | PROT_WRITE, UMAP_PRIVATE, -1, 0,
 *                                       &store);
 */
#ifndef FARPAGE_UMAP_STORE_NETWORK_H
#define FARPAGE_UMAP_STORE_NETWORK_H

#include <cstddef>
#include <memory>
#include <string>

#include "umap/store/Store.hpp"
#include "umap/umap.h"

namespace Umap {

/* How pages are encoded on their way to the server. */
enum CompressionMode : int {
  /* As they are. */
  COMPRESS_NONE = 0,
  /* Without loss, where that makes them smaller. */
  COMPRESS_LZ4 = 1,
};

/* Connections to memory servers, with a page buffer of UMAP_BUFSIZE pages that all its stores
 * share. */
class NetworkClient {
 public:
  /* `servers`: `tcp://host:7400` or `shm:///run/farpage.sock`, several separated by commas; a name
   * without `://` is a host's. Throws std::runtime_error. */
  explicit NetworkClient(const std::string &servers);

  /* Stores that still live go on working. */
  ~NetworkClient();

  class Connection;

 private:
  friend class StoreNetwork;
  std::shared_ptr<Connection> connection;
};

/* `length` zeroed bytes on the servers. They live as long as this object, or the region that is
 * mapped with it if that lives longer; several clients may use the same name, which is for
 * messages. The region can be unmapped and mapped again, at the address that it had. It can be
 * written whatever its protection says. */
class StoreNetwork : public Store {
 public:
  /* Throws std::invalid_argument. */
  StoreNetwork(const std::string &name, std::size_t length, NetworkClient *client, int compression_mode = COMPRESS_NONE);
  ~StoreNetwork() override;

  ssize_t read_from_store(char *buf, std::size_t nb, off_t off) override;
  ssize_t write_to_store(char *buf, std::size_t nb, off_t off) override;

  class Array;

 private:
  std::shared_ptr<Array> array;
};

}  // namespace Umap

#endif /* FARPAGE_UMAP_STORE_NETWORK_H */
