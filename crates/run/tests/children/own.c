// Children made by `fork` that allocate by themselves: the case that the argument names. The budget
// is 8 MiB.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MIB = 1 << 20, BYTES = 32 * MIB, STEP = 4096 };

static void fill(char *block, size_t bytes, unsigned seed) {
    for (size_t at = 0; at < bytes; at += STEP) *(unsigned *)(block + at) = at / STEP * 31 + seed;
}

static int holds(const char *block, size_t bytes, unsigned seed) {
    for (size_t at = 0; at < bytes; at += STEP)
        if (*(const unsigned *)(block + at) != at / STEP * 31 + seed) return 0;
    return 1;
}

static void must(int right, const char *what) {
    if (right) return;
    printf("wrong: %s, errno %d\n", what, errno);
    fflush(stdout);
    _exit(1);
}

static void must_end(pid_t child) {
    int status = 0;
    must(child > 0 && waitpid(child, &status, 0) == child, "no child");
    if (status != 0) printf("status %d\n", status);
    must(status == 0, "a child has failed");
}

// A block of `bytes` bytes, filled.
static char *made(size_t bytes, unsigned seed) {
    char *block = malloc(bytes);
    must(block != NULL, "malloc");
    fill(block, bytes, seed);
    return block;
}

static char *mapped(size_t bytes) {
    char *block = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    must(block != MAP_FAILED, "mmap");
    return block;
}

// Bytes of private memory that this process has, of the whole process.
static size_t local(void) {
    char line[256];
    size_t kib = 0;
    FILE *status = fopen("/proc/self/status", "r");
    while (fgets(line, sizeof line, status))
        if (sscanf(line, "RssAnon: %zu", &kib) == 1) break;
    fclose(status);
    return kib << 10;
}

static void allocations(void) {
    char *inherited = made(BYTES, 1), *grows = made(4 * MIB, 2), *goes = made(4 * MIB, 3);
    char *place = mapped(4 * MIB);
    fill(place, 4 * MIB, 4);
    pid_t child = fork();
    if (child == 0) {
        char *own = made(BYTES, 5);
        must(holds(inherited, BYTES, 1), "inherited beside own");
        char *grown = realloc(grows, 8 * MIB);
        must(grown != NULL && holds(grown, 4 * MIB, 2), "an inherited block that has grown");
        fill(grown, 8 * MIB, 6);
        free(goes);
        must(holds(own, BYTES, 5), "own");
        own = realloc(own, 2 * BYTES);
        must(own != NULL && holds(own, BYTES, 5), "own that has grown");
        char *zeros = calloc(1, BYTES);
        for (size_t at = 0; at < BYTES; at += STEP) must(zeros[at] == 0, "zeros");
        fill(zeros, BYTES, 7);
        must(holds(grown, 8 * MIB, 6), "what has grown");
        must(local() < 24 * MIB, "the budget");
        char *moved = mremap(place, 4 * MIB, 8 * MIB, MREMAP_MAYMOVE);
        must(moved != MAP_FAILED && holds(moved, 4 * MIB, 4) && moved[5 * MIB] == 0, "mremap");
        free(own);
        free(zeros);
        own = made(BYTES, 8);
        must(holds(inherited, BYTES, 1) && holds(own, BYTES, 8), "the end");
        _exit(0);
    }
    fill(inherited, BYTES, 9);
    must_end(child);
    must(holds(inherited, BYTES, 9) && holds(grows, 4 * MIB, 2), "the parent's own");
}

// The parent has no arena: the child's is its first one.
static void alone(void) {
    pid_t child = fork();
    if (child == 0) {
        char *own = made(BYTES, 1);
        must(holds(own, BYTES, 1) && local() < 24 * MIB, "own");
        _exit(0);
    }
    must_end(child);
    char *block = made(BYTES, 2);
    must(holds(block, BYTES, 2), "the parent's");
}

