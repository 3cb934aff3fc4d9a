//! Frames: their memory and their slots.

use farpage_vm::{
    AddressSpace, Batch, Frame, KernelFrame, KernelSpace, KernelSpaceOptions, SCATTERED_PAGES_MAX,
};

use crate::common::{BOTH, Moves, numbered, numbers, pages, run_geometry, space};

#[test]
fn frame_gives_its_memory_back_and_can_be_made_again() {
    for transfer in BOTH {
        let options = KernelSpaceOptions {
            frame_bytes_max: 4 << 20,
            transfer: Some(transfer),
            ..KernelSpaceOptions::default()
        };
        let space = KernelSpace::new(options).unwrap();
        for page_bytes in [4096, 65536, 2 << 20] {
            for value in 1..=3 {
                let frames: Vec<_> = (0..(4 << 20) / page_bytes)
                    .map(|_| {
                        let mut frame = space.new_frame(page_bytes, 1).unwrap();
                        assert!(frame.as_ref().iter().all(|&byte| byte == 0));
                        frame.as_mut().fill(value);
                        frame
                    })
                    .collect();
                assert!(
                    space.new_frame(page_bytes, 1).is_err(),
                    "the pool has a size"
                );
                let address = frames[0].as_ref().as_ptr() as usize;
                drop(frames);
                assert!(!space.is_present(address));
            }
        }
    }
}

#[test]
fn frames_that_are_dropped_together_give_their_memory_and_their_slots_back() {
    for transfer in BOTH {
        let options = KernelSpaceOptions {
            frame_bytes_max: SCATTERED_PAGES_MAX * 4096,
            transfer: Some(transfer),
            ..KernelSpaceOptions::default()
        };
        let space = KernelSpace::new(options).unwrap();
        for _ in 0..3 {
            let frames: Batch<_> = (0..SCATTERED_PAGES_MAX)
                .map(|_| space.new_frame(4096, 1).unwrap())
                .collect();
            assert!(space.new_frame(4096, 1).is_err(), "the pool has a size");
            let addresses: Vec<_> = frames
                .iter()
                .map(|frame| frame.as_ref().as_ptr() as usize)
                .collect();
            space.drop_frames(frames);
            assert!(
                !addresses
                    .into_iter()
                    .any(|address| space.is_present(address))
            );
        }
        space.drop_frames(Batch::new());
    }
}

#[test]
fn frame_is_cut_and_joined_and_what_is_dropped_gives_its_memory_back() {
    for transfer in BOTH {
        let space = space(transfer, 1);
        for page_bytes in [4096, 65536, 2 << 20] {
            let mut first = numbered(&space, page_bytes, 6, 1);
            let address = first.as_ref().as_ptr() as usize;
            let mut middle = first.split_off(2 * page_bytes);
            let last = middle.split_off(3 * page_bytes);
            assert_eq!(numbers(first.as_ref(), page_bytes), [1, 2]);
            assert_eq!(numbers(middle.as_ref(), page_bytes), [3, 4, 5]);
            let last = first.join(last).unwrap_err();
            let first = middle.join(first).unwrap_err();
            middle.join(last).unwrap();
            assert_eq!(numbers(middle.as_ref(), page_bytes), [3, 4, 5, 6]);
            drop(first);
            assert!(!space.is_present(address) && !space.is_present(address + page_bytes));
            // The vacant slots are found again.
            let again = numbered(&space, page_bytes, 2, 1);
            assert_eq!(again.as_ref().as_ptr() as usize, address);
            let mut again = again;
            again.join(middle).unwrap();
            let all = [1, 2, 3, 4, 5, 6];
            assert_eq!(numbers(again.as_ref(), page_bytes), all);
            for wrong in [0, 6 * page_bytes, page_bytes / 2] {
                let cut = std::panic::AssertUnwindSafe(|| drop(again.split_off(wrong)));
                assert!(std::panic::catch_unwind(cut).is_err(), "{wrong}");
            }
            drop(again);
            assert!((0..6).all(|page| !space.is_present(address + page * page_bytes)));
        }
    }
}

#[test]
fn frames_made_cut_joined_moved_and_dropped_at_random_never_overlap_and_leak_no_slot() {
    const PAGES_MAX: usize = 256;
    for transfer in BOTH {
        for seed in 1..=4u64 {
            let options = KernelSpaceOptions {
                frame_bytes_max: PAGES_MAX * 4096,
                transfer: Some(transfer),
                ..KernelSpaceOptions::default()
            };
            let space = KernelSpace::new(options).unwrap();
            let geometry = run_geometry(64, 4096);
            let base = space.map(geometry).unwrap().address;
            let mut state = seed;
            let mut below = move |end: usize| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state % end as u64) as usize
            };
            // Frames with the value that each of their pages was filled with.
            let mut model: Vec<(KernelFrame, Vec<u8>)> = Vec::new();
            for step in 0..3000 {
                let held: usize = model.iter().map(|(_, values)| values.len()).sum();
                let pick = below(model.len().max(1));
                match below(6) {
                    0 | 1 => {
                        let pages = 1 + below(24);
                        match space.new_frame(4096, pages) {
                            Ok(mut frame) => {
                                assert!(held + pages <= PAGES_MAX);
                                let value = step as u8;
                                frame.as_mut().fill(value);
                                model.push((frame, vec![value; pages]));
                            }
                            // One page is always found. At these sizes a run is, too, while half of
                            // what may be held is not.
                            Err(_) => assert!(held + pages > PAGES_MAX || held > PAGES_MAX / 2),
                        }
                    }
                    _ if model.is_empty() => {}
                    2 => {
                        let (frame, values) = &mut model[pick];
                        if values.len() > 1 {
                            let at = 1 + below(values.len() - 1);
                            let rest = (frame.split_off(at * 4096), values.split_off(at));
                            model.push(rest);
                        }
                    }
                    3 => {
                        let (frame, values) = model.swap_remove(pick);
                        let behind = frame.as_ref().as_ptr_range().start;
                        let before = model
                            .iter_mut()
                            .find(|(before, _)| before.as_ref().as_ptr_range().end == behind);
                        match before {
                            Some((before, all)) => {
                                before.join(frame).unwrap();
                                all.extend(values);
                            }
                            None => model.push((frame, values)),
                        }
                    }
                    4 => drop(model.swap_remove(pick)),
                    _ => {
                        let (frame, values) = model.swap_remove(pick);
                        if values.len() > 64 {
                            continue;
                        }
                        space.move_in(0, base, 4096, frame).unwrap();
                        // The pages may come back in shorter runs.
                        let mut done = 0;
                        while done < values.len() {
                            let at = base + done * 4096;
                            let frame = space
                                .move_out(pages(0, at, 4096, values.len() - done))
                                .unwrap();
                            let pages = frame.as_ref().len() / 4096;
                            model.push((frame, values[done..done + pages].to_vec()));
                            done += pages;
                        }
                    }
                }
                if step % 16 == 0 {
                    for (frame, values) in &model {
                        assert_eq!(&numbers(frame.as_ref(), 4096), values, "seed {seed}");
                    }
                }
            }
            drop(model);
            let all: Vec<_> = (0..PAGES_MAX)
                .map(|_| space.new_frame(4096, 1).unwrap())
                .collect();
            assert!(space.new_frame(4096, 1).is_err());
            drop(all);
            space.unmap(base, geometry);
        }
    }
}
