//! Processes made by `fork` have private copies of all regions.
//!
//! The rule it keeps: a child does nothing but read and write arrays, make system calls, build a
//! runtime of its own, and end. Other threads of the parent may hold any lock at the fork.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::{
    hint::black_box,
    os::fd::AsRawFd,
    ptr,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use common::{
    Fabric, Memory, begin, builder, can_reach, fabrics,
    forks::{
        end, fill, holds_in_own_child, must_pass, start, value, wait_until_nothing_is_held, wrong,
    },
    over_fabrics,
};
use farpage::{Advice, Codec, CreateError, FaultMode, RegionOptions, RemoteArray, Runtime};
use farpage_testkit::{KIB, MIB, Relay, Rng, say, seed, wait_until};
use nix::{
    sys::{
        signal::{Signal, kill},
        wait::WaitStatus,
    },
    unistd::Pid,
};

const PAGE: usize = 16 * KIB;
const PAGE_WORDS: usize = PAGE / 8;
const MODES: [FaultMode; 2] = [FaultMode::Filler, FaultMode::InThread];

/// Returns the status of a child that forks: 0 if `is_right` holds in both.
fn holds_here_and_in_own_child(is_right: impl Fn() -> bool) -> i32 {
    match (holds_in_own_child(&is_right), is_right()) {
        (true, true) => 0,
        (true, false) => 4,
        (false, _) => 5,
    }
}

/// Runtimes over all fabrics and in both modes, with arrays of `words` words that exceed the
/// budget four times.
fn each(
    words: usize,
    options: impl Fn() -> RegionOptions,
    test: impl Fn(&Runtime, RemoteArray<u64>),
) {
    for fabric in fabrics() {
        for mode in MODES {
            let memory = Memory::start(fabric, 256 * MIB);
            let budget = (words * 8 / 4).max(MIB);
            let builder = memory.builder(budget, PAGE).fault_mode(mode);
            let runtime = builder.build().unwrap();
            let array = runtime.array_with(words, options()).unwrap();
            test(&runtime, array);
            wait_until_nothing_is_held(&runtime);
        }
    }
}

#[test]
fn children_read_what_the_parent_had_while_it_writes() {
    let Some(_watchdog) = begin(240) else { return };
    each(4 * MIB / 8, RegionOptions::new, |_, mut array| {
        for round in 1..6 {
            fill(&mut array, round);
            let child = start(|| i32::from(wrong(&array, round) > 0));
            fill(&mut array, round + 100);
            must_pass(child);
            assert_eq!(wrong(&array, round + 100), 0);
        }
    });
}

#[test]
fn compressed_pages_are_read_by_children_too() {
    let Some(_watchdog) = begin(240) else { return };
    let lz4 = || RegionOptions::new().codec(Codec::Lz4);
    each(2 * MIB / 8, lz4, |_, mut array| {
        for (at, word) in array.iter_mut().enumerate() {
            *word = at as u64 / 7;
        }
        let is_right = |array: &[u64]| (0..array.len()).all(|at| array[at] == at as u64 / 7);
        let child = start(|| i32::from(!is_right(&array)));
        array.fill(1);
        must_pass(child);
    });
}

#[test]
fn what_children_write_is_theirs() {
    let Some(_watchdog) = begin(240) else { return };
    each(4 * MIB / 8, RegionOptions::new, |_, mut array| {
        fill(&mut array, 1);
        let at = array.as_mut_ptr();
        let len = array.len();
        let child = start(|| {
            // SAFETY: the child's own copy.
            let array = unsafe { std::slice::from_raw_parts_mut(at, len) };
            fill(&mut array[..len / 2], 2);
            let is_right = wrong(&array[..len / 2], 2) == 0
                && (len / 2..len).all(|at| array[at] == value(at, 1));
            i32::from(!is_right)
        });
        must_pass(child);
        assert_eq!(wrong(&array, 1), 0);
    });
}

