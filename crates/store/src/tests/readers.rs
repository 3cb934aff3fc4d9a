//! Readers of named regions: each has exactly the version that it opened, whatever the writer does.

use super::*;
use crate::{remote::reserved_bytes, slots::GRANULE_BYTES};

fn named(cluster: &Arc<Cluster>, pages: u64, codec: Codec, replace: bool) -> Arc<PageStore> {
    let options = RemoteOptions {
        codec: Some(codec),
        name: Some("x".to_owned()),
        replace,
        ..RemoteOptions::default()
    };
    PageStore::remote(cluster, REGION, pages * 4096, 4096, &options).expect("it fits")
}

/// Program that reads a version, with the bytes that it must see.
struct Reader {
    cluster: Arc<Cluster>,
    store: Arc<PageStore>,
    bytes: Vec<u8>,
}

impl Reader {
    fn open(servers: &[Arc<SimServer>], published: &[u8]) -> Self {
        let cluster = client(servers);
        let store = PageStore::open_to_read(&cluster, REGION, "x").unwrap();
        let bytes = published.to_vec();
        Self {
            cluster,
            store,
            bytes,
        }
    }

    fn check(&self) {
        assert!(vec_of(&self.cluster, &self.store) == self.bytes);
    }
}

/// Writers come and go, publish, lose answers and die; readers come and go at any time.
#[test]
fn readers_see_their_version_while_writers_publish_many() {
    for (seed, codec) in (0..).zip([Codec::Raw, Codec::Lz4, Codec::Raw, Codec::Lz4]) {
        let servers = servers();
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        println!("seed {seed}, {codec:?}");
        let mut published = vec![0; 60 * 4096];
        let mut readers: Vec<Reader> = Vec::new();
        for writer in 0..6 {
            let cluster = client(&servers);
            let store = match writer {
                0 => named(&cluster, 60, codec, false),
                _ => PageStore::open(&cluster, REGION, "x").unwrap(),
            };
            let mut model = published.clone();
            for round in 0..8 {
                let seed = seed * 10_000 + writer * 100 + round;
                conform(&cluster, &store, &mut model, seed, 150);
                if random.random_bool(0.2) {
                    for server in &servers {
                        server.lose_next_publish_answer();
                    }
                    // The other server's manifest is no publication yet.
                    store.publish().unwrap_err();
                    store.publish().unwrap_err();
                    // It was published all the same.
                    published.clone_from(&model);
                    if random.random_bool(0.5) {
                        readers.push(Reader::open(&servers, &published));
                    }
                    conform(&cluster, &store, &mut model, seed + 50, 150);
                }
                store.publish().unwrap();
                published.clone_from(&model);
                while readers.len() < 5 && random.random_bool(0.6) {
                    readers.push(Reader::open(&servers, &published));
                }
                if !readers.is_empty() && random.random_bool(0.5) {
                    let leaves = random.random_range(0..readers.len());
                    readers.swap_remove(leaves);
                }
                readers.iter().for_each(Reader::check);
            }
            // Changes that are not published do not reach readers.
            conform(&cluster, &store, &mut model, seed * 10_000 + 99, 150);
            readers.iter().for_each(Reader::check);
            drop((store, cluster));
            readers.iter().for_each(Reader::check);
        }
        // The name goes, and what was read goes with its last reader.
        client(&servers).remove("x").unwrap();
        readers.push(readers_keep_what_was_removed(&servers));
        readers.iter().for_each(Reader::check);
        assert!(granted(&servers) > 0);
        readers.clear();
        assert_eq!(granted(&servers), 0);
    }
}

/// Returns a reader of a region that was replaced while it was read, and then removed.
fn readers_keep_what_was_removed(servers: &[Arc<SimServer>]) -> Reader {
    let cluster = client(servers);
    let store = named(&cluster, 8, Codec::Raw, false);
    let mut model = vec![0; 8 * 4096];
    conform(&cluster, &store, &mut model, 5, 100);
    store.publish().unwrap();
    let reader = Reader::open(servers, &model);
    drop(store);
    let store = named(&cluster, 4, Codec::Raw, true);
    let mut other = vec![0; 4 * 4096];
    for seed in [6, 7, 8] {
        conform(&cluster, &store, &mut other, seed, 100);
        store.publish().unwrap();
    }
    reader.check();
    drop(store);
    client(servers).remove("x").unwrap();
    reader
}

