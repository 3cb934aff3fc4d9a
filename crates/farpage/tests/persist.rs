//! Named regions on servers that keep them on a disk: restarts, kills, several servers, damage.
//!
//! The rule it keeps: after a restart a program reads a version that was published, whole, or gets
//! an error.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::{env, fs, os::unix::fs::FileExt, path::PathBuf, thread, time::Duration};

use common::{
    Fabric, ServerProcess, begin, builder, fabrics, serve_if_asked,
    words::{assert_filled, fill, word},
};
use farpage::{RegionOptions, RemoteArray, Reserve, Runtime};
use farpage_fabric::{Durability, Persistence};
use farpage_memserver::{RunningServer, Server};
use farpage_testkit::{KIB, MIB, Rng, seed, socket_in, tcp};
use tempfile::TempDir;

const PAGE: usize = 16 * KIB;
const PAGE_WORDS: usize = PAGE / 8;

/// The test that becomes the server process of all tests.
const SERVING: &str = "a_killed_server_has_the_last_flushed_version_when_it_is_started_again";

/// A server in this process that keeps names in a directory, and can be started anew.
struct Kept {
    server: Option<RunningServer>,
    url: String,
    directory: TempDir,
    _socket: TempDir,
    when: Persistence,
    /// Memory that the server holds, if it spills the rest.
    memory: Option<usize>,
}

impl Kept {
    fn start(fabric: Fabric, when: Persistence) -> Self {
        Self::start_tiered(fabric, when, None)
    }

    fn start_tiered(fabric: Fabric, when: Persistence, memory: Option<usize>) -> Self {
        let socket = tempfile::tempdir().unwrap();
        let url = match fabric {
            Fabric::Shm => socket_in(&socket).to_string(),
            _ => tcp().to_string(),
        };
        let mut kept = Self {
            server: None,
            url,
            directory: tempfile::tempdir().unwrap(),
            _socket: socket,
            when,
            memory,
        };
        kept.start_again();
        kept
    }

    /// Starts the server at the address where it was.
    fn start_again(&mut self) {
        self.server = None;
        let mut server = Server::builder()
            .listen(self.url.parse().unwrap())
            .capacity(256 * MIB as u64)
            .grace(Duration::ZERO)
            .persist(self.directory.path().to_owned(), self.when);
        if let Some(bytes) = self.memory {
            server = server.memory(bytes as u64).spill(env::temp_dir());
        }
        let server = server.start().unwrap();
        self.url = server.endpoints()[0].to_string();
        self.server = Some(server);
    }

    fn written_bytes(&self) -> u64 {
        self.server.as_ref().unwrap().stat().persist.written_bytes
    }

    fn files(&self, prefix: &str) -> Vec<PathBuf> {
        let files = fs::read_dir(self.directory.path()).unwrap();
        let files = files.map(|entry| entry.unwrap().path());
        let named = |path: &PathBuf| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            name.starts_with(prefix)
        };
        files.filter(named).collect()
    }
}

fn runtime(urls: &[&str], budget_bytes: usize) -> Runtime {
    let builder = builder(budget_bytes, PAGE).deadline(Duration::from_secs(5));
    let servers = urls
        .iter()
        .fold(builder, |builder, url| builder.server(*url));
    servers.build().unwrap()
}

fn named(runtime: &Runtime, name: &str, bytes: usize) -> RemoteArray<u64> {
    let options = RegionOptions::new().name(name);
    runtime.array_with(bytes / 8, options).unwrap()
}

#[test]
fn a_region_is_there_after_a_restart_with_its_shape_and_is_written_and_read_as_before() {
    let Some(_watchdog) = begin(120) else { return };
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        for when in [Persistence::AtOnce, Persistence::Soon] {
            let mut kept = Kept::start(fabric, when);
            {
                // Less than the array, so that pages are written back and read again.
                let runtime = runtime(&[&kept.url], MIB);
                let options = RegionOptions::new().name("field").shape([4, 64 * 1024]);
                let mut array = runtime.array_with::<u64>(256 * 1024, options).unwrap();
                fill(&mut array, 1);
                array.flush().unwrap();
                fill(&mut array[..1000], 2);
                array.close().unwrap();
            }
            for salt in 2..5 {
                kept.start_again();
                let runtime = runtime(&[&kept.url], MIB);
                let listed = runtime.sessions()[0].names().unwrap();
                assert_eq!(listed[0].durability, Durability::Disk);
                let reader = runtime.open_array_to_read::<u64>("field").unwrap();
                let mut array = runtime.open_array::<u64>("field").unwrap();
                assert_eq!(array.shape(), [4, 64 * 1024]);
                for array in [&array, &reader] {
                    assert_filled(&array[..1000], salt);
                    assert_eq!(array[1000..], reader[1000..]);
                    assert_eq!(array[1000], word(1000, 1));
                }
                fill(&mut array[..1000], salt + 1);
                array.flush().unwrap();
                assert_filled(&reader[..1000], salt);
                array.close().unwrap();
            }
            let runtime = runtime(&[&kept.url], MIB);
            runtime.remove("field").unwrap();
            drop(runtime);
            assert_eq!(kept.files("extent-"), [""; 0].map(PathBuf::from));
            kept.start_again();
            let runtime = self::runtime(&[&kept.url], MIB);
            assert_eq!(runtime.names().unwrap(), []);
        }
    }
}

