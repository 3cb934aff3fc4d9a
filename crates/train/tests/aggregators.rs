//! Training through aggregators: the same bits over every fabric and through any number of them,
//! the bytes that theory says, and errors that name who is missing.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests, which fail by panicking"
)]

mod common;

use std::{
    thread,
    time::{Duration, Instant},
};

use common::{ADAM, LEASE, MOMENTUM, PATIENCE, SIM, end, last, network, options};
use farpage_testkit::tcp;
use farpage_train::{
    AggregateError, Aggregator, AggregatorCourse, Between, Job, Layout, Mode, Network, Party, Plan,
    Rule, Through, distance, hash, run,
};

fn job(rule: Rule, workers: usize, hidden: usize) -> Job {
    Job {
        rule,
        ..common::job(Mode::Bsp, workers, 2, hidden)
    }
}

/// Returns the job with exchanges through `aggregators`.
fn with(aggregators: usize, job: &Job) -> Job {
    Job {
        aggregators,
        ..job.clone()
    }
}

fn layout(workers: usize, parameters: usize) -> Layout {
    Layout {
        plan: Plan::of_all(workers),
        aggregators: 1,
        parameters,
    }
}

/// Announcements may need room, over a network, before the aggregator's news comes that it took the
/// ones before.
#[test]
fn a_job_has_more_steps_than_the_ring_of_announcements_has_room_for() {
    let job = Job {
        steps: 200,
        every: 200,
        ..job(MOMENTUM, 2, 4)
    };
    let whole = end(&with(1, &job), &SIM);
    for between in [Between::Shm, Between::Tcp] {
        assert_eq!(end(&with(2, &job), &network(between)), whole, "{between:?}");
    }
}

#[test]
fn a_seed_ends_in_the_same_bits_over_every_fabric_and_through_any_number_of_aggregators() {
    for rule in [MOMENTUM, ADAM] {
        let job = job(rule, 4, 24);
        let whole = end(&with(1, &job), &SIM);
        for (between, aggregators) in [
            (Between::Sim, 3),
            (Between::Shm, 1),
            (Between::Shm, 3),
            (Between::Tcp, 2),
        ]
        .into_iter()
        .take(if rule == MOMENTUM { 4 } else { 3 })
        {
            let ended = end(&with(aggregators, &job), &network(between));
            assert_eq!(ended, whole, "{between:?} {aggregators}");
        }
        let slow = Job {
            slow: Some((1, 3.0)),
            ..job.clone()
        };
        let network = Network {
            between: Between::Shm,
            link: Some((1.0, 50.0)),
            ..SIM
        };
        assert_eq!(end(&with(2, &slow), &network), whole);
        let other = Job { seed: 2, ..job };
        assert_ne!(end(&with(1, &other), &SIM), whole);
    }
}

#[test]
fn aggregators_and_rings_agree() {
    // Two summands have one sum, in whichever order.
    let two = job(MOMENTUM, 2, 24);
    let ring = run(&two, &SIM).unwrap();
    let through = run(&with(2, &two), &SIM).unwrap();
    assert_eq!(hash(last(&through)), hash(last(&ring)));
    // Four are rounded in another order.
    let four = job(MOMENTUM, 4, 24);
    let ring = run(&four, &SIM).unwrap();
    let through = run(&with(2, &four), &SIM).unwrap();
    let apart = distance(last(&through), last(&ring)[0]);
    assert!(apart > 0.0 && apart < 1e-5, "{apart}");
}

#[test]
fn aggregators_move_the_bytes_that_theory_says_and_share_them() {
    let job = job(MOMENTUM, 4, 4000);
    let network = network(Between::Shm);
    for aggregators in [1, 3] {
        let outcomes = run(&with(aggregators, &job), &network).unwrap();
        let theory = 2.0 * 4.0 * job.model.parameters() as f64 * job.steps as f64;
        let near = |bytes: u64, theory: f64| {
            let over = bytes as f64 / theory;
            assert!((1.0..1.01).contains(&over), "{aggregators}: {over}");
        };
        let workers = outcomes.len() as f64;
        near(
            outcomes.iter().map(|outcome| outcome.moved_bytes).sum(),
            workers * theory,
        );
        for number in 0..aggregators {
            let moved = outcomes
                .iter()
                .map(|outcome| outcome.moved_by_aggregator[number]);
            near(moved.sum(), workers * theory / aggregators as f64);
        }
    }
}

