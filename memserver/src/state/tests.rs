//! Tests of the books: what clients ask for, in order and out of it, and that nothing is left at
//! the end.

use std::{os::unix::fs::FileExt, sync::Arc, thread, time::Duration};

use farpage_fabric::{
    host::{Asker, Host, Opened, Origin, Refusal, Transport},
    memory::ExtentMemory,
};
use farpage_wire::{NamedRegion, PublicKey, Secret};
use proptest::{collection::vec, prelude::*};

use super::{accounts::charge_of, *};

const LEASE: Duration = Duration::from_secs(8);
const RECONNECT_GRACE: Duration = Duration::from_secs(8);

fn state(capacity_bytes: u64) -> State {
    State::new(Limits {
        capacity_bytes,
        capacity_per_address: capacity_bytes,
        lease: LEASE,
        reconnect_grace: RECONNECT_GRACE,
        extents_per_session: 6,
        extents: 16,
        extents_per_address: 16,
        sessions: 7,
        operators: vec![OPERATOR],
    })
}

const HERE: Origin = Origin::User(0);

/// Whose names most tests use.
const KEY: PublicKey = PublicKey([1; 32]);
const OPERATOR: PublicKey = PublicKey([2; 32]);

fn client(state: &State, transport: Transport) -> SessionId {
    let session = state.admit("test", transport, HERE, None).unwrap().session;
    state.identify(session, KEY).unwrap();
    session
}

fn remove(state: &State, session: SessionId, name: &str) -> Result<(), Refusal> {
    state.remove(Asker::Session(session), name, None)
}

impl State {
    /// A request without a number.
    fn grant(&self, session: SessionId, bytes: u64) -> Result<Arc<ExtentMemory>, Refusal> {
        Host::grant(self, session, bytes, false, None)
    }

    fn open(&self, session: SessionId, name: &str) -> Result<Opened, Refusal> {
        Host::open(self, session, name, None)
    }

    fn held(&self, session: SessionId) -> Vec<ExtentId> {
        let ledger = self.ledger.lock();
        let mut held: Vec<_> = ledger
            .sessions
            .get(&session)
            .map_or_else(Vec::new, |record| record.extents.iter().copied().collect());
        held.sort();
        held
    }

    /// The two structures agree, and the sums are what they are sums of.
    fn check(&self) {
        let retained = self.retained.lock();
        let ledger = self.ledger.lock();
        let extents = ledger.extents.values();
        let bytes: u64 = extents.map(|extent| charge_of(extent.memory.bytes())).sum();
        let names = ledger.names.values();
        let named: u64 = names
            .map(|name| 4096 + name.manifest.as_ref().map_or(0, |manifest| manifest.len()) as u64)
            .sum();
        let all = ledger.accounts.all();
        let kept: u64 = retained.iter().map(Retained::charge).sum();
        assert_eq!(all.bytes, bytes + named + kept);
        assert!(all.bytes <= self.limits.capacity_bytes);
        assert_eq!(all.extents, ledger.extents.len() + retained.len());
        assert_eq!(all.sessions, ledger.sessions.len());
        assert_eq!(all, ledger.accounts.sum());
        let leased = self.leases.count();
        assert_eq!(
            leased,
            ledger
                .extents
                .values()
                .filter(|extent| extent.lessee.is_some())
                .count()
        );
        assert_eq!(
            leased,
            ledger
                .sessions
                .values()
                .map(|session| session.extents.len())
                .sum::<usize>()
        );
        for (id, extent) in &ledger.extents {
            assert!(
                extent.lessee.is_some() || extent.name.is_some(),
                "extent {id} belongs to nobody"
            );
            if let Some(name) = &extent.name {
                assert!(ledger.names[name].extents.contains(id));
            }
            if let Some(lessee) = extent.lessee {
                assert!(ledger.sessions[&lessee].extents.contains(id));
                let memory = self.extent(lessee, *id).expect("leased");
                memory.copy_out(0, &mut [0]).expect("not revoked");
            }
        }
        for (name, record) in &ledger.names {
            for id in &record.extents {
                let extent = &ledger.extents[id];
                assert_eq!(extent.name.as_ref(), Some(name));
                assert!(
                    extent.lessee.is_none() || extent.lessee == record.holder,
                    "extent {id} leased to a stranger"
                );
            }
            if let Some(holder) = record.holder {
                assert!(ledger.sessions[&holder].names.contains(name));
            }
        }
    }
}

