// Cases of memory that is ordinary until more is allocated than the budget.

#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#define K ((size_t)1024)
#define M (1024 * K)
#define PAGE (4 * K)

static void fail(const char *what) {
    printf("%s is wrong\n", what);
    fflush(stdout);
    _exit(1);
}

static void *get(size_t bytes) {
    void *made = malloc(bytes);
    if (made == NULL) {
        fail("malloc");
    }
    return made;
}

// Writes a word to every `step`th kernel page.
static void fill(char *at, size_t bytes, size_t step, size_t seed) {
    for (size_t offset = 0; offset < bytes; offset += step * PAGE) {
        *(size_t *)(at + offset) = offset * 31 + seed;
    }
}

static void check(char *at, size_t bytes, size_t step, size_t seed, const char *what) {
    for (size_t offset = 0; offset < bytes; offset += step * PAGE) {
        if (*(size_t *)(at + offset) != offset * 31 + seed) {
            fail(what);
        }
    }
}

static void fits(void) {
    char *p = get(16 * M);
    fill(p, 16 * M, 1, 1);
    p = realloc(p, 20 * M);
    check(p, 16 * M, 1, 1, "what has grown");
    for (int round = 0; round < 8; round++) {
        char *q = get(3 * M);
        fill(q, 3 * M, 3, round);
        free(q);
    }
    char *q = mmap(NULL, 2 * M, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (madvise(q, 2 * M, MADV_HUGEPAGE) != 0) {
        fail("advice");
    }
    fill(q, 2 * M, 1, 5);
    madvise(q, M, MADV_DONTNEED);
    if (q[0] != 0 || q[M - PAGE] != 0) {
        fail("what was given up");
    }
    check(q + M, M, 1, M * 31 + 5, "what stays");
    munmap(q, 2 * M);
    q = realloc(get(8 * M), M);
    free(q);
    check(p, 16 * M, 1, 1, "what is there");
    free(p);
}

static char *shared;
static atomic_int ends;

// Adds to words of its own, most of them in pages that are absent at first.
static void *adds(void *number) {
    size_t mine = (size_t)number * 64 + 64;
    size_t rounds = 0;
    while (!ends || rounds < 3) {
        for (size_t offset = 0; offset < 24 * M; offset += PAGE) {
            size_t *word = (size_t *)(shared + offset + mine);
            if (*word != rounds * offset) {
                fail("a word of a thread");
            }
            *word += offset;
        }
        rounds++;
    }
    return NULL;
}

static void grows(void) {
    pthread_t threads[8];
    shared = calloc(24, M);
    fill(shared, 24 * M, 5, 7);
    for (size_t at = 0; at < 8; at++) {
        pthread_create(&threads[at], NULL, adds, (void *)at);
    }
    char *q = get(24 * M);
    fill(q, 24 * M, 1, 9);
    ends = 1;
    for (size_t at = 0; at < 8; at++) {
        pthread_join(threads[at], NULL);
    }
    check(shared, 24 * M, 5, 7, "what was there");
    check(q, 24 * M, 1, 9, "what came");
    free(shared);
    free(q);
}

static void starts(void) {
    char *p = get(16 * M);
    fill(p, 16 * M, 1, 3);
    fflush(stdout);
    for (int round = 0; round < 3; round++) {
        if (system("exit 5") != 5 << 8) {
            fail("a started program");
        }
        pid_t child = fork();
        if (child == 0) {
            check(p, 16 * M, 1, 3, "a copy");
            execl("/bin/true", "true", NULL);
            _exit(9);
        }
        int status;
        if (waitpid(child, &status, 0) != child || status != 0) {
            fail("a child");
        }
        fill(p, 16 * M, 1, 3);
    }
    check(p, 16 * M, 1, 3, "what is there");
}

static void child(void) {
    char *p = get(24 * M);
    fill(p, 24 * M, 2, 3);
    int pipes[2];
    if (pipe(pipes) != 0) {
        fail("a pipe");
    }
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        char byte;
        if (read(pipes[0], &byte, 1) != 1) {
            _exit(8);
        }
        check(p, 24 * M, 2, 3, "a copy");
        fill(p, 24 * M, 1, 4);
        char *own = get(M);
        fill(own, M, 1, 5);
        free(p);
        check(own, M, 1, 5, "what a child has made");
        _exit(0);
    }
    char *q = get(24 * M);
    fill(p, 24 * M, 2, 6);
    fill(q, 24 * M, 1, 7);
    if (write(pipes[1], "1", 1) != 1) {
        fail("a pipe");
    }
    int status;
    if (waitpid(child, &status, 0) != child || status != 0) {
        fail("a child");
    }
    check(p, 24 * M, 2, 6, "what was there");
    check(q, 24 * M, 1, 7, "what came");
}

