//! Generators of fields: models of the atmosphere, of flames and of atoms, turbulence, fields that
//! are mostly zero, particles, a graph in compressed rows, and text.

use std::f64::consts::{PI, TAU};

use super::noise::{Noise, spectrum};
use crate::pick::Picker;

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
            let y = row as f64 / rows as f64 - 0.5;
            let x = column as f64 / columns as f64 - 0.5;
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

/// Edge of the simulated box, as in HACC's positions.
const BOX_EDGE: f64 = 256.0;
/// Particles of one halo, which lie one after the other.
const HALO: usize = 512;

/// Makes a coordinate of particles that gravity has drawn together.
pub(super) fn positions(seed: u64, [_, _, count]: [usize; 3]) -> Vec<f64> {
    halos(seed, count, |noise| noise.unit() * BOX_EDGE, 0.4)
        .map(|x| x.rem_euclid(BOX_EDGE))
        .collect()
}

/// Makes a velocity of particles in halos, in kilometres per second.
pub(super) fn velocities(seed: u64, [_, _, count]: [usize; 3]) -> Vec<f64> {
    halos(seed, count, |noise| noise.normal() * 300.0, 120.0).collect()
}

/// Makes halos around `centre`s, each spread normally.
fn halos(
    seed: u64,
    count: usize,
    centre: impl Fn(&mut Noise) -> f64,
    spread: f64,
) -> impl Iterator<Item = f64> {
    let mut noise = Noise::new(seed);
    let mut middle = 0.0;
    (0..count).map(move |at| {
        if at % HALO == 0 {
            middle = centre(&mut noise);
        }
        middle + spread * noise.normal()
    })
}

/// Makes a coordinate of metal atoms that tremble about the points of their lattice, in angstroms.
pub(super) fn atoms(seed: u64, [_, _, count]: [usize; 3]) -> Vec<f64> {
    const CELL: f64 = 3.615;
    const CELLS: usize = 96;
    let mut noise = Noise::new(seed);
    // Four atoms of a face-centred cell, two of them half a cell further on.
    (0..count)
        .map(|at| {
            let half = if at % 4 < 2 { 0.0 } else { 0.5 };
            CELL * ((at / 4 % CELLS) as f64 + half) + 0.08 * noise.normal()
        })
        .collect()
}

const VERTICES: usize = 1 << 20;

/// Makes the neighbours of each vertex, ascending. Few vertices have many neighbours; half of all
/// neighbours are near.
pub(super) fn columns(seed: u64, [_, _, count]: [usize; 3]) -> Vec<f64> {
    let mut noise = Noise::new(seed);
    let mut field = Vec::with_capacity(count);
    let mut vertex = 0;
    while field.len() < count {
        let mut row: Vec<usize> = (0..degree(&mut noise))
            .map(|_| match noise.unit() < 0.5 {
                true => (vertex + noise.below(1024)) % VERTICES,
                false => (VERTICES as f64 * noise.unit().powi(3)) as usize,
            })
            .collect();
        row.sort_unstable();
        field.extend(row.into_iter().map(|column| column as f64));
        vertex += 1;
    }
    field.truncate(count);
    field
}

/// Makes the offset at which the neighbours of each vertex end.
pub(super) fn offsets(seed: u64, [_, _, count]: [usize; 3]) -> Vec<f64> {
    let mut noise = Noise::new(seed);
    let mut offset = 0;
    (0..count)
        .map(|_| {
            offset += degree(&mut noise);
            offset as f64
        })
        .collect()
}

/// Draws a number of neighbours by a power law: 8 at least, 16 on average, now and then thousands.
fn degree(noise: &mut Noise) -> usize {
    (8.0 / (1.0 - noise.unit()).sqrt()).min(10_000.0) as usize
}

const WORDS: usize = 4096;
const SYLLABLES: [&str; 24] = [
    "ba", "cor", "de", "el", "fi", "gan", "ho", "in", "jo", "ka", "lum", "me", "na", "or", "pe",
    "qui", "ra", "sen", "ti", "ul", "ve", "wi", "xa", "zo",
];

/// Makes `count` bytes of text.
pub(super) fn text(seed: u64, [_, _, count]: [usize; 3]) -> Vec<f64> {
    let mut noise = Noise::new(seed);
    let words: Vec<String> = (0..WORDS)
        .map(|_| {
            let syllables = 1 + noise.below(4);
            (0..syllables)
                .map(|_| SYLLABLES[noise.below(SYLLABLES.len())])
                .collect()
        })
        .collect();
    let mut picker = Picker::new(WORDS as u64, Some(0.99), seed);
    let mut text = String::with_capacity(count + 32);
    while text.len() < count {
        text += &words[picker.pick() as usize];
        text += if noise.below(12) == 0 { ".\n" } else { " " };
    }
    text.bytes().take(count).map(f64::from).collect()
}
