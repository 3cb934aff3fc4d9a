//! A server under a service manager, which a test plays: systemd's store of descriptors.

use std::{
    fs::File,
    io::{IoSliceMut, Write},
    net::{Ipv4Addr, TcpListener},
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::{net::UnixDatagram, process::CommandExt},
    },
    path::{Path, PathBuf},
    process::{self, Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread,
};

use farpage_testkit::{
    PATIENCE,
    process::{send_signal, wait_for_end},
    text, wait_until,
};
use farpage_wire::Endpoint;
use nix::{
    fcntl::{FcntlArg, fcntl},
    sys::{
        signal::Signal,
        socket::{ControlMessageOwned, MsgFlags, recvmsg},
    },
};
use tempfile::TempDir;

use super::{
    MIB, PAUSE,
    common::{command, connect, connect_as, read, stat, write},
    work,
};

/// Number from which on the manager keeps its descriptors, away from those that it passes.
const KEPT_FROM: RawFd = 500;
/// First descriptor that a service finds.
const FIRST: RawFd = 3;

/// State of the manager.
#[derive(Default)]
struct Kept {
    descriptors: Vec<(String, OwnedFd)>,
    is_ready: bool,
    /// Number of messages that the manager has acted on.
    barriers: usize,
}

/// A service manager, and its service.
struct Managed {
    directory: TempDir,
    kept: Arc<Mutex<Kept>>,
    service: Child,
    arguments: Vec<String>,
    tcp: Endpoint,
    shm: Endpoint,
}

impl Managed {
    fn start(arguments: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = UnixDatagram::bind(directory.path().join("notify")).unwrap();
        let kept = Arc::new(Mutex::new(Kept::default()));
        let heard = Arc::clone(&kept);
        thread::spawn(move || while hear(&socket, &heard) {});
        let shm: Endpoint = format!("shm://{}", directory.path().join("s").display())
            .parse()
            .unwrap();
        // A port that was free just now, of an address that nobody else has: the service has it for
        // good, also between two processes.
        static SERVICES: AtomicU32 = AtomicU32::new(0);
        let (test, service) = (process::id(), SERVICES.fetch_add(1, Ordering::Relaxed));
        let address = Ipv4Addr::from_bits(0x7f40_0000 + ((test % 0x4000) << 8) + service % 0x100);
        let port = TcpListener::bind((address, 0)).unwrap();
        let tcp: Endpoint = format!("tcp://{}", port.local_addr().unwrap())
            .parse()
            .unwrap();
        drop(port);
        let listen = [&tcp, &shm].map(|it| ["--listen".to_owned(), it.to_string()]);
        let arguments = arguments.iter().map(|it| (*it).to_owned());
        let arguments: Vec<_> = arguments.chain(listen.concat()).collect();
        let service = spawn(directory.path(), &arguments, &[]);
        let managed = Self {
            directory,
            kept,
            service,
            arguments,
            tcp,
            shm,
        };
        managed.wait_until_ready();
        managed
    }

    fn wait_until_ready(&self) {
        wait_until("the service is ready", || {
            self.kept.lock().unwrap().is_ready
        });
    }

    fn count(&self) -> usize {
        self.kept.lock().unwrap().descriptors.len()
    }

    /// Ends the service's process by `signal`.
    fn end(&mut self, signal: Signal) {
        send_signal(&self.service, signal);
        let status = wait_for_end(&mut self.service, PATIENCE);
        assert_eq!(status.code(), (signal == Signal::SIGTERM).then_some(0));
    }

    /// Starts the service's next process with all descriptors. Returns what it has logged, once it
    /// has ended itself or serves.
    fn go_on(&mut self) {
        let mut kept = self.kept.lock().unwrap();
        kept.is_ready = false;
        let passed = &kept.descriptors;
        self.service = spawn(self.directory.path(), &self.arguments, passed);
        drop(kept);
        self.wait_until_ready();
    }

    fn log(&self) -> String {
        text(&std::fs::read(log(self.directory.path())).unwrap())
    }
}

impl Drop for Managed {
    fn drop(&mut self) {
        let _ = self.service.kill();
        let _ = self.service.wait();
    }
}

fn log(directory: &Path) -> PathBuf {
    directory.join("log")
}

