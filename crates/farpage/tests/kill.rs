//! A memory server that dies or stalls in the middle of things, as a real process and by real
//! signals.
//!
//! The rule it keeps: a program learns of lost memory by a typed error or by SIGBUS within its
//! deadline; it never hangs, and never reads anything but what it wrote. Memory over shm is not
//! lost with the server.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::{
    env, fmt, io,
    os::unix::process::ExitStatusExt,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use common::{
    Fabric, HookedStore, ServerProcess, array_with, begin, builder, can_page, fabrics, get,
    serve_if_asked, set, shared, stored_here,
    words::{assert_filled, fill, rewrite_or_exit},
};
use farpage::{Advice, ByteSize, FlushError, PageError, RegionOptions, RemoteArray, Runtime};
use farpage_fabric::{SessionOptions, Visit};
use farpage_pager::FlushError as PagesError;
use farpage_store::StoreError;
use farpage_testkit::{KIB, MIB, Rng, TestProcess, Watchdog, mix, say, seed, wait_until};
use nix::sys::signal::Signal;

const PAGE_BYTES: usize = 16 * KIB;
const PAGE_WORDS: usize = PAGE_BYTES / 8;
const DEADLINE: Duration = Duration::from_secs(1);
/// Additional time for a busy machine.
const MARGIN: Duration = Duration::from_secs(4);

/// The test that becomes the server process of all tests.
const SERVING: &str = "touching_lost_memory_raises_sigbus_within_the_deadline";

fn server(fabric: Fabric) -> ServerProcess {
    ServerProcess::start(SERVING, fabric, 512 * MIB)
}

/// Returns the fabrics over which memory is lost with the server.
fn networks() -> impl Iterator<Item = Fabric> {
    fabrics()
        .into_iter()
        .filter(|fabric| *fabric != Fabric::Shm)
}

/// Begins a test of memory over shm. `None` if this run has other fabrics, or cannot page.
fn begin_over_shm(seconds: u64) -> Option<Watchdog> {
    begin(seconds).filter(|_| fabrics().contains(&Fabric::Shm))
}

fn runtime(url: &str, budget_bytes: usize) -> Runtime {
    runtime_within(url, budget_bytes, DEADLINE)
}

fn runtime_within(url: &str, budget_bytes: usize, deadline: Duration) -> Runtime {
    builder(budget_bytes, PAGE_BYTES)
        .server(url)
        .deadline(deadline)
        .build()
        .unwrap()
}

/// Asserts that an error is about the server at `url`, and says so.
fn assert_names_server(error: &PageError, url: &str) {
    assert!(
        matches!(error, PageError::Store(StoreError::Remote { server, .. }) if **server == *url),
        "{error:?}"
    );
    assert!(
        error.to_string().contains(url),
        "`{error}` does not name {url}"
    );
}

/// Asserts that what has begun at `since` has ended within `limit`, on a busy machine, too.
#[track_caller]
fn assert_in_time(since: Instant, limit: Duration, what: impl fmt::Display) {
    let took = since.elapsed();
    assert!(took < limit + MARGIN, "{what}: after {took:?}");
}

fn page_error(error: FlushError) -> PageError {
    match error {
        FlushError::Pages(PagesError::Page(error)) => error,
        other => panic!("{other:?}"),
    }
}

/// Freed memory that is kept for its next owner may be lost before or after it is freed.
#[test]
fn freed_memory_that_is_lost_is_given_to_nobody_as_it_is() {
    let Some(_watchdog) = begin(60) else { return };
    for (fabric, freed_before) in networks().flat_map(|f| [(f, false), (f, true)]) {
        let mut server = server(fabric);
        let runtime = runtime(&server.url, 4 * MIB);
        let arena = runtime.arena(8 * MIB).unwrap();
        let block = arena.allocate_uninit(2 * PAGE_BYTES, 1).unwrap();
        for at in 0..2 * PAGE_BYTES {
            // SAFETY: it is ours, and has so many bytes.
            unsafe { block.as_ptr().add(at).write(at as u8) };
        }
        // SAFETY: nobody else has it, and it is used no more.
        let free = || unsafe { arena.deallocate(block) }.unwrap();
        let region = arena.region();
        region.advise(.., Advice::DontNeed).unwrap();
        if freed_before {
            free();
        }
        server.kill();
        region.prefetch_now(..2 * PAGE_BYTES).unwrap_err();
        if !freed_before {
            free();
        }
        let next = arena.allocate_uninit(2 * PAGE_BYTES, 1).unwrap();
        for at in 0..2 * PAGE_BYTES {
            // SAFETY: it is ours, and has so many bytes.
            assert_eq!(unsafe { next.as_ptr().add(at).read_volatile() }, 0);
        }
    }
}

