//! Operations, honest and hostile, and the leases that they need.

use super::*;

#[test]
fn shared_memory_copies_one_operation_in_each_poll() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = Server::start(&Endpoint::Shm(folder.path().join("socket")));
    let session = server.session();
    let extent = session.grant(1 << 20).expect("room").id;
    let op = |verb, value| Op {
        tag: u64::from(value),
        ..op(verb, extent, 0, vec![value; 4096])
    };
    let [mut writer, mut reader] = [(); 2].map(|()| session.channel::<Vec<u8>>().expect("alive"));
    let mut remote_value = || {
        reader.post(op(Verb::Read, 0xee)).expect("room");
        let mut done = Vec::new();
        assert_eq!(reader.poll(&mut done), 1);
        done[0].buf[4095]
    };
    for value in [7, 9] {
        writer.post(op(Verb::Write, value)).expect("room");
    }
    assert_eq!(remote_value(), 0, "posted, not polled");
    let mut done = Vec::new();
    for value in [7, 9] {
        assert!(
            writer
                .wait()
                .until
                .is_some_and(|until| until <= Instant::now())
        );
        assert_eq!(writer.poll(&mut done), 1);
        assert_eq!(done.pop().expect("ended").tag, u64::from(value));
        assert_eq!(remote_value(), value);
    }
    assert_eq!((writer.in_flight(), writer.wait().until), (0, None));
}

#[test]
fn hostile_operations_end_their_connection_and_touch_nothing() {
    let server = Server::tcp();
    let victim = server.session();
    let theirs = victim.grant(1 << 20).expect("room").id;
    write_and_read(&victim, theirs);
    let (mut control, own) = server.begin();
    let lease = control.grant(10_000).expect("room");
    // The READ would be answered if it were accepted.
    let good = header(OpKind::Read, lease.id, 4096);
    let changed = |at: usize, byte: u8| {
        let mut bytes = good.encode();
        bytes[at] = byte;
        bytes.to_vec()
    };
    let op = |op: OpHeader| op.encode().to_vec();
    let first = OpHeader {
        following: 1,
        ..good
    };
    let second = OpHeader {
        sequence: 1,
        ..first
    };
    let stories: [(&str, Vec<u8>); 11] = [
        ("bad magic", changed(0, 0)),
        ("an unknown operation", changed(4, 7)),
        ("reserved bytes", changed(5, 1)),
        ("a batch too long", changed(7, 0xff)),
        (
            "too many bytes",
            op(header(OpKind::Read, lease.id, MAX_OP_BYTES + 1)),
        ),
        ("no bytes", op(header(OpKind::Read, lease.id, 0))),
        ("two words", op(header(OpKind::FetchAdd, lease.id, 16))),
        (
            "an address that wraps",
            op(OpHeader {
                offset: u64::MAX - 10,
                ..good
            }),
        ),
        (
            "the wrong sequence",
            op(OpHeader {
                sequence: 5,
                ..good
            }),
        ),
        (
            "a batch that does not count down",
            [op(first), op(second)].concat(),
        ),
        (
            "half a header",
            good.encode()[..OP_HEADER_BYTES / 2].to_vec(),
        ),
    ];
    for (story, bytes) in stories {
        let mut stream = server.attach(own);
        stream.write_all(&bytes).expect("the server listens");
        stream.finish();
        assert_eq!(stream.drain(story), [0_u8; 0], "{story}");
    }
    let beyond = OpHeader {
        offset: 9_000,
        ..header(OpKind::Write, lease.id, 4096)
    };
    for (story, header) in [
        ("beyond the extent", beyond),
        (
            "somebody else's extent",
            header(OpKind::Write, theirs, 4096),
        ),
        ("no extent", header(OpKind::Write, ExtentId(u64::MAX), 4096)),
        (
            "reading somebody else's extent",
            header(OpKind::Read, theirs, 4096),
        ),
        (
            "adding to somebody else's extent",
            header(OpKind::FetchAdd, theirs, 8),
        ),
        (
            "no extent for atomics",
            header(OpKind::CompareSwap, lease.id, 8),
        ),
    ] {
        let mut stream = server.attach(own);
        stream
            .write_all(&header.encode())
            .expect("the server listens");
        // The payload of a refused WRITE must not push the refusal out of the socket.
        stream.write_all(&[9; 4096]).expect("the server reads it");
        stream.finish();
        let answer = stream.drain(story);
        assert_eq!((answer.len(), answer[4]), (16, 1), "{story}");
    }
    let memory = server
        .host
        .extent(SessionId(1), theirs)
        .expect("the victim's lease");
    let mut bytes = [0; 4096];
    memory.copy_out(0, &mut bytes).expect("in range");
    assert_eq!(bytes, [5; 4096]);
    write_and_read(&victim, theirs);
    // Traffic is counted after the answer is sent.
    let counted = || {
        (
            server.serving.traffic().bytes_read(),
            server.serving.traffic().bytes_written(),
        ) == (8192, 8192)
    };
    wait_until(
        "refused operations are not counted, and the others are",
        counted,
    );
}

