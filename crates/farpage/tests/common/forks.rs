//! Processes made by `fork`, and arrays whose words say where they are.
//!
//! The rule it keeps: a child does nothing but what its closure does, and ends.

use std::{
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::{
        signal::{Signal, kill},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{ForkResult, Pid, fork},
};

/// Runs `child` in a child made by `fork`, which ends with the returned status.
pub fn start(child: impl FnOnce() -> i32) -> Pid {
    // SAFETY: the child uses what the test is about, and ends itself.
    match unsafe { fork() }.unwrap() {
        ForkResult::Parent { child } => child,
        ForkResult::Child => {
            let status = child();
            // SAFETY: ends the child.
            unsafe { libc::_exit(status) }
        }
    }
}

/// Waits for a child, which must not hang.
pub fn end(child: Pid) -> WaitStatus {
    let patience = Duration::from_secs(60);
    end_beside(child, patience, || thread::sleep(Duration::from_millis(1)))
}

/// Waits for a child, which must end within `patience`, and calls `meanwhile` again and again.
pub fn end_beside(child: Pid, patience: Duration, mut meanwhile: impl FnMut()) -> WaitStatus {
    let until = Instant::now() + patience;
    loop {
        match waitpid(child, Some(WaitPidFlag::WNOHANG)).unwrap() {
            WaitStatus::StillAlive if Instant::now() > until => {
                kill(child, Signal::SIGKILL).unwrap();
                panic!("the child hangs");
            }
            WaitStatus::StillAlive => meanwhile(),
            ended => return ended,
        }
    }
}

/// Waits for a child, which must end with status 0.
pub fn must_pass(child: Pid) {
    assert_eq!(end(child), WaitStatus::Exited(child, 0));
}

/// Forks in a child, and returns true if `is_right` holds in the child's own child.
pub fn holds_in_own_child(is_right: impl FnOnce() -> bool) -> bool {
    // SAFETY: as the parent's child does, it makes system calls alone.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: ends the child's own child.
        unsafe { libc::_exit(i32::from(!is_right())) };
    }
    has_passed(child)
}

/// Waits in a child for its own child. Returns true if that has ended with status 0.
pub fn has_passed(child: libc::pid_t) -> bool {
    let mut status = 0;
    // SAFETY: there is room for the status.
    unsafe { libc::waitpid(child, &raw mut status, 0) == child && status == 0 }
}

/// Returns the word at `at` in a round.
pub fn value(at: usize, round: u64) -> u64 {
    (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ round
}

/// Writes the words of a round.
pub fn fill(array: &mut [u64], round: u64) {
    for (at, word) in array.iter_mut().enumerate() {
        *word = value(at, round);
    }
}

/// Counts the words that differ from those of `round`.
pub fn wrong(array: &[u64], round: u64) -> usize {
    let words = array.iter().enumerate();
    words
        .filter(|&(at, &word)| word != value(at, round))
        .count()
}
