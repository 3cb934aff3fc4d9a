//! Faults of the disk: errors that say what is wrong, and never other bytes.

use std::{env, os::unix::process::ExitStatusExt};

use farpage_testkit::{finish, test_command, test_name, text, wait_until};

use super::*;

#[test]
fn what_the_disk_cannot_give_back_is_an_error_and_never_other_bytes() {
    let stage = Stage::set();
    stage.fill(first);
    for fault in [Fault::ReadError, Fault::ShortRead, Fault::FlippedBit] {
        let spilled = stage.at_place(Place::Spilled);
        assert!(spilled.len() > 8, "{fault:?}: {}", spilled.len());
        let before = stage.tier.stat().spill_errors;
        stage.break_disk(fault);
        for chunk in &spilled[..4] {
            let read = stage.read(*chunk);
            assert!(
                matches!(read, Err(ChannelError::Unreadable { .. })),
                "{fault:?} {read:?}"
            );
            // A part of it would hide that the rest is lost.
            let written = stage.operate(Verb::Write, *chunk, vec![1; 4096]);
            assert!(
                matches!(written, Err(ChannelError::Unreadable { .. })),
                "{fault:?}"
            );
        }
        assert!(stage.tier.stat().spill_errors >= before + 8, "{fault:?}");
        stage.break_disk(Fault::None);
        stage.assert_filled(&format!("{fault:?}"), first);
    }
}

#[test]
fn writes_wait_for_memory_and_are_told_that_there_is_none_and_nothing_is_lost() {
    for fault in [Fault::WriteError, Fault::ShortWrite, Fault::Full] {
        let stage = Stage::set();
        stage.break_disk(fault);
        let mut written = Vec::new();
        let mut turned_down = 0;
        for chunk in Stage::chunks() {
            match stage.operate(Verb::Write, chunk, odd(chunk)) {
                Ok(_) => written.push(chunk),
                Err(ChannelError::NoRoom { .. }) => turned_down += 1,
                Err(error) => panic!("{fault:?}: {error}"),
            }
            let tiers = stage.tier.stat();
            assert!(
                tiers.held_bytes <= LEAST_MEMORY_BYTES,
                "{fault:?}: {tiers:?}"
            );
            if turned_down == 2 {
                break;
            }
        }
        assert_eq!(turned_down, 2, "{fault:?}: memory is less than that");
        let tiers = stage.tier.stat();
        assert!(
            tiers.no_room >= 2 && tiers.spill_errors > 0,
            "{fault:?}: {tiers:?}"
        );
        stage.break_disk(Fault::None);
        stage.assert_filled(&format!("{fault:?}"), |chunk| {
            match written.contains(&chunk) {
                true => odd(chunk),
                false => vec![0; CHUNK],
            }
        });
    }
}

#[test]
fn a_chunk_that_was_only_read_leaves_without_a_write() {
    let stage = Stage::set();
    stage.fill(odd);
    let read_all = || stage.assert_filled("unchanged", odd);
    // Afterwards each of them has been on the disk.
    read_all();
    read_all();
    let before = stage.tier.stat();
    stage.break_disk(Fault::WriteError);
    read_all();
    let after = stage.tier.stat();
    assert!(after.evictions > before.evictions + 100, "{after:?}");
    assert_eq!(after.spill_errors, 0, "nothing was written");
}

#[test]
fn a_few_slots_that_cannot_be_written_end_no_evictions() {
    let stage = Stage::set();
    stage.break_disk(Fault::BadSlots);
    stage.fill(odd);
    let tiers = stage.tier.stat();
    assert!(tiers.spill_errors > 0, "{tiers:?}");
    stage.assert_filled("in the end", odd);
}

#[test]
fn the_clock_passes_by_chunks_that_cannot_be_stored() {
    let stage = Stage::set();
    stage.break_disk(Fault::WriteError);
    // Compressible chunks need no disk.
    let content = |chunk| content(if chunk < 96 { 1 } else { 2 }, chunk);
    stage.fill(content);
    let tiers = stage.tier.stat();
    assert!(
        (1..64).contains(&tiers.spill_errors),
        "each chunk of a segment has been tried: {tiers:?}"
    );
    stage.assert_filled("in the end", content);
}

/// Five of six chunks do not need the disk, and find room although it holds every evictor that was
/// there first.
#[test]
fn a_disk_that_takes_no_writes_holds_up_only_what_needs_it() {
    let stage = Stage::set();
    stage.break_disk(Fault::HungWrites);
    // Compressible chunks need no disk. The oldest chunks, which leave first, do.
    let content = |chunk| content(if chunk < 64 { 1 } else { 2 }, chunk);
    stage.fill(content);
    // The evictor that is left may still be compressing.
    wait_until("all evictors but one are in writes", || {
        stage.at_place(Place::Busy).len() == EVICTORS - 1
    });
    stage.break_disk(Fault::None);
    stage.assert_filled("in the end", content);
}

