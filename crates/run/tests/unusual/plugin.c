/* A library that frees, grows and makes memory of the program that loads it. */
#include <stdlib.h>

void take(void *at) { free(at); }
void *grow(void *at, size_t bytes) { return realloc(at, bytes); }
void *make(size_t bytes) { return malloc(bytes); }