#[test]
fn groups_of_two_through_aggregators_end_in_the_bits_of_rings() {
    // Two summands have one sum, in whichever order.
    for mode in [Mode::Ds, Mode::Fixed] {
        let job = common::job(mode, 4, 2, 24);
        let rings = run(&job, &SIM).unwrap();
        for (between, aggregators) in [
            (Between::Sim, 4),
            (Between::Shm, 2),
            (Between::Tcp, 2),
            (Between::Tcp, 6),
        ] {
            let network = network(between);
            let through = run(&with(aggregators, &job), &network).unwrap();
            let ends = (hash(last(&through)), hash(last(&rings)));
            assert_eq!(ends.0, ends.1, "{mode} {between:?} {aggregators}");
            for (a, b) in through.iter().zip(&rings) {
                assert_eq!(a.settled, b.settled, "{mode} {between:?} {aggregators}");
            }
        }
    }
    // Workers that meet nobody have nothing to aggregate.
    let alone = common::job(Mode::Nothing, 4, 2, 24);
    let rings = end(&alone, &SIM);
    assert_eq!(end(&with(3, &alone), &SIM), rings);
}

#[test]
fn groups_of_four_through_aggregators_are_rounded_in_another_order() {
    let job = common::job(Mode::Ds, 16, 4, 24);
    let rings = run(&job, &SIM).unwrap();
    let through = run(&with(4, &job), &SIM).unwrap();
    for (a, b) in last(&through).into_iter().zip(last(&rings)) {
        let apart = distance([a], b);
        assert!(apart > 0.0 && apart < 1e-5, "{apart}");
    }
    let settled = through
        .windows(2)
        .all(|pair| pair[0].settled == pair[1].settled);
    assert!(settled, "all meet in one consensus");
}

#[test]
fn one_aggregator_of_a_group_carries_what_the_group_moves() {
    let (workers, group) = (8, 2);
    let network = network(Between::Shm);
    for (mode, aggregators) in [(Mode::Ds, 4), (Mode::Ds, 8), (Mode::Fixed, 4)] {
        let job = Job {
            steps: 6,
            ..common::job(mode, workers, group, 4000)
        };
        let outcomes = run(&with(aggregators, &job), &network).unwrap();
        let parameter_bytes = 4.0 * job.model.parameters() as f64;
        let steps = job.steps as f64;
        let near = |bytes: u64, theory: f64| {
            let over = bytes as f64 / theory;
            assert!((1.0..1.01).contains(&over), "{mode} {aggregators}: {over}");
        };
        // All together move as much as through one aggregator of all.
        near(
            outcomes.iter().map(|outcome| outcome.moved_bytes).sum(),
            2.0 * workers as f64 * parameter_bytes * steps,
        );
        let shares = (aggregators * group / workers) as f64;
        for number in 0..aggregators {
            let moved = outcomes
                .iter()
                .map(|outcome| outcome.moved_by_aggregator[number]);
            let theory = 2.0 * group as f64 * parameter_bytes / shares * steps;
            near(moved.sum(), theory);
        }
        for outcome in &outcomes {
            assert_eq!(outcome.serial_steps, 2 * job.steps);
        }
    }
}

#[test]
fn aggregators_that_groups_cannot_share_are_refused() {
    let error = run(&with(6, &common::job(Mode::Ds, 8, 2, 4)), &SIM).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("choose a multiple of 4"), "{text}");
    assert!(Layout::of(&common::job(Mode::Fixed, 4, 2, 4)).is_err());
}

#[test]
fn an_aggregators_link_carries_the_bytes_of_all_its_workers() {
    let job = Job {
        steps: 4,
        ..job(MOMENTUM, 4, 1000)
    };
    let whole = end(&with(1, &job), &SIM);
    let gbps = 0.2;
    let each = 4.0 * job.model.parameters() as f64 * 8.0 / 1e9 / gbps;
    for (between, aggregators) in [(Between::Shm, 1), (Between::Tcp, 2)] {
        let network = Network {
            between,
            link: Some((gbps, 0.0)),
            ..SIM
        };
        let ended = run(&with(aggregators, &job), &network).unwrap();
        assert_eq!(hash(last(&ended)), whole);
        // One direction after the other, of a link that all workers share.
        let least = 2.0 * 4.0 * each / aggregators as f64 * job.steps as f64;
        for outcome in &ended {
            let took = outcome.exchange_s;
            assert!(took >= 0.95 * least, "{aggregators}: {took} s of {least}");
        }
    }
}

