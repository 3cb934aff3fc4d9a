//! Names belong to keys: the rights of their owner, of other users, and of the operator.
#![allow(clippy::unwrap_used, reason = "a test that fails here says where")]

mod common;

use std::{
    os::unix::fs::FileExt,
    path::Path,
    process::Output,
    thread,
    time::{Duration, Instant},
};

use common::{Daemon, command, connect_as, read, stat, transfer, write};
use farpage_fabric::{OpenNameError, PublishError, Session, SessionOptions, Verb, key::Key};
use farpage_testkit::{Both, PATIENCE, RawClient, text, wait_until};
use farpage_wire::{
    NamedRegion, PublicKey, Refusal, Request, Response, Signature, control::Purpose,
};
use nix::sys::signal::Signal;

const MIB: u64 = 1 << 20;

#[test]
fn another_user_can_neither_read_replace_remove_list_nor_occupy_a_name() {
    let both = Both::start(64 * MIB, Duration::from_secs(60));
    let keys = tempfile::tempdir().unwrap();
    let [owner, stranger] = ["owner", "stranger"].map(|name| keys.path().join(name));
    for (name, endpoint) in ["a", "b"].into_iter().zip(both.endpoints()) {
        let publisher = connect_as(endpoint, &owner);
        let extent = publisher.grant(MIB).unwrap();
        write(&publisher, &extent, 0, b"secret").unwrap();
        publisher.publish(name, b"map", &[extent.id]).unwrap();
        drop(publisher);
        for endpoint in both.endpoints() {
            let thief = connect_as(endpoint, &stranger);
            let error = thief.open(name).unwrap_err();
            assert!(matches!(error, OpenNameError::NotFound { .. }), "{error}");
            let error = thief.remove(name).unwrap_err();
            assert!(matches!(error, OpenNameError::NotFound { .. }), "{error}");
            assert_eq!(thief.names(), Ok(vec![]));
            // A name of his own, which the owner never meets.
            thief.publish(name, b"", &[]).unwrap();
            thief.remove(name).unwrap();
        }
        let again = connect_as(endpoint, &owner);
        let names: Vec<_> = (again.names().unwrap().into_iter())
            .map(|named| (named.name, named.bytes, named.in_use))
            .collect();
        assert_eq!(names, [(name.to_owned(), MIB + 4096 + 3, false)]);
        assert_eq!(again.open(name).unwrap().manifest, b"map");
        assert_eq!(read(&again, extent.id, 0, 6).unwrap(), b"secret");
        again.remove(name).unwrap();
    }
}

#[test]
fn a_key_is_believed_only_with_its_own_signature_of_this_challenge() {
    let both = Both::start(64 * MIB, Duration::from_secs(60));
    let keys = tempfile::tempdir().unwrap();
    let [ours, theirs] = ["a", "b"].map(|name| Key::load_or_make(&keys.path().join(name)).unwrap());
    for endpoint in both.endpoints() {
        for in_session in [false, true] {
            let mut stream = match in_session {
                true => RawClient::session(endpoint).unwrap().0,
                false => RawClient::greet(endpoint, Purpose::Control).unwrap(),
            };
            let mut ask = |request: &Request| stream.ask(request).unwrap();
            let mut challenge = || match ask(&Request::Challenge) {
                Response::Challenge(challenge) => challenge,
                other => panic!("{other:?}"),
            };
            let (first, second) = (challenge(), challenge());
            assert_ne!(first, second);
            let shown = |key: PublicKey, signature: Signature| Request::Identify { key, signature };
            for wrong in [
                // The other's key with our signature, an old challenge, no signature, and a
                // challenge that was used.
                shown(theirs.public(), ours.sign(&second)),
                shown(ours.public(), ours.sign(&first)),
                shown(ours.public(), Signature([[0; 32]; 2])),
                shown(ours.public(), ours.sign(&second)),
            ] {
                assert!(
                    matches!(ask(&wrong), Response::Refused(Refusal::Invalid(_))),
                    "{wrong:?}"
                );
            }
            if in_session {
                let names = ask(&Request::Names { after: None });
                assert_eq!(names, Response::Refused(Refusal::Unidentified));
            }
            let Response::Challenge(third) = ask(&Request::Challenge) else {
                panic!("no challenge")
            };
            let identify = shown(ours.public(), ours.sign(&third));
            assert_eq!(ask(&identify), Response::Done);
            assert_eq!(
                ask(&Request::Names { after: None }),
                Response::Names(vec![])
            );
        }
    }
}

