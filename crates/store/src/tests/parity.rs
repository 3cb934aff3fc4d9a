//! Regions with parity: servers die, are cut off, lose requests and damage bytes while sets are
//! made, opened, read and repaired.

use super::{
    copies::{World, group_of, impatient, impatient_within, members_of, waiting},
    *,
};
use crate::{Redundancy, groups::Member, parity::ParityCode, repair::RepairTurn};

pub(super) fn options(data: u8, parity: u8, reserve: Reserve) -> RemoteOptions {
    RemoteOptions {
        reserve,
        redundancy: Some(Redundancy::Parity { data, parity }),
        ..RemoteOptions::default()
    }
}

pub(super) fn coded(world: &World, pages: u64, (data, parity): (u8, u8)) -> Arc<PageStore> {
    let options = options(data, parity, Reserve::OnDemand);
    PageStore::remote(&world.cluster, REGION, pages * 4096, 4096, &options).expect("it fits")
}

/// Returns the share of the used bytes that has parity.
pub(super) fn sealed_part(store: &PageStore) -> f64 {
    store.stats().sealed_bytes as f64 / pool(store).granted_bytes() as f64
}

/// Returns the home of a page in a set.
pub(super) fn home_of(store: &PageStore, page: u64) -> Member {
    let place = place_of(store, page).0;
    let group = pool(store).group(place).expect("its slot is live");
    assert!(group.column.is_some(), "page {page} has no parity");
    group.member(0).expect("a column has a home")
}

/// A world whose pages have parity, their bytes, and an I/O queue.
pub(super) struct SealedWorld {
    pub(super) world: World,
    pub(super) store: Arc<PageStore>,
    pub(super) io: Queue,
    pub(super) model: Vec<u8>,
}

impl SealedWorld {
    pub(super) fn new(servers: u64, code: (u8, u8), options: ClusterOptions) -> Self {
        Self::of(World::of(servers, options), code)
    }

    pub(super) fn of(mut world: World, code: (u8, u8)) -> Self {
        let store = coded(&world, 512, code);
        let mut io = queue(&world.cluster);
        let model = odd_pages(4096, 0..512);
        for page in (0..512).step_by(16) {
            let run = &model[page as usize * 4096..][..16 * 4096];
            write_pages(&mut io, &store, page, run);
        }
        world.repair();
        assert!(sealed_part(&store) > 0.5, "{:?}", store.stats());
        Self {
            world,
            store,
            io,
            model,
        }
    }

    #[track_caller]
    pub(super) fn assert_reads(&mut self) {
        for page in (0..self.store.pages()).step_by(8) {
            let read = read_pages(&mut self.io, &self.store, page, 8);
            let right = &self.model[page as usize * 4096..][..8 * 4096];
            assert!(read == right, "pages from {page} on are others");
        }
    }

    /// Returns the pages that have parity.
    pub(super) fn sealed_pages(&self) -> Vec<u64> {
        let is_sealed = |page: &u64| {
            let place = place_of(&self.store, *page).0;
            let group = pool(&self.store).group(place);
            group.is_some_and(|group| group.column.is_some())
        };
        (0..self.store.pages()).filter(is_sealed).collect()
    }

    /// Writes a page while repairs go on.
    fn write_amid_repairs(&mut self, page: u64, bytes: Vec<u8>) {
        self.model[page as usize * 4096..][..4096].copy_from_slice(&bytes);
        self.io
            .write_back(&self.store, at(page), bytes.into(), page);
        let limit = Instant::now() + Duration::from_secs(20);
        while self.io.in_flight() > 0 {
            poll(&mut self.io)
                .iter()
                .for_each(|done| assert!(done.failed.is_empty()));
            self.world.repairer.turn(&self.world.cluster);
            assert!(Instant::now() < limit, "a write never ends");
        }
    }

    pub(super) fn kill(&self, server: usize) {
        self.world.servers[server].kill();
    }
}

