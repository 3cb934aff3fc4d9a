//! Small explicit-state model checker: visits every world that a model can reach, breadth first.
//!
//! The rule: the checker reports the *shortest* way to the harm it found. It knows nothing about
//! pages.
//!
//! Moves are of two kinds. Work that has been begun must go on: such a move is *compulsory*. Work
//! that may begin but need not (an eviction, the prefetch of a page) is not. A world without a
//! compulsory move is *at rest*. A good model does no harm on the way, is at rest in good worlds
//! only, and can come to rest from everywhere by compulsory moves alone.

use std::{
    collections::{HashMap, hash_map::Entry},
    fmt,
    hash::{BuildHasherDefault, Hash, Hasher},
};

/// Model that the checker explores.
pub(crate) trait Model {
    type World: Copy + Eq + Hash + fmt::Display;
    /// Kinds of harm that the model can do.
    type Harm: fmt::Debug;

    fn start(&self) -> Self::World;
    /// Appends every move that is possible now.
    fn moves(&self, world: &Self::World, out: &mut Vec<Move<Self::World, Self::Harm>>);
    /// Returns the harm in `world`, if any; `at_rest`: no compulsory move is left.
    fn judge(&self, world: &Self::World, at_rest: bool) -> Result<(), Self::Harm>;
    /// Returns the harm of a world from which there is no way to rest.
    fn never_rests(&self) -> Self::Harm;
}

/// One atomic step of one actor.
pub(crate) struct Move<W, H> {
    pub(crate) compulsory: bool,
    pub(crate) label: Label,
    pub(crate) to: Result<W, H>,
}

/// Words for a move.
#[derive(Clone, Copy)]
pub(crate) struct Label {
    pub(crate) actor: &'static str,
    pub(crate) does: &'static str,
    pub(crate) page: usize,
}

/// Figures of a harmless exploration.
pub(crate) struct Summary {
    pub(crate) worlds: usize,
    pub(crate) moves: usize,
    /// Number of worlds that are at rest.
    pub(crate) rests: usize,
    /// True if compulsory moves alone always come to an end, however they are scheduled.
    pub(crate) always_comes_to_rest: bool,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} worlds, {} moves, {} worlds at rest",
            self.worlds, self.moves, self.rests
        )
    }
}

/// A harm and the shortest way to it.
pub(crate) struct Counterexample<H> {
    pub(crate) harm: H,
    steps: Vec<String>,
}

impl<H: fmt::Debug> fmt::Display for Counterexample<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:?} after {} steps:",
            self.harm,
            self.steps.len().saturating_sub(1)
        )?;
        self.steps
            .iter()
            .try_for_each(|step| writeln!(f, "  {step}"))
    }
}

/// Visits every reachable world.
pub(crate) fn explore<M: Model>(model: &M) -> Result<Summary, Counterexample<M::Harm>> {
    let mut worlds = vec![model.start()];
    let mut parents = vec![0u32];
    let mut numbers: HashMap<M::World, u32, BuildHasherDefault<Mixer>> = HashMap::default();
    numbers.insert(worlds[0], 0);
    let mut compulsory: Vec<(u32, u32)> = Vec::new();
    let (mut moves, mut rests) = (0, Vec::new());
    let mut possible = Vec::new();

    // 1. Forward, in the order of discovery; only moves that lead somewhere else count.
    let mut at = 0;
    while at < worlds.len() {
        let world = worlds[at];
        let number = at as u32;
        model.moves(&world, &mut possible);
        let at_rest = !possible.iter().any(|m| m.compulsory);
        if let Err(harm) = model.judge(&world, at_rest) {
            return Err(Counterexample {
                harm,
                steps: way_to(model, &worlds, &parents, number),
            });
        }
        if at_rest {
            rests.push(number);
        }
        moves += possible.len();
        for step in possible.drain(..) {
            let next = match step.to {
                Ok(next) => next,
                Err(harm) => {
                    let mut steps = way_to(model, &worlds, &parents, number);
                    steps.push(step.label.to_string());
                    return Err(Counterexample { harm, steps });
                }
            };
            let to = match numbers.entry(next) {
                Entry::Occupied(known) => *known.get(),
                Entry::Vacant(new) => {
                    let to =
                        u32::try_from(worlds.len()).expect("a model has fewer than 2^32 worlds");
                    worlds.push(next);
                    parents.push(number);
                    *new.insert(to)
                }
            };
            if step.compulsory {
                compulsory.push((number, to));
            }
        }
        at += 1;
    }

    // 2. Backward from the worlds at rest.
    let ends = backward(&compulsory, worlds.len(), &rests);
    if let Some(trapped) = ends.reaches.iter().position(|&reaches| !reaches) {
        return Err(Counterexample {
            harm: model.never_rests(),
            steps: way_to(model, &worlds, &parents, trapped as u32),
        });
    }
    Ok(Summary {
        worlds: worlds.len(),
        moves,
        rests: rests.len(),
        always_comes_to_rest: ends.always,
    })
}

