//! userfaultfd's ioctls: those that the `userfaultfd` crate lacks, and what their errors mean.
//!
//! The rule it keeps: a call that the kernel ends halfway is carried on here, so that callers see
//! how many bytes are done and one [`Refusal`], never a bare errno. The answer to a refusal is left
//! to the callers.

use std::{
    io,
    ops::Range,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

use farpage_tables::lost;
use linux_raw_sys::general as raw;
use nix::errno::Errno;

/// Number of tries without progress after which a transfer gives up. The kernel asks to try again
/// while a page is locked or migrated, which takes microseconds. It also asks while another thread
/// changes the mapping, which takes as long as it likes: callers wait for that themselves, without
/// the locks that others need.
const FRUITLESS_TRIES_MAX: u32 = 16;

nix::ioctl_readwrite!(uffdio_api, raw::UFFDIO, raw::_UFFDIO_API, raw::uffdio_api);
nix::ioctl_readwrite!(
    uffdio_copy,
    raw::UFFDIO,
    raw::_UFFDIO_COPY,
    raw::uffdio_copy
);
nix::ioctl_readwrite!(
    uffdio_move,
    raw::UFFDIO,
    raw::_UFFDIO_MOVE,
    raw::uffdio_move
);
nix::ioctl_readwrite!(
    uffdio_poison,
    raw::UFFDIO,
    raw::_UFFDIO_POISON,
    raw::uffdio_poison
);
nix::ioctl_readwrite!(pagemap_scan, b'f', 16, raw::pm_scan_arg);

/// Name of the descriptor in the message to a program that has closed one.
pub(crate) const USERFAULTFD: &str = "userfaultfd";

/// `UFFDIO_MOVE_MODE_ALLOW_SRC_HOLES`, absent from the published bindings.
const MOVE_ALLOW_SRC_HOLES: u64 = 2;

/// Reason why the kernel would not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// `EEXIST`: something is mapped at the destination already.
    #[error("something is mapped at the destination already")]
    Exists,
    /// `ENOENT`: nothing is mapped at the source, or the destination is no longer registered with
    /// this userfaultfd.
    #[error("nothing is mapped at the source, or the destination is not registered any more")]
    Missing,
    /// `EBUSY`: the source page is pinned (direct I/O, registered buffers, RDMA) or shared with
    /// another process. Plain references (pages in a pipe by `vmsplice`, sends with `MSG_ZEROCOPY`)
    /// are not refused: the page moves, and a write to it changes what the kernel reads.
    #[error("the source page is pinned or shared")]
    Busy,
    /// `EAGAIN`, again and again: a page stayed locked, or the mapping kept changing.
    #[error("the page stayed locked for too long")]
    Contended,
    /// `ESRCH`: the process whose memory this was has ended.
    #[error("the process that owned the memory has ended")]
    Ended,
    /// `EINVAL`: unaligned, or not a private anonymous mapping registered with this userfaultfd, or
    /// source and destination differ in protection (`mprotect`) or in being locked in memory
    /// (`mlock`).
    #[error("not a registered anonymous mapping, or changed by `mprotect` or `mlock`")]
    Invalid,
    /// `ENOMEM`: no memory left for a page or a page table, or the memory cgroup's limit is
    /// reached.
    #[error("out of memory")]
    OutOfMemory,
    /// Any other errno.
    #[error("{0}")]
    Other(Errno),
}

impl Refusal {
    fn of(errno: Errno) -> Self {
        match errno {
            Errno::EEXIST => Self::Exists,
            Errno::ENOENT => Self::Missing,
            Errno::EBUSY => Self::Busy,
            Errno::EAGAIN => Self::Contended,
            Errno::ESRCH => Self::Ended,
            Errno::EINVAL => Self::Invalid,
            Errno::ENOMEM => Self::OutOfMemory,
            Errno::EBADF | Errno::ENOTTY => lost(USERFAULTFD),
            other => Self::Other(other),
        }
    }
}

impl From<Refusal> for io::Error {
    fn from(refusal: Refusal) -> Self {
        let kind = match refusal {
            Refusal::Exists => io::ErrorKind::AlreadyExists,
            Refusal::Missing | Refusal::Ended => io::ErrorKind::NotFound,
            Refusal::Busy | Refusal::Contended => io::ErrorKind::ResourceBusy,
            Refusal::Invalid => io::ErrorKind::InvalidInput,
            Refusal::OutOfMemory => io::ErrorKind::OutOfMemory,
            Refusal::Other(errno) => return io::Error::from_raw_os_error(errno as i32),
        };
        io::Error::new(kind, refusal)
    }
}

