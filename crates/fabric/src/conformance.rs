//! The suite that every fabric must pass.
//!
//! The rule it keeps: it knows nothing about a fabric but how to begin a session, so that a new
//! transport adds one line to the tests. A test calls [`check`] with a [`Fabric`]; a failed
//! expectation panics with its story. A server's policy (leases that expire, capacity over several
//! clients) is left to the server's tests.

use std::{
    collections::HashSet,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::{
    AllocError, Atomic, Busy, Channel, ChannelError, Completion, Extent, ExtentId, MAX_OP_BYTES,
    Op, OpenNameError, Session, Verb,
    areas::{Areas, Board},
};

/// Time limit of each step: longer than any takes on a busy machine, short enough to wait for.
const PATIENCE: Duration = Duration::from_secs(20);

/// Upper bound of the bytes that the suite holds at a time: a server needs a little more.
pub const NEEDED_BYTES: u64 = 64 << 20;

/// A fabric with a live server.
pub struct Fabric<'a> {
    /// Start of another session at the same server, with an operation deadline of at most 5
    /// seconds.
    pub connect: &'a (dyn Fn() -> Arc<Session> + Sync),
    /// Abrupt end of the server, without a goodbye. The suite connects no more after that.
    pub kill: Box<dyn FnOnce() + 'a>,
    /// True if the memory that a killed server lent stays: over shared memory, when its process is
    /// another one.
    pub memory_stays: bool,
}

/// Runs the suite, each part in sessions of its own; ends with the server's death.
///
/// # Panics
/// When the fabric breaks a promise of [`Channel`] or [`Session`].
pub fn check(fabric: Fabric<'_>) {
    let connect = fabric.connect;
    reads_its_own_writes_at_every_size(&connect());
    many_in_flight_end_exactly_once_each_with_its_own_bytes(&connect());
    a_full_queue_hands_the_operation_back(&connect());
    addresses_beyond_the_extent_are_refused(&connect());
    another_clients_extent_is_refused(&connect(), &connect());
    fresh_memory_is_zero_also_after_release_and_regrant(&connect());
    released_extents_are_refused(&connect());
    too_much_memory_is_a_typed_error_and_the_session_goes_on(&connect());
    channels_of_several_threads_do_not_mix_their_bytes(&connect());
    atomics_return_the_old_value_and_change_their_word_alone(&connect());
    atomics_outside_of_leases_or_between_words_are_refused(&connect(), &connect());
    counting_over_many_channels_loses_nothing(&connect());
    compare_and_swap_makes_a_lock(&connect());
    a_named_region_outlives_its_session(connect);
    readers_share_a_version_and_cannot_write_it(connect);
    an_idle_channel_asks_for_no_wake_up(&connect());
    match fabric.memory_stays {
        true => memory_stays_when_its_server_dies(&connect(), fabric.kill),
        false => death_ends_everything_in_bounded_time(&connect(), fabric.kill),
    }
}

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

/// Makes bytes that show where they belong.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|i| {
            (i.wrapping_mul(31)
                .wrapping_add(seed.wrapping_mul(0x9e37_79b9))
                >> 3) as u8
        })
        .collect()
}

fn op(verb: Verb, extent: ExtentId, offset: u64, buf: Vec<u8>) -> Op<Vec<u8>> {
    Op {
        tag: offset,
        verb,
        extent,
        offset,
        len: buf.len() as u32,
        buf,
    }
}

fn post(channel: &mut dyn Channel<Vec<u8>>, op: Op<Vec<u8>>) {
    channel.post(op).expect("the queue has room");
}

/// Sleeps as the channel says and polls, until nothing is in flight.
fn drain(channel: &mut dyn Channel<Vec<u8>>) -> Vec<Completion<Vec<u8>>> {
    let mut done = Vec::new();
    let begun = Instant::now();
    while channel.in_flight() > 0 {
        assert!(
            begun.elapsed() < PATIENCE,
            "{} operations did not end",
            channel.in_flight()
        );
        let (before, in_flight) = (done.len(), channel.in_flight());
        let count = channel.poll(&mut done);
        assert_eq!(
            (count, channel.in_flight()),
            (done.len() - before, in_flight - count),
            "poll counts what it hands over"
        );
        if count == 0 {
            sleep(channel);
        }
    }
    done
}

