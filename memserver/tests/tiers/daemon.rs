//! A daemon that lends more than its memory: what it holds, and which settings it takes.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Output,
    sync::atomic::AtomicBool,
    thread,
    time::{Duration, Instant},
};

use farpage_fabric::Verb;
use farpage_memserver::{Server, StartError, TiersError};
use farpage_testkit::{PATIENCE, Rng, process::proc_bytes, tcp, wait_until};
use farpage_wire::TierStat;

use super::{
    CHUNK, MEMORY, MIB, churn,
    common::{Daemon, command, connect, read, transfer},
    spill,
};

/// A control group with a limit of memory.
struct Group(PathBuf);

impl Group {
    fn new(bytes: u64) -> Result<Self, String> {
        let own = fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
        let place = own.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            match (fields.next()?, fields.next()?) {
                ("memory", path) => Some((format!("/sys/fs/cgroup/memory{path}"), V1_LIMIT)),
                ("", path) if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() => {
                    Some((format!("/sys/fs/cgroup{path}"), "memory.max"))
                }
                _ => None,
            }
        });
        let (parent, limit) = place.ok_or("no memory controller")?;
        let group = Path::new(&parent).join(format!("farpage-tiers-{}", std::process::id()));
        let failed = |error: std::io::Error| format!("{}: {error}", group.display());
        fs::create_dir(&group).map_err(failed)?;
        let made = Self(group.clone());
        fs::write(group.join(limit), bytes.to_string()).map_err(failed)?;
        Ok(made)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        wait_until("the control group is empty", || {
            fs::remove_dir(&self.0).is_ok()
        });
    }
}

const V1_LIMIT: &str = "memory.limit_in_bytes";

#[test]
fn a_daemon_lives_in_a_control_group_of_its_memory_and_32_mib() {
    let group = match Group::new(MEMORY + 32 * MIB) {
        Ok(group) => group,
        Err(why) => {
            let name = "a_daemon_lives_in_a_control_group_of_its_memory_and_32_mib";
            eprintln!("SKIPPED: {name}: cannot make a control group: {why}");
            return;
        }
    };
    let directory = spill();
    let path = directory.path().to_str().unwrap();
    let arguments = ["--capacity", "160MiB", "--memory", "16MiB", "--spill", path];
    let mut daemon = Daemon::in_group(&group.0, &arguments);
    thread::scope(|scope| {
        for seed in 0..2 {
            let endpoint = &daemon.tcp;
            scope.spawn(move || {
                let session = connect(endpoint);
                let extent = session.grant(5 * MEMORY).unwrap();
                churn(&session, &extent, seed, &AtomicBool::new(false), 500);
            });
        }
    });
    assert!(daemon.child.try_wait().unwrap().is_none(), "it was killed");
    let stat = connect(&daemon.tcp).stat().unwrap();
    // Memory is a tenth of what is used: the figures say so.
    assert!(stat.tiers.evictions > 1000, "{stat:?}");
    assert!(stat.tiers.fetches > 300, "{stat:?}");
    drop(daemon);
}

fn files_left(directory: &Path) -> usize {
    fs::read_dir(directory).unwrap().count()
}

/// Counts the memory of the daemon: its own pages, and all pages of its memfds, mapped or not.
fn held_by(daemon: &Daemon) -> u64 {
    let process = daemon.child.id();
    let kept = ["Pss_Anon", "Pss_File"].map(|name| proc_bytes(process, "smaps_rollup", name));
    let own = kept.iter().sum::<usize>() as u64;
    let memfds = fs::read_dir(format!("/proc/{process}/fd"))
        .unwrap()
        .flatten();
    let memfds = memfds.filter(|fd| {
        fs::read_link(fd.path()).is_ok_and(|to| to.to_string_lossy().contains("memfd:"))
    });
    own + memfds
        .map(|fd| fs::metadata(fd.path()).map_or(0, |of| of.blocks() * 512))
        .sum::<u64>()
}

