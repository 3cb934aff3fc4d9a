//! Names on a simulated disk that is full, slow or damaged, and names of several servers.

use std::{io, thread};

use farpage_fabric::host::Proposal;
use farpage_wire::{
    Durability, ExtentRange, Persistence, ServerId,
    register::{Ballot, Epoch, Register, Stamp},
};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::{
    persist::{Writer, durability, publish_once, start},
    *,
};
use crate::{
    durable::{
        Binding, BoundExtent, PersistError,
        cut::{CutFolder, Step},
    },
    state::records::NameId,
};

fn random() -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(7)
}

/// Makes the file of the only name one that tells no name.
fn tear(folder: &CutFolder) -> String {
    let file = folder.files("name-").remove(0);
    folder.tamper(&file, |bytes| bytes.truncate(30));
    file
}

/// Returns a server on which `a` is damaged and listed under its file's name, and that name.
fn damaged(when: Persistence) -> (CutFolder, State, String) {
    let folder = CutFolder::default();
    let state = start(&folder, Persistence::AtOnce).unwrap();
    publish_once(&state, "a");
    drop(state);
    let twin = format!("unreadable {}", tear(&folder));
    let state = start(&folder.reopen(), when).unwrap();
    (folder, state, twin)
}

#[test]
fn a_name_whose_file_is_unreadable_is_taken_only_to_replace_it_and_its_record_goes_then() {
    for when in [Persistence::AtOnce, Persistence::Soon] {
        let (folder, state, twin) = damaged(when);
        let session = client(&state, Transport::Tcp);
        let refusals = [
            state.claim(session, "a", false).unwrap_err(),
            state.publish(session, "a", vec![1], &[]).unwrap_err(),
        ];
        for refusal in refusals {
            let says = refusal.to_string();
            assert!(says.contains(&twin) && says.contains("remove"), "{says}");
        }
        state.check();
        let mut writer = Writer::create(&state, "a");
        writer.publish(&state, &mut random()).unwrap();
        state.check();
        let names = state.names(Asker::Key(KEY), None).unwrap();
        assert_eq!(names.len(), 1, "{names:?}");
        let removed = state.remove(Asker::Key(KEY), &twin, None);
        assert_eq!(removed, Err(Refusal::NotFound));
        drop(state);
        let state = start(&folder.reopen(), when).unwrap();
        assert!(Writer::open(&state, "a").unwrap().is_whole());
    }
}

#[test]
fn damaged_files_stay_until_what_replaces_them_is_on_the_disk() {
    let (folder, state, twin) = damaged(Persistence::Soon);
    let mut writer = Writer::create(&state, "a");
    folder.fail(Some((Step::Write, "extent-", io::ErrorKind::StorageFull)));
    writer.publish(&state, &mut random()).unwrap_err();
    folder.fail(None);
    assert!(matches!(durability(&state, &twin), Durability::Damaged(_)));
    assert_eq!(folder.files("name-").len(), 1);
    writer.publish(&state, &mut random()).unwrap();
    assert_eq!(durability(&state, "a"), Durability::Disk);
    state.check();
}

#[test]
fn an_extent_that_two_names_claim_stays_until_both_are_removed() {
    let folder = CutFolder::default();
    let state = start(&folder, Persistence::AtOnce).unwrap();
    let writer = Writer::create(&state, "a");
    let memory = &writer.extents[0];
    let claim = Binding {
        server: Some(ServerId(1)),
        version: 9,
        origin: HERE,
        manifest: Vec::new(),
        extents: vec![BoundExtent {
            id: memory.id(),
            bytes: memory.bytes(),
            atomics: false,
        }],
        register: Register::default(),
    };
    for name in ["a", "b"] {
        let durable = state.durable.as_ref().unwrap();
        durable.bind(KEY, name, &claim).unwrap();
    }
    drop(state);
    let state = start(&folder.reopen(), Persistence::AtOnce).unwrap();
    assert_eq!(state.stat().persist.damaged_names, 2);
    for (name, left) in [("a", 1), ("b", 0)] {
        state.remove(Asker::Key(KEY), name, None).unwrap();
        assert_eq!(folder.files("extent-").len(), left);
        state.check();
    }
}

#[test]
fn a_removal_of_unknown_outcome_is_shown_and_nothing_more_is_removed() {
    let folder = CutFolder::default();
    let state = start(&folder, Persistence::AtOnce).unwrap();
    publish_once(&state, "a");
    publish_once(&state, "b");
    folder.fail(Some((Step::SyncFolder, "", io::ErrorKind::Other)));
    state.remove(Asker::Key(KEY), "a", None).unwrap_err();
    folder.fail(None);
    let shown = durability(&state, "a");
    assert!(matches!(shown, Durability::Failed(_)), "{shown:?}");
    for name in ["a", "b"] {
        let refusal = state.remove(Asker::Key(KEY), name, None).unwrap_err();
        let says = refusal.to_string();
        assert!(says.contains("started anew"), "{says}");
    }
    assert_eq!(state.names(Asker::Key(KEY), None).unwrap().len(), 2);
    state.check();
}

