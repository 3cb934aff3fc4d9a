/* Programs whose small objects are remote, by the first argument. The program has a variable with
 * the name of jemalloc's options. */
#define _GNU_SOURCE
#include <alloca.h>
#include <limits.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

const char *_rjem_malloc_conf = "abort_conf:true,no_such_option:true";

/* Makes and frees a list. */
static void list(int blocks) {
    void **list = NULL;
    for (int i = 0; i < blocks; i++) {
        size_t size = 32 + i % 60 * 8;
        void **block = malloc(size);
        if (!block)
            _exit(3);
        *(void **)memset(block, i, size) = list, list = block;
    }
    while (list) {
        void **rest = *list;
        free(list), list = rest;
    }
}

static int aligned(void) {
    for (int i = 0; i < 1000; i++) {
        void *blocks[] = {malloc(8), malloc(1), calloc(1, 8), aligned_alloc(8, 8), realloc(malloc(24), 8)};
        for (int at = 0; at < 5; at++)
            if ((uintptr_t)blocks[at] % 16)
                return 4;
    }
    return 0;
}

/* Leaves blocks behind. */
static void *leave(void *unused) {
    for (int i = 0; i < 100; i++)
        memset(malloc(96), i, 96);
    return unused;
}

static int ended(void) {
    for (int i = 0; i < 400; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, leave, NULL) || pthread_join(thread, NULL))
            return 5;
    }
    return 0;
}

/* Has a stack of 16 KiB, and some of that in use. */
static void *narrow(void *bytes) {
    memset(alloca((size_t)bytes), 1, (size_t)bytes);
    list(20000);
    return NULL;
}

static int narrow_stacks(void) {
    list(100000);
    pthread_attr_t attributes;
    pthread_t thread;
    if (pthread_attr_init(&attributes) || pthread_attr_setstacksize(&attributes, PTHREAD_STACK_MIN))
        return 6;
    for (int i = 0; i < 3; i++)
        if (pthread_create(&thread, &attributes, narrow, (void *)4000) || pthread_join(thread, NULL))
            return 7;
    return 0;
}

/* Opens no file any more, nor asks for its processors. */
static int confined(void) {
    char *large = malloc(20 << 20);
    memset(large, 1, 20 << 20);
    int calls[] = {SYS_open, SYS_openat, SYS_sched_getaffinity};
    struct sock_filter filter[8] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))};
    for (int i = 0; i < 3; i++) {
        filter[1 + 2 * i] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, calls[i], 0, 1);
        filter[2 + 2 * i] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    }
    filter[7] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = {8, filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
        return 8;
    list(100000);
    return puts("done"), fflush(stdout), _exit(0), 0;
}

int main(int argc, char **argv) {
    const char *how = argc > 1 ? argv[1] : "";
    int failed = !strcmp(how, "aligned") ? aligned()
                 : !strcmp(how, "ended") ? ended()
                 : !strcmp(how, "narrow") ? narrow_stacks()
                                            : confined();
    if (!failed)
        puts("done");
    return failed;
}