#[test]
fn prefetch_now_tells_of_a_killed_server_within_the_deadline() {
    let Some(_watchdog) = begin(60) else { return };
    for (fabric, changed) in networks().flat_map(|f| [(f, false), (f, true)]) {
        let mut server = server(fabric);
        let runtime = runtime(&server.url, 4 * MIB);
        let mut array = runtime.array::<u64>(16 * MIB / 8).unwrap();
        fill(&mut array, 0);
        if !changed {
            array.flush().unwrap();
        }
        server.kill();
        for _ in 0..3 {
            let since = Instant::now();
            let error = array.prefetch_now(..).unwrap_err();
            assert_in_time(since, DEADLINE, fabric);
            // If the budget is full of pages that cannot be written back, that may be found out
            // first.
            if !(changed && matches!(error, PageError::NoFrame { .. })) {
                assert_names_server(&error, &server.url);
            }
        }
        // The region can be given up, too.
        let since = Instant::now();
        drop(array);
        assert_in_time(since, DEADLINE, fabric);
    }
}

#[test]
fn changed_pages_of_a_killed_server_stay_and_flush_names_it() {
    let Some(_watchdog) = begin(90) else { return };
    for fabric in networks() {
        let mut server = server(fabric);
        let runtime = runtime(&server.url, 4 * MIB);
        let mut array = runtime.array::<u64>(MIB / 8).unwrap();
        array.fill(7);
        array.flush().unwrap();
        server.kill();
        // All of the array is resident: no fault.
        fill(&mut array, 0);
        let mut turn = 7;
        wait_until("a flush fails", || {
            turn += 1;
            // A page of one repeated value would need no WRITE.
            array.iter_mut().step_by(2).for_each(|word| *word = turn);
            array.flush().is_err()
        });
        fill(&mut array, 0);
        let since = Instant::now();
        let error = page_error(array.flush().unwrap_err());
        assert_in_time(since, 2 * DEADLINE, fabric);
        assert_names_server(&error, &server.url);
        assert_names_server(
            &array.advise(.., Advice::DontNeed).unwrap_err(),
            &server.url,
        );
        assert_filled(&array, 0);

        // Pressure from a region with a healthy store takes nothing away either.
        let options = stored_here(8 * MIB);
        let mut other = runtime.array_with::<u64>(8 * MIB / 8, options).unwrap();
        let mut error = None;
        // A write-back fails when its deadline has passed, however fast the other region is.
        wait_until("evictions were tried", || {
            fill(&mut other, 0);
            assert_filled(&other, 0);
            assert_filled(&array, 0);
            error = array.region().take_error();
            error.is_some()
        });
        assert_names_server(&error.expect("waited for it"), &server.url);
        other.close().unwrap();
    }
}

/// Covers a killed server, and a silent one, which clients notice by waiting alone. The changed
/// pages fill many windows of the evictors, each of which would wait on its own.
#[test]
fn a_job_ends_at_its_first_lost_server() {
    let Some(_watchdog) = begin(180) else { return };
    let deadline = Duration::from_secs(2);
    for signal in [Signal::SIGKILL, Signal::SIGSTOP] {
        let server = server(Fabric::Tcp);
        let runtime = runtime_within(&server.url, 192 * MIB, deadline);
        let options = RegionOptions::new().name("lost");
        let mut array = runtime.array_with::<u64>(128 * MIB / 8, options).unwrap();
        fill(&mut array, 0);
        server.signal(signal);
        let timed = |what: &str, since: Instant| {
            println!("{signal}: {what} took {:?}", since.elapsed());
            assert_in_time(since, deadline, format!("{signal}: {what}"));
        };
        let since = Instant::now();
        let error = page_error(array.flush().unwrap_err());
        timed("flush", since);
        assert_names_server(&error, &server.url);
        let since = Instant::now();
        let error = array.close().unwrap_err();
        timed("close", since);
        let array = error.into_inner();
        assert_filled(&array, 0);
        let since = Instant::now();
        drop(array);
        timed("drop", since);
        let since = Instant::now();
        drop(runtime);
        timed("the runtime's drop", since);
    }
}

const VICTIM: &str = "FARPAGE_TEST_VICTIM";