#[test]
fn a_daemon_holds_no_more_than_its_memory_and_leaves_nothing_when_it_is_killed() {
    let directory = spill();
    let path = directory.path().to_str().unwrap();
    let arguments = ["--capacity", "80MiB", "--memory", "16MiB", "--spill", path];
    let mut daemon = Daemon::over_tcp(&arguments);
    assert_eq!(
        files_left(directory.path()),
        0,
        "the spill file has no name"
    );
    let session = connect(&daemon.tcp);
    let extent = session.grant(5 * MEMORY).unwrap();
    let before = held_by(&daemon);
    let ends = AtomicBool::new(false);
    let most = thread::scope(|scope| {
        let busy = scope.spawn(|| churn(&session, &extent, 11, &ends, 600));
        let mut most = 0;
        while !busy.is_finished() {
            most = most.max(held_by(&daemon));
        }
        busy.join().unwrap();
        most
    });
    // `before` has the daemon's code, stacks, heap and tables, and no lent memory.
    assert!(most <= before + MEMORY + 8 * MIB, "{most} after {before}");
    // Killed while a client reads what is on the disk.
    let mut channel = session.channel::<Vec<u8>>().unwrap();
    let hurt = thread::scope(|scope| {
        let reads = scope.spawn(|| {
            let until = Instant::now() + PATIENCE;
            let mut random = Rng(5);
            loop {
                let at = random.below(5 * MEMORY as usize - CHUNK) as u64;
                let bytes = vec![0; CHUNK];
                match transfer(&mut *channel, Verb::Read, extent.id, at, bytes) {
                    Ok(_) => assert!(Instant::now() < until, "the server was killed"),
                    Err(error) => return error,
                }
            }
        });
        thread::sleep(Duration::from_millis(20));
        daemon.child.kill().unwrap();
        reads.join().unwrap()
    });
    assert!(hurt.is_transient(), "{hurt}");
    daemon.wait();
    assert_eq!(files_left(directory.path()), 0);
    let again = Daemon::over_tcp(&arguments);
    let session = connect(&again.tcp);
    let extent = session.grant(5 * MEMORY).unwrap();
    assert_eq!(
        read(&session, extent.id, 9 * MIB, CHUNK).unwrap(),
        [0; CHUNK]
    );
}

fn refusal(arguments: &[&str]) -> String {
    let Output { status, stderr, .. } = command().arg("serve").args(arguments).output().unwrap();
    let said = String::from_utf8(stderr).unwrap();
    assert!(!status.success(), "{said}");
    said
}

#[test]
fn settings_that_do_not_fit_together_are_refused_and_say_what_to_give() {
    let directory = spill();
    let path = directory.path().to_str().unwrap();
    let over_tcp = ["--listen", "tcp://127.0.0.1:0", "--capacity", "64MiB"];
    let cases: [(&[&str], &str); 5] = [
        (&["--memory", "32MiB"], "--spill"),
        (&["--spill", path], "give both or none"),
        (&["--memory", "1MiB", "--spill", path], "16 MiB"),
        (
            &["--memory", "32MiB", "--spill", "/nowhere/at/all"],
            "directory on a disk",
        ),
        (&["--memory", "32MiB", "--spill", "/dev/shm"], "tmpfs"),
    ];
    for (arguments, expected) in cases {
        let said = refusal(&[&over_tcp, arguments].concat());
        assert!(said.contains(expected), "{arguments:?}: {said}");
    }
    let too_much = Server::builder()
        .listen(tcp())
        .capacity(64 * MIB)
        .memory(32 * MIB)
        .start();
    let refused = too_much.map(drop).unwrap_err();
    assert!(
        matches!(refused, StartError::Tiers(TiersError::NoSpill)),
        "{refused}"
    );
    // All of it may be in memory: nothing has to leave.
    let enough = Server::builder()
        .listen(tcp())
        .capacity(32 * MIB)
        .memory(32 * MIB)
        .start()
        .unwrap();
    wait_until("it serves", || enough.stat().tiers == TierStat::default());
}
