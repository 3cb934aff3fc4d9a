//! Parity sets that are made and opened while servers leave, die, or return damaged bytes.

use super::{
    copies::{World, impatient},
    full::{Others, describe},
    parity::{SealedWorld, coded},
    *,
};
use crate::{
    groups::{ExtentGroup, MemberState},
    parity::ParitySet,
};

/// Returns the servers of the homes of a set, by position.
fn servers_of(store: &PageStore, set: &ParitySet) -> Vec<u8> {
    let home = |index: &u32| pool(store).groups.home(*index);
    (set.groups().iter().filter_map(home))
        .map(|(server, _)| server)
        .collect()
}

/// Asserts that no server has two extents of a set.
#[track_caller]
fn assert_apart(store: &PageStore, set: &ParitySet) {
    let mut servers = servers_of(store, set);
    servers.sort_unstable();
    servers.dedup();
    assert_eq!(servers.len(), set.code.extents());
}

/// Begins to open a set. Returns its number, and the set.
fn open_first(it: &SealedWorld) -> (u32, ParitySet) {
    let (number, set) = pool(&it.store).groups.sets()[0];
    assert!(pool(&it.store).open_set(number));
    (number, set)
}

#[test]
fn a_drain_while_a_set_is_opened_keeps_its_extents_on_different_servers() {
    for at in 0..5 {
        let mut it = SealedWorld::new(6, (4, 1), impatient());
        let (number, set) = open_first(&it);
        let leaves = usize::from(servers_of(&it.store, &set)[at]);
        let endpoint = it.world.endpoint(leaves);
        let drain = it.world.cluster.begin_drain(&endpoint);
        let drain = drain.expect("it is known");
        while pool(&it.store).is_on(leaves) {
            it.world.repairer.turn(&it.world.cluster);
            if let Some(set) = pool(&it.store).groups.set(number) {
                assert_apart(&it.store, &set);
            }
        }
        it.world.repairer.turn(&it.world.cluster);
        drain.wait().expect("it is empty");
        it.kill(leaves);
        it.kill((leaves + 1) % 6);
        it.assert_reads();
        assert_eq!(it.store.stats().errors, 0);
    }
}

/// One copy of a column was made when the column's home dies, and there is no room for more.
#[test]
fn a_set_that_is_not_opened_keeps_the_only_copy_of_a_column() {
    let (mut closed, mut kept_open) = (0, 0);
    for servers in [5, 6] {
        for number in 0..8 {
            let mut it = SealedWorld::new(servers, (4, 1), impatient());
            let sets = pool(&it.store).groups.sets();
            let Some(&(number, set)) = sets.get(number) else {
                continue;
            };
            pool(&it.store).open_set(number);
            let group_of = |store: &PageStore| {
                let mut columns = set.columns().iter();
                let groups = &pool(store).groups;
                columns.find_map(|&index| groups.get(index).filter(|it| it.good_count() == 2))
            };
            while group_of(&it.store).is_none() {
                it.world.repairer.turn(&it.world.cluster);
            }
            let group = group_of(&it.store).expect("it has a copy");
            let home = group.member(0).expect("it has a home").server;
            let copy = group.member(1).expect("it has a copy");
            it.kill(usize::from(home));
            it.world.give_up(&it.store, home);
            pool(&it.store).keep_set(number, &set);
            let set = pool(&it.store).groups.set(number).expect("it is there");
            let groups = pool(&it.store).groups.all();
            let has_copy = |it: &ExtentGroup| it.good().any(|(_, it)| it == copy);
            assert!(groups.iter().flatten().any(has_copy), "the copy went back");
            match set.is_opening {
                true => kept_open += 1,
                false => {
                    assert_apart(&it.store, &set);
                    closed += 1;
                }
            }
            it.assert_reads();
            assert_eq!(it.store.stats().errors, 0);
        }
    }
    assert!(closed > 0 && kept_open > 0, "{closed}, {kept_open}");
}

/// No server is left for the home, which has nothing of the set.
#[test]
fn a_set_is_opened_although_a_home_is_lost() {
    for code in [(2, 1), (4, 1), (4, 2)] {
        let servers = code.0 + code.1;
        let mut it = SealedWorld::new(u64::from(servers), code, impatient());
        let (number, set) = open_first(&it);
        let lost = servers_of(&it.store, &set)[0];
        it.kill(usize::from(lost));
        it.world.give_up(&it.store, lost);
        let limit = Instant::now() + Duration::from_secs(20);
        let is_open = |it: &SealedWorld| {
            let set = pool(&it.store).groups.set(number);
            set.is_none_or(|set| !set.is_opening)
        };
        while !is_open(&it) {
            it.world.repairer.turn(&it.world.cluster);
            assert!(Instant::now() < limit, "{code:?}: it is never opened");
        }
        for &index in set.columns() {
            let group = pool(&it.store).groups.get(index).expect("it has pages");
            assert_eq!(group.good_count(), usize::from(code.1) + 1);
        }
        it.assert_reads();
        assert_eq!(it.store.stats().errors, 0);
    }
}