#[test]
fn a_publication_that_the_disk_refuses_after_its_answer_is_written_before_the_next_one() {
    let folder = CutFolder::default();
    let state = start(&folder, Persistence::Soon).unwrap();
    let first = publish_once(&state, "a");
    let mut writer = Writer::open(&state, "a").unwrap();
    let name = folder.files("extent-").remove(0);
    folder.fail(Some((Step::Write, &name, io::ErrorKind::StorageFull)));
    writer.publish_soon(&state, &mut random()).unwrap();
    let shown = durability(&state, "a");
    let Durability::Failed(why) = shown else {
        panic!("{shown:?}")
    };
    assert!(why.contains("no storage space"), "{why}");
    // Others go on, and the disk has the version before.
    publish_once(&state, "b");
    assert_eq!(durability(&state, "b"), Durability::Disk);
    let after = start(&folder.cut(&mut random()), Persistence::Soon).unwrap();
    let found = Writer::open(&after, "a").unwrap();
    assert!(found.is_whole() && found.published == first);
    let again = writer.publish_soon(&state, &mut random()).unwrap_err();
    let says = again.to_string();
    assert!(says.contains("no storage space"), "{says}");
    state.check();
    // Another client goes on once there is room.
    state.close(writer.session);
    drop(writer);
    folder.fail(None);
    let mut writer = Writer::open(&state, "a").unwrap();
    writer.publish_soon(&state, &mut random()).unwrap();
    assert_eq!(durability(&state, "a"), Durability::Disk);
    state.check();
    let state = start(&folder.reopen(), Persistence::Soon).unwrap();
    let found = Writer::open(&state, "a").unwrap();
    assert!(found.is_whole() && found.published == writer.published);
}

#[test]
fn a_name_whose_publication_the_disk_refuses_can_be_removed() {
    let folder = CutFolder::default();
    let state = start(&folder, Persistence::Soon).unwrap();
    let mut writer = Writer::create(&state, "a");
    folder.fail(Some((Step::Write, "extent-", io::ErrorKind::StorageFull)));
    writer.publish_soon(&state, &mut random()).unwrap();
    state.close(writer.session);
    folder.fail(None);
    state.remove(Asker::Key(KEY), "a", None).unwrap();
    state.check();
    assert_eq!(state.ledger.lock().extents.len(), 0);
    assert!(folder.files("extent-").is_empty() && folder.files("name-").is_empty());
}

#[test]
fn extents_that_a_waiting_publication_writes_stay_until_it_is_written() {
    let folder = CutFolder::default();
    let state = start(&folder, Persistence::Soon).unwrap();
    let jobs = state.take_jobs();
    let session = client(&state, Transport::Tcp);
    state.claim(session, "a", false).unwrap();
    let [kept, other] = [(); 2].map(|()| state.grant(session, 4096).unwrap().id());
    for extent in [kept, other] {
        let range = ExtentRange {
            extent,
            offset: 0,
            bytes: 64,
        };
        assert!(state.persist(session, "a", &[range], false).unwrap());
    }
    state.publish(session, "a", vec![1], &[kept]).unwrap();
    state.release(session, other).unwrap();
    assert!(state.ledger.lock().extents.contains_key(&other));
    assert!(!state.wait_jobs(Instant::now()), "nobody has written yet");
    state.end_jobs();
    state.write_publications(&jobs);
    assert!(state.wait_jobs(Instant::now()));
    assert_eq!(folder.files("extent-").len(), 1);
    assert_eq!(state.ledger.lock().extents.len(), 1);
    state.check();
}

#[test]
fn a_session_whose_request_is_in_the_disk_does_not_end() {
    let folder = CutFolder::default();
    let state = start(&folder, Persistence::AtOnce).unwrap();
    let session = client(&state, Transport::Tcp);
    state.claim(session, "a", false).unwrap();
    let range = ExtentRange {
        extent: state.grant(session, 4096).unwrap().id(),
        offset: 0,
        bytes: 64,
    };
    let late = Instant::now() + 10 * state.limits.lease;
    thread::scope(|scope| {
        let hung = folder.hang();
        let request = scope.spawn(|| state.persist(session, "a", &[range], true));
        while state.ledger.lock().sessions[&session].in_disk == 0 {
            thread::yield_now();
        }
        let reaper = scope.spawn(|| state.reap(late));
        // The end of the session would wait for the disk as well.
        let is_there = || state.ledger.lock().sessions.contains_key(&session);
        while !reaper.is_finished() && is_there() {
            thread::yield_now();
        }
        drop(hung);
        assert_eq!(reaper.join().unwrap(), 0);
        assert_eq!(request.join().unwrap(), Ok(true));
    });
    assert_eq!(state.renew(session), Ok(()));
}