/// Makes a server with room for `bytes`, and a region of 64 pages there.
fn small_server(bytes: u64) -> (Arc<SimServer>, Arc<Cluster>, Arc<PageStore>) {
    let server = SimServer::new(lending(1, bytes));
    let cluster = client(std::slice::from_ref(&server));
    let store = named(&cluster, 64, Codec::Raw, false);
    (server, cluster, store)
}

fn write_all(cluster: &Arc<Cluster>, store: &Arc<PageStore>, number: u64) -> Option<StoreError> {
    let mut io = queue(cluster);
    (0..64).find_map(|page| write(&mut io, store, page, &odd_page(4096, number + page)).err())
}

#[test]
fn a_full_server_names_the_readers_in_the_way_and_goes_on_when_they_have_gone() {
    let reserved = reserved_bytes(64 * 4096, 4096, true);
    let (server, cluster, store) = small_server(reserved.next_multiple_of(GRANULE_BYTES));
    let servers = std::slice::from_ref(&server);
    let mut readers = Vec::new();
    let refused = loop {
        let version = readers.len() as u64;
        assert!(version < 20, "the server cannot have so much room");
        if let Some(error) = write_all(&cluster, &store, version * 100) {
            break error.to_string();
        }
        if let Err(error) = store.publish() {
            break error.to_string();
        }
        let reader = || Reader::open(servers, &vec_of(&cluster, &store));
        readers.extend([reader(), reader()]);
    };
    assert!(refused.contains("2 readers of version"), "{refused}");
    readers.iter().for_each(Reader::check);
    drop(readers);
    // A server that was full is not asked again at once.
    wait_until("there is room now", || {
        write_all(&cluster, &store, 7000).is_none() && store.publish().is_ok()
    });
}

#[test]
fn what_readers_took_beside_the_reservation_is_given_back() {
    let (server, cluster, store) = small_server(1 << 30);
    let servers = std::slice::from_ref(&server);
    let before = granted(servers);
    let mut readers = Vec::new();
    for version in 0..200 {
        assert!(write_all(&cluster, &store, version * 100).is_none());
        store.publish().unwrap();
        readers.push(Reader::open(servers, &vec_of(&cluster, &store)));
    }
    assert!(granted(servers) > before);
    readers.iter().for_each(Reader::check);
    readers.clear();
    for version in 0..5 {
        assert!(write_all(&cluster, &store, version * 100).is_none());
        store.publish().unwrap();
    }
    assert_eq!(granted(servers), before);
}

#[test]
fn a_writer_that_comes_while_old_versions_are_read_spares_them() {
    let (server, cluster, store) = small_server(1 << 30);
    let servers = std::slice::from_ref(&server);
    assert!(write_all(&cluster, &store, 1).is_none());
    store.publish().unwrap();
    let reader = Reader::open(servers, &vec_of(&cluster, &store));
    assert!(write_all(&cluster, &store, 100).is_none());
    store.publish().unwrap();
    drop((store, cluster));
    let cluster = client(servers);
    let store = PageStore::open(&cluster, REGION, "x").unwrap();
    for version in 2..8 {
        assert!(write_all(&cluster, &store, version * 100).is_none());
        reader.check();
        store.publish().unwrap();
        reader.check();
    }
    let used = |store: &PageStore| pool(store).used_bytes();
    let with_reader = used(&store);
    drop(reader);
    store.publish().unwrap();
    assert!(used(&store) < with_reader, "its slots are free");
}

#[test]
fn a_region_is_read_by_the_program_that_writes_it_and_never_written_by_a_reader() {
    let (_server, cluster, store) = small_server(1 << 30);
    assert!(write_all(&cluster, &store, 1).is_none());
    store.publish().unwrap();
    let bytes = vec_of(&cluster, &store);
    let readers = [(); 2].map(|()| PageStore::open_to_read(&cluster, REGION, "x").unwrap());
    assert!(write_all(&cluster, &store, 100).is_none());
    store.publish().unwrap();
    for reader in &readers {
        assert!(vec_of(&cluster, reader) == bytes);
        assert!(matches!(
            reader.publish(),
            Err(PublishStoreError::NotNamed { .. })
        ));
    }
    let listed = cluster.names().unwrap();
    assert_eq!((listed[0].readers, listed[0].old_versions), (2, 1));
    drop(readers);
    assert_eq!(cluster.names().unwrap()[0].readers, 0);
}
