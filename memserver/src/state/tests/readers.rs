//! Readers of named regions: what they see stays, and goes when the last of them has gone.

use super::*;

/// Returns the first byte of each extent, as a reader sees it.
fn seen(reading: &OpenedVersion) -> Vec<u8> {
    let byte = |(_, memory): &(ExtentId, Arc<ExtentMemory>)| {
        let mut byte = [0];
        memory.copy_out(0, &mut byte).expect("leased");
        byte[0]
    };
    reading.extents.iter().map(byte).collect()
}

/// End of a reader.
#[derive(Clone, Copy, Debug)]
enum Death {
    /// The reader closes its extents, one after the other.
    Closes,
    /// The reader is killed over shared memory.
    Killed,
    /// The reader's lease runs out over TCP.
    Expires,
    /// The reader is killed when it has closed half of its extents.
    HalfClosed,
}

/// Runs a writer that publishes three versions, each in extents of its own, and closes; then the
/// name is removed. A reader comes before step `read_at` and goes before step `dies_at`.
fn history(death: Death, read_at: usize, dies_at: usize) {
    let state = state(1 << 20);
    let writer = client(&state, Transport::Shm);
    let transport = match death {
        Death::Expires => Transport::Tcp,
        _ => Transport::Shm,
    };
    let reader = client(&state, transport);
    let mut reading: Option<(OpenedVersion, Vec<u8>)> = None;
    let mut held: Vec<ExtentId> = Vec::new();
    let mut published = 0u8;
    for step in 0..8 {
        if step == read_at && published > 0 {
            let now = state.read(reader, "x").unwrap();
            assert_eq!(now.manifest[0], published);
            let bits = seen(&now);
            assert_eq!(bits, [published; 2]);
            reading = Some((now, bits));
        }
        if step == dies_at
            && let Some((reading, _)) = reading.take()
        {
            let views: Vec<_> = reading.extents.iter().map(|(_, view)| view.id()).collect();
            // The handles are the connection's.
            drop(reading);
            match death {
                Death::Closes => {
                    for view in views {
                        state.release(reader, view).unwrap();
                    }
                }
                Death::HalfClosed => {
                    state.release(reader, views[0]).unwrap();
                    assert_eq!(state.stat().readers, 1, "it still has a view");
                    state.lost(reader);
                }
                Death::Killed => state.lost(reader),
                Death::Expires => expire(&state, reader),
            }
        }
        match step {
            // Publishes version 1, 2, 3: new extents, and the old ones go.
            0 | 2 | 4 => {
                published += 1;
                let new: Vec<_> = (0..2)
                    .map(|_| {
                        let memory = state.grant(writer, 4096).unwrap();
                        memory.copy_in(0, &[published]).unwrap();
                        memory.id()
                    })
                    .collect();
                let answer = state
                    .publish(writer, "x", vec![published; 100], &new)
                    .unwrap();
                let is_read = reading.as_ref().map(|(_, bits)| bits[0]);
                let old = is_read.filter(|read| *read < published);
                assert_eq!(answer.read.len(), usize::from(old.is_some()), "{answer:?}");
                assert!(answer.read.iter().all(|it| it.readers == 1));
                for old in std::mem::replace(&mut held, new) {
                    state.release(writer, old).unwrap();
                }
            }
            5 => state.lost(writer),
            6 => remove(&state, client(&state, Transport::Shm), "x").unwrap(),
            _ => {}
        }
        if let Some((reading, bits)) = &reading {
            assert_eq!(seen(reading), *bits, "after step {step}");
            assert_eq!(state.stat().readers, 1);
        } else {
            assert_eq!(state.stat().readers, 0);
            assert_eq!(state.stat().old_versions, 0);
            // Nothing is left of versions that nobody reads.
            let named = u64::from(step < 6);
            let expected = named * (2 * 4096 + 4096 + 100);
            assert_eq!(state.stat().granted_bytes, expected, "after step {step}");
        }
        state.check();
    }
    drop(reading);
    state.close(reader);
    assert_eq!(state.stat().granted_bytes, 0);
    assert_eq!((state.stat().readers, state.stat().extents), (0, 0));
    state.check();
}

/// Ends the lease of one session, and renews all others.
fn expire(state: &State, session: SessionId) {
    let mut ledger = state.ledger.lock();
    ledger.known(session).unwrap().renewed -= 2 * LEASE;
    drop(ledger);
    let now = Instant::now();
    state.reap(now);
    state.reap(now);
}

#[test]
fn readers_that_come_and_die_at_any_step_keep_exactly_their_version() {
    for death in [
        Death::Closes,
        Death::Killed,
        Death::Expires,
        Death::HalfClosed,
    ] {
        for read_at in 1..6 {
            for dies_at in read_at + 1..9 {
                history(death, read_at, dies_at);
            }
        }
    }
}

