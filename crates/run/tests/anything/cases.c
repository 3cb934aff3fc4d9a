// Reservations that become something else. Each case prints the same natively and under farpage.
#include "helpers.h"

static void guards(void) {
    unsigned char *p = must(mmap(NULL, M, RW, ANON, -1, 0), "mmap");
    memset(p, 7, M);
    for (size_t at = 0; at < M; at += 20 * K) {
        over(p + at, 4 * K, PROT_NONE, ANON | MAP_NORESERVE, -1);
    }
    press();
    for (size_t at = 0; at < M; at += 4 * K) {
        printf("%d ", peek(p + at));
    }
    over(p + 20 * K, 4 * K, PROT_READ, MAP_SHARED, file(4 * K, 3));
    over(p + 20 * K, 4 * K, PROT_NONE, ANON, -1);
    printf("%d %d %d\n", peek(p + 19 * K), peek(p + 20 * K), peek(p + 24 * K));
    over(p + 20 * K, 4 * K, RW, ANON, -1);
    printf("%d %d\n", peek(p + 20 * K), poke(p + 20 * K, 5));
}

static void noreplace(void) {
    unsigned char *p = must(mmap(NULL, M, RW, ANON, -1, 0), "mmap");
    memset(p, 1, M);
    int fd = file(64 * K, 9);
    int flags = ANON | MAP_FIXED_NOREPLACE;
    void *made = mmap(p + 8 * K, 8 * K, RW, flags, -1, 0);
    printf("%s\n", made == MAP_FAILED ? strerror(errno) : "made");
    munmap(p + 64 * K, 72 * K);
    made = mmap(p + 60 * K, 8 * K, RW, flags, -1, 0);
    printf("%s\n", made == MAP_FAILED ? strerror(errno) : "made");
    made = mmap(p + 68 * K, 8 * K, RW, flags, -1, 0);
    printf("%d %d %d\n", made == p + 68 * K, peek(p + 68 * K), poke(p + 68 * K, 3));
    made = mmap(p + 80 * K, 20 * K, PROT_READ, MAP_PRIVATE | MAP_FIXED_NOREPLACE, fd, 0);
    printf("%d %d %d\n", made == p + 80 * K, peek(p + 80 * K), peek(p + 96 * K));
    made = mmap(p + 84 * K, 4 * K, PROT_READ, MAP_PRIVATE | MAP_FIXED_NOREPLACE, fd, 0);
    printf("%s\n", made == MAP_FAILED ? strerror(errno) : "made");
    munmap(p + 80 * K, 20 * K);
    made = mmap(p + 80 * K, 20 * K, RW, flags, -1, 0);
    printf("%d %d %d\n", made == p + 80 * K, peek(p + 80 * K), peek(p + 63 * K));
    printf("%d\n", munmap(p, M));
    printf("%d\n", mmap(p, 4 * K, RW, flags, -1, 0) == p);
}

static void not_to_children(void) {
    unsigned char *p = reserve(M);
    over(p + 16 * K, 64 * K, RW, MAP_SHARED | MAP_ANONYMOUS, -1);
    over(p + 256 * K, 64 * K, RWX, ANON, -1);
    memset(p + 256 * K, 4, 64 * K);
    printf("%d\n", madvise(p + 16 * K, 32 * K, MADV_DONTFORK));
    printf("%d\n", madvise(p + 256 * K, 32 * K, MADV_WIPEONFORK));
    poke(p + 48 * K, 6);
    fflush(stdout);
    if (fork() == 0) {
        printf("%d %d ", peek(p + 16 * K), peek(p + 48 * K));
        printf("%d %d\n", peek(p + 256 * K), peek(p + 288 * K));
        fflush(stdout);
        _exit(0);
    }
    wait(NULL);
    printf("%d %d\n", poke(p + 16 * K, 1), peek(p + 256 * K));
}

