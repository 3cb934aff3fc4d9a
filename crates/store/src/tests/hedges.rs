//! Servers that fall silent, or are slow, with their connections open. Deadlines are far longer
//! than any of these tests may take. Times are those of the I/O queue, in which a busy machine's
//! pauses do not count.

use farpage_fabric::regmem::{RegPool, RegPoolOptions};

use super::{
    copies::{World, group_of, members_of, raw, raw_world, waiting},
    parity::{SealedWorld, home_of},
    *,
};

/// Upper bound of the time until requests end that a silent server keeps waiting: enough for a
/// connection that is given up after 250 ms, and for 100 ms in which it may open again.
const SOON: Duration = Duration::from_millis(500);

/// Returns the server that a page is read from first.
fn first_of(store: &PageStore, page: u64) -> usize {
    usize::from(members_of(store, page)[0].server)
}

/// Asserts that little time has passed since `began`.
fn assert_soon(io: &Queue, began: Instant) {
    let took = io.now().saturating_duration_since(began);
    assert!(took < SOON, "{took:?}");
}

/// Reads a page, which must come soon.
fn read_soon(io: &mut Queue, store: &Arc<PageStore>, page: u64) -> Vec<u8> {
    let began = io.now();
    let bytes = read(io, store, page).expect("another copy is there");
    assert_soon(io, began);
    bytes
}

/// Polls until `is_met`.
fn poll_until(io: &mut Queue, missing: &str, is_met: impl Fn() -> bool) {
    wait_until(missing, || {
        assert!(poll(io).is_empty(), "nothing ends meanwhile");
        is_met()
    });
}

/// Polls for a while, in which nothing ends.
fn poll_for(io: &mut Queue, time: Duration) {
    let until = Instant::now() + time;
    while Instant::now() < until {
        assert!(poll(io).is_empty(), "nothing ends meanwhile");
    }
}

#[test]
fn a_page_of_a_silent_server_is_read_from_another_copy() {
    for codec in [Codec::Raw, Codec::Lz4] {
        for is_passive in [false, true] {
            let world = World::of(2, waiting());
            let store = copies::copied(&world, 8, 2, codec, Reserve::Full);
            let mut io = queue(&world.cluster);
            let page: Vec<u8> = (0..4096).map(|i| (i / 7) as u8).collect();
            write(&mut io, &store, 0, &page).expect("both live");
            if is_passive {
                io = passive_queue(&world.cluster);
                io.prepare(&store, 1);
                assert!(read_soon(&mut io, &store, 0) == page);
            }
            let silent = first_of(&store, 0);
            let acquired = world.cluster.registered.stats().acquisitions;
            world.servers[silent].stop();
            assert!(read_soon(&mut io, &store, 0) == page);
            let stats = store.stats();
            assert_eq!((stats.hedges, stats.hedges_won), (1, 1), "{codec:?}");
            assert_eq!((stats.retries, stats.errors), (0, 0));
            assert!(
                world.cluster.health.is_fine(silent),
                "it is slow, and no more"
            );
            // The next READs do not go there first, but for a probe now and then.
            let began = Instant::now();
            for _ in 0..20 {
                assert!(read_soon(&mut io, &store, 0) == page);
            }
            let probes = 1 + began.elapsed().as_millis() as u64 / 100;
            assert!(store.stats().hedges <= 1 + probes, "{:?}", store.stats());
            if is_passive {
                let now = world.cluster.registered.stats().acquisitions;
                assert_eq!(now, acquired, "a signal handler allocates nothing");
            }
            // The server is read again once it answers.
            world.servers[silent].go_on();
            let before = store.stats().failovers;
            let asked = world.servers[silent].operations();
            wait_until("the first copy is never read again", || {
                let served = store.stats().failovers;
                assert!(read_soon(&mut io, &store, 0) == page);
                store.stats().failovers == served
            });
            assert!(world.servers[silent].operations() > asked && before > 0);
            assert_eq!(store.stats().corrupt, 0);
        }
    }
}

/// READs of the silent server are rare and all hedged, so that none waits for the end.
#[test]
fn the_connection_of_a_silent_server_is_given_up_while_others_answer() {
    for is_passive in [false, true] {
        let (world, store, mut io) = raw_world(2, waiting(), 8, 2);
        write(&mut io, &store, 0, &odd_page(4096, 0)).expect("both live");
        if is_passive {
            io = passive_queue(&world.cluster);
            io.prepare(&store, 1);
        }
        let silent = first_of(&store, 0);
        world.servers[silent].stop();
        wait_until("the silent server is never suspect", || {
            assert!(read_soon(&mut io, &store, 0) == odd_page(4096, 0));
            !world.cluster.health.is_fine(silent)
        });
        assert!(world.cluster.health.is_fine(1 - silent));
        let stats = store.stats();
        assert_eq!((stats.errors, stats.corrupt), (0, 0));
        assert_eq!(stats.connections_given_up, 1);
    }
}