#[test]
fn dropped_pages_are_zeros_in_a_child_and_in_its_own_child() {
    let Some(_watchdog) = begin(240) else { return };
    each(4 * MIB / 8, RegionOptions::new, |_, mut array| {
        fill(&mut array, 1);
        let (at, len) = (array.as_mut_ptr(), array.len());
        let dropped = len / 4..len / 2;
        let is_right = |array: &[u64]| {
            (0..len).all(|at| match dropped.contains(&at) {
                true => array[at] == 0,
                false => array[at] == value(at, 1),
            })
        };
        let child = start(|| {
            // SAFETY: the child's own copy, of whole pages.
            let status = unsafe {
                let bytes = dropped.len() * 8;
                libc::madvise(at.add(dropped.start).cast(), bytes, libc::MADV_DONTNEED)
            };
            if status != 0 {
                return 2;
            }
            holds_here_and_in_own_child(|| is_right(&array))
        });
        array.fill(7);
        must_pass(child);
    });
}

/// Protections and unmapped parts divide the mapping within pages. What a child maps anew in a hole
/// is not the region's, also for a child of that child.
#[test]
fn children_of_divided_mappings_read_the_rest_and_zeros_in_new_ones() {
    const PART: usize = 4 * KIB;
    let Some(_watchdog) = begin(240) else { return };
    each(4 * MIB / 8, RegionOptions::new, |_, mut array| {
        fill(&mut array, 1);
        let (at, len) = (array.as_mut_ptr().cast::<u8>(), array.len());
        let protect = |page: usize, access| {
            // SAFETY: a part of a page of the array, which stays readable.
            let done = unsafe { libc::mprotect(at.add(page * PAGE + PART).cast(), PART, access) };
            assert_eq!(done, 0);
        };
        (0..8).for_each(|page| protect(page, libc::PROT_READ));
        array.advise(.., Advice::DontNeed).unwrap();
        let hole = 20 * PAGE + PART..20 * PAGE + 2 * PART;
        let is_right = |array: &[u64]| {
            (0..len).all(|word| match hole.contains(&(word * 8)) {
                true => array[word] == 0,
                false => array[word] == value(word, 1),
            })
        };
        let child = start(|| {
            // SAFETY: the child's own copy.
            let made = unsafe {
                let (at, access) = (at.add(hole.start).cast(), libc::PROT_READ);
                libc::munmap(at, PART);
                let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
                libc::mmap(at, PART, access, kind, -1, 0)
            };
            if made == libc::MAP_FAILED {
                return 2;
            }
            holds_here_and_in_own_child(|| is_right(&array))
        });
        must_pass(child);
        (0..8).for_each(|page| protect(page, libc::PROT_READ | libc::PROT_WRITE));
    });
}

#[test]
fn a_child_that_gives_up_its_rights_has_children_with_all_memory() {
    // SAFETY: always succeeds.
    if unsafe { libc::geteuid() } != 0 {
        return say("only root can give up rights");
    }
    let Some(_watchdog) = begin(240) else { return };
    each(64 * MIB / 8, RegionOptions::new, |_, mut array| {
        fill(&mut array, 1);
        let (receiver, sender) = nix::unistd::pipe().unwrap();
        // System calls read pages that were touched before.
        let is_sent = |word: &u64| {
            let mut copy = 0_u64;
            // SAFETY: a word of the array, and room for another.
            unsafe {
                libc::write(sender.as_raw_fd(), ptr::from_ref(word).cast(), 8) == 8
                    && libc::read(receiver.as_raw_fd(), (&raw mut copy).cast(), 8) == 8
                    && copy == *word
            }
        };
        let child = start(|| {
            // SAFETY: the child's own rights.
            if unsafe { libc::setresuid(65534, 65534, 65534) } != 0 {
                return 2;
            }
            let is_right = || {
                let mut words = array.iter().step_by(PAGE_WORDS);
                wrong(&array, 1) == 0 && words.all(is_sent)
            };
            i32::from(!holds_in_own_child(is_right))
        });
        fill(&mut array, 2);
        must_pass(child);
    });
}