/// Starts the aggregators of a job over tcp, and a thread for each worker, which runs `work`.
/// Returns the results of the aggregators and of the workers.
fn team<T: Send>(
    job: &Job,
    deadline: Duration,
    work: impl Fn(usize, Through) -> T + Sync,
) -> (Vec<Result<(), AggregateError>>, Vec<T>) {
    let layout = Layout::of(job).unwrap();
    let open = |number| Aggregator::open(layout, number, &tcp(), deadline).unwrap();
    let aggregators: Vec<_> = (0..job.aggregators).map(open).collect();
    let addresses: Vec<_> = aggregators.iter().map(Aggregator::address).collect();
    let (options, _folder) = options();
    thread::scope(|scope| {
        let serve = |aggregator: Aggregator| {
            scope.spawn(move || aggregator.serve_job(job, AggregatorCourse::default(), deadline))
        };
        let serving: Vec<_> = aggregators.into_iter().map(serve).collect();
        let (work, addresses, options) = (&work, &addresses, &options);
        let working: Vec<_> = (0..job.plan.workers())
            .map(|rank| {
                scope.spawn(move || {
                    let through = Through::join(layout, rank, addresses, options, deadline);
                    work(rank, through.unwrap())
                })
            })
            .collect();
        let worked = working.into_iter().map(|thread| thread.join().unwrap());
        let worked = worked.collect();
        let served = serving.into_iter().map(|thread| thread.join().unwrap());
        (served.collect(), worked)
    })
}

#[test]
fn the_exact_mean_is_there_after_as_many_rounds_as_there_are_digits() {
    let job = Job {
        steps: 0,
        aggregators: 8,
        ..common::job(Mode::Ds, 8, 2, 24)
    };
    // Powers of two: all sums and shares are exact.
    let mean = (0..8).map(|rank| f32::exp2(rank as f32)).sum::<f32>() / 8.0;
    let (served, worked) = team(&job, PATIENCE, |rank, mut through| {
        through.buffers().unwrap().0.fill(f32::exp2(rank as f32));
        let seen = (0..3).map(|round| {
            through.mean_in_place(round).unwrap();
            let parameters = through.buffers().unwrap().0;
            assert!(parameters.iter().all(|value| *value == parameters[0]));
            parameters[0]
        });
        seen.collect::<Vec<_>>()
    });
    assert!(served.iter().all(Result::is_ok), "{served:?}");
    for seen in worked {
        assert_eq!(seen[2], mean);
        assert_ne!(seen[1], mean, "two rounds of three are not enough");
    }
}

#[test]
fn a_worker_that_is_stuck_is_named_in_all_groups() {
    let deadline = Duration::from_secs(4);
    let job = Job {
        steps: 1000,
        aggregators: 4,
        ..common::job(Mode::Ds, 8, 2, 24)
    };
    let (served, worked) = team(&job, deadline, |rank, mut through| {
        let failed = (0..1000).find_map(|round| {
            if (rank, round) == (5, 2) {
                thread::sleep(3 * deadline);
                return Some(None);
            }
            through.mean_in_place(round).err().map(Some)
        });
        failed.unwrap()
    });
    for error in served.into_iter().map(Result::unwrap_err) {
        assert_eq!(at_fault(&error), Party::Worker(5), "{error}");
    }
    for error in worked.into_iter().flatten() {
        assert_eq!(at_fault(&error), Party::Worker(5), "{error}");
    }
}

#[test]
fn an_aggregator_that_never_comes_is_named_by_the_others() {
    let deadline = Duration::from_secs(3);
    let job = Job {
        aggregators: 2,
        ..job(MOMENTUM, 2, 24)
    };
    let layout = Layout::of(&job).unwrap();
    let open = |number| Aggregator::open(layout, number, &tcp(), deadline).unwrap();
    let there = open(0);
    // Nobody listens there any more.
    let addresses = [there.address(), open(1).address()];
    let (options, _folder) = options();
    let (served, worked) = thread::scope(|scope| {
        let (job, addresses, options) = (&job, &addresses, &options);
        let serving =
            scope.spawn(move || there.serve_job(job, AggregatorCourse::default(), deadline));
        let join = |rank| {
            scope.spawn(move || Through::join(layout, rank, addresses, options, deadline).err())
        };
        let worked = [join(0), join(1)].map(|thread| thread.join().unwrap().unwrap());
        (serving.join().unwrap().unwrap_err(), worked)
    });
    assert_eq!(at_fault(&served), Party::Aggregator(1), "{served}");
    for error in worked {
        let is_named = matches!(
            error,
            AggregateError::Refused {
                at: Party::Aggregator(1),
                ..
            }
        );
        assert!(is_named, "{error}");
    }
}

/// Runs two workers at one aggregator over tcp: worker 0 trains, worker 1 takes part in a step and
/// then runs `second`. Returns the results of the aggregator and of worker 0.
fn failing(
    deadline: Duration,
    second: impl FnOnce(Through) + Send,
) -> (AggregateError, AggregateError) {
    let layout = layout(2, 1000);
    let aggregator = Aggregator::open(layout, 0, &tcp(), LEASE).unwrap();
    let address = [aggregator.address()];
    let (options, _folder) = options();
    let join = |rank| Through::join(layout, rank, &address, &options, deadline).unwrap();
    let join = &join;
    thread::scope(|scope| {
        let serving = scope.spawn(|| {
            let served = aggregator.serve(&[0.0; 1000], MOMENTUM, 1000, deadline);
            served.unwrap_err()
        });
        let first = scope.spawn(move || {
            let (mut through, mut parameters) = (join(0), [0.0; 1000]);
            let mut steps = 0..1000;
            let failed =
                steps.find_map(|step| through.step(step, &[1.0; 1000], &mut parameters).err());
            failed.unwrap()
        });
        scope.spawn(move || {
            let (mut through, mut parameters) = (join(1), [0.0; 1000]);
            through.step(0, &[1.0; 1000], &mut parameters).unwrap();
            second(through);
        });
        (serving.join().unwrap(), first.join().unwrap())
    })
}

