//! Copies that are lost, damaged or behind: which bytes are read, and how the copies are made anew.

use super::{
    copies::{
        World, copied, group_of, impatient, impatient_within, members_of, raw, raw_world, waiting,
    },
    *,
};
use crate::groups::Member;

/// Changes a page's bytes in one copy, behind the store's back.
pub(super) fn tamper_copy(store: &PageStore, page: u64, member: Member) {
    let (place, len) = place_of(store, page);
    let extent = (member.server, member.id);
    tamper_extent(pool(store), extent, (place.offset, len), |bytes| {
        bytes[7] ^= 0x10
    });
}

/// Operations are lost, some of which take place later. A write that moves to other slots leaves
/// its first ones in doubt.
#[test]
fn nothing_lands_late_in_slots_that_are_used_again() {
    let mut lost = 0;
    for seed in 0..40 {
        let config = |server| SimConfig {
            lose_one_in: Some(8),
            // A slot is used again before what was lost lands there.
            delay_steps: 1,
            ..SimConfig::new(100 * seed + server)
        };
        let options = waiting();
        let mut world = World::new((0..3).map(config), options);
        let store = copied(&world, 128, 2, Codec::Raw, Reserve::Full);
        let mut model = vec![0; 128 * 4096];
        let cluster = &world.cluster;
        let amid = |_: &mut ChaCha8Rng| {
            (0..3).for_each(|server| cluster.health.succeeded(server));
        };
        let failed = conform_amid(cluster, &store, &mut model, seed, 400, amid);
        let stats = store.stats();
        assert_eq!(
            (failed, stats.errors, stats.corrupt),
            (0, 0, 0),
            "seed {seed}"
        );
        lost += stats.retries;
        world.repair_as_far_as_possible();
    }
    assert!(lost > 100, "{lost} operations were lost");
}

#[test]
fn bits_that_flip_in_one_copy_do_no_harm() {
    for codec in CODECS {
        let mut world = World::of(3, impatient());
        let store = copied(&world, 64, 2, codec, Reserve::Full);
        let mut io = queue(&world.cluster);
        let page_of = |page: u64| -> Vec<u8> { odd_page(512, page).repeat(8) };
        let all: Vec<u8> = (0..32).flat_map(page_of).collect();
        write_pages(&mut io, &store, 0, &all);
        // Different pages of one READ are damaged in different copies.
        for page in [3, 8, 9] {
            let home = members_of(&store, page)[0];
            tamper_copy(&store, page, home);
        }
        for page in [2, 10] {
            let other = members_of(&store, page)[1];
            tamper_copy(&store, page, other);
        }
        assert!(read_pages(&mut io, &store, 0, 32) == all, "{codec}");
        let stats = store.stats();
        assert!(stats.corrupt >= 3 && stats.errors == 0, "{stats:?}");
        // The damaged copies are not read again, and are made anew.
        assert!(stats.under_protected_bytes > 0);
        world.repair();
        let repaired = store.stats();
        assert_eq!(repaired.under_protected_bytes, 0);
        assert!(repaired.repaired_bytes > 0);
    }
}

/// The first damage makes one copy stale, and the second is in the other.
#[test]
fn a_page_whose_good_copies_are_damaged_is_read_from_a_stale_one() {
    let (mut world, store, mut io) = raw_world(2, impatient(), 8, 2);
    let pages = odd_pages(4096, 0..8);
    write_pages(&mut io, &store, 0, &pages);
    let members = members_of(&store, 0);
    tamper_copy(&store, 0, members[0]);
    tamper_copy(&store, 1, members[1]);
    for page in [0, 1, 0, 1] {
        assert_eq!(
            read(&mut io, &store, page).expect("one is right"),
            odd_page(4096, page)
        );
    }
    assert_eq!(group_of(&store, 0).good_count(), 1);
    assert_eq!(store.stats().errors, 0);
    world.repair();
    assert_eq!(
        read(&mut io, &store, 0).expect("one is right"),
        odd_page(4096, 0)
    );
}

#[test]
fn a_page_that_is_damaged_everywhere_is_an_error_that_names_the_servers() {
    let (_world, store, mut io) = raw_world(2, impatient(), 8, 2);
    write(&mut io, &store, 0, &odd_page(4096, 0)).expect("there is room");
    for member in members_of(&store, 0) {
        tamper_copy(&store, 0, member);
    }
    let error = read(&mut io, &store, 0).expect_err("it is damaged");
    assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
    let said = error.to_string();
    assert!(said.contains("sim:1") && said.contains("sim:2"), "{said}");
    assert_eq!(
        group_of(&store, 0).good_count(),
        2,
        "no copy is known to be right"
    );
}