#[test]
fn full_extents_get_parity_and_give_their_copies_back() {
    for code in [(2, 1), (4, 1), (8, 1), (4, 2), (8, 2)] {
        let servers = u64::from(code.0 + code.1);
        let mut it = SealedWorld::new(servers, code, impatient());
        let stats = it.store.stats();
        let ParityCode { data, parity } = ParityCode {
            data: code.0,
            parity: code.1,
        };
        assert_eq!(
            stats.parity_bytes * u64::from(data),
            stats.sealed_bytes * u64::from(parity)
        );
        let granted: u64 = (0..it.world.servers.len())
            .map(|server| it.world.granted_bytes(server))
            .sum();
        assert_eq!(granted, pool(&it.store).memory_bytes());
        let before = it.store.stats();
        it.assert_reads();
        let after = it.store.stats();
        assert_eq!(after.bytes_read - before.bytes_read, 512 * 4096);
        assert_eq!((after.failovers, after.corrupt, after.retries), (0, 0, 0));
        // Homes and parity of a set are on different servers.
        for (_, set) in pool(&it.store).groups.sets() {
            let home = |index: &u32| pool(&it.store).groups.home(*index).expect("it is there").0;
            let mut on: Vec<u8> = set.groups().iter().map(home).collect();
            on.sort_unstable();
            on.dedup();
            assert_eq!(on.len(), usize::from(data + parity));
        }
        drop(it.store);
        it.world.repair();
        assert_eq!(it.world.cluster.granted_bytes(), 0);
    }
}

#[test]
fn pages_with_parity_outlive_as_many_deaths_as_there_are_parities() {
    for (code, seed) in [
        ((2, 1), 0),
        ((4, 1), 1),
        ((4, 2), 2),
        ((4, 2), 3),
        ((3, 2), 4),
    ] {
        let servers = usize::from(code.0 + code.1) + 1;
        for first in 0..servers {
            let mut it = SealedWorld::new(servers as u64, code, impatient());
            it.kill(first);
            let second = (first + 1 + seed % (servers - 1)) % servers;
            if code.1 == 2 {
                it.kill(second);
            }
            it.assert_reads();
            assert!(it.store.stats().failovers > 0);
            assert_eq!(it.store.stats().errors, 0);
            // The lost extents are made again, where there are servers for them.
            it.world.repair_as_far_as_possible();
            it.assert_reads();
            if code.1 == 1 {
                assert_eq!(it.store.stats().under_protected_bytes, 0);
                it.kill((first + 1) % servers);
                it.assert_reads();
            }
        }
    }
}

/// A server is cut off: READs do not wait for it.
#[test]
fn a_silent_server_is_decoded_around_at_once() {
    let mut it = SealedWorld::new(5, (4, 1), waiting());
    it.world.servers[0].cut();
    it.assert_reads();
    assert!(it.store.stats().failovers > 0);
    it.world.servers[0].heal();
    it.world.wait_until_all_answer();
    let mut io = queue(&it.world.cluster);
    std::mem::swap(&mut io, &mut it.io);
    let before = it.store.stats();
    it.assert_reads();
    assert_eq!(it.store.stats().failovers, before.failovers);
}

#[test]
fn more_deaths_than_parities_are_an_error_that_names_the_servers() {
    let mut it = SealedWorld::new(3, (2, 1), impatient_within(200));
    let pages = it.sealed_pages();
    let page = pages[0];
    let home = usize::from(home_of(&it.store, page).server);
    it.kill(home);
    it.kill((home + 1) % 3);
    it.world.repair_as_far_as_possible();
    let began = Instant::now();
    let error = read(&mut it.io, &it.store, page).expect_err("it is lost");
    assert!(began.elapsed() < Duration::from_secs(5));
    let StoreError::Remote { server, .. } = &error else {
        panic!("{error:?}")
    };
    for number in 1..=3 {
        assert!(server.contains(&format!("sim:{number}")), "{server}");
    }
}

#[test]
fn a_damaged_column_is_decoded_and_made_anew() {
    for code in [(4, 1), (4, 2)] {
        let mut it = SealedWorld::new(7, code, impatient());
        let pages = it.sealed_pages();
        let page = pages[pages.len() / 2];
        let home = home_of(&it.store, page);
        let (place, len) = place_of(&it.store, page);
        let change = |bytes: &mut [u8]| bytes[9] ^= 4;
        tamper_extent(
            pool(&it.store),
            (home.server, home.id),
            (place.offset, len),
            change,
        );
        it.assert_reads();
        let stats = it.store.stats();
        assert!(stats.corrupt >= 1 && stats.errors == 0, "{stats:?}");
        assert!(stats.under_protected_bytes > 0);
        it.world.repair();
        assert_eq!(it.store.stats().under_protected_bytes, 0);
        let corrupt = it.store.stats().corrupt;
        it.assert_reads();
        assert_eq!(it.store.stats().corrupt, corrupt, "it was made anew");
    }
}