static void middle(void) {
    unsigned char *p = must(mmap(NULL, 4 * M, RW, ANON, -1, 0), "mmap");
    int fd = file(M, 1);
    for (int turn = 0; turn < 60; turn++) {
        size_t at = M + turn % 7 * 4 * K;
        memset(p, turn, 4 * M);
        munmap(p + at, M);
        over(p + at, M, PROT_READ, MAP_PRIVATE, fd);
        if (turn % 16 == 0) {
            press();
        }
        unsigned long before = sum(p + at - 64 * K, 64 * K);
        unsigned long within = sum(p + at, M), behind = sum(p + at + M, 64 * K);
        if (turn % 2 == 0) {
            munmap(p + at, M);
        }
        over(p + at, M, RW, ANON, -1);
        unsigned long empty = sum(p + at, M);
        memset(p + at, turn + 1, M);
        printf("%lx %lx %lx %lx %lx\n", before, within, behind, empty, sum(p + at, M));
        fflush(stdout);
    }
}

static void moves_in(void) {
    unsigned char *p = reserve(8 * M);
    int fixed = MREMAP_MAYMOVE | MREMAP_FIXED;
    // From elsewhere: small memory, and a file.
    unsigned char *small = must(mmap(NULL, 8 * K, RW, ANON, -1, 0), "mmap");
    memset(small, 8, 8 * K);
    must(mremap(small, 8 * K, 8 * K, fixed, p + 4 * K), "in");
    int fd = file(64 * K, 2);
    unsigned char *mapped = must(mmap(NULL, 64 * K, RW, MAP_SHARED, fd, 0), "mmap");
    must(mremap(mapped, 64 * K, 64 * K, fixed, p + 100 * K), "in");
    printf("%d %d %d\n", peek(p), peek(p + 4 * K), peek(p + 12 * K));
    printf("%d %d %d\n", peek(p + 100 * K), peek(p + 160 * K), peek(p + 164 * K));
    // From remote memory, at the same place in its page and at another.
    unsigned char *large = must(mmap(NULL, M, RW, ANON, -1, 0), "mmap");
    for (size_t at = 0; at < M; at++) {
        large[at] = at * 7 + at / 4096;
    }
    unsigned long all = sum(large, M);
    press();
    must(mremap(large, M, M, fixed, p + 2 * M), "in");
    printf("%d\n", sum(p + 2 * M, M) == all);
    must(mremap(p + 2 * M, M, M, fixed, p + 4 * M + 4 * K), "within");
    printf("%d\n", sum(p + 4 * M + 4 * K, M) == all);
    // Grown, shrunk, and a part of it.
    must(mremap(p + 4 * M + 4 * K, M, 2 * M, fixed, p + 6 * M), "grown");
    printf("%d %d\n", sum(p + 6 * M, M) == all, peek(p + 7 * M));
    must(mremap(p + 6 * M, 2 * M, 512 * K, fixed, p + M), "shrunk");
    printf("%lx\n", sum(p + M, 512 * K));
    // Out.
    unsigned char *out = must(mmap(NULL, 128 * K, PROT_NONE, MAP_SHARED | MAP_ANONYMOUS, -1, 0), "mmap");
    must(mremap(p + M, 96 * K, 96 * K, fixed, out), "out");
    printf("%lx\n", sum(out, 96 * K));
    must(mremap(p + 100 * K, 64 * K, 64 * K, fixed, p + 3 * M), "file within");
    printf("%d\n", peek(p + 3 * M));
    out = must(mremap(p + 3 * M, 64 * K, 32 * K, fixed, out), "file out");
    printf("%d\n", peek(out));
    printf("%s\n", mremap(p + 3 * M, 4 * K, 8 * K, MREMAP_MAYMOVE) == MAP_FAILED ? strerror(errno) : "moved");
    printf("%s\n", mremap(p + M + 96 * K, 4 * K, 4 * K, MREMAP_FIXED, p) == MAP_FAILED ? strerror(errno) : "moved");
}

