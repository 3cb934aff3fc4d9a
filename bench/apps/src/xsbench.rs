//! Macroscopic cross-section lookups after XSBench (Tramm and others, "XSBench - The Development
//! and Verification of a Performance Abstraction for Monte Carlo Reactor Analysis", PHYSOR 2014),
//! the small Hoogenboom-Martin reactor with a unionised energy grid: a binary search for a
//! particle's energy, then for each nuclide of its material two points of that nuclide's grid,
//! interpolated.
//!
//! All grids are remote. [`ByEnergy`] is XSBench's event-based form with its accelerator kernels'
//! optimisation: lookups are done in batches, sorted by energy, so that each batch walks through
//! the grids once. The batch is local and counts as local memory. [`AsDrawn`] does each lookup as
//! it is drawn, dozens of scattered accesses: the worst that paging can meet.

use anyhow::Result;
use farpage::Advice;

use crate::{
    app::{App, Verdict, ensure, random},
    place::Place,
    team::{Team, there_and_back},
};
use farpage_bench_kit::pick::mix;

const NUCLIDES: usize = 68;
/// Bytes of the grids per grid point of a nuclide: its energy and cross sections, its energy again
/// and a row of indices in the unionised grid.
const POINT_BYTES: u64 = (6 * 8 + 8 + NUCLIDES * 4) as u64;
/// Number of batches, of twice as many lookups as the unionised grid has points. XSBench does 22
/// lookups per point.
const BATCHES: usize = 4;
/// Lookups per piece of work.
const PIECE: usize = 1 << 12;

/// Nuclides of each material, as in XSBench; fuel is the first.
const MATERIALS: [&[u8]; 12] = [
    &[
        58, 59, 60, 61, 40, 42, 43, 44, 45, 46, 1, 2, 3, 7, 8, 9, 10, 29, 57, 47, 48, 0, 62, 15,
        33, 34, 52, 53, 54, 55, 56, 18, 23, 41,
    ],
    &[63, 64, 65, 66, 67],
    &[24, 41, 4, 5],
    &[24, 41, 4, 5],
    &[
        19, 20, 21, 22, 35, 36, 37, 38, 39, 25, 27, 28, 29, 30, 31, 32, 26, 49, 50, 51, 11, 12, 13,
        14, 6, 16, 17,
    ],
    STEEL,
    STEEL,
    STEEL,
    STEEL,
    STEEL,
    &[24, 41, 4, 5, 63, 64, 65, 66, 67],
    &[24, 41, 4, 5, 63, 64, 65, 66, 67],
];
const STEEL: &[u8] = &[
    24, 41, 4, 5, 19, 20, 21, 22, 35, 36, 37, 38, 39, 25, 49, 50, 51, 11, 12, 13, 14,
];
/// Chances of a particle to be in each material, in thousandths, as in XSBench. They add up to
/// 1001: the last material gets 12.
const CHANCES: [u64; 12] = [140, 52, 275, 134, 154, 64, 66, 55, 8, 15, 25, 13];

/// A grid point: its energy and five cross sections.
type Point = [f64; 6];

pub(crate) type ByEnergy = XsBench<false>;
pub(crate) type AsDrawn = XsBench<true>;

pub(crate) struct XsBench<const RANDOM: bool> {
    /// Grid points, nuclide after nuclide, each by energy.
    points: Vec<Point>,
    union_energies: Vec<f64>,
    /// Last point of each nuclide not above the energy, for each energy of the unionised grid.
    union_points: Vec<[u32; NUCLIDES]>,
}

pub(crate) struct Grids<P: Place> {
    points: P::Array<Point>,
    union_energies: P::Array<f64>,
    union_points: P::Array<u32>,
    /// Number of resets as drawn. Each run does other lookups then: the pages of the same ones
    /// would still be local.
    run: usize,
}

/// XSBench's verification hash (which cross section is the largest, summed up over all lookups),
/// and a hash of all cross sections bit by bit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Hash {
    largest: u64,
    bits: u64,
}

impl<const RANDOM: bool> App for XsBench<RANDOM> {
    type On<P: Place> = Grids<P>;
    type Answer = Hash;

