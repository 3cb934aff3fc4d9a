//! Stores that C programs implement, as tables of functions.

use std::{
    ffi::{c_char, c_int, c_void},
    io,
};

use farpage::Store;

use crate::{
    error::Failure,
    options::{self, Growing},
};

/// Store of a region's pages: functions of the program. They are called from several threads at
/// once, but never twice at once for the same page, and must not touch the region that they serve.
/// They must not throw exceptions.
///
/// farpage copies this struct; `context` remains the program's. Set the whole struct to zero, then
/// `struct_bytes`, then other fields.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct farpage_store {
    /// `sizeof(farpage_store)`.
    pub struct_bytes: usize,
    /// Argument of each function.
    pub context: *mut c_void,
    /// Reads exactly `bytes` bytes at `offset`, a multiple of the page size, into `buffer`: one
    /// page or several, of which the region's last may be shorter. Returns 0 or an errno, which
    /// counts for all of these pages. A page that has not been written since must read the same
    /// every time.
    pub read: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            offset: u64,
            buffer: *mut c_void,
            bytes: usize,
        ) -> c_int,
    >,
    /// Writes all of `buffer` at `offset`. Returns 0 or an errno: then the page stays in memory,
    /// and flushing the region fails. May be null if the region is `read_only`.
    pub write: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            offset: u64,
            buffer: *const c_void,
            bytes: usize,
        ) -> c_int,
    >,
    /// Makes all that was written durable. Returns 0 or an errno. May be null.
    pub flush: Option<unsafe extern "C" fn(context: *mut c_void) -> c_int>,
    /// Called once when no other call runs or will come, perhaps a moment after the region was
    /// unmapped, on any thread; also if the region could not be mapped. May be null.
    pub release: Option<unsafe extern "C" fn(context: *mut c_void)>,
    /// Name of the store in errors; copied. May be null.
    pub name: *const c_char,
    /// 1: `read` and `write` never wait, so farpage's own threads may call them.
    pub never_blocks: u32,
}

// SAFETY: pointers, functions that may be null, and an integer, beginning with the length.
unsafe impl Growing for farpage_store {}

/// A store that calls a program's functions.
pub(crate) struct CStore {
    table: farpage_store,
    name: String,
}

// SAFETY: the program promises that its functions may be called from any thread with its context.
unsafe impl Send for CStore {}
// SAFETY: as above, and from several at once.
unsafe impl Sync for CStore {}

impl CStore {
    /// # Safety
    /// `store` points to as many bytes as it says, and its functions keep their documentation.
    pub(crate) unsafe fn new(
        store: *const farpage_store,
        read_only: bool,
    ) -> Result<CStore, Failure> {
        // SAFETY: the caller's promise.
        let table = unsafe { options::read(store) }?;
        // From here on dropping `store` releases the context.
        let mut store = CStore {
            table,
            name: "the program's store".to_owned(),
        };
        // SAFETY: the caller's promise.
        if let Some(name) = unsafe { options::text(table.name, "the store's `name`") }? {
            store.name = name.to_owned();
        }
        if table.read.is_none() || (table.write.is_none() && !read_only) {
            return Err(Failure::invalid(
                "a store without `read`, or without `write` for a region that is not `read_only`",
            ));
        }
        Ok(store)
    }
}

impl Store for CStore {
    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let read = self.table.read.expect("checked when it was made");
        let context = self.table.context;
        // SAFETY: the program's promise; the buffer is ours for the length of the call.
        errno(unsafe { read(context, offset, buf.as_mut_ptr().cast(), buf.len()) })
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        let Some(write) = self.table.write else {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        };
        let context = self.table.context;
        // SAFETY: as above.
        errno(unsafe { write(context, offset, buf.as_ptr().cast(), buf.len()) })
    }

    fn flush(&self) -> io::Result<()> {
        match self.table.flush {
            // SAFETY: as above.
            Some(flush) => errno(unsafe { flush(self.table.context) }),
            None => Ok(()),
        }
    }

    fn may_block(&self) -> bool {
        self.table.never_blocks == 0
    }

    fn name(&self) -> String {
        self.name.clone()
    }
}

impl Drop for CStore {
    fn drop(&mut self) {
        if let Some(release) = self.table.release {
            // SAFETY: as above; nobody else holds the store.
            unsafe { release(self.table.context) };
        }
    }
}

fn errno(code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code.abs())),
    }
}
