//! Parts that fields are made from: numbers that look random, and sums of waves with a given
//! spectrum.
//!
//! The rule it keeps: the seed decides everything.

use std::f64::consts::TAU;

use crate::pick::{Random, mix};

/// A sequence of random numbers.
pub(super) struct Noise(Random);

impl Noise {
    pub(super) fn new(seed: u64) -> Self {
        Self(Random(mix(seed)))
    }

    /// Draws evenly from 0 to 1, 1 excluded.
    pub(super) fn unit(&mut self) -> f64 {
        (self.0.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Draws evenly from the numbers below `count`.
    pub(super) fn below(&mut self, count: usize) -> usize {
        (self.unit() * count as f64) as usize
    }

    /// Draws from the normal distribution, after Box and Muller.
    pub(super) fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (TAU * self.unit()).cos()
    }

    /// Draws from Poisson's distribution with a small mean, after Knuth.
    pub(super) fn poisson(&mut self, mean: f64) -> f64 {
        let end = (-mean).exp();
        let (mut count, mut product) = (0, self.unit());
        while product > end {
            count += 1;
            product *= self.unit();
        }
        f64::from(count)
    }
}

/// Sums waves whose energy falls with their wave number as `number ^ -slope`, on a periodic grid of
/// `shape` (z, y, x), normalised to a variance of one. No wave is shorter than `finest` points of
/// the grid's longest dimension.
pub(super) fn spectrum(
    seed: u64,
    shape: [usize; 3],
    slope: f64,
    finest: f64,
    waves: usize,
) -> Vec<f64> {
    let mut noise = Noise::new(seed);
    let [planes, rows, columns] = shape;
    let longest = shape.iter().copied().fold(1, usize::max) as f64;
    let numbers = (longest / finest).max(1.0).ln();
    let mut sum = vec![0.0; planes * rows * columns];
    let mut energy = 0.0;
    for _ in 0..waves {
        // Numbers are spread evenly in their logarithm, so that a wave stands for an interval as
        // wide as its number.
        let number = (noise.unit() * numbers).exp();
        let amplitude = number.powf((1.0 - slope) / 2.0);
        energy += amplitude * amplitude / 2.0;
        let direction = [0; 3].map(|_| noise.normal());
        let length = direction.iter().map(|x| x * x).sum::<f64>().sqrt();
        // Whole numbers keep the grid periodic.
        let whole = direction.map(|x| (x / length * number).round());
        let phase = noise.unit() * TAU;
        let angle = |axis: usize, at: usize| TAU * whole[axis] * at as f64 / shape[axis] as f64;
        let (turn_sin, turn_cos) = angle(2, 1).sin_cos();
        for (at, row) in sum.chunks_exact_mut(columns).enumerate() {
            let begin = phase + angle(0, at / rows) + angle(1, at % rows);
            let (mut sin, mut cos) = begin.sin_cos();
            for x in row {
                *x += amplitude * cos;
                (sin, cos) = (
                    sin * turn_cos + cos * turn_sin,
                    cos * turn_cos - sin * turn_sin,
                );
            }
        }
    }
    let scale = energy.sqrt().recip();
    sum.iter_mut().for_each(|x| *x *= scale);
    sum
}
