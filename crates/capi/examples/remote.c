/* An array of squares on a memory server, with a tenth of it in local memory. FARPAGE_SERVER names
 * the server:
 *
 *   cc remote.c $(pkg-config --cflags --libs farpage) -o remote
 *   FARPAGE_SERVER=tcp://10.0.0.2:7400 ./remote
 *
 * It compiles as C++, too. */
#include <farpage.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define COUNT (UINT64_C(1) << 22)

/* Farpage says what went wrong in words. */
static int fail(const char *what) {
  fprintf(stderr, "%s: %s\n", what, farpage_error_message());
  return 1;
}

int main(void) {
  farpage_runtime_options options;
  memset(&options, 0, sizeof options);
  options.struct_bytes = sizeof options;
  options.budget_bytes = COUNT * sizeof(uint64_t) / 10;

  farpage_runtime *runtime;
  if (farpage_runtime_new(&options, &runtime) != FARPAGE_OK) return fail("cannot start");
  farpage_region *region;
  if (farpage_region_map(runtime, COUNT * sizeof(uint64_t), NULL, &region) != FARPAGE_OK) return fail("cannot map");
  farpage_region_advise(region, 0, farpage_region_bytes(region), FARPAGE_ADVICE_SEQUENTIAL);

  /* From here on it is memory. */
  uint64_t *squares = (uint64_t *)farpage_region_address(region);
  for (uint64_t i = 0; i < COUNT; i++) squares[i] = i * i;
  uint64_t sum = 0;
  for (uint64_t i = 0; i < COUNT; i++) sum += squares[i];

  farpage_stats stats;
  if (farpage_runtime_stats(runtime, &stats, sizeof stats) != FARPAGE_OK) return fail("no figures");
  printf("sum %" PRIu64 "; %" PRIu64 " pages in, %" PRIu64 " out; at most %" PRIu64 " of %" PRIu64 " bytes in memory\n", sum, stats.fills, stats.evictions,
         stats.peak_resident_bytes, stats.budget_bytes);

  if (farpage_region_unmap(region) != FARPAGE_OK) return fail("cannot unmap");
  farpage_runtime_free(runtime);
  return 0;
}