/// One column is lost, and a source of its decoding is damaged: with two parities there is another.
#[test]
fn a_damaged_source_is_left_out() {
    let mut it = SealedWorld::new(6, (4, 2), impatient());
    let page = it.sealed_pages()[0];
    let (place, len) = place_of(&it.store, page);
    let view = pool(&it.store)
        .groups
        .set_of(place.extent)
        .expect("it has parity");
    for other in 0..6 {
        if other == view.at {
            continue;
        }
        let source = view.home(other).expect("it is there");
        let change = |bytes: &mut [u8]| bytes[9] ^= 4;
        let extent = (source.server, source.id);
        tamper_extent(pool(&it.store), extent, (place.offset, len), change);
        let home = view.home(view.at).expect("it is there");
        it.world.servers[usize::from(home.server)].cut();
        let bytes = read(&mut it.io, &it.store, page).expect("it is decoded");
        assert!(bytes == it.model[page as usize * 4096..][..4096]);
        it.world.servers[usize::from(home.server)].heal();
        tamper_extent(pool(&it.store), extent, (place.offset, len), change);
    }
}

/// Changes a byte of a page in one of its copies, and back again.
pub(super) fn flip(store: &PageStore, page: u64, member: Member) {
    let (place, len) = place_of(store, page);
    let extent = (member.server, member.id);
    let change = |bytes: &mut [u8]| bytes[9] ^= 4;
    tamper_extent(pool(store), extent, (place.offset, len), change);
}

#[test]
fn copies_that_differ_get_no_parity() {
    let mut world = World::of(5, impatient());
    let store = coded(&world, 512, (4, 1));
    let mut io = queue(&world.cluster);
    let model = odd_pages(4096, 0..512);
    write_pages(&mut io, &store, 0, &model);
    let damaged = [7, 100, 333].map(|page| (page, members_of(&store, page)[page as usize % 2]));
    damaged
        .iter()
        .for_each(|&(page, member)| flip(&store, page, member));
    world.repair();
    assert!(store.stats().sealed_bytes > 0);
    assert!(store.stats().corrupt >= 1);
    for (page, member) in damaged {
        let group = group_of(&store, page);
        assert!(group.column.is_none(), "page {page}");
        assert!(group.members().any(|(_, it)| it == member));
    }
    assert!(read_pages(&mut io, &store, 0, 512) == model);
    // Damage that a fill found is copied again. Damage in a copy that no page is read from is
    // known, but not in which copy it is.
    world.repair();
    assert!(group_of(&store, 7).column.is_none());
    assert_eq!(store.stats().under_protected_bytes, 0);
    assert!(read_pages(&mut io, &store, 0, 512) == model);
    assert_eq!(store.stats().errors, 0);
}

/// The parity is the only other source of the damaged bytes.
#[test]
fn a_set_with_damage_keeps_its_parity() {
    let mut it = SealedWorld::new(5, (4, 1), impatient());
    let pages = it.sealed_pages();
    let page = pages[0];
    flip(&it.store, page, home_of(&it.store, page));
    let home = home_of(&it.store, page);
    // Everything is written again, but for the damaged page.
    for other in (0..512).filter(|&other| other != page) {
        let new = odd_page(4096, 5000 + other);
        it.write_amid_repairs(other, new);
    }
    assert_eq!(home_of(&it.store, page), home);
    it.assert_reads();
    let stats = it.store.stats();
    assert!(stats.corrupt > 0 && stats.errors == 0, "{stats:?}");
}

