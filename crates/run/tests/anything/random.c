// Random calls on one reservation, which a plain run answers in the same way: maps memory, files,
// code and shared memory over parts of it, protects, empties, moves and copies them, forks.
#define _GNU_SOURCE
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096ul
#define PAGES 192
#define ANON (MAP_PRIVATE | MAP_ANONYMOUS)
#define RW (PROT_READ | PROT_WRITE)

static unsigned long state;

static unsigned long below(unsigned long limit) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (state >> 11) % limit;
}

static sigjmp_buf back;
static volatile int is_expected;

static void on_signal(int signal) {
    if (!is_expected) {
        _exit(3);
    }
    siglongjmp(back, signal);
}

static unsigned char *base;

// Rights of each page: those of `mmap`, and 8 if nothing is mapped.
static int rights[PAGES];

static unsigned long digest(void) {
    volatile unsigned long all = 0;
    for (volatile int page = 0; page < PAGES; page++) {
        if (rights[page] & 8) {
            continue;
        }
        int caught = sigsetjmp(back, 1);
        is_expected = caught == 0;
        if (caught == 0) {
            for (unsigned long at = 0; at < PAGE; at += 8) {
                all = all * 31 + *(unsigned long *)(base + page * PAGE + at);
            }
        }
        is_expected = 0;
        all = all * 7 + caught;
    }
    return all;
}

static void set(int first, int pages, int right) {
    for (int page = first; page < first + pages; page++) {
        rights[page] = right;
    }
}

static int is_mapped(int first, int pages) {
    for (int page = first; page < first + pages; page++) {
        if (rights[page] & 8) {
            return 0;
        }
    }
    return 1;
}

int main(int count, char **arguments) {
    (void)count;
    state = strtoul(arguments[1], NULL, 10) * 0x9e3779b97f4a7c15ul + 1;
    int steps = atoi(arguments[2]);
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
    int fd = memfd_create("file", MFD_CLOEXEC);
    if (ftruncate(fd, PAGES * PAGE) != 0) {
        return 1;
    }
    for (unsigned long at = 0; at < PAGES * PAGE; at += 8) {
        unsigned long word = at * 0x9e3779b97f4a7c15ul;
        if (pwrite(fd, &word, 8, at) != 8) {
            return 1;
        }
    }
    base = mmap(NULL, PAGES * PAGE, PROT_NONE, ANON | MAP_NORESERVE, -1, 0);
    unsigned char *scratch = mmap(NULL, PAGES * PAGE, PROT_NONE, ANON | MAP_NORESERVE, -1, 0);
    unsigned char *other = malloc(6 << 20);
    for (int step = 0; step < steps; step++) {
        int first = below(PAGES), pages = 1 + below(below(4) ? 12 : PAGES);
        if (first + pages > PAGES) {
            pages = PAGES - first;
        }
        unsigned char *at = base + first * PAGE;
        size_t bytes = pages * PAGE;
        int what = below(13), protection = below(3) ? RW : (int[]){PROT_NONE, PROT_READ}[below(2)];
        void *made = at;
        int result = 0;
        switch (what) {
        case 0:
            made = mmap(at, bytes, protection, ANON | MAP_FIXED, -1, 0);
            set(first, pages, protection);
            break;
        case 1:
            made = mmap(at, bytes, protection, MAP_PRIVATE | MAP_FIXED, fd, first * PAGE);
            set(first, pages, protection);
            break;
        case 2:
            made = mmap(at, bytes, protection, MAP_SHARED | MAP_FIXED, fd, first * PAGE);
            set(first, pages, protection);
            break;
        case 3:
            made = mmap(at, bytes, RW | PROT_EXEC, ANON | MAP_FIXED, -1, 0);
            set(first, pages, RW);
            break;
        case 4:
            result = munmap(at, bytes);
            set(first, pages, 8);
            break;
        case 5:
        case 6:
            if (is_mapped(first, pages)) {
                result = mprotect(at, bytes, protection);
                set(first, pages, protection);
            }
            break;
        case 7:
            if (is_mapped(first, pages)) {
                result = madvise(at, bytes, MADV_DONTNEED);
            }
            break;
        case 8:
            // Never in a gap of the reservation, where a plain run might map it.
            if (below(2)) {
                made = mmap(NULL, bytes, RW, ANON | MAP_32BIT, -1, 0);
            } else {
                made = mmap(scratch, bytes, RW, ANON | MAP_FIXED, -1, 0);
            }
            memset(made, step, bytes);
            made = mremap(made, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, at);
            set(first, pages, RW);
            break;
        case 9:
            made = mmap(at, bytes, RW, ANON | MAP_FIXED_NOREPLACE, -1, 0);
            if (made == at) {
                set(first, pages, RW);
            }
            break;
        case 10:
            memset(other, step, 6 << 20);
            break;
        case 11:
            if (below(8) == 0) {
                fflush(stdout);
                if (fork() == 0) {
                    printf("%lx\n", digest());
                    fflush(stdout);
                    _exit(0);
                }
                wait(NULL);
            }
            break;
        case 12: {
            // To another place of the same rights.
            int to = below(PAGES);
            if (pages > 4) {
                pages = 4;
            }
            int is_apart = to + pages <= first || first + pages <= to;
            if (to + pages <= PAGES && is_apart && is_mapped(first, pages)) {
                made = mmap(at, pages * PAGE, RW, ANON | MAP_FIXED, -1, 0);
                memset(at, step, pages * PAGE);
                made = mremap(at, pages * PAGE, pages * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED,
                              base + to * PAGE);
                set(first, pages, 8);
                set(to, pages, RW);
                made = made == base + to * PAGE ? at : NULL;
            }
            break;
        }
        }
        printf("%d %d %d: %ld %d ", what, first, pages, made == MAP_FAILED ? -1l : made == at, result);
        for (int page = first; page < first + pages; page++) {
            if (rights[page] == RW && below(2)) {
                *(unsigned long *)(base + page * PAGE + below(512) * 8) = step;
            }
        }
        printf("%lx\n", digest());
    }
    return 0;
}
