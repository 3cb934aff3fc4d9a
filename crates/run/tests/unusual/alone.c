/* A program that defines one function of the allocator alone (FREE, MALLOC, REALLOC), by the C
 * library's own of another name. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern void *__libc_malloc(size_t), *__libc_realloc(void *, size_t);
extern void __libc_free(void *);
static long calls;
#ifdef FREE
void free(void *block) { calls++; __libc_free(block); }
#endif
#ifdef MALLOC
void *malloc(size_t bytes) { calls++; return __libc_malloc(bytes); }
#endif
#ifdef REALLOC
void *realloc(void *block, size_t bytes) { calls++; return __libc_realloc(block, bytes); }
#endif
int main(void) {
    long sum = 0;
    for (int size = 24; size < 40 << 20; size *= 7) {
        char *blocks[50];
        int count = size > 1 << 20 ? 2 : 50;
        for (int i = 0; i < count; i++) {
            blocks[i] = i % 2 ? malloc(size) : calloc(1, size);
            memset(blocks[i], i, size);
        }
        for (int i = 0; i < count; i++) {
            blocks[i] = realloc(blocks[i], size + 1000);
            sum += blocks[i][size / 2];
            free(blocks[i]);
        }
        free(strdup("text"));
    }
    printf("%ld %s\n", sum, calls ? "called" : "not called");
    return 0;
}
