/* Pages kept by functions of the program: here a file of its own whose bytes are scrambled. No
 * server is needed.
 *
 *   cc own_store.c $(pkg-config --cflags --libs farpage) -o own_store && ./own_store secret
 *
 * It compiles as C++, too. */
#include <errno.h>
#include <farpage.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BYTES ((size_t)1 << 20)
#define KEY 0x5a

/* Called from several threads at once, each for a page of its own. A hole in the file is a page of
 * zeros. */
static int read_page(void *context, uint64_t offset, void *buffer, size_t bytes) {
  unsigned char *to = (unsigned char *)buffer;
  ssize_t got = pread(*(int *)context, to, bytes, (off_t)offset);
  if (got < 0) return errno;
  memset(to + got, 0, bytes - (size_t)got);
  for (size_t i = 0; i < (size_t)got; i++) to[i] ^= KEY;
  return 0;
}

static int write_page(void *context, uint64_t offset, const void *buffer, size_t bytes) {
  const unsigned char *from = (const unsigned char *)buffer;
  unsigned char *scrambled = (unsigned char *)malloc(bytes);
  if (scrambled == NULL) return ENOMEM;
  for (size_t i = 0; i < bytes; i++) scrambled[i] = from[i] ^ KEY;
  ssize_t put = pwrite(*(int *)context, scrambled, bytes, (off_t)offset);
  int code = put == (ssize_t)bytes ? 0 : put < 0 ? errno : EIO;
  free(scrambled);
  return code;
}

static int flush_file(void *context) { return fdatasync(*(int *)context) == 0 ? 0 : errno; }

static int fail(const char *what) {
  fprintf(stderr, "%s: %s\n", what, farpage_error_message());
  return 1;
}

/* Maps the file, lets `use` work on the memory, and unmaps it: then all changes are in the file. */
static int with_file(farpage_runtime *runtime, const char *path, void (*use)(char *memory)) {
  int fd = open(path, O_RDWR | O_CREAT, 0600);
  if (fd < 0) {
    perror(path);
    return 1;
  }
  farpage_store store;
  memset(&store, 0, sizeof store);
  store.struct_bytes = sizeof store;
  store.context = &fd;
  store.read = read_page;
  store.write = write_page;
  store.flush = flush_file;
  store.name = path;

  farpage_region_options options;
  memset(&options, 0, sizeof options);
  options.struct_bytes = sizeof options;
  options.page_bytes = 4096;
  options.store = &store;

  farpage_region *region;
  if (farpage_region_map(runtime, BYTES, &options, &region) != FARPAGE_OK) return fail("cannot map");
  use((char *)farpage_region_address(region));
  if (farpage_region_unmap(region) != FARPAGE_OK) return fail("cannot write back");
  close(fd);
  return 0;
}

static void fill(char *memory) {
  for (size_t at = 0; at < BYTES; at += 64) snprintf(memory + at, 64, "line %zu", at / 64);
}

static void show(char *memory) { printf("%s\n", memory + BYTES / 2); }

int main(int argc, char **argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: %s FILE\n", argv[0]);
    return 2;
  }
  farpage_runtime_options options;
  memset(&options, 0, sizeof options);
  options.struct_bytes = sizeof options;
  options.budget_bytes = 64 * 4096;

  farpage_runtime *runtime;
  if (farpage_runtime_new(&options, &runtime) != FARPAGE_OK) return fail("cannot start");
  int code = with_file(runtime, argv[1], fill) || with_file(runtime, argv[1], show);
  farpage_runtime_free(runtime);
  return code;
}