/// The run of the hedged READ has ended, and another one has taken its place in the I/O queue.
#[test]
fn a_late_answer_lands_in_no_other_page() {
    let (world, store, mut io) = raw_world(2, waiting(), 8, 2);
    for page in 0..2 {
        write(&mut io, &store, page, &odd_page(4096, page)).expect("both live");
    }
    let silent = first_of(&store, 0);
    assert_eq!(
        silent,
        first_of(&store, 1),
        "both pages are read there first"
    );
    world.servers[silent].stop();
    let frame = read_soon(&mut io, &store, 0);
    // The next READ goes to the other server, and waits there.
    let other = &world.servers[1 - silent];
    other.stop();
    let asked = other.operations();
    io.fill(&store, at(1), vec![0xee; 4096].into(), 1);
    assert_eq!(other.operations(), asked + 1);
    world.servers[silent].go_on();
    for _ in 0..50 {
        // Nothing is hedged to a server that is slow.
        world.cluster.health.late(silent);
        assert!(poll(&mut io).is_empty(), "the late answer ends nothing");
    }
    other.go_on();
    let done = one(&mut io);
    assert!(done.failed.is_empty() && done.frame.bytes == odd_page(4096, 1));
    assert!(frame == odd_page(4096, 0), "the frame was handed out");
    let stats = store.stats();
    assert_eq!((stats.corrupt, stats.hedges_won), (0, 1), "{stats:?}");
}

#[test]
fn the_first_answer_counts_also_if_it_is_the_late_one() {
    let (world, store, mut io) = raw_world(2, waiting(), 8, 2);
    write(&mut io, &store, 0, &odd_page(4096, 0)).expect("both live");
    let silent = first_of(&store, 0);
    let other = &world.servers[1 - silent];
    world.servers[silent].stop();
    let asked = other.operations();
    io.fill(&store, at(0), vec![0xee; 4096].into(), 0);
    poll_until(&mut io, "nothing is hedged", || other.operations() > asked);
    other.stop();
    poll_for(&mut io, Duration::from_millis(20));
    world.servers[silent].go_on();
    let done = one(&mut io);
    assert!(done.failed.is_empty() && done.frame.bytes == odd_page(4096, 0));
    let stats = store.stats();
    assert_eq!((stats.hedges, stats.hedges_won, stats.corrupt), (1, 0, 0));
    // The hedge is late now, and its bytes go nowhere.
    other.go_on();
    for page in 0..4 {
        write(&mut io, &store, page, &odd_page(4096, 10 + page)).expect("both live");
        assert!(read_soon(&mut io, &store, page) == odd_page(4096, 10 + page));
    }
    assert_eq!(store.stats().corrupt, 0);
}

/// The queue of the other server is full, so that the hedge was not posted.
#[test]
fn the_late_answer_counts_while_the_hedge_waits_for_room() {
    let config = |seed| SimConfig {
        queue_depth: 1,
        ..SimConfig::new(seed)
    };
    let world = World::new((0..2).map(config), waiting());
    let alone = remote(&world.cluster, 64, 4096, Codec::Raw);
    let copied = raw(&world, 8, 2);
    let mut io = queue(&world.cluster);
    write(&mut io, &copied, 0, &odd_page(4096, 0)).expect("both live");
    let silent = first_of(&copied, 0);
    let is_elsewhere = |page: &u64| {
        write(&mut io, &alone, *page, &odd_page(4096, 1)).expect("both live");
        usize::from(place_of(&alone, *page).0.server) != silent
    };
    let page = (0..64).find(is_elsewhere).expect("both are used");
    world.servers.iter().for_each(|server| server.stop());
    io.fill(&alone, at(page), vec![0xee; 4096].into(), 1);
    io.fill(&copied, at(0), vec![0xee; 4096].into(), 0);
    poll_for(&mut io, Duration::from_millis(40));
    world.servers[silent].go_on();
    let done = one(&mut io);
    assert!(done.request == 0 && done.frame.bytes == odd_page(4096, 0));
    let stats = copied.stats();
    assert_eq!((stats.hedges, stats.hedges_won, stats.corrupt), (1, 0, 0));
    world.servers[1 - silent].go_on();
    assert!(one(&mut io).frame.bytes == odd_page(4096, 1));
}

