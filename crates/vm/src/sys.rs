//! The kernel's own calls: every ioctl that the `userfaultfd` crate lacks, and what each of their errors means.
//!
//! The rule it keeps: nothing but this file names an ioctl number. A call that the kernel ends halfway is carried on here, so that
//! callers see how many bytes are done and one [`Refusal`], never a bare errno. What to do about a refusal is their business.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

use linux_raw_sys::general as raw;
use nix::errno::Errno;

/// The kernel page: the unit in which the kernel maps, moves and counts. Checked when a space is opened.
pub(crate) const KERNEL_PAGE_BYTES: usize = 4096;

/// Tries that make no progress before a transfer gives up. The kernel asks to try again while a page is locked or migrated, which takes microseconds, and
/// while another thread changes the mapping, which can take as long as it likes: callers who can wait for that do so without what others wait for.
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
    uffdio_continue,
    raw::UFFDIO,
    raw::_UFFDIO_CONTINUE,
    raw::uffdio_continue
);
nix::ioctl_readwrite!(
    uffdio_poison,
    raw::UFFDIO,
    raw::_UFFDIO_POISON,
    raw::uffdio_poison
);
nix::ioctl_readwrite!(pagemap_scan, b'f', 16, raw::pm_scan_arg);

/// `UFFDIO_MOVE_MODE_DONTWAKE` and `UFFDIO_MOVE_MODE_ALLOW_SRC_HOLES`, absent from the published bindings.
const MOVE_DONTWAKE: u64 = 1;
const MOVE_ALLOW_SRC_HOLES: u64 = 2;

/// `UFFDIO_CONTINUE_MODE_DONTWAKE`, `UFFDIO_POISON_MODE_DONTWAKE`: shifts in the kernel's header, so bindgen drops them.
const CONTINUE_DONTWAKE: u64 = 1;

/// Why the kernel would not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// `EEXIST`: something is mapped at the destination already.
    #[error("something is mapped at the destination already")]
    Exists,
    /// `ENOENT`: nothing is mapped at the source, or the destination is no longer registered with this userfaultfd.
    #[error("nothing is mapped at the source, or the destination is not registered any more")]
    Missing,
    /// `EBUSY`: the source page is pinned (direct I/O, `vmsplice`, RDMA) or shared with another process.
    #[error("the source page is pinned or shared")]
    Held,
    /// `EAGAIN`, again and again: a page stayed locked, or the mapping kept changing.
    #[error("the page stayed locked for too long")]
    Contended,
    /// `ESRCH`: the process whose memory this was has ended.
    #[error("the process that owned the memory has ended")]
    Ended,
    /// `EINVAL`: unaligned, or not a private anonymous mapping registered with this userfaultfd, or source and destination differ in
    /// protection (`mprotect`) or in being locked in memory (`mlock`).
    #[error("not a registered anonymous mapping, or changed by `mprotect` or `mlock`")]
    Invalid,
    /// `ENOMEM`: no memory left for a page or a page table, or the memory cgroup's limit is reached.
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
            Errno::EBUSY => Self::Held,
            Errno::EAGAIN => Self::Contended,
            Errno::ESRCH => Self::Ended,
            Errno::EINVAL => Self::Invalid,
            Errno::ENOMEM => Self::OutOfMemory,
            other => Self::Other(other),
        }
    }
}

