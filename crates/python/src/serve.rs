//! The memory server that `farpage.local` starts: this library once more, in a process of its own.
//!
//! The rule it keeps: the server ends when its runtime does, or the process that started it,
//! however that ends. The runtime's end is a byte, or the end, of standard input. The process is
//! watched by itself as well: other children of it may hold the other end of that pipe.

use std::{
    io::{self, Write},
    os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd},
};

use farpage_memserver::{RunningServer, Server};
use nix::{
    errno::Errno,
    libc,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    unistd,
};
use pyo3::prelude::*;

/// Serves until standard input, or the process `parent`, ends. Prints the endpoint, or what went
/// wrong.
#[pyfunction]
pub(crate) fn serve(
    py: Python<'_>,
    listen: &str,
    capacity_bytes: u64,
    parent: i32,
) -> PyResult<()> {
    py.detach(|| {
        let line = |line: String| {
            let mut stdout = io::stdout();
            writeln!(stdout, "{line}").and_then(|()| stdout.flush())
        };
        let started = watch(parent)
            .map_err(|error| format!("cannot watch the process that started it: {error}"))
            .and_then(|parent| Ok((parent, start(listen, capacity_bytes)?)));
        let (parent, server) = match started {
            Ok(started) => started,
            Err(error) => return line(format!("error: {error}")),
        };
        let endpoint = server.endpoints()[0].to_string();
        // The write fails where the parent has ended meanwhile, which `wait` sees next.
        let _ = line(endpoint);
        wait(parent.as_fd())?;
        server.shutdown();
        Ok(())
    })?;
    Ok(())
}

fn start(listen: &str, capacity_bytes: u64) -> Result<RunningServer, String> {
    let endpoint = listen.parse().map_err(|error| format!("{error}"))?;
    (Server::of_one_program().listen(endpoint))
        .capacity(capacity_bytes)
        .start()
        .map_err(|error| error.to_string())
}

/// Returns a descriptor that can be read when the process `pid` has ended.
fn watch(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: no pointers.
    let fd = Errno::result(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
    // SAFETY: made just now, and known to no other code.
    let watched = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    // The process may have ended before, and its number be another's.
    if unistd::getppid().as_raw() != pid {
        return Err(io::Error::other("it has ended"));
    }
    Ok(watched)
}

fn wait(parent: BorrowedFd<'_>) -> io::Result<()> {
    let stdin = io::stdin();
    let mut ends = [
        PollFd::new(stdin.as_fd(), PollFlags::POLLIN),
        PollFd::new(parent, PollFlags::POLLIN),
    ];
    loop {
        match poll(&mut ends, PollTimeout::NONE) {
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
