//! Ends of arrays when things go wrong: a panic, a close that fails, a fork, a server that is
//! killed.
//!
//! The rule it keeps: the last published version stays whole, changes that were not made safe stay
//! with the program, and the program is told.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::{
    env, fs,
    io::{self, Read},
    os::unix::process::ExitStatusExt,
    panic::{AssertUnwindSafe, catch_unwind},
    process, ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use common::{
    Call, Fabric, HookedStore, Memory, ServerProcess, array_with, begin, builder,
    forks::{must_pass, start},
    serve_if_asked, stored,
    words::{assert_filled, fill, word},
};
use farpage::{
    Advice, Builder, ByteSize, CreateError, RegionOptions, RemoteArray, Reserve, Runtime,
    error::StoreCreateError,
};
use farpage_testkit::{
    KIB, MIB, Rng, TestProcess, finish, mix, say, test_command, test_name, text,
};
use nix::sys::signal::Signal;

const PAGE: usize = 4 * KIB;
const PAGE_WORDS: usize = PAGE / 8;

fn named(name: &str) -> RegionOptions {
    RegionOptions::new().name(name)
}

#[test]
fn a_panic_publishes_nothing() {
    let Some(_watchdog) = begin(60) else { return };
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    let runtime = memory.runtime(MIB, PAGE);
    let mut array = array_with(&runtime, 64 * PAGE_WORDS, named("ledger"));
    array.fill(1);
    array.flush().unwrap();
    let outcome = catch_unwind(AssertUnwindSafe(move || {
        let half = array.len() / 2;
        array[..half].fill(2);
        panic!("a bug of the program's");
    }));
    assert!(outcome.is_err());
    let array = runtime.open_array::<u64>("ledger").unwrap();
    assert!(
        array.iter().all(|&word| word == 1),
        "half of the array was updated, and it was published"
    );
}

/// Makes an array while a panic unwinds, and closes it if the flag is set.
struct Cleaner<'a>(&'a farpage::Runtime, &'static str, bool);

impl Drop for Cleaner<'_> {
    fn drop(&mut self) {
        let mut array: RemoteArray<u64> = self.0.array_with(PAGE_WORDS, named(self.1)).unwrap();
        array.fill(3);
        if self.2 {
            array.close().unwrap();
        }
    }
}

#[test]
fn while_a_panic_unwinds_only_close_publishes() {
    let Some(_watchdog) = begin(60) else { return };
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    let runtime = memory.runtime(MIB, PAGE);
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let _dropped = Cleaner(&runtime, "dropped", false);
        let _closed = Cleaner(&runtime, "closed", true);
        panic!("a bug of the program's");
    }));
    assert!(outcome.is_err());
    assert!(runtime.open_array::<u64>("dropped").is_err());
    assert_eq!(runtime.open_array::<u64>("closed").unwrap()[0], 3);
}

#[test]
fn a_close_that_fails_gives_the_array_back() {
    let Some(_watchdog) = begin(60) else { return };
    let full = Arc::new(AtomicBool::new(true));
    let (is_full, disk) = (full.clone(), Arc::new(AtomicBool::new(false)));
    let written = disk.clone();
    let store = HookedStore::new(8 * PAGE, move |call, _| {
        if call != Call::Read && is_full.load(Ordering::Relaxed) {
            return Err(io::Error::other("the disk is full"));
        }
        written.fetch_or(call == Call::Write, Ordering::Relaxed);
        Ok(())
    });
    let runtime = builder(MIB, PAGE).build().unwrap();
    let mut array = array_with(&runtime, 8 * PAGE_WORDS, stored(store));
    array.fill(7);
    let error = array.close().unwrap_err();
    assert!(error.to_string().contains("the disk is full"), "{error}");
    let array = error.into_inner();
    assert!(array.iter().all(|&word| word == 7), "it is what it was");
    full.store(false, Ordering::Relaxed);
    array.close().unwrap();
    assert!(disk.load(Ordering::Relaxed));
}

#[test]
fn overwriting_is_copying_where_nothing_is_lost() {
    let Some(_watchdog) = begin(60) else { return };
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    let runtime = memory.runtime(MIB, PAGE);
    let mut array: RemoteArray<u64> = runtime.array(4 * PAGE_WORDS).unwrap();
    array.overwrite(PAGE_WORDS - 1, &[1, 2, 3]).unwrap();
    assert_eq!(array[PAGE_WORDS - 2..PAGE_WORDS + 3], [0, 1, 2, 3, 0]);
}

