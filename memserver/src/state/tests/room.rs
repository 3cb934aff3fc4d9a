//! Limits of all clients together, and the origins that are charged.

use super::*;

#[test]
fn beyond_the_capacity_a_client_is_told_what_is_left_and_goes_on() {
    let state = state(3 << 20);
    let session = client(&state, Transport::Shm);
    let first = state.grant(session, 2 << 20).unwrap();
    assert_eq!(
        state.grant(session, 2 << 20).unwrap_err(),
        Refusal::Full {
            asked: 2 << 20,
            available: 1 << 20,
            limit: Limit::Capacity(3 << 20),
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
    let at = |origin| client_at(&state, Transport::Tcp, origin);
    let greedy = [at(HERE), at(HERE)];
    let named = state.grant(greedy[0], 2 << 20).unwrap().id();
    let small = state.grant(greedy[1], 1 << 20).unwrap().id();
    let full = Refusal::Full {
        asked: 4096,
        available: 0,
        limit: Limit::PerAddress(3 << 20),
    };
    assert_eq!(state.grant(greedy[1], 4096).unwrap_err(), full);
    state.release(greedy[1], small).unwrap();
    state.publish(greedy[0], "x", vec![], &[named]).unwrap();
    greedy.iter().for_each(|session| state.close(*session));
    // The name and its extents are still charged to the address that left them.
    let session = at(HERE);
    state.grant(session, (1 << 20) - 4096).unwrap();
    assert_eq!(state.grant(session, 4096).unwrap_err(), full);
    let modest = at(there);
    state.grant(modest, 1 << 20).unwrap();
    state.check();
    state.close(session);
    // A session that opens the name takes the charge over.
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
    let at = |origin| client_at(&state, Transport::Tcp, origin);
    let (one, two, other) = (at(HERE), at(HERE), at(Origin::User(1)));
    let named = state.grant(one, 4096).unwrap().id();
    state.grant(one, 4096).unwrap();
    state.grant(two, 4096).unwrap();
    let is_told = |refused: Refusal| matches!(&refused, Refusal::Invalid(why) if why.contains("--extents-per-address"));
    assert!(is_told(state.grant(two, 4096).unwrap_err()));
    // A session that opens a name left by another takes it over, if there is room.
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
fn figures_are_of_what_connected_clients_say_that_they_keep() {
    let state = state(1 << 30);
    let [one, other] = clients(&state, [Transport::Shm, Transport::Tcp]);
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
    // The memory is charged, and bytes that were written to it are gone.
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
        limit: Limit::Capacity(state.limits.capacity_bytes),
    };
    assert_eq!(state.grant(other, PART).unwrap_err(), full);
    // There is room as soon as the client lets go.
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
fn claims_alone_take_neither_the_names_of_others_nor_of_the_own_key() {
    let state = state(1 << 30);
    let greedy: Vec<_> = [(); 4].map(|()| client(&state, Transport::Tcp)).into();
    // 1. One session: the most names that it has published nothing under.
    let most = super::names::CLAIMS_PER_SESSION;
    let claim = |session, i: usize| state.claim(session, &format!("{session} {i}"), false);
    (0..most).for_each(|i| drop(claim(greedy[0], i).unwrap()));
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
    let other = admit(&state, Transport::Tcp, HERE);
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
    let mut at = |origin: Origin| {
        let session = admit(&state, Transport::Tcp, origin).session;
        let key = PublicKey([keys.next().unwrap(); 32]);
        state.identify(session, key).unwrap();
        session
    };
    let sessions = [at(HERE), at(HERE), at(there), at(there)];
    let full = Refusal::Full {
        asked: 4096,
        available: 0,
        limit: Limit::Capacity(16 * 4096),
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
fn one_client_cannot_use_up_the_servers_descriptors() {
    let state = state(1 << 30);
    let [greedy, modest] = clients(&state, [Transport::Shm; 2]);
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
        state.admit("sixth", Transport::Shm, &HERE.into(), None),
        Err(Refusal::Invalid(_))
    ));
    state.check();
}
