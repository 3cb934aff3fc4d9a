//! The end of this process, by `exit`, `_exit` or a signal: servers are told, and the lines of
//! `--stats` are written.
//!
//! The rule it keeps: handlers of signals may end a process at any instruction, also in `malloc`. A
//! thread of our own does the work, and the ending thread waits for a bounded time only. SIGKILL
//! leaves no time.
//!
//! Among programs that share a budget, a process without pages in the arena writes no lines, except
//! about large local memory.

use std::{
    ffi::{c_int, c_void},
    fs, mem, process, ptr,
    sync::atomic::{AtomicI32, AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use farpage::{ByteSize, Runtime};

use crate::{
    say_to, signals, small,
    state::{self, State},
};

/// Local memory that any program has: a smaller amount is not worth a line.
const LOCAL_BYTES: u64 = 16 << 20;
/// The longest time that the end of a process waits for the thread.
const PATIENCE: Duration = Duration::from_secs(1);

/// Copy of standard error from the start: programs close theirs before they end. Negative without
/// `--stats`.
static STANDARD_ERROR: AtomicI32 = AtomicI32::new(-1);
/// State of the thread, and the futex that it sleeps on: [`NONE`], [`IDLE`], [`ASKED`] or [`DONE`].
static WORD: AtomicU32 = AtomicU32::new(NONE);
/// State before the thread is started.
const NONE: u32 = 0;
const IDLE: u32 = 1;
const ASKED: u32 = 2;
const DONE: u32 = 3;

/// Starts the thread, which also works if a signal ends the process. With `stats` the thread writes
/// the lines of `--stats`.
pub(crate) fn begin(stats: bool) -> Result<(), String> {
    let thread = thread::Builder::new().name("farpage-end".into());
    let started = farpage_tables::spawn(thread, when_asked);
    started.map_err(|error| format!("cannot start a thread: {error}"))?;
    WORD.store(IDLE, Ordering::Release);
    if stats {
        // SAFETY: a new descriptor, which is closed by `exec`.
        let copy = unsafe { libc::fcntl(2, libc::F_DUPFD_CLOEXEC, 3) };
        STANDARD_ERROR.store(if copy >= 0 { copy } else { 2 }, Ordering::Relaxed);
    }
    signals::handle_fatal(on_fatal);
    Ok(())
}

/// Begins a child made by `fork`, which has no such thread and writes no lines.
pub(crate) fn begin_child() {
    WORD.store(NONE, Ordering::Release);
    STANDARD_ERROR.store(-1, Ordering::Relaxed);
}

fn when_asked() {
    loop {
        match WORD.load(Ordering::Acquire) {
            ASKED => break,
            other => wait(other, None),
        }
    }
    if let Some(runtime) = state::runtime() {
        let standard_error = STANDARD_ERROR.load(Ordering::Relaxed);
        if standard_error >= 0 {
            let lines = lines(runtime, state::get());
            lines.iter().for_each(|line| say_to(standard_error, line));
        }
        (runtime.sessions().iter()).for_each(|session| session.leave());
    }
    WORD.store(DONE, Ordering::Release);
    wake();
}

/// Waits for children that have this process's memory, and then for the thread. In a child made by
/// `fork`: does nothing.
pub(crate) extern "C" fn finish() {
    if state::runtime().is_some() {
        farpage::fork::wait_for_children();
        report();
    }
}

/// Makes the thread do the remaining work, once, and waits for a bounded time.
fn report() {
    // A filter of the program's own may forbid the calls below.
    if matches!(WORD.load(Ordering::Acquire), NONE | DONE) {
        return;
    }
    // Fails if another thread has asked already.
    let _ = WORD.compare_exchange(IDLE, ASKED, Ordering::AcqRel, Ordering::Acquire);
    wake();
    let until = Instant::now() + PATIENCE;
    while WORD.load(Ordering::Acquire) == ASKED && Instant::now() < until {
        wait(ASKED, Some(until - Instant::now()));
    }
}

/// Handles a signal that the program does not handle: reports, and then ends as the signal demands.
extern "C-unwind" fn on_fatal(signal: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // Before SIGBUS ends the process: in-thread, writing lines touches absent memory.
    if state::runtime().is_some() {
        report();
    }
    // SAFETY: all zeros is SIG_DFL. The signal is held back until the handler returns, and comes
    // again then, with the kernel's information.
    unsafe {
        signals::install(signal, &mem::zeroed());
        let (process, thread) = (process::id(), libc::gettid());
        libc::syscall(libc::SYS_rt_tgsigqueueinfo, process, thread, signal, info);
    }
}

/// Sleeps while the word is `value`, which may have changed meanwhile.
fn wait(value: u32, at_most: Option<Duration>) {
    let time = at_most.map(|time| libc::timespec {
        tv_sec: time.as_secs() as libc::time_t,
        tv_nsec: i64::from(time.subsec_nanos()),
    });
    let time = time.as_ref().map_or(ptr::null(), ptr::from_ref);
    let call = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: a word and a time that last for the call.
    unsafe { libc::syscall(libc::SYS_futex, WORD.as_ptr(), call, value, time) };
}

fn wake() {
    let call = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: wakes who sleeps on the word.
    unsafe { libc::syscall(libc::SYS_futex, WORD.as_ptr(), call, c_int::MAX) };
}

/// Returns the lines of `--stats`. Without a `state` no request was large enough for the arena.
fn lines(runtime: &Runtime, state: Option<&State>) -> Vec<String> {
    let stats = runtime.stats();
    let (pager, store) = (stats.pager, stats.store);
    let size = |bytes: u64| ByteSize(bytes).to_string();
    let of = |part: u64, all: u64| format!("{} %", part * 100 / all.max(1));
    let mut lines = Vec::new();
    let statics = state.map_or(0, |state| state.arena.beside_bytes()) as u64;
    let of_statics = match statics {
        0 => String::new(),
        bytes => format!(" and in static arrays ({} of .bss)", size(bytes)),
    };
    if let Some(state) = state
        && state.arena.is_ordinary()
    {
        lines.push(format!(
            "ordinary: all {} that were accessible at once fitted the budget ({}), so that nothing became remote",
            size((state.peak_bytes() + state.arena.beside_bytes()) as u64),
            size(pager.budget_bytes),
        ));
    }
    if let Some(begun) = state.and_then(|state| state.arena.begun()) {
        lines.push(format!(
            "ordinary up to {}, and under paging from then on, which began within {:.1} ms",
            size(begun.used_bytes as u64 + statics),
            begun.took.as_secs_f64() * 1e3,
        ));
    }
    if let Some(state) = state
        && pager.fills > 0
    {
        lines.push(format!(
            "at most {} in the arena{of_statics}, {} of it in local memory (budget {}), and {} accessible; {} faults, {} pages came in, {} of them ahead, \
             {} left, {} of them unchanged; {} read, {} written",
            size((state.arena.touched_peak_bytes() + state.arena.beside_bytes()) as u64),
            size(pager.peak_resident_bytes),
            size(pager.budget_bytes),
            size(state.peak_bytes() as u64),
            pager.faults,
            pager.fills,
            pager.prefetches,
            pager.evictions,
            pager.clean_evictions,
            size(store.bytes_read),
            size(store.bytes_written),
        ));
        lines.push(format!(
            "at most {} were kept remotely; faults waited {:.3} s for bytes and for room, beside what the kernel takes to tell of each",
            size(state.arena.region().kept_peak_bytes()),
            pager.waited_ns as f64 / 1e9,
        ));
    }
    if store.failovers + store.under_protected_bytes + store.repaired_bytes > 0 {
        lines.push(format!(
            "{} reads were served by another copy; {} have fewer copies than asked for now, and {} were copied again",
            store.failovers,
            size(store.under_protected_bytes),
            size(store.repaired_bytes),
        ));
    }
    if let Some(state) = state
        && pager.evictions > 0
    {
        lines.push(format!(
            "estimated from when pages left and came back: of {} that did, {} would have stayed with twice the budget, {} with four times; \
             pages of twice {} would have saved {} of the faults at most",
            pager.returns,
            of(pager.returns_within_one_budget, pager.returns),
            of(pager.returns_within_three_budgets, pager.returns),
            size(state.arena.region().page_bytes() as u64),
            of(pager.beside_resident, pager.fills - pager.prefetches),
        ));
    }
    if let Some(bytes) = small::switched_at() {
        lines.push(format!(
            "small objects are in the arena since {} of them were outside (--small), except those that the C library makes, such as lines of getline",
            size(bytes),
        ));
    }
    // Among many programs only those with pages in the arena are of interest.
    if state.is_none() && !state::has_children_interposed() {
        lines.push(
            "at most 0 B in the arena, since no request was as large as --min-bytes (--small yes makes smaller ones remote)".to_owned(),
        );
    }
    let of_the_arena = match state {
        Some(state) if state.arena.is_ordinary() => statics + state.peak_bytes() as u64,
        _ => pager.peak_resident_bytes,
    };
    let local = local_peak_bytes(of_the_arena, state);
    if local > LOCAL_BYTES {
        let why = small::why_local().map_or(String::new(), |why| format!("; {why}"));
        lines.push(format!(
            "about {} were local, outside the arena and the budget: small objects (requests below {}{why}), static arrays (.data and .bss: {}), stacks",
            size(local),
            size(state::min_bytes() as u64),
            size(static_bytes().saturating_sub(statics)),
        ));
    }
    lines
}

/// Returns roughly the most anonymous memory that the program had beside the arena's: the kernel
/// keeps the peak of all memory only.
fn local_peak_bytes(of_the_arena: u64, state: Option<&State>) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let said = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        kib.unwrap_or(0) << 10
    };
    // Memory that a server on this machine lends is mapped here, too.
    let kept = state.map_or(0, |state| state.arena.region().kept_peak_bytes());
    let shared = said("RssShmem:").max(kept);
    let peak = said("VmHWM:").saturating_sub(said("RssFile:") + shared);
    peak.max(said("RssAnon:")).saturating_sub(of_the_arena)
}

/// Returns the bytes of the program's own static variables.
fn static_bytes() -> u64 {
    unsafe extern "C" fn add(object: *mut libc::dl_phdr_info, _: usize, sum: *mut c_void) -> c_int {
        // SAFETY: what `dl_iterate_phdr` passes, and the sum below.
        unsafe {
            let headers =
                std::slice::from_raw_parts((*object).dlpi_phdr, (*object).dlpi_phnum.into());
            let writable = headers.iter().filter(|header| {
                header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_W != 0
            });
            *sum.cast::<u64>() = writable.map(|header| header.p_memsz).sum();
        }
        // The program itself is first. Its libraries do not count.
        1
    }
    let mut sum = 0u64;
    // SAFETY: `add` takes what it is given.
    unsafe { libc::dl_iterate_phdr(Some(add), (&raw mut sum).cast()) };
    sum
}