struct Ends {
    /// True, per world, if some schedule of compulsory moves leads to rest.
    reaches: Vec<bool>,
    /// True if every schedule leads to rest, from every world.
    always: bool,
}

fn backward(edges: &[(u32, u32)], worlds: usize, rests: &[u32]) -> Ends {
    // Worlds that lead to world `w`: sources[first[w]..first[w + 1]].
    let mut first = vec![0u32; worlds + 1];
    let mut ways_out = vec![0u32; worlds];
    for &(from, to) in edges {
        first[to as usize + 1] += 1;
        ways_out[from as usize] += 1;
    }
    for w in 0..worlds {
        first[w + 1] += first[w];
    }
    let mut free = first.clone();
    let mut sources = vec![0u32; edges.len()];
    for &(from, to) in edges {
        sources[free[to as usize] as usize] = from;
        free[to as usize] += 1;
    }
    let sources_of = |w: u32| &sources[first[w as usize] as usize..first[w as usize + 1] as usize];

    let mut reaches = vec![false; worlds];
    let mut todo = rests.to_vec();
    rests.iter().for_each(|&w| reaches[w as usize] = true);
    while let Some(w) = todo.pop() {
        for &from in sources_of(w) {
            if !std::mem::replace(&mut reaches[from as usize], true) {
                todo.push(from);
            }
        }
    }
    // Peel off the worlds whose every way out leads to peeled ones: the remaining worlds lead into
    // a cycle.
    let mut peeled = rests.len();
    todo.extend_from_slice(rests);
    while let Some(w) = todo.pop() {
        for &from in sources_of(w) {
            ways_out[from as usize] -= 1;
            if ways_out[from as usize] == 0 {
                peeled += 1;
                todo.push(from);
            }
        }
    }
    Ends {
        reaches,
        always: peeled == worlds,
    }
}

fn way_to<M: Model>(model: &M, worlds: &[M::World], parents: &[u32], end: u32) -> Vec<String> {
    let mut path = vec![end];
    while *path.last().expect("never empty") != 0 {
        path.push(parents[*path.last().expect("never empty") as usize]);
    }
    path.reverse();
    let mut steps = vec![format!("{:<52} {}", "start", worlds[0])];
    let mut possible = Vec::new();
    for pair in path.windows(2) {
        let (from, to) = (&worlds[pair[0] as usize], &worlds[pair[1] as usize]);
        model.moves(from, &mut possible);
        let taken = possible
            .drain(..)
            .find(|m| m.to.as_ref().is_ok_and(|next| next == to));
        let label = taken.expect("the parent leads to its child").label;
        steps.push(format!("{:<52} {to}", label.to_string()));
    }
    steps
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "page {}: {} {}", self.page, self.actor, self.does)
    }
}

/// Multiplicative hash of rustc: the worlds are many small integers, for which SipHash takes most
/// of the time.
#[derive(Default)]
struct Mixer(u64);

impl Hasher for Mixer {
    fn finish(&self) -> u64 {
        // The table takes its bucket from the low bits, where a product is weakest.
        self.0 ^ self.0 >> 32
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte.into()));
    }

    fn write_u8(&mut self, value: u8) {
        self.write_u64(value.into());
    }

    fn write_usize(&mut self, value: usize) {
        self.write_u64(value as u64);
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0.rotate_left(5) ^ value).wrapping_mul(0x517c_c1b7_2722_0a95);
    }
}
