//! A network between a client and its server that tests can cut and silence.
//!
//! The rule it keeps: bytes pass in order and whole until a connection is cut or silenced.

use std::{
    io::{ErrorKind, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use nix::sys::socket::{setsockopt, sockopt};

/// Interval at which a thread that waits for bytes looks at the state of its connection.
const LOOK: Duration = Duration::from_millis(5);

const FORWARDS: u8 = 0;
/// Open, but nothing passes any more, as behind a router that has forgotten the connection.
const SILENT: u8 = 1;
/// Ends both sides by RST.
const CUT: u8 = 2;

/// Connection of a client, and the one to the server that belongs to it. The threads that forward
/// own the line: when both have ended, the sockets are closed.
struct Line {
    state: AtomicU8,
    client: TcpStream,
    upstream: TcpStream,
}

/// Relay that forwards connections to a server over TCP. Dropping it cuts them all.
pub struct Relay {
    /// URL at which clients reach the server through the relay.
    pub url: String,
    lines: Arc<Mutex<Vec<Weak<Line>>>>,
    accepted: Arc<AtomicUsize>,
    refuses: Arc<AtomicBool>,
    holds: Arc<AtomicBool>,
    over: Arc<AtomicBool>,
    listener: Option<JoinHandle<()>>,
}

impl Relay {
    /// Starts a relay to the server at `url`.
    pub fn to(url: &str) -> Relay {
        let server = url.strip_prefix("tcp://").unwrap().to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let url = format!("tcp://{}", listener.local_addr().unwrap());
        let lines = Arc::<Mutex<Vec<Weak<Line>>>>::default();
        let (accepted, over) = (Arc::<AtomicUsize>::default(), Arc::<AtomicBool>::default());
        let (lines2, accepted2, over2) = (lines.clone(), accepted.clone(), over.clone());
        let refuses = Arc::<AtomicBool>::default();
        let holds = Arc::<AtomicBool>::default();
        let (refuses2, holds2) = (refuses.clone(), holds.clone());
        let listen = move || {
            while !over2.load(Ordering::Relaxed) {
                match listener.accept() {
                    Ok((client, _)) => {
                        accepted2.fetch_add(1, Ordering::Relaxed);
                        if refuses2.load(Ordering::Relaxed) {
                            continue;
                        }
                        // A server that is gone refuses connections, and so does the relay.
                        if let Ok(upstream) = TcpStream::connect(&server) {
                            let line = forward(client, upstream, &holds2);
                            let mut lines = lines2.lock().unwrap();
                            lines.retain(|line| line.strong_count() > 0);
                            lines.push(line);
                        }
                    }
                    Err(_) => thread::sleep(Duration::from_millis(1)),
                }
            }
        };
        Relay {
            url,
            lines,
            accepted,
            refuses,
            holds,
            over,
            listener: Some(thread::spawn(listen)),
        }
    }

    /// Cuts all current connections by RST. New ones are served.
    pub fn cut(&self) {
        self.turn_to(CUT);
    }

    /// Lets nothing more pass on the current connections, and leaves them open. New ones are
    /// served.
    pub fn silence(&self) {
        self.turn_to(SILENT);
    }

    /// Holds all bytes back, also those of new connections, as a network that loses each packet
    /// does; or lets them pass, in order and whole.
    pub fn hold(&self, holds: bool) {
        self.holds.store(holds, Ordering::Relaxed);
    }

    /// Closes each new connection at once, or serves new ones again.
    pub fn refuse(&self, refuses: bool) {
        self.refuses.store(refuses, Ordering::Relaxed);
    }

    /// Closes all current connections in good order. When this returns, nothing passes on them any
    /// more. New ones are served.
    pub fn close(&self) {
        for line in self.lines.lock().unwrap().iter().filter_map(Weak::upgrade) {
            for side in [&line.client, &line.upstream] {
                // Fails if the connection has ended already.
                let _ = side.shutdown(Shutdown::Both);
            }
        }
    }

    /// Returns the number of connections that were ever accepted.
    pub fn accepted(&self) -> usize {
        self.accepted.load(Ordering::Relaxed)
    }

    fn turn_to(&self, state: u8) {
        for line in self.lines.lock().unwrap().iter().filter_map(Weak::upgrade) {
            line.state.fetch_max(state, Ordering::Relaxed);
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        let _ = self.listener.take().unwrap().join();
        self.cut();
    }
}

/// Starts a thread for each direction of a connection.
fn forward(client: TcpStream, upstream: TcpStream, holds: &Arc<AtomicBool>) -> Weak<Line> {
    for side in [&client, &upstream] {
        side.set_nonblocking(false).unwrap();
        side.set_nodelay(true).unwrap();
        side.set_read_timeout(Some(LOOK)).unwrap();
        side.set_write_timeout(Some(LOOK)).unwrap();
    }
    let line = Arc::new(Line {
        state: AtomicU8::new(FORWARDS),
        client,
        upstream,
    });
    let (up, down) = (line.clone(), line.clone());
    let (holds_up, holds_down) = (holds.clone(), holds.clone());
    thread::spawn(move || pump(&up.client, &up.upstream, &up.state, &holds_up));
    thread::spawn(move || pump(&down.upstream, &down.client, &down.state, &holds_down));
    Arc::downgrade(&line)
}

/// Forwards one direction.
fn pump(mut from: &TcpStream, mut to: &TcpStream, state: &AtomicU8, holds: &AtomicBool) {
    let mut buf = vec![0; 64 << 10];
    let (mut filled, mut sent) = (0, 0);
    loop {
        match state.load(Ordering::Relaxed) {
            FORWARDS if !holds.load(Ordering::Relaxed) => {}
            FORWARDS | SILENT => {
                thread::sleep(LOOK);
                continue;
            }
            _ => {
                // Closed without a goodbye: an RST.
                let linger = nix::libc::linger {
                    l_onoff: 1,
                    l_linger: 0,
                };
                let _ = setsockopt(from, sockopt::Linger, &linger);
                return;
            }
        }
        let moved = match sent == filled {
            true => from.read(&mut buf).map(|bytes| (filled, sent) = (bytes, 0)),
            false => to.write(&buf[sent..filled]).map(|bytes| sent += bytes),
        };
        match moved {
            // The end of one side is passed on to the other.
            Ok(()) if filled == 0 => {
                let _ = to.shutdown(Shutdown::Write);
                return;
            }
            Ok(()) => {}
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                ) => {}
            Err(_) => {
                state.store(CUT, Ordering::Relaxed);
            }
        }
    }
}
