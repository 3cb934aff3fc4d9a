//! Servers that are emptied while their pages come and go.

use std::thread::{self, ScopedJoinHandle};

use super::{
    copies::{World, copied, impatient, impatient_within, members_of, waiting},
    snapshots::Child,
    *,
};
use crate::{
    DrainError, DrainReport, Redundancy,
    repair::Repairer,
    sealed::{CopyPlan, Refusals, SealedGroup},
};

impl World {
    /// Drains a server, with turns of the repairs between calls of `amid`.
    fn drain_amid(
        &mut self,
        server: usize,
        mut amid: impl FnMut(usize),
    ) -> Result<DrainReport, DrainError> {
        let endpoint = self.endpoint(server);
        let (cluster, repairer) = (&self.cluster, &mut self.repairer);
        thread::scope(|scope| {
            let drain = scope.spawn(|| cluster.drain_server(&endpoint));
            let limit = Instant::now() + Duration::from_secs(60);
            for turn in 0.. {
                if drain.is_finished() {
                    break;
                }
                assert!(Instant::now() < limit, "the drain never ends");
                repairer.turn(cluster);
                amid(turn);
            }
            drain.join().expect("it does not panic")
        })
    }

    fn drain(&mut self, server: usize) -> Result<DrainReport, DrainError> {
        self.drain_amid(server, |_| {})
    }
}

/// Waits for drains that find room, with turns of the repairs. Returns their reports.
pub(super) fn end_drains<const N: usize>(
    drains: [ScopedJoinHandle<'_, Result<DrainReport, DrainError>>; N],
    repairer: &mut Repairer,
    cluster: &Arc<Cluster>,
) -> [DrainReport; N] {
    let limit = Instant::now() + Duration::from_secs(60);
    while !drains.iter().all(|drain| drain.is_finished()) {
        assert!(Instant::now() < limit, "the drains never end");
        repairer.turn(cluster);
    }
    drains.map(|drain| {
        let report = drain.join().expect("it does not panic");
        report.expect("there is room")
    })
}

fn unnamed(
    world: &World,
    pages: u64,
    copies: u8,
    codec: Codec,
    reserve: Reserve,
) -> Arc<PageStore> {
    if copies > 1 {
        return copied(world, pages, copies, codec, reserve);
    }
    let options = RemoteOptions {
        codec: Some(codec),
        reserve,
        redundancy: Some(Redundancy::None),
        ..RemoteOptions::default()
    };
    PageStore::remote(&world.cluster, REGION, pages * 4096, 4096, &options).expect("it fits")
}

/// A drain begins at any step of a schedule of writes and fills on three I/O queues, and the
/// repairs take a turn between any two steps. Operations take long on their way, so that many are
/// under way when an extent moves.
#[test]
fn a_server_is_emptied_at_any_step_and_no_byte_changes() {
    let (mut moved, mut retries) = (0, 0);
    for seed in 0..300 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let servers = random.random_range(2..=4);
        let copies = random.random_range(1..servers.min(3)) as u8;
        let delay_steps = [2, 8, 60][seed as usize % 3];
        let config = |server| SimConfig {
            delay_steps,
            ..SimConfig::new(1000 * seed + server)
        };
        let mut world = World::new((0..servers).map(config), impatient());
        let codec = CODECS[seed as usize % CODECS.len()];
        let reserve = [Reserve::Full, Reserve::OnDemand][seed as usize / 3 % 2];
        let store = unnamed(&world, 96, copies, codec, reserve);
        let mut model = vec![0; 96 * 4096];
        let victim = random.random_range(0..servers) as usize;
        let begins = random.random_range(1..200);
        let endpoint = world.endpoint(victim);
        let World {
            cluster, repairer, ..
        } = &mut world;
        let cluster = &*cluster;
        thread::scope(|scope| {
            let (mut step, mut drain) = (0, None);
            let amid = |random: &mut ChaCha8Rng| {
                step += 1;
                if step == begins {
                    drain = Some(scope.spawn(|| cluster.drain_server(&endpoint)));
                }
                if random.random_bool(0.2) {
                    repairer.turn(cluster);
                }
            };
            assert_eq!(
                conform_amid(cluster, &store, &mut model, seed, 300, amid),
                0
            );
            let drain = drain.expect("it has begun");
            let [report] = end_drains([drain], repairer, cluster);
            moved += report.moved_bytes;
        });
        assert_eq!(world.granted_bytes(victim), 0, "seed {seed}");
        let rest = conform(&world.cluster, &store, &mut model, seed + 1000, 100);
        assert_eq!(rest, 0, "seed {seed}");
        // Nothing new is granted there, also not to new regions.
        let other = unnamed(&world, 2000, copies, Codec::Raw, Reserve::Full);
        assert_eq!(world.granted_bytes(victim), 0, "seed {seed}");
        let again = world.drain(victim).expect("it is empty");
        assert_eq!(again, DrainReport::default());
        let stats = store.stats();
        assert_eq!(
            (stats.errors, stats.corrupt, stats.draining_bytes),
            (0, 0, 0),
            "seed {seed}"
        );
        retries += stats.retries;
        drop((store, other));
        for server in 0..servers as usize {
            assert_eq!(world.granted_bytes(server), 0, "seed {seed}");
        }
    }
    assert!(moved > 10 << 20, "{moved} bytes moved");
    assert!(
        retries > 0,
        "no READ was under way when its extent went back"
    );
}