fn at_fault(error: &AggregateError) -> Party {
    match error {
        AggregateError::Missing { missing, .. } => *missing,
        AggregateError::Gone { gone, .. } => *gone,
        AggregateError::Strange { from, .. } => *from,
        error => panic!("{error}"),
    }
}

#[test]
fn a_worker_that_is_stuck_is_named_by_the_aggregator_and_the_others() {
    let deadline = Duration::from_secs(3);
    let begun = Instant::now();
    let (aggregator, worker) = failing(deadline, |through| {
        thread::sleep(2 * deadline);
        drop(through);
    });
    assert_eq!(at_fault(&aggregator), Party::Worker(1), "{aggregator}");
    assert_eq!(at_fault(&worker), Party::Worker(1), "{worker}");
    assert!(begun.elapsed() < Duration::from_secs(30));
}

#[test]
fn a_worker_that_goes_is_named_long_before_the_deadline() {
    let deadline = Duration::from_secs(60);
    let begun = Instant::now();
    let (aggregator, worker) = failing(deadline, drop);
    assert_eq!(at_fault(&aggregator), Party::Worker(1), "{aggregator}");
    assert_eq!(at_fault(&worker), Party::Worker(1), "{worker}");
    assert!(begun.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_worker_that_does_another_step_is_noticed() {
    let (aggregator, worker) = failing(Duration::from_secs(5), |mut through| {
        let _ = through.step(7, &[1.0; 1000], &mut [0.0; 1000]);
    });
    assert!(
        matches!(aggregator, AggregateError::Strange { .. }),
        "{aggregator}"
    );
    assert_eq!(at_fault(&worker), Party::Worker(1), "{worker}");
}

#[test]
fn a_worker_or_an_aggregator_that_never_comes_is_named() {
    let deadline = Duration::from_secs(3);
    let layout = layout(2, 10);
    let open = || Aggregator::open(layout, 0, &tcp(), LEASE).unwrap();
    let (options, _folder) = options();
    let begun = Instant::now();
    // 1. Worker 1 does not come.
    let aggregator = open();
    let address = [aggregator.address()];
    let (served, worked) = thread::scope(|scope| {
        let serving = scope.spawn(|| aggregator.serve(&[0.0; 10], MOMENTUM, 1, deadline));
        let mut through = Through::join(layout, 0, &address, &options, deadline).unwrap();
        let worked = through.step(0, &[1.0; 10], &mut [0.0; 10]);
        drop(through);
        (serving.join().unwrap(), worked)
    });
    for error in [served.unwrap_err(), worked.unwrap_err()] {
        assert_eq!(at_fault(&error), Party::Worker(1), "{error}");
    }
    // 2. The aggregator does not come.
    let address = [open().address()];
    let joined = Through::join(layout, 0, &address, &options, deadline);
    let error = joined.err().unwrap();
    assert!(
        matches!(
            error,
            AggregateError::Refused {
                who: Party::Worker(0),
                at: Party::Aggregator(0),
                ..
            }
        ),
        "{error}"
    );
    assert!(begun.elapsed() < Duration::from_secs(30), "{begun:?}");
}

#[test]
fn an_aggregator_that_goes_is_named() {
    let layout = layout(1, 10);
    let aggregator = Aggregator::open(layout, 0, &tcp(), LEASE).unwrap();
    let (address, deadline) = ([aggregator.address()], Duration::from_secs(3));
    let (options, _folder) = options();
    let mut through = Through::join(layout, 0, &address, &options, deadline).unwrap();
    // One that does nothing, and then one that is not there.
    let (gradient, mut parameters) = ([0.0; 10], [0.0; 10]);
    let error = through.step(0, &gradient, &mut parameters).unwrap_err();
    assert!(matches!(error, AggregateError::Missing { .. }), "{error}");
    assert_eq!(at_fault(&error), Party::Aggregator(0), "{error}");
    drop(aggregator);
    let error = through.step(1, &gradient, &mut parameters).unwrap_err();
    assert_eq!(at_fault(&error), Party::Aggregator(0), "{error}");
    assert!(Through::join(layout, 0, &address, &options, deadline).is_err());
}
