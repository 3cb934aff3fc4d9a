//! [`Folder`]: the files of one directory on a disk, and [`DiskFolder`], the real one.
//!
//! The rule it keeps: plain steps. Nothing is durable before a `sync`: of the file for its bytes,
//! of the folder for creations, renames and removals. The order of the steps is left to
//! [`DurableNames`](super::DurableNames).

use std::{
    fs::{self, File, OpenOptions},
    io,
    ops::Range,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
};

use farpage_fabric::memory::ExtentFile;
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg, OFlag},
    sys::statfs::{TMPFS_MAGIC, statfs},
    unistd::{Whence, lseek},
};
use tracing::{info, warn};

use crate::tier::BLOCK_BYTES;

/// File that is locked while a server uses the directory.
const LOCK: &str = "lock";

/// Directory in which checks of a file system leave files that had lost their names.
pub(super) const LOST: &str = "lost+found";

/// The least number of bytes that are moved without the page cache. Fewer are moved faster through
/// it, since the kernel writes many places at once.
const DIRECT_BYTES: usize = 256 << 10;

/// Files of one directory.
pub(crate) trait Folder: Send + Sync {
    /// Returns the locked file, if there is one.
    fn locked(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    /// Lists the files.
    fn list(&self) -> io::Result<Vec<String>>;
    /// True if a check of the file system has found files that had lost their names.
    fn has_lost_files(&self) -> io::Result<bool>;
    /// Opens a file that exists.
    fn open(&self, file: &str) -> io::Result<Box<dyn FolderFile>>;
    /// Makes a file of `bytes` zeros, in place of an older one of that name.
    fn create(&self, file: &str, bytes: u64) -> io::Result<Box<dyn FolderFile>>;
    /// Gives a file another name, in place of an older one of that name.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Removes a file.
    fn remove(&self, file: &str) -> io::Result<()>;
    /// Makes all creations, renames and removals until now durable.
    fn sync(&self) -> io::Result<()>;
}

/// An open file of a [`Folder`].
pub(crate) trait FolderFile {
    /// Returns the file's length.
    fn bytes(&self) -> io::Result<u64>;
    /// Returns the bytes that the file takes on the disk.
    fn disk_bytes(&self) -> io::Result<u64>;
    /// Fills `to` from offset `at`, all of it or an error.
    fn read(&self, at: u64, to: &mut [u8]) -> io::Result<()>;
    /// Returns the first range at or behind `from` that was written. Other bytes are zeros.
    fn next_data(&self, from: u64) -> io::Result<Option<Range<u64>>>;
    /// Writes all of `from` at offset `at`.
    fn write(&self, at: u64, from: &[u8]) -> io::Result<()>;
    /// Writes whole blocks of `memory` at offset `at`, where they are in memory, without a copy.
    /// Returns the number of bytes that were written; 0 if they are to be copied. `len` bytes are
    /// enough.
    fn write_memory(&self, _memory: &ExtentFile, _at: u64, _len: u64) -> io::Result<u64> {
        Ok(0)
    }
    /// Makes all writes until now durable, and the file's length.
    fn sync(&self) -> io::Result<()>;
}

/// A directory that one process uses at a time.
pub(crate) struct DiskFolder {
    path: PathBuf,
    handle: File,
    /// True if the file system moves bytes without the page cache.
    is_direct: bool,
    lock: FolderLock,
}

/// The right to use a directory, until it is dropped.
enum FolderLock {
    Taken(Flock<File>),
    /// File of an earlier process, which took the lock. The lock ends with the last descriptor.
    Inherited(File),
}

/// A file of a [`DiskFolder`].
struct DiskFile {
    file: File,
    /// Handle of the file without the page cache, which would take memory that nobody counts.
    direct: Option<File>,
}

impl DiskFolder {
    /// Opens and locks the directory at `path`.
    ///
    /// # Errors
    /// The system's error; `WouldBlock` if another process has the lock.
    pub(crate) fn lock(path: &Path) -> io::Result<Self> {
        Self::open(path, || {
            let lock = own_file().create(true).open(path.join(LOCK))?;
            let lock = Flock::lock(lock, FlockArg::LockExclusiveNonblock);
            Ok(FolderLock::Taken(
                lock.map_err(|(_, errno)| io::Error::from(errno))?,
            ))
        })
    }

    /// Opens the directory at `path`, whose lock an earlier process took and handed over.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn inherit(path: &Path, lock: OwnedFd) -> io::Result<Self> {
        Self::open(path, || Ok(FolderLock::Inherited(lock.into())))
    }

