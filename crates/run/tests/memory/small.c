/* Small objects: lists of four threads, which a child of fork reads and frees, too. Children are
 * made while the threads are at work. Blocks from before the threads are reallocated and freed
 * after them. Prints a sum of all, and says on standard error how many KiB of anonymous memory are
 * local at the end. With `remote`: the last child's own blocks are local. */
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 4, NODES = 200000, OLD = 3000 };

struct node {
    struct node *next;
    long value;
    char rest[80];
};

static struct node *lists[THREADS];

/* A size of the arena, which must succeed, unless the arena may be full. */
static size_t large = 300000;

/* Blocks of all ways to get one, from the beginning. */
static unsigned char *old[OLD];

static size_t size_of(int i) { return 16 + i * 7 % 900; }

static void make_old(void) {
    for (int i = 0; i < OLD; i++) {
        size_t size = size_of(i);
        void *made = NULL;
        if (i % 4 == 0)
            made = malloc(size);
        else if (i % 4 == 1)
            made = calloc(1, size);
        else if (i % 4 == 2)
            made = aligned_alloc(64, size);
        else if (posix_memalign(&made, 256, size))
            made = NULL;
        if (!made || malloc_usable_size(made) < size)
            _exit(10);
        old[i] = memset(made, i, size);
    }
}

static void check(int i, size_t size) {
    for (size_t at = 0; at < size; at++)
        if (old[i][at] != (unsigned char)i)
            _exit(11);
}

/* Blocks change their sizes, from one allocator to another and back, and are freed. */
static void use_old(void) {
    const size_t sizes[] = {0, 3000, 70000, large, 24};
    for (int i = 0; i < OLD; i++) {
        size_t size = size_of(i);
        check(i, size);
        for (int step = 1; step <= i % 5; step++) {
            if (!(old[i] = realloc(old[i], sizes[step])) || malloc_usable_size(old[i]) < sizes[step])
                _exit(12);
            size = size < sizes[step] ? size : sizes[step];
            check(i, size);
        }
        free(old[i]);
    }
    for (int i = 0; i < OLD; i++) {
        unsigned char *zeros = calloc(i % 50 + 1, 11);
        for (int at = 0; at < 11; at++)
            if (zeros[at])
                _exit(13);
        free(memset(zeros, 1, 11));
        void *aligned = aligned_alloc(512, 512);
        if ((unsigned long)aligned % 512)
            _exit(14);
        free(aligned);
    }
}

static void *make(void *which) {
    long list = (long)which;
    for (long i = 0; i < NODES; i++) {
        struct node *node = malloc(sizeof *node);
        memset(node, (int)i, sizeof *node);
        node->next = lists[list], node->value = i ^ list;
        lists[list] = node;
        /* Some go, and others take their places. */
        if (i % 5 == 0) {
            struct node *gone = lists[list]->next;
            if (gone)
                lists[list]->next = gone->next, free(gone);
        }
        if (i % 1000 == 0)
            free(realloc(malloc(3000), 70000));
    }
    return NULL;
}

static long sum(void) {
    long sum = 0;
    for (int list = 0; list < THREADS; list++)
        for (struct node *node = lists[list]; node; node = node->next)
            sum = sum * 31 + node->value + node->rest[79];
    return sum;
}

int main(int argc, char **argv) {
    int is_remote = argc > 1 && !strcmp(argv[1], "remote");
    if (argc > 1 && !strcmp(argv[1], "full"))
        large = 100000;
    make_old();
    /* Memory of the arena, which cannot be made while a child is. */
    void *volatile large_block = malloc(1 << 20);
    free(large_block);
    pthread_t threads[THREADS];
    for (long i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, make, (void *)i))
            return 1;
    for (int i = 0; i < 20; i++) {
        pid_t child = fork();
        int status;
        if (child == 0) {
            for (int size = 16; size < 100000; size *= 2)
                free(memset(malloc(size), size, size));
            use_old();
            _exit(0);
        }
        if (child < 0 || waitpid(child, &status, 0) != child || status)
            return 3;
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    pid_t child = fork();
    if (child == 0) {
        printf("%ld in the child\n", sum()), fflush(stdout);
        use_old();
        for (int list = 0; list < THREADS; list++)
            for (int i = 0; i < 1000 && lists[list]; i++) {
                struct node *gone = lists[list], *next = gone->next;
                if (i % 2 && !(gone = realloc(gone, 2000)))
                    _exit(15);
                if (malloc_usable_size(gone) < sizeof *gone || gone->next != next)
                    _exit(16);
                free(gone), lists[list] = next;
                void *made = malloc(sizeof *gone);
                if (!made)
                    _exit(17);
                /* Local: in the heap of the C library. */
                long below = (char *)sbrk(0) - (char *)made;
                if (is_remote && (below < 0 || below > 1 << 28))
                    _exit(18);
                memset(made, 255, sizeof *gone);
            }
        _exit(0);
    }
    int status;
    if (child < 0 || waitpid(child, &status, 0) != child || status)
        return 2;
    for (int i = 0; i < NODES; i++)
        for (int list = 0; list < THREADS && lists[list] && i % 2; list++) {
            struct node *gone = lists[list];
            lists[list] = gone->next, free(gone);
        }
    use_old();
    printf("%ld\n", sum());
    char line[256];
    for (FILE *file = fopen("/proc/self/status", "r"); fgets(line, sizeof line, file);)
        if (!strncmp(line, "RssAnon:", 8))
            fputs(line, stderr);
    return 0;
}
