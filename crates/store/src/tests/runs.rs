//! Runs: pages that move together, pages that fail alone, and the slots of both.

use super::*;

#[test]
fn runs_longer_than_all_staging_buffers_take_their_turn() {
    let cluster = cluster(1);
    let store = remote(&cluster, 100, 65536, Codec::Lz4);
    let mut model = vec![0; 100 * 65536];
    assert_eq!(conform(&cluster, &store, &mut model, 8, 100), 0);
    let mut io = queue(&cluster);
    let pages: Vec<u8> = (0..100u64 * 65536)
        .map(|i| (i / 5 + i / 65536) as u8)
        .collect();
    // A run that waits for buffers has begun; the request behind it has not.
    let others: Vec<u8> = pages[..90 * 65536].iter().map(|byte| !byte).collect();
    io.write_back(&store, at(0), others.into(), 1);
    io.fill(&store, at(99), vec![0; 65536].into(), 2);
    assert_eq!((io.load().held, io.load().begun), (1, 1));
    let withdrawn = io.withdraw(|_| true).map(|(request, _)| request);
    assert_eq!((withdrawn, one(&mut io).request), (Some(2), 1));
    let done = write_run(&mut io, &store, 0, &pages);
    assert_eq!((done.outcome.written, done.failed.len()), (100, 0));
    assert!(read_run(&mut io, &store, 0, 100).frame.bytes == pages);
}

#[test]
fn a_run_that_was_written_together_is_written_by_one_operation_and_read_by_few() {
    // 128 KiB by each READ, if pages are not longer.
    for (page_bytes, pages, reads) in [(4096, 256, 8), (65536, 16, 8), (1 << 20, 2, 2)] {
        let (server, cluster) = lone(SimConfig::new(1), ClusterOptions::default());
        let store = remote(&cluster, pages, page_bytes, Codec::Raw);
        let mut io = queue(&cluster);
        let mut bytes = odd_pages(page_bytes, 0..pages);
        for round in 0..3 {
            let before = server.operations();
            let done = write_run(&mut io, &store, 0, &bytes);
            let expected = RunCounts {
                clean: 0,
                written: pages as u32,
                wire_bytes: bytes.len() as u64,
            };
            assert_eq!(done.outcome, expected);
            assert_eq!(server.operations() - before, 1, "a WRITE, round {round}");
            let read = read_run(&mut io, &store, 0, pages as usize);
            assert!(read.frame.bytes == bytes);
            assert_eq!(read.outcome.wire_bytes, bytes.len() as u64);
            let operations = server.operations() - before;
            assert_eq!(operations, 1 + reads, "READs, round {round}");
            let clean = write_run(&mut io, &store, 0, &bytes);
            assert_eq!(clean.outcome.clean, pages as u32);
            assert_eq!(server.operations() - before, operations, "nothing changed");
            bytes.rotate_right(1);
        }
    }
    // No operation is longer than the fabric allows.
    let (server, cluster) = lone(SimConfig::new(1), ClusterOptions::default());
    let store = remote(&cluster, 100, 65536, Codec::Raw);
    let mut io = queue(&cluster);
    let bytes = odd_pages(65536, 0..100);
    write_run(&mut io, &store, 0, &bytes);
    assert!(server.operations() <= 6, "{}", server.operations());
    assert!(read_run(&mut io, &store, 0, 100).frame.bytes == bytes);
}

#[test]
fn a_complete_run_is_handed_out_before_the_next_is_copied() {
    let folder = tempfile::tempdir().unwrap();
    let endpoint = Endpoint::Shm(folder.path().join("socket"));
    let mut server = ServerThread::start(&endpoint, Arc::new(SimHost::new(64 << 20))).unwrap();
    {
        let session = Session::connect(&endpoint, &SessionOptions::default()).unwrap();
        let cluster = Cluster::new(vec![session], ClusterOptions::default());
        let store = remote(&cluster, 24, 65536, Codec::Raw);
        let mut io = queue(&cluster);
        let bytes = odd_pages(65536, 0..24);
        for (page, run) in (0..).step_by(8).zip(bytes.chunks(8 * 65536)) {
            write_run(&mut io, &store, page, run);
        }
        for page in [0, 8, 16] {
            let frame = vec![0xee; 8 * 65536];
            io.fill(&store, at(page), frame.into(), page);
        }
        for (page, run) in (0..).step_by(8).zip(bytes.chunks(8 * 65536)) {
            if page > 0 {
                io.begin_turn();
            }
            let done = poll(&mut io);
            let tags: Vec<_> = done.iter().map(|done| done.request).collect();
            assert_eq!(tags, [page]);
            let timing = done[0].timing;
            assert_eq!((timing.alone, timing.at_once), (page == 0, page == 0));
            assert!(done[0].frame.bytes == run);
        }
        assert_eq!(io.in_flight(), 0);
    }
    server.end().unwrap();
}

