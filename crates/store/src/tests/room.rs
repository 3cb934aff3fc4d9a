//! Servers that are full, dead, or asked for memory.

use super::*;

/// Servers are asked for memory elsewhere: an I/O queue goes on with other runs meanwhile.
#[test]
fn write_that_needs_an_extent_waits_and_its_queue_does_not() {
    let (_server, cluster) = lone(SimConfig::new(1), ClusterOptions::default());
    let store = on_demand(&cluster, 1 << 20, None);
    let mut io = queue(&cluster);
    let (go_on, may_go_on) = crossbeam_channel::bounded::<()>(1);
    let (held, is_held) = crossbeam_channel::bounded(1);
    let timed_out = std::thread::scope(|scope| {
        let store = &store;
        let asking = scope.spawn(move || {
            let _growth = pool(store).lock_growth();
            held.send(()).expect("the test waits for it");
            may_go_on.recv_timeout(Duration::from_secs(10)).is_err()
        });
        is_held.recv().expect("somebody asks the servers");
        io.write_back(store, at(0), odd_page(4096, 1).into(), 7);
        assert!(poll(&mut io).is_empty(), "there is no memory for it yet");
        // A page of one value needs none.
        io.write_back(store, at(1), vec![3; 4096].into(), 8);
        assert_eq!(one(&mut io).request, 8);
        let _ = go_on.send(());
        asking.join().expect("it only waits")
    });
    assert!(!timed_out, "the I/O queue waited for who asks the servers");
    let done = one(&mut io);
    assert_eq!((done.request, done.failed.len()), (7, 0));
    assert_eq!(read(&mut io, &store, 0).unwrap(), odd_page(4096, 1));
}

#[test]
fn a_dead_server_is_a_typed_error_within_the_deadline_and_keeps_nothing_waiting() {
    let deadline = Duration::from_millis(300);
    let (server, cluster) = lone(SimConfig::new(1), within(deadline));
    let store = remote(&cluster, 8, 4096, Codec::Raw);
    let mut io = queue(&cluster);
    let mut page = vec![1; 4096];
    page[0] = 0;
    write(&mut io, &store, 0, &page).unwrap();
    server.kill();
    let began = Instant::now();
    io.fill(&store, at(0), vec![0; 4096].into(), 1);
    io.write_back(&store, at(1), page.clone().into(), 2);
    let mut ended = 0;
    while ended < 2 {
        for done in some(&mut io) {
            ended += 1;
            let (_, error) = &done.failed[0];
            assert!(
                matches!(
                    error,
                    StoreError::Remote {
                        retry: true,
                        attempts: 2..,
                        ..
                    }
                ),
                "{error:?}"
            );
        }
    }
    assert!(
        (deadline..deadline * 4).contains(&began.elapsed()),
        "{:?}",
        began.elapsed()
    );
    assert!(
        matches!(store.table.load(at(1)), PageEntry::Never),
        "a failed write-back leaves the entry alone"
    );
    assert_eq!(io.in_flight(), 0);
}

#[test]
fn a_full_server_is_typed_and_leaves_everything_usable() {
    let config = |seed| lending(seed, 8 << 20);
    let cluster = cluster_of([config(1), config(2)]);
    let kept = remote(&cluster, 1024, 4096, Codec::Raw);
    for _ in 0..3 {
        let error = PageStore::remote(&cluster, REGION, 64 << 20, 4096, &RemoteOptions::default())
            .map(drop)
            .unwrap_err();
        assert!(
            matches!(&error, CreateError::Alloc { source: AllocError::Full { endpoint, .. }, .. } if endpoint.starts_with("sim:")),
            "{error}"
        );
    }
    // Memory that the failed attempts took is back: the rest of the capacity still serves.
    let rest = remote(&cluster, 1024, 4096, Codec::Lz4);
    conform(&cluster, &kept, &mut vec![0; 1024 * 4096], 1, 4000);
    conform(&cluster, &rest, &mut vec![0; 1024 * 4096], 2, 4000);
    drop((kept, rest));
    assert_eq!(
        cluster.granted_bytes(),
        0,
        "closed regions give everything back"
    );
}

