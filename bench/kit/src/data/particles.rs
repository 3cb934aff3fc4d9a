//! Particles in the order in which a simulation keeps them: neighbours in memory are near each
//! other, and yet hardly alike.

use super::noise::Noise;

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
