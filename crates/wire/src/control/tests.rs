//! Bytes of all messages, and bytes that are none.

use std::fmt;

use proptest::{collection::vec, prelude::*};
use serde::{Serialize, de::DeserializeOwned};

use super::*;
use crate::{
    ClientStat, PersistStat, ServerId, ShareStat, TierStat,
    register::{Register, Stamp},
};

#[test]
fn hello_has_pinned_bytes() {
    assert_eq!(
        &Hello::new(Purpose::Data).encode(),
        b"farpage\0\x0c\0\x02\0\0\0\0\0"
    );
}

#[test]
fn another_version_is_named_and_not_called_garbage() {
    let mut bytes = Hello::new(Purpose::Control).encode();
    bytes[8] = 8;
    bytes[10] = 77;
    let error = Hello::decode(&bytes).expect_err("version 8");
    assert_eq!(
        error,
        ControlDecodeError::Version {
            theirs: 8,
            ours: VERSION
        }
    );
    assert_eq!(
        Hello::decode(b"GET / HTTP/1.1\r\n"),
        Err(ControlDecodeError::NotFarpage)
    );
}

/// Checks that a message is sent as the bytes `expected`, and read from these alone: a cut or
/// lengthened message is an error.
fn travels<T>((message, expected): (T, Vec<u8>))
where
    T: Serialize + DeserializeOwned + PartialEq + fmt::Debug,
{
    let frame = encode(&message).expect("short");
    let (prefix, body) = frame.split_first_chunk().expect("a prefix");
    assert_eq!(body, expected, "{message:?}");
    assert_eq!(frame_bytes(*prefix, MAX_FRAME_BYTES), Ok(body.len()));
    let cut = decode::<T>(&body[..body.len() - 1]);
    assert!(cut.is_err(), "{message:?}: {cut:?}");
    for extra in [0, 1, 0xff] {
        let longer = decode::<T>(&[body, &[extra]].concat());
        assert!(longer.is_err(), "{message:?}: {longer:?}");
    }
    assert_eq!(decode(body), Ok(message));
}

