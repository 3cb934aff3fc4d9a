//! What an application is: written once, for arrays in any place.
//!
//! The rule it keeps: an application cannot tell where its arrays are. Timing is left to the
//! crate's root.

use anyhow::Result;
use farpage_bench_kit::data::random_word;

use crate::{place::Place, team::Team};

/// An application.
pub(crate) trait App: Sized {
    /// Its data, in the arrays of a place.
    type On<P: Place>;
    /// What it computes, apart from what it leaves in its arrays.
    type Answer;

    /// An instance of about so many bytes.
    fn generate(bytes: u64, team: &Team) -> Self;

    /// What it keeps local by design and grows with its data.
    fn local_bytes(&self, team: &Team) -> u64;

    /// Puts the data into arrays.
    fn load<P: Place>(&self, place: &P) -> Result<Self::On<P>>;

    /// Before each run: what the run changes is as at first again.
    fn reset<P: Place>(&self, _data: &mut Self::On<P>, _team: &Team) {}

    /// What is timed.
    fn work<P: Place>(&self, data: &mut Self::On<P>, team: &Team) -> Self::Answer;

    /// Says what is wrong with a result, if anything. `local` is the first local run's.
    fn verify<P: Place>(
        &self,
        data: &Self::On<P>,
        answer: &Self::Answer,
        local: &Self::Answer,
    ) -> Verdict;
}

/// What is wrong, if anything.
pub(crate) type Verdict = Result<(), String>;

pub(crate) fn ensure(right: bool, what_is_wrong: impl FnOnce() -> String) -> Verdict {
    if right { Ok(()) } else { Err(what_is_wrong()) }
}

/// The same numbers, bit by bit.
pub(crate) fn verify_bits(found: &[f64], local: &[f64]) -> Verdict {
    ensure(found.len() == local.len(), || {
        format!("{} numbers, the local run has {}", found.len(), local.len())
    })?;
    let differs = |(a, b): (&f64, &f64)| a.to_bits() != b.to_bits();
    match found.iter().zip(local).position(differs) {
        None => Ok(()),
        Some(at) => Err(format!(
            "number {at} is {}, the local run's is {}",
            found[at], local[at]
        )),
    }
}

/// Number `index` of a sequence that looks random.
pub(crate) fn random(sequence: u64, index: u64) -> u64 {
    random_word(sequence << 56, index)
}
