//! A server that is replaced by its next process, and what its clients notice.
#![allow(clippy::unwrap_used, reason = "a test that fails here says where")]

mod common;
#[path = "restart/managed.rs"]
mod managed;
#[path = "restart/slow.rs"]
mod slow;

use std::{
    fs,
    io::{Read, Write},
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use common::{Daemon, Log, command_at, connect, connect_as, read, stat, transfer, write};
use farpage_fabric::{Session, Verb, key::Key};
use farpage_testkit::{RawClient, text, wait_until};
use farpage_wire::{
    Endpoint, ExtentRange, Request, Response, ServerStat,
    control::{self, Purpose},
};
use nix::sys::signal::Signal;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const MIB: u64 = 1 << 20;
/// The longest pause of a client, also on a machine that has much else to do.
const PAUSE: Duration = Duration::from_secs(10);

/// A daemon and the lines that it has logged.
struct Watched {
    daemon: Daemon,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Watched {
    fn start(arguments: &[&str]) -> Self {
        Self::of(Daemon::unread(arguments))
    }

    fn of((daemon, log): (Daemon, Log)) -> Self {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let written = Arc::clone(&lines);
        thread::spawn(move || {
            for line in log.map_while(Result::ok) {
                written.lock().unwrap().push(line);
            }
        });
        Self { daemon, lines }
    }

    fn count(&self, text: &str) -> usize {
        let lines = self.lines.lock().unwrap();
        lines.iter().filter(|line| line.contains(text)).count()
    }

    /// Replaces the process. Returns when the next one serves.
    fn restart(&self) {
        let count = || ["\"listening\"", "SIGUSR2"].map(|text| self.count(text));
        let [before, failed] = count();
        self.daemon.signal(Signal::SIGUSR2);
        wait_until("the next process listens", || {
            assert_eq!(count()[1], failed, "it goes on itself");
            self.count("\"listening\"") >= before + 2
        });
    }

    /// Asks for a restart that fails. Returns the log line that says why.
    fn restart_in_vain(&self) -> String {
        let before = self.count("SIGUSR2");
        self.daemon.signal(Signal::SIGUSR2);
        wait_until("the daemon says why", || self.count("SIGUSR2") > before);
        let lines = self.lines.lock().unwrap();
        let mut said = lines.iter().filter(|line| line.contains("SIGUSR2"));
        said.next_back().unwrap().clone()
    }
}

/// Writes and reads random words, `words` in all and `stride` bytes apart, until `ended`. Returns
/// the longest time of an operation, and how often a connection was opened again.
fn work(
    session: &Arc<Session>,
    (words, stride): (usize, u64),
    seed: u64,
    ended: &AtomicBool,
) -> (Duration, usize) {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let extent = session.grant(words as u64 * stride).unwrap();
    let line = session.line();
    let mut channel = line.channel::<Vec<u8>>().unwrap();
    let mut model = vec![0u64; words];
    let (mut longest, mut reopened) = (Duration::ZERO, 0);
    let mut round = |last: bool, at: usize| {
        let offset = at as u64 * stride;
        let began = Instant::now();
        let (verb, bytes) = match last || random.random::<bool>() {
            true => (Verb::Read, vec![0xa5; 8]),
            false => {
                model[at] = random.random();
                (Verb::Write, model[at].to_le_bytes().to_vec())
            }
        };
        let found = loop {
            match transfer(&mut *channel, verb, extent.id, offset, bytes.clone()) {
                Ok(found) => break found,
                Err(_) => {
                    channel = line.channel().unwrap();
                    reopened += 1;
                }
            }
        };
        longest = longest.max(began.elapsed());
        assert_eq!(found, model[at].to_le_bytes(), "seed {seed}, word {at}");
    };
    let mut next = ChaCha8Rng::seed_from_u64(!seed);
    while !ended.load(Ordering::Relaxed) {
        round(false, next.random_range(0..words));
    }
    (0..words).for_each(|at| round(true, at));
    (longest, reopened)
}

/// Restarts a server ten times under the load of a client at each of `endpoints`.
fn ten_restarts(server: &Watched, words: (usize, u64)) {
    let ended = AtomicBool::new(false);
    let endpoints: [&Endpoint; 2] = [&server.daemon.tcp, &server.daemon.shm];
    thread::scope(|scope| {
        let clients: Vec<_> = (endpoints.into_iter().zip(1..))
            .map(|(endpoint, seed)| {
                let (session, ended) = (connect(endpoint), &ended);
                scope.spawn(move || work(&session, words, seed, ended))
            })
            .collect();
        for _ in 0..10 {
            let written = stat(&server.daemon.tcp).bytes_written;
            wait_until("clients are at work", || {
                stat(&server.daemon.tcp).bytes_written > written
            });
            server.restart();
        }
        ended.store(true, Ordering::Relaxed);
        for (client, endpoint) in clients.into_iter().zip(endpoints) {
            let (longest, reopened) = client.join().unwrap();
            println!("{endpoint}: longest pause {longest:?}, {reopened} connections reopened");
            assert!(longest < PAUSE, "{longest:?}");
        }
    });
    assert!(stat(&server.daemon.tcp).bytes_written > 0);
}

#[test]
fn two_clients_find_every_word_right_through_ten_restarts() {
    let server = Watched::start(&["--capacity", "64MiB"]);
    ten_restarts(&server, (4096, 8));
}

#[test]
fn what_is_outside_of_memory_is_right_through_ten_restarts() {
    // On a disk, which the directory of temporary files may not be.
    let spill = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let server = Watched::start(&[
        "--capacity",
        "64MiB",
        "--memory",
        "16MiB",
        "--spill",
        spill.path().to_str().unwrap(),
    ]);
    // Beside the two clients, whose words compress: chunks that do not, and that nobody touches.
    let client = connect(&server.daemon.tcp);
    let idle = client.grant(16 * MIB).unwrap();
    let random = |at: u64| {
        let mut bytes = vec![0; MIB as usize];
        ChaCha8Rng::seed_from_u64(at).fill(&mut bytes[..]);
        bytes
    };
    for at in 0..16 {
        write(&client, &idle, at * MIB, &random(at)).unwrap();
    }
    ten_restarts(&server, (300, 64 << 10));
    let tiers = stat(&server.daemon.tcp).tiers;
    assert!(tiers.spilled_bytes > 0 && tiers.evictions > 0, "{tiers:?}");
    assert!(tiers.held_bytes <= 16 * MIB, "{tiers:?}");
    // Evictors may move a last chunk during a restart.
    wait_until("a restart changes no figure", || {
        let before = stat(&server.daemon.tcp).tiers;
        server.restart();
        stat(&server.daemon.tcp).tiers == before
    });
    let after = stat(&server.daemon.tcp).tiers;
    assert!(after.evictions >= tiers.evictions, "{after:?}, {tiers:?}");
    assert!(after.fetches >= tiers.fetches, "{after:?}, {tiers:?}");
    for at in 0..16 {
        let found = read(&client, idle.id, at * MIB, MIB as usize).unwrap();
        assert!(found == random(at), "MiB {at}");
    }
    // The counts go on, and come down to what nobody leases.
    drop(client);
    server.restart();
    wait_until("all is given back", || {
        let figures = stat(&server.daemon.tcp);
        let tiers = figures.tiers;
        figures.granted_bytes + tiers.hot_bytes + tiers.compressed_bytes + tiers.spilled_bytes == 0
    });
}

#[test]
fn requests_that_give_something_meet_no_error_through_restarts() {
    let server = Watched::start(&["--capacity", "64MiB"]);
    let keys = tempfile::tempdir().unwrap();
    let key = keys.path().join("key");
    let ended = AtomicBool::new(false);
    let requests = |endpoint: &Endpoint, name: &str| {
        let (session, mut rounds) = (connect_as(endpoint, &key), 0u64);
        while !ended.load(Ordering::Relaxed) {
            session.claim(name, true).unwrap();
            let extent = session.grant(1 << 16).unwrap();
            let number = rounds.to_le_bytes();
            session.publish(name, &number, &[extent.id]).unwrap();
            session.release(extent.id).unwrap();
            session.disclaim(name).unwrap();
            let reading = session.read(name).unwrap();
            assert_eq!(reading.manifest, number);
            session.release(reading.extents[0].1.id).unwrap();
            rounds += 1;
        }
        rounds
    };
    thread::scope(|scope| {
        let (daemon, requests, ended) = (&server.daemon, &requests, &ended);
        let clients = [(&daemon.tcp, "a"), (&daemon.shm, "b")]
            .map(|(endpoint, name)| scope.spawn(move || requests(endpoint, name)));
        // Clients that have no session yet.
        let visitors = scope.spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                drop(connect(&daemon.tcp));
                drop(connect(&daemon.shm));
            }
        });
        for _ in 0..5 {
            server.restart();
        }
        ended.store(true, Ordering::Relaxed);
        for client in clients {
            assert!(client.join().unwrap() > 0);
        }
        visitors.join().unwrap();
    });
    let figures = stat(&server.daemon.tcp);
    assert_eq!(figures.extents, 2, "the published ones");
    assert_eq!(figures.named_regions, 2);
    assert_eq!(figures.readers, 0);
}

