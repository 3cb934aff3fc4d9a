//! A program that closes descriptors which it has not opened.
//!
//! The rule it keeps: the program reads the values that it wrote, or ends with a line. Absent pages
//! are never zeros.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::{
    env,
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    os::{
        fd::AsRawFd,
        unix::{fs::FileExt, process::ExitStatusExt},
    },
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use common::{Fabric, HookedStore, Memory, begin, builder, over_fabrics, stored};
use farpage::{FaultMode, RegionOptions, RemoteArray, Runtime, Store};
use farpage_testkit::{KIB, MIB, finish, mix, test_command, test_name, text, wait_until};
use nix::sys::signal::Signal;
use tempfile::NamedTempFile;

const PAGE: usize = 4 * KIB;
const BUDGET: usize = MIB;
const LEN: usize = 4 * MIB / 8;

/// Variable that makes a test the program: how it closes descriptors, how its faults are served,
/// and where its memory is.
const PROGRAM: &str = "FARPAGE_TEST_CLOSES";

/// Exit status of a program that has read a value which it did not write.
const WRONG: i32 = 3;

/// Closes the runtime's descriptors by number, or puts the file at the path `how` in their place.
fn close(how: &str) {
    if how == "close" {
        // SAFETY: the program ends without using what it has open.
        unsafe { libc::close_range(3, u32::MAX, 0) };
        return;
    }
    let file = (File::options().read(true).write(true).open(how)).unwrap();
    for number in 3..200 {
        // SAFETY: as above.
        unsafe { libc::dup2(file.as_raw_fd(), number) };
    }
    std::mem::forget(file);
}

/// Runs as the program, if `test` was started for it.
fn be_the_program() {
    let Ok(what) = env::var(PROGRAM) else {
        return;
    };
    let [how, mode, memory] = what.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{PROGRAM}={what}");
    };
    let runtime: Runtime = match (mode, memory) {
        ("in-thread", url) => builder(BUDGET, PAGE)
            .fault_mode(FaultMode::InThread)
            .server(url),
        (_, "store") => builder(BUDGET, PAGE),
        (_, url) => builder(BUDGET, PAGE).server(url),
    }
    .build()
    .unwrap();
    let mut options = RegionOptions::new();
    if memory == "store" {
        options = options.store(HookedStore::new(LEN * 8, |_, _| Ok(())));
    }
    let mut array: RemoteArray<u64> = runtime.array_with(LEN, options).unwrap();
    let written = |at: usize| mix(at as u64);
    (array.iter_mut().enumerate()).for_each(|(at, word)| *word = written(at));
    close(how);
    for _ in 0..2 {
        for at in (0..LEN).rev() {
            if array[at] != written(at) {
                process::exit(WRONG);
            }
            array[at] = written(at);
        }
    }
    let more: RemoteArray<u64> = runtime.array(LEN).unwrap_or_else(|_| {
        // Only servers have memory for a second array.
        assert_eq!(memory, "store");
        process::exit(0)
    });
    assert!(more.iter().all(|&word| word == 0));
    array.discard_range(..LEN / 2).unwrap();
    assert!(array[..LEN / 2].iter().all(|&word| word == 0));
    assert_eq!(array[LEN / 2], written(LEN / 2));
    drop((array, more, runtime));
    process::exit(0);
}

/// Runs `test` as the program. Returns true if the program went on to its end with all its data. If
/// not, asserts that a line has said why.
fn goes_on(what: &str) -> bool {
    let mut program = test_command(&test_name());
    let ended = finish(program.env(PROGRAM, what), Duration::from_secs(100));
    let (status, said) = (ended.status, text(&ended.stderr));
    assert_ne!(
        status.code(),
        Some(WRONG),
        "{what}: it read something else than it wrote"
    );
    if status.success() {
        return true;
    }
    assert_eq!(
        status.signal(),
        Some(Signal::SIGABRT as i32),
        "{what}: {status}, {said}"
    );
    assert!(
        said.contains("has closed or replaced a descriptor"),
        "{what}: {said}"
    );
    false
}

#[test]
fn closed_descriptors_leave_no_zeros_behind() {
    be_the_program();
    let Some(_watchdog) = begin(300) else { return };
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    let file = NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    for how in ["close", "/dev/zero", path] {
        for (mode, at) in [("in-thread", &*memory.url), ("filler", "store")] {
            let what = format!("{how} {mode} {at}");
            assert!(!goes_on(&what), "{what}: its descriptors are in reach");
            let len = file.as_file().metadata().unwrap().len();
            assert_eq!(len, 0, "{what}: it wrote to a file of the program's");
        }
    }
}

#[test]
fn program_whose_runtime_keeps_descriptors_apart_goes_on() {
    be_the_program();
    over_fabrics(300, 64 * MIB, |memory| {
        for how in ["close", "/dev/zero"] {
            let what = format!("{how} filler {}", memory.url);
            assert!(goes_on(&what), "{what}: its descriptors are out of reach");
        }
    });
}

/// A store of a file that the program has opened. Notes that the file is closed.
struct Opened {
    file: File,
    is_closed: Arc<AtomicBool>,
}

impl Store for Opened {
    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buf, offset)
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.file.write_all_at(buf, offset)
    }

    fn flush(&self) -> io::Result<()> {
        self.file.sync_all()
    }

    fn may_block(&self) -> bool {
        false
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // Fails if the number is another file's here.
        let closed = self
            .file
            .metadata()
            .is_ok_and(|file| file.len() == LEN as u64 * 8);
        self.is_closed.store(closed, Ordering::SeqCst);
    }
}

/// The runtime has servers, so the threads that move pages do not have the program's descriptors.
#[test]
fn stores_beside_servers_use_the_programs_descriptors() {
    let Some(_watchdog) = begin(100) else { return };
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    let runtime = memory.runtime(BUDGET, PAGE);
    let mut file = tempfile::tempfile().unwrap();
    file.set_len(LEN as u64 * 8).unwrap();
    let is_closed = Arc::<AtomicBool>::default();
    let store = Opened {
        file: file.try_clone().unwrap(),
        is_closed: is_closed.clone(),
    };
    let options = stored(store);
    let mut array: RemoteArray<u64> = runtime.array_with(LEN, options).unwrap();
    for round in 1..3 {
        for (at, word) in array.iter_mut().enumerate() {
            assert_eq!(*word, if round == 1 { 0 } else { mix(at as u64 + 1) });
            *word = mix(at as u64 + round);
        }
        array.flush().unwrap();
    }
    array.close().unwrap();
    // A worker may hold the store for a moment longer.
    wait_until("the store's file is closed", || {
        is_closed.load(Ordering::SeqCst)
    });
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_to_end(&mut bytes).unwrap();
    let (words, _) = bytes.as_chunks::<8>();
    for (at, word) in words.iter().enumerate() {
        assert_eq!(u64::from_ne_bytes(*word), mix(at as u64 + 2), "word {at}");
    }
}
