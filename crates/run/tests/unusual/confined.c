/* Confines itself in one of several ways, and goes on with memory larger than the budget. Says
 * "confined" if it was let, and "done". */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define COUNT(list) (sizeof(list) / sizeof *(list))
#define ANSWER(what) BPF_STMT(BPF_RET | BPF_K, what)
#define LISTED(name, otherwise) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##name, otherwise, 0)

enum { MIB = 1 << 20 };

/* Goes through memory, frees it, and makes more. */
static int work(void) {
    for (int round = 0; round < 3; round++) {
        size_t bytes = 8 * MIB;
        char *at = malloc(bytes);
        if (!at)
            return 3;
        for (size_t i = 0; i < bytes; i += 512)
            at[i] = (char)(i / 512 + round);
        for (size_t i = 0; i < bytes; i += 512)
            if (at[i] != (char)(i / 512 + round))
                return 4;
        free(at);
    }
    return 0;
}

static unsigned flags;

static int filter(struct sock_filter *filter, size_t length, int by_number) {
    struct sock_fprog program = {length, filter};
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (flags)
        return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program);
    if (by_number)
        return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program);
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

/* All but one call. */
static int one_denied(int by_number) {
    struct sock_filter list[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        LISTED(ptrace, 1),
        ANSWER(SECCOMP_RET_ALLOW),
        ANSWER(SECCOMP_RET_ERRNO | EPERM),
    };
    return filter(list, COUNT(list), by_number);
}

/* What a program needs that has its memory to itself. */
static int few_allowed(int by_number) {
    struct sock_filter list[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        LISTED(read, 9),       LISTED(write, 8),      LISTED(exit_group, 7), LISTED(mmap, 6),
        LISTED(munmap, 5),     LISTED(brk, 4),        LISTED(futex, 3),      LISTED(mremap, 2),
        LISTED(newfstatat, 1),
        ANSWER(SECCOMP_RET_KILL_PROCESS),
        ANSWER(SECCOMP_RET_ALLOW),
    };
    return filter(list, COUNT(list), by_number);
}

/* All but new threads. */
static int no_threads(int by_number) {
    struct sock_filter list[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        LISTED(clone, 2),
        LISTED(clone3, 1),
        ANSWER(SECCOMP_RET_ALLOW),
        ANSWER(SECCOMP_RET_ERRNO | EPERM),
    };
    return filter(list, COUNT(list), by_number);
}

/* What kills the thread that makes a call, which this program then does. */
static int one_deadly(int by_number) {
    struct sock_filter list[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        LISTED(ptrace, 1),
        ANSWER(SECCOMP_RET_ALLOW),
        ANSWER(SECCOMP_RET_KILL_THREAD),
    };
    if (filter(list, COUNT(list), by_number))
        return -1;
    return syscall(SYS_ptrace, 0, 0, 0, 0);
}

/* Gives memory a name. */
static int is_named(char *at) {
    char *page = (char *)(((size_t)at + 4095) & ~(size_t)4095);
    if (prctl(PR_SET_VMA, PR_SET_VMA_ANON_NAME, page, 8192, "farpage-test"))
        return -1;
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && fgets(line, sizeof line, maps))
        if (strstr(line, "farpage-test"))
            puts("named");
    return 0;
}

int main(int count, char **arguments) {
    const char *how = count > 1 ? arguments[1] : "";
    int confined, by_number = count > 2;
    char *before = NULL;
    if (!strncmp(how, "first-", 6)) {
        /* Nothing is remote yet. The C library's allocator has begun. */
        free(malloc(16));
        how += 6;
    } else {
        before = malloc(MIB);
        memset(before, 1, MIB);
    }
    /* A thread that is gone is not all of the process. */
    alarm(20);
    if (!strcmp(how, "for-all-threads")) {
        flags = SECCOMP_FILTER_FLAG_TSYNC;
        how = "one-denied";
    }
    if (!strcmp(how, "one-denied"))
        confined = one_denied(by_number);
    else if (!strcmp(how, "no-threads"))
        confined = no_threads(by_number);
    else if (!strcmp(how, "few-allowed"))
        confined = few_allowed(by_number);
    else if (!strcmp(how, "one-deadly"))
        confined = one_deadly(by_number);
    else if (!strcmp(how, "strict"))
        confined = prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT);
    else if (!strcmp(how, "named"))
        confined = is_named(before);
    else if (!strcmp(how, "user-namespace"))
        confined = by_number ? syscall(SYS_unshare, CLONE_NEWUSER) : unshare(CLONE_NEWUSER);
    else
        return 2;
    if (confined == 0)
        puts("confined");
    else
        printf("errno %d\n", errno);
    fflush(stdout);
    free(before);
    int wrong = strcmp(how, "strict") || confined != 0 ? work() : 0;
    if (wrong)
        return wrong;
    puts("done");
    fflush(stdout);
    syscall(strcmp(how, "strict") || confined ? SYS_exit_group : SYS_exit, 0);
}
