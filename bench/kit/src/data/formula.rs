//! Contents that need no memory: each element is computed from its index. No SDRBench data set is
//! behind them; they are the best case, the worst case, and the simplest case between.

use crate::pick::{ODD, mix};

#[derive(Clone, Copy, Debug)]
pub(crate) enum Formula {
    /// One value.
    Constant,
    /// Random mantissas under one exponent.
    Random,
    /// A slow sine.
    Smooth,
}

/// Angle per element of the sine: about 63 000 elements per wave, 8 pages of 64 KiB.
const SMOOTH_STEP: f64 = 1e-4;

impl Formula {
    /// Returns the value of element `index`, between 1 and 2.
    pub(crate) fn value(self, seed: u64, index: u64) -> f64 {
        match self {
            Self::Constant => 1.0,
            Self::Random => f64::from_bits(1.0f64.to_bits() | Self::Random.word(seed, index) >> 12),
            Self::Smooth => 1.5 + 0.5 * (index as f64 * SMOOTH_STEP).sin(),
        }
    }

    /// Returns eight bytes for element `index`: random bits, or the bits of its value.
    pub(crate) fn word(self, seed: u64, index: u64) -> u64 {
        match self {
            Self::Random => mix(seed ^ index.wrapping_mul(ODD)),
            Self::Constant | Self::Smooth => self.value(seed, index).to_bits(),
        }
    }
}