impl From<Refusal> for io::Error {
    fn from(refusal: Refusal) -> Self {
        let kind = match refusal {
            Refusal::Exists => io::ErrorKind::AlreadyExists,
            Refusal::Missing | Refusal::Ended => io::ErrorKind::NotFound,
            Refusal::Held | Refusal::Contended => io::ErrorKind::ResourceBusy,
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
    /// Bytes transferred before it stopped: a multiple of the kernel page.
    pub done_bytes: usize,
    /// Why it stopped there.
    pub why: Refusal,
}

/// Carries on a call that the kernel may end halfway: `step` is told how far it is and answers the call's result and the kernel's count.
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

/// `UFFDIO_COPY`: maps copies of `len` bytes at `src` to the absent pages at `dst`.
///
/// # Safety
/// `dst..dst + len` belongs to the caller as far as absent pages go; see [`Uffd::copy`](crate::Uffd::copy).
pub(crate) unsafe fn copy(
    fd: BorrowedFd<'_>,
    dst: usize,
    src: usize,
    len: usize,
    wake: bool,
    protect: bool,
) -> Result<(), Stopped> {
    let mut mode = 0;
    if !wake {
        mode |= u64::from(raw::UFFDIO_COPY_MODE_DONTWAKE);
    }
    if protect {
        mode |= u64::from(raw::UFFDIO_COPY_MODE_WP);
    }
    carry_on(len, |done| {
        let mut arg = raw::uffdio_copy {
            dst: (dst + done) as u64,
            src: (src + done) as u64,
            len: (len - done) as u64,
            mode,
            copy: 0,
        };
        // SAFETY: `arg` is valid for the call; what happens to memory is the caller's promise.
        let result = unsafe { uffdio_copy(fd.as_raw_fd(), &mut arg) };
        (result, arg.copy)
    })
}

/// Whether `UFFDIO_COPY` would be told to try again, whatever it was asked for: the kernel looks at that first, and nothing is copied by a copy of no bytes.
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
    refused == Err(Errno::EAGAIN)
}

/// `UFFDIO_MOVE` (kernel 6.8): moves the pages at `src` to the absent pages at `dst`, which is registered with `fd`.
///
/// # Safety
/// `src..src + len` becomes absent: nothing may rely on its bytes; `dst..` as for [`copy`].
pub(crate) unsafe fn move_pages(
    fd: BorrowedFd<'_>,
    dst: usize,
    src: usize,
    len: usize,
    wake: bool,
    allow_holes: bool,
) -> Result<(), Stopped> {
    let mode =
        if wake { 0 } else { MOVE_DONTWAKE } | if allow_holes { MOVE_ALLOW_SRC_HOLES } else { 0 };
    carry_on(len, |done| {
        let mut arg = raw::uffdio_move {
            dst: (dst + done) as u64,
            src: (src + done) as u64,
            len: (len - done) as u64,
            mode,
            move_: 0,
        };
        // SAFETY: `arg` is valid for the call; what happens to memory is the caller's promise.
        let result = unsafe { uffdio_move(fd.as_raw_fd(), &mut arg) };
        (result, arg.move_)
    })
}

/// `UFFDIO_CONTINUE` (kernel 5.14 on shared memory): maps what the page cache already holds.
///
/// # Safety
/// As for [`copy`].
pub(crate) unsafe fn map_existing(
    fd: BorrowedFd<'_>,
    start: usize,
    len: usize,
    wake: bool,
) -> Result<(), Stopped> {
    carry_on(len, |done| {
        let mut arg = raw::uffdio_continue {
            range: raw::uffdio_range {
                start: (start + done) as u64,
                len: (len - done) as u64,
            },
            mode: if wake { 0 } else { CONTINUE_DONTWAKE },
            mapped: 0,
        };
        // SAFETY: `arg` is valid for the call; what happens to memory is the caller's promise.
        let result = unsafe { uffdio_continue(fd.as_raw_fd(), &mut arg) };
        (result, arg.mapped)
    })
}

/// `UFFDIO_POISON` (kernel 6.6): accesses to the absent pages raise SIGBUS; sleeping threads are woken.
///
/// # Safety
/// As for [`copy`].
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
        // SAFETY: `arg` is valid for the call; what happens to memory is the caller's promise.
        let result = unsafe { uffdio_poison(fd.as_raw_fd(), &mut arg) };
        (result, arg.updated)
    })
}

