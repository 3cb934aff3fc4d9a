/* System calls on memory whose pages are absent: each case checks itself and says "done". */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/futex.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { MIB = 1 << 20, PAGE = 4096 };

/* Eight budgets, over which a thread sweeps so that everything else leaves. */
static volatile char *sweeps;
static atomic_int stop;

static void *sweep(void *unused) {
    (void)unused;
    while (!stop)
        for (size_t at = 0; at < 8 * MIB && !stop; at += PAGE)
            sweeps[at]++;
    return NULL;
}

/* Everything that is not touched right now is soon absent. */
static void settle(void) { usleep(3000); }

static char *remote(size_t bytes) {
    char *at = malloc(bytes);
    CHECK(at);
    memset(at, 0, bytes);
    return at;
}

static char pattern(size_t at) { return (char)(at * 2654435761u >> 13); }

static void fill(char *at, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        at[i] = pattern(i);
}

static int is_filled(const char *at, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (at[i] != pattern(i))
            return 0;
    return 1;
}

static void stdio(void) {
    char *out = remote(3 * MIB), *in = remote(3 * MIB), *buffer = remote(MIB);
    fill(out, 3 * MIB);
    FILE *file = tmpfile();
    CHECK(file);
    /* The stream's own buffer is remote, too. */
    CHECK(setvbuf(file, buffer, _IOFBF, MIB) == 0);
    settle();
    CHECK(fwrite(out, 1, 3 * MIB, file) == 3 * MIB);
    CHECK(fputs("line one\nline two\n", file) >= 0);
    CHECK(fflush(file) == 0);
    rewind(file);
    settle();
    CHECK(fread(in, 1, 3 * MIB, file) == 3 * MIB);
    CHECK(is_filled(in, 3 * MIB));
    settle();
    CHECK(fgets(in + 5 * PAGE, 100, file) && !strcmp(in + 5 * PAGE, "line one\n"));
    char *line = remote(MIB);
    size_t room = MIB;
    settle();
    CHECK(getline(&line, &room, file) == 9 && !strcmp(line, "line two\n"));
    CHECK(fclose(file) == 0);
}

static int pair[2];

static void *send_all(void *from) {
    CHECK(write(pair[1], from, 2 * MIB) == 2 * MIB);
    return NULL;
}

static void streams(void) {
    char *from = remote(2 * MIB), *to = remote(2 * MIB);
    fill(from, 2 * MIB);
    for (int kind = 0; kind < 2; kind++) {
        if (kind)
            CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
        else
            CHECK(pipe(pair) == 0);
        memset(to, 0, 2 * MIB);
        pthread_t sender;
        CHECK(pthread_create(&sender, NULL, send_all, from) == 0);
        for (size_t done = 0; done < 2 * MIB;) {
            ssize_t got = read(pair[0], to + done, 2 * MIB - done < 200000 ? 2 * MIB - done : 200000);
            CHECK(got > 0);
            done += got;
        }
        CHECK(pthread_join(sender, NULL) == 0);
        CHECK(is_filled(to, 2 * MIB));
    }
    CHECK(pthread_create(&(pthread_t){0}, NULL, send_all, from) == 0);
    memset(to, 0, 2 * MIB);
    settle();
    CHECK(recv(pair[0], to, 2 * MIB, MSG_WAITALL) == 2 * MIB && is_filled(to, 2 * MIB));
}

static void datagrams(void) {
    int a = socket(AF_INET, SOCK_DGRAM, 0), b = socket(AF_INET, SOCK_DGRAM, 0);
    char *memory = remote(MIB);
    struct sockaddr_in *address = (void *)(memory + 8 * PAGE);
    socklen_t *length = (void *)(memory + 20 * PAGE);
    CHECK(a >= 0 && b >= 0);
    address->sin_family = AF_INET;
    address->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    settle();
    CHECK(bind(b, (void *)address, sizeof *address) == 0);
    *length = sizeof *address;
    settle();
    CHECK(getsockname(b, (void *)address, length) == 0 && *length == sizeof *address);
    for (size_t round = 0; round < 120; round++) {
        size_t bytes = 1 + round * 500;
        char *from = memory + 30 * PAGE, *to = memory + 60 * PAGE;
        fill(from, bytes);
        settle();
        struct iovec out[2] = {{from, bytes / 2}, {from + bytes / 2, bytes - bytes / 2}};
        struct msghdr message = {
            .msg_name = address, .msg_namelen = sizeof *address, .msg_iov = out, .msg_iovlen = 2};
        CHECK(sendmsg(a, &message, 0) == (ssize_t)bytes);
        memset(to, 0, bytes);
        settle();
        if (round % 2) {
            CHECK(recv(b, to, 200000, 0) == (ssize_t)bytes);
        } else {
            struct sockaddr_in *sender = (void *)(memory + 12 * PAGE);
            struct iovec in = {to, 200000};
            struct msghdr received = {
                .msg_name = sender, .msg_namelen = sizeof *sender, .msg_iov = &in, .msg_iovlen = 1};
            CHECK(recvmsg(b, &received, 0) == (ssize_t)bytes);
            CHECK(sender->sin_family == AF_INET && !(received.msg_flags & MSG_TRUNC));
        }
        CHECK(is_filled(to, bytes));
    }
    /* Several by one call. */
    struct mmsghdr many[4] = {0};
    struct iovec parts[4];
    for (int i = 0; i < 4; i++) {
        parts[i] = (struct iovec){memory + (30 + i) * PAGE, 100 + i};
        many[i].msg_hdr = (struct msghdr){
            .msg_name = address, .msg_namelen = sizeof *address, .msg_iov = &parts[i], .msg_iovlen = 1};
        fill(parts[i].iov_base, 100 + i);
    }
    settle();
    CHECK(sendmmsg(a, many, 4, 0) == 4);
    for (int i = 0; i < 4; i++) {
        parts[i] = (struct iovec){memory + (60 + i) * PAGE, 1000};
        many[i].msg_hdr.msg_name = NULL;
    }
    settle();
    CHECK(recvmmsg(b, many, 4, MSG_WAITFORONE, NULL) == 4);
    for (int i = 0; i < 4; i++)
        CHECK(many[i].msg_len == 100u + i && is_filled(parts[i].iov_base, 100 + i));
}

