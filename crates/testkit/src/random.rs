//! Random numbers from a seed that a failed test prints.

use std::{
    env,
    time::{SystemTime, UNIX_EPOCH},
};

use crate::wait::test_name;

/// Returns the seed of the running test: `FARPAGE_TEST_SEED`, else a new one. Prints the seed, so
/// that a failure can be repeated.
pub fn seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed = env::var("FARPAGE_TEST_SEED").map_or(now.as_nanos() as u64, |seed| {
        seed.parse().expect("FARPAGE_TEST_SEED is a whole number")
    });
    println!("{}: FARPAGE_TEST_SEED={seed}", test_name());
    seed
}

/// Generator SplitMix64 (Steele, Lea and Flood, 2014): small, and equal on all machines.
#[derive(Clone, Debug)]
pub struct Rng(pub u64);

impl Rng {
    /// Returns the next number.
    #[expect(clippy::should_implement_trait, reason = "the sequence has no end")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Returns a number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next()) * n as u128) >> 64) as usize
    }

    /// True once in `n` times on average.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// Returns `len` random bytes.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }
}

/// Returns a value that looks random and depends on all bits of `x`; never 0 for the numbers that
/// tests use.
pub fn mix(x: u64) -> u64 {
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}
