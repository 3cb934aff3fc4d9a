//! PageRank as GAP does it: each vertex gathers from its neighbours until the scores move by less
//! than [`TOLERANCE`], at most 20 rounds.
//!
//! The graph's rows are remote, read once per round in order; the two vectors, of which one is
//! gathered from at random, are local and count as local memory.

use anyhow::Result;
use farpage::Advice;

use crate::{
    app::{App, Verdict, ensure},
    graph::{Graph, GraphOn, row},
    place::Place,
    team::{Team, there_and_back},
};

const DAMPING: f64 = 0.85;
const TOLERANCE: f64 = 1e-4;
const ROUNDS_MAX: usize = 20;
/// Vertices per piece of work: about a megabyte of neighbours.
const PIECE: usize = 1 << 13;

pub(crate) struct PageRank(Graph);

impl App for PageRank {
    type On<P: Place> = GraphOn<P>;
    type Answer = Vec<f32>;

    fn generate(bytes: u64, team: &Team) -> Self {
        Self(Graph::of_size(bytes, team))
    }

    fn local_bytes(&self, _: &Team) -> u64 {
        2 * size_of::<f32>() as u64 * self.0.vertices() as u64
    }

    fn load<P: Place>(&self, place: &P) -> Result<GraphOn<P>> {
        self.0.load(place, Advice::Sequential)
    }

    fn work<P: Place>(&self, graph: &mut GraphOn<P>, team: &Team) -> Vec<f32> {
        let (offsets, neighbours): (&[u64], &[u32]) = (&graph.offsets, &graph.neighbours);
        let vertices = offsets.len() - 1;
        let base = ((1.0 - DAMPING) / vertices as f64) as f32;
        let mut scores = vec![1.0 / vertices as f32; vertices];
        let mut shares = vec![0.0_f32; vertices];
        let mut moved = vec![0.0; vertices.div_ceil(PIECE)];
        for round in 0..ROUNDS_MAX {
            // 1. The share that each vertex gives to each neighbour.
            let pieces = shares.chunks_mut(PIECE).zip(scores.chunks(PIECE));
            let pieces = there_and_back(round, pieces.enumerate());
            team.each(pieces, |(piece, (shares, scores))| {
                let degrees = offsets[piece * PIECE..].windows(2).map(|w| w[1] - w[0]);
                for ((share, score), degree) in shares.iter_mut().zip(scores).zip(degrees) {
                    *share = match degree {
                        0 => 0.0,
                        degree => score / degree as f32,
                    };
                }
            });
            // 2. Each vertex gathers.
            let pieces = scores.chunks_mut(PIECE).zip(&mut moved);
            team.each(
                there_and_back(round, pieces.enumerate()),
                |(piece, (scores, moved))| {
                    *moved = 0.0;
                    for (score, v) in scores.iter_mut().zip(piece * PIECE..) {
                        let row = row(offsets, neighbours, v).iter();
                        let gathered: f32 = row.map(|&u| shares[u as usize]).sum();
                        let new = base + DAMPING as f32 * gathered;
                        *moved += f64::from((new - *score).abs());
                        *score = new;
                    }
                },
            );
            if moved.iter().sum::<f64>() < TOLERANCE {
                break;
            }
        }
        scores
    }

    fn verify<P: Place>(&self, _: &GraphOn<P>, scores: &Vec<f32>, local: &Vec<f32>) -> Verdict {
        verify(&self.0, scores, local)
    }
}

/// Verifies that scores equal the local run's in the sum of differences and are stable: one more
/// round, computed the other way round (each vertex gives) and in double precision, moves them by
/// little more than the tolerance.
fn verify(graph: &Graph, scores: &[f32], local: &[f32]) -> Verdict {
    let vertices = graph.vertices();
    ensure(scores.len() == vertices, || {
        format!("{} scores of {vertices} vertices", scores.len())
    })?;
    let pairs = scores.iter().zip(local);
    let distance: f64 = pairs.map(|(a, b)| f64::from((a - b).abs())).sum();
    ensure(distance <= 1e-6, || {
        format!("the scores differ from the local run's by {distance:e} in sum")
    })?;
    let mut next = vec![(1.0 - DAMPING) / vertices as f64; vertices];
    for (v, &score) in scores.iter().enumerate() {
        let row = graph.row(v);
        for &u in row {
            next[u as usize] += DAMPING * f64::from(score) / row.len() as f64;
        }
    }
    let pairs = next.iter().zip(scores);
    let moved: f64 = pairs.map(|(new, old)| (new - f64::from(*old)).abs()).sum();
    ensure(moved <= 1.1 * TOLERANCE, || {
        format!("one more round moves the scores by {moved:e}, which is more than {TOLERANCE:e}")
    })
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{ran, team},
        *,
    };
    use crate::place::Local;

    #[test]
    fn a_wrong_score_is_rejected() {
        let app = PageRank(Graph::kronecker(9, &team()));
        let (on, scores) = ran(&app);
        let mut wrong = scores.clone();
        wrong[7] *= 1.5;
        app.verify::<Local>(&on, &wrong, &scores).unwrap_err();
        // Wrong in both runs: only the round that is computed anew can tell.
        app.verify::<Local>(&on, &wrong, &wrong).unwrap_err();
    }
}
