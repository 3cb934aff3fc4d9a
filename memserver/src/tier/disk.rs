//! [`Disk`]: storage of chunks that memory has no room for, and [`SpillFile`], the real one.
//!
//! The rule it keeps: no byte of the file is in the page cache, where `--memory` would not count
//! it. Nothing outlives the process: the file has no name.

use std::{
    fs::{File, OpenOptions},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::{FileExt, OpenOptionsExt},
    },
    path::Path,
};

use farpage_fabric::log::later;
use nix::{
    fcntl::{FallocateFlags, OFlag, fallocate},
    sys::statfs::{BTRFS_SUPER_MAGIC, FsType, TMPFS_MAGIC, statfs},
};

/// File systems that copy on write: a write takes new blocks, whatever was set aside, and O_DIRECT
/// may go through the page cache without a word.
const COPY_ON_WRITE: [FsType; 3] = [BTRFS_SUPER_MAGIC, FsType(0x2fc1_2fc1), FsType(0xca45_1a4e)];

/// Block size: O_DIRECT takes its multiples as offsets, lengths and addresses on every device.
pub(crate) const BLOCK_BYTES: usize = 4096;

/// Reads and writes of whole blocks.
pub(crate) trait Disk: Send + Sync {
    /// Returns the file's descriptor, if there is one.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    /// Fills `to` from offset `at`, all of it or an error.
    fn read(&self, at: u64, to: &mut [u8]) -> io::Result<()>;
    /// Writes all of `from` at offset `at`.
    fn write(&self, at: u64, from: &[u8]) -> io::Result<()>;
}

/// A file without a name, all of whose blocks are its own from the start.
pub(crate) struct SpillFile(File);

impl SpillFile {
    /// Makes a file of `bytes` bytes in `directory`.
    ///
    /// # Errors
    /// The system's error; `Unsupported` for a directory that is in memory itself.
    pub(crate) fn create(directory: &Path, bytes: u64) -> io::Result<Self> {
        let kind = statfs(directory)?.filesystem_type();
        if COPY_ON_WRITE.contains(&kind) {
            later(|| {
                tracing::warn!(
                    "the spill file is on a file system that copies on write (btrfs, ZFS, bcachefs): it may run full, and use memory that nobody counts"
                );
            });
        }
        if kind == TMPFS_MAGIC {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "this directory is in memory itself (tmpfs): name one on a disk",
            ));
        }
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .mode(0o600)
            .custom_flags((OFlag::O_TMPFILE | OFlag::O_DIRECT).bits())
            .open(directory)?;
        fallocate(&file, FallocateFlags::empty(), 0, bytes as i64)?;
        Ok(Self(file))
    }
}

impl From<OwnedFd> for SpillFile {
    /// Takes over the file of an earlier process.
    fn from(file: OwnedFd) -> Self {
        Self(file.into())
    }
}

impl Disk for SpillFile {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }

    fn read(&self, at: u64, to: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(to, at)
    }

    fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        self.0.write_all_at(from, at)
    }
}

/// Bytes that begin at a multiple of [`BLOCK_BYTES`] in memory.
pub(crate) struct Aligned {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    pub(crate) fn new(len: usize) -> Self {
        let bytes = vec![0; len + BLOCK_BYTES];
        let start = bytes.as_ptr().align_offset(BLOCK_BYTES);
        Self { bytes, start, len }
    }
}

impl std::ops::Deref for Aligned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..][..self.len]
    }
}

impl std::ops::DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..][..self.len]
    }
}
