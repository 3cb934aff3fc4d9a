//! The memory of processes made by `fork` is under the budget, together with that of their parent.
//!
//! The rule it keeps: a child does nothing but read and write arrays and memory that was made
//! before the fork, make system calls, and end.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::{
    ffi::c_void,
    fs,
    ops::Range,
    os::fd::AsRawFd,
    ptr,
    sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering},
    time::Duration,
};

use common::{
    Memory, begin, fabrics,
    forks::{
        end, end_beside, fill, has_passed, holds_in_own_child, must_pass, start, value,
        wait_until_nothing_is_held, wrong,
    },
};
use farpage::{Advice, FaultMode, RemoteArray, Runtime};
use farpage_testkit::{KIB, MIB, Rng, seed, wait_until};
use nix::{
    sys::{
        signal::{Signal, kill},
        wait::WaitStatus,
    },
    unistd::Pid,
};

const PAGE: usize = 16 * KIB;
const PAGE_WORDS: usize = PAGE / 8;
/// Budget of the runtimes. All children together may have half of it.
const BUDGET: usize = 16 * MIB;
/// Size of the arrays, of which a child may have a twelfth.
const BYTES: usize = 96 * MIB;
/// Bytes that a child may bring in before the keeper looks after them.
const GROWN: usize = 16 * MIB;
/// Bytes that may be on their way.
const SLACK: usize = 4 * MIB;

/// Calls `test`, for `seconds` at most, with runtimes in both modes, over all fabrics, with an
/// array of which nothing is present, and much room on the server.
fn each(seconds: u64, test: impl Fn(&Memory, &Runtime, RemoteArray<u64>)) {
    each_of(seconds, (1024 * MIB, BUDGET, PAGE), test);
}

/// Calls `test` as [`each`] does. The runtimes have a capacity of the server, a budget and a length
/// of pages.
fn each_of(
    seconds: u64,
    (capacity, budget, page): (usize, usize, usize),
    test: impl Fn(&Memory, &Runtime, RemoteArray<u64>),
) {
    let Some(_watchdog) = begin(seconds) else {
        return;
    };
    for fabric in fabrics() {
        for mode in [FaultMode::Filler, FaultMode::InThread] {
            let memory = Memory::start(fabric, capacity);
            let builder = memory.builder(budget, page).fault_mode(mode);
            let runtime = builder.build().unwrap();
            let mut array = runtime.array(BYTES / 8).unwrap();
            fill(&mut array, 1);
            array.advise(.., Advice::DontNeed).unwrap();
            test(&memory, &runtime, array);
            wait_until_nothing_is_held(&runtime);
        }
    }
}

fn addresses(array: &[u64]) -> Range<usize> {
    let bytes = array.as_ptr_range();
    bytes.start.addr()..bytes.end.addr()
}

/// Returns the bytes of a process's memory at `addresses`.
fn resident(process: Pid, addresses: &Range<usize>) -> usize {
    let Ok(text) = fs::read_to_string(format!("/proc/{process}/smaps")) else {
        return 0;
    };
    let (mut is_within, mut bytes) = (false, 0);
    for line in text.lines() {
        let first = line.split(' ').next().unwrap_or_default();
        if let Some((start, end)) = first.split_once('-') {
            let at = |text| usize::from_str_radix(text, 16).unwrap();
            is_within = addresses.start <= at(start) && at(end) <= addresses.end;
        } else if is_within && first == "Rss:" {
            let kib = line.split_whitespace().nth(1).unwrap();
            bytes += kib.parse::<usize>().unwrap() * KIB;
        }
    }
    bytes
}

/// Waits for a child, which must end with status 0. Returns the most bytes that it had of the
/// array at once.
fn must_pass_within(child: Pid, array: &Range<usize>) -> usize {
    let mut most = 0;
    let look = || most = most.max(resident(child, array));
    let ended = end_beside(child, Duration::from_secs(120), look);
    assert_eq!(ended, WaitStatus::Exited(child, 0));
    most
}