/// Sleeps until the channel may have something to do: the caller's half of [`Channel::wait`].
fn sleep(channel: &dyn Channel<Vec<u8>>) {
    let wait = channel.wait();
    assert!(
        wait.until.is_some(),
        "operations are in flight, and nothing says when they end at the latest"
    );
    let left = wait.until.map_or(PATIENCE, |until| {
        until.saturating_duration_since(Instant::now())
    });
    let timeout = PollTimeout::try_from(left.as_micros().div_ceil(1000) as u32).expect("seconds");
    let mut events = PollFlags::empty();
    events.set(PollFlags::POLLIN, wait.readable);
    events.set(PollFlags::POLLOUT, wait.writable);
    let mut fds: Vec<_> = wait
        .fd
        .map(|fd| PollFd::new(fd, events))
        .into_iter()
        .collect();
    poll(&mut fds, timeout).expect("a poll of open descriptors");
}

fn one(channel: &mut dyn Channel<Vec<u8>>, op: Op<Vec<u8>>) -> Completion<Vec<u8>> {
    post(channel, op);
    let mut done = drain(channel);
    assert_eq!(done.len(), 1, "one operation ends once");
    done.remove(0)
}

fn write(channel: &mut dyn Channel<Vec<u8>>, extent: ExtentId, offset: u64, bytes: Vec<u8>) {
    one(channel, op(Verb::Write, extent, offset, bytes))
        .result
        .expect("a WRITE to leased memory");
}

fn read(channel: &mut dyn Channel<Vec<u8>>, extent: ExtentId, offset: u64, len: usize) -> Vec<u8> {
    // The buffer holds no zeros, or a READ that does nothing would pass for fresh memory.
    let done = one(channel, op(Verb::Read, extent, offset, vec![0xee; len]));
    done.result.expect("a READ of leased memory");
    done.buf
}

fn refused(channel: &mut dyn Channel<Vec<u8>>, op: Op<Vec<u8>>) {
    let len = op.buf.len();
    let done = one(channel, op);
    assert!(
        matches!(done.result, Err(ChannelError::Refused { .. })),
        "{:?}",
        done.result
    );
    assert_eq!(done.buf.len(), len, "the buffer comes back");
}

fn grant(session: &Session, bytes: u64) -> Extent {
    let extent = session.grant(bytes).expect("the server has room");
    assert_eq!(extent.bytes, bytes);
    extent
}

fn grant_for_atomics(session: &Session, bytes: u64) -> Extent {
    let extent = session.grant_for_atomics(bytes);
    extent.expect("the server has room")
}

fn channel(session: &Arc<Session>) -> Box<dyn Channel<Vec<u8>>> {
    session.channel().expect("a live server")
}

fn reads_its_own_writes_at_every_size(session: &Arc<Session>) {
    let mut channel = channel(session);
    let extent = grant(session, 8 << 20);
    for len in [
        1,
        2,
        7,
        31,
        32,
        33,
        511,
        4095,
        4096,
        4097,
        65_536,
        100_003,
        1 << 20,
        MAX_OP_BYTES as usize,
    ] {
        for offset in [0, 1, 4096, extent.bytes - len as u64] {
            let bytes = pattern(offset + len as u64, len);
            write(&mut *channel, extent.id, offset, bytes.clone());
            assert!(
                read(&mut *channel, extent.id, offset, len) == bytes,
                "{len} bytes at {offset}"
            );
        }
    }
    // An operation moves `len` bytes and no more.
    write(&mut *channel, extent.id, 0, vec![1; 100]);
    let longer = Op {
        len: 10,
        ..op(Verb::Write, extent.id, 20, vec![2; 100])
    };
    one(&mut *channel, longer).result.expect("in range");
    let shorter = Op {
        len: 40,
        ..op(Verb::Read, extent.id, 0, vec![3; 100])
    };
    let done = one(&mut *channel, shorter);
    let expected = [vec![1; 20], vec![2; 10], vec![1; 10], vec![3; 60]].concat();
    assert_eq!(done.buf, expected);
}

