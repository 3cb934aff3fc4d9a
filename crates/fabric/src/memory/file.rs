//! [`ExtentFile`]: the file of an extent's memory.
//!
//! The rule it keeps: nothing here needs a lease, or gives one.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd},
        unix::fs::{FileExt, MetadataExt},
    },
    sync::{Arc, OnceLock, atomic::Ordering},
};

use farpage_wire::ExtentId;
use memmap2::{MmapOptions, MmapRaw};
use nix::{
    errno::Errno,
    fcntl::{FallocateFlags, fallocate},
    unistd::{Whence, lseek},
};

use super::words::mark_at;
use crate::exchange::announcements::Announcements;

/// Memory of an extent, whoever leases it.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) id: ExtentId,
    pub(super) bytes: u64,
    pub(super) atomics: bool,
    /// True if clients may only read the memory.
    pub(super) read_only: bool,
    /// Bytes of the file: those of the extent, and of its marks if it has some.
    pub(super) file_bytes: u64,
    pub(super) file: File,
    map: OnceLock<MmapRaw>,
    pub(super) announcements: Announcements,
}

impl Memory {
    /// Makes memory of `file`, whose first `bytes` bytes are the extent's.
    pub(super) fn new(id: ExtentId, bytes: u64, file: File, file_bytes: u64) -> Self {
        Self {
            id,
            bytes,
            atomics: false,
            read_only: false,
            file_bytes,
            file,
            map: OnceLock::new(),
            announcements: Announcements::default(),
        }
    }

    /// Returns the mapping, which is made by the first call.
    pub(super) fn map(&self) -> io::Result<&MmapRaw> {
        if let Some(map) = self.map.get() {
            return Ok(map);
        }
        let map = MmapOptions::new()
            .len(self.file_bytes as usize)
            .map_raw(&self.file)?;
        // Shared with a child, the mapping would only keep the memory alive.
        map.advise(memmap2::Advice::DontFork)?;
        // Another thread may have been first: then its mapping counts and ours goes.
        Ok(self.map.get_or_init(|| map))
    }
}

/// Command for the signal to a file lease's owner (fcntl(2)); `libc` has it for some targets only.
const F_SETSIG: libc::c_int = 10;

/// An extent's file, to look at without a lease.
#[derive(Clone, Debug)]
pub struct ExtentFile(pub(super) Arc<Memory>);

impl ExtentFile {
    /// True if another process, or another part of this one, can still reach the bytes: the memory
    /// was [lent](super::ExtentMemory::lend), and is open or mapped.
    ///
    /// # Errors
    /// The kernel's error where it has no file leases.
    pub fn is_held_elsewhere(&self) -> io::Result<bool> {
        let ask = |command: libc::c_int, number: libc::c_int| {
            // SAFETY: the call takes three numbers, of which the first is a descriptor of ours.
            let answer = unsafe { libc::fcntl(self.0.file.as_raw_fd(), command, number) };
            Errno::result(answer)
        };
        // A process that opens the file while the file lease is held causes a signal to us. SIGIO,
        // the usual one, would end this process; SIGURG is ignored unless the program handles it.
        // Ending a lease forgets the choice.
        ask(F_SETSIG, libc::SIGURG)?;
        // The kernel gives a write lease only to the sole holder of an open file (fcntl(2)). It
        // delays other opens only until the next line.
        match ask(libc::F_SETLEASE, libc::F_WRLCK) {
            Ok(_) => {
                ask(libc::F_SETLEASE, libc::F_UNLCK)?;
                Ok(false)
            }
            Err(Errno::EAGAIN) => Ok(true),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Gives the physical memory back now, even while a process still maps it. Its bytes become
    /// zero.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn punch(&self) -> io::Result<()> {
        self.punch_range(0, self.0.file_bytes)
    }

    /// Punches `len` bytes at `offset`, like [`punch`](Self::punch).
    ///
    /// # Errors
    /// The kernel's error.
    pub fn punch_range(&self, offset: u64, len: u64) -> io::Result<()> {
        let how = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        Ok(fallocate(&self.0.file, how, offset as i64, len as i64)?)
    }

    /// Reads bytes without the mapping: holes read as zeros and stay holes.
    ///
    /// # Errors
    /// The kernel's error; `UnexpectedEof` beyond the end.
    pub fn read_at(&self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        self.0.file.read_exact_at(to, offset)
    }

    /// Writes bytes without the mapping.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn write_at(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        self.0.file.write_all_at(from, offset)
    }

    /// Writes the `len` bytes at `offset` to the same offset of `to`. A file that was opened for
    /// O_DIRECT takes them out of the mapping, without a copy.
    ///
    /// # Errors
    /// The kernel's error; `UnexpectedEof` beyond the end.
    pub fn write_out(&self, offset: u64, len: u64, to: &File) -> io::Result<()> {
        let is_inside = |end| end <= self.0.bytes;
        if !offset.checked_add(len).is_some_and(is_inside) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let map = self.0.map()?;
        let mut done = 0;
        while done < len {
            let from = offset + done;
            // SAFETY:
            // - `from` and the `len - done` bytes behind it were checked against the mapping, which
            //   lives as long as `self`;
            // - the kernel only reads them, and no reference to them exists.
            let wrote = unsafe {
                let address = map.as_ptr().add(from as usize);
                let left = (len - done) as usize;
                libc::pwrite(to.as_raw_fd(), address.cast(), left, from as i64)
            };
            match Errno::result(wrote) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(bytes) => done += bytes as u64,
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Returns the offset of the first physically backed byte at or behind `from`.
    pub fn next_data(&self, from: u64) -> Option<u64> {
        // Clients share the file's position: only the result of each call counts.
        let at = lseek(&self.0.file, from as i64, Whence::SeekData);
        at.ok().map(|at| at as u64)
    }

    /// Takes the marks of a segment: one bit for each chunk that clients that share the memory have
    /// touched since the last call.
    ///
    /// # Panics
    /// If the extent has no such segment, or was made without marks.
    pub fn take_marks(&self, segment: usize) -> u32 {
        match self.0.map() {
            Ok(map) => {
                let mark = mark_at(map, self.0.bytes, segment);
                match mark.load(Ordering::Relaxed) {
                    0 => 0,
                    _ => mark.swap(0, Ordering::Relaxed),
                }
            }
            // An extent that cannot be mapped is not lent either.
            Err(_) => 0,
        }
    }

    /// Returns the number of bytes of the file that are for marks.
    pub fn marks_bytes(&self) -> u64 {
        self.0.file_bytes - self.0.bytes
    }

    /// Returns the extent's length in bytes.
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// Returns the extent's id.
    pub fn id(&self) -> ExtentId {
        self.0.id
    }

    /// Returns the number of physically backed bytes, whichever process wrote them.
    pub fn resident_bytes(&self) -> u64 {
        // A block of `stat` has 512 bytes whatever the file system. fstat of a memfd cannot fail.
        let metadata = self.0.file.metadata();
        metadata.map_or(0, |metadata| metadata.blocks() * 512)
    }
}

impl AsFd for ExtentFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.file.as_fd()
    }
}