#[test]
fn a_session_reads_what_it_writes_and_reads_it_twice() {
    let state = state(1 << 20);
    let session = client(&state, Transport::Tcp);
    let memory = state.grant(session, 4096).unwrap();
    let id = memory.id();
    memory.copy_in(0, &[7]).unwrap();
    state.publish(session, "x", vec![1], &[id]).unwrap();
    let [one, two] = [(); 2].map(|()| state.read(session, "x").unwrap());
    assert_eq!((seen(&one), seen(&two)), (vec![7], vec![7]));
    assert_eq!(one.extents[0].0, id);
    let [one, two] = [one, two].map(|it| it.extents[0].1.id());
    assert!(one != two && one != id);
    state.release(session, one).unwrap();
    assert_eq!(state.release(session, one), Err(Refusal::NotLeased(one)));
    assert!(state.extent(session, one).is_none());
    assert!(state.extent(session, two).is_some());
    assert!(!state.extent(session, id).unwrap().is_read_only());
    // A view cannot be published.
    assert_eq!(
        state.publish(session, "y", vec![], &[two]),
        Err(Refusal::NotLeased(two))
    );
    state.check();
}

#[test]
fn a_lost_answer_is_given_again_and_no_more() {
    let state = state(1 << 20);
    let [writer, reader] = clients(&state, [Transport::Tcp; 2]);
    let id = state.grant(writer, 4096).unwrap().id();
    state.publish(writer, "x", vec![1], &[id]).unwrap();
    let ask = || Host::read(&state, reader, "x", Some(5)).unwrap();
    let first = ask().extents[0].1.id();
    state.publish(writer, "x", vec![2], &[id]).unwrap();
    let again = ask();
    assert_eq!((again.manifest[0], again.extents[0].1.id()), (1, first));
    assert_eq!(state.stat().readers, 1);
    // Once it was given back, the number gives something new.
    state.release(reader, first).unwrap();
    assert_eq!(ask().manifest[0], 2);
    state.check();
}

#[test]
fn names_show_their_readers_and_strangers_read_nothing() {
    let state = state(1 << 20);
    let [writer, reader] = clients(&state, [Transport::Tcp; 2]);
    let admission = admit(&state, Transport::Tcp, HERE);
    let stranger = admission.session;
    assert_eq!(
        state.read(stranger, "x").unwrap_err(),
        Refusal::Unidentified
    );
    state.identify(stranger, PublicKey([9; 32])).unwrap();
    assert_eq!(state.read(reader, "x").unwrap_err(), Refusal::NotFound);
    state.claim(writer, "x", false).unwrap();
    assert_eq!(
        state.read(reader, "x").unwrap_err(),
        Refusal::NotFound,
        "nothing is published yet"
    );
    let id = state.grant(writer, 4096).unwrap().id();
    state.publish(writer, "x", vec![1], &[id]).unwrap();
    assert_eq!(state.read(stranger, "x").unwrap_err(), Refusal::NotFound);
    state.read(reader, "x").unwrap();
    let first = state.publish(writer, "x", vec![2], &[id]).unwrap();
    state.read(reader, "x").unwrap();
    let listed = state.names(Asker::Key(KEY), None).unwrap();
    assert_eq!((listed[0].readers, listed[0].old_versions), (2, 1));
    assert_eq!(first.read[0].readers, 1);
    assert!(first.read[0].version < first.published);
    assert_eq!(Host::readers(&state, writer, "x").unwrap(), first);
    state.check();
}

#[test]
fn a_version_that_is_read_is_charged_until_its_reader_goes() {
    // Room for the extents and names, and not for two manifests of 5000 bytes.
    let state = state(4096 + 4096 + 5000 + 5000);
    let [writer, reader] = clients(&state, [Transport::Tcp; 2]);
    let id = state.grant(writer, 4096).unwrap().id();
    state.publish(writer, "x", vec![1; 5000], &[id]).unwrap();
    let view = state.read(reader, "x").unwrap().extents[0].1.id();
    let refused = state.publish(writer, "x", vec![2; 5000], &[id]);
    assert!(matches!(refused, Err(Refusal::Full { .. })), "{refused:?}");
    state.check();
    state.release(reader, view).unwrap();
    state.publish(writer, "x", vec![2; 5000], &[id]).unwrap();
    state.check();
}

#[test]
fn a_reader_over_shared_memory_is_charged_for_what_it_keeps_mapped() {
    let state = state(1 << 20);
    let [writer, reader] = clients(&state, [Transport::Tcp, Transport::Shm]);
    let id = state.grant(writer, 4096).unwrap().id();
    state.publish(writer, "x", vec![], &[id]).unwrap();
    let kept = descriptor_of(&state.read(reader, "x").unwrap().extents[0].1);
    state.close(writer);
    remove(&state, reader, "x").unwrap();
    state.close(reader);
    assert_eq!(state.stat().granted_bytes, 4096, "somebody has it open");
    state.check();
    drop(kept);
    assert_eq!(state.stat().granted_bytes, 0);
    state.check();
}

#[test]
fn a_region_is_not_copied_for_another_user_while_it_is_read() {
    let state = state(1 << 20);
    let admit = |user| client_at(&state, Transport::Shm, Origin::User(user));
    let (first, second, reader) = (admit(1), admit(2), admit(1));
    let memory = state.grant(first, 4096).unwrap();
    memory.copy_in(0, &[7]).unwrap();
    state.publish(first, "x", vec![], &[memory.id()]).unwrap();
    drop(memory);
    state.close(first);
    let reading = state.read(reader, "x").unwrap();
    let refused = state.open(second, "x").unwrap_err();
    assert!(
        matches!(&refused, Refusal::Invalid(why) if why.contains("1 readers")),
        "{refused}"
    );
    assert_eq!(seen(&reading), [7]);
    state.close(reader);
    drop(reading);
    state.open(second, "x").unwrap();
    state.check();
}
