//! Programs that read a named array, beside each other and beside one that writes it: real
//! processes, and real signals.
//!
//! The rule it keeps: a reader sees the version that it opened, bit by bit, or an error. The memory
//! of that version is free when the reader has gone, however it went.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::{env, io::Read, thread, time::Duration};

use common::{
    Fabric, ServerProcess, begin, builder, fabrics, over_fabrics, serve_if_asked,
    words::{assert_filled, fill, word},
};
use farpage::{
    ByteSize, CreateError, Endpoint, OpenError, RegionOptions, RemoteArray, Reserve, Runtime,
};
use farpage_fabric::{SessionOptions, Visit};
use farpage_store::{NamesError, OpenStoreError};
use farpage_testkit::{KIB, MIB, TestProcess, say, wait_until};
use nix::sys::signal::Signal;

const PAGE: usize = 16 * KIB;
const WORDS: usize = 2 * MIB / 8;
/// Budget of a program: less than half of the array.
const BUDGET: usize = 768 * KIB;
const LEASE: Duration = Duration::from_secs(2);

/// The test that becomes the server process of all tests.
const SERVING: &str = "eight_programs_read_versions_of_their_own_beside_a_writer";

/// Variables that tell a process its server, and its role.
const URL: &str = "FARPAGE_TEST_URL";
const ROLE: &str = "FARPAGE_TEST_ROLE";

fn server(fabric: Fabric) -> ServerProcess {
    ServerProcess::start_leasing(SERVING, fabric, 256 * MIB, LEASE)
}

fn runtime(url: &str) -> Runtime {
    let builder = builder(BUDGET, PAGE).server(url);
    builder.deadline(Duration::from_secs(5)).build().unwrap()
}

fn create(runtime: &Runtime) -> RemoteArray<u64> {
    let named = RegionOptions::new().name("x");
    runtime.array_with::<u64>(WORDS, named).unwrap()
}

/// Fills the array with the words of a version, and publishes it.
fn publish(array: &mut RemoteArray<u64>, version: u64) {
    fill(array, version);
    array.flush().unwrap();
}

/// Returns figures of a server: granted bytes, readers, and old versions that are read.
fn stat(url: &str) -> (u64, u64, u64) {
    let endpoint: Endpoint = url.parse().unwrap();
    let mut visit = Visit::connect(&endpoint, &SessionOptions::default()).unwrap();
    let stat = visit.stat().unwrap();
    (stat.granted_bytes, stat.readers, stat.old_versions)
}

/// Starts a process that reads. Returns it with the version that it prints.
fn reader(url: &str) -> (TestProcess, u64) {
    let mut reader = TestProcess::start(&[(URL, url), (ROLE, "reader")]);
    let version = reader.wait_for_line("reads ").parse().unwrap();
    (reader, version)
}

/// Reads or writes until standard input ends, if this process was started for a role. Returns true
/// if it was.
fn play_role() -> bool {
    let (Ok(url), Ok(role)) = (env::var(URL), env::var(ROLE)) else {
        return false;
    };
    let (runtime, over) = (runtime(&url), input_ended());
    match &*role {
        "reader" => {
            let array = runtime.open_array_to_read::<u64>("x").unwrap();
            let version = (1..100).find(|version| array[0] == word(0, *version));
            let version = version.expect("a version that was published");
            say(&format!("reads {version}"));
            while !over.is_finished() {
                assert_filled(&array, version);
            }
            assert_filled(&array, version);
            array.close().unwrap();
        }
        // A role whose lease ends while the process is stopped.
        "sleeper" => {
            let array = runtime.open_array_to_read::<u64>("x").unwrap();
            assert_filled(&array, 1);
            say("reads 1");
            let pages = || (0..WORDS).step_by(PAGE / 8);
            let lost = (pages().cycle())
                .find_map(|at| {
                    let page = at..at + PAGE / 8;
                    let brought = array.prefetch_now(page.clone());
                    if brought.is_ok() {
                        for at in page {
                            assert_eq!(array[at], word(at, 1), "word {at}");
                        }
                    }
                    brought.err()
                })
                .unwrap();
            say(&format!("lost {lost}"));
        }
        "writer" => {
            let mut array = create(&runtime);
            publish(&mut array, 1);
            say("published");
            // Never published: the process is killed on the way.
            for version in 2.. {
                fill(&mut array, version);
            }
        }
        other => panic!("no role: {other}"),
    }
    true
}

fn input_ended() -> thread::JoinHandle<()> {
    thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
    })
}

#[test]
fn eight_programs_read_versions_of_their_own_beside_a_writer() {
    if serve_if_asked() || play_role() {
        return;
    }
    let Some(_watchdog) = begin(240) else { return };
    for fabric in fabrics() {
        let server = server(fabric);
        let runtime = runtime(&server.url);
        let mut array = create(&runtime);
        let before = stat(&server.url).0;
        let mut readers = Vec::new();
        for version in 1..=4 {
            publish(&mut array, version);
            for _ in 0..2 {
                let (reader, reads) = reader(&server.url);
                assert_eq!(reads, version);
                readers.push(reader);
            }
        }
        // Two more versions while all readers read.
        for version in 5..=6 {
            publish(&mut array, version);
        }
        assert_eq!(
            (stat(&server.url).1, stat(&server.url).2),
            (8, 4),
            "{fabric}"
        );
        let listed = runtime.names().unwrap();
        assert_eq!((listed[0].readers, listed[0].old_versions), (8, 4));
        assert!(listed[0].in_use);
        // Some readers are killed, and others close. Their versions' memory is the server's again.
        for reader in readers.drain(..3) {
            reader.signal(Signal::SIGKILL);
        }
        wait_until("the dead are noticed", || stat(&server.url).1 == 5);
        publish(&mut array, 7);
        for reader in readers {
            reader.must_pass(Duration::from_secs(60));
        }
        for version in 8..=11 {
            publish(&mut array, version);
        }
        let (after, readers, old_versions) = stat(&server.url);
        assert_eq!((readers, old_versions), (0, 0));
        // The memory of two versions: each is written beside the one before.
        assert!(
            after <= 2 * before,
            "{fabric}: {before} bytes before, {after} after"
        );
        assert_filled(&array, 11);
    }
}

