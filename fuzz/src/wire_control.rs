//! Control frames and hellos from arbitrary bytes: no panic, and what decodes survives being
//! encoded again.

use farpage_wire::{
    ExtentId, Refusal, Request, Response, Secret, SessionId,
    control::{self, HELLO_BYTES, Hello, MAX_FRAME_BYTES, PREFIX_BYTES, Purpose},
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

/// Hellos, requests and responses, whole.
pub fn seeds() -> Vec<Vec<u8>> {
    let hellos = [Purpose::Control, Purpose::Data].map(|it| Hello::new(it).encode().to_vec());
    let requests = [
        Request::Attach {
            session: SessionId(7),
            secret: Secret([0x5a; 16]),
            line: 300,
        },
        Request::Renew,
        Request::Grant { bytes: 1 << 20 },
        Request::Release {
            extent: ExtentId(300),
        },
        Request::Publish {
            name: "squares".to_owned(),
            manifest: vec![1, 2, 3],
            extents: vec![ExtentId(1), ExtentId(u64::MAX)],
        },
        Request::Stat,
    ];
    let responses = [
        Response::Begun {
            session: SessionId(7),
            secret: Secret([0xa5; 16]),
            lease_ms: 60_000,
        },
        Response::Done,
        Response::Refused(Refusal::Full {
            asked: 1 << 40,
            available: 4096,
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