/// `PAGEMAP_SCAN` (kernel 6.7): fills `found` with the ranges of `start..end` that were written since they were last protected, and
/// protects them again in the same step. Returns how many there are and the address up to which it looked.
pub(crate) fn scan_written(
    pagemap: BorrowedFd<'_>,
    start: usize,
    end: usize,
    found: &mut [raw::page_region],
) -> io::Result<(usize, usize)> {
    let mut arg = raw::pm_scan_arg {
        size: size_of::<raw::pm_scan_arg>() as u64,
        flags: u64::from(raw::PM_SCAN_WP_MATCHING | raw::PM_SCAN_CHECK_WPASYNC),
        start: start as u64,
        end: end as u64,
        walk_end: 0,
        vec: found.as_mut_ptr() as u64,
        vec_len: found.len() as u64,
        max_pages: 0,
        category_inverted: 0,
        category_mask: u64::from(raw::PAGE_IS_WRITTEN),
        category_anyof_mask: 0,
        return_mask: u64::from(raw::PAGE_IS_WRITTEN),
    };
    // SAFETY: `arg` is valid for the call and `vec`, `vec_len` describe a slice that is borrowed mutably. Pages keep their bytes.
    let count = unsafe { pagemap_scan(pagemap.as_raw_fd(), &mut arg) }?;
    Ok((
        usize::try_from(count).expect("a count is not negative"),
        arg.walk_end as usize,
    ))
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

/// `madvise`, for advice that leaves pages alone or drops pages that the caller owns.
///
/// # Safety
/// The range is a mapping of the caller's; with `MADV_DONTNEED` nothing may rely on its bytes.
pub(crate) unsafe fn madvise(start: usize, len: usize, advice: libc::c_int) -> nix::Result<()> {
    // SAFETY: the caller's promise.
    Errno::result(unsafe { libc::madvise(start as *mut libc::c_void, len, advice) }).map(drop)
}

/// Ranges that one call of [`copy_each`] or [`drop_each`] takes.
pub(crate) const RANGES_MAX: usize = 32;

/// `PIDFD_SELF` (kernel 6.14), absent from the published bindings.
const PIDFD_SELF: libc::c_int = -10_000;

/// `process_vm_readv` of this process's own memory: copies `len` bytes from each address of `from` to that of `to`, at most [`RANGES_MAX`] of them. Returns how many were
/// copied whole. Unlike in a plain copy, an absent page at which a fault is not served ends it there.
///
/// # Safety
/// Each of `to` is the caller's to write.
pub(crate) unsafe fn copy_each(from: &[usize], to: &[usize], len: usize) -> nix::Result<usize> {
    let (from, to) = (Vectors::new(from, len), Vectors::new(to, len));
    // SAFETY: the caller's promise; what cannot be read is an error.
    let copied = Errno::result(unsafe {
        let this = libc::getpid();
        libc::process_vm_readv(this, to.start(), to.count, from.start(), from.count, 0)
    })?;
    Ok(copied as usize / len)
}

/// `process_madvise` with `MADV_DONTNEED`: drops the `len` bytes at each address, at most [`RANGES_MAX`] of them; the processors that run the process are told once for
/// all of them (kernel 6.16). Returns how many were dropped whole.
///
/// # Safety
/// They lie in mappings of the caller's, and nothing relies on their bytes.
pub(crate) unsafe fn drop_each(starts: &[usize], len: usize) -> nix::Result<usize> {
    let ranges = Vectors::new(starts, len);
    // SAFETY: the caller's promise.
    let dropped = Errno::result(unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            PIDFD_SELF,
            ranges.start(),
            ranges.count,
            libc::MADV_DONTNEED,
            0,
        )
    })?;
    Ok(dropped as usize / len)
}

/// Whether this process may use [`copy_each`] and [`drop_each`].
pub(crate) fn can_copy_and_drop_each() -> bool {
    let (from, mut to) = (1_u64, 0_u64);
    let (start, end) = (&raw const from as usize, &raw mut to as usize);
    // SAFETY: the second number is the first's to become; nothing is dropped.
    let (copied, dropped) = unsafe {
        let copied = copy_each(&[start], &[end], size_of_val(&from));
        (copied, drop_each(&[], KERNEL_PAGE_BYTES))
    };
    copied == Ok(1) && to == from && dropped.is_ok()
}

/// Ranges of one length, as the kernel wants them.
struct Vectors {
    vectors: [libc::iovec; RANGES_MAX],
    count: libc::c_ulong,
}

impl Vectors {
    fn new(starts: &[usize], len: usize) -> Vectors {
        let vector = |at: usize| libc::iovec {
            iov_base: starts.get(at).map_or(0, |&start| start) as *mut libc::c_void,
            iov_len: len,
        };
        assert!(
            starts.len() <= RANGES_MAX,
            "{} ranges at once",
            starts.len()
        );
        Vectors {
            vectors: std::array::from_fn(vector),
            count: starts.len() as libc::c_ulong,
        }
    }

    fn start(&self) -> *const libc::iovec {
        self.vectors.as_ptr()
    }
}