/// Returns the sum of the extents of a set with one parity, as its servers return them.
fn sum_of(store: &PageStore, set: &ParitySet) -> Vec<u8> {
    let mut sum = vec![0; 64 << 10];
    for &index in set.groups() {
        let extent = pool(store).groups.home(index).expect("it is there");
        let add = |bytes: &mut [u8]| sum.iter_mut().zip(bytes).for_each(|(sum, it)| *sum ^= *it);
        read_extent(pool(store), extent, (0, 64 << 10), add);
    }
    sum
}

/// READs of holes bring wrong bytes now and then, which no page's hash shows.
#[test]
fn damage_to_holes_gets_no_parity() {
    let config = |seed| SimConfig {
        damage_one_in: Some(8),
        ..SimConfig::new(seed)
    };
    let mut made = 0;
    for seed in 0..4 {
        let mut world = World::new((0..4).map(|it| config(10 * seed + it)), impatient());
        let store = coded(&world, 512, (2, 1));
        let mut io = queue(&world.cluster);
        write_pages(&mut io, &store, 0, &odd_pages(4096, 0..512));
        for page in (0..512).step_by(5) {
            store.clear(at(page).and_on(1));
        }
        for _ in 0..300 {
            world.repairer.turn(&world.cluster);
        }
        for (number, set) in pool(&store).groups.sets() {
            made += 1;
            // READs here are damaged, too, but most are not.
            let mut sums = (0..50).map(|_| sum_of(&store, &set));
            let is_right = sums.any(|sum| sum.iter().all(|&byte| byte == 0));
            assert!(is_right, "seed {seed}: set {number} has other parity");
        }
    }
    println!("{made} sets made");
    assert!(made > 0);
}

#[test]
fn a_wish_for_room_ends_with_the_writes_that_had_it() {
    let mut it = SealedWorld::new(5, (4, 1), impatient());
    let mut page = 0;
    while !pool(&it.store).is_room_awaited() {
        // A turn would open a set.
        let new = odd_page(4096, 1000 + page);
        it.io
            .write_back(&it.store, at(page % 512), new.into(), page);
        page += 1;
        while it.io.in_flight() > 0 {
            poll(&mut it.io);
        }
    }
    wait_until("a wish never ends", || !pool(&it.store).is_room_awaited());
}

/// A home was lost while its set was opened. A server has room for what another set needs to be
/// opened, and has all that it can have of the first one.
#[test]
fn a_half_open_set_does_not_keep_others_closed() {
    let mut tried = 0;
    for first in 0..8 {
        let world = World::new((1..=6).map(|it| lending(it, 4 << 20)), impatient());
        let mut it = SealedWorld::of(world, (4, 1));
        let sets = pool(&it.store).groups.sets();
        let Some(&(number, set)) = sets.get(first) else {
            continue;
        };
        pool(&it.store).open_set(number);
        let copied = |it: &SealedWorld| {
            let mut groups = (set.columns().iter()).map(|&index| pool(&it.store).groups.get(index));
            groups.find_map(|group| group.filter(|group| group.good_count() == 2))
        };
        while copied(&it).is_none() {
            it.world.repairer.turn(&it.world.cluster);
        }
        let group = copied(&it).expect("it has a copy");
        let mut on = group.good().map(|(_, it)| it.server);
        let [lost, copy] = [(); 2].map(|()| on.next().expect("it has two"));
        // Another set, whose columns can have their copies on the server of the copy.
        let fits = |(other, set): &&(u32, ParitySet)| {
            let servers = servers_of(&it.store, set);
            *other != number && !servers.contains(&lost) && servers[4] == copy
        };
        let is_shared = servers_of(&it.store, &set).contains(&copy);
        if !is_shared || !sets.iter().any(|other| fits(&other)) {
            continue;
        }
        tried += 1;
        let others = Others::of(&it.world);
        others.take_all();
        it.kill(usize::from(lost));
        it.world.give_up(&it.store, lost);
        others.give_back(usize::from(copy));
        for page in (0..512).step_by(4) {
            it.store.clear(at(page).and_on(1));
        }
        let is_open = |it: &SealedWorld| {
            let is_gone = |(other, _): &(u32, ParitySet)| {
                *other != number && pool(&it.store).groups.set(*other).is_none()
            };
            sets.iter().any(is_gone)
        };
        let mut page = 0;
        let limit = Instant::now() + Duration::from_secs(20);
        while !is_open(&it) {
            let new = odd_page(4096, 9000 + page);
            it.io
                .write_back(&it.store, at(page % 512), new.clone().into(), page);
            while it.io.in_flight() > 0 && !is_open(&it) {
                poll(&mut it.io);
                it.world.repairer.turn(&it.world.cluster);
                assert!(
                    Instant::now() < limit,
                    "no other set than {number} is opened, {lost} is lost: {}",
                    describe(&it.store)
                );
            }
            page += 1;
        }
        let set = pool(&it.store).groups.set(number).expect("it is half open");
        assert!(set.is_opening);
        let home = (set.columns().iter()).filter_map(|&index| pool(&it.store).groups.get(index));
        let is_lost = |group: ExtentGroup| {
            (group.member(0)).is_none_or(|home| home.state == MemberState::Dead)
        };
        assert!(home.into_iter().any(is_lost));
    }
    assert!(tried > 0);
}
