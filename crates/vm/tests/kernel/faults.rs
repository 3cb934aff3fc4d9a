//! Faults: of system calls, of threads that sleep, on poisoned pages, and beside `fork`.

use std::{
    io::{Read, Seek, Write},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use farpage_vm::{AddressSpace, Shard, Transfer};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::Signal,
        wait::{WaitStatus, waitpid},
    },
    unistd::{ForkResult, fork},
};

use crate::common::{
    BOTH, Filler, Moves, as_the_program, byte, drop_range, events, geometry, mapped, numbered,
    numbers, pages, run_geometry, set, space, system_call_can_read, unmap_by_the_program,
};

#[test]
fn system_calls_read_and_write_absent_pages() {
    for transfer in BOTH {
        let space = space(transfer, 1);
        let geometry = geometry(8 * 65536, 65536);
        let (filler, threads) = Filler::start(&space, geometry);
        let mut file = tempfile::tempfile().unwrap();
        let content: Vec<u8> = (0..geometry.bytes)
            .map(|index| (index % 251) as u8)
            .collect();
        file.write_all(&content).unwrap();
        file.rewind().unwrap();
        // SAFETY: the whole region, which no other thread writes.
        let region =
            unsafe { std::slice::from_raw_parts_mut(filler.base as *mut u8, geometry.bytes) };
        file.read_exact(region).unwrap();
        for page in 0..8 {
            filler.evict(page).unwrap();
        }
        let mut copy = tempfile::tempfile().unwrap();
        copy.write_all(region).unwrap();
        copy.rewind().unwrap();
        let mut back = Vec::new();
        copy.read_to_end(&mut back).unwrap();
        assert_eq!(back, content);
        filler.finish(threads);
    }
}

#[test]
fn region_stays_usable_after_fork_and_exec_while_faulting() {
    let space = space(Transfer::Move, 1);
    let geometry = geometry(64 * 4096, 4096);
    let (filler, threads) = Filler::start(&space, geometry);
    let running = Arc::new(AtomicBool::new(true));
    let program = {
        let (running, base) = (Arc::clone(&running), filler.base);
        thread::spawn(move || {
            let mut page = 0;
            while running.load(Ordering::Relaxed) {
                set(base + page % 64 * 4096, 1);
                page += 7;
            }
        })
    };
    for round in 0..20 {
        assert!(Command::new("/bin/true").status().unwrap().success());
        // SAFETY: the child only touches the region and exits.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                // The region is not inherited: this is SIGSEGV.
                byte(filler.base);
                // SAFETY: ends the child without running the parent's destructors.
                unsafe { libc::_exit(0) }
            }
            ForkResult::Parent { child } => {
                assert!(matches!(
                    waitpid(child, None).unwrap(),
                    WaitStatus::Signaled(_, Signal::SIGSEGV, _)
                ));
            }
        }
        for page in 0..64 {
            filler.evict(page).unwrap();
        }
        set(filler.base + 63 * 4096 + 9, round);
        assert_eq!(byte(filler.base + 63 * 4096 + 9), round);
    }
    running.store(false, Ordering::Relaxed);
    program.join().unwrap();
    assert!(filler.faults.load(Ordering::Relaxed) > 64);
    filler.finish(threads);
}

#[test]
fn poisoned_page_fails_and_install_heals_it() {
    for transfer in BOTH {
        let space = space(transfer, 1);
        for page_bytes in [4096, 65536, 2 << 20] {
            let geometry = geometry(2 * page_bytes, page_bytes);
            let base = space.map(geometry).unwrap().address;
            space.poison(pages(0, base, page_bytes, 1)).unwrap();
            assert!(!system_call_can_read(base));
            assert!(!system_call_can_read(base + page_bytes - 4096));
            let mut frame = space.new_frame(page_bytes, 1).unwrap();
            frame.as_mut().fill(5);
            space.move_in(0, base, page_bytes, frame).unwrap();
            assert!(system_call_can_read(base));
            assert_eq!((byte(base), byte(base + page_bytes - 1)), (5, 5));
            let frame = space.move_out(pages(0, base, page_bytes, 1)).unwrap();
            assert!(frame.as_ref().iter().all(|&byte| byte == 5));
            space.unmap(base, geometry);
        }
    }
}

#[test]
fn poison_that_the_program_dropped_in_part_is_healed_whole() {
    for transfer in BOTH {
        for dropped in [0..4, 12..16, 4..12] {
            let space = space(transfer, 1);
            let geometry = run_geometry(3, 65536);
            let base = space.map(geometry).unwrap().address;
            space.poison(pages(0, base + 65536, 65536, 1)).unwrap();
            drop_range(base + 65536 + dropped.start * 4096, dropped.len() * 4096);
            space
                .move_in(0, base, 65536, numbered(&space, 65536, 3, 1))
                .unwrap();
            for part in (base..base + geometry.bytes).step_by(4096) {
                assert!(system_call_can_read(part), "{dropped:?} at {part:#x}");
            }
            assert_eq!(numbers(mapped(base, geometry.bytes), 65536), [1, 2, 3]);
            space.unmap(base, geometry);
        }
    }
}