    fn generate(bytes: u64, team: &Team) -> Self {
        let grid_points = (bytes / POINT_BYTES) as usize / NUCLIDES;
        let mut points = vec![[0.0; 6]; grid_points * NUCLIDES];
        let grids = points
            .chunks_mut(grid_points)
            .zip((0..).step_by(grid_points));
        team.each(grids, |(grid, first)| {
            for (point, index) in grid.iter_mut().zip(first..) {
                *point = std::array::from_fn(|field| unit(random(20 + field as u64, index)));
            }
            grid.sort_unstable_by(|a, b| a[0].total_cmp(&b[0]));
        });
        let union = points.iter().enumerate();
        let union = union.map(|(at, point)| (point[0].to_bits(), (at / grid_points) as u32));
        let mut union: Vec<(u64, u32)> = union.collect();
        // Positive numbers are ordered as their bits are.
        team.sort(&mut union);
        let mut last = [None; NUCLIDES];
        let row = |&(_, nuclide): &(u64, u32)| {
            let last_one = &mut last[nuclide as usize];
            *last_one = Some(last_one.map_or(0, |at: u32| at + 1));
            last.map(|at| at.unwrap_or(0))
        };
        let union_points = union.iter().map(row).collect();
        let energies = union.iter().map(|&(bits, _)| f64::from_bits(bits));
        Self {
            union_energies: energies.collect(),
            points,
            union_points,
        }
    }

    fn local_bytes(&self, _: &Team) -> u64 {
        (self.batch() * size_of::<u64>()) as u64
    }

    fn load<P: Place>(&self, place: &P) -> Result<Grids<P>> {
        // By energy, every grid is walked through in order, 68 of them at once: sequences are found
        // as they come.
        let advice = [Advice::Normal, Advice::Random][usize::from(RANDOM)];
        Ok(Grids {
            points: place.copy_of(&self.points, advice)?,
            union_energies: place.copy_of(&self.union_energies, advice)?,
            union_points: place.copy_of(self.union_points.as_flattened(), advice)?,
            run: 0,
        })
    }

    fn reset<P: Place>(&self, grids: &mut Grids<P>, _: &Team) {
        grids.run += usize::from(RANDOM);
    }

    fn work<P: Place>(&self, grids: &mut Grids<P>, team: &Team) -> Hash {
        let run = grids.run;
        let grids = Slices {
            points: &grids.points,
            union_energies: &grids.union_energies,
            union_points: &grids.union_points,
        };
        let mut hash = Hash::default();
        let mut batch = vec![0; self.batch()];
        let batches = if RANDOM { 1 } else { BATCHES };
        for pass in run..run + batches {
            // A lookup is its energy, roughly, and its number.
            let pieces = batch.chunks_mut(PIECE).enumerate();
            team.each(pieces, |(piece, lookups)| {
                for (lookup, number) in lookups.iter_mut().zip(piece * PIECE..) {
                    *lookup = energy(self.number(pass, number)) >> 32 << 32 | number as u64;
                }
            });
            if !RANDOM {
                team.sort(&mut batch);
            }
            // In random order a lookup may wait for dozens of pages: pieces are small, so that no
            // thread ends long after the other.
            let pieces = batch.chunks(if RANDOM { 16 } else { PIECE });
            let hashes = team.fold(
                there_and_back(pass, pieces),
                Hash::default,
                |hash, lookups| {
                    for &lookup in lookups {
                        let number = self.number(pass, (lookup & 0xffff_ffff) as usize);
                        hash.add(grids.macroscopic(unit(energy(number)), material(number)));
                    }
                },
            );
            hash = hashes.into_iter().fold(hash, Hash::sum);
        }
        hash
    }

    fn verify<P: Place>(&self, grids: &Grids<P>, found: &Hash, local: &Hash) -> Verdict {
        let local = &match RANDOM {
            true => self.expected(grids.run),
            false => *local,
        };
        ensure(found.largest > 0 && found == local, || {
            format!("the hash is {found:x?}, the local run's is {local:x?}")
        })
    }
}

impl<const RANDOM: bool> XsBench<RANDOM> {
    /// Returns the hash of one batch, on the grids that all others are copies of.
    fn expected(&self, pass: usize) -> Hash {
        let grids = Slices {
            points: &self.points,
            union_energies: &self.union_energies,
            union_points: self.union_points.as_flattened(),
        };
        let mut hash = Hash::default();
        for number in (0..self.batch()).map(|lookup| self.number(pass, lookup)) {
            hash.add(grids.macroscopic(unit(energy(number)), material(number)));
        }
        hash
    }

    /// Returns the number of lookups in a batch.
    fn batch(&self) -> usize {
        let points = self.union_energies.len();
        if RANDOM {
            (points / 128).max(64)
        } else {
            2 * points
        }
    }

    fn number(&self, pass: usize, in_batch: usize) -> u64 {
        (pass * self.batch() + in_batch) as u64
    }
}

/// Returns the energy of a lookup; [`unit()`] makes it a number below 1.
fn energy(number: u64) -> u64 {
    random(30, number)
}