/// Returns the child's own copy of an array.
fn own(array: *mut u64) -> &'static mut [u64] {
    // SAFETY: in a child, which ends before the array.
    unsafe { std::slice::from_raw_parts_mut(array, BYTES / 8) }
}

#[test]
fn a_child_that_reads_everything_keeps_to_its_share() {
    each(300, |_, runtime, mut array| {
        let at = array.as_mut_ptr();
        let child = start(|| i32::from((0..2).any(|_| wrong(own(at), 1) > 0)));
        let most = must_pass_within(child, &addresses(&array));
        assert!(most <= GROWN + SLACK, "{most} bytes");
        assert!(most > SLACK, "the child has had {most} bytes");
        wait_until("the parent has its budget back", || {
            runtime.stats().pager.budget_bytes == BUDGET as u64
        });
    });
}

#[test]
fn a_child_that_writes_everything_reads_it_again_while_the_parent_writes() {
    each(400, |memory, _, mut array| {
        let at = array.as_mut_ptr();
        let before = memory.server.stat().granted_bytes;
        let child = start(|| {
            for round in 10..12 {
                fill(own(at), round);
                if wrong(own(at), round) > 0 {
                    return 1;
                }
            }
            0
        });
        fill(&mut array, 2);
        let most = must_pass_within(child, &addresses(&array));
        assert!(most <= GROWN + SLACK, "{most} bytes");
        assert_eq!(wrong(&array, 2), 0);
        wait_until("the child's remote memory is free", || {
            memory.server.stat().granted_bytes <= before + BYTES as u64
        });
    });
}

/// Pages that were present at the fork are shared with the parent, until the parent has others.
#[test]
fn pages_that_were_there_at_the_fork_leave_a_child_too() {
    each(300, |_, runtime, mut array| {
        let (at, addresses) = (array.as_mut_ptr(), addresses(&array));
        let near = BUDGET / 2 / 8;
        fill(&mut array[..near], 5);
        let before = runtime.stats().pager.resident_bytes;
        assert!(before >= (BUDGET / 4) as u64, "{before} bytes are present");
        let is_right = |array: &[u64]| {
            let round = |at| if at < near { 5 } else { 1 };
            let mut words = array.iter().enumerate().step_by(PART);
            words.all(|(at, word)| value(at, round(at)) == *word)
        };
        let (wait, go) = nix::unistd::pipe().unwrap();
        let child = start(|| {
            if !is_right(own(at)) {
                return 1;
            }
            let mut byte = 0_u8;
            // SAFETY: there is room for the byte.
            unsafe { libc::read(wait.as_raw_fd(), (&raw mut byte).cast(), 1) };
            2 * i32::from(!is_right(own(at)))
        });
        fill(&mut array, 2);
        wait_until("the child has its share", || {
            let bytes = resident(child, &addresses);
            (MIB..=BUDGET / 2 + MIB).contains(&bytes)
        });
        assert_eq!(nix::unistd::write(&go, b"x").unwrap(), 1);
        must_pass(child);
        assert_eq!(wrong(&array, 2), 0);
    });
}

/// Memory that a child maps in a hole of the array is not the array's.
#[test]
fn memory_that_a_child_maps_in_holes_stays() {
    each(300, |_, _, mut array| {
        let at = array.as_mut_ptr();
        let hole = |page: usize| at.wrapping_add(page * PAGE_WORDS + PART);
        let holes = || (0..BYTES / PAGE).step_by(7);
        let is_right = |round| {
            (0..BYTES / 8).step_by(PART).all(|word| {
                let (page, rest) = (word / PAGE_WORDS, word % PAGE_WORDS);
                let is_hole = page.is_multiple_of(7) && rest == PART;
                let expected = if is_hole {
                    77 + page as u64
                } else {
                    value(word, round)
                };
                own(at)[word] == expected
            })
        };
        let child = start(|| {
            if wrong(own(at), 1) > 0 {
                return 1;
            }
            for page in holes() {
                // SAFETY: a part of the child's copy, which is unmapped and mapped anew.
                unsafe {
                    libc::munmap(hole(page).cast(), 8 * PART);
                    let access = libc::PROT_READ | libc::PROT_WRITE;
                    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
                    let made = libc::mmap(hole(page).cast(), 8 * PART, access, kind, -1, 0);
                    if made == libc::MAP_FAILED {
                        return 2;
                    }
                    hole(page).write(77 + page as u64);
                }
            }
            if !(0..3).all(|_| is_right(1)) {
                return 3;
            }
            for word in (0..BYTES / 8).step_by(PART) {
                let is_hole = (word / PAGE_WORDS).is_multiple_of(7) && word % PAGE_WORDS == PART;
                if !is_hole {
                    own(at)[word] = value(word, 4);
                }
            }
            i32::from(!(0..3).all(|_| is_right(4)))
        });
        must_pass(child);
    });
}

