/* The stores that come with the library. */
#include <dirent.h>

#include <fstream>
#include <memory>
#include <system_error>
#include <tuple>

#include "case.hpp"
#include "umap/StoreNetwork.h"
#include "umap/store/SparseStore.h"

static std::size_t files_in(const std::string &folder) {
  DIR *dir = opendir(folder.c_str());
  CHECK(dir != nullptr);
  std::size_t count = 0;
  while (dirent *entry = readdir(dir)) count += entry->d_name[0] != '.' && entry->d_name[0] != '_';
  closedir(dir);
  return count;
}

CASE(file_store_made_by_hand) {
  int fd = new_file("pages", 3 * PAGE + 8);
  std::unique_ptr<Umap::Store> store(Umap::Store::make_store(nullptr, 3 * PAGE + 8, PAGE, fd));
  auto *words = map_store<std::uint64_t>(store.get(), 3 * PAGE + 8);
  words[3 * PAGE / 8] = 7;
  CHECK(uunmap(words, 3 * PAGE + 8) == 0);
  CHECK(word_in_file(fd, 3 * PAGE / 8) == 7);
  CHECK(file_bytes(fd) == 3 * PAGE + 8);
}

CASE(sparse_store_makes_files_on_demand_and_is_opened_again) {
  constexpr std::size_t FILE_BYTES = 16 * PAGE, FILES = 64, BYTES = FILES * FILE_BYTES;
  std::string root = path("sparse");
  {
    Umap::SparseStore store(BYTES, PAGE, root, FILE_BYTES - 1);
    CHECK(store.get_current_capacity() == BYTES);
    auto *words = map_store<std::uint64_t>(&store, BYTES);
    CHECK(words[5 * FILE_BYTES / 8] == 0);
    CHECK(files_in(root) == 0);
    for (std::size_t file : {0, 7, 63}) {
      for (std::size_t at = 0; at < FILE_BYTES / 8; at += 100) words[file * FILE_BYTES / 8 + at] = mix(file << 32 | at);
    }
    CHECK(uunmap(words, BYTES) == 0);
    CHECK(files_in(root) == 3);
    struct stat about;
    CHECK(stat((root + "/7").c_str(), &about) == 0 && (about.st_mode & 0777) == 0600);
    CHECK(store.close_files() == 0);
  }
  CHECK(Umap::SparseStore::get_capacity(root) == BYTES);
  for (bool read_only : {true, false}) {
    Umap::SparseStore store(root, read_only);
    CHECK(store.get_current_capacity() == BYTES);
    int prot = read_only ? PROT_READ : PROT_READ | PROT_WRITE;
    void *at = Umap::umap_ex(nullptr, BYTES, prot, UMAP_PRIVATE, -1, 0, &store);
    CHECK(at != UMAP_FAILED);
    auto *words = static_cast<std::uint64_t *>(at);
    for (std::size_t file : {0, 7, 63}) {
      for (std::size_t i = 0; i < FILE_BYTES / 8; i += 100) CHECK(words[file * FILE_BYTES / 8 + i] == mix(file << 32 | i));
    }
    CHECK(words[9 * FILE_BYTES / 8] == 0);
    if (!read_only) words[9 * FILE_BYTES / 8] = 9;
    CHECK(uunmap(at, BYTES) == 0);
    CHECK(files_in(root) == (read_only ? 3 : 4));
    // A page may lie across two files.
    std::vector<char> buffer(2 * PAGE, 'q');
    off_t across = static_cast<off_t>(7 * FILE_BYTES - PAGE);
    CHECK(store.write_to_store(buffer.data(), 2 * PAGE, across) == (read_only ? -1 : static_cast<ssize_t>(2 * PAGE)));
    CHECK(read_only ? errno == EROFS : files_in(root) == 5);
    CHECK(store.read_from_store(buffer.data(), 2 * PAGE, static_cast<off_t>(BYTES - PAGE)) == -1 && errno == ENOSPC);
  }
  auto fails = [](const std::function<void()> &make) {
    try {
      make();
    } catch (const std::system_error &) {
      return true;
    }
    return false;
  };
  CHECK(fails([&] { Umap::SparseStore(BYTES, PAGE, root, FILE_BYTES); }));
  CHECK(fails([&] { Umap::SparseStore(path("nowhere"), true); }));
  CHECK(fails([&] { Umap::SparseStore::get_capacity(path("nowhere")); }));
  CHECK(fails([&] { Umap::SparseStore(0, PAGE, path("empty"), FILE_BYTES); }));
}

CASE(sparse_store_of_an_absurd_size_is_an_error) {
  auto refused = [](const std::function<void()> &make) {
    try {
      make();
    } catch (const std::system_error &error) {
      return error.code().value() == EINVAL;
    }
    return false;
  };
  auto create = [](std::size_t bytes, std::size_t aligned, std::size_t file_bytes) {
    return [=] { Umap::SparseStore(bytes, aligned, path("new"), file_bytes); };
  };
  CHECK(refused(create(SIZE_MAX, PAGE, PAGE)));
  CHECK(refused(create(PAGE, PAGE, SIZE_MAX)));
  CHECK(refused(create(PAGE, SIZE_MAX, PAGE)));
  CHECK(refused(create(std::size_t{1} << 60, 1, 1)));
  // What was refused has left nothing behind.
  CHECK(access(path("new").c_str(), F_OK) != 0 && errno == ENOENT);
  create(2 * PAGE, PAGE, PAGE)();
  for (const char *sizes : {"2 18446744073709551615", "-1 -1", "0 4096", "4096 0", "1 1000000000000000", "99999999999999999999999 1", "pages", ""}) {
    std::ofstream(path("new/_metadata")) << sizes;
    CHECK(refused([] { Umap::SparseStore(path("new"), false); }));
    CHECK(refused([] { Umap::SparseStore::get_capacity(path("new")); }));
  }
}

