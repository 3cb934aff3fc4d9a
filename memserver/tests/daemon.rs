//! The real binary: settings, signals, exit statuses, and what it prints.
#![allow(clippy::unwrap_used, reason = "a test that fails here says where")]

mod common;

use std::{
    fs,
    io::{BufRead, BufReader},
    process::{Output, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use common::{Daemon, command, connect, transfer};
use farpage_fabric::Verb;
use farpage_testkit::{process::send_signal, socket_in, text, wait_until};
use farpage_wire::{Endpoint, ServerStat};
use nix::sys::signal::Signal;

fn path(endpoint: &Endpoint) -> &std::path::Path {
    let Endpoint::Shm(path) = endpoint else {
        panic!("{endpoint} is not shm")
    };
    path
}

fn stderr(output: &Output) -> String {
    text(&output.stderr)
}

#[test]
fn sigterm_under_load_exits_0_and_removes_the_socket() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut daemon = Daemon::start(&["--capacity", "64MiB", "--grace", "200ms"]);
        let working = Arc::new(AtomicBool::new(false));
        let ended = Arc::new(AtomicBool::new(false));
        let load: Vec<_> = [&daemon.shm, &daemon.tcp]
            .map(|endpoint| {
                let session = connect(endpoint);
                let (working, ended) = (working.clone(), ended.clone());
                thread::spawn(move || {
                    let extent = session.grant(1 << 20).unwrap();
                    let mut rounds = 0u64;
                    // Over shared memory it goes on without the server.
                    while !ended.load(Ordering::Relaxed)
                        && let Ok(mut channel) = session.channel::<Vec<u8>>()
                    {
                        let bytes = vec![1; 65536];
                        if transfer(&mut *channel, Verb::Write, extent.id, 0, bytes).is_err() {
                            break;
                        }
                        rounds += 1;
                        working.store(true, Ordering::Relaxed);
                    }
                    rounds
                })
            })
            .into();
        wait_until("clients are at work", || working.load(Ordering::Relaxed));
        let asked = Instant::now();
        daemon.signal(signal);
        assert_eq!(daemon.wait().code(), Some(0), "{signal}");
        ended.store(true, Ordering::Relaxed);
        assert!(asked.elapsed() < Duration::from_secs(10));
        assert!(!path(&daemon.shm).exists());
        load.into_iter()
            .for_each(|load| assert!(load.join().is_ok()));
    }
}

#[test]
fn with_a_drain_timeout_a_server_ends_once_no_client_has_memory_there() {
    let mut daemon = Daemon::start(&["--drain-timeout", "60s"]);
    let clients = [&daemon.shm, &daemon.tcp].map(connect);
    let extents = clients
        .each_ref()
        .map(|client| client.grant(1 << 20).unwrap());
    daemon.signal(Signal::SIGTERM);
    for (client, extent) in clients.iter().zip(&extents) {
        wait_until("the server drains", || {
            client.stat().unwrap().asks_to_leave()
        });
        client.release(extent.id).unwrap();
    }
    let left = Instant::now();
    assert_eq!(daemon.wait().code(), Some(0));
    assert!(left.elapsed() < Duration::from_secs(10));
    drop(clients);
}

#[test]
fn a_server_ends_at_its_drain_timeout_and_says_what_was_left() {
    let (mut daemon, log) = Daemon::unread(&["--drain-timeout", "300ms"]);
    let client = connect(&daemon.tcp);
    client.grant(1 << 20).unwrap();
    daemon.signal(Signal::SIGTERM);
    let status = daemon.wait();
    assert_eq!(status.code(), Some(0));
    let lines: Vec<String> = log.map_while(Result::ok).collect();
    let said = lines.join("\n");
    assert!(said.contains("drain timeout of 300ms is over"), "{said}");
    assert!(said.contains("1048576"), "{said}");
}

#[test]
fn a_draining_server_waits_for_its_clients_and_refuses_new_ones() {
    let mut daemon = Daemon::start(&["--grace", "30s"]);
    let client = connect(&daemon.tcp);
    daemon.signal(Signal::SIGTERM);
    wait_until("the server drains", || client.stat().unwrap().draining);
    assert!(!client.stat().unwrap().asks_to_leave(), "without a timeout");
    let refused = farpage_fabric::Session::connect(&daemon.tcp, &Default::default())
        .map(drop)
        .unwrap_err();
    assert!(refused.to_string().contains("shutting down"), "{refused}");
    client.grant(4096).unwrap();
    let left = Instant::now();
    drop(client);
    assert_eq!(daemon.wait().code(), Some(0));
    assert!(
        left.elapsed() < Duration::from_secs(10),
        "waited for the whole grace with nobody left"
    );
}