static void vectors(void) {
    char *from = remote(MIB), *to = remote(MIB);
    fill(from, MIB);
    int fd = open("/tmp", O_TMPFILE | O_RDWR, 0600);
    CHECK(fd >= 0);
    struct iovec parts[10];
    for (int turn = 0; turn < 3; turn++) {
        for (int i = 0; i < 10; i++)
            parts[i] = (struct iovec){from + i * 100000, 100000};
        settle();
        CHECK((turn ? pwritev(fd, parts, 10, 0) : writev(fd, parts, 10)) == 1000000);
        memset(to, 0, MIB);
        for (int i = 0; i < 10; i++)
            parts[i].iov_base = to + i * 100000;
        settle();
        CHECK(lseek(fd, 0, SEEK_SET) == 0);
        ssize_t got = turn == 0 ? readv(fd, parts, 10)
                    : turn == 1 ? preadv(fd, parts, 10, 0)
                                : preadv2(fd, parts, 10, -1, 0);
        CHECK(got == 1000000 && is_filled(to, 1000000));
    }
    volatile int none = -1;
    CHECK(readv(fd, parts, none) == -1 && errno == EINVAL);
    close(fd);
    CHECK(readv(fd, parts, 10) == -1 && errno == EBADF);
}

struct shared {
    pthread_mutex_t mutex;
    char gap1[2 * PAGE];
    pthread_cond_t condition;
    char gap2[2 * PAGE];
    sem_t semaphore;
    char gap3[2 * PAGE];
    pthread_barrier_t barrier;
    char gap4[2 * PAGE];
    long count, turn;
    char end[MIB];
};

static void *work(void *argument) {
    struct shared *shared = argument;
    pthread_barrier_wait(&shared->barrier);
    for (int i = 0; i < 2000; i++) {
        CHECK(pthread_mutex_lock(&shared->mutex) == 0);
        shared->count++;
        CHECK(pthread_mutex_unlock(&shared->mutex) == 0);
    }
    for (int i = 0; i < 100; i++) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += 1000000;
        if (until.tv_nsec >= 1000000000)
            until.tv_sec++, until.tv_nsec -= 1000000000;
        CHECK(pthread_mutex_lock(&shared->mutex) == 0);
        int code = pthread_cond_timedwait(&shared->condition, &shared->mutex, &until);
        CHECK(code == 0 || code == ETIMEDOUT);
        shared->turn++;
        CHECK(pthread_mutex_unlock(&shared->mutex) == 0);
        CHECK(pthread_cond_signal(&shared->condition) == 0);
    }
    CHECK(sem_post(&shared->semaphore) == 0);
    return NULL;
}

static void locks(void) {
    struct shared *shared = (void *)remote(sizeof *shared);
    CHECK(pthread_mutex_init(&shared->mutex, NULL) == 0);
    CHECK(pthread_cond_init(&shared->condition, NULL) == 0);
    CHECK(sem_init(&shared->semaphore, 0, 0) == 0);
    CHECK(pthread_barrier_init(&shared->barrier, NULL, 4) == 0);
    pthread_t *threads = (void *)remote(MIB);
    for (int i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i * 1000], NULL, work, shared) == 0);
    for (int i = 0; i < 4; i++)
        CHECK(sem_wait(&shared->semaphore) == 0);
    for (int i = 0; i < 4; i++)
        CHECK(pthread_join(threads[i * 1000], NULL) == 0);
    CHECK(shared->count == 8000 && shared->turn == 400);
    /* The word alone: it is absent when the kernel looks at it. */
    int *word = (int *)remote(MIB) + 5000;
    for (int i = 0; i < 20; i++) {
        settle();
        struct timespec moment = {0, 100000};
        CHECK(syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, 0, &moment) == -1 && errno == ETIMEDOUT);
        settle();
        CHECK(syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, 1, NULL) == -1 && errno == EAGAIN);
    }
}

