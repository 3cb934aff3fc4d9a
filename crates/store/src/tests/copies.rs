//! Regions whose pages are on several servers, some of which die, are cut off, are full, or damage
//! what they keep.

use super::*;
use crate::{
    Redundancy,
    groups::{ExtentGroup, Member, MemberState},
    repair::{RepairTurn, Repairer},
};

/// Servers, their client, and its repairs, which the test makes by hand.
pub(super) struct World {
    pub(super) servers: Vec<Arc<SimServer>>,
    pub(super) cluster: Arc<Cluster>,
    pub(super) repairer: Repairer,
}

/// Options under which a silent server is given up at once.
pub(super) fn impatient() -> ClusterOptions {
    ClusterOptions {
        deadline: Duration::from_secs(30),
        dead_after: Duration::ZERO,
        repair_rate: None,
        seal_after: Duration::ZERO,
        ..ClusterOptions::default()
    }
}

/// Options under which operations end after `deadline_ms`, besides those of [`impatient`].
pub(super) fn impatient_within(deadline_ms: u64) -> ClusterOptions {
    ClusterOptions {
        deadline: Duration::from_millis(deadline_ms),
        ..impatient()
    }
}

/// Options under which a silent server is never given up.
pub(super) fn waiting() -> ClusterOptions {
    ClusterOptions {
        dead_after: Duration::from_secs(600),
        ..impatient()
    }
}

impl World {
    pub(super) fn new(
        configs: impl IntoIterator<Item = SimConfig>,
        options: ClusterOptions,
    ) -> Self {
        let servers: Vec<_> = configs.into_iter().map(SimServer::new).collect();
        let cluster = Cluster::new(servers.iter().map(session).collect(), options);
        *cluster.repairs_started.lock() = true;
        Self {
            repairer: Repairer::new(),
            servers,
            cluster,
        }
    }

    pub(super) fn of(servers: u64, options: ClusterOptions) -> Self {
        Self::new((1..=servers).map(SimConfig::new), options)
    }

    pub(super) fn endpoint(&self, server: usize) -> Endpoint {
        self.cluster.sessions()[server].endpoint().clone()
    }

    pub(super) fn granted_bytes(&self, server: usize) -> u64 {
        let stat = self.cluster.sessions()[server].stat();
        stat.expect("the server lives").granted_bytes
    }

    /// Takes all that the servers can lend.
    pub(super) fn fill_up(&self) -> Vec<Arc<PageStore>> {
        let options = RemoteOptions::default();
        let take = |bytes| PageStore::remote(&self.cluster, REGION, bytes, 4096, &options).ok();
        let sizes = [4 << 20, 1 << 20, 256 << 10, 64 << 10];
        sizes
            .into_iter()
            .flat_map(|bytes| iter::from_fn(move || take(bytes)))
            .collect()
    }

    /// Lets a region give up the copies on a server that is suspect.
    pub(super) fn give_up(&self, store: &PageStore, server: u8) {
        self.cluster.health.failed(usize::from(server));
        pool(store).mark_dead(server, false);
    }

    /// Repairs until nothing can be done. Returns the last turn.
    pub(super) fn repair(&mut self) -> RepairTurn {
        let limit = Instant::now() + Duration::from_secs(20);
        loop {
            match self.repairer.turn(&self.cluster) {
                RepairTurn::Repaired => {}
                RepairTurn::Waits | RepairTurn::Failed if is_lacking(&self.cluster) => {
                    assert!(Instant::now() < limit, "a repair never ends");
                }
                turn => return turn,
            }
        }
    }

    /// Repairs until two turns in a row find nothing that can be done.
    pub(super) fn repair_as_far_as_possible(&mut self) -> RepairTurn {
        let mut idle = 0;
        loop {
            let turn = self.repairer.turn(&self.cluster);
            idle = (idle + 1) * u32::from(turn != RepairTurn::Repaired);
            if idle == 2 {
                return turn;
            }
        }
    }

    /// Waits until no server is suspect, and repairs nothing.
    pub(super) fn wait_until_all_answer(&mut self) {
        self.wait_until_others_answer(usize::MAX);
    }

    /// Waits until no server but `victim` is suspect, and repairs nothing.
    pub(super) fn wait_until_others_answer(&mut self, victim: usize) {
        let is_fine = |server| server == victim || self.cluster.health.is_fine(server);
        wait_until("a server is never heard of", || {
            self.repairer.look_at_servers(&self.cluster, &[]);
            (0..self.servers.len()).all(is_fine)
        });
    }
}

