/* System calls whose arguments lead to absent memory by structures, lists or numbers, or are longer
   than a page. Each case prints the results, which a plain run has, too, and says "done". */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <linux/ethtool.h>
#include <linux/fiemap.h>
#include <linux/filter.h>
#include <linux/fs.h>
#include <linux/futex.h>
#include <linux/if.h>
#include <linux/keyctl.h>
#include <linux/perf_event.h>
#include <linux/seccomp.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/prctl.h>
#include <sys/sem.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

enum { MIB = 1 << 20, PAGE = 4096, ROUNDS = 3 };

/* Three budgets. */
static volatile char *sweeps;

/* Makes everything else absent. */
static void settle(void) {
    for (size_t at = 0; at < 3 * MIB; at += PAGE)
        sweeps[at]++;
}

/* Bytes behind each block: what is small becomes large by them. */
static size_t more;

static void *block(size_t bytes) {
    char *at = malloc(bytes + more);
    CHECK(at);
    memset(at, 0, bytes);
    return at;
}

/* Prints a call's result. */
static void told(int round, const char *what, long result) {
    printf("%d, %s: %ld %d\n", round, what, result, result < 0 ? errno : 0);
}

static void interfaces(int round) {
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    CHECK(fd >= 0);
    struct ifreq *list = block(32 * sizeof *list);
    struct ifconf local = {.ifc_len = 32 * sizeof *list, .ifc_req = list}, *remote = block(sizeof *remote);
    *remote = local;
    settle();
    int result = ioctl(fd, SIOCGIFCONF, &local);
    told(round, "SIOCGIFCONF", result);
    told(round, "bytes", local.ifc_len);
    told(round, "name", list[0].ifr_name[0]);
    settle();
    told(round, "SIOCGIFCONF, remote", ioctl(fd, SIOCGIFCONF, remote));
    told(round, "bytes", remote->ifc_len);
    struct ethtool_value *value = block(sizeof *value);
    struct ifreq request = {0}, *requested = block(sizeof *requested);
    strcpy(request.ifr_name, "lo");
    value->cmd = ETHTOOL_GLINK;
    request.ifr_data = (void *)value;
    *requested = request;
    settle();
    told(round, "SIOCETHTOOL", ioctl(fd, SIOCETHTOOL, &request));
    told(round, "value", value->data);
    settle();
    told(round, "SIOCETHTOOL by number", syscall(SYS_ioctl, fd, SIOCETHTOOL, requested));
    told(round, "value", value->data);
    told(round, "SIOCETHTOOL, nowhere", ioctl(fd, SIOCETHTOOL, 8));
    request.ifr_data = (void *)8;
    told(round, "SIOCETHTOOL to nowhere", ioctl(fd, SIOCETHTOOL, &request));
    close(fd);
}

static void filters(int round) {
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    struct sock_filter *filter = block(1000 * sizeof *filter);
    for (int i = 0; i < 999; i++)
        filter[i] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_IMM, i);
    filter[999] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, 7);
    struct sock_fprog local = {1000, filter}, *remote = block(sizeof *remote);
    *remote = local;
    settle();
    told(round, "SO_ATTACH_FILTER", setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &local, sizeof local));
    settle();
    told(round, "remote", setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, remote, sizeof local));
    settle();
    told(round, "by number", syscall(SYS_setsockopt, fd, SOL_SOCKET, SO_ATTACH_FILTER, &local, sizeof local));
    close(fd);
}