/// A failure means that the protocol has changed: see [`VERSION`].
#[test]
fn every_message_has_the_bytes_of_this_version() {
    assert_eq!(VERSION, 12);
    let (session, secret) = (SessionId(300), Secret([7; 16]));
    let (id, bytes) = (ExtentId(5), 300);
    let (name, manifest) = ("n".to_owned(), vec![9]);
    let sevens = [7; 16];
    let key = PublicKey([6; 32]);
    let epoch = Epoch {
        counter: 3,
        writer: 4,
    };
    let ballot = Ballot {
        life: 6,
        stamp: Stamp { epoch, version: 2 },
        holders: vec![ServerId(8)],
        removed: false,
    };
    let register = Register {
        promised: epoch,
        accepted: Some(ballot.clone()),
        is_chosen: true,
    };
    let vote = (ServerId(8), register);
    let vote_bytes = [8, 3, 4, 1, 6, 3, 4, 2, 1, 8, 0, 1];
    let requests = [
        (
            Request::Begin {
                client: "c".to_owned(),
                resume: Some((session, secret)),
            },
            [&[0, 1, b'c', 1, 0xac, 2][..], &sevens].concat(),
        ),
        (
            Request::Attach {
                session,
                secret,
                line: 300,
            },
            [&[1, 0xac, 2][..], &sevens, &[0xac, 2]].concat(),
        ),
        (Request::Renew, vec![2]),
        (Request::Goodbye, vec![3]),
        (
            Request::Grant {
                bytes,
                atomics: true,
                serial: Some(300),
            },
            vec![4, 0xac, 2, 1, 1, 0xac, 2],
        ),
        (Request::Release { extent: id }, vec![5, 5]),
        (
            Request::Publish {
                name: name.clone(),
                manifest: manifest.clone(),
                extents: vec![id],
                ballot: Some(Box::new(ballot.clone())),
                keeps: true,
            },
            vec![6, 1, b'n', 1, 9, 1, 5, 1, 6, 3, 4, 2, 1, 8, 0, 1],
        ),
        (
            Request::Open {
                name: name.clone(),
                serial: None,
            },
            vec![7, 1, b'n', 0],
        ),
        (
            Request::Remove {
                name: name.clone(),
                owner: None,
            },
            vec![8, 1, b'n', 0],
        ),
        (
            Request::Remove {
                name: name.clone(),
                owner: Some(key),
            },
            [&[8, 1, b'n', 1][..], &[6; 32]].concat(),
        ),
        (Request::Stat, vec![9]),
        (
            Request::Contents {
                plain_bytes: 300,
                stored_bytes: 2,
            },
            vec![10, 0xac, 2, 2],
        ),
        (Request::Challenge, vec![11]),
        (
            Request::Identify {
                key,
                signature: Signature([[4; 32], [5; 32]]),
            },
            [&[12][..], &[6; 32], &[4; 32], &[5; 32]].concat(),
        ),
        (
            Request::Claim {
                name: name.clone(),
                replace: true,
            },
            vec![13, 1, b'n', 1],
        ),
        (Request::Disclaim { name: name.clone() }, vec![14, 1, b'n']),
        (Request::Names { after: None }, vec![15, 0]),
        (
            Request::Names {
                after: Some((key, name.clone())),
            },
            [&[15, 1][..], &[6; 32], &[1, b'n']].concat(),
        ),
        (
            Request::Read {
                name: name.clone(),
                serial: Some(300),
            },
            vec![16, 1, b'n', 1, 0xac, 2],
        ),
        (Request::Readers { name: name.clone() }, vec![17, 1, b'n']),
        (Request::Leaving, vec![18]),
        (
            Request::Persist {
                name: name.clone(),
                ranges: vec![ExtentRange {
                    extent: id,
                    offset: 300,
                    bytes: 2,
                }],
                wait: true,
            },
            vec![19, 1, b'n', 1, 5, 0xac, 2, 2, 1],
        ),
        (
            Request::Promise {
                name: name.clone(),
                epoch,
            },
            vec![20, 1, b'n', 3, 4],
        ),
    ];
    requests.into_iter().for_each(travels);
    let stat = ServerStat {
        version: "v".to_owned(),
        uptime_ms: 1,
        draining: true,
        capacity_bytes: 2,
        granted_bytes: 3,
        resident_bytes: 4,
        sessions: 5,
        lost_sessions: 33,
        clients: vec![ClientStat {
            name: "c".to_owned(),
            address: "d".to_owned(),
            connected: true,
            granted_bytes: 34,
            extents: 35,
        }],
        extents: 6,
        named_regions: 7,
        bytes_read: 8,
        bytes_written: 9,
        logical_bytes: 10,
        stored_bytes: 11,
        retained_bytes: 12,
        request_bytes: 13,
        tiers: TierStat {
            memory_bytes: 14,
            held_bytes: 15,
            hot_bytes: 16,
            compressed_bytes: 17,
            pool_bytes: 18,
            spilled_bytes: 19,
            evictions: 20,
            fetches: 21,
            fetch_p50_us: 22,
            fetch_p99_us: 23,
            forced_seals: 24,
            stray_bytes: 25,
            no_room: 26,
            spill_errors: 27,
        },
        shares: vec![ShareStat {
            of: "a".to_owned(),
            weight: 28,
            hot_bytes: 29,
            sessions: 30,
        }],
        readers: 31,
        old_versions: 32,
        persist: PersistStat {
            directory: "d".to_owned(),
            disk_bytes: 33,
            written_bytes: 34,
            damaged_names: 35,
            error: "e".to_owned(),
        },
    };
    let versions = Versions {
        published: 300,
        read: vec![VersionRead {
            version: 3,
            readers: 2,
        }],
    };
    let full = Refusal::Full {
        asked: 2,
        available: 1,
        limit: Limit::PerAddress(3),
    };
    let lease = Lease {
        id,
        bytes,
        atomics: true,
        paged: false,
        read_only: true,
    };
    let responses = [
        (
            Response::Begun {
                session,
                secret,
                lease_ms: 1,
                paged: true,
                persistence: Persistence::AtOnce,
            },
            [&[0, 0xac, 2][..], &sevens, &[1, 1, 2]].concat(),
        ),
        (Response::Done, vec![1]),
        (
            Response::Granted { extent: lease },
            vec![2, 5, 0xac, 2, 1, 0, 1],
        ),
        (
            Response::Opened {
                manifest: manifest.clone(),
                extents: vec![lease],
                versions: versions.clone(),
                vote: vote.clone(),
            },
            [
                &[3, 1, 9, 1, 5, 0xac, 2, 1, 0, 1, 0xac, 2, 1, 3, 2][..],
                &vote_bytes,
            ]
            .concat(),
        ),
        (
            Response::Stat(Box::new(stat)),
            [
                vec![4, 1, b'v', 1],
                (1..=5).collect(),
                vec![33, 1, 1, b'c', 1, b'd', 1, 34, 35],
                (6..=27).collect(),
                vec![1, 1, b'a', 28, 29, 30, 31, 32],
                vec![1, b'd', 33, 34, 35, 1, b'e'],
            ]
            .concat(),
        ),
        (Response::Refused(full), vec![5, 0, 2, 1, 1, 3]),
        (Response::Refused(Refusal::NoSession), vec![5, 1]),
        (Response::Refused(Refusal::NotFound), vec![5, 2]),
        (Response::Refused(Refusal::InUse), vec![5, 3]),
        (Response::Refused(Refusal::NotLeased(id)), vec![5, 4, 5]),
        (Response::Refused(Refusal::Draining), vec![5, 5]),
        (
            Response::Refused(Refusal::Invalid("i".to_owned())),
            vec![5, 6, 1, b'i'],
        ),
        (Response::Refused(Refusal::Exists), vec![5, 7]),
        (Response::Refused(Refusal::Unidentified), vec![5, 8]),
        (
            Response::Challenge(Challenge([3; 32])),
            [&[6][..], &[3; 32]].concat(),
        ),
        (
            Response::Names(vec![NamedRegion {
                owner: key,
                name,
                bytes: 300,
                in_use: true,
                readers: 4,
                old_versions: 3,
                durability: Durability::Damaged("w".to_owned()),
            }]),
            [
                &[7, 1][..],
                &[6; 32],
                &[1, b'n', 0xac, 2, 1, 4, 3, 3, 1, b'w'],
            ]
            .concat(),
        ),
        (
            Response::Reading {
                manifest,
                extents: vec![ExtentId(7)],
                leases: vec![lease],
                vote: vote.clone(),
            },
            [&[8, 1, 9, 1, 7, 1, 5, 0xac, 2, 1, 0, 1][..], &vote_bytes].concat(),
        ),
        (
            Response::Versions(versions.clone()),
            vec![9, 0xac, 2, 1, 3, 2],
        ),
        (Response::Later, vec![10]),
        (
            Response::Claimed {
                vote,
                is_bound: true,
            },
            [&[11][..], &vote_bytes, &[1]].concat(),
        ),
        (
            Response::Bound {
                versions,
                keeps_more: true,
            },
            vec![12, 0xac, 2, 1, 3, 2, 1],
        ),
    ];
    responses.into_iter().for_each(travels);
    let key = RemoteKey {
        address: 300,
        rkey: 3,
    };
    let mut keys = LeaseKeys {
        memory: key,
        paged: None,
    };
    let frame = encode(&vec![keys]).expect("short");
    assert_eq!(frame[PREFIX_BYTES..], [1, 0xac, 2, 3, 0]);
    keys.paged = Some(PagedKeys {
        words: key,
        marks: key,
        granule_bytes: 1,
    });
    let frame = encode(&vec![keys]).expect("short");
    let expected = [1, 0xac, 2, 3, 1, 0xac, 2, 3, 0xac, 2, 3, 1];
    assert_eq!(frame[PREFIX_BYTES..], expected);
}