fn many_in_flight_end_exactly_once_each_with_its_own_bytes(session: &Arc<Session>) {
    const PAGES: u64 = 300;
    let mut channel = channel(session);
    for len in [100, 4096, 65_536] {
        let extent = grant(session, PAGES * len);
        for verb in [Verb::Write, Verb::Read] {
            let mut tags = HashSet::new();
            let mut done = Vec::new();
            let mut check = |done: &mut Vec<Completion<Vec<u8>>>| {
                for completion in done.drain(..) {
                    completion.result.expect("leased memory");
                    assert!(
                        tags.insert(completion.tag),
                        "operation {} ended twice",
                        completion.tag
                    );
                    let right = pattern(completion.tag, len as usize) == completion.buf;
                    assert!(
                        right && completion.verb == verb,
                        "{verb:?} {} of {len} bytes",
                        completion.tag
                    );
                }
            };
            for page in 0..PAGES {
                let tag = page * len;
                let buf = if verb == Verb::Write {
                    pattern(tag, len as usize)
                } else {
                    vec![0xee; len as usize]
                };
                let mut next = op(verb, extent.id, tag, buf);
                while let Err(Busy(op)) = channel.post(next) {
                    next = op;
                    if channel.poll(&mut done) == 0 {
                        sleep(&*channel);
                    }
                    check(&mut done);
                }
            }
            done = drain(&mut *channel);
            check(&mut done);
            assert_eq!(tags.len() as u64, PAGES);
        }
        session.release(extent.id).expect("leased");
    }
    // READs and WRITEs at once.
    let extent = grant(session, 4 << 20);
    write(&mut *channel, extent.id, 0, pattern(1, 1 << 20));
    for i in 0..8 {
        post(
            &mut *channel,
            op(Verb::Read, extent.id, i << 10, vec![0; 65_536]),
        );
        post(
            &mut *channel,
            op(
                Verb::Write,
                extent.id,
                (2 << 20) + (i << 17),
                pattern(i, 1 << 17),
            ),
        );
    }
    for completion in drain(&mut *channel) {
        completion.result.expect("leased memory");
        if completion.verb == Verb::Read {
            assert!(completion.buf[..] == pattern(1, 1 << 20)[completion.tag as usize..][..65_536]);
        }
    }
    for i in 0..8 {
        assert!(
            read(&mut *channel, extent.id, (2 << 20) + (i << 17), 1 << 17) == pattern(i, 1 << 17)
        );
    }
}

fn a_full_queue_hands_the_operation_back(session: &Arc<Session>) {
    let mut channel = channel(session);
    let extent = grant(session, 1 << 20);
    let mut posted = 0;
    let returned = loop {
        let bytes = pattern(posted, 4096);
        match channel.post(op(Verb::Write, extent.id, posted % 256 * 4096, bytes)) {
            Ok(()) => posted += 1,
            Err(Busy(op)) => break op,
        }
        assert!(posted < 1 << 20, "the queue has no end");
    };
    assert_eq!(channel.in_flight() as u64, posted);
    assert!(
        returned.tag == posted % 256 * 4096 && returned.buf == pattern(posted, 4096),
        "handed back as it was"
    );
    assert_eq!(drain(&mut *channel).len() as u64, posted);
    post(&mut *channel, returned);
    assert!(
        drain(&mut *channel)
            .iter()
            .all(|completion| completion.result.is_ok())
    );
}

fn addresses_beyond_the_extent_are_refused(session: &Arc<Session>) {
    let extent = grant(session, 10_000);
    for (offset, len) in [
        (9_999, 2),
        (10_000, 1),
        (0, 10_001),
        (1 << 40, 4096),
        (u64::MAX - 5000, 4096),
    ] {
        for verb in [Verb::Read, Verb::Write] {
            // A refusal may end a channel.
            refused(
                &mut *channel(session),
                op(verb, extent.id, offset, vec![0; len]),
            );
        }
    }
    let mut channel = channel(session);
    write(&mut *channel, extent.id, 9_999, vec![7]);
    assert_eq!(
        read(&mut *channel, extent.id, 9_990, 10),
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 7]
    );
}