static void stays_mapped(void) {
    unsigned char *p = must(mmap(NULL, M, RW, ANON, -1, 0), "mmap");
    for (size_t at = 0; at < M; at++) {
        p[at] = at * 3 + at / 4096;
    }
    unsigned long all = sum(p, M);
    press();
    int stays = MREMAP_MAYMOVE | MREMAP_DONTUNMAP;
    unsigned char *q = must(mremap(p, M, M, stays, NULL), "stays");
    printf("%d %d %d\n", q != p, sum(q, M) == all, sum(p, M) == 0);
    memset(p, 2, M);
    unsigned char *r = reserve(4 * M);
    must(mremap(q, M, M, stays | MREMAP_FIXED, r + M), "stays");
    printf("%d %d %d\n", sum(r + M, M) == all, sum(q, M) == 0, p[5]);
    over(r, 64 * K, RWX, ANON, -1);
    memset(r, 3, 64 * K);
    q = must(mremap(r, 64 * K, 64 * K, stays, NULL), "stays");
    printf("%d %d\n", q[100], r[100]);
    printf("%s\n", mremap(p, M, 2 * M, stays, NULL) == MAP_FAILED ? strerror(errno) : "moved");
}

static void twice(void) {
    size_t n = 256 * K;
    int fd = memfd_create("ring", 0);
    if (ftruncate(fd, n) != 0) {
        _exit(1);
    }
    unsigned char *p = reserve(3 * n);
    over(p + 4 * K, n, RW, MAP_SHARED, fd);
    over(p + 4 * K + n, n, RW, MAP_SHARED, fd);
    for (size_t at = 0; at < n; at++) {
        p[4 * K + at] = at * 5;
    }
    press();
    printf("%d\n", memcmp(p + 4 * K, p + 4 * K + n, n));
    fflush(stdout);
    if (fork() == 0) {
        p[4 * K + n + 17] = 200;
        _exit(0);
    }
    wait(NULL);
    printf("%d %d %d\n", p[4 * K + 17], peek(p), peek(p + 4 * K + 2 * n));
    munmap(p + 4 * K, n);
    printf("%d\n", peek(p + 4 * K + n + 17));
    mprotect(p, 4 * K, RW);
    printf("%d\n", poke(p, 1));
    munmap(p, 3 * n);
}

static const unsigned char code[] = {0xb8, 42, 0, 0, 0, 0xc3}; // mov eax, 42; ret

static int call(unsigned char *at) {
    return ((int (*)(void))at)();
}

static void executes(void) {
#ifdef __x86_64__
    unsigned char *p = reserve(16 * M);
    over(p + M, M, RWX, ANON, -1);
    mprotect(p + 4 * M, M, RWX);
    mprotect(p + 6 * M, M, RW);
    for (size_t at = 0; at < M; at += 4 * K) {
        memcpy(p + M + at + 100, code, sizeof code);
        memcpy(p + 4 * M + at + 100, code, sizeof code);
        memcpy(p + 6 * M + at + 4090, code, sizeof code);
    }
    mprotect(p + 6 * M, M, PROT_READ | PROT_EXEC);
    press();
    int all = 0;
    for (size_t at = 0; at < M; at += 4 * K) {
        all += call(p + M + at + 100) + call(p + 4 * M + at + 100) + call(p + 6 * M + at + 4090);
    }
    printf("%d %d\n", all, poke(p + 6 * M, 1));
    over(p + M, M, PROT_NONE, ANON | MAP_NORESERVE, -1);
    printf("%d\n", peek(p + M));
    over(p + M, 64 * K, RWX, ANON, -1);
    memcpy(p + M, code, sizeof code);
    printf("%d %d\n", call(p + M), peek(p + M + 64 * K));
#else
    printf("another machine\n");
#endif
}

