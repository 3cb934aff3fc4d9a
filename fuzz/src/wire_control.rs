//! Control frames and hellos from arbitrary bytes: no panic, and decoded messages survive being
//! encoded again.

use farpage_wire::{
    Challenge, Durability, ExtentId, ExtentRange, Limit, NamedRegion, Persistence, PublicKey,
    Refusal, Request, Response, Secret, ServerStat, SessionId, Signature,
    control::{
        self, HELLO_BYTES, Hello, Lease, MAX_FRAME_BYTES, PREFIX_BYTES, Purpose, VersionRead,
        Versions,
    },
};

/// Decodes `bytes` as a hello, as a prefix, as a request and as a response.
pub fn run(bytes: &[u8]) {
    if let Some(hello) = bytes.first_chunk::<HELLO_BYTES>()
        && let Ok(decoded) = Hello::decode(hello)
    {
        assert_eq!(&decoded.encode(), hello);
    }
    if let Some(prefix) = bytes.first_chunk::<PREFIX_BYTES>() {
        assert!(control::frame_bytes(*prefix, MAX_FRAME_BYTES).unwrap_or(0) <= MAX_FRAME_BYTES);
    }
    // Bytes may be another, longer form of the same number: the values must agree, not the bytes.
    if let Ok(request) = control::decode::<Request>(bytes) {
        let frame = control::encode(&request)
            .expect("what was decoded is no longer than what it came from");
        assert_eq!(
            control::decode::<Request>(&frame[PREFIX_BYTES..]).as_ref(),
            Ok(&request)
        );
    }
    if let Ok(response) = control::decode::<Response>(bytes) {
        let frame = control::encode(&response)
            .expect("what was decoded is no longer than what it came from");
        assert_eq!(
            control::decode::<Response>(&frame[PREFIX_BYTES..]).as_ref(),
            Ok(&response)
        );
    }
}

/// Makes whole hellos, requests and responses.
pub fn seeds() -> Vec<Vec<u8>> {
    let hellos = [Purpose::Control, Purpose::Data].map(|it| Hello::new(it).encode().to_vec());
    let requests = [
        Request::Attach {
            session: SessionId(7),
            secret: Secret([0x5a; 16]),
            line: 300,
        },
        Request::Renew,
        Request::Grant {
            bytes: 1 << 20,
            atomics: false,
            serial: None,
        },
        Request::Release {
            extent: ExtentId(300),
        },
        Request::Open {
            name: "squares".to_owned(),
            serial: Some(7),
        },
        Request::Remove {
            name: "squares".to_owned(),
            owner: Some(PublicKey([0x5a; 32])),
        },
        Request::Claim {
            name: "squares".to_owned(),
            replace: true,
        },
        Request::Disclaim {
            name: "squares".to_owned(),
        },
        Request::Challenge,
        Request::Identify {
            key: PublicKey([0x5a; 32]),
            signature: Signature([[1; 32], [2; 32]]),
        },
        Request::Names {
            after: Some((PublicKey([0x5a; 32]), "squares".to_owned())),
        },
        Request::Contents {
            plain_bytes: 1 << 20,
            stored_bytes: 300,
        },
        Request::Goodbye,
        Request::Leaving,
        Request::Publish {
            name: "squares".to_owned(),
            manifest: vec![1, 2, 3],
            extents: vec![ExtentId(1), ExtentId(u64::MAX)],
            ballot: None,
            keeps: true,
        },
        Request::Promise {
            name: "squares".to_owned(),
            epoch: Default::default(),
        },
        Request::Stat,
        Request::Read {
            name: "squares".to_owned(),
            serial: Some(3),
        },
        Request::Readers {
            name: "squares".to_owned(),
        },
        Request::Persist {
            name: "squares".to_owned(),
            ranges: vec![ExtentRange {
                extent: ExtentId(1),
                offset: 4096,
                bytes: 1 << 20,
            }],
            wait: true,
        },
    ];
    let lease = Lease {
        id: ExtentId(300),
        bytes: 1 << 20,
        atomics: true,
        paged: true,
        read_only: true,
    };
    let versions = Versions {
        published: 300,
        read: vec![VersionRead {
            version: 3,
            readers: 8,
        }],
    };
    let responses = [
        Response::Begun {
            session: SessionId(7),
            secret: Secret([0xa5; 16]),
            lease_ms: 60_000,
            paged: true,
            persistence: Persistence::Soon,
        },
        Response::Done,
        Response::Later,
        Response::Granted { extent: lease },
        Response::Opened {
            manifest: vec![1, 2, 3],
            extents: vec![lease; 2],
            versions: versions.clone(),
            vote: Default::default(),
        },
        Response::Reading {
            manifest: vec![1, 2, 3],
            extents: vec![ExtentId(300)],
            leases: vec![lease],
            vote: Default::default(),
        },
        Response::Versions(versions),
        Response::Stat(Box::new(ServerStat {
            version: "0.1.0".to_owned(),
            ..ServerStat::default()
        })),
        Response::Challenge(Challenge([0xa5; 32])),
        Response::Names(vec![NamedRegion {
            owner: PublicKey([0x5a; 32]),
            name: "squares".to_owned(),
            bytes: 4096,
            in_use: true,
            readers: 8,
            old_versions: 1,
            durability: Durability::Damaged("why".to_owned()),
        }]),
        Response::Refused(Refusal::Exists),
        Response::Refused(Refusal::Unidentified),
        Response::Refused(Refusal::Full {
            asked: 1 << 40,
            available: 4096,
            limit: Limit::Capacity(1 << 40),
        }),
        Response::Refused(Refusal::Invalid("why".to_owned())),
    ];
    let body = |frame: Vec<u8>| frame[PREFIX_BYTES..].to_vec();
    let requests = requests.map(|it| body(control::encode(&it).expect("short")));
    let responses = responses.map(|it| body(control::encode(&it).expect("short")));
    hellos
        .into_iter()
        .chain(requests)
        .chain(responses)
        .collect()
}
