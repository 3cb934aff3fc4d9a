//! Named regions: their owners, and the contents that their next holder finds.

use super::*;

#[test]
fn a_named_region_is_not_opened_before_operations_under_its_old_lease_have_ended() {
    let state = state(1 << 20);
    let [first, second] = clients(&state, [Transport::Tcp; 2]);
    let id = state.grant(first, 4096).unwrap().id();
    state.publish(first, "x", Vec::new(), &[id]).unwrap();
    // The handle that a connection keeps while bytes move.
    let operation = state.extent(first, id).unwrap();
    state.close(first);
    assert_eq!(state.open(second, "x").unwrap_err(), Refusal::InUse);
    thread::scope(|scope| {
        let opened = scope.spawn(|| state.open(second, "x").unwrap());
        drop(operation);
        assert_eq!(opened.join().unwrap().extents[0].id(), id);
    });
    state.check();
}

#[test]
fn who_was_lent_memory_of_a_name_reaches_no_byte_of_the_next_user_who_opens_it() {
    let state = state(16 << 20);
    let at = |transport, origin| client_at(&state, transport, origin);
    let [one, two] = [1, 2].map(Origin::User);
    let machine = Origin::Address(std::net::Ipv4Addr::LOCALHOST.into());
    let first = at(Transport::Shm, one);
    let memory = state.grant(first, 1 << 20).unwrap();
    let (id, kept) = (memory.id(), descriptor_of(&memory));
    memory.copy_in(500_000, b"published").unwrap();
    drop(memory);
    state.publish(first, "x", vec![], &[id]).unwrap();
    state.close(first);
    // 1. The same user: the same memory.
    let again = at(Transport::Shm, one);
    let same = state.open(again, "x").unwrap().extents.remove(0);
    same.copy_in(0, b"own").unwrap();
    let seen = |file: &std::fs::File| {
        let mut byte = [0xa5];
        file.read_exact_at(&mut byte, 0).unwrap();
        byte[0]
    };
    assert_eq!(seen(&kept), b'o');
    drop(same);
    state.close(again);
    // 2. Another user or machine: what was published, out of reach of all who had it before.
    let mut kept = vec![kept];
    for (transport, origin) in [
        (Transport::Shm, two),
        (Transport::Tcp, machine),
        (Transport::Shm, one),
        (Transport::Shm, Origin::Unknown),
        (Transport::Shm, Origin::Unknown),
    ] {
        let next = at(transport, origin);
        let opened = state.open(next, "x").unwrap().extents.remove(0);
        assert_eq!(opened.id(), id);
        let mut found = [0; 9];
        opened.copy_out(500_000, &mut found).unwrap();
        assert_eq!(&found, b"published");
        assert!(opened.resident_bytes() < 1 << 20, "holes stay holes");
        opened.copy_in(0, b"secret").unwrap();
        for old in &kept {
            assert_eq!(seen(old), 0, "seen by who had it");
            old.write_all_at(b"!", 500_000).unwrap();
        }
        opened.copy_out(500_000, &mut found).unwrap();
        assert_eq!(&found, b"published", "{origin:?}: changed by who had it");
        state.check();
        if transport == Transport::Shm {
            kept.push(descriptor_of(&opened));
        }
        drop(opened);
        state.close(next);
    }
    let last = at(Transport::Tcp, machine);
    state.open(last, "x").unwrap();
    remove(&state, last, "x").unwrap();
    state.close(last);
    // Memory that clients kept is charged to them.
    let charged = kept.len() as u64 * (1 << 20);
    assert_eq!(state.stat().granted_bytes, charged);
    drop(kept);
    assert_eq!(state.stat().granted_bytes, 0);
    state.check();
}

#[test]
fn a_region_that_its_last_user_still_maps_is_copied_where_there_is_room_for_both() {
    // Room for the region twice, but for its name.
    let state = state(2 << 20);
    let admit = |user| client_at(&state, Transport::Shm, Origin::User(user));
    let (first, second) = (admit(1), admit(2));
    let memory = state.grant(first, 1 << 20).unwrap();
    state.publish(first, "x", vec![], &[memory.id()]).unwrap();
    let kept = descriptor_of(&memory);
    drop(memory);
    state.close(first);
    assert!(matches!(state.open(second, "x"), Err(Refusal::Full { .. })));
    state.check();
    drop(kept);
    let opened = state.open(second, "x").unwrap();
    state.check();
    assert_eq!(state.stat().granted_bytes, charge_of(1 << 20) + 4096);
    drop(opened);
}

