//! Programs that are stopped, alone or with the whole machine, for longer than their deadline.
//!
//! The rule it keeps: time in which a program stood still counts for no deadline. The program goes
//! on with all its data, and no page is given up.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::{
    env, io,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use common::{
    Fabric, ServerProcess, begin, builder, fabrics, serve_if_asked, shared,
    words::{assert_filled, fill, rewrite_or_exit},
};
use farpage::RemoteArray;
use farpage_testkit::{KIB, MIB, Rng, TestProcess, say, seed};
use nix::sys::signal::Signal;

const SERVING: &str = "a_program_that_stands_still_beyond_its_deadline_goes_on";
const DEADLINE: Duration = Duration::from_millis(1500);
/// Time of a standstill: longer than any deadline, and shorter than a lease.
const STILL: Duration = Duration::from_millis(2500);

const CLIENT: &str = "FARPAGE_TEST_CLIENT";

#[test]
fn a_program_that_stands_still_beyond_its_deadline_goes_on() {
    if serve_if_asked() {
        return;
    }
    if let Ok(url) = env::var(CLIENT) {
        return page_until_told(&url);
    }
    let Some(_watchdog) = begin(180) else { return };
    let seed = seed();
    thread::scope(|scope| {
        for (nth, fabric) in fabrics().into_iter().enumerate() {
            scope.spawn(move || stand_still_often(fabric, Rng(seed + nth as u64)));
        }
    });
}

fn stand_still_often(fabric: Fabric, mut rng: Rng) {
    let server = ServerProcess::start(SERVING, fabric, 256 * MIB);
    let mut client = TestProcess::start_as(SERVING, &[(CLIENT, &server.url)]);
    client.wait_for_line("paging");
    for round in 0..4 {
        thread::sleep(Duration::from_micros(rng.below(50_000) as u64));
        // In every other round the server stands still, too, and before the client: completions
        // that the client waits for have not come when it goes on.
        let both = round % 2 == 0;
        if both {
            server.signal(Signal::SIGSTOP);
            thread::sleep(DEADLINE / 20);
        }
        client.signal(Signal::SIGSTOP);
        thread::sleep(STILL);
        client.signal(Signal::SIGCONT);
        if both {
            thread::sleep(DEADLINE / 20);
            server.signal(Signal::SIGCONT);
        }
    }
    client.hang_up();
    client.wait_for_line("whole");
    client.must_pass(Duration::from_secs(30));
}

/// Reads and writes four times the budget by four threads, until the parent hangs up. A word with a
/// wrong value ends the process with status 3.
fn page_until_told(url: &str) {
    let runtime = builder(MIB, 16 * KIB)
        .server(url)
        .deadline(DEADLINE)
        .build()
        .unwrap();
    let mut array: RemoteArray<u64> = runtime.array(4 * MIB / 8).unwrap();
    fill(&mut array, 0);
    let (_, words) = shared(&mut array);
    let stop = AtomicBool::new(false);
    say("paging");
    thread::scope(|scope| {
        for thread in 0..4 {
            let stop = &stop;
            scope.spawn(move || {
                let mut rng = Rng(thread);
                while !stop.load(Ordering::Relaxed) {
                    rewrite_or_exit(words, &mut rng);
                }
            });
        }
        io::stdin().read_line(&mut String::new()).unwrap();
        stop.store(true, Ordering::Relaxed);
    });
    assert_filled(&array, 0);
    array.flush().unwrap();
    assert_eq!(runtime.stats().pager.poisoned, 0);
    say("whole");
}