#[test]
fn a_run_moves_what_changed_and_makes_what_needs_no_request() {
    let (server, cluster) = lone(SimConfig::new(1), ClusterOptions::default());
    let store = remote(&cluster, 8, 4096, Codec::Raw);
    let mut io = queue(&cluster);
    let mut pages = odd_pages(4096, 0..8);
    write_run(&mut io, &store, 0, &pages);
    // Clean, changed, changed, one value, clean, changed, clean, zeros.
    pages[4096..3 * 4096].copy_from_slice(&odd_pages(4096, 11..13));
    pages[3 * 4096..4 * 4096].fill(7);
    pages[5 * 4096] ^= 1;
    pages[7 * 4096..].fill(0);
    let before = server.operations();
    let done = write_run(&mut io, &store, 0, &pages);
    let expected = RunCounts {
        clean: 3,
        written: 5,
        wire_bytes: 3 * 4096,
    };
    assert_eq!((done.outcome, done.failed.len()), (expected, 0));
    assert_eq!(server.operations() - before, 2, "one for each stretch");
    let read = read_run(&mut io, &store, 0, 8);
    assert!(read.frame.bytes == pages);
    assert_eq!(read.outcome.wire_bytes, 6 * 4096);
}

#[test]
fn a_damaged_page_fails_alone() {
    for codec in CODECS {
        let cluster = cluster(1);
        let store = remote(&cluster, 16, 4096, codec);
        let mut io = queue(&cluster);
        let pages: Vec<u8> = (0..16 * 4096u64)
            .map(|i| (i / 9 + i / 4096 * 3) as u8)
            .collect();
        write_run(&mut io, &store, 0, &pages);
        for page in [3, 4, 15] {
            tamper(&store, page, |bytes| bytes[1] ^= 1);
        }
        let done = read_run(&mut io, &store, 0, 16);
        let failed: Vec<_> = done.failed.iter().map(|(page, _)| page.number()).collect();
        assert_eq!(failed, [3, 4, 15]);
        for (page, error) in &done.failed {
            assert!(matches!(error, StoreError::Corrupt { page: p, .. } if *p == page.number()));
        }
        let pages = pages.chunks(4096).zip(done.frame.bytes.chunks(4096));
        for (page, (expected, got)) in (0..).zip(pages) {
            assert!(failed.contains(&page) || expected == got, "page {page}");
        }
        assert_eq!((store.stats().corrupt, store.stats().errors), (3, 3));
    }
}

#[test]
fn bytes_that_were_damaged_on_their_way_are_read_a_second_time() {
    for codec in CODECS {
        let (_server, cluster) = lone(
            SimConfig {
                damage_one_in: Some(8),
                ..SimConfig::new(7)
            },
            ClusterOptions::default(),
        );
        let store = remote(&cluster, 512, 4096, codec);
        let mut io = queue(&cluster);
        for page in 0..512 {
            write_run(&mut io, &store, page, &odd_pages(4096, page..page + 1));
        }
        for page in 0..512 {
            let done = read_run(&mut io, &store, page, 1);
            let is_right = done.frame.bytes == odd_pages(4096, page..page + 1);
            assert_eq!(is_right, done.failed.is_empty(), "page {page}");
        }
        let stats = store.stats();
        // One in 8, and one in 64 twice.
        assert!((32..128).contains(&stats.retries), "{stats:?}");
        assert!(stats.corrupt < stats.retries / 2, "{stats:?}");
        assert_eq!(stats.fills + stats.corrupt, 512, "{stats:?}");
    }
}