static void mixed(void) {
    unsigned char *p = must(mmap(NULL, M, RW, ANON, -1, 0), "mmap");
    memset(p, 1, M);
    int fd = file(200 * K, 50);
    over(p + 36 * K, 200 * K, RW, MAP_PRIVATE, fd);
    over(p + 300 * K, 100 * K, RWX, ANON, -1);
    memset(p + 300 * K, 2, 100 * K);
    poke(p + 40 * K, 99);
    printf("%d\n", mprotect(p + 20 * K, 400 * K, PROT_READ));
    printf("%d %d %d %d\n", poke(p + 24 * K, 1), poke(p + 40 * K, 1), poke(p + 300 * K, 1), poke(p + 420 * K, 1));
    printf("%d\n", mprotect(p + 20 * K, 400 * K, RW));
    printf("%d\n", madvise(p + 20 * K, 400 * K, MADV_DONTNEED));
    printf("%d %d %d %d %d\n", peek(p + 16 * K), peek(p + 20 * K), peek(p + 40 * K), peek(p + 300 * K), peek(p + 420 * K));
    unsigned char pages[256];
    memset(pages, 9, sizeof pages);
    printf("%d\n", mlock(p + 32 * K, 16 * K));
    printf("%d\n", mincore(p + 32 * K, 16 * K, pages));
    printf("%d %d %d %d\n", pages[0] & 1, pages[1] & 1, pages[2] & 1, pages[3] & 1);
    printf("%d\n", munlock(p + 32 * K, 16 * K));
    printf("%d\n", mincore(p, M, pages));
    printf("%d %d\n", madvise(p, M, MADV_WILLNEED), madvise(p, M, MADV_POPULATE_READ));
    munmap(p + 36 * K, 200 * K);
    printf("%d %d\n", peek(p + 35 * K), peek(p + 236 * K));
    printf("%d\n", munmap(p, M));
}

static void children(void) {
    unsigned char *p = must(mmap(NULL, 4 * M, RW, ANON, -1, 0), "mmap");
    memset(p, 1, 4 * M);
    int fd = file(128 * K, 70);
    over(p + 4 * K, 128 * K, RW, MAP_PRIVATE, fd);
    over(p + M + 8 * K, 64 * K, RW, MAP_SHARED, fd);
    over(p + 2 * M + 12 * K, 64 * K, RWX, ANON, -1);
    memset(p + 2 * M + 12 * K, 33, 32 * K);
    press();
    for (int turn = 0; turn < 5; turn++) {
        fflush(stdout);
        if (fork() == 0) {
            p[4 * K] += 1;
            p[M + 8 * K] += 1;
            p[3 * M] = 9;
            printf("%lx %lx ", sum(p, M), sum(p + M, M));
            printf("%lx %lx\n", sum(p + 2 * M, M), sum(p + 3 * M, M));
            fflush(stdout);
            if (fork() == 0) {
                p[M + 8 * K] += 1;
                munmap(p + 2 * M, 64 * K);
                unsigned char *q = over(p + 2 * M, 32 * K, RW, ANON, -1);
                printf("%lx %lx %d\n", sum(p, 2 * M), sum(p + 3 * M, M), q[8]);
                fflush(stdout);
                _exit(0);
            }
            wait(NULL);
            _exit(0);
        }
        wait(NULL);
        printf("%d %d %d %d\n", p[4 * K], p[M + 8 * K], p[2 * M + 12 * K], p[3 * M]);
    }
    munmap(p + 4 * K, 128 * K);
    over(p, 256 * K, RW, ANON, -1);
    fflush(stdout);
    if (fork() == 0) {
        printf("%lx\n", sum(p, 256 * K));
        fflush(stdout);
        _exit(0);
    }
    wait(NULL);
}