#[test]
fn a_named_array_reserves_both_versions_or_is_refused() {
    let Some(_watchdog) = begin(120) else { return };
    let words = 8 * MIB / 8;
    // Room for one version and some more, as arrays without a name reserve.
    let small = Memory::start(Fabric::Shm, 10 * MIB);
    let error = (small.runtime(2 * MIB, PAGE))
        .array_with::<u64>(words, named("field"))
        .unwrap_err();
    let needed_bytes = match error {
        CreateError::Store(StoreCreateError::Alloc { needed_bytes, .. }) => needed_bytes,
        other => panic!("{other}"),
    };
    assert!(error.to_string().contains(&needed_bytes.to_string()));
    assert!(error.to_string().contains("two versions"), "{error}");
    let on_demand = named("field").reserve(Reserve::OnDemand);
    (small.runtime(2 * MIB, PAGE))
        .array_with::<u64>(words, on_demand)
        .unwrap();

    // The memory that the error asks for is enough: for both versions, their maps, and pages that
    // leave during a publication. The server keeps the name besides.
    let enough = Memory::start(Fabric::Shm, needed_bytes as usize + 64 * KIB);
    let runtime = enough.runtime(2 * MIB, PAGE);
    let mut field: RemoteArray<u64> = runtime.array_with(words, named("field")).unwrap();
    let mut rng = Rng(7);
    for round in 1..4 {
        // Scattered writes, so that slots of old versions come free between others.
        for _ in 0..words / 64 {
            let at = rng.below(words);
            field[at] = word(at, round);
        }
        field.flush().unwrap();
        fill(&mut field, round);
        field.flush().unwrap();
        assert!(field.take_error().is_none());
    }
    drop(field);
    let field = runtime.open_array::<u64>("field").unwrap();
    assert_filled(&field, 3);
}

const FORKS: &str = "FARPAGE_TEST_FORKS";

#[test]
fn a_forked_child_is_refused_and_harms_nobody() {
    if let Ok(mode) = env::var(FORKS) {
        return fork_children(&mode);
    }
    let Some(_watchdog) = begin(240) else { return };
    for mode in ["filler", "in-thread"] {
        TestProcess::start(&[(FORKS, mode)]).must_pass(Duration::from_secs(110));
    }
}

/// Runs in a process of its own: no other thread prints, or holds a lock of the standard library,
/// during the fork.
fn fork_children(mode: &str) {
    let memory = Memory::start(Fabric::Tcp, 64 * MIB);
    let builder = memory.builder(MIB, PAGE);
    let runtime = builder.fault_mode(mode.parse().unwrap()).build().unwrap();
    let words = 4 * MIB / 8;
    let mut plain: RemoteArray<u64> = runtime.array(words).unwrap();
    let mut ledger: RemoteArray<u64> = runtime.array_with(words, named("ledger")).unwrap();
    plain.fill(1);
    ledger.fill(2);
    ledger.flush().unwrap();
    ledger[0] = 3;

    in_child(|| {
        let says = [
            plain.prefetch_now(..).unwrap_err().to_string(),
            plain.advise(.., Advice::DontNeed).unwrap_err().to_string(),
            plain.pin(..1).unwrap_err().to_string(),
            ledger.flush().unwrap_err().to_string(),
            runtime.array::<u64>(9).unwrap_err().to_string(),
            runtime.open_array::<u64>("ledger").unwrap_err().to_string(),
        ];
        assert!(says.iter().all(|it| it.contains("fork")), "{says:?}");
        plain.unpin(..);
        assert!(plain.take_error().is_some());
        assert!(runtime.sessions().is_empty());
        assert_eq!(runtime.stats().pager.resident_bytes, 0);
    });

    // A child that returns from `main` drops its values.
    let arrays = (plain, ledger, runtime);
    in_child(|| {
        // SAFETY: the child ends after this, and the parent has a copy of its own.
        drop(unsafe { ptr::read(&arrays) });
    });
    let (plain, mut ledger, runtime) = arrays;

    // The child reads what its parent had.
    in_child(|| assert!(plain.iter().all(|&word| word == 1) && ledger[0] == 3));

    // The child can begin anew.
    in_child(|| {
        let runtime = memory.builder(MIB, PAGE).build().unwrap();
        let mut own: RemoteArray<u64> = runtime.array(4 * PAGE_WORDS).unwrap();
        own.fill(5);
        own.advise(.., Advice::DontNeed).unwrap();
        assert!(own.iter().all(|&word| word == 5));
    });

    // Nothing of the parent was given back, published or disturbed.
    assert!(plain.iter().all(|&word| word == 1));
    assert!(ledger[1..].iter().all(|&word| word == 2));
    assert_eq!(ledger[0], 3);
    ledger[0] = 4;
    ledger.close().unwrap();
    assert_eq!(runtime.open_array::<u64>("ledger").unwrap()[0], 4);
}

