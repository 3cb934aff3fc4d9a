//! [`FdStore`]: a file or device behind a descriptor of the program, as the store of a region.
//!
//! The rule it keeps: bytes beyond the end of a file are zeros, and a file grows only when other
//! bytes than zeros are stored beyond its end: the part of a page that sticks out of the file is
//! not added to it. The program may close its descriptor. A file is kept open once, however many
//! regions it has.

use std::{
    collections::HashMap,
    fs::{self, File, OpenOptions},
    io,
    os::{
        fd::{BorrowedFd, RawFd},
        unix::fs::{FileExt, FileTypeExt, MetadataExt},
    },
    sync::{
        Arc, LazyLock, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use farpage::Store;
use farpage_signals::Mutex;
use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    sys::statfs::{TMPFS_MAGIC, fstatfs},
};

use crate::{FARPAGE_DENIED, FARPAGE_SYSTEM, error::Failure};

/// Multiple that `O_DIRECT` requires of addresses, lengths and offsets, on all devices.
const DIRECT_BYTES: usize = 4096;

/// A range of a file.
pub(crate) struct FdStore {
    file: Arc<OpenFile>,
    offset: u64,
    bytes: u64,
}

impl FdStore {
    /// Makes a store of the `bytes` bytes at `offset` of the file behind `fd`: a regular file,
    /// which may be shorter, or a block device.
    pub(crate) fn new(
        fd: RawFd,
        offset: u64,
        bytes: u64,
        read_only: bool,
    ) -> Result<FdStore, Failure> {
        let end = offset.checked_add(bytes);
        if end.is_none_or(|end| end > i64::MAX as u64) {
            return Err(Failure::invalid(format!(
                "{bytes} bytes at offset {offset} are beyond what a file can hold"
            )));
        }
        if fd < 0 {
            return Err(Failure::invalid(format!("{fd} is no descriptor of a file")));
        }
        Ok(FdStore {
            file: OpenFile::find(fd, read_only)?,
            offset,
            bytes,
        })
    }
}

impl Store for FdStore {
    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let inside = self.bytes.saturating_sub(offset).min(buf.len() as u64);
        let (inside, beyond) = buf.split_at_mut(inside as usize);
        beyond.fill(0);
        self.file.read(self.offset + offset, inside)
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        let inside = self.bytes.saturating_sub(offset).min(buf.len() as u64);
        self.file
            .write(self.offset + offset, &buf[..inside as usize])
    }

    fn flush(&self) -> io::Result<()> {
        self.file.sync()
    }

    fn may_block(&self) -> bool {
        !self.file.in_memory
    }

    fn name(&self) -> String {
        self.file.name.clone()
    }
}

/// Device, inode, and whether it may be written and is open for direct access.
type Identity = (u64, u64, bool, bool);

/// Files that regions use, by their identity: ten thousand regions of one file take one descriptor.
static OPEN: LazyLock<Mutex<HashMap<Identity, Weak<OpenFile>>>> = LazyLock::new(Mutex::default);

struct OpenFile {
    file: File,
    /// The file with `O_DIRECT`, if the program's has that flag: whole pages go past the page
    /// cache.
    direct: Option<File>,
    identity: Identity,
    name: String,
    in_memory: bool,
    /// The greatest length of the file that was ever seen; `u64::MAX` for a device, whose end is
    /// fixed.
    length: AtomicU64,
    /// True if bytes were written since the last `sync`.
    written: AtomicBool,
}