/// The client loses its network for longer than it waits for a dead server.
#[test]
fn the_last_copy_is_not_given_up_because_its_server_is_silent() {
    let options = impatient_within(50);
    let (mut world, store, mut io) = raw_world(2, options, 8, 2);
    write(&mut io, &store, 0, &odd_page(4096, 0)).expect("there is room");
    world.servers.iter().for_each(|server| server.cut());
    read(&mut io, &store, 0).expect_err("nobody answers");
    for _ in 0..10 {
        world.repairer.turn(&world.cluster);
    }
    assert!(group_of(&store, 0).good_count() > 0);
    world.servers.iter().for_each(|server| server.heal());
    world.wait_until_all_answer();
    wait_until("it does not come back", || {
        read(&mut io, &store, 0).ok() == Some(odd_page(4096, 0))
    });
}

#[test]
fn full_survivors_go_on_with_fewer_copies_and_repair_once_there_is_room() {
    // Each server has room for its own copies, and not for those of another.
    let mut world = World::new((1..=3).map(|seed| lending(seed, 20 << 20)), impatient());
    let store = copied(&world, 256, 2, Codec::Raw, Reserve::Full);
    let mut model = vec![0; 256 * 4096];
    assert_eq!(conform(&world.cluster, &store, &mut model, 1, 300), 0);
    // Everything that is left is taken.
    let mut fillers = world.fill_up();
    world.servers[0].kill();
    assert_eq!(conform(&world.cluster, &store, &mut model, 2, 300), 0);
    let mut turn = world.repair_as_far_as_possible();
    assert!(store.stats().under_protected_bytes > 0, "{turn:?}");
    assert_eq!(conform(&world.cluster, &store, &mut model, 3, 300), 0);
    fillers.clear();
    turn = world.repair_as_far_as_possible();
    assert_eq!(store.stats().under_protected_bytes, 0, "{turn:?}");
    world.servers[1].kill();
    assert_eq!(conform(&world.cluster, &store, &mut model, 4, 300), 0);
}

#[test]
fn servers_may_die_while_a_copy_is_made() {
    for seed in 0..60 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut world = World::of(4, impatient());
        let store = raw(&world, 512, 3);
        let mut model = odd_pages(4096, 0..512);
        let mut io = queue(&world.cluster);
        for page in (0..512).step_by(64) {
            let run = &model[page as usize * 4096..][..64 * 4096];
            write_pages(&mut io, &store, page, run);
        }
        let first = random.random_range(0..4);
        world.servers[first].kill();
        read_run(&mut io, &store, 0, 512);
        let second = (first + random.random_range(1..4)) % 4;
        world.servers[second].kill_after(random.random_range(1..12));
        world.repair_as_far_as_possible();
        world.servers[second].kill();
        world.repair_as_far_as_possible();
        assert_eq!(
            conform(&world.cluster, &store, &mut model, seed, 60),
            0,
            "seed {seed}"
        );
        // Two servers are left for three copies.
        assert!(store.stats().under_protected_bytes > 0);
        let third = (0..4).find(|&server| server != first && server != second);
        world.servers[third.expect("there are four")].kill();
        assert_eq!(
            conform(&world.cluster, &store, &mut model, seed, 60),
            0,
            "seed {seed}"
        );
    }
}

/// The thread that repairs copies slowly, while the I/O queues write. There is one group, so that
/// writes would go to it if they could. Writes take long on their way where `delay_steps` are many:
/// some are under way when the repair begins.
#[test]
fn writes_during_a_repair_are_in_the_new_copy() {
    for (seed, delay_steps) in [(0, 8), (1, 8), (2, 4000), (3, 4000), (4, 4000), (5, 4000)] {
        let options = ClusterOptions {
            repair_rate: Some(8 << 20),
            ..impatient()
        };
        let config = |server| SimConfig {
            delay_steps,
            ..SimConfig::new(10 * seed + server)
        };
        let world = World::new((0..3).map(config), options);
        *world.cluster.repairs_started.lock() = false;
        let store = copied(&world, 256, 2, Codec::Raw, Reserve::OnDemand);
        let mut model = vec![0; 256 * 4096];
        let cluster = &world.cluster;
        assert_eq!(conform(cluster, &store, &mut model, seed, 300), 0);
        let page = (0..256).find(|&page| store.table.is_stored(at(page)));
        let members = members_of(&store, page.expect("some were written"));
        world.servers[usize::from(members[1].server)].kill();
        let limit = Instant::now() + Duration::from_secs(60);
        let mut rounds = 0;
        while rounds < 2 || store.stats().under_protected_bytes > 0 {
            assert!(Instant::now() < limit, "the repair never ends");
            let failed = conform(cluster, &store, &mut model, seed + rounds, 300);
            assert_eq!(failed, 0);
            rounds += 1;
        }
        assert!(store.stats().repaired_bytes > 0);
        world.servers[usize::from(members[0].server)].kill();
        let failed = conform(cluster, &store, &mut model, seed, 50);
        assert_eq!(failed, 0, "seed {seed}");
        assert_eq!(store.stats().corrupt, 0, "seed {seed}");
    }
}
