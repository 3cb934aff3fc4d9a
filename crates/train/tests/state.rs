//! An optimizer's state in remote memory, of which a fraction is local at a time: the same bits as
//! in local memory, and an error where the memory has gone.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests, which fail by panicking"
)]

mod common;

use std::{thread, time::Duration};

use common::{ADAM, MOMENTUM, end, last, network, options};
use farpage::{BuildError, ByteSize, Runtime};
use farpage_memserver::RunningServer;
use farpage_testkit::{serve, tcp, test_name};
use farpage_train::{
    AggregateError, Aggregator, AggregatorCourse, Between, Checkpoint, Content, Course, Courses,
    Job, Keeping, Layout, Mlp, Mode, Network, Party, Plan, Rule, Through, hash, run_on,
};

const NETWORK: Network = network(Between::Shm);

/// True if this process may page its own memory. If not, prints that the test is skipped, and why.
fn can_page() -> bool {
    match Runtime::builder().build() {
        Err(BuildError::Userfaultfd(why)) => {
            eprintln!("SKIPPED: {}: {why}", test_name());
            false
        }
        _ => true,
    }
}

fn runtime(server: &RunningServer, budget_bytes: usize) -> Runtime {
    let runtime = Runtime::builder()
        .server(server.endpoints()[0].to_string())
        .budget(ByteSize(budget_bytes as u64))
        .page_size(ByteSize::kib(16))
        .deadline(Duration::from_secs(5));
    runtime.build().unwrap()
}

fn job(rule: Rule) -> Job {
    let job = common::job(Mode::Bsp, 2, 2, 500);
    let (width, classes) = (job.data.width, job.data.classes);
    Job {
        model: Mlp::new(&[width, 500, 500, classes]),
        rule,
        batch: 4,
        steps: 6,
        every: 6,
        ..job
    }
}

fn through(job: &Job, aggregators: usize) -> Job {
    Job {
        aggregators,
        ..job.clone()
    }
}

fn in_memory_of(runtime: &Runtime) -> Courses<'_> {
    Courses {
        state: Some(runtime),
        ..Courses::default()
    }
}

#[test]
fn a_state_four_times_as_large_as_the_budget_ends_in_the_bits_of_local_memory() {
    if !can_page() {
        return;
    }
    let server = serve(&tcp(), 64 << 20);
    for (rule, floats) in [(MOMENTUM, 2), (ADAM, 3)] {
        let job = job(rule);
        let bytes = 4 * floats * job.model.parameters();
        let whole = end(&through(&job, 1), &NETWORK);
        for (between, aggregators) in [(Between::Shm, 1), (Between::Tcp, 2)] {
            let (job, network) = (through(&job, aggregators), network(between));
            let runtime = runtime(&server, bytes / 4);
            let ended = run_on(&job, &network, in_memory_of(&runtime)).unwrap();
            assert_eq!(hash(last(&ended)), whole, "{rule:?} {between:?}");
            // All of it went out and came back in each step.
            let moved = runtime.stats().pager.evictions * (16 << 10);
            assert!(moved as usize > bytes * 3, "{moved} of {bytes}");
        }
    }
}

#[test]
fn a_memory_server_without_room_is_an_error_of_the_aggregator() {
    if !can_page() {
        return;
    }
    let server = serve(&tcp(), 1 << 20);
    let runtime = runtime(&server, 1 << 20);
    let error = run_on(&through(&job(ADAM), 1), &NETWORK, in_memory_of(&runtime)).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("aggregator 0 cannot get at its parameters"),
        "{text}"
    );
}

