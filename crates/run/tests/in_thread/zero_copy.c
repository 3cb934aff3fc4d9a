/* Calls after which the kernel keeps references to memory. Each case gives memory away, goes
 * through more than the budget, and compares what comes out with what was put in. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/errqueue.h>
#include <linux/io_uring.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "check.h"

enum { KIB = 1 << 10, MIB = 1 << 20, PAGE = 4096, PIPE = 64 * KIB, SENT = 256 * KIB };

static char *others;

/* Goes through eight budgets twice: everything else leaves, and its frames serve others. */
static void churn(void) {
    for (int round = 0; round < 2; round++)
        for (size_t at = 0; at < 8 * MIB; at += PAGE / 2)
            others[at] = '#';
}

static char pattern(size_t at, int seed) {
    return (char)((at + 1 + (size_t)seed * 7919) * 2654435761u >> 13);
}

static void fill(char *at, size_t bytes, int seed) {
    for (size_t i = 0; i < bytes; i++)
        at[i] = pattern(i, seed);
}

/* Reads bytes, and compares them with a pattern. */
static void check_read(int fd, size_t bytes, int seed) {
    char in[PAGE];
    size_t done = 0, wrong = 0;
    while (done < bytes) {
        ssize_t got = read(fd, in, sizeof in < bytes - done ? sizeof in : bytes - done);
        CHECK(got > 0);
        for (ssize_t i = 0; i < got; i++)
            wrong += in[i] != pattern(done + i, seed);
        done += got;
    }
    if (wrong)
        fprintf(stderr, "%zu of %zu bytes are wrong\n", wrong, bytes);
    CHECK(!wrong);
}

static char *mapped(size_t bytes) {
    char *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    return at;
}

static void pipes(void) {
    int fd[2];
    CHECK(pipe(fd) == 0 && fcntl(fd[1], F_SETPIPE_SZ, PIPE) == PIPE);
    char *out = aligned_alloc(PAGE, MIB);
    for (int round = 0; round < 6; round++) {
        fill(out, PIPE, round);
        /* Two buffers, of which the second does not begin at a page. */
        struct iovec parts[2] = {{out, 2 * PAGE}, {out + 2 * PAGE, 5 * PAGE + 100}};
        ssize_t put = round % 2 ? syscall(SYS_vmsplice, fd[1], parts, 2, 0)
                                : vmsplice(fd[1], parts, 2, 0);
        CHECK(put == 7 * PAGE + 100);
        churn();
        check_read(fd[0], put, round);
    }
    /* Memory that is given up while its pages are in the pipe. */
    for (int round = 0; round < 6; round++) {
        char *gone = mapped(512 * KIB);
        fill(gone, 8 * PAGE, round);
        struct iovec part = {gone, 8 * PAGE};
        CHECK(vmsplice(fd[1], &part, 1, 0) == 8 * PAGE);
        CHECK(munmap(gone, 512 * KIB) == 0);
        char *next = mapped(512 * KIB);
        memset(next, '#', 512 * KIB);
        churn();
        check_read(fd[0], 8 * PAGE, round);
        CHECK(munmap(next, 512 * KIB) == 0);
    }
    /* A full pipe, and errors. */
    struct iovec much = {out, MIB}, one = {out, 1};
    fill(out, MIB, 9);
    CHECK(vmsplice(fd[1], &much, 1, 0) == PIPE);
    CHECK(vmsplice(fd[1], &one, 1, SPLICE_F_NONBLOCK) == -1 && errno == EAGAIN);
    churn();
    check_read(fd[0], PIPE, 9);
    CHECK(vmsplice(-1, &one, 1, 0) == -1 && errno == EBADF);
    CHECK(vmsplice(0, &one, 1, 0) == -1 && errno == EBADF);
    /* The end that is read copies out of the pipe. */
    fill(out, PAGE, 3);
    CHECK(write(fd[1], out, PAGE) == PAGE);
    memset(out, 0, PIPE);
    churn();
    struct iovec in = {out + 8 * PAGE, PAGE};
    CHECK(vmsplice(fd[0], &in, 1, 0) == PAGE);
    for (size_t i = 0; i < PAGE; i++)
        CHECK(out[8 * PAGE + i] == pattern(i, 3));
}

/* A connection whose receiver takes little until it reads, so that the rest waits at the sender. */
static void connected(int *from, int *to) {
    int listener = socket(AF_INET, SOCK_STREAM, 0), small = 4 * KIB, large = 4 * MIB, on = 1;
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t bytes = sizeof address;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK(setsockopt(listener, SOL_SOCKET, SO_RCVBUF, &small, sizeof small) == 0);
    CHECK(bind(listener, (void *)&address, sizeof address) == 0 && listen(listener, 1) == 0);
    CHECK(getsockname(listener, (void *)&address, &bytes) == 0);
    *from = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(setsockopt(*from, SOL_SOCKET, SO_SNDBUF, &large, sizeof large) == 0);
    CHECK(setsockopt(*from, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof on) == 0);
    CHECK(connect(*from, (void *)&address, sizeof address) == 0);
    *to = accept(listener, NULL, NULL);
    CHECK(*to >= 0 && close(listener) == 0);
}

