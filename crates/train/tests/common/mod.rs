//! Jobs that are small enough for a test, and what tests ask of their ends.

#![allow(dead_code, reason = "each test program uses its own part")]

use std::{path::Path, sync::Arc, time::Duration};

use farpage_fabric::SessionOptions;
use farpage_train::{
    Between, Job, Mlp, Mode, Network, Outcome, Plan, Rule,
    data::{Dataset, Shards, Source},
    hash, run,
};
use tempfile::TempDir;

/// Deadline of operations. A busy machine that stands still for a second does not count as gone.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// Lease of a worker: a busy machine does not keep it from renewing for so long.
pub(crate) const LEASE: Duration = Duration::from_secs(10);
pub(crate) const SIM: Network = network(Between::Sim);
pub(crate) const MOMENTUM: Rule = Rule::Sgd {
    rate: 0.1,
    momentum: 0.9,
};
pub(crate) const ADAM: Rule = Rule::Adam { rate: 0.01 };

/// Makes a network without links that are slow.
pub(crate) const fn network(between: Between) -> Network {
    Network {
        between,
        link: None,
        deadline: PATIENCE,
    }
}

/// Makes a job of 20 steps with one hidden layer of `hidden` units.
pub(crate) fn job(mode: Mode, workers: usize, group: usize, hidden: usize) -> Job {
    let data = Dataset::load(Source::Blobs, Path::new("")).unwrap();
    Job {
        plan: Plan::new(mode, workers, group).unwrap(),
        model: Mlp::new(&[data.width, hidden, data.classes]),
        rule: MOMENTUM,
        data: Arc::new(data),
        shards: Shards::Even,
        batch: 16,
        steps: 20,
        every: 20,
        seed: 1,
        slow: None,
        aggregators: 0,
    }
}

/// Returns the parameters of all workers at the end.
pub(crate) fn last(outcomes: &[Outcome]) -> Vec<&[f32]> {
    let ends = outcomes.iter().map(|outcome| outcome.snapshots.last());
    ends.map(|end| &*end.unwrap().parameters).collect()
}

/// Runs a job. Returns the hash of the parameters at the end.
pub(crate) fn end(job: &Job, network: &Network) -> u128 {
    hash(last(&run(job, network).unwrap()))
}

/// Returns options with a key of the test's own, which lies in the folder.
pub(crate) fn options() -> (SessionOptions, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let options = SessionOptions {
        key_file: Some(folder.path().join("key")),
        deadline: PATIENCE,
        ..SessionOptions::default()
    };
    (options, folder)
}
