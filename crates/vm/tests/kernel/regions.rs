//! Regions: where they lie, what they leave behind, and read-only ones.

use std::{
    fs,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use farpage_vm::{AddressSpace, Geometry, Shard, Transfer};

use crate::common::{
    BOTH, Filler, Moves, as_the_program, byte, geometry, map_over, mapped, numbered, numbers,
    pages, protection, run_geometry, set, space, unmap_by_the_program,
};

#[test]
fn unmapping_under_load_leaves_other_regions_alone() {
    let space = space(Transfer::Move, 2);
    let (filler, threads) = Filler::start(&space, geometry(64 * 4096, 4096));
    let running = Arc::new(AtomicBool::new(true));
    let program = {
        let (running, base) = (Arc::clone(&running), filler.base);
        thread::spawn(move || {
            let mut page = 0;
            while running.load(Ordering::Relaxed) {
                set(base + page % 64 * 4096, 1);
                page += 11;
            }
        })
    };
    let other = geometry(16 * 4096, 4096);
    for round in 0..2000 {
        let base = space.map(other).unwrap().address;
        let mut frame = space.new_frame(4096, 1).unwrap();
        frame.as_mut().fill(round as u8);
        space.move_in(0, base, 4096, frame).unwrap();
        assert_eq!(byte(base), round as u8);
        filler.evict(round % 64).unwrap();
        space.unmap(base, other);
    }
    running.store(false, Ordering::Relaxed);
    program.join().unwrap();
    filler.finish(threads);
}

fn count_of(path: &str) -> usize {
    fs::read_to_string(path).unwrap().lines().count()
}

fn resident_kib() -> usize {
    let status = fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("Rss:"))
        .unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Runs in a process of its own: other tests of this file change the counts.
#[test]
fn mapping_ten_thousand_times_leaks_nothing_and_ten_thousand_fit_at_once() {
    const CHILD: &str = "FARPAGE_VM_TEST_ALONE";
    if std::env::var_os(CHILD).is_none() {
        let name = "regions::mapping_ten_thousand_times_leaks_nothing_and_ten_thousand_fit_at_once";
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name])
            .env(CHILD, "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        let passed = output.status.success() && said.contains("1 passed");
        assert!(passed, "{said}");
        return;
    }
    for transfer in BOTH {
        let space = space(transfer, 2);
        let geometry = Geometry {
            bytes: 65536,
            page_bytes: 4096,
            stripe_bytes: 32768,
            first_shard: 0,
            address: None,
            read_only: false,
            no_direct_io: false,
            ordinary: false,
        };
        let mut before = None;
        for cycle in 0..11_000 {
            let base = space.map(geometry).unwrap().address;
            let mut frame = space.new_frame(4096, 1).unwrap();
            frame.as_mut()[0] = 1;
            space.move_in(0, base, geometry.page_bytes, frame).unwrap();
            // Every other page is lost with its region.
            if cycle % 2 == 0 {
                space.move_out(pages(0, base, 4096, 1)).unwrap();
            }
            space.unmap(base, geometry);
            let count = || {
                let descriptors = fs::read_dir("/proc/self/fd").unwrap().count();
                (descriptors, count_of("/proc/self/maps"), resident_kib())
            };
            if cycle == 999 {
                before = Some(count());
            } else if cycle == 10_999 {
                let (before, after) = (before.unwrap(), count());
                assert_eq!(before.0, after.0, "descriptors");
                assert!(after.1 <= before.1 + 4, "mappings: {before:?} {after:?}");
                assert!(after.2 <= before.2 + 1024, "resident: {before:?} {after:?}");
            }
        }
        let regions: Vec<_> = (0..10_000)
            .map(|_| space.map(geometry).unwrap().address)
            .collect();
        for base in regions {
            space.unmap(base, geometry);
        }
    }
}