#[test]
fn names_on_a_disk_stay_locked_and_whole_through_restarts() {
    let (kept, keys) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let directory = kept.path().to_str().unwrap();
    for when in ["false", "true"] {
        let later = format!("--persist-async={when}");
        let arguments = ["--capacity", "64MiB", "--persist", directory, &later];
        let mut server = Watched::start(&arguments);
        let key = keys.path().join("key");
        let session = connect_as(&server.daemon.tcp, &key);
        session.claim("name", true).unwrap();
        let extent = session.grant(MIB).unwrap();
        for round in 0..5u64 {
            let bytes = round.to_le_bytes();
            write(&session, &extent, round * 4096, &bytes).unwrap();
            let range = ExtentRange {
                extent: extent.id,
                offset: round * 4096,
                bytes: 8,
            };
            while !session.persist("name", vec![range], false).unwrap() {}
            // Between the bytes and their publication.
            server.restart();
            session.publish("name", &bytes, &[extent.id]).unwrap();
            server.restart();
        }
        let second = command_at(Path::new(env!("CARGO_BIN_EXE_farpage-memserver")))
            .args(["serve", "--listen", "tcp://127.0.0.1:0"])
            .args(arguments)
            .output()
            .unwrap();
        assert!(text(&second.stderr).contains("another server uses"));
        assert!(stat(&server.daemon.tcp).persist.written_bytes > 0);
        server.daemon.signal(Signal::SIGTERM);
        drop(session);
        assert_eq!(server.daemon.wait().code(), Some(0));
        // What a start finds on the disk.
        let server = Watched::start(&arguments);
        let session = connect_as(&server.daemon.tcp, &key);
        let opened = session.open("name").unwrap();
        assert_eq!(opened.manifest, 4u64.to_le_bytes());
        for round in 0..5u64 {
            let found = read(&session, opened.extents[0].id, round * 4096, 8).unwrap();
            assert_eq!(found, round.to_le_bytes(), "--persist-async {when}");
        }
    }
}