#[test]
fn data_connections_end_with_their_session() {
    let server = Server::tcp();
    let (mut control, own) = server.begin();
    let mut data = server.attach(own);
    assert_eq!(
        control.ask(&Request::Goodbye).expect("an answer"),
        Response::Done
    );
    data.drain("an idle data connection after the goodbye");
}

#[test]
fn a_slow_reader_is_not_sent_what_the_next_holder_writes() {
    let server = Server::tcp();
    let (mut control, own) = server.begin();
    let extent = control.grant(2 << 20).expect("room");
    let publish = Request::Publish {
        name: "x".to_owned(),
        manifest: Vec::new(),
        extents: vec![extent.id],
        ballot: None,
        keeps: false,
    };
    let answer = control.ask(&publish).expect("an answer");
    assert!(matches!(answer, Response::Bound { .. }));
    // The client asks for far more than the sockets hold, and does not read it.
    let mut data = server.attach(own);
    let count = 64;
    for i in 0..count {
        let header = OpHeader {
            following: count - 1 - i,
            sequence: i.into(),
            ..header(OpKind::Read, extent.id, 2 << 20)
        };
        data.write_all(&header.encode()).expect("headers fit");
    }
    let mut data = TcpStream::from(data);
    // Waits until the sockets are full: a batch that is being sent now may still go out.
    let mut waste = vec![0; 128 << 20];
    let mut arrived = || data.peek(&mut waste).expect("answers");
    let mut before = 0;
    while before != arrived() {
        before = arrived();
        thread::sleep(Duration::from_millis(200));
    }
    assert_eq!(
        control
            .ask(&Request::Release { extent: extent.id })
            .expect("an answer"),
        Response::Done
    );
    let next = server.session();
    next.open("x").expect("nobody holds it");
    let mut channel = next.channel::<Vec<u8>>().expect("alive");
    let op = op(Verb::Write, extent.id, 0, vec![0xbb; 2 << 20]);
    transfer(&mut *channel, op).expect("leased");
    // One after another, answers from before the lease's end may arrive; then comes the end.
    let sent = closed(&mut data, "a READ whose lease has ended");
    let headers = usize::from(count) * ANSWER_HEADER_BYTES;
    let foreign = sent.iter().filter(|&&byte| byte == 0xbb).count();
    assert!(foreign <= headers, "{foreign} bytes of another client");
}

#[test]
fn a_half_sent_write_gives_an_extent_up_when_its_lease_ends() {
    let server = Server::tcp();
    let (mut control, own) = server.begin();
    let extent = control.grant(4096).expect("room");
    let mut data = server.attach(own);
    let header = header(OpKind::Write, extent.id, 4096);
    data.write_all(&header.encode()).expect("a header fits");
    data.write_all(&[1; 100]).expect("a part fits");
    let memory = server.host.extent(own.0, extent.id).expect("leased");
    wait_until("the WRITE has begun", || memory.resident_bytes() > 0);
    assert_eq!(
        control
            .ask(&Request::Release { extent: extent.id })
            .expect("an answer"),
        Response::Done
    );
    let answer = data.drain("a WRITE whose lease has ended");
    assert_eq!(answer, [0_u8; 0], "an answer before the bytes had moved");
    assert_eq!(Arc::strong_count(&memory), 1, "nobody keeps the memory");
}

#[test]
fn a_write_that_was_cut_off_never_lands_after_its_line_has_a_new_connection() {
    let server = Server::tcp();
    let (mut control, own) = server.begin();
    let extent = control.grant(4096).expect("room");
    let memory = server.host.extent(own.0, extent.id).expect("leased");
    for round in 1..=20 {
        // A network lets half of a WRITE through, and the rest whenever it likes.
        let mut old = server.attach_to(own, 7);
        let other = server.attach_to(own, 8);
        let header = header(OpKind::Write, extent.id, 4096);
        old.write_all(&header.encode()).expect("a header fits");
        old.write_all(&[round; 100]).expect("a part fits");
        let byte_at = |offset| {
            let mut byte = [0];
            memory.copy_out(offset, &mut byte).expect("leased");
            byte[0]
        };
        wait_until("the WRITE has begun", || byte_at(99) == round);
        let mut new = server.attach_to(own, 7);
        // The client has been answered: the place may be used for something else.
        memory.copy_in(0, &[0xee; 4096]).expect("leased");
        // The server may have closed it, so that writing may fail.
        let _ = old.write_all(&[round; 3996]);
        old.drain("a connection whose line has a newer one");
        new.write_all(&header.encode()).expect("a header fits");
        assert!(
            (0..4096).all(|offset| byte_at(offset) == 0xee),
            "round {round}: a WRITE landed late"
        );
        new.write_all(&[0; 4096]).expect("it fits");
        let mut answer = [0; ANSWER_HEADER_BYTES];
        new.read_exact(&mut answer).expect("the new one is served");
        drop((new, other));
    }
}