/// The I/O queue of a signal handler opens no channel again, and waits for the first copy.
#[test]
fn a_hedge_that_fails_ends_no_read() {
    for is_passive in [false, true] {
        let (world, store, mut io) = raw_world(2, waiting(), 8, 2);
        write(&mut io, &store, 0, &odd_page(4096, 0)).expect("both live");
        if is_passive {
            io = passive_queue(&world.cluster);
            io.prepare(&store, 1);
        }
        let silent = first_of(&store, 0);
        let other = &world.servers[1 - silent];
        world.servers[silent].stop();
        let asked = other.operations();
        io.fill(&store, at(0), vec![0xee; 4096].into(), 0);
        poll_until(&mut io, "nothing is hedged", || {
            if other.operations() == asked {
                return false;
            }
            other.stop();
            true
        });
        other.cut();
        poll_for(&mut io, Duration::from_millis(20));
        world.servers[silent].go_on();
        let done = one(&mut io);
        assert!(done.failed.is_empty() && done.frame.bytes == odd_page(4096, 0));
        assert_eq!(store.stats().corrupt, 0);
    }
}

#[test]
fn nothing_is_hedged_while_all_servers_are_slow() {
    for (servers, writes) in [(2, false), (3, false), (2, true), (3, true)] {
        let (world, store, mut io) = raw_world(servers, waiting(), 64, 2);
        for page in 0..64 {
            write(&mut io, &store, page, &odd_page(4096, page)).expect("all live");
        }
        // One page of each server, so that all of them are waited for.
        let pages = (0..world.servers.len()).map(|server| {
            let mut pages = 0..64;
            pages.find(|&page| first_of(&store, page) == server)
        });
        let pages: Vec<u64> = pages.map(|page| page.expect("all are used")).collect();
        world.servers.iter().for_each(|server| server.stop());
        let asked: u64 = world.servers.iter().map(|it| it.operations()).sum();
        for &page in &pages {
            io.fill(&store, at(page), vec![0xee; 4096].into(), page);
            if writes {
                io.write_back(&store, at(page), odd_page(4096, 100 + page).into(), page);
            }
        }
        poll_for(&mut io, Duration::from_millis(200));
        let begun = pages.len() as u64 * (1 + u64::from(writes));
        let now: u64 = world.servers.iter().map(|it| it.operations()).sum();
        // Each server may be asked if it answers.
        let questions = world.servers.len() as u64;
        let all = asked + begun..=asked + begun + questions;
        assert!(all.contains(&now), "nothing is sent twice");
        assert!((0..world.servers.len()).all(|server| world.cluster.health.is_fine(server)));
        world.servers.iter().for_each(|server| server.go_on());
        while io.in_flight() > 0 {
            some(&mut io)
                .iter()
                .for_each(|done| assert!(done.failed.is_empty()));
        }
        assert_eq!((store.stats().hedges, store.stats().retries), (0, 0));
    }
}

#[test]
fn one_read_in_twenty_may_be_hedged() {
    let (mut world, store, mut io) = raw_world(2, waiting(), 256, 2);
    write_pages(&mut io, &store, 0, &odd_pages(4096, 0..256));
    let silent = first_of(&store, 0);
    let here: Vec<u64> = (0..256)
        .filter(|&page| first_of(&store, page) == silent)
        .collect();
    // A worker's READs under way, and more than are saved up for.
    let reads = |io: &mut Queue, count: usize| {
        let began = io.now();
        // Every other page, so that each has a READ of its own.
        for &page in here.iter().step_by(2).take(count) {
            io.fill(&store, at(page), vec![0xee; 4096].into(), page);
        }
        while io.in_flight() > 0 {
            for done in some(io) {
                let right = odd_page(4096, done.request);
                assert!(done.failed.is_empty() && done.frame.bytes == right);
            }
        }
        assert_soon(io, began);
    };
    world.servers[silent].stop();
    reads(&mut io, 60);
    // Nothing is saved up any more: all READs from here on pay.
    let before = store.stats();
    assert_eq!(before.hedges, 32);
    // The others came when the silent connection was given up.
    assert!(!world.cluster.health.is_fine(silent));
    world.servers[silent].go_on();
    world.wait_until_all_answer();
    world.cluster.health.in_time(silent);
    wait_until("it is never read again", || {
        let served = store.stats().failovers;
        reads(&mut io, 1);
        store.stats().failovers == served
    });
    assert_eq!(store.stats().hedges, 32, "the server answers");
    for _ in 0..40 {
        reads(&mut io, 1);
    }
    world.servers[silent].stop();
    reads(&mut io, 10);
    let paid = store.stats().fills - before.fills;
    let hedges = store.stats().hedges - before.hedges;
    assert!(hedges >= 1 && hedges <= paid / 20, "{hedges} of {paid}");
}

