/* A program's own signals while its memory is remote: each case checks itself and says "done". */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/time.h>
#include <unistd.h>

#include "check.h"

enum { MIB = 1 << 20, PAGE = 4096, PAGES = 8 * MIB / PAGE };

static volatile char *memory;

/* Touches eight budgets: nearly every page is absent when it is. */
static void touch_all(void) {
    for (int page = 0; page < PAGES; page++)
        memory[page * PAGE]++;
}

static void *volatile handled_at;
static volatile int handled, handled_code;
static volatile char *guarded;

static void on_guard(int signal, siginfo_t *info, void *context) {
    (void)context;
    handled++, handled_at = info->si_addr, handled_code = info->si_code;
    CHECK(signal == SIGSEGV);
    CHECK(mprotect((void *)((size_t)info->si_addr & ~(size_t)(PAGE - 1)), PAGE, PROT_READ | PROT_WRITE) == 0);
    touch_all();
}

static void action(int signal, void (*handler)(int, siginfo_t *, void *), int flags) {
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO | flags};
    sigfillset(&action.sa_mask);
    CHECK(sigaction(signal, &action, NULL) == 0);
}

static void guard(void) {
    action(SIGSEGV, on_guard, 0);
    /* Of the kernel, and of remote memory. */
    char *places[] = {mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0),
                      (char *)(((size_t)memory + PAGE) & ~(size_t)(PAGE - 1))};
    for (int place = 0; place < 2; place++)
        for (int turn = 0; turn < 20; turn++) {
            guarded = places[place] + PAGE;
            touch_all();
            guarded[5] = (char)turn;
            CHECK(mprotect((void *)guarded, PAGE, PROT_NONE) == 0);
            handled = 0;
            guarded[7] = 3;
            CHECK(handled == 1 && handled_at == (void *)(guarded + 7) && handled_code == SEGV_ACCERR);
            CHECK(guarded[5] == (char)turn && guarded[7] == 3);
        }
}

/* A mapping that is longer than its file. */
static volatile char *short_file(void) {
    FILE *file = tmpfile();
    CHECK(file && ftruncate(fileno(file), PAGE) == 0);
    volatile char *at = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0);
    CHECK(at != MAP_FAILED);
    return at + PAGE;
}

