//! One userfaultfd: opened, its features agreed upon, its errors in words.
//!
//! The rule it keeps: a lacking ability of the kernel is known when the descriptor is opened, with
//! the reason and the remedy, and not at the first fault. The registered ranges and their pages are
//! left to the caller.

use std::{
    fmt, io,
    mem::ManuallyDrop,
    ops::{BitAnd, BitOr, Range},
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd},
};

use farpage_tables::{is_private, lost};
use linux_raw_sys::general as raw;
use nix::errno::Errno;
use userfaultfd::{Event, EventBuffer, FaultKind, ReadWrite};

pub use userfaultfd::RegisterMode;

use crate::{
    pagemap,
    space::PageFault,
    sys::{self, Stopped},
};

/// Number of messages that one `read` takes from a descriptor.
const FAULTS_PER_READ: usize = 64;

/// A userfaultfd.
///
/// The methods that change memory are `unsafe`: addresses are plain numbers here.
pub struct Uffd {
    inner: userfaultfd::Uffd,
    /// True where the program can close the descriptor.
    is_in_reach: bool,
}

impl Uffd {
    /// Opens a descriptor with `features` agreed upon: by the system call or, where that is not
    /// permitted, by `/dev/userfaultfd`.
    ///
    /// With `user_mode_only`, only faults of the program's own instructions are caught. Those
    /// inside system calls end in `EFAULT`. Unprivileged processes may always have that.
    ///
    /// # Errors
    /// See [`UserfaultfdError`]; [`UserfaultfdError::TooOld`] names the first feature that the
    /// kernel lacks.
    pub fn open(features: Features, user_mode_only: bool) -> Result<Self, UserfaultfdError> {
        let fd = open_any(user_mode_only)?;
        match sys::agree(fd.as_fd(), features.0) {
            Ok(_) => Ok(Self::over(fd)),
            Err(Errno::EINVAL) => {
                let missing = Self::supported(user_mode_only)?.first_missing(features);
                Err(missing.map_or(
                    UserfaultfdError::Os(Errno::EINVAL.into()),
                    |(feature, since)| UserfaultfdError::TooOld { feature, since },
                ))
            }
            Err(errno) => Err(UserfaultfdError::Os(errno.into())),
        }
    }