#[test]
fn what_fails_of_a_run_leaves_the_last_good_copies() {
    let mut failed = 0;
    for seed in 0..10 {
        let server = |seed| {
            let config = SimConfig {
                lose_one_in: Some(6),
                timeout_steps: 30,
                ..SimConfig::new(seed)
            };
            session(&SimServer::new(config))
        };
        // No time to repeat anything.
        let options = within(Duration::ZERO);
        let cluster = Cluster::new(vec![server(seed), server(seed + 500)], options);
        let codec = CODECS[seed as usize % CODECS.len()];
        let store = remote(&cluster, 60, 4096, codec);
        failed += conform(&cluster, &store, &mut vec![0; 60 * 4096], seed, 600);
        assert!(!pool(&store).has_unsettled());
    }
    assert!(failed > 1000, "{failed} pages failed");
}

/// A WRITE that was given up may land until there is a new channel. Until then its slot is not
/// used.
#[test]
fn slots_of_a_run_that_seemed_lost_are_free_when_a_new_channel_is_open() {
    let (_server, cluster) = lone(
        SimConfig {
            lose_one_in: Some(1),
            capacity_bytes: 1 << 20,
            timeout_steps: 10,
            ..SimConfig::new(1)
        },
        within(Duration::ZERO),
    );
    let store = on_demand(&cluster, 2 << 20, None);
    let mut io = queue(&cluster);
    // Takes all memory of the server, so that no run waits for more on its way.
    while pool(&store).grow(4096).is_ok() {}
    for round in 0..5 {
        let done = write_run(&mut io, &store, 0, &odd_pages(4096, 0..256));
        let full = |(_, error): &(PageIndex, StoreError)| matches!(error, StoreError::Full { .. });
        assert!(done.failed.len() == 256 && !done.failed.iter().any(full));
        assert_eq!(pool(&store).used_bytes(), 1 << 20, "all of it is in doubt");
        assert!(matches!(
            write(&mut io, &store, 0, &odd_page(4096, 1)),
            Err(StoreError::Full { .. })
        ));
        // The I/O queue opens a channel for this alone.
        let until = Instant::now() + Duration::from_secs(20);
        while pool(&store).used_bytes() > 0 {
            assert!(Instant::now() < until, "round {round}: slots stay in doubt");
            poll(&mut io);
            std::thread::yield_now();
        }
        assert!(!pool(&store).has_unsettled());
    }
}

#[test]
fn slots_of_a_run_that_was_never_sent_are_free_again() {
    let (server, cluster) = lone(SimConfig::new(1), within(Duration::from_millis(50)));
    let store = remote(&cluster, 64, 4096, Codec::Raw);
    let mut io = queue(&cluster);
    server.kill();
    // Sent, so in doubt; from then on there is no channel.
    assert!(write(&mut io, &store, 0, &odd_page(4096, 0)).is_err());
    let done = write_run(&mut io, &store, 0, &odd_pages(4096, 0..64));
    assert_eq!(done.failed.len(), 64);
    assert_eq!(pool(&store).used_bytes(), 4096, "the slot of the first one");
    // An I/O queue that is dropped leaves no slot unsettled either.
    io.write_back(&store, at(0), odd_pages(4096, 0..64).into(), 0);
    assert!(pool(&store).has_unsettled());
    drop(io);
    assert!(!pool(&store).has_unsettled());
}

