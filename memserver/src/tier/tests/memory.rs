//! Memory that extents take. It is counted before it is lent, kept for what is used again, and
//! given back.

use super::*;

#[test]
fn memory_of_a_released_extent_is_lent_again_once_its_last_chunks_have_arrived() {
    let stage = Stage::set();
    stage.break_disk(Fault::HungWrites);
    let mut written = Stage::chunks();
    while stage.at_place(Place::Busy).is_empty() {
        let chunk = written.next().expect("memory is smaller than the extent");
        let _may_find_no_room = stage.operate(Verb::Write, chunk, content(chunk | 1, 1));
    }
    stage.session.release(stage.extent).expect("it is leased");
    assert!(
        stage.tier.mover.room.books.lock().orphans > 0,
        "an evictor hangs"
    );
    thread::scope(|scope| {
        scope.spawn(|| {
            // Longer than it takes to ask. Where it is not, the test says less.
            thread::sleep(Duration::from_millis(100));
            stage.break_disk(Fault::None);
        });
        // All slots are wanted, and one or more are not back.
        let again = stage.session.grant(EXTENT_BYTES);
        assert!(again.is_ok(), "{again:?}");
    });
    assert_eq!(stage.tier.mover.room.books.lock().orphans, 0);
}

#[test]
fn a_lease_whose_table_has_no_room_waits_until_chunks_have_left() {
    // The large extent's table takes more than evictors keep free.
    const LARGE_BYTES: u64 = 768 * MIB;
    // Zeros, which take no memory here until they are written.
    let stage = Stage::with_capacity(EXTENT_BYTES + LARGE_BYTES + 3 * CHUNK_BYTES, 0);
    let small = [(); 3].map(|()| stage.session.grant(CHUNK_BYTES).expect("room").id);
    stage.fill(odd);
    stage.break_disk(Fault::WriteError);
    let begun = Instant::now();
    let refused = stage.session.grant(LARGE_BYTES);
    assert!(
        matches!(refused, Err(AllocError::Control(_))) && begun.elapsed() < TABLE_PATIENCE / 2,
        "it has as many extents as it may, so nothing is waited for: {refused:?}"
    );
    for id in small {
        stage.session.release(id).expect("it was lent");
    }
    let refused = stage.session.grant(LARGE_BYTES);
    assert!(
        matches!(refused, Err(AllocError::Full { .. })),
        "{refused:?}"
    );
    assert_eq!(stage.tier.mover.room.books.lock().wanted_bytes, 0);
    stage.break_disk(Fault::None);
    let large = stage.session.grant(LARGE_BYTES).expect("chunks can leave");
    let held_bytes = stage.tier.stat().held_bytes;
    assert!(held_bytes <= LEAST_MEMORY_BYTES, "{held_bytes}");
    stage.assert_filled("in the end", odd);
    stage.session.release(large.id).expect("it was lent");
    assert!(
        stage.session.grant(LARGE_BYTES).is_ok(),
        "all was given back"
    );
}

#[test]
fn memory_that_a_client_takes_by_touching_what_is_not_there_is_charged_to_it_and_given_back() {
    let mut stage = Stage::set();
    stage.fill(first);
    // Evictors would change the counts while they are compared.
    stage.stop_evictors();
    let extent = stage.lent();
    let _words = extent.share().expect("a descriptor");
    let out = stage.at_place(Place::Spilled);
    assert!(out.len() > 64, "{}", out.len());
    let touched = u64::try_from(out.len()).expect("few") * 4096;
    for chunk in &out {
        let first = *chunk * CHUNK_BYTES;
        extent.file.write_at(first, &[7; 8]).expect("memory");
    }
    let chunks = || stage.tier.mover.room.books.lock().extents[&stage.extent].chunks;
    let before = chunks();
    stage.tier.punch_strays();
    let tiers = stage.tier.stat();
    // Room is left for marks: nobody has made any, but an evictor may have looked.
    let found = tiers.stray_bytes;
    let no_marks = touched - extent.file.marks_bytes();
    assert!([touched, no_marks].contains(&found), "{touched} {found}");
    assert_eq!(chunks() - before, found.div_ceil(CHUNK_BYTES));
    // Nothing is there any more, and the charge ends at the next look.
    stage.tier.punch_strays();
    let tiers = stage.tier.stat();
    assert_eq!(tiers.stray_bytes, found, "given back at the first look");
    assert_eq!(chunks(), before);
    stage.restart_evictors();
    stage.assert_filled("in the end", first);
}