#[test]
fn touching_lost_memory_raises_sigbus_within_the_deadline() {
    if serve_if_asked() {
        return;
    }
    if let Ok(url) = env::var(VICTIM) {
        return be_the_victim(&url);
    }
    let Some(_watchdog) = begin(120) else { return };
    let mut rng = Rng(seed());
    for fabric in networks() {
        for _ in 0..3 {
            let mut server = server(fabric);
            let mut victim = TestProcess::start(&[(VICTIM, &server.url)]);
            victim.wait_for_line("paging");
            // At any moment of its work.
            thread::sleep(Duration::from_micros(rng.below(50_000) as u64));
            server.kill();
            let since = Instant::now();
            let status = victim.wait(DEADLINE + MARGIN);
            let signal = status.signal();
            assert_eq!(signal, Some(Signal::SIGBUS as i32), "{fabric}: {status}");
            let took = since.elapsed();
            println!("{fabric}: SIGBUS {took:?} after the server's death");
        }
    }
}

/// Reads and writes remote memory by four threads until it is lost. A word with a wrong value ends
/// the process with status 3.
fn be_the_victim(url: &str) {
    let runtime = runtime(url, MIB);
    let mut array: RemoteArray<u64> = runtime.array(16 * MIB / 8).unwrap();
    fill(&mut array, 0);
    let (_, words) = shared(&mut array);
    say("paging");
    thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || {
                let mut rng = Rng(thread);
                loop {
                    rewrite_or_exit(words, &mut rng);
                }
            });
        }
    });
}