/// A transfer that ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("stopped after {done_bytes} bytes: {why}")]
pub struct Stopped {
    /// Bytes transferred before the stop: a multiple of the kernel page.
    pub done_bytes: usize,
    /// Reason of the stop.
    pub why: Refusal,
}

/// Carries on a call that the kernel may end halfway. `step` gets the number of bytes done, and
/// returns the call's result and the kernel's count.
fn carry_on(
    len: usize,
    mut step: impl FnMut(usize) -> (nix::Result<i32>, i64),
) -> Result<(), Stopped> {
    let mut done_bytes = 0;
    let mut fruitless = 0;
    loop {
        let (result, count) = step(done_bytes);
        match result {
            Ok(_) => return Ok(()),
            Err(Errno::EAGAIN) if count > 0 => {
                done_bytes +=
                    usize::try_from(count).expect("the kernel counts no more than was asked");
                fruitless = 0;
                if done_bytes >= len {
                    return Ok(());
                }
            }
            Err(Errno::EAGAIN) if fruitless < FRUITLESS_TRIES_MAX => {
                fruitless += 1;
                std::thread::yield_now();
            }
            Err(errno) => {
                return Err(Stopped {
                    done_bytes,
                    why: Refusal::of(errno),
                });
            }
        }
    }
}

/// `UFFDIO_COPY`: maps copies of the `len` bytes at `src` to the absent pages at `dst`, and wakes
/// the threads that sleep there.
///
/// # Safety
/// As [`Uffd::copy`](crate::Uffd::copy).
pub(crate) unsafe fn copy(
    fd: BorrowedFd<'_>,
    dst: usize,
    src: usize,
    len: usize,
) -> Result<(), Stopped> {
    carry_on(len, |done| {
        let mut arg = raw::uffdio_copy {
            dst: (dst + done) as u64,
            src: (src + done) as u64,
            len: (len - done) as u64,
            mode: 0,
            copy: 0,
        };
        // SAFETY:
        // - `arg` is a valid `uffdio_copy` for the length of the call.
        // - `src` is readable and `dst` may be filled: this function's contract.
        let result = unsafe { uffdio_copy(fd.as_raw_fd(), &mut arg) };
        (result, arg.copy)
    })
}

/// True if `UFFDIO_COPY` would be told to try again, whatever its arguments. The kernel checks that
/// first, and a copy of no bytes copies nothing. Ends the process if `fd` is no userfaultfd.
pub(crate) fn is_changing(fd: BorrowedFd<'_>) -> bool {
    let mut arg = raw::uffdio_copy {
        dst: 0,
        src: 0,
        len: 0,
        mode: 0,
        copy: 0,
    };
    // SAFETY: `arg` is valid for the call, which touches no memory: a length of 0 is refused.
    let refused = unsafe { uffdio_copy(fd.as_raw_fd(), &mut arg) };
    match refused {
        Err(Errno::EBADF | Errno::ENOTTY) => lost(USERFAULTFD),
        refused => refused == Err(Errno::EAGAIN),
    }
}

/// `UFFDIO_MOVE` (kernel 6.8): moves the pages at `src` to the absent pages at `dst`, which is
/// registered with `fd`, and wakes the threads that sleep there.
///
/// # Safety
/// As [`Uffd::move_pages`](crate::Uffd::move_pages).
pub(crate) unsafe fn move_pages(
    fd: BorrowedFd<'_>,
    dst: usize,
    src: usize,
    len: usize,
    allow_holes: bool,
) -> Result<(), Stopped> {
    let mode = if allow_holes { MOVE_ALLOW_SRC_HOLES } else { 0 };
    carry_on(len, |done| {
        let mut arg = raw::uffdio_move {
            dst: (dst + done) as u64,
            src: (src + done) as u64,
            len: (len - done) as u64,
            mode,
            move_: 0,
        };
        // SAFETY:
        // - `arg` is a valid `uffdio_move` for the length of the call.
        // - Nothing relies on the bytes at `src`, and `dst` may be filled: this function's
        //   contract.
        let result = unsafe { uffdio_move(fd.as_raw_fd(), &mut arg) };
        (result, arg.move_)
    })
}

/// `UFFDIO_POISON` (kernel 6.6): accesses to the absent pages raise SIGBUS; sleeping threads are
/// woken.
///
/// # Safety
/// As [`Uffd::poison`](crate::Uffd::poison).
pub(crate) unsafe fn poison(fd: BorrowedFd<'_>, start: usize, len: usize) -> Result<(), Stopped> {
    carry_on(len, |done| {
        let mut arg = raw::uffdio_poison {
            range: raw::uffdio_range {
                start: (start + done) as u64,
                len: (len - done) as u64,
            },
            mode: 0,
            updated: 0,
        };
        // SAFETY:
        // - `arg` is a valid `uffdio_poison` for the length of the call.
        // - The absent pages may be poisoned: this function's contract.
        let result = unsafe { uffdio_poison(fd.as_raw_fd(), &mut arg) };
        (result, arg.updated)
    })
}