/// True if a copy that can be made is missing, or is on a server that is not given up yet.
pub(super) fn is_lacking(cluster: &Cluster) -> bool {
    let groups = |pool: &Arc<SlotPool>| pool.groups.all();
    let is_fine = |member: &Member| cluster.health.is_fine(usize::from(member.server));
    (cluster
        .pools_with_copies()
        .iter()
        .flat_map(groups)
        .flatten())
    .any(|group| {
        group.good().filter(|(_, member)| is_fine(member)).count() > 0
            && (group.lacks_copies() || !group.good().all(|(_, member)| is_fine(&member)))
    })
}

pub(super) fn copied(
    world: &World,
    pages: u64,
    copies: u8,
    codec: Codec,
    reserve: Reserve,
) -> Arc<PageStore> {
    let options = RemoteOptions {
        codec: Some(codec),
        reserve,
        redundancy: Some(Redundancy::Copies(copies)),
        ..RemoteOptions::default()
    };
    PageStore::remote(&world.cluster, REGION, pages * 4096, 4096, &options).expect("it fits")
}

pub(super) fn raw(world: &World, pages: u64, copies: u8) -> Arc<PageStore> {
    copied(world, pages, copies, Codec::Raw, Reserve::Full)
}

/// Returns a world with a region of raw pages, and an I/O queue.
pub(super) fn raw_world(
    servers: u64,
    options: ClusterOptions,
    pages: u64,
    copies: u8,
) -> (World, Arc<PageStore>, Queue) {
    raw_world_of(World::of(servers, options), pages, copies)
}

pub(super) fn raw_world_of(world: World, pages: u64, copies: u8) -> (World, Arc<PageStore>, Queue) {
    let store = raw(&world, pages, copies);
    let io = queue(&world.cluster);
    (world, store, io)
}

pub(super) fn group_of(store: &PageStore, page: u64) -> ExtentGroup {
    let place = place_of(store, page).0;
    pool(store).group(place).expect("its slot is live")
}

pub(super) fn members_of(store: &PageStore, page: u64) -> Vec<Member> {
    let group = group_of(store, page);
    group.members().map(|(_, member)| member).collect()
}

#[test]
fn each_page_is_on_as_many_servers_as_asked_for() {
    for copies in 2..=4 {
        let (world, store, mut io) = raw_world(4, impatient(), 64, copies);
        for page in 0..64 {
            write(&mut io, &store, page, &odd_page(4096, page)).expect("there is room");
            let mut servers: Vec<_> = (members_of(&store, page).iter())
                .map(|member| member.server)
                .collect();
            servers.sort_unstable();
            servers.dedup();
            assert_eq!(servers.len(), usize::from(copies));
        }
        let granted = world.cluster.granted_bytes();
        assert!(granted >= u64::from(copies) * 64 * 4096, "{granted}");
        drop(store);
        (0..4).for_each(|server| assert_eq!(world.granted_bytes(server), 0));
    }
}

/// A server dies at any operation, repairs go on between any two, pages are discarded, and a second
/// server dies once the copies of the first one are made again.
#[test]
fn one_server_may_die_at_any_step() {
    for seed in 0..320 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let servers = random.random_range(2..=4);
        let victim = random.random_range(0..servers);
        let dies_at = random.random_range(1..600);
        // Operations are lost instead: what misses one is as good as dead until it is repaired.
        let is_lossy = seed % 4 == 3;
        let configs = (0..servers).map(|server| SimConfig {
            die_at_op: (server == victim && !is_lossy).then_some(dies_at),
            lose_one_in: is_lossy.then_some(60),
            ..SimConfig::new(1000 * seed + server)
        });
        let options = ClusterOptions {
            // Half of the victims are given up only much later than they die.
            dead_after: Duration::from_millis(if seed % 2 == 0 { 0 } else { 20 }),
            ..impatient()
        };
        let mut world = World::new(configs, options);
        let copies = random.random_range(2..=servers.min(3)) as u8;
        let codec = CODECS[seed as usize % CODECS.len()];
        let reserve = if seed % 3 == 0 {
            Reserve::OnDemand
        } else {
            Reserve::Full
        };
        let store = copied(&world, 96, copies, codec, reserve);
        let mut model = vec![0; 96 * 4096];
        let mut failed = 0;
        let World {
            cluster, repairer, ..
        } = &mut world;
        for round in 0..3 {
            let amid = |random: &mut ChaCha8Rng| {
                if random.random_bool(0.1) {
                    repairer.turn(cluster);
                }
            };
            failed += conform_amid(cluster, &store, &mut model, seed + round, 60, amid);
            let from = random.random_range(0..90);
            store.clear(at(from).and_on(6));
            model[from as usize * 4096..][..6 * 4096].fill(0);
        }
        assert_eq!(failed, 0, "seed {seed}: {servers} servers");
        if is_lossy {
            world.wait_until_all_answer();
            world.repair_as_far_as_possible();
            continue;
        }
        // Some victims are not dead by now.
        world.servers[victim as usize].kill();
        world.cluster.health.failed(victim as usize);
        world.wait_until_others_answer(victim as usize);
        match servers > u64::from(copies) {
            true => world.repair(),
            false => world.repair_as_far_as_possible(),
        };
        let stats = store.stats();
        assert_eq!(stats.errors, 0, "seed {seed}");
        if servers > u64::from(copies) {
            assert_eq!(stats.under_protected_bytes, 0, "seed {seed}");
            let second = (victim + 1) % servers;
            world.servers[second as usize].kill();
            let failed = conform(&world.cluster, &store, &mut model, seed + 9, 60);
            assert_eq!(failed, 0, "seed {seed}: the second death");
        }
    }
}

