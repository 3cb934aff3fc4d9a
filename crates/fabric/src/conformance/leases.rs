//! Leases and names: who may touch which memory, and for how long.

use std::sync::Arc;

use super::kit::{channel, drain, grant, op, pattern, post, read, refused, write};
use crate::{AllocError, ChannelError, ExtentId, OpenNameError, Session, Verb};

pub(super) fn addresses_beyond_the_extent_are_refused(session: &Arc<Session>) {
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

pub(super) fn another_clients_extent_is_refused(session: &Arc<Session>, other: &Arc<Session>) {
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

pub(super) fn fresh_memory_is_zero_also_after_release_and_regrant(session: &Arc<Session>) {
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

pub(super) fn released_extents_are_refused(session: &Arc<Session>) {
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

pub(super) fn too_much_memory_is_a_typed_error_and_the_session_goes_on(session: &Arc<Session>) {
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

pub(super) fn a_named_region_outlives_its_session(connect: &dyn Fn() -> Arc<Session>) {
    let name = "conformance";
    let first = connect();
    assert!(is_absent(&first, name));
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
    assert!(is_in_use(&second, name));
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
    assert!(is_absent(&second, name));
    second.remove(name).expect_err("forgotten already");
}

pub(super) fn readers_share_a_version_and_cannot_write_it(connect: &dyn Fn() -> Arc<Session>) {
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

fn is_absent(session: &Session, name: &str) -> bool {
    matches!(session.open(name), Err(OpenNameError::NotFound { .. }))
}

fn is_in_use(session: &Session, name: &str) -> bool {
    matches!(session.open(name), Err(OpenNameError::InUse { .. }))
}
