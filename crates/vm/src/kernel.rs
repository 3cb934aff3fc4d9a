//! The real address space.

use std::{io, os::fd::BorrowedFd};

use crate::space::{AddressSpace, DetachError, Fault, InstallError, Layout};

/// How pages change sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// By `UFFDIO_MOVE` (kernel 6.8): the physical page changes its address, nothing is copied.
    Move,
    /// By copying.
    Copy,
}

/// How a [`KernelSpace`] is made.
#[derive(Clone, Debug)]
pub struct KernelSpaceOptions {
    /// Number of shards, each with a userfaultfd of its own.
    pub shards: usize,
    /// Bytes of frames that may be held at once, per page size.
    pub frame_bytes_max: usize,
    /// How pages change sides; `None`: the best that the kernel offers.
    pub transfer: Option<Transfer>,
    /// Catch only faults of the program's own instructions, not those inside system calls.
    pub user_mode_only: bool,
}

/// A [`KernelSpace`] could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Any other failure.
    #[error("cannot open userfaultfd")]
    Os(#[source] io::Error),
}

/// The program's real memory.
pub struct KernelSpace {}

impl KernelSpace {
    /// Opens the userfaultfds.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn new(options: KernelSpaceOptions) -> Result<Self, OpenError> {
        let _ = options;
        Err(OpenError::Os(io::ErrorKind::Unsupported.into()))
    }

    /// How pages change sides here.
    pub fn transfer(&self) -> Transfer {
        Transfer::Move
    }
}

/// One page's bytes while the page is not mapped in a region.
pub struct KernelFrame {}

impl AsRef<[u8]> for KernelFrame {
    fn as_ref(&self) -> &[u8] {
        &[]
    }
}

impl AsMut<[u8]> for KernelFrame {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut []
    }
}

#[allow(unused_variables)]
impl AddressSpace for KernelSpace {
    type Frame = KernelFrame;
    fn shards(&self) -> usize {
        0
    }
    fn map(&self, layout: Layout) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn unmap(&self, address: usize, layout: Layout) {}
    fn new_frame(&self, page_bytes: usize) -> io::Result<KernelFrame> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn install(&self, shard: usize, address: usize, frame: KernelFrame) -> Result<(), InstallError<KernelFrame>> {
        Ok(())
    }
    fn detach(&self, shard: usize, address: usize, page_bytes: usize) -> Result<KernelFrame, DetachError> {
        Err(DetachError::Absent)
    }
    fn is_present(&self, address: usize) -> bool {
        false
    }
    fn wake(&self, shard: usize, address: usize, page_bytes: usize) {}
    fn poison(&self, shard: usize, address: usize, page_bytes: usize) -> io::Result<()> {
        Ok(())
    }
    fn faults(&self, shard: usize, out: &mut Vec<Fault>) -> io::Result<()> {
        Ok(())
    }
    fn fault_fd(&self, shard: usize) -> Option<BorrowedFd<'_>> {
        None
    }
}
