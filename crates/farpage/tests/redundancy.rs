//! Regions whose pages are on several servers, as real processes, which are killed by real signals
//! while threads write.
//!
//! The rule it keeps: a memory server that dies is a slower page and nothing else: no word is lost,
//! and no thread sees SIGBUS, which would end the test.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::Duration,
};

use common::{Fabric, ServerProcess, begin, builder, get, serve_if_asked, set, shared};
use farpage::{
    CreateError, FaultMode, Redundancy, RegionOptions, Runtime, error::StoreCreateError,
};
use farpage_testkit::{KIB, MIB, Rng, Watchdog, mix, seed, wait_until};
use nix::sys::signal::Signal;

const PAGE_BYTES: usize = 16 * KIB;
const ARRAY_BYTES: usize = 32 * MIB;
const THREADS: usize = 4;

/// The test that becomes the server process of all tests.
const SERVING: &str = "servers_that_are_killed_are_slower_pages_and_nothing_else";

fn servers(count: usize) -> Vec<ServerProcess> {
    (0..count)
        .map(|_| ServerProcess::start(SERVING, Fabric::Tcp, 256 * MIB))
        .collect()
}

/// Builds a runtime that keeps two copies of each page, and a quarter of the array locally.
fn runtime(servers: &[ServerProcess], mode: FaultMode) -> Runtime {
    runtime_with(servers, mode, Redundancy::Copies(2))
}

fn runtime_with(servers: &[ServerProcess], mode: FaultMode, redundancy: Redundancy) -> Runtime {
    let builder = builder(ARRAY_BYTES / 4, PAGE_BYTES).fault_mode(mode);
    let builder = builder.redundancy(redundancy);
    let add = |builder: farpage::Builder, server: &ServerProcess| builder.server(&server.url);
    servers.iter().fold(builder, add).build().unwrap()
}

/// Updates random words by several threads while `amid` runs. Each compares its own words with a
/// plain array. Ends with a look at all words.
fn update_amid(words: &[AtomicU64], seed: u64, amid: impl FnOnce()) {
    let stop = AtomicBool::new(false);
    let len = words.len() / THREADS;
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let stop = &stop;
            scope.spawn(move || {
                let mut rng = Rng(mix(seed ^ thread as u64));
                let mine = &words[thread * len..][..len];
                let mut plain: Vec<u64> = (0..len).map(|at| get(mine, at)).collect();
                while !stop.load(Ordering::Relaxed) {
                    for _ in 0..64 {
                        let at = rng.below(len);
                        assert_eq!(get(mine, at), plain[at], "word {at} of thread {thread}");
                        plain[at] = rng.next();
                        set(mine, at, plain[at]);
                    }
                }
                for (at, &word) in plain.iter().enumerate() {
                    assert_eq!(
                        get(mine, at),
                        word,
                        "word {at} of thread {thread}, at the end"
                    );
                }
            });
        }
        amid();
        stop.store(true, Ordering::Relaxed);
    });
}

/// Waits until a quarter of the array has been written to the servers.
fn wait_for_writes(runtime: &Runtime) {
    let written = || runtime.stats().store.bytes_written;
    let enough = written() + ARRAY_BYTES as u64 / 4;
    wait_until("writes go on", || written() > enough);
}

#[track_caller]
fn assert_unharmed(runtime: &Runtime) {
    let stats = runtime.stats();
    assert_eq!(
        (stats.pager.poisoned, stats.store.errors),
        (0, 0),
        "{stats}"
    );
}

#[test]
fn servers_that_are_killed_are_slower_pages_and_nothing_else() {
    if serve_if_asked() {
        return;
    }
    let Some(_watchdog) = begin(300) else { return };
    let mut rng = Rng(seed());
    for mode in [FaultMode::Filler, FaultMode::InThread] {
        let mut servers = servers(3);
        let runtime = runtime(&servers, mode);
        let mut array = runtime.array::<u64>(ARRAY_BYTES / 8).unwrap();
        let (_, words) = shared(&mut array);
        let stats = || runtime.stats();
        update_amid(words, rng.next(), || {
            // A server dies at any moment of the work.
            thread::sleep(Duration::from_millis(200 + rng.below(400) as u64));
            let first = rng.below(3);
            servers[first].kill();
            wait_until("its pages are copied again", || {
                let store = stats().store;
                store.repaired_bytes > 0 && store.under_protected_bytes == 0
            });
            println!("{mode:?}: {}", stats());
            thread::sleep(Duration::from_millis(rng.below(200) as u64));
            let second = (first + 1 + rng.below(2)) % 3;
            servers[second].kill();
            // The survivor alone has everything, and takes writes.
            wait_until("the second death is noticed", || {
                stats().store.under_protected_bytes > 0
            });
            wait_for_writes(&runtime);
        });
        array.flush().unwrap();
        println!("{mode:?}: {}", stats());
        let stats = stats();
        assert_eq!((stats.pager.poisoned, stats.store.errors), (0, 0));
        assert!(stats.store.failovers > 0);
        array.close().unwrap();
    }
}

