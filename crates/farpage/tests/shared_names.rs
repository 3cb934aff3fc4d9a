//! Named arrays with copies on servers that are real processes, killed and started again.
//!
//! The rule it keeps: a program that opens the name finds the last flushed version, or an error
//! that says which servers are missing, and never an older version.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::time::Duration;

use common::{Fabric, ServerProcess, begin, builder, serve_if_asked};
use farpage::{Redundancy, RegionOptions, RemoteArray, Runtime};
use farpage_fabric::Persistence;
use farpage_testkit::{KIB, MIB, mix};
use tempfile::TempDir;

const PAGE_BYTES: usize = 16 * KIB;
const WORDS: usize = MIB / 8;
const NAME: &str = "field";

/// The test that becomes the server process of all tests.
const SERVING: &str = "a_server_that_is_killed_leaves_the_array_to_be_read_and_written";

fn servers(count: usize) -> Vec<ServerProcess> {
    let start = |_| ServerProcess::start(SERVING, Fabric::Tcp, 64 * MIB);
    (0..count).map(start).collect()
}

fn runtime<'a>(servers: impl IntoIterator<Item = &'a ServerProcess>) -> Runtime {
    let builder = builder(MIB / 4, PAGE_BYTES).deadline(Duration::from_secs(10));
    let builder = builder.redundancy(Redundancy::Copies(2));
    let servers = servers.into_iter();
    let builder = servers.fold(builder, |builder, server| builder.server(&server.url));
    builder.build().unwrap()
}

fn fill(array: &mut RemoteArray<u64>, version: u64) {
    for (at, word) in array.iter_mut().enumerate() {
        *word = mix(version << 32 | at as u64);
    }
}

fn assert_version(array: &[u64], version: u64) {
    let wrong = (0..WORDS).find(|at| array[*at] != mix(version << 32 | *at as u64));
    assert_eq!(wrong, None, "a word is not of version {version}");
}

/// Makes the array with version 1.
fn create(servers: &[ServerProcess]) {
    let runtime = runtime(servers);
    let options = RegionOptions::new().name(NAME);
    let mut array = runtime.array_with::<u64>(WORDS, options).unwrap();
    fill(&mut array, 1);
    array.close().unwrap();
}

/// Opens the array, which is of one version, and writes the next.
fn write_next(runtime: &Runtime, version: u64) {
    let mut array = runtime.open_array::<u64>(NAME).unwrap();
    assert_version(&array, version);
    fill(&mut array, version + 1);
    array.close().unwrap();
}

#[test]
fn a_server_that_is_killed_leaves_the_array_to_be_read_and_written() {
    if serve_if_asked() {
        return;
    }
    let Some(_watchdog) = begin(300) else { return };
    for dead in 0..3 {
        let mut servers = servers(3);
        create(&servers);
        // One dies while the array is open, and flushes go on.
        let runtime_of_three = runtime(&servers);
        let mut array = runtime_of_three.open_array::<u64>(NAME).unwrap();
        servers[dead].kill();
        fill(&mut array, 2);
        array.flush().unwrap();
        assert_version(&array, 2);
        array.close().unwrap();
        drop(runtime_of_three);
        servers.remove(dead);
        let runtime = runtime(&servers);
        let array = runtime.open_array_to_read::<u64>(NAME).unwrap();
        assert_version(&array, 2);
        write_next(&runtime, 2);
        assert_version(&array, 2);
        drop(array);
        write_next(&runtime, 3);
    }
}

#[test]
fn a_server_that_was_started_anew_at_its_address_has_no_vote() {
    let Some(_watchdog) = begin(300) else { return };
    let mut servers = servers(3);
    create(&servers);
    servers[0].kill();
    servers[0].start_again();
    write_next(&runtime(&servers), 1);
    write_next(&runtime(&servers[1..]), 2);
    // It makes no majority with one of the two.
    servers[1].kill();
    for left in [&servers[..], &servers[2..]] {
        let runtime = runtime(left.iter().filter(|it| it.url != servers[1].url));
        let error = runtime.open_array::<u64>(NAME).map(drop).unwrap_err();
        assert!(error.to_string().contains("2 are needed"), "{error}");
    }
}