CASE(sparse_store_from_several_threads) {
  constexpr std::size_t FILE_BYTES = 4 * PAGE, BYTES = 256 * FILE_BYTES;
  Umap::SparseStore store(BYTES, PAGE, path("sparse"), FILE_BYTES);
  auto *words = map_store<std::uint64_t>(&store, BYTES);
  std::vector<std::thread> threads;
  for (std::size_t id = 0; id < 4; ++id) {
    threads.emplace_back([=] {
      for (std::size_t at = id; at < BYTES / 8; at += 64) words[at] = mix(at);
    });
  }
  for (auto &thread : threads) thread.join();
  for (std::size_t at = 0; at < BYTES / 8; at += 64) CHECK(words[at] == mix(at));
  CHECK(uunmap(words, BYTES) == 0);
}

/* The caller has started a server. */
CASE(network_arrays_as_on_the_poster) {
  constexpr std::size_t COUNT = 1 << 18, LENGTH = COUNT * sizeof(double);
  Umap::NetworkClient *client = new Umap::NetworkClient(std::getenv("SERVER"));
  std::vector<Umap::Store *> stores;
  std::vector<double *> arrays;
  for (const char *name : {"a", "b", "c"}) {
    Umap::Store *store = new Umap::StoreNetwork(name, LENGTH, client, arrays.empty() ? Umap::COMPRESS_NONE : Umap::COMPRESS_LZ4);
    double *array = (double *)umap_ex(NULL, LENGTH, PROT_READ | PROT_WRITE, UMAP_PRIVATE, -1, 0, store);
    CHECK(array != UMAP_FAILED);
    stores.push_back(store);
    arrays.push_back(array);
  }
  auto [a, b, c] = std::tuple(arrays[0], arrays[1], arrays[2]);
  for (std::size_t i = 0; i < COUNT; ++i) a[i] = 1, b[i] = static_cast<double>(i), c[i] = 0;
  for (std::size_t i = 0; i < COUNT; ++i) c[i] = a[i] + 3 * b[i];
  for (std::size_t i = 0; i < COUNT; ++i) CHECK(c[i] == 1 + 3 * static_cast<double>(i));

  errno = 0;
  CHECK(Umap::umap_ex(nullptr, LENGTH, PROT_READ | PROT_WRITE, UMAP_PRIVATE, -1, 0, stores[2]) == UMAP_FAILED && errno == EBUSY);
  CHECK(umap_flush() == 0);
  for (double *array : arrays) CHECK(uunmap(array, LENGTH) == 0);
  errno = 0;
  CHECK(Umap::umap_ex(nullptr, LENGTH + 1, PROT_READ | PROT_WRITE, UMAP_PRIVATE, -1, 0, stores[2]) == UMAP_FAILED && errno == EINVAL);
  // The contents live as long as the store.
  double back = 0;
  CHECK(stores[2]->read_from_store(reinterpret_cast<char *>(&back), sizeof back, 8 * 1000) == sizeof back);
  CHECK(back == 3001);
  back = 5;
  CHECK(stores[2]->write_to_store(reinterpret_cast<char *>(&back), sizeof back, 8 * 1000) == sizeof back);
  auto *again = map_store<double>(stores[2], LENGTH);
  CHECK(again[1000] == 5 && again[1001] == 3004);
  // And as the region, if that lives longer; a client is not needed to the end.
  for (Umap::Store *store : stores) delete store;
  delete client;
  CHECK(again[COUNT - 1] == 1 + 3 * static_cast<double>(COUNT - 1));
  CHECK(uunmap(again, LENGTH) == 0);
}

/* The poster's call with the poster's names. What makes them is three lines. */
CASE(posters_call_needs_three_lines_before_it) {
  const char *name = "array";
  std::size_t length = 512 * PAGE;
  for (Umap::CompressionMode compression_mode : {Umap::COMPRESS_NONE, Umap::COMPRESS_LZ4}) {
    Umap::NetworkClient *client = new Umap::NetworkClient(std::getenv("SERVER"));

    Umap::Store *store = new Umap::StoreNetwork(name, length, client, compression_mode);
    void *region = umap_ex(NULL, length, PROT_READ | PROT_WRITE, UMAP_PRIVATE, -1, 0, store);
    CHECK(region != UMAP_FAILED);

    auto *words = static_cast<std::uint64_t *>(region);
    for (std::size_t at = 0; at < length / 8; ++at) words[at] = mix(at) & 0xffff;
    for (std::size_t at = 0; at < length / 8; ++at) CHECK(words[at] == (mix(at) & 0xffff));
    CHECK(uunmap(region, length) == 0);
    delete store;
    delete client;
  }
}

CASE(network_client_without_a_server_throws) {
  bool threw = false;
  try {
    Umap::NetworkClient client("shm://" + path("nobody"));
  } catch (const std::runtime_error &) {
    threw = true;
  }
  CHECK(threw);
}
