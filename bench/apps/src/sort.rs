//! Sorting 64-bit keys in place, by rayon's parallel quicksort.
//!
//! A quicksort suits paging without knowing of it: each partition walks through its keys from both
//! ends, and as soon as a part fits into local memory it is sorted there to the end.

use anyhow::Result;
use farpage::Advice;

use crate::{
    app::{App, Verdict, ensure, random},
    place::Place,
    team::Team,
};
use farpage_bench_kit::pick::mix;

const SEED: u64 = 3;

pub(crate) struct Sort(Vec<u64>);

impl App for Sort {
    type On<P: Place> = P::Array<u64>;
    type Answer = ();

    fn generate(bytes: u64, _: &Team) -> Self {
        let keys = bytes / size_of::<u64>() as u64;
        Self((0..keys).map(|index| random(SEED, index)).collect())
    }

    fn local_bytes(&self, _: &Team) -> u64 {
        0
    }

    fn load<P: Place>(&self, place: &P) -> Result<P::Array<u64>> {
        place.array(self.0.len(), Advice::Normal)
    }

    fn reset<P: Place>(&self, keys: &mut P::Array<u64>, team: &Team) {
        team.copy(&self.0, keys);
    }

    fn work<P: Place>(&self, keys: &mut P::Array<u64>, team: &Team) {
        team.sort(keys);
    }

    fn verify<P: Place>(&self, keys: &P::Array<u64>, (): &(), (): &()) -> Verdict {
        verify(&self.0, keys)
    }
}

/// Verifies order, and that the keys are the same: their hashes have the same sum.
fn verify(given: &[u64], sorted: &[u64]) -> Verdict {
    let out_of_order = sorted.windows(2).position(|pair| pair[0] > pair[1]);
    ensure(out_of_order.is_none(), || {
        format!("keys {out_of_order:?} and the next are out of order")
    })?;
    let hash = |keys: &[u64]| {
        keys.iter()
            .fold(keys.len() as u64, |sum, &key| sum.wrapping_add(mix(key)))
    };
    ensure(hash(given) == hash(sorted), || {
        "keys were lost or changed".into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_changed_and_misplaced_keys_are_rejected() {
        let given = [5, 1, 4, 1];
        verify(&given, &[1, 1, 4, 5]).unwrap();
        for wrong in [&[1, 4, 1, 5][..], &[1, 4, 5], &[1, 4, 4, 5], &[0, 1, 4, 5]] {
            verify(&given, wrong).unwrap_err();
        }
    }
}