#[test]
fn a_region_ends_before_the_child_that_has_it() {
    over_fabrics(240, 64 * MIB, |memory| {
        let runtime = memory.runtime(MIB, PAGE);
        let mut array: RemoteArray<u64> = runtime.array(4 * MIB / 8).unwrap();
        fill(&mut array, 1);
        let (at, len) = (array.as_ptr(), array.len());
        let child = start(|| {
            // SAFETY: the child's own copy.
            let array = unsafe { std::slice::from_raw_parts(at, len) };
            // SAFETY: waits.
            unsafe { libc::usleep(200_000) };
            i32::from(wrong(array, 1) > 0)
        });
        drop(array);
        let mut other: RemoteArray<u64> = runtime.array(4 * MIB / 8).unwrap();
        fill(&mut other, 2);
        must_pass(child);
        assert_eq!(wrong(&other, 2), 0);
    });
}

/// Each word is announced before it is written. So a child finds what was announced, or what was
/// there before.
#[test]
fn forks_at_any_moment_find_every_page_whole() {
    let Some(_watchdog) = begin(300) else { return };
    let seed = seed();
    each(2 * MIB / 8, RegionOptions::new, |_, mut array| {
        let pages = array.len() / PAGE_WORDS;
        let announced: Vec<AtomicU64> = (0..pages).map(|_| AtomicU64::new(0)).collect();
        // SAFETY: shared by threads that access it by atomics alone.
        let words = unsafe {
            std::slice::from_raw_parts(array.as_mut_ptr().cast::<AtomicU64>(), array.len())
        };
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            for thread in 0..4 {
                let (announced, stop) = (&announced, &stop);
                scope.spawn(move || {
                    let mut rng = Rng(seed ^ thread as u64);
                    while !stop.load(Ordering::Relaxed) {
                        let page = rng.below(pages / 4) * 4 + thread;
                        let next = announced[page].fetch_add(1, Ordering::SeqCst) + 1;
                        for at in 0..PAGE_WORDS / 64 {
                            words[page * PAGE_WORDS + at * 64].store(next, Ordering::SeqCst);
                        }
                    }
                });
            }
            for _ in 0..25 {
                let check = || {
                    let is_right = (0..pages).all(|page| {
                        let now = announced[page].load(Ordering::SeqCst);
                        (0..PAGE_WORDS / 64).all(|at| {
                            let word = words[page * PAGE_WORDS + at * 64].load(Ordering::SeqCst);
                            word == now || word + 1 == now
                        })
                    });
                    i32::from(!is_right)
                };
                must_pass(start(check));
            }
            stop.store(true, Ordering::Relaxed);
        });
    });
}

#[test]
fn advice_and_flush_go_on_while_a_child_lives() {
    let Some(_watchdog) = begin(240) else { return };
    each(4 * MIB / 8, RegionOptions::new, |runtime, mut array| {
        fill(&mut array, 1);
        let child = start(|| {
            // SAFETY: waits to be killed, and not for ever if the test fails.
            unsafe { libc::sleep(60) };
            0
        });
        // All pages are shared with the child; each can leave all the same. Some that were being
        // read ahead may come in meanwhile.
        array.advise(.., Advice::DontNeed).unwrap();
        let resident = runtime.stats().pager.resident_bytes as usize;
        assert!(resident <= 16 * PAGE, "{resident} bytes have not left");
        assert_eq!(wrong(&array, 1), 0);
        fill(&mut array, 2);
        array.flush().unwrap();
        let held = runtime.stats().store.held_bytes;
        assert!(held > 0, "slots are held for the child");
        kill(child, Signal::SIGKILL).unwrap();
        end(child);
    });
}

#[test]
fn a_child_that_calls_exec_holds_nothing() {
    let Some(_watchdog) = begin(240) else { return };
    each(4 * MIB / 8, RegionOptions::new, |runtime, mut array| {
        fill(&mut array, 1);
        let sleep = c"/bin/sleep";
        let arguments = [sleep.as_ptr(), c"30".as_ptr(), std::ptr::null()];
        let child = start(|| {
            // SAFETY: strings of C's, and a null at the end.
            unsafe { libc::execv(sleep.as_ptr(), arguments.as_ptr()) };
            1
        });
        wait_until("the child has called exec", || {
            let command = std::fs::read(format!("/proc/{child}/cmdline")).unwrap();
            command.starts_with(sleep.to_bytes())
        });
        fill(&mut array, 2);
        wait_until_nothing_is_held(runtime);
        kill(child, Signal::SIGKILL).unwrap();
        end(child);
    });
}