/// One server has the right bytes, and returns wrong ones.
#[test]
fn a_server_that_returns_damaged_bytes_gets_no_parity() {
    let config = |server| SimConfig {
        damage_one_in: (server == 3).then_some(1),
        ..SimConfig::new(server)
    };
    let mut world = World::new((0..5).map(config), impatient());
    let store = coded(&world, 512, (2, 1));
    let mut io = queue(&world.cluster);
    let model = odd_pages(4096, 0..512);
    write_pages(&mut io, &store, 0, &model);
    for _ in 0..200 {
        world.repairer.turn(&world.cluster);
    }
    let sets = pool(&store).groups.sets();
    assert!(!sets.is_empty(), "other servers keep what they get");
    for (_, set) in sets {
        for &index in set.groups() {
            let home = pool(&store).groups.home(index);
            assert_ne!(home.expect("it is there").0, 3);
        }
    }
    assert!(store.stats().corrupt > 0);
}

/// A region was promised its room, others took all that was given back since, and every page is
/// written again and again. There are `extra` servers beyond those that a set needs.
fn assert_write_backs_find_room(code: (u8, u8), lent: u64, extra: u64) {
    let servers = u64::from(code.0 + code.1) + extra;
    let mut world = World::new((1..=servers).map(|it| lending(it, lent)), impatient());
    let full = options(code.0, code.1, Reserve::Full);
    let store = PageStore::remote(&world.cluster, REGION, 512 * 4096, 4096, &full);
    let store = store.expect("it fits");
    let mut io = queue(&world.cluster);
    let model = odd_pages(4096, 0..512);
    write_pages(&mut io, &store, 0, &model);
    world.repair();
    assert!(store.stats().sealed_bytes > 0);
    let _taken = world.fill_up();
    let mut it = SealedWorld {
        world,
        store,
        io,
        model,
    };
    let mut random = ChaCha8Rng::seed_from_u64(3);
    for number in 0..1200 {
        let page = random.random_range(0..512u64);
        it.write_amid_repairs(page, odd_page(4096, 5000 + number));
    }
    it.assert_reads();
    assert_eq!(it.store.stats().errors, 0);
    assert_eq!(it.store.stats().under_protected_bytes, 0);
    it.kill(1);
    it.assert_reads();
}

#[test]
fn a_write_back_of_a_reserved_region_finds_room_when_all_servers_are_full() {
    for extra in [0, 2] {
        assert_write_backs_find_room((4, 1), 4 << 20, extra);
        assert_write_backs_find_room((2, 2), 8 << 20, extra);
    }
}

/// Columns and parity extents leave a server like any others.
#[test]
fn a_server_with_columns_and_parity_is_emptied() {
    for victim in 0..6 {
        let mut it = SealedWorld::new(6, (4, 1), impatient());
        let sealed = it.store.stats().sealed_bytes;
        let endpoint = it.world.endpoint(victim);
        let drain = it
            .world
            .cluster
            .begin_drain(&endpoint)
            .expect("it is known");
        while pool(&it.store).is_on(victim) {
            it.world.repairer.turn(&it.world.cluster);
        }
        it.world.repairer.turn(&it.world.cluster);
        drain.wait().expect("it is empty");
        assert_eq!(it.world.granted_bytes(victim), 0);
        it.kill(victim);
        it.assert_reads();
        assert_eq!(it.store.stats().failovers, 0);
        assert!(it.store.stats().sealed_bytes >= sealed);
        // All extents of a set are on different servers still.
        let next = (victim + 1) % 6;
        it.kill(next);
        it.assert_reads();
        assert_eq!(it.store.stats().errors, 0);
    }
}

#[test]
fn pages_keep_copies_while_there_are_too_few_servers_for_parity() {
    let mut world = World::of(3, impatient());
    let store = coded(&world, 512, (4, 1));
    let mut io = queue(&world.cluster);
    let model = odd_pages(4096, 0..512);
    write_pages(&mut io, &store, 0, &model);
    world.repair();
    let stats = store.stats();
    assert_eq!((stats.sealed_bytes, stats.under_protected_bytes), (0, 0));
    world.servers[1].kill();
    assert!(read_pages(&mut io, &store, 0, 512) == model);
    let two = World::of(2, impatient());
    let many = options(8, 2, Reserve::OnDemand);
    let error = PageStore::remote(&two.cluster, REGION, 1 << 20, 4096, &many).map(drop);
    let error = error.expect_err("there are two servers");
    assert!(
        matches!(error, CreateError::TooFewServers { copies: 3, .. }),
        "{error}"
    );
}