fn material(number: u64) -> usize {
    let mut draw = random(31, number) % 1000;
    for (material, &chance) in CHANCES.iter().enumerate() {
        if draw < chance {
            return material;
        }
        draw -= chance;
    }
    0
}

fn concentration(material: usize, nuclide: usize) -> f64 {
    unit(random(32, (material * NUCLIDES + nuclide) as u64))
}

/// Maps random bits to a number between 0 and 1.
fn unit(random: u64) -> f64 {
    (random >> 11) as f64 / (1_u64 << 53) as f64
}

struct Slices<'a> {
    points: &'a [Point],
    union_energies: &'a [f64],
    union_points: &'a [u32],
}

impl Slices<'_> {
    /// Returns the five macroscopic cross sections of a material at an energy.
    fn macroscopic(&self, energy: f64, material: usize) -> [f64; 5] {
        let grid_points = self.points.len() / NUCLIDES;
        let above = self.union_energies.partition_point(|&e| e <= energy);
        let row = &self.union_points[above.saturating_sub(1) * NUCLIDES..][..NUCLIDES];
        let mut sums = [0.0; 5];
        for &nuclide in MATERIALS[material] {
            let nuclide = usize::from(nuclide);
            // The last point has none above it to interpolate with.
            let at = (row[nuclide] as usize).min(grid_points - 2) + nuclide * grid_points;
            let (low, high) = (&self.points[at], &self.points[at + 1]);
            let fraction = (high[0] - energy) / (high[0] - low[0]);
            let concentration = concentration(material, nuclide);
            for (sum, (low, high)) in sums.iter_mut().zip(low[1..].iter().zip(&high[1..])) {
                *sum += (high - fraction * (high - low)) * concentration;
            }
        }
        sums
    }
}

impl Hash {
    fn add(&mut self, cross_sections: [f64; 5]) {
        let is_larger = |at: usize, than: usize| cross_sections[at] > cross_sections[than];
        let largest = (1..5).fold(0, |most, at| if is_larger(at, most) { at } else { most });
        let bits = cross_sections.iter();
        let bits = bits.fold(0, |hash, x| mix(hash ^ x.to_bits()));
        *self = self.sum(Self {
            largest: largest as u64 + 1,
            bits,
        });
    }

    fn sum(self, other: Self) -> Self {
        Self {
            largest: self.largest + other.largest,
            bits: self.bits.wrapping_add(other.bits),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{assert_rejected, ran, team},
        *,
    };
    use crate::place::Local;

    fn check<const RANDOM: bool>() {
        let app = XsBench::<RANDOM>::generate(300 * NUCLIDES as u64 * POINT_BYTES, &team());
        let (mut on, found) = ran(&app);

        // The same lookups as they are drawn, each nuclide's grid searched by itself.
        let lookups = app.batch() * if RANDOM { 1 } else { BATCHES };
        let mut expected = Hash::default();
        for number in 0..lookups as u64 {
            let (energy, material) = (unit(energy(number)), material(number));
            let mut sums = [0.0; 5];
            for &nuclide in MATERIALS[material] {
                let grid = &app.points[usize::from(nuclide) * 300..][..300];
                let above = grid.iter().filter(|point| point[0] <= energy).count();
                let at = above.saturating_sub(1).min(298);
                let (low, high) = (&grid[at], &grid[at + 1]);
                let fraction = (high[0] - energy) / (high[0] - low[0]);
                for (x, sum) in sums.iter_mut().enumerate() {
                    *sum += (high[x + 1] - fraction * (high[x + 1] - low[x + 1]))
                        * concentration(material, usize::from(nuclide));
                }
            }
            expected.add(sums);
        }
        assert_eq!(found, expected);

        // A nuclide of the fuel; near the middle, where lookups are sure to come.
        on.points[58 * 300 + 150][1] += 1e-9;
        on.points[4 * 300 + 150][1] += 1e-9;
        if !RANDOM {
            assert_rejected(&app, &mut on, &found);
        }
        let wrong = Hash {
            largest: found.largest + 1,
            ..found
        };
        app.verify::<Local>(&on, &wrong, &found).unwrap_err();
    }

    #[test]
    fn lookups_in_any_order_find_what_a_search_of_each_grid_finds() {
        check::<false>();
        check::<true>();
    }

    #[test]
    fn materials_are_drawn_as_often_as_they_should_be() {
        let mut counts = [0_u32; 12];
        for number in 0..100_000 {
            counts[material(number)] += 1;
        }
        for (count, chance) in counts.into_iter().zip(CHANCES) {
            assert!(count.abs_diff(chance as u32 * 100) < 600, "{counts:?}");
        }
    }
}
