/* A directory of files of one size that stands for one large store. A file is made when something
 * is first written to its part; what has no file reads as zeros. The directory keeps its layout in
 * `_metadata`, so that it can be opened again. */
#ifndef FARPAGE_UMAP_SPARSE_STORE_H
#define FARPAGE_UMAP_SPARSE_STORE_H

#include <cstddef>
#include <memory>
#include <string>

#include "umap/store/Store.hpp"

namespace Umap {

class SparseStore : public Store {
 public:
  /* Makes the directory `root_path`, which must not exist, for `rsize` bytes in files of
   * `file_size`, rounded up to a multiple of `aligned_size`. Throws std::system_error. */
  SparseStore(std::size_t rsize, std::size_t aligned_size, std::string root_path, std::size_t file_size);

  /* Opens the directory again. Throws std::system_error. */
  SparseStore(std::string root_path, bool read_only);

  /* Closes the files. */
  ~SparseStore() override;

  ssize_t read_from_store(char *buf, std::size_t nb, off_t off) override;
  ssize_t write_to_store(char *buf, std::size_t nb, off_t off) override;

  /* Bytes that the store can hold. */
  std::size_t get_current_capacity();

  /* The same of a directory that nobody has opened. Throws std::system_error. */
  static std::size_t get_capacity(std::string base_path);

  /* Closes all files; they are opened again when needed. Returns 0, or -1 with errno if what was
   * written may not have reached a file. */
  int close_files();

 private:
  class Files;
  std::unique_ptr<Files> files;
};

}  // namespace Umap

#endif /* FARPAGE_UMAP_SPARSE_STORE_H */
