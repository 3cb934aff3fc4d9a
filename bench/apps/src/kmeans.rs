//! Lloyd's k-means: [`ROUNDS`] rounds over points of [`DIMENSIONS`] coordinates around [`CLUSTERS`]
//! centres.
//!
//! The points are remote, read once per round in order. Each piece's sums are added up in the order
//! of the pieces, so that the result does not depend on the threads.

use anyhow::Result;
use farpage::Advice;

use crate::{
    app::{App, Verdict, ensure, random},
    place::Place,
    team::{Team, there_and_back},
};

const DIMENSIONS: usize = 16;
const CLUSTERS: usize = 16;
const ROUNDS: usize = 8;
/// Points per piece of work: a megabyte.
const PIECE: usize = 1 << 14;

type Point = [f32; DIMENSIONS];

pub(crate) struct KMeans(Vec<Point>);

/// Result of the rounds.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Clustering {
    centres: [Point; CLUSTERS],
    /// Sum of the squared distances to the nearest centre, in the last round.
    inertia: f64,
}

/// Sums over one piece.
#[derive(Clone, Default)]
struct Sums {
    coordinates: [[f64; DIMENSIONS]; CLUSTERS],
    points: [u64; CLUSTERS],
    inertia: f64,
}

impl App for KMeans {
    type On<P: Place> = P::Array<Point>;
    type Answer = Clustering;

    fn generate(bytes: u64, team: &Team) -> Self {
        let mut points = vec![[0.0; DIMENSIONS]; bytes as usize / size_of::<Point>()];
        team.each(points.chunks_mut(PIECE).enumerate(), |(piece, points)| {
            for (point, index) in points.iter_mut().zip((piece * PIECE) as u64..) {
                *point = generate(index);
            }
        });
        Self(points)
    }

    fn local_bytes(&self, _: &Team) -> u64 {
        (self.0.len().div_ceil(PIECE) * size_of::<Sums>()) as u64
    }

    fn load<P: Place>(&self, place: &P) -> Result<P::Array<Point>> {
        place.copy_of(&self.0, Advice::Sequential)
    }

    fn work<P: Place>(&self, points: &mut P::Array<Point>, team: &Team) -> Clustering {
        let mut centres: [Point; CLUSTERS] = std::array::from_fn(|cluster| points[cluster]);
        let mut inertia = 0.0;
        let mut sums = vec![Sums::default(); points.len().div_ceil(PIECE)];
        for round in 0..ROUNDS {
            let pieces = points.chunks(PIECE).zip(&mut sums);
            team.each(there_and_back(round, pieces), |(points, sums)| {
                *sums = assign(points, &centres);
            });
            let mut total = Sums::default();
            for sums in &sums {
                total.add(sums);
            }
            inertia = total.inertia;
            for (cluster, centre) in centres.iter_mut().enumerate() {
                // A centre without points stays where it is.
                let points = total.points[cluster];
                if points > 0 {
                    *centre = total.coordinates[cluster].map(|sum| (sum / points as f64) as f32);
                }
            }
        }
        Clustering { centres, inertia }
    }

    fn verify<P: Place>(
        &self,
        _: &P::Array<Point>,
        found: &Clustering,
        local: &Clustering,
    ) -> Verdict {
        ensure(found.inertia > 0.0 && found == local, || {
            format!(
                "an inertia of {}, the local run's is {}; or other centres",
                found.inertia, local.inertia
            )
        })
    }
}

/// Generates point `index`, near the corner of a cube that belongs to its cluster.
fn generate(index: u64) -> Point {
    let cluster = random(4, index) % CLUSTERS as u64;
    std::array::from_fn(|d| {
        let corner = random(5, cluster * DIMENSIONS as u64 + d as u64) & 1;
        let noise = random(6 + d as u64, index) >> 40;
        corner as f32 + noise as f32 / (1 << 24) as f32
    })
}

/// Adds each point to the sums of its nearest centre.
fn assign(points: &[Point], centres: &[Point; CLUSTERS]) -> Sums {
    let mut sums = Sums::default();
    // Coordinate by coordinate, so that the distances to all centres are computed side by side.
    let by_coordinate: [[f32; CLUSTERS]; DIMENSIONS] =
        std::array::from_fn(|d| std::array::from_fn(|cluster| centres[cluster][d]));
    for point in points {
        let mut distances = [0.0_f32; CLUSTERS];
        for (x, centres) in point.iter().zip(&by_coordinate) {
            for (distance, centre) in distances.iter_mut().zip(centres) {
                *distance += (x - centre) * (x - centre);
            }
        }
        let (mut nearest, mut least) = (0, distances[0]);
        for (cluster, &distance) in distances.iter().enumerate() {
            if distance < least {
                (nearest, least) = (cluster, distance);
            }
        }
        sums.inertia += f64::from(least);
        sums.points[nearest] += 1;
        for (sum, x) in sums.coordinates[nearest].iter_mut().zip(point) {
            *sum += f64::from(*x);
        }
    }
    sums
}

impl Sums {
    fn add(&mut self, other: &Self) {
        self.inertia += other.inertia;
        for cluster in 0..CLUSTERS {
            self.points[cluster] += other.points[cluster];
            for (sum, x) in self.coordinates[cluster]
                .iter_mut()
                .zip(&other.coordinates[cluster])
            {
                *sum += x;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{ran, team},
        *,
    };
    use crate::place::Local;

    #[test]
    fn rounds_do_what_lloyd_says_and_another_result_is_rejected() {
        let app = KMeans::generate(40_000 * size_of::<Point>() as u64, &team());
        let (on, found) = ran(&app);

        // By the book, one point and one centre at a time.
        let centres = app.0[..CLUSTERS].iter();
        let mut centres: Vec<Vec<f64>> = centres.map(|p| p.map(f64::from).to_vec()).collect();
        let mut inertia = 0.0;
        for _ in 0..ROUNDS {
            let mut sums = vec![(vec![0.0; DIMENSIONS], 0.0); CLUSTERS];
            inertia = 0.0;
            for point in &app.0 {
                let distance = |centre: &Vec<f64>| -> f64 {
                    let pairs = centre.iter().zip(point);
                    pairs.map(|(c, x)| (f64::from(*x) - c).powi(2)).sum()
                };
                let distances = centres.iter().map(distance).enumerate();
                let nearest = distances.min_by(|a, b| a.1.total_cmp(&b.1));
                let (nearest, least) = nearest.unwrap();
                inertia += least;
                sums[nearest].1 += 1.0;
                for (sum, x) in sums[nearest].0.iter_mut().zip(point) {
                    *sum += f64::from(*x);
                }
            }
            for (centre, (sum, points)) in centres.iter_mut().zip(sums) {
                if points > 0.0 {
                    *centre = sum.into_iter().map(|x| x / points).collect();
                }
            }
        }
        let ratio = found.inertia / inertia;
        assert!((ratio - 1.0).abs() < 1e-4, "{ratio}");

        let mut wrong = found.clone();
        wrong.inertia *= 1.000_000_1;
        app.verify::<Local>(&on, &wrong, &found).unwrap_err();
        let mut wrong = found.clone();
        wrong.centres[3][3] += 1e-3;
        app.verify::<Local>(&on, &wrong, &found).unwrap_err();
    }
}
