//! Clients of a running server: limits that they are told, figures, and memory that is given back.
#![allow(clippy::unwrap_used, reason = "a test that fails here says where")]

mod common;

use std::time::Duration;

use common::{connect, transfer, write};
use farpage_fabric::{Session, Verb};
use farpage_testkit::{Both, RawClient, wait_until};
use farpage_wire::ServerStat;

const LEASE: Duration = Duration::from_secs(10);
const MIB: u64 = 1 << 20;

#[test]
fn full_server_names_the_limit_that_stands_in_the_way() {
    let both = Both::start_as(|server| {
        let server = server.capacity(6 * MIB).capacity_per_address(4 * MIB);
        server.lease(LEASE)
    });
    let refused = |session: &Session, bytes| session.grant(bytes).unwrap_err().to_string();
    let (first, second) = (connect(&both.shm), connect(&both.tcp));
    first.grant(MIB).unwrap();
    let said = refused(&first, 4 * MIB);
    let of_one = "no room for 4.0 MiB: 3.0 MiB left of the 4.0 MiB that it lends to one address (--capacity-per-address)";
    assert!(said.contains(of_one), "{said}");
    first.grant(3 * MIB).unwrap();
    let said = refused(&second, 3 * MIB);
    let of_all = "no room for 3.0 MiB: 2.0 MiB left of its capacity of 6.0 MiB";
    assert!(said.contains(of_all), "{said}");
    let said = refused(&second, 2 * MIB + 1);
    assert!(
        said.contains("no room for 2097153 bytes: 2097152 bytes left"),
        "{said}"
    );
}

#[test]
fn clients_are_listed_with_their_address_and_those_that_are_gone_are_not_counted() {
    let both = Both::start(64 * MIB, LEASE);
    let stat = || both.server.stat();
    let here = connect(&both.tcp);
    here.grant(MIB).unwrap();
    let (mut stream, _) = RawClient::session(&both.tcp).unwrap();
    stream.grant(2 * MIB).unwrap();
    let of = |stat: ServerStat| {
        let clients = stat.clients.into_iter();
        let told: Vec<_> = clients.map(|it| (it.connected, it.granted_bytes)).collect();
        (stat.sessions, stat.lost_sessions, told)
    };
    assert_eq!(of(stat()), (2, 0, vec![(true, 2 * MIB), (true, MIB)]));
    let address = &stat().clients[0].address;
    assert!(address.starts_with("127.0.0.1:"), "{address}");
    // The client's connection breaks: the client may come back.
    drop(stream);
    wait_until("the connection's end is noticed", || {
        stat().lost_sessions == 1
    });
    assert_eq!(of(stat()), (1, 1, vec![(false, 2 * MIB), (true, MIB)]));
}

/// Returns the physical bytes of extents that this process maps, as a client or as a server.
fn mapped_extents_resident_bytes() -> u64 {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut is_extent = false;
    let mut kib = 0;
    for line in maps.lines() {
        if let Some(rss) = line.strip_prefix("Rss:") {
            let rss: u64 = rss.trim().trim_end_matches(" kB").parse().unwrap();
            kib += if is_extent { rss } else { 0 };
        } else if line.split(' ').next().unwrap().contains('-') {
            // The first line of a mapping begins with its addresses.
            is_extent = line.contains("farpage-extent");
        }
    }
    kib << 10
}

#[test]
fn memory_that_a_client_still_maps_is_back_when_it_is_released() {
    let both = Both::start(256 * MIB, LEASE);
    let session = connect(&both.shm);
    // Larger than what other tests of this process lend, all of them together.
    let extent = session.grant(200 * MIB).unwrap();
    // The channel keeps its mapping: nothing makes it look whether the lease has ended.
    let mut channel = session.channel::<Vec<u8>>().unwrap();
    for at in 0..100 {
        let bytes = vec![7; 2 << 20];
        transfer(&mut *channel, Verb::Write, extent.id, at * 2 * MIB, bytes).unwrap();
    }
    assert!(mapped_extents_resident_bytes() >= 200 * MIB);
    session.release(extent.id).unwrap();
    let left = mapped_extents_resident_bytes();
    assert!(left < 100 * MIB, "{left} bytes are still there");
}

#[test]
fn a_client_lets_go_of_what_it_gives_back_though_a_channel_remembers_it() {
    let both = Both::start(64 * MIB, LEASE);
    let session = connect(&both.shm);
    let kept = session.grant(MIB).unwrap();
    let extent = session.grant(MIB).unwrap();
    let mut idle = session.channel::<Vec<u8>>().unwrap();
    transfer(&mut *idle, Verb::Write, extent.id, 0, vec![7; 4096]).unwrap();
    session.release(extent.id).unwrap();
    let stat = both.server.stat();
    assert_eq!((stat.granted_bytes, stat.retained_bytes), (MIB, 0));
    let late = transfer(&mut *idle, Verb::Read, extent.id, 0, vec![1; 4096]);
    assert!(late.is_err());
    transfer(&mut *idle, Verb::Write, kept.id, 0, vec![7; 4096]).unwrap();
    drop((idle, session));
    let stat = both.server.stat();
    assert_eq!((stat.granted_bytes, stat.retained_bytes), (0, 0));
}

#[test]
fn dropping_the_server_ends_it_and_removes_its_socket() {
    // The session's lease does not end within the test.
    let both = Both::start(MIB, Duration::from_secs(3600));
    let (shm, tcp) = (both.shm.clone(), both.tcp.clone());
    let session = connect(&shm);
    let ended = std::thread::spawn(|| drop(both.server));
    wait_until("the server has ended", || ended.is_finished());
    let farpage_wire::Endpoint::Shm(path) = &shm else {
        panic!("not shm")
    };
    assert!(!path.exists());
    for endpoint in [&shm, &tcp] {
        assert!(farpage_fabric::Session::connect(endpoint, &Default::default()).is_err());
    }
    assert!(session.grant(1).is_err());
}

#[test]
fn memory_is_backed_only_once_it_is_written() {
    let both = Both::start(1 << 40, LEASE);
    let session = connect(&both.tcp);
    let extent = session.grant(1 << 36).unwrap();
    assert_eq!(both.server.stat().resident_bytes, 0);
    write(&session, &extent, 1 << 35, &vec![1; MIB as usize]).unwrap();
    let resident_bytes = session.stat().unwrap().resident_bytes;
    // Huge pages, where the host uses them for shared memory, round up.
    assert!(
        (MIB..=4 * MIB).contains(&resident_bytes),
        "{resident_bytes}"
    );
    assert_eq!(session.stat().unwrap().bytes_written, MIB);
}
