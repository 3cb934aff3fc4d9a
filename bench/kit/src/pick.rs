//! Choices that look random: which element is next.
//!
//! The rule it keeps: the seed decides everything.

/// 2^64 divided by the golden ratio: spreads consecutive numbers.
pub const ODD: u64 = 0x9e37_79b9_7f4a_7c15;

/// Applies the finaliser of SplitMix64: a bijection whose output bits all depend on all input bits.
pub fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Iterator over the numbers below `count`, each once, in an order that looks random and needs no
/// memory.
pub struct Shuffle {
    count: u64,
    mask: u64,
    offset: u64,
    next: u64,
}

impl Shuffle {
    /// Shuffles the numbers below `count` by `seed`.
    pub fn new(count: u64, seed: u64) -> Self {
        let mask = count.next_power_of_two() - 1;
        Self {
            count,
            mask,
            offset: mix(seed),
            next: 0,
        }
    }

    /// Maps `x` by bijections of the numbers up to `mask`: adding, multiplying with an odd number,
    /// folding high bits onto low ones.
    fn place(&self, x: u64) -> u64 {
        let half = self.mask.count_ones().div_ceil(2).max(1);
        let mut x = x.wrapping_add(self.offset) & self.mask;
        for odd in [ODD, 0xd6e8_feb8_6659_fd93] {
            x = x.wrapping_mul(odd) & self.mask;
            x ^= x >> half;
        }
        x
    }
}

impl Iterator for Shuffle {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        while self.next <= self.mask {
            let x = self.place(self.next);
            self.next += 1;
            if x < self.count {
                return Some(x);
            }
        }
        None
    }
}

/// Sequence of random numbers, from a seed: SplitMix64.
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    /// Draws 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(ODD);
        mix(self.0)
    }

    /// Draws a number below `limit`, nearly evenly for a small `limit`; 0 for a `limit` of 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.bits() % limit.max(1)
    }
}

/// Generator of random indices.
pub struct Picker {
    random: Random,
    law: Law,
}

enum Law {
    /// Each index below this count as often as any other.
    Uniform(u64),
    /// Few indices most of the time.
    Zipf(Zipf),
}

impl Picker {
    /// Chooses among `count` elements. `zipf` is the exponent; `None` chooses uniformly.
    pub fn new(count: u64, zipf: Option<f64>, seed: u64) -> Self {
        Self {
            random: Random(mix(seed)),
            law: match zipf {
                None => Law::Uniform(count),
                Some(theta) => Law::Zipf(Zipf::new(count, theta)),
            },
        }
    }

    /// Returns the next index.
    pub fn pick(&mut self) -> u64 {
        let random = self.random.bits();
        match &self.law {
            Law::Uniform(count) => scale(random, *count),
            // Ranks are scattered over the array, or all hot elements would share a few pages.
            Law::Zipf(zipf) => scale(mix(zipf.rank(random).wrapping_mul(ODD)), zipf.count),
        }
    }
}

/// Maps the 64 bits of `random` evenly to the numbers below `count`.
fn scale(random: u64, count: u64) -> u64 {
    ((u128::from(random) * u128::from(count)) >> 64) as u64
}

/// Zipf's law with an exponent below 1, after Gray et al., "Quickly generating billion-record
/// synthetic databases" (SIGMOD 1994), the generator of YCSB.
struct Zipf {
    count: u64,
    theta: f64,
    alpha: f64,
    zeta: f64,
    eta: f64,
}

impl Zipf {
    fn new(count: u64, theta: f64) -> Self {
        let zeta = zeta(count, theta);
        let zeta_2 = 1.0 + 0.5f64.powf(theta);
        let eta = (1.0 - (2.0 / count as f64).powf(1.0 - theta)) / (1.0 - zeta_2 / zeta);
        Self {
            count,
            theta,
            alpha: 1.0 / (1.0 - theta),
            zeta,
            eta,
        }
    }

    /// Returns the rank for 64 random bits. Rank 0 is the most frequent.
    fn rank(&self, random: u64) -> u64 {
        let u = (random >> 11) as f64 / (1u64 << 53) as f64;
        let uz = u * self.zeta;
        let rank = match uz {
            uz if uz < 1.0 => 0,
            uz if uz < 1.0 + 0.5f64.powf(self.theta) => 1,
            _ => (self.count as f64 * (self.eta * u - self.eta + 1.0).powf(self.alpha)) as u64,
        };
        rank.min(self.count - 1)
    }
}

/// Sums `1 / k^theta` for k from 1 to `count`: the head term by term, the tail by the
/// Euler-Maclaurin formula.
fn zeta(count: u64, theta: f64) -> f64 {
    let term = |k: f64| k.powf(-theta);
    let head = count.min(10_000);
    let sum: f64 = (1..=head).map(|k| term(k as f64)).sum();
    if head == count {
        return sum;
    }
    let (from, to) = (head as f64, count as f64);
    sum + (to.powf(1.0 - theta) - from.powf(1.0 - theta)) / (1.0 - theta)
        + (term(to) - term(from)) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shuffle_visits_everything_once() {
        for count in [1, 2, 3, 7, 64, 1000, 4097] {
            let mut seen: Vec<u64> = Shuffle::new(count, 5).collect();
            assert!(count <= 10 || !seen.is_sorted(), "not shuffled");
            seen.sort_unstable();
            assert_eq!(seen, (0..count).collect::<Vec<_>>());
        }
    }

    #[test]
    fn zeta_matches_the_plain_sum() {
        let plain: f64 = (1..=200_000).map(|k| f64::from(k).powf(-0.99)).sum();
        assert!((zeta(200_000, 0.99) - plain).abs() < 1e-6 * plain);
    }

    #[test]
    fn zipf_gives_the_first_rank_its_share() {
        let zipf = Zipf::new(100_000, 0.99);
        let is_first = |i: &u64| zipf.rank(mix(i.wrapping_mul(ODD))) == 0;
        let firsts = (0..100_000).filter(is_first).count() as f64;
        let expected = 100_000.0 / zeta(100_000, 0.99);
        let off = (firsts - expected).abs();
        assert!(off < 0.05 * expected, "{firsts} of about {expected}");
    }

    #[test]
    fn picks_stay_in_range_and_reach_all_of_it() {
        for zipf in [None, Some(0.5)] {
            let mut picker = Picker::new(16, zipf, 3);
            let mut seen = [false; 16];
            for _ in 0..10_000 {
                seen[picker.pick() as usize] = true;
            }
            let least = if zipf.is_some() { 8 } else { 16 };
            assert!(seen.iter().filter(|seen| **seen).count() >= least);
        }
    }
}