#[cfg(not(feature = "rdma"))]
#[test]
fn without_the_feature_no_library_of_rdma_is_needed() {
    let daemon = Daemon::start(&[]);
    let maps = fs::read_to_string(format!("/proc/{}/maps", daemon.child.id())).unwrap();
    assert!(maps.contains("libc.so"), "the daemon's libraries: {maps}");
    for library in ["libibverbs", "librdmacm"] {
        assert!(!maps.contains(library), "{library} is loaded");
    }
}

#[test]
fn a_second_signal_exits_at_once() {
    let mut daemon = Daemon::start(&["--grace", "1h"]);
    let client = connect(&daemon.tcp);
    daemon.signal(Signal::SIGTERM);
    wait_until("the server drains", || client.stat().unwrap().draining);
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.wait().code(), Some(128 + Signal::SIGTERM as i32));
}

#[test]
fn terminal_that_closes_leaves_the_server_and_its_memory() {
    let (mut daemon, mut log) = Daemon::unread(&["--grace", "0s"]);
    let client = connect(&daemon.tcp);
    let extent = client.grant(1 << 20).unwrap();
    daemon.signal(Signal::SIGHUP);
    let said = log.find(|line| line.as_ref().unwrap().contains("SIGHUP"));
    assert!(said.unwrap().unwrap().contains("serving on"));
    let mut channel = client.channel::<Vec<u8>>().unwrap();
    transfer(&mut *channel, Verb::Write, extent.id, 0, vec![7; 4096]).unwrap();
    let bytes = transfer(&mut *channel, Verb::Read, extent.id, 0, vec![0; 4096]).unwrap();
    assert_eq!(bytes, vec![7; 4096]);
    thread::spawn(move || log.for_each(drop));
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.wait().code(), Some(0));
}

#[test]
fn a_socket_left_by_a_killed_server_is_taken_over_and_a_live_one_is_not() {
    let mut killed = Daemon::start(&[]);
    let socket = killed.shm.to_string();
    let rival = || {
        command()
            .args(["serve", "--capacity", "1MiB", "--listen", &socket])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let refused = rival().wait_with_output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains(&socket), "{}", stderr(&refused));
    connect(&killed.shm);

    killed.kill();
    assert!(path(&killed.shm).exists());
    let mut heir = rival();
    wait_until("the next server answers on the old socket", || {
        farpage_fabric::Session::connect(&killed.shm, &Default::default()).is_ok()
    });
    heir.kill().unwrap();
    heir.wait().unwrap();
}

#[test]
fn a_port_in_use_exits_1_and_says_which() {
    let daemon = Daemon::start(&[]);
    let endpoint = daemon.tcp.to_string();
    let output = command()
        .args(["serve", "--capacity", "1MiB", "--listen", &endpoint])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains(&endpoint), "{}", stderr(&output));
}

#[test]
fn wrong_usage_exits_2_and_says_what_is_wrong() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("wrong.toml");
    fs::write(&file, "capasity = '1GiB'\n").unwrap();
    let file = file.to_str().unwrap();
    for (arguments, complaint) in [
        (vec![], "Usage"),
        (vec!["serve", "--capacity", "lots"], "capacity"),
        (vec!["serve", "--capacity", "0"], "capacity"),
        (vec!["serve", "--capacity", "2"], "capacity is 2 bytes"),
        (
            vec!["serve", "--listen", "http://x"],
            "shm:///run/farpage.sock",
        ),
        (vec!["serve", "--config", file], "capasity"),
        (
            vec!["serve", "--config", "/does/not/exist.toml"],
            "/does/not/exist.toml",
        ),
        (
            vec!["serve", "--capacity", "1MiB", "--log-level", "=loud=="],
            "log-level",
        ),
        (vec!["stat"], "--endpoint"),
    ] {
        let output = command().args(&arguments).output().unwrap();
        assert_eq!(
            output.status.code(),
            Some(2),
            "{arguments:?}: {}",
            stderr(&output)
        );
        assert!(
            stderr(&output).contains(complaint),
            "{arguments:?}: {}",
            stderr(&output)
        );
    }
}

#[test]
fn variable_that_nobody_reads_exits_2_and_the_one_that_was_meant_is_named() {
    let (wrong, right) = ("FARPAGE_MEMSERVER_CAPACTY", "FARPAGE_MEMSERVER_CAPACITY");
    for arguments in [&["serve"][..], &["stat", "--endpoint", "tcp://127.0.0.1:1"]] {
        let mut command = command();
        let output = command.args(arguments).env(wrong, "8GiB").output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        let complaint = format!("{wrong} is no variable of farpage (did you mean {right}?)");
        assert!(stderr(&output).contains(&complaint), "{}", stderr(&output));
    }
}

