//! Signal handlers of the program that touch absent pages while their thread is inside the library.
//!
//! The rule it keeps: a handler runs after each single instruction of a call during which signals
//! are not held back. The processor's trap flag raises SIGTRAP, which is never held back, and its
//! handler does the same work as another signal's would.

#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::{
    arch::asm,
    env, mem, ptr,
    sync::atomic::{AtomicPtr, AtomicUsize, Ordering::Relaxed},
    time::Duration,
};

use common::{Fabric, ServerProcess, builder, can_page, serve_if_asked};
use farpage::{Advice, Allocator, ByteSize, FaultMode, RegionOptions, Runtime};
use farpage_testkit::{KIB, MIB, Watchdog, run, test_command, test_name};

const PAGE: usize = 4 * KIB;
/// Number of pages for the handler: eight budgets.
const PAGES: usize = 1024;
const BUDGET: usize = PAGES / 8 * PAGE;

static MEMORY: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());
static STEPS: AtomicUsize = AtomicUsize::new(0);
static TOUCHED: AtomicUsize = AtomicUsize::new(0);
/// Tells a test that it has a process of its own: handlers belong to the process.
const ALONE: &str = "FARPAGE_TEST_ALONE";

/// Allocator without which the runtime's threads wait for a `malloc` that a handler interrupts.
#[global_allocator]
static ALLOCATOR: Allocator = Allocator::new();

extern "C" fn on_step(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    STEPS.fetch_add(1, Relaxed);
    // SAFETY: the kernel's, valid while the handler runs.
    let holds = unsafe {
        let mask = &raw const (*context.cast::<libc::ucontext_t>()).uc_sigmask;
        libc::sigismember(mask, libc::SIGALRM) == 1
    };
    if !holds {
        let page = TOUCHED.fetch_add(1, Relaxed) % PAGES;
        // SAFETY: bytes of a region that is there until all steps are done.
        unsafe {
            let byte = MEMORY.load(Relaxed).add(page * PAGE);
            byte.write_volatile(byte.read_volatile().wrapping_add(1));
        }
    }
}

/// Calls `act` and has [`on_step`] called after each of its instructions.
#[inline(never)]
fn step<T>(act: impl FnOnce() -> T) -> T {
    // SAFETY: sets the trap flag, below the red zone; SIGTRAP is handled.
    unsafe {
        asm!(
            "lea rsp, [rsp - 128]",
            "pushfq",
            "or qword ptr [rsp], 0x100",
            "popfq",
            "lea rsp, [rsp + 128]"
        );
    }
    let done = act();
    // SAFETY: clears the trap flag.
    unsafe {
        asm!(
            "lea rsp, [rsp - 128]",
            "pushfq",
            "and qword ptr [rsp], ~0x100",
            "popfq",
            "lea rsp, [rsp + 128]"
        );
    }
    done
}

fn calls(runtime: &Runtime) {
    let options = || RegionOptions::new().page_size(ByteSize(PAGE as u64));
    let mut region = step(|| runtime.region_with(16 * PAGE, options())).unwrap();
    region.fill(7);
    step(|| region.advise(.., Advice::WillNeed)).unwrap();
    step(|| region.advise(.., Advice::DontNeed)).unwrap();
    step(|| region.prefetch_now(..)).unwrap();
    step(|| region.pin(..2 * PAGE)).unwrap();
    step(|| region.unpin(..2 * PAGE));
    step(|| region.flush()).unwrap();
    step(|| region.discard_range(100..9 * PAGE)).unwrap();
    assert_eq!((region[99], region[100], region[12 * PAGE]), (7, 0, 7));
    step(|| {
        (
            region.store_stats(),
            region.kept_peak_bytes(),
            region.take_error(),
        )
    });
    step(|| drop(region));
    let arena = step(|| runtime.arena_with(MIB, options())).unwrap();
    let block = step(|| arena.allocate(8 * PAGE, PAGE)).unwrap();
    let behind = step(|| arena.allocate(PAGE, PAGE)).unwrap();
    // SAFETY: both are as long, and are not used after they are given up.
    unsafe {
        block.as_ptr().write_bytes(3, 8 * PAGE);
        let block = step(|| arena.reallocate(block, 16 * PAGE, PAGE)).unwrap();
        assert_eq!(block.as_ptr().add(8 * PAGE - 1).read(), 3);
        step(|| arena.deallocate(block)).unwrap();
        step(|| arena.deallocate(behind)).unwrap();
    }
    step(|| arena.allocated_bytes());
    step(|| drop(arena));
    step(|| runtime.set_budget(ByteSize(BUDGET as u64)));
    step(|| runtime.stats());
}

/// Runs the test in a process of its own, all of whose threads share one lock of `malloc`.
fn alone() {
    let mut command = test_command(&test_name());
    command.env(ALONE, "1").env("MALLOC_ARENA_MAX", "1");
    run(&mut command, Duration::from_secs(150));
}

fn each_instruction(mode: FaultMode) {
    if serve_if_asked() || !can_page() {
        return;
    }
    if env::var_os(ALONE).is_none() {
        return alone();
    }
    let _watchdog = Watchdog::new(Duration::from_secs(120));
    let memory = ServerProcess::start(&test_name(), Fabric::Tcp, 64 * MIB);
    let runtime = builder(BUDGET, PAGE).fault_mode(mode).server(&memory.url);
    let runtime = runtime.build().unwrap();
    let mut touched = runtime.region(PAGES * PAGE).unwrap();
    MEMORY.store(touched.as_mut_ptr(), Relaxed);
    STEPS.store(0, Relaxed);
    TOUCHED.store(0, Relaxed);
    // SAFETY: all zeros is a valid action; the handler touches atomics and the region.
    unsafe {
        let mut action: libc::sigaction = mem::zeroed();
        action.sa_sigaction = on_step as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        assert_eq!(libc::sigaction(libc::SIGTRAP, &action, ptr::null_mut()), 0);
    }
    calls(&runtime);
    let (steps, count) = (STEPS.load(Relaxed), TOUCHED.load(Relaxed));
    println!("{steps} steps, {count} with a touch");
    assert!(
        count > PAGES && steps > 2 * count,
        "{steps} steps, {count} touches"
    );
    for page in 0..PAGES {
        let touches = (count + PAGES - 1 - page) / PAGES;
        assert_eq!(touched[page * PAGE], touches as u8, "page {page}");
    }
}

#[test]
fn a_handler_after_each_instruction_of_a_call_finds_its_memory() {
    each_instruction(FaultMode::Filler);
}

#[test]
fn a_handler_after_each_instruction_of_a_call_finds_its_memory_in_thread() {
    each_instruction(FaultMode::InThread);
}