#[test]
fn a_server_that_lends_more_than_its_memory_has_its_names_again() {
    let Some(_watchdog) = begin(120) else { return };
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        let mut kept = Kept::start_tiered(fabric, Persistence::AtOnce, Some(16 * MIB));
        let bytes = 48 * MIB;
        for salt in 0..2 {
            let runtime = runtime(&[&kept.url], 4 * MIB);
            let mut array = match salt {
                0 => named(&runtime, "large", bytes),
                _ => runtime.open_array::<u64>("large").unwrap(),
            };
            fill(&mut array, salt);
            array.close().unwrap();
            drop(runtime);
            kept.start_again();
            let runtime = self::runtime(&[&kept.url], 4 * MIB);
            let array = runtime.open_array_to_read::<u64>("large").unwrap();
            assert_filled(&array, salt);
        }
    }
}

#[test]
fn a_flush_writes_little_more_than_what_changed() {
    let Some(_watchdog) = begin(60) else { return };
    let kept = Kept::start(Fabric::Shm, Persistence::AtOnce);
    let runtime = runtime(&[&kept.url], 96 * MIB);
    let mut array = named(&runtime, "field", 64 * MIB);
    fill(&mut array, 0);
    array.flush().unwrap();
    let mut rng = Rng(seed());
    for _ in 0..5 {
        let before = kept.written_bytes();
        let mut pages: Vec<_> = (0..41).map(|_| rng.below(64 * MIB / PAGE)).collect();
        pages.sort_unstable();
        pages.dedup();
        for page in &pages {
            array[page * PAGE_WORDS] ^= 1;
        }
        array.flush().unwrap();
        let (changed, written) = (pages.len() * PAGE, kept.written_bytes() - before);
        // The map of 64 MiB in pages of 16 KiB has 128 KiB.
        assert!(
            written < changed as u64 * 12 / 10 + 3 * 4096,
            "{written} bytes for {changed}"
        );
    }
    array.close().unwrap();
}

#[test]
fn several_servers_have_their_parts_before_the_name_is_bound() {
    let Some(_watchdog) = begin(120) else { return };
    let mut kept = [(); 3].map(|()| Kept::start(Fabric::Tcp, Persistence::Soon));
    for salt in 0..4 {
        let urls = kept.each_ref().map(|kept| kept.url.clone());
        let urls = urls.each_ref().map(String::as_str);
        let runtime = runtime(&urls, MIB);
        let mut array = match salt {
            0 => named(&runtime, "wide", 4 * MIB),
            _ => {
                let array = runtime.open_array::<u64>("wide").unwrap();
                assert_filled(&array, salt - 1);
                array
            }
        };
        fill(&mut array, salt);
        array.flush().unwrap();
        // All is durable now, although these servers may write later.
        for session in runtime.sessions() {
            assert_eq!(session.names().unwrap()[0].durability, Durability::Disk);
        }
        array.close().unwrap();
        drop(runtime);
        kept.iter_mut().for_each(Kept::start_again);
    }
}

#[test]
fn what_a_region_replaces_is_there_until_its_first_server_binds_the_name() {
    let Some(_watchdog) = begin(120) else { return };
    let mut kept = [(); 2].map(|()| Kept::start(Fabric::Tcp, Persistence::AtOnce));
    let urls = kept.each_ref().map(|kept| kept.url.clone());
    let connect = || runtime(&[&urls[0], &urls[1]], MIB);
    {
        let runtime = connect();
        let mut array = named(&runtime, "wide", 4 * MIB);
        fill(&mut array, 0);
        array.close().unwrap();
    }
    // The first server cannot make the name's file. The other one has bound its part by then.
    let file = kept[0].files("name-").remove(0);
    let name = file.file_name().unwrap().to_str().unwrap();
    let obstacle = file.with_file_name(format!("new-{name}"));
    fs::create_dir(&obstacle).unwrap();
    {
        let runtime = connect();
        let options = RegionOptions::new().name("wide").replace(true);
        let mut array = runtime.array_with::<u64>(MIB / 2, options).unwrap();
        fill(&mut array, 1);
        array.flush().unwrap_err();
    }
    fs::remove_dir(&obstacle).unwrap();
    for _ in 0..2 {
        let runtime = connect();
        let array = runtime.open_array::<u64>("wide").unwrap();
        assert_filled(&array, 0);
        drop((array, runtime));
        kept.iter_mut().for_each(Kept::start_again);
    }
    // Once the region is bound, what it replaces is free on both.
    let runtime = connect();
    let options = RegionOptions::new().name("wide").replace(true);
    let mut array = runtime.array_with::<u64>(1000, options).unwrap();
    fill(&mut array, 2);
    array.close().unwrap();
    let bytes = |kept: &Kept| kept.server.as_ref().unwrap().stat().granted_bytes;
    assert!(kept.iter().map(bytes).sum::<u64>() < 4 * MIB as u64);
}