impl OpenFile {
    fn find(fd: RawFd, read_only: bool) -> Result<Arc<OpenFile>, Failure> {
        let name = fs::read_link(format!("/proc/self/fd/{fd}")).map_or_else(
            |_| format!("descriptor {fd}"),
            |path| path.display().to_string(),
        );
        let fail = |attempt: &str, error: &dyn std::fmt::Display| {
            Failure::new(FARPAGE_SYSTEM, format!("cannot {attempt} {name}: {error}"))
        };
        // SAFETY: borrowed for this call; a descriptor that is not open is an error of the first
        // system call.
        let theirs = unsafe { BorrowedFd::borrow_raw(fd) };
        let flags = fcntl(theirs, FcntlArg::F_GETFL)
            .map_err(|e| Failure::invalid(format!("{fd} is no open descriptor: {e}")))?;
        let flags = OFlag::from_bits_truncate(flags);
        let access = flags & OFlag::O_ACCMODE;
        if access == OFlag::O_WRONLY || (access == OFlag::O_RDONLY && !read_only) {
            return Err(Failure::new(
                FARPAGE_DENIED,
                format!(
                    "{name} is open for {} only: open it for reading and writing, or for reading a region that is not to be written",
                    if access == OFlag::O_WRONLY {
                        "writing"
                    } else {
                        "reading"
                    }
                ),
            ));
        }
        let direct = flags.contains(OFlag::O_DIRECT);
        let plain = if direct || flags.contains(OFlag::O_APPEND) {
            // Another open file: appending and direct access are flags of the open file, and
            // `pwrite` obeys them.
            OpenOptions::new()
                .read(true)
                .write(access == OFlag::O_RDWR)
                .open(format!("/proc/self/fd/{fd}"))
        } else {
            theirs.try_clone_to_owned().map(File::from)
        };
        let file = plain.map_err(|e| fail("open", &e))?;
        let about = file.metadata().map_err(|e| fail("look at", &e))?;
        let is_device = about.file_type().is_block_device();
        if !is_device && !about.is_file() {
            return Err(Failure::invalid(format!(
                "{name} is neither a regular file nor a block device"
            )));
        }
        let identity = (about.dev(), about.ino(), access == OFlag::O_RDWR, direct);

        let mut open = OPEN.lock();
        if let Some(known) = open.get(&identity).and_then(Weak::upgrade) {
            known.length.fetch_max(about.len(), Ordering::Relaxed);
            return Ok(known);
        }
        let direct = match direct {
            true => Some(theirs.try_clone_to_owned().map_err(|e| fail("keep", &e))?),
            false => None,
        };
        let made = Arc::new(OpenFile {
            in_memory: fstatfs(&file).is_ok_and(|fs| fs.filesystem_type() == TMPFS_MAGIC),
            direct: direct.map(File::from),
            length: AtomicU64::new(if is_device { u64::MAX } else { about.len() }),
            written: AtomicBool::new(false),
            file,
            identity,
            name,
        });
        open.insert(identity, Arc::downgrade(&made));
        Ok(made)
    }

    /// Returns the file for an access to `len` bytes at `address`.
    fn file_for(&self, address: usize, offset: u64, len: usize) -> &File {
        let aligned = address.is_multiple_of(DIRECT_BYTES)
            && offset.is_multiple_of(DIRECT_BYTES as u64)
            && len.is_multiple_of(DIRECT_BYTES);
        self.direct
            .as_ref()
            .filter(|_| aligned)
            .unwrap_or(&self.file)
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < buf.len() {
            let (at, rest) = (offset + done as u64, &mut buf[done..]);
            let file = self.file_for(rest.as_ptr().addr(), at, rest.len());
            match file.read_at(rest, at) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        let end = offset + done as u64;
        if done < buf.len() && end < self.length.load(Ordering::Relaxed) {
            // Zeros would hide that data was lost.
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!("{} ends at byte {end}: somebody cut it", self.name),
            ));
        }
        buf[done..].fill(0);
        Ok(())
    }

    fn write(&self, offset: u64, mut buf: &[u8]) -> io::Result<()> {
        let mut length = self.length.load(Ordering::Relaxed);
        if offset + buf.len() as u64 > length {
            // Another program may have made the file longer.
            length = length.max(self.file.metadata()?.len());
            let inside = length.saturating_sub(offset).min(buf.len() as u64) as usize;
            let stored = buf
                .iter()
                .rposition(|&byte| byte != 0)
                .map_or(0, |at| at + 1);
            buf = &buf[..inside.max(stored)];
            if buf.is_empty() {
                return Ok(());
            }
        }
        let file = self.file_for(buf.as_ptr().addr(), offset, buf.len());
        self.written.store(true, Ordering::Release);
        file.write_all_at(buf, offset)?;
        self.length
            .fetch_max(offset + buf.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        if self.written.swap(false, Ordering::AcqRel)
            && let Err(error) = self.file.sync_data()
        {
            self.written.store(true, Ordering::Release);
            return Err(error);
        }
        Ok(())
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        let mut open = OPEN.lock();
        // Another open file may have taken the place already.
        if open
            .get(&self.identity)
            .is_some_and(|file| file.strong_count() == 0)
        {
            open.remove(&self.identity);
        }
    }
}
