//! Leases and sessions: how long they last.

use super::*;

#[test]
fn an_extent_is_visible_to_its_lessee_only_and_until_its_lease_ends() {
    let state = state(1 << 30);
    let [owner, stranger] = clients(&state, [Transport::Tcp; 2]);
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
    let tcp = admit(&state, Transport::Tcp, HERE);
    let (shm_extent, tcp_extent) = (
        state.grant(shm, 4096).unwrap(),
        state.grant(tcp.session, 4096).unwrap(),
    );
    state.lost(shm);
    state.lost(tcp.session);
    assert!(state.extent(shm, shm_extent.id()).is_none());
    assert_eq!(state.stat().granted_bytes, 4096);
    let wrong = Secret([0; 16]);
    let refused = resume(&state, tcp.session, wrong).unwrap_err();
    assert_eq!(refused, Refusal::NoSession);
    assert_eq!(state.attach(tcp.session, &wrong), Err(Refusal::NoSession));
    let back = resume(&state, tcp.session, tcp.secret).unwrap();
    assert_eq!(back.session, tcp.session);
    assert!(state.extent(tcp.session, tcp_extent.id()).is_some());
    state.check();
}

#[test]
fn a_client_that_is_gone_has_its_grace_and_one_that_came_back_its_lease() {
    let mut state = state(1 << 30);
    state.limits.reconnect_grace = LEASE / 4;
    let [gone, back, silent] = [(); 3].map(|()| admit(&state, Transport::Tcp, HERE));
    let held = state.grant(gone.session, 4096).unwrap().id();
    state.identify(gone.session, KEY).unwrap();
    state.publish(gone.session, "x", vec![], &[held]).unwrap();
    let lost = Instant::now();
    state.lost(gone.session);
    state.grant(back.session, 4096).unwrap();
    let again = resume(&state, back.session, back.secret).unwrap();
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
fn a_silent_client_loses_its_memory_and_one_that_renews_does_not() {
    let state = state(1 << 30);
    let [silent, alive] = clients(&state, [Transport::Tcp, Transport::Shm]);
    state.grant(silent, 4096).unwrap();
    let start = Instant::now();
    let looks = |from: u32, to: u32| {
        (from..=to)
            .map(|eighth| state.reap(start + LEASE / 8 * eighth))
            .sum::<usize>()
    };
    assert_eq!(looks(0, 7), 0);
    // The effect of `renew`, at a time of the test's choosing.
    state.ledger.lock().known(alive).unwrap().renewed = start + LEASE / 8 * 7;
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
fn a_draining_server_keeps_its_clients_and_takes_no_new_ones() {
    let state = state(1 << 30);
    let held = admit(&state, Transport::Tcp, HERE);
    state.drain();
    let new = state.admit("new", Transport::Tcp, &HERE.into(), None);
    assert_eq!(new.unwrap_err(), Refusal::Draining);
    assert!(resume(&state, held.session, held.secret).is_ok());
    assert!(
        state.grant(held.session, 4096).is_ok(),
        "out-of-place writes of a flush need memory"
    );
    assert!(state.stat().draining);
    assert_eq!(state.wait_until_empty(Instant::now()), 1);
    state.close(held.session);
    assert_eq!(state.wait_until_empty(Instant::now() + LEASE), 0);
}

#[test]
fn clients_are_asked_to_leave_only_where_they_have_time_to_and_get_no_more_memory_then() {
    let state = state(1 << 30);
    let held = client(&state, Transport::Tcp);
    let extent = state.grant(held, 4096).unwrap();
    state.drain();
    assert!(!state.stat().asks_to_leave());
    state.ask_to_leave();
    assert!(state.stat().asks_to_leave());
    assert_eq!(state.grant(held, 4096).unwrap_err(), Refusal::Draining);
    let now = Instant::now();
    assert_eq!(state.wait_until_unused(now, now), 4096);
    state.release(held, extent.id()).unwrap();
    let told = Instant::now() + Duration::from_millis(200);
    assert_eq!(state.wait_until_unused(told, told + LEASE), 0);
    assert!(Instant::now() >= told, "its client was not told yet");
    state.close(held);
    let told = Instant::now() + Duration::from_secs(60);
    assert_eq!(state.wait_until_unused(told, told), 0);
    assert!(Instant::now() < told, "nobody is there to be told");
}
