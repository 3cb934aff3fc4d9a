//! Connections that break, fall silent or take too long, between a program and servers that live.
//!
//! The rule it keeps: a network that comes back within the deadline costs time only: no memory, no
//! page, no room.

mod common;

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use common::{
    Fabric, Memory, begin, builder,
    words::{assert_filled, fill},
};
use farpage::{RegionOptions, Runtime};
use farpage_testkit::{KIB, MIB, Relay, Rng, mix, seed};

const PAGE_BYTES: usize = 64 * KIB;

fn runtime(relay: &Relay, budget_bytes: usize, deadline: Duration) -> Runtime {
    let builder = builder(budget_bytes, PAGE_BYTES).server(&relay.url);
    builder.deadline(deadline).build().expect("a live server")
}

#[test]
fn thirty_cuts_leave_a_full_server_with_room_for_every_flush() {
    let Some(_watchdog) = begin(240) else { return };
    let mut rng = Rng(seed());
    for budget_bytes in [8 * MIB, 16 * MIB] {
        // All of the server's memory is reserved: memory left behind by a cut is missing at once.
        let memory = Memory::start(Fabric::Tcp, 66 * MIB);
        let relay = Relay::to(&memory.url);
        let runtime = runtime(&relay, budget_bytes, Duration::from_secs(20));
        let mut array = runtime.array::<u64>(64 * MIB / 8).unwrap();
        let (stop, mut cuts, mut turn) = (AtomicBool::new(false), 0, 0);
        thread::scope(|scope| {
            let cutter = scope.spawn(|| {
                for _ in 0..30 {
                    thread::sleep(Duration::from_millis(20 + rng.below(60) as u64));
                    relay.cut();
                    cuts += 1;
                }
                stop.store(true, Ordering::Relaxed);
            });
            while !stop.load(Ordering::Relaxed) {
                turn += 1;
                fill(&mut array, turn);
                array.flush().unwrap();
            }
            cutter.join().unwrap();
        });
        assert_eq!(cuts, 30);
        // After the cuts, a rewrite of all pages finds room, again and again.
        for _ in 0..3 {
            turn += 1;
            fill(&mut array, turn);
            array.flush().unwrap();
        }
        assert_filled(&array, turn);
        assert_eq!(runtime.stats().pager.poisoned, 0);
        println!("{turn} rewrites, {} connections", relay.accepted());
    }
}

#[test]
fn a_network_that_forgets_its_connections_costs_a_part_of_the_deadline() {
    let Some(_watchdog) = begin(120) else { return };
    let deadline = Duration::from_secs(8);
    let memory = Memory::start(Fabric::Tcp, 256 * MIB);
    let relay = Relay::to(&memory.url);
    let runtime = runtime(&relay, 4 * MIB, deadline);
    let mut array = runtime.array::<u64>(32 * MIB / 8).unwrap();
    let timed = |what: &str, act: &mut dyn FnMut()| {
        relay.silence();
        let since = Instant::now();
        act();
        let took = since.elapsed();
        println!("{what}: {took:?}");
        // Each worker may notice on its own, one after the other.
        assert!(took < 2 * deadline, "{what} took {took:?}");
    };
    for turn in 1..=2 {
        // Evictions and faults at any moment; SIGBUS would end this program.
        timed("a rewrite of all", &mut || fill(&mut array, turn));
        timed("a look at all", &mut || assert_filled(&array, turn));
        timed("a flush", &mut || {
            array[5] = turn;
            array.flush().unwrap();
            array[5] = mix(5 ^ turn << 32);
        });
        timed("a control call", &mut || {
            drop(runtime.array::<u64>(64 * MIB / 8).unwrap());
        });
        timed("a publication", &mut || {
            let options = RegionOptions::new().name(format!("kept {turn}"));
            let mut named = runtime.array_with::<u64>(MIB / 8, options).unwrap();
            fill(&mut named, turn);
            named.close().unwrap();
        });
    }
    assert_eq!(runtime.stats().pager.poisoned, 0);
}