#[test]
fn a_memory_server_that_goes_is_an_error_of_the_aggregator_and_ends_the_job() {
    if !can_page() {
        return;
    }
    let layout = Layout {
        aggregators: 1,
        plan: Plan::of_all(1),
        parameters: 1 << 20,
    };
    // Pages of one repeated value would not leave this process.
    let initial: Vec<f32> = (0..layout.parameters).map(|at| at as f32).collect();
    let memory = serve(&tcp(), 64 << 20);
    let runtime = runtime(&memory, 2 << 20);
    let aggregator = Aggregator::open(layout, 0, &tcp(), Duration::from_secs(30)).unwrap();
    let aggregator = aggregator.keep_in(&runtime);
    let (address, deadline) = ([aggregator.address()], Duration::from_secs(30));
    let (options, _folder) = options();
    let (served, worked) = thread::scope(|scope| {
        let serving = scope.spawn(|| aggregator.serve(&initial, ADAM, 100, deadline));
        let mut through = Through::join(layout, 0, &address, &options, deadline).unwrap();
        through.buffers().unwrap().1.copy_from_slice(&initial);
        through.step_in_place(0).unwrap();
        memory.shutdown();
        let worked = (1..100).find_map(|step| through.step_in_place(step).err());
        drop(through);
        (serving.join().unwrap().unwrap_err(), worked.unwrap())
    });
    assert!(matches!(served, AggregateError::State { .. }), "{served}");
    let AggregateError::Gone { gone, .. } = worked else {
        panic!("{worked}");
    };
    assert_eq!(gone, Party::Aggregator(0));
}

/// Keeps the one checkpoint after four steps.
fn keeping(kept: &mut Vec<u8>) -> Option<Keeping<'_>> {
    let keep = |step, content: &mut dyn Content| {
        assert_eq!(step, 4);
        content.write_to(kept)?;
        assert_eq!(kept.len() as u64, content.bytes());
        Ok(())
    };
    Some(Keeping {
        every: 4,
        keep: Box::new(keep),
    })
}

#[test]
fn aggregators_go_on_from_checkpoints_in_local_and_in_remote_memory() {
    if !can_page() {
        return;
    }
    let server = serve(&tcp(), 64 << 20);
    for rule in [MOMENTUM, ADAM] {
        let job = through(&job(rule), 2);
        let bytes = 4 * 3 * job.model.parameters();
        let whole = end(&job, &NETWORK);
        let (mut of_workers, mut of_aggregators) = ([vec![], vec![]], [vec![], vec![]]);
        let remote = runtime(&server, bytes / 4);
        let kept = Courses {
            workers: (of_workers.iter_mut())
                .map(|kept| Course {
                    from: None,
                    keeping: keeping(kept),
                })
                .collect(),
            aggregators: (of_aggregators.iter_mut())
                .map(|kept| AggregatorCourse {
                    keeping: keeping(kept),
                    ..AggregatorCourse::default()
                })
                .collect(),
            state: Some(&remote),
        };
        let ended = run_on(&job, &NETWORK, kept).unwrap();
        assert_eq!(hash(last(&ended)), whole);
        // A worker keeps no parameters where aggregators have them.
        let parameters = 4 * job.model.parameters();
        assert!(of_workers[0].len() < parameters, "{}", of_workers[0].len());
        let resumed = |state, aggregators: &[Vec<u8>; 2]| {
            let workers = of_workers.iter().enumerate().map(|(rank, kept)| Course {
                from: Some(Checkpoint::from_bytes(kept, &job, rank).unwrap()),
                keeping: None,
            });
            let aggregators = aggregators.iter().map(|kept| AggregatorCourse {
                from: 4,
                checkpoint: Some(Box::new(&**kept)),
                keeping: None,
            });
            let courses = Courses {
                workers: workers.collect(),
                aggregators: aggregators.collect(),
                state,
            };
            run_on(&job, &NETWORK, courses)
        };
        for state in [None, Some(&remote)] {
            let ended = resumed(state, &of_aggregators).unwrap();
            assert_eq!((ended[0].from, hash(last(&ended))), (4, whole), "{rule:?}");
        }
        // Another aggregator's, a bit that is wrong, and an end that is missing.
        let [first, second] = &of_aggregators;
        let mut damaged = second.clone();
        damaged[second.len() / 2] ^= 1;
        let cut = second[..second.len() - 1].to_vec();
        for (wrong, said) in [
            (first.clone(), "aggregator 0 of 2"),
            (damaged, "damaged"),
            (cut, "aggregator 1 cannot go on"),
        ] {
            let error = resumed(None, &[first.clone(), wrong]).unwrap_err();
            assert!(error.to_string().contains(said), "{error}");
        }
    }
}