#[test]
fn ranges_are_joined_and_those_beyond_the_bound_are_written_at_once() {
    let folder = CutFolder::default();
    let state = start(&folder, Persistence::Soon).unwrap();
    let session = client(&state, Transport::Tcp);
    let extent = state.grant(session, 1 << 20).unwrap().id();
    let range = |offset, bytes| ExtentRange {
        extent,
        offset,
        bytes,
    };
    let persist = |name, ranges: &[ExtentRange]| state.persist(session, name, ranges, false);
    let kept = |name| {
        let ledger = state.ledger.lock();
        ledger.names[&NameId::new(KEY, name)].unwritten.clone()
    };
    let written = folder.written_bytes();
    for name in ["a", "b", "c"] {
        state.claim(session, name, false).unwrap();
    }
    for offset in [0, 64, 128] {
        persist("a", &[range(offset, 64)]).unwrap();
    }
    assert_eq!(kept("a"), [range(0, 192)]);
    let many: Vec<_> = (1..1 << 16).map(|i| range(2 * i, 1)).collect();
    assert_eq!(persist("b", &many), Ok(true));
    assert_eq!(kept("b").len(), many.len());
    assert_eq!(folder.written_bytes(), written);
    assert_eq!(persist("c", &[range(0, 100)]), Ok(true));
    assert_eq!(kept("c"), []);
    assert_eq!(folder.written_bytes(), written + 100);
}

#[test]
fn a_start_that_lacks_memory_ends_and_calls_no_name_damaged() {
    for prefix in ["name-", "extent-"] {
        let folder = CutFolder::default();
        let state = start(&folder, Persistence::AtOnce).unwrap();
        publish_once(&state, "a");
        drop(state);
        let folder = folder.reopen();
        folder.fail(Some((Step::Read, prefix, io::ErrorKind::OutOfMemory)));
        let error = start(&folder, Persistence::AtOnce).map(drop).unwrap_err();
        assert!(matches!(error, PersistError::Memory { .. }), "{error}");
        assert!(error.to_string().contains("start it anew"), "{error}");
        let state = start(&folder.reopen(), Persistence::AtOnce).unwrap();
        assert!(Writer::open(&state, "a").unwrap().is_whole());
    }
}

#[test]
fn extents_without_a_name_stay_while_a_file_may_have_lost_the_name() {
    let folder = CutFolder::default();
    let state = start(&folder, Persistence::AtOnce).unwrap();
    let mut writer = Writer::create(&state, "a");
    let (_, ranges) = writer.change(&state, &mut random());
    state.persist(writer.session, "a", &ranges, true).unwrap();
    drop(state);
    let left = || {
        let state = start(&folder.reopen(), Persistence::AtOnce).unwrap();
        state.check();
        drop(state);
        folder.files("extent-").len()
    };
    folder.put("name-of-nobody");
    assert_eq!(left(), 1);
    folder.lose("name-of-nobody");
    folder.find_lost(true);
    assert_eq!(left(), 1);
    folder.find_lost(false);
    assert_eq!(left(), 0);
}

#[test]
fn the_bytes_on_the_disk_are_those_of_all_files() {
    let folder = CutFolder::default();
    let state = start(&folder, Persistence::AtOnce).unwrap();
    let check = |state: &State| {
        assert_eq!(state.stat().persist.disk_bytes, folder.bytes());
    };
    check(&state);
    publish_once(&state, "a");
    publish_once(&state, "b");
    check(&state);
    publish_once(&state, "a");
    state.remove(Asker::Key(KEY), "b", None).unwrap();
    check(&state);
    drop(state);
    check(&start(&folder.reopen(), Persistence::AtOnce).unwrap());
}

/// Publishes `a` so that what the version before has stays. True if there is such.
fn keeps_more(state: &State, session: SessionId, extents: &[ExtentId]) -> bool {
    let proposal = Proposal {
        manifest: vec![1],
        extents,
        ballot: None,
        keeps: true,
    };
    state.bind(session, "a", proposal).unwrap().keeps_more
}

