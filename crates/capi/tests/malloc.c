/* Touches absent pages while the lock of `malloc` is held, as the handler of a signal does that has
 * interrupted `malloc`. Ends with status 3 and the name of a thread that wants the lock. The first
 * argument is the fault mode. */
#define _GNU_SOURCE
#include <errno.h>
#include <farpage.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

enum { PAGE = 4096, BUDGET_PAGES = 64, PAGES = 8 * BUDGET_PAGES, ROUNDS = 6 };

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static volatile int is_held;

/* Ends the program if the lock is held. */
static void take(const char *call) {
  if (!is_held) return;
  char name[16] = "?", line[128];
  prctl(PR_GET_NAME, name);
  int length = snprintf(line, sizeof line, "%s waits for the program's %s\n", name, call);
  if (write(2, line, length) != length) abort();
  _exit(3);
}

void *malloc(size_t bytes) {
  take("malloc");
  return __libc_malloc(bytes);
}

void *calloc(size_t count, size_t bytes) {
  take("calloc");
  return __libc_calloc(count, bytes);
}

void *realloc(void *block, size_t bytes) {
  take("realloc");
  return __libc_realloc(block, bytes);
}

void *memalign(size_t align, size_t bytes) {
  take("memalign");
  return __libc_memalign(align, bytes);
}

void *aligned_alloc(size_t align, size_t bytes) { return memalign(align, bytes); }

int posix_memalign(void **block, size_t align, size_t bytes) {
  *block = memalign(align, bytes);
  return *block ? 0 : ENOMEM;
}

void free(void *block) {
  if (block) take("free");
  __libc_free(block);
}

static void check(farpage_code code, const char *what) {
  if (code == FARPAGE_OK) return;
  fprintf(stderr, "%s: %s\n", what, farpage_error_message());
  exit(1);
}

static void touch(farpage_runtime *runtime, const char *codec) {
  farpage_region_options options;
  memset(&options, 0, sizeof options);
  options.struct_bytes = sizeof options;
  options.codec = codec;
  farpage_region *region;
  check(farpage_region_map(runtime, PAGES * PAGE, &options, &region), "map");
  double *numbers = (double *)farpage_region_address(region);
  for (int round = 0; round < ROUNDS; round++) {
    int wrong = 0;
    is_held = 1;
    for (int page = 0; page < PAGES; page++) {
      double *number = &numbers[page * (PAGE / sizeof(double)) + 7];
      wrong += *number != (round ? page + round - 1 : 0);
      *number = page + round;
    }
    is_held = 0;
    if (wrong) {
      fprintf(stderr, "%s: %d wrong numbers in round %d\n", codec, wrong, round);
      exit(1);
    }
  }
  check(farpage_region_unmap(region), "unmap");
}

int main(int count, char **words) {
  farpage_runtime_options options;
  memset(&options, 0, sizeof options);
  options.struct_bytes = sizeof options;
  options.budget_bytes = BUDGET_PAGES * PAGE;
  options.page_bytes = PAGE;
  options.fault_mode = count > 1 && !strcmp(words[1], "in-thread") ? FARPAGE_FAULTS_IN_THREAD : FARPAGE_FAULTS_FILLER;
  farpage_runtime *runtime;
  check(farpage_runtime_new(&options, &runtime), "start");
  touch(runtime, "raw");
  touch(runtime, "lz4");
  farpage_runtime_free(runtime);
  puts("all pages came");
  return 0;
}