#[test]
fn children_by_the_thousand_leave_nothing_behind() {
    let Some(_watchdog) = begin(300) else { return };
    let memory = Memory::start(Fabric::Tcp, 64 * MIB);
    let runtime = memory.runtime(MIB, PAGE);
    let mut array: RemoteArray<u64> = runtime.array(2 * MIB / 8).unwrap();
    fill(&mut array, 1);
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let mut before = 0;
    for round in 0..1000_u64 {
        let child = start(|| {
            if round % 3 == 0 {
                // SAFETY: ends the child as if from outside.
                unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            }
            i32::from(black_box(array[round as usize * 97 % array.len()]) == 0)
        });
        array[round as usize * 31 % (2 * MIB / 8)] ^= 0;
        let ended = end(child);
        let is_killed = matches!(ended, WaitStatus::Signaled(..));
        assert_eq!(is_killed, round % 3 == 0, "{ended:?}");
        if round == 20 {
            before = descriptors();
        }
    }
    wait_until_nothing_is_held(&runtime);
    wait_until("no descriptor is left", || descriptors() <= before);
    assert_eq!(wrong(&array, 1), 0);
}

/// A child whose pages do not leave any more lives longer than an agent may be late.
#[test]
fn a_child_that_locks_its_memory_lives_on() {
    let Some(_watchdog) = begin(240) else { return };
    each(64 * MIB / 8, RegionOptions::new, |_, mut array| {
        fill(&mut array, 1);
        let child = start(|| {
            let mut is_right = wrong(&array, 1) == 0;
            // SAFETY: changes no byte.
            let is_locked = unsafe { libc::mlockall(libc::MCL_CURRENT) } == 0;
            let until = Instant::now() + Duration::from_secs(3);
            while is_locked && Instant::now() < until {
                is_right &= wrong(&array, 1) == 0;
            }
            i32::from(!is_right)
        });
        must_pass(child);
    });
}

/// The arrays of a child's own runtime are apart from its copies of its parent's. The copy of its
/// parent's runtime makes no more arrays.
#[test]
fn a_child_builds_a_runtime_of_its_own_beside_what_it_has_inherited() {
    let Some(_watchdog) = begin(120) else { return };
    let words = 4 * MIB / 8;
    each(words, RegionOptions::new, |runtime, mut array| {
        fill(&mut array, 1);
        must_pass(start(|| {
            let refused = runtime.array::<u64>(words);
            if !matches!(refused, Err(CreateError::Forked)) {
                return 2;
            }
            let own = match runtime.of_child(false) {
                Ok(own) => own,
                Err(error) => {
                    // Devices are opened once.
                    let is_right = error
                        .to_string()
                        .contains("by fork has opened the RDMA devices");
                    return if is_right && fabrics().contains(&Fabric::Rdma) {
                        0
                    } else {
                        4
                    };
                }
            };
            let mut more = own.array::<u64>(words).unwrap();
            fill(&mut more, 2);
            let is_right = || wrong(&array, 1) == 0 && wrong(&more, 2) == 0;
            let status = holds_here_and_in_own_child(is_right);
            fill(&mut array, 3);
            if wrong(&array, 3) > 0 || wrong(&more, 2) > 0 {
                return 3;
            }
            drop(more);
            drop(own);
            status
        }));
        assert_eq!(wrong(&array, 1), 0);
    });
}

#[test]
fn a_child_builds_a_runtime_in_any_mode_whatever_its_parent_has() {
    let Some(_watchdog) = begin(120) else { return };
    let words = 4 * MIB / 8;
    let memory = Memory::start(Fabric::Tcp, 256 * MIB);
    let builder = |mode| memory.builder(MIB, PAGE).fault_mode(mode);
    for (parents, childs) in MODES.iter().flat_map(|mode| MODES.map(|own| (*mode, own))) {
        let runtime = builder(parents).build().unwrap();
        let mut array = runtime.array::<u64>(words).unwrap();
        fill(&mut array, 1);
        must_pass(start(|| {
            let own = builder(childs).build().unwrap();
            let mut more = own.array::<u64>(words).unwrap();
            fill(&mut more, 2);
            i32::from(wrong(&array, 1) > 0 || wrong(&more, 2) > 0)
        }));
        assert_eq!(wrong(&array, 1), 0);
    }
}