#[test]
fn a_write_is_on_all_servers_before_its_page_is_published() {
    for seed in 0..100 {
        for survivor in 0..2 {
            let (world, store, mut io) = raw_world_of(
                World::new(
                    [SimConfig::new(seed), SimConfig::new(seed + 500)],
                    impatient(),
                ),
                8,
                2,
            );
            let frame = odd_pages(4096, 0..4);
            io.write_back(&store, at(0), frame.into(), 0);
            let mut done = Vec::new();
            // A server dies as soon as any page is published.
            while !(0..4).any(|page| store.table.is_stored(at(page))) {
                done = poll(&mut io);
            }
            world.servers[1 - survivor].kill();
            while done.is_empty() {
                done = poll(&mut io);
            }
            assert!(done[0].failed.is_empty());
            assert!(
                read_pages(&mut io, &store, 0, 4) == odd_pages(4096, 0..4),
                "seed {seed}"
            );
        }
    }
}

#[test]
fn a_request_that_waits_goes_to_the_first_server_that_answers() {
    let options = waiting();
    for writes in [false, true] {
        for answers in 0..2 {
            let (world, store, mut io) = raw_world(2, options.clone(), 8, 2);
            write(&mut io, &store, 0, &odd_page(4096, 0)).expect("there is room");
            world.servers.iter().for_each(|server| server.cut());
            match writes {
                true => io.write_back(&store, at(0), odd_page(4096, 1).into(), 0),
                false => io.fill(&store, at(0), vec![0; 4096].into(), 0),
            }
            let until = Instant::now() + Duration::from_millis(20);
            while Instant::now() < until {
                assert!(poll(&mut io).is_empty(), "nobody answers");
            }
            world.servers[answers].heal();
            let done = one(&mut io);
            assert!(done.failed.is_empty(), "{:?}", done.failed);
            assert!(done.frame.bytes == odd_page(4096, u64::from(writes)));
            let good = group_of(&store, 0).good_count();
            assert_eq!(good, if writes { 1 } else { 2 });
        }
    }
}

#[test]
fn a_server_that_is_cut_off_for_a_moment_is_not_read_before_it_has_caught_up() {
    let options = waiting();
    for cut in 0..2 {
        let (mut world, store, mut io) = raw_world(2, options.clone(), 64, 2);
        let old = odd_pages(4096, 0..64);
        write_pages(&mut io, &store, 0, &old);
        let mut model = old;
        world.servers[cut].cut();
        for page in (0..64).step_by(2) {
            let new = odd_page(4096, 1000 + page);
            write(&mut io, &store, page, &new).expect("one server lives");
            model[page as usize * 4096..][..4096].copy_from_slice(&new);
        }
        assert!(store.stats().under_protected_bytes > 0);
        world.servers[cut].heal();
        let states = || members_of(&store, 0).into_iter().map(|member| member.state);
        assert!(states().any(|state| state == MemberState::Stale));
        world.wait_until_all_answer();
        let mut other = queue(&world.cluster);
        assert!(read_pages(&mut other, &store, 0, 64) == model);
        assert_eq!(store.stats().corrupt, 0, "what missed a write was read");
        assert_eq!(world.repair(), RepairTurn::Idle);
        assert_eq!(store.stats().under_protected_bytes, 0);
        assert!(store.stats().repaired_bytes >= 64 * 4096);
        // An I/O queue that lost its channel opens another, and does not pass the server over.
        for page in (0..64).step_by(3) {
            let new = odd_page(4096, 2000 + page);
            write(&mut io, &store, page, &new).expect("both live");
            model[page as usize * 4096..][..4096].copy_from_slice(&new);
        }
        assert_eq!(store.stats().under_protected_bytes, 0);
        // Each server has everything.
        world.servers[1 - cut].kill();
        assert!(read_pages(&mut io, &store, 0, 64) == model);
    }
}