static void mappings(void) {
    char *before = made(BYTES, 1);
    pid_t child = fork();
    if (child == 0) {
        char *own = mapped(BYTES);
        fill(own, BYTES, 2);
        must(munmap(own + 8 * MIB, 8 * MIB) == 0, "munmap");
        must(madvise(own, 4 * MIB, MADV_DONTNEED) == 0 && own[MIB] == 0, "madvise");
        must(mprotect(own + 4 * MIB, 4 * MIB, PROT_READ) == 0, "mprotect");
        char *grown = mremap(own + 16 * MIB, 16 * MIB, 32 * MIB, MREMAP_MAYMOVE);
        must(grown != MAP_FAILED, "mremap");
        for (size_t at = 0; at < 16 * MIB; at += STEP) {
            unsigned found = *(unsigned *)(grown + at);
            must(found == (at + 16 * MIB) / STEP * 31 + 2, "mremap of own");
        }
        must(mlock(grown, MIB) == 0 && munlock(grown, MIB) == 0, "mlock");
        int pipes[2];
        must(pipe(pipes) == 0, "pipe");
        char *buffers[] = {before, grown};
        for (int from = 0; from < 2; from++) {
            fill(grown, 32 * MIB, 3);
            must(holds(before, BYTES, 1), "all of what is inherited");
            // Absent by now, like the other buffer.
            must(write(pipes[1], buffers[from], 64) == 64, "write");
            must(read(pipes[0], buffers[1 - from] + 8 * MIB, 64) == 64, "read");
            must(memcmp(buffers[1 - from] + 8 * MIB, buffers[from], 64) == 0, "a system call");
            *(unsigned *)(before + 8 * MIB) = 8 * MIB / STEP * 31 + 1;
        }
        _exit(0);
    }
    must_end(child);
    must(holds(before, BYTES, 1), "the parent's");
}

static void generation(int left, int all) {
    if (left == 0) return;
    char *own = made(BYTES, left);
    pid_t child = fork();
    if (child == 0) {
        generation(left - 1, all);
        must(holds(own, BYTES, left), "inherited");
        _exit(0);
    }
    must_end(child);
    must(holds(own, BYTES, left), "own");
}

static void generations(void) { generation(4, 4); }
static void more_generations(void) { generation(6, 6); }

static void in_turn(void) {
    char *block = made(BYTES, 1);
    for (int round = 0; round < 20; round++) {
        pid_t child = fork();
        if (child == 0) {
            char *own = made(BYTES, round);
            must(holds(own, BYTES, round) && holds(block, BYTES, 1), "a child in turn");
            _exit(0);
        }
        must_end(child);
    }
}

static size_t threads(void) {
    char line[256];
    size_t threads = 0;
    FILE *status = fopen("/proc/self/status", "r");
    while (fgets(line, sizeof line, status))
        if (sscanf(line, "Threads: %zu", &threads) == 1) break;
    fclose(status);
    return threads;
}

static void little(void) {
    char *block = made(BYTES, 1);
    pid_t child = fork();
    if (child == 0) {
        char *own = made(900 << 10, 2);
        must(holds(own, 900 << 10, 2) && threads() == 1, "threads");
        free(own);
        own = made(BYTES, 3);
        must(holds(own, BYTES, 3) && threads() > 1, "an arena");
        pid_t grandchild = fork();
        if (grandchild == 0) {
            char *little = made(900 << 10, 4);
            must(holds(little, 900 << 10, 4) && threads() == 1, "threads of a grandchild");
            _exit(0);
        }
        must_end(grandchild);
        _exit(0);
    }
    must_end(child);
    must(holds(block, BYTES, 1), "the parent's");
}

static void outlives(void) {
    int pipes[2];
    char byte = 0;
    must(pipe(pipes) == 0, "pipe");
    pid_t parent = getpid();
    if (fork() == 0) {
        char *own = made(BYTES, 1);
        must(write(pipes[1], &byte, 1) == 1, "write");
        while (getppid() == parent) usleep(1000);
        for (int round = 2; round < 6; round++) {
            fill(own, BYTES, round);
            must(holds(own, BYTES, round), "after the parent's end");
        }
        printf("done\n");
        fflush(stdout);
        _exit(0);
    }
    must(read(pipes[0], &byte, 1) == 1, "read");
    _exit(0);
}

static atomic_int ends;

static void *allocates(void *seed) {
    unsigned number = (unsigned)(uintptr_t)seed;
    while (!ends) {
        char *block = made(MIB, number);
        must(holds(block, MIB, number), "a thread's");
        char *place = mapped(MIB);
        madvise(place, MIB, MADV_WILLNEED);
        mprotect(place, MIB, PROT_READ);
        munmap(place, MIB);
        free(block);
        number += 2;
    }
    return NULL;
}