/// The runtime does not see a raw call. The child has nothing at the addresses of the array, also
/// where the kernel chooses addresses for its memory.
#[test]
fn a_child_by_a_raw_call_reads_nothing_in_place_of_an_array() {
    let Some(_watchdog) = begin(120) else { return };
    each(4 * MIB / 8, RegionOptions::new, |_, mut array| {
        fill(&mut array, 1);
        // SAFETY: the child makes system calls, touches memory and ends.
        let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
        if child == 0 {
            for bytes in [64 * KIB, MIB, 4 * MIB, 64 * MIB, 1024 * MIB] {
                let access = libc::PROT_READ | libc::PROT_WRITE;
                let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
                for _ in 0..64 {
                    // SAFETY: maps where nothing is.
                    unsafe { libc::mmap(ptr::null_mut(), bytes, access, kind, -1, 0) };
                }
            }
            let status = i32::from(wrong(&array, 1) > 0);
            // SAFETY: ends the child.
            unsafe { libc::_exit(status) };
        }
        let child = Pid::from_raw(child as i32);
        let ended = end(child);
        let is_refused = matches!(ended, WaitStatus::Signaled(_, Signal::SIGSEGV, _));
        assert!(is_refused, "{ended:?}");
        assert_eq!(wrong(&array, 1), 0);
    });
}

/// Children have no connection of their own and no registered memory. Compressed pages pass the
/// parent's.
#[test]
fn children_over_rdma_read_and_change_what_their_parent_had() {
    if !can_reach(Fabric::Rdma) {
        return;
    }
    let Some(_watchdog) = begin(240) else { return };
    for (mode, codec) in [
        (FaultMode::Filler, Codec::Lz4),
        (FaultMode::InThread, Codec::Raw),
    ] {
        let memory = Memory::start(Fabric::Rdma, 64 * MIB);
        let builder = memory.builder(MIB, 64 * KIB).fault_mode(mode);
        let runtime = builder.build().unwrap();
        let options = RegionOptions::new().codec(codec);
        let mut array = runtime.array_with(3 * MIB / 8, options).unwrap();
        fill(&mut array, 1);
        let (at, len) = (array.as_mut_ptr(), array.len());
        let child = start(|| {
            // SAFETY: the child's own copy.
            let own = unsafe { std::slice::from_raw_parts_mut(at, len) };
            let is_right = wrong(own, 1) == 0;
            fill(own, 2);
            i32::from(!is_right || wrong(own, 2) > 0)
        });
        fill(&mut array, 3);
        must_pass(child);
        assert_eq!(wrong(&array, 3), 0);

        let child = start(|| {
            loop {
                black_box(wrong(&array, 3));
            }
        });
        fill(&mut array, 4);
        kill(child, Signal::SIGKILL).unwrap();
        end(child);
        assert_eq!(wrong(&array, 4), 0);
        wait_until_nothing_is_held(&runtime);
    }
}

/// The first page of a child makes the parent connect to the server once more.
#[test]
fn a_child_waits_for_a_server_that_cannot_be_reached_for_a_moment() {
    let Some(_watchdog) = begin(120) else { return };
    let memory = Memory::start(Fabric::Tcp, 64 * MIB);
    let relay = Relay::to(&memory.url);
    let runtime = builder(MIB, PAGE).server(&relay.url).build().unwrap();
    let mut array = runtime.array(4 * MIB / 8).unwrap();
    fill(&mut array, 1);
    let before = relay.accepted();
    relay.refuse(true);
    let child = start(|| i32::from(wrong(&array, 1) > 0));
    wait_until("the relay has refused", || relay.accepted() > before);
    relay.refuse(false);
    must_pass(child);
}