static void behind_the_end(void) {
    unsigned char *p = reserve(M);
    int fd = file(64 * K, 1);
    over(p + 4 * K, 64 * K, RW, MAP_SHARED, fd);
    if (ftruncate(fd, 16 * K) != 0) {
        _exit(1);
    }
    for (int turn = 0; turn < 3; turn++) {
        printf("%d %d %d %d\n", peek(p + 4 * K), peek(p + 20 * K), poke(p + 40 * K, 1), peek(p + 80 * K));
    }
    if (ftruncate(fd, 64 * K) != 0) {
        _exit(1);
    }
    printf("%d\n", peek(p + 20 * K));
    /* A child's own mapping over what it has inherited. */
    unsigned char *q = must(mmap(NULL, M, RW, ANON, -1, 0), "mmap");
    memset(q, 1, M);
    fflush(stdout);
    if (fork() == 0) {
        over(q + 64 * K, 64 * K, RW, MAP_SHARED, fd);
        if (ftruncate(fd, 16 * K) != 0) {
            _exit(1);
        }
        for (int turn = 0; turn < 3; turn++) {
            printf("%d %d %d\n", peek(q + 68 * K), peek(q + 84 * K), peek(q + 192 * K));
        }
        fflush(stdout);
        _exit(0);
    }
    int status;
    wait(&status);
    printf("%x\n", status);
}