static void mend(volatile char *at) {
    void *page = (void *)((size_t)at & ~(size_t)(PAGE - 1));
    CHECK(mmap(page, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == page);
}

static char alternate[64 << 10];
static volatile int was_on_alternate;

static void on_sigbus(int signal, siginfo_t *info, void *context) {
    (void)context;
    char here;
    was_on_alternate = &here >= alternate && &here < alternate + sizeof alternate;
    handled++, handled_at = info->si_addr, handled_code = info->si_code;
    CHECK(signal == SIGBUS);
    touch_all();
    mend(info->si_addr);
}

static volatile char *plain_at;

static void on_plain(int signal) {
    CHECK(signal == SIGBUS);
    handled++;
    touch_all();
    mend(plain_at);
}

static void sigbus(void) {
    for (int flags = 0; flags < 4; flags++) {
        int more = (flags & 1 ? SA_NODEFER : 0) | (flags & 2 ? SA_ONSTACK : 0);
        if (more & SA_ONSTACK) {
            stack_t stack = {.ss_sp = alternate, .ss_size = sizeof alternate};
            CHECK(sigaltstack(&stack, NULL) == 0);
        }
        action(SIGBUS, on_sigbus, more);
        touch_all();
        volatile char *at = short_file() + 77;
        handled = 0;
        *at = 5;
        CHECK(handled == 1 && handled_at == at && handled_code == BUS_ADRERR && *at == 5);
        CHECK(!(more & SA_ONSTACK) || was_on_alternate);
        touch_all();
        CHECK(handled == 1);
    }
    CHECK(signal(SIGBUS, on_plain) == (void (*)(int))(void *)on_sigbus);
    plain_at = short_file();
    handled = 0;
    *plain_at = 5;
    touch_all();
    CHECK(handled == 1 && *plain_at == 5);
    CHECK(signal(SIGBUS, SIG_DFL) == on_plain);
    touch_all();
}

static int same(const struct sigaction *one, const struct sigaction *other) {
    for (int i = 1; i < 65; i++)
        /* Those of the C library, and the two that nobody can hold back. */
        if (i != 32 && i != 33 && i != SIGKILL && i != SIGSTOP &&
            sigismember(&one->sa_mask, i) != sigismember(&other->sa_mask, i))
            return 0;
    return one->sa_sigaction == other->sa_sigaction &&
           (one->sa_flags & 0x7fffffff & ~0x04000000) == (other->sa_flags & 0x7fffffff & ~0x04000000);
}

static void believed(void) {
    int signals[] = {SIGBUS, SIGSYS, SIGSEGV, SIGUSR1};
    for (int i = 0; i < 4; i++) {
        struct sigaction first = {.sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO | SA_RESTART};
        struct sigaction second = {.sa_handler = on_plain, .sa_flags = SA_NODEFER}, seen;
        sigfillset(&first.sa_mask);
        sigemptyset(&second.sa_mask);
        CHECK(sigaction(signals[i], NULL, &seen) == 0 && seen.sa_handler == SIG_DFL);
        CHECK(sigaction(signals[i], &first, &seen) == 0 && seen.sa_handler == SIG_DFL);
        CHECK(sigaction(signals[i], NULL, &seen) == 0 && same(&seen, &first));
        CHECK(sigaction(signals[i], &second, &seen) == 0 && same(&seen, &first));
        CHECK(sigaction(signals[i], NULL, &seen) == 0 && same(&seen, &second));
        CHECK(signal(signals[i], SIG_DFL) == on_plain);
        touch_all();
    }
    CHECK(sigaction(SIGKILL, &(struct sigaction){.sa_handler = on_plain}, NULL) == -1 && errno == EINVAL);
    CHECK(sigaction(999, NULL, NULL) == -1 && errno == EINVAL);
    sigset_t set, old;
    sigemptyset(&set), sigaddset(&set, SIGBUS), sigaddset(&set, SIGUSR2);
    CHECK(sigprocmask(SIG_BLOCK, &set, &old) == 0 && !sigismember(&old, SIGBUS));
    CHECK(pthread_sigmask(SIG_BLOCK, NULL, &old) == 0);
    CHECK(sigismember(&old, SIGBUS) && sigismember(&old, SIGUSR2) && !sigismember(&old, SIGSYS));
    touch_all();
    CHECK(pthread_sigmask(SIG_UNBLOCK, &set, &old) == 0 && sigismember(&old, SIGBUS));
    CHECK(sigprocmask(SIG_SETMASK, NULL, &old) == 0 && !sigismember(&old, SIGBUS));
    CHECK(sigprocmask(77, &set, NULL) == -1 && errno == EINVAL);
}

static void *block_and_touch(void *how) {
    sigset_t all;
    sigfillset(&all);
    if (how)
        CHECK(pthread_sigmask(SIG_SETMASK, &all, NULL) == 0);
    touch_all();
    /* A system call with remote memory. */
    int fds[2];
    CHECK(pipe(fds) == 0);
    CHECK(write(fds[1], (char *)memory + 99 * PAGE, 5000) == 5000);
    CHECK(read(fds[0], (char *)memory + 1000 * PAGE, 5000) == 5000);
    close(fds[0]), close(fds[1]);
    return NULL;
}

static void blocked(void) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, block_and_touch, "all") == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    sigset_t all;
    sigfillset(&all);
    CHECK(sigprocmask(SIG_BLOCK, &all, NULL) == 0);
    touch_all();
    /* A thread inherits what its maker holds back. */
    CHECK(pthread_create(&thread, NULL, block_and_touch, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(kill(getpid(), SIGTERM) == 0);
    block_and_touch(NULL);
    sigset_t pending;
    CHECK(sigpending(&pending) == 0 && sigismember(&pending, SIGTERM));
    CHECK(signal(SIGTERM, SIG_IGN) == SIG_DFL);
}

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

/* Calls of System V and BSD, and the C library's own names, change no signal of the runtime's. */
extern int __sigaction(int, const struct sigaction *, struct sigaction *);
extern int __sigpause(int, int), __xpg_sigpause(int);

static void on_usr1(int signal) {
    CHECK(signal == SIGUSR1);
    handled++;
    touch_all();
}

static void old_calls(void) {
    struct sigaction seen;
    int signals[] = {SIGBUS, SIGSYS, SIGSEGV, SIGUSR1};
    for (int i = 0; i < 4; i++) {
        CHECK(__sigaction(signals[i], NULL, &seen) == 0 && seen.sa_handler == SIG_DFL);
        /* As Erlang's runtime does with the handlers that it finds. */
        seen.sa_flags |= SA_ONSTACK;
        CHECK(__sigaction(signals[i], &seen, NULL) == 0);
        CHECK(sigset(signals[i], on_plain) == SIG_DFL);
        touch_all();
        CHECK(sigset(signals[i], SIG_HOLD) == on_plain);
        touch_all();
        CHECK(sigset(signals[i], SIG_DFL) == SIG_HOLD);
        CHECK(sigignore(signals[i]) == 0 && sigset(signals[i], SIG_DFL) == SIG_IGN);
        CHECK(sighold(signals[i]) == 0 && siggetmask() == 1 << (signals[i] - 1));
        touch_all();
        CHECK(sigrelse(signals[i]) == 0 && siggetmask() == 0);
    }
    CHECK(sigset(999, SIG_IGN) == SIG_ERR && errno == EINVAL);
    CHECK(sighold(999) == -1 && errno == EINVAL);
    CHECK(sigblock(1 << (SIGBUS - 1)) == 0 && sigblock(~0) == 1 << (SIGBUS - 1));
    block_and_touch(NULL);
    int all = sigsetmask(0);
    CHECK(all >> (SIGBUS - 1) & 1 && all >> (SIGSYS - 1) & 1 && all >> (SIGTERM - 1) & 1);
    CHECK(sigsetmask(~0) == 0);
    block_and_touch(NULL);
    CHECK(signal(SIGUSR1, on_usr1) == SIG_DFL && raise(SIGUSR1) == 0);
    CHECK(__xpg_sigpause(SIGUSR1) == -1 && errno == EINTR && handled == 1);
    CHECK(raise(SIGUSR1) == 0 && __sigpause(~(1 << (SIGUSR1 - 1)), 0) == -1 && errno == EINTR);
    CHECK(handled == 2 && siggetmask() >> (SIGUSR1 - 1) & 1);
    touch_all();
}

static void on_timer(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)info, (void)context;
    handled++;
    memory[handled * 37 % PAGES * PAGE]++;
}