/// Reads all pages, which have their bytes. Those that are only on the server `dead` fail: one is
/// tried, since each takes until the deadline. Returns their number.
fn count_lost(io: &mut Queue, store: &Arc<PageStore>, pages: &[u8], dead: usize) -> usize {
    let mut lost = 0;
    for (page, bytes) in (0..).zip(pages.chunks(4096)) {
        let members = members_of(store, page);
        if (members.iter()).all(|it| usize::from(it.server) == dead) {
            if lost == 0 {
                let error = read(io, store, page).expect_err("its server is dead");
                assert!(matches!(error, StoreError::Remote { .. }), "{error}");
            }
            lost += 1;
            continue;
        }
        let got = read(io, store, page).expect("its server lives");
        assert!(got == bytes, "page {page} is another");
    }
    lost
}

fn written_pages(world: &World, store: &Arc<PageStore>, pages: u64) -> Vec<u8> {
    let bytes = odd_pages(4096, 0..pages);
    let mut io = queue(&world.cluster);
    for page in (0..pages).step_by(64) {
        let run = &bytes[page as usize * 4096..][..64 * 4096];
        write_pages(&mut io, store, page, run);
    }
    bytes
}

/// Extents of 1 MiB, so that a drain moves many.
fn many_extents(world: &World, copies: u8) -> (Vec<Arc<PageStore>>, Vec<Vec<u8>>) {
    (0..8)
        .map(|_| {
            let store = unnamed(world, 4096, copies, Codec::Raw, Reserve::Full);
            let bytes = written_pages(world, &store, 512);
            (store, bytes)
        })
        .unzip()
}

#[test]
fn a_server_that_dies_while_it_is_emptied_takes_only_what_had_not_moved() {
    let (mut lost, mut moved) = (0, 0);
    for seed in 0..8 {
        let copies = 1 + (seed % 2) as u8;
        let options = impatient_within(500);
        let mut world = World::new(
            (1..=3).map(|server| SimConfig::new(10 * seed + server)),
            options,
        );
        let (stores, bytes) = many_extents(&world, copies);
        let victim = world.servers[0].clone();
        victim.kill_after(1 + 25 * seed);
        let report = world.drain(0);
        victim.kill();
        world.repair_as_far_as_possible();
        let mut io = queue(&world.cluster);
        let all = stores.iter().zip(&bytes);
        let missing: usize = all
            .map(|(store, bytes)| count_lost(&mut io, store, bytes, 0))
            .sum();
        match report {
            Ok(report) => {
                moved += report.moved_bytes;
                assert_eq!(missing, 0, "seed {seed}");
            }
            Err(DrainError::Lost { left_bytes, .. }) => {
                assert!(missing > 0 && left_bytes > 0 && copies == 1, "seed {seed}");
            }
            Err(error) => panic!("seed {seed}: {error}"),
        }
        lost += missing;
    }
    assert!(
        lost > 0 && moved > 0,
        "{lost} pages lost, {moved} bytes moved"
    );
}