#[test]
fn readers_outlive_their_writer_and_a_name_that_is_removed_or_replaced() {
    if play_role() {
        return;
    }
    let Some(_watchdog) = begin(240) else { return };
    for fabric in fabrics() {
        let server = server(fabric);
        let environment = [(URL, &*server.url), (ROLE, "writer")];
        let mut writer = TestProcess::start(&environment);
        writer.wait_for_line("published");
        let readers = [(); 2].map(|()| runtime(&server.url));
        let [first, second] =
            (readers.each_ref()).map(|it| it.open_array_to_read::<u64>("x").unwrap());
        assert_filled(&first, 1);
        // 1. The writer dies in the middle of its writes.
        writer.signal(Signal::SIGKILL);
        writer.wait(Duration::from_secs(10));
        assert_filled(&first, 1);
        // 2. Another program writes while the readers read.
        let runtime = runtime(&server.url);
        let mut array = None;
        wait_until("the dead writer's name is free", || {
            let opened = runtime.open_array::<u64>("x");
            let in_use = matches!(&opened, Err(OpenError::Store(OpenStoreError::InUse { .. })));
            assert!(in_use || opened.is_ok(), "{opened:?}");
            array = opened.ok();
            array.is_some()
        });
        let mut array = array.unwrap();
        for version in 20..24 {
            publish(&mut array, version);
            assert_filled(&second, 1);
        }
        let newest = runtime.open_array_to_read::<u64>("x").unwrap();
        array.close().unwrap();
        // 3. Another writer, which does not know the readers' slots.
        let mut array = runtime.open_array::<u64>("x").unwrap();
        for version in 30..33 {
            publish(&mut array, version);
        }
        assert_filled(&first, 1);
        assert_filled(&newest, 23);
        // A region that is open for writing is not removed.
        let refused = readers[0].remove("x");
        assert!(
            matches!(refused, Err(NamesError::InUse { .. })),
            "{refused:?}"
        );
        array.close().unwrap();
        // 4. The region is replaced, and removed, while it is read.
        let named = RegionOptions::new().name("x").replace(true);
        let mut other = runtime.array_with::<u64>(WORDS / 2, named).unwrap();
        other.fill(5);
        other.close().unwrap();
        assert_filled(&second, 1);
        readers[1].remove("x").unwrap();
        assert_filled(&first, 1);
        assert_filled(&newest, 23);
        let gone = runtime.open_array_to_read::<u64>("x").unwrap_err();
        assert!(
            matches!(gone, OpenError::Store(OpenStoreError::NotFound { .. })),
            "{gone}"
        );
        assert_eq!(stat(&server.url).1, 3);
        drop((first, second, newest));
        wait_until("all of it is free", || stat(&server.url) == (0, 0, 0));
    }
}

#[test]
fn a_reader_that_comes_back_after_its_lease_gets_an_error_and_no_other_bytes() {
    if play_role() {
        return;
    }
    let Some(_watchdog) = begin(240) else { return };
    for fabric in fabrics() {
        let server = server(fabric);
        let runtime = runtime(&server.url);
        let mut array = create(&runtime);
        publish(&mut array, 1);
        let environment = [(URL, &*server.url), (ROLE, "sleeper")];
        let mut sleeper = TestProcess::start(&environment);
        sleeper.wait_for_line("reads ");
        sleeper.signal(Signal::SIGSTOP);
        wait_until("its lease has ended", || stat(&server.url).1 == 0);
        // The sleeper's slots are used again, by other bytes.
        for version in 2..6 {
            publish(&mut array, version);
        }
        sleeper.signal(Signal::SIGCONT);
        println!("{fabric}: {}", sleeper.wait_for_line("lost "));
        sleeper.must_pass(Duration::from_secs(30));
    }
}

#[test]
fn a_reader_needs_no_reservation_and_a_full_server_names_the_readers_in_the_way() {
    over_fabrics(120, 2 * 2 * MIB + 2 * MIB, |memory| {
        // Room for little more than the two reserved versions.
        let runtime = memory.runtime(BUDGET, PAGE);
        let mut array = create(&runtime);
        publish(&mut array, 1);
        // A second array of this size does not fit, but a reader does.
        let other = RegionOptions::new().name("y").reserve(Reserve::Full);
        let refused = runtime.array_with::<u64>(WORDS, other).unwrap_err();
        assert!(matches!(refused, CreateError::Store(_)), "{refused}");
        let reader = runtime.open_array_to_read::<u64>("x").unwrap();
        let mut refused = None;
        for version in 2..6 {
            fill(&mut array, version);
            if let Err(error) = array.flush() {
                refused = Some(error.to_string());
                break;
            }
        }
        let refused = refused.expect("three versions do not fit");
        assert!(
            refused.contains("1 reader of version") && refused.contains("`x`"),
            "{refused}"
        );
        assert_filled(&reader, 1);
        reader.close().unwrap();
        wait_until("there is room again", || array.flush().is_ok());
        assert!(array.len() == WORDS && ByteSize(array.region().len() as u64) == ByteSize::mib(2));
    });
}
