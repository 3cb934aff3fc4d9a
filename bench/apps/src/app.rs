//! An application: written once, for arrays in any place.
//!
//! The rule it keeps: an application cannot tell where its arrays are. Timing is left to the
//! crate's root.

use anyhow::Result;
use farpage_bench_kit::data::random_word;

use crate::{place::Place, team::Team};

/// An application.
pub(crate) trait App: Sized {
    /// Data of the application, in the arrays of a place.
    type On<P: Place>;
    /// Result of the application, apart from what it leaves in its arrays.
    type Answer;

    /// Generates an instance of about `bytes` bytes.
    fn generate(bytes: u64, team: &Team) -> Self;

    /// Returns the bytes that the application keeps local by design and that grow with its data.
    fn local_bytes(&self, team: &Team) -> u64;

    /// Puts the data into arrays.
    fn load<P: Place>(&self, place: &P) -> Result<Self::On<P>>;

    /// Undoes the changes of the last run, before each run.
    fn reset<P: Place>(&self, _data: &mut Self::On<P>, _team: &Team) {}

    /// Runs the work that is timed.
    fn work<P: Place>(&self, data: &mut Self::On<P>, team: &Team) -> Self::Answer;

    /// Says what is wrong with a result, if anything. `local` is the answer of the first local run.
    fn verify<P: Place>(
        &self,
        data: &Self::On<P>,
        answer: &Self::Answer,
        local: &Self::Answer,
    ) -> Verdict;
}

/// Outcome of a verification: an error says what is wrong.
pub(crate) type Verdict = Result<(), String>;

pub(crate) fn ensure(right: bool, what_is_wrong: impl FnOnce() -> String) -> Verdict {
    if right { Ok(()) } else { Err(what_is_wrong()) }
}

/// Verifies that the numbers are the same, bit by bit.
pub(crate) fn verify_bits(found: &[f64], local: &[f64]) -> Verdict {
    ensure(found.len() == local.len(), || {
        format!("{} numbers, the local run has {}", found.len(), local.len())
    })?;
    let differs = |(a, b): (&f64, &f64)| a.to_bits() != b.to_bits();
    match found.iter().zip(local).position(differs) {
        None => Ok(()),
        Some(at) => {
            let (found, local) = (found[at], local[at]);
            Err(format!(
                "number {at} is {found}, the local run's is {local}"
            ))
        }
    }
}

/// Returns number `index` of a sequence that looks random.
pub(crate) fn random(sequence: u64, index: u64) -> u64 {
    random_word(sequence << 56, index)
}