/// Succeeds if this kernel knows `PAGEMAP_SCAN` (kernel 6.7): scans no addresses.
pub(crate) fn can_scan(pagemap: BorrowedFd<'_>) -> io::Result<()> {
    let mut arg = raw::pm_scan_arg {
        size: size_of::<raw::pm_scan_arg>() as u64,
        flags: 0,
        start: 0,
        end: 0,
        walk_end: 0,
        vec: 0,
        vec_len: 0,
        max_pages: 0,
        category_inverted: 0,
        category_mask: 0,
        category_anyof_mask: 0,
        return_mask: 0,
    };
    // SAFETY:
    // - `arg` is a valid `pm_scan_arg` for the length of the call.
    // - It names no vector to write to and no page to protect.
    unsafe { pagemap_scan(pagemap.as_raw_fd(), &mut arg) }?;
    Ok(())
}

/// `PAGEMAP_SCAN` (kernel 6.7): appends the parts of `start..end` where memory is mapped or swapped
/// out, ascending.
pub(crate) fn scan(
    pagemap: BorrowedFd<'_>,
    start: usize,
    end: usize,
    out: &mut Vec<Range<usize>>,
) -> io::Result<()> {
    /// Number of ranges that one call tells of.
    const RANGES: usize = 64;
    let occupied = u64::from(raw::PAGE_IS_PRESENT | raw::PAGE_IS_SWAPPED);
    let mut at = start;
    while at < end {
        let mut found = [raw::page_region {
            start: 0,
            end: 0,
            categories: 0,
        }; RANGES];
        let mut arg = raw::pm_scan_arg {
            size: size_of::<raw::pm_scan_arg>() as u64,
            flags: 0,
            start: at as u64,
            end: end as u64,
            walk_end: 0,
            vec: found.as_mut_ptr().addr() as u64,
            vec_len: RANGES as u64,
            max_pages: 0,
            category_inverted: 0,
            category_mask: 0,
            category_anyof_mask: occupied,
            return_mask: 0,
        };
        // SAFETY:
        // - `arg` is a valid `pm_scan_arg` for the length of the call.
        // - The vector has room for as many ranges, and no page is protected.
        let count = unsafe { pagemap_scan(pagemap.as_raw_fd(), &mut arg) }?;
        let parts = found.iter().take(usize::try_from(count).unwrap_or(0));
        for part in parts.map(|part| part.start as usize..part.end as usize) {
            match out.last_mut() {
                Some(last) if last.end == part.start && last.start >= start => last.end = part.end,
                _ => out.push(part),
            }
        }
        at = arg.walk_end as usize;
    }
    Ok(())
}

/// Opens a userfaultfd by its system call (kernel 4.3).
pub(crate) fn open_by_syscall(user_mode_only: bool) -> nix::Result<OwnedFd> {
    // SAFETY: takes flags and touches no memory.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, open_flags(user_mode_only)) };
    let fd = Errno::result(fd)?;
    // SAFETY: the kernel has just returned this descriptor, nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Opens a userfaultfd by `/dev/userfaultfd` (kernel 6.1).
pub(crate) fn open_by_device(user_mode_only: bool) -> nix::Result<OwnedFd> {
    let device = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/userfaultfd")
        .map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)))?;
    let request = nix::request_code_none!(raw::USERFAULTFD_IOC, 0);
    // SAFETY: USERFAULTFD_IOC_NEW takes flags by value and touches no memory.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), request, open_flags(user_mode_only)) };
    let fd = Errno::result(fd)?;
    // SAFETY: the kernel has just returned this descriptor, nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn open_flags(user_mode_only: bool) -> libc::c_int {
    libc::O_CLOEXEC
        | libc::O_NONBLOCK
        | if user_mode_only {
            raw::UFFD_USER_MODE_ONLY as i32
        } else {
            0
        }
}

/// `UFFDIO_API`: agrees on `features`; once per descriptor. Returns what the kernel supports.
pub(crate) fn agree(fd: BorrowedFd<'_>, features: u64) -> nix::Result<u64> {
    let mut arg = raw::uffdio_api {
        api: u64::from(raw::UFFD_API),
        features,
        ioctls: 0,
    };
    // SAFETY: `arg` is valid for the call, which changes nothing but the descriptor.
    unsafe { uffdio_api(fd.as_raw_fd(), &mut arg) }?;
    Ok(arg.features)
}
