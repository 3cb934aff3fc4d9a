//! The graph that GAP's benchmarks run on (Beamer, Asanovic, Patterson, "The GAP Benchmark Suite",
//! 2015): a Kronecker graph with Graph500's parameters, undirected, its vertices permuted, without
//! loops and double edges, as compressed sparse rows.
//!
//! The rule it keeps: the graph is a function of its scale alone, whatever the number of threads.

use anyhow::Result;
use farpage::Advice;

use crate::{app::random, place::Place, team::Team};

/// Number of edges drawn per vertex; each appears in the rows of both its ends.
const EDGE_FACTOR: usize = 16;
/// Chances of the quarters of the adjacency matrix, in thousandths: A, A + B, A + B + C.
const QUARTERS: [u64; 3] = [570, 760, 950];
const SEED: u64 = 27_491_095;
/// Edges per piece of work.
const PIECE: usize = 1 << 14;

/// A graph in local memory.
pub(crate) struct Graph {
    /// Bounds of rows: vertex `v` has the neighbours from `offsets[v]` to `offsets[v + 1]`.
    pub(crate) offsets: Vec<u64>,
    pub(crate) neighbours: Vec<u32>,
}

/// A graph in any place.
pub(crate) struct GraphOn<P: Place> {
    pub(crate) offsets: P::Array<u64>,
    pub(crate) neighbours: P::Array<u32>,
}

impl Graph {
    /// Makes the graph of this family that is nearest to `bytes`: 2^scale vertices of about 128
    /// bytes each.
    pub(crate) fn of_size(bytes: u64, team: &Team) -> Self {
        let scale = (bytes as f64 / 128.0).log2().round().clamp(4.0, 31.0);
        Self::kronecker(scale as u32, team)
    }

    /// Makes a graph of 2^`scale` vertices.
    pub(crate) fn kronecker(scale: u32, team: &Team) -> Self {
        let vertices = 1_usize << scale;

        // 1. A permutation: ranks of random numbers.
        let mut order: Vec<u64> = (0..vertices as u64)
            .map(|v| random(SEED, v) >> 32 << 32 | v)
            .collect();
        team.sort(&mut order);

        // 2. Each edge as two arcs, source in the upper half and target in the lower. A loop
        //    becomes a pair of equals.
        let mut arcs = vec![[0_u64; 2]; vertices * EDGE_FACTOR];
        team.each(
            arcs.chunks_mut(PIECE).zip((0..).step_by(PIECE)),
            |(arcs, first)| {
                for (arc, index) in arcs.iter_mut().zip(first..) {
                    let (source, target) = edge(scale, index);
                    let [source, target] =
                        [source, target].map(|v| order[v as usize] & 0xffff_ffff);
                    *arc = [source << 32 | target, target << 32 | source];
                }
            },
        );
        let mut arcs = arcs.into_flattened();
        team.sort(&mut arcs);
        arcs.dedup();
        arcs.retain(|arc| arc >> 32 != arc & 0xffff_ffff);

        // 3. Rows.
        let mut offsets = vec![0; vertices + 1];
        for arc in &arcs {
            offsets[(arc >> 32) as usize + 1] += 1;
        }
        for v in 0..vertices {
            offsets[v + 1] += offsets[v];
        }
        let neighbours = arcs.into_iter().map(|arc| arc as u32).collect();
        Self {
            offsets,
            neighbours,
        }
    }

    pub(crate) fn vertices(&self) -> usize {
        self.offsets.len() - 1
    }

    pub(crate) fn row(&self, v: usize) -> &[u32] {
        row(&self.offsets, &self.neighbours, v)
    }

    /// Copies the graph to `place`.
    pub(crate) fn load<P: Place>(&self, place: &P, advice: Advice) -> Result<GraphOn<P>> {
        Ok(GraphOn {
            offsets: place.copy_of(&self.offsets, advice)?,
            neighbours: place.copy_of(&self.neighbours, advice)?,
        })
    }
}

pub(crate) fn row<'a>(offsets: &[u64], neighbours: &'a [u32], v: usize) -> &'a [u32] {
    &neighbours[offsets[v] as usize..offsets[v + 1] as usize]
}

/// Draws edge `index` before the permutation: four unequal quarters give each bit of its ends.
fn edge(scale: u32, index: u64) -> (u32, u32) {
    (0..scale).fold((0, 0), |(source, target), bit| {
        let draw = random(SEED + 1 + u64::from(bit), index) % 1000;
        let quarter = QUARTERS.iter().filter(|&&limit| draw >= limit).count() as u32;
        (source << 1 | quarter >> 1, target << 1 | quarter & 1)
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn graph(scale: u32, threads: usize) -> Graph {
        Graph::kronecker(scale, &Team::new(threads, Arc::default()).unwrap())
    }

    #[test]
    fn rows_are_sorted_symmetric_and_without_loops() {
        let graph = graph(10, 2);
        assert_eq!(graph.vertices(), 1024);
        assert_eq!(graph.offsets[1024], graph.neighbours.len() as u64);
        let mut degrees = 0;
        for v in 0..1024 {
            let row = graph.row(v);
            degrees += row.len();
            assert!(row.is_sorted_by(|a, b| a < b), "{v}: {row:?}");
            for &u in row {
                assert_ne!(u as usize, v);
                assert!(graph.row(u as usize).binary_search(&(v as u32)).is_ok());
            }
        }
        assert_eq!(degrees, graph.neighbours.len());
        // Two arcs per edge, less those that were drawn twice.
        assert!(degrees <= 2 * 16 * 1024 && degrees > 16 * 1024, "{degrees}");
    }

    #[test]
    fn edges_follow_the_quarters_and_vertices_are_permuted() {
        let draws = 20_000;
        let mut shares = [0.0; 4];
        for index in 0..draws {
            let (source, target) = edge(1, index);
            shares[(source << 1 | target) as usize] += 1.0 / draws as f64;
        }
        for (share, expected) in shares.into_iter().zip([0.57_f64, 0.19, 0.19, 0.05]) {
            assert!((share - expected).abs() < 0.02, "{shares:?}");
        }
        // Unpermuted, vertex 0 has by far the most neighbours and they thin out: the heavy ones
        // must be anywhere.
        let graph = graph(12, 1);
        let half: u64 = graph.offsets[graph.vertices() / 2];
        let share = half as f64 / graph.neighbours.len() as f64;
        assert!((0.35..0.65).contains(&share), "{share} in the first half");
        let heaviest = (0..4096).map(|v| graph.row(v).len()).max().unwrap();
        assert!(heaviest > 20 * graph.neighbours.len() / 4096, "{heaviest}");
    }

    #[test]
    fn the_number_of_threads_does_not_matter() {
        let (one, three) = (graph(8, 1), graph(8, 3));
        assert_eq!(one.offsets, three.offsets);
        assert_eq!(one.neighbours, three.neighbours);
    }
}
