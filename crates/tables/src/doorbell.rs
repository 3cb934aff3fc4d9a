//! [`Doorbell`]: a descriptor by which one thread wakes another that polls it.
//!
//! The rule it keeps: ringing and clearing never change a file that the program has put in the
//! place of the doorbell's descriptors, at whatever moment it does so. Writing to an eventfd would
//! write to that file, and the file may come between a check and the write.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};

use nix::{
    errno::Errno,
    sys::{
        epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags},
        eventfd::EventFd,
    },
};

use crate::{Table, lost};

/// An event that is readable from [`ring`](Doorbell::ring) until [`clear`](Doorbell::clear).
///
/// An epoll instance that watches an eventfd, which is always readable, and which all doorbells of
/// a table share. Ringing lets the instance report the eventfd, and clearing keeps it from that.
/// Both are `epoll_ctl` calls, which the kernel refuses for anything but this pair of descriptors:
/// they cost what a write and a read of an eventfd cost.
#[derive(Debug)]
pub struct Doorbell {
    bell: Epoll,
    always_readable: Arc<EventFd>,
}

impl Doorbell {
    /// Makes a doorbell that has not been rung.
    ///
    /// # Errors
    /// The process or the system has no descriptors or memory left.
    pub fn new() -> io::Result<Doorbell> {
        let always_readable = Table::always_readable()?;
        let bell = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        bell.add(&*always_readable, EpollEvent::new(EpollFlags::empty(), 0))?;
        Ok(Doorbell {
            bell,
            always_readable,
        })
    }

    /// Makes the descriptor readable. Ends the process if the program has closed or replaced one of
    /// the doorbell's descriptors.
    pub fn ring(&self) {
        self.try_ring().unwrap_or_else(end);
    }

    /// Makes the descriptor readable.
    ///
    /// # Errors
    /// The program has closed or replaced one of the doorbell's descriptors.
    pub fn try_ring(&self) -> Result<(), Errno> {
        self.set(EpollFlags::EPOLLIN)
    }

    /// Makes the descriptor unreadable. Ends the process as [`ring`](Doorbell::ring) does.
    pub fn clear(&self) {
        self.set(EpollFlags::empty()).unwrap_or_else(end);
    }

    fn set(&self, events: EpollFlags) -> Result<(), Errno> {
        self.bell
            .modify(&*self.always_readable, &mut EpollEvent::new(events, 0))
    }
}

fn end(_: Errno) {
    lost("a worker's doorbell")
}

impl AsFd for Doorbell {
    /// Returns the descriptor to poll.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        io::{Read, Write},
        os::{fd::AsRawFd, unix::net::UnixStream},
    };

    use nix::{
        poll::{PollFd, PollFlags, PollTimeout, poll},
        sys::memfd::{MFdFlags, memfd_create},
    };

    use super::*;

    fn is_readable(doorbell: &Doorbell) -> bool {
        let mut fds = [PollFd::new(doorbell.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).unwrap() == 1
    }

    #[test]
    fn doorbell_is_readable_until_it_is_cleared() {
        let doorbell = Doorbell::new().unwrap();
        for _ in 0..3 {
            assert!(!is_readable(&doorbell));
            doorbell.ring();
            doorbell.ring();
            assert!(is_readable(&doorbell) && is_readable(&doorbell));
            doorbell.clear();
        }
        doorbell.clear();
        assert!(!is_readable(&doorbell));
    }

    /// Puts `file` in the place of `replaced`.
    fn replace(replaced: BorrowedFd<'_>, file: BorrowedFd<'_>) {
        // SAFETY: the number is the test's own.
        unsafe { libc::dup2(file.as_raw_fd(), replaced.as_raw_fd()) };
    }

    #[test]
    fn files_in_place_of_a_doorbell_stay_as_they_are() {
        let mut file = tempfile();
        file.write_all(b"the program's").unwrap();
        let (mut other_end, socket) = UnixStream::pair().unwrap();
        other_end.set_nonblocking(true).unwrap();
        let (epoll, counter) = (
            Epoll::new(EpollCreateFlags::empty()).unwrap(),
            EventFd::new().unwrap(),
        );
        let theirs = [
            file.as_fd(),
            socket.as_fd(),
            counter.as_fd(),
            epoll.0.as_fd(),
        ];
        for theirs in theirs {
            for replaces_bell in [true, false] {
                let doorbell = Doorbell::new().unwrap();
                let replaced = if replaces_bell {
                    doorbell.as_fd()
                } else {
                    doorbell.always_readable.as_fd()
                };
                replace(replaced, theirs);
                for events in [EpollFlags::EPOLLIN, EpollFlags::empty()] {
                    let refused = doorbell.set(events).unwrap_err();
                    assert!([Errno::EINVAL, Errno::ENOENT, Errno::EPERM].contains(&refused));
                }
            }
        }
        assert_eq!(file.metadata().unwrap().len(), 13);
        other_end.read(&mut [0]).unwrap_err();
    }

    fn tempfile() -> File {
        File::from(memfd_create(c"program", MFdFlags::empty()).unwrap())
    }
}
