//! Named regions with copies: opened, published and removed while holders of their name are gone,
//! and come back.

use super::*;
use farpage_fabric::sim::RequestFault;

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

fn copies(replace: bool) -> RemoteOptions {
    RemoteOptions {
        codec: Some(Codec::Raw),
        reserve: Reserve::OnDemand,
        redundancy: Some(Redundancy::Copies(2)),
        name: Some(NAME.to_owned()),
        replace,
        ..RemoteOptions::default()
    }
}

fn create(cluster: &Arc<Cluster>) -> Result<Arc<PageStore>, CreateError> {
    PageStore::remote(cluster, REGION, PAGES * 4096, 4096, &copies(false))
}

fn copied(cluster: &Arc<Cluster>, replace: bool) -> Arc<PageStore> {
    let options = copies(replace);
    PageStore::remote(cluster, REGION, PAGES * 4096, 4096, &options).expect("it fits")
}

fn open(cluster: &Arc<Cluster>) -> Result<Arc<PageStore>, OpenStoreError> {
    PageStore::open(cluster, REGION, NAME)
}

/// Opens the region once a client that was dropped has let go of it, whose repairs may run still,
/// and once no answer is lost any more.
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

/// Writes all pages twice after a flush that failed, and publishes nothing: the slots of the
/// version that was not published go out of use, and are written again if they are free.
fn writes_on(cluster: &Arc<Cluster>, store: &Arc<PageStore>) {
    for version in [50, 51] {
        write_all(cluster, store, version);
    }
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

/// Returns true if an error says that too few holders of the name answer.
fn lacks_holders(error: &OpenStoreError) -> bool {
    matches!(error, OpenStoreError::Holders { .. })
}

#[test]
fn one_of_two_servers_is_read_and_not_written() {
    let servers = servers();
    publish_first(&servers);
    assert_eq!(publish_next(&servers, 2), 1);
    for away in 0..2 {
        servers[away].cut();
        let left = without(&servers, away);
        let error = open(&client(&left)).map(drop).unwrap_err();
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
        assert_eq!(read_version(&left), 2);
        servers[away].heal();
    }
    assert_eq!(publish_next(&servers, 3), 2);
}

/// Reads at one of two servers. A version that one of them has accepted may be published by the
/// time the other one is asked. So neither gives it to readers before the writer says that it is.
#[test]
fn a_version_that_one_of_two_servers_has_is_not_read_unless_it_stays() {
    let mut unsaid = 0;
    for (others, at) in (0..8).flat_map(|others| [(others, 0), (others, 1)]) {
        let servers = servers();
        publish_first(&servers);
        let cluster = client(&servers);
        let store = open(&cluster).unwrap();
        write_all(&cluster, &store, 2);
        servers[at].fail_request(others, RequestFault::RequestLost);
        let is_published = store.publish().is_ok();
        servers[at].spare_requests();
        let mut read = 1;
        for one in &servers {
            let cluster = client(std::slice::from_ref(one));
            match open_to_read(&cluster) {
                Ok(store) => {
                    let version = version_of(&cluster, &store);
                    assert!(version >= read, "{version} after {read}");
                    read = version;
                }
                Err(error) => {
                    assert!(lacks_holders(&error), "{error}");
                    unsaid += 1;
                }
            }
        }
        drop((store, cluster));
        let found = publish_next(&servers, 3);
        assert!(found >= read && (found == 2 || !is_published), "{found}");
    }
    assert!(unsaid > 0, "no server is silent about a version");
}

#[test]
fn a_removed_region_does_not_come_back_with_a_holder_that_was_away() {
    let servers = three();
    publish_first(&servers);
    servers[2].cut();
    client(&servers[..2]).remove(NAME).unwrap();
    // The name is free once all holders have removed it.
    let error = create(&client(&servers[..2])).map(drop).unwrap_err();
    assert!(matches!(error, CreateError::Holders { .. }), "{error}");
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
    publish_first(&servers);
    assert_eq!(read_version(&servers), 1);
    client(&servers).remove(NAME).unwrap();
    let error = client(&servers).remove(NAME).unwrap_err();
    assert!(matches!(error, NamesError::NotFound { .. }), "{error}");
    wait_until("nothing is left", || granted(&servers) == 0);
}

/// The operator takes a name off two holders of three. A region of that name that is made there
/// since has nothing to do with what the third holder has.
#[test]
fn a_holder_of_another_life_of_the_name_has_no_say() {
    let servers = three();
    publish_first(&servers);
    for version in 2..6 {
        publish_next(&servers, version);
    }
    servers[2].cut();
    for server in &servers[..2] {
        server.remove_name(NAME).unwrap();
    }
    let mut now = vec![servers[0].clone(), servers[1].clone()];
    now.push(SimServer::new(SimConfig::new(4)));
    let cluster = client(&now);
    let store = copied(&cluster, false);
    write_all(&cluster, &store, 7);
    store.publish().unwrap();
    drop((store, cluster));
    servers[2].heal();
    assert_eq!(read_version(&now), 7);
    assert_eq!(publish_next(&now, 8), 7);
    // Both lives at once are an error, and nothing is completed.
    let all = [&now[..], &servers[2..]].concat();
    for opened in [open(&client(&all)), open_to_read(&client(&all))] {
        let error = opened.map(drop).unwrap_err();
        assert!(error.to_string().contains("apart"), "{error}");
    }
    assert!(client(&all).remove(NAME).is_err());
    for opened in [
        open(&client(&servers[2..])),
        open_to_read(&client(&servers[2..])),
    ] {
        let error = opened.map(drop).unwrap_err();
        assert!(lacks_holders(&error), "{error}");
    }
    servers[2].remove_name(NAME).unwrap();
    assert_eq!(publish_next(&all, 9), 8);
}

#[test]
fn names_are_listed_and_removed_while_a_server_is_dead() {
    for dead in 0..3 {
        let servers = three();
        publish_first(&servers);
        let cluster = client(&servers);
        servers[dead].kill();
        assert_eq!(cluster.names().unwrap().len(), 1);
        cluster.remove(NAME).unwrap();
        assert!(cluster.names().unwrap().is_empty());
        let error = open(&client(&without(&servers, dead)))
            .map(drop)
            .unwrap_err();
        assert!(matches!(error, OpenStoreError::NotFound { .. }), "{error}");
    }
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
    assert_eq!(publish_next(&servers, 3), 2);
}

#[test]
fn a_region_is_replaced_by_one_of_its_own_kind_on_its_own_servers() {
    let alone = |replace| RemoteOptions {
        name: Some(NAME.to_owned()),
        replace,
        ..RemoteOptions::default()
    };
    let servers = three();
    let refused = |servers: &[Arc<SimServer>], options: &RemoteOptions| {
        let cluster = client(servers);
        let made = PageStore::remote(&cluster, REGION, PAGES * 4096, 4096, options);
        made.map(drop).unwrap_err()
    };
    // 1. With copies, none replaces it that has none.
    publish_first(&servers);
    let error = refused(&servers, &alone(true));
    assert!(
        matches!(error, CreateError::OtherRedundancy { .. }),
        "{error}"
    );
    // 2. Nor one with other holders.
    let other = [&servers[..2], &[SimServer::new(SimConfig::new(4))]].concat();
    let error = refused(&other, &copies(true));
    assert!(matches!(error, CreateError::OtherServers { .. }), "{error}");
    assert_eq!(publish_next(&servers, 2), 1);
    client(&servers).remove(NAME).unwrap();
    // 3. Without copies, none replaces it that has some.
    let cluster = client(&servers);
    let store = PageStore::remote(&cluster, REGION, PAGES * 4096, 4096, &alone(false)).unwrap();
    write_all(&cluster, &store, 3);
    store.publish().unwrap();
    drop((store, cluster));
    let error = refused(&servers, &copies(true));
    assert!(
        matches!(error, CreateError::OtherRedundancy { .. }),
        "{error}"
    );
    assert_eq!(publish_next(&servers, 4), 3);
    // 4. It is replaced, also by a runtime that names the servers in another order.
    let mut turned = servers.to_vec();
    turned.rotate_left(1);
    let cluster = client(&turned);
    let store = PageStore::remote(&cluster, REGION, PAGES * 4096, 4096, &alone(true)).unwrap();
    write_all(&cluster, &store, 5);
    store.publish().unwrap();
    drop((store, cluster));
    assert_eq!(publish_next(&servers, 6), 5);
}

/// A reader at two of three holders reads a version. The next one is accepted by one of these and
/// by the third holder. The next writer asks the other two, and hears of the reader when it
/// completes the version that one of them has missed.
#[test]
fn a_reader_keeps_its_version_at_a_holder_that_missed_the_next_one() {
    let mut missed = 0;
    for others in 0.. {
        let servers = three();
        publish_first(&servers);
        let cluster = client(&servers);
        let store = open(&cluster).unwrap();
        // The last version needs no extent that the holders do not keep yet: a holder that misses
        // it has heard of nothing since the reader came.
        for version in 2..6 {
            write_all(&cluster, &store, version);
            store.publish().unwrap();
        }
        let at_two = client(&servers[1..]);
        let reader = open_to_read(&at_two).unwrap();
        write_all(&cluster, &store, 6);
        servers[2].fail_request(others, RequestFault::RequestLost);
        store.publish().unwrap();
        if servers[2].spare_requests() {
            break;
        }
        drop((store, cluster));
        let cluster = client(&without(&servers, 1));
        let store = open_soon(&cluster).unwrap();
        missed += 1;
        assert_eq!(version_of(&cluster, &store), 6);
        for version in 7..10 {
            write_all(&cluster, &store, version);
            store.publish().unwrap();
            assert_eq!(version_of(&at_two, &reader), 5, "{others} before the fault");
        }
    }
    assert!(missed > 0, "the third server has missed the version alone");
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
            // Another server may be away next.
            wait_until("copies are made again", || {
                pool(&store).under_protected_bytes() == 0
            });
            published += 1;
            write_all(&cluster, &store, published);
            store.publish().unwrap();
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

/// Deed of a program at a name while control requests fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deed {
    /// Publishes the first version.
    Creates,
    /// Publishes the second version.
    Flushes,
    /// Opens the region for writing.
    Opens,
    /// Opens the region for writing, one holder of which has the next version.
    Completes,
    Removes,
}

/// Continuation after a deed that has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// Repetition of the deed by the same program.
    Again,
    /// Another program opens the region.
    Reopened,
}

