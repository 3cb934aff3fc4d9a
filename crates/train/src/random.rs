//! [`Random`]: the numbers behind initial parameters, shards and batches.
//!
//! The rule it keeps: a seed gives the same numbers on every machine and in every version, for
//! ever. Libraries promise that of their generators, but not of what they derive from them.

/// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators").
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Makes the sequence of `seed` and `stream`: workers draw from streams of their own.
    pub fn new(seed: u64, stream: u64) -> Self {
        let mut random = Self(seed);
        let start = random.bits() ^ stream.wrapping_mul(0xd605_1c2d_5f4a_9c31);
        Self(start)
    }

    /// Returns the position in the sequence.
    pub(crate) fn state(&self) -> u64 {
        self.0
    }

    /// Makes the sequence that was at `state`.
    pub(crate) fn with_state(state: u64) -> Self {
        Self(state)
    }

    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// Draws a number from 0 to below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        // The high half of a product: even enough for a `limit` far below 2^64, and no division.
        ((u128::from(self.bits()) * limit as u128) >> 64) as usize
    }

    /// Draws a number from -1 to below 1: a multiple of 2^-23, so that no rounding takes part.
    pub fn signed_unit(&mut self) -> f32 {
        let steps = (self.bits() >> 40) as i32 - (1 << 23);
        steps as f32 / (1 << 23) as f32
    }

    /// Puts `items` into a random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_these_numbers_for_ever() {
        let mut random = Random::new(1, 2);
        let below: Vec<_> = (0..6).map(|_| random.below(1000)).collect();
        let units: Vec<_> = (0..2).map(|_| random.signed_unit()).collect();
        let mut order: Vec<_> = (0..8).collect();
        random.shuffle(&mut order);
        assert_eq!(below, [464, 871, 260, 618, 575, 523]);
        assert_eq!(units, [-0.8017037, -0.58131206]);
        assert_eq!(order, [7, 4, 6, 1, 0, 2, 5, 3]);
    }

    #[test]
    fn units_fill_their_range() {
        let mut random = Random::new(7, 0);
        let units: Vec<_> = (0..10_000).map(|_| random.signed_unit()).collect();
        assert!(units.iter().all(|unit| (-1.0..1.0).contains(unit)));
        let mean: f32 = units.iter().sum::<f32>() / 10_000.0;
        let below_half = units.iter().filter(|unit| **unit < -0.5).count();
        assert!(mean.abs() < 0.02, "{mean}");
        assert!((2300..2700).contains(&below_half), "{below_half}");
    }
}