/// State of a child's threads, made before the fork.
struct Work {
    array: *mut u64,
    seed: u64,
    next: AtomicUsize,
    wrong: AtomicUsize,
    ends: AtomicBool,
    /// Value of each kernel page's first word.
    model: Vec<AtomicU64>,
}

impl Work {
    /// Returns the state before any thread runs. `word` is the first word of each kernel page.
    fn new(array: &mut [u64], seed: u64, word: impl Fn(usize) -> u64) -> Work {
        let parts = (0..BYTES / 8 / PART).map(|part| AtomicU64::new(word(part * PART)));
        Work {
            array: array.as_mut_ptr(),
            seed,
            next: AtomicUsize::new(0),
            wrong: AtomicUsize::new(0),
            ends: AtomicBool::new(false),
            model: parts.collect(),
        }
    }
}

const THREADS: usize = 3;
/// Words of a kernel page.
const PART: usize = 512;

/// Touches, writes, drops and protects the pages of one thread, and compares.
extern "C" fn work(work: *mut c_void) -> *mut c_void {
    // SAFETY: outlives the thread.
    let work = unsafe { &*work.cast::<Work>() };
    let thread = work.next.fetch_add(1, Ordering::Relaxed);
    let mut rng = Rng(work.seed ^ thread as u64);
    let pages = BYTES / PAGE;
    for _ in 0..4_000 {
        let page = rng.below(pages / THREADS) * THREADS + thread;
        let part = page * (PAGE_WORDS / PART) + rng.below(PAGE_WORDS / PART);
        // SAFETY: a word of this thread's page.
        let word = unsafe { work.array.add(part * PART) };
        // SAFETY: as above.
        let now = unsafe { word.read_volatile() };
        if now != work.model[part].load(Ordering::Relaxed) {
            work.wrong.fetch_add(1, Ordering::Relaxed);
        }
        match rng.below(40) {
            0 => {
                // SAFETY: one kernel page of this thread's.
                unsafe { libc::madvise(word.cast(), 8 * PART, libc::MADV_DONTNEED) };
                work.model[part].store(0, Ordering::Relaxed);
            }
            1 => {
                let first = page * (PAGE_WORDS / PART);
                // SAFETY: one page of this thread's.
                unsafe {
                    let page = work.array.add(first * PART).cast();
                    libc::madvise(page, PAGE, libc::MADV_DONTNEED);
                }
                for part in &work.model[first..first + PAGE_WORDS / PART] {
                    part.store(0, Ordering::Relaxed);
                }
            }
            2 => {
                // SAFETY: one kernel page of this thread's, which is readable.
                unsafe { libc::mprotect(word.cast(), 8 * PART, libc::PROT_READ) };
            }
            3..=20 => {
                let next = rng.below(usize::MAX) as u64 | 1;
                // SAFETY: as above; the page may have been protected.
                unsafe {
                    libc::mprotect(word.cast(), 8 * PART, libc::PROT_READ | libc::PROT_WRITE);
                    word.write_volatile(next);
                }
                work.model[part].store(next, Ordering::Relaxed);
            }
            _ => {}
        }
    }
    ptr::null_mut()
}

