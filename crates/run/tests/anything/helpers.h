// Helpers of the cases: reservations, files in memory, and touches that may raise a signal.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#define K 1024ul
#define M (1024 * K)
#define ANON (MAP_PRIVATE | MAP_ANONYMOUS)
#define RW (PROT_READ | PROT_WRITE)
#define RWX (RW | PROT_EXEC)

static sigjmp_buf back;
// Signal that was caught; -1 while one is expected.
static volatile int caught;

static void on_signal(int signal) {
    if (caught >= 0) {
        _exit(3);
    }
    caught = signal;
    siglongjmp(back, 1);
}

// Returns the byte at an address, or minus the signal that reading it raises.
static int peek(const volatile unsigned char *at) {
    caught = -1;
    int value = -1;
    if (sigsetjmp(back, 1) == 0) {
        value = *at;
        caught = 0;
        return value;
    }
    return -caught;
}

static int poke(volatile unsigned char *at, int value) {
    caught = -1;
    if (sigsetjmp(back, 1) == 0) {
        *at = value;
        caught = 0;
        return value;
    }
    return -caught;
}

static unsigned char *must(void *made, const char *what) {
    if (made == MAP_FAILED) {
        printf("%s: %s\n", what, strerror(errno));
        fflush(stdout);
        _exit(1);
    }
    return made;
}

static unsigned char *reserve(size_t bytes) {
    return must(mmap(NULL, bytes, PROT_NONE, ANON | MAP_NORESERVE, -1, 0), "reserve");
}

static unsigned char *over(unsigned char *at, size_t bytes, int protection, int flags, int fd) {
    unsigned char *made = must(mmap(at, bytes, protection, flags | MAP_FIXED, fd, 0), "over");
    if (made != at) {
        printf("elsewhere\n");
    }
    return made;
}

// A file in memory whose page `n` is full of `first + n`.
static int file(size_t bytes, int first) {
    int fd = memfd_create("file", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, bytes) != 0) {
        perror("memfd");
        _exit(1);
    }
    unsigned char page[4096];
    for (size_t at = 0; at < bytes; at += sizeof page) {
        memset(page, first + at / sizeof page, sizeof page);
        if (pwrite(fd, page, sizeof page, at) != sizeof page) {
            _exit(1);
        }
    }
    return fd;
}

static unsigned long sum(const unsigned char *from, size_t bytes) {
    unsigned long all = 0;
    for (size_t at = 0; at < bytes; at++) {
        all = all * 31 + from[at];
    }
    return all;
}

// Uses more memory than the budget, so that all that can leave has left.
static void press(void) {
    unsigned char *other = malloc(12 * M);
    for (int turn = 0; turn < 2; turn++) {
        memset(other, turn, 12 * M);
    }
    free(other);
}
