// Children made by `fork` that allocate by themselves: the case that the argument names. The budget
// is 8 MiB if a case says nothing else.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
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

// Waits until `block`, of `BYTES` bytes, has the whole budget: no other process has a share.
static void must_get_the_budget(char *block) {
    for (unsigned seed = 1; local() < 7 * MIB; seed++) {
        fill(block, BYTES, seed);
        must(holds(block, BYTES, seed), "a block that grows");
    }
}

// Waits for a byte of a child.
static void must_hear(int from) {
    char byte = 0;
    must(read(from, &byte, 1) == 1, "read");
}

static void tell(int to) { must(write(to, "", 1) == 1, "write"); }

// Sleeps until the parent closes its end of the pipe.
static void sleep_until_end(int from) {
    char byte;
    must(read(from, &byte, 1) == 0, "the end of a pipe");
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
    must(pipe(pipes) == 0, "pipe");
    pid_t parent = getpid();
    if (fork() == 0) {
        char *own = made(BYTES, 1);
        tell(pipes[1]);
        while (getppid() == parent) usleep(1000);
        for (int round = 2; round < 6; round++) {
            fill(own, BYTES, round);
            must(holds(own, BYTES, round), "after the parent's end");
        }
        printf("done\n");
        fflush(stdout);
        _exit(0);
    }
    must_hear(pipes[0]);
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

// A descriptor that this process gets now, among a few.
static void must_close(int descriptor) {
    must(descriptor >= 0 && descriptor < 64, "the number of a descriptor");
    must(close(descriptor) == 0, "close");
}

static void *opens(void *none) {
    struct sockaddr_un any = {.sun_family = AF_UNIX};
    socklen_t length = sizeof(sa_family_t);
    int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    must(bind(listener, (struct sockaddr *)&any, length) == 0 && listen(listener, 1) == 0, "listen");
    length = sizeof any;
    must(getsockname(listener, (struct sockaddr *)&any, &length) == 0, "a name");
    while (!ends) {
        int opened = open("/dev/null", O_RDONLY), connects = socket(AF_UNIX, SOCK_STREAM, 0);
        must(connect(connects, (struct sockaddr *)&any, length) == 0, "connect");
        must_close(accept(listener, NULL, NULL));
        must_close(connects);
        must_close(opened);
        FILE *file = fopen("/dev/null", "r");
        must(file != NULL && fclose(file) == 0, "a stream");
    }
    must_close(listener);
    return none;
}

// Threads of a child open and close files while the child makes its arena.
static void among_openers(void) {
    char *block = made(BYTES, 1);
    for (int round = 0; round < 4; round++) {
        pid_t child = fork();
        if (child == 0) {
            pthread_t others[2];
            for (int at = 0; at < 2; at++) pthread_create(&others[at], NULL, opens, NULL);
            char *own = made(BYTES, 2);
            must(holds(own, BYTES, 2) && holds(block, BYTES, 1), "own");
            ends = 1;
            for (int at = 0; at < 2; at++) pthread_join(others[at], NULL);
            _exit(0);
        }
        must_end(child);
    }
}

static void killed(void) {
    int pipes[2];
    must(pipe(pipes) == 0, "pipe");
    char *block = made(BYTES, 1);
    pid_t child = fork();
    if (child == 0) {
        char *own = made(BYTES, 2);
        must(holds(own, BYTES, 2), "own");
        tell(pipes[1]);
        for (;;) pause();
    }
    must_hear(pipes[0]);
    int status = 0;
    must(kill(child, SIGKILL) == 0 && waitpid(child, &status, 0) == child, "kill");
    must(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "a child that is killed");
    must_get_the_budget(block);
}

static char *program;

// Number of descriptors that a program started now gets.
static int passed_on(void) {
    int passed = 0;
    for (int descriptor = 0; descriptor < 4096; descriptor++) {
        int flags = fcntl(descriptor, F_GETFD);
        passed += flags >= 0 && !(flags & FD_CLOEXEC);
    }
    return passed;
}

static void becomes(void) {
    int pipes[2];
    char passed[16];
    snprintf(passed, sizeof passed, "%d", passed_on());
    setenv("PASSED_ON", passed, 1);
    must(pipe2(pipes, O_CLOEXEC) == 0, "pipe");
    char *block = made(BYTES, 1);
    pid_t child = fork();
    if (child == 0) {
        char *own = made(BYTES, 2);
        must(holds(own, BYTES, 2) && holds(block, BYTES, 1), "own");
        must(dup2(pipes[0], 0) == 0, "dup2");
        execl(program, program, "sleeps", NULL);
        must(0, "exec");
    }
    must_get_the_budget(block);
    must(waitpid(child, NULL, WNOHANG) == 0, "the program has ended");
    must(close(pipes[1]) == 0, "close");
    must_end(child);
}

// The program that a child with an arena has become.
static void sleeps(void) {
    must(passed_on() == atoi(getenv("PASSED_ON")), "a descriptor is left");
    sleep_until_end(0);
    _exit(0);
}

// A child whose arena is refused by the kernel, after it has got a share of the budget.
static void refused(void) {
    int pipes[2], ends_pipe[2];
    must(pipe(pipes) == 0 && pipe(ends_pipe) == 0, "pipe");
    char *block = made(BYTES, 1);
    pid_t child = fork();
    if (child == 0) {
        size_t pages = 0;
        FILE *sizes = fopen("/proc/self/statm", "r");
        must(fscanf(sizes, "%zu", &pages) == 1 && fclose(sizes) == 0, "the size");
        rlim_t most = pages * 4096 + 512 * MIB;
        struct rlimit limit = {most, most};
        must(setrlimit(RLIMIT_AS, &limit) == 0, "a limit");
        char *own = made(BYTES, 2);
        must(holds(own, BYTES, 2), "own");
        while (threads() > 1) usleep(1000);
        tell(pipes[1]);
        close(ends_pipe[1]);
        sleep_until_end(ends_pipe[0]);
        _exit(0);
    }
    must_hear(pipes[0]);
    must_get_the_budget(block);
    must(close(ends_pipe[1]) == 0, "close");
    must_end(child);
}

// True if faults on absent pages at `address` come to farpage.
static int is_under_paging(const char *address) {
    char line[1024];
    int is_here = 0, is_under = -1;
    FILE *maps = fopen("/proc/self/smaps", "r");
    while (fgets(line, sizeof line, maps)) {
        uintptr_t start, end;
        if (sscanf(line, "%lx-%lx ", &start, &end) == 2)
            is_here = start <= (uintptr_t)address && (uintptr_t)address < end;
        if (is_here && strncmp(line, "VmFlags:", 8) == 0) is_under = strstr(line, " um") != NULL;
    }
    fclose(maps);
    must(is_under >= 0, "no such mapping");
    return is_under;
}

// Memory is ordinary while it fits. The budget is 64 MiB.
static void ordinary(void) {
    char *block = made(8 * MIB, 1);
    pid_t child = fork();
    if (child == 0) {
        char *own = made(8 * MIB, 2);
        must(!is_under_paging(own) && !is_under_paging(block), "memory that fits is under paging");
        char *more = made(120 * MIB, 3);
        must(is_under_paging(own) && is_under_paging(more), "memory that does not fit is ordinary");
        must(holds(block, 8 * MIB, 1) && holds(own, 8 * MIB, 2), "the child's");
        must(holds(more, 120 * MIB, 3), "more of the child's");
        _exit(0);
    }
    must_end(child);
    must(!is_under_paging(block) && holds(block, 8 * MIB, 1), "the parent's");
}

// Under a limit that counts stacks, threads start with the arena, and not when they are needed.
// Memory is ordinary. The budget is 64 MiB.
static void limited(void) {
    size_t with_threads[2];
    int pipes[2];
    must(pipe(pipes) == 0, "pipe");
    for (int is_limited = 0; is_limited < 2; is_limited++) {
        pid_t child = fork();
        if (child == 0) {
            struct rlimit far = {(rlim_t)1 << 46, (rlim_t)1 << 46};
            must(!is_limited || setrlimit(RLIMIT_AS, &far) == 0, "a limit");
            char *own = made(8 * MIB, 1);
            size_t count = threads();
            must(write(pipes[1], &count, sizeof count) == sizeof count, "write");
            must(holds(own, 8 * MIB, 1) && !is_under_paging(own), "own");
            own = realloc(own, 80 * MIB);
            must(own != NULL && holds(own, 8 * MIB, 1) && is_under_paging(own), "more");
            _exit(0);
        }
        must(read(pipes[0], &with_threads[is_limited], sizeof(size_t)) > 0, "read");
        must_end(child);
    }
    must(with_threads[0] < with_threads[1], "threads have not started with the arena");
}

// Parent and child use far more than the budget at the same time.
static void both(void) {
    char *block = made(3 * BYTES, 1);
    pid_t child = fork();
    char *own = made(3 * BYTES, 2 + (child == 0));
    for (unsigned round = 0; round < 3; round++) {
        must(holds(block, 3 * BYTES, 1), "what both have");
        must(holds(own, 3 * BYTES, 2 + (child == 0) + round), "own");
        fill(own, 3 * BYTES, 3 + (child == 0) + round);
    }
    if (child == 0) _exit(0);
    must_end(child);
}

int main(int count, char **names) {
    program = names[0];
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
        {"among-openers", among_openers},
        {"killed", killed},             {"becomes", becomes},
        {"sleeps", sleeps},             {"refused", refused},
        {"ordinary", ordinary},         {"both", both},
        {"limited", limited},
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
