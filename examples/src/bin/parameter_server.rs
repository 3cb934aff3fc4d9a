//! A parameter server: workers push gradients and pull parameters, each with examples of its own.
//! `parameter_server [workers, such as 3]`
//!
//! Workers are threads here. A worker in another process needs its rank and the aggregators'
//! endpoints (`Address::Fabric`); nothing else differs.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow, ensure};
use farpage_examples::argument;
use farpage_fabric::SessionOptions;
use farpage_train::{Address, Aggregator, Layout, Plan, Rule, Through};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Number of inputs, whose weighted sum is the model. Two aggregators keep half of the weights
/// each.
const WEIGHTS: usize = 64;
const AGGREGATORS: usize = 2;
const STEPS: u64 = 300;
/// Number of examples that a worker looks at in each step.
const BATCH: usize = 16;
/// Longest wait for a peer. A longer one ends in an error that names the peer, which has failed.
const DEADLINE: Duration = Duration::from_secs(20);

fn main() -> Result<()> {
    let workers: usize = argument("number of workers", 3)?;
    ensure!(workers > 0, "without workers nobody learns");
    let layout = Layout {
        aggregators: AGGREGATORS,
        plan: Plan::of_all(workers),
        parameters: WEIGHTS,
    };
    let rule = Rule::Sgd {
        rate: 0.05,
        momentum: 0.5,
    };

    // Each aggregator keeps a part of the parameters. `Aggregator::keep_in(&runtime)` would keep it
    // in an array of farpage, which may be larger than memory.
    let endpoint = "tcp://127.0.0.1:0".parse()?;
    let aggregators = (0..AGGREGATORS)
        .map(|number| Aggregator::open(layout, number, &endpoint, DEADLINE))
        .collect::<Result<Vec<_>, _>>()?;
    let addresses: Vec<Address> = aggregators.iter().map(Aggregator::address).collect();
    let addresses = &addresses[..];

    let started = Instant::now();
    let learnt = thread::scope(|scope| -> Result<Vec<Vec<f32>>> {
        let serving: Vec<_> = (aggregators.into_iter())
            .map(|each| scope.spawn(move || each.serve(&[0.0; WEIGHTS], rule, STEPS, DEADLINE)))
            .collect();
        let working: Vec<_> = (0..workers)
            .map(|rank| scope.spawn(move || work(layout, rank, addresses)))
            .collect();
        let learnt = working.into_iter().map(|thread| joined(thread.join())?);
        let learnt = learnt.collect();
        for thread in serving {
            joined(thread.join())??;
        }
        learnt
    })?;
    println!(
        "{workers} workers did {STEPS} steps in {:.2?}",
        started.elapsed()
    );

    let is_same = learnt.iter().all(|weights| *weights == learnt[0]);
    ensure!(is_same, "workers came to different weights");
    let errors = learnt[0].iter().zip(truth()).map(|(a, b)| (a - b).abs());
    let worst = errors.fold(0.0, f32::max);
    ensure!(worst < 0.001, "a weight is {worst} from what it should be");
    println!("all have the same weights, at most {worst:.1e} from the truth: correct");
    Ok(())
}

/// Runs a worker, which pulls, computes, and pushes.
fn work(layout: Layout, rank: usize, addresses: &[Address]) -> Result<Vec<f32>> {
    let options = SessionOptions::default();
    let mut through = Through::join(layout, rank, addresses, &options, DEADLINE)?;
    let (truth, mut random) = (truth(), ChaCha8Rng::seed_from_u64(1 + rank as u64));
    for step in 0..STEPS {
        // Both lie in registered memory: over RDMA they are moved without a copy. Parameters are
        // zeros at first, as the aggregators' are.
        let (weights, gradient) = through.buffers()?;
        gradient.fill(0.0);
        for _ in 0..BATCH {
            let inputs: [f32; WEIGHTS] = std::array::from_fn(|_| random.random_range(-1.0..1.0));
            let sum =
                |weights: &[f32]| -> f32 { inputs.iter().zip(weights).map(|(a, b)| a * b).sum() };
            let error = sum(weights) - sum(&truth);
            for (slope, input) in gradient.iter_mut().zip(inputs) {
                *slope += error * input / BATCH as f32;
            }
        }
        // Pushes the gradient. Pulls the parameters, changed by the mean of all workers' gradients.
        through.step_in_place(step)?;
    }
    Ok(through.buffers()?.0.to_vec())
}

/// Returns the weights that gave the examples their results.
fn truth() -> [f32; WEIGHTS] {
    std::array::from_fn(|at| (at as f32).sin())
}

fn joined<T>(ended: thread::Result<T>) -> Result<T> {
    ended.map_err(|_| anyhow!("a thread panicked"))
}
