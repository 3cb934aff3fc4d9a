//! Breadth-first search from several vertices, direction-optimising as GAP's (Beamer, Asanovic,
//! Patterson, "Direction-Optimizing Breadth-First Search", SC 2012).
//!
//! The graph's rows are remote. The frontier is a bitmap, so that its vertices are expanded in the
//! order of their rows: a queue would touch a random page for each. Parents and bitmaps are local
//! and count as local memory.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed};

use anyhow::Result;
use farpage::Advice;

use crate::{
    app::{App, Verdict, ensure, random},
    graph::{Graph, GraphOn, row},
    place::Place,
    team::{Team, there_and_back},
};

/// Number of searches in one measurement.
const SOURCES: usize = 4;
/// Thresholds from the paper. A search looks for parents once the frontier has more than 1/15 of
/// the edges left, until it shrinks to 1/18 of the vertices.
const ALPHA: i64 = 15;
const BETA: usize = 18;
/// Words of a bitmap per piece of work: about a megabyte of neighbours.
const PIECE: usize = 1 << 7;
const NOT_REACHED: i32 = -1;

pub(crate) struct Bfs {
    graph: Graph,
    sources: Vec<usize>,
    /// Distances of all vertices from each source; [`u32::MAX`] for those that are not reached.
    distances: Vec<Vec<u32>>,
}

impl App for Bfs {
    type On<P: Place> = GraphOn<P>;
    /// Parents of all vertices, for each source.
    type Answer = Vec<Vec<i32>>;

    fn generate(bytes: u64, team: &Team) -> Self {
        Self::new(Graph::of_size(bytes, team))
    }

    fn local_bytes(&self, _: &Team) -> u64 {
        let vertices = self.graph.vertices() as u64;
        vertices * size_of::<i32>() as u64 + 2 * vertices / 8
    }

    /// Loads without advice, which is better than `Sequential`: windows of neighbours are skipped
    /// as often as they are read.
    fn load<P: Place>(&self, place: &P) -> Result<GraphOn<P>> {
        self.graph.load(place, Advice::Normal)
    }

    fn work<P: Place>(&self, graph: &mut GraphOn<P>, team: &Team) -> Vec<Vec<i32>> {
        let search = |&source| search(&graph.offsets, &graph.neighbours, source, team);
        self.sources.iter().map(search).collect()
    }

    fn verify<P: Place>(
        &self,
        _: &GraphOn<P>,
        trees: &Vec<Vec<i32>>,
        _: &Vec<Vec<i32>>,
    ) -> Verdict {
        for ((tree, distances), &source) in trees.iter().zip(&self.distances).zip(&self.sources) {
            verify(&self.graph, source, tree, distances)?;
        }
        ensure(trees.len() == self.sources.len(), || {
            format!("{} searches of {}", trees.len(), self.sources.len())
        })
    }
}

impl Bfs {
    fn new(graph: Graph) -> Self {
        let vertices = graph.vertices() as u64;
        let drawn = (0..).map(|draw| (random(64, draw) % vertices) as usize);
        let drawn = drawn.filter(|&v| !graph.row(v).is_empty());
        let sources: Vec<usize> = drawn.take(SOURCES).collect();
        let distances = sources.iter().map(|&v| distances(&graph, v)).collect();
        Self {
            graph,
            sources,
            distances,
        }
    }
}

/// Returns the tree of a search; a vertex that is not reached has a negative number.
fn search(offsets: &[u64], neighbours: &[u32], source: usize, team: &Team) -> Vec<i32> {
    let vertices = offsets.len() - 1;
    // Until it is reached, a vertex holds its degree, negative, so that the edges of a new frontier
    // are counted without its rows.
    let mut parents = vec![0; vertices];
    const VERTICES: usize = PIECE * 64;
    let pieces = parents.chunks_mut(VERTICES).enumerate();
    team.each(pieces, |(piece, parents)| {
        let degrees = offsets[piece * VERTICES..].windows(2).map(|w| w[1] - w[0]);
        for (parent, degree) in parents.iter_mut().zip(degrees) {
            *parent = -(degree.max(1) as i32);
        }
    });
    let mut edges_left = neighbours.len() as i64;
    let mut edges_next = -i64::from(parents[source]);
    parents[source] = source as i32;
    let parents: Vec<AtomicI32> = parents.into_iter().map(AtomicI32::new).collect();
    let mut frontier = bitmap(vertices);
    frontier[source / 64] = AtomicU64::new(1 << (source % 64));
    let mut next = bitmap(vertices);
    let mut found = 1;
    let mut level = 0;
    // True while many rows are open: each vertex looks for a parent itself, until few find one.
    let mut upwards = false;
    while found > 0 && team.check().is_ok() {
        let step = Step {
            offsets,
            neighbours,
            parents: &parents,
            frontier: &frontier,
            next: &next,
            level,
            team,
        };
        if upwards || edges_next > edges_left / ALPHA {
            let before = found;
            found = step.look_for_parents();
            upwards = found >= before || found > vertices / BETA;
            edges_next = 1;
        } else {
            edges_left -= edges_next;
            (found, edges_next) = step.look_for_children();
        }
        level += 1;
        (frontier, next) = (next, frontier);
        clear(&next, team);
    }
    parents.into_iter().map(AtomicI32::into_inner).collect()
}

/// One level of a search.
struct Step<'a> {
    offsets: &'a [u64],
    neighbours: &'a [u32],
    parents: &'a [AtomicI32],
    frontier: &'a [AtomicU64],
    next: &'a [AtomicU64],
    level: usize,
    team: &'a Team,
}