    fn open(path: &Path, lock: impl FnOnce() -> io::Result<FolderLock>) -> io::Result<Self> {
        let handle = File::open(path)?;
        if !handle.metadata()?.is_dir() {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        if statfs(path)?.filesystem_type() == TMPFS_MAGIC {
            warn!(
                directory = %path.display(),
                "the directory of --persist is in memory itself (tmpfs): names outlive this server, and not this machine"
            );
        }
        let lock = lock()?;
        let is_direct = direct_file().open(path.join(LOCK)).is_ok();
        if !is_direct {
            info!(directory = %path.display(), "names go to the disk through the page cache: the file system has no O_DIRECT");
        }
        Ok(Self {
            path: path.to_owned(),
            handle,
            is_direct,
            lock,
        })
    }

    fn file(&self, name: &str, file: File) -> io::Result<Box<dyn FolderFile>> {
        let direct = (self.is_direct).then(|| direct_file().open(self.path.join(name)));
        let direct = direct.transpose()?;
        Ok(Box::new(DiskFile { file, direct }))
    }
}

impl DiskFile {
    /// Divides `len` bytes at `address`, for offset `at` of the file: up to the first whole block,
    /// whole blocks that are worth moving without the page cache, and the rest.
    fn parts(&self, at: u64, address: usize, len: usize) -> (Option<&File>, [usize; 2]) {
        let head = (at.next_multiple_of(BLOCK_BYTES as u64) - at) as usize;
        let whole = len.saturating_sub(head) / BLOCK_BYTES * BLOCK_BYTES;
        let is_aligned = address.wrapping_add(head).is_multiple_of(BLOCK_BYTES);
        match &self.direct {
            Some(direct) if is_aligned && whole >= DIRECT_BYTES => (Some(direct), [head, whole]),
            _ => (None, [len, 0]),
        }
    }
}

fn direct_file() -> OpenOptions {
    let mut options = own_file();
    options.custom_flags(OFlag::O_DIRECT.bits());
    options
}

fn own_file() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    options
}

