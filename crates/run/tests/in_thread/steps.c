/* Handlers that touch remote memory while their thread is inside malloc, free, munmap and their
 * kind: each case checks itself and says "done". */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>
#include <unistd.h>

#define CHECK_ENDS _exit
#include "check.h"

enum { KIB = 1 << 10, MIB = 1 << 20, PAGE = 4096, PAGES = 8 * MIB / PAGE, LONG = 160 * KIB };
enum { READS = PROT_READ, WRITES = PROT_READ | PROT_WRITE };

static volatile char *memory;
static int ends[2];
static volatile unsigned touched;

/* Touches a page that has left: the handlers go round eight budgets. */
static volatile char *touch(void) {
    volatile char *page = memory + (size_t)(touched++ % PAGES) * PAGE;
    *page = *page + 1;
    return page;
}

/* A system call with absent memory among its arguments. */
static void call(void) {
    char *from = (char *)touch(), *to = (char *)memory + (size_t)((touched + PAGES / 2) % PAGES) * PAGE;
    CHECK(write(ends[1], from, 8) == 8);
    CHECK(read(ends[0], to + 8, 8) == 8);
}

static void handle(int signal, void (*handler)(int, siginfo_t *, void *)) {
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO | SA_RESTART};
    CHECK(sigaction(signal, &action, NULL) == 0);
}

static char *map(size_t bytes) {
    char *made = mmap(NULL, bytes, WRITES, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(made != MAP_FAILED);
    return made;
}

static void fill(char *at, size_t bytes) {
    for (size_t byte = 0; byte < bytes; byte += PAGE)
        at[byte] = 1;
}

/* What programs do with memory, a step at a time: `which` counts them. */
static int operation(int which) {
    static char *block, *mapping, *aligned, *grown;
    switch (which) {
    case 0: block = malloc(LONG); break;
    case 1: fill(block, LONG); break;
    case 2: CHECK(malloc_usable_size(block) >= LONG); break;
    case 3: block = realloc(block, 2 * LONG); break;
    case 4: block = realloc(block, LONG); break;
    case 5: free(block); break;
    case 6: block = calloc(1, LONG); break;
    case 7: fill(block, LONG); break;
    case 8: free(block); break;
    case 9: mapping = map(LONG); break;
    case 10: fill(mapping, LONG); break;
    case 11: CHECK(madvise(mapping, 64 * KIB, MADV_DONTNEED) == 0); break;
    case 12: CHECK(madvise(mapping, LONG, MADV_PAGEOUT) == 0); break;
    case 13: CHECK(madvise(mapping, LONG, MADV_POPULATE_READ) == 0); break;
    case 14: CHECK(mprotect(mapping, 2 * PAGE, READS) == 0); break;
    case 15: CHECK(mlock(mapping + 2 * PAGE, PAGE) == 0); break;
    case 16: CHECK(munlock(mapping + 2 * PAGE, PAGE) == 0); break;
    case 17: CHECK(munmap(mapping + 4 * PAGE, 8 * PAGE) == 0); break;
    case 18: grown = mremap(mapping + 2 * PAGE, 2 * PAGE, LONG, MREMAP_MAYMOVE); break;
    case 19: CHECK(grown != MAP_FAILED && munmap(grown, LONG) == 0); break;
    case 20: CHECK(munmap(mapping, LONG) == 0); break;
    case 21: CHECK(posix_memalign((void **)&aligned, 64 * KIB, LONG) == 0); break;
    case 22: free(aligned); break;
    case 23: handle(SIGUSR2, (void (*)(int, siginfo_t *, void *))abort); break;
    default: return 0;
    }
    return 1;
}

static volatile unsigned steps, held;

static void on_step(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)info;
    steps++;
    if (sigismember(&((ucontext_t *)context)->uc_sigmask, SIGALRM)) {
        held++;
        return;
    }
    /* Here another signal could have come. */
    if (steps % 8)
        touch();
    else
        call();
}

/* The processor raises SIGTRAP after each instruction while bit 8 of its flags is set. */
#define FLAGS(change)                                                                              \
    __asm__ volatile("lea -128(%%rsp), %%rsp\n pushfq\n " change                                   \
                     ", (%%rsp)\n popfq\n lea 128(%%rsp), %%rsp" ::: "memory", "cc")

static void each(void) {
    handle(SIGTRAP, on_step);
    for (int which = 0, more = 1; more; which++) {
        FLAGS("orq $0x100");
        more = operation(which);
        FLAGS("andq $~0x100");
    }
    CHECK(steps > 2000 && touched > 2000);
    fprintf(stderr, "%u steps, %u of them with signals held back, %u touches\n", steps, held, touched);
}

static void on_timer(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)info, (void)context;
    call();
}

/* Profilers and preemptive fibres. */
static void storm(void) {
    handle(SIGALRM, on_timer);
    struct itimerval often = {{0, 300}, {0, 300}}, never = {0};
    CHECK(setitimer(ITIMER_REAL, &often, NULL) == 0);
    while (touched < 1000)
        for (int which = 0; operation(which);)
            which++;
    CHECK(setitimer(ITIMER_REAL, &never, NULL) == 0);
}

static _Atomic int stopped, goes_on, ended;

static void on_stop(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)info, (void)context;
    int before = errno;
    touch();
    int round = ++stopped;
    while (goes_on < round)
        usleep(20);
    errno = before;
}

static void *mutate(void *nothing) {
    while (!ended)
        for (int which = 0; operation(which);)
            which++;
    return nothing;
}

/* A collector that stops the world, and then needs memory. */
static void collector(void) {
    handle(SIGUSR1, on_stop);
    pthread_t mutator;
    CHECK(pthread_create(&mutator, NULL, mutate, NULL) == 0);
    for (int round = 1; round <= 500; round++) {
        CHECK(pthread_kill(mutator, SIGUSR1) == 0);
        while (stopped < round)
            usleep(20);
        char *block = calloc(1, LONG), *mapping = map(LONG);
        fill(block, LONG), fill(mapping, LONG);
        touch();
        CHECK(madvise(mapping, LONG, MADV_DONTNEED) == 0 && munmap(mapping, LONG) == 0);
        free(block);
        goes_on = round;
        usleep(100);
    }
    ended = 1;
    CHECK(pthread_join(mutator, NULL) == 0);
}

int main(int count, char **arguments) {
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {{"each", each}, {"storm", storm}, {"collector", collector}};
    CHECK(count == 2 && pipe(ends) == 0);
    memory = malloc(PAGES * PAGE + PAGE);
    memory += -(size_t)memory % PAGE;
    fill((char *)memory, PAGES * PAGE);
    for (size_t which = 0; which < sizeof cases / sizeof *cases; which++) {
        if (!strcmp(cases[which].name, arguments[1])) {
            cases[which].run();
            puts("done");
            return 0;
        }
    }
    return 2;
}
