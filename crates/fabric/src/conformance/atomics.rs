//! Atomics: words that change in one step, beside READs and WRITEs.

use std::{sync::Arc, thread, time::Instant};

use super::kit::{
    PATIENCE, channel, drain, grant, grant_for_atomics, one, op, pattern, post, read, refused,
    sleep, write,
};
use crate::{Atomic, Busy, Channel, ExtentId, Op, Session, Verb};

fn atomic(
    channel: &mut dyn Channel<Vec<u8>>,
    extent: ExtentId,
    offset: u64,
    atomic: Atomic,
) -> u64 {
    let verb = Verb::Atomic(atomic);
    let done = one(channel, op(verb, extent, offset, vec![0xee; 8]));
    done.result.expect("an atomic on leased memory");
    assert_eq!(done.verb, verb);
    number(&done.buf)
}

fn number(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"))
}

fn swap(expected: u64, new: u64) -> Atomic {
    Atomic::CompareSwap { expected, new }
}

pub(super) fn atomics_return_the_old_value_and_change_their_word_alone(session: &Arc<Session>) {
    let mut channel = channel(session);
    let extent = grant_for_atomics(session, 10_000);
    let last = extent.bytes - 8;
    for offset in [0, 8, 4096, last] {
        let mut act = |what| atomic(&mut *channel, extent.id, offset, what);
        assert_eq!(act(Atomic::FetchAdd(5)), 0, "fresh memory is zero");
        assert_eq!(act(Atomic::FetchAdd(u64::MAX)), 5);
        assert_eq!(act(Atomic::FetchAdd(0)), 4, "it wraps");
        assert_eq!(act(swap(5, 7)), 4);
        assert_eq!(act(swap(4, 0x0807_0605_0403_0201)), 4, "5 was not there");
        assert_eq!(act(swap(4, 9)), 0x0807_0605_0403_0201);
        assert_eq!(
            read(&mut *channel, extent.id, offset, 8),
            [1, 2, 3, 4, 5, 6, 7, 8]
        );
    }
    let between = read(&mut *channel, extent.id, 16, 4080);
    assert!(between.iter().all(|byte| *byte == 0));
    // An atomic changes only 8 bytes of a longer buffer.
    let longer = Op {
        len: 8,
        ..op(Verb::Atomic(swap(0, 0)), extent.id, 64, vec![3; 20])
    };
    let done = one(&mut *channel, longer);
    done.result.expect("an atomic on leased memory");
    assert_eq!(done.buf, [vec![0; 8], vec![3; 12]].concat());
    // READs, WRITEs and atomics at once, on different bytes.
    write(&mut *channel, extent.id, 4096, pattern(1, 4096));
    for i in 0..5 {
        let page = vec![0; 4096];
        post(&mut *channel, op(Verb::Read, extent.id, 4096, page));
        post(
            &mut *channel,
            op(Verb::Write, extent.id, 1024 + i * 256, pattern(i, 256)),
        );
        let add = Verb::Atomic(Atomic::FetchAdd(i + 1));
        post(&mut *channel, op(add, extent.id, 512 + i * 8, vec![0; 8]));
    }
    for completion in drain(&mut *channel) {
        completion.result.expect("leased memory");
        match completion.verb {
            Verb::Read => assert!(completion.buf == pattern(1, 4096)),
            Verb::Write => {}
            Verb::Atomic(_) => assert_eq!(completion.buf, [0; 8]),
        }
    }
    for i in 0..5 {
        let word = read(&mut *channel, extent.id, 512 + i * 8, 8);
        assert_eq!(number(&word), i + 1);
        assert!(read(&mut *channel, extent.id, 1024 + i * 256, 256) == pattern(i, 256));
    }
}