#[test]
fn names_readers_and_kept_memory_are_counted_as_before() {
    let server = Watched::start(&["--capacity", "64MiB"]);
    let keys = tempfile::tempdir().unwrap();
    let key = keys.path().join("key");
    let Daemon { tcp, shm, .. } = &server.daemon;
    let writer = connect_as(tcp, &key);
    writer.claim("name", false).unwrap();
    let first = writer.grant(MIB).unwrap();
    write(&writer, &first, 0, b"first").unwrap();
    writer.publish("name", b"1", &[first.id]).unwrap();
    let reader = connect_as(shm, &key);
    let reading = reader.read("name").unwrap();
    let second = writer.grant(MIB).unwrap();
    write(&writer, &second, 0, b"second").unwrap();
    writer.publish("name", b"2", &[second.id]).unwrap();
    writer.release(first.id).unwrap();
    // A client by hand keeps the memory that it gives back: its descriptor is in the socket.
    let (mut keeper, _) = RawClient::session(shm).unwrap();
    let lease = keeper.grant(3 << 20).unwrap();
    keeper.say(&Request::Release { extent: lease.id }).unwrap();
    wait_until("it is given back", || stat(tcp).retained_bytes > 0);
    let before = stat(tcp);
    assert_eq!((before.readers, before.old_versions), (1, 1));
    assert_eq!(before.retained_bytes, 3 << 20);
    server.restart();
    let after = stat(tcp);
    let figures = |stat: &ServerStat| {
        let mut stat = stat.clone();
        (stat.uptime_ms, stat.resident_bytes) = (0, 0);
        stat.clients.sort_by(|a, b| a.name.cmp(&b.name));
        stat.clients.sort_by_key(|client| client.granted_bytes);
        stat
    };
    assert_eq!(figures(&after), figures(&before));
    assert!(after.uptime_ms > before.uptime_ms);
    // The reader has the version of its opening, and the writer the newer one.
    let view = reading.extents[0].1.id;
    assert_eq!(read(&reader, view, 0, 5).unwrap(), b"first");
    assert_eq!(read(&writer, second.id, 0, 6).unwrap(), b"second");
    // Another user's key opens nothing, as before.
    let stranger = connect_as(tcp, &keys.path().join("other"));
    assert!(stranger.read("name").is_err());
    assert!(connect_as(tcp, &key).open("name").is_err(), "still held");
    // All is given back when the last holder lets go.
    reader.release(view).unwrap();
    drop((writer, keeper, reader));
    wait_until("charges end", || {
        let figures = stat(tcp);
        (figures.retained_bytes, figures.readers, figures.sessions) == (0, 0, 1)
    });
    assert_eq!(stat(tcp).granted_bytes, MIB + 4096 + 1);
}

