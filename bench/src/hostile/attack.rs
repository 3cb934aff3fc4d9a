//! The attacker: messages that no client sends, and too many of those that clients do send.
//!
//! The rule it keeps: all connections come from [`ATTACKER`], and every answer is looked at. An
//! answer that gives or changes what belongs to others is counted, never passed over.

use clap::Args;
use std::{
    collections::BTreeMap,
    io::{self, ErrorKind, Read, Write},
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream, ToSocketAddrs},
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use farpage_testkit::{Identity, raw};
use farpage_wire::{
    Endpoint, ExtentId, MAX_OP_BYTES, Request, Response, Secret, SessionId,
    control::{self, Hello, MAX_FRAME_BYTES, Purpose},
    data::{
        ANSWER_HEADER_BYTES, AnswerHeader, OPERAND_BYTES, OpHeader, OpKind, Status, WORD_BYTES,
    },
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use socket2::{Domain, Protocol, Socket, Type};

use super::neighbour::end_with_parent;
use farpage_bench_kit::{
    cpus::own_time,
    out::say as print,
    pick::{Random, mix},
};

/// Address of the attacker: another one of the loopback interface than the victim's.
pub(super) const ATTACKER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

/// Number of threads that attack at once, each as a peer of its own.
pub(super) const THREADS: usize = 4;

/// Time without an answer after which a request counts as unanswered.
const PATIENCE: Duration = Duration::from_secs(5);

/// Number of requests that a session sends in one go.
const PIPELINED: u64 = 400;

/// Bytes that the attacker leases, to forge operations beside them.
const OWN_BYTES: u64 = 64 << 10;

/// Outcomes of the requests of one kind.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Kind {
    pub(super) sent: u64,
    /// Requests that were turned down by an answer, or by closing the connection.
    pub(super) refused: u64,
    /// Requests that were granted: every client may have a session and memory of its own.
    pub(super) granted: u64,
    pub(super) unanswered: u64,
}

/// Report of the attacker.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Attack {
    pub(super) kinds: BTreeMap<String, Kind>,
    /// Bytes of others that the attacker saw, or was told it had changed.
    pub(super) foreign_bytes: u64,
    pub(super) cpu_s: f64,
}

impl Kind {
    fn plus(self, other: Self) -> Self {
        Self {
            sent: self.sent + other.sent,
            refused: self.refused + other.refused,
            granted: self.granted + other.granted,
            unanswered: self.unanswered + other.unanswered,
        }
    }
}

impl Attack {
    pub(super) fn sum(&self) -> Kind {
        let kinds = self.kinds.values().copied();
        kinds.fold(Kind::default(), Kind::plus)
    }
}

#[derive(Args, Debug)]
pub(crate) struct AttackOptions {
    /// Endpoint of the server to attack
    #[arg(long)]
    pub(crate) endpoint: Endpoint,
    /// Number of requests
    #[arg(long)]
    pub(crate) requests: u64,
    /// Seed of everything random
    #[arg(long)]
    pub(crate) seed: u64,
    /// Seconds after which the attack ends, whatever has been sent
    #[arg(long)]
    pub(crate) seconds_max: u64,
}