#[test]
fn a_server_that_is_added_has_its_part_on_its_disk_as_well() {
    let Some(_watchdog) = begin(60) else { return };
    let mut kept = [(); 2].map(|()| Kept::start(Fabric::Tcp, Persistence::AtOnce));
    let urls = kept.each_ref().map(|kept| kept.url.clone());
    {
        let runtime = runtime(&[&urls[0]], MIB);
        let options = RegionOptions::new().name("wide").reserve(Reserve::OnDemand);
        let mut array = runtime.array_with::<u64>(MIB, options).unwrap();
        fill(&mut array[..1000], 0);
        array.flush().unwrap();
        runtime.add_server(&urls[1]).unwrap();
        fill(&mut array, 1);
        array.close().unwrap();
    }
    kept.iter_mut().for_each(Kept::start_again);
    let runtime = runtime(&[&urls[0], &urls[1]], MIB);
    assert_filled(&runtime.open_array::<u64>("wide").unwrap(), 1);
}

#[test]
fn servers_with_and_without_a_disk_do_not_share_a_name() {
    let Some(_watchdog) = begin(60) else { return };
    let kept = Kept::start(Fabric::Tcp, Persistence::AtOnce);
    let without = farpage_testkit::serve_tcp(64 * MIB);
    let runtime = runtime(&[&kept.url, &without.1], MIB);
    let create = || runtime.array_with::<u64>(1000, RegionOptions::new().name("field"));
    let mut errors = vec![create().map(drop).unwrap_err().to_string()];
    // A name from before the second server came, and a server that comes while the name is open.
    let alone = self::runtime(&[&kept.url], MIB);
    let array = named(&alone, "field", MIB);
    array.flush().unwrap();
    alone.add_server(&without.1).unwrap();
    assert_eq!(array[0], 0);
    array.flush().unwrap();
    array.close().unwrap();
    drop(alone);
    errors.push(
        runtime
            .open_array::<u64>("field")
            .map(drop)
            .unwrap_err()
            .to_string(),
    );
    for error in errors {
        for part in [&kept.url, &without.1, "--persist"] {
            assert!(error.contains(part), "{error}");
        }
    }
    runtime.open_array_to_read::<u64>("field").unwrap();
}

#[test]
fn changed_bytes_on_the_disk_are_an_error_and_never_data() {
    let Some(_watchdog) = begin(60) else { return };
    let mut kept = Kept::start(Fabric::Tcp, Persistence::AtOnce);
    {
        let runtime = runtime(&[&kept.url], 4 * MIB);
        let mut array = named(&runtime, "field", MIB);
        fill(&mut array, 0);
        array.close().unwrap();
    }
    kept.server = None;
    let file = kept.files("extent-").remove(0);
    let bytes = fs::read(&file).unwrap();
    let at = bytes
        .windows(8)
        .position(|it| it == word(5, 0).to_le_bytes());
    let file = fs::OpenOptions::new().write(true).open(file).unwrap();
    file.write_all_at(&[!word(5, 0) as u8], at.unwrap() as u64)
        .unwrap();
    kept.start_again();
    let runtime = runtime(&[&kept.url], 4 * MIB);
    let array = runtime.open_array_to_read::<u64>("field").unwrap();
    let error = array.prefetch_now(..1).unwrap_err().to_string();
    assert!(error.contains("hash"), "{error}");
    assert_filled_from(&array, PAGE_WORDS, 0);
}

/// Asserts that the words from `first` on are filled.
fn assert_filled_from(words: &[u64], first: usize, salt: u64) {
    for (at, &seen) in words.iter().enumerate().skip(first) {
        assert_eq!(seen, word(at, salt), "word {at}");
    }
}

#[test]
fn one_directory_is_one_servers() {
    let kept = Kept::start(Fabric::Tcp, Persistence::AtOnce);
    let other = || {
        let server = Server::builder().listen(tcp());
        server
            .persist(kept.directory.path().to_owned(), Persistence::AtOnce)
            .start()
    };
    let error = other().map(drop).unwrap_err().to_string();
    assert!(error.contains("another server uses"), "{error}");
}