#[test]
fn a_named_region_outlives_its_publisher_and_is_open_once() {
    let state = state(1 << 30);
    let publisher = client(&state, Transport::Shm);
    let memory = state.grant(publisher, 4096).unwrap();
    memory.copy_in(7, b"kept").unwrap();
    state
        .publish(publisher, "x", b"map".to_vec(), &[memory.id()])
        .unwrap();
    let [second, third] = clients(&state, [Transport::Tcp; 2]);
    assert_eq!(state.open(second, "x").unwrap_err(), Refusal::InUse);
    state.lost(publisher);
    assert_eq!(
        (state.stat().granted_bytes, state.stat().named_regions),
        (2 * 4096 + 3, 1)
    );
    assert!(memory.copy_in(7, b"late").is_err());
    let id = memory.id();
    drop(memory);
    let opened = state.open(second, "x").unwrap();
    assert_eq!(
        (opened.manifest.as_slice(), opened.extents.len()),
        (b"map".as_slice(), 1)
    );
    let mut bytes = [0; 4];
    opened.extents[0].copy_out(7, &mut bytes).unwrap();
    assert_eq!(&bytes, b"kept");
    assert_eq!(state.open(third, "x").unwrap_err(), Refusal::InUse);
    assert_eq!(remove(&state, third, "x"), Err(Refusal::InUse));
    assert_eq!(state.publish(third, "x", vec![], &[]), Err(Refusal::InUse));
    drop(opened);
    state.release(second, id).unwrap();
    state.open(third, "x").unwrap();
    remove(&state, third, "x").unwrap();
    assert_eq!(state.open(second, "x").unwrap_err(), Refusal::NotFound);
    state.close(third);
    assert_eq!(state.stat().granted_bytes, 0);
    state.check();
}

#[test]
fn names_belong_to_keys_and_only_the_operator_reaches_all() {
    let state = state(1 << 30);
    let (owner, stranger) = (
        client(&state, Transport::Tcp),
        admit(&state, Transport::Tcp, HERE).session,
    );
    let id = state.grant(owner, 4096).unwrap().id();
    assert_eq!(
        state.publish(stranger, "x", vec![], &[]),
        Err(Refusal::Unidentified)
    );
    let other = PublicKey([3; 32]);
    state.identify(stranger, other).unwrap();
    assert!(matches!(
        state.identify(stranger, KEY),
        Err(Refusal::Invalid(_))
    ));
    state.publish(owner, "x", vec![7], &[id]).unwrap();
    state.close(owner);
    // 1. Another key has names of its own, which the owner's do not hinder.
    let asker = Asker::Session(stranger);
    assert_eq!(state.open(stranger, "x").unwrap_err(), Refusal::NotFound);
    for owner in [None, Some(KEY)] {
        assert_eq!(state.remove(asker, "x", owner), Err(Refusal::NotFound));
    }
    assert_eq!(state.names(asker, None), Ok(vec![]));
    assert_eq!(
        state.names(asker, Some((KEY, String::new()))),
        Ok(vec![]),
        "also when asked for what comes behind another's"
    );
    state.publish(stranger, "x", vec![8], &[]).unwrap();
    // 2. The operator sees both, without a session, and removes the owner's alone.
    let operator = Asker::Key(OPERATOR);
    let names = state.names(operator, None).unwrap();
    let of = |named: &NamedRegion| (named.owner, named.bytes, named.in_use);
    assert_eq!(
        names.iter().map(of).collect::<Vec<_>>(),
        [(KEY, 2 * 4096 + 1, false), (other, 4096 + 1, true)]
    );
    assert_eq!(
        state.remove(operator, "x", Some(other)),
        Err(Refusal::InUse)
    );
    assert_eq!(state.remove(operator, "x", Some(KEY)), Ok(()));
    assert_eq!(state.names(Asker::Key(KEY), None), Ok(vec![]));
    assert_eq!(state.names(asker, None).unwrap()[0].owner, other);
    state.check();
}

