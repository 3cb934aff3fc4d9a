// Static arrays: 48 MiB, more with buffers, stacks and locks, which are given to the kernel, shared
// with threads, inherited by children, given back and locked. Prints the local memory in KiB.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#define WORDS (6u << 20)
#define BYTES (4 << 20)
#define LOCKS 1000

#ifdef LIBRARY
unsigned long in_library[WORDS];
#else
#ifdef WITH_LIBRARY
extern unsigned long in_library[WORDS];
#define words in_library
#else
static unsigned long words[WORDS];
#endif
static char buffer[BYTES], alternate[64 << 10], coroutine[64 << 10], path[64];
static pthread_mutex_t locks[LOCKS];
static ucontext_t back, there;
static volatile int handled;

#ifdef ALLOCATOR
void *__libc_malloc(size_t bytes);
void *malloc(size_t bytes) { return __libc_malloc(bytes); }
#endif

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static unsigned long value(unsigned at, unsigned long round) { return at * 2654435761ul + round; }

// Touches all words: what was touched before has left.
static void press(void) {
    for (unsigned i = 0; i < WORDS; i += 64) *(volatile unsigned long *)&words[i] += 0;
}

static void check(unsigned long round) {
    for (unsigned i = 0; i < WORDS; i++)
        if (words[i] != value(i, round)) fail("a word is wrong");
}

static void files(void) {
    strcpy(path, "/tmp/farpage-statics.XXXXXX");
    int fd = mkstemp(path);
    if (fd < 0 || write(fd, words, 2 * BYTES) != 2 * BYTES) fail("write");
    press();
    if (pread(fd, buffer, BYTES, 0) != BYTES) fail("pread");
    press();
    if (memcmp(buffer, words, BYTES) != 0) fail("pread's bytes");
    struct iovec parts[2] = {{buffer, BYTES / 4}, {buffer + BYTES / 2, BYTES / 4}};
    press();
    if (preadv(fd, parts, 2, BYTES) != BYTES / 2) fail("preadv");
    if (memcmp(buffer, (char *)words + BYTES, BYTES / 4) != 0) fail("preadv's bytes");
    // By number, and by an instruction of the kernel's own code in the program.
    press();
    if (syscall(SYS_pread64, fd, buffer, BYTES, 0) != BYTES) fail("pread by number");
    if (memcmp(buffer, words, BYTES) != 0) fail("bytes of pread by number");
    static struct timespec used;
    press();
    if (clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used) != 0 || used.tv_sec + used.tv_nsec == 0)
        fail("clock_gettime");
    struct stat found;
    press();
    if (stat(path, &found) != 0 || found.st_size != 2 * BYTES) fail("stat");
    FILE *file = fopen(path, "r");
    setvbuf(file, buffer, _IOFBF, BYTES / 4);
    press();
    for (unsigned i = 0; i < 100000; i++) {
        unsigned long word;
        if (fread(&word, sizeof word, 1, file) != 1 || word != value(i, 1)) fail("fread");
    }
    fclose(file);
    close(fd);
    unlink(path);
}

static void *use_locks(void *none) {
    for (unsigned i = 0; i < 2 * LOCKS; i++) {
        pthread_mutex_lock(&locks[i % LOCKS]);
        words[i * 4051ul * 512 % WORDS]++;
        words[i * 4051ul * 512 % WORDS]--;
        pthread_mutex_unlock(&locks[i % LOCKS]);
    }
    return none;
}

static void threads(void) {
    pthread_t made[4];
    for (int i = 0; i < LOCKS; i++) pthread_mutex_init(&locks[i], NULL);
    for (int i = 0; i < 4; i++) pthread_create(&made[i], NULL, use_locks, NULL);
    for (int i = 0; i < 4; i++) pthread_join(made[i], NULL);
}

static void on_signal(int signal) {
    volatile char some[4096];
    some[0] = (char)signal;
    handled += some[0] != 0;
}

static void on_coroutine(void) {
    press();
    swapcontext(&there, &back);
}

static void stacks(void) {
    stack_t stack = {.ss_sp = alternate, .ss_size = sizeof alternate};
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_ONSTACK};
    if (sigaltstack(&stack, NULL) != 0) fail("sigaltstack");
    sigaction(SIGUSR1, &action, NULL);
    press();
    raise(SIGUSR1);
    if (handled != 1) fail("no signal");
    getcontext(&there);
    there.uc_stack.ss_sp = coroutine;
    there.uc_stack.ss_size = sizeof coroutine;
    there.uc_link = &back;
    makecontext(&there, on_coroutine, 0);
    for (int i = 0; i < 2; i++) {
        press();
        swapcontext(&back, &there);
    }
}

static void children(void) {
    int child = fork(), status;
    if (child == 0) {
        check(1);
        for (unsigned i = 0; i < WORDS; i += 512) words[i] = 0;
        _exit(7);
    }
    for (unsigned i = 0; i < WORDS; i++) words[i] += 4;
    waitpid(child, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 7) fail("the child");
    check(5);
    FILE *said = popen("echo said", "r");
    if (fgets(path, sizeof path, said) == NULL || strcmp(path, "said\n") != 0) fail("popen");
    pclose(said);
}

static void advice(void) {
    char *page = (char *)(((size_t)buffer + 65535) & ~65535ul);
    size_t bytes = BYTES / 2;
    memset(page, 9, bytes);
    press();
    if (madvise(page, bytes, MADV_DONTNEED) != 0) fail("madvise");
    for (size_t i = 0; i < bytes; i++)
        if (page[i] != 0) fail("discarded bytes");
    if (madvise(page + 1, 4096, MADV_DONTNEED) == 0 || errno != EINVAL) fail("unaligned madvise");
    memset(page, 9, 4096);
    if (madvise(page, 100, MADV_DONTNEED) != 0 || page[0] != 0 || page[4095] != 0)
        fail("madvise of a part of a page");
    if (mprotect(page, bytes, PROT_READ) || mprotect(page, bytes, PROT_READ | PROT_WRITE))
        fail("mprotect");
    page[3] = 1;
    if (mlock(page, 65536) != 0) fail("mlock");
    press();
    if (page[3] != 1 || munlock(page, 65536) != 0) fail("munlock");
    check(5);
}

static long kilobytes(const char *what) {
    long found = 0;
    FILE *status = fopen("/proc/self/status", "r");
    while (fgets(path, sizeof path, status)) sscanf(path, what, &found);
    fclose(status);
    return found;
}

// Locks all, or fails because that is more than the budget has.
static void locks_all(void) {
    if (mlockall(MCL_CURRENT) == 0) {
        if (kilobytes("VmLck: %ld") < (long)sizeof words / 1024) fail("mlockall");
        munlockall();
    } else if (errno != ENOMEM) {
        fail("mlockall's error");
    }
    check(5);
}

int main(void) {
    for (unsigned i = 0; i < WORDS; i++) words[i] = value(i, 1);
    files();
    threads();
    stacks();
    check(1);
    children();
    advice();
    fprintf(stderr, "%ld KiB local at the end\n", kilobytes("RssAnon: %ld"));
    locks_all();
    puts("all is right");
    return 0;
}
#endif