/// Runs the attacker, as the process that the benchmark starts.
pub(crate) fn attack(options: &AttackOptions) -> Result<()> {
    end_with_parent();
    let Endpoint::Tcp { host, port } = &options.endpoint else {
        bail!("the attack goes over tcp, not to {}", options.endpoint);
    };
    let addresses = (host.as_str(), *port).to_socket_addrs();
    let server = addresses
        .context("no such host")?
        .find_map(|address| match address {
            SocketAddr::V4(address) if address.ip().is_loopback() => Some(address),
            _ => None,
        });
    let server = server.context("the attack is for loopback addresses only")?;
    let (sent, total) = (AtomicU64::new(0), Mutex::new(Attack::default()));
    let end = Instant::now() + Duration::from_secs(options.seconds_max);
    thread::scope(|scope| {
        for thread in 0..THREADS as u64 {
            let (sent, total) = (&sent, &total);
            scope.spawn(move || {
                let mut attacker = Attacker {
                    server,
                    random: Random(mix(options.seed) ^ mix(thread + 1)),
                    found: Attack::default(),
                };
                while sent.load(Relaxed) < options.requests && Instant::now() < end {
                    let before = attacker.found.sum().sent;
                    attacker.round();
                    sent.fetch_add(attacker.found.sum().sent - before, Relaxed);
                }
                let mut total = total.lock().expect("nothing panics under it");
                total.foreign_bytes += attacker.found.foreign_bytes;
                for (name, kind) in attacker.found.kinds {
                    let sum = total.kinds.entry(name).or_default();
                    *sum = sum.plus(kind);
                }
            });
        }
    });
    let mut found = total.into_inner().expect("nothing panics under it");
    found.cpu_s = own_time().as_secs_f64();
    print(json!(found))
}

enum Outcome {
    Refused,
    Granted,
    Unanswered,
    /// Number of bytes of others that were given or changed.
    Foreign(u64),
}

/// Outcome of one request; a refusal may be an error.
type Tried = io::Result<Outcome>;

struct Attacker {
    server: SocketAddrV4,
    random: Random,
    found: Attack,
}

impl Attacker {
    /// Draws a number that may well be an id that exists: ids count up from the beginning.
    fn guess(&mut self) -> u64 {
        match self.random.bits() % 8 {
            0 => self.random.bits(),
            _ => self.random.bits() % 64,
        }
    }

    fn count(&mut self, kind: &str, tried: Tried) {
        self.count_many(kind, 1, tried);
    }

