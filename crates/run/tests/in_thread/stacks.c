/* Stacks in remote memory: of coroutines, and for signals. Each case says "done". */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/sched.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include "check.h"

enum { COROUTINES = 32, ROUNDS = 4, STACK = 256 << 10, MIB = 1 << 20 };

struct group {
    ucontext_t back, here[COROUTINES];
    long sums[COROUTINES];
};

static int descend(int depth) {
    volatile char pad[1000];
    memset((void *)pad, depth, sizeof pad);
    int below = depth ? descend(depth - 1) : 0;
    return below + pad[depth];
}

static void body(unsigned high, unsigned low, int which) {
    struct group *group = (struct group *)((unsigned long)high << 32 | low);
    for (int round = 0; round < ROUNDS; round++) {
        group->sums[which] += descend(60) + round;
        CHECK(swapcontext(&group->here[which], &group->back) == 0);
    }
}

static void begin(struct group *group, int which) {
    unsigned long at = (unsigned long)group;
    ucontext_t *here = &group->here[which];
    CHECK(getcontext(here) == 0);
    here->uc_stack = (stack_t){.ss_sp = malloc(STACK), .ss_size = STACK};
    here->uc_link = &group->back;
    CHECK(here->uc_stack.ss_sp);
    makecontext(here, (void (*)(void))body, 3, (unsigned)(at >> 32), (unsigned)at, which);
}

/* All stacks together are eight budgets. */
static void *coroutines(void *none) {
    (void)none;
    struct group *group = calloc(1, sizeof *group);
    for (int i = 0; i < COROUTINES; i++)
        begin(group, i);
    long sum = 0;
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < COROUTINES; i++)
            CHECK(swapcontext(&group->back, &group->here[i]) == 0);
    for (int i = 0; i < COROUTINES; i++)
        sum += group->sums[i], free(group->here[i].uc_stack.ss_sp);
    for (int i = 1; i < COROUTINES; i++)
        CHECK(group->sums[i] == group->sums[0]);
    free(group);
    return (void *)sum;
}

static void on_threads(void) {
    void *own = coroutines(NULL);
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        CHECK(pthread_create(&threads[i], NULL, coroutines, NULL) == 0);
    for (int i = 0; i < 3; i++) {
        void *sum;
        CHECK(pthread_join(threads[i], &sum) == 0 && sum == own);
    }
}

static volatile char *memory;
static int touched = 16 * MIB;

static void touch_all(void) {
    for (int at = 0; at < touched; at += 4096)
        memory[at]++;
}

static volatile int handled;
static stack_t programs;

static void on_signal(int signal) {
    char here;
    CHECK(signal == SIGUSR1 || signal == SIGSEGV);
    CHECK(&here > (char *)programs.ss_sp && &here < (char *)programs.ss_sp + programs.ss_size);
    stack_t told;
    CHECK(sigaltstack(NULL, &told) == 0 && told.ss_flags == SS_ONSTACK);
    CHECK(told.ss_sp == programs.ss_sp);
    touch_all();
    handled++;
}

/* The program's own stack for signals is remote. */
static void of_signals(void) {
    stack_t told;
    CHECK(sigaltstack(NULL, &told) == 0 && told.ss_flags == SS_DISABLE && !told.ss_sp);
    programs = (stack_t){.ss_sp = malloc(STACK), .ss_size = STACK};
    CHECK(sigaltstack(&programs, &told) == 0 && told.ss_flags == SS_DISABLE);
    CHECK(sigaltstack(NULL, &told) == 0 && told.ss_sp == programs.ss_sp && told.ss_flags == 0);
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_ONSTACK};
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    for (int round = 0; round < 20; round++) {
        touch_all();
        CHECK(raise(SIGUSR1) == 0 && handled == round + 1);
    }
    coroutines(NULL);
    stack_t none = {.ss_flags = SS_DISABLE}, tiny = {.ss_sp = programs.ss_sp, .ss_size = 16};
    CHECK(sigaltstack(&tiny, NULL) == -1 && errno == ENOMEM);
    CHECK(sigaltstack(&none, &told) == 0 && told.ss_sp == programs.ss_sp);
    CHECK(sigaltstack(NULL, &told) == 0 && told.ss_flags == SS_DISABLE && !told.ss_sp);
    free(programs.ss_sp);
    coroutines(NULL);
}

static int mappings(void) {
    int lines = 0;
    FILE *file = fopen("/proc/self/maps", "r");
    for (int byte; (byte = fgetc(file)) != EOF;)
        lines += byte == '\n';
    fclose(file);
    return lines;
}

static void *end(void *how) {
    touch_all();
    stack_t told;
    CHECK(sigaltstack(NULL, &told) == 0 && told.ss_flags == SS_DISABLE);
    if (how)
        pthread_exit(how);
    return how;
}

