//! Servers that are added while pages come and go.

use farpage_wire::Endpoint;

use super::{
    copies::{World, copied, impatient, raw},
    drains::end_drains,
    *,
};
use crate::{AddServerError, repair::RepairTurn};

impl World {
    /// Starts a server, and adds it to the cluster.
    pub(super) fn add_server(&mut self, config: SimConfig) {
        let server = SimServer::new(config);
        let endpoint = session(&server).endpoint().clone();
        let added = (self.cluster).add_server(&endpoint, || Ok(session(&server)));
        added.expect("the server lives");
        self.servers.push(server);
    }
}

/// I/O queues are made before the server is added, and use it afterwards.
#[test]
fn an_added_server_takes_part_in_grants_and_io_queues_find_their_way_to_it() {
    for codec in CODECS {
        let mut world = World::of(1, impatient());
        let before = remote(&world.cluster, 64, 4096, codec);
        let mut io = queue(&world.cluster);
        let pages = odd_pages(4096, 0..64);
        write_pages(&mut io, &before, 0, &pages);
        world.add_server(SimConfig::new(7));
        world.add_server(SimConfig::new(8));
        assert_eq!((world.granted_bytes(1), world.granted_bytes(2)), (0, 0));
        let after: Vec<_> = (0..3)
            .map(|_| remote(&world.cluster, 4096, 4096, codec))
            .collect();
        assert!(world.granted_bytes(1) > 0 && world.granted_bytes(2) > 0);
        for store in after.iter().chain([&before]) {
            for _ in 0..3 {
                write_pages(&mut io, store, 0, &pages);
                assert!(read_pages(&mut io, store, 0, 64) == pages);
            }
        }
        assert!(world.servers[1].operations() > 0 && world.servers[2].operations() > 0);
    }
}

#[test]
fn an_io_queue_of_signal_handlers_reaches_an_added_server_once_its_ports_are_made() {
    let mut world = World::of(1, impatient());
    let mut passive = passive_queue(&world.cluster);
    let mut io = queue(&world.cluster);
    world.add_server(SimConfig::new(7));
    let store = remote(&world.cluster, 1024, 4096, Codec::Raw);
    let pages = odd_pages(4096, 0..64);
    // Successive runs fall on successive servers.
    for (first, half) in [(0, &pages[..32 * 4096]), (32, &pages[32 * 4096..])] {
        write_pages(&mut io, &store, first, half);
    }
    let is_there = |page: &u64| place_of(&store, *page).0.server == 1;
    let page = (0..64).find(is_there).expect("one of two servers");
    let error = read(&mut passive, &store, page).expect_err("it has no port there");
    assert!(
        error.may_retry() && error.to_string().contains("added just now"),
        "{error}"
    );
    assert!(passive.lacks_channels());
    passive.open_lacking();
    wait_until("the channel never opens", || {
        passive.open_lacking();
        read(&mut passive, &store, page).ok() == Some(odd_page(4096, page))
    });
    assert!(!passive.lacks_channels());
}

#[test]
fn repairs_that_lacked_a_server_use_an_added_one() {
    let mut world = World::of(2, impatient());
    let store = raw(&world, 64, 2);
    let mut model = vec![0; 64 * 4096];
    assert_eq!(conform(&world.cluster, &store, &mut model, 1, 200), 0);
    world.servers[0].kill();
    assert_eq!(conform(&world.cluster, &store, &mut model, 2, 100), 0);
    world.repair_as_far_as_possible();
    assert!(store.stats().under_protected_bytes > 0);
    world.add_server(SimConfig::new(7));
    assert_eq!(world.repair(), RepairTurn::Idle);
    assert_eq!(store.stats().under_protected_bytes, 0);
    world.servers[1].kill();
    assert_eq!(conform(&world.cluster, &store, &mut model, 3, 100), 0);
}

/// Servers are added and emptied in turn, so that at the end none of the first ones is left.
#[test]
fn a_program_moves_house_while_its_pages_come_and_go() {
    for seed in 0..20 {
        let copies = 1 + (seed % 2) as u8;
        let mut world = World::of(u64::from(copies), impatient());
        let store = match copies {
            1 => remote(&world.cluster, 96, 4096, Codec::Raw),
            _ => copied(&world, 96, copies, Codec::Raw, Reserve::OnDemand),
        };
        let mut model = vec![0; 96 * 4096];
        for round in 0..4 {
            world.add_server(SimConfig::new(100 * seed + round + 50));
            let endpoint = world.endpoint(round as usize);
            let World {
                cluster, repairer, ..
            } = &mut world;
            let cluster = &*cluster;
            std::thread::scope(|scope| {
                let drain = scope.spawn(|| cluster.drain_server(&endpoint));
                let amid = |random: &mut ChaCha8Rng| {
                    if random.random_bool(0.2) {
                        repairer.turn(cluster);
                    }
                };
                let failed = conform_amid(cluster, &store, &mut model, seed + round, 200, amid);
                assert_eq!(failed, 0);
                end_drains([drain], repairer, cluster);
            });
            world.servers[round as usize].kill();
        }
        assert_eq!(conform(&world.cluster, &store, &mut model, seed, 100), 0);
        assert_eq!(store.stats().errors, 0);
    }
}

#[test]
fn a_known_server_is_added_once_and_its_drain_ends() {
    let mut world = World::of(2, impatient());
    let endpoint = world.endpoint(0);
    let again =
        |world: &World| (world.cluster).add_server(&endpoint, || panic!("the server is known"));
    again(&world).expect("it is known");
    assert_eq!(world.cluster.sessions().len(), 2);
    world.cluster.health.set_leaving(0, true);
    again(&world).expect("it is known");
    assert!(!world.cluster.health.is_leaving(0));
    // A server that is silent may come back with all that it has.
    world.servers[0].cut();
    let is_silent = |error: &AddServerError| matches!(error, AddServerError::Silent { .. });
    match again(&world) {
        Err(error) => assert!(is_silent(&error), "{error}"),
        Ok(()) => assert!(world.cluster.sessions()[0].stat().is_ok(), "it was asked"),
    }
    world.servers[0].heal();
    for number in 2..256 {
        world.add_server(SimConfig::new(1000 + number));
    }
    let server = SimServer::new(SimConfig::new(9));
    let one_more: Endpoint = "sim:9".parse().expect("an endpoint");
    let error = (world.cluster)
        .add_server(&one_more, || Ok(session(&server)))
        .expect_err("there are as many as can be");
    assert!(matches!(error, AddServerError::TooMany), "{error}");
}

#[test]
fn nothing_else_waits_while_an_added_server_waits_for_a_request_for_memory() {
    let world = World::of(1, impatient());
    let cluster = &world.cluster;
    let store = remote(cluster, 64, 4096, Codec::Raw);
    let added = SimServer::new(SimConfig::new(7));
    let growing = pool(&store).lock_growth();
    std::thread::scope(|scope| {
        let adder = scope.spawn(|| cluster.add_session(session(&added)));
        while cluster.sessions().len() < 2 {
            std::thread::yield_now();
        }
        let asker = scope.spawn(|| cluster.granted_bytes());
        let limit = Instant::now() + Duration::from_secs(10);
        while !asker.is_finished() && Instant::now() < limit {
            std::thread::yield_now();
        }
        let is_answered = asker.is_finished();
        let waits = !adder.is_finished();
        drop(growing);
        assert!(waits && is_answered, "{waits} {is_answered}");
        let added = adder.join().expect("it does not panic");
        added.expect("there are few servers");
    });
    assert_eq!(pool(&store).servers().len(), 2);
}
