//! Arguments of system calls that are addresses at which the kernel reads or writes
//! ([`addresses`]).
//!
//! The rule it keeps: a call stands here with all such arguments, or not at all. Registers that a
//! call has no argument in may hold anything, also what looks like an address of ours. So calls are
//! never judged by all of their registers. Calls about addresses (`munmap`), those that return
//! twice or do not return, and `execve`, whose failure its callers expect, are left out.

use super::raw::Arguments;

/// Bound above all numbers of system calls.
pub const NUMBERS: libc::c_long = 512;

/// Returns a bit for each argument of the call `number` that is an address it reads or writes at.
pub fn addresses(number: libc::c_long) -> u8 {
    let found = CALLS.iter().find(|(_, calls)| calls.contains(&number));
    found.map_or(0, |(arguments, _)| {
        arguments
            .iter()
            .fold(0, |bits, argument| bits | 1 << argument)
    })
}

/// Returns the arguments that are [`addresses`].
pub(super) fn of(number: libc::c_long, args: Arguments) -> impl Iterator<Item = usize> {
    let bits = addresses(number);
    let args = args.into_iter().enumerate();
    args.filter_map(move |(at, arg)| (bits >> at & 1 == 1).then_some(arg))
}

/// Arguments by place, and the calls that have addresses there.
type Calls = (&'static [u8], &'static [libc::c_long]);

/// Calls that only older machines have.
#[cfg(target_arch = "x86_64")]
const OLD: [Calls; 5] = [
    (
        &[0],
        &[
            libc::SYS_open,
            libc::SYS_creat,
            libc::SYS_access,
            libc::SYS_unlink,
            libc::SYS_mkdir,
            libc::SYS_rmdir,
            libc::SYS_chmod,
            libc::SYS_chown,
            libc::SYS_lchown,
            libc::SYS_mknod,
            libc::SYS_pipe,
            libc::SYS_poll,
            libc::SYS_time,
            libc::SYS_uselib,
        ],
    ),
    (
        &[0, 1],
        &[
            libc::SYS_stat,
            libc::SYS_lstat,
            libc::SYS_readlink,
            libc::SYS_rename,
            libc::SYS_link,
            libc::SYS_symlink,
            libc::SYS_utime,
            libc::SYS_utimes,
        ],
    ),
    (&[1, 2], &[libc::SYS_futimesat]),
    (
        &[1],
        &[
            libc::SYS_getdents,
            libc::SYS_epoll_wait,
            libc::SYS_signalfd,
            libc::SYS_modify_ldt,
            libc::SYS_arch_prctl,
        ],
    ),
    (&[1, 2, 3, 4], &[libc::SYS_select]),
];
#[cfg(not(target_arch = "x86_64"))]
const OLD: [Calls; 5] = [(&[], &[]); 5];