#[test]
fn the_only_server_that_is_left_of_two_is_read_and_copied_to_a_new_name() {
    let Some(_watchdog) = begin(300) else { return };
    let mut servers = servers(2);
    create(&servers);
    servers[0].kill();
    let runtime = runtime(&servers[1..]);
    let error = runtime.open_array::<u64>(NAME).map(drop).unwrap_err();
    assert!(error.to_string().contains("open it for reading"), "{error}");
    let old = runtime.open_array_to_read::<u64>(NAME).unwrap();
    assert_version(&old, 1);
    let options = RegionOptions::new()
        .name("copy")
        .redundancy(Redundancy::None);
    let mut new = runtime.array_with::<u64>(WORDS, options).unwrap();
    new.copy_from_slice(&old);
    new.close().unwrap();
    assert_version(&runtime.open_array_to_read::<u64>("copy").unwrap(), 1);
}

fn persisting(directories: &[TempDir]) -> Vec<ServerProcess> {
    let start = |directory: &TempDir| {
        let place = (directory.path(), Persistence::AtOnce);
        ServerProcess::start_persisting(SERVING, Fabric::Tcp, 64 * MIB, place)
    };
    directories.iter().map(start).collect()
}

#[test]
fn all_servers_that_are_killed_at_once_have_the_last_flushed_version_on_their_disks() {
    let Some(_watchdog) = begin(300) else { return };
    let directories = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let mut servers = persisting(&directories);
    create(&servers);
    for version in 1..4 {
        let runtime = runtime(&servers);
        let mut array = runtime.open_array::<u64>(NAME).unwrap();
        assert_version(&array, version);
        fill(&mut array, version + 1);
        array.flush().unwrap();
        // Written back and not flushed: nothing of it may show.
        fill(&mut array, 99);
        servers.iter_mut().for_each(ServerProcess::kill);
        drop((array, runtime));
        servers.iter_mut().for_each(ServerProcess::start_again);
    }
    // Each disk has what is needed beside another one.
    for dead in 0..3 {
        servers[dead].kill();
        let left = servers.iter().enumerate().filter(|(at, _)| *at != dead);
        let runtime = runtime(left.map(|(_, server)| server));
        assert_version(&runtime.open_array_to_read::<u64>(NAME).unwrap(), 4);
        drop(runtime);
        servers[dead].start_again();
    }
}

#[test]
fn a_server_that_comes_back_with_an_old_version_on_its_disk_does_not_win() {
    let Some(_watchdog) = begin(300) else { return };
    let directories = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let mut servers = persisting(&directories);
    create(&servers);
    servers[0].kill();
    write_next(&runtime(&servers[1..]), 1);
    write_next(&runtime(&servers[1..]), 2);
    servers[0].start_again();
    // Whoever is missing: the last version, or an error.
    servers[1].kill();
    let left = runtime([&servers[0], &servers[2]]);
    for opened in [left.open_array::<u64>(NAME), left.open_array_to_read(NAME)] {
        match opened {
            Ok(array) => assert_version(&array, 3),
            Err(error) => assert!(error.to_string().contains(NAME), "{error}"),
        }
    }
    drop(left);
    servers[1].start_again();
    write_next(&runtime(&servers), 3);
}

/// Pages that no flush has changed since their copies were made again are on the disks, too.
#[test]
fn copies_that_were_made_again_are_on_the_disks_with_the_next_flush() {
    let Some(_watchdog) = begin(300) else { return };
    let directories = [(); 5].map(|()| tempfile::tempdir().unwrap());
    let mut servers = persisting(&directories);
    create(&servers);
    let of_all = runtime(&servers);
    let mut array = of_all.open_array::<u64>(NAME).unwrap();
    servers[0].kill();
    // One page, so that the runtime hears of the death.
    array[0] = !array[0];
    array[0] = !array[0];
    let under_protected = || of_all.stats().store.under_protected_bytes;
    while under_protected() == 0 {
        array.flush().unwrap();
        array[0] = array[0].wrapping_add(1);
    }
    while under_protected() > 0 {
        std::thread::yield_now();
    }
    array[0] = mix(1 << 32);
    array.flush().unwrap();
    servers[1..].iter_mut().for_each(ServerProcess::kill);
    drop((array, of_all));
    servers.remove(0);
    servers.iter_mut().for_each(ServerProcess::start_again);
    // Each disk has what the others lack.
    for away in 0..4 {
        let left = servers.iter().enumerate().filter(|(at, _)| *at != away);
        let runtime = runtime(left.map(|(_, server)| server));
        assert_version(&runtime.open_array_to_read::<u64>(NAME).unwrap(), 1);
    }
}