/* Waits until the kernel says that it has let go of what call number `last` gave it. */
static void wait_for_notice(int fd, unsigned last) {
    for (;;) {
        char control[256];
        struct msghdr message = {.msg_control = control, .msg_controllen = sizeof control};
        struct pollfd ready = {fd, 0, 0};
        if (recvmsg(fd, &message, MSG_ERRQUEUE) < 0) {
            CHECK(errno == EAGAIN && poll(&ready, 1, 60000) == 1);
            continue;
        }
        struct sock_extended_err *notice = (void *)CMSG_DATA(CMSG_FIRSTHDR(&message));
        CHECK(notice->ee_origin == SO_EE_ORIGIN_ZEROCOPY && notice->ee_data <= last);
        if (notice->ee_data == last)
            return;
    }
}

static void sends(void) {
    int from, to;
    connected(&from, &to);
    char *out = aligned_alloc(PAGE, MIB);
    for (unsigned way = 0; way < 10; way++) {
        fill(out, SENT, way);
        struct iovec parts[2] = {{out, 100 * PAGE / 4}, {out + 100 * PAGE / 4, SENT - 100 * PAGE / 4}};
        struct mmsghdr message = {.msg_hdr = {.msg_iov = parts, .msg_iovlen = 2}};
        int flags = MSG_ZEROCOPY | MSG_DONTWAIT;
        ssize_t put = -1;
        switch (way % 5) {
        case 0: put = send(from, out, SENT, flags); break;
        case 1: put = sendto(from, out, SENT, flags, NULL, 0); break;
        case 2: put = sendmsg(from, &message.msg_hdr, flags); break;
        case 3: put = sendmmsg(from, &message, 1, flags) == 1 ? (ssize_t)message.msg_len : -1; break;
        case 4: put = syscall(SYS_sendto, from, out, SENT, flags, NULL, 0); break;
        }
        CHECK(put > 64 * KIB);
        churn();
        check_read(to, put, way);
        wait_for_notice(from, way);
    }
}

static struct io_uring_params params;
static int ring;

static void make_ring(void) {
    ring = syscall(SYS_io_uring_setup, 2, &params);
    if (ring < 0)
        ring = -errno;
}

/* Zero-copy sends by io_uring, from memory that is not registered. */
static void uring(void) {
    if (ring == -ENOSYS || ring == -EPERM) {
        puts("SKIPPED: there is no io_uring");
        return;
    }
    CHECK(ring >= 0 && params.features & IORING_FEAT_SINGLE_MMAP);
    size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
    int prot = PROT_READ | PROT_WRITE;
    char *rings = mmap(NULL, sq_bytes > cq_bytes ? sq_bytes : cq_bytes, prot, MAP_SHARED, ring,
                       IORING_OFF_SQ_RING);
    struct io_uring_sqe *sqe = mmap(NULL, params.sq_entries * sizeof *sqe, prot, MAP_SHARED, ring,
                                    IORING_OFF_SQES);
    CHECK(rings != MAP_FAILED && sqe != MAP_FAILED);
    int from, to;
    connected(&from, &to);
    char *out = aligned_alloc(PAGE, MIB);
    for (int round = 0; round < 4; round++) {
        fill(out, SENT, round);
        *sqe = (struct io_uring_sqe){.opcode = IORING_OP_SEND_ZC, .fd = from,
                                     .addr = (size_t)out, .len = SENT, .msg_flags = MSG_DONTWAIT};
        unsigned *tail = (void *)(rings + params.sq_off.tail);
        ((unsigned *)(rings + params.sq_off.array))[*tail & 1] = 0;
        __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
        CHECK(syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) == 1);
        unsigned *head = (void *)(rings + params.cq_off.head);
        unsigned mask = *(unsigned *)(rings + params.cq_off.ring_mask);
        struct io_uring_cqe *cqes = (void *)(rings + params.cq_off.cqes);
        int put = cqes[*head & mask].res;
        if (put == -EINVAL) {
            puts("SKIPPED: io_uring sends nothing without copying");
            return;
        }
        CHECK(put > 64 * KIB);
        CHECK(cqes[*head & mask].flags & IORING_CQE_F_MORE);
        __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
        churn();
        check_read(to, put, round);
        /* The kernel has let go. */
        while (__atomic_load_n((unsigned *)(rings + params.cq_off.tail), __ATOMIC_ACQUIRE) == *head)
            CHECK(syscall(SYS_io_uring_enter, ring, 0, 1, IORING_ENTER_GETEVENTS, NULL, 0) == 0);
        CHECK(cqes[*head & mask].flags & IORING_CQE_F_NOTIF);
        __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
    }
}

int main(int count, char **arguments) {
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {{"pipes", pipes}, {"sends", sends}, {"uring", uring},
                 {"uring-first", uring}};
    CHECK(count == 2);
    int first = !strcmp(arguments[1], "uring-first");
    /* "uring-first": before any memory is remote. */
    if (first)
        make_ring();
    others = malloc(8 * MIB);
    if (!strcmp(arguments[1], "uring"))
        make_ring();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (!strcmp(cases[i].name, arguments[1])) {
            cases[i].run();
            puts("done");
            return 0;
        }
    return 2;
}
