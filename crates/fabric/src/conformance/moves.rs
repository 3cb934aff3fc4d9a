//! READs and WRITEs: bytes, queues and channels.

use std::{collections::HashSet, sync::Arc, thread};

use super::kit::{channel, drain, grant, one, op, pattern, post, read, sleep, write};
use crate::{Busy, Completion, MAX_OP_BYTES, Op, Session, Verb};

pub(super) fn reads_its_own_writes_at_every_size(session: &Arc<Session>) {
    let mut channel = channel(session);
    let extent = grant(session, 8 << 20);
    let odd = [1, 2, 7, 31, 32, 33, 511, 4095, 4096, 4097, 65_536, 100_003];
    for len in odd.into_iter().chain([1 << 20, MAX_OP_BYTES as usize]) {
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

pub(super) fn many_in_flight_end_exactly_once_each_with_its_own_bytes(session: &Arc<Session>) {
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

pub(super) fn a_full_queue_hands_the_operation_back(session: &Arc<Session>) {
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

pub(super) fn channels_of_several_threads_do_not_mix_their_bytes(session: &Arc<Session>) {
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

pub(super) fn an_idle_channel_asks_for_no_wake_up(session: &Arc<Session>) {
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
