//! Hellos and other first words of peers, and bytes that are not this protocol.

use super::*;

#[test]
fn strangers_that_speak_something_else_are_closed_and_others_go_on() {
    let folder = tempfile::tempdir().expect("a folder");
    let hello = Hello::new(Purpose::Control).encode();
    let mut bad_purpose = hello;
    bad_purpose[10] = 9;
    let frame = |request: &Request| control::encode(request).expect("short");
    for endpoint in [Endpoint::Shm(folder.path().join("socket")), tcp()] {
        let server = Server::start(&endpoint);
        let session = server.session();
        let extent = session.grant(1 << 20).expect("room").id;
        let attach = |session| frame(&raw::attach((session, Secret([0; 16])), 0));
        let data = |session| [&Hello::new(Purpose::Data).encode()[..], &attach(session)].concat();
        let stories: [(&str, Vec<u8>); 8] = [
            (
                "another protocol",
                b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
            ),
            ("a bad hello", bad_purpose.to_vec()),
            ("a huge first frame", [&hello[..], &[0xff; 4]].concat()),
            (
                "garbage for a request",
                [&hello[..], &[3, 0, 0, 0, 0xff, 0xff, 0xff]].concat(),
            ),
            (
                "a request before the session",
                [&hello[..], &frame(&raw::grant(1))].concat(),
            ),
            (
                "attach on a control connection",
                [&hello[..], &attach(SessionId(1))].concat(),
            ),
            ("attach with a wrong secret", data(SessionId(1))),
            ("attach to no session", data(SessionId(u64::MAX))),
        ];
        for (story, bytes) in stories {
            let mut stream = server.stranger();
            stream.write_all(&bytes).expect("the server listens");
            stream.drain(story);
            write_and_read(&session, extent);
        }
        // In a session of their own.
        for (story, bytes) in [
            ("a frame too long", &[0xff; 4][..]),
            ("a frame that is none", &[1, 0, 0, 0, 99]),
        ] {
            let (mut stream, _) = server.begin();
            stream.write_all(bytes).expect("the server listens");
            stream.drain(story);
            write_and_read(&session, extent);
        }
    }
}

#[test]
fn another_version_is_told_which_one_the_server_speaks() {
    let server = Server::tcp();
    let mut stream = server.stranger();
    let mut hello = Hello::new(Purpose::Control).encode();
    hello[8] = 99;
    stream.write_all(&hello).expect("the server listens");
    assert_eq!(
        stream.drain("version 99"),
        Hello::new(Purpose::Control).encode()
    );
}

#[test]
fn a_client_of_another_version_says_so() {
    let (listener, endpoint) = listener();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        let mut hello = [0; HELLO_BYTES];
        stream.read_exact(&mut hello).expect("a hello");
        hello[8] = 99;
        stream.write_all(&hello).expect("a client");
    });
    let error = Session::connect(&endpoint, &options()).expect_err("version 99");
    assert!(matches!(error, ConnectError::Protocol { .. }), "{error}");
    assert!(error.to_string().contains("version 99"), "{error}");
    server.join().expect("the server ends");
}

#[test]
fn a_stranger_that_says_nothing_is_closed_in_time() {
    let server = Server::tcp();
    let begun = Instant::now();
    server.stranger().drain("silence");
    assert!(
        begun.elapsed() > Duration::from_millis(500),
        "a slow network gets its time"
    );
    assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
}

#[test]
fn a_refusal_reaches_a_client_that_is_slow_to_read_and_still_sending() {
    let server = Server::tcp();
    let (mut control, own) = server.begin();
    let extent = control.grant(2 << 20).expect("room");
    let mut stream = server.attach(own);
    let read = |i: u16| OpHeader {
        following: 8 - i,
        sequence: u32::from(i),
        ..header(OpKind::Read, extent.id, 2 << 20)
    };
    for i in 0..8 {
        stream.write_all(&read(i).encode()).expect("connected");
    }
    let refused = OpHeader {
        kind: OpKind::Write,
        extent: ExtentId(u64::MAX),
        ..read(8)
    };
    stream.write_all(&refused.encode()).expect("connected");
    // The server never reads these bytes, but they are no reason to lose its answers.
    stream.write_all(&[9; 100_000]).expect("connected");
    let mut answers = vec![0; 8 * (ANSWER_HEADER_BYTES + (2 << 20))];
    stream
        .read_exact(&mut answers)
        .expect("the READs before the refusal");
    let mut answer = [0; ANSWER_HEADER_BYTES];
    stream.read_exact(&mut answer).expect("the refusal");
    assert_eq!(
        AnswerHeader::decode(&answer),
        Ok(AnswerHeader {
            status: Status::Refused,
            sequence: 8,
            len: 0
        })
    );
}

#[test]
fn a_server_that_answers_nonsense_ends_the_channel_with_a_reason() {
    let good = AnswerHeader {
        status: Status::Ok,
        sequence: 0,
        len: 4096,
    };
    let stories: [(&str, Vec<u8>, &str); 5] = [
        (
            "another sequence",
            AnswerHeader {
                sequence: 1,
                ..good
            }
            .encode()
            .to_vec(),
            "out of order",
        ),
        (
            "another length",
            AnswerHeader { len: 4095, ..good }.encode().to_vec(),
            "another length",
        ),
        ("garbage", vec![0x55; ANSWER_HEADER_BYTES], "magic"),
        ("half an answer", good.encode()[..9].to_vec(), "closed"),
        (
            "half a payload",
            [&good.encode()[..], &[0; 2048]].concat(),
            "closed",
        ),
    ];
    // The goodbye is not answered either.
    let hurried = SessionOptions {
        deadline: Duration::from_millis(300),
        ..options()
    };
    for (story, answer, reason) in stories {
        let (listener, endpoint) = listener();
        let server = thread::spawn(move || {
            let accept = |purpose: Purpose, response: Response| {
                let (mut stream, _) = listener.accept().expect("a client");
                raw::greet(&mut stream, purpose).expect("a client");
                receive::<Request>(&mut stream).expect("a request");
                send(&mut stream, &response).expect("a client");
                stream
            };
            let begun = Response::Begun {
                session: SessionId(1),
                secret: Secret([1; 16]),
                lease_ms: 60_000,
                paged: false,
                persistence: farpage_wire::Persistence::Never,
            };
            let mut control = accept(Purpose::Control, begun);
            let mut data = accept(Purpose::Data, Response::Done);
            let mut header = [0; OP_HEADER_BYTES];
            data.read_exact(&mut header).expect("an operation");
            data.write_all(&answer).expect("a client");
            drop(data);
            // Open until the client leaves, so that only the data connection breaks.
            closed(&mut control, "the client leaves");
        });
        let session = Session::connect(&endpoint, &hurried).expect("it speaks the protocol");
        let mut channel = session
            .channel::<Vec<u8>>()
            .expect("it speaks the protocol");
        let op = op(Verb::Read, ExtentId(1), 0, vec![0; 4096]);
        let answered = transfer(&mut *channel, op);
        let error = answered.expect_err(story).to_string();
        assert!(error.contains(reason), "{story}: {error}");
        drop((channel, session));
        server.join().expect("the server ends");
    }
}
