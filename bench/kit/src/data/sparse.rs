//! Fields that are mostly zero, and measurements that have few values.

use super::noise::{Noise, spectrum};

/// Makes cloud water: exactly zero outside clouds.
pub(super) fn clouds(seed: u64, shape: [usize; 3]) -> Vec<f64> {
    let mut field = spectrum(seed, shape, 2.5, 4.0, 48);
    field
        .iter_mut()
        .for_each(|x| *x = (*x - 1.2).max(0.0) * 1e-3);
    field
}

/// Makes the photons that a detector counted: dark with single photons, and rings of many.
pub(super) fn detector(seed: u64, [_, rows, columns]: [usize; 3]) -> Vec<f64> {
    /// Reading of the electronics for one photon.
    const GAIN: f64 = 17.5;
    let mut noise = Noise::new(seed);
    let mut field = Vec::with_capacity(rows * columns);
    for row in 0..rows {
        for column in 0..columns {
            let (y, x) = (
                row as f64 / rows as f64 - 0.5,
                column as f64 / columns as f64 - 0.5,
            );
            let ring = (60.0 * x.hypot(y)).sin().max(0.0).powi(8);
            field.push(GAIN * noise.poisson(0.05 + 3.0 * ring * (-8.0 * (x * x + y * y)).exp()));
        }
    }
    field
}

/// Makes integrals over pairs of electrons: of either sign and of all magnitudes. About 38 % are
/// negligible and set to zero.
pub(super) fn integrals(seed: u64, [_, _, count]: [usize; 3]) -> Vec<f64> {
    let mut noise = Noise::new(seed);
    // Integrals over one pair of shells lie together and are alike in magnitude.
    const SHELLS: usize = 36;
    let mut exponent = 0.0;
    (0..count)
        .map(|at| {
            if at % SHELLS == 0 {
                exponent = -14.0 * noise.unit().sqrt();
            }
            match exponent < -11.0 {
                true => 0.0,
                false => noise.normal() * 10f64.powf(exponent),
            }
        })
        .collect()
}
