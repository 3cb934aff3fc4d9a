//! Copies of which one is out of reach while another one is damaged, or a connection is cut for a
//! moment.

use super::{
    copies::{World, group_of, members_of, raw, raw_world, raw_world_of, waiting},
    repairs::tamper_copy,
    *,
};
use crate::{
    groups::{ExtentGroup, Member},
    place::SlotSpan,
    repair::RepairTurn,
};

/// Options under which a silent server is never given up, a channel may take long to open, and
/// operations end in time.
fn patient(deadline_ms: u64) -> ClusterOptions {
    ClusterOptions {
        deadline: Duration::from_millis(deadline_ms),
        reopen_within: Duration::from_secs(20),
        ..waiting()
    }
}

/// Reads pages by an I/O queue, and fails if that takes more than 10 s.
fn read_in_time(io: &mut Queue, store: &Arc<PageStore>, pages: usize) -> Done {
    let began = Instant::now();
    let done = read_run(io, store, 0, pages);
    assert!(began.elapsed() < Duration::from_secs(10));
    done
}

#[test]
fn a_damaged_page_whose_other_copy_is_out_of_reach_is_an_error_in_time() {
    for (is_passive, is_dead) in [(false, false), (false, true), (true, false), (true, true)] {
        for (pages, damaged) in [(1, 0), (2, 0), (2, 1)] {
            let (mut world, store, mut io) = raw_world(2, patient(400), 8, 2);
            let bytes = odd_pages(4096, 0..pages);
            write_pages(&mut io, &store, 0, &bytes);
            let members = members_of(&store, 0);
            let near = usize::from(members[damaged].server);
            tamper_copy(&store, 0, members[damaged]);
            let mut io = match is_passive {
                true => passive_queue(&world.cluster),
                false => io,
            };
            world.servers[1 - near].cut();
            if is_dead {
                // What an I/O queue does that finds the server silent for too long.
                pool(&store).mark_dead(members[1 - damaged].server, false);
            }
            let done = read_in_time(&mut io, &store, pages as usize);
            let failed: Vec<_> = done.failed.iter().map(|(page, _)| *page).collect();
            assert_eq!(failed, [at(0)], "{is_passive} {is_dead} {pages}");
            let (_, error) = &done.failed[0];
            let is_typed = matches!(
                error,
                StoreError::Remote { .. } | StoreError::Corrupt { .. }
            );
            assert!(is_typed, "{error:?}");
            if is_dead {
                assert!(matches!(error, StoreError::Corrupt { .. }), "{error:?}");
                continue;
            }
            // The right copy is read as soon as its server answers.
            world.servers[1 - near].heal();
            world.wait_until_all_answer();
            if is_passive {
                io.reopen();
                wait_until("its channel is never opened", || {
                    read_in_time(&mut io, &store, 1).failed.is_empty()
                });
            }
            let done = read_in_time(&mut io, &store, pages as usize);
            assert!(done.failed.is_empty(), "{:?}", done.failed);
            assert!(done.frame.bytes == bytes);
        }
    }
}

#[test]
fn a_connection_that_breaks_and_comes_back_makes_no_copy_stale() {
    for broken in 0..2 {
        let (world, store, mut io) = raw_world(2, patient(30_000), 8, 2);
        for round in 0..4 {
            world.servers[broken].cut();
            poll(&mut io);
            world.servers[broken].heal();
            write(&mut io, &store, 0, &odd_page(4096, round)).expect("both live");
            assert_eq!(group_of(&store, 0).good_count(), 2, "{broken} {round}");
        }
        assert_eq!(store.stats().under_protected_bytes, 0);
    }
}