/// Announces each word before it is written, until the end.
extern "C" fn announce(work: *mut c_void) -> *mut c_void {
    // SAFETY: outlives the thread.
    let work = unsafe { &*work.cast::<Work>() };
    let thread = work.next.fetch_add(1, Ordering::Relaxed);
    let mut rng = Rng(work.seed ^ thread as u64);
    while !work.ends.load(Ordering::Relaxed) {
        let part = rng.below(work.model.len() / THREADS) * THREADS + thread;
        let next = work.model[part].fetch_add(1, Ordering::SeqCst) + 1;
        // SAFETY: a word of the array, which is accessed by atomics alone.
        unsafe { &*work.array.add(part * PART).cast::<AtomicU64>() }.store(next, Ordering::SeqCst);
    }
    ptr::null_mut()
}

/// Runs the body in threads to its end, and `meanwhile`. Returns the number of wrong words that the
/// threads have seen.
fn run_threads(
    work_of_all: &Work,
    body: extern "C" fn(*mut c_void) -> *mut c_void,
    meanwhile: impl FnOnce(),
) -> usize {
    let mut threads = [0; THREADS];
    for thread in &mut threads {
        let work_of_all = ptr::from_ref(work_of_all).cast_mut().cast();
        // SAFETY: the work outlives the thread, which is joined.
        let made = unsafe { libc::pthread_create(thread, ptr::null(), body, work_of_all) };
        if made != 0 {
            return usize::MAX;
        }
    }
    meanwhile();
    for thread in threads {
        // SAFETY: made above.
        unsafe { libc::pthread_join(thread, ptr::null_mut()) };
    }
    work_of_all.wrong.load(Ordering::Relaxed)
}

/// True if the first word of each kernel page is that of the model.
fn is_as_modelled(work: &Work) -> bool {
    let words = work.model.iter().enumerate();
    // SAFETY: words of the array.
    let mut pairs = words.map(|(part, word)| (unsafe { *work.array.add(part * PART) }, word));
    pairs.all(|(now, word)| now == word.load(Ordering::Relaxed))
}

#[test]
fn threads_of_a_child_write_drop_and_protect_pages_that_leave() {
    let seed = seed();
    each(500, |_, _, mut array| {
        let state = Work::new(&mut array, seed, |word| value(word, 1));
        let child = start(|| {
            if run_threads(&state, work, || {}) > 0 {
                return 1;
            }
            // The child's own child has what was written, dropped and moved out.
            // SAFETY: makes system calls alone, and reads.
            let grandchild = unsafe { libc::fork() };
            if grandchild == 0 {
                let is_right = is_as_modelled(&state);
                // SAFETY: ends the grandchild.
                unsafe { libc::_exit(i32::from(!is_right)) };
            }
            state.next.store(0, Ordering::Relaxed);
            if run_threads(&state, work, || {}) > 0 {
                return 2;
            }
            match (has_passed(grandchild), is_as_modelled(&state)) {
                (true, true) => 0,
                (true, false) => 3,
                _ => 4,
            }
        });
        fill(&mut array, 2);
        let addresses = addresses(&array);
        must_pass_within(child, &addresses);
        assert_eq!(wrong(&array, 2), 0);
    });
}

#[test]
fn a_child_makes_children_at_any_moment_which_find_every_page_whole() {
    let seed = seed();
    each(300, |_, _, mut array| {
        array.iter_mut().step_by(PART).for_each(|word| *word = 0);
        let state = Work::new(&mut array, seed, |_| 0);
        let is_right = || {
            state.model.iter().enumerate().all(|(part, word)| {
                // SAFETY: a word of the array.
                let now = unsafe { state.array.add(part * PART).read_volatile() };
                let announced = word.load(Ordering::SeqCst);
                now == announced || now + 1 == announced
            })
        };
        let fork_often = || {
            for _ in 0..6 {
                let is_wrong = usize::from(!holds_in_own_child(is_right));
                state.wrong.fetch_add(is_wrong, Ordering::Relaxed);
            }
            state.ends.store(true, Ordering::Relaxed);
        };
        let child = start(|| {
            // Most pages have come and gone before the first fork.
            let is_right_before = is_right();
            let wrong = run_threads(&state, announce, fork_often);
            i32::from(!is_right_before) + 2 * (wrong as i32) + 100 * i32::from(!is_right())
        });
        must_pass_within(child, &addresses(&array));
    });
}

