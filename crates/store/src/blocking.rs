//! SKELETON.
use std::io;

/// What a user plugs in: bytes by offset. Called from several threads at once.
pub trait Store: Send + Sync + 'static {
    /// Reads exactly `buf.len()` bytes at `offset`.
    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;
    /// Writes all of `buf` at `offset`.
    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()>;
    /// Makes everything written so far durable.
    fn flush(&self) -> io::Result<()> { Ok(()) }
    /// False: read and write return without waiting and are called on the worker's own thread.
    fn may_block(&self) -> bool { true }
    /// How errors call this store.
    fn name(&self) -> String { std::any::type_name::<Self>().to_owned() }
}

/// How a user's own store is driven.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BlockingOptions {
    /// At most so many calls at once. Default: 8.
    pub threads: usize,
}
impl Default for BlockingOptions { fn default() -> Self { Self { threads: 8 } } }
