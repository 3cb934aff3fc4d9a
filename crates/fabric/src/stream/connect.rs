//! Connections of sockets, Unix and TCP.
//!
//! The rule it keeps: a connection is made before a given time, and sockets do not block.

use std::{
    io,
    net::TcpStream,
    os::{fd::AsRawFd, unix::net::UnixStream},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    sys::socket::{
        AddressFamily, SockFlag, SockType, UnixAddr, connect, setsockopt, socket, sockopt,
    },
};

use crate::resolver::resolve;

/// Idle time before keep-alive probes: routers forget connections that idle for a minute.
const IDLE: Duration = Duration::from_secs(15);
/// Time between keep-alive probes. [`PROBES`] unanswered probes end the connection.
const PROBE: Duration = Duration::from_secs(5);
const PROBES: u32 = 3;

pub(super) fn connect_unix(path: &Path, until: Instant) -> io::Result<UnixStream> {
    let address = UnixAddr::new(path)?;
    loop {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let fd = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
        match connect(fd.as_raw_fd(), &address) {
            Ok(()) => return Ok(fd.into()),
            // The server's backlog is full, which cannot be waited for on a Unix socket.
            Err(Errno::EAGAIN) if Instant::now() < until => thread::sleep(Duration::from_millis(2)),
            Err(errno) => return Err(errno.into()),
        }
    }
}

pub(super) fn connect_tcp(host: &str, port: u16, until: Instant) -> io::Result<TcpStream> {
    let addresses = resolve(host, port, until)?;
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for (tried, address) in addresses.iter().enumerate() {
        // The other addresses get their part of the time: the first may be one that answers
        // nothing.
        let left =
            until.saturating_duration_since(Instant::now()) / (addresses.len() - tried) as u32;
        match TcpStream::connect_timeout(address, left.max(Duration::from_millis(1))) {
            Ok(socket) => {
                socket.set_nodelay(true)?;
                socket.set_nonblocking(true)?;
                keep_alive(&socket)?;
                return Ok(socket);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Sets up keep-alive probes after [`IDLE`], so that routers remember an idle connection, and its
/// end is known before it is needed.
pub(crate) fn keep_alive(socket: &TcpStream) -> io::Result<()> {
    setsockopt(socket, sockopt::KeepAlive, &true)?;
    setsockopt(socket, sockopt::TcpKeepIdle, &(IDLE.as_secs() as u32))?;
    setsockopt(socket, sockopt::TcpKeepInterval, &(PROBE.as_secs() as u32))?;
    setsockopt(socket, sockopt::TcpKeepCount, &PROBES)?;
    // Unacknowledged bytes end the connection as fast as unanswered probes do.
    let unacknowledged_ms = (PROBE * PROBES).as_millis() as u32;
    Ok(setsockopt(
        socket,
        sockopt::TcpUserTimeout,
        &unacknowledged_ms,
    )?)
}