/// Everything at once: writes, discards, sets that are made and opened, reads, repairs, late and
/// lost requests, and as many deaths as the code outlives.
#[test]
fn pages_with_parity_survive_any_schedule() {
    let seeds = std::env::var("FARPAGE_PARITY_SEEDS").map_or(200, |it| it.parse().expect("number"));
    let (mut sealed, mut opened, mut decoded, mut drained) = (0, 0, 0, 0);
    let first = std::env::var("FARPAGE_PARITY_FIRST").map_or(0, |it| it.parse().expect("number"));
    for seed in first..first + seeds {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let (data, parity) = [(2, 1), (3, 1), (2, 2), (4, 1)][random.random_range(0..4)];
        let servers = u64::from(data + parity) + random.random_range(0..=1);
        let is_lossy = seed % 4 == 3;
        let mut victims: Vec<u64> = (0..u64::from(parity))
            .map(|_| random.random_range(0..servers))
            .collect();
        victims.dedup();
        let configs = (0..servers).map(|server| SimConfig {
            die_at_op: (victims.contains(&server) && !is_lossy)
                .then(|| random.random_range(1..6000)),
            lose_one_in: is_lossy.then_some(60),
            ..SimConfig::new(1000 * seed + server)
        });
        let configs: Vec<_> = configs.collect();
        let options_of = ClusterOptions {
            dead_after: Duration::from_millis(if seed % 2 == 0 { 0 } else { 20 }),
            ..impatient()
        };
        let mut world = World::new(configs, options_of);
        let codec = CODECS[seed as usize % CODECS.len()];
        let reserve = [Reserve::Full, Reserve::OnDemand][seed as usize / 5 % 2];
        let options = RemoteOptions {
            codec: Some(codec),
            ..options(data, parity, reserve)
        };
        let store = PageStore::remote(&world.cluster, REGION, 192 * 4096, 4096, &options);
        let store = store.expect("it fits");
        let mut model = vec![0; 192 * 4096];
        let (mut failed, mut is_drained) = (0, is_lossy);
        for round in 0..4 {
            let World {
                cluster, repairer, ..
            } = &mut world;
            let mut was_sealed = store.stats().sealed_bytes;
            let amid = |random: &mut ChaCha8Rng| {
                if random.random_bool(0.5) {
                    let sets = pool(&store).groups.sets();
                    if !is_drained && sets.iter().any(|(_, set)| set.is_opening) {
                        let leaves = random.random_range(0..cluster.sessions().len());
                        let endpoint = cluster.sessions()[leaves].endpoint().clone();
                        // A server that has died is refused.
                        is_drained = cluster.begin_drain(&endpoint).is_ok();
                        drained += u64::from(is_drained);
                    }
                    repairer.turn(cluster);
                    let now = store.stats().sealed_bytes;
                    sealed += u64::from(now > was_sealed);
                    opened += u64::from(now < was_sealed);
                    was_sealed = now;
                }
            };
            failed += conform_amid(cluster, &store, &mut model, seed + round, 120, amid);
            if round % 2 == 0 && !is_lossy {
                world.repair_as_far_as_possible();
            }
            let from = random.random_range(0..150);
            store.clear(at(from).and_on(40));
            model[from as usize * 4096..][..40 * 4096].fill(0);
        }
        let stats = store.stats();
        assert_eq!(
            (failed, stats.errors),
            (0, 0),
            "seed {seed}: {data}+{parity}"
        );
        let differing = pool(&store).differing();
        assert_eq!(
            stats.corrupt, 0,
            "seed {seed}: {data}+{parity}, {differing} differing"
        );
        decoded += stats.failovers;
    }
    println!("{sealed} times sealed, {opened} times opened, {drained} drains, {decoded} failovers");
    assert!(sealed > seeds / 4 && opened > 0 && decoded > seeds);
}

/// Returns the granted bytes for each byte of a region.
fn memory_part(store: &PageStore) -> f64 {
    pool(store).memory_bytes() as f64 / store.bytes() as f64
}