// Forks while threads allocate: whatever they hold then, a child allocates, from threads, too.
static void among_threads(void) {
    pthread_t others[3];
    char *block = made(8 * MIB, 1);
    for (uintptr_t at = 0; at < 3; at++) pthread_create(&others[at], NULL, allocates, (void *)at);
    for (int round = 0; round < 12; round++) {
        pid_t child = fork();
        if (child == 0) {
            pthread_t own[2];
            ends = 0;
            for (uintptr_t at = 0; at < 2; at++)
                must(pthread_create(&own[at], NULL, allocates, (void *)at) == 0, "a thread");
            char *more = made(8 * MIB, round);
            must(holds(more, 8 * MIB, round) && holds(block, 8 * MIB, 1), "a child's");
            ends = 1;
            for (int at = 0; at < 2; at++) pthread_join(own[at], NULL);
            _exit(0);
        }
        must_end(child);
    }
    ends = 1;
    for (int at = 0; at < 3; at++) pthread_join(others[at], NULL);
    must(holds(block, 8 * MIB, 1), "the parent's");
}

// The parent's memory and the child's fit the budget of 64 MiB together.
static void fits(void) {
    char *block = made(56 * MIB, 1);
    size_t before = local();
    pid_t child = fork();
    if (child == 0) {
        char *own = made(3 * MIB, 2);
        must(holds(own, 3 * MIB, 2), "own");
        _exit(0);
    }
    must_end(child);
    must(before >= 56 * MIB && local() + MIB >= before, "the parent's memory has gone out");
    must(holds(block, 56 * MIB, 1), "the parent's");
}

static char *inherited_block;

static void *measures(void *none) {
    while (!ends) must(malloc_usable_size(inherited_block) >= MIB, "the size of what is inherited");
    return none;
}

// Forks a child while threads of it look at inherited blocks, which the grandchild uses, too.
static void among_lookers(void) {
    inherited_block = made(2 * MIB, 1);
    pid_t child = fork();
    if (child == 0) {
        pthread_t others[2];
        char *own = made(4 * MIB, 2);
        for (int at = 0; at < 2; at++) pthread_create(&others[at], NULL, measures, NULL);
        for (int round = 0; round < 40; round++) {
            pid_t grandchild = fork();
            if (grandchild == 0) {
                alarm(60);
                must(malloc_usable_size(inherited_block) >= 2 * MIB, "the size");
                free(inherited_block);
                _exit(0);
            }
            must_end(grandchild);
        }
        ends = 1;
        for (int at = 0; at < 2; at++) pthread_join(others[at], NULL);
        must(holds(own, 4 * MIB, 2), "own");
        _exit(0);
    }
    must_end(child);
}

static void raw(void) {
    char *block = made(BYTES, 1);
    pid_t child = _Fork();
    if (child == 0) {
        char *own = mapped(BYTES);
        fill(own, BYTES, 2);
        must(holds(own, BYTES, 2) && holds(block, BYTES, 1), "a raw child's");
        _exit(0);
    }
    must_end(child);
}

static void bare(void) {
    char *block = made(BYTES, 1);
    pid_t child = fork();
    if (child == 0) {
        for (int descriptor = 3; descriptor < 6000; descriptor++) close(descriptor);
        close_range(3, ~0u, 0);
        char *own = made(BYTES, 2);
        must(holds(own, BYTES, 2) && holds(block, BYTES, 1) && local() < 24 * MIB, "own");
        closefrom(3);
        must(holds(own, BYTES, 2), "own without descriptors");
        _exit(0);
    }
    must_end(child);
}

// A filter that allows everything.
static void confined(void) {
    char *block = made(8 * MIB, 1);
    pid_t child = fork();
    if (child == 0) {
        struct sock_filter allow = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
        struct sock_fprog filter = {1, &allow};
        must(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "no new rights");
        must(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0, "a filter");
        char *own = made(BYTES, 2);
        must(holds(own, BYTES, 2) && holds(block, 8 * MIB, 1), "own");
        _exit(0);
    }
    must_end(child);
}

int main(int count, char **names) {
    struct {
        const char *name;
        void (*run)(void);
    } cases[] = {
        {"allocations", allocations},   {"alone", alone},
        {"mappings", mappings},         {"generations", generations},
        {"more-generations", more_generations},
        {"in-turn", in_turn},           {"little", little},
        {"outlives", outlives},         {"among-threads", among_threads},
        {"raw", raw},                   {"bare", bare},
        {"confined", confined},         {"fits", fits},
        {"among-lookers", among_lookers},
    };
    for (size_t at = 0; at < sizeof cases / sizeof *cases; at++) {
        if (count == 2 && strcmp(names[1], cases[at].name) == 0) {
            cases[at].run();
            printf("done\n");
            return 0;
        }
    }
    return 2;
}