fn another_clients_extent_is_refused(session: &Arc<Session>, other: &Arc<Session>) {
    let extent = grant(session, 4096);
    let mut mine = channel(session);
    write(&mut *mine, extent.id, 0, vec![1; 4096]);
    for verb in [Verb::Read, Verb::Write] {
        refused(&mut *channel(other), op(verb, extent.id, 0, vec![9; 4096]));
    }
    assert!(
        other.release(extent.id).is_err(),
        "only its owner can release an extent"
    );
    assert_eq!(read(&mut *mine, extent.id, 0, 4096), vec![1; 4096]);
    refused(
        &mut *channel(other),
        op(Verb::Read, ExtentId(u64::MAX), 0, vec![9; 4096]),
    );
    // One refused WRITE among good ones: the others end one way or the other, and the buffers come
    // back.
    let own = grant(other, 8 << 20);
    let mut channel = channel(other);
    for i in 0..8 {
        let id = if i == 4 { extent.id } else { own.id };
        post(&mut *channel, op(Verb::Write, id, i, vec![9; 1 << 20]));
    }
    for completion in drain(&mut *channel) {
        assert_eq!(completion.buf.len(), 1 << 20);
        match completion.result {
            Err(ChannelError::Refused { .. }) => assert_eq!(completion.tag, 4),
            Err(error) => assert!(error.is_transient(), "{error}"),
            Ok(()) => assert_ne!(completion.tag, 4),
        }
    }
    assert_eq!(read(&mut *mine, extent.id, 0, 4096), vec![1; 4096]);
}

fn fresh_memory_is_zero_also_after_release_and_regrant(session: &Arc<Session>) {
    let mut channel = channel(session);
    for _ in 0..5 {
        let extent = grant(session, 4 << 20);
        for offset in [0, 2 << 20] {
            let bytes = read(&mut *channel, extent.id, offset, 2 << 20);
            assert!(bytes.iter().all(|byte| *byte == 0), "fresh memory is zero");
            write(&mut *channel, extent.id, offset, vec![0xff; 2 << 20]);
        }
        session.release(extent.id).expect("leased");
    }
}

fn released_extents_are_refused(session: &Arc<Session>) {
    let extent = grant(session, 4096);
    let mut used = channel(session);
    write(&mut *used, extent.id, 0, vec![1; 4096]);
    session.release(extent.id).expect("leased");
    refused(&mut *used, op(Verb::Read, extent.id, 0, vec![0; 4096]));
    refused(
        &mut *channel(session),
        op(Verb::Write, extent.id, 0, vec![0; 4096]),
    );
    assert!(session.release(extent.id).is_err(), "released twice");
}

fn too_much_memory_is_a_typed_error_and_the_session_goes_on(session: &Arc<Session>) {
    let stat = session.stat().expect("a live server");
    let asked = stat.capacity_bytes + 4096;
    match session.grant(asked) {
        Err(AllocError::Full {
            asked: said,
            available,
            ..
        }) => assert!(said == asked && available <= stat.capacity_bytes),
        other => panic!("{other:?}"),
    }
    let extent = grant(session, 4096);
    write(&mut *channel(session), extent.id, 0, vec![1; 4096]);
}

fn channels_of_several_threads_do_not_mix_their_bytes(session: &Arc<Session>) {
    let extent = grant(session, 4 << 20);
    thread::scope(|scope| {
        for thread in 0..4u64 {
            scope.spawn(move || {
                let mut channel = channel(session);
                let base = thread << 20;
                for round in 0..20 {
                    for page in 0..16 {
                        let at = base + (page << 16);
                        post(
                            &mut *channel,
                            op(Verb::Write, extent.id, at, pattern(at + round, 65_536)),
                        );
                    }
                    drain(&mut *channel)
                        .into_iter()
                        .for_each(|done| done.result.expect("leased memory"));
                    for page in 0..16 {
                        let at = base + (page << 16);
                        assert!(
                            read(&mut *channel, extent.id, at, 65_536)
                                == pattern(at + round, 65_536),
                            "{at}"
                        );
                    }
                }
            });
        }
    });
}

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