/// Starts a process of the service, which finds `passed` from [`FIRST`] on.
fn spawn(directory: &Path, arguments: &[String], passed: &[(String, OwnedFd)]) -> Child {
    let names: Vec<_> = passed.iter().map(|(name, _)| &**name).collect();
    let mut service = service(directory, arguments, "$$");
    service
        .env("LISTEN_FDS", passed.len().to_string())
        .env("LISTEN_FDNAMES", names.join(":"));
    let numbers: Vec<RawFd> = passed.iter().map(|(_, fd)| fd.as_raw_fd()).collect();
    // SAFETY: the closure makes system calls alone, on descriptors that are open until `spawn`
    // returns; those that it makes are not used by this process.
    unsafe {
        service.pre_exec(move || {
            for (number, to) in numbers.iter().zip(FIRST..) {
                nix::errno::Errno::result(libc::dup2(*number, to))?;
            }
            Ok(())
        });
    }
    service.spawn().unwrap()
}

/// Makes the command of a service whose main process is `main`, as its shell understands it.
fn service(directory: &Path, arguments: &[String], main: &str) -> Command {
    let log = File::options()
        .append(true)
        .create(true)
        .open(log(directory));
    // Only the process itself knows its number in time.
    let script = format!("export LISTEN_PID=$$ SYSTEMD_EXEC_PID={main}; exec \"$@\"");
    let mut service = Command::new("sh");
    service
        .args(["-c", &script, "sh"])
        .arg(command().get_program())
        .arg("serve")
        .args(arguments)
        .env("NOTIFY_SOCKET", directory.join("notify"))
        .env("FDSTORE", "1000")
        .stderr(Stdio::from(log.unwrap()));
    service
}