#[test]
fn pages_whose_servers_are_all_dead_are_an_error_that_names_the_servers() {
    let options = impatient_within(200);
    let (mut world, store, mut io) = raw_world(2, options, 8, 2);
    write(&mut io, &store, 0, &odd_page(4096, 0)).expect("there is room");
    world.servers.iter().for_each(|server| server.kill());
    world.repairer.turn(&world.cluster);
    let began = Instant::now();
    let error = read(&mut io, &store, 0).expect_err("nobody has it");
    assert!(began.elapsed() < Duration::from_secs(5));
    assert!(
        matches!(error, StoreError::Remote { retry: true, .. }),
        "{error:?}"
    );
    let said = error.to_string();
    assert!(said.contains("sim:"), "{said}");
    let StoreError::Remote { server, .. } = &error else {
        unreachable!("matched above")
    };
    assert!(
        server.contains("sim:1") && server.contains("sim:2"),
        "{server}"
    );
    let error = write(&mut io, &store, 0, &odd_page(4096, 1)).expect_err("nobody takes it");
    assert!(error.may_retry(), "{error}");
    assert!(
        group_of(&store, 0).good_count() > 0,
        "the last copy may come back"
    );
}

/// Two of four servers die at once: what was on both is lost, and nothing else.
#[test]
fn pages_with_a_copy_left_outlive_more_deaths_than_there_are_copies() {
    let options = impatient_within(300);
    let world = World::of(4, options);
    let store = copied(&world, 256, 2, Codec::Lz4, Reserve::Full);
    let mut io = queue(&world.cluster);
    let page_of = |page: u64| odd_page(512, page).repeat(8);
    for page in 0..256 {
        write(&mut io, &store, page, &page_of(page)).expect("there is room");
    }
    for victim in [0, 1] {
        world.servers[victim].kill();
    }
    let is_lost = |page: &u64| members_of(&store, *page).iter().all(|it| it.server < 2);
    let lost: Vec<u64> = (0..256).filter(is_lost).collect();
    assert!(lost.len() < 200, "{} pages are on both", lost.len());
    let mut failed = Vec::new();
    for page in 0..256 {
        if lost.contains(&page) && !failed.is_empty() {
            // A READ of a lost page takes the deadline.
            continue;
        }
        match read(&mut io, &store, page) {
            Ok(bytes) => assert!(bytes == page_of(page), "page {page}"),
            Err(_) => failed.push(page),
        }
    }
    assert_eq!(failed[..], lost[..lost.len().min(1)]);
    // Writes find places, whatever the place of the page was.
    for page in 0..256 {
        write(&mut io, &store, page, &page_of(page + 1)).expect("two servers live");
        assert!(read(&mut io, &store, page).expect("it was written") == page_of(page + 1));
    }
}

#[test]
fn a_snapshot_is_read_from_the_copies_that_live() {
    let (mut world, store, mut io) = raw_world(3, impatient(), 32, 2);
    let old = odd_pages(4096, 0..32);
    write_pages(&mut io, &store, 0, &old);
    let snapshot = crate::Snapshot::take(&store).expect("it is open");
    let entries: Vec<_> = (0..32)
        .map(|page| store.table.load_words(at(page)))
        .collect();
    write_pages(&mut io, &store, 0, &odd_pages(4096, 100..132));
    for victim in [0, 1] {
        world.servers[victim].kill();
        for (page, entry) in (0..).zip(&entries) {
            let done = read_copy(&mut io, &snapshot, at(page), *entry);
            assert!(done.failed.is_empty(), "{:?}", done.failed);
            assert!(done.frame.bytes == odd_page(4096, page));
        }
        world.repair();
    }
}