#[test]
fn remote_memory_stays_within_bounds_when_pages_are_written_again() {
    for (reserve, rounds) in [(Reserve::Full, 10), (Reserve::OnDemand, 1)] {
        let mut world = World::of(5, impatient());
        let pages = 96 << 8;
        let options = options(4, 1, reserve);
        let store = PageStore::remote(&world.cluster, REGION, pages * 4096, 4096, &options);
        let store = store.expect("it fits");
        let mut io = queue(&world.cluster);
        for page in (0..pages).step_by(64) {
            write_pages(&mut io, &store, page, &odd_pages(4096, page..page + 64));
        }
        world.repair();
        let in_order = memory_part(&store);
        assert!(
            in_order <= 1.3,
            "{reserve:?}: {in_order:.2} after writing in order"
        );
        let mut random = ChaCha8Rng::seed_from_u64(1);
        let mut most = in_order;
        for number in 0..rounds * pages / 8 {
            let page = random.random_range(0..pages / 8) * 8;
            let from = 100_000 + 8 * number;
            let new = odd_pages(4096, from..from + 8);
            io.write_back(&store, at(page), new.into(), page);
            while io.in_flight() > 0 {
                poll(&mut io)
                    .iter()
                    .for_each(|done| assert!(done.failed.is_empty()));
                if pool(&store).is_room_awaited() {
                    world.repairer.turn(&world.cluster);
                    most = most.max(memory_part(&store));
                }
            }
        }
        world.repair();
        let rewritten = memory_part(&store);
        println!(
            "{reserve:?}: {in_order:.2} in order, {rewritten:.2} rewritten, {most:.2} at most"
        );
        assert!(
            rewritten <= 1.6,
            "{reserve:?}: {rewritten:.2} after {rounds} rounds"
        );
    }
}

/// Handlers of threads that serve themselves open no channels.
#[test]
fn a_passive_queue_decodes_at_once() {
    for codec in [Codec::Raw, Codec::Lz4] {
        let mut world = World::of(5, impatient());
        let options = RemoteOptions {
            codec: Some(codec),
            ..options(4, 1, Reserve::OnDemand)
        };
        let store = PageStore::remote(&world.cluster, REGION, 512 * 4096, 4096, &options);
        let store = store.expect("there is no reservation");
        let mut io = queue(&world.cluster);
        let mut passive = passive_queue(&world.cluster);
        passive.prepare(&store, 8);
        let page_of = |page: u64| odd_page(512, page).repeat(8);
        let model: Vec<u8> = (0..512).flat_map(page_of).collect();
        write_pages(&mut io, &store, 0, &model);
        world.repair();
        assert!(sealed_part(&store) > 0.5);
        world.servers[2].kill();
        for page in (0..512).step_by(8) {
            let read = read_pages(&mut passive, &store, page, 8);
            assert!(read == model[page as usize * 4096..][..8 * 4096], "{codec}");
        }
        assert!(store.stats().failovers > 0);
    }
}

#[test]
fn a_set_without_pages_goes_back() {
    let mut it = SealedWorld::new(5, (4, 1), impatient());
    it.store.clear(at(0).and_on(512));
    it.world.repair();
    assert_eq!(it.store.stats().sealed_bytes, 0);
    assert_eq!(it.store.stats().parity_bytes, 0);
    let second = odd_pages(4096, 600..1112);
    write_pages(&mut it.io, &it.store, 0, &second);
    it.model = second;
    it.world.repair();
    it.assert_reads();
}

#[test]
fn a_set_is_opened_when_a_write_finds_no_room() {
    let mut it = SealedWorld::new(5, (4, 1), impatient());
    let mut random = ChaCha8Rng::seed_from_u64(5);
    for round in 0..10 {
        for _ in 0..512 {
            let page = random.random_range(0..512u64);
            let new = odd_page(4096, 1000 * (round + 1) + page);
            it.io
                .write_back(&it.store, at(page), new.clone().into(), page);
            let limit = Instant::now() + Duration::from_secs(20);
            while it.io.in_flight() > 0 {
                poll(&mut it.io)
                    .iter()
                    .for_each(|done| assert!(done.failed.is_empty()));
                it.world.repairer.turn(&it.world.cluster);
                assert!(Instant::now() < limit, "a write never ends");
            }
            it.model[page as usize * 4096..][..4096].copy_from_slice(&new);
        }
        assert_eq!(it.world.repair(), RepairTurn::Idle);
        let part = pool(&it.store).memory_bytes() as f64 / (512.0 * 4096.0);
        println!(
            "round {round}: {part:.2} of the size, {:?}",
            it.store.stats().sealed_bytes
        );
        it.assert_reads();
    }
}