impl Folder for DiskFolder {
    fn locked(&self) -> Option<BorrowedFd<'_>> {
        Some(match &self.lock {
            FolderLock::Taken(file) => file.as_fd(),
            FolderLock::Inherited(file) => file.as_fd(),
        })
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            let file = entry?.file_name().to_string_lossy().into_owned();
            if file != LOCK {
                files.push(file);
            }
        }
        Ok(files)
    }

    fn has_lost_files(&self) -> io::Result<bool> {
        match fs::read_dir(self.path.join(LOST)) {
            Ok(mut files) => Ok(files.next().is_some()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn open(&self, file: &str) -> io::Result<Box<dyn FolderFile>> {
        self.file(file, own_file().open(self.path.join(file))?)
    }

    fn create(&self, file: &str, bytes: u64) -> io::Result<Box<dyn FolderFile>> {
        let mut options = own_file();
        let made = options.create(true).truncate(true);
        let made = made.open(self.path.join(file))?;
        made.set_len(bytes)?;
        self.file(file, made)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.path.join(from), self.path.join(to))
    }

    fn remove(&self, file: &str) -> io::Result<()> {
        fs::remove_file(self.path.join(file))
    }

    fn sync(&self) -> io::Result<()> {
        self.handle.sync_all()
    }
}

impl FolderFile for DiskFile {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn disk_bytes(&self) -> io::Result<u64> {
        // A block of `stat` has 512 bytes whatever the file system.
        Ok(self.file.metadata()?.blocks() * 512)
    }

    fn read(&self, at: u64, to: &mut [u8]) -> io::Result<()> {
        let (direct, [head, whole]) = self.parts(at, to.as_ptr().addr(), to.len());
        let (head, rest) = to.split_at_mut(head);
        let (whole, tail) = rest.split_at_mut(whole);
        self.file.read_exact_at(head, at)?;
        let mut at = at + head.len() as u64;
        if let Some(direct) = direct {
            direct.read_exact_at(whole, at)?;
        }
        at += whole.len() as u64;
        self.file.read_exact_at(tail, at)
    }

    fn next_data(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        let start = match lseek(&self.file, from as i64, Whence::SeekData) {
            Ok(start) => start,
            // Only holes follow.
            Err(Errno::ENXIO) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        let end = lseek(&self.file, start, Whence::SeekHole)?;
        Ok(Some(start as u64..end as u64))
    }

    fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        let (direct, [head, whole]) = self.parts(at, from.as_ptr().addr(), from.len());
        let (head, rest) = from.split_at(head);
        let (whole, tail) = rest.split_at(whole);
        self.file.write_all_at(head, at)?;
        let mut at = at + head.len() as u64;
        if let Some(direct) = direct {
            direct.write_all_at(whole, at)?;
        }
        at += whole.len() as u64;
        self.file.write_all_at(tail, at)
    }

    fn write_memory(&self, memory: &ExtentFile, at: u64, len: u64) -> io::Result<u64> {
        // A mapping begins at a block, so addresses are as odd as offsets.
        let odd = (at % BLOCK_BYTES as u64) as usize;
        match self.parts(at, odd, usize::try_from(len).unwrap_or(usize::MAX)) {
            (Some(direct), [0, whole]) => {
                memory.write_out(at, whole as u64, direct)?;
                Ok(whole as u64)
            }
            _ => Ok(0),
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

#[cfg(test)]
mod tests {
    use farpage_fabric::memory::ExtentMemory;
    use farpage_wire::ExtentId;

    use super::*;
    use crate::tier::Aligned;

    #[test]
    fn bytes_come_back_with_and_without_the_page_cache_at_every_offset() {
        let directory = tempfile::tempdir().unwrap();
        let folder = DiskFolder::lock(directory.path()).unwrap();
        let bytes = 3 * DIRECT_BYTES;
        let file = folder.create("file", bytes as u64).unwrap();
        let mut expected = vec![0; bytes];
        let mut buffer = Aligned::new(bytes);
        for (turn, at) in [0, 1, 4095, 4096, 4097, 12_345].into_iter().enumerate() {
            // The buffer is as odd as the offset, and as odd as another one.
            for skip in [at % BLOCK_BYTES, 77] {
                for len in [1, 4096, DIRECT_BYTES, 2 * DIRECT_BYTES + 7] {
                    let from = &mut buffer[skip..][..len];
                    from.fill((turn + len + skip) as u8 | 1);
                    file.write(at as u64, from).unwrap();
                    expected[at..][..len].copy_from_slice(from);
                    from.fill(0);
                    file.read(at as u64, from).unwrap();
                    assert_eq!(*from, expected[at..][..len], "{len} bytes at {at}");
                }
            }
        }
        file.sync().unwrap();
        let again = DiskFolder::lock(directory.path()).map(drop).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::WouldBlock);
        drop(folder);
        let folder = DiskFolder::lock(directory.path()).unwrap();
        let mut found = vec![0; bytes];
        folder.open("file").unwrap().read(0, &mut found).unwrap();
        assert!(found == expected);
    }

    #[test]
    fn files_that_lost_their_names_are_seen() {
        let directory = tempfile::tempdir().unwrap();
        let folder = DiskFolder::lock(directory.path()).unwrap();
        assert!(!folder.has_lost_files().unwrap());
        let lost = directory.path().join(LOST);
        fs::create_dir(&lost).unwrap();
        assert!(!folder.has_lost_files().unwrap());
        fs::write(lost.join("#12"), "").unwrap();
        assert!(folder.has_lost_files().unwrap());
    }

    #[test]
    fn whole_blocks_of_memory_are_written_where_they_were() {
        let directory = tempfile::tempdir().unwrap();
        let folder = DiskFolder::lock(directory.path()).unwrap();
        let bytes = 4 * DIRECT_BYTES;
        let memory = ExtentMemory::create(ExtentId(1), bytes as u64, false).unwrap();
        let expected: Vec<u8> = (0..bytes).map(|i| (i / 1000) as u8).collect();
        memory.copy_in(0, &expected).unwrap();
        let file = folder.create("file", bytes as u64).unwrap();
        let write = |at: usize, len| {
            let written = file.write_memory(&memory.file(), at as u64, len as u64);
            written.unwrap() as usize
        };
        let whole = if folder.is_direct {
            2 * DIRECT_BYTES
        } else {
            0
        };
        assert_eq!(write(BLOCK_BYTES, 2 * DIRECT_BYTES + 7), whole);
        assert_eq!(write(1, DIRECT_BYTES), 0);
        assert_eq!(write(0, BLOCK_BYTES), 0);
        let mut found = vec![0; bytes];
        file.read(0, &mut found).unwrap();
        let mut written = vec![0; bytes];
        let range = BLOCK_BYTES..BLOCK_BYTES + whole;
        written[range.clone()].copy_from_slice(&expected[range]);
        assert!(found == written);
        if folder.is_direct {
            let beyond = file.write_memory(&memory.file(), bytes as u64, DIRECT_BYTES as u64);
            assert_eq!(beyond.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        }
    }
}