/// Faults of threads that serve themselves have no thread that opens channels.
#[test]
fn a_passive_queue_reads_the_other_copy_at_once() {
    for victim in 0..2 {
        let (world, store, mut io) = raw_world(2, impatient(), 8, 2);
        let mut passive = passive_queue(&world.cluster);
        passive.prepare(&store, 8);
        write_pages(&mut io, &store, 0, &odd_pages(4096, 0..8));
        world.servers[victim].kill();
        for _ in 0..3 {
            assert!(read_pages(&mut passive, &store, 0, 8) == odd_pages(4096, 0..8));
        }
        let served = store.stats().failovers;
        assert_eq!(
            served > 0,
            members_of(&store, 0)[0].server as usize == victim
        );
        // An I/O queue that is made now does not have the dead server.
        queue(&world.cluster);
    }
}

#[test]
fn a_passive_queue_reads_a_server_again_that_answers_again() {
    let options = waiting();
    let (mut world, store, mut io) = raw_world(2, options, 8, 2);
    let mut passive = passive_queue(&world.cluster);
    write(&mut io, &store, 0, &odd_page(4096, 0)).expect("there is room");
    let home = usize::from(members_of(&store, 0)[0].server);
    world.servers[home].cut();
    let mut reads_another = || {
        let before = store.stats().failovers;
        assert_eq!(
            read(&mut passive, &store, 0).expect("one lives"),
            odd_page(4096, 0)
        );
        (store.stats().failovers > before, passive.lacks_channels())
    };
    assert_eq!(
        reads_another(),
        (true, false),
        "a cut server has no channels"
    );
    assert_eq!(reads_another(), (true, false));
    world.servers[home].heal();
    world.wait_until_all_answer();
    assert_eq!(reads_another(), (true, true));
    passive.open_lacking();
    wait_until("its channel is never opened", || {
        let before = store.stats().failovers;
        let got = read(&mut passive, &store, 0).expect("both live");
        assert_eq!(got, odd_page(4096, 0));
        store.stats().failovers == before
    });
    assert!(!passive.lacks_channels());
}

#[test]
fn copies_that_cannot_be_kept_are_refused_and_take_nothing() {
    let world = World::of(2, impatient());
    let create = |options: &RemoteOptions| {
        PageStore::remote(&world.cluster, REGION, 1 << 20, 4096, options).map(drop)
    };
    let options = |copies| RemoteOptions {
        redundancy: Some(Redundancy::Copies(copies)),
        ..RemoteOptions::default()
    };
    let error = create(&options(3)).expect_err("there are two servers");
    assert!(
        matches!(
            error,
            CreateError::TooFewServers {
                copies: 3,
                servers: 2,
                ..
            }
        ),
        "{error}"
    );
    assert!(error.to_string().contains("name 1 more"), "{error}");
    // One server that is named twice is one server.
    let twice = Cluster::new(
        vec![session(&world.servers[0]), session(&world.servers[0])],
        impatient(),
    );
    let error = PageStore::remote(&twice, REGION, 1 << 20, 4096, &options(2)).map(drop);
    assert!(matches!(
        error,
        Err(CreateError::TooFewServers { servers: 1, .. })
    ));
    for copies in [0, 1, 5] {
        let error = create(&options(copies)).expect_err("no such number");
        assert!(matches!(error, CreateError::Redundancy { .. }), "{error}");
    }
    let named = RemoteOptions {
        name: Some("kept".to_owned()),
        redundancy: Some(Redundancy::Parity { data: 2, parity: 1 }),
        ..options(2)
    };
    let error = create(&named).expect_err("names have no parity");
    assert!(matches!(error, CreateError::NamedParity { .. }), "{error}");
    world.servers[1].kill();
    let error = create(&options(2)).expect_err("one of them is dead");
    assert!(error.to_string().contains("sim:2"), "{error}");
    assert_eq!(world.cluster.granted_bytes(), 0);
    assert_eq!(world.granted_bytes(0), 0);
}

#[test]
fn a_reservation_promises_room_for_every_copy() {
    let config = |seed| lending(seed, 24 << 20);
    let world = World::new((1..=3).map(config), impatient());
    // 72 MiB hold 30 MiB twice, and not 40 MiB.
    let options = RemoteOptions {
        redundancy: Some(Redundancy::Copies(2)),
        ..RemoteOptions::default()
    };
    let create = |bytes| PageStore::remote(&world.cluster, REGION, bytes, 4096, &options);
    let error = create(40 << 20).map(drop).expect_err("it does not fit");
    assert!(
        matches!(
            error,
            CreateError::Alloc {
                source: AllocError::Full { .. },
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(world.cluster.granted_bytes(), 0);
    let store = create(30 << 20).expect("it fits");
    let mut io = queue(&world.cluster);
    for page in (0..store.pages()).step_by(32) {
        let run = odd_pages(4096, page..page + 32);
        write_pages(&mut io, &store, page, &run);
    }
}