/// Control request that fails: the one at a server after so many others there.
type Failing = (usize, u64, RequestFault);

/// Every control request of a deed fails once: it is lost, its answer is lost, or its server is cut
/// off with it. Then the same while a second server is cut off at any moment, and while both
/// others are. The program goes on after a flush that has failed. The name has the version before
/// or the new one, whole, and keeps it.
#[test]
fn any_requests_that_fail_leave_the_version_before_or_the_new_one() {
    let kinds = [
        RequestFault::RequestLost,
        RequestFault::AnswerLost,
        RequestFault::Cut,
    ];
    for deed in [
        Deed::Creates,
        Deed::Flushes,
        Deed::Opens,
        Deed::Completes,
        Deed::Removes,
    ] {
        let (mut cases, mut failures) = (0, 0);
        let mut all_fail = |faults: &[Failing], next| {
            let (all_fail, is_done) = does(deed, faults, next);
            cases += u32::from(all_fail);
            failures += u32::from(!is_done);
            all_fail
        };
        for next in [Next::Again, Next::Reopened] {
            // 1. One request fails. Holds the number of requests that each server is sent.
            let mut requests = [0; 3];
            for (at, kind) in (0..3).flat_map(|at| kinds.map(|kind| (at, kind))) {
                let all = (0..).take_while(|others| all_fail(&[(at, *others, kind)], next));
                requests[at] = all.count() as u64;
            }
            // 2. A second server is cut off before, meanwhile or afterwards.
            if next == Next::Again && !matches!(deed, Deed::Creates | Deed::Flushes) {
                continue;
            }
            let both = (0..3).flat_map(|at| (0..3).map(move |second| (at, second)));
            for (at, second) in both.filter(|(at, second)| at != second) {
                for others in 0..requests[at] {
                    for cut in 0..requests[second] {
                        let cut = (second, cut, RequestFault::Cut);
                        for kind in [RequestFault::RequestLost, RequestFault::AnswerLost] {
                            all_fail(&[(at, others, kind), cut], next);
                        }
                    }
                }
            }
            // 3. A server accepts and does not answer, and both others are cut off.
            for (at, others) in (0..3).flat_map(|at| (0..requests[at]).map(move |it| (at, it))) {
                let cut = |second| (second, others, RequestFault::Cut);
                let faults = [
                    (at, others, RequestFault::AnswerLost),
                    cut((at + 1) % 3),
                    cut((at + 2) % 3),
                ];
                all_fail(&faults, next);
            }
        }
        println!("{deed:?}: {cases} cases, and {failures} that failed");
        assert!(
            cases > 100 && failures > 50,
            "{deed:?}: {cases}, {failures}"
        );
    }
}