#[test]
fn a_client_that_does_not_come_back_loses_its_memory_after_the_grace() {
    let arguments = ["--capacity", "64MiB", "--reconnect-grace", "300ms"];
    let server = Watched::start(&arguments);
    let (mut lost, _) = RawClient::session(&server.daemon.tcp).unwrap();
    lost.grant(MIB).unwrap();
    drop(lost);
    wait_until("its loss is noticed", || {
        stat(&server.daemon.tcp).lost_sessions == 1
    });
    server.restart();
    wait_until("its memory is back", || {
        stat(&server.daemon.tcp).granted_bytes == 0
    });
}

#[test]
fn a_request_that_has_begun_to_come_is_answered_before_the_hand_over() {
    let server = Watched::start(&["--capacity", "64MiB"]);
    let (mut client, _) = RawClient::session(&server.daemon.shm).unwrap();
    let Response::Challenge(challenge) = client.ask(&Request::Challenge).unwrap() else {
        panic!("no challenge");
    };
    let request = Request::Grant {
        bytes: MIB,
        atomics: false,
        serial: Some(1),
    };
    let bytes = control::encode(&request).unwrap();
    let (half, rest) = bytes.split_at(bytes.len() / 2);
    client.write_all(half).unwrap();
    let before = server.count("\"listening\"");
    server.daemon.signal(Signal::SIGUSR2);
    wait_until("the server waits for the rest", || {
        server.count("\"restarting\"") == 1
    });
    client.write_all(rest).unwrap();
    let answer = client.hear().unwrap();
    assert!(matches!(answer, Response::Granted { .. }), "{answer:?}");
    // The byte that carries the descriptor.
    client.read_exact(&mut [0]).unwrap();
    wait_until("the next process listens", || {
        server.count("\"listening\"") == before + 2
    });
    // The next process knows what it asked, and what it was asked before.
    let file = server.daemon.directory.path().join("key");
    let key = Key::load_or_make(&file).unwrap();
    let signature = key.sign(&challenge);
    let key = key.public();
    let shown = client.ask(&Request::Identify { key, signature }).unwrap();
    assert_eq!(shown, Response::Done);
    assert_eq!(client.ask(&request).unwrap(), answer);
    client.read_exact(&mut [0]).unwrap();
    server.restart();
    assert_eq!(client.ask(&request).unwrap(), answer);
    assert_eq!(stat(&server.daemon.tcp).extents, 1);
}

