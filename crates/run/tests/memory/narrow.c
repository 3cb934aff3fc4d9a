/* Threads with the smallest stacks make the arena: with `large` by a large block, with `small` by
 * many small ones. Prints what was read back. */
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCKS = 20000 };

static size_t size = 1000;

static void *work(void *sum) {
    static unsigned char *blocks[BLOCKS];
    int count = size > 1000 ? 1 : BLOCKS;
    for (int i = 0; i < count; i++)
        memset(blocks[i] = malloc(size), i, size);
    for (int i = 0; i < count; i++) {
        *(long *)sum += blocks[i][0] + blocks[i][size - 1];
        free(blocks[i]);
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "large"))
        size = 1 << 20;
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) || pthread_attr_setstacksize(&attributes, PTHREAD_STACK_MIN))
        return 1;
    long sum = 0;
    for (int i = 0; i < 3; i++) {
        pthread_t thread;
        if (pthread_create(&thread, &attributes, work, &sum) || pthread_join(thread, NULL))
            return 2;
    }
    printf("%ld\n", sum);
    return 0;
}