/// Runs `child` in a child made by `fork`, which must pass, and not hang.
fn in_child(child: impl FnOnce()) {
    must_pass(start(|| {
        let outcome = catch_unwind(AssertUnwindSafe(child));
        // Ends as a return from `main` would.
        process::exit(i32::from(outcome.is_err()));
    }));
}

const VICTIM: &str = "FARPAGE_TEST_LAST_WORDS";

/// The server process of the next test, and not a test of its own.
#[test]
fn serve_until_killed() {
    serve_if_asked();
}

#[test]
fn a_program_that_a_killed_server_ends_reads_why_once() {
    if let Ok(what) = env::var(VICTIM) {
        let (mode, url) = what.split_once(' ').unwrap();
        return die_of_lost_memory(mode, url);
    }
    let Some(_watchdog) = begin(180) else { return };
    for (mode, wanted) in [("filler", "1"), ("in-thread", "1"), ("filler", "0")] {
        let server = ServerProcess::start("serve_until_killed", Fabric::Tcp, 64 * MIB);
        let url = server.url.clone();
        let said = words_of_the_dying(mode, server, wanted);
        let words: Vec<_> = said.lines().filter(|l| l.starts_with("farpage:")).collect();
        if wanted == "0" {
            assert!(words.is_empty(), "{said}");
            continue;
        }
        assert_eq!(words.len(), 1, "{mode}: {said}");
        for part in ["array `squares`", "page ", &url, "SIGBUS", "prefetch_now"] {
            assert!(words[0].contains(part), "{part} is not in: {}", words[0]);
        }
    }
}

/// Runs the test in a process of its own, and kills its server when the process says that it is
/// ready. Returns the output of the process until SIGBUS ends it.
fn words_of_the_dying(mode: &str, mut server: ServerProcess, wanted: &str) -> String {
    let stderr = tempfile::NamedTempFile::new().unwrap();
    let mut command = test_command(&test_name());
    command
        .env(VICTIM, format!("{mode} {}", server.url))
        .env("FARPAGE_LAST_WORDS", wanted)
        .stderr(stderr.reopen().unwrap());
    let mut victim = TestProcess::spawn(&mut command);
    victim.wait_for_line("ready");
    server.kill();
    victim.hang_up();
    let status = victim.wait(Duration::from_secs(40));
    assert_eq!(status.signal(), Some(Signal::SIGBUS as i32), "{status}");
    fs::read_to_string(stderr.path()).unwrap()
}

#[test]
fn a_program_that_prints_a_lost_page_reads_why() {
    if let Ok(what) = env::var(VICTIM) {
        let (mode, url) = what.split_once(' ').unwrap();
        let (_runtime, array) = remote_squares(mode, url);
        // The page is touched while the lock of standard error is held.
        return eprintln!("read {}", array[32 * PAGE_WORDS]);
    }
    let Some(_watchdog) = begin(180) else { return };
    for mode in ["filler", "in-thread"] {
        let server = ServerProcess::start("serve_until_killed", Fabric::Tcp, 64 * MIB);
        let said = words_of_the_dying(mode, server, "1");
        assert!(said.contains("farpage: fill of page "), "{mode}: {said}");
    }
}

#[test]
fn program_whose_pages_a_full_server_does_not_take_reads_which_server() {
    if let Ok(what) = env::var(VICTIM) {
        let (mode, url) = what.split_once(' ').unwrap();
        return outgrow_server(mode, url);
    }
    let Some(_watchdog) = begin(180) else { return };
    for mode in ["filler", "in-thread"] {
        let server = Memory::start(Fabric::Tcp, 2 * MIB);
        let mut program = test_command(&test_name());
        program.env(VICTIM, format!("{mode} {}", server.url));
        let output = finish(&mut program, Duration::from_secs(120));
        let said = text(&output.stderr);
        assert_eq!(
            output.status.signal(),
            Some(Signal::SIGBUS as i32),
            "{said}"
        );
        let words = said.lines().find(|line| line.starts_with("farpage:"));
        let words = words.unwrap_or_else(|| panic!("no last words: {said}"));
        let full = format!("{} has no room for", server.url);
        assert!(
            words.contains(&full) && words.contains("capacity of 2.0 MiB"),
            "{words}"
        );
        assert!(!words.contains("pinned"), "{words}");
    }
}

