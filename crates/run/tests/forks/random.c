// Random calls on blocks of memory, and children at random moments by each call that makes them.
// Each process knows what its blocks hold, page by page. A child compares everything, makes random
// calls, makes a child itself, writes everything anew and compares again, while its parent and a
// thread of the parent's go on.

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, BLOCKS = 12, PAGES_MAX = 1024, CHILDREN_MAX = 3, DEPTH_MAX = 2 };

struct block {
    unsigned char *at;
    int pages;
    int is_mapped;
    // Number of the last write to each page; 0 where the page holds zeros.
    unsigned rounds[PAGES_MAX];
};

static struct block blocks[BLOCKS];
static unsigned round_now;
static unsigned long state;
static int depth;
static int children;
// False where another thread may have held the allocator's locks when this process was made.
static int allocates = 1;

static int below(int limit) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (state >> 11) % limit;
}

static uint64_t word(int block, int page, unsigned round, int at) {
    if (round == 0) return 0;
    uint64_t mixed = ((uint64_t)round << 32) ^ (block << 20) ^ (page << 9) ^ at;
    return mixed * 0x9e3779b97f4a7c15ul | 1;
}

static void fail(const char *what, int block, int page, uint64_t found, uint64_t wanted) {
    char line[200];
    int bytes = snprintf(line, sizeof line, "%d, depth %d: %s: block %d page %d: %lx, not %lx\n", getpid(),
                         depth, what, block, page, found, wanted);
    if (write(1, line, bytes) < 0) _exit(4);
    _exit(1);
}

static void check(const char *when, int which, int page) {
    struct block *block = &blocks[which];
    uint64_t *words = (uint64_t *)(block->at + (size_t)page * PAGE);
    for (int at = 0; at < PAGE / 8; at++) {
        uint64_t found = words[at], wanted = word(which, page, block->rounds[page], at);
        if (found != wanted) fail(when, which, page, found, wanted);
    }
}

static void write_page(int which, int page) {
    struct block *block = &blocks[which];
    uint64_t *words = (uint64_t *)(block->at + (size_t)page * PAGE);
    block->rounds[page] = ++round_now;
    for (int at = 0; at < PAGE / 8; at++) words[at] = word(which, page, round_now, at);
}

static void check_all(const char *when) {
    for (int which = 0; which < BLOCKS; which++)
        for (int page = 0; page < blocks[which].pages; page++) check(when, which, page);
}

static void write_all(void) {
    for (int which = 0; which < BLOCKS; which++)
        for (int page = 0; page < blocks[which].pages; page++) write_page(which, page);
}

// Makes the pages from `first` on those of fresh memory: zeros, or anything, which is written to.
static void fresh(int which, int first, int are_zeros) {
    struct block *block = &blocks[which];
    for (int page = first; page < block->pages; page++) {
        block->rounds[page] = 0;
        if (!are_zeros) write_page(which, page);
    }
}

static void allocate(int which) {
    struct block *block = &blocks[which];
    int how = below(3), pages = 1 + below(PAGES_MAX);
    size_t bytes = (size_t)pages * PAGE;
    block->is_mapped = how == 0;
    if (how == 0)
        block->at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    else
        block->at = how == 1 ? malloc(bytes) : calloc(1, bytes);
    if (block->at == NULL || block->at == MAP_FAILED) fail("no memory", which, pages, 0, 0);
    block->pages = pages;
    fresh(which, 0, how != 1);
}

static void resize(int which) {
    struct block *block = &blocks[which];
    int before = block->pages, pages = 1 + below(PAGES_MAX);
    void *at = block->is_mapped
                   ? mremap(block->at, (size_t)before * PAGE, (size_t)pages * PAGE, MREMAP_MAYMOVE)
                   : realloc(block->at, (size_t)pages * PAGE);
    if (at == NULL || at == MAP_FAILED) fail("no memory to grow", which, pages, 0, 0);
    block->at = at;
    block->pages = pages;
    if (before < pages) fresh(which, before, block->is_mapped);
}

static void release(int which) {
    struct block *block = &blocks[which];
    if (block->is_mapped)
        munmap(block->at, (size_t)block->pages * PAGE);
    else
        free(block->at);
    block->pages = 0;
}