const CALLS: &[Calls] = &[
    OLD[0],
    OLD[1],
    OLD[2],
    OLD[3],
    OLD[4],
    (
        &[0],
        &[
            libc::SYS_perf_event_open,
            libc::SYS_adjtimex,
            libc::SYS_delete_module,
            libc::SYS_landlock_create_ruleset,
            libc::SYS_fsopen,
            libc::SYS_chdir,
            libc::SYS_chroot,
            libc::SYS_truncate,
            libc::SYS_getcwd,
            libc::SYS_uname,
            libc::SYS_times,
            libc::SYS_sysinfo,
            libc::SYS_pipe2,
            libc::SYS_getrandom,
            libc::SYS_memfd_create,
            libc::SYS_rt_sigpending,
            libc::SYS_rt_sigsuspend,
            libc::SYS_acct,
            libc::SYS_swapon,
            libc::SYS_umount2,
            libc::SYS_sethostname,
            libc::SYS_setdomainname,
            libc::SYS_mq_unlink,
            libc::SYS_removexattr,
        ],
    ),
    (
        &[1],
        &[
            libc::SYS_bpf,
            libc::SYS_finit_module,
            libc::SYS_set_mempolicy,
            libc::SYS_process_madvise,
            libc::SYS_open_by_handle_at,
            libc::SYS_mq_notify,
            libc::SYS_syslog,
            libc::SYS_fspick,
            libc::SYS_open_tree,
            libc::SYS_fchmodat2,
            libc::SYS_read,
            libc::SYS_write,
            libc::SYS_pread64,
            libc::SYS_pwrite64,
            libc::SYS_readv,
            libc::SYS_writev,
            libc::SYS_preadv,
            libc::SYS_pwritev,
            libc::SYS_preadv2,
            libc::SYS_pwritev2,
            libc::SYS_vmsplice,
            libc::SYS_fstat,
            libc::SYS_fstatfs,
            libc::SYS_getdents64,
            libc::SYS_openat,
            libc::SYS_unlinkat,
            libc::SYS_mkdirat,
            libc::SYS_mknodat,
            libc::SYS_fchmodat,
            libc::SYS_fchownat,
            libc::SYS_faccessat,
            libc::SYS_faccessat2,
            libc::SYS_sendmsg,
            libc::SYS_recvmsg,
            libc::SYS_sendmmsg,
            libc::SYS_connect,
            libc::SYS_bind,
            libc::SYS_getrlimit,
            libc::SYS_setrlimit,
            libc::SYS_getrusage,
            libc::SYS_getgroups,
            libc::SYS_setgroups,
            libc::SYS_clock_gettime,
            libc::SYS_clock_settime,
            libc::SYS_clock_getres,
            libc::SYS_clock_adjtime,
            libc::SYS_getitimer,
            libc::SYS_timer_gettime,
            libc::SYS_timerfd_gettime,
            libc::SYS_sched_setparam,
            libc::SYS_sched_getparam,
            libc::SYS_sched_setattr,
            libc::SYS_sched_getattr,
            libc::SYS_sched_rr_get_interval,
            libc::SYS_inotify_add_watch,
            libc::SYS_fremovexattr,
            libc::SYS_flistxattr,
            libc::SYS_semop,
            libc::SYS_msgsnd,
            libc::SYS_msgrcv,
            libc::SYS_signalfd4,
            libc::SYS_io_setup,
        ],
    ),
    (
        &[2],
        &[
            libc::SYS_seccomp,
            libc::SYS_pidfd_send_signal,
            libc::SYS_landlock_add_rule,
            // The command is not looked at: an argument that is a number is no address of ours.
            libc::SYS_ioctl,
            libc::SYS_fcntl,
            libc::SYS_io_submit,
            libc::SYS_sched_setaffinity,
            libc::SYS_sched_getaffinity,
            libc::SYS_sched_setscheduler,
            libc::SYS_mincore,
            libc::SYS_sendfile,
            libc::SYS_shmctl,
            libc::SYS_msgctl,
            libc::SYS_rt_sigqueueinfo,
        ],
    ),
    (
        &[3],
        &[
            libc::SYS_mbind,
            libc::SYS_quotactl_fd,
            libc::SYS_ptrace,
            libc::SYS_socketpair,
            libc::SYS_epoll_ctl,
            libc::SYS_setsockopt,
            libc::SYS_semctl,
            libc::SYS_rt_tgsigqueueinfo,
        ],
    ),
    (
        &[0, 1],
        &[
            libc::SYS_get_mempolicy,
            libc::SYS_statfs,
            libc::SYS_gettimeofday,
            libc::SYS_settimeofday,
            libc::SYS_nanosleep,
            libc::SYS_sigaltstack,
            libc::SYS_getcpu,
            libc::SYS_capget,
            libc::SYS_capset,
            libc::SYS_listxattr,
            libc::SYS_llistxattr,
            libc::SYS_lremovexattr,
            libc::SYS_pivot_root,
        ],
    ),
    (
        &[1, 2],
        &[
            libc::SYS_get_robust_list,
            libc::SYS_io_cancel,
            libc::SYS_mq_getsetattr,
            libc::SYS_newfstatat,
            libc::SYS_readlinkat,
            libc::SYS_utimensat,
            libc::SYS_rt_sigprocmask,
            libc::SYS_rt_sigaction,
            libc::SYS_setitimer,
            libc::SYS_accept,
            libc::SYS_accept4,
            libc::SYS_getsockname,
            libc::SYS_getpeername,
            libc::SYS_fsetxattr,
            libc::SYS_fgetxattr,
            libc::SYS_timer_create,
            libc::SYS_prctl,
            libc::SYS_openat2,
        ],
    ),
    (
        &[1, 3],
        &[
            libc::SYS_process_vm_readv,
            libc::SYS_process_vm_writev,
            libc::SYS_quotactl,
            libc::SYS_move_mount,
            libc::SYS_mount_setattr,
            libc::SYS_splice,
            libc::SYS_copy_file_range,
            libc::SYS_wait4,
            libc::SYS_renameat,
            libc::SYS_renameat2,
            libc::SYS_linkat,
            libc::SYS_semtimedop,
        ],
    ),
    (
        &[1, 4],
        &[
            libc::SYS_sendto,
            libc::SYS_statx,
            libc::SYS_recvmmsg,
            libc::SYS_mq_timedsend,
            libc::SYS_epoll_pwait,
        ],
    ),
    (&[1, 4, 5], &[libc::SYS_recvfrom]),
    (&[1, 3, 4], &[libc::SYS_mq_timedreceive]),
    (&[0, 2], &[libc::SYS_symlinkat, libc::SYS_init_module]),
    (&[0, 3], &[libc::SYS_mq_open, libc::SYS_futex_waitv]),
    (&[1, 2, 3], &[libc::SYS_name_to_handle_at]),
    (&[4], &[libc::SYS_fanotify_mark]),
    (&[2, 3, 4], &[libc::SYS_move_pages]),
    (&[1, 2, 3, 4], &[libc::SYS_keyctl]),
    (
        &[0, 1, 2],
        &[
            libc::SYS_add_key,
            libc::SYS_request_key,
            libc::SYS_setxattr,
            libc::SYS_lsetxattr,
            libc::SYS_getxattr,
            libc::SYS_lgetxattr,
            libc::SYS_rt_sigtimedwait,
        ],
    ),
    (&[0, 1, 2, 4], &[libc::SYS_mount]),
    (
        &[2, 3],
        &[
            libc::SYS_migrate_pages,
            libc::SYS_fsconfig,
            libc::SYS_clock_nanosleep,
            libc::SYS_prlimit64,
            libc::SYS_timer_settime,
            libc::SYS_timerfd_settime,
        ],
    ),
    (&[3, 4], &[libc::SYS_getsockopt, libc::SYS_io_getevents]),
    (&[2, 4], &[libc::SYS_waitid]),
    (&[0, 2, 3], &[libc::SYS_ppoll]),
    (&[1, 2, 3, 4, 5], &[libc::SYS_pselect6]),
    (&[1, 3, 4], &[libc::SYS_epoll_pwait2]),
    (&[0, 3, 4], &[libc::SYS_futex]),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_stands_in_one_place_below_the_bound() {
        let mut all: Vec<_> = CALLS.iter().flat_map(|(_, calls)| calls.iter()).collect();
        let count = all.len();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), count);
        assert!(all.iter().all(|&&call| (0..NUMBERS).contains(&call)));
        assert_eq!(addresses(libc::SYS_read), 0b10);
        assert_eq!(addresses(libc::SYS_futex), 0b1_1001);
        assert_eq!(addresses(libc::SYS_close), 0);
    }
}
