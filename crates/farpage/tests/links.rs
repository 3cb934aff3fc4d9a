//! Connections that break, fall silent or take too long, between a program and servers that live.
//!
//! The rule it keeps: a network that comes back within the deadline costs time and nothing else: no memory, no page, no room.

mod common;

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use common::{Fabric, KIB, MIB, Memory, Rng, Watchdog, builder, can_page, mix, relay::Relay, seed};

const PAGE_BYTES: usize = 64 * KIB;

fn fill(array: &mut [u64], turn: u64) {
    for (at, word) in array.iter_mut().enumerate() {
        *word = mix(at as u64 ^ turn << 32);
    }
}

fn assert_filled(array: &[u64], turn: u64) {
    for (at, &word) in array.iter().enumerate() {
        assert_eq!(word, mix(at as u64 ^ turn << 32), "word {at}");
    }
}

#[test]
fn thirty_cuts_leave_a_full_server_with_room_for_every_flush() {
    let test = "thirty_cuts_leave_a_full_server_with_room_for_every_flush";
    let _watchdog = Watchdog::new(test, Duration::from_secs(240));
    if !can_page(test) {
        return;
    }
    let mut rng = Rng(seed(test));
    for budget_bytes in [8 * MIB, 16 * MIB] {
        // All that it has is reserved: what a cut leaves behind is missing at once.
        let memory = Memory::start(Fabric::Tcp, 66 * MIB);
        let relay = Relay::to(&memory.url);
        let runtime = builder(budget_bytes, PAGE_BYTES)
            .server(&relay.url)
            .deadline(Duration::from_secs(20))
            .build()
            .unwrap();
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
        // Nobody cuts any more, and a rewrite of all of it finds room, again and again.
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