#[test]
fn creating_a_name_that_exists_is_an_error_unless_it_is_to_be_replaced() {
    let both = Both::start(64 * MIB, Duration::from_secs(60));
    let keys = tempfile::tempdir().unwrap();
    let key = keys.path().join("key");
    let (first, second) = (connect_as(&both.shm, &key), connect_as(&both.tcp, &key));
    first.publish("x", b"old", &[]).unwrap();
    drop(first);
    wait_until("the name is free", || {
        matches!(
            second.names().unwrap()[..],
            [NamedRegion { in_use: false, .. }]
        )
    });
    for error in [
        second.claim("x", false).unwrap_err(),
        second.publish("x", b"new", &[]).unwrap_err(),
    ] {
        assert!(matches!(error, PublishError::Exists { .. }), "{error}");
    }
    second.claim("x", true).unwrap();
    second.publish("x", b"new", &[]).unwrap();
    second.disclaim("x").unwrap();
    assert_eq!(second.open("x").unwrap().manifest, b"new");
}

#[test]
fn a_user_without_a_place_for_a_key_is_told_so_when_a_name_is_used() {
    let both = Both::start(64 * MIB, Duration::from_secs(60));
    let session = connect_as(&both.tcp, Path::new("/proc/nobody/key"));
    session.grant(MIB).unwrap();
    let error = session.open("x").unwrap_err().to_string();
    assert!(error.contains("/proc/nobody/key"), "{error}");
    assert!(error.contains("FARPAGE_KEY_FILE"), "{error}");
    session.grant(MIB).unwrap();
}

/// Makes this thread another user to its peers; it opens files as before.
fn become_another_user() {
    // SAFETY: raw system calls that take numbers alone and change this thread alone.
    unsafe {
        assert_eq!(libc::syscall(libc::SYS_setresuid, -1, 12_345, -1), 0);
        libc::syscall(libc::SYS_setfsuid, 0);
    }
}

#[test]
fn another_user_of_the_socket_gets_memory_that_the_one_before_does_not_reach() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("NOT TRIED: only root can become another user");
        return;
    }
    let daemon = Daemon::start(&["--capacity", "64MiB", "--lease", "1h"]);
    let keys = tempfile::tempdir().unwrap();
    let key = keys.path().join("key");
    let publisher = connect_as(&daemon.shm, &key);
    let extent = publisher.grant(MIB).unwrap();
    write(&publisher, &extent, 0, b"published").unwrap();
    publisher.publish("x", b"", &[extent.id]).unwrap();
    // Memory that the publisher was given, kept beyond its session.
    let files = std::fs::read_dir(format!("/proc/{}/fd", daemon.child.id())).unwrap();
    let memory = (files.map(|file| file.unwrap().path()))
        .find(|path| {
            let is_memory = |to: &Path| to.to_string_lossy().contains("farpage-extent");
            std::fs::read_link(path).is_ok_and(|to| is_memory(&to))
        })
        .unwrap();
    let mut options = std::fs::OpenOptions::new();
    let kept = options.read(true).write(true).open(memory).unwrap();
    drop(publisher);
    let opened = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            become_another_user();
            let session = connect_as(&daemon.shm, &key);
            wait_until("the name is free", || session.open("x").is_ok());
            session
        });
        other.join().unwrap()
    });
    write(&opened, &extent, 100, b"secret").unwrap();
    kept.write_all_at(b"overwrites", 0).unwrap();
    let mut seen = [0xa5; 6];
    kept.read_exact_at(&mut seen, 100).unwrap();
    assert_eq!(seen, [0; 6], "the next user's bytes are seen");
    assert_eq!(read(&opened, extent.id, 0, 9).unwrap(), b"published");
    assert_eq!(read(&opened, extent.id, 100, 6).unwrap(), b"secret");
}