#[test]
fn a_client_that_marks_everything_all_the_time_still_gives_up_chunks() {
    let stage = Stage::set();
    for chunk in 0..4 {
        stage.write(chunk, 1).expect("room");
    }
    let extent = stage.lent();
    extent.share().expect("a memfd");
    // As a client does through its mapping.
    let mark_all = || {
        extent
            .file
            .write_at(EXTENT_BYTES, &[0xff; 4])
            .expect("marks")
    };
    // Chunks that were young because they had been written are not any more.
    assert_eq!(extent.take_cold(0, false), None);
    for _ in 0..3 {
        mark_all();
        assert_eq!(extent.take_cold(0, false), None, "all are used");
    }
    mark_all();
    assert_eq!(extent.take_cold(0, true), Some(0));
    assert_eq!(extent.place(0), Place::Busy);
}

#[test]
fn a_chunk_that_could_not_leave_is_not_called_hot_after_its_extent_has_ended() {
    let stage = Stage::set();
    for chunk in 0..2 {
        stage.write(chunk, 1).expect("room");
    }
    let extent = stage.lent();
    let words = extent.share().expect("a memfd");
    // The first is held, and the other is on its way out.
    assert_eq!(extent.pin(0), Ok(true));
    assert_eq!(extent.take_cold(0, true), Some(1));
    stage.break_disk(Fault::WriteError);
    thread::scope(|scope| {
        let storage = &stage.tier.mover.storage;
        let discard = scope.spawn(|| extent.discard(|chunk| storage.forget(chunk)));
        while words.get(0).chunks() != 0 {
            thread::yield_now();
        }
        let mover = &stage.tier.mover;
        assert!(!mover.evict(&extent, 1, &mut Transfer::new()));
        assert_eq!(words.get(0).chunks(), 1 << 1, "it could not leave");
        extent.let_go(0, CHUNK_BYTES);
        assert_eq!(discard.join().expect("no panic"), (2, 0));
    });
    assert_eq!(words.get(0).chunks(), 0);
}

#[test]
fn what_extents_take_beside_their_chunks_is_counted_before_they_are_lent() {
    let stage = Stage::with_capacity(4 * EXTENT_BYTES, 0);
    let before = stage.tier.stat().held_bytes;
    let kept = stage.tier.keep_for(4096).expect("room");
    // A page of words and one of marks.
    let one = stage.tier.stat().held_bytes - before;
    assert_eq!(one, 2 * 4096 + TABLE_BYTES_PER_CHUNK);
    drop(kept);
    assert_eq!(stage.tier.stat().held_bytes, before);
    let mut kept = Vec::new();
    let available = loop {
        match stage.tier.keep_for(4096) {
            Ok(one) => kept.push(one),
            Err(available) => break available,
        }
    };
    // The most of the memory is for chunks.
    assert!(kept.len() as u64 * one <= LEAST_MEMORY_BYTES / 4);
    assert!(available < CHUNK_BYTES, "{available}");
}

#[test]
fn what_is_read_once_stays_where_it_is_and_what_is_read_again_comes_into_memory() {
    let mut stage = Stage::set();
    stage.fill(first);
    for place in [Place::Spilled, Place::Compressed] {
        // Otherwise the chunk may be moved on while the test looks.
        stage.stop_evictors();
        let chunk = stage.at_place(place)[0];
        let before = stage.tier.stat().fetches;
        // A part, not at the chunk's beginning.
        let offset = chunk * CHUNK_BYTES + 4096;
        let part = stage.transfer(Verb::Read, offset, vec![0xa5; 8192]);
        assert!(part.expect("a sound disk") == content(chunk, 1)[4096..][..8192]);
        assert!(stage.at_place(place).contains(&chunk), "{place:?}");
        assert!(stage.read(chunk).expect("a sound disk") == content(chunk, 1));
        assert!(stage.at_place(Place::Hot).contains(&chunk), "{place:?}");
        assert_eq!(stage.tier.stat().fetches, before + 2, "{place:?}");
        stage.restart_evictors();
        // A WRITE of a part needs the rest.
        let chunk = stage.at_place(place)[0];
        let written = stage.operate(Verb::Write, chunk, vec![1; 4096]);
        written.expect("a sound disk");
        let expected = [&[1; 4096][..], &content(chunk, 1)[4096..]].concat();
        assert!(stage.read(chunk).expect("a sound disk") == expected);
    }
}
