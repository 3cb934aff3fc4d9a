//! Named regions with copies: opened, published and removed while holders of their name are gone,
//! and come back.

use super::*;
use crate::{NamesError, Redundancy};

const PAGES: u64 = 40;
const NAME: &str = "x";

fn three() -> [Arc<SimServer>; 3] {
    [1, 2, 3].map(|seed| SimServer::new(SimConfig::new(seed)))
}

/// Returns the servers but one.
fn without(servers: &[Arc<SimServer>], at: usize) -> Vec<Arc<SimServer>> {
    let others = servers.iter().enumerate().filter(|(i, _)| *i != at);
    others.map(|(_, server)| server.clone()).collect()
}

fn copied(cluster: &Arc<Cluster>, replace: bool) -> Arc<PageStore> {
    let options = RemoteOptions {
        codec: Some(Codec::Raw),
        reserve: Reserve::OnDemand,
        redundancy: Some(Redundancy::Copies(2)),
        name: Some(NAME.to_owned()),
        replace,
        ..RemoteOptions::default()
    };
    PageStore::remote(cluster, REGION, PAGES * 4096, 4096, &options).expect("it fits")
}

fn open(cluster: &Arc<Cluster>) -> Result<Arc<PageStore>, OpenStoreError> {
    PageStore::open(cluster, REGION, NAME)
}

/// Opens the region once a client that was dropped has let go of it, whose repairs may run still, and
/// once no answer is lost any more.
fn open_soon(cluster: &Arc<Cluster>) -> Result<Arc<PageStore>, OpenStoreError> {
    let mut opened = None;
    wait_until("the region is free", || {
        let result = open(cluster);
        let is_free = !matches!(
            result,
            Err(OpenStoreError::InUse { .. } | OpenStoreError::Complete { .. })
        );
        opened = Some(result);
        is_free
    });
    opened.expect("waited for")
}

fn open_to_read(cluster: &Arc<Cluster>) -> Result<Arc<PageStore>, OpenStoreError> {
    PageStore::open_to_read(cluster, REGION, NAME)
}

/// Writes all pages: those of `version`.
fn write_all(cluster: &Arc<Cluster>, store: &Arc<PageStore>, version: u64) {
    let mut io = queue(cluster);
    for page in 0..PAGES {
        let bytes = odd_page(4096, version * 1000 + page);
        write(&mut io, store, page, &bytes).unwrap_or_else(|error| panic!("{error}"));
    }
}

/// Returns the version whose pages the store has. All have to be of one version.
fn version_of(cluster: &Arc<Cluster>, store: &Arc<PageStore>) -> u64 {
    let mut io = queue(cluster);
    let first = read(&mut io, store, 0).unwrap();
    let is_it = |version: &u64| odd_page(4096, version * 1000) == first;
    let version = (0..100).find(is_it).expect("a version that was written");
    for page in 1..PAGES {
        let expected = odd_page(4096, version * 1000 + page);
        assert!(
            read(&mut io, store, page).unwrap() == expected,
            "page {page} is not of version {version}"
        );
    }
    version
}

/// Makes a region, publishes version 1, and closes the region.
fn publish_first(servers: &[Arc<SimServer>]) {
    let cluster = client(servers);
    let store = copied(&cluster, false);
    write_all(&cluster, &store, 1);
    store.publish().unwrap();
}

/// Opens the region for writing, returns its version, and publishes another.
fn publish_next(servers: &[Arc<SimServer>], version: u64) -> u64 {
    let cluster = client(servers);
    let store = open_soon(&cluster).unwrap();
    let found = version_of(&cluster, &store);
    write_all(&cluster, &store, version);
    store.publish().unwrap();
    found
}

fn read_version(servers: &[Arc<SimServer>]) -> u64 {
    let cluster = client(servers);
    version_of(&cluster, &open_to_read(&cluster).unwrap())
}

#[test]
fn a_region_is_read_and_written_after_the_death_of_any_server() {
    for dead in 0..3 {
        let servers = three();
        publish_first(&servers);
        servers[dead].kill();
        let left = without(&servers, dead);
        assert_eq!(read_version(&left), 1);
        assert_eq!(publish_next(&left, 2), 1);
        assert_eq!(publish_next(&left, 3), 2);
        assert_eq!(read_version(&left), 3);
    }
}