static void refused(void) {
    unsigned char *p = must(mmap(NULL, M, RW, ANON, -1, 0), "mmap");
    memset(p, 6, M);
    int flags = MAP_PRIVATE | MAP_FIXED;
    printf("%s\n", mmap(p + 4 * K, 64 * K, RW, flags, 999, 0) == MAP_FAILED ? strerror(errno) : "made");
    int fd = open("/proc/self/exe", O_RDONLY);
    printf("%s\n", mmap(p, 64 * K, RW, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED ? strerror(errno) : "made");
    printf("%s\n", mmap(p, 64 * K, RW, flags, fd, 5) == MAP_FAILED ? strerror(errno) : "made");
    printf("%s\n", mmap(p + 5, 64 * K, RW, flags, fd, 0) == MAP_FAILED ? strerror(errno) : "made");
    printf("%s\n", mmap(p, 64 * K, RW, MAP_FIXED | MAP_ANONYMOUS, -1, 0) == MAP_FAILED ? strerror(errno) : "made");
    printf("%d\n", sum(p, M) == sum(memset(malloc(M), 6, M), M));
}

static void calls(void) {
    unsigned char *p = must(mmap(NULL, M, RW, ANON, -1, 0), "mmap");
    memset(p, 1, M);
    over(p + 20 * K, 64 * K, RW, MAP_SHARED | MAP_ANONYMOUS, -1);
    int ends[2];
    if (pipe(ends) != 0) {
        _exit(1);
    }
    unsigned char some[32 * K];
    for (size_t at = 0; at < sizeof some; at++) {
        some[at] = at * 11;
    }
    ssize_t done = write(ends[1], some, sizeof some);
    done += read(ends[0], p + 8 * K, 24 * K);
    struct iovec parts[2] = {{p + 64 * K, 4 * K}, {p + 100 * K, 4 * K}};
    done += readv(ends[0], parts, 2);
    printf("%zd %lx %lx %lx\n", done, sum(p + 8 * K, 24 * K), sum(p + 64 * K, 4 * K), sum(p + 100 * K, 4 * K));
    done = write(ends[1], p + 16 * K, 8 * K);
    done += read(ends[0], some, 8 * K);
    printf("%zd %lx\n", done, sum(some, 8 * K));
    // A lock between processes.
    int *word = (int *)(p + 24 * K);
    *word = 0;
    fflush(stdout);
    if (fork() == 0) {
        __atomic_store_n(word, 1, __ATOMIC_SEQ_CST);
        syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
        _exit(0);
    }
    while (__atomic_load_n(word, __ATOMIC_SEQ_CST) == 0) {
        syscall(SYS_futex, word, FUTEX_WAIT, 0, NULL, NULL, 0);
    }
    wait(NULL);
    printf("%d\n", *word);
}

static void giants(void) {
    size_t giant = 1ul << 40;
    for (int turn = 0; turn < 3; turn++) {
        for (int access = 0; access < 2; access++) {
            int protection = access ? RW : PROT_NONE;
            unsigned char *p = must(mmap(NULL, giant, protection, ANON | MAP_NORESERVE, -1, 0), "giant");
            mprotect(p + giant / 2, M, RW);
            p[giant / 2 + 5] = 7;
            over(p + giant / 4, 64 * K, RWX, ANON, -1);
            p[giant / 4] = 1;
            printf("%d %d\n", p[giant / 2 + 5], peek(p));
            printf("%d\n", munmap(p, giant));
        }
    }
    unsigned char *p = reserve(200 * M);
    over(p, 200 * M, PROT_NONE, ANON | MAP_NORESERVE, -1);
    printf("%d\n", munmap(p, 200 * M));
}

// A thread uses bytes beside those that another maps over.
static unsigned char *border;
static volatile int is_over;

static void *use_border(void *offset) {
    volatile unsigned long *word = (volatile unsigned long *)(border + (size_t)offset);
    unsigned long turns = 0;
    while (!is_over || turns < 1000) {
        turns++;
        *word += 1;
        if (*word != turns) {
            printf("lost %lu %lu\n", *word, turns);
            fflush(stdout);
            _exit(1);
        }
    }
    return NULL;
}

static void borders(void) {
    unsigned char *all = must(mmap(NULL, 64 * M, RW, ANON, -1, 0), "mmap");
    int fd = file(64 * K, 1);
    unsigned long seen = 0;
    for (int turn = 0; turn < 150; turn++) {
        border = all + turn % 200 * 256 * K + (turn % 3 + 1) * 4 * K;
        pthread_t threads[2];
        is_over = 0;
        // Just before the file, and just behind.
        pthread_create(&threads[0], NULL, use_border, (void *)(4 * K - 64));
        pthread_create(&threads[1], NULL, use_border, (void *)(4 * K + 64 * K));
        for (int i = 0; i < turn % 5; i++) {
            all[63 * M + i * 64 * K] += 1;
        }
        over(border + 4 * K, 64 * K, PROT_READ, MAP_PRIVATE, fd);
        seen += sum(border + 4 * K, 64 * K);
        if (turn % 2) {
            over(border + 4 * K, 64 * K, RW, ANON, -1);
            seen += sum(border + 4 * K, 64 * K);
        } else if (turn % 3) {
            munmap(border + 4 * K, 64 * K);
        }
        is_over = 1;
        pthread_join(threads[0], NULL);
        pthread_join(threads[1], NULL);
    }
    printf("%lx\n", seen);
}

// Borders of remote memory, which the kernel has because of a file beside them, move with the rest.
static void moves_mixed(void) {
    unsigned char *r = reserve(8 * M);
    int fixed = MREMAP_MAYMOVE | MREMAP_FIXED, fd = file(64 * K, 1);
    int protections[] = {RW, PROT_READ, PROT_NONE};
    for (int turn = 0; turn < 9; turn++) {
        unsigned char *p = must(mmap(NULL, M, RW, ANON, -1, 0), "mmap");
        memset(p, turn + 1, M);
        over(p + 20 * K, 64 * K, PROT_READ, MAP_SHARED, fd);
        mprotect(p, 20 * K, protections[turn % 3]);
        press();
        size_t grown = turn / 3 == 1 ? 40 * K : 20 * K;
        unsigned char *to = r + turn * 256 * K + 4 * K, *q;
        switch (turn / 3) {
        case 0:
            q = must(mremap(p, 20 * K, grown, fixed, to), "fixed");
            break;
        case 1:
            q = must(mremap(p, 20 * K, grown, MREMAP_MAYMOVE), "grown");
            break;
        default:
            q = must(mremap(p, 20 * K, grown, fixed | MREMAP_DONTUNMAP, to), "stays");
            printf("%d %d ", poke(p, 1), poke(p + 16 * K, 1));
            mprotect(p, 20 * K, RW);
            printf("%d %d\n", peek(p + 1), peek(p + 16 * K + 1));
        }
        printf("%d %d %d ", peek(q), peek(q + 16 * K), peek(q + grown - 1));
        printf("%d %d %d ", poke(q, 5), poke(q + 16 * K, 6), poke(q + grown - 1, 7));
        mprotect(q, grown, RW);
        printf("%d %d %d %d\n", peek(q), peek(q + 1), peek(q + 16 * K), peek(q + grown - 1));
        munmap(p, M);
    }
}

static volatile int is_forking;

// Maps files in remote memory and takes them away, all the time.
static void *cede_and_regain(void *at) {
    int fd = file(64 * K, 1);
    while (is_forking) {
        over(at, 64 * K, PROT_READ, MAP_SHARED, fd);
        over(at, 64 * K, RW, ANON, -1);
    }
    return NULL;
}

static void children_move(void) {
    unsigned char *p = must(mmap(NULL, 4 * M, RW, ANON, -1, 0), "mmap");
    over(p, 64 * K, RW, MAP_SHARED, file(64 * K, 40));
    is_forking = 1;
    pthread_t thread;
    pthread_create(&thread, NULL, cede_and_regain, p + 2 * M);
    for (int turn = 0; turn < 40; turn++) {
        fflush(stdout);
        if (fork() == 0) {
            unsigned char *to = mmap(NULL, 64 * K, PROT_NONE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
            unsigned char *q = mremap(p, 64 * K, 64 * K, MREMAP_MAYMOVE | MREMAP_FIXED, to);
            printf("%s %d\n", q == to ? "moved" : strerror(errno), peek(to + 4 * K));
            fflush(stdout);
            _exit(0);
        }
        wait(NULL);
    }
    is_forking = 0;
    pthread_join(thread, NULL);
}

// What a debugger calls brings remote memory in on both sides of a file.
static void debugged(void) {
    unsigned char *p = must(mmap(NULL, M, RW, ANON, -1, 0), "mmap");
    memset(p, 1, M);
    over(p + 36 * K, 200 * K, PROT_READ, MAP_SHARED, file(200 * K, 1));
    press();
    int (*bring_in)(const void *, size_t) =
        (int (*)(const void *, size_t))dlsym(RTLD_DEFAULT, "farpage_bring_in");
    printf("%d\n", bring_in ? bring_in(p, M) : 0);
    unsigned char pages[256];
    printf("%d ", mincore(p, M, pages));
    printf("%d %d\n", pages[0] & 1, pages[255] & 1);
}

// Kilobytes that the kernel has locked.
static int locked_kilobytes(void) {
    char line[256];
    int kilobytes = -1;
    FILE *status = fopen("/proc/self/status", "r");
    while (fgets(line, sizeof line, status)) {
        sscanf(line, "VmLck: %d", &kilobytes);
    }
    fclose(status);
    return kilobytes;
}

static void locked(void) {
    unsigned char *p = must(mmap(NULL, 256 * K, RW, ANON, -1, 0), "mmap");
    memset(p, 3, 256 * K);
    printf("%d\n", mlock(p, 64 * K));
    over(p + 20 * K, 8 * K, RW, MAP_SHARED | MAP_ANONYMOUS, -1);
    printf("%d %d %d\n", peek(p + 16 * K), peek(p + 20 * K), peek(p + 28 * K));
    printf("%d kB\n", locked_kilobytes());
    press();
    unsigned char pages[16];
    printf("%d\n", mincore(p, 64 * K, pages));
    printf("%d\n", (pages[0] & pages[4] & pages[7] & pages[15] & 1));
    printf("%d %d\n", munlock(p, 64 * K), munmap(p, 256 * K));
}

// Uses up all mappings of the process but a few, as `vm.max_map_count` allows.
static unsigned char *filler;
static size_t used_up;

static void use_up(void) {
    used_up = 0;
    while (mprotect(filler + used_up * 8 * K, 4 * K, PROT_READ) == 0) {
        used_up++;
    }
}

static void give_back(size_t mappings) {
    for (; mappings > 0 && used_up > 0; mappings--) {
        used_up--;
        mprotect(filler + used_up * 8 * K, 4 * K, PROT_NONE);
    }
}

// True if all bytes are `value`.
static int all_are(const unsigned char *from, size_t bytes, int value) {
    for (size_t at = 0; at < bytes; at += 512) {
        if (peek(from + at) != value) {
            return 0;
        }
    }
    return 1;
}

static void exhausted(void) {
    filler = must(mmap(NULL, 2048 * M, PROT_NONE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0), "mmap");
    int fd = file(64 * K, 9), fixed = MREMAP_MAYMOVE | MREMAP_FIXED;
    int refused = 0;
    for (int what = 0; what < 3; what++) {
        for (int free_mappings = 0; free_mappings < 14; free_mappings++) {
            unsigned char *p = must(mmap(NULL, M, RW, ANON, -1, 0), "mmap");
            memset(p, 3, M);
            // A source that cannot grow in place: other memory lies just behind.
            unsigned char *source = must(mmap(NULL, 64 * K, RW, MAP_SHARED | MAP_ANONYMOUS, -1, 0), "mmap");
            over(source + 32 * K, 32 * K, RW, MAP_PRIVATE, fd);
            memset(source, 5, 32 * K);
            unsigned char *at = p + 256 * K + 4 * K, *made;
            mlock(at - 4 * K, 4 * K);
            int locked = locked_kilobytes();
            use_up();
            give_back(free_mappings);
            if (what == 0) {
                made = mmap(at, 64 * K, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0);
            } else if (what == 1) {
                made = mremap(source, 32 * K, 64 * K, fixed, at);
            } else {
                made = mremap(source, 32 * K, 32 * K, fixed | MREMAP_DONTUNMAP, at);
            }
            give_back(used_up);
            size_t wanted = what == 2 ? 32 * K : 64 * K;
            int is_whole = all_are(p, at - p, 3) && all_are(at + wanted, p + M - at - wanted, 3);
            is_whole = is_whole && peek(source + 32 * K) == 9 && peek(source + 63 * K) == 16;
            is_whole = is_whole && locked_kilobytes() == locked;
            if (made == MAP_FAILED) {
                refused++;
                if (what == 0) {
                    // Other bytes there may be gone, but can be used.
                    is_whole = is_whole && poke(at, 1) == 1 && poke(at + 63 * K, 1) == 1;
                }
                is_whole = is_whole && all_are(source, 32 * K, 5);
            } else if (what == 0) {
                is_whole = is_whole && peek(at) == 9 && peek(at + 63 * K) == 24;
            } else {
                is_whole = is_whole && all_are(at, 32 * K, 5);
            }
            printf("%d %d %s\n", what, free_mappings, is_whole ? "whole" : "not whole");
            fflush(stdout);
            munmap(p, M);
            munmap(source, 64 * K);
        }
    }
    printf("%s\n", refused > 0 ? "some are refused" : "none is refused");
}

int main(int count, char **arguments) {
    (void)count;
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
    struct { const char *name; void (*run)(void); } cases[] = {
        {"guards", guards}, {"noreplace", noreplace}, {"not-to-children", not_to_children},
        {"middle", middle}, {"moves-in", moves_in}, {"stays-mapped", stays_mapped},
        {"twice", twice}, {"executes", executes}, {"mixed", mixed}, {"children", children},
        {"behind-the-end", behind_the_end}, {"refused", refused}, {"calls", calls},
        {"giants", giants}, {"borders", borders}, {"locked", locked},
        {"moves-mixed", moves_mixed}, {"children-move", children_move}, {"debugged", debugged},
        {"exhausted", exhausted},
    };
    for (size_t at = 0; at < sizeof cases / sizeof *cases; at++) {
        if (strcmp(arguments[1], cases[at].name) == 0) {
            cases[at].run();
            printf("done\n");
            return 0;
        }
    }
    return 2;
}