    /// Returns the features that this kernel has.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn supported(user_mode_only: bool) -> Result<Features, UserfaultfdError> {
        let fd = open_any(user_mode_only)?;
        // A descriptor agrees only once: this one serves for the question alone.
        sys::agree(fd.as_fd(), 0)
            .map(Features)
            .map_err(|errno| UserfaultfdError::Os(errno.into()))
    }

    /// Takes over a descriptor that has agreed on its features.
    pub(crate) fn over(fd: OwnedFd) -> Self {
        // SAFETY: a userfaultfd that has agreed on its features, owned by nobody else.
        let inner = unsafe { userfaultfd::Uffd::from_raw_fd(fd.into_raw_fd()) };
        Self {
            inner,
            is_in_reach: !is_private(),
        }
    }

    /// Returns the descriptor.
    pub(crate) fn into_fd(self) -> OwnedFd {
        // The crate's own `into_raw_fd` closes the descriptor.
        let inner = ManuallyDrop::new(self.inner);
        // SAFETY: nobody else owns it any more.
        unsafe { OwnedFd::from_raw_fd(inner.as_raw_fd()) }
    }

    /// Starts to catch faults in a range of a mapping.
    ///
    /// # Errors
    /// `EBUSY` when another userfaultfd has it, `ENOMEM` when `vm.max_map_count` is reached,
    /// `EINVAL` when the mapping's kind is not supported.
    pub fn register(&self, start: usize, len: usize, mode: RegisterMode) -> io::Result<()> {
        self.inner
            .register_with_mode(start as *mut _, len, mode)
            .map(drop)
            .map_err(os_error)
    }

    /// Stops catching faults in a range, and wakes the threads that sleep there. From now on the
    /// kernel fills absent pages with zeros.
    ///
    /// # Errors
    /// `EINVAL` when there is no mapping, `ENOMEM` when `vm.max_map_count` is reached.
    pub fn unregister(&self, start: usize, len: usize) -> io::Result<()> {
        self.inner
            .unregister(start as *mut _, len)
            .map_err(os_error)
    }

    /// Wakes the threads that sleep on a fault in the range; they try again.
    ///
    /// # Errors
    /// `EINVAL` when the range is unaligned. It need not be mapped.
    pub fn wake(&self, start: usize, len: usize) -> io::Result<()> {
        self.inner.wake(start as *mut _, len).map_err(os_error)
    }

    /// Maps copies of the bytes at `src` to the absent (or poisoned) pages at `dst`, and wakes the
    /// threads that sleep there.
    ///
    /// # Errors
    /// [`Stopped`]: what lies before `done_bytes` is mapped.
    ///
    /// # Safety
    /// - `src..src + len` is readable.
    /// - The owner of the mapping at `dst` agrees to what appears in its absent pages.
    pub unsafe fn copy(&self, dst: usize, src: usize, len: usize) -> Result<(), Stopped> {
        // SAFETY: this method's contract is that of `sys::copy`.
        unsafe { sys::copy(self.inner.as_fd(), dst, src, len) }
    }

    /// Moves the pages at `src` to the absent pages at `dst`, and wakes the threads that sleep
    /// there. `dst` is registered with this descriptor; `src` need not be. With `allow_holes`,
    /// absent source pages are skipped.
    ///
    /// # Errors
    /// [`Stopped`]: what lies before `done_bytes` is moved.
    ///
    /// # Safety
    /// - Nothing relies on the bytes at `src`, which vanish from there.
    /// - The owner of the mapping at `dst` agrees to what appears in its absent pages.
    pub unsafe fn move_pages(
        &self,
        dst: usize,
        src: usize,
        len: usize,
        allow_holes: bool,
    ) -> Result<(), Stopped> {
        // SAFETY: this method's contract is that of `sys::move_pages`.
        unsafe { sys::move_pages(self.inner.as_fd(), dst, src, len, allow_holes) }
    }

    /// Makes accesses to absent pages raise SIGBUS, and wakes the threads that sleep there
    /// ([`Features::POISON`]).
    ///
    /// # Errors
    /// [`Stopped`]: what lies before `done_bytes` is poisoned.
    ///
    /// # Safety
    /// The owner of the mapping agrees to the end of its absent pages.
    pub unsafe fn poison(&self, start: usize, len: usize) -> Result<(), Stopped> {
        // SAFETY: this method's contract is that of `sys::poison`.
        unsafe { sys::poison(self.inner.as_fd(), start, len) }
    }

    /// Write-protects a range that is registered for write protection: a write is a fault then.
    ///
    /// # Errors
    /// `ENOENT` when the range is not registered so, `EAGAIN` while the mapping changes.
    pub fn write_protect(&self, start: usize, len: usize) -> io::Result<()> {
        self.inner
            .write_protect(start as *mut _, len)
            .map_err(os_error)
    }

    /// Lifts [`write_protect`](Self::write_protect) and wakes the threads that sleep there.
    ///
    /// # Errors
    /// As [`write_protect`](Self::write_protect).
    pub fn write_unprotect(&self, start: usize, len: usize) -> io::Result<()> {
        self.inner
            .remove_write_protection(start as *mut _, len, true)
            .map_err(os_error)
    }

    /// True while a mapping is being taken away ([`Features::EVENT_UNMAP`]). Until its message has
    /// been read, nothing can be put anywhere.
    pub(crate) fn is_changing(&self) -> bool {
        sys::is_changing(self.inner.as_fd())
    }

    /// Appends the faults that wait, without blocking.
    ///
    /// # Errors
    /// The operating system's.
    pub fn faults(&self, buffer: &mut FaultBuffer, out: &mut Vec<PageFault>) -> io::Result<()> {
        self.messages(buffer, |message| {
            if let UffdMessage::Fault(fault) = message {
                out.push(fault);
            }
        })
    }

    /// Calls `each` with the messages that wait, without blocking.
    pub(crate) fn messages(
        &self,
        buffer: &mut FaultBuffer,
        mut each: impl FnMut(UffdMessage),
    ) -> io::Result<()> {
        if self.is_in_reach {
            // A file that the program has put in the descriptor's place must not be read.
            self.is_changing();
        }
        loop {
            let mut count = 0;
            let events = match self.inner.read_events(&mut buffer.0) {
                Ok(events) => events,
                Err(userfaultfd::Error::SystemError(errno)) if errno as i32 == libc::EAGAIN => {
                    return Ok(());
                }
                Err(error) => return Err(os_error(error)),
            };
            for event in events {
                count += 1;
                match event.map_err(os_error)? {
                    Event::Pagefault {
                        kind,
                        rw,
                        addr,
                        thread_id,
                        ..
                    } => each(UffdMessage::Fault(PageFault {
                        address: addr as usize,
                        write: rw == ReadWrite::Write,
                        protected: kind == FaultKind::WriteProtected,
                        thread: thread_id.as_raw().cast_unsigned(),
                    })),
                    Event::Unmap { start, end } => {
                        each(UffdMessage::Unmapped(start as usize..end as usize));
                    }
                    Event::Remove { start, end } => {
                        each(UffdMessage::Removed(start as usize..end as usize));
                    }
                    // The other events have not been agreed upon.
                    _ => {}
                }
            }
            // A read takes all there is, up to its buffer.
            if count < FAULTS_PER_READ {
                return Ok(());
            }
        }
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

impl fmt::Debug for Uffd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Uffd({})", self.inner.as_raw_fd())
    }
}