static void handlers(void) {
    action(SIGALRM, on_timer, SA_RESTART);
    struct itimerval often = {{0, 500}, {0, 500}};
    CHECK(setitimer(ITIMER_REAL, &often, NULL) == 0);
    while (handled < 100)
        touch_all();
    for (int turn = 0; turn < 20; turn++)
        block_and_touch(NULL);
    often.it_value.tv_usec = 0;
    CHECK(setitimer(ITIMER_REAL, &often, NULL) == 0);
}

/* Touches remote memory while the mask of a wait is in force. */
static void on_wait(int signal) {
    (void)signal;
    handled++;
    touch_all();
}

static void waits(void) {
    struct sigaction wake = {.sa_handler = on_wait};
    CHECK(sigaction(SIGALRM, &wake, NULL) == 0);
    sigset_t all;
    sigfillset(&all), sigdelset(&all, SIGALRM);
    int poller = epoll_create1(0);
    for (int which = 0; which < 4; which++) {
        struct itimerval soon = {{0, 0}, {0, 2000}};
        handled = 0;
        CHECK(setitimer(ITIMER_REAL, &soon, NULL) == 0);
        int result;
        struct epoll_event event;
        switch (which) {
        case 0: result = sigsuspend(&all); break;
        case 1: result = ppoll(NULL, 0, NULL, &all); break;
        case 2: result = pselect(0, NULL, NULL, NULL, NULL, &all); break;
        default: result = epoll_pwait(poller, &event, 1, -1, &all);
        }
        CHECK(result == -1 && errno == EINTR && handled == 1);
    }
}

static sigjmp_buf back;

