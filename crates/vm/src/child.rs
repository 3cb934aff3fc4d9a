//! Regions in a process made by `fork`, which are caught there by a descriptor of its own.
//!
//! `fork` copies a region's mapping without its registration: pages that are present are shared,
//! and absent ones would read as zeros. So regions are not inherited at all, except by a process
//! that [arms](arm) them before any other code runs. The descriptor goes to the process that has
//! the pages, which fills them by [`ChildMemory`].
//!
//! The rule it keeps: no page of zeros appears in the child that the parent's page did not have.

use std::{
    fs::File,
    io,
    ops::Range,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::FileExt,
    },
};

use nix::errno::Errno;

use crate::{
    kernel::begin_sharing,
    sys::{self, Refusal, Stopped},
    uffd::{FaultBuffer, Features, RegisterMode, Uffd, UffdMessage, UserfaultfdError},
};

/// Features of a child's descriptor, as far as the kernel has them: found out before the fork.
#[derive(Clone, Copy, Debug)]
pub struct ChildFeatures {
    features: Features,
    user_mode_only: bool,
}

impl ChildFeatures {
    /// Asks the kernel. Faults inside system calls are caught if that is permitted.
    ///
    /// # Errors
    /// See [`UserfaultfdError`].
    pub fn find() -> Result<ChildFeatures, UserfaultfdError> {
        let (supported, user_mode_only) = match Uffd::supported(false) {
            Ok(supported) => (supported, false),
            Err(UserfaultfdError::NotPermitted { .. }) => (Uffd::supported(true)?, true),
            Err(error) => return Err(error),
        };
        Ok(ChildFeatures {
            features: Features::EVENT_REMOVE | (supported & Features::POISON),
            user_mode_only,
        })
    }
}

/// Lets processes that are made by `fork` inherit a region, or not.
///
/// # Errors
/// `ENOMEM` where the kernel has no memory for another mapping. Addresses without a mapping are
/// passed over.
///
/// # Safety
/// Each process that inherits the region [arms](arm) it before it touches the region.
pub unsafe fn set_inherited(region: &Range<usize>, inherited: bool) -> nix::Result<()> {
    let advice = match inherited {
        true => libc::MADV_DOFORK,
        false => libc::MADV_DONTFORK,
    };
    if inherited {
        begin_sharing();
    }
    // SAFETY: the advice drops no pages. What inheriting means is this function's contract.
    unsafe { sys::madvise(region.start, region.len(), advice) }
}

/// Catches the faults of absent pages in `regions`, which this process has inherited. Uses no
/// memory but the stack's: to be called in a process that `fork` has just made.
///
/// # Errors
/// The operating system's: absent pages would read as zeros.
pub fn arm(regions: &[Range<usize>], found: &ChildFeatures) -> nix::Result<OwnedFd> {
    let mode = found.user_mode_only;
    let fd = match sys::open_by_syscall(mode) {
        Err(Errno::EPERM | Errno::EACCES | Errno::ENOSYS) => sys::open_by_device(mode),
        opened => opened,
    }?;
    sys::agree(fd.as_fd(), found.features.bits())?;
    let uffd = Uffd::over(fd);
    for region in regions {
        let registered = uffd.register(region.start, region.len(), RegisterMode::MISSING);
        registered.map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)))?;
    }
    Ok(uffd.into_fd())
}

/// Event in a child's regions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChildEvent {
    /// A thread sleeps at this address, whose page is absent.
    Fault(usize),
    /// The child has dropped the pages of these addresses: they hold zeros from now on.
    Removed(Range<usize>),
}

/// Memory of a process made by `fork`, as the process sees it that fills its absent pages.
pub struct ChildMemory {
    uffd: Uffd,
    memory: File,
    buffer: FaultBuffer,
}

impl ChildMemory {
    /// Takes over the descriptors of a child: what [`arm`] has returned there, and the child's
    /// `/proc/self/mem`.
    pub fn new(uffd: OwnedFd, memory: OwnedFd) -> ChildMemory {
        ChildMemory {
            uffd: Uffd::over(uffd),
            memory: File::from(memory),
            buffer: FaultBuffer::default(),
        }
    }

    /// Appends what has happened since the last call. Does not block.
    ///
    /// # Errors
    /// The operating system's.
    pub fn events(&mut self, out: &mut Vec<ChildEvent>) -> io::Result<()> {
        self.uffd
            .messages(&mut self.buffer, |message| match message {
                UffdMessage::Fault(fault) => out.push(ChildEvent::Fault(fault.address)),
                UffdMessage::Removed(range) => out.push(ChildEvent::Removed(range)),
                UffdMessage::Unmapped(_) => {}
            })
    }

    /// Returns the descriptor that is readable when something has happened.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }

    /// Reads the child's memory at `address`, which is present, and outside the regions. Returns
    /// false if the child has ended, or has called `exec`.
    ///
    /// # Errors
    /// The operating system's.
    pub fn read(&self, address: usize, out: &mut [u8]) -> io::Result<bool> {
        match self.memory.read_exact_at(out, address as u64) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Maps a copy of `bytes`, of whole kernel pages, at `address`, and wakes the threads that
    /// sleep there. Pages that are there already stay as they are.
    ///
    /// # Errors
    /// [`Refusal::Missing`]: the child has unmapped the page; [`Refusal::Ended`]: it has ended, or
    /// has called `exec`; [`Refusal::Contended`]: it changes its mappings, so that its
    /// [`events`](Self::events) come first.
    pub fn put(&self, address: usize, bytes: &[u8]) -> Result<(), Refusal> {
        let mut done = 0;
        while done < bytes.len() {
            let (to, from) = (address + done, bytes.as_ptr().addr() + done);
            // SAFETY:
            // - The bytes are readable.
            // - The child has given its absent pages to the descriptor.
            let put = unsafe { self.uffd.copy(to, from, bytes.len() - done) };
            let Err(Stopped { done_bytes, why }) = put else {
                break;
            };
            done += done_bytes;
            match why {
                Refusal::Exists => {
                    self.wake(address + done);
                    done += sys::KERNEL_PAGE_BYTES;
                }
                why => return Err(why),
            }
        }
        Ok(())
    }

    /// Makes an access to absent pages raise SIGBUS in the child.
    ///
    /// # Errors
    /// As [`put`](Self::put), and where the kernel cannot do this (before 6.6).
    pub fn poison(&self, address: usize, len: usize) -> Result<(), Refusal> {
        // SAFETY: the child has given its absent pages to the descriptor.
        let poisoned = unsafe { self.uffd.poison(address, len) };
        poisoned.map_err(|stopped| stopped.why)
    }

    /// Wakes the threads that sleep on the kernel page at `address`; they try again.
    pub fn wake(&self, address: usize) {
        // Fails where the child has ended, and no thread sleeps.
        let _ = self.uffd.wake(address, sys::KERNEL_PAGE_BYTES);
    }
}