#[test]
fn a_resumed_session_keeps_its_key() {
    let state = state(1 << 30);
    let begun = admit(&state, Transport::Tcp, HERE);
    state.identify(begun.session, KEY).unwrap();
    let id = state.grant(begun.session, 4096).unwrap().id();
    state.publish(begun.session, "x", vec![], &[id]).unwrap();
    state.lost(begun.session);
    resume(&state, begun.session, begun.secret).unwrap();
    state.publish(begun.session, "x", vec![1], &[id]).unwrap();
}

#[test]
fn creating_a_name_is_exclusive_unless_replacing_was_asked_for() {
    let state = state(1 << 30);
    let [first, second] = clients(&state, [Transport::Tcp; 2]);
    // 1. A claim keeps others out before anything is published, and is gone without a trace.
    state.claim(first, "x", false).unwrap();
    assert_eq!(state.claim(second, "x", false), Err(Refusal::InUse));
    assert_eq!(state.claim(second, "x", true), Err(Refusal::InUse));
    assert_eq!(state.publish(second, "x", vec![], &[]), Err(Refusal::InUse));
    assert_eq!(state.open(second, "x").unwrap_err(), Refusal::InUse);
    assert_eq!(state.names(Asker::Key(KEY), None), Ok(vec![]));
    state.disclaim(second, "x").unwrap();
    assert_eq!(state.claim(second, "x", false), Err(Refusal::InUse));
    state.disclaim(first, "x").unwrap();
    assert_eq!(state.open(second, "x").unwrap_err(), Refusal::NotFound);
    // 2. What was published is not replaced by accident.
    let id = state.grant(first, 4096).unwrap().id();
    state.claim(first, "x", false).unwrap();
    state.publish(first, "x", vec![1], &[id]).unwrap();
    state.publish(first, "x", vec![2], &[id]).unwrap();
    state.close(first);
    assert_eq!(state.claim(second, "x", false), Err(Refusal::Exists));
    assert_eq!(
        state.publish(second, "x", vec![3], &[]),
        Err(Refusal::Exists)
    );
    // 3. With `replace` the old binding stays until there is a new one.
    state.claim(second, "x", true).unwrap();
    state.disclaim(second, "x").unwrap();
    assert_eq!(*state.open(second, "x").unwrap().manifest, [2]);
    state.release(second, id).unwrap();
    state.claim(second, "x", true).unwrap();
    state.publish(second, "x", vec![4], &[]).unwrap();
    state.check();
    state.close(second);
    let third = client(&state, Transport::Tcp);
    assert_eq!(*state.open(third, "x").unwrap().manifest, [4]);
    state.check();
}

#[test]
fn publishing_again_frees_what_only_the_old_binding_kept() {
    let state = state(1 << 30);
    let session = client(&state, Transport::Shm);
    let (old, new) = (
        state.grant(session, 4096).unwrap(),
        state.grant(session, 8192).unwrap(),
    );
    state
        .publish(session, "x", vec![0; 10], &[old.id(), old.id()])
        .unwrap();
    state.claim(session, "x", true).unwrap();
    state.release(session, old.id()).unwrap();
    state
        .publish(session, "x", vec![0; 20], &[new.id()])
        .unwrap();
    assert_eq!(state.stat().granted_bytes, 8192 + 4096 + 20);
    assert!(matches!(
        state.publish(session, "y", vec![], &[new.id()]),
        Err(Refusal::Invalid(_))
    ));
    state.check();
}

#[test]
fn a_manifest_that_does_not_fit_leaves_the_old_binding_whole() {
    let state = state(3 * 4096);
    let session = client(&state, Transport::Shm);
    let extent = state.grant(session, 4096).unwrap();
    state
        .publish(session, "x", vec![1; 4000], &[extent.id()])
        .unwrap();
    assert_eq!(
        state.publish(session, "x", vec![2; 5000], &[]).unwrap_err(),
        Refusal::Full {
            asked: 4096 + 5000,
            available: 2 * 4096,
            limit: Limit::Capacity(state.limits.capacity_bytes),
        }
    );
    state.close(session);
    drop(extent);
    let opened = state.open(client(&state, Transport::Shm), "x").unwrap();
    assert_eq!((opened.manifest[0], opened.extents.len()), (1, 1));
    state.check();
}