#[test]
fn a_list_of_more_extents_than_a_server_has_is_not_read_to_its_end() {
    let publish = |extents| Request::Publish {
        name: "n".to_owned(),
        manifest: vec![],
        extents: vec![ExtentId(1); extents],
        ballot: None,
        keeps: false,
    };
    let most = encode(&publish(MAX_EXTENTS)).expect("short");
    assert!(decode::<Request>(&most[PREFIX_BYTES..]).is_ok());
    let more = encode(&publish(MAX_EXTENTS + 1)).expect("short");
    assert_eq!(
        decode::<Request>(&more[PREFIX_BYTES..]),
        Err(ControlDecodeError::Frame)
    );
}

#[test]
fn a_list_of_more_ranges_than_a_request_may_have_is_not_read_to_its_end() {
    let range = ExtentRange {
        extent: ExtentId(1),
        offset: 0,
        bytes: 1,
    };
    let persist = |ranges| Request::Persist {
        name: "n".to_owned(),
        ranges: vec![range; ranges],
        wait: true,
    };
    let most = encode(&persist(MAX_RANGES)).expect("short");
    assert!(decode::<Request>(&most[PREFIX_BYTES..]).is_ok());
    let more = encode(&persist(MAX_RANGES + 1)).expect("short");
    assert_eq!(
        decode::<Request>(&more[PREFIX_BYTES..]),
        Err(ControlDecodeError::Frame)
    );
}

#[test]
fn a_frame_beyond_its_limit_is_refused_before_it_is_read() {
    assert_eq!(
        frame_bytes([0xff; 4], 10),
        Err(ControlDecodeError::TooLong {
            bytes: 0xffff_ffff,
            limit: 10
        })
    );
    let manifest = vec![0; MAX_FRAME_BYTES + 1];
    let huge = Request::Publish {
        name: String::new(),
        manifest,
        extents: vec![],
        ballot: None,
        keeps: false,
    };
    assert!(matches!(
        encode(&huge),
        Err(ControlDecodeError::TooLong { .. })
    ));
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in vec(any::<u8>(), 0..300), hello in any::<[u8; HELLO_BYTES]>()) {
        let _ = decode::<Request>(&bytes);
        let _ = decode::<Response>(&bytes);
        let _ = Hello::decode(&hello);
    }
}