/// Message from one `read`.
pub(crate) enum UffdMessage {
    Fault(PageFault),
    /// The program has unmapped these addresses, some of which were registered with this
    /// descriptor.
    Unmapped(Range<usize>),
    /// The program has dropped the pages of these addresses, by `madvise`.
    Removed(Range<usize>),
}

/// Room for the messages of one `read`, kept between calls.
pub struct FaultBuffer(EventBuffer);

impl Default for FaultBuffer {
    fn default() -> Self {
        Self(EventBuffer::new(FAULTS_PER_READ))
    }
}

/// Features of userfaultfd, as in `UFFDIO_API`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(u64);

impl Features {
    /// Faults on absent pages and nothing else (kernel 4.11).
    pub const MISSING: Self = Self(0);
    /// A fault raises SIGBUS in the thread that faults instead of a message (kernel 4.14).
    pub const SIGBUS: Self = Self(raw::UFFD_FEATURE_SIGBUS as u64);
    /// A message when the program unmaps registered addresses; its thread sleeps until the message
    /// is read (kernel 4.11).
    pub const EVENT_UNMAP: Self = Self(raw::UFFD_FEATURE_EVENT_UNMAP as u64);
    /// A message when the program drops pages by `madvise`; its thread sleeps until the message is
    /// read (kernel 4.11).
    pub const EVENT_REMOVE: Self = Self(raw::UFFD_FEATURE_EVENT_REMOVE as u64);
    /// Messages say which thread has touched the page (kernel 4.14).
    pub const THREAD_ID: Self = Self(raw::UFFD_FEATURE_THREAD_ID as u64);
    /// Write protection of anonymous memory (kernel 5.7).
    pub const WP: Self = Self(raw::UFFD_FEATURE_PAGEFAULT_FLAG_WP as u64);
    /// Faults on pages that a shared memory object holds but that are not mapped (kernel 5.14).
    pub const MINOR_SHMEM: Self = Self(raw::UFFD_FEATURE_MINOR_SHMEM as u64);
    /// Write protection of pages that are absent (kernel 6.4).
    pub const WP_UNPOPULATED: Self = Self(raw::UFFD_FEATURE_WP_UNPOPULATED as u64);
    /// `UFFDIO_POISON` (kernel 6.6).
    pub const POISON: Self = Self(raw::UFFD_FEATURE_POISON as u64);
    /// Writes to protected pages are noted instead of reported (kernel 6.7).
    pub const WP_ASYNC: Self = Self(raw::UFFD_FEATURE_WP_ASYNC as u64);
    /// `UFFDIO_MOVE` (kernel 6.8).
    pub const MOVE: Self = Self(raw::UFFD_FEATURE_MOVE as u64);

    /// All features that have a name here, with their names and the kernels that brought them.
    pub(crate) const NAMED: [(Self, &'static str, &'static str); 7] = [
        (Self::SIGBUS, "SIGBUS", "4.14"),
        (Self::WP, "WP", "5.7"),
        (Self::MINOR_SHMEM, "MINOR", "5.14"),
        (Self::WP_UNPOPULATED, "WP_UNPOPULATED", "6.4"),
        (Self::POISON, "POISON", "6.6"),
        (Self::WP_ASYNC, "WP_ASYNC", "6.7"),
        (Self::MOVE, "MOVE", "6.8"),
    ];

