//! Every other SIGBUS ends as it would have ended without us.

use std::{
    os::{fd::AsRawFd, unix::process::ExitStatusExt},
    process::Command,
    ptr,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
};

use nix::errno::Errno;

use crate::common::{PAGE, Toy, counter, events};

/// Runs `child` in a process of its own, whose SIGBUS handler nobody has touched, and returns the
/// process's status.
fn in_a_process_of_its_own(test: &str, child: impl FnOnce()) -> Option<std::process::ExitStatus> {
    const MARK: &str = "FARPAGE_TEST_SIGBUS_CHILD";
    if std::env::var_os(MARK).is_some() {
        child();
        return None;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("foreign::{test}"), "--nocapture"])
        .env(MARK, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("running 1 test"), "no test {test}: {said}");
    Some(output.status)
}

/// Returns an address behind the end of the file that is mapped there.
fn behind_the_end_of_a_file() -> usize {
    let file = tempfile::tempfile().unwrap();
    file.set_len(2 * PAGE as u64).unwrap();
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let fd = file.as_raw_fd();
    // SAFETY: a new mapping.
    let start = unsafe { libc::mmap(ptr::null_mut(), 2 * PAGE, prot, libc::MAP_SHARED, fd, 0) };
    assert_ne!(start, libc::MAP_FAILED);
    file.set_len(PAGE as u64).unwrap();
    start as usize + PAGE
}

#[test]
fn foreign_sigbus_reaches_the_handler_that_was_there_before() {
    static TOUCHED: AtomicUsize = AtomicUsize::new(0);
    static MASKED: AtomicUsize = AtomicUsize::new(0);
    extern "C" fn before(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
        // SAFETY: the kernel's, valid while the handler runs.
        let address = unsafe { (*info).si_addr() } as usize;
        TOUCHED.store(address, Ordering::Relaxed);
        // SAFETY: all zeros is a valid set; asks only.
        let blocked = unsafe {
            let mut held: libc::sigset_t = std::mem::zeroed();
            libc::sigprocmask(libc::SIG_BLOCK, ptr::null(), &mut held);
            libc::sigismember(&held, libc::SIGBUS) + 2 * libc::sigismember(&held, libc::SIGUSR1)
        };
        MASKED.store(blocked as usize, Ordering::Relaxed);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: replaces the page that this test maps.
        unsafe { libc::mmap((address & !(PAGE - 1)) as *mut _, PAGE, prot, flags, -1, 0) };
    }
    let ended = in_a_process_of_its_own(
        "foreign_sigbus_reaches_the_handler_that_was_there_before",
        || {
            // SAFETY: all zeros is a valid sigaction.
            let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
            action.sa_sigaction = before as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            // SAFETY: the handler does what is allowed in one.
            Errno::result(unsafe { libc::sigaction(libc::SIGBUS, &action, ptr::null_mut()) })
                .unwrap();
            let toy = Toy::new(2, Some(1));
            let _registration = toy.register();
            let foreign = behind_the_end_of_a_file() + 24;
            counter(foreign).store(7, Ordering::Relaxed);
            assert_eq!(TOUCHED.load(Ordering::Relaxed), foreign);
            assert_eq!(MASKED.load(Ordering::Relaxed), 1);
            // Ours is served as before, and what is refused goes the same way.
            counter(toy.address(0)).store(7, Ordering::Relaxed);
            assert_eq!(TOUCHED.load(Ordering::Relaxed), foreign);
            let touched = AtomicBool::new(false);
            thread::scope(|scope| {
                // The handler maps over a page of the region: the kernel lets it go on when that is
                // read.
                scope.spawn(|| {
                    while !touched.load(Ordering::Acquire) {
                        events(&toy.space, 0);
                        thread::yield_now();
                    }
                });
                counter(toy.address(1)).store(7, Ordering::Relaxed);
                touched.store(true, Ordering::Release);
            });
            assert_eq!(TOUCHED.load(Ordering::Relaxed), toy.address(1));
        },
    );
    assert!(ended.is_none_or(|status| status.success()), "{ended:?}");
}