#[test]
fn a_server_dies_while_a_region_is_open_and_its_copies_are_made_again() {
    let servers = three();
    let cluster = client(&servers);
    let store = copied(&cluster, false);
    write_all(&cluster, &store, 1);
    store.publish().unwrap();
    servers[2].kill();
    write_all(&cluster, &store, 2);
    store.publish().unwrap();
    cluster.health.failed(2);
    pool(&store).mark_dead(2, true);
    wait_until("copies are made again", || {
        pool(&store).under_protected_bytes() == 0
    });
    store.publish().unwrap();
    drop((store, cluster));
    // What is left has all pages twice. The name has two holders of three.
    assert_eq!(read_version(&servers[..2]), 2);
    assert_eq!(publish_next(&servers[..2], 3), 2);
    // One holder of three is not enough, although it has all pages.
    servers[0].kill();
    let error = open_to_read(&client(&servers[1..2])).map(drop).unwrap_err();
    assert!(matches!(error, OpenStoreError::Holders { .. }), "{error}");
}

/// Each of three holders takes the publication, takes it and does not answer, or is cut off.
#[test]
fn a_publication_that_any_holders_miss_is_the_previous_version_or_the_new_one() {
    let mut news = 0;
    for outcome in 0..27u32 {
        for silent in 0..3 {
            let servers = three();
            publish_first(&servers);
            let cluster = client(&servers);
            let store = open_soon(&cluster).unwrap();
            write_all(&cluster, &store, 2);
            let faults = [outcome % 3, outcome / 3 % 3, outcome / 9];
            for (server, fault) in servers.iter().zip(faults) {
                match fault {
                    1 => server.lose_next_publish_answer(),
                    2 => server.cut(),
                    _ => {}
                }
            }
            let is_published = store.publish().is_ok();
            drop((store, cluster));
            servers.iter().for_each(|server| server.heal());
            let case = format!("{faults:?}, then without {silent}, published {is_published}");
            println!("{case}");
            // 1. The next writer finds one of both, and that is it from then on.
            let some = without(&servers, silent);
            let find = |some: &[Arc<SimServer>]| {
                let cluster = client(some);
                match open_soon(&cluster) {
                    Ok(store) => Some(version_of(&cluster, &store)),
                    // The pages are on the silent server, and one that has missed them.
                    Err(OpenStoreError::ExtentMissing { .. }) if faults != [0; 3] => None,
                    Err(error) => panic!("{case}: {error}"),
                }
            };
            let found = find(&some).unwrap_or_else(|| find(&servers).expect("all are there"));
            assert!(found == 2 || found == 1 && !is_published, "{case}: {found}");
            news += u32::from(found == 2);
            // 2. Whichever holders answer, nobody finds the other one.
            for silent in 0..3 {
                let again = find(&without(&servers, silent));
                assert!(again.is_none_or(|again| again == found), "{case}");
            }
            // A reader uses no holder that the last writer has not seen.
            assert_eq!(find(&servers), Some(found), "{case}");
            assert_eq!(read_version(&servers), found, "{case}");
            assert_eq!(publish_next(&servers, 3), found, "{case}");
        }
    }
    assert!(news > 0 && news < 81, "both happen: {news}");
}

#[test]
fn a_holder_that_comes_back_with_an_old_version_does_not_win() {
    let servers = three();
    publish_first(&servers);
    servers[0].cut();
    for version in 2..5 {
        publish_next(&servers[1..], version);
    }
    servers[0].heal();
    for silent in 1..3 {
        let some = without(&servers, silent);
        let cluster = client(&some);
        // Holders that the newest version names have a majority, or nothing is read.
        match open_to_read(&cluster) {
            Ok(store) => assert_eq!(version_of(&cluster, &store), 4),
            Err(error) => assert!(matches!(error, OpenStoreError::Holders { .. }), "{error}"),
        }
    }
    assert_eq!(publish_next(&servers, 5), 4);
    // The holder takes part again.
    for dead in 0..3 {
        assert_eq!(read_version(&without(&servers, dead)), 5);
    }
    // Alone it has no majority, and its version is not given out.
    assert!(open(&client(&servers[..1])).is_err());
    assert!(open_to_read(&client(&servers[..1])).is_err());
}

#[test]
fn a_region_has_one_writer() {
    let servers = three();
    publish_first(&servers);
    let first = client(&servers);
    let store = open(&first).unwrap();
    for some in [&servers[..], &servers[..2], &servers[1..]] {
        let error = open(&client(some)).map(drop).unwrap_err();
        assert!(matches!(error, OpenStoreError::InUse { .. }), "{error}");
        assert!(client(some).remove(NAME).is_err());
    }
    write_all(&first, &store, 2);
    store.publish().unwrap();
    drop((store, first));
    assert_eq!(publish_next(&servers, 3), 2);
}