    fn count_many(&mut self, name: &str, requests: u64, tried: Tried) {
        let kind = self.found.kinds.entry(name.to_owned()).or_default();
        kind.sent += requests;
        // A timeout is no answer, every other error a refusal.
        match tried.unwrap_or_else(|error| match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => Outcome::Unanswered,
            _ => Outcome::Refused,
        }) {
            Outcome::Refused => kind.refused += requests,
            Outcome::Granted => kind.granted += requests,
            Outcome::Unanswered => kind.unanswered += requests,
            Outcome::Foreign(bytes) => {
                kind.granted += requests;
                self.found.foreign_bytes += bytes;
            }
        }
    }

    /// Sends some requests of every kind.
    fn round(&mut self) {
        type Attempt = fn(&mut Attacker) -> Tried;
        let attempts: [(&str, u32, Attempt); 5] = [
            ("garbage instead of a hello", 8, Self::garbage),
            ("half a frame", 4, Self::half_frame),
            ("Begin, and gone", 16, |it| {
                it.begin().map(|_| Outcome::Granted)
            }),
            ("a wrong secret", 8, Self::wrong_secret),
            ("a frame too long", 4, Self::oversized),
        ];
        for (name, times, attempt) in attempts {
            for _ in 0..times {
                let tried = attempt(self);
                self.count(name, tried);
            }
        }
        self.flood();
        for _ in 0..8 {
            self.forged_operations();
        }
        self.forged_requests();
    }

    fn connect(&mut self) -> io::Result<TcpStream> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.set_write_timeout(Some(PATIENCE))?;
        // Resets the connection when it is closed: otherwise there are more connections than ports.
        socket.set_linger(Some(Duration::ZERO))?;
        socket.bind(&SocketAddrV4::new(ATTACKER, 0).into())?;
        socket.connect_timeout(&self.server.into(), PATIENCE)?;
        let stream = TcpStream::from(socket);
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    fn greet(&mut self, purpose: Purpose) -> io::Result<TcpStream> {
        let mut stream = self.connect()?;
        raw::greet(&mut stream, purpose)?;
        Ok(stream)
    }

    fn begin(&mut self) -> io::Result<(TcpStream, Identity)> {
        let mut stream = self.greet(Purpose::Control)?;
        match say(&mut stream, &begin(None))? {
            Response::Begun {
                session, secret, ..
            } => Ok((stream, (session, secret))),
            other => Err(refused(&other)),
        }
    }

    /// Attaches a data connection to a session. Anything but a success is an error.
    fn attached(&mut self, identity: Identity, line: u64) -> io::Result<TcpStream> {
        let mut stream = self.greet(Purpose::Data)?;
        match say(&mut stream, &raw::attach(identity, line))? {
            Response::Done => Ok(stream),
            other => Err(refused(&other)),
        }
    }

    fn garbage(&mut self) -> Tried {
        let bytes: Vec<u8> = (0..8)
            .flat_map(|_| self.random.bits().to_le_bytes())
            .collect();
        let mut stream = self.connect()?;
        stream.write_all(&bytes)?;
        closed(&mut stream)
    }

    fn half_frame(&mut self) -> Tried {
        let half = [&1000u32.to_le_bytes()[..], &[1, 2, 3]].concat();
        let (mut stream, half) = match self.random.bits() % 3 {
            0 => (
                self.connect()?,
                Hello::new(Purpose::Control).encode()[..7].to_vec(),
            ),
            1 => (self.greet(Purpose::Control)?, half),
            _ => (self.begin()?.0, half),
        };
        // Half a frame gets no answer. The connection is dropped, with all that it held.
        stream.write_all(&half)?;
        Ok(Outcome::Refused)
    }

    fn wrong_secret(&mut self) -> Tried {
        let session = SessionId(self.guess());
        let mut secret = [0; 16];
        secret[..8].copy_from_slice(&self.random.bits().to_le_bytes());
        let identity = (session, Secret(secret));
        let (purpose, request) = match self.random.bits().is_multiple_of(2) {
            true => (Purpose::Control, begin(Some(identity))),
            false => (Purpose::Data, raw::attach(identity, 0)),
        };
        let mut stream = self.greet(purpose)?;
        match say(&mut stream, &request)? {
            // Access to another client's session gives all that is in it.
            Response::Begun { .. } | Response::Done => Ok(Outcome::Foreign(1)),
            other => Err(refused(&other)),
        }
    }

    fn oversized(&mut self) -> Tried {
        let lies = self.random.bits().is_multiple_of(2);
        let (mut stream, ..) = self.begin()?;
        if lies {
            stream.write_all(&u32::MAX.to_le_bytes())?;
            return closed(&mut stream);
        }
        // A frame of the maximal length, of which only a part is sent.
        let mut half = (MAX_FRAME_BYTES as u32).to_le_bytes().to_vec();
        half.resize(64 << 10, 6);
        stream.write_all(&half)?;
        Ok(Outcome::Refused)
    }

    /// Begins a session and tries to attach 32 data connections to it.
    fn flood(&mut self) {
        let name = "a flood of data connections";
        let (_control, identity) = match self.begin() {
            Ok(begun) => begun,
            Err(error) => return self.count(name, Err(error)),
        };
        let mut held = Vec::new();
        for line in 0..32 {
            let attached = self.attached(identity, line);
            let tried = attached.map(|stream| held.push(stream));
            self.count(name, tried.map(|()| Outcome::Granted));
        }
    }

    /// Sends READs, WRITEs and atomics to extents of others, and beyond the own extent.
    fn forged_operations(&mut self) {
        let name = "forged operations";
        let mut own = || -> io::Result<(TcpStream, Identity, ExtentId)> {
            let (mut stream, identity) = self.begin()?;
            match say(&mut stream, &raw::grant(OWN_BYTES))? {
                Response::Granted { extent } => Ok((stream, identity, extent.id)),
                other => Err(refused(&other)),
            }
        };
        let (_control, identity, own) = match own() {
            Ok(own) => own,
            Err(error) => return self.count(name, Err(error)),
        };
        // New memory holds nothing of its last holder.
        let new = self.attached(identity, 0).and_then(|mut stream| {
            stream.write_all(&op(OpKind::Read, own, 0, OWN_BYTES as u32).encode())?;
            let bytes = answer(&mut stream)?;
            Ok(match bytes.iter().filter(|byte| **byte != 0).count() {
                0 => Outcome::Granted,
                foreign => Outcome::Foreign(foreign as u64),
            })
        });
        self.count("a READ of the own, new memory", new);

        for line in 1..4 {
            let mut guesses = std::iter::repeat_with(|| ExtentId(self.guess()));
            let foreign = guesses.find(|guess| *guess != own).expect("ids differ");
            let (extent, offset) = match self.random.bits() % 4 {
                0 => (own, OWN_BYTES - 8),
                1 => (own, u64::MAX - (1 << 20)),
                _ => (foreign, self.random.bits() % 16 * 4096),
            };
            let (kind, len, payload) = match self.random.bits() % 4 {
                0 => (OpKind::Write, 4096, 4096),
                1 => (OpKind::FetchAdd, WORD_BYTES, OPERAND_BYTES),
                2 => (OpKind::Read, MAX_OP_BYTES, 0),
                _ => (OpKind::Read, 4096, 0),
            };
            // The last eight bytes belong to the own extent: an access to them alone is not forged.
            let forged = extent != own || len > WORD_BYTES || offset > OWN_BYTES;
            let done = self.attached(identity, line).and_then(|mut stream| {
                stream.write_all(&op(kind, extent, offset, len).encode())?;
                stream.write_all(&vec![0xee; payload])?;
                let bytes = answer(&mut stream)?.len().max(payload) as u64;
                Ok(if forged {
                    Outcome::Foreign(bytes)
                } else {
                    Outcome::Granted
                })
            });
            self.count(name, done);
        }
    }

    /// Sends requests of a session for what is not its own, many in one go.
    fn forged_requests(&mut self) {
        let name = "forged requests of a session";
        let (mut stream, ..) = match self.begin() {
            Ok(begun) => begun,
            Err(error) => return self.count(name, Err(error)),
        };
        let mut bytes = Vec::new();
        for _ in 0..PIPELINED {
            let request = match self.random.bits() % 5 {
                0 => Request::Release {
                    extent: ExtentId(self.guess()),
                },
                1 => raw::grant(u64::MAX >> 8),
                2 => Request::Open {
                    name: "squares".to_owned(),
                    serial: None,
                },
                3 => Request::Publish {
                    name: "squares".to_owned(),
                    manifest: vec![7; 64],
                    extents: vec![ExtentId(self.guess()); 64],
                    ballot: None,
                    keeps: false,
                },
                _ => Request::Remove {
                    name: "squares".to_owned(),
                    owner: None,
                },
            };
            bytes.extend(control::encode(&request).expect("short"));
        }
        if let Err(error) = stream.write_all(&bytes) {
            return self.count_many(name, PIPELINED, Err(error));
        }
        for heard in 0..PIPELINED {
            match raw::receive(&mut stream) {
                Ok(Response::Refused(_)) => self.count(name, Ok(Outcome::Refused)),
                // The attacker has a right to none of what it asked for.
                Ok(_) => self.count(name, Ok(Outcome::Foreign(1))),
                Err(error) => return self.count_many(name, PIPELINED - heard, Err(error)),
            }
        }
    }
}