static void processes(int round) {
    enum { BYTES = 200000 };
    char *from = block(BYTES), *to = block(BYTES), *back = block(BYTES);
    char *shared = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int i = 0; i < BYTES; i++)
        from[i] = i * 7 + round;
    int ends[2];
    CHECK(pipe(ends) == 0);
    pid_t child = fork();
    if (child == 0) {
        char end;
        close(ends[1]);
        _exit(read(ends[0], &end, 1) == 0 ? 0 : 1);
    }
    struct iovec *own = block(2 * sizeof *own), *other = block(2 * sizeof *other);
    own[0] = (struct iovec){from, 1000}, own[1] = (struct iovec){from + 1000, BYTES - 1000};
    other[0] = (struct iovec){shared, 50000}, other[1] = (struct iovec){shared + 50000, BYTES - 50000};
    settle();
    told(round, "writev", process_vm_writev(child, own, 2, other, 2, 0));
    own[0].iov_base = to, own[1].iov_base = to + 1000;
    settle();
    told(round, "readv", process_vm_readv(child, own, 2, other, 2, 0));
    told(round, "same", memcmp(from, to, BYTES));
    struct iovec here = {back, BYTES}, there = {from, BYTES};
    settle();
    told(round, "own memory", syscall(SYS_process_vm_readv, getpid(), &here, 1, &there, 1, 0));
    told(round, "same", memcmp(from, back, BYTES));
    there.iov_base = (void *)8;
    told(round, "nowhere", process_vm_readv(getpid(), &here, 1, &there, 1, 0));
    close(ends[0]), close(ends[1]);
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    told(round, "child", status);
    munmap(shared, BYTES);
}

static void confined(int round) {
    struct sock_filter *filter = block(sizeof *filter);
    struct sock_fprog *program = block(sizeof *program);
    *filter = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    *program = (struct sock_fprog){1, filter};
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    settle();
    told(round, "PR_SET_SECCOMP", prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0));
    settle();
    told(round, "seccomp", syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, program));
}

static void programs(int round) {
    struct bpf_insn *code = block(2 * sizeof *code);
    code[0] = (struct bpf_insn){.code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = 0, .imm = 0};
    code[1] = (struct bpf_insn){.code = BPF_JMP | BPF_EXIT};
    char *license = block(4), *log = block(20000);
    strcpy(license, "GPL");
    union bpf_attr *attr = block(sizeof *attr), local;
    attr->prog_type = BPF_PROG_TYPE_SOCKET_FILTER;
    attr->insns = (uintptr_t)code, attr->insn_cnt = 2;
    attr->license = (uintptr_t)license;
    attr->log_buf = (uintptr_t)log, attr->log_size = 20000, attr->log_level = 1;
    local = *attr;
    settle();
    int fd = syscall(SYS_bpf, BPF_PROG_LOAD, &local, sizeof local);
    told(round, "bpf", fd < 0 ? -1 : 0);
    close(fd);
    settle();
    fd = syscall(SYS_bpf, BPF_PROG_LOAD, attr, sizeof local);
    told(round, "bpf, remote", fd < 0 ? -1 : 0);
    close(fd);
    struct perf_event_attr *event = block(sizeof *event);
    *event = (struct perf_event_attr){.type = PERF_TYPE_SOFTWARE, .size = sizeof *event, .config = PERF_COUNT_SW_TASK_CLOCK};
    event->disabled = event->exclude_kernel = 1;
    settle();
    fd = syscall(SYS_perf_event_open, event, 0, -1, -1, 0);
    told(round, "perf_event_open", fd < 0 ? -1 : 0);
    close(fd);
}

static void keys(int round) {
    char *kind = block(5), *name = block(20), *payload = block(20000), *back = block(20000);
    strcpy(kind, "user"), sprintf(name, "farpage-%d", getpid());
    memset(payload, 'k', 20000);
    settle();
    long key = syscall(SYS_add_key, kind, name, payload, 20000, KEY_SPEC_PROCESS_KEYRING);
    told(round, "add_key", key < 0 ? -1 : 0);
    settle();
    told(round, "KEYCTL_READ", syscall(SYS_keyctl, KEYCTL_READ, key, back, 20000, 0));
    told(round, "last", back[19999]);
    struct iovec parts[2] = {{payload, 5000}, {payload + 5000, 15000}};
    settle();
    told(round, "KEYCTL_INSTANTIATE_IOV", syscall(SYS_keyctl, KEYCTL_INSTANTIATE_IOV, key, parts, 2, 0) < 0 ? -1 : 0);
}