static void paths(void) {
    char *memory = remote(MIB);
    char *path = memory + 10 * PAGE - 4;
    for (int i = 0; i < 40; i++) {
        strcpy(path, "/proc/self/status");
        settle();
        int fd = open(path, O_RDONLY);
        CHECK(fd >= 0);
        struct stat *stat = (void *)(memory + 30 * PAGE - 64);
        settle();
        CHECK(fstat(fd, stat) == 0 && S_ISREG(stat->st_mode));
        close(fd);
        settle();
        CHECK(access(path, R_OK) == 0);
        settle();
        CHECK(readlink("/proc/self/exe", memory + 50 * PAGE - 3, 4000) > 5);
        settle();
        CHECK(getcwd(memory + 60 * PAGE - 2, 4000));
        settle();
        CHECK(getentropy(memory + 70 * PAGE - 100, 200) == 0);
        int *fds = (int *)(memory + 80 * PAGE - 4);
        settle();
        CHECK(pipe(fds) == 0);
        struct pollfd *ready = (void *)(memory + 90 * PAGE - 8);
        ready[0] = (struct pollfd){fds[0], POLLIN, 0};
        ready[1] = (struct pollfd){fds[1], POLLOUT, 0};
        settle();
        CHECK(poll(ready, 2, 0) == 1 && ready[0].revents == 0 && ready[1].revents == POLLOUT);
        close(fds[0]), close(fds[1]);
        int *status = (int *)(memory + 100 * PAGE);
        pid_t child;
        char *none[] = {"true", NULL};
        CHECK(posix_spawn(&child, "/bin/true", NULL, NULL, none, NULL) == 0);
        *status = 99;
        settle();
        CHECK(waitpid(child, status, 0) == child && *status == 0);
    }
    CHECK(open((char *)8, O_RDONLY) == -1 && errno == EFAULT);
}

static void raw(void) {
#ifdef __x86_64__
    char *to = remote(MIB);
    for (int i = 0; i < 50; i++) {
        int fd = open("/dev/zero", O_RDONLY);
        memset(to + i * PAGE, 1, 2 * PAGE);
        settle();
        long result;
        __asm__ volatile("syscall"
                         : "=a"(result)
                         : "0"(SYS_read), "D"(fd), "S"(to + i * PAGE), "d"(2 * PAGE)
                         : "rcx", "r11", "memory");
        CHECK(result == 2 * PAGE && to[i * PAGE] == 0 && to[(i + 2) * PAGE - 1] == 0);
        __asm__ volatile("syscall"
                         : "=a"(result)
                         : "0"(SYS_read), "D"(-1), "S"(to + i * PAGE), "d"(2 * PAGE)
                         : "rcx", "r11", "memory");
        CHECK(result == -EBADF);
        close(fd);
    }
#endif
}

/* The filter stays with children, which have nobody to handle its signal. */
static void children(void) {
    char *held = remote(MIB);
    fill(held, MIB);
    for (int i = 0; i < 5; i++) {
        FILE *child = popen("head -c 1000000 /dev/zero | tr '\\0' x | wc -c; printf ended", "r");
        CHECK(child);
        memset(held, 0, PAGE);
        settle();
        size_t got = fread(held, 1, MIB, child);
        CHECK(got > 5 && !memcmp(held, "1000000\nended", 13));
        CHECK(pclose(child) == 0);
    }
}

/* Runs a program under a filter that raises SIGSYS for buffers in the lower half of the places. */
static void filter(char **command) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[1]) + 4),
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 0x1000, 0, 2),
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 0x3000, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
    execv(*command, command);
    CHECK(!"it was run");
}

int main(int count, char **arguments) {
    if (count > 2 && !strcmp(arguments[1], "filter"))
        filter(arguments + 2);
    CHECK(count == 2);
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {{"stdio", stdio},     {"streams", streams}, {"datagrams", datagrams},
                 {"vectors", vectors}, {"locks", locks},     {"paths", paths},
                 {"raw", raw},         {"children", children}};
    sweeps = remote(8 * MIB);
    pthread_t sweeper;
    CHECK(pthread_create(&sweeper, NULL, sweep, NULL) == 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (!strcmp(cases[i].name, arguments[1])) {
            cases[i].run();
            stop = 1;
            CHECK(pthread_join(sweeper, NULL) == 0);
            puts("done");
            return 0;
        }
    return 2;
}