static void reap(int at_most) {
    for (; children > at_most; children--) {
        int status;
        if (wait(&status) < 0) fail("wait", 0, 0, 0, 0);
        if (status != 0) fail("a child has failed", 0, 0, status, 0);
    }
}

static void fork_somehow(void);

// Makes one random call.
static void step(void) {
    int which = below(BLOCKS);
    struct block *block = &blocks[which];
    if (block->pages == 0) {
        if (allocates) allocate(which);
        return;
    }
    int first = below(block->pages), pages = 1 + below(16);
    if (first + pages > block->pages) pages = block->pages - first;
    unsigned char *at = block->at + (size_t)first * PAGE;
    size_t bytes = (size_t)pages * PAGE;
    switch (below(12)) {
    case 0:
        if (allocates) release(which);
        break;
    case 1:
        if (allocates) resize(which);
        break;
    case 2:
        if (block->is_mapped) {
            madvise(at, bytes, MADV_DONTNEED);
            memset(&block->rounds[first], 0, pages * sizeof(unsigned));
        }
        break;
    case 3:
        if (block->is_mapped) {
            mprotect(at, bytes, PROT_READ);
            for (int page = first; page < first + pages; page++) check("protected", which, page);
            mprotect(at, bytes, PROT_READ | PROT_WRITE);
        }
        break;
    case 4:
        if (depth < DEPTH_MAX && below(3) == 0) fork_somehow();
        break;
    case 5:
        if (children > 0 && below(2)) reap(children - 1);
        break;
    case 6:
    case 7:
    case 8:
        for (int page = first; page < first + pages; page++) write_page(which, page);
        break;
    default:
        for (int page = first; page < first + pages; page++) check("step", which, page);
    }
}

// Runs a child. `is_plain` says that `fork` has made it, which takes the allocator's locks.
static int live(void *is_plain) {
    allocates = allocates && is_plain != NULL;
    depth++;
    children = 0;
    state = state * 31 + round_now + 1;
    check_all("first");
    for (int at = below(40); at > 0; at--) step();
    if (below(2)) write_all();
    reap(0);
    check_all("last");
    _exit(0);
}

static void fork_somehow(void) {
    // The stack that this process runs on may be one of them.
    static char stacks[DEPTH_MAX][1 << 16] __attribute__((aligned(16)));
    reap(CHILDREN_MAX - 1);
    int how = below(allocates ? 5 : 3);
    long made;
    switch (how) {
    case 0:
        made = _Fork();
        break;
    case 1:
        made = clone(live, stacks[depth] + sizeof *stacks, SIGCHLD, NULL);
        break;
    case 2:
#ifdef __x86_64__
        made = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
#else
        made = _Fork();
#endif
        break;
    default:
        made = fork();
    }
    if (made == 0) live(how > 2 ? &state : NULL);
    if (made < 0) fail("no child", how, 0, 0, 0);
    children++;
    below(2);
}

static atomic_int is_over;

// Allocates, writes, compares and frees, while the other thread makes children.
static void *other(void *argument) {
    (void)argument;
    for (unsigned long turn = 1; !is_over; turn++) {
        size_t words = (128 << 10) + turn % 7 * 4096;
        unsigned long *block = malloc(8 * words);
        for (size_t at = 0; at < words; at += 64) block[at] = at ^ turn;
        for (size_t at = 0; at < words; at += 64)
            if (block[at] != (at ^ turn)) fail("the other thread's", 0, at / 512, block[at], at ^ turn);
        free(block);
    }
    return NULL;
}

int main(int count, char **arguments) {
    (void)count;
    pthread_t thread;
    state = strtoul(arguments[1], NULL, 10) * 0x9e3779b97f4a7c15ul + 1;
    pthread_create(&thread, NULL, other, NULL);
    // The first large allocation connects to the server. The file says that this is over.
    allocate(0);
    fclose(fopen(arguments[3], "w"));
    for (int left = atoi(arguments[2]); left > 0; left--) step();
    reap(0);
    check_all("end");
    is_over = 1;
    pthread_join(thread, NULL);
    puts("done");
    return 0;
}