static void words(int round) {
    struct entry { uint64_t value, address; uint32_t flags, reserved; } local[3] = {0};
    for (int i = 0; i < 3; i++) {
        local[i].address = (uintptr_t)block(8);
        local[i].flags = 2 | FUTEX_PRIVATE_FLAG;
    }
    struct timespec *until = block(sizeof *until), past = {0, 1};
    *until = past;
    settle();
    told(round, "futex_waitv", syscall(SYS_futex_waitv, local, 3, 0, until, CLOCK_MONOTONIC));
    *(int *)local[2].address = 1;
    struct entry *remote = block(sizeof local);
    memcpy(remote, local, sizeof local);
    settle();
    told(round, "futex_waitv, changed", syscall(SYS_futex_waitv, remote, 3, 0, NULL, 0));
}

static void queues(int round) {
    int queue = msgget(IPC_PRIVATE, 0600), sems = semget(IPC_PRIVATE, 250, 0600);
    struct { long kind; char text[8000]; } *message = block(sizeof *message);
    message->kind = 3, memset(message->text, 'm', 8000);
    settle();
    told(round, "msgsnd", msgsnd(queue, message, 8000, IPC_NOWAIT));
    memset(message, 0, sizeof *message);
    settle();
    told(round, "msgrcv", msgrcv(queue, message, 8000, 0, IPC_NOWAIT));
    told(round, "last", message->text[7999]);
    unsigned short *values = block(250 * sizeof *values);
    for (int i = 0; i < 250; i++)
        values[i] = i;
    settle();
    told(round, "SETALL", semctl(sems, 0, SETALL, values));
    memset(values, 0, 500);
    settle();
    told(round, "GETALL", semctl(sems, 0, GETALL, values));
    told(round, "last", values[249]);
    msgctl(queue, IPC_RMID, NULL), semctl(sems, 0, IPC_RMID);
}

static void files(int round) {
    char *path = block(64), *value = block(60000);
    strcpy(path, "/dev/shm/farpage-XXXXXX");
    int fd = mkstemp(path);
    CHECK(fd >= 0);
    memset(value, 'v', 60000);
    settle();
    long set = setxattr(path, "user.farpage", value, 60000, 0);
    told(round, "setxattr", set);
    memset(value, 0, 60000);
    settle();
    told(round, "getxattr", getxattr(path, "user.farpage", value, 60000));
    told(round, "last", value[59999]);
    unlink(path);
    close(fd);
    fd = open("/tmp", O_TMPFILE | O_RDWR, 0600);
    CHECK(fd >= 0 && ftruncate(fd, 64 * MIB) == 0);
    for (int i = 0; i < 200; i++)
        CHECK(pwrite(fd, "x", 1, i * 64 * 1024) == 1);
    fsync(fd);
    struct fiemap *map = block(sizeof *map + 256 * sizeof map->fm_extents[0]);
    map->fm_length = 64 * MIB, map->fm_extent_count = 256;
    settle();
    told(round, "FS_IOC_FIEMAP", ioctl(fd, FS_IOC_FIEMAP, map));
    told(round, "extents", map->fm_mapped_extents);
    struct { struct file_handle handle; char bytes[128]; } *handle = block(sizeof *handle);
    int *mount = block(8);
    handle->handle.handle_bytes = 128;
    settle();
    told(round, "name_to_handle_at", name_to_handle_at(fd, "", &handle->handle, mount, AT_EMPTY_PATH));
    close(fd);
}

static void lists(int round) {
    int fd = open("/dev/zero", O_RDONLY), ends[2];
    char *to = block(3 * PAGE);
    memset(to, 1, 3 * PAGE);
    struct iovec local[2] = {{to, 100}, {to + PAGE, 2 * PAGE}};
    settle();
    told(round, "readv by number", syscall(SYS_readv, fd, local, 2));
    told(round, "last", to[3 * PAGE - 1]);
    CHECK(socketpair(AF_UNIX, SOCK_DGRAM, 0, ends) == 0);
    struct msghdr message = {.msg_iov = local, .msg_iovlen = 2};
    settle();
    told(round, "sendmsg by number", syscall(SYS_sendmsg, ends[0], &message, 0));
    settle();
    told(round, "recvmsg by number", syscall(SYS_recvmsg, ends[1], &message, 0));
    close(fd), close(ends[0]), close(ends[1]);
    char *here = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(here, 1, 4 * PAGE);
    void **pages = block(4 * sizeof *pages);
    int *status = block(4 * sizeof *status);
    for (int i = 0; i < 4; i++)
        pages[i] = here + i * PAGE, status[i] = 77;
    settle();
    told(round, "move_pages", syscall(SYS_move_pages, 0, 4, pages, NULL, status, 0));
    told(round, "status", status[3]);
    munmap(here, 4 * PAGE);
}

