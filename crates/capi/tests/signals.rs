//! Signal handlers that touch absent pages while their thread is inside a function of `farpage.h`.

mod common;

use std::{
    ffi::CString,
    mem,
    os::unix::thread::JoinHandleExt,
    ptr,
    sync::atomic::{
        AtomicBool, AtomicPtr, AtomicUsize,
        Ordering::{Relaxed, SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use common::{blank, serve};
use farpage_capi::*;

const PAGE: usize = 4096;
const BUDGET_PAGES: usize = 64;
/// Number of pages for the handler: eight budgets.
const PAGES: usize = 8 * BUDGET_PAGES;

static MEMORY: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());
static TOUCHED: AtomicUsize = AtomicUsize::new(0);
static ENDED: AtomicBool = AtomicBool::new(false);

extern "C" fn touch(_: i32) {
    let page = TOUCHED.fetch_add(1, Relaxed) % PAGES;
    // SAFETY: a byte of a region that is there while signals come.
    unsafe {
        let byte = MEMORY.load(Relaxed).add(page * PAGE);
        byte.write_volatile(byte.read_volatile().wrapping_add(1));
    }
}

fn check(code: farpage_code) {
    assert_eq!(code, FARPAGE_OK);
}

/// Maps, uses and unmaps regions until handlers have touched each page.
fn work(runtime: *mut farpage_runtime) {
    let bytes = 16 * PAGE as u64;
    while TOUCHED.load(Relaxed) < PAGES {
        let mut region = ptr::null_mut();
        // SAFETY: all pointers are good, and the region is not used after it is unmapped.
        unsafe {
            check(farpage_region_map(runtime, bytes, ptr::null(), &mut region));
            (farpage_region_address(region).cast::<u8>()).write_bytes(7, bytes as usize);
            check(farpage_region_flush(region));
            check(farpage_region_advise(
                region,
                0,
                bytes,
                FARPAGE_ADVICE_DONT_NEED,
            ));
            check(farpage_region_prefetch(region, 0, bytes));
            check(farpage_region_pin(region, 0, PAGE as u64));
            check(farpage_region_unpin(region, 0, PAGE as u64));
            check(farpage_region_unmap(region));
        }
    }
    ENDED.store(true, SeqCst);
}

fn storm(fault_mode: u32) {
    let server = serve("tcp://127.0.0.1:0");
    let url = CString::new(server.endpoints()[0].to_string()).expect("no zero bytes");
    let mut options: farpage_runtime_options = blank();
    options.servers = url.as_ptr();
    options.budget_bytes = (BUDGET_PAGES * PAGE) as u64;
    options.page_bytes = PAGE as u64;
    options.fault_mode = fault_mode;
    let (mut runtime, mut touched) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: all pointers are good.
    unsafe {
        check(farpage_runtime_new(&options, &mut runtime));
        let bytes = (PAGES * PAGE) as u64;
        check(farpage_region_map(
            runtime,
            bytes,
            ptr::null(),
            &mut touched,
        ));
        MEMORY.store(farpage_region_address(touched).cast(), Relaxed);
    }
    TOUCHED.store(0, Relaxed);
    ENDED.store(false, SeqCst);
    let address = runtime.expose_provenance();
    let worker = thread::spawn(move || work(ptr::with_exposed_provenance_mut(address)));
    let end = Instant::now() + Duration::from_secs(100);
    // Signals go to the worker alone: the server of this process must not wait for itself.
    while !ENDED.load(SeqCst) && !worker.is_finished() {
        let before = TOUCHED.load(Relaxed);
        // SAFETY: the thread has not been joined.
        unsafe { libc::pthread_kill(worker.as_pthread_t(), libc::SIGUSR1) };
        // The calls go on between two signals.
        thread::sleep(Duration::from_micros(200));
        while TOUCHED.load(Relaxed) == before && !worker.is_finished() {
            assert!(Instant::now() < end, "a call waits for its own handler");
            thread::yield_now();
        }
    }
    worker.join().expect("all calls succeed");
    // SAFETY: both are given back once.
    unsafe {
        check(farpage_region_unmap(touched));
        farpage_runtime_free(runtime);
    }
}

#[test]
fn a_storm_of_signals_finds_its_memory_while_regions_come_and_go() {
    // SAFETY: all zeros is a valid action, and its handler touches atomics and a region.
    unsafe {
        let mut action: libc::sigaction = mem::zeroed();
        action.sa_sigaction = touch as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &action, ptr::null_mut()), 0);
    }
    storm(FARPAGE_FAULTS_FILLER);
    storm(FARPAGE_FAULTS_IN_THREAD);
}