/// Others hear of the server, and this I/O queue has no channel to it. A passive I/O queue opens
/// none.
#[test]
fn a_write_that_is_complete_on_one_server_is_kept_though_another_channel_is_missing() {
    for is_passive in [false, true] {
        let world = World::of(2, patient(300));
        let store = raw(&world, 8, 2);
        let mut io = match is_passive {
            true => passive_queue(&world.cluster),
            false => queue(&world.cluster),
        };
        let (old, new) = (odd_page(4096, 0), odd_page(4096, 1));
        write(&mut io, &store, 0, &old).expect("both live");
        let home = usize::from(members_of(&store, 0)[0].server);
        world.servers[home].cut();
        assert_eq!(read(&mut io, &store, 0).expect("one lives"), old);
        world.cluster.health.succeeded(home);
        io.write_back(&store, at(0), new.clone().into(), 0);
        let (mut done, began) = (Vec::new(), Instant::now());
        while done.is_empty() {
            assert!(began.elapsed() < Duration::from_secs(10), "it never ends");
            world.cluster.health.succeeded(home);
            done = poll(&mut io);
        }
        assert!(done[0].failed.is_empty(), "{:?}", done[0].failed);
        assert_eq!(group_of(&store, 0).good_count(), 1);
        assert_eq!(read(&mut io, &store, 0).expect("one lives"), new);
    }
}

/// Takes an extent back on its server, behind the store's back.
fn take_back(world: &World, member: Member) {
    let session = &world.cluster.sessions()[usize::from(member.server)];
    session.release(member.id).expect("it is there");
}

#[test]
fn a_copy_that_a_server_refuses_to_read_is_made_anew() {
    let (mut world, store, mut io) = raw_world(2, patient(30_000), 8, 2);
    let bytes = odd_pages(4096, 0..8);
    write_pages(&mut io, &store, 0, &bytes);
    take_back(&world, members_of(&store, 0)[0]);
    assert!(read_pages(&mut io, &store, 0, 8) == bytes);
    assert_eq!(group_of(&store, 0).good_count(), 1, "it is read again");
    world.repair();
    assert_eq!(group_of(&store, 0).good_count(), 2);
    assert_eq!(store.stats().errors, 0);
}

#[test]
fn a_server_that_refuses_writes_misses_them_at_once() {
    for refusing in 0..2 {
        let (world, store, mut io) = raw_world(2, patient(30_000), 8, 2);
        write(&mut io, &store, 0, &odd_page(4096, 0)).expect("both live");
        take_back(&world, members_of(&store, 0)[refusing]);
        let began = Instant::now();
        write(&mut io, &store, 0, &odd_page(4096, 1)).expect("one takes it");
        assert!(began.elapsed() < Duration::from_secs(10));
        assert!(store.stats().retries <= 2, "{}", store.stats().retries);
        assert_eq!(group_of(&store, 0).good_count(), 1);
        assert!(read(&mut io, &store, 0).expect("one has it") == odd_page(4096, 1));
    }
}

#[test]
fn damage_of_a_copy_that_was_replaced_is_no_damage_of_the_new_one() {
    let (mut world, store, mut io) = raw_world(2, patient(30_000), 8, 2);
    write(&mut io, &store, 0, &odd_page(4096, 0)).expect("both live");
    let (before, place) = (group_of(&store, 0), place_of(&store, 0).0);
    let right = members_of(&store, 0)[1];
    let damaged = (1, before.changes);
    pool(&store).mark_damaged(place, damaged, right);
    assert_eq!(group_of(&store, 0).good_count(), 1);
    world.repair();
    assert_eq!(group_of(&store, 0).good_count(), 2);
    pool(&store).mark_damaged(place, damaged, right);
    assert_eq!(group_of(&store, 0).good_count(), 2);
}

#[test]
fn memory_whose_copies_are_all_lost_is_promised_to_nobody() {
    let config = |seed| lending(seed, 20 << 20);
    let world = World::new((1..=2).map(config), patient(30_000));
    let options = RemoteOptions {
        redundancy: Some(crate::Redundancy::Copies(2)),
        ..RemoteOptions::default()
    };
    let create = || PageStore::remote(&world.cluster, REGION, 8 << 20, 4096, &options);
    let first = create().expect("it fits");
    // Each server has 11 MiB left, and the first region lacks 9 MiB of them.
    for server in 0..2 {
        pool(&first).mark_dead(server, true);
    }
    let error = create().map(drop).expect_err("it does not fit");
    assert!(matches!(error, CreateError::Alloc { .. }), "{error}");
    drop(first);
    create().expect("it fits again");
}

