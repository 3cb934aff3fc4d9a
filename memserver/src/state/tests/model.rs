//! Requests in any order: the books balance.

use super::*;

#[derive(Clone, Debug)]
enum Step {
    Admit(bool),
    Grant(usize, u64),
    Release(usize, u64),
    Publish(usize, usize, usize, Vec<u64>),
    Open(usize, usize),
    Read(usize, usize),
    ReleaseView(usize, u64),
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
        (who.clone(), name.clone()).prop_map(|(who, name)| Step::Read(who, name)),
        (who.clone(), 0..20u64).prop_map(|(who, view)| Step::ReleaseView(who, view)),
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
                Step::Read(who, name) => drop(state.read(sessions[who], names[name])),
                Step::ReleaseView(who, number) => {
                    let views = state.views(sessions[who]);
                    if let Some(view) = views.get(number as usize % views.len().max(1)) {
                        state.release(sessions[who], *view).unwrap();
                    }
                }
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
