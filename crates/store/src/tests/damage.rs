//! Damage to extents of parity sets, and what repairs make of it.

use std::{
    hint, ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

use super::{
    copies::impatient,
    full::{Others, reserved},
    parity::{SealedWorld, flip, home_of},
    *,
};
use crate::groups::{Member, MemberState, SetView};

fn set_of(it: &SealedWorld, page: u64) -> SetView {
    let extent = place_of(&it.store, page).0.extent;
    let view = pool(&it.store).groups.set_of(extent);
    view.expect("it has parity")
}

/// Returns two pages of one set that are in different columns, and not at the same place.
fn two_pages(it: &SealedWorld) -> [u64; 2] {
    let pages = it.sealed_pages();
    let first = pages[0];
    let offset = |page| place_of(&it.store, page).0.offset;
    let (servers, at) = (members(&set_of(it, first)), set_of(it, first).at);
    let is_other = |&&page: &&u64| {
        let view = set_of(it, page);
        members(&view) == servers && view.at != at && offset(page) != offset(first)
    };
    [
        first,
        *pages.iter().find(is_other).expect("a set has pages"),
    ]
}

fn members(view: &SetView) -> Vec<Member> {
    view.homes().collect()
}

#[test]
fn a_repair_spreads_no_damage_that_no_fill_has_found() {
    for code in [(2, 1), (4, 1), (4, 2)] {
        let mut it = SealedWorld::new(7, code, impatient());
        let [found, hidden] = two_pages(&it);
        let home = home_of(&it.store, found);
        flip(&it.store, found, home);
        flip(&it.store, hidden, home_of(&it.store, hidden));
        read(&mut it.io, &it.store, found).expect("it is decoded");
        it.world.repair();
        assert_ne!(home_of(&it.store, found), home, "{code:?}: it is made anew");
        it.assert_reads();
        it.world.repair();
        assert_eq!(it.store.stats().under_protected_bytes, 0);
        let before = it.store.stats().corrupt;
        it.assert_reads();
        let stats = it.store.stats();
        assert_eq!((stats.corrupt, stats.errors), (before, 0), "{code:?}");
    }
}

#[test]
fn a_damaged_source_is_made_anew() {
    for other in 0..5 {
        let mut it = SealedWorld::new(7, (4, 2), impatient());
        let page = it.sealed_pages()[0];
        let view = set_of(&it, page);
        let source = view.others().nth(other).expect("a set has six extents");
        flip(&it.store, page, source);
        let home = usize::from(home_of(&it.store, page).server);
        it.world.servers[home].cut();
        let right = it.model[page as usize * 4096..][..4096].to_vec();
        assert!(read(&mut it.io, &it.store, page).expect("it is decoded") == right);
        it.world.servers[home].heal();
        it.world.wait_until_all_answer();
        it.world.repair();
        assert_eq!(it.store.stats().under_protected_bytes, 0);
        // Parity and columns that no fill needs are not read: the set tells.
        let is_used = set_of(&it, page).others().any(|it| it == source);
        let before = it.store.stats();
        let home = usize::from(home_of(&it.store, page).server);
        it.world.servers[home].cut();
        assert!(read(&mut it.io, &it.store, page).expect("it is decoded") == right);
        let after = it.store.stats();
        assert_eq!(after.corrupt, before.corrupt, "{other}");
        assert_eq!(
            is_used,
            before.corrupt == 0,
            "{other}: found, and made anew"
        );
    }
}

#[test]
fn a_damaged_extent_serves_to_decode_pages_that_it_has_right() {
    let mut it = SealedWorld::new(3, (2, 1), impatient());
    let [page, other] = two_pages(&it);
    flip(&it.store, page, home_of(&it.store, page));
    read(&mut it.io, &it.store, page).expect("it is decoded");
    assert!(it.store.stats().under_protected_bytes > 0);
    it.kill(usize::from(home_of(&it.store, other).server));
    let bytes = read(&mut it.io, &it.store, other).expect("it is decoded");
    assert!(bytes == it.model[other as usize * 4096..][..4096]);
}

/// Most of what a fill brings from the extent would be damaged.
#[test]
fn a_repair_heals_damage_beside_that_which_a_fill_has_found() {
    for (code, count) in [((2, 1), 12), ((4, 1), 12), ((4, 2), 2)] {
        let mut it = SealedWorld::new(7, code, impatient());
        let mut pages = it.sealed_pages();
        let home = home_of(&it.store, pages[0]);
        pages.retain(|&page| home_of(&it.store, page) == home);
        pages.truncate(count);
        assert_eq!(pages.len(), count);
        pages.iter().for_each(|&page| flip(&it.store, page, home));
        read(&mut it.io, &it.store, pages[0]).expect("it is decoded");
        it.world.repair();
        assert_ne!(home_of(&it.store, pages[0]), home, "it is made anew");
        let before = it.store.stats().corrupt;
        it.assert_reads();
        assert_eq!(it.store.stats().corrupt, before, "{code:?}");
    }
}

/// A source is out of reach for a moment, and another is known to be damaged.
#[test]
fn right_sources_are_waited_for_although_damaged_ones_could_be_read() {
    let mut it = SealedWorld::new(6, (4, 2), impatient());
    let page = it.sealed_pages()[0];
    let view = set_of(&it, page);
    let mut others = (0..6).filter(|&at| at != view.at);
    let [damaged, away] = [(); 2].map(|()| others.next().expect("a set has six extents"));
    let source = |at| view.home(at).expect("it is there");
    flip(&it.store, page, source(damaged));
    let place = place_of(&it.store, page).0;
    pool(&it.store).mark_extent_damaged(place, Some(damaged), (view.changes, 4096));
    let home = home_of(&it.store, page).server;
    it.kill(usize::from(home));
    it.world.give_up(&it.store, home);
    let away = &it.world.servers[usize::from(source(away).server)];
    away.cut();
    it.io.fill(&it.store, at(page), vec![0; 4096].into(), page);
    for _ in 0..20 {
        assert!(poll(&mut it.io).is_empty());
    }
    away.heal();
    let done = one(&mut it.io);
    assert!(done.failed.is_empty(), "{:?}", done.failed);
    assert!(done.frame.as_ref() == &it.model[page as usize * 4096..][..4096]);
    let stats = it.store.stats();
    assert_eq!((stats.corrupt, stats.errors), (0, 0));
}

/// The set is opened on full servers, so that a column gets its copy before its damaged home is
/// made anew.
#[test]
fn opening_a_set_spreads_no_damage_that_no_fill_has_found() {
    let (world, store, io, model) = reserved((2, 1), 3);
    let mut it = SealedWorld {
        world,
        store,
        io,
        model,
    };
    let [found, hidden] = two_pages(&it);
    let others = Others::of(&it.world);
    others.take_all();
    flip(&it.store, found, home_of(&it.store, found));
    flip(&it.store, hidden, home_of(&it.store, hidden));
    read(&mut it.io, &it.store, found).expect("it is decoded");
    let column = place_of(&it.store, found).0.extent;
    let groups = &pool(&it.store).groups;
    let set = groups.get(column).and_then(|group| group.column);
    let number = set.expect("it has parity").set;
    assert!(pool(&it.store).open_set(number));
    let has_copy = |it: &SealedWorld| {
        let group = pool(&it.store).groups.get(column);
        group.is_some_and(|group| group.good_count() > 0)
    };
    let limit = Instant::now() + Duration::from_secs(20);
    while !has_copy(&it) {
        it.world.repairer.turn(&it.world.cluster);
        others.take_all();
        assert!(Instant::now() < limit, "it gets no copy");
    }
    let pages = it.sealed_pages();
    let in_column = |page: &&u64| place_of(&it.store, **page).0.extent == column;
    let pages: Vec<u64> = pages.iter().filter(in_column).copied().collect();
    let before = it.store.stats().corrupt;
    for page in pages {
        let bytes = read(&mut it.io, &it.store, page).expect("it is right");
        assert!(bytes == it.model[page as usize * 4096..][..4096]);
    }
    let stats = it.store.stats();
    assert_eq!((stats.corrupt, stats.errors), (before, 0));
}

#[test]
fn an_extent_that_its_server_refuses_to_read_is_made_anew() {
    let mut it = SealedWorld::new(7, (4, 2), impatient());
    let page = it.sealed_pages()[0];
    let view = set_of(&it, page);
    let source = view.others().next().expect("a set has six extents");
    let session = pool(&it.store).session(source.server);
    session.release(source.id).expect("the server lives");
    flip(&it.store, page, home_of(&it.store, page));
    let bytes = read(&mut it.io, &it.store, page).expect("it is decoded");
    assert!(bytes == it.model[page as usize * 4096..][..4096]);
    it.world.repair();
    assert!(!set_of(&it, page).others().any(|other| other == source));
    it.assert_reads();
    assert_eq!(it.store.stats().errors, 0);
}

/// The set is gone while a page is decoded, as may be that of a place which another process names.
#[test]
fn a_decoding_whose_set_is_gone_ends_at_once() {
    let mut it = SealedWorld::new(6, (4, 1), impatient());
    let page = it.sealed_pages()[0];
    let view = set_of(&it, page);
    let column = pool(&it.store)
        .groups
        .get(place_of(&it.store, page).0.extent);
    let set = column.and_then(|group| group.column);
    let away = view.others().next().expect("a set has five extents").server;
    flip(&it.store, page, home_of(&it.store, page));
    it.world.servers[usize::from(away)].cut();
    it.io.fill(&it.store, at(page), vec![0; 4096].into(), page);
    for _ in 0..20 {
        assert!(poll(&mut it.io).is_empty());
    }
    let number = set.expect("it has parity").set;
    pool(&it.store).groups.remove_set(number);
    it.world.servers[usize::from(away)].heal();
    let began = Instant::now();
    let done = one(&mut it.io);
    let took = began.elapsed();
    assert!(!done.failed.is_empty());
    assert!(took < it.world.cluster.deadline / 2, "{took:?}");
    // The pool is not what it was, and would not end as it should.
    static KEPT: AtomicPtr<SealedWorld> = AtomicPtr::new(ptr::null_mut());
    KEPT.store(Box::into_raw(Box::new(it)), Ordering::Relaxed);
    // A static that nobody reads would go.
    hint::black_box(&KEPT);
}

/// A damaged home is replaced while sources are waited for.
#[test]
fn a_home_that_was_replaced_meanwhile_is_not_taken_for_the_damaged_one() {
    let mut it = SealedWorld::new(7, (4, 2), impatient());
    let page = it.sealed_pages()[0];
    let (place, len) = place_of(&it.store, page);
    let right = it.model[page as usize * 4096..][..4096].to_vec();
    let view = set_of(&it, page);
    let mut servers: Vec<u8> = view.others().map(|it| it.server).collect();
    servers.truncate(2);
    servers.sort_unstable();
    flip(&it.store, page, home_of(&it.store, page));
    let sim =
        |it: &SealedWorld, number: usize| it.world.servers[usize::from(servers[number])].clone();
    (0..2).for_each(|number| sim(&it, number).cut());
    it.io.fill(&it.store, at(page), vec![0; 4096].into(), page);
    for _ in 0..20 {
        assert!(poll(&mut it.io).is_empty());
    }
    let pool = pool(&it.store).clone();
    let is_free = |server: &u8| !view.homes().any(|home| home.server == *server);
    let server = (0..7).find(is_free).expect("there is one more");
    let bytes = pool.groups.get(place.extent).expect("it is kept").bytes;
    let id = pool.grant_copy(server, bytes).expect("there is room").id;
    tamper_extent(&pool, (server, id), (place.offset, len), |bytes| {
        bytes.copy_from_slice(&right);
    });
    assert!(pool.seal(place.extent));
    pool.replace(place.extent, 0, Some((server, id)));
    pool.unseal(place.extent);
    sim(&it, 0).heal();
    let done = one(&mut it.io);
    assert!(done.failed.is_empty() && done.frame.as_ref() == right);
    let home = home_of(&it.store, page);
    assert_eq!((home.id, home.state), (id, MemberState::Good));
    sim(&it, 1).heal();
}
