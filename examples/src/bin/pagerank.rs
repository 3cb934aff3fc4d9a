//! PageRank of a generated graph whose edges are remote and whose ranks are local.
//! `pagerank [scale: 2^scale vertices, such as 18]`

use std::time::Instant;

use anyhow::{Result, ensure};
use farpage::ByteSize;
use farpage_examples::{Memory, argument, report};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

const EDGES_PER_VERTEX: usize = 16;
const DAMPING: f64 = 0.85;
/// Upper bound of the rank that a round moves when ranks have converged.
const TOLERANCE: f64 = 1e-9;

fn main() -> Result<()> {
    let scale: u32 = argument("scale", 18)?;
    ensure!(
        (10..=31).contains(&scale),
        "a scale of {scale}: need 10 to 31"
    );
    let vertices = 1 << scale;
    let edges = vertices * EDGES_PER_VERTEX;
    let graph_bytes = vertices * size_of::<u64>() + edges * size_of::<u32>();

    let memory = Memory::find()?;
    let runtime = memory
        .runtime()
        .budget(ByteSize(graph_bytes as u64 / 4))
        .build()?;

    // The graph as compressed sparse rows: sources[offsets[v]..offsets[v + 1]] are the vertices
    // that link to v.
    let started = Instant::now();
    let mut offsets = runtime.array::<u64>(vertices + 1)?;
    let mut sources = runtime.array::<u32>(edges)?;
    let mut links = runtime.array::<u64>(edges)?;
    generate(&mut links, &mut offsets, &mut sources);
    links.close()?; // its remote memory is free again
    let what = format!("made a graph of {vertices} vertices and {edges} edges");
    report(&what, started, &runtime);

    let started = Instant::now();
    let (ranks, rounds) = pagerank(&offsets, &sources);
    report(&format!("{rounds} rounds"), started, &runtime);

    let sum: f64 = ranks.iter().sum();
    ensure!((sum - 1.0).abs() < 1e-9, "the ranks' sum is {sum}, not 1");

    // The same functions on ordinary memory must give the same bits.
    let mut local_offsets = vec![0; vertices + 1];
    let mut local_sources = vec![0; edges];
    generate(&mut vec![0; edges], &mut local_offsets, &mut local_sources);
    let (local_ranks, _) = pagerank(&local_offsets, &local_sources);
    ensure!(
        ranks == local_ranks,
        "the ranks differ from those in local memory"
    );
    println!("the ranks' sum is {sum:.9}, and all are as in local memory: correct");
    Ok(())
}

/// Makes the edges of an R-MAT graph (Chakrabarti, Zhan, Faloutsos, 2004), sorts them by target,
/// and writes them as compressed sparse rows.
fn generate(links: &mut [u64], offsets: &mut [u64], sources: &mut [u32]) {
    const CHUNK: usize = 1 << 16;
    let scale = (offsets.len() - 1).ilog2();
    links
        .par_chunks_mut(CHUNK)
        .enumerate()
        .for_each(|(i, chunk)| {
            let mut rng = ChaCha8Rng::seed_from_u64(i as u64);
            chunk.fill_with(|| link(&mut rng, scale));
        });

    // Sorting makes this work beyond memory: putting edges in place one by one would touch a random
    // page for each.
    links.par_sort_unstable();

    let mut at = 0;
    for (target, offset) in offsets.iter_mut().enumerate() {
        while at < links.len() && links[at] >> 32 < target as u64 {
            sources[at] = links[at] as u32;
            at += 1;
        }
        *offset = at as u64;
    }
}

/// Makes one edge, with its target in the upper half and its source in the lower. Each bit of both
/// is drawn from four unequal quarters.
fn link(rng: &mut ChaCha8Rng, scale: u32) -> u64 {
    (0..scale).fold(0, |link, _| {
        let (target, source) = match rng.random_range(0..100) {
            0..57 => (0, 0),
            57..76 => (0, 1),
            76..95 => (1, 0),
            _ => (1, 1),
        };
        link << 1 | target << 32 | source
    })
}

/// Returns the rank of every vertex, and the number of rounds. Remote arrays and vectors are both
/// slices here.
fn pagerank(offsets: &[u64], sources: &[u32]) -> (Vec<f64>, u32) {
    let vertices = offsets.len() - 1;
    let mut links_out = vec![0_u32; vertices];
    for &source in sources {
        links_out[source as usize] += 1;
    }

    let mut ranks = vec![1.0 / vertices as f64; vertices];
    for round in 1.. {
        // 1. Each vertex shares its rank among those it links to; one without links gives to all.
        let shares: Vec<f64> = ranks
            .iter()
            .zip(&links_out)
            .map(|(rank, &links)| rank / f64::from(links.max(1)))
            .collect();
        let unlinked: f64 = ranks
            .iter()
            .zip(&links_out)
            .filter(|&(_, &links)| links == 0)
            .map(|(rank, _)| rank)
            .sum();
        let base = (1.0 - DAMPING + DAMPING * unlinked) / vertices as f64;

        // 2. Each vertex gathers. This reads the remote arrays from front to back, once per round.
        let gathered: Vec<f64> = offsets
            .par_windows(2)
            .map(|row| {
                let sources = &sources[row[0] as usize..row[1] as usize];
                let sum: f64 = sources.iter().map(|&source| shares[source as usize]).sum();
                base + DAMPING * sum
            })
            .collect();

        // 3. The rounds end when nothing moves any more.
        let moved: f64 = ranks
            .iter()
            .zip(&gathered)
            .map(|(old, new)| (new - old).abs())
            .sum();
        ranks = gathered;
        if moved < TOLERANCE {
            return (ranks, round);
        }
    }
    unreachable!("a round moves at most {DAMPING} of what the round before moved")
}