static void leap(int signal) {
    (void)signal;
    handled++;
    touch_all();
    siglongjmp(back, 1);
}

static void longjmps(void) {
    volatile int turn;
    CHECK(signal(SIGBUS, leap) == SIG_DFL && signal(SIGSEGV, leap) == SIG_DFL);
    for (turn = 0; turn < 200; turn++) {
        volatile char *at = turn % 2 ? short_file() : (char *)8;
        if (sigsetjmp(back, 1) == 0) {
            *at = 1;
            CHECK(!"it was written");
        }
        memory[turn * 77 % PAGES * PAGE]++;
        /* Requests are still served from where they were. */
        char *more = mmap(NULL, 2 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(labs(more - (char *)memory) < 64L << 30);
        CHECK(munmap(more, 2 * MIB) == 0);
    }
    CHECK(handled == 200);
    touch_all();
}

static void die_at_once(void) {
    *short_file() = 1;
}

static void resets(int signal) {
    (void)signal;
}

static void die_once(void) {
    struct sigaction once = {.sa_handler = resets, .sa_flags = SA_RESETHAND}, seen;
    CHECK(sigaction(SIGBUS, &once, NULL) == 0);
    touch_all();
    CHECK(raise(SIGBUS) == 0);
    CHECK(sigaction(SIGBUS, NULL, &seen) == 0 && seen.sa_handler == SIG_DFL);
    *short_file() = 1;
}

static void die_sent(void) {
    kill(getpid(), SIGBUS);
    pause();
}

static void on_lost(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)context;
    volatile char *at = info->si_addr;
    if (at >= memory && at < memory + 8 * MIB && write(1, "handled\n", 8) == 8)
        _exit(42);
    _exit(43);
}

static const char *ready;

static void lose_server(void) {
    char gone[4096];
    snprintf(gone, sizeof gone, "%s.gone", ready);
    fclose(fopen(ready, "w"));
    while (access(gone, F_OK) != 0)
        usleep(1000);
}

static void lost(void) {
    lose_server();
    touch_all();
}

static void lost_handled(void) {
    action(SIGBUS, on_lost, 0);
    lost();
}

static char *mapping, *block;

/* Ends what the program has, as destructors do. */
static void give_back(void) {
    free(block);
    if (munmap(mapping, 64 * PAGE) == 0)
        puts("handled");
}

static void on_lost_exit(int signal) {
    (void)signal;
    exit(42);
}

/* What gives a part of a lost page back must not raise SIGBUS while it holds a lock. */
static void lost_in_part(void) {
    block = malloc(64 * PAGE);
    mapping = mmap(NULL, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(block && mapping != MAP_FAILED && atexit(give_back) == 0);
    for (int page = 0; page < 64; page++)
        mapping[page * PAGE] = 1;
    /* Until the page has left: which pages stay is the pager's choice. */
    for (unsigned char there = 1; there & 1;) {
        touch_all();
        CHECK(mincore(mapping + 9 * PAGE, PAGE, &there) == 0);
    }
    signal(SIGBUS, on_lost_exit);
    CHECK(mprotect(mapping + 9 * PAGE, PAGE, PROT_READ) == 0);
    lose_server();
    CHECK(madvise(mapping + 9 * PAGE, PAGE, MADV_DONTNEED) == -1 && errno == EAGAIN);
    CHECK(munmap(mapping + PAGE, PAGE) == 0);
    exit(42);
}

int main(int count, char **arguments) {
    CHECK(count >= 2);
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {{"guard", guard},         {"sigbus", sigbus},       {"believed", believed},
                 {"old", old_calls},       {"blocked", blocked},     {"handlers", handlers},   {"waits", waits},
                 {"longjmp", longjmps},    {"die", die_at_once},     {"die-once", die_once},
                 {"die-sent", die_sent},   {"lost", lost},           {"lost-handled", lost_handled},
                 {"lost-in-part", lost_in_part}};
    memory = malloc(8 * MIB);
    CHECK(memory);
    touch_all();
    ready = count > 2 ? arguments[2] : NULL;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (!strcmp(cases[i].name, arguments[1])) {
            cases[i].run();
            puts("done");
            return 0;
        }
    return 2;
}