#[test]
fn one_of_two_servers_is_read_and_written_again_once_it_was_adopted() {
    let servers = servers();
    publish_first(&servers);
    assert_eq!(publish_next(&servers, 2), 1);
    servers[0].cut();
    let left = &servers[1..];
    let error = open(&client(left)).map(drop).unwrap_err();
    assert!(
        matches!(
            error,
            OpenStoreError::Holders {
                have: 1,
                need: 2,
                ..
            }
        ),
        "{error}"
    );
    assert!(error.to_string().contains("adopt"), "{error}");
    assert_eq!(read_version(left), 2);
    client(left).adopt(NAME).unwrap();
    assert_eq!(publish_next(left, 3), 2);
    // The other one has no say when it comes back.
    servers[0].heal();
    assert_eq!(publish_next(&servers, 4), 3);
    assert_eq!(read_version(&servers), 4);
}

#[test]
fn a_removed_region_does_not_come_back_with_a_holder_that_was_away() {
    let servers = three();
    publish_first(&servers);
    servers[2].cut();
    client(&servers[..2]).remove(NAME).unwrap();
    servers[2].heal();
    assert!(client(&servers[..2]).names().unwrap().is_empty());
    for some in [&servers[..], &servers[..2], &servers[1..]] {
        for error in [open(&client(some)), open_to_read(&client(some))] {
            let error = error.map(drop).unwrap_err();
            assert!(
                matches!(
                    error,
                    OpenStoreError::NotFound { .. } | OpenStoreError::Holders { .. }
                ),
                "{error}"
            );
        }
    }
    // Nothing is left once all holders have removed it.
    client(&servers).remove(NAME).unwrap();
    wait_until("nothing is left", || granted(&servers) == 0);
    publish_first(&servers);
    assert_eq!(read_version(&servers), 1);
    client(&servers).remove(NAME).unwrap();
    let error = client(&servers).remove(NAME).unwrap_err();
    assert!(matches!(error, NamesError::NotFound { .. }), "{error}");
    wait_until("nothing is left", || granted(&servers) == 0);
}

#[test]
fn a_region_replaces_another_of_its_name_at_its_first_publication() {
    let servers = three();
    publish_first(&servers);
    let cluster = client(&servers);
    let store = copied(&cluster, true);
    write_all(&cluster, &store, 2);
    assert_eq!(read_version(&servers), 1);
    store.publish().unwrap();
    drop((store, cluster));
    for dead in 0..3 {
        assert_eq!(read_version(&without(&servers, dead)), 2);
    }
    // One without copies as well: its name keeps its holders.
    let cluster = client(&servers);
    let options = RemoteOptions {
        name: Some(NAME.to_owned()),
        replace: true,
        ..RemoteOptions::default()
    };
    let store = PageStore::remote(&cluster, REGION, PAGES * 4096, 4096, &options).unwrap();
    write_all(&cluster, &store, 3);
    assert_eq!(read_version(&servers), 2);
    store.publish().unwrap();
    drop((store, cluster));
    assert_eq!(publish_next(&servers, 4), 3);
}

#[test]
fn readers_keep_their_version_while_holders_come_and_go() {
    for seed in 0..4 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        println!("seed {seed}");
        let servers = three();
        publish_first(&servers);
        let mut readers: Vec<(Arc<Cluster>, Arc<PageStore>, u64)> = Vec::new();
        let mut published = 1;
        for _ in 0..6 {
            let away = random.random_range(0..4);
            if let Some(server) = servers.get(away) {
                server.cut();
            }
            let some = without(&servers, away);
            let cluster = client(&some);
            let store = open_soon(&cluster).unwrap();
            assert_eq!(version_of(&cluster, &store), published);
            for _ in 0..4 {
                published += 1;
                write_all(&cluster, &store, published);
                store.publish().unwrap();
                if random.random_bool(0.6) {
                    let reader = client(&some);
                    let version = open_to_read(&reader).unwrap();
                    readers.push((reader, version, published));
                }
                if readers.len() > 3 {
                    readers.swap_remove(random.random_range(0..readers.len()));
                }
            }
            servers.iter().for_each(|server| server.heal());
            for (cluster, store, version) in &readers {
                assert_eq!(version_of(cluster, store), *version);
            }
        }
        readers.clear();
        client(&servers).remove(NAME).unwrap();
        wait_until("nothing is left", || granted(&servers) == 0);
    }
}