#[test]
fn a_write_to_a_silent_server_goes_elsewhere_soon() {
    for servers in [2, 3] {
        let (mut world, store, mut io) = raw_world(servers, waiting(), 64, 2);
        write_pages(&mut io, &store, 0, &odd_pages(4096, 0..64));
        let silent = first_of(&store, 0);
        world.servers[silent].stop();
        let began = io.now();
        for page in 0..64 {
            write(&mut io, &store, page, &odd_page(4096, 100 + page)).expect("others live");
        }
        assert_soon(&io, began);
        assert_eq!(store.stats().connections_given_up, 1);
        let lacks = store.stats().under_protected_bytes > 0;
        assert_eq!(lacks, servers == 2, "another server takes what it can");
        world.servers[silent].go_on();
        world.wait_until_all_answer();
        // Nothing stale is read there.
        for page in 0..64 {
            assert!(read_soon(&mut io, &store, page) == odd_page(4096, 100 + page));
        }
        world.repair();
        for page in 0..64 {
            assert_eq!(group_of(&store, page).good_count(), 2);
        }
        assert_eq!((store.stats().corrupt, store.stats().errors), (0, 0));
    }
}

/// Asserts that no server's connection was given up, and none was sent anything twice.
fn assert_waited(world: &World, store: &PageStore) {
    let mut servers = 0..world.servers.len();
    assert!(servers.all(|it| world.cluster.health.is_fine(it)));
    let stats = store.stats();
    assert_eq!((stats.retries, stats.errors), (0, 0), "{stats:?}");
    assert_eq!((stats.under_protected_bytes, stats.corrupt), (0, 0));
}

/// A server that has nothing of the page answers all the time.
#[test]
fn a_read_waits_for_its_copies_whoever_else_answers() {
    let (world, store, mut io) = raw_world(3, waiting(), 64, 2);
    for page in 0..64 {
        write(&mut io, &store, page, &odd_page(4096, page)).expect("all live");
    }
    let members = members_of(&store, 0).into_iter();
    let servers: Vec<_> = members.map(|it| usize::from(it.server)).collect();
    let is_other = |page: &u64| !servers.contains(&first_of(&store, *page));
    let other = (0..64).find(is_other).expect("all servers are used");
    for &server in &servers {
        world.servers[server].stop();
    }
    io.fill(&store, at(0), vec![0xee; 4096].into(), 0);
    let until = Instant::now() + Duration::from_millis(600);
    while Instant::now() < until {
        io.fill(&store, at(other), vec![0xee; 4096].into(), other);
        let done = one(&mut io);
        assert!(done.request == other && done.frame.bytes == odd_page(4096, other));
    }
    for &server in &servers {
        world.servers[server].go_on();
    }
    assert!(one(&mut io).frame.bytes == odd_page(4096, 0));
    assert_waited(&world, &store);
}

/// The other server was asked nothing, so that nothing says whether it answers.
#[test]
fn a_write_waits_while_the_other_copy_is_silent_too() {
    for silence in [100, 600].map(Duration::from_millis) {
        let (world, store, mut io) = raw_world(2, waiting(), 8, 2);
        write(&mut io, &store, 0, &odd_page(4096, 0)).expect("both live");
        world.servers.iter().for_each(|server| server.stop());
        io.write_back(&store, at(0), odd_page(4096, 1).into(), 0);
        poll_for(&mut io, silence);
        world.servers.iter().for_each(|server| server.go_on());
        assert!(one(&mut io).failed.is_empty());
        assert_waited(&world, &store);
        assert!(read_soon(&mut io, &store, 0) == odd_page(4096, 1));
    }
}

