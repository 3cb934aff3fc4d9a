//! Names on a disk, as the daemon and its commands show them.
#![allow(clippy::unwrap_used, reason = "a test that fails here says where")]

mod common;

use std::{fs, net::TcpListener, path::Path, process::Output};

use common::{Daemon, command, connect_as, read, stat, write};
use farpage_testkit::text;
use farpage_wire::{Endpoint, ExtentRange};

const MIB: u64 = 1 << 20;

/// Publishes an extent that begins with `bytes` under `name`.
fn publish(endpoint: &Endpoint, key: &Path, name: &str, bytes: &[u8]) {
    let session = connect_as(endpoint, key);
    session.claim(name, false).unwrap();
    let extent = session.grant(MIB).unwrap();
    write(&session, &extent, 0, bytes).unwrap();
    let range = ExtentRange {
        extent: extent.id,
        offset: 0,
        bytes: bytes.len() as u64,
    };
    assert!(session.persist(name, vec![range], true).unwrap());
    session.publish(name, b"map", &[extent.id]).unwrap();
}

fn names(endpoint: &Endpoint, key: &Path) -> Output {
    let mut names = command();
    names.args(["names", "--endpoint", &endpoint.to_string(), "--key-file"]);
    names.arg(key).output().unwrap()
}

#[test]
fn a_killed_daemon_has_its_names_again_and_shows_which_are_on_the_disk() {
    let (kept, keys) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let key = keys.path().join("key");
    let file = keys.path().join("settings.toml");
    fs::write(&file, format!("persist = {:?}\n", kept.path())).unwrap();
    let flag = kept.path().to_str().unwrap();
    let by_file = file.to_str().unwrap();
    let mut daemon = Daemon::start(&["--capacity", "8MiB", "--persist", flag]);
    publish(&daemon.tcp, &key, "a", b"bytes of a");
    publish(&daemon.shm, &key, "b", b"bytes of b");
    let figures = stat(&daemon.tcp);
    assert_eq!(figures.persist.directory, flag);
    assert!(figures.persist.disk_bytes > 0 && figures.persist.written_bytes > 20);
    daemon.kill();
    // The file's key is the flag's name.
    let mut daemon = Daemon::start(&["--capacity", "8MiB", "--config", by_file]);
    assert_eq!(stat(&daemon.tcp).granted_bytes, figures.granted_bytes);
    for name in ["a", "b"] {
        let session = connect_as(&daemon.tcp, &key);
        let opened = session.open(name).unwrap();
        assert_eq!(opened.manifest, b"map");
        let found = read(&session, opened.extents[0].id, 0, 10).unwrap();
        assert_eq!(text(&found), format!("bytes of {name}"));
    }
    let listed = text(&names(&daemon.tcp, &key).stdout);
    assert_eq!(
        listed
            .lines()
            .filter(|line| line.contains("on disk"))
            .count(),
        2,
        "{listed}"
    );
    daemon.kill();
    // Damage is shown, and no reason for other names to be missing.
    let damaged = fs::read_dir(kept.path())
        .unwrap()
        .map(|it| it.unwrap().path());
    let damaged = damaged
        .filter(|it| it.to_string_lossy().contains("extent-"))
        .min()
        .unwrap();
    fs::remove_file(&damaged).unwrap();
    let daemon = Daemon::start(&["--capacity", "8MiB", "--persist", flag]);
    let listed = text(&names(&daemon.tcp, &key).stdout);
    let lines: Vec<_> = listed
        .lines()
        .filter(|line| line.contains("DAMAGED"))
        .collect();
    assert_eq!(lines.len(), 1, "{listed}");
    assert!(lines[0].contains(damaged.to_str().unwrap()), "{listed}");
    assert_eq!(listed.lines().count(), 2, "{listed}");
    assert_eq!(stat(&daemon.tcp).persist.damaged_names, 1);
}

#[test]
fn a_directory_that_cannot_be_used_ends_the_start_with_a_reason() {
    let kept = tempfile::tempdir().unwrap();
    let serve = |arguments: &[&str]| {
        let mut serve = command();
        serve.args([
            "serve",
            "--listen",
            "tcp://127.0.0.1:0",
            "--capacity",
            "8MiB",
        ]);
        let ended = serve.args(arguments).output().unwrap();
        (ended.status.code(), text(&ended.stderr))
    };
    let missing = kept.path().join("missing");
    let (code, said) = serve(&["--persist", missing.to_str().unwrap()]);
    assert!(code == Some(1) && said.contains("has to exist"), "{said}");
    let (code, said) = serve(&["--persist-async"]);
    assert!(code == Some(2) && said.contains("--persist"), "{said}");
    fs::write(kept.path().join("letter"), "dear").unwrap();
    let (code, said) = serve(&["--persist", kept.path().to_str().unwrap()]);
    assert!(code == Some(1) && said.contains("letter"), "{said}");
    // Addresses come first: loading the names takes long.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let endpoint = format!("tcp://127.0.0.1:{port}");
    let directory = kept.path().to_str().unwrap();
    let (code, said) = serve(&["--persist", directory, "--listen", &endpoint]);
    assert!(code == Some(1) && said.contains(&endpoint), "{said}");
}
