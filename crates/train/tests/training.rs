//! Training runs: the same bits over every fabric, the same result as synchronous training where
//! it must be, and what shuffling is good for.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests, which fail by panicking"
)]

mod common;

use std::{path::Path, sync::Arc};

use common::{ADAM, MOMENTUM, SIM, end, last, network};
use farpage_testkit::test_name;
use farpage_train::{
    Between, Checkpoint, Content, Course, Courses, Job, Keeping, Mlp, Mode, Network, Rule, Scratch,
    consensus,
    data::{Dataset, Shards, Source},
    distance, hash, run, run_on,
};

const SGD: Rule = Rule::Sgd {
    rate: 0.1,
    momentum: 0.0,
};
fn job(mode: Mode, workers: usize, group: usize) -> Job {
    Job {
        rule: SGD,
        ..common::job(mode, workers, group, 24)
    }
}

/// Returns the share of the test examples that these parameters get right.
fn accuracy(job: &Job, parameters: &[f32]) -> f64 {
    let right = job
        .model
        .right(parameters, &job.data.test, &mut Scratch::default());
    right as f64 / job.data.test.labels.len() as f64
}

#[test]
fn a_seed_ends_in_the_same_bits_over_every_fabric() {
    for (mode, rule) in [(Mode::Ds, ADAM), (Mode::Bsp, MOMENTUM)] {
        let job = Job {
            rule,
            ..job(mode, 4, 2)
        };
        let hashes = [Between::Sim, Between::Shm, Between::Tcp];
        let hashes = hashes.map(|between| end(&job, &network(between)));
        assert_eq!(hashes, [hashes[0]; 3], "{mode}");
        // Slow links and slow workers change times and nothing else.
        let slow = Job {
            slow: Some((1, 3.0)),
            ..job.clone()
        };
        let network = Network {
            link: Some((1.0, 50.0)),
            ..SIM
        };
        assert_eq!(end(&slow, &network), hashes[0], "{mode}");
        let other = Job { seed: 2, ..job };
        assert_ne!(end(&other, &SIM), hashes[0], "{mode}");
    }
}

#[test]
fn the_bits_are_these_on_every_processor() {
    for (mode, rule, expected) in [
        (Mode::Ds, SGD, "9a383eb8c76ba03ecd50f9f06ad8beb3"),
        (Mode::Bsp, MOMENTUM, "a114c86dbb31f8914f4ae1c2f6063112"),
    ] {
        let job = Job {
            rule,
            ..job(mode, 4, 2)
        };
        for between in [Between::Sim, Between::Shm, Between::Tcp] {
            let hash = format!("{:032x}", end(&job, &network(between)));
            assert_eq!(hash, expected, "{mode} {rule:?} {between:?}");
        }
    }
}

fn on<'a>(workers: impl Iterator<Item = Course<'a>>) -> Courses<'a> {
    Courses {
        workers: workers.collect(),
        ..Courses::default()
    }
}

/// Keeps the one checkpoint that a job of 20 steps has.
fn keeping(kept: &mut Vec<u8>) -> Course<'_> {
    Course {
        from: None,
        keeping: Some(Keeping {
            every: 13,
            keep: Box::new(|_, content: &mut dyn Content| Ok(content.write_to(kept)?)),
        }),
    }
}

#[test]
fn a_job_goes_on_from_checkpoints_with_the_same_bits() {
    for between in [Between::Sim, Between::Shm, Between::Tcp] {
        let network = network(between);
        let job = Job {
            rule: MOMENTUM,
            ..job(Mode::Ds, 4, 2)
        };
        let mut kept = vec![Vec::new(); 4];
        let whole = run_on(&job, &network, on(kept.iter_mut().map(keeping))).unwrap();
        let resume = |(rank, bytes): (usize, &Vec<u8>)| {
            let from = Checkpoint::from_bytes(bytes, &job, rank).unwrap();
            assert_eq!(from.step(), 13);
            Course {
                from: Some(from),
                keeping: None,
            }
        };
        let courses = kept.iter().enumerate().map(resume);
        let resumed = run_on(&job, &network, on(courses)).unwrap();
        assert_eq!(hash(last(&resumed)), hash(last(&whole)), "{between:?}");
    }
}

