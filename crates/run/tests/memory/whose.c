/* Whose small blocks are: those that the C library makes for itself are its own, also while all
 * others are remote. Runs with `--small yes`. What is read in the child of `posix_spawn` is absent
 * before: its memory has left for other blocks. Prints what the children print. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

/* True if a block is the C library's: its heap lies below the break. */
static int is_local(const void *block) {
    long below = (char *)sbrk(0) - (char *)block;
    return below > 0 && below < 1 << 28;
}

static void expect(int is_true, int number) {
    if (!is_true) {
        fprintf(stderr, "expectation %d fails\n", number);
        _exit(number);
    }
}

/* Blocks that fill the budget again and again, so that others leave. */
static void press(void) {
    for (int round = 0; round < 2; round++) {
        char *blocks[30000];
        for (int i = 0; i < 30000; i++)
            memset(blocks[i] = malloc(1000), i, 1000);
        for (int i = 0; i < 30000; i++)
            free(blocks[i]);
    }
}

/* A structure between others of its size, which leave together. */
static void *among_others(size_t size) {
    void *made = NULL;
    for (int i = 0; i < 2000; i++)
        memset(i == 1000 ? made = malloc(size) : malloc(size), 0, size);
    return made;
}

static pthread_key_t last;
static void *blocks_of_ends[64];
static int ends;

/* Makes and frees blocks while a thread ends, after other destructors. */
static void end(void *rounds) {
    void *block = memset(malloc(200), 5, 200);
    free(memset(malloc(300), 6, 300));
    blocks_of_ends[ends++] = block;
    if (rounds != (void *)1)
        pthread_setspecific(last, (char *)rounds - 1);
}

static void *live(void *unused) {
    free(memset(malloc(100), 4, 100));
    pthread_setspecific(last, (void *)4);
    return unused;
}

int main(void) {
    void *own = malloc(24);
    expect(own && !is_local(own), 1);

    /* Strings that the program asks for are its own, and buffers of the C library are not. */
    char *copy = strdup("a text"), *part = strndup("a text", 3), *line = NULL, *made = NULL;
    expect(!is_local(copy) && !strcmp(copy, "a text"), 2);
    expect(!is_local(part) && !strcmp(part, "a t"), 3);
    size_t size = 0;
    FILE *file = fopen("/proc/self/status", "r");
    expect(file && is_local(file) && getline(&line, &size, file) > 0 && is_local(line), 4);
    expect(asprintf(&made, "%d", 12345) == 5 && is_local(made), 5);
    /* A block of the program's that the C library lets grow becomes its own. */
    char *grown = malloc(128), *text = "a line of more than half of the block, which grows to the whole of it\n";
    FILE *lines = fmemopen(text, strlen(text), "r");
    size = 64;
    expect(!is_local(grown) && lines && getline(&grown, &size, lines) > 64, 6);
    expect(size == 128 && is_local(grown) && !strcmp(grown, text), 16);
    fclose(file), fclose(lines), free(line), free(made), free(grown);
    /* The loader is a part of the C library. */
    void *library = dlopen("libanl.so.1", RTLD_NOW);
    expect(library && is_local(library), 15);

    posix_spawn_file_actions_t *actions = among_others(sizeof *actions);
    posix_spawnattr_t *attributes = among_others(sizeof *attributes);
    expect(!is_local(actions) && !is_local(attributes), 7);
    expect(!posix_spawn_file_actions_init(actions) && !posix_spawnattr_init(attributes), 8);
    char *path = among_others(20);
    strcpy(path, "/dev/null");
    for (int i = 0; i < 20; i++)
        expect(!posix_spawn_file_actions_addopen(actions, 100 + i, path, O_RDONLY, 0), 9);
    for (int i = 0; i < 20; i++) {
        press();
        pid_t child;
        int status;
        char *arguments[] = {"echo", "spawned", NULL};
        int spawned = posix_spawn(&child, "/bin/echo", actions, attributes, arguments, environ);
        expect(!spawned && waitpid(child, &status, 0) == child && !status, 10);
        char text[64];
        FILE *shell = popen("echo by a shell", "r");
        expect(shell && fgets(text, sizeof text, shell) && !pclose(shell), 11);
        fputs(text, stdout), fflush(stdout);
    }
    posix_spawn_file_actions_destroy(actions), posix_spawnattr_destroy(attributes);

    /* Memory that was used before is zeros again. Some has been discarded meanwhile: jemalloc
     * begins to when memory has been free for a part of ten seconds. */
    time_t since = time(NULL);
    for (int round = 0; round < 200 || time(NULL) - since < 4; round++) {
        unsigned char *used[20];
        size_t sizes[20];
        for (int i = 0; i < 20; i++) {
            sizes[i] = 3000 + round % 200 * i * 977 % 100000;
            memset(used[i] = malloc(sizes[i]), 255, sizes[i]);
        }
        for (int i = 0; i < 20; i++)
            free(used[i]);
        for (int i = 0; i < 20; i++) {
            used[i] = calloc(1, sizes[i]);
            for (size_t at = 0; at < sizes[i]; at++)
                expect(!used[i][at], 14);
        }
        for (int i = 0; i < 20; i++)
            free(used[i]);
    }
    static unsigned char *zeros[700];
    for (int i = 0; i < 700; i++) {
        zeros[i] = calloc(1, 60000);
        for (size_t at = 0; at < 60000; at++)
            expect(!zeros[i][at], 17);
    }
    for (int i = 0; i < 700; i++)
        free(zeros[i]);

    pthread_key_create(&last, end);
    for (int i = 0; i < 16; i++) {
        pthread_t thread;
        expect(!pthread_create(&thread, NULL, live, NULL) && !pthread_join(thread, NULL), 12);
    }
    for (int i = 0; i < ends; i++) {
        for (int at = 0; at < 200; at++)
            expect(((char *)blocks_of_ends[i])[at] == 5, 13);
        free(blocks_of_ends[i]);
    }
    printf("%d blocks at ends\n", ends);
    return 0;
}