#[test]
fn a_disk_that_does_not_answer_stops_no_release_and_no_other_fetch() {
    let stage = Stage::set();
    stage.fill(first);
    // Time to leave the chunks that are on their way.
    let (spilled, compressed) = (
        stage.at_place(Place::Spilled),
        stage.at_place(Place::Compressed),
    );
    assert!(spilled.len() > DISK_FETCHES && compressed.len() > 8);
    stage.break_disk(Fault::HungReads);
    thread::scope(|scope| {
        for chunk in &spilled[..DISK_FETCHES] {
            scope.spawn(|| {
                let read = stage.read(*chunk).map(|bytes| bytes.len());
                read.expect_err("it is released meanwhile")
            });
        }
        wait_until("reads begin", || {
            stage.tier.mover.storage.disk_buffers.free.lock().is_empty()
        });
        let other = stage.read(spilled[DISK_FETCHES]);
        assert!(
            matches!(other, Err(ChannelError::NoRoom { .. })),
            "its reads wait for a buffer: {other:?}"
        );
        let read = stage.read(compressed[0]).expect("it needs no disk");
        assert!(read == content(compressed[0], 1));
        stage.break_disk(Fault::Hung);
        // Chunks that are read again soon are worth memory: others leave without the disk.
        for chunk in compressed.iter().chain(&compressed) {
            let read = stage.read(*chunk).expect("one evictor is not at the disk");
            assert!(read == content(*chunk, 1), "{chunk}");
        }
        // Returns although the disk never answers.
        stage.session.release(stage.extent).expect("it is leased");
        let left = stage.tier.stat();
        // Fetches, and what goes from the pool to the disk.
        let on_their_way = (DISK_FETCHES + EVICTORS) as u64 * CHUNK_BYTES;
        assert!(
            left.compressed_bytes + left.spilled_bytes <= on_their_way,
            "{left:?}"
        );
        stage.break_disk(Fault::None);
    });
    // Chunks that were being moved are given back by their movers, and the pool shrinks.
    wait_until("all is back", || {
        let left = stage.tier.stat();
        let own_bytes = stage.tier.mover.storage.own_bytes() + left.pool_bytes;
        left.hot_bytes + left.compressed_bytes + left.spilled_bytes == 0
            && left.held_bytes == own_bytes
            && stage.tier.mover.room.books.lock().slots_kept == 0
    });
    let slots = stage.tier.mover.storage.slots.lock();
    assert_eq!(slots.free.len() + slots.failed.len(), slots.fresh as usize);
}

#[test]
fn a_read_of_many_chunks_has_one_deadline_and_gets_further_each_time() {
    let stage = Stage::set();
    stage.fill(odd);
    // Chunks that lie one behind the other.
    let spilled = stage.at_place(Place::Spilled);
    let first = spilled
        .chunk_by(|a, b| a + 1 == *b)
        .find(|run| run.len() >= 32);
    let first = first.expect("the first are the coldest")[0];
    stage.break_disk(Fault::SlowRead);
    let mut turned_down = 0;
    let read = loop {
        match stage.operate(Verb::Read, first, vec![0xa5; 32 * CHUNK]) {
            Ok(bytes) => break bytes,
            Err(ChannelError::NoRoom { .. }) => turned_down += 1,
            Err(error) => panic!("{error}"),
        }
        assert!(turned_down < 8, "it gets further");
    };
    assert!(
        turned_down > 0,
        "all of it takes longer than one deadline, each chunk takes less"
    );
    for (chunk, bytes) in (first..).zip(read.chunks(CHUNK)) {
        assert!(bytes == content(chunk | 1, 1), "{chunk}");
    }
}

#[test]
fn a_capacity_that_no_disk_has_is_an_error() {
    let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a directory");
    for capacity_bytes in [u64::MAX, i64::MAX as u64, 1 << 60] {
        let started = Tier::start(
            LEAST_MEMORY_BYTES,
            capacity_bytes,
            directory.path(),
            HashMap::new(),
        );
        assert!(started.is_err(), "{capacity_bytes}");
    }
}

#[test]
fn a_slot_that_did_not_give_its_bytes_back_is_the_last_to_be_used_again() {
    let stage = Stage::set();
    stage.fill(first);
    stage.break_disk(Fault::FlippedBit);
    let spilled = stage.at_place(Place::Spilled);
    for chunk in &spilled[..4] {
        stage.read(*chunk).expect_err("it came back changed");
    }
    stage.break_disk(Fault::None);
    stage.session.release(stage.extent).expect("it is leased");
    let slots = stage.tier.mover.storage.slots.lock();
    assert_eq!((slots.failed.len(), slots.suspect.len()), (4, 0));
    assert!(slots.failed.iter().all(|slot| !slots.free.contains(slot)));
}

#[test]
fn a_panic_of_an_evictor_ends_the_process_and_says_so() {
    const CHILD: &str = "FARPAGE_TEST_EVICTOR_PANICS";
    if env::var_os(CHILD).is_some() {
        let stage = Stage::set();
        stage.break_disk(Fault::Panic);
        for chunk in Stage::chunks() {
            let written = stage.operate(Verb::Write, chunk, content(chunk | 1, 1));
            if written.is_err() {
                return;
            }
        }
    }
    let mut child = test_command(&test_name());
    let child = finish(child.env(CHILD, "1"), Duration::from_secs(60));
    let said = text(&child.stderr);
    assert_eq!(child.status.signal(), Some(nix::libc::SIGABRT), "{said}");
    assert!(
        said.contains("an evictor of this server panicked"),
        "{said}"
    );
}
