//! The protocol by hand, for peers that say what no client says.

use std::{
    io::{Read, Write},
    net::TcpStream,
    os::unix::net::UnixStream,
};

use farpage_wire::{
    Endpoint, Request, Response, Secret, SessionId,
    control::{self, HELLO_BYTES, Hello, PREFIX_BYTES, Purpose},
};

use super::PATIENCE;

pub trait Stream: Read + Write + Send {
    /// Says that nothing more will be sent.
    fn finish(&self);
}

impl Stream for TcpStream {
    fn finish(&self) {
        let _ = self.shutdown(std::net::Shutdown::Write);
    }
}

impl Stream for UnixStream {
    fn finish(&self) {
        let _ = self.shutdown(std::net::Shutdown::Write);
    }
}

pub fn raw(endpoint: &Endpoint) -> Box<dyn Stream> {
    match endpoint {
        Endpoint::Shm(path) => {
            let stream = UnixStream::connect(path).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            Box::new(stream)
        }
        Endpoint::Tcp { host, port } => {
            let stream = TcpStream::connect((host.as_str(), *port)).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            Box::new(stream)
        }
        other => unreachable!("no server listens on {other}"),
    }
}

pub fn say(stream: &mut dyn Stream, request: &Request) {
    stream
        .write_all(&control::encode(request).unwrap())
        .unwrap();
}

pub fn hear(stream: &mut dyn Stream) -> Response {
    let mut prefix = [0; PREFIX_BYTES];
    stream.read_exact(&mut prefix).unwrap();
    let mut body = vec![0; control::frame_bytes(prefix, control::MAX_FRAME_BYTES).unwrap()];
    stream.read_exact(&mut body).unwrap();
    control::decode(&body).unwrap()
}

pub fn greet(endpoint: &Endpoint, purpose: Purpose) -> Box<dyn Stream> {
    let mut stream = raw(endpoint);
    stream.write_all(&Hello::new(purpose).encode()).unwrap();
    let mut hello = [0; HELLO_BYTES];
    stream.read_exact(&mut hello).unwrap();
    assert_eq!(Hello::decode(&hello).unwrap().purpose, purpose);
    stream
}

/// A session by hand.
pub fn begin(endpoint: &Endpoint) -> (Box<dyn Stream>, SessionId, Secret) {
    let mut stream = greet(endpoint, Purpose::Control);
    say(
        &mut *stream,
        &Request::Begin {
            client: "by hand".to_owned(),
            resume: None,
        },
    );
    let Response::Begun {
        session, secret, ..
    } = hear(&mut *stream)
    else {
        panic!("no session")
    };
    (stream, session, secret)
}