#[test]
fn a_killed_child_leaves_no_remote_memory_behind() {
    each(300, |memory, runtime, mut array| {
        let at = array.as_mut_ptr();
        let before = memory.server.stat().granted_bytes;
        for _ in 0..2 {
            let child = start(|| {
                for round in 10.. {
                    fill(own(at), round);
                }
                0
            });
            wait_until("changed pages have left the child", || {
                memory.server.stat().granted_bytes > before
            });
            let budget = || runtime.stats().pager.budget_bytes as usize;
            wait_until("the child has a part of the budget", || budget() < BUDGET);
            assert!(budget() >= BUDGET / 2, "{}", budget());
            kill(child, Signal::SIGKILL).unwrap();
            end(child);
            wait_until("the child's remote memory is free", || {
                memory.server.stat().granted_bytes <= before
            });
        }
        wait_until("the parent has its budget back", || {
            runtime.stats().pager.budget_bytes == BUDGET as u64
        });
    });
}

#[test]
fn a_child_keeps_what_it_has_changed_if_the_server_is_full() {
    each_of(300, (BYTES + 16 * MIB, BUDGET, PAGE), |_, _, mut array| {
        let at = array.as_mut_ptr();
        let child = start(|| {
            fill(own(at), 3);
            i32::from(wrong(own(at), 3) > 0)
        });
        must_pass(child);
        assert_eq!(wrong(&array, 1), 0);
    });
}

extern "C" fn nothing(_: libc::c_int) {}

#[test]
fn a_child_that_cannot_be_called_has_all_bytes() {
    each(300, |_, _, mut array| {
        let at = array.as_mut_ptr();
        for way in 0..3 {
            let child = start(|| {
                // SAFETY: the child's own signals.
                unsafe {
                    match way {
                        0 => {
                            let mut set = std::mem::zeroed();
                            libc::sigemptyset(&raw mut set);
                            libc::sigaddset(&raw mut set, libc::SIGURG);
                            libc::sigprocmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut());
                        }
                        1 => {
                            libc::signal(libc::SIGURG, nothing as *const () as usize);
                        }
                        _ => {
                            libc::signal(libc::SIGURG, libc::SIG_IGN);
                        }
                    }
                }
                fill(&mut own(at)[..4 * MIB], 3);
                i32::from(wrong(&own(at)[..4 * MIB], 3) > 0)
            });
            must_pass(child);
        }
    });
}

#[test]
fn a_child_that_calls_exec_with_an_agent_goes_on() {
    each(300, |_, _, mut array| {
        let at = array.as_mut_ptr();
        let program = c"/bin/true";
        let arguments = [program.as_ptr(), ptr::null()];
        for _ in 0..5 {
            let child = start(|| {
                fill(&mut own(at)[..4 * MIB], 3);
                // SAFETY: strings of C's, and a null at the end.
                unsafe { libc::execv(program.as_ptr(), arguments.as_ptr()) };
                1
            });
            must_pass(child);
        }
    });
}

/// Advises the kernel about `len` bytes of the child's own copy, from `word` on.
fn advise(word: *mut u64, len: usize, advice: libc::c_int) -> bool {
    // SAFETY: bytes of the array, in a child.
    unsafe { libc::madvise(word.cast(), len, advice) == 0 }
}

#[test]
fn a_child_that_writes_only_what_it_has_dropped_reads_it_again() {
    each(300, |_, _, mut array| {
        let at = array.as_mut_ptr();
        let child = start(|| {
            if !advise(at, BYTES, libc::MADV_DONTNEED) {
                return 1;
            }
            fill(own(at), 9);
            2 * i32::from(wrong(own(at), 9) > 0)
        });
        must_pass(child);
        assert_eq!(wrong(&array, 1), 0);
    });
}