#[test]
fn beyond_the_capacity_a_client_is_told_what_is_left_and_goes_on() {
    let state = state(3 << 20);
    let session = client(&state, Transport::Shm);
    let first = state.grant(session, 2 << 20).unwrap();
    assert_eq!(
        state.grant(session, 2 << 20).unwrap_err(),
        Refusal::Full {
            asked: 2 << 20,
            available: 1 << 20
        }
    );
    assert!(matches!(
        state.grant(session, u64::MAX).unwrap_err(),
        Refusal::Full {
            available: 0x10_0000,
            ..
        }
    ));
    assert!(matches!(state.grant(session, 0), Err(Refusal::Invalid(_))));
    state.grant(session, 1 << 20).unwrap();
    state.release(session, first.id()).unwrap();
    assert_eq!(state.stat().granted_bytes, 1 << 20);
    state.check();
}

#[test]
fn one_address_cannot_take_all_memory_nor_leave_it_behind_under_names() {
    let state = State::new(Limits {
        capacity_per_address: 3 << 20,
        ..state(4 << 20).limits
    });
    let there = Origin::User(1);
    let at = |origin| {
        let begun = state.admit("test", Transport::Tcp, origin, None).unwrap();
        state.identify(begun.session, KEY).unwrap();
        begun.session
    };
    let greedy = [at(HERE), at(HERE)];
    let named = state.grant(greedy[0], 2 << 20).unwrap().id();
    let small = state.grant(greedy[1], 1 << 20).unwrap().id();
    let full = Refusal::Full {
        asked: 4096,
        available: 0,
    };
    assert_eq!(state.grant(greedy[1], 4096).unwrap_err(), full);
    state.release(greedy[1], small).unwrap();
    state.publish(greedy[0], "x", vec![], &[named]).unwrap();
    greedy.iter().for_each(|session| state.close(*session));
    // What stays under a name, and the name, is still put on the address that left it.
    let session = at(HERE);
    state.grant(session, (1 << 20) - 4096).unwrap();
    assert_eq!(state.grant(session, 4096).unwrap_err(), full);
    let modest = at(there);
    state.grant(modest, 1 << 20).unwrap();
    state.check();
    state.close(session);
    // Whoever opens it takes it over.
    state.open(modest, "x").unwrap();
    state.grant(at(HERE), (1 << 20) - 4096).unwrap();
    state.check();
}

#[test]
fn one_address_cannot_take_all_extents() {
    let state = State::new(Limits {
        extents_per_address: 3,
        ..state(1 << 30).limits
    });
    let at = |origin| {
        let begun = state.admit("test", Transport::Tcp, origin, None).unwrap();
        state.identify(begun.session, KEY).unwrap();
        begun.session
    };
    let (one, two, other) = (at(HERE), at(HERE), at(Origin::User(1)));
    let named = state.grant(one, 4096).unwrap().id();
    state.grant(one, 4096).unwrap();
    state.grant(two, 4096).unwrap();
    let is_told = |refused: Refusal| matches!(&refused, Refusal::Invalid(why) if why.contains("--extents-per-address"));
    assert!(is_told(state.grant(two, 4096).unwrap_err()));
    // Whoever opens what another left behind takes it over, if there is room.
    state.publish(one, "x", vec![], &[named]).unwrap();
    state.release(one, named).unwrap();
    assert!(is_told(state.grant(two, 4096).unwrap_err()));
    let own: Vec<_> = [(); 3]
        .map(|()| state.grant(other, 4096).unwrap().id())
        .into();
    assert!(is_told(state.open(other, "x").unwrap_err()));
    state.release(other, own[0]).unwrap();
    state.open(other, "x").unwrap();
    state.grant(two, 4096).unwrap();
    state.check();
}