fn atomics_return_the_old_value_and_change_their_word_alone(session: &Arc<Session>) {
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

fn atomics_outside_of_leases_or_between_words_are_refused(
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

fn counting_over_many_channels_loses_nothing(session: &Arc<Session>) {
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

fn compare_and_swap_makes_a_lock(session: &Arc<Session>) {
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

fn a_named_region_outlives_its_session(connect: &dyn Fn() -> Arc<Session>) {
    let name = "conformance";
    let first = connect();
    assert!(matches!(
        first.open(name),
        Err(OpenNameError::NotFound { .. })
    ));
    let kept = grant(&first, 1 << 20);
    let dropped = grant(&first, 1 << 20);
    write(&mut *channel(&first), kept.id, 4096, pattern(5, 100));
    first
        .publish(name, b"old", &[dropped.id])
        .expect("own extents");
    first
        .publish(name, b"manifest", &[kept.id])
        .expect("own extents");
    let second = connect();
    assert!(matches!(
        second.open(name),
        Err(OpenNameError::InUse { .. })
    ));
    assert!(
        second.publish(name, b"theft", &[kept.id]).is_err(),
        "somebody else's extent"
    );
    drop(first);
    let named = second.open(name).expect("nobody holds it");
    assert_eq!(
        (&named.manifest[..], &named.extents[..]),
        (&b"manifest"[..], &[kept][..])
    );
    assert_eq!(
        read(&mut *channel(&second), kept.id, 4096, 100),
        pattern(5, 100)
    );
    refused(
        &mut *channel(&second),
        op(Verb::Read, dropped.id, 0, vec![0; 10]),
    );
    second.release(kept.id).expect("leased by opening");
    let third = connect();
    assert_eq!(third.open(name).expect("released").extents, [kept]);
    assert_eq!(
        read(&mut *channel(&third), kept.id, 4096, 100),
        pattern(5, 100)
    );
    third.remove(name).expect("in nobody else's use");
    assert!(matches!(
        second.open(name),
        Err(OpenNameError::NotFound { .. })
    ));
    second.remove(name).expect_err("forgotten already");
}

fn readers_share_a_version_and_cannot_write_it(connect: &dyn Fn() -> Arc<Session>) {
    let name = "read";
    let writer = connect();
    let extent = grant(&writer, 1 << 20);
    let mut to = channel(&writer);
    write(&mut *to, extent.id, 4096, pattern(5, 100));
    let none = connect().read(name);
    assert!(
        matches!(none, Err(OpenNameError::NotFound { .. })),
        "{none:?}"
    );
    let first = writer.publish(name, b"1", &[extent.id]).expect("its own");
    assert_eq!(first.read, []);
    // 1. Two clients, one of them twice, while the writer has it.
    let readers = [connect(), connect()];
    let readings = [&readers[0], &readers[0], &readers[1]].map(|it| it.read(name).expect("read"));
    let mut ids = Vec::new();
    for (reading, reader) in readings.iter().zip([0, 0, 1]) {
        assert_eq!(reading.manifest, b"1");
        let [(of, lease)] = reading.extents[..] else {
            panic!("{reading:?}")
        };
        assert_eq!((of, lease.bytes), (extent.id, extent.bytes));
        let mut from = channel(&readers[reader]);
        assert_eq!(read(&mut *from, lease.id, 4096, 100), pattern(5, 100));
        // A reader cannot use the writer's id.
        refused(&mut *from, op(Verb::Read, extent.id, 0, vec![0; 10]));
        ids.push(lease.id);
    }
    // 2. No reader changes a byte.
    for (id, reader) in ids.iter().zip([0, 0, 1]) {
        let mut forger = channel(&readers[reader]);
        refused(&mut *forger, op(Verb::Write, *id, 4096, vec![1; 100]));
    }
    let theft = readers[1].publish("other", b"", &[ids[2]]);
    assert!(theft.is_err(), "what is only read is not one's own");
    assert_eq!(read(&mut *to, extent.id, 4096, 100), pattern(5, 100));
    // 3. The writer hears which versions are still read.
    let second = writer.publish(name, b"2", &[extent.id]).expect("its own");
    assert!(second.published > first.published);
    let [old] = second.read[..] else {
        panic!("{second:?}")
    };
    assert_eq!((old.version, old.readers), (first.published, 3));
    readers[0].release(ids[0]).expect("leased");
    let asked = writer.readers(name).expect("its own");
    assert_eq!(
        (asked.published, asked.read[0].readers),
        (second.published, 2)
    );
    // 4. The memory stays for the readers when the writer and the name have gone.
    drop((to, writer));
    let third = connect();
    third.open(name).expect("nobody holds it");
    third.remove(name).expect("its own");
    let mut from = channel(&readers[1]);
    assert_eq!(read(&mut *from, ids[2], 4096, 100), pattern(5, 100));
    readers[1].release(ids[2]).expect("leased");
    refused(&mut *from, op(Verb::Read, ids[2], 0, vec![0; 10]));
}

fn an_idle_channel_asks_for_no_wake_up(session: &Arc<Session>) {
    let mut channel = channel(session);
    let extent = grant(session, 4096);
    read(&mut *channel, extent.id, 0, 4096);
    let wait = channel.wait();
    assert!(
        wait.fd.is_none() && wait.until.is_none() && !wait.readable && !wait.writable,
        "{wait:?}"
    );
    assert_eq!(channel.poll(&mut Vec::new()), 0);
}

fn memory_stays_when_its_server_dies(session: &Arc<Session>, kill: Box<dyn FnOnce() + '_>) {
    let extent = grant(session, 1 << 20);
    let mut channel_before = channel(session);
    let bytes = pattern(7, 4096);
    write(&mut *channel_before, extent.id, 0, bytes.clone());
    kill();
    let begun = Instant::now();
    for _ in 0..3 {
        // The grant fails only once the death is known.
        session.grant(4096).expect_err("the server is dead");
        let mut channel_after = channel(session);
        for channel in [&mut channel_before, &mut channel_after] {
            assert_eq!(read(&mut **channel, extent.id, 0, 4096), bytes);
            write(&mut **channel, extent.id, 8192, bytes.clone());
            assert_eq!(read(&mut **channel, extent.id, 8192, 4096), bytes);
        }
    }
    assert!(begun.elapsed() < PATIENCE);
}

fn death_ends_everything_in_bounded_time(session: &Arc<Session>, kill: Box<dyn FnOnce() + '_>) {
    let extent = grant(session, 32 << 20);
    let mut busy = channel(session);
    let mut idle = channel(session);
    read(&mut *idle, extent.id, 0, 4096);
    for i in 0..16 {
        let verb = if i % 2 == 0 { Verb::Write } else { Verb::Read };
        post(&mut *busy, op(verb, extent.id, i << 20, vec![1; 1 << 20]));
    }
    kill();
    let mut done = drain(&mut *busy);
    assert_eq!(done.len(), 16, "every operation ends");
    // The first operations after the death may be faster than the news of it.
    for channel in [&mut busy, &mut idle] {
        let begun = Instant::now();
        loop {
            assert!(begun.elapsed() < PATIENCE, "the death goes unnoticed");
            let completion = one(&mut **channel, op(Verb::Read, extent.id, 0, vec![1; 4096]));
            let dead = completion.result.is_err();
            done.push(completion);
            if dead {
                break;
            }
        }
        let again = one(&mut **channel, op(Verb::Write, extent.id, 0, vec![1; 4096]));
        assert!(again.result.is_err(), "a dead channel stays dead");
    }
    for completion in done {
        if let Err(error) = completion.result {
            assert!(
                matches!(
                    error,
                    ChannelError::Disconnected { .. } | ChannelError::TimedOut { .. }
                ),
                "{error}"
            );
        }
        assert!(!completion.buf.is_empty(), "buffers come back");
    }
    let begun = Instant::now();
    session.grant(4096).expect_err("the server is dead");
    assert!(session.channel::<Vec<u8>>().is_err(), "the server is dead");
    assert!(begun.elapsed() < PATIENCE);
}
