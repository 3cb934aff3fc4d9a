//! [`FileStore`]: a range of an ordinary file as the store of a region.
//!
//! The rule it keeps: the file never changes its length. Reads beyond the range are zeros, writes
//! beyond it are not made.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};

use crate::Store;

farpage_wire::debug_as_display!(FileStoreError);

/// A range of an ordinary file. `flush` is `fdatasync`. Files on tmpfs are read and written by the
/// workers themselves.
#[derive(Debug)]
pub struct FileStore {
    file: File,
    path: PathBuf,
    offset: u64,
    bytes: u64,
    in_memory: bool,
}

/// Reason why a file cannot be a store.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum FileStoreError {
    /// The system refused an operation.
    #[error("cannot {attempt} {}: {source}", path.display())]
    Io {
        /// The refused operation.
        attempt: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        r#source: io::Error,
    },
    /// The file does not have the bytes asked for.
    #[error("{} has {file_bytes} bytes, but {bytes} at offset {offset} were asked for: ask for fewer, or create the file", path.display())]
    TooShort {
        /// The file.
        path: PathBuf,
        /// The file's length.
        file_bytes: u64,
        /// Offset of the range in the file.
        offset: u64,
        /// Length of the range.
        bytes: u64,
    },
}

impl FileStore {
    /// Creates a file of `bytes` zeros.
    ///
    /// # Errors
    /// [`FileStoreError::Io`], also when the file exists: opening it is [`open`](Self::open).
    pub fn create(path: impl AsRef<Path>, bytes: u64) -> Result<Self, FileStoreError> {
        let path = path.as_ref();
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)
            .map_err(io_error("create", path))?;
        file.set_len(bytes)
            .map_err(io_error("set the length of", path))?;
        Ok(Self::over(file, path, 0, bytes))
    }

    /// Opens the `bytes` bytes at `offset` of a file that exists and is long enough.
    ///
    /// # Errors
    /// [`FileStoreError::TooShort`] and [`FileStoreError::Io`].
    pub fn open(path: impl AsRef<Path>, offset: u64, bytes: u64) -> Result<Self, FileStoreError> {
        let path = path.as_ref();
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(io_error("open", path))?;
        let file_bytes = file.metadata().map_err(io_error("look at", path))?.len();
        if offset.checked_add(bytes).is_none_or(|end| end > file_bytes) {
            return Err(FileStoreError::TooShort {
                path: path.to_owned(),
                file_bytes,
                offset,
                bytes,
            });
        }
        Ok(Self::over(file, path, offset, bytes))
    }

    /// Returns the length of the range.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn over(file: File, path: &Path, offset: u64, bytes: u64) -> Self {
        let in_memory = fstatfs(&file).is_ok_and(|fs| fs.filesystem_type() == TMPFS_MAGIC);
        Self {
            file,
            path: path.to_owned(),
            offset,
            bytes,
            in_memory,
        }
    }

    /// Returns how many of `len` bytes at `offset` are in the range.
    fn inside(&self, offset: u64, len: usize) -> usize {
        self.bytes.saturating_sub(offset).min(len as u64) as usize
    }
}

impl Store for FileStore {
    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let (inside, beyond) = buf.split_at_mut(self.inside(offset, buf.len()));
        beyond.fill(0);
        // A file that ends here was cut by another process: an error, never zeros.
        self.file.read_exact_at(inside, self.offset + offset)
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.file
            .write_all_at(&buf[..self.inside(offset, buf.len())], self.offset + offset)
    }

    fn flush(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn may_block(&self) -> bool {
        !self.in_memory
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }
}

fn io_error(attempt: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FileStoreError {
    let path = path.to_owned();
    move |source| FileStoreError::Io {
        attempt,
        path,
        source,
    }
}
