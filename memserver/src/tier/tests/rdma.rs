//! Moves over an adapter with on-demand paging.

use super::*;

/// Makes a stage at this machine's device, if it has one.
fn stage() -> Option<Stage> {
    let endpoint = farpage_testkit::rdma()?;
    Some(Stage::at(&endpoint.to_string(), EXTENT_BYTES, 0xee))
}

/// Blocks of one extent, dealt out to channels. All of it does not fit into memory, so that
/// blocks leave while others are moved.
#[test]
fn rdma_races_with_chunks_that_leave_and_nothing_is_lost() {
    const CHANNELS: u64 = 3;
    const BLOCK: u64 = 24 << 10;
    let Some(stage) = stage() else {
        return;
    };
    thread::scope(|scope| {
        for number in 0..CHANNELS {
            let stage = &stage;
            scope.spawn(move || {
                let mut channel = stage.session.channel::<Vec<u8>>().expect("a connection");
                let mut truth = vec![0_u64; (EXTENT_BYTES / BLOCK / CHANNELS) as usize];
                let mut random = number + 1;
                let mut draw = |below: u64| {
                    random = random
                        .wrapping_mul(0x5851_f42d_4c95_7f2d)
                        .wrapping_add(number | 1);
                    (random >> 33) % below
                };
                let blocks = truth.len() as u64;
                for round in 0..3 * blocks {
                    // All of them once, so that there is more than fits.
                    let block = if round < blocks { round } else { draw(blocks) };
                    let writes = round < blocks || draw(2) == 0;
                    let known = &mut truth[block as usize];
                    let buf = match writes {
                        true => {
                            *known = draw(u64::MAX) << 1 | 1;
                            known.to_le_bytes().repeat(BLOCK as usize / 8)
                        }
                        false => vec![0xa5; BLOCK as usize],
                    };
                    let op = op(
                        if writes { Verb::Write } else { Verb::Read },
                        stage.extent,
                        (block * CHANNELS + number) * BLOCK,
                        buf,
                    );
                    let buf = farpage_testkit::transfer(&mut *channel, op);
                    let buf = buf.expect("a sound disk");
                    let is_right = (buf.chunks(8)).all(|word| *word == known.to_le_bytes());
                    assert!(is_right, "channel {number}, block {block}, round {round}");
                }
            });
        }
    });
    let tiers = stage.tier.stat();
    assert!(tiers.forced_seals > 200, "{tiers:?}");
    assert_eq!((tiers.spill_errors, tiers.no_room), (0, 0), "{tiers:?}");
}

#[test]
fn rdma_reaches_what_is_in_memory_without_the_server() {
    let Some(stage) = stage() else {
        return;
    };
    stage.write(3, 1).expect("a sound disk");
    let traffic = stage.serving.traffic();
    let before = (traffic.bytes_read(), traffic.bytes_written());
    for version in 2..20 {
        stage.write(3, version).expect("a sound disk");
        assert!(stage.read(3).expect("a sound disk") == content(3, version));
    }
    let after = (traffic.bytes_read(), traffic.bytes_written());
    assert_eq!(after, before);
}

#[test]
fn rdma_of_what_the_disk_cannot_give_back_is_an_error_and_never_other_bytes() {
    let Some(stage) = stage() else {
        return;
    };
    stage.fill(first);
    let spilled = stage.at_place(Place::Spilled);
    assert!(spilled.len() > 8, "{}", spilled.len());
    stage.break_disk(Fault::FlippedBit);
    for chunk in &spilled[..4] {
        for result in [stage.read(*chunk).map(drop), stage.write(*chunk, 2)] {
            assert!(
                matches!(result, Err(ChannelError::Unreadable { .. })),
                "{result:?}"
            );
        }
    }
    stage.break_disk(Fault::None);
    for chunk in &spilled {
        assert!(stage.read(*chunk).expect("a sound disk") == content(*chunk, 1));
    }
}
