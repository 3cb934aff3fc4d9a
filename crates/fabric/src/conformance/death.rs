//! The death of a server.

use std::{sync::Arc, time::Instant};

use super::kit::{PATIENCE, channel, drain, grant, one, op, pattern, post, read, write};
use crate::{ChannelError, Session, Verb};

pub(super) fn memory_stays_when_its_server_dies(
    session: &Arc<Session>,
    kill: Box<dyn FnOnce() + '_>,
) {
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

pub(super) fn death_ends_everything_in_bounded_time(
    session: &Arc<Session>,
    kill: Box<dyn FnOnce() + '_>,
) {
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