#[test]
fn one_group_of_all_is_synchronous_training() {
    let bsp = run(&job(Mode::Bsp, 4, 4), &SIM).unwrap();
    let ds = run(&job(Mode::Ds, 4, 4), &SIM).unwrap();
    for (a, b) in last(&bsp).into_iter().zip(last(&ds)) {
        let apart = a
            .iter()
            .zip(b)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        assert!(apart < 1e-5, "{apart}");
        assert!(
            apart > 0.0,
            "means of gradients and of parameters are rounded differently"
        );
    }
    // All workers have the same.
    assert!(last(&bsp).windows(2).all(|pair| pair[0] == pair[1]));
    assert!(last(&ds).windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn workers_without_training_meet_in_their_consensus() {
    let outcomes = run(&job(Mode::Ds, 16, 4), &SIM).unwrap();
    let mean = consensus(last(&outcomes));
    let apart = distance(last(&outcomes), &mean);
    // The last round was that of the groups that differ in the second digit.
    let ends = last(&outcomes);
    assert_eq!(ends[0], ends[4]);
    assert_ne!(ends[0], ends[1]);
    let settled = || outcomes.iter().map(|outcome| &*outcome.settled);
    assert!(apart > 1e-4, "{apart}");
    assert!(distance(settled(), &mean) < 1e-6);
    assert_eq!(distance(settled(), &consensus(settled())), 0.0);
}

#[test]
fn with_classes_apart_only_shuffling_comes_near_to_synchronous_training() {
    let accuracies = [Mode::Bsp, Mode::Ds, Mode::Fixed, Mode::Nothing].map(|mode| {
        let job = Job {
            steps: 60,
            shards: Shards::Skewed,
            ..job(mode, 16, 4)
        };
        let outcomes = run(&job, &SIM).unwrap();
        let worst = outcomes
            .iter()
            .map(|outcome| accuracy(&job, &outcome.settled));
        worst.fold(1.0, f64::min)
    });
    let [bsp, ds, fixed, nothing] = accuracies;
    println!("{accuracies:?}");
    assert!(bsp > 0.8 && ds > bsp - 0.05, "{accuracies:?}");
    assert!(fixed < ds - 0.2 && nothing < fixed, "{accuracies:?}");
}

/// Reads the file of `source`. If there is none, says that the running test is skipped.
fn fetched(source: Source) -> Option<Dataset> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/training-data");
    let file = source.file().map(|file| folder.join(file));
    if !file.is_some_and(|file| file.is_file()) {
        let test = test_name();
        eprintln!("SKIPPED: {test}: no data; `cargo xtask data` fetches it");
        return None;
    }
    Some(Dataset::load(source, &folder).unwrap())
}

#[test]
fn sixteen_workers_learn_to_read_digits() {
    let Some(data) = fetched(Source::Digits) else {
        return;
    };
    for mode in [Mode::Bsp, Mode::Ds] {
        let job = Job {
            model: Mlp::new(&[data.width, 32, data.classes]),
            data: Arc::new(data.clone()),
            steps: 60,
            rule: Rule::Sgd {
                rate: 0.2,
                momentum: 0.9,
            },
            ..job(mode, 16, 4)
        };
        let outcomes = run(&job, &SIM).unwrap();
        let mean = consensus(last(&outcomes));
        let accuracy = accuracy(&job, &mean);
        println!("{mode}: {accuracy}");
        assert!(accuracy > 0.93, "{mode}: {accuracy}");
        let losses = outcomes[0].snapshots.last().unwrap().loss;
        assert!(losses < 1.0, "{losses}");
    }
}

#[test]
fn all_pictures_of_mnist_are_read() {
    let Some(data) = fetched(Source::Mnist) else {
        return;
    };
    assert_eq!(
        (data.train.labels.len(), data.test.labels.len()),
        (4000, 1000)
    );
    // 500 of each class, wherever the split has put them.
    let mut counts = [0; 10];
    for label in data.train.labels.iter().chain(&data.test.labels) {
        counts[usize::from(*label)] += 1;
    }
    assert_eq!(counts, [500; 10]);
}

#[test]
fn an_exchange_takes_the_time_that_a_slow_link_needs() {
    let job = Job {
        model: Mlp::new(&[16, 256, 256, 10]),
        steps: 3,
        ..job(Mode::Bsp, 4, 2)
    };
    let bytes = (4 * job.model.parameters()) as f64 * 2.0 * 3.0 / 4.0;
    let (by_rate, by_latency) = (bytes / (0.1e9 / 8.0), 6.0 * 2e-3);
    for between in [Between::Shm, Between::Tcp] {
        for (link, expected) in [((0.1, 0.0), by_rate), ((1e6, 2000.0), by_latency)] {
            let network = Network {
                between,
                link: Some(link),
                ..SIM
            };
            for outcome in run(&job, &network).unwrap() {
                let over = outcome.exchange_s / expected / 3.0;
                assert!(over > 0.99, "{between:?} {link:?}: {over}");
            }
        }
    }
}
