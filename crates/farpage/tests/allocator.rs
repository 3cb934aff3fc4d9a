//! Faults of threads that hold the lock of the program's allocator, as the thread of a handler does
//! that has interrupted `malloc`.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::Mutex,
};

use common::{Fabric, ServerProcess, builder, can_page, serve_if_asked};
use farpage::{Allocator, Codec, FaultMode, RegionOptions};
use farpage_testkit::{KIB, MIB, test_name};

const PAGE: usize = 4 * KIB;
const BUDGET: usize = 64 * PAGE;
const PATIENCE_SECONDS: u32 = 60;

/// Allocator with one lock.
struct Locked;

static LOCK: Mutex<()> = Mutex::new(());

// SAFETY: the system's.
unsafe impl GlobalAlloc for Locked {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _locked = LOCK.lock();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        let _locked = LOCK.lock();
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(block, layout) };
    }
}

#[global_allocator]
static ALLOCATOR: Allocator<Locked> = Allocator::over(Locked);

/// Touches regions of eight budgets while this thread has the allocator's lock.
fn touch(mode: FaultMode) {
    if serve_if_asked() || !can_page() {
        return;
    }
    // A watchdog's thread would wait for the allocator, too.
    // SAFETY: asks for a signal, which ends the process.
    unsafe { libc::alarm(PATIENCE_SECONDS) };
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        let memory = ServerProcess::start(&test_name(), fabric, 64 * MIB);
        let runtime = builder(BUDGET, PAGE).fault_mode(mode).server(&memory.url);
        let runtime = runtime.build().unwrap();
        for codec in [Codec::Raw, Codec::Lz4] {
            let options = RegionOptions::new().codec(codec);
            let mut region = runtime.region_with(8 * BUDGET, options).unwrap();
            for round in 0..6u8 {
                let locked = LOCK.lock();
                for (page, bytes) in region.chunks_mut(PAGE).enumerate() {
                    assert_eq!(
                        bytes[7],
                        if round == 0 {
                            0
                        } else {
                            page as u8 ^ (round - 1)
                        }
                    );
                    bytes[7] = page as u8 ^ round;
                }
                drop(locked);
            }
        }
    }
}

#[test]
fn pages_come_while_the_allocators_lock_is_held() {
    touch(FaultMode::Filler);
}

#[test]
fn pages_come_in_thread_while_the_allocators_lock_is_held() {
    touch(FaultMode::InThread);
}