/// Reserves `len` bytes of private anonymous memory, aligned to `align` (a power of two), which takes no memory until touched and is not
/// inherited by `fork`. `huge` asks for huge pages, otherwise they are refused: a page that the kernel merged or prefetched behind
/// the pager's back would break the budget.
pub(crate) fn reserve(len: usize, align: usize, huge: bool) -> nix::Result<usize> {
    let slack = align - KERNEL_PAGE_BYTES;
    // SAFETY: no address is asked for, so that no mapping is replaced.
    let start = unsafe { map_anonymous(0, len + slack, 0) }?;
    let aligned = start.next_multiple_of(align);
    let end = start + len + slack;
    for (from, to) in [(start, aligned), (aligned + len, end)] {
        if from < to {
            // SAFETY: part of the mapping made above, which nobody else knows.
            unsafe { release(from, to - from) };
        }
    }
    set_up(aligned, len, huge)?;
    Ok(aligned)
}

/// As [`reserve`], at `start` and nowhere else: what is mapped there is replaced, and nothing beside it.
///
/// # Safety
/// Nothing relies on what is mapped there.
pub(crate) unsafe fn reserve_at(start: usize, len: usize, huge: bool) -> nix::Result<()> {
    // SAFETY: the caller's promise.
    unsafe { map_anonymous(start, len, libc::MAP_FIXED) }?;
    set_up(start, len, huge)
}

/// # Safety
/// With `MAP_FIXED`, nothing relies on what is mapped there.
unsafe fn map_anonymous(start: usize, len: usize, more: libc::c_int) -> nix::Result<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | more;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the caller's promise.
    let mapped = unsafe { libc::mmap(start as *mut libc::c_void, len, protection, flags, -1, 0) };
    if mapped == libc::MAP_FAILED {
        Err(Errno::last())
    } else {
        Ok(mapped as usize)
    }
}

/// The advice of a new mapping, which is given up if that fails.
fn set_up(start: usize, len: usize, huge: bool) -> nix::Result<()> {
    let page_kind = if huge {
        libc::MADV_HUGEPAGE
    } else {
        libc::MADV_NOHUGEPAGE
    };
    for advice in [libc::MADV_DONTFORK, page_kind] {
        // SAFETY: the mapping made above; neither advice drops pages.
        match unsafe { madvise(start, len, advice) } {
            Ok(()) => {}
            // A kernel built without transparent huge pages: there is nothing to ask for or to refuse.
            Err(Errno::EINVAL) if advice == page_kind => {}
            Err(errno) => {
                // SAFETY: the mapping made above, which nobody else knows.
                unsafe { release(start, len) };
                return Err(errno);
            }
        }
    }
    Ok(())
}

/// `munmap`.
///
/// # Safety
/// The range is the caller's, and nothing uses it any more.
pub(crate) unsafe fn release(start: usize, len: usize) {
    // SAFETY: the caller's promise.
    if let Err(errno) = Errno::result(unsafe { libc::munmap(start as *mut libc::c_void, len) }) {
        // Only ENOMEM is possible: cutting a hole would exceed vm.max_map_count. The range stays mapped, which leaks addresses, but its
        // memory can be given back.
        debug_assert_eq!(errno, Errno::ENOMEM);
        // SAFETY: the caller's promise.
        let _ = unsafe { madvise(start, len, libc::MADV_DONTNEED) };
    }
}

/// `mremap` with `MREMAP_DONTUNMAP` (kernel 5.7): moves all pages of the range to a new mapping, atomically, and leaves the range mapped,
/// registered and empty.
///
/// # Safety
/// The range lies in one private anonymous mapping of the caller's, where absent pages are expected.
pub(crate) unsafe fn carry_away(start: usize, len: usize) -> nix::Result<usize> {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP;
    let anywhere = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: the caller's promise; the kernel picks a free address. glibc reads a fifth argument with this flag, which must not be left out.
    let staged = unsafe { libc::mremap(start as *mut libc::c_void, len, len, flags, anywhere) };
    if staged == libc::MAP_FAILED {
        Err(Errno::last())
    } else {
        Ok(staged as usize)
    }
}

/// `mprotect`.
///
/// # Safety
/// The range is the caller's.
pub(crate) unsafe fn protect(start: usize, len: usize, prot: libc::c_int) -> nix::Result<()> {
    // SAFETY: the caller's promise.
    Errno::result(unsafe { libc::mprotect(start as *mut libc::c_void, len, prot) }).map(drop)
}