fn begin(resume: Option<Identity>) -> Request {
    Request::Begin {
        client: "hostile".to_owned(),
        resume,
    }
}

fn op(kind: OpKind, extent: ExtentId, offset: u64, len: u32) -> OpHeader {
    OpHeader {
        kind,
        following: 0,
        sequence: 0,
        len,
        extent,
        offset,
    }
}

fn say(stream: &mut TcpStream, request: &Request) -> io::Result<Response> {
    raw::send(stream, request)?;
    raw::receive(stream)
}

/// Reads the answer to one operation and returns its payload.
fn answer(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut header = [0; ANSWER_HEADER_BYTES];
    stream.read_exact(&mut header)?;
    let header = AnswerHeader::decode(&header).map_err(io::Error::other)?;
    match header.status {
        Status::Ok => {}
        Status::Refused => return Err(ErrorKind::PermissionDenied.into()),
        // A typed refusal without bytes: a client has to ask again, or elsewhere.
        Status::NoRoom | Status::Unreadable | Status::NotYet => {
            return Err(io::Error::other("the server cannot answer now"));
        }
    }
    let mut payload = vec![0; header.len as usize];
    stream.read_exact(&mut payload)?;
    Ok(payload)
}

/// Waits until the server has closed the connection, as it has to after garbage.
fn closed(stream: &mut TcpStream) -> Tried {
    let mut rest = Vec::new();
    stream.take(1 << 20).read_to_end(&mut rest)?;
    Ok(Outcome::Refused)
}

