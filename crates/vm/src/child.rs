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
    kernel::{begin_child, begin_sharing},
    sigbus,
    sys::{self, Refusal, Stopped},
    uffd::{FaultBuffer, Features, RegisterMode, Uffd, UffdMessage, UserfaultfdError},
};

/// Makes locks of the parent's free in a child made by `fork`, in which other regions may be made.
///
/// # Safety
/// The calling thread is the only one of this process.
pub unsafe fn begin() {
    // SAFETY: the caller's promise.
    unsafe {
        begin_child();
        sigbus::begin_child();
    }
}

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
            features: Features::EVENT_REMOVE
                | Features::EVENT_UNMAP
                | (supported & Features::POISON),
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
/// memory but the stack's: to be called in a process that `fork` has just made. A process that has
/// given up its rights since the features were found catches faults of its own instructions alone.
/// Returns true with the descriptor if it catches those inside system calls, too.
///
/// # Errors
/// The operating system's: absent pages would read as zeros.
pub fn arm(regions: &[Range<usize>], found: &ChildFeatures) -> nix::Result<(OwnedFd, bool)> {
    let refused = |errno| matches!(errno, Errno::EPERM | Errno::EACCES | Errno::ENOSYS);
    let open = |user_mode_only| match sys::open_by_syscall(user_mode_only) {
        Err(errno) if refused(errno) => sys::open_by_device(user_mode_only),
        opened => opened,
    };
    let (fd, user_mode_only) = match open(found.user_mode_only) {
        Err(_) if !found.user_mode_only => (open(true)?, true),
        opened => (opened?, found.user_mode_only),
    };
    sys::agree(fd.as_fd(), found.features.bits())?;
    let uffd = Uffd::over(fd);
    for region in regions {
        register(&uffd, region.clone())?;
    }
    Ok((uffd.into_fd(), !user_mode_only))
}

/// Registers what is left of a region. Its parent may have unmapped some of it and mapped a file
/// there, which the kernel refuses: such a mapping is passed over.
fn register(uffd: &Uffd, part: Range<usize>) -> nix::Result<()> {
    let registered = uffd.register(part.start, part.len(), RegisterMode::MISSING);
    let errno = registered.map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(0)));
    match errno {
        Err(Errno::EINVAL) if part.len() > sys::KERNEL_PAGE_BYTES => {
            let half = (part.len() / 2).next_multiple_of(sys::KERNEL_PAGE_BYTES);
            register(uffd, part.start..part.start + half)?;
            register(uffd, part.start + half..part.end)
        }
        Err(Errno::EINVAL) => Ok(()),
        registered => registered,
    }
}

/// Event in a child's regions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChildEvent {
    /// A thread sleeps at this address, whose page is absent.
    Fault(usize),
    /// The child drops the pages of these addresses: they hold zeros from now on. Pages that are
    /// there may stay for a moment, until the child's thread goes on.
    Removed(Range<usize>),
    /// The child has unmapped these addresses: they are not the region's any more, whatever the
    /// child maps there. For a child of the child they hold zeros.
    Unmapped(Range<usize>),
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
                UffdMessage::Unmapped(range) => out.push(ChildEvent::Unmapped(range)),
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
    /// sleep there. Pages that are there already, or that the child has unmapped, stay as they are.
    /// Calls `mapped` with the addresses where the copy is mapped, also before an error.
    ///
    /// # Errors
    /// [`Refusal::Ended`]: the child has ended, or has called `exec`; [`Refusal::Contended`]: it
    /// changes its mappings, so that its [`events`](Self::events) come first.
    pub fn put(
        &self,
        address: usize,
        bytes: &[u8],
        mut mapped: impl FnMut(Range<usize>),
    ) -> Result<(), Refusal> {
        let from = bytes.as_ptr().addr();
        self.each_part(address, bytes.len(), |done, len| {
            let to = address + done;
            // SAFETY:
            // - The bytes are readable.
            // - The child has given its absent pages to the descriptor.
            let copied = unsafe { self.uffd.copy(to, from + done, len) };
            let done_bytes = match &copied {
                Ok(()) => len,
                Err(stopped) => stopped.done_bytes,
            };
            if done_bytes > 0 {
                mapped(to..to + done_bytes);
            }
            copied
        })
    }

    /// Calls `fill` for all of `len` bytes from `address` on: at once as far as the kernel goes,
    /// and page by page where the child has divided its mapping. Wakes threads where nothing is
    /// filled.
    fn each_part(
        &self,
        address: usize,
        len: usize,
        mut fill: impl FnMut(usize, usize) -> Result<(), Stopped>,
    ) -> Result<(), Refusal> {
        let (mut done, mut step) = (0, len);
        while done < len {
            match fill(done, step.min(len - done)) {
                Ok(()) => done += step,
                Err(Stopped { done_bytes, why }) => {
                    done += done_bytes;
                    match why {
                        Refusal::Missing | Refusal::Invalid if step > sys::KERNEL_PAGE_BYTES => {
                            step = sys::KERNEL_PAGE_BYTES;
                        }
                        Refusal::Exists | Refusal::Missing | Refusal::Invalid => {
                            self.wake(address + done);
                            done += sys::KERNEL_PAGE_BYTES;
                        }
                        why => return Err(why),
                    }
                }
            }
        }
        Ok(())
    }

    /// Makes an access to absent pages raise SIGBUS in the child.
    ///
    /// # Errors
    /// As [`put`](Self::put), and where the kernel cannot do this (before 6.6).
    pub fn poison(&self, address: usize, len: usize) -> Result<(), Refusal> {
        self.each_part(address, len, |done, len| {
            // SAFETY: the child has given its absent pages to the descriptor.
            unsafe { self.uffd.poison(address + done, len) }
        })
    }

    /// Wakes the threads that sleep on the kernel page at `address`; they try again.
    pub fn wake(&self, address: usize) {
        // Fails where the child has ended, and no thread sleeps.
        let _ = self.uffd.wake(address, sys::KERNEL_PAGE_BYTES);
    }
}
