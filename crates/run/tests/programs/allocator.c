/* An allocator as jemalloc is, in small: what it gives out is cut from memory that it maps, from
 * the first byte on. It knows its own by the size that stands in a table beside them. Compiled with
 * MAIN, a program that uses it. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define OBJECT 4096
#define CHUNK (1 << 20)
#define CHUNKS 64

#ifndef MAIN

static char *chunks[CHUNKS];
static size_t sizes[CHUNKS * CHUNK / OBJECT];
static size_t used;
/* Larger ones, each mapped by itself and kept. */
static struct { char *start; size_t bytes; } larges[16];
static int larges_used;
size_t freed;

static size_t *size_of(void *object) {
    for (int i = 0; i < CHUNKS && chunks[i]; i++)
        if ((uintptr_t)object - (uintptr_t)chunks[i] < CHUNK)
            return &sizes[(i * CHUNK + ((char *)object - chunks[i])) / OBJECT];
    return NULL;
}

void *malloc(size_t bytes) {
    size_t chunk = used / (CHUNK / OBJECT), at = used % (CHUNK / OBJECT);
    if (bytes > OBJECT && larges_used < 16) {
        void *made = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        larges[larges_used].start = made;
        larges[larges_used++].bytes = bytes;
        return made;
    }
    if (bytes > OBJECT || chunk >= CHUNKS)
        return NULL;
    if (!chunks[chunk]) {
        void *made = mmap(NULL, CHUNK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (made == MAP_FAILED)
            return NULL;
        chunks[chunk] = made;
    }
    sizes[used++] = bytes + 1;
    return chunks[chunk] + at * OBJECT;
}

void free(void *object) {
    size_t *size = object ? size_of(object) : NULL;
    if (size && *size) {
        *size = 0;
        freed++;
    }
}

void *calloc(size_t count, size_t bytes) {
    void *made = malloc(count * bytes);
    return made ? memset(made, 0, count * bytes) : NULL;
}

size_t malloc_usable_size(void *object) {
    for (int i = 0; i < larges_used; i++)
        if (larges[i].start == object)
            return larges[i].bytes;
    size_t *size = object ? size_of(object) : NULL;
    return size && *size ? *size - 1 : 0;
}

void *realloc(void *object, size_t bytes) {
    void *made = malloc(bytes);
    size_t before = malloc_usable_size(object);
    if (made && object) {
        memcpy(made, object, before < bytes ? before : bytes);
        free(object);
    }
    return made;
}

void *memalign(size_t align, size_t bytes) {
    return align <= OBJECT ? malloc(bytes) : NULL;
}

#else

#include <malloc.h>
#include <stdlib.h>

extern size_t freed;

int main(void) {
    enum { COUNT = 4000 };
    static unsigned char *objects[COUNT];
    for (int i = 0; i < COUNT; i++) {
        objects[i] = malloc(1000);
        if (!objects[i] || malloc_usable_size(objects[i]) != 1000)
            return 1;
        memset(objects[i], i, 1000);
    }
    for (int i = 0; i < COUNT; i += 2)
        if (!(objects[i] = realloc(objects[i], 2000)))
            return 2;
    /* From small to large and back: from one allocator to the other. */
    unsigned char *grown = realloc(objects[0], 3 << 20);
    if (!grown)
        return 3;
    memset(grown + 1000, 7, (3 << 20) - 1000);
    if (!(objects[0] = realloc(grown, 4 << 20)) || objects[0][(3 << 20) - 1] != 7)
        return 4;
    unsigned long sum = 0;
    for (int i = 0; i < COUNT; i++)
        for (int at = 0; at < 1000; at++)
            sum += objects[i][at] * (unsigned long)(i + at);
    size_t before = freed;
    for (int i = 1; i < COUNT; i++)
        free(objects[i]);
    if (freed - before != COUNT - 1)
        return 5;
    free(objects[0]);
    printf("%lu\n", sum);
    return 0;
}

#endif