#[test]
fn a_target_may_die_while_a_server_is_emptied() {
    for seed in 0..8 {
        let copies = 1 + (seed % 2) as u8;
        let options = impatient_within(500);
        let configs = (1..=4).map(|server| SimConfig::new(10 * seed + server));
        let mut world = World::new(configs, options);
        let (stores, bytes) = many_extents(&world, copies);
        // A new I/O queue needs all servers but the one that was emptied.
        let mut io = queue(&world.cluster);
        let target = world.servers[1].clone();
        target.kill_after(1 + 25 * seed);
        world.drain(0).expect("two servers have room");
        target.kill();
        world.repair_as_far_as_possible();
        assert_eq!(world.granted_bytes(0), 0, "seed {seed}");
        for (store, bytes) in stores.iter().zip(&bytes) {
            let lost = count_lost(&mut io, store, bytes, 1);
            assert!(
                copies == 1 || lost == 0,
                "seed {seed}: {lost} pages are lost"
            );
        }
    }
}

#[test]
fn full_targets_are_an_error_that_says_what_is_left_and_a_later_drain_goes_on() {
    for copies in [1, 2] {
        let configs = (1..=3).map(|seed| lending(seed, 40 << 20));
        let mut world = World::new(configs, impatient());
        let store = unnamed(&world, 2048, copies, Codec::Raw, Reserve::Full);
        let bytes = written_pages(&world, &store, 2048);
        let mut io = queue(&world.cluster);
        let mut fillers = world.fill_up();
        let error = world.drain(0).expect_err("there is no room");
        let said = error.to_string();
        match error {
            DrainError::NoRoom {
                left_bytes,
                refusal,
                ..
            } => assert!(left_bytes > 0 && refusal.is_some(), "{said}"),
            _ => panic!("{said}"),
        }
        assert!(
            said.contains("sim:1") && said.contains("add a server"),
            "{said}"
        );
        assert!(store.stats().draining_bytes > 0);
        assert_eq!(count_lost(&mut io, &store, &bytes, 9), 0);
        fillers.clear();
        world.drain(0).expect("there is room now");
        assert_eq!(
            (world.granted_bytes(0), store.stats().draining_bytes),
            (0, 0)
        );
        assert_eq!(count_lost(&mut io, &store, &bytes, 9), 0);
    }
}

#[test]
fn a_server_that_nothing_lies_on_is_empty_at_once_and_an_unknown_one_is_an_error() {
    let mut world = World::of(2, impatient());
    assert_eq!(world.drain(1).expect("it is empty"), DrainReport::default());
    let store = unnamed(&world, 64, 1, Codec::Raw, Reserve::Full);
    assert_eq!(world.granted_bytes(1), 0);
    let unknown = "sim:99".parse().expect("an endpoint");
    let error = world.cluster.drain_server(&unknown).expect_err("unknown");
    let said = error.to_string();
    assert!(
        said.contains("sim:99") && said.contains("sim:1, sim:2"),
        "{said}"
    );
    // The last server cannot be emptied.
    written_pages(&world, &store, 64);
    let error = world.drain(0).expect_err("there is no other server");
    assert!(
        matches!(error, DrainError::NoRoom { refusal: None, .. }),
        "{error}"
    );
}

#[test]
fn drains_at_once_never_drain_into_each_other() {
    for copies in [1, 2] {
        let mut world = World::of(4, impatient());
        let store = unnamed(&world, 2048, copies, Codec::Raw, Reserve::Full);
        let bytes = written_pages(&world, &store, 2048);
        let mut io = queue(&world.cluster);
        let (one, other) = (world.endpoint(0), world.endpoint(1));
        let World {
            cluster, repairer, ..
        } = &mut world;
        let cluster = &*cluster;
        let reports = thread::scope(|scope| {
            let drains = [&one, &other].map(|it| scope.spawn(|| cluster.drain_server(it)));
            end_drains(drains, repairer, cluster)
        });
        // No page moved twice.
        let moved: u64 = reports.iter().map(|report| report.moved_bytes).sum();
        assert!(
            moved <= 2048 * 4096 * u64::from(copies),
            "{moved} bytes moved"
        );
        assert_eq!((world.granted_bytes(0), world.granted_bytes(1)), (0, 0));
        assert_eq!(count_lost(&mut io, &store, &bytes, 9), 0);
    }
}