/// Silence as long as a busy machine, or a limit of processor time, causes.
#[test]
fn a_write_waits_for_a_server_that_is_silent_for_a_moment() {
    for servers in [2, 3] {
        let (world, store, mut io) = raw_world(servers, waiting(), 8, 2);
        write(&mut io, &store, 0, &odd_page(4096, 0)).expect("all live");
        let silent = first_of(&store, 0);
        for version in 1..4 {
            world.servers[silent].stop();
            io.write_back(&store, at(0), odd_page(4096, version).into(), 0);
            // The write may go to other slots, on other servers.
            let until = Instant::now() + Duration::from_millis(90);
            while io.in_flight() > 0 && Instant::now() < until {
                assert!(poll(&mut io).iter().all(|done| done.failed.is_empty()));
            }
            world.servers[silent].go_on();
            if io.in_flight() > 0 {
                assert!(one(&mut io).failed.is_empty());
            }
            assert_waited(&world, &store);
        }
    }
}

#[test]
fn time_in_which_the_thread_stood_still_is_no_silence() {
    let (world, store, mut io) = raw_world(2, waiting(), 8, 2);
    write(&mut io, &store, 0, &odd_page(4096, 0)).expect("both live");
    world.servers[first_of(&store, 0)].stop();
    io.write_back(&store, at(0), odd_page(4096, 1).into(), 0);
    poll_for(&mut io, Duration::from_millis(10));
    std::thread::sleep(Duration::from_millis(600));
    poll_for(&mut io, Duration::from_millis(60));
    world.servers.iter().for_each(|server| server.go_on());
    assert!(one(&mut io).failed.is_empty());
    assert_waited(&world, &store);
}

#[test]
fn a_column_of_a_silent_server_is_decoded() {
    for is_passive in [false, true] {
        let mut it = SealedWorld::new(5, (4, 1), waiting());
        if is_passive {
            it.io = passive_queue(&it.world.cluster);
            it.io.prepare(&it.store, 1);
        }
        let page = it.sealed_pages()[0];
        let right = it.model[page as usize * 4096..][..4096].to_vec();
        assert!(read_soon(&mut it.io, &it.store, page) == right);
        let silent = usize::from(home_of(&it.store, page).server);
        it.world.servers[silent].stop();
        for _ in 0..3 {
            assert!(read_soon(&mut it.io, &it.store, page) == right);
        }
        let stats = it.store.stats();
        assert!(
            stats.hedges >= 1 && stats.hedges == stats.hedges_won,
            "{stats:?}"
        );
        assert_eq!((stats.errors, stats.corrupt), (0, 0));
        it.world.servers[silent].go_on();
        assert!(read_soon(&mut it.io, &it.store, page) == right);
    }
}

/// The page comes from its home before all sources of its decoding have come.
#[test]
fn a_late_column_ends_its_decoding() {
    let mut it = SealedWorld::new(5, (4, 1), waiting());
    let page = it.sealed_pages()[0];
    let home = usize::from(home_of(&it.store, page).server);
    let asked = |it: &SealedWorld| -> u64 {
        let others = it.world.servers.iter().enumerate();
        let others = others.filter(|(server, _)| *server != home);
        others.map(|(_, server)| server.operations()).sum()
    };
    it.world.servers[home].stop();
    let before = asked(&it);
    it.io
        .fill(&it.store, at(page), vec![0xee; 4096].into(), page);
    wait_until("nothing is decoded", || {
        assert!(poll(&mut it.io).is_empty());
        asked(&it) > before
    });
    it.world.servers.iter().for_each(|server| server.stop());
    poll_for(&mut it.io, Duration::from_millis(20));
    it.world.servers[home].go_on();
    let done = one(&mut it.io);
    let right = &it.model[page as usize * 4096..][..4096];
    assert!(done.failed.is_empty() && done.frame.bytes == right);
    let stats = it.store.stats();
    assert_eq!((stats.hedges, stats.hedges_won, stats.corrupt), (1, 0, 0));
    it.world.servers.iter().for_each(|server| server.go_on());
    it.assert_reads();
}

/// One server is dead, so that a page there is decoded, and another one is silent.
#[test]
fn a_decoding_goes_on_without_a_silent_source() {
    for is_passive in [false, true] {
        let mut it = SealedWorld::new(6, (4, 2), waiting());
        if is_passive {
            it.io = passive_queue(&it.world.cluster);
            it.io.prepare(&it.store, 1);
        }
        let page = it.sealed_pages()[0];
        let right = it.model[page as usize * 4096..][..4096].to_vec();
        let home = home_of(&it.store, page).server;
        it.kill(usize::from(home));
        assert!(read_soon(&mut it.io, &it.store, page) == right);
        let view = pool(&it.store)
            .groups
            .set_of(place_of(&it.store, page).0.extent);
        let source = view.expect("it has parity").others().next();
        let silent = usize::from(source.expect("a set has others").server);
        it.world.servers[silent].stop();
        for _ in 0..3 {
            assert!(read_soon(&mut it.io, &it.store, page) == right);
        }
        let stats = it.store.stats();
        assert_eq!((stats.errors, stats.corrupt), (0, 0), "{stats:?}");
        assert_eq!(stats.connections_given_up, 1, "{stats:?}");
        it.world.servers[silent].go_on();
        it.assert_reads();
    }
}