fn default_sigbus() {
    // SAFETY: all zeros is SIG_DFL.
    let default = unsafe { std::mem::zeroed() };
    // SAFETY: installs no handler.
    Errno::result(unsafe { libc::sigaction(libc::SIGBUS, &default, ptr::null_mut()) }).unwrap();
}

fn assert_killed(ended: Option<std::process::ExitStatus>) {
    if let Some(status) = ended {
        assert_eq!(status.signal(), Some(libc::SIGBUS), "{status:?}");
    }
}

#[test]
fn foreign_sigbus_kills_where_nobody_handled_it() {
    assert_killed(in_a_process_of_its_own(
        "foreign_sigbus_kills_where_nobody_handled_it",
        || {
            default_sigbus();
            let toy = Toy::new(1, None);
            let _registration = toy.register();
            counter(behind_the_end_of_a_file()).store(7, Ordering::Relaxed);
        },
    ));
}

#[test]
fn foreign_sigbus_kills_a_program_with_the_handler_of_rust() {
    assert_killed(in_a_process_of_its_own(
        "foreign_sigbus_kills_a_program_with_the_handler_of_rust",
        || {
            let toy = Toy::new(1, None);
            let _registration = toy.register();
            counter(behind_the_end_of_a_file()).store(7, Ordering::Relaxed);
        },
    ));
}

#[test]
fn sigbus_that_was_sent_kills_where_nobody_handled_it() {
    assert_killed(in_a_process_of_its_own(
        "sigbus_that_was_sent_kills_where_nobody_handled_it",
        || {
            default_sigbus();
            let toy = Toy::new(1, None);
            let _registration = toy.register();
            // SAFETY: ends this process.
            unsafe { libc::raise(libc::SIGBUS) };
        },
    ));
}

#[test]
fn refused_page_kills_at_the_address_that_was_touched() {
    let ended = in_a_process_of_its_own(
        "refused_page_kills_at_the_address_that_was_touched",
        touch_a_refused_page_while_traced,
    );
    assert!(ended.is_none_or(|status| status.success()), "{ended:?}");
}

fn touch_a_refused_page_while_traced() {
    const OFFSET: usize = 40;
    // SAFETY: the child ends by the signal; it allocates, which glibc supports after fork.
    let child = unsafe { libc::fork() };
    if child == 0 {
        default_sigbus();
        let toy = Toy::new(1, Some(0));
        let _registration = toy.register();
        // SAFETY: asks the parent, which waits, to trace: from here on each signal stops the child.
        unsafe { libc::ptrace(libc::PTRACE_TRACEME) };
        counter(toy.base + OFFSET).store(1, Ordering::Relaxed);
        // SAFETY: ends the child.
        unsafe { libc::_exit(0) };
    }
    let mut seen = Vec::new();
    let status = loop {
        let mut status = 0;
        // SAFETY: waits for the child made above.
        Errno::result(unsafe { libc::waitpid(child, &mut status, 0) }).unwrap();
        if !libc::WIFSTOPPED(status) {
            break status;
        }
        // SAFETY: all zeros is a valid siginfo; the child is stopped.
        unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            libc::ptrace(libc::PTRACE_GETSIGINFO, child, 0, &raw mut info);
            seen.push((info.si_signo, info.si_code, info.si_addr() as usize));
            libc::ptrace(
                libc::PTRACE_CONT,
                child,
                0,
                libc::c_long::from(info.si_signo),
            );
        }
    };
    assert!(libc::WIFSIGNALED(status), "{status:#x}");
    assert_eq!(libc::WTERMSIG(status), libc::SIGBUS);
    // Once on its way to the handler, once to kill.
    assert_eq!(seen.len(), 2, "{seen:x?}");
    assert_eq!(seen[0], seen[1]);
    assert_eq!(seen[0].0, libc::SIGBUS);
    assert_eq!(seen[0].2 % PAGE, OFFSET);
}
