//! Permissions of this user, and the remedies that errors name.

use std::{fs, io::Write, os::fd::AsRawFd, sync::Arc};

use farpage_vm::{Features, KernelSpace, KernelSpaceOptions, Uffd, UserfaultfdError};
use nix::{
    sys::wait::{WaitStatus, waitpid},
    unistd::{ForkResult, fork},
};

use crate::common::{Filler, byte, geometry};

#[test]
fn user_mode_only_makes_system_calls_fail_and_still_serves_the_program() {
    let options = KernelSpaceOptions {
        user_mode_only: true,
        ..KernelSpaceOptions::default()
    };
    let space = Arc::new(KernelSpace::new(options).unwrap());
    let (filler, threads) = Filler::start(&space, geometry(2 * 4096, 4096));
    let mut file = tempfile::tempfile().unwrap();
    // SAFETY: the kernel checks the address.
    let rc = unsafe { libc::write(file.as_raw_fd(), (filler.base + 4096) as *const _, 8) };
    assert_eq!(
        (rc, std::io::Error::last_os_error().raw_os_error()),
        (-1, Some(libc::EFAULT))
    );
    file.flush().unwrap();
    assert_eq!(byte(filler.base), 0);
    filler.finish(threads);
}

#[test]
fn probe_prints_every_feature_and_a_remedy_for_what_is_missing() {
    let probe = farpage_vm::probe(false);
    let table = probe.to_string();
    println!("{table}");
    for name in [
        "MISSING",
        "WP",
        "MINOR",
        "SIGBUS",
        "MOVE",
        "POISON",
        "WP_ASYNC",
        "PAGEMAP_SCAN",
        "vm.max_map_count",
    ] {
        assert!(table.contains(name), "{name}");
    }
    assert!(
        probe
            .checks
            .iter()
            .all(|check| check.mend.is_some() == (check.verdict != farpage_vm::Verdict::Yes))
    );
    assert!(probe.usable());
}

#[test]
fn without_permission_the_error_says_what_to_do_and_user_mode_still_opens() {
    if !nix::unistd::geteuid().is_root()
        || fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd")
            .unwrap()
            .trim()
            == "1"
    {
        eprintln!(
            "SKIPPED: without_permission_the_error_says_what_to_do_and_user_mode_still_opens: \
             needs root, to become somebody who is not, where that matters"
        );
        return;
    }
    // SAFETY: the child changes its user and ends; it allocates, which glibc supports after fork.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            nix::unistd::setresuid(65534.into(), 65534.into(), 65534.into()).unwrap();
            let refused = Uffd::open(Features::MISSING, false);
            let text = refused
                .as_ref()
                .map_or_else(ToString::to_string, |_| String::new());
            let told = matches!(refused, Err(UserfaultfdError::NotPermitted { .. }))
                && text.contains("sysctl -w vm.unprivileged_userfaultfd=1");
            let opened = Uffd::open(Features::MISSING, true).is_ok();
            let verdicts = (
                farpage_vm::probe(false).usable(),
                farpage_vm::probe(true).usable(),
            );
            // The kernel hides a process that changed its user from itself, until it says
            // otherwise.
            let hidden = verdicts == (false, false) && hidden_page_map_is_told();
            // SAFETY: changes one flag of this process.
            let shown = unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1) } == 0;
            let mended = shown && farpage_vm::probe(true).usable();
            let default_is_refused = !farpage_vm::probe(false).usable();
            let status = [told, opened, hidden, mended, default_is_refused]
                .iter()
                .position(|&fine| !fine);
            // SAFETY: ends the child without running the parent's destructors.
            unsafe { libc::_exit(status.map_or(0, |which| 1 + which as i32)) }
        }
        ForkResult::Parent { child } => {
            assert_eq!(waitpid(child, None).unwrap(), WaitStatus::Exited(child, 0))
        }
    }
}

/// True if a process that changed its user is told so, instead of to mount what is mounted.
fn hidden_page_map_is_told() -> bool {
    let error = KernelSpace::new(KernelSpaceOptions {
        user_mode_only: true,
        ..KernelSpaceOptions::default()
    })
    .err();
    let text = error.as_ref().map(ToString::to_string).unwrap_or_default();
    matches!(error, Some(UserfaultfdError::Pagemap(_)))
        && text.contains("PR_SET_DUMPABLE")
        && !text.contains("mount")
}