/// No buffer can be had for the sources of the decoding that a late READ is hedged with.
#[test]
fn a_decoding_that_cannot_begin_ends_no_read() {
    let mut it = SealedWorld::new(5, (4, 1), waiting());
    let none = RegPoolOptions {
        bytes_max: 0,
        ..RegPoolOptions::default()
    };
    it.io.set_source_buffers(RegPool::new([], none));
    let page = it.sealed_pages()[0];
    let home = usize::from(home_of(&it.store, page).server);
    it.world.servers[home].stop();
    it.io
        .fill(&it.store, at(page), vec![0xee; 4096].into(), page);
    poll_for(&mut it.io, Duration::from_millis(40));
    it.world.servers[home].go_on();
    let done = one(&mut it.io);
    let right = &it.model[page as usize * 4096..][..4096];
    assert!(done.failed.is_empty() && done.frame.bytes == right);
    let stats = it.store.stats();
    assert_eq!((stats.hedges, stats.errors, stats.corrupt), (0, 0, 0));
}

/// Requests are lost, or land late, as those of broken connections do.
#[test]
fn servers_that_stop_and_go_on_lose_nothing() {
    for seed in 0..24 {
        let copies = 2 + (seed % 2) as u8;
        let servers = 2 + seed % 3;
        let copies = copies.min(servers as u8);
        let config = |server| SimConfig::new(1000 * seed + server);
        let world = World::new((0..servers).map(config), waiting());
        let codec = CODECS[seed as usize % CODECS.len()];
        let store = copies::copied(&world, 96, copies, codec, Reserve::Full);
        let mut model = vec![0; 96 * 4096];
        let mut stopped = None;
        let amid = |random: &mut ChaCha8Rng| {
            if random.random_bool(0.1)
                && let Some(server) = stopped.take()
            {
                let server: &Arc<SimServer> = server;
                server.go_on();
            } else if random.random_bool(0.1) && stopped.is_none() {
                let server = &world.servers[random.random_range(0..servers) as usize];
                server.stop();
                stopped = Some(server);
            }
        };
        let failed = conform_amid(&world.cluster, &store, &mut model, seed, 80, amid);
        assert_eq!(failed, 0, "seed {seed}");
        let stats = store.stats();
        assert_eq!((stats.errors, stats.corrupt), (0, 0), "seed {seed}");
    }
}

#[test]
fn pages_without_copies_wait_for_their_server() {
    let (server, cluster) = lone(SimConfig::new(1), within(Duration::from_secs(30)));
    let store = remote(&cluster, 8, 4096, Codec::Raw);
    let mut io = queue(&cluster);
    write(&mut io, &store, 0, &odd_page(4096, 0)).expect("it lives");
    server.stop();
    io.fill(&store, at(0), vec![0xee; 4096].into(), 0);
    poll_for(&mut io, Duration::from_millis(200));
    server.go_on();
    assert!(one(&mut io).frame.bytes == odd_page(4096, 0));
    assert_eq!((store.stats().retries, store.stats().hedges), (0, 0));
    // Beside pages with copies, too.
    let world = World::of(2, waiting());
    let (alone, copied) = (
        remote(&world.cluster, 8, 4096, Codec::Raw),
        raw(&world, 8, 2),
    );
    let mut io = queue(&world.cluster);
    write(&mut io, &alone, 0, &odd_page(4096, 0)).expect("all live");
    write(&mut io, &copied, 0, &odd_page(4096, 1)).expect("all live");
    let home = usize::from(place_of(&alone, 0).0.server);
    world.servers[home].stop();
    io.fill(&alone, at(0), vec![0xee; 4096].into(), 0);
    poll_for(&mut io, Duration::from_millis(200));
    world.servers[home].go_on();
    assert!(one(&mut io).frame.bytes == odd_page(4096, 0));
    assert_eq!(alone.stats().retries, 0);
}
