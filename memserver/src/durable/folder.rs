//! [`Folder`]: the files of one directory on a disk, and [`DiskFolder`], the real one.
//!
//! The rule it keeps: plain steps. Nothing is durable before a `sync`: of the file for its bytes,
//! of the folder for creations, renames and removals. The order of the steps is left to
//! [`DurableNames`](super::DurableNames).

use std::{
    fs::{self, File, OpenOptions},
    io,
    ops::Range,
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    sys::statfs::{TMPFS_MAGIC, statfs},
    unistd::{Whence, lseek},
};
use tracing::warn;

/// File that is locked while a server uses the directory.
const LOCK: &str = "lock";

/// Files of one directory.
pub(crate) trait Folder: Send + Sync {
    /// Lists the files.
    fn list(&self) -> io::Result<Vec<String>>;
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
    /// Makes all writes until now durable, and the file's length.
    fn sync(&self) -> io::Result<()>;
}

/// A directory that one process uses at a time.
pub(crate) struct DiskFolder {
    path: PathBuf,
    handle: File,
    _lock: Flock<File>,
}

impl DiskFolder {
    /// Opens and locks the directory at `path`.
    ///
    /// # Errors
    /// The system's error; `WouldBlock` if another process has the lock.
    pub(crate) fn lock(path: &Path) -> io::Result<Self> {
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
        let lock = own_file().create(true).open(path.join(LOCK))?;
        let lock = Flock::lock(lock, FlockArg::LockExclusiveNonblock);
        let _lock = lock.map_err(|(_, errno)| io::Error::from(errno))?;
        Ok(Self {
            path: path.to_owned(),
            handle,
            _lock,
        })
    }
}

fn own_file() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    options
}

impl Folder for DiskFolder {
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

    fn open(&self, file: &str) -> io::Result<Box<dyn FolderFile>> {
        Ok(Box::new(own_file().open(self.path.join(file))?))
    }

    fn create(&self, file: &str, bytes: u64) -> io::Result<Box<dyn FolderFile>> {
        let mut options = own_file();
        let made = options.create(true).truncate(true);
        let made = made.open(self.path.join(file))?;
        made.set_len(bytes)?;
        Ok(Box::new(made))
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

impl FolderFile for File {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn disk_bytes(&self) -> io::Result<u64> {
        // A block of `stat` has 512 bytes whatever the file system.
        Ok(self.metadata()?.blocks() * 512)
    }

    fn read(&self, at: u64, to: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(to, at)
    }

    fn next_data(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        let start = match lseek(self, from as i64, Whence::SeekData) {
            Ok(start) => start,
            // Only holes follow.
            Err(Errno::ENXIO) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        let end = lseek(self, start, Whence::SeekHole)?;
        Ok(Some(start as u64..end as u64))
    }

    fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        self.write_all_at(from, at)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }
}
