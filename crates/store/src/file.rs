//! SKELETON.
use std::{io, path::Path};
use crate::Store;
/// An ordinary file as a store.
pub struct FileStore { _p: () }
/// Why a file cannot serve as a store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileStoreError { /// I/O
    #[error("{0}")] Io(io::Error) }
impl FileStore {
    /// Creates (or empties) a file of `bytes` bytes.
    pub fn create(path: &Path, bytes: u64) -> Result<Self, FileStoreError> { let _ = (path, bytes); todo!() }
    /// Opens `bytes` bytes at `offset` of a file that must be long enough.
    pub fn open(path: &Path, offset: u64, bytes: u64) -> Result<Self, FileStoreError> { let _ = (path, offset, bytes); todo!() }
}
impl Store for FileStore {
    fn read(&self, _: u64, _: &mut [u8]) -> io::Result<()> { todo!() }
    fn write(&self, _: u64, _: &[u8]) -> io::Result<()> { todo!() }
}