    /// True if all of `other` are among these features.
    pub fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    pub(crate) fn bits(self) -> u64 {
        self.0
    }

    fn first_missing(self, wanted: Self) -> Option<(&'static str, &'static str)> {
        Self::NAMED
            .into_iter()
            .find(|(feature, ..)| wanted.contains(*feature) && !self.contains(*feature))
            .map(|(_, name, since)| (name, since))
    }
}

impl BitOr for Features {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitAnd for Features {
    type Output = Self;

    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

/// Reason why userfaultfd can not be used.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum UserfaultfdError {
    /// The system call and the device are both not permitted.
    #[error(
        "userfaultfd is not permitted (system call: {syscall}; /dev/userfaultfd: {device}). Any of these mends it: \
         `sudo sysctl -w vm.unprivileged_userfaultfd=1`; `sudo setfacl -m u:$USER:rw /dev/userfaultfd` (kernel 6.1 and later); \
         run as root or with CAP_SYS_PTRACE; in a container, also a seccomp profile that allows the system call. \
         Or catch faults in user mode only (FARPAGE_USER_MODE_ONLY=1): then region memory can not be passed to system calls while absent"
    )]
    NotPermitted {
        /// Error of the system call.
        syscall: Errno,
        /// Error of the device.
        device: Errno,
    },
    /// The kernel was built without userfaultfd.
    #[error(
        "this kernel has no userfaultfd: use one that is built with CONFIG_USERFAULTFD=y (`zgrep USERFAULTFD /proc/config.gz`)"
    )]
    NotBuilt,
    /// The kernel lacks a feature.
    #[error("this kernel's userfaultfd lacks {feature}: use kernel {since} or later")]
    TooOld {
        /// The feature's name.
        feature: &'static str,
        /// The kernel that brought the feature.
        since: &'static str,
    },
    /// `/proc/self/pagemap` can not be read.
    #[error("cannot open /proc/self/pagemap: {0}; {remedy}", remedy = pagemap::remedy(.0))]
    Pagemap(io::Error),
    /// The kernel's page is not 4 KiB.
    #[error(
        "the kernel's page is {bytes} bytes, only 4096 is supported: use a kernel with 4 KiB pages"
    )]
    KernelPage {
        /// The page's size.
        bytes: usize,
    },
    /// Any other failure.
    #[error("cannot open a userfaultfd: {0} (descriptors: see `ulimit -n`)")]
    Os(io::Error),
}

/// Prints the same as `Display`: programs whose `main` returns a `Result` print errors by `Debug`.
impl fmt::Debug for UserfaultfdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Opens a descriptor, first by the system call: that needs no file, and containers often lack
/// `/dev/userfaultfd`.
fn open_any(user_mode_only: bool) -> Result<OwnedFd, UserfaultfdError> {
    let syscall = match sys::open_by_syscall(user_mode_only) {
        Ok(fd) => return Ok(fd),
        Err(errno @ (Errno::EPERM | Errno::EACCES | Errno::ENOSYS)) => errno,
        // Kernels before 5.11 do not know UFFD_USER_MODE_ONLY.
        Err(Errno::EINVAL) if user_mode_only => {
            return Err(UserfaultfdError::TooOld {
                feature: "USER_MODE_ONLY",
                since: "5.11",
            });
        }
        Err(errno) => return Err(UserfaultfdError::Os(errno.into())),
    };
    match sys::open_by_device(user_mode_only) {
        Ok(fd) => Ok(fd),
        Err(Errno::ENOENT) if syscall == Errno::ENOSYS => Err(UserfaultfdError::NotBuilt),
        Err(
            device @ (Errno::EPERM | Errno::EACCES | Errno::ENOENT | Errno::ENXIO | Errno::ENODEV),
        ) => Err(UserfaultfdError::NotPermitted { syscall, device }),
        Err(errno) => Err(UserfaultfdError::Os(errno.into())),
    }
}

fn os_error(error: userfaultfd::Error) -> io::Error {
    match error {
        userfaultfd::Error::SystemError(errno)
            if matches!(errno as i32, libc::EBADF | libc::ENOTTY) =>
        {
            lost(sys::USERFAULTFD)
        }
        // The crate's errno is that of another major version of nix: only the number travels.
        userfaultfd::Error::SystemError(errno) => io::Error::from_raw_os_error(errno as i32),
        other => io::Error::other(other),
    }
}
