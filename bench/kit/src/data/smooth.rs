//! Fields of models of the atmosphere, of flames and of atoms: smooth between grid points, with
//! detail that only simulations have.

use std::f64::consts::{PI, TAU};

use super::noise::{Noise, spectrum};

/// Makes a random walk: the sum of normally distributed steps, like SDRBench's Brown samples.
pub(super) fn brown(seed: u64, [_, _, count]: [usize; 3]) -> Vec<f64> {
    let mut noise = Noise::new(seed);
    let mut at = 0.0;
    let step = || {
        at += noise.normal() * 1e-3;
        at
    };
    std::iter::repeat_with(step).take(count).collect()
}

/// Makes the temperature over latitude and longitude, in kelvin: warm at the equator, weather
/// everywhere.
pub(super) fn climate(seed: u64, shape: [usize; 3]) -> Vec<f64> {
    let mut field = spectrum(seed, shape, 3.0, 8.0, 48);
    let [_, rows, columns] = shape;
    for (row, line) in field.chunks_exact_mut(columns).enumerate() {
        let latitude = PI * (row as f64 / rows as f64 - 0.5);
        for x in line {
            *x = 225.0 + 75.0 * latitude.cos() + 4.0 * *x;
        }
    }
    field
}

/// Makes wind from the west around an eye that leans with height, in metres per second.
pub(super) fn hurricane(seed: u64, shape: [usize; 3]) -> Vec<f64> {
    let mut field = spectrum(seed, shape, 3.0, 6.0, 32);
    let [planes, rows, columns] = shape;
    for (at, x) in field.iter_mut().enumerate() {
        let (plane, row, column) = (at / (rows * columns), at / columns % rows, at % columns);
        let height = plane as f64 / planes as f64;
        let east = column as f64 / columns as f64 - 0.45 - 0.1 * height;
        let north = row as f64 / rows as f64 - 0.5;
        // Rankine's vortex, without its corner: rising to the wall of the eye, falling outside.
        let radius = east.hypot(north) / 0.08;
        let speed = 60.0 * (1.0 - height) * 2.0 * radius / (1.0 + radius * radius);
        *x = -speed * north / (0.08 * radius + 1e-9) + 10.0 * height + 1.5 * *x;
    }
    field
}

/// Makes the temperature around a wrinkled flame, in kelvin: unburnt on one side, burnt on the
/// other, exactly even far away from the front.
pub(super) fn combustion(seed: u64, shape: [usize; 3]) -> Vec<f64> {
    let [planes, rows, columns] = shape;
    let wrinkle = spectrum(seed, [1, planes, rows], 3.0, 6.0, 32);
    let mut field = Vec::with_capacity(planes * rows * columns);
    for front in wrinkle {
        let front = columns as f64 * (0.5 + 0.08 * front);
        field.extend((0..columns).map(|column| {
            let distance = (column as f64 - front) / 2.5;
            1050.0 + 750.0 * distance.tanh()
        }));
    }
    field
}

/// Makes orbitals of electrons on a grid, one after the other: waves under the envelope of an atom.
pub(super) fn orbitals(seed: u64, [planes, rows, columns]: [usize; 3]) -> Vec<f64> {
    const ORBITAL_PLANES: usize = 16;
    let mut noise = Noise::new(seed);
    let mut field = Vec::with_capacity(planes * rows * columns);
    for _ in 0..planes.div_ceil(ORBITAL_PLANES) {
        let centre = [0; 3].map(|_| 0.3 + 0.4 * noise.unit());
        let waves = [0; 3].map(|_| 1.0 + noise.below(4) as f64);
        let phase = noise.unit() * TAU;
        for plane in 0..ORBITAL_PLANES {
            for row in 0..rows {
                for column in 0..columns {
                    let at = [
                        plane as f64 / ORBITAL_PLANES as f64,
                        row as f64 / rows as f64,
                        column as f64 / columns as f64,
                    ];
                    let angle: f64 = at.iter().zip(waves).map(|(x, n)| TAU * n * x).sum();
                    let far: f64 = at.iter().zip(centre).map(|(x, c)| (x - c).powi(2)).sum();
                    field.push((angle + phase).cos() * (-12.0 * far).exp());
                }
            }
        }
    }
    field.truncate(planes * rows * columns);
    field
}