static void locks(void) {
    char *p = get(8 * M);
    fill(p, 8 * M, 1, 3);
    if (mlock(p, 64 * K) != 0) {
        fail("a lock");
    }
    // What was locked has come under paging with all else.
    char *q = get(28 * M);
    fill(q, 28 * M, 1, 4);
    check(p, 8 * M, 1, 3, "what is locked");
    check(q, 28 * M, 1, 4, "what came");
    munlock(p, 64 * K);
}

/* Mappings of others lie in ordinary memory, and stay when it comes under paging. */
static void maps_over(size_t more) {
    char *p = mmap(NULL, 8 * M, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    fill(p, 8 * M, 1, 3);
    char *made = mmap(p + M, M, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (made != p + M || made[0] != 0) {
        fail("a mapping");
    }
    memset(made, 5, M);
    check(p, M, 1, 3, "what lies before");
    check(p + 2 * M, 6 * M, 1, 2 * M * 31 + 3, "what lies behind");
    char *q = get(more);
    fill(q, more, 1, 4);
    check(p, M, 1, 3, "what lies before");
    check(p + 2 * M, 6 * M, 1, 2 * M * 31 + 3, "what lies behind");
    for (size_t i = 0; i < M; i++) {
        if (made[i] != 5) {
            fail("a mapping of others");
        }
    }
    munmap(p + M / 2, 8 * M - M / 2);
    check(q, more, 1, 4, "what came");
    check(p, M / 2, 1, 3, "what is left");
}

static void maps_over_and_fits(void) {
    maps_over(16 * M);
}

static void maps_over_and_grows(void) {
    maps_over(28 * M);
}

/* Addresses are reserved, and become memory part by part. */
static void reserves(size_t more) {
    char *p = mmap(NULL, 96 * M, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    for (int round = 0; round < 4; round++) {
        /* Each part takes the place of the one before. */
        char *part = p + round * 20 * M;
        if (mprotect(part, 20 * M, PROT_READ | PROT_WRITE) != 0) {
            fail("access");
        }
        fill(part, 20 * M, 1, 5);
        check(part, 20 * M, 1, 5, "what was reserved");
        if (round % 2 == 0) {
            mmap(part, 20 * M, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        } else {
            mprotect(part, 20 * M, PROT_NONE);
            madvise(part, 20 * M, MADV_DONTNEED);
        }
    }
    /* What the kernel refuses changes nothing. */
    if (mprotect(p, 60 * M, 1 << 14) == 0 || mprotect(p + 1, 60 * M, PROT_READ) == 0) {
        fail("a protection that there is not");
    }
    /* By whichever call. */
    if (pkey_mprotect(p, more / 2, PROT_READ | PROT_WRITE, -1) != 0 ||
        syscall(SYS_mprotect, p + more / 2, more / 2, PROT_READ | PROT_WRITE) != 0) {
        fail("access");
    }
    mprotect(p + more / 2, more / 2, PROT_READ | PROT_WRITE);
    fill(p, more, 1, 6);
    check(p, more, 1, 6, "what was reserved last");
    munmap(p, 96 * M);
    /* Reserved again at the same place. */
    char *again = mmap(p, 96 * M, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    munmap(again, 96 * M);
    /* What takes their place counts. */
    char *q = get(24 * M);
    fill(q, 24 * M, 1, 7);
    check(q, 24 * M, 1, 7, "what came");
}

static void gets_access_unseen(void) {
    char *p = mmap(NULL, (size_t)200 * M, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    syscall(SYS_mprotect, p + 100 * M, 2 * M, PROT_READ | PROT_WRITE);
    fill(p + 100 * M, 2 * M, 3, 8);
    char *q = get(28 * M), *r = NULL;
    fill(q, 28 * M, 1, 9);
    r = get(8 * M);
    fill(r, 8 * M, 1, 4);
    for (int turn = 0; turn < 2; turn++) {
        check(p + 100 * M, 2 * M, 3, 8, "what got access unseen");
        check(q, 28 * M, 1, 9, "what was there");
        check(r, 8 * M, 1, 4, "what came");
    }
}

static char *made[70000];

/* A mapping in place of another one is refused for lack of mappings. */
static void is_refused(void) {
    for (int spare = 0; spare < 24; spare += 3) {
        char *z = mmap(NULL, 16 * M, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        mmap(z, 16 * M, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        fill(z, 16 * M, 1, 7);
        char *p = get(28 * M);
        fill(p, 28 * M, 1, 5);
        int count = 0;
        for (; count < 70000; count++) {
            int access = count % 2 ? PROT_NONE : PROT_READ;
            char *q = (char *)syscall(SYS_mmap, NULL, 4096, access, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if ((long)q < 0) {
                break;
            }
            made[count] = q;
        }
        for (int i = 0; i < spare; i++) {
            syscall(SYS_munmap, made[--count], 4096);
        }
        char *r = mmap(z, 16 * M, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        while (count > 0) {
            syscall(SYS_munmap, made[--count], 4096);
        }
        if (r == MAP_FAILED) {
            check(z, 16 * M, 1, 7, "what was to be replaced");
        } else {
            fill(z, 16 * M, 1, 3);
            check(z, 16 * M, 1, 3, "what took its place");
        }
        check(p, 28 * M, 1, 5, "what lies beside");
        munmap(z, 16 * M);
        free(p);
    }
}

static void reserves_and_fits(void) {
    reserves(28 * M);
}

static void reserves_and_grows(void) {
    reserves(40 * M);
}

static ucontext_t back, there;

/* The allocation goes deeper into the stack than anything before. */
static void on_coroutine(void) {
    char *large = get(24 * M);
    fill(large, 24 * M, 1, 7);
    check(large, 24 * M, 1, 7, "what a coroutine made");
    free(large);
}

/* The stack of the thread that puts memory under paging is a part of that memory. */
static void coroutine(void) {
    char *kept = get(16 * M), *stack = get(M);
    fill(kept, 16 * M, 1, 6);
    getcontext(&there);
    there.uc_stack = (stack_t){.ss_sp = stack, .ss_size = M};
    there.uc_link = &back;
    makecontext(&there, on_coroutine, 0);
    if (swapcontext(&back, &there) != 0) {
        fail("a coroutine");
    }
    check(kept, 16 * M, 1, 6, "what was kept");
}

int main(int count, char **arguments) {
    struct { const char *name; void (*run)(void); } cases[] = {
        {"fits", fits}, {"grows", grows}, {"starts", starts}, {"child", child},
        {"locks", locks}, {"coroutine", coroutine},
        {"maps-over-and-fits", maps_over_and_fits}, {"maps-over-and-grows", maps_over_and_grows},
        {"gets-access-unseen", gets_access_unseen}, {"is-refused", is_refused},
        {"reserves-and-fits", reserves_and_fits}, {"reserves-and-grows", reserves_and_grows},
    };
    for (size_t at = 0; count == 2 && at < sizeof cases / sizeof *cases; at++) {
        if (strcmp(arguments[1], cases[at].name) == 0) {
            cases[at].run();
            printf("all is right\n");
            return 0;
        }
    }
    return 2;
}
