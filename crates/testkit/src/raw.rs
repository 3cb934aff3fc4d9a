//! A client that speaks the protocol by hand, for peers that say what no client says.
//!
//! The rule it keeps: reading has a bound, [`PATIENCE`]. The end of a connection is an error that
//! is returned, because a server may close the connection at any time. Bytes that no server sends
//! are a panic.

use std::{
    io::{self, Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddrV4, TcpStream, ToSocketAddrs},
};

use farpage_wire::{
    Endpoint, ExtentId, Request, Response, Secret, SessionId,
    control::{self, HELLO_BYTES, Hello, Lease, PREFIX_BYTES, Purpose},
    data::{OpHeader, OpKind},
};
use serde::{Serialize, de::DeserializeOwned};
use socket2::{Domain, SockAddr, Socket, Type};

use crate::wait::PATIENCE;

/// Number of a session, and the secret that proves who began the session.
pub type Identity = (SessionId, Secret);

/// Connection to a server.
#[derive(Debug)]
pub struct RawClient(Socket);

impl RawClient {
    /// Opens a connection and says nothing.
    pub fn connect(endpoint: &Endpoint) -> io::Result<RawClient> {
        match endpoint {
            Endpoint::Shm(path) => Self::open(Domain::UNIX, None, &SockAddr::unix(path)?),
            tcp => Self::open_tcp(None, tcp),
        }
    }

    /// Opens a connection over TCP from `source`, an address of this machine.
    fn connect_from(source: Ipv4Addr, endpoint: &Endpoint) -> io::Result<RawClient> {
        Self::open_tcp(Some(SocketAddrV4::new(source, 0).into()), endpoint)
    }

    fn open_tcp(source: Option<SockAddr>, endpoint: &Endpoint) -> io::Result<RawClient> {
        let Endpoint::Tcp { host, port } = endpoint else {
            unreachable!("no server of a test listens on {endpoint}")
        };
        let mut addresses = (host.as_str(), *port).to_socket_addrs()?;
        let to = addresses.next().expect("a host has an address");
        Self::open(Domain::for_address(to), source, &to.into())
    }

    fn open(domain: Domain, source: Option<SockAddr>, to: &SockAddr) -> io::Result<RawClient> {
        let socket = Socket::new(domain, Type::STREAM, None)?;
        if let Some(source) = source {
            socket.bind(&source)?;
        }
        socket.connect(to)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        Ok(RawClient(socket))
    }

    /// Opens a connection for `purpose`, and exchanges hellos.
    pub fn greet(endpoint: &Endpoint, purpose: Purpose) -> io::Result<RawClient> {
        let mut client = Self::connect(endpoint)?;
        greet(&mut client, purpose)?;
        Ok(client)
    }

    /// Opens a connection as [`greet`](Self::greet) does, from `source`.
    pub fn greet_from(
        source: Ipv4Addr,
        endpoint: &Endpoint,
        purpose: Purpose,
    ) -> io::Result<RawClient> {
        let mut client = Self::connect_from(source, endpoint)?;
        greet(&mut client, purpose)?;
        Ok(client)
    }

    /// Opens a control connection with a session of its own.
    pub fn session(endpoint: &Endpoint) -> io::Result<(RawClient, Identity)> {
        let mut client = Self::greet(endpoint, Purpose::Control)?;
        let identity = client.begin(None)?;
        Ok((client, identity))
    }

    /// Opens a data connection of a session.
    pub fn data(endpoint: &Endpoint, identity: Identity, line: u64) -> io::Result<RawClient> {
        let mut client = Self::greet(endpoint, Purpose::Data)?;
        match client.ask(&attach(identity, line))? {
            Response::Done => Ok(client),
            other => Err(refused(&other)),
        }
    }

    /// Sends a request.
    pub fn say(&mut self, request: &Request) -> io::Result<()> {
        send(self, request)
    }

    /// Receives the answer to a request.
    pub fn hear(&mut self) -> io::Result<Response> {
        receive(self)
    }

    /// Sends a request and returns the answer.
    pub fn ask(&mut self, request: &Request) -> io::Result<Response> {
        self.say(request)?;
        self.hear()
    }

