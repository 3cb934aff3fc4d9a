/* An allocator of the program's own, whose state is in memory that it maps, and so remote. Each
 * call touches a page of it that has left. Only threads of the program may call it once there is
 * such memory: another's call could wait for a page that waits for that thread.
 *
 * The program has a `sigaction` of its own, too, as Erlang's runtime: it gives all handlers that it
 * finds the alternate stack. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define STATE (8u << 20)
#define BYTES (64u << 20)
#define PAGE 4096

static __thread int is_programs;
static volatile unsigned char *state;
static int foreign;
static char early[4 << 20];
static size_t used;

static void *take(size_t align, size_t bytes) {
    if (state) {
        if (!is_programs)
            __atomic_add_fetch(&foreign, 1, __ATOMIC_SEQ_CST);
        static size_t calls;
        state[__atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST) * 97 * PAGE % STATE]++;
    }
    if (align < 16)
        align = 16;
    size_t at = __atomic_fetch_add(&used, bytes + 16 + align, __ATOMIC_SEQ_CST);
    if (at + bytes + 16 + align > sizeof early)
        return NULL;
    uintptr_t made = ((uintptr_t)early + at + 16 + align - 1) / align * align;
    ((size_t *)made)[-1] = bytes;
    return (void *)made;
}

void *malloc(size_t bytes) { return take(16, bytes); }
void *memalign(size_t align, size_t bytes) { return take(align, bytes); }
void *aligned_alloc(size_t align, size_t bytes) { return take(align, bytes); }
void free(void *old) {
    if (old && state && !is_programs)
        __atomic_add_fetch(&foreign, 1, __ATOMIC_SEQ_CST);
}
void *calloc(size_t count, size_t bytes) {
    void *made = take(16, count * bytes);
    return made ? memset(made, 0, count * bytes) : NULL;
}
void *realloc(void *old, size_t bytes) {
    void *made = take(16, bytes);
    size_t before = old ? ((size_t *)old)[-1] : 0;
    return made && old ? memcpy(made, old, before < bytes ? before : bytes) : made;
}
size_t malloc_usable_size(void *of) { return of ? ((size_t *)of)[-1] : 0; }

int sigaction(int signal, const struct sigaction *new, struct sigaction *old) {
    int (*next)(int, const struct sigaction *, struct sigaction *) = NULL;
    *(void **)&next = dlsym(RTLD_NEXT, "__sigaction");
    return next(signal, new, old);
}

static int has_handlers(void) {
    struct sigaction found;
    int handlers = 0;
    for (int signal = 1; signal < 32; signal++) {
        if (sigaction(signal, NULL, &found) || found.sa_handler == SIG_DFL)
            continue;
        /* Shells start programs in the background with some signals ignored. */
        if (found.sa_handler == SIG_IGN)
            continue;
        handlers++;
        found.sa_flags |= SA_ONSTACK;
        sigaction(signal, &found, NULL);
    }
    return handlers;
}

static unsigned char *map(size_t bytes) {
    return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

static void *use(void *from) {
    is_programs = 1;
    volatile unsigned char *memory = from;
    for (int round = 0; round < 3; round++)
        for (size_t i = 0; i < BYTES / 2; i += PAGE) {
            if (memory[i] != (unsigned char)(round ? i / PAGE + round : 0))
                return "wrong";
            memory[i] = i / PAGE + round + 1;
        }
    return NULL;
}

int main(void) {
    is_programs = 1;
    unsigned char *mapped = map(STATE), *memory = map(BYTES);
    memset(mapped, 1, STATE);
    state = mapped;
    pthread_t other;
    void *wrong;
    if (has_handlers())
        return 2;
    if (pthread_create(&other, NULL, use, memory + BYTES / 2))
        return 1;
    void *mine = use(memory);
    pthread_join(other, &wrong);
    if (mine || wrong)
        return puts("the memory has changed"), 1;
    munmap(memory, BYTES);
    if (foreign)
        return printf("%d calls by threads of others\n", foreign), 1;
    puts("done");
    return 0;
}
