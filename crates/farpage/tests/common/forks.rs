//! Processes made by `fork`, and arrays whose words say where they are.
//!
//! The rule it keeps: a child does nothing but what its closure does, and ends.

use std::{
    io::Write,
    thread,
    time::{Duration, Instant},
};

use farpage::Runtime;
use farpage_testkit::PATIENCE;
use nix::{
    errno::Errno,
    sys::{
        signal::{Signal, kill},
        wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid},
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

/// Waits until no slot of `runtime` is held. The children of all tests of this program have its
/// memory, so that the time in which slots must become free begins when no child is left.
pub fn wait_until_nothing_is_held(runtime: &Runtime) {
    let mut until = Instant::now() + PATIENCE;
    while runtime.stats().store.held_bytes > 0 {
        let looks = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        if waitid(Id::All, looks) != Err(Errno::ECHILD) {
            until = Instant::now() + PATIENCE;
        }
        let is_late = Instant::now() > until;
        assert!(!is_late, "slots are held {PATIENCE:?} after the last child");
        thread::sleep(Duration::from_millis(1));
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

/// Factor that tells the words of a round apart.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
/// Number by which a product of [`FACTOR`] is divided by it.
const INVERSE: u64 = 0xf1de_83e1_9937_733d;
const _: () = assert!(FACTOR.wrapping_mul(INVERSE) == 1, "the inverse");
/// Upper bound of the rounds that are looked for in wrong words.
const ROUNDS: u64 = 200;

/// Returns the word at `at` in a round.
pub fn value(at: usize, round: u64) -> u64 {
    (at as u64).wrapping_mul(FACTOR) ^ round
}

/// Writes the words of a round.
pub fn fill(array: &mut [u64], round: u64) {
    for (at, word) in array.iter_mut().enumerate() {
        *word = value(at, round);
    }
}

/// Counts the words that differ from those of `round`. Writes a line about them if there are some.
pub fn wrong(array: &[u64], round: u64) -> usize {
    let mut found = Wrong::default();
    for (at, &word) in array.iter().enumerate() {
        if word != value(at, round) {
            found.add(at, word, array.len());
        }
    }
    if found.count > 0 {
        found.say(round);
    }
    found.count
}

/// Contents of words that are wrong.
#[derive(Default)]
struct Wrong {
    count: usize,
    /// Number of words that are zero, are of another round, and are another place's.
    kinds: [usize; 3],
    /// First and last word, by their places.
    ends: [(usize, u64); 2],
}

impl Wrong {
    /// Adds the wrong word at `at` of an array of `len` words.
    fn add(&mut self, at: usize, word: u64, len: usize) {
        let place = |round: u64| (word ^ round).wrapping_mul(INVERSE);
        let kind = match word {
            0 => Some(0),
            _ if round_of(at, word) < ROUNDS => Some(1),
            _ if (0..ROUNDS).any(|round| place(round) < len as u64) => Some(2),
            _ => None,
        };
        if let Some(kind) = kind {
            self.kinds[kind] += 1;
        }
        if self.count == 0 {
            self.ends[0] = (at, word);
        }
        self.ends[1] = (at, word);
        self.count += 1;
    }

    /// Writes a line. Uses no memory but the stack's: a child may call it.
    fn say(&self, round: u64) {
        let (count, [zeros, old, others]) = (self.count, self.kinds);
        let [(first, first_word), (last, last_word)] = self.ends;
        let mut line = [0; 400];
        let mut rest = &mut line[..];
        // What does not fit is cut off.
        let _ = writeln!(
            rest,
            "process {}: {count} words are not those of round {round}: {zeros} are zero, {old} \
             are another round's, {others} another place's; from word {first}, which is \
             {first_word:#x} (round {}), to word {last}, which is {last_word:#x} (round {})",
            std::process::id(),
            round_of(first, first_word),
            round_of(last, last_word),
        );
        let len = 400 - rest.len();
        // SAFETY: the bytes are there.
        unsafe { libc::write(2, line.as_ptr().cast(), len) };
    }
}

/// Returns the round that the word at `at` is of. Meaningless for a word of no round.
fn round_of(at: usize, word: u64) -> u64 {
    value(at, 0) ^ word
}
