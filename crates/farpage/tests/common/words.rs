//! Words and bytes whose index determines their value.

use std::{process, sync::atomic::AtomicU64};

use farpage_testkit::{Rng, mix};

use super::{get, set};

/// Returns the value of the word at `at`. Values of another `salt` differ.
pub fn word(at: usize, salt: u64) -> u64 {
    mix(at as u64 ^ salt << 32)
}

pub fn fill(words: &mut [u64], salt: u64) {
    for (at, seen) in words.iter_mut().enumerate() {
        *seen = word(at, salt);
    }
}

#[track_caller]
pub fn assert_filled(words: &[u64], salt: u64) {
    for (at, &seen) in words.iter().enumerate() {
        assert_eq!(seen, word(at, salt), "word {at} of salt {salt}");
    }
}

/// Reads and writes random words of the thread's own, for `turns` turns.
pub fn exercise(words: &[AtomicU64], thread: usize, of: usize, rng: &mut Rng, turns: usize) {
    for _ in 0..turns {
        let at = rng.below(words.len() / of) * of + thread;
        assert_untouched_or_right(at, get(words, at));
        set(words, at, word(at, 0));
    }
}

/// Reads a random word and writes it again. A wrong value ends the process with status 3.
pub fn rewrite_or_exit(words: &[AtomicU64], rng: &mut Rng) {
    let at = rng.below(words.len());
    let seen = get(words, at);
    if seen != word(at, 0) {
        eprintln!("word {at} is {seen:#x}");
        process::exit(3);
    }
    set(words, at, seen);
}

/// Asserts that each word has the value that [`exercise`] writes, or was never written.
#[track_caller]
pub fn assert_exercised(words: &[u64]) {
    for (at, &seen) in words.iter().enumerate() {
        assert_untouched_or_right(at, seen);
    }
}

#[track_caller]
fn assert_untouched_or_right(at: usize, seen: u64) {
    assert!(seen == 0 || seen == word(at, 0), "word {at} is {seen:#x}");
}

/// Returns `count` bytes that `seed` determines.
pub fn bytes(count: usize, seed: u64) -> Vec<u8> {
    (0..count)
        .map(|at| mix(at as u64 ^ seed << 40) as u8)
        .collect()
}