#[test]
fn an_extent_is_visible_to_its_lessee_only_and_until_its_lease_ends() {
    let state = state(1 << 30);
    let (owner, stranger) = (
        client(&state, Transport::Tcp),
        client(&state, Transport::Tcp),
    );
    let memory = state.grant(owner, 5000).unwrap();
    assert_eq!((memory.bytes(), state.stat().granted_bytes), (5000, 8192));
    assert!(state.extent(owner, memory.id()).is_some());
    assert!(state.extent(stranger, memory.id()).is_none());
    assert_eq!(
        state.release(stranger, memory.id()),
        Err(Refusal::NotLeased(memory.id()))
    );
    assert_eq!(
        state.publish(stranger, "x", vec![], &[memory.id()]),
        Err(Refusal::NotLeased(memory.id()))
    );
    state.release(owner, memory.id()).unwrap();
    assert!(state.extent(owner, memory.id()).is_none());
    assert!(
        memory.copy_in(0, &[1]).is_err(),
        "an operation that was under way goes on after the release"
    );
    state.check();
}

#[test]
fn a_lost_shm_client_is_dead_and_a_lost_tcp_client_may_return_within_its_lease() {
    let state = state(1 << 30);
    let shm = client(&state, Transport::Shm);
    let tcp = state.admit("test", Transport::Tcp, HERE, None).unwrap();
    let (shm_extent, tcp_extent) = (
        state.grant(shm, 4096).unwrap(),
        state.grant(tcp.session, 4096).unwrap(),
    );
    state.lost(shm);
    state.lost(tcp.session);
    assert!(state.extent(shm, shm_extent.id()).is_none());
    assert_eq!(state.stat().granted_bytes, 4096);
    let wrong = Secret([0; 16]);
    assert_eq!(
        state
            .admit("thief", Transport::Tcp, HERE, Some((tcp.session, wrong)))
            .unwrap_err(),
        Refusal::NoSession
    );
    assert_eq!(state.attach(tcp.session, &wrong), Err(Refusal::NoSession));
    let back = state
        .admit(
            "test",
            Transport::Tcp,
            HERE,
            Some((tcp.session, tcp.secret)),
        )
        .unwrap();
    assert_eq!(back.session, tcp.session);
    assert!(state.extent(tcp.session, tcp_extent.id()).is_some());
    state.check();
}

#[test]
fn a_client_that_is_gone_has_its_grace_and_one_that_came_back_its_lease() {
    let mut state = state(1 << 30);
    state.limits.reconnect_grace = LEASE / 4;
    let [gone, back, silent] =
        [(); 3].map(|()| state.admit("test", Transport::Tcp, HERE, None).unwrap());
    let held = state.grant(gone.session, 4096).unwrap().id();
    state.identify(gone.session, KEY).unwrap();
    state.publish(gone.session, "x", vec![], &[held]).unwrap();
    let lost = Instant::now();
    state.lost(gone.session);
    state.grant(back.session, 4096).unwrap();
    let resume = Some((back.session, back.secret));
    let again = state.admit("test", Transport::Tcp, HERE, resume).unwrap();
    // The old connection's end may be seen after the new one has come.
    state.lost(back.session);
    let ended: usize = (0..=6)
        .map(|eighth| state.reap(lost + LEASE / 8 * eighth))
        .sum();
    assert_eq!(ended, 1, "one came back, one has its lease");
    assert!(state.renew(gone.session).is_err());
    state.identify(silent.session, KEY).unwrap();
    state.open(silent.session, "x").expect("nobody holds it");
    state.lost(again.session);
    let later = Instant::now() + LEASE / 8 * 7;
    state.ledger.lock().reaped = Some(later);
    assert_eq!(state.reap(later), 1, "lost again, and gone for its grace");
    state.check();
}

