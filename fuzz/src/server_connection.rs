//! A real server fed with arbitrary bytes on a connection, at several depths of the protocol: it
//! neither ends nor keeps anything that the connection borrowed.
//!
//! The first byte chooses the fabric and how much of the protocol is right before the rest is sent.

use std::{
    io::{self, Write},
    panic,
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use farpage_testkit::{
    Both, RawClient,
    raw::{self, attach},
};
use farpage_wire::{
    Endpoint, ExtentId, Request, Response,
    control::{self, Hello, Purpose},
    data::{OpHeader, OpKind},
};

/// Plays a client that says `bytes`, then checks that the server still serves an honest one.
pub fn run(bytes: &[u8]) {
    let Some((choice, rest)) = bytes.split_first() else {
        return;
    };
    let endpoint = server().endpoints()[usize::from(choice & 1)];
    // The server decides the fate of the stranger's connection: a reset is as good as an answer.
    let _ = play(endpoint, choice >> 1, rest);
    let mut honest = RawClient::greet(endpoint, Purpose::Control).expect("the server still serves");
    let begin = honest.ask(&hello()).expect("the server still answers");
    assert!(
        matches!(begin, Response::Begun { .. } | Response::Refused(_)),
        "{begin:?}"
    );
    if matches!(begin, Response::Begun { .. }) {
        honest
            .ask(&Request::Goodbye)
            .expect("the server still answers");
    }
    assert_eq!(PANICS.load(Relaxed), 0, "a thread of the server panicked");
}

/// Number of panics of any thread: those of the server would go unnoticed.
static PANICS: AtomicUsize = AtomicUsize::new(0);

/// Makes inputs for each depth: an empty one, frames, and a whole operation for a data connection.
pub fn seeds() -> Vec<Vec<u8>> {
    let frame = |request: &Request| control::encode(request).expect("short");
    let op = OpHeader {
        kind: OpKind::Write,
        following: 0,
        sequence: 0,
        len: 64,
        extent: ExtentId(1),
        offset: 0,
    };
    let inputs = [
        vec![],
        Hello::new(Purpose::Control).encode().to_vec(),
        frame(&hello()),
        frame(&Request::Stat),
        frame(&raw::grant(EXTENT_BYTES)),
        [&op.encode()[..], &[1; 64]].concat(),
    ];
    let choices = 0..2 * DEPTHS;
    choices
        .flat_map(|choice| {
            inputs
                .iter()
                .map(move |input| [&[choice], &input[..]].concat())
        })
        .collect()
}

/// Length of the extent of a client.
const EXTENT_BYTES: u64 = 1 << 16;

/// Number of depths: raw, greeted, in a session, attached.
const DEPTHS: u8 = 4;

fn hello() -> Request {
    Request::Begin {
        client: "fuzz".to_owned(),
        resume: None,
    }
}

fn play(endpoint: &Endpoint, depth: u8, bytes: &[u8]) -> io::Result<()> {
    let mut stream = match depth % DEPTHS {
        0 => RawClient::connect(endpoint)?,
        1 => RawClient::greet(endpoint, Purpose::Control)?,
        2 => begun(endpoint)?.0,
        _ => attached(endpoint)?,
    };
    stream.write_all(bytes)?;
    stream.finish();
    // Waits until the server has closed its side.
    io::copy(&mut stream, &mut io::sink()).map(drop)
}

fn server() -> &'static Both {
    static SERVER: OnceLock<Both> = OnceLock::new();
    SERVER.get_or_init(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            PANICS.fetch_add(1, Relaxed);
            before(info);
        }));
        Both::start_as(|server| server.capacity(64 << 20).lease(Duration::from_secs(1)))
    })
}

/// Opens a control connection and asks for a session, which the server may refuse.
fn begun(endpoint: &Endpoint) -> io::Result<(RawClient, Response)> {
    let mut control = RawClient::greet(endpoint, Purpose::Control)?;
    let answer = control.ask(&hello())?;
    Ok((control, answer))
}

/// Opens a data connection of a session that has one extent, on TCP; elsewhere a session.
fn attached(endpoint: &Endpoint) -> io::Result<RawClient> {
    let (mut control, begun) = begun(endpoint)?;
    let Response::Begun {
        session, secret, ..
    } = begun
    else {
        return Ok(control);
    };
    control.ask(&raw::grant(EXTENT_BYTES))?;
    if matches!(endpoint, Endpoint::Shm(_)) {
        return Ok(control);
    }
    let mut data = RawClient::greet(endpoint, Purpose::Data)?;
    data.ask(&attach((session, secret), 0))?;
    Ok(data)
}