#[test]
fn a_flag_beats_the_environment_which_beats_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let endpoint = socket_in(&directory);
    let file = directory.path().join("memserver.toml");
    fs::write(
        &file,
        format!("listen = ['{endpoint}']\ncapacity = '1MiB'\ngrace = '0s'\n"),
    )
    .unwrap();
    for (variable, flag, capacity_bytes) in [
        (None, None, 1u64 << 20),
        (Some("2MiB"), None, 2 << 20),
        (Some("2MiB"), Some("3MiB"), 3 << 20),
    ] {
        let mut command = command();
        command
            .args(["serve", "--config", file.to_str().unwrap()])
            .stderr(Stdio::null());
        variable.map(|size| command.env("FARPAGE_MEMSERVER_CAPACITY", size));
        flag.map(|size| command.args(["--capacity", size]));
        let mut child = command.spawn().unwrap();
        let mut stat = None;
        wait_until("the server answers", || {
            stat = farpage_fabric::Session::connect(&endpoint, &Default::default())
                .ok()
                .map(|session| session.stat().unwrap());
            stat.is_some()
        });
        assert_eq!(stat.expect("waited for it").capacity_bytes, capacity_bytes);
        send_signal(&child, Signal::SIGTERM);
        assert_eq!(child.wait().unwrap().code(), Some(0));
    }
}

#[test]
fn figures_that_nobody_reads_are_no_failure_and_a_full_disk_is_one() {
    let daemon = Daemon::start(&["--capacity", "64MiB"]);
    for form in [&[][..], &["--json"]] {
        let stat = |stdout: Stdio| {
            let mut stat = command();
            stat.args(["stat", "--endpoint", &daemon.shm.to_string()]);
            stat.args(form).stdout(stdout).output().unwrap()
        };
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = stat(writer.into());
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(stderr(&output), "");
        let full = std::fs::File::options().write(true).open("/dev/full");
        let output = stat(full.unwrap().into());
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        assert!(stderr(&output).contains("cannot write to standard output"));
    }
}

#[test]
fn a_log_that_no_terminal_shows_has_no_colours() {
    let directory = tempfile::tempdir().unwrap();
    let mut server = command()
        .args(["serve", "--listen", &socket_in(&directory).to_string()])
        .env_remove("NO_COLOR")
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(server.stderr.take().unwrap()).lines();
    let listens = lines.find(|line| line.as_ref().unwrap().contains("shm://"));
    server.kill().unwrap();
    server.wait().unwrap();
    let line = listens.unwrap().unwrap();
    assert!(!line.contains('\u{1b}'), "{line:?}");
}

#[test]
fn stat_prints_json_for_machines_and_a_table_for_people() {
    let (daemon, mut log) = Daemon::unread(&["--capacity", "64MiB"]);
    let client = connect(&daemon.shm);
    client.grant(8 << 20).unwrap();
    let came = log.next().unwrap().unwrap();
    for endpoint in [&daemon.shm, &daemon.tcp] {
        let output = command()
            .args(["stat", "--json", "--endpoint", &endpoint.to_string()])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let stat: ServerStat = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(
            (stat.capacity_bytes, stat.granted_bytes, stat.extents),
            (64 << 20, 8 << 20, 1)
        );
        assert_eq!(stat.sessions, 1, "who looks is no client");
        let user = nix::unistd::geteuid();
        let address = format!("pid {} of user {user}", std::process::id());
        let [client] = &stat.clients[..] else {
            panic!("{:?}", stat.clients)
        };
        assert_eq!((client.granted_bytes, client.extents), (8 << 20, 1));
        assert_eq!(client.address, address);
        assert!(came.contains(&address), "{came}");
        let output = command()
            .args(["stat", "--endpoint", &endpoint.to_string()])
            .output()
            .unwrap();
        let table = String::from_utf8(output.stdout).unwrap();
        assert!(
            table.contains("64.0 MiB") && table.contains("8.0 MiB"),
            "{table}"
        );
        assert!(table.contains(&address), "{table}");
        // The client has not said what it keeps: that is not told as nothing.
        assert!(
            table.contains("none reported") && !table.contains("0 B stored"),
            "{table}"
        );
    }
    drop(client);
    let next = log.next().unwrap().unwrap();
    let left = |line: &str| line.contains("session") && !line.contains(r#""level":"WARN""#);
    assert!(left(&came) && left(&next), "{came}\n{next}");
    thread::spawn(move || log.for_each(drop));
    let output = command()
        .args(["stat", "--endpoint", "tcp://127.0.0.1:1"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("tcp://127.0.0.1:1"),
        "{}",
        stderr(&output)
    );
}
