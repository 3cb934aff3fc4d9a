// Children by `clone` and its kind, by functions, by number and by an instruction. Each child
// compares all of a block that is mostly absent, changes it, and compares it again.

#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BYTES = 32 << 20, WORDS = BYTES / 8, STEP = 64 };

static uint64_t *block;

static void fill(uint64_t round) {
    for (size_t at = 0; at < WORDS; at += STEP) block[at] = at * 31 + round;
}

static int holds(uint64_t round) {
    for (size_t at = 0; at < WORDS; at += STEP)
        if (block[at] != at * 31 + round) return 0;
    return 1;
}

static int child(void *argument) {
    (void)argument;
    int right = holds(1);
    fill(2);
    _exit(right && holds(2) ? 0 : 1);
}

static void fail(const char *what, long value) {
    printf("%s: %ld, errno %d\n", what, value, errno);
    exit(1);
}

// Waits for a child, which must have ended with `expected`.
static void must_end(const char *what, long process, int expected) {
    int status = 0;
    if (process <= 0) fail(what, process);
    fill(3);
    if (waitpid(process, &status, 0) != process || status != expected) fail(what, status);
    if (!holds(3)) fail("the parent's own", 0);
    fill(1);
}

static void check(const char *what, long made) {
    if (made == 0) child(NULL);
    must_end(what, made, 0);
}

#ifdef __x86_64__
// Makes a call of the kernel's that nobody sees.
static long by_instruction(long number, long flags) {
    long result;
    register long none __asm__("r10") = 0;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(flags), "S"(0), "d"(0), "r"(none)
                     : "rcx", "r11", "memory");
    return result;
}

static void start(void) { child(NULL); }

// Arguments of `clone3`, of its third version.
struct args {
    uint64_t flags, pidfd, child, parent, signal, stack, stack_size, tls, set, set_size, cgroup;
};

static void by_number(void) {
    static uint64_t stack[1 << 13] __attribute__((aligned(16)));
    // `syscall` returns to what lies at the child's stack pointer.
    uint64_t *top = &stack[(1 << 13) - 16];
    *top = (uintptr_t)start;
    check("fork", syscall(SYS_fork));
    check("clone", syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0));
    check("clone with a stack", syscall(SYS_clone, SIGCHLD, top, 0, 0, 0));
    check("clone like vfork", syscall(SYS_clone, SIGCHLD | CLONE_VFORK, 0, 0, 0, 0));
    struct args args = {.signal = SIGCHLD};
    check("clone3", syscall(SYS_clone3, &args, sizeof args));
    check("clone3 of the first version", syscall(SYS_clone3, &args, 64));
    args.stack = (uintptr_t)stack;
    args.stack_size = (uintptr_t)top - (uintptr_t)stack;
    check("clone3 with a stack", syscall(SYS_clone3, &args, sizeof args));
    if (syscall(SYS_clone3, NULL, 0) != -1 || errno != EINVAL) fail("clone3 of nothing", 0);
}

// The kernel is asked to write ids into absent pages of the block.
static void ids(void) {
    int *parent_id = (int *)&block[1 << 14] + 3, *child_id = (int *)&block[1 << 15] + 3;
    int flags = CLONE_PARENT_SETTID | CLONE_CHILD_SETTID;
    struct args args = {.flags = flags,
                        .signal = SIGCHLD,
                        .parent = (uintptr_t)parent_id,
                        .child = (uintptr_t)child_id};
    for (int which = 0; which < 2; which++) {
        *parent_id = *child_id = -1;
        fill(1);
        long made = which ? syscall(SYS_clone3, &args, sizeof args)
                          : syscall(SYS_clone, SIGCHLD | flags, 0, parent_id, child_id, 0);
        if (made == 0) {
            if (*child_id != getpid() || *parent_id != -1) _exit(3);
            child(NULL);
        }
        if (*parent_id != made || *child_id != -1) fail("ids", made);
        must_end("ids", made, 0);
    }
}

// A child that nobody sees has nothing of the block, also where it maps memory itself.
static void unseen(void) {
    long made = by_instruction(SYS_clone, SIGCHLD);
    if (made == 0) {
        char *own = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memset(own, 5, BYTES);
        child(NULL);
    }
    must_end("clone by an instruction", made, SIGSEGV);
}
#else
static void by_number(void) {}
static void ids(void) {}
static void unseen(void) {}
#endif

static int started(void *argument) {
    if (*(int *)argument != getpid()) _exit(3);
    return child(NULL);
}

static void by_function(void) {
    char *stack = malloc(1 << 16), *top = stack + (1 << 16);
    check("_Fork", _Fork());
    must_end("clone", clone(child, top, SIGCHLD, NULL), 0);
    must_end("clone like vfork", clone(child, top, SIGCHLD | CLONE_VFORK, NULL), 0);
    int *parent_id = (int *)&block[1 << 14] + 3, *child_id = (int *)&block[1 << 15] + 3;
    *parent_id = *child_id = -1;
    fill(1);
    int flags = SIGCHLD | CLONE_PARENT_SETTID | CLONE_CHILD_SETTID;
    long made = clone(started, top, flags, child_id, parent_id, NULL, child_id);
    if (*parent_id != made || *child_id != -1) fail("ids", made);
    must_end("ids", made, 0);
    int shares = SIGCHLD | CLONE_FILES;
    if (clone(child, top, shares, NULL) != -1 || errno != EINVAL) fail("shared descriptors", 0);
}

int main(void) {
    block = malloc(BYTES);
    fill(1);
    by_function();
    by_number();
    ids();
    unseen();
    puts("done");
    return 0;
}