/// Pages that the kernel may free stay mapped: no write to them raises a fault.
#[test]
fn a_child_that_lets_the_kernel_free_pages_has_what_it_writes_there() {
    each(300, |_, _, mut array| {
        let at = array.as_mut_ptr();
        let freed = || (8..BYTES / PAGE).step_by(40);
        let child = start(|| {
            if wrong(own(at), 1) > 0 {
                return 1;
            }
            for (turn, page) in freed().enumerate() {
                let (word, len) = match turn % 2 {
                    0 => (page * PAGE_WORDS, PAGE),
                    _ => (page * PAGE_WORDS + PART, 8 * PART),
                };
                own(at)[word] = 3;
                if !advise(at.wrapping_add(word), len, libc::MADV_FREE) {
                    return 2;
                }
                own(at)[word] = 77;
            }
            let is_right = |word: usize| {
                let (page, part) = (word / PAGE_WORDS, word % PAGE_WORDS);
                let is_freed = page >= 8 && (page - 8).is_multiple_of(40);
                let expected = match (is_freed, (page.max(8) - 8) / 40 % 2, part) {
                    (true, 0, 0) | (true, 1, PART) => 77,
                    // The kernel may have freed these.
                    (true, 0, _) => return true,
                    _ => value(word, 1),
                };
                own(at)[word] == expected
            };
            let is_all_right = || (0..BYTES / 8).step_by(PART).all(is_right);
            3 * i32::from(!(0..3).all(|_| is_all_right()))
        });
        must_pass(child);
    });
}

#[test]
fn a_child_reads_pages_that_are_large_for_its_share() {
    each_of(300, (1024 * MIB, 19 * MIB, 2 * MIB), |_, _, mut array| {
        let at = array.as_mut_ptr();
        let child = start(|| i32::from((0..2).any(|_| wrong(own(at), 1) > 0)));
        must_pass(child);
    });
}

/// Array of which a process touches all pages while it forks, if it has set one.
static TOUCHED: AtomicPtr<u64> = AtomicPtr::new(ptr::null_mut());

/// Registered before the runtime's handler of `fork`: so it is called after that.
#[used]
#[unsafe(link_section = ".init_array")]
static FIRST: extern "C" fn() = {
    extern "C" fn before_fork() {
        let at = TOUCHED.load(Ordering::Relaxed);
        for word in (0..BYTES / 8).step_by(PART).take_while(|_| !at.is_null()) {
            // SAFETY: a word of the array, in a child.
            unsafe { at.add(word).read_volatile() };
        }
    }
    extern "C" fn first() {
        // SAFETY: the handler may run at any fork.
        unsafe { libc::pthread_atfork(Some(before_fork), None, None) };
    }
    first
};

#[test]
fn a_child_with_a_full_share_touches_pages_while_it_forks() {
    each(300, |_, _, mut array| {
        let at = array.as_mut_ptr();
        let child = start(|| {
            fill(own(at), 3);
            TOUCHED.store(at, Ordering::Relaxed);
            // SAFETY: reads, and ends.
            let grandchild = unsafe { libc::fork() };
            let is_wrong = i32::from(wrong(own(at), 3) > 0);
            if grandchild == 0 {
                // SAFETY: ends the grandchild.
                unsafe { libc::_exit(is_wrong) };
            }
            is_wrong + 2 * i32::from(!has_passed(grandchild))
        });
        must_pass(child);
    });
}

#[test]
fn a_child_ends_whose_last_thread_ends_alone() {
    each(300, |_, _, mut array| {
        let at = array.as_mut_ptr();
        let child = start(|| {
            let is_wrong = wrong(own(at), 1) > 0;
            // SAFETY: ends this thread.
            unsafe { libc::syscall(libc::SYS_exit, i32::from(is_wrong)) };
            2
        });
        must_pass(child);
    });
}