/// The kernel poisons nothing that spans two mappings.
#[test]
fn poison_covers_a_page_that_the_program_has_divided() {
    for transfer in BOTH {
        for (divided, unmapped) in [(3..7, 0..0), (15..16, 0..0), (0..1, 0..0), (5..9, 2..4)] {
            let space = space(transfer, 1);
            let geometry = run_geometry(3, 65536);
            let base = space.map(geometry).unwrap().address;
            let page = base + 65536;
            protect(page, divided.clone(), libc::PROT_READ);
            as_the_program(&space, || {
                if !unmapped.is_empty() {
                    unmap_by_the_program(page + unmapped.start * 4096, unmapped.len() * 4096);
                }
            });
            space.poison(pages(0, page, 65536, 1)).unwrap();
            // Nobody serves faults: a part that is not poisoned would be waited for without end.
            let sleeper =
                thread::spawn(move || (page..page + 65536).step_by(4096).any(system_call_can_read));
            let since = Instant::now();
            while !sleeper.is_finished() {
                assert!(
                    since.elapsed() < Duration::from_secs(20),
                    "{divided:?} is waited for"
                );
                thread::sleep(Duration::from_millis(1));
            }
            assert!(!sleeper.join().unwrap(), "{divided:?}");
            if unmapped.is_empty() {
                protect(page, divided, libc::PROT_READ | libc::PROT_WRITE);
                space
                    .move_in(0, base, 65536, numbered(&space, 65536, 3, 1))
                    .unwrap();
                assert_eq!(numbers(mapped(base, geometry.bytes), 65536), [1, 2, 3]);
            }
            space.unmap(base, geometry);
        }
    }
}

fn protect(page: usize, parts: std::ops::Range<usize>, protection: libc::c_int) {
    let start = (page + parts.start * 4096) as *mut _;
    // SAFETY: a part of a region of the test's own.
    let done = unsafe { libc::mprotect(start, parts.len() * 4096, protection) };
    assert_eq!(done, 0);
}

#[test]
fn program_that_locks_all_it_maps_pages_all_the_same() {
    // A child of its own: the lock is the whole process's. SAFETY: the child makes its own space;
    // it allocates, which glibc supports after fork.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            // SAFETY: changes how this process maps memory.
            if unsafe { libc::mlockall(libc::MCL_FUTURE) } != 0 {
                // SAFETY: ends the child without running the parent's destructors.
                unsafe { libc::_exit(SKIPPED) };
            }
            let mut is_fine = true;
            for transfer in BOTH {
                let space = space(transfer, 1);
                let geometry = run_geometry(3, 65536);
                let base = space.map(geometry).unwrap().address;
                is_fine &= !space.is_present(base);
                let frame = numbered(&space, 65536, 3, 1);
                space.move_in(0, base, 65536, frame).unwrap();
                let out = space.move_out(pages(0, base, 65536, 3)).unwrap();
                is_fine &= numbers(out.as_ref(), 65536) == [1, 2, 3];
                is_fine &= !space.is_present(base);
                drop(out);
                space.unmap(base, geometry);
            }
            // SAFETY: as above.
            unsafe { libc::_exit(i32::from(!is_fine)) }
        }
        ForkResult::Parent { child } => match waitpid(child, None).unwrap() {
            WaitStatus::Exited(_, SKIPPED) => {
                eprintln!("SKIPPED: program_that_locks_all_it_maps_pages_all_the_same: no right to")
            }
            status => assert_eq!(status, WaitStatus::Exited(child, 0)),
        },
    }
}

const SKIPPED: i32 = 77;

#[test]
fn touching_a_poisoned_page_kills_with_sigbus() {
    // A child of its own, since the region is not inherited by fork. SAFETY: the child makes its
    // own space and ends by the signal; it allocates, which glibc supports after fork.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            let space = space(Transfer::Move, 1);
            let base = space.map(geometry(4096, 4096)).unwrap().address;
            space.poison(pages(0, base, 4096, 1)).unwrap();
            byte(base);
            // SAFETY: ends the child without running the parent's destructors.
            unsafe { libc::_exit(0) }
        }
        ForkResult::Parent { child } => {
            assert!(matches!(
                waitpid(child, None).unwrap(),
                WaitStatus::Signaled(_, Signal::SIGBUS, _)
            ));
        }
    }
}

#[test]
fn poisoning_and_waking_end_the_sleep_of_a_system_call() {
    let space = space(Transfer::Move, 1);
    let geometry = geometry(4096, 4096);
    let base = space.map(geometry).unwrap().address;
    let sleeper = thread::spawn(move || system_call_can_read(base));
    let mut faults = Vec::new();
    // A woken thread tries again, and its fault is reported again.
    for _ in 0..2 {
        poll(
            &mut [PollFd::new(
                space.wait(Shard(0)).fd.unwrap(),
                PollFlags::POLLIN,
            )],
            PollTimeout::NONE,
        )
        .unwrap();
        faults.extend(events(&space, 0).faults);
        space.wake(pages(0, base, 4096, 1));
    }
    assert!(faults.len() >= 2);
    space.poison(pages(0, base, 4096, 1)).unwrap();
    assert!(!sleeper.join().unwrap());
    // The region goes while somebody sleeps on it.
    space
        .move_in(0, base, 4096, space.new_frame(4096, 1).unwrap())
        .unwrap();
    drop(space.move_out(pages(0, base, 4096, 1)).unwrap());
    let sleeper = thread::spawn(move || system_call_can_read(base));
    poll(
        &mut [PollFd::new(
            space.wait(Shard(0)).fd.unwrap(),
            PollFlags::POLLIN,
        )],
        PollTimeout::NONE,
    )
    .unwrap();
    space.unmap(base, geometry);
    assert!(!sleeper.join().unwrap());
}
