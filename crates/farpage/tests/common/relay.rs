//! [`Relay`]: a network between a client and its server that tests can cut and silence.

use std::{
    io::{ErrorKind, Read, Write},
    net::{TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
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

/// Forwards connections to a server over TCP. Dropping it cuts them all.
pub struct Relay {
    pub url: String,
    lines: Arc<Mutex<Vec<Arc<AtomicU8>>>>,
    accepted: Arc<AtomicUsize>,
    over: Arc<AtomicBool>,
    listener: Option<JoinHandle<()>>,
}

impl Relay {
    pub fn to(url: &str) -> Relay {
        let server = url.strip_prefix("tcp://").unwrap().to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let url = format!("tcp://{}", listener.local_addr().unwrap());
        let lines = Arc::<Mutex<Vec<Arc<AtomicU8>>>>::default();
        let (accepted, over) = (Arc::<AtomicUsize>::default(), Arc::<AtomicBool>::default());
        let (lines2, accepted2, over2) = (lines.clone(), accepted.clone(), over.clone());
        let listen = move || {
            while !over2.load(Ordering::Relaxed) {
                match listener.accept() {
                    Ok((client, _)) => {
                        accepted2.fetch_add(1, Ordering::Relaxed);
                        // A server that is gone refuses connections, and so does the relay.
                        if let Ok(upstream) = TcpStream::connect(&server) {
                            lines2.lock().unwrap().push(forward(client, upstream));
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
            over,
            listener: Some(thread::spawn(listen)),
        }
    }

    /// Cuts all current connections. New ones are served.
    pub fn cut(&self) {
        self.turn_to(CUT);
    }

    /// Lets nothing more pass on the current connections, and leaves them open. New ones are
    /// served.
    pub fn silence(&self) {
        self.turn_to(SILENT);
    }

    /// Returns the number of connections that were ever accepted.
    pub fn accepted(&self) -> usize {
        self.accepted.load(Ordering::Relaxed)
    }

    fn turn_to(&self, state: u8) {
        for line in self.lines.lock().unwrap().iter() {
            line.fetch_max(state, Ordering::Relaxed);
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

fn forward(client: TcpStream, upstream: TcpStream) -> Arc<AtomicU8> {
    let state = Arc::new(AtomicU8::new(FORWARDS));
    for (from, to) in [(&client, &upstream), (&upstream, &client)] {
        from.set_nonblocking(false).unwrap();
        from.set_nodelay(true).unwrap();
        from.set_read_timeout(Some(LOOK)).unwrap();
        from.set_write_timeout(Some(LOOK)).unwrap();
        let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
        let state = state.clone();
        thread::spawn(move || pump(from, to, &state));
    }
    state
}

/// Forwards one direction. The sockets are closed when both directions have ended.
fn pump(mut from: TcpStream, mut to: TcpStream, state: &AtomicU8) {
    let mut buf = vec![0; 64 << 10];
    let (mut filled, mut sent) = (0, 0);
    loop {
        match state.load(Ordering::Relaxed) {
            FORWARDS => {}
            SILENT => {
                thread::sleep(LOOK);
                continue;
            }
            _ => {
                // Closed without a goodbye: an RST.
                let linger = libc_linger();
                let _ = setsockopt(&from, sockopt::Linger, &linger);
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
                let _ = to.shutdown(std::net::Shutdown::Write);
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

fn libc_linger() -> nix::libc::linger {
    nix::libc::linger {
        l_onoff: 1,
        l_linger: 0,
    }
}