#[test]
fn a_server_that_dies_in_the_middle_of_runs_tears_none() {
    for seed in 0..12 {
        println!("seed {seed}");
        let dying = SimServer::new(SimConfig {
            die_at_op: Some(5 + seed * 2),
            ..SimConfig::new(seed)
        });
        let living = SimServer::new(SimConfig::new(seed + 500));
        let options = within(Duration::from_millis(4));
        let cluster = Cluster::new(vec![session(&dying), session(&living)], options);
        let codec = CODECS[seed as usize % CODECS.len()];
        let store = remote(&cluster, 64, 4096, codec);
        let mut io = queue(&cluster);
        // Bytes that each page was last written with, and its entry then.
        let mut model = vec![0; 64 * 4096];
        let mut entries = [PageEntry::Never; 64];
        let mut failed = 0;
        for round in 0..20 {
            let mut bytes = model.clone();
            for (i, page) in bytes.chunks_mut(4096).enumerate() {
                let new = odd_page(4096, round * 64 + i as u64);
                let half = if codec == Codec::Raw { 4096 } else { 2000 };
                page[..half].copy_from_slice(&new[..half]);
            }
            for from in (0..64).step_by(16) {
                let run = bytes[from * 4096..][..16 * 4096].to_vec();
                io.write_back(&store, at(from as u64), run.into(), from as u64);
            }
            while io.in_flight() > 0 {
                for done in some(&mut io) {
                    failed += done.failed.len();
                    for page in done.request..done.request + 16 {
                        let number = page as usize;
                        let entry = store.table.load(at(page));
                        if done.failed.iter().any(|(failed, _)| *failed == at(page)) {
                            assert_eq!(entry, entries[number], "page {page}");
                        } else {
                            let range = number * 4096..(number + 1) * 4096;
                            model[range.clone()].copy_from_slice(&bytes[range]);
                            entries[number] = entry;
                        }
                    }
                }
            }
        }
        assert!(failed > 0);
        let done = read_run(&mut io, &store, 0, 64);
        for (page, entry) in entries.iter().enumerate() {
            let lost = matches!(entry, PageEntry::Stored { place, .. } if place.server == 0);
            let failed = done.failed.iter().any(|(failed, _)| failed.0 == page);
            assert_eq!(lost, failed, "page {page}");
            let range = page * 4096..(page + 1) * 4096;
            assert!(
                lost || done.frame.bytes[range.clone()] == model[range],
                "page {page}"
            );
        }
    }
}

#[test]
fn a_full_server_takes_what_fits_of_a_run() {
    let cluster = cluster_of([lending(1, 1 << 20)]);
    let store = on_demand(&cluster, 64 << 20, None);
    let mut io = queue(&cluster);
    let bytes = odd_pages(4096, 0..300);
    let done = write_run(&mut io, &store, 0, &bytes);
    assert_eq!((done.outcome.written, done.failed.len()), (256, 44));
    for (page, error) in &done.failed {
        assert!(matches!(error, StoreError::Full { page: p, .. } if *p == page.number()));
    }
    for page in 0..300 {
        let is_kept = !done.failed.iter().any(|(failed, _)| *failed == at(page));
        let expected = if is_kept {
            odd_page(4096, page)
        } else {
            vec![0; 4096]
        };
        assert!(
            read(&mut io, &store, page).unwrap() == expected,
            "page {page}"
        );
    }
}

#[test]
fn runs_wait_for_each_others_slots_where_space_is_tight() {
    for codec in CODECS {
        let cluster = cluster_of([lending(1, 5 << 20)]);
        // The reservation and nothing more: 40 pages, and 16 on their way.
        let store = remote(&cluster, 40, 65536, codec);
        let granted = cluster.sessions()[0].stat().unwrap().granted_bytes;
        let rest = (5 << 20) - granted;
        let _rest = (rest > 0).then(|| cluster.sessions()[0].grant(rest).unwrap());
        let mut model = vec![0; 40 * 65536];
        let failed = conform(&cluster, &store, &mut model, 3, 600);
        assert!(!pool(&store).has_unsettled());
        if codec != Codec::Raw {
            continue;
        }
        assert_eq!(failed, 0, "a reserved region has room");
        // Every page has a slot and there are 16 more: two I/O queues write two runs of 20.
        let mut ios = [(); 2].map(|()| queue(&cluster));
        for round in 0..10 {
            let bytes = odd_pages(65536, round * 40..(round + 1) * 40);
            for (i, (io, half)) in ios.iter_mut().zip(bytes.chunks(20 * 65536)).enumerate() {
                io.write_back(&store, at(i as u64 * 20), half.to_vec().into(), 0);
            }
            for io in &mut ios {
                let done = one(io);
                assert_eq!((done.outcome.written, done.failed.len()), (20, 0));
            }
            assert!(read_run(&mut ios[0], &store, 0, 40).frame.bytes == bytes);
        }
    }
}