#[test]
fn a_program_that_refuses_leaves_the_server_as_it_was() {
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("farpage-memserver");
    let install = |target: &Path| {
        let _ = fs::remove_file(&program);
        symlink(target, &program).unwrap();
    };
    let this = Path::new(env!("CARGO_BIN_EXE_farpage-memserver"));
    install(this);
    let settings = directory.path().join("settings.toml");
    fs::write(&settings, "capacity = \"64MiB\"\n").unwrap();
    let arguments = ["--config", settings.to_str().unwrap()];
    let server = Watched::of(Daemon::run(command_at(&program), &arguments));
    let pid = server.daemon.child.id();
    let clients = [&server.daemon.tcp, &server.daemon.shm].map(connect);
    let extents = clients.each_ref().map(|it| it.grant(MIB).unwrap());
    let lines = clients.each_ref().map(|it| it.line());
    let check = |byte: u8| {
        for (line, extent) in lines.iter().zip(&extents) {
            let mut channel = line.channel::<Vec<u8>>().unwrap();
            let bytes = vec![byte; 4096];
            transfer(&mut *channel, Verb::Write, extent.id, 0, bytes.clone()).unwrap();
            let found = transfer(&mut *channel, Verb::Read, extent.id, 0, vec![0; 4096]);
            assert_eq!(found.unwrap(), bytes);
            assert!(line.session().grant(4096).is_ok());
        }
        assert_eq!(stat(&server.daemon.tcp).sessions, 2);
    };
    check(1);
    // 1. No file, no program, and one that knows nothing of take-overs.
    fs::remove_file(&program).unwrap();
    let said = server.restart_in_vain();
    assert!(said.contains("cannot start"), "{said}");
    check(2);
    let script = directory.path().join("script");
    fs::write(
        &script,
        "#!/bin/sh\necho too old to take over >&2\nexit 2\n",
    )
    .unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o700)).unwrap();
    install(&script);
    let said = server.restart_in_vain();
    assert!(said.contains("too old to take over"), "{said}");
    check(3);
    // A program that says much, and whose child keeps its standard error open.
    fs::write(
        &script,
        "#!/bin/sh\necho too wordy\nsleep 100 & yes | head -c 100000 >&2\nexit 2\n",
    )
    .unwrap();
    let said = server.restart_in_vain();
    assert!(said.contains("y; y") && said.len() < 20_000, "{said}");
    check(3);
    // 2. Settings that this version refuses.
    install(this);
    fs::write(&settings, "capacity = \"64MiB\"\nlease = \"1ms\"\n").unwrap();
    let said = server.restart_in_vain();
    assert!(said.contains("lease"), "{said}");
    check(4);
    let kept = directory.path().join("kept");
    fs::create_dir(&kept).unwrap();
    let text = format!("capacity = \"64MiB\"\npersist = {kept:?}\n");
    fs::write(&settings, text).unwrap();
    let said = server.restart_in_vain();
    assert!(said.contains("--persist"), "{said}");
    check(5);
    // 3. The same process has served all the time, and can still be replaced.
    assert_eq!(server.count("\"listening\""), 0, "since its start");
    fs::write(&settings, "capacity = \"32MiB\"\n").unwrap();
    server.restart();
    check(6);
    assert_eq!(stat(&server.daemon.tcp).capacity_bytes, 32 << 20);
    assert_eq!(server.daemon.child.id(), pid);
}

