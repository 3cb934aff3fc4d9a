//! Fields with structure at every scale down to the grid.

use super::noise::spectrum;

/// Slope of Kolmogorov's law: energy falls with the wave number to the power of 5/3.
const KOLMOGOROV: f64 = 5.0 / 3.0;

/// Makes a velocity of turbulent flow.
pub(super) fn turbulence(seed: u64, shape: [usize; 3]) -> Vec<f64> {
    spectrum(seed, shape, KOLMOGOROV, 2.0, 64)
}

/// Makes the density of gas between galaxies: the exponential of a random field, over many orders
/// of magnitude.
pub(super) fn density(seed: u64, shape: [usize; 3]) -> Vec<f64> {
    let mut field = spectrum(seed, shape, KOLMOGOROV, 3.0, 64);
    field.iter_mut().for_each(|x| *x = (2.0 * *x - 2.0).exp());
    field
}