#[test]
fn a_key_file_that_is_no_file_is_refused_and_holds_nobody_up() {
    let both = Both::start(64 * MIB, Duration::from_secs(60));
    let keys = tempfile::tempdir().unwrap();
    let pipe = keys.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    for (key_file, endpoint) in [pipe.as_path(), Path::new("/dev/zero"), keys.path()]
        .iter()
        .zip(both.endpoints().into_iter().cycle())
    {
        let session = connect_as(endpoint, key_file);
        let same = session.clone();
        let (say, said) = std::sync::mpsc::channel();
        thread::spawn(move || say.send(same.claim("x", false).map(drop)));
        let claimed = said.recv_timeout(PATIENCE);
        let error = claimed.expect("an answer").unwrap_err().to_string();
        let what = format!("{} is no key file", key_file.display());
        assert!(error.contains(&what), "{error}");
        session.grant(MIB).unwrap();
    }
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

/// Runs over a Unix socket, which stays open: closing it would end the session.
#[test]
fn what_a_stopped_server_grants_too_late_is_given_back() {
    let lease = Duration::from_secs(3);
    let daemon = Daemon::start(&["--capacity", "64MiB", "--lease", "3s"]);
    let keys = tempfile::tempdir().unwrap();
    let options = SessionOptions {
        key_file: Some(keys.path().join("key")),
        deadline: Duration::from_secs(1),
        ..SessionOptions::default()
    };
    let session = Session::connect(&daemon.shm, &options).unwrap();
    let extent = session.grant(MIB).unwrap();
    session.claim("before", false).unwrap();
    let mut channel = session.channel::<Vec<u8>>().unwrap();
    let requests: [&dyn Fn() -> bool; 2] = [&|| session.grant(16 * MIB).is_err(), &|| {
        session.claim("late", false).is_err()
    }];
    for fails in requests {
        daemon.signal(Signal::SIGSTOP);
        let since = Instant::now();
        assert!(fails(), "nobody is there to say yes");
        // The second one is not even asked: the first answer is still to come.
        assert!(session.grant(MIB).is_err());
        while since.elapsed() < 2 * lease {
            transfer(&mut *channel, Verb::Write, extent.id, 0, vec![7; 4096]).unwrap();
        }
        daemon.signal(Signal::SIGCONT);
        wait_until("what came too late is given back", || {
            session
                .stat()
                .is_ok_and(|stat| (stat.granted_bytes, stat.sessions) == (MIB + 4096, 1))
        });
        assert!(read(&session, extent.id, 0, 4096).unwrap() == [7; 4096]);
    }
    let other = connect_as(&daemon.tcp, &keys.path().join("key"));
    wait_until("the name is free", || other.claim("late", false).is_ok());
    assert!(matches!(
        other.claim("before", false),
        Err(PublishError::InUse { .. })
    ));
}

#[test]
fn names_are_listed_and_removed_by_their_owner_and_by_the_operator() {
    let keys = tempfile::tempdir().unwrap();
    let file = |name: &str| keys.path().join(name).display().to_string();
    let run = |arguments: &[&str], key: &str| {
        let mut command = command();
        command.args(arguments).args(["--key-file", &file(key)]);
        command.output().unwrap()
    };
    let operator = stdout(&run(&["key"], "operator"));
    assert_eq!(operator, stdout(&run(&["key"], "operator")), "made once");
    let list = keys.path().join("operators");
    std::fs::write(&list, format!("# who may\n{operator}")).unwrap();
    let daemon = Daemon::start(&["--operator-key", list.to_str().unwrap()]);
    let endpoint = daemon.tcp.to_string();
    for (user, name) in [("one", "squares"), ("two", "squares"), ("two", "cubes")] {
        let session = connect_as(&daemon.tcp, &keys.path().join(user));
        session.publish(name, b"", &[]).unwrap();
    }
    let names = |key| stdout(&run(&["names", "--endpoint", &endpoint], key));
    // 0. Nobody's are said to be none.
    let none = names("nobody");
    let nobody = stdout(&run(&["key"], "nobody"));
    assert!(
        none.starts_with("no named regions") && none.contains(nobody.trim()),
        "{none}"
    );
    assert_eq!(names("one").lines().count(), 1);
    assert!(names("one").contains("squares"));
    assert_eq!(names("operator").lines().count(), 3);
    let owner = stdout(&run(&["key"], "two"));
    let removal = |name, more: &[&str], key| {
        let arguments = [&["remove", name, "--endpoint", &endpoint], more].concat();
        run(&arguments, key)
    };
    // 1. Not another's, whoever is named as the owner.
    let refused = removal("cubes", &["--owner", owner.trim()], "one");
    assert_eq!(refused.status.code(), Some(1));
    let words = text(&refused.stderr);
    assert!(words.contains("belongs to this key"), "{words}");
    // 2. One's own, and all by the operator.
    stdout(&removal("cubes", &[], "two"));
    stdout(&removal("squares", &["--owner", owner.trim()], "operator"));
    let json = stdout(&run(
        &["names", "--json", "--endpoint", &endpoint],
        "operator",
    ));
    let left: Vec<NamedRegion> = serde_json::from_str(&json).unwrap();
    assert_eq!(left.len(), 1);
    assert_eq!(
        left[0].owner.to_string(),
        stdout(&run(&["key"], "one")).trim()
    );
    // 3. A look takes no client's place.
    assert_eq!(stat(&daemon.shm).sessions, 0);
}