#[test]
fn sighup_reads_the_configuration_file_anew() {
    let directory = tempfile::tempdir().unwrap();
    let settings = directory.path().join("settings.toml");
    fs::write(&settings, "capacity = \"64MiB\"\nlease = \"60s\"\n").unwrap();
    let arguments = ["--config", settings.to_str().unwrap()];
    let server = Watched::of(Daemon::run(
        command_at(Path::new(env!("CARGO_BIN_EXE_farpage-memserver"))),
        &arguments,
    ));
    let (mut before, _) = RawClient::session(&server.daemon.tcp).unwrap();
    before.grant(MIB).unwrap();
    fs::write(&settings, "capacity = \"4MiB\"\nlease = \"30s\"\n").unwrap();
    server.daemon.signal(Signal::SIGHUP);
    wait_until("the settings hold", || {
        stat(&server.daemon.tcp).capacity_bytes == 4 << 20
    });
    assert!(
        before
            .grant(8 * MIB)
            .unwrap_err()
            .to_string()
            .contains("Full")
    );
    // A client keeps the lease that it was told, and a new one gets the new one.
    let lease = |resume: Option<farpage_testkit::Identity>| {
        let mut client = RawClient::greet(&server.daemon.tcp, Purpose::Control).unwrap();
        let client_name = "by hand".to_owned();
        let begin = Request::Begin {
            client: client_name,
            resume,
        };
        match client.ask(&begin).unwrap() {
            Response::Begun { lease_ms, .. } => lease_ms,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(lease(None), 30_000);
    // A level that is none ends nobody.
    fs::write(&settings, "capacity = \"4MiB\"\nlog-level = \"=loud=\"\n").unwrap();
    let said = server.restart_in_vain();
    assert!(said.contains("=loud="), "{said}");
    // A file that is wrong changes nothing, and is told in one line.
    fs::write(&settings, "capacity = \"1MiB\"\nlaese = \"10s\"\n").unwrap();
    server.daemon.signal(Signal::SIGHUP);
    wait_until("the daemon says why", || server.count("SIGHUP:") == 1);
    assert_eq!(server.count("laese"), 1);
    assert_eq!(stat(&server.daemon.tcp).capacity_bytes, 4 << 20);
}

#[test]
fn a_damaged_state_is_refused_in_one_line() {
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path().join("state");
    fs::write(&state, [b'x'; 100]).unwrap();
    let binary = env!("CARGO_BIN_EXE_farpage-memserver");
    let script = format!("exec 9<{state:?}; exec {binary:?} serve --take-over 9");
    let mut shell = Command::new("sh");
    let refused = shell.args(["-c", &script]).output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    let said = text(&refused.stderr);
    assert!(said.contains("its state is damaged"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

#[test]
fn a_sigterm_drains_the_next_process_as_the_first_one() {
    let mut server = Watched::start(&["--grace", "100ms"]);
    // Half of what is available, which is less once some is lent.
    let capacity = stat(&server.daemon.tcp).capacity_bytes;
    let client = connect(&server.daemon.shm);
    let extent = client.grant(MIB).unwrap();
    write(&client, &extent, 0, b"here").unwrap();
    server.restart();
    server.restart();
    assert_eq!(stat(&server.daemon.tcp).capacity_bytes, capacity);
    server.daemon.signal(Signal::SIGTERM);
    assert_eq!(server.daemon.wait().code(), Some(0));
    let Endpoint::Shm(path) = &server.daemon.shm else {
        unreachable!("shm");
    };
    assert!(!path.exists(), "the socket's file goes with the server");
    // Clients over shared memory see that the server has ended, and keep what they have.
    wait_until("the end is noticed", || client.has_outlived_server());
    assert_eq!(read(&client, extent.id, 0, 4).unwrap(), b"here");
}