#[test]
fn a_fully_reserved_region_never_lacks_room_and_one_on_demand_says_so() {
    let page = |i: u64| {
        let mut page = vec![0; 4096];
        ChaCha8Rng::seed_from_u64(i).fill_bytes(&mut page);
        page
    };
    let config = lending(1, 5 << 20);
    let cluster = cluster_of([config]);
    let store = remote(&cluster, 1024, 4096, Codec::Raw);
    let mut io = queue(&cluster);
    for i in 0..3 * 1024 {
        write(&mut io, &store, i % 1024, &page(i)).unwrap();
    }
    drop(store);
    let store = on_demand(&cluster, 1 << 30, None);
    let outcomes: Vec<_> = (0..1400)
        .map(|i| write(&mut io, &store, i, &page(i)))
        .collect();
    let stored = outcomes
        .iter()
        .take_while(|outcome| outcome.is_ok())
        .count();
    assert!((1200..=1280).contains(&stored), "{stored} of 5 MiB");
    assert!(
        matches!(outcomes[stored], Err(StoreError::Full { page, .. }) if page == stored as u64)
    );
    assert_eq!(
        read(&mut io, &store, 5).unwrap(),
        page(5),
        "what was stored is still there"
    );
    write(&mut io, &store, 5, &[0; 4096]).unwrap();
    write(&mut io, &store, 1399, &page(1)).expect("room again");
}

#[test]
fn many_small_regions_share_extents() {
    let cluster = cluster(1);
    let regions: Vec<_> = (0..2000)
        .map(|_| remote(&cluster, 1, 4096, Codec::Raw))
        .collect();
    let extents = cluster
        .sessions()
        .iter()
        .map(|session| session.stat().unwrap().extents)
        .sum::<u64>();
    assert!(extents <= 40, "{extents}");
    drop(regions);
    assert_eq!(cluster.granted_bytes(), 0);
    for _ in 0..100 {
        drop(remote(&cluster, 100, 4096, Codec::Lz4));
    }
    assert_eq!(cluster.granted_bytes(), 0);
}

#[test]
fn regions_without_a_reservation_leave_what_others_were_promised() {
    let cluster = cluster_of([lending(1, 40 << 20)]);
    let promised = remote(&cluster, 2048, 4096, Codec::Raw);
    let options = RemoteOptions {
        reserve: Reserve::OnDemand,
        ..RemoteOptions::default()
    };
    let greedy = PageStore::remote(&cluster, "array 8", 64 << 20, 4096, &options).unwrap();
    let mut io = queue(&cluster);
    let page = |i: u64| (0..4096u64).map(|j| (j / 5 + i) as u8).collect::<Vec<_>>();
    let full = (0..greedy.pages()).find(|&i| write(&mut io, &greedy, i, &page(i)).is_err());
    assert!(full.is_some(), "the server is full now");
    for i in 0..promised.pages() {
        write(&mut io, &promised, i, &page(i)).expect("it was reserved");
    }
}

#[test]
fn what_is_granted_to_a_shared_pool_for_a_region_that_is_gone_goes_back() {
    let cluster = client(&servers());
    let region = || on_demand(&cluster, 60 * 4096, None);
    let (store, other) = (region(), region());
    let pool = pool(&store).clone();
    // A thread asks for memory, and reaches the server only when the region has ended.
    let ended = pool.ended();
    drop(store);
    pool.grow_unless_ended(4096, ended).unwrap();
    assert_eq!(pool.granted_bytes(), 0, "nobody gives it back");
    // A region that still waits asks again.
    pool.grow(4096).unwrap();
    assert!(pool.granted_bytes() > 0);
    drop(other);
    assert_eq!(pool.granted_bytes(), 0);
}
