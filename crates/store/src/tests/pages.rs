//! Pages in remote memory: they come back as written, or are an error.

use super::*;

#[test]
fn page_is_unchanged_as_long_as_it_has_the_bytes_that_come_back() {
    for codec in CODECS {
        let cluster = cluster(1);
        let store = remote(&cluster, 2, 4096, codec);
        let mut io = queue(&cluster);
        let (zeros, ones) = (vec![0; 4096], vec![1; 4096]);
        let mut bytes: Vec<u8> = (0..4096).map(|i| (i / 7) as u8).collect();
        assert!(store.is_unchanged(at(0), &zeros) && !store.is_unchanged(at(0), &ones));
        write(&mut io, &store, 0, &ones).expect("a page of one value");
        assert!(store.is_unchanged(at(0), &ones) && !store.is_unchanged(at(0), &zeros));
        write(&mut io, &store, 0, &bytes).expect("the server has room");
        assert!(store.is_unchanged(at(0), &bytes) && !store.is_unchanged(at(0), &ones));
        assert!(store.is_unchanged(at(1), &zeros));
        bytes[4095] ^= 1;
        assert!(!store.is_unchanged(at(0), &bytes));
    }
}

#[test]
fn remote_pages_come_back_as_written() {
    for (seed, page_bytes, pages) in [(1, 4096, 50), (2, 65536, 20), (3, 2 << 20, 3)] {
        for codec in CODECS {
            let cluster = cluster(seed);
            let store = remote(&cluster, pages, page_bytes, codec);
            let mut model = vec![0; pages as usize * page_bytes];
            conform(
                &cluster,
                &store,
                &mut model,
                seed,
                if pages < 10 { 100 } else { 3000 },
            );
        }
    }
}

#[test]
fn lost_delayed_and_reordered_operations_neither_lose_nor_mix_pages() {
    for seed in 0..12 {
        let lossy = |seed| SimConfig {
            lose_one_in: Some(40),
            delay_steps: 20,
            ..SimConfig::new(seed)
        };
        let cluster = cluster_of([lossy(seed), lossy(seed + 500)]);
        let codec = CODECS[seed as usize % CODECS.len()];
        let store = remote(&cluster, 40, 4096, codec);
        conform(&cluster, &store, &mut vec![0; 40 * 4096], seed, 2000);
        assert!(store.stats().retries > 0, "seed {seed} lost nothing");
    }
}

#[test]
fn pages_that_need_no_request_send_none() {
    let (_server, cluster) = lone(SimConfig::new(1), ClusterOptions::default());
    let store = remote(&cluster, 4, 4096, Codec::Raw);
    let mut io = queue(&cluster);
    assert!(!store.table.is_stored(at(0)));
    assert_eq!(read(&mut io, &store, 0).unwrap(), vec![0; 4096]);
    assert_eq!(write(&mut io, &store, 0, &[0; 4096]).unwrap(), CLEAN);
    assert_eq!(write(&mut io, &store, 1, &[5; 4096]).unwrap(), written(0));
    assert_eq!(write(&mut io, &store, 1, &[5; 4096]).unwrap(), CLEAN);
    assert_eq!(read(&mut io, &store, 1).unwrap(), vec![5; 4096]);
    let stats = store.stats();
    assert_eq!(
        (
            stats.bytes_read,
            stats.bytes_written,
            stats.fills_never,
            stats.fills_repeated
        ),
        (0, 0, 1, 1)
    );
    let mut page = vec![5; 4096];
    page[9] = 6;
    assert_eq!(write(&mut io, &store, 1, &page).unwrap(), written(4096));
    assert_eq!(write(&mut io, &store, 1, &page).unwrap(), CLEAN);
    assert!(store.table.is_stored(at(1)));
    assert_eq!(write(&mut io, &store, 1, &[0; 4096]).unwrap(), written(0));
    assert_eq!(
        read(&mut io, &store, 1).unwrap(),
        vec![0; 4096],
        "zeros replace what was there"
    );
    drop(store);
    assert_eq!(cluster.stats().bytes_written, 4096, "closed stores count");
}

#[test]
fn a_page_that_does_not_shrink_costs_what_a_raw_page_costs() {
    let cluster = cluster(1);
    let store = remote(&cluster, 2, 65536, Codec::Lz4);
    let mut io = queue(&cluster);
    let mut page = vec![0; 65536];
    ChaCha8Rng::seed_from_u64(1).fill_bytes(&mut page);
    assert_eq!(write(&mut io, &store, 0, &page).unwrap(), written(65536));
    page[1000..].fill(3);
    let outcome = write(&mut io, &store, 0, &page).unwrap();
    assert_eq!(outcome.written, 1);
    assert!(outcome.wire_bytes < 2000, "{outcome:?}");
    assert_eq!(read(&mut io, &store, 0).unwrap(), page);
}

#[test]
fn damaged_remote_bytes_are_an_error_and_never_data() {
    for codec in CODECS {
        let cluster = cluster(1);
        let store = remote(&cluster, 100, 4096, codec);
        let mut io = queue(&cluster);
        let mut random = ChaCha8Rng::seed_from_u64(5);
        for page in 0..100 {
            let bytes: Vec<u8> = (0..4096)
                .map(|i| (i / 9) as u8 ^ random.random_range(0..2u8))
                .collect();
            write(&mut io, &store, page, &bytes).unwrap();
            tamper(&store, page, |bytes| {
                let at = random.random_range(0..bytes.len());
                bytes[at] ^= 1 << random.random_range(0..8);
            });
            let error = read(&mut io, &store, page).unwrap_err();
            assert!(
                matches!(&error, StoreError::Corrupt { region, page: p, server, .. } if **region == *REGION && *p == page && server.starts_with("sim:")),
                "{error}"
            );
            assert!(!error.may_retry());
        }
        assert_eq!(store.stats().corrupt, 100);
    }
}
