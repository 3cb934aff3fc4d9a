//! Exchanges over every fabric: the exact mean, the bytes that it takes, and the worker that is
//! named when one is missing.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests, which fail by panicking"
)]

mod common;

use std::{
    thread,
    time::{Duration, Instant},
};

use common::{LEASE, PATIENCE, options};
use farpage_fabric::Endpoint;
use farpage_testkit::tcp;
use farpage_train::{Address, ExchangeError, JoinError, Member, Mode, Plan, Random, Station};

#[derive(Clone, Copy, Debug)]
enum Fabric {
    Sim,
    Shm,
    Tcp,
}

const ALL: [Fabric; 3] = [Fabric::Sim, Fabric::Shm, Fabric::Tcp];

/// Runs `work` on a thread per worker and returns what each found.
fn team<R: Send>(
    fabric: Fabric,
    plan: Plan,
    deadline: Duration,
    work: impl Fn(usize, Member) -> R + Sync,
) -> Vec<R> {
    let joined = |rank, joined: Result<Member, JoinError>| work(rank, joined.unwrap());
    team_without(None, fabric, plan, deadline, joined)
}

/// Runs `work` as [`team`] does, without worker `absent`, whose address nobody serves any more.
fn team_without<R: Send>(
    absent: Option<usize>,
    fabric: Fabric,
    plan: Plan,
    deadline: Duration,
    work: impl Fn(usize, Result<Member, JoinError>) -> R + Sync,
) -> Vec<R> {
    let (options, folder) = options();
    let stations: Vec<_> = (0..plan.workers())
        .map(|rank| {
            let endpoint = match fabric {
                Fabric::Sim => Endpoint::Sim(rank as u64),
                Fabric::Shm => Endpoint::Shm(folder.path().join(rank.to_string())),
                Fabric::Tcp => tcp(),
            };
            Station::open(plan, rank, &endpoint, LEASE).unwrap()
        })
        .collect();
    let addresses: Vec<_> = stations.iter().map(Station::address).collect();
    let (addresses, options, work) = (&addresses, &options, &work);
    thread::scope(|scope| {
        let threads: Vec<_> = stations
            .into_iter()
            .enumerate()
            // The others begin when the absent worker's station has been dropped.
            .filter(|(rank, _)| Some(*rank) != absent)
            .collect::<Vec<_>>()
            .into_iter()
            .map(|(rank, station)| {
                scope.spawn(move || work(rank, station.join(addresses, options, deadline)))
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

fn plan(mode: Mode, workers: usize, group: usize) -> Plan {
    Plan::new(mode, workers, group).unwrap()
}

#[test]
fn the_exact_mean_is_everywhere_after_as_many_rounds_as_digits() {
    for fabric in ALL {
        for (workers, group) in [(2, 2), (8, 2), (16, 4), (4, 4)] {
            let plan = plan(Mode::Ds, workers, group);
            // Not a multiple of anything, and more than one message per chunk.
            let len = 33_333;
            // Powers of two and their multiples: no sum is rounded.
            let value = |rank: usize, at: usize| ((rank * 7 + at) % 64) as f32 * 0.25;
            let all = team(fabric, plan, PATIENCE, |rank, mut member| {
                let mut values: Vec<_> = (0..len).map(|at| value(rank, at)).collect();
                for round in 0..plan.digits() as usize {
                    member
                        .exchange
                        .mean(round, round as u64, &mut values)
                        .unwrap();
                }
                let steps = member.exchange.serial_steps();
                member.leave().unwrap();
                (values, steps)
            });
            for (rank, (values, steps)) in all.iter().enumerate() {
                for (at, found) in values.iter().enumerate() {
                    let sum: f32 = (0..workers).map(|rank| value(rank, at)).sum();
                    assert_eq!(
                        *found,
                        sum / workers as f32,
                        "{fabric:?} {workers} {rank} {at}"
                    );
                }
                assert_eq!(*steps, u64::from(plan.digits()) * 2 * (group as u64 - 1));
            }
        }
    }
}

#[test]
fn sums_have_the_order_of_the_ring_and_not_of_arrival() {
    let plan = plan(Mode::Bsp, 4, 4);
    let len = 4 * 9000;
    let draw = |rank| -> Vec<f32> {
        let mut random = Random::new(5, rank as u64);
        (0..len).map(|_| random.signed_unit()).collect()
    };
    // Chunk c begins at member c and is summed on its way.
    let inputs: Vec<_> = (0..4).map(draw).collect();
    let expected: Vec<_> = (0..len)
        .map(|at| {
            let first = at / 9000;
            let sum = (1..4).fold(inputs[first][at], |sum, next| {
                sum + inputs[(first + next) % 4][at]
            });
            sum * 0.25
        })
        .collect();
    for fabric in ALL {
        let all = team(fabric, plan, PATIENCE, |rank, mut member| {
            let mut values = draw(rank);
            member.exchange.mean(0, 0, &mut values).unwrap();
            member.leave().unwrap();
            values
        });
        all.iter()
            .for_each(|values| assert!(*values == expected, "{fabric:?}"));
    }
}

#[test]
fn a_ring_moves_the_bytes_that_theory_says() {
    const LEN: usize = 400_000;
    for fabric in ALL {
        for (mode, workers, group, members) in [
            (Mode::Bsp, 16, 4, 16.0),
            (Mode::Ds, 16, 4, 4.0),
            (Mode::Fixed, 16, 4, 4.0),
        ] {
            let all = team(
                fabric,
                plan(mode, workers, group),
                PATIENCE,
                |_, mut member| {
                    let mut values = vec![1.0; LEN];
                    member.exchange.mean(0, 0, &mut values).unwrap();
                    let bytes = member.exchange.moved_bytes() as f64;
                    member.leave().unwrap();
                    bytes
                },
            );
            let expected = 2.0 * (4 * LEN) as f64 * (members - 1.0) / members;
            for bytes in all {
                let over = bytes / expected;
                assert!((1.0..1.01).contains(&over), "{fabric:?} {mode}: {over}");
            }
        }
    }
}

#[test]
fn vectors_shorter_than_the_ring_are_exchanged_too() {
    for len in [0, 1, 3] {
        let all = team(
            Fabric::Sim,
            plan(Mode::Bsp, 4, 4),
            PATIENCE,
            |rank, mut member| {
                let mut values = vec![rank as f32; len];
                for round in 0..3 {
                    member.exchange.mean(0, round, &mut values).unwrap();
                }
                member.leave().unwrap();
                values
            },
        );
        all.iter()
            .for_each(|values| assert_eq!(*values, vec![1.5; len]));
    }
}

/// Returns the worker that an error names.
fn named(error: &ExchangeError) -> usize {
    match error {
        ExchangeError::Missing { missing, .. } => *missing,
        ExchangeError::Gone { gone, .. } => *gone,
        other => panic!("{other}"),
    }
}

/// Takes part in rounds until one fails, or until that of `last`. Returns the failure, and the time
/// until it.
fn rounds(
    member: &mut Member,
    rings: u64,
    len: usize,
    last: Option<u64>,
) -> Option<(ExchangeError, Duration)> {
    let (begun, mut values) = (Instant::now(), vec![1.0; len]);
    let failed = (0..last.unwrap_or(u64::MAX)).find_map(|round| {
        let ring = (round % rings) as usize;
        member.exchange.mean(ring, round, &mut values).err()
    });
    failed.map(|error| (error, begun.elapsed()))
}

/// Runs `test` over both real fabrics and in the modes with one ring and with two, all at once.
fn everywhere(test: impl Fn(Fabric, Mode, u64) + Sync) {
    let test = &test;
    thread::scope(|scope| {
        for fabric in [Fabric::Shm, Fabric::Tcp] {
            for (mode, rings) in [(Mode::Bsp, 1), (Mode::Ds, 2)] {
                scope.spawn(move || test(fabric, mode, rings));
            }
        }
    });
}

#[test]
fn a_worker_that_is_stuck_is_named_by_all_within_the_deadline() {
    let deadline = Duration::from_secs(2);
    everywhere(|fabric, mode, rings| {
        let all = team(fabric, plan(mode, 4, 2), deadline, |rank, mut member| {
            let last = (rank == 2).then_some(3);
            let failed = rounds(&mut member, rings, 1000, last);
            if rank == 2 && failed.is_none() {
                // Alive, and silent.
                thread::sleep(deadline * 2);
            }
            failed
        });
        assert_eq!(all.iter().flatten().count(), 3);
        assert!(all[2].is_none());
        for (error, elapsed) in all.into_iter().flatten() {
            assert_eq!(named(&error), 2, "{fabric:?} {mode}: {error}");
            assert!(elapsed < deadline * 2, "{elapsed:?}: {error}");
        }
    });
}

#[test]
fn a_worker_that_goes_is_named_by_all_long_before_the_deadline() {
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        let plan = plan(Mode::Ds, 4, 2);
        let all = team(fabric, plan, PATIENCE, |rank, mut member| {
            rounds(&mut member, 2, 100_000, (rank == 1).then_some(4))
        });
        assert_eq!(all.iter().flatten().count(), 3);
        for (error, elapsed) in all.into_iter().flatten() {
            assert_eq!(named(&error), 1, "{fabric:?}: {error}");
            assert!(elapsed < PATIENCE / 2, "{elapsed:?}: {error}");
        }
    }
}

#[test]
fn a_worker_that_never_comes_is_named_by_all() {
    let deadline = Duration::from_secs(2);
    everywhere(|fabric, mode, rings| {
        let begun = Instant::now();
        let plan = plan(mode, 4, 2);
        let all = team_without(Some(2), fabric, plan, deadline, |_, joined| match joined {
            Err(JoinError::Missing { missing, .. } | JoinError::Absent { missing, .. }) => missing,
            Err(error) => panic!("{error}"),
            Ok(mut member) => named(&rounds(&mut member, rings, 1000, None).unwrap().0),
        });
        assert_eq!(all, [2; 3], "{fabric:?} {mode}");
        assert!(begun.elapsed() < deadline * 3, "{:?}", begun.elapsed());
    });
}

#[test]
fn a_worker_that_does_not_end_is_named_within_the_deadline() {
    let deadline = Duration::from_secs(3);
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        let plan = plan(Mode::Bsp, 2, 2);
        let all = team(fabric, plan, deadline, |rank, mut member| {
            member.exchange.mean(0, 0, &mut [1.0; 10]).unwrap();
            if rank == 1 {
                thread::sleep(deadline * 2);
                return None;
            }
            let begun = Instant::now();
            let error = member.leave().unwrap_err().to_string();
            Some((error, begun.elapsed()))
        });
        let (error, elapsed) = all[0].clone().unwrap();
        assert!(error.contains("for worker 1 to end"), "{error}");
        assert!(elapsed < deadline * 2, "{elapsed:?}");
    }
}

#[test]
fn workers_of_another_job_are_noticed() {
    let all = team(
        Fabric::Shm,
        plan(Mode::Bsp, 2, 2),
        PATIENCE,
        |rank, mut member| {
            let mut values = vec![1.0; 1000 + 10 * rank];
            member
                .exchange
                .mean(0, 0, &mut values)
                .map_err(|error| error.to_string())
        },
    );
    let said = all.into_iter().find_map(Result::err).unwrap();
    assert!(said.contains("do all workers run the same job?"), "{said}");
}

#[test]
fn workers_that_never_come_are_named() {
    let plan = plan(Mode::Bsp, 2, 2);
    let (options, _folder) = options();
    let deadline = Duration::from_millis(300);
    let open = |rank| Station::open(plan, rank, &tcp(), LEASE).unwrap();
    let join = |here: Station, there: Address| {
        let addresses = [here.address(), there];
        here.join(&addresses, &options, deadline).err().unwrap()
    };
    // 1. Nobody listens there any more.
    let gone = open(1).address();
    let error = join(open(0), gone);
    let is_named = matches!(
        error,
        JoinError::Missing {
            rank: 0,
            missing: 1,
            ..
        }
    );
    assert!(is_named, "{error}");
    // 2. The other can be reached, and does not reach us.
    let silent = open(1);
    let error = join(open(0), silent.address());
    let is_named = matches!(
        error,
        JoinError::Absent {
            rank: 0,
            missing: 1,
            ..
        }
    );
    assert!(is_named, "{error}");
}