#[test]
fn figures_are_of_what_connected_clients_say_that_they_keep() {
    let state = state(1 << 30);
    let (one, other) = (
        client(&state, Transport::Shm),
        client(&state, Transport::Tcp),
    );
    state.report_contents(one, 1000, 400).unwrap();
    state.report_contents(one, 3000, 500).unwrap();
    state.report_contents(other, u64::MAX, 7).unwrap();
    let stat = state.stat();
    assert_eq!((stat.logical_bytes, stat.stored_bytes), (u64::MAX, 507));
    state.close(other);
    let stat = state.stat();
    assert_eq!((stat.logical_bytes, stat.stored_bytes), (3000, 500));
    assert_eq!(state.report_contents(other, 1, 1), Err(Refusal::NoSession));
}

#[test]
fn a_silent_client_loses_its_memory_and_one_that_renews_does_not() {
    let state = state(1 << 30);
    let (silent, alive) = (
        client(&state, Transport::Tcp),
        client(&state, Transport::Shm),
    );
    state.grant(silent, 4096).unwrap();
    let start = Instant::now();
    let looks = |from: u32, to: u32| {
        (from..=to)
            .map(|eighth| state.reap(start + LEASE / 8 * eighth))
            .sum::<usize>()
    };
    assert_eq!(looks(0, 7), 0);
    // What `renew` does, at a time of the test's choosing.
    state
        .ledger
        .lock()
        .sessions
        .get_mut(&alive)
        .unwrap()
        .renewed = start + LEASE / 8 * 7;
    assert_eq!(looks(8, 10), 1);
    assert_eq!(state.renew(silent), Err(Refusal::NoSession));
    assert_eq!(state.renew(alive), Ok(()));
    assert_eq!(state.stat().granted_bytes, 0);
    state.check();
}

#[test]
fn a_server_that_was_stopped_does_not_punish_its_clients() {
    let state = state(1 << 30);
    let session = client(&state, Transport::Tcp);
    let start = Instant::now();
    assert_eq!(state.reap(start), 0);
    assert_eq!(state.reap(start + LEASE * 100), 0);
    assert_eq!(state.reap(start + LEASE * 100 + LEASE / 4), 0);
    assert_eq!(state.renew(session), Ok(()));
}