/// Number of kills of one test; `FARPAGE_TEST_KILLS` replaces it.
fn kills() -> usize {
    env::var("FARPAGE_TEST_KILLS").map_or(6, |kills| kills.parse().unwrap())
}

/// Kills servers at random moments, under a program that publishes one version after the other.
fn survives_kills(fabric: Fabric, servers: usize, when: Persistence) {
    let directories = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let start = |directory: &TempDir| {
        let place = (directory.path(), when);
        ServerProcess::start_persisting(SERVING, fabric, 64 * MIB, place)
    };
    let mut servers: Vec<_> = directories[..servers].iter().map(start).collect();
    let mut rng = Rng(seed());
    // Versions that may be found: the numbers of words, by page.
    let mut possible: Vec<Vec<u64>> = Vec::new();
    for kill in 0..kills() {
        let urls: Vec<_> = servers.iter().map(|server| server.url.clone()).collect();
        let urls: Vec<_> = urls.iter().map(String::as_str).collect();
        let runtime = runtime(&urls, 16 * MIB);
        let pages = 2 * MIB / PAGE;
        let mut array = match possible.is_empty() {
            true => named(&runtime, "field", 2 * MIB),
            false => runtime.open_array::<u64>("field").unwrap(),
        };
        let found: Vec<u64> = (0..pages).map(|page| array[page * PAGE_WORDS]).collect();
        assert_whole(&array, &found);
        if !possible.is_empty() {
            assert!(
                possible.contains(&found),
                "kill {kill}: no version that was published"
            );
        }
        let mut version = found;
        // The first version is published undisturbed.
        if possible.is_empty() {
            array.flush().unwrap();
        }
        possible = vec![version.clone()];
        let (delay, victim) = (rng.below(60_000) as u64, rng.below(servers.len()));
        let killer = thread::spawn(move || {
            let mut servers = servers;
            thread::sleep(Duration::from_micros(delay));
            servers[victim].kill();
            servers
        });
        loop {
            for _ in 0..1 + rng.below(30) {
                let page = rng.below(pages);
                version[page] += 1;
                array[page * PAGE_WORDS..][..PAGE_WORDS].fill(version[page]);
            }
            possible.push(version.clone());
            match array.flush() {
                // Sync: nothing older may be found from now on.
                Ok(()) if when == Persistence::AtOnce => {
                    possible.drain(..possible.len() - 1);
                }
                Ok(()) => {}
                Err(_) => break,
            }
        }
        servers = killer.join().unwrap();
        drop(array);
        drop(runtime);
        // One server or all: what a machine's power cut would end.
        if rng.below(2) == 0 {
            servers
                .iter_mut()
                .enumerate()
                .filter(|it| it.0 != victim)
                .for_each(|it| it.1.kill());
            servers.iter_mut().for_each(ServerProcess::start_again);
        } else {
            servers[victim].start_again();
        }
    }
}

/// Asserts that each page has one number all over.
fn assert_whole(words: &[u64], pages: &[u64]) {
    for (page, words) in words.chunks(PAGE_WORDS).enumerate() {
        assert!(
            words.iter().all(|word| *word == pages[page]),
            "page {page} is torn"
        );
    }
}

#[test]
fn a_killed_server_has_the_last_flushed_version_when_it_is_started_again() {
    if serve_if_asked() {
        return;
    }
    let Some(_watchdog) = begin(60 + 10 * kills() as u64) else {
        return;
    };
    for fabric in fabrics() {
        survives_kills(fabric, 1, Persistence::AtOnce);
    }
}

#[test]
fn one_of_two_killed_servers_leaves_no_torn_version() {
    let Some(_watchdog) = begin(60 + 10 * kills() as u64) else {
        return;
    };
    survives_kills(Fabric::Tcp, 2, Persistence::AtOnce);
}

#[test]
fn a_killed_server_that_writes_later_has_a_whole_version() {
    let Some(_watchdog) = begin(60 + 10 * kills() as u64) else {
        return;
    };
    survives_kills(Fabric::Tcp, 1, Persistence::Soon);
}

#[test]
fn a_program_that_has_a_name_open_across_a_restart_gets_errors() {
    let Some(_watchdog) = begin(60) else { return };
    let mut kept = Kept::start(Fabric::Tcp, Persistence::AtOnce);
    let runtime = runtime(&[&kept.url], 4 * MIB);
    let mut array = named(&runtime, "field", MIB);
    fill(&mut array, 0);
    array.flush().unwrap();
    kept.start_again();
    array[0] += 1;
    array.flush().unwrap_err();
    drop(array);
    // The name is nobody's.
    let again = self::runtime(&[&kept.url], 4 * MIB);
    assert_filled(&again.open_array::<u64>("field").unwrap(), 0);
}
