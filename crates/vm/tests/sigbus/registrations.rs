//! Registrations come and go.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

use farpage_vm::sigbus::FaultRegistration;
use nix::errno::Errno;

use crate::common::{PAGE, Toy, calling, counter};

#[test]
fn end_of_a_registration_waits_for_its_handlers_and_for_no_others() {
    static ENTERED: AtomicUsize = AtomicUsize::new(0);
    static RELEASED: AtomicBool = AtomicBool::new(false);
    static SERVED: AtomicBool = AtomicBool::new(false);
    let (address, registration) = calling(|| {
        ENTERED.store(1, Ordering::SeqCst);
        while !RELEASED.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        SERVED.store(true, Ordering::SeqCst);
    });
    thread::scope(|scope| {
        scope.spawn(|| counter(address).store(1, Ordering::Relaxed));
        while ENTERED.load(Ordering::SeqCst) == 0 {
            thread::yield_now();
        }
        // Others come and go meanwhile.
        let (other, others) = calling(|| {});
        counter(other).store(1, Ordering::Relaxed);
        drop(others);
        let ending = scope.spawn(|| {
            ENTERED.store(2, Ordering::SeqCst);
            drop(registration);
            SERVED.load(Ordering::SeqCst)
        });
        while ENTERED.load(Ordering::SeqCst) < 2 {
            thread::yield_now();
        }
        RELEASED.store(true, Ordering::SeqCst);
        assert!(ending.join().unwrap());
    });
}

#[test]
fn registrations_come_and_go_while_others_are_served() {
    let toy = Toy::new(8, None);
    let registration = toy.register();
    let stop = AtomicBool::new(false);
    let steps: u64 = thread::scope(|scope| {
        let counting = [0, 1].map(|thread| {
            let (toy, stop) = (&toy, &stop);
            scope.spawn(move || {
                let mut steps = 0;
                while !stop.load(Ordering::Relaxed) {
                    toy.evict((steps + thread) % 8);
                    counter(toy.address(steps % 8)).fetch_add(1, Ordering::Relaxed);
                    steps += 1;
                }
                steps as u64
            })
        });
        for _ in 0..2000 {
            let (address, other) = calling(|| {});
            counter(address).store(1, Ordering::Relaxed);
            assert_eq!(counter(address).load(Ordering::Relaxed), 1);
            drop(other);
        }
        stop.store(true, Ordering::Relaxed);
        counting.map(|thread| thread.join().unwrap()).iter().sum()
    });
    let counted = (0..8).map(|page| counter(toy.address(page)).load(Ordering::Relaxed));
    assert_eq!(counted.sum::<u64>(), steps);
    drop(registration);
}

#[test]
#[should_panic(expected = "overlaps")]
fn ranges_that_overlap_are_our_own_mistake() {
    let toy = Toy::new(2, None);
    let _registration = toy.register();
    let _ = FaultRegistration::new(toy.base + PAGE..toy.base + 3 * PAGE, toy);
}

#[test]
fn child_after_fork_can_register_for_itself() {
    let (address, _registration) = calling(|| {});
    // SAFETY: the child allocates, which glibc supports after fork, and ends without destructors of
    // the parent's.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let served = std::panic::catch_unwind(|| {
            let toy = Toy::new(1, None);
            // The parent's range is free here, also for the region.
            drop(FaultRegistration::new(
                address..address + PAGE,
                Arc::clone(&toy) as _,
            ));
            let _registration = toy.register();
            counter(toy.base).store(1, Ordering::Relaxed);
        });
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(served.is_err())) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    Errno::result(unsafe { libc::waitpid(child, &mut status, 0) }).unwrap();
    assert!(
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0,
        "{status:#x}"
    );
    counter(address).store(1, Ordering::Relaxed);
}