/// Takes all that a server can lend.
fn fill_up(world: &World, server: usize) {
    let session = &world.cluster.sessions()[server];
    for bytes in [16 << 20, 4 << 20, 1 << 20, 256 << 10, 64 << 10] {
        while session.grant(bytes).is_ok() {}
    }
}

#[test]
fn a_repair_that_fails_leaves_the_stale_copy_to_be_read() {
    let config = |seed| lending(seed, 64 << 20);
    let (mut world, store, mut io) =
        raw_world_of(World::new((1..=3).map(config), patient(30_000)), 8, 2);
    let bytes = odd_pages(4096, 0..8);
    write_pages(&mut io, &store, 0, &bytes);
    let members = members_of(&store, 0);
    tamper_copy(&store, 0, members[0]);
    tamper_copy(&store, 1, members[1]);
    read(&mut io, &store, 0).expect("one copy is right");
    assert_eq!(group_of(&store, 0).good_count(), 1);
    // The copy is made on the third server, which dies while it is written.
    let (one, other) = (members[0].server, members[1].server);
    let third = (0..3).find(|it| *it != usize::from(one) && *it != usize::from(other));
    fill_up(&world, usize::from(one));
    world.servers[third.expect("there are three")].kill_after(1);
    assert_eq!(world.repairer.turn(&world.cluster), RepairTurn::Failed);
    for page in [0, 1, 0, 1] {
        let read = read(&mut io, &store, page).expect("one copy is right");
        assert!(read == odd_page(4096, page));
    }
    // The stale copy goes first where there is room for nothing else.
    world.cluster.health.failed(third.expect("there are three"));
    world.repair();
    assert_eq!(group_of(&store, 0).good_count(), 2);
}

#[test]
fn a_repair_copies_from_the_copy_that_can_be_read() {
    for refusing in 0..3 {
        let (mut world, store, mut io) = raw_world(4, patient(30_000), 8, 3);
        let bytes = odd_pages(4096, 0..8);
        write_pages(&mut io, &store, 0, &bytes);
        let members = members_of(&store, 0);
        take_back(&world, members[refusing]);
        let dead = members[(refusing + 1) % 3].server;
        world.servers[usize::from(dead)].kill();
        world.give_up(&store, dead);
        world.repair();
        assert_eq!(group_of(&store, 0).good_count(), 3);
        let last = members[(refusing + 2) % 3].server;
        world.servers[usize::from(last)].kill();
        assert!(read_pages(&mut io, &store, 0, 8) == bytes);
    }
}

/// Ends a write that took no place.
fn abandon(store: &PageStore, place: SlotPlace) {
    let bytes = 4096;
    pool(store).begin_doubt(place);
    pool(store).end_writes(place, 1);
    pool(store).abandon(&[SlotSpan { place, bytes }]);
}

/// Extents come and go, and their indices are used again, while doubts end.
#[test]
fn a_doubt_ends_in_the_extent_that_it_began_in() {
    let cluster = cluster(1);
    let store = on_demand(&cluster, 1 << 30, None);
    let pool = pool(&store);
    let begin = || {
        let place = iter::repeat_with(|| {
            let place = pool.alloc(4096, 0);
            if place.is_none() {
                pool.grow(4096).expect("the servers have room");
            }
            place
        });
        place
            .flatten()
            .next()
            .expect("the search ends with a place")
    };
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..20_000 {
                    abandon(&store, begin());
                    pool.shrink();
                }
            });
        }
    });
    assert_eq!(pool.used_bytes(), 0);
}

/// Begins a write in a group, and returns its place.
fn begin_write(store: &PageStore, group: u32) -> SlotPlace {
    let place = (0..64).find_map(|wish| {
        let place = pool(store).alloc(4096, wish).expect("there is room");
        match place.extent == group {
            true => Some(place),
            false => {
                abandon(store, place);
                None
            }
        }
    });
    place.expect("the group has room")
}