impl Step<'_> {
    /// Goes from every vertex of the frontier to its neighbours that are not reached. Returns the
    /// number of vertices found, and of their edges.
    fn look_for_children(&self) -> (usize, i64) {
        let pieces = self.frontier.chunks(PIECE).enumerate();
        let counts = self.team.fold(
            there_and_back(self.level, pieces),
            || (0, 0),
            |(found, edges), (piece, words)| {
                for (word, at) in words.iter().zip(piece * PIECE..) {
                    let mut word = word.load(Relaxed);
                    while word != 0 {
                        let v = at * 64 + word.trailing_zeros() as usize;
                        word &= word - 1;
                        for &u in row(self.offsets, self.neighbours, v) {
                            let parent = &self.parents[u as usize];
                            let seen = parent.load(Relaxed);
                            let mine = seen < 0
                                && parent
                                    .compare_exchange(seen, v as i32, Relaxed, Relaxed)
                                    .is_ok();
                            if mine {
                                self.next[u as usize / 64].fetch_or(1 << (u % 64), Relaxed);
                                *found += 1;
                                *edges -= i64::from(seen);
                            }
                        }
                    }
                }
            },
        );
        counts
            .iter()
            .fold((0, 0), |sum, count| (sum.0 + count.0, sum.1 + count.1))
    }

    /// Finds unreached vertices with a neighbour in the frontier. Returns the number found.
    fn look_for_parents(&self) -> usize {
        let in_frontier =
            |&&u: &&u32| self.frontier[u as usize / 64].load(Relaxed) >> (u % 64) & 1 == 1;
        let pieces = self.next.chunks(PIECE).zip(self.parents.chunks(PIECE * 64));
        let counts = self.team.fold(
            there_and_back(self.level, pieces.enumerate()),
            || 0,
            |found, (piece, (words, parents))| {
                for (v, parent) in (piece * PIECE * 64..).zip(parents) {
                    if parent.load(Relaxed) < 0
                        && let Some(&u) = row(self.offsets, self.neighbours, v)
                            .iter()
                            .find(in_frontier)
                    {
                        parent.store(u as i32, Relaxed);
                        words[v / 64 - piece * PIECE].fetch_or(1 << (v % 64), Relaxed);
                        *found += 1;
                    }
                }
            },
        );
        counts.into_iter().sum()
    }
}

fn bitmap(vertices: usize) -> Vec<AtomicU64> {
    (0..vertices.div_ceil(64))
        .map(|_| AtomicU64::new(0))
        .collect()
}

fn clear(bitmap: &[AtomicU64], team: &Team) {
    team.each(bitmap.chunks(PIECE), |words| {
        for word in words {
            word.store(0, Relaxed);
        }
    });
}

/// Returns the distances from `source`, found by a queue, one vertex after another.
fn distances(graph: &Graph, source: usize) -> Vec<u32> {
    let mut distances = vec![u32::MAX; graph.vertices()];
    distances[source] = 0;
    let mut queue = std::collections::VecDeque::from([source]);
    while let Some(v) = queue.pop_front() {
        for &u in graph.row(v) {
            if distances[u as usize] == u32::MAX {
                distances[u as usize] = distances[v] + 1;
                queue.push_back(u as usize);
            }
        }
    }
    distances
}

/// Verifies `tree` by Graph500's rules: the source is its own parent; exactly the vertices are
/// reached that can be; every parent is a neighbour and one step nearer to the source.
fn verify(graph: &Graph, source: usize, tree: &[i32], distances: &[u32]) -> Verdict {
    ensure(tree.len() == distances.len(), || {
        format!("a tree of {} vertices", tree.len())
    })?;
    ensure(tree[source] == source as i32, || {
        format!("the source {source} has the parent {}", tree[source])
    })?;
    for (v, (&parent, &distance)) in tree.iter().zip(distances).enumerate() {
        let reached = parent > NOT_REACHED;
        ensure(reached == (distance != u32::MAX), || {
            format!("vertex {v} has the parent {parent} and the distance {distance}")
        })?;
        if reached && v != source {
            let neighbour = graph.row(v).binary_search(&(parent as u32)).is_ok();
            let is_nearer = distances[parent as usize] + 1 == distance;
            ensure(neighbour && is_nearer, || {
                format!(
                    "{parent} cannot be the parent of vertex {v}, {distance} steps from {source}"
                )
            })?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{ran, team},
        *,
    };
    use crate::place::Local;

    #[test]
    fn a_wrong_tree_is_rejected() {
        let app = Bfs::new(Graph::kronecker(9, &team()));
        let (on, trees) = ran(&app);
        let verify = |trees: &Vec<Vec<i32>>| app.verify::<Local>(&on, trees, trees);
        let (tree, source, distances) = (&trees[0], app.sources[0], &app.distances[0]);
        let mut vertices = 0..tree.len();
        let is_other = |&v: &usize| v != source && tree[v] >= 0;
        let reached = vertices.clone().find(is_other).unwrap();
        let is_far = |&v: &usize| distances[v] != u32::MAX && distances[v] > distances[reached];
        let far = vertices.find(is_far).unwrap();
        for (v, parent) in [
            (source, -1),
            (reached, -5),
            (reached, reached as i32),
            (reached, far as i32),
        ] {
            let mut wrong = trees.clone();
            wrong[0][v] = parent;
            verify(&wrong).unwrap_err();
        }
        verify(&trees[1..].to_vec()).unwrap_err();
    }
}
