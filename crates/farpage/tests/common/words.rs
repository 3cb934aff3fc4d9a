//! Words whose index determines their value.

use std::sync::atomic::AtomicU64;

use super::{Rng, get, mix, set};

/// Reads and writes random words of the thread's own, for `turns` turns.
pub fn exercise(words: &[AtomicU64], thread: usize, of: usize, rng: &mut Rng, turns: usize) {
    for _ in 0..turns {
        let at = rng.below(words.len() / of) * of + thread;
        let (seen, right) = (get(words, at), mix(at as u64));
        assert!(seen == 0 || seen == right, "word {at} is {seen:#x}");
        set(words, at, right);
    }
}

/// Asserts that each word has the value that [`exercise`] writes, or was never written.
pub fn assert_exercised(words: &[u64]) {
    for (at, &seen) in words.iter().enumerate() {
        assert!(
            seen == 0 || seen == mix(at as u64),
            "word {at} is {seen:#x}"
        );
    }
}

pub fn fill(words: &mut [u64], salt: u64) {
    for (at, word) in words.iter_mut().enumerate() {
        *word = mix(at as u64 ^ salt << 32);
    }
}

pub fn assert_filled(words: &[u64], salt: u64) {
    for (at, &word) in words.iter().enumerate() {
        assert_eq!(word, mix(at as u64 ^ salt << 32), "word {at}");
    }
}
