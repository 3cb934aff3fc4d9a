//! Children of processes whose regions have names, which publish and have readers.

use super::*;

#[test]
fn a_child_reads_what_pages_held_while_their_named_region_publishes() {
    for (seed, codec) in (0..).zip([Codec::Raw, Codec::Lz4]) {
        println!("seed {seed}");
        // Returns the bytes that the region takes in the end.
        let publish = |has_child: bool| {
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            let cluster = client(&servers());
            let mut io = queue(&cluster);
            let store = named(&cluster, "x", 60, codec);
            let mut bytes = Vec::new();
            for _ in 0..2 {
                bytes = random_bytes(&mut random, 60);
                write_all(&mut io, &store, &bytes);
                store.publish().unwrap();
            }
            let child = has_child.then(|| Child::fork(&store, &bytes));
            for _ in 0..3 {
                store.publish().unwrap();
            }
            assert_eq!(store.stats().held_bytes, 0, "maps are not in entries");
            for round in 0..4 {
                bytes = random_bytes(&mut random, 60);
                write_all(&mut io, &store, &bytes);
                if round != 2 {
                    store.publish().unwrap();
                }
                if let Some(child) = &child {
                    child.check(&mut io);
                    assert!(store.stats().held_bytes > 0);
                }
            }
            assert!(vec_of(&cluster, &store) == bytes);
            drop(child);
            assert_eq!(store.stats().held_bytes, 0);
            pool(&store).used_bytes()
        };
        assert_eq!(publish(true), publish(false));
    }
    // A region without spare maps gives the slots of its maps back.
    let cluster = client(&servers());
    let store = on_demand(&cluster, 60 * 4096, Some("x"));
    let bytes = odd_pages(4096, 0..60);
    write_all(&mut queue(&cluster), &store, &bytes);
    store.publish().unwrap();
    let child = Child::fork(&store, &bytes);
    let used = pool(&store).used_bytes();
    for _ in 0..3 {
        store.publish().unwrap();
        assert_eq!(
            (pool(&store).used_bytes(), store.stats().held_bytes),
            (used, 0)
        );
    }
    drop(child);
}

#[test]
fn a_named_region_that_ends_keeps_its_name_and_its_memory_until_its_children_have_ended() {
    for codec in [Codec::Raw, Codec::Lz4] {
        let mut random = ChaCha8Rng::seed_from_u64(1);
        let servers = servers();
        let cluster = client(&servers);
        let mut io = queue(&cluster);
        let store = named(&cluster, "x", 60, codec);
        let published = random_bytes(&mut random, 60);
        write_all(&mut io, &store, &published);
        store.publish().unwrap();
        let bytes = random_bytes(&mut random, 60);
        write_all(&mut io, &store, &bytes);
        let (child, younger) = (Child::fork(&store, &bytes), Child::fork(&store, &bytes));
        write_all(&mut io, &store, &random_bytes(&mut random, 60));
        store.retire();
        drop((store, younger));
        child.check(&mut io);
        assert!(matches!(
            PageStore::open(&cluster, REGION, "x"),
            Err(OpenStoreError::Held { .. })
        ));
        assert!(matches!(
            PageStore::open(&client(&servers), REGION, "x"),
            Err(OpenStoreError::InUse { .. })
        ));
        child.check(&mut io);
        drop(child);
        let other = client(&servers);
        let store = PageStore::open(&other, REGION, "x").expect("it is free");
        assert!(vec_of(&other, &store) == published);
        drop(store);
        // A region that is only read.
        let store = PageStore::open_to_read(&cluster, REGION, "x").unwrap();
        let child = Child::fork(&store, &published);
        store.retire();
        drop(store);
        child.check(&mut io);
        assert_eq!(cluster.names().unwrap()[0].readers, 1);
        drop(child);
        assert_eq!(cluster.names().unwrap()[0].readers, 0);
        cluster.remove("x").unwrap();
        assert_eq!(granted(&servers), 0);
    }
}

/// A named region is published, read, closed and opened while children come and go.
#[test]
fn children_and_readers_of_a_named_region_read_what_they_opened() {
    const PAGES: u64 = 40;
    for seed in 0..8 {
        println!("seed {seed}");
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let servers = servers();
        let cluster = client(&servers);
        let mut io = queue(&cluster);
        let codec = CODECS[seed as usize % CODECS.len()];
        let mut store = named(&cluster, "x", PAGES, codec);
        let mut model = vec![0; PAGES as usize * 4096];
        store.publish().unwrap();
        let mut published = model.clone();
        let mut children: Vec<Child> = Vec::new();
        let mut readers: Vec<(Arc<PageStore>, Vec<u8>)> = Vec::new();
        for _ in 0..300 {
            let page = random.random_range(0..PAGES);
            let count = random.random_range(1..=8).min(PAGES - page);
            let range = page as usize * 4096..(page + count) as usize * 4096;
            match random.random_range(0..100) {
                0..40 => {
                    let bytes = random_bytes(&mut random, count);
                    let done = write_run(&mut io, &store, page, &bytes);
                    assert!(done.failed.is_empty(), "{:?}", done.failed);
                    model[range].copy_from_slice(&bytes);
                }
                40..50 => {
                    store.clear(at(page).and_on(count as usize));
                    model[range].fill(0);
                }
                50..60 => {
                    if random.random_bool(0.2) {
                        let all = servers.iter();
                        all.for_each(|server| server.lose_next_publish_answer());
                        // The second server's manifest is no publication yet, the first one's is.
                        store.publish().unwrap_err();
                        store.publish().unwrap_err();
                    } else {
                        store.publish().unwrap();
                    }
                    published.clone_from(&model);
                }
                60..75 if children.len() < 4 => children.push(Child::fork(&store, &model)),
                75..83 if !children.is_empty() => {
                    let ends = random.random_range(0..children.len());
                    children.remove(ends);
                }
                83..90 if readers.len() < 3 => {
                    let reader = PageStore::open_to_read(&cluster, REGION, "x").unwrap();
                    readers.push((reader, published.clone()));
                }
                90..95 if !readers.is_empty() => {
                    let ends = random.random_range(0..readers.len());
                    readers.remove(ends);
                }
                95..97 => {
                    // The name is free when the last child has ended.
                    store.retire();
                    for child in std::mem::take(&mut children) {
                        child.check(&mut io);
                        assert!(PageStore::open(&cluster, REGION, "x").is_err());
                    }
                    store = PageStore::open(&cluster, REGION, "x").unwrap();
                    model.clone_from(&published);
                }
                _ => {}
            }
            for child in &children {
                child.check_page(&mut io, at(random.random_range(0..PAGES)));
            }
            let held = store.stats().held_bytes;
            assert!(pool(&store).used_bytes() >= needed_bytes([&store], &children));
            assert!(held == 0 || !children.is_empty(), "seed {seed}");
        }
        children.iter().for_each(|child| child.check(&mut io));
        for (reader, bytes) in &readers {
            assert!(vec_of(&cluster, reader) == *bytes, "seed {seed}");
        }
        assert!(vec_of(&cluster, &store) == model, "seed {seed}");
        store.retire();
        drop((store, children, readers));
        cluster.remove("x").unwrap();
        assert_eq!(granted(&servers), 0, "seed {seed}");
    }
}
