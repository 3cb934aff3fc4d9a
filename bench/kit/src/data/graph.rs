//! The two arrays of a graph in compressed rows. SDRBench has no graphs; programs of the GAP
//! benchmark suite hold such arrays.

use super::noise::Noise;

/// Number of vertices of the graph.
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