#[test]
fn a_server_that_stalls_for_less_than_the_deadline_does_no_harm() {
    let Some(_watchdog) = begin(300) else { return };
    for fabric in fabrics() {
        let server = server(fabric);
        let runtime = runtime_within(&server.url, MIB, Duration::from_secs(8));
        let mut array = runtime.array::<u64>(16 * MIB / 8).unwrap();
        fill(&mut array, 0);
        let (_, words) = shared(&mut array);
        let (stop, turns) = (AtomicBool::new(false), AtomicUsize::new(0));
        thread::scope(|scope| {
            for thread in 0..4 {
                let (stop, turns) = (&stop, &turns);
                scope.spawn(move || {
                    let mut rng = Rng(thread);
                    while !stop.load(Ordering::Relaxed) {
                        let at = rng.below(words.len());
                        assert_eq!(get(words, at), mix(at as u64), "{fabric}: word {at}");
                        set(words, at, mix(at as u64));
                        turns.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            for _ in 0..3 {
                server.signal(Signal::SIGSTOP);
                thread::sleep(Duration::from_millis(400));
                server.signal(Signal::SIGCONT);
                let before = turns.load(Ordering::Relaxed);
                wait_until("all threads go on", || {
                    turns.load(Ordering::Relaxed) > before + 1000
                });
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert_filled(&array, 0);
        array.flush().unwrap();
        assert_eq!(runtime.stats().pager.poisoned, 0, "{fabric}");
    }
}

/// Asserts that an operation that needs a server fails in time and says why.
fn assert_needs_server(since: Instant, error: &dyn std::error::Error, why: &str) {
    assert_in_time(since, DEADLINE, error);
    assert!(error.to_string().contains(why), "{error}");
}

#[test]
fn memory_over_shm_outlives_a_killed_server() {
    outlives(ServerProcess::kill);
}

#[test]
fn memory_over_shm_outlives_a_server_that_ends_in_good_order() {
    outlives(ServerProcess::stop);
}

fn outlives(end: fn(&mut ServerProcess)) {
    let Some(_watchdog) = begin_over_shm(120) else {
        return;
    };
    let mut server = server(Fabric::Shm);
    let runtime = runtime(&server.url, MIB);
    let mut array = runtime.array::<u64>(16 * MIB / 8).unwrap();
    // So large that it is granted no more than it reserves: room for two versions. A failed
    // publication must not keep a third.
    let mut named = array_with(&runtime, 16 * MIB / 8, RegionOptions::new().name("kept"));
    fill(&mut array, 0);
    fill(&mut named, 0);
    named.flush().unwrap();
    end(&mut server);
    let ended = "the server's process has ended";
    for turn in 0..4 {
        // Each page comes, goes and changes, also once all threads know that the server is gone.
        assert_filled(&array, 0);
        assert_filled(&named, 0);
        for array in [&mut array, &mut named] {
            array.iter_mut().for_each(|word| *word = !*word);
            array.iter_mut().for_each(|word| *word = !*word);
        }
        array.flush().unwrap();
        array.prefetch_now(..MIB / 16).unwrap();
        let since = Instant::now();
        let error = named.flush().unwrap_err();
        assert_needs_server(since, &error, ended);
        let since = Instant::now();
        let error = runtime.array::<u64>(64 * MIB / 8).unwrap_err();
        assert_needs_server(since, &error, ended);
        println!("turn {turn}: {error}");
    }
    let since = Instant::now();
    let error = named.close().unwrap_err();
    assert_needs_server(since, &error, ended);
    let named = error.into_inner();
    assert_filled(&named, 0);
    assert_filled(&array, 0);
    assert_eq!(runtime.stats().pager.poisoned, 0);
    let since = Instant::now();
    drop((named, array, runtime));
    assert_in_time(since, DEADLINE, "drop");
}

/// A stopped server may take a publication when it goes on. Until then, a publication that has not
/// reached the server keeps no memory, or a region that is published often would run out of room.
#[test]
fn publications_that_a_stopped_server_cannot_take_keep_no_memory() {
    let Some(_watchdog) = begin_over_shm(120) else {
        return;
    };
    let server = server(Fabric::Shm);
    let before = runtime(&server.url, MIB);
    let options = || RegionOptions::new().name("kept");
    let mut array = before.array_with::<u64>(16 * MIB / 8, options()).unwrap();
    fill(&mut array, 0);
    array.flush().unwrap();
    server.signal(Signal::SIGSTOP);
    for _ in 0..4 {
        array.iter_mut().for_each(|word| *word = !*word);
        let since = Instant::now();
        let error = array.flush().unwrap_err();
        assert_needs_server(since, &error, "the server has not answered in time");
        array.iter_mut().for_each(|word| *word = !*word);
    }
    assert_filled(&array, 0);
    server.signal(Signal::SIGCONT);
    array[1] = 1;
    wait_until("the server takes a publication", || array.flush().is_ok());
    array.close().unwrap();
    drop(before);
    let after = runtime(&server.url, MIB);
    let mut array = after.open_array::<u64>("kept").unwrap();
    assert_eq!(array[1], 1);
    array[1] = mix(1);
    assert_filled(&array, 0);
}

const CLIENT: &str = "FARPAGE_TEST_CLIENT";

/// Fills an array, says so, and waits until standard input ends.
fn fill_and_wait(runtime: Runtime) -> (Runtime, RemoteArray<u64>) {
    let mut array = runtime.array::<u64>(8 * MIB / 8).unwrap();
    fill(&mut array, 0);
    array.flush().unwrap();
    say("filled");
    io::stdin().read_line(&mut String::new()).unwrap();
    (runtime, array)
}

#[test]
fn a_client_that_was_stopped_beyond_its_lease_does_not_keep_a_dead_servers_memory() {
    let _watchdog = Watchdog::new(Duration::from_secs(120));
    if let Ok(url) = env::var(CLIENT) {
        let (_runtime, array) = fill_and_wait(runtime(&url, MIB));
        wait_until("the memory is lost", || array.prefetch_now(..).is_err());
        say("lost");
        return;
    }
    if !can_page() || !fabrics().contains(&Fabric::Shm) {
        return;
    }
    let lease = Duration::from_secs(2);
    let mut server = ServerProcess::start_leasing(SERVING, Fabric::Shm, 256 * MIB, lease);
    let mut client = TestProcess::start(&[(CLIENT, &server.url)]);
    client.wait_for_line("filled");
    client.signal(Signal::SIGSTOP);
    // The server may have ended the session by then.
    thread::sleep(2 * lease);
    server.kill();
    client.signal(Signal::SIGCONT);
    client.hang_up();
    client.wait_for_line("lost");
    client.must_pass(Duration::from_secs(30));
}

/// Memory that a server has taken back is no damage, and a new try does not help.
#[test]
fn a_client_that_was_stopped_beyond_its_lease_is_told_what_happened() {
    let _watchdog = Watchdog::new(Duration::from_secs(120));
    if let Ok(url) = env::var(CLIENT) {
        let patient = builder(MIB, PAGE_BYTES).server(url).build().unwrap();
        let (_runtime, array) = fill_and_wait(patient);
        let error = array.prefetch_now(..).unwrap_err();
        assert!(!error.may_retry(), "{error}");
        say(&format!("lost: {error}"));
        return;
    }
    let Some(_watchdog) = begin(60) else { return };
    let lease = Duration::from_secs(4);
    for fabric in fabrics() {
        let server = ServerProcess::start_leasing(SERVING, fabric, 256 * MIB, lease);
        let mut client = TestProcess::start(&[(CLIENT, &server.url)]);
        client.wait_for_line("filled");
        client.signal(Signal::SIGSTOP);
        let visit = || {
            let options = SessionOptions::default();
            let visit = Visit::connect(&server.url.parse().unwrap(), &options);
            let stat = visit.unwrap().stat().unwrap();
            stat.sessions + stat.lost_sessions
        };
        wait_until("its lease has ended", || visit() == 0);
        client.signal(Signal::SIGCONT);
        client.hang_up();
        let said = client.wait_for_line("lost: ");
        assert!(said.contains("for longer than its lease of 4s"), "{said}");
        assert!(said.contains("lent its memory to others"), "{said}");
        client.must_pass(Duration::from_secs(30));
    }
}

/// Memory that went with its server does not come back when the server is started again.
#[test]
fn a_server_that_was_started_anew_says_that_the_memory_is_gone() {
    let Some(_watchdog) = begin(60) else { return };
    for fabric in networks() {
        let mut server = server(fabric);
        let runtime = runtime(&server.url, MIB);
        let mut array = runtime.array::<u64>(8 * MIB / 8).unwrap();
        fill(&mut array, 0);
        array.flush().unwrap();
        server.kill();
        let error = array.prefetch_now(..).unwrap_err();
        let said = error.to_string();
        assert!(said.contains("also when it is started again"), "{said}");
        server.start_again();
        let lost = || array.prefetch_now(..).unwrap_err();
        wait_until("the new server is asked", || !lost().may_retry());
        let said = lost().to_string();
        assert!(said.contains("the server has been started anew"), "{said}");
        assert!(said.contains("is gone"), "{said}");
    }
}

#[test]
fn a_server_that_is_stopped_for_longer_than_its_lease_goes_on_over_shm() {
    let Some(_watchdog) = begin_over_shm(180) else {
        return;
    };
    let lease = Duration::from_secs(3);
    let server = ServerProcess::start_leasing(SERVING, Fabric::Shm, 256 * MIB, lease);
    let runtime = runtime(&server.url, MIB);
    let mut array = runtime.array::<u64>(8 * MIB / 8).unwrap();
    fill(&mut array, 0);
    let work = |array: &mut RemoteArray<u64>, time: Duration| {
        let since = Instant::now();
        while since.elapsed() < time {
            assert_filled(array, 0);
            array.iter_mut().for_each(|word| *word = !*word);
            array.iter_mut().for_each(|word| *word = !*word);
            array.flush().unwrap();
        }
    };
    for _ in 0..2 {
        server.signal(Signal::SIGSTOP);
        work(&mut array, lease + 2 * DEADLINE);
        let since = Instant::now();
        let error = runtime.array::<u64>(64 * MIB / 8).unwrap_err();
        assert_needs_server(since, &error, "the server has not answered in time");
        work(&mut array, DEADLINE);
        server.signal(Signal::SIGCONT);
        wait_until("the server grants again", || {
            runtime.array::<u64>(64 * MIB / 8).is_ok()
        });
        // The lease would end meanwhile if it were not renewed.
        work(&mut array, 2 * lease);
        drop(runtime.array::<u64>(64 * MIB / 8).unwrap());
    }
    assert_eq!(runtime.stats().pager.poisoned, 0);
}

#[test]
fn another_server_serves_the_same_process_after_a_death() {
    let Some(_watchdog) = begin(60) else { return };
    for fabric in fabrics() {
        let mut first = server(fabric);
        let before = runtime(&first.url, MIB);
        let mut lost = before.array::<u64>(4 * MIB / 8).unwrap();
        fill(&mut lost, 0);
        // Changed pages that cannot be written back stay, and would be all of the budget here.
        lost.flush().unwrap();
        first.kill();
        assert_eq!(lost.prefetch_now(..).is_ok(), fabric == Fabric::Shm);

        let second = server(fabric);
        let after = runtime(&second.url, MIB);
        let mut array = after.array::<u64>(4 * MIB / 8).unwrap();
        fill(&mut array, 0);
        assert_filled(&array, 0);
        array.flush().unwrap();
        // The dead server's region still exists.
        assert_eq!(lost.prefetch_now(..).is_ok(), fabric == Fabric::Shm);
        // A region of the first runtime with a store of its own goes on.
        let options = RegionOptions::new()
            .page_size(ByteSize::kib(4))
            .store(HookedStore::new(PAGE_WORDS * 8, |_, _| io::Result::Ok(())));
        let mut own = before.array_with::<u64>(PAGE_WORDS, options).unwrap();
        fill(&mut own, 0);
        own.close().unwrap();
    }
}
