//! Named arrays with copies on servers that are real processes, killed and started again.
//!
//! The rule it keeps: a program that opens the name finds the last flushed version, or an error that
//! says which servers are missing, and never an older version.

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
fn a_server_that_was_started_anew_at_its_address_has_no_say_and_takes_part_again() {
    let Some(_watchdog) = begin(300) else { return };
    let mut servers = servers(3);
    create(&servers);
    servers[0].kill();
    servers[0].start_again();
    write_next(&runtime(&servers), 1);
    // The new one has copies and a vote by now.
    servers[1].kill();
    let left = [&servers[0], &servers[2]];
    write_next(&runtime(left), 2);
    servers[1].start_again();
    write_next(&runtime(&servers), 3);
}

#[test]
fn the_only_server_that_is_left_of_two_is_read_and_written_once_it_was_adopted() {
    let Some(_watchdog) = begin(300) else { return };
    let mut servers = servers(2);
    create(&servers);
    servers[0].kill();
    let runtime = runtime(&servers[1..]);
    let error = runtime.open_array::<u64>(NAME).map(drop).unwrap_err();
    assert!(error.to_string().contains("Runtime::adopt"), "{error}");
    assert_version(&runtime.open_array_to_read::<u64>(NAME).unwrap(), 1);
    runtime.adopt(NAME).unwrap();
    write_next(&runtime, 1);
    write_next(&runtime, 2);
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