/// Builds a runtime that waits a second for its server.
fn hurried(mode: &str, url: &str) -> Runtime {
    builder(MIB, PAGE)
        .server(url)
        .fault_mode(mode.parse().unwrap())
        .deadline(Duration::from_secs(1))
        .build()
        .unwrap()
}

/// Writes more than the server and the budget hold together, to memory that is taken on demand.
fn outgrow_server(mode: &str, url: &str) {
    let runtime = hurried(mode, url);
    let options = RegionOptions::new().reserve(Reserve::OnDemand);
    let mut array: RemoteArray<u64> = runtime.array_with(MIB, options).unwrap();
    fill(&mut array, 0);
    panic!("8 MiB fit into 3");
}

/// Touches pages of a killed server, after many of them were asked for in vain.
fn die_of_lost_memory(mode: &str, url: &str) {
    let (_runtime, array) = remote_squares(mode, url);
    assert!(array.prefetch_now(..).is_err());
    panic!("read {}", array[32 * PAGE_WORDS]);
}

/// Makes an array whose pages are all at the server, which is killed before this returns.
fn remote_squares(mode: &str, url: &str) -> (Runtime, RemoteArray<u64>) {
    let runtime = hurried(mode, url);
    let mut array = array_with(&runtime, 64 * PAGE_WORDS, named("squares"));
    fill(&mut array, 0);
    array.advise(.., Advice::DontNeed).unwrap();
    say("ready");
    io::stdin().read_to_end(&mut Vec::new()).unwrap();
    (runtime, array)
}

#[test]
fn a_region_as_large_as_the_address_space_is_refused() {
    let Some(_watchdog) = begin(60) else { return };
    let memory = Memory::start(Fabric::Shm, 64 * MIB);
    let runtime = Runtime::builder().server(&memory.url).build().unwrap();
    for bytes in [usize::MAX, usize::MAX / 2 + 2] {
        assert!(runtime.region(bytes).is_err());
    }
}

#[test]
fn small_arrays_take_small_pages_unless_told_otherwise() {
    let Some(_watchdog) = begin(60) else { return };
    let memory = Memory::start(Fabric::Shm, 256 * MIB);
    let build = || {
        let builder = Runtime::builder().server(&memory.url);
        builder.budget(ByteSize::mib(4)).fillers(2)
    };
    let runtime = build().build().unwrap();
    let pages = |runtime: &Runtime, bytes: usize| {
        let region = runtime.region(bytes).unwrap();
        region.page_bytes()
    };
    let expected = [
        (800, 4),
        (64 * KIB, 4),
        (256 * KIB, 16),
        (MIB, 64),
        (8 * MIB, 64),
    ];
    for (bytes, kib) in expected {
        assert_eq!(pages(&runtime, bytes), kib * KIB, "{bytes} bytes");
    }
    let told = build().page_size(ByteSize::kib(64)).build().unwrap();
    assert_eq!(pages(&told, 800), 64 * KIB);

    let arrays: Vec<_> = (0..1000u64)
        .map(|number| {
            let mut array = runtime.array::<u64>(100).unwrap();
            array
                .iter_mut()
                .enumerate()
                .for_each(|(at, word)| *word = mix(at as u64 ^ number << 32));
            array.advise(.., Advice::DontNeed).unwrap();
            array
        })
        .collect();
    let moved_bytes = runtime.stats().store.bytes_written;
    println!(
        "{} arrays of 800 bytes: {moved_bytes} bytes moved",
        arrays.len()
    );
    assert!(moved_bytes <= 1000 * 4 * KIB as u64);
}

#[test]
fn options_that_make_no_sense_are_refused_when_the_runtime_is_built() {
    let says = |builder: Builder| builder.build().unwrap_err().to_string();
    let error = says(Runtime::builder().page_size(ByteSize::kib(3)));
    assert!(
        error.contains("3.0 KiB") && error.contains("power of two"),
        "{error}"
    );
}