/// Servers die before, while and after pages get parity, one after the other.
#[test]
fn pages_with_parity_outlive_servers_that_are_killed() {
    let Some(_watchdog) = begin(300) else { return };
    let mut rng = Rng(seed());
    for mode in [FaultMode::Filler, FaultMode::InThread] {
        let mut servers = servers(6);
        let parity = Redundancy::Parity { data: 4, parity: 1 };
        let runtime = runtime_with(&servers, mode, parity);
        let mut array = runtime.array::<u64>(ARRAY_BYTES / 8).unwrap();
        let (_, words) = shared(&mut array);
        let stats = || runtime.stats().store;
        let kill = |server: &mut ServerProcess| {
            let repaired = stats().repaired_bytes;
            server.kill();
            wait_until("what was on the server is made again", || {
                let store = stats();
                store.repaired_bytes > repaired && store.under_protected_bytes == 0
            });
        };
        update_amid(words, rng.next(), || {
            wait_for_writes(&runtime);
            kill(&mut servers[rng.below(6)]);
        });
        // Nothing is written now.
        wait_until("pages get parity", || {
            stats().sealed_bytes > ARRAY_BYTES as u64 / 2
        });
        println!("{mode:?}: {}", runtime.stats());
        let sum = |words: &[AtomicU64]| (0..words.len()).fold(0, |sum, at| sum ^ get(words, at));
        let before = sum(words);
        let failovers = stats().failovers;
        let alive: Vec<usize> = (0..6)
            .filter(|&server| granted_bytes_if_alive(&runtime, &servers[server]).is_some())
            .collect();
        servers[alive[rng.below(alive.len())]].kill();
        assert_eq!(sum(words), before);
        assert!(stats().failovers > failovers);
        update_amid(words, rng.next(), || wait_for_writes(&runtime));
        array.flush().unwrap();
        println!("{mode:?}: {}", runtime.stats());
        let stats = runtime.stats();
        assert_eq!(
            (stats.pager.poisoned, stats.store.corrupt),
            (0, 0),
            "{stats}"
        );
        array.close().unwrap();
    }
}

/// A server that stands still is noticed by its silence alone, and takes part again afterwards.
#[test]
fn a_server_that_stalls_holds_nobody_up_for_long() {
    let Some(_watchdog) = begin(300) else { return };
    let servers = servers(3);
    let runtime = runtime(&servers, FaultMode::Filler);
    let mut array = runtime.array::<u64>(ARRAY_BYTES / 8).unwrap();
    let (_, words) = shared(&mut array);
    update_amid(words, seed(), || {
        thread::sleep(Duration::from_millis(200));
        servers[0].signal(Signal::SIGSTOP);
        wait_until("its pages are copied again", || {
            let store = runtime.stats().store;
            store.repaired_bytes > 0 && store.under_protected_bytes == 0
        });
        servers[0].signal(Signal::SIGCONT);
    });
    assert_unharmed(&runtime);
    array.close().unwrap();
}

/// Returns the bytes that a server has granted, by its own count.
fn granted_bytes(runtime: &Runtime, server: &ServerProcess) -> u64 {
    granted_bytes_if_alive(runtime, server).expect("the server lives")
}

/// Returns the bytes that a server has granted, unless the server was killed.
fn granted_bytes_if_alive(runtime: &Runtime, server: &ServerProcess) -> Option<u64> {
    let sessions = runtime.sessions().iter();
    let mut of_server = sessions.filter(|session| session.endpoint().to_string() == server.url);
    let session = of_server.next().expect("it is the runtime's");
    Some(session.stat().ok()?.granted_bytes)
}

/// Servers are added, emptied and ended while threads write: at the end none of the first ones is
/// left.
#[test]
fn a_program_moves_house_while_it_writes() {
    let Some(_watchdog) = begin(300) else { return };
    let mut rng = Rng(seed());
    for mode in [FaultMode::Filler, FaultMode::InThread] {
        for redundancy in [Redundancy::None, Redundancy::Copies(2)] {
            let mut first = servers(redundancy.copies());
            let second = servers(redundancy.copies());
            let runtime = runtime_with(&first, mode, redundancy);
            let mut array = runtime.array::<u64>(ARRAY_BYTES / 8).unwrap();
            let (_, words) = shared(&mut array);
            update_amid(words, rng.next(), || {
                wait_for_writes(&runtime);
                for (old, new) in first.iter_mut().zip(&second) {
                    runtime.add_server(&new.url).unwrap();
                    let report = runtime.drain_server(&old.url).unwrap();
                    assert!(report.moved_bytes > 0, "{report:?}");
                    assert_eq!(granted_bytes(&runtime, old), 0);
                    old.kill();
                }
                wait_for_writes(&runtime);
            });
            array.flush().unwrap();
            let stats = runtime.stats();
            println!("{mode:?}, {redundancy}: {stats}");
            let store = stats.store;
            // A handler without a channel hands its page over to a filler, and counts an error.
            let errors = match mode {
                FaultMode::Filler => store.errors,
                _ => 0,
            };
            assert_eq!((stats.pager.poisoned, errors, store.corrupt), (0, 0, 0));
            assert_eq!(store.draining_bytes, 0);
            array.close().unwrap();
        }
    }
}

