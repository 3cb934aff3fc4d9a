//! Threads serve their own faults, as if nothing had happened.

use std::{
    fs::File,
    io::Read,
    ptr,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use farpage_vm::sigbus::STACK_BYTES;
use nix::errno::Errno;

use crate::common::{ALLOCATIONS, PAGE, Toy, calling, count_up, counter, events};

#[test]
fn threads_serve_their_own_faults_and_lose_no_write() {
    const THREADS: usize = 4;
    const PAGES: usize = 32;
    const ROUNDS: usize = 400;
    let toy = Toy::new(PAGES, None);
    let _registration = toy.register();
    count_up(&toy, THREADS, ROUNDS, |time| toy.evict(time % PAGES));
    assert!(toy.faults.load(Ordering::Relaxed) >= PAGES);
    assert_eq!(toy.allocations.load(Ordering::Relaxed), 0);
    assert!(events(&toy.space, 0).is_empty());
}

#[test]
fn allocations_are_counted() {
    let before = ALLOCATIONS.get();
    drop(std::hint::black_box(Box::new(1)));
    assert_eq!(ALLOCATIONS.get() - before, 2);
}

#[test]
fn reads_and_writes_are_told_apart() {
    let toy = Toy::new(2, None);
    let _registration = toy.register();
    counter(toy.address(0)).load(Ordering::Relaxed);
    let expected = if cfg!(target_arch = "x86_64") { 0 } else { 1 };
    assert_eq!(toy.writes.load(Ordering::Relaxed), expected);
    counter(toy.address(1)).store(1, Ordering::Relaxed);
    assert_eq!(toy.writes.load(Ordering::Relaxed), expected + 1);
}

#[test]
fn system_calls_fail_on_absent_pages_and_work_on_present_ones() {
    let toy = Toy::new(1, None);
    let _registration = toy.register();
    let mut zeros = File::open("/dev/zero").unwrap();
    // SAFETY: a region that stays mapped; the file is the only one to write it.
    let page = unsafe { std::slice::from_raw_parts_mut(toy.base as *mut u8, PAGE) };
    assert_eq!(
        zeros.read(page).unwrap_err().raw_os_error(),
        Some(libc::EFAULT)
    );
    counter(toy.base).load(Ordering::Relaxed);
    assert_eq!(zeros.read(page).unwrap(), PAGE);
}

#[test]
fn errno_is_as_before() {
    let (address, _registration) = calling(|| Errno::set_raw(libc::EIO));
    Errno::set_raw(libc::EXDEV);
    counter(address).store(1, Ordering::Relaxed);
    assert_eq!(Errno::last_raw(), libc::EXDEV);
}

#[test]
fn threads_with_little_stack_and_without_one_for_signals_are_served() {
    // Nearly all of the stack that handlers are promised.
    let use_stack = || {
        let mut bytes = [0u8; STACK_BYTES - (16 << 10)];
        std::hint::black_box(&mut bytes).fill(1);
    };
    for alternate in [true, false] {
        let (address, registration) = calling(use_stack);
        let thread = thread::Builder::new().stack_size(48 << 10);
        let thread = thread.spawn(move || {
            if !alternate {
                // SAFETY: all zeros is a valid stack_t.
                let mut none: libc::stack_t = unsafe { std::mem::zeroed() };
                none.ss_flags = libc::SS_DISABLE;
                // SAFETY: nothing of this thread is on its alternate stack.
                unsafe { libc::sigaltstack(&none, ptr::null_mut()) };
            }
            counter(address).fetch_add(1, Ordering::Relaxed)
        });
        assert_eq!(thread.unwrap().join().unwrap(), 0);
        drop(registration);
    }
}

#[test]
fn more_threads_than_stacks_in_stock_are_served_at_once() {
    const THREADS: usize = 100;
    static SERVING: AtomicUsize = AtomicUsize::new(0);
    let regions: Vec<_> = (0..THREADS)
        .map(|_| {
            calling(|| {
                SERVING.fetch_add(1, Ordering::Relaxed);
                while SERVING.load(Ordering::Relaxed) < THREADS {
                    thread::yield_now();
                }
            })
        })
        .collect();
    thread::scope(|scope| {
        for (address, _) in &regions {
            scope.spawn(|| counter(*address).store(1, Ordering::Relaxed));
        }
    });
    assert_eq!(SERVING.load(Ordering::Relaxed), THREADS, "each served once");
    for (address, _) in &regions {
        assert_eq!(counter(*address).load(Ordering::Relaxed), 1);
    }
}

#[test]
fn signals_wait_until_the_fault_is_served() {
    static ARRIVED: AtomicUsize = AtomicUsize::new(0);
    static ARRIVED_MEANWHILE: AtomicUsize = AtomicUsize::new(0);
    extern "C" fn arrived(_: libc::c_int) {
        // Enough to lay over what the fault left on the alternate stack.
        std::hint::black_box([1u8; 1024]);
        ARRIVED.fetch_add(1, Ordering::Relaxed);
    }
    // SAFETY: all zeros is a valid sigaction.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = arrived as *const () as usize;
    action.sa_flags = libc::SA_ONSTACK;
    // SAFETY: the handler counts and returns.
    Errno::result(unsafe { libc::sigaction(libc::SIGUSR1, &action, ptr::null_mut()) }).unwrap();
    let (address, _registration) = calling(|| {
        // SAFETY: sends a signal to this thread.
        unsafe { libc::raise(libc::SIGUSR1) };
        ARRIVED_MEANWHILE.fetch_add(ARRIVED.load(Ordering::Relaxed), Ordering::Relaxed);
    });
    counter(address).store(1, Ordering::Relaxed);
    assert_eq!(ARRIVED_MEANWHILE.load(Ordering::Relaxed), 0);
    assert_eq!(ARRIVED.load(Ordering::Relaxed), 1);
}