fn refused(response: &Response) -> io::Error {
    match response {
        Response::Refused(_) => ErrorKind::PermissionDenied.into(),
        other => io::Error::other(format!("an answer to nothing that was asked: {other:?}")),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use farpage_wire::{
        Persistence,
        control::{HELLO_BYTES, Lease},
        data::OP_HEADER_BYTES,
    };

    use super::*;

    /// Serves a connection and refuses nothing: every request is granted, every READ gets bytes.
    fn generous(mut stream: TcpStream) -> io::Result<()> {
        let mut hello = [0; HELLO_BYTES];
        stream.read_exact(&mut hello)?;
        let hello = Hello::decode(&hello).map_err(io::Error::other)?;
        stream.write_all(&hello.encode())?;
        loop {
            let answer = match raw::receive(&mut stream)? {
                Request::Begin { .. } => Response::Begun {
                    session: SessionId(1),
                    secret: Secret([1; 16]),
                    lease_ms: 60_000,
                    paged: false,
                    persistence: Persistence::Never,
                },
                Request::Grant { bytes, atomics, .. } => Response::Granted {
                    extent: Lease {
                        id: ExtentId(1),
                        bytes,
                        atomics,
                        paged: false,
                        read_only: false,
                    },
                },
                _ => Response::Done,
            };
            raw::send(&mut stream, &answer)?;
            if hello.purpose == Purpose::Data {
                break;
            }
        }
        let mut header = [0; OP_HEADER_BYTES];
        stream.read_exact(&mut header)?;
        let op = OpHeader::decode(&header).map_err(io::Error::other)?;
        let (taken, given) = match op.kind {
            OpKind::Read => (0, op.len),
            OpKind::Write => (op.len as usize, 0),
            OpKind::FetchAdd | OpKind::CompareSwap | OpKind::ReadWhen => (OPERAND_BYTES, op.len),
        };
        stream.read_exact(&mut vec![0; taken])?;
        let answer = AnswerHeader {
            status: Status::Ok,
            sequence: op.sequence,
            len: given,
        };
        stream.write_all(&answer.encode())?;
        stream.write_all(&vec![0xaa; given as usize])
    }

    #[test]
    fn server_that_gives_what_is_not_the_attackers_is_found_out() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let address = listener.local_addr().expect("it listens");
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                thread::spawn(move || generous(stream));
            }
        });
        let SocketAddr::V4(server) = address else {
            unreachable!("it was bound to an address of version 4")
        };
        type Act = fn(&mut Attacker);
        let attacks: [(&str, Act); 3] = [
            ("operations", Attacker::forged_operations),
            ("requests", Attacker::forged_requests),
            ("secrets", |attacker| {
                let tried = attacker.wrong_secret();
                attacker.count("a wrong secret", tried);
            }),
        ];
        for (name, attack) in attacks {
            let mut attacker = Attacker {
                server,
                random: Random(1),
                found: Attack::default(),
            };
            attack(&mut attacker);
            let found = attacker.found;
            assert!(found.foreign_bytes > 0, "{name}: {found:?}");
        }
    }
}