#[test]
fn a_group_that_is_written_to_holds_up_no_other_repair() {
    let mut world = World::of(3, patient(30_000));
    let store = raw(&world, 2048, 2);
    let groups = |store: &PageStore| pool(store).groups.all();
    let place = begin_write(&store, 0);
    let dead = groups(&store)[0].expect("it is there").member(1);
    let dead = dead.expect("it has two copies").server;
    world.servers[usize::from(dead)].kill();
    world.give_up(&store, dead);
    let lacking = |store: &PageStore| -> Vec<u32> {
        let lacks = |(_, group): &(u32, Option<ExtentGroup>)| {
            group.is_some_and(|group| group.lacks_copies())
        };
        let all = (0..).zip(groups(store)).filter(lacks);
        all.map(|(index, _)| index).collect()
    };
    assert!(lacking(&store).len() > 1, "the server has several groups");
    for _ in 0..8 {
        world.repairer.turn(&world.cluster);
    }
    assert_eq!(lacking(&store), [0]);
    abandon(&store, place);
    world.repair();
    assert!(lacking(&store).is_empty());
    assert!(!pool(&store).has_sealed());
}

#[test]
fn a_group_is_not_sealed_where_its_copy_has_no_place() {
    let mut world = World::of(2, patient(30_000));
    let store = raw(&world, 8, 2);
    let place = begin_write(&store, 0);
    world.servers[1].kill();
    world.give_up(&store, 1);
    for _ in 0..3 {
        world.repairer.turn(&world.cluster);
        assert!(!pool(&store).has_sealed());
    }
    abandon(&store, place);
}

#[test]
fn a_server_that_is_named_twice_counts_once_when_a_region_grows() {
    let servers = servers();
    let sessions = [0, 0, 1].map(|server: usize| session(&servers[server]));
    let cluster = Cluster::new(sessions.into(), patient(2_000));
    *cluster.repairs_started.lock() = true;
    let options = RemoteOptions {
        reserve: Reserve::OnDemand,
        redundancy: Some(crate::Redundancy::Copies(2)),
        ..RemoteOptions::default()
    };
    let store = PageStore::remote(&cluster, REGION, 1 << 20, 4096, &options).expect("two live");
    servers[1].kill();
    cluster.health.failed(2);
    let mut io = queue(&cluster);
    write(&mut io, &store, 0, &odd_page(4096, 0)).expect("one server lives");
    assert!(store.stats().under_protected_bytes > 0);
}

#[test]
fn repairs_that_fail_are_tried_again_at_growing_intervals() {
    let (mut world, store, mut io) = raw_world(3, patient(30_000), 8, 2);
    write(&mut io, &store, 0, &odd_page(4096, 0)).expect("all live");
    let members = members_of(&store, 0);
    take_back(&world, members[1]);
    let dead = members[0].server;
    world.servers[usize::from(dead)].kill();
    world.give_up(&store, dead);
    while world.repairer.turn(&world.cluster) == RepairTurn::Repaired {}
    let mut pauses = vec![world.repairer.pause()];
    for _ in 0..12 {
        assert_eq!(world.repairer.turn(&world.cluster), RepairTurn::Failed);
        pauses.push(world.repairer.pause());
    }
    assert!(
        pauses.is_sorted() && pauses[3] >= 4 * pauses[0],
        "{pauses:?}"
    );
    assert!(pauses[12] <= Duration::from_secs(2), "{pauses:?}");
    assert!(!pool(&store).has_sealed());
}

#[test]
fn a_server_that_was_given_up_gets_its_extents_back_when_it_answers() {
    let mut world = World::of(3, patient(30_000));
    let store = raw(&world, 8, 2);
    let mut io = queue(&world.cluster);
    write(&mut io, &store, 0, &odd_page(4096, 0)).expect("all live");
    let silent = usize::from(members_of(&store, 0)[0].server);
    assert!(world.granted_bytes(silent) > 0);
    world.servers[silent].cut();
    world.give_up(&store, silent as u8);
    world.repair();
    let groups = pool(&store).groups.all().into_iter().flatten();
    let is_there = |group: ExtentGroup| group.members().any(|(_, it)| it.server == silent as u8);
    assert!(!groups.into_iter().any(is_there));
    world.servers[silent].heal();
    world.wait_until_all_answer();
    world.repairer.turn(&world.cluster);
    assert_eq!(world.granted_bytes(silent), 0);
}