/// Does a deed while requests fail, and what comes next. Returns true if all these requests were
/// sent, and true if the deed was done.
fn does(deed: Deed, faults: &[Failing], next: Next) -> (bool, bool) {
    let case = format!("{deed:?}: {faults:?}, then {next:?}");
    let servers = three();
    if deed != Deed::Creates {
        publish_first(&servers);
    }
    // 1. Versions that may be found afterwards. Zero: there is no region.
    let cluster = client(&servers);
    let arm = || {
        for (at, others, fault) in faults {
            servers[*at].fail_request(*others, *fault);
        }
    };
    let heal = || {
        let spared = servers.iter().filter(|server| server.spare_requests());
        let all_fail = spared.count() == 0;
        servers.iter().for_each(|server| server.heal());
        all_fail
    };
    let publish = |cluster: &Arc<Cluster>, store: &Arc<PageStore>, version| {
        wait_until("it is published", || {
            write_all(cluster, store, version);
            store.publish().is_ok()
        });
    };
    let (all_fail, is_done, possible) = match deed {
        Deed::Creates => {
            let store = copied(&cluster, false);
            write_all(&cluster, &store, 1);
            arm();
            let result = store.publish();
            let all_fail = heal();
            let mut possible = vec![0, 1];
            if result.is_err() {
                writes_on(&cluster, &store);
            }
            if next == Next::Again && result.is_err() {
                publish(&cluster, &store, 2);
                possible = vec![2];
            } else if result.is_ok() {
                possible = vec![1];
            }
            (all_fail, result.is_ok(), possible)
        }
        Deed::Flushes => {
            let store = open(&cluster).unwrap();
            write_all(&cluster, &store, 2);
            arm();
            let result = store.publish();
            let all_fail = heal();
            let mut possible = vec![1, 2];
            if result.is_err() {
                writes_on(&cluster, &store);
            }
            if next == Next::Again && result.is_err() {
                publish(&cluster, &store, 3);
                possible = vec![3];
            } else if result.is_ok() {
                possible = vec![2];
            }
            (all_fail, result.is_ok(), possible)
        }
        Deed::Opens | Deed::Completes => {
            let mut possible = vec![1];
            if deed == Deed::Completes {
                let before = client(&servers);
                let store = open(&before).unwrap();
                write_all(&before, &store, 2);
                // The other two take the extents, and not the version.
                servers[1].fail_request(1, RequestFault::Cut);
                servers[2].fail_request(1, RequestFault::Cut);
                possible = match store.publish() {
                    Ok(()) => vec![2],
                    Err(_) => vec![1, 2],
                };
                drop((store, before));
                servers.iter().for_each(|server| {
                    server.spare_requests();
                    server.heal();
                });
            }
            arm();
            let result = open(&cluster);
            let all_fail = heal();
            let result = result.map(|store| version_of(&cluster, &store));
            let is_done = result.is_ok();
            let found = match result {
                Ok(found) => Some(found),
                Err(_) if next == Next::Again => match open(&cluster) {
                    Ok(store) => Some(version_of(&cluster, &store)),
                    // A server that was not told that the program lets the name go.
                    Err(OpenStoreError::InUse { .. }) => None,
                    Err(error) => panic!("{case}: {error}"),
                },
                Err(_) => None,
            };
            if let Some(found) = found {
                assert!(possible.contains(&found), "{case}: {found}");
                possible = vec![found];
            }
            (all_fail, is_done, possible)
        }
        Deed::Removes => {
            arm();
            let result = cluster.remove(NAME);
            let all_fail = heal();
            let mut possible = vec![0, 1];
            if next == Next::Again && result.is_err() {
                wait_until("it is removed", || {
                    matches!(
                        cluster.remove(NAME),
                        Ok(()) | Err(NamesError::NotFound { .. })
                    )
                });
                possible = vec![0];
            } else if result.is_ok() {
                possible = vec![0];
            }
            (all_fail, result.is_ok(), possible)
        }
    };
    drop(cluster);
    // 2. What is found stays, whichever holder is away.
    let find = |some: &[Arc<SimServer>]| {
        let cluster = client(some);
        match open_soon(&cluster) {
            Ok(store) => Some(version_of(&cluster, &store)),
            Err(OpenStoreError::NotFound { .. }) => Some(0),
            // The server that has missed the request has no copies of the version.
            Err(OpenStoreError::ExtentMissing { .. }) => None,
            Err(error) => panic!("{case}: {error}"),
        }
    };
    let found = find(&servers).expect("all are there");
    assert!(
        possible.contains(&found),
        "{case}: {found} is none of {possible:?}"
    );
    for away in 0..3 {
        let again = find(&without(&servers, away));
        assert!(
            again.is_none_or(|again| again == found),
            "{case}: {again:?} and not {found} without {away}"
        );
    }
    assert_eq!(find(&servers), Some(found), "{case}");
    if found > 0 {
        assert_eq!(read_version(&servers), found, "{case}");
    }
    // 3. The name goes on.
    match found {
        0 => publish_first(&servers),
        found => assert_eq!(publish_next(&servers, 9), found, "{case}"),
    }
    (all_fail, is_done)
}