#[test]
fn region_at_a_given_address_replaces_what_is_there_and_nothing_else() {
    let space = space(Transfer::Move, 2);
    for page_bytes in [4096, 65536] {
        let around = run_geometry(4, page_bytes);
        // A region finds aligned addresses; the program has them afterwards.
        let start = space.map(around).unwrap().address;
        space.unmap(start, around);
        map_over(start, 4 * page_bytes, libc::PROT_READ | libc::PROT_WRITE);
        for number in 0..4 {
            set(start + number * page_bytes, 50);
        }
        let geometry = Geometry {
            address: Some(start + page_bytes),
            ..run_geometry(2, page_bytes)
        };
        assert_eq!(space.map(geometry).unwrap().address, start + page_bytes);
        assert_eq!((byte(start), byte(start + 3 * page_bytes)), (50, 50));
        let Shard(shard) = geometry.shard_of(0, 2);
        space
            .move_in(
                shard,
                start + page_bytes,
                page_bytes,
                numbered(&space, page_bytes, 2, 1),
            )
            .unwrap();
        assert_eq!(byte(start + page_bytes), 1);
        // Refused: places over another region, and addresses where no region can begin.
        let refused = |address| {
            let geometry = Geometry {
                address: Some(address),
                ..geometry
            };
            space.map(geometry).unwrap_err().kind()
        };
        use std::io::ErrorKind::{AlreadyExists, InvalidInput};
        assert_eq!(refused(start), AlreadyExists);
        assert_eq!(refused(start + 2 * page_bytes), AlreadyExists);
        assert_eq!(refused(start + 2048), InvalidInput);
        assert_eq!(refused(0), InvalidInput);
        assert_eq!(refused(usize::MAX - page_bytes + 1), InvalidInput);
        assert_eq!(byte(start + page_bytes), 1);
        space.unmap(start + page_bytes, geometry);
        assert_eq!((byte(start), byte(start + 3 * page_bytes)), (50, 50));
        assert_eq!(protection(start + page_bytes), None);
        unmap_by_the_program(start, page_bytes);
        unmap_by_the_program(start + 3 * page_bytes, page_bytes);
    }
}

#[test]
fn new_region_keeps_out_of_what_the_program_has_unmapped_of_another() {
    let space = space(Transfer::Move, 1);
    let geometry = run_geometry(64, 65536);
    let base = space.map(geometry).unwrap().address;
    as_the_program(&space, || unmap_by_the_program(base + 65536, 62 * 65536));
    let small: Vec<usize> = (0..32)
        .map(|_| space.map(run_geometry(2, 4096)).unwrap().address)
        .collect();
    for &address in &small {
        assert!(address + 8192 <= base || base + geometry.bytes <= address);
        space.unmap(address, run_geometry(2, 4096));
    }
    space.unmap(base, geometry);
}

#[test]
fn read_only_region_is_paged_and_cannot_be_written() {
    for transfer in BOTH {
        let space = space(transfer, 1);
        for page_bytes in [4096, 65536, 2 << 20] {
            let geometry = Geometry {
                read_only: true,
                no_direct_io: false,
                ordinary: false,
                ..run_geometry(4, page_bytes)
            };
            let base = space.map(geometry).unwrap().address;
            for round in 0..3 {
                space
                    .move_in(0, base, page_bytes, numbered(&space, page_bytes, 4, round))
                    .unwrap();
                let there = numbers(mapped(base, 4 * page_bytes), page_bytes);
                assert_eq!(there, [round, round + 1, round + 2, round + 3]);
                assert_eq!(protection(base + page_bytes).as_deref(), Some("r--p"));
                let frame = space.move_out(pages(0, base, page_bytes, 4)).unwrap();
                assert_eq!(numbers(frame.as_ref(), page_bytes), there);
                assert!(!space.is_present(base));
            }
            space.poison(pages(0, base, page_bytes, 1)).unwrap();
            space
                .move_in(0, base, page_bytes, numbered(&space, page_bytes, 1, 9))
                .unwrap();
            assert_eq!(numbers(mapped(base, page_bytes), page_bytes), [9]);
            assert_eq!(protection(base).as_deref(), Some("r--p"));
            space.unmap(base, geometry);
        }
    }
}

/// ThreadSanitizer and MemorySanitizer have shadow memory at most addresses below programs.
#[cfg(target_arch = "x86_64")]
#[test]
fn regions_lie_apart_where_sanitizers_expect_a_programs_memory() {
    let space = space(Transfer::Move, 1);
    let apart = 0x5500_0000_0000..0x5555_0000_0000;
    for (pages, page_bytes, is_apart) in [
        (1, 4096, true),
        (64, 65536, true),
        // Regions of other tests are there, too, and leave room for this one.
        (1 << 14, 2 << 20, true),
        // More than fits there.
        (1 << 18, 2 << 20, false),
    ] {
        let geometry = run_geometry(pages, page_bytes);
        let start = space.map(geometry).unwrap().address;
        let ends = [start, start + geometry.bytes - 1];
        let is_within = ends.iter().any(|end| apart.contains(end));
        assert_eq!(is_within, is_apart, "{start:#x}");
        assert!(!is_apart || ends.iter().all(|end| apart.contains(end)));
        space.unmap(start, geometry);
    }
}