/* Threads that end, either way, leave no stack behind. */
static void of_threads(void) {
    int before = 0;
    for (long round = 0; round < 200; round++) {
        pthread_t thread;
        void *how;
        CHECK(pthread_create(&thread, NULL, end, (void *)(round % 2)) == 0);
        CHECK(pthread_join(thread, &how) == 0 && how == (void *)(round % 2));
        if (round == 20)
            before = mappings();
    }
    CHECK(mappings() < before + 20);
}

static void *on_given(void *stack) {
    touch_all();
    return (void *)(long)(descend(20) + raise(SIGUSR2) + (stack ? 0 : 1));
}

static void count_signal(int signal) {
    (void)signal;
    __atomic_fetch_add(&handled, 1, __ATOMIC_RELAXED);
}

/* Threads whose stacks the program has allocated. The stacks leave while the threads run. */
static void given(void) {
    struct sigaction action = {.sa_handler = count_signal};
    CHECK(sigaction(SIGUSR2, &action, NULL) == 0);
    for (int round = 0; round < 5; round++) {
        pthread_t threads[4];
        void *stacks[4], *result;
        for (int i = 0; i < 4; i++) {
            pthread_attr_t attributes;
            CHECK(pthread_attr_init(&attributes) == 0);
            CHECK(posix_memalign(&stacks[i], 4096, STACK) == 0);
            CHECK(pthread_attr_setstack(&attributes, stacks[i], STACK) == 0);
            CHECK(pthread_create(&threads[i], &attributes, on_given, stacks[i]) == 0);
            CHECK(pthread_attr_destroy(&attributes) == 0);
        }
        touch_all();
        for (int i = 0; i < 4; i++) {
            CHECK(pthread_join(threads[i], &result) == 0 && result == (void *)(long)descend(20));
            free(stacks[i]);
        }
    }
    CHECK(handled == 20);
}

static int in_child(void *deep) {
    touch_all();
    return (descend((int)(long)deep) & 63) + 1;
}

/* Ends a child of `clone` by number, which must not return on its new stack. */
static void end_child(void) {
    long status = in_child((void *)5L);
    for (;;)
        syscall(SYS_exit, status);
}

/* Children that share memory, and whose stacks leave while they run. */
static void shared(void) {
    /* Memory below the stacks of some has been given back. */
    char *half = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(half != MAP_FAILED);
    memset(half, 1, MIB);
    CHECK(munmap(half, MIB / 2) == 0);
    int flags[] = {CLONE_VM | CLONE_VFORK | SIGCHLD, CLONE_VM | SIGCHLD};
    int sizes[] = {STACK, 48 << 10, MIB / 2};
    /* Three budgets. */
    touched = 3 * MIB;
    for (int round = 0; round < 12; round++) {
        int size = sizes[round % 3], status;
        char *stack = malloc(size);
        long deep = size > 100 << 10 ? 60 : 10;
        touch_all();
        pid_t child = clone(in_child, stack + size, flags[round % 2], (void *)deep);
        CHECK(child > 0 && waitpid(child, &status, __WALL) == child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == (descend(deep) & 63) + 1);
#ifdef __x86_64__
        /* By number: the child's first return goes to what lies on its stack. */
        void **top = (void **)(stack + size) - 2;
        for (int by = 0; by < 2; by++) {
            top[0] = (void *)end_child;
            touch_all();
            struct clone_args args = {.flags = CLONE_VM,
                                      .exit_signal = SIGCHLD,
                                      .stack = (unsigned long)stack,
                                      .stack_size = (char *)top - stack};
            child = by ? syscall(SYS_clone3, &args, sizeof args)
                       : syscall(SYS_clone, CLONE_VM | SIGCHLD, top, NULL, NULL, NULL);
            CHECK(child > 0 && waitpid(child, &status, __WALL) == child);
            CHECK(WIFEXITED(status) && WEXITSTATUS(status) == (descend(5) & 63) + 1);
        }
#endif
        free(stack);
        char *end_of_low = half + MIB / 2 + (64 << 10);
        touch_all();
        child = clone(in_child, end_of_low, flags[round % 2], (void *)10L);
        CHECK(child > 0 && waitpid(child, &status, __WALL) == child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == (descend(10) & 63) + 1);
    }
}

int main(int count, char **arguments) {
    CHECK(count > 1);
    memory = malloc(16 * MIB);
    touch_all();
    if (!strcmp(arguments[1], "coroutines"))
        on_threads();
    else if (!strcmp(arguments[1], "signals"))
        of_signals();
    else if (!strcmp(arguments[1], "given"))
        given();
    else if (!strcmp(arguments[1], "shared"))
        shared();
    else
        of_threads();
    puts("done");
    return 0;
}
