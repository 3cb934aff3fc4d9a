//! Tests of [`Arena`].

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::place::PLACE_UNIT;

#[test]
fn raw_pages_fill_an_extent_to_its_last_granule() {
    for page_bytes in [4096u32, 65536, 2 << 20] {
        let mut arena = Arena::new();
        let bytes = 7 * (2 << 20) + GRANULE_BYTES;
        arena.add(3, bytes);
        let slots = std::iter::from_fn(|| arena.alloc(page_bytes, Choice::First)).count() as u64;
        assert_eq!(slots, bytes / u64::from(page_bytes));
    }
}

#[derive(Clone, Debug)]
enum SlotStep {
    Alloc(u32),
    AllocRun(u32, usize),
    Free(prop::sample::Index),
}

fn step() -> impl Strategy<Value = SlotStep> {
    prop_oneof![
        6 => (1u32..70_000).prop_map(SlotStep::Alloc),
        3 => (12u32..17, 1usize..40).prop_map(|(bits, count)| SlotStep::AllocRun(1 << bits, count)),
        5 => any::<prop::sample::Index>().prop_map(SlotStep::Free),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn live_slots_never_overlap_and_everything_returns(steps in prop::collection::vec(step(), 1..400)) {
        let mut arena = Arena::new();
        let extents = [(0, 3 << 20), (2, (1 << 20) + 3 * GRANULE_BYTES), (5, GRANULE_BYTES + 100)];
        for (index, bytes) in extents {
            arena.add(index, bytes);
        }
        // Slot -> length.
        let mut live: BTreeMap<Slot, u32> = BTreeMap::new();
        for step in steps {
            match step {
                SlotStep::Alloc(bytes) | SlotStep::AllocRun(bytes, _) => {
                    let mut slots = Vec::new();
                    match step {
                        SlotStep::AllocRun(_, count) => {
                            arena.alloc_run(bytes, count, Choice::First, |slot| slots.push(slot));
                            prop_assert!(slots.len() == count || arena.alloc(bytes, Choice::First).is_none());
                        }
                        _ => slots.extend(arena.alloc(bytes, Choice::First)),
                    }
                    for slot in slots {
                        let end = slot.offset + u64::from(bytes);
                        let extent = extents.iter().find(|(index, _)| *index == slot.extent).expect("a granted extent").1;
                        prop_assert!(end <= extent && slot.offset.is_multiple_of(PLACE_UNIT));
                        if let Some((below, len)) = live.range(..=slot).next_back() {
                            prop_assert!(below.extent != slot.extent || below.offset + u64::from(*len) <= slot.offset);
                        }
                        if let Some((above, _)) = live.range(slot..).next() {
                            prop_assert!(above.extent != slot.extent || end <= above.offset);
                        }
                        live.insert(slot, bytes);
                    }
                }
                SlotStep::Free(_) if live.is_empty() => {}
                SlotStep::Free(index) => {
                    let slot = *index.get(&live.keys().copied().collect::<Vec<_>>());
                    let bytes = live.remove(&slot).expect("picked from the live ones");
                    arena.free(slot, slot_bytes(bytes));
                }
            }
        }
        let used: u64 = live.values().map(|&bytes| slot_bytes(bytes)).sum();
        prop_assert_eq!(arena.used_bytes(), used);
        // Another process takes the same slots out of the same extents, and none twice.
        let mut other = Arena::new();
        extents.iter().for_each(|&(index, bytes)| other.add(index, bytes));
        for (&slot, &bytes) in &live {
            prop_assert!(other.claim(slot, bytes) && !other.claim(slot, bytes));
        }
        prop_assert_eq!(&other.by_length, &arena.by_length);
        for (index, bytes) in extents {
            for offset in (0..bytes + 4096).step_by(1024) {
                let (slot, end) = (Slot { extent: index, offset }, offset + 1024);
                let mut taken = 0;
                for (live, &len) in live.range(start_of(index)..start_of(index + 1)) {
                    let live_end = live.offset + slot_bytes(len);
                    taken += live_end.min(end).saturating_sub(live.offset.max(offset));
                }
                prop_assert_eq!(arena.has(slot, 1024), taken == 1024);
            }
        }
        prop_assert!(!arena.has(start_of(1), 64) && !arena.has(start_of(6), 64));
        prop_assert_eq!(arena.take_surplus(0).len() < 3, !live.is_empty());
        for (slot, bytes) in live {
            arena.free(slot, slot_bytes(bytes));
        }
        arena.take_surplus(0);
        prop_assert_eq!((arena.granted_bytes, arena.holes.len(), arena.by_length[0].len()), (0, 0, 0));
    }
}

/// Pages that are rewritten with other lengths again and again, in order and at random, alone
/// and in runs, some of them raw: the space that was ever needed against the bytes stored.
#[test]
fn rewriting_pages_with_changing_lengths_keeps_the_space_compact() {
    for (page_bytes, run_max, raw_in_ten, at_random) in [
        (4096u64, 1, 0, false),
        (4096, 1, 0, true),
        (65536, 1, 0, false),
        (65536, 1, 0, true),
        (4096, 16, 3, false),
        (65536, 16, 3, false),
        (65536, 16, 3, true),
        (65536, 16, 10, false),
        (65536, 1, 10, true),
    ] {
        let mut arena = Arena::new();
        arena.add(0, 1 << 30);
        let mut next = numbers(page_bytes);
        let pages = 4000;
        let mut slots: Vec<Option<(Slot, u64)>> = vec![None; pages];
        let mut worst = 0.0f64;
        for pass in 0..10 {
            let (mut from, mut written) = (0, 0);
            while written < pages {
                if at_random && pass > 0 {
                    from = next(pages);
                }
                let to = (from + 1 + next(run_max)).min(pages);
                let (raw, encoded): (Vec<_>, Vec<_>) =
                    (from..to).partition(|_| next(10) < raw_in_ten);
                let mut new: Vec<_> = alloc_run(&mut arena, page_bytes, raw.len())
                    .into_iter()
                    .map(|slot| (slot, page_bytes))
                    .collect();
                assert_eq!(new.len(), raw.len(), "there is room");
                for _ in &encoded {
                    let bytes = page_bytes / 4 + next(page_bytes as usize / 2) as u64;
                    new.push((
                        arena
                            .alloc(bytes as u32, Choice::First)
                            .expect("there is room"),
                        bytes,
                    ));
                }
                for (page, new) in raw.into_iter().chain(encoded).zip(new) {
                    if let Some((old, bytes)) = slots[page].replace(new) {
                        arena.free(old, slot_bytes(bytes as u32));
                    }
                }
                (from, written) = (to, written + to - from);
            }
            // Best fit leaves the end alone as long as anything else will do.
            let (last, len) = arena.holes.last_key_value().expect("not full");
            assert_eq!(last.offset + len, 1 << 30);
            let stored: u64 = slots.iter().flatten().map(|(_, bytes)| bytes).sum();
            worst = worst.max(last.offset as f64 / stored as f64);
        }
        println!(
            "{page_bytes}-byte pages, {raw_in_ten} in 10 raw, runs of {run_max}, at random: {at_random}: {worst:.3} times what is stored"
        );
        assert!(worst < 1.1, "{worst}");
    }
}

/// Returns a seeded generator that yields the same numbers on every machine.
fn numbers(seed: u64) -> impl FnMut(usize) -> usize {
    let mut random = seed;
    move |limit| {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % limit
    }
}

fn rows(slots: &[Slot], page_bytes: u64) -> usize {
    let behind = |a: &Slot, b: &Slot| a.extent == b.extent && a.offset + page_bytes == b.offset;
    slots.chunk_by(behind).count()
}

fn alloc_run(arena: &mut Arena, page_bytes: u64, count: usize) -> Vec<Slot> {
    let mut slots = Vec::new();
    arena.alloc_run(page_bytes as u32, count, Choice::First, |slot| {
        slots.push(slot)
    });
    slots
}

#[test]
fn a_run_is_one_row_where_there_is_room_for_it() {
    for (page_bytes, count) in [
        (4096, 256),
        (4096, 17),
        (65536, 16),
        (65536, 5),
        (65536, 32),
    ] {
        let mut arena = Arena::new();
        arena.add(0, 64 << 20);
        for _ in 0..8 {
            let slots = alloc_run(&mut arena, page_bytes, count);
            assert_eq!((slots.len(), rows(&slots, page_bytes)), (count, 1));
        }
    }
    let mut arena = Arena::new();
    arena.add(0, 1 << 20);
    let all = alloc_run(&mut arena, 65536, 20);
    assert_eq!((all.len(), rows(&all, 65536)), (16, 1), "what there is");
    all.iter()
        .step_by(2)
        .for_each(|slot| arena.free(*slot, 65536));
    assert_eq!(alloc_run(&mut arena, 65536, 20).len(), 8, "in pieces");
}

/// Neighbouring pages that are written back together, mostly 16 of them, else some in a row.
#[test]
fn rewriting_runs_keeps_them_in_rows() {
    let spare = 16 << 20;
    for (page_bytes, whole_in_ten, written_max, read_max) in [
        (4096u64, 9, 1.1, 1.4),
        (65536, 9, 1.2, 1.5),
        (65536, 5, 3.0, 5.0),
    ] {
        let pages = ((256 << 20) / page_bytes) as usize;
        let mut arena = Arena::new();
        arena.add(0, (256 << 20) + spare);
        let mut next = numbers(page_bytes);
        let mut slots = alloc_run(&mut arena, page_bytes, pages);
        let (mut written, mut runs) = (0, 0);
        let rounds = 10 * pages / 16;
        for i in 0..rounds {
            let mut from = next(pages / 16) * 16;
            let mut to = from + 16;
            if next(10) >= whole_in_ten {
                from += next(16);
                to = from + 1 + next(to - from);
            }
            let new = alloc_run(&mut arena, page_bytes, to - from);
            assert_eq!(new.len(), to - from, "there is room");
            if i > rounds / 2 {
                (written, runs) = (written + rows(&new, page_bytes), runs + 1);
            }
            for (old, new) in slots[from..to].iter_mut().zip(new) {
                arena.free(std::mem::replace(old, new), page_bytes);
            }
        }
        let read: usize = slots.chunks(16).map(|run| rows(run, page_bytes)).sum();
        let (written, read) = (
            written as f64 / runs as f64,
            read as f64 * 16.0 / pages as f64,
        );
        println!(
            "{page_bytes}-byte pages, {whole_in_ten} in 10 whole: {written:.2} rows per run written, {read:.2} per 16 pages read"
        );
        assert!(written < written_max && read < read_max, "{written} {read}");
    }
}

#[test]
#[should_panic(expected = "freed twice")]
fn freeing_twice_is_our_own_mistake() {
    let mut arena = Arena::new();
    arena.add(0, 1 << 20);
    let slot = arena.alloc(4096, Choice::First).expect("there is room");
    arena.alloc(4096, Choice::First);
    arena.free(slot, 4096);
    arena.free(slot, 4096);
}