#[test]
fn named_regions_stay_and_snapshots_follow() {
    let mut world = World::of(2, impatient());
    let options = RemoteOptions {
        name: Some("stays".to_owned()),
        ..RemoteOptions::default()
    };
    let named = PageStore::remote(&world.cluster, REGION, 1 << 20, 4096, &options);
    let named = named.expect("it fits");
    let store = unnamed(&world, 64, 1, Codec::Raw, Reserve::Full);
    let before = written_pages(&world, &store, 64);
    let child = Child::fork(&store, &before);
    let after: Vec<u8> = odd_pages(4096, 100..164);
    let mut io = queue(&world.cluster);
    write_pages(&mut io, &store, 0, &after);
    let report = world.drain(0).expect("the other server has room");
    assert!(
        report.named_bytes > 0 && report.moved_bytes > 0,
        "{report:?}"
    );
    assert_eq!(world.granted_bytes(0), report.named_bytes);
    assert_eq!(count_lost(&mut io, &store, &after, 9), 0);
    child.check(&mut io);
    drop(named);
}

#[test]
fn a_server_that_alone_may_grant_goes_on_until_it_is_reported_as_empty() {
    let mut world = World::of(1, impatient());
    let store = on_demand(&world.cluster, 64 << 20, None);
    written_pages(&world, &store, 64);
    let error = world.drain(0).expect_err("there is no other server");
    assert!(matches!(error, DrainError::NoRoom { .. }), "{error}");
    let before = world.granted_bytes(0);
    written_pages(&world, &store, 8192);
    assert!(world.granted_bytes(0) > before);
    drop(store);
    world.drain(0).expect("it is empty");
    let options = RemoteOptions::default();
    let refused = PageStore::remote(&world.cluster, REGION, 1 << 20, 4096, &options);
    assert!(refused.is_err(), "it was said to be empty");
    assert_eq!(world.granted_bytes(0), 0);
}

#[test]
fn a_named_region_grows_where_it_stays_and_a_new_one_is_elsewhere() {
    let mut world = World::of(1, impatient());
    let named = on_demand(&world.cluster, 64 << 20, Some("grows"));
    written_pages(&world, &named, 64);
    world.add_server(SimConfig::new(7));
    let report = world.drain(0).expect("only the named region is there");
    assert_eq!(report.named_bytes, world.granted_bytes(0));
    written_pages(&world, &named, 8192);
    let grown = world.granted_bytes(0);
    assert!(grown > report.named_bytes);
    let other = on_demand(&world.cluster, 1 << 20, Some("elsewhere"));
    written_pages(&world, &other, 64);
    assert_eq!(world.granted_bytes(0), grown);
}

#[test]
fn a_full_server_is_the_reason_for_a_lack_of_room_beside_one_that_leaves() {
    let full = lending(2, 1 << 20);
    let world = World::new([SimConfig::new(1), full], impatient());
    let store = on_demand(&world.cluster, 64 << 20, None);
    world.cluster.health.set_leaving(0, true);
    let error = pool(&store).grow(2 << 20).expect_err("there is no room");
    assert!(matches!(error, AllocError::Full { .. }), "{error}");
}

#[test]
fn an_emptied_server_that_was_silent_for_a_moment_keeps_names_again() {
    let mut world = World::of(2, impatient());
    let store = unnamed(&world, 64, 1, Codec::Raw, Reserve::Full);
    written_pages(&world, &store, 64);
    world.drain(0).expect("there is room");
    world.cluster.health.failed(0);
    assert_eq!(world.cluster.name_ports(), [1]);
    wait_until("it is never asked again", || {
        world.repairer.turn(&world.cluster);
        world.cluster.health.is_fine(0)
    });
    assert_eq!(world.cluster.name_ports(), [0, 1]);
}

#[test]
fn a_server_that_nothing_can_be_copied_from_is_suspect() {
    let mut world = World::of(2, waiting());
    let store = unnamed(&world, 64, 1, Codec::Raw, Reserve::Full);
    written_pages(&world, &store, 64);
    world.cluster.health.set_leaving(0, true);
    world.servers[0].cut();
    world.repairer.turn(&world.cluster);
    assert!(!world.cluster.health.is_fine(0) && world.cluster.health.is_fine(1));
}