    /// Begins a session, or resumes one. A refusal is an error.
    pub fn begin(&mut self, resume: Option<Identity>) -> io::Result<Identity> {
        let client = "by hand".to_owned();
        match self.ask(&Request::Begin { client, resume })? {
            Response::Begun {
                session, secret, ..
            } => Ok((session, secret)),
            other => Err(refused(&other)),
        }
    }

    /// Asks for an extent. A refusal is an error.
    pub fn grant(&mut self, bytes: u64) -> io::Result<Lease> {
        match self.ask(&grant(bytes))? {
            Response::Granted { extent } => Ok(extent),
            other => Err(refused(&other)),
        }
    }

    /// Says that nothing more will be sent.
    pub fn finish(&self) {
        // Fails if the server has closed the connection.
        let _ = self.0.shutdown(Shutdown::Write);
    }

    /// Reads until the server has closed the connection. Returns the bytes that came. A reset is as
    /// good as an end.
    ///
    /// # Panics
    /// If the connection is open after [`PATIENCE`]. The message names `story`.
    #[track_caller]
    pub fn drain(&mut self, story: &str) -> Vec<u8> {
        closed(self, story)
    }
}

impl Read for RawClient {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes)
    }
}

impl Write for RawClient {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Not every program of tests ignores SIGPIPE.
        self.0.send_with_flags(bytes, libc::MSG_NOSIGNAL)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl From<RawClient> for TcpStream {
    fn from(client: RawClient) -> TcpStream {
        client.0.into()
    }
}

/// Makes a request for an extent without atomics.
pub fn grant(bytes: u64) -> Request {
    Request::Grant {
        bytes,
        atomics: false,
        serial: None,
    }
}

/// Makes the header of a data connection's first operation, alone in its batch, on the first `len`
/// bytes of `extent`.
pub fn header(kind: OpKind, extent: ExtentId, len: u32) -> OpHeader {
    OpHeader {
        kind,
        following: 0,
        sequence: 0,
        len,
        extent,
        offset: 0,
    }
}

/// Makes the only request of a data connection.
pub fn attach((session, secret): Identity, line: u64) -> Request {
    Request::Attach {
        session,
        secret,
        line,
    }
}

fn refused(answer: &Response) -> io::Error {
    io::Error::other(format!("{answer:?}"))
}

/// Exchanges hellos for `purpose`. A hello of another version or purpose is a panic.
pub fn greet(stream: &mut (impl Read + Write), purpose: Purpose) -> io::Result<()> {
    stream.write_all(&Hello::new(purpose).encode())?;
    let mut hello = [0; HELLO_BYTES];
    stream.read_exact(&mut hello)?;
    assert_eq!(Hello::decode(&hello), Ok(Hello::new(purpose)));
    Ok(())
}

/// Sends one message of a control connection.
pub fn send<T: Serialize>(stream: &mut impl Write, message: &T) -> io::Result<()> {
    stream.write_all(&control::encode(message).expect("short"))
}

/// Receives one message of a control connection. Bytes that are no message are a panic.
pub fn receive<T: DeserializeOwned>(stream: &mut impl Read) -> io::Result<T> {
    let mut prefix = [0; PREFIX_BYTES];
    stream.read_exact(&mut prefix)?;
    let bytes = control::frame_bytes(prefix, control::MAX_FRAME_BYTES);
    let mut body = vec![0; bytes.expect("a message")];
    stream.read_exact(&mut body)?;
    Ok(control::decode(&body).expect("a message"))
}

/// Reads the last bytes of a peer until the peer has closed the connection. A reset is as good as
/// an end.
///
/// # Panics
/// If the connection is open when the read timeout of `stream` is over. The message names `story`.
#[track_caller]
pub fn closed(stream: &mut impl Read, story: &str) -> Vec<u8> {
    let mut said = Vec::new();
    if let Err(error) = stream.read_to_end(&mut said) {
        let is_reset = error.kind() == io::ErrorKind::ConnectionReset;
        assert!(
            is_reset,
            "{story}: the peer did not close the connection: {error}"
        );
    }
    said
}
