//! Boards, which many clients hold and none can change.

use std::{sync::Arc, thread};

use super::kit::{channel, drain, op, post, read, refused};
use crate::{
    Atomic, Channel, ChannelError, ExtentId, Op, Session, Verb,
    areas::{Areas, Board},
};

/// Checks a fabric's promises about boards, which many clients hold and none can change. `connect`
/// begins a session at the program that has `areas`.
///
/// # Panics
/// When the fabric breaks a promise.
pub fn check_boards(areas: &Areas, connect: &dyn Fn() -> Arc<Session>) {
    const FLOATS: usize = 100_000;
    let floats: Vec<f32> = (0..FLOATS as u32).map(|i| i as f32 + 0.25).collect();
    let board = areas
        .show("board", 4096 + 4 * FLOATS as u64)
        .expect("memory");
    board.write_floats(4096, &floats);
    board.announce(64, 7);
    let sessions = [connect(), connect(), connect()];
    let open = |session: &Arc<Session>| session.open("board").expect("shown").extents[0];
    let number = Board::NUMBER_BYTES;
    // 1. All sessions see the bytes that were written, and those written later.
    for session in &sessions {
        let (extent, mut channel) = (open(session), channel(session));
        let seen = read(&mut *channel, extent.id, 4096, 4 * FLOATS);
        let seen = seen.as_chunks().0.iter().copied().map(f32::from_le_bytes);
        assert!(seen.eq(floats.iter().copied()));
        let seen = read(&mut *channel, extent.id, 64, number);
        assert_eq!(Board::announced(&seen), Some(7));
    }
    board.announce(64, 8);
    let [one, other, gone] = &sessions;
    let extent = open(one);
    let seen = read(&mut *channel(one), extent.id, 64, number);
    assert_eq!(Board::announced(&seen), Some(8));
    // 2. No session can change the board, or read beyond its end. A refusal may end the channel.
    let add = Verb::Atomic(Atomic::FetchAdd(1));
    for (verb, offset) in [(Verb::Write, 64), (add, 64), (Verb::Read, extent.bytes - 7)] {
        refused(&mut *channel(one), op(verb, extent.id, offset, vec![1; 8]));
    }
    let seen = read(&mut *channel(other), open(other).id, 64, number);
    assert_eq!(Board::announced(&seen), Some(8));
    // 3. A session that gives the board back has lost it, and the others have not.
    let extent = open(gone);
    gone.release(extent.id).expect("leased");
    refused(
        &mut *channel(gone),
        op(Verb::Read, extent.id, 64, vec![0; 8]),
    );
    assert!(gone.release(extent.id).is_err());
    let seen = read(&mut *channel(other), open(other).id, 64, number);
    assert_eq!(Board::announced(&seen), Some(8));
    // The session may ask for the board again.
    let seen = read(&mut *channel(gone), open(gone).id, 64, number);
    assert_eq!(Board::announced(&seen), Some(8));
    // 4. A READ waits for the number at the beginning, where the fabric can.
    let (extent, mut channel) = (open(other).id, channel(other));
    if !channel.waits_for_numbers() {
        return;
    }
    let after = |channel: &mut dyn Channel<Vec<u8>>, least| {
        let op = op(Verb::Read, extent, 4096, vec![0xee; 4]);
        assert!(channel.post_when(op, least).is_ok());
        // Operations behind the READ wait, too.
        post(channel, op_at_64(extent));
        let mut done = drain(channel);
        assert_eq!(done.len(), 2);
        let behind = done.pop().expect("two");
        behind.result.expect("a READ that does not wait itself");
        assert_eq!(Board::announced(&behind.buf), Some(8));
        done.pop().expect("two")
    };
    let done = after(&mut *channel, 5);
    let not_yet = matches!(done.result, Err(ChannelError::NotYet { least: 5, .. }));
    assert!(not_yet, "{:?}", done.result);
    assert_eq!(done.buf.len(), 4, "the buffer comes back");
    thread::scope(|scope| {
        let board = board.clone();
        let announcing = scope.spawn(move || board.announce(0, 5));
        let done = after(&mut *channel, 4);
        done.result.expect("the number has come");
        assert_eq!(done.buf, floats[0].to_le_bytes());
        announcing.join().expect("no panic");
    });
    // The number is there already.
    after(&mut *channel, 5).result.expect("it has come before");
}

fn op_at_64(extent: ExtentId) -> Op<Vec<u8>> {
    op(Verb::Read, extent, 64, vec![0; Board::NUMBER_BYTES])
}