#[test]
fn a_named_region_is_not_opened_before_operations_under_its_old_lease_have_ended() {
    let state = state(1 << 20);
    let (first, second) = (
        client(&state, Transport::Tcp),
        client(&state, Transport::Tcp),
    );
    let id = state.grant(first, 4096).unwrap().id();
    state.publish(first, "x", Vec::new(), &[id]).unwrap();
    // What a connection keeps while bytes move.
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

/// What a client over shared memory was given, and keeps for as long as it likes.
fn descriptor_of(memory: &ExtentMemory) -> std::fs::File {
    memory.lend().unwrap().into()
}

#[test]
fn who_was_lent_memory_of_a_name_reaches_no_byte_of_the_next_user_who_opens_it() {
    let state = state(16 << 20);
    let at = |transport, origin| {
        let begun = state.admit("test", transport, origin, None).unwrap();
        state.identify(begun.session, KEY).unwrap();
        begun.session
    };
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
    // What they kept is charged to them.
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
    let admit = |user| {
        let origin = Origin::User(user);
        let admission = state.admit("test", Transport::Shm, origin, None).unwrap();
        state.identify(admission.session, KEY).unwrap();
        admission.session
    };
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
fn a_client_beyond_its_limit_may_open_what_is_its_own() {
    let mut state = state(8 << 20);
    let session = client(&state, Transport::Tcp);
    let memory = state.grant(session, 1 << 20).unwrap();
    state.publish(session, "x", vec![], &[memory.id()]).unwrap();
    state.release(session, memory.id()).unwrap();
    drop(memory);
    state.limits.extents_per_address = 0;
    state.open(session, "x").unwrap();
    state.check();
}

#[test]
fn memory_that_a_client_gave_back_and_kept_is_charged_until_it_lets_go() {
    const PART: u64 = 1 << 20;
    let state = state(4 * PART);
    let session = client(&state, Transport::Shm);
    // Given back extent by extent, and with the session; the second is removed with its name.
    let kept: Vec<_> = (0..3)
        .map(|_| state.grant(session, PART).unwrap())
        .map(|memory| (memory.id(), descriptor_of(&memory)))
        .collect();
    state.publish(session, "x", vec![], &[kept[1].0]).unwrap();
    state.release(session, kept[0].0).unwrap();
    state.close(session);
    let other = client(&state, Transport::Tcp);
    remove(&state, other, "x").unwrap();
    state.check();
    for (_, file) in &kept {
        file.write_all_at(&[7; 4096], 0).unwrap();
    }
    // Charged, and what was written to it is gone.
    let stat = state.stat();
    assert_eq!(
        (stat.granted_bytes, stat.retained_bytes),
        (3 * PART, 3 * PART)
    );
    assert_eq!((stat.extents, stat.resident_bytes), (0, 0));
    for (_, file) in &kept {
        let mut seen = [1];
        file.read_exact_at(&mut seen, 0).unwrap();
        assert_eq!(seen, [0]);
    }
    state.grant(other, PART).unwrap();
    let full = Refusal::Full {
        asked: PART,
        available: 0,
    };
    assert_eq!(state.grant(other, PART).unwrap_err(), full);
    // There is room as soon as it lets go.
    for (_, file) in kept {
        drop(file);
        state.grant(other, PART).unwrap();
        state.check();
    }
    assert_eq!(state.grant(other, PART).unwrap_err(), full);
    state.close(other);
    assert_eq!(state.stat().granted_bytes, 0);
    state.check();
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
    let (second, third) = (
        client(&state, Transport::Tcp),
        client(&state, Transport::Tcp),
    );
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
        state
            .admit("test", Transport::Tcp, HERE, None)
            .unwrap()
            .session,
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
    // 1. Another key has names of its own, which nothing of the owner's is in the way of.
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
    let begun = state.admit("test", Transport::Tcp, HERE, None).unwrap();
    state.identify(begun.session, KEY).unwrap();
    let id = state.grant(begun.session, 4096).unwrap().id();
    state.publish(begun.session, "x", vec![], &[id]).unwrap();
    state.lost(begun.session);
    let resume = Some((begun.session, begun.secret));
    state.admit("test", Transport::Tcp, HERE, resume).unwrap();
    state.publish(begun.session, "x", vec![1], &[id]).unwrap();
}

#[test]
fn creating_a_name_is_exclusive_unless_replacing_was_asked_for() {
    let state = state(1 << 30);
    let (first, second) = (
        client(&state, Transport::Tcp),
        client(&state, Transport::Tcp),
    );
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
fn claims_alone_take_neither_the_names_of_others_nor_of_the_own_key() {
    let state = state(1 << 30);
    let greedy: Vec<_> = [(); 4].map(|()| client(&state, Transport::Tcp)).into();
    // 1. One session: so many that it has published nothing under.
    let most = super::names::CLAIMS_PER_SESSION;
    let claim = |session, i: usize| state.claim(session, &format!("{session} {i}"), false);
    (0..most).for_each(|i| claim(greedy[0], i).unwrap());
    let refused = claim(greedy[0], most).unwrap_err();
    assert!(
        matches!(&refused, Refusal::Invalid(why) if why.contains("publish or close")),
        "{refused:?}"
    );
    let first = format!("{} 0", greedy[0]);
    state.publish(greedy[0], &first, vec![], &[]).unwrap();
    claim(greedy[0], most).unwrap();
    // 2. All sessions of one key.
    let left = super::names::NAMES_PER_KEY - most - 1;
    let mut others = (1..4).flat_map(|at| (0..most).map(move |i| (at, i)));
    for (at, i) in others.by_ref().take(left) {
        claim(greedy[at], i).unwrap();
    }
    let (at, i) = others.next().unwrap();
    for refused in [
        claim(greedy[at], i).unwrap_err(),
        state.publish(greedy[at], "more", vec![], &[]).unwrap_err(),
    ] {
        assert!(
            matches!(&refused, Refusal::Invalid(why) if why.contains("of this key")),
            "{refused:?}"
        );
    }
    // 3. Another key has its own, and what is gone makes room.
    let other = state.admit("test", Transport::Tcp, HERE, None).unwrap();
    state.identify(other.session, OPERATOR).unwrap();
    state.claim(other.session, "x", false).unwrap();
    remove(&state, greedy[0], &first).unwrap();
    claim(greedy[at], i).unwrap();
    greedy.iter().for_each(|session| state.close(*session));
    assert_eq!(state.ledger.lock().names.len(), 1);
    state.check();
}

#[test]
fn names_take_room_also_those_that_are_only_claimed_by_ever_new_keys() {
    let state = state(16 * 4096);
    let (there, mut keys) = (Origin::User(1), 3..);
    let mut at = |origin| {
        let session = state.admit("test", Transport::Tcp, origin, None).unwrap();
        let key = PublicKey([keys.next().unwrap(); 32]);
        state.identify(session.session, key).unwrap();
        session.session
    };
    let sessions = [at(HERE), at(HERE), at(there), at(there)];
    let full = Refusal::Full {
        asked: 4096,
        available: 0,
    };
    // 1. Claims, whosever they are, take a page each.
    for i in 0..16 {
        let claimed = state.claim(sessions[i % 4], &i.to_string(), false);
        claimed.unwrap();
        state.check();
    }
    assert_eq!(state.stat().granted_bytes, 16 * 4096);
    assert_eq!(state.claim(sessions[0], "more", false), Err(full.clone()));
    assert_eq!(state.publish(sessions[1], "more", vec![], &[]), Err(full));
    // 2. A claim that is published without a manifest costs no more, and once it is removed there
    //    is room.
    state.publish(sessions[0], "0", vec![], &[]).unwrap();
    state.disclaim(sessions[3], "3").unwrap();
    state.claim(sessions[2], "more", false).unwrap();
    remove(&state, sessions[0], "0").unwrap();
    state.claim(sessions[2], "even more", false).unwrap();
    state.check();
    sessions.iter().for_each(|session| state.close(*session));
    assert_eq!(state.stat().granted_bytes, 0);
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
            available: 2 * 4096
        }
    );
    state.close(session);
    drop(extent);
    let opened = state.open(client(&state, Transport::Shm), "x").unwrap();
    assert_eq!((opened.manifest[0], opened.extents.len()), (1, 1));
    state.check();
}

#[test]
fn one_client_cannot_use_up_the_servers_descriptors() {
    let state = state(1 << 30);
    let (greedy, modest) = (
        client(&state, Transport::Shm),
        client(&state, Transport::Shm),
    );
    for _ in 0..6 {
        state.grant(greedy, 4096).unwrap();
    }
    assert!(matches!(
        state.grant(greedy, 4096),
        Err(Refusal::Invalid(_))
    ));
    state.grant(modest, 4096).unwrap();
    for _ in 0..3 {
        client(&state, Transport::Shm);
    }
    assert!(matches!(
        state.admit("sixth", Transport::Shm, HERE, None),
        Err(Refusal::Invalid(_))
    ));
    state.check();
}

#[test]
fn a_draining_server_keeps_its_clients_and_takes_no_new_ones() {
    let state = state(1 << 30);
    let held = state.admit("held", Transport::Tcp, HERE, None).unwrap();
    state.drain();
    assert_eq!(
        state.admit("new", Transport::Tcp, HERE, None).unwrap_err(),
        Refusal::Draining
    );
    assert!(
        state
            .admit(
                "held",
                Transport::Tcp,
                HERE,
                Some((held.session, held.secret))
            )
            .is_ok()
    );
    assert!(
        state.grant(held.session, 4096).is_ok(),
        "out-of-place writes of a flush need memory"
    );
    assert!(state.stat().draining);
    assert_eq!(state.wait_until_empty(Instant::now()), 1);
    state.close(held.session);
    assert_eq!(state.wait_until_empty(Instant::now() + LEASE), 0);
}

#[derive(Clone, Debug)]
enum Step {
    Admit(bool),
    Grant(usize, u64),
    Release(usize, u64),
    Publish(usize, usize, usize, Vec<u64>),
    Open(usize, usize),
    Remove(usize, usize),
    Claim(usize, usize, bool),
    Disclaim(usize, usize),
    Lost(usize),
    Close(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let (who, name, extent) = (0..4usize, 0..3usize, 0..20u64);
    prop_oneof![
        any::<bool>().prop_map(Step::Admit),
        (who.clone(), 0..6000u64).prop_map(|(who, bytes)| Step::Grant(who, bytes)),
        (who.clone(), extent.clone()).prop_map(|(who, extent)| Step::Release(who, extent)),
        (who.clone(), name.clone(), 0..100usize, vec(extent, 0..4))
            .prop_map(|(a, b, c, d)| Step::Publish(a, b, c, d)),
        (who.clone(), name.clone()).prop_map(|(who, name)| Step::Open(who, name)),
        (who.clone(), name.clone()).prop_map(|(who, name)| Step::Remove(who, name)),
        (who.clone(), name.clone(), any::<bool>()).prop_map(|(a, b, c)| Step::Claim(a, b, c)),
        (who.clone(), name).prop_map(|(who, name)| Step::Disclaim(who, name)),
        who.clone().prop_map(Step::Lost),
        who.prop_map(Step::Close),
    ]
}

proptest! {
    #[test]
    fn whatever_clients_ask_for_the_books_balance_and_nothing_is_left_at_the_end(steps in vec(step(), 1..80)) {
        let state = state(40_000);
        let names = ["a", "b", "c"];
        let mut sessions = [SessionId(0); 4];
        let mut next = 0;
        for step in steps {
            // Mostly what the client holds, so that requests succeed; now and then what it does
            // not.
            let pick = |who: usize, number: u64| match state.held(sessions[who]) {
                held if !held.is_empty() && number < 16 => held[number as usize % held.len()],
                _ => ExtentId(number),
            };
            // Refusals are as good an answer as any: what is checked is the state that they leave.
            match step {
                Step::Admit(shm) => {
                    let transport = if shm { Transport::Shm } else { Transport::Tcp };
                    state.close(sessions[next]);
                    sessions[next] = client(&state, transport);
                    next = (next + 1) % sessions.len();
                }
                Step::Grant(who, bytes) => drop(state.grant(sessions[who], bytes)),
                Step::Release(who, extent) => drop(state.release(sessions[who], pick(who, extent))),
                Step::Publish(who, name, bytes, extents) => {
                    drop(state.publish(sessions[who], names[name], vec![0; bytes], &extents.iter().map(|number| pick(who, *number)).collect::<Vec<_>>()));
                }
                Step::Open(who, name) => drop(state.open(sessions[who], names[name])),
                Step::Remove(who, name) => drop(remove(&state, sessions[who], names[name])),
                Step::Claim(who, name, replace) => drop(state.claim(sessions[who], names[name], replace)),
                Step::Disclaim(who, name) => drop(state.disclaim(sessions[who], names[name])),
                Step::Lost(who) => state.lost(sessions[who]),
                Step::Close(who) => state.close(sessions[who]),
            }
            state.check();
        }
        sessions.iter().for_each(|session| state.close(*session));
        let last = client(&state, Transport::Shm);
        names.iter().for_each(|name| drop(remove(&state, last, name)));
        state.check();
        prop_assert_eq!(state.stat().granted_bytes, 0);
        prop_assert_eq!(state.stat().extents, 0);
    }
}