/* Memory beside what calls are about cannot be read. */
static void guarded(int round) {
    char *at = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    memset(at, 1, MIB);
    CHECK(mprotect(at + 2 * PAGE, PAGE, PROT_NONE) == 0);
    struct sock_filter *filter = (void *)(at + 128);
    *filter = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, 7);
    struct sock_fprog program = {1, filter};
    int fd = socket(AF_INET, SOCK_DGRAM, 0), ends[2], status, *bytes = (int *)(at + 256);
    CHECK(fd >= 0 && pipe(ends) == 0 && write(ends[1], "abc", 3) == 3);
    settle();
    pid_t child = fork();
    if (child == 0) {
        int set = setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program);
        _exit(set || ioctl(ends[0], FIONREAD, bytes) || *bytes != 3);
    }
    CHECK(waitpid(child, &status, 0) == child);
    told(round, "child", status);
    char here[2 * PAGE];
    struct iovec own = {here, 2 * PAGE}, other = {at + PAGE, 2 * PAGE};
    settle();
    told(round, "up to the guard", process_vm_readv(getpid(), &own, 1, &other, 1, 0));
    settle();
    told(round, "thread", process_vm_readv(syscall(SYS_gettid), &own, 1, &other, 1, 0));
    other.iov_base = at + 2 * PAGE;
    told(round, "the guard", process_vm_readv(getpid(), &own, 1, &other, 1, 0));
    told(round, "to the guard", process_vm_writev(getpid(), &own, 1, &other, 1, 0));
    munmap(at, MIB);
    told(round, "no list", process_vm_readv(getpid(), (void *)8, 1, &other, 1, 0));
    close(fd), close(ends[0]), close(ends[1]);
}

/* The program has locked all that may be locked. */
static void locked(int round) {
    enum { BYTES = 16 * MIB, STEP = 4 * PAGE };
    char *at = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    for (size_t done = 0; done < BYTES && !mlock(at + done, STEP);)
        done += STEP;
    int *bytes = block(MIB), ends[2], fd = socket(AF_INET, SOCK_STREAM, 0);
    struct timeval *time = block(MIB);
    time->tv_sec = 3;
    CHECK(fd >= 0 && pipe(ends) == 0 && write(ends[1], "abc", 3) == 3);
    settle();
    told(round, "FIONREAD", ioctl(ends[0], FIONREAD, bytes));
    told(round, "bytes", *bytes);
    settle();
    told(round, "SO_RCVTIMEO", setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, time, sizeof *time));
    close(fd), close(ends[0]), close(ends[1]);
    munmap(at, BYTES);
}

int main(int count, char **arguments) {
    CHECK(count == 3);
    static const struct {
        const char *name;
        void (*run)(int);
    } cases[] = {{"interfaces", interfaces}, {"filters", filters}, {"processes", processes},
                 {"confined", confined},     {"programs", programs}, {"keys", keys},
                 {"words", words},           {"queues", queues},   {"files", files},
                 {"lists", lists},           {"guarded", guarded}, {"locked", locked}};
    more = strcmp(arguments[2], "large") ? 0 : 256 << 10;
    sweeps = malloc(3 * MIB);
    CHECK(sweeps);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (!strcmp(cases[i].name, arguments[1])) {
            for (int round = 0; round < ROUNDS; round++)
                cases[i].run(round);
            puts("done");
            return 0;
        }
    return 2;
}