/// The first server of the region binds the name between the two publications.
#[test]
fn what_a_part_replaces_is_there_until_the_region_is_bound() {
    let folder = CutFolder::default();
    let state = start(&folder, Persistence::AtOnce).unwrap();
    let part = |state: &State, replace: bool| {
        let mut writer = Writer::create(state, "a");
        let (pages, ranges) = writer.change(state, &mut random());
        state.persist(writer.session, "a", &ranges, true).unwrap();
        let extents: Vec<_> = writer.extents.iter().map(|memory| memory.id()).collect();
        assert_eq!(keeps_more(state, writer.session, &extents), replace);
        writer.published = pages;
        (writer, extents)
    };
    let (old, _) = part(&state, false);
    state.close(old.session);
    let (new, extents) = part(&state, true);
    state.check();
    // A cut: whichever of the two versions the first server has is whole.
    let after = start(&folder.cut(&mut random()), Persistence::AtOnce).unwrap();
    let session = client(&after, Transport::Tcp);
    let opened = after.open(session, "a").unwrap().extents;
    for version in [&old, &new] {
        let found = Writer {
            session,
            name: "a",
            extents: opened.clone(),
            published: version.published.clone(),
            attempted: None,
            overwrites: false,
        };
        assert!(found.is_whole());
    }
    // The region is bound: what only the version before has is free.
    state.publish(new.session, "a", vec![1], &extents).unwrap();
    assert_eq!(folder.files("extent-").len(), extents.len());
    assert_eq!(state.ledger.lock().extents.len(), extents.len());
    assert!(!keeps_more(&state, new.session, &extents));
    state.check();
}

#[test]
fn a_directory_of_the_format_before_is_taken_over() {
    let folder = CutFolder::default();
    let state = start(&folder, Persistence::AtOnce).unwrap();
    publish_once(&state, "a");
    drop(state);
    let mut now = Vec::new();
    folder.tamper("format", |bytes| {
        now.clone_from(bytes);
        let digit = bytes.iter().rposition(u8::is_ascii_digit).unwrap();
        bytes[digit] = b'1';
    });
    let state = start(&folder.reopen(), Persistence::AtOnce).unwrap();
    assert!(Writer::open(&state, "a").unwrap().is_whole());
    folder.tamper("format", |bytes| assert_eq!(*bytes, now));
}

#[test]
fn what_was_promised_and_accepted_outlives_a_start() {
    let epoch = |counter| Epoch { counter, writer: 1 };
    let ballot = |life, counter| Ballot {
        life,
        stamp: Stamp {
            epoch: epoch(counter),
            version: 1,
        },
        holders: vec![ServerId(1), ServerId(2)],
        removed: false,
    };
    let bind = |state: &State, session, ballot, keeps| {
        let proposal = Proposal {
            manifest: vec![1],
            extents: &[],
            ballot,
            keeps,
        };
        state.bind(session, "a", proposal).map(drop)
    };
    let folder = CutFolder::default();
    let state = start(&folder, Persistence::AtOnce).unwrap();
    let session = client(&state, Transport::Tcp);
    let (id, _) = state.claim(session, "a", false).unwrap().vote;
    bind(&state, session, Some(ballot(3, 1)), true).unwrap();
    state.promise(session, "a", epoch(5)).unwrap();
    // The promise lasts longer than the version that it was made with.
    bind(&state, session, Some(ballot(3, 5)), true).unwrap();
    state.promise(session, "a", epoch(7)).unwrap();
    let check = |state: &State, session| {
        let outdated = Err(Refusal::Outdated);
        assert_eq!(state.promise(session, "a", epoch(6)), outdated);
        assert_eq!(bind(state, session, Some(ballot(3, 6)), true), outdated);
        let other = bind(state, session, Some(ballot(4, 8)), true);
        assert_eq!(other, Err(Refusal::OtherRegion));
        assert_eq!(bind(state, session, None, false), Err(Refusal::Shared));
        let removed = state.remove(Asker::Session(session), "a", None);
        assert_eq!(removed, Err(Refusal::Shared));
    };
    check(&state, session);
    drop(state);
    let state = start(&folder.reopen(), Persistence::AtOnce).unwrap();
    let session = client(&state, Transport::Tcp);
    let claimed = state.claim(session, "a", true).unwrap();
    assert!(claimed.is_bound);
    let (same, register) = claimed.vote;
    assert_eq!(same, id);
    assert_eq!(register.promised, epoch(7));
    assert_eq!(register.accepted, Some(ballot(3, 5)));
    check(&state, session);
    // A region that one server holds does not become one of several.
    let mut alone = Writer::create(&state, "b");
    alone.publish(&state, &mut random()).unwrap();
    let proposal = Proposal {
        manifest: vec![1],
        extents: &[],
        ballot: Some(ballot(3, 1)),
        keeps: true,
    };
    let refused = state.bind(alone.session, "b", proposal).map(drop);
    assert_eq!(refused, Err(Refusal::OtherRegion));
}