/// The server ends before its timeout, since its client has moved everything away by itself.
#[test]
fn a_server_that_is_about_to_end_is_left_by_its_client_first() {
    let Some(_watchdog) = begin(300) else { return };
    let timeout = Duration::from_secs(60);
    let mut old = ServerProcess::start_draining(SERVING, Fabric::Tcp, 256 * MIB, timeout, timeout);
    let new = servers(1);
    let runtime = runtime_with(&new, FaultMode::Filler, Redundancy::None);
    runtime.add_server(&old.url).unwrap();
    let mut array = runtime.array::<u64>(ARRAY_BYTES / 8).unwrap();
    let (_, words) = shared(&mut array);
    update_amid(words, seed(), || {
        wait_for_writes(&runtime);
        assert!(granted_bytes(&runtime, &old) > 0);
        // Waits for the end of the process, which comes well before the timeout.
        old.stop();
        wait_for_writes(&runtime);
    });
    array.flush().unwrap();
    let stats = runtime.stats();
    let store = stats.store;
    let harm = (stats.pager.poisoned, store.errors, store.corrupt);
    assert_eq!(harm, (0, 0, 0), "{stats}");
    array.close().unwrap();
}

/// The server that was emptied was the first one, and keeps no names any more.
#[test]
fn names_are_kept_by_the_servers_that_are_left() {
    let Some(_watchdog) = begin(120) else { return };
    let mut servers = servers(2);
    let runtime = runtime_with(&servers, FaultMode::Filler, Redundancy::None);
    runtime.drain_server(&servers[0].url).unwrap();
    servers[0].kill();
    let named = |name: &str| runtime.array_with::<u64>(MIB, RegionOptions::new().name(name));
    // The end of the server is noticed after a while.
    let mut made = None;
    wait_until("the server that has ended is not asked any more", || {
        made = named("kept").ok();
        made.is_some()
    });
    let mut array = made.expect("waited for");
    array[7] = 7;
    array.close().unwrap();
    let array = runtime.open_array::<u64>("kept").unwrap();
    assert_eq!(array[7], 7);
    drop(array);
    runtime.remove("kept").unwrap();
}

/// A server is killed, started anew at its address, and added: the lost copies are made there.
#[test]
fn a_server_that_was_started_anew_is_a_new_one() {
    let Some(_watchdog) = begin(300) else { return };
    let mut servers = servers(2);
    let runtime = runtime(&servers, FaultMode::Filler);
    let mut array = runtime.array::<u64>(ARRAY_BYTES / 8).unwrap();
    let (_, words) = shared(&mut array);
    let lacking = || runtime.stats().store.under_protected_bytes;
    update_amid(words, seed(), || {
        wait_for_writes(&runtime);
        for server in &mut servers {
            server.kill();
            wait_until("its death is noticed", || lacking() > 0);
            server.start_again();
            runtime.add_server(&server.url).unwrap();
            wait_until("its copies are made again", || lacking() == 0);
        }
    });
    assert_unharmed(&runtime);
    assert_eq!(runtime.sessions().len(), 4);
    array.close().unwrap();
}

#[test]
fn copies_that_cannot_be_kept_are_refused() {
    let _watchdog = Watchdog::new(Duration::from_secs(60));
    let Some(_paging) = begin(60) else { return };
    let servers = servers(2);
    let runtime = runtime(&servers, FaultMode::Filler);
    let options = RegionOptions::new().redundancy(Redundancy::Copies(3));
    let error = runtime
        .array_with::<u64>(MIB, options)
        .map(drop)
        .unwrap_err();
    let is_few = |error: &CreateError| {
        matches!(
            error,
            CreateError::Store(StoreCreateError::TooFewServers { servers: 2, .. })
        )
    };
    assert!(is_few(&error), "{error}");
    // The runtime's copies are a default for regions without a name.
    let named = RegionOptions::new().name("kept");
    let error = runtime
        .array_with::<u64>(MIB, named.clone().redundancy(Redundancy::Copies(2)))
        .map(drop)
        .unwrap_err();
    assert!(error.to_string().contains("redundancy none"), "{error}");
    runtime
        .array_with::<u64>(MIB, named)
        .unwrap()
        .close()
        .unwrap();
    runtime.remove("kept").unwrap();
}