pub(super) fn atomics_outside_of_leases_or_between_words_are_refused(
    session: &Arc<Session>,
    other: &Arc<Session>,
) {
    let extent = grant_for_atomics(session, 10_000);
    let plain = grant(session, 4096);
    let released = grant_for_atomics(other, 4096);
    other.release(released.id).expect("leased");
    write(
        &mut *channel(session),
        extent.id,
        0,
        pattern(3, extent.bytes as usize),
    );
    // A refusal may end a channel.
    let refused = |session, extent, offset| {
        for atomic in [Atomic::FetchAdd(1), swap(0, 1)] {
            let op = op(Verb::Atomic(atomic), extent, offset, vec![9; 8]);
            refused(&mut *channel(session), op);
        }
    };
    for offset in [1, 4, 4095, 9_996, 10_000, 1 << 40, u64::MAX - 15] {
        refused(session, extent.id, offset);
    }
    refused(session, plain.id, 0);
    for id in [extent.id, released.id, ExtentId(u64::MAX)] {
        refused(other, id, 0);
    }
    let after = read(&mut *channel(session), plain.id, 0, 8);
    assert_eq!(after, [0; 8]);
    let after = read(&mut *channel(session), extent.id, 0, extent.bytes as usize);
    assert!(after == pattern(3, extent.bytes as usize));
}

pub(super) fn counting_over_many_channels_loses_nothing(session: &Arc<Session>) {
    const THREADS: u64 = 4;
    const EACH: u64 = 300;
    let extent = grant_for_atomics(session, 4096);
    let count = || {
        let (mut channel, mut found) = (channel(session), Vec::new());
        let mut done = Vec::new();
        for _ in 0..EACH {
            let add = Verb::Atomic(Atomic::FetchAdd(1));
            let mut next = op(add, extent.id, 8, vec![0xee; 8]);
            while let Err(Busy(op)) = channel.post(next) {
                next = op;
                if channel.poll(&mut done) == 0 {
                    sleep(&*channel);
                }
            }
        }
        done.append(&mut drain(&mut *channel));
        for completion in done {
            completion.result.expect("an atomic on leased memory");
            found.push(number(&completion.buf));
        }
        found
    };
    let mut found: Vec<u64> = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(count)).collect();
        let found = threads
            .into_iter()
            .map(|thread| thread.join().expect("a thread that counts"));
        found.flatten().collect()
    });
    found.sort_unstable();
    assert!(
        found.iter().copied().eq(0..THREADS * EACH),
        "every number is found once: {found:?}"
    );
    let word = read(&mut *channel(session), extent.id, 8, 8);
    assert_eq!(number(&word), THREADS * EACH);
}

pub(super) fn compare_and_swap_makes_a_lock(session: &Arc<Session>) {
    const THREADS: u64 = 3;
    const ROUNDS: u64 = 20;
    const LOCK: u64 = 0;
    /// Offset of a number that takes more than one step to change.
    const GUARDED: u64 = 64;
    let extent = grant_for_atomics(session, 4096);
    let work = |me: u64| {
        let mut channel = channel(session);
        let begun = Instant::now();
        for _ in 0..ROUNDS {
            while atomic(&mut *channel, extent.id, LOCK, swap(0, me)) != 0 {
                assert!(begun.elapsed() < PATIENCE, "the lock is never free");
            }
            let next = number(&read(&mut *channel, extent.id, GUARDED, 8)) + 1;
            let bytes = next.to_le_bytes().to_vec();
            post(&mut *channel, op(Verb::Write, extent.id, GUARDED, bytes));
            if !channel.writes_in_order() {
                let done = drain(&mut *channel);
                assert!(done.iter().all(|done| done.result.is_ok()));
            }
            let unlock = Verb::Atomic(swap(me, 0));
            post(&mut *channel, op(unlock, extent.id, LOCK, vec![0xee; 8]));
            let done = drain(&mut *channel);
            assert!(done.iter().all(|done| done.result.is_ok()));
            let unlocked = done.iter().find(|done| done.verb == unlock);
            assert_eq!(unlocked.map(|done| number(&done.buf)), Some(me));
        }
    };
    thread::scope(|scope| {
        for me in 1..=THREADS {
            scope.spawn(move || work(me));
        }
    });
    let guarded = read(&mut *channel(session), extent.id, GUARDED, 8);
    assert_eq!(number(&guarded), THREADS * ROUNDS);
}
