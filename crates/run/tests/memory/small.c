/* Small objects: lists of four threads, which a child of fork reads, too. Children are made while
 * the threads are at work. Prints a sum of all, and says on standard error how many KiB of
 * anonymous memory are local at the end. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 4, NODES = 200000 };

struct node {
    struct node *next;
    long value;
    char rest[80];
};

static struct node *lists[THREADS];

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

int main(void) {
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
            _exit(0);
        }
        if (child < 0 || waitpid(child, &status, 0) != child || status)
            return 3;
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    pid_t child = fork();
    if (child == 0)
        printf("%ld in the child\n", sum()), fflush(stdout), _exit(0);
    int status;
    if (child < 0 || waitpid(child, &status, 0) != child || status)
        return 2;
    for (int i = 0; i < NODES; i++)
        for (int list = 0; list < THREADS && lists[list] && i % 2; list++) {
            struct node *gone = lists[list];
            lists[list] = gone->next, free(gone);
        }
    printf("%ld\n", sum());
    char line[256];
    for (FILE *file = fopen("/proc/self/status", "r"); fgets(line, sizeof line, file);)
        if (!strncmp(line, "RssAnon:", 8))
            fputs(line, stderr);
    return 0;
}