#[test]
fn a_failure_that_never_ends_is_an_error_that_says_why() {
    let mut world = World::of(1, impatient());
    let store = unnamed(&world, 64, 1, Codec::Raw, Reserve::Full);
    written_pages(&world, &store, 64);
    world.add_server(SimConfig::new(7));
    // The server has lost the extent, and nothing can be read there.
    let lost = members_of(&store, 0)[0].id;
    let released = world.cluster.sessions()[0].release(lost);
    released.expect("it is there");
    let error = world.drain(0).expect_err("it cannot be copied");
    let said = error.to_string();
    match error {
        DrainError::Failed { left_bytes, .. } => assert!(left_bytes > 0, "{said}"),
        _ => panic!("{said}"),
    }
    assert!(
        said.contains("outside") || said.contains("refused") || said.contains("lease"),
        "{said}"
    );
}

#[test]
fn the_predecessor_of_a_server_at_its_address_does_not_decide_on_a_drain() {
    let mut world = World::of(2, impatient());
    let anew = SimServer::new(SimConfig::new(1));
    let added = world.cluster.add_session(session(&anew));
    added.expect("there are few servers");
    // Nothing is put on the predecessor.
    world.cluster.health.set_leaving(0, true);
    let (stores, bytes) = many_extents(&world, 1);
    let mut io = queue(&world.cluster);
    assert!(world.granted_bytes(2) > 0);
    world.cluster.health.set_leaving(0, false);
    world.servers[0].kill();
    world.cluster.health.failed(0);
    world.drain(0).expect("the other server has room");
    assert_eq!(world.granted_bytes(2), 0);
    for (store, bytes) in stores.iter().zip(&bytes) {
        assert_eq!(count_lost(&mut io, store, bytes, 9), 0);
    }
}

#[test]
fn a_drain_waits_for_a_target_that_is_silent_for_a_moment() {
    let options = waiting();
    let mut world = World::of(1, options);
    let store = unnamed(&world, 64, 1, Codec::Raw, Reserve::Full);
    let bytes = written_pages(&world, &store, 64);
    world.add_server(SimConfig::new(7));
    let target = world.servers[1].clone();
    target.cut();
    world.cluster.health.failed(1);
    let amid = |turn| {
        if turn == 20 {
            target.heal();
        }
    };
    let report = world.drain_amid(0, amid).expect("the target comes back");
    assert!(report.moved_bytes > 0);
    let mut io = queue(&world.cluster);
    assert_eq!(count_lost(&mut io, &store, &bytes, 9), 0);
}

#[test]
fn a_copy_that_was_prepared_for_another_group_at_its_index_is_given_up() {
    let mut world = World::of(1, impatient());
    let store = on_demand(&world.cluster, 64 << 20, None);
    written_pages(&world, &store, 64);
    world.add_server(SimConfig::new(7));
    let leaves = |server: usize| {
        (0..2).for_each(|it| world.cluster.health.set_leaving(it, it == server));
    };
    leaves(0);
    let pool = pool(&store).clone();
    let plan = CopyPlan::new(&pool, 0, &mut Refusals::new(), Duration::ZERO);
    let plan = plan.unwrap_or_else(|_| panic!("the other server has room"));
    assert!(world.granted_bytes(1) > 0);
    drop(store);
    assert!(pool.groups.get(0).is_none());
    // A longer extent takes the index, on the server that is to be left.
    leaves(1);
    pool.grow(32 << 20).expect("there is room");
    leaves(0);
    assert!(pool.groups.get(0).is_some());
    assert!(SealedGroup::seal(&pool, 0, plan).is_err());
    assert!(!pool.has_sealed());
    assert_eq!(world.granted_bytes(1), 0);
}

#[test]
fn an_extent_without_copies_goes_back_at_once_also_to_a_suspect_server_that_leaves() {
    let world = World::of(1, impatient());
    let store = on_demand(&world.cluster, 64 << 20, Some("closed"));
    written_pages(&world, &store, 64);
    world.cluster.health.set_leaving(0, true);
    world.cluster.health.failed(0);
    drop(store);
    assert_eq!(world.granted_bytes(0), 0);
}