/// Acts on the next message of a service. False if there is none any more.
fn hear(socket: &UnixDatagram, kept: &Mutex<Kept>) -> bool {
    let (mut bytes, mut space) = ([0; 4096], nix::cmsg_space!([RawFd; 8]));
    let mut buffer = [IoSliceMut::new(&mut bytes)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let fd = socket.as_raw_fd();
    let Ok(message) = recvmsg::<()>(fd, &mut buffer, Some(&mut space), flags) else {
        return false;
    };
    let mut passed = Vec::new();
    for part in message.cmsgs().unwrap() {
        if let ControlMessageOwned::ScmRights(fds) = part {
            for fd in fds {
                // SAFETY: the kernel made the descriptor for this call, and nobody else knows it.
                let fd = unsafe { OwnedFd::from_raw_fd(fd) };
                passed.push(away(&fd));
            }
        }
    }
    let len = message.bytes;
    let said = text(&bytes[..len]);
    let value = |key: &str| said.lines().find_map(|line| line.strip_prefix(key));
    let mut kept = kept.lock().unwrap();
    if value("FDSTORE=1").is_some() {
        let name = value("FDNAME=").unwrap().to_owned();
        assert_eq!(value("FDPOLL="), Some("0"));
        assert_eq!(passed.len(), 1, "{said}");
        kept.descriptors.push((name, passed.remove(0)));
    }
    if value("FDSTOREREMOVE=1").is_some() {
        let name = value("FDNAME=").unwrap();
        kept.descriptors.retain(|(other, _)| other != name);
    }
    kept.is_ready |= value("READY=1").is_some();
    kept.barriers += usize::from(value("BARRIER=1").is_some());
    // The end of a barrier is closed here.
    true
}

/// Duplicates a descriptor to a number that no service finds its own at.
fn away(fd: &impl AsFd) -> OwnedFd {
    let away = fcntl(fd.as_fd(), FcntlArg::F_DUPFD_CLOEXEC(KEPT_FROM)).unwrap();
    // SAFETY: the kernel made the descriptor for this call, and nobody else knows it.
    unsafe { OwnedFd::from_raw_fd(away) }
}

#[test]
fn clients_go_on_through_restarts_by_a_service_manager() {
    let mut managed = Managed::start(&["--capacity", "64MiB"]);
    let ended = AtomicBool::new(false);
    let (tcp, shm) = (connect(&managed.tcp), connect(&managed.shm));
    thread::scope(|scope| {
        let clients = [(&tcp, 1), (&shm, 2)].map(|(session, seed)| {
            let ended = &ended;
            scope.spawn(move || work(session, (4096, 8), seed, ended))
        });
        for _ in 0..3 {
            let written = stat(&managed.tcp).bytes_written;
            wait_until("clients are at work", || {
                stat(&managed.tcp).bytes_written > written
            });
            managed.end(Signal::SIGTERM);
            assert!(managed.count() > 5, "{}", managed.count());
            managed.go_on();
            assert_eq!(managed.count(), 0, "a process that serves has all");
        }
        ended.store(true, Ordering::Relaxed);
        for client in clients {
            let (longest, reopened) = client.join().unwrap();
            println!("longest pause {longest:?}, {reopened} connections reopened");
            assert!(longest < PAUSE, "{longest:?}");
        }
    });
    // What was lent is charged, and given back by its clients.
    assert_eq!(stat(&managed.tcp).granted_bytes, 2 * 4096 * 8);
    drop((tcp, shm));
    wait_until("all is given back", || {
        stat(&managed.tcp).granted_bytes == 0
    });
}

#[test]
fn tiers_and_names_on_a_disk_go_through_a_service_manager() {
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let [spill, kept] = ["spill", "kept"].map(|name| disk.path().join(name));
    for directory in [&spill, &kept] {
        std::fs::create_dir(directory).unwrap();
    }
    let [spill_path, kept_path] = [&spill, &kept].map(|it| it.to_str().unwrap());
    let mut arguments = vec!["--capacity", "64MiB", "--memory", "16MiB"];
    arguments.extend(["--spill", spill_path, "--persist", kept_path]);
    let mut managed = Managed::start(&arguments);
    let key = managed.directory.path().join("key");
    let session = connect_as(&managed.tcp, &key);
    session.claim("name", false).unwrap();
    let extent = session.grant(32 * MIB).unwrap();
    let bytes = |at: u64| vec![at as u8 + 1; 4096];
    for at in 0..32 {
        write(&session, &extent, at * MIB, &bytes(at)).unwrap();
    }
    session.publish("name", b"map", &[extent.id]).unwrap();
    for _ in 0..2 {
        managed.end(Signal::SIGTERM);
        managed.go_on();
        for at in 0..32 {
            assert_eq!(
                read(&session, extent.id, at * MIB, 4096).unwrap(),
                bytes(at)
            );
        }
        session.publish("name", b"map", &[extent.id]).unwrap();
    }
}

#[test]
fn a_service_that_is_killed_leaves_no_descriptor_behind() {
    let mut managed = Managed::start(&["--capacity", "64MiB"]);
    let client = connect(&managed.tcp);
    client.grant(MIB).unwrap();
    // After a hand-over, too.
    managed.end(Signal::SIGTERM);
    managed.go_on();
    managed.end(Signal::SIGKILL);
    assert_eq!(managed.count(), 0);
    managed.go_on();
    assert_eq!(stat(&managed.tcp).granted_bytes, 0);
}

#[test]
fn what_a_process_has_taken_over_is_refused_by_the_next() {
    let mut managed = Managed::start(&["--capacity", "64MiB"]);
    let client = connect(&managed.tcp);
    client.grant(MIB).unwrap();
    managed.end(Signal::SIGTERM);
    let passed = |kept: &(String, OwnedFd)| (kept.0.clone(), away(&kept.1));
    let stale: Vec<_> = (managed.kept.lock().unwrap().descriptors.iter())
        .map(passed)
        .collect();
    managed.go_on();
    client.grant(MIB).unwrap();
    managed.end(Signal::SIGKILL);
    // A manager that has not forgotten them.
    managed.kept.lock().unwrap().descriptors = stale;
    managed.go_on();
    assert_eq!(managed.count(), 0);
    assert_eq!(stat(&managed.tcp).granted_bytes, 0);
    let said = "another process has taken over already";
    wait_until("the service says so", || managed.log().contains(said));
}

#[test]
fn a_process_that_the_manager_did_not_start_gives_it_nothing() {
    let mut managed = Managed::start(&["--capacity", "64MiB"]);
    managed.end(Signal::SIGTERM);
    managed.kept.lock().unwrap().descriptors.clear();
    let before = managed.log().matches("listening").count();
    // The service's main process is its parent.
    let mut service = service(managed.directory.path(), &managed.arguments, "1");
    managed.kept.lock().unwrap().is_ready = false;
    managed.service = service.spawn().unwrap();
    wait_until("clients are served", || {
        let log = managed.log();
        log.matches("listening").count() > before
    });
    managed.end(Signal::SIGTERM);
    assert_eq!(managed.count(), 0);
    assert!(!managed.kept.lock().unwrap().is_ready);
}

#[test]
fn a_socket_whose_file_is_gone_is_made_anew() {
    let mut managed = Managed::start(&["--capacity", "64MiB"]);
    let Endpoint::Shm(path) = managed.shm.clone() else {
        unreachable!("shm");
    };
    let client = connect(&managed.shm);
    managed.end(Signal::SIGTERM);
    std::fs::remove_file(path).unwrap();
    managed.go_on();
    client.grant(MIB).unwrap();
    connect(&managed.shm).grant(MIB).unwrap();
}

#[test]
fn a_connection_that_another_process_serves_says_nothing_when_it_breaks() {
    let mut managed = Managed::start(&["--capacity", "64MiB"]);
    let client = connect(&managed.shm);
    client.grant(MIB).unwrap();
    managed.end(Signal::SIGTERM);
    managed.go_on();
    client.grant(MIB).unwrap();
    // Closed by a process that cannot be seen, which may live and lend the memory to others.
    managed.end(Signal::SIGKILL);
    wait_until("the client has lost its memory", || {
        client.grant(MIB).is_err()
    });
    assert!(!client.has_outlived_server());
}

#[test]
fn what_cannot_be_verified_is_given_back_in_one_line() {
    for spoil in [
        |kept: &mut Vec<(String, OwnedFd)>| {
            let state = kept.iter_mut().find(|(name, _)| name == "farpage-state");
            state.unwrap().1 = away(&File::open("/dev/null").unwrap());
        },
        |kept: &mut Vec<(String, OwnedFd)>| {
            let state = kept.iter_mut().find(|(name, _)| name == "farpage-state");
            let (_, state) = state.unwrap();
            let path = format!("/proc/self/fd/{}", state.as_raw_fd());
            let mut bytes = std::fs::read(path).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            let mut damaged = tempfile::tempfile().unwrap();
            damaged.write_all(&bytes).unwrap();
            *state = away(&damaged);
        },
        |kept: &mut Vec<(String, OwnedFd)>| kept.retain(|(name, _)| name != "farpage-state"),
        |kept: &mut Vec<(String, OwnedFd)>| kept.retain(|(name, _)| name != "farpage-mark"),
        |kept: &mut Vec<(String, OwnedFd)>| kept.retain(|(name, _)| name != "f0"),
        |kept: &mut Vec<(String, OwnedFd)>| {
            let twice = ("f0".to_owned(), away(&kept[1].1));
            kept.push(twice);
        },
    ] {
        let mut managed = Managed::start(&["--capacity", "64MiB"]);
        let client = connect(&managed.tcp);
        client.grant(MIB).unwrap();
        managed.end(Signal::SIGTERM);
        spoil(&mut managed.kept.lock().unwrap().descriptors);
        managed.go_on();
        let left = format!("{:?}", managed.kept.lock().unwrap().descriptors);
        assert_eq!(managed.count(), 0, "{left} {}", managed.log());
        assert_eq!(stat(&managed.tcp).granted_bytes, 0);
        // A line is written a moment after it was logged.
        let lines = || managed.log().matches("given back").count();
        wait_until("the service says so", || lines() > 0);
        assert_eq!(lines(), 1, "{}", managed.log());
        // Its client hears that its memory is gone.
        assert!(client.grant(MIB).is_err());
    }
}

#[test]
fn a_start_that_fails_leaves_everything_to_the_next() {
    let mut managed = Managed::start(&["--capacity", "64MiB"]);
    let client = connect(&managed.tcp);
    let extent = client.grant(MIB).unwrap();
    write(&client, &extent, 0, b"here").unwrap();
    managed.end(Signal::SIGTERM);
    let count = managed.count();
    // The settings of the next start are wrong.
    let arguments = managed.arguments.clone();
    let kept = managed.directory.path().join("missing");
    managed
        .arguments
        .extend(["--persist".to_owned(), kept.display().to_string()]);
    let passed = std::mem::take(&mut managed.kept.lock().unwrap().descriptors);
    managed.service = spawn(managed.directory.path(), &managed.arguments, &passed);
    let status = wait_for_end(&mut managed.service, PATIENCE);
    assert_eq!(status.code(), Some(1), "{}", managed.log());
    assert!(managed.log().contains("--persist was"), "{}", managed.log());
    managed.kept.lock().unwrap().descriptors = passed;
    assert_eq!(managed.count(), count);
    managed.arguments = arguments;
    managed.go_on();
    assert_eq!(read(&client, extent.id, 0, 4).unwrap(), b"here");
}
