//! Creation of regions: their options, and the functions that map.

use std::{
    ffi::{c_char, c_int, c_void},
    ptr,
    sync::Arc,
};

use farpage::{ByteSize, RegionOptions, Reserve, Runtime, Store};

use super::mapped::{AtEnd, Kept, Mapped, boxed, farpage_region};
use crate::{
    error::{Failure, farpage_code, guard},
    file::FdStore,
    options::{self, Growing},
    runtime::farpage_runtime,
    store::{CStore, farpage_store},
};

/// Options of a region. Set the whole struct to zero, then `struct_bytes`, then other fields: zero
/// and null mean the runtime's choice.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct farpage_region_options {
    /// `sizeof(farpage_region_options)`.
    pub struct_bytes: usize,
    /// Page size: a power of two, 4096 to 2097152.
    pub page_bytes: u64,
    /// The most pages that are read ahead of sequential access, or FARPAGE_READ_AHEAD_OFF.
    pub read_ahead: u32,
    /// Codec of pages on servers, as in the runtime's options. Not for stores and files.
    pub codec: *const c_char,
    /// 1: take remote memory when pages need it instead of all of it at once (twice the size for a
    /// region with a name); then evictions may fail for lack of it. Not for stores and files.
    pub on_demand: u32,
    /// 1: the program may only read: a write to the region's memory raises SIGSEGV. Not for
    /// servers.
    pub read_only: u32,
    /// Name under which the region is published on its servers at each flush and when it is
    /// unmapped. A published region outlives the program. Not for stores and files.
    pub name: *const c_char,
    /// Store that keeps the pages instead of the servers. Copied.
    pub store: *const farpage_store,
    /// Address at which the region is mapped, a multiple of its page size. Mappings up to the end
    /// of the region's last page are replaced, and nothing beside them. Another region there is not
    /// replaced: FARPAGE_INVALID.
    pub address: *mut c_void,
    /// 1: `name` may exist already; the version published under it stays until this region is
    /// published. 0: mapping fails with FARPAGE_EXISTS if `name` exists.
    pub replace: u32,
    /// 1: the program promises that no device writes into the region's memory (`O_DIRECT` reads,
    /// RDMA, registered buffers of io_uring): pages of 4096 bytes then leave as copies, many at
    /// once. Bytes that a device writes into a page while it leaves are lost. Default: as
    /// FARPAGE_NO_DIRECT_IO says.
    pub no_direct_io: u32,
    /// Protection of pages, as in the runtime's options. Default: those of the runtime for a region
    /// without a name, and "none" for one with a name, which is refused with more. Not for stores
    /// and files.
    pub redundancy: *const c_char,
}

// SAFETY: integers and pointers, beginning with the length.
unsafe impl Growing for farpage_region_options {}

/// Maps `bytes` bytes, zeroed or with the contents of `options->store`, and puts the region into
/// `*region`, which the caller owns until `farpage_region_unmap`. On failure `*region` is null.
///
/// # Safety
/// `runtime` came from `farpage_runtime_new` and has not been freed; `options` is null or points to
/// as many bytes as it says; `region` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_map(
    runtime: *const farpage_runtime,
    bytes: u64,
    options: *const farpage_region_options,
    region: *mut *mut farpage_region,
) -> farpage_code {
    // SAFETY: the caller's promise.
    let map = || unsafe {
        let given = options::read(options)?;
        let read_only = given.read_only != 0;
        if given.store.is_null() {
            if read_only {
                return Err(Failure::invalid("a read-only region needs a store"));
            }
            return create(runtime, bytes, &given, None, AtEnd::Drop);
        }
        let store = CStore::new(given.store, read_only)?;
        create(runtime, bytes, &given, Some(Arc::new(store)), AtEnd::Flush)
    };
    // SAFETY: as above.
    guard(|| unsafe { put(region, map) })
}

/// Maps the `bytes` bytes at `offset` of the file, or block device, behind the descriptor `fd`,
/// which the caller may close afterwards, and puts the region into `*region`.
///
/// Bytes beyond the end of the file read as zeros; the file grows only when other bytes than zeros
/// are stored there. `fd` must be open for reading and writing; reading is enough with
/// `options->read_only`.
///
/// # Safety
/// As `farpage_region_map`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_map_fd(
    runtime: *const farpage_runtime,
    fd: c_int,
    offset: u64,
    bytes: u64,
    options: *const farpage_region_options,
    region: *mut *mut farpage_region,
) -> farpage_code {
    // SAFETY: the caller's promise.
    let map = || unsafe {
        let given = options::read(options)?;
        if !given.store.is_null() {
            return Err(Failure::invalid(
                "a store and a descriptor: need one of them",
            ));
        }
        let store = FdStore::new(fd, offset, bytes, given.read_only != 0)?;
        let store: Arc<dyn Store> = Arc::new(store);
        create(runtime, bytes, &given, Some(store), AtEnd::WriteBack)
    };
    // SAFETY: as above.
    guard(|| unsafe { put(region, map) })
}

/// Opens the region that was published under `name` and puts it into `*region`. Until it is
/// unmapped, other programs can only open the published version to read it.
///
/// # Safety
/// `runtime` came from `farpage_runtime_new` and has not been freed; `name` is a string that ends
/// with a zero byte; `region` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_open(
    runtime: *const farpage_runtime,
    name: *const c_char,
    region: *mut *mut farpage_region,
) -> farpage_code {
    // SAFETY: the caller's promise.
    let map = || unsafe {
        let (runtime, name) = named(runtime, name)?;
        Ok(Mapped {
            region: runtime.open_region(name)?,
            read_only: false,
            at_end: AtEnd::Flush,
            kept: None,
        })
    };
    // SAFETY: as above.
    guard(|| unsafe { put(region, map) })
}

/// Opens the version that is published under `name` now, to read it, and puts it into `*region`.
/// Any number of programs can at a time, also while one has the region open for writing. The region
/// does not change until it is unmapped, whatever is published meanwhile. A write to its memory
/// raises SIGSEGV.
///
/// # Safety
/// As `farpage_region_open`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_open_to_read(
    runtime: *const farpage_runtime,
    name: *const c_char,
    region: *mut *mut farpage_region,
) -> farpage_code {
    // SAFETY: the caller's promise.
    let map = || unsafe {
        let (runtime, name) = named(runtime, name)?;
        Ok(Mapped {
            region: runtime.open_region_to_read(name)?,
            read_only: true,
            at_end: AtEnd::Drop,
            kept: None,
        })
    };
    // SAFETY: as above.
    guard(|| unsafe { put(region, map) })
}

/// # Safety
/// As `farpage_region_open`.
unsafe fn named<'a>(
    runtime: *const farpage_runtime,
    name: *const c_char,
) -> Result<(&'a Runtime, &'a str), Failure> {
    // SAFETY: the caller's promise.
    let (runtime, name) = unsafe {
        (
            farpage_runtime::get(runtime)?,
            options::text(name, "the name")?,
        )
    };
    let name = name.ok_or_else(|| Failure::invalid("no name: it is null"))?;
    Ok((runtime, name))
}

/// # Safety
/// `runtime` as in `farpage_region_map`, and `given` was read from its options.
unsafe fn create(
    runtime: *const farpage_runtime,
    bytes: u64,
    given: &farpage_region_options,
    store: Option<Arc<dyn Store>>,
    at_end: AtEnd,
) -> Result<Mapped, Failure> {
    // SAFETY: the caller's promise.
    let (runtime, name, codec, redundancy) = unsafe {
        (
            farpage_runtime::get(runtime)?,
            options::text(given.name, "`name`")?,
            options::codec(given.codec)?,
            options::redundancy(given.redundancy)?,
        )
    };
    let bytes = bytes as usize;
    let read_only = given.read_only != 0;
    let mut options = RegionOptions::new();
    if let Some(store) = &store {
        options = options.store(store.clone());
    }
    if read_only {
        options = options.read_only();
    }
    if given.no_direct_io != 0 {
        options = options.no_direct_io(true);
    }
    if given.page_bytes > 0 {
        options = options.page_size(ByteSize(given.page_bytes));
    }
    if let Some(pages) = options::read_ahead(given.read_ahead) {
        options = options.read_ahead(pages);
    }
    if let Some(codec) = codec {
        options = options.codec(codec);
    }
    if let Some(redundancy) = redundancy {
        options = options.redundancy(redundancy);
    }
    if given.on_demand != 0 {
        options = options.reserve(Reserve::OnDemand);
    }
    if !given.address.is_null() {
        // SAFETY: the caller knows what is mapped there.
        options = unsafe { options.address(given.address.addr()) };
    }
    if let Some(name) = name {
        if store.is_some() {
            return Err(Failure::invalid(
                "a name, and a store or descriptor: only what servers keep has a name",
            ));
        }
        options = options.name(name).replace(given.replace != 0);
    }
    let at_end = match name {
        Some(_) => AtEnd::Flush,
        None if read_only => AtEnd::Drop,
        None => at_end,
    };
    let kept = store.map(|store| Kept {
        runtime: runtime.clone(),
        options: options.clone(),
        store,
        offset: 0,
    });
    Ok(Mapped {
        region: runtime.region_with(bytes, options)?,
        read_only,
        at_end,
        kept,
    })
}

/// # Safety
/// `region` is null or may be written.
unsafe fn put(
    region: *mut *mut farpage_region,
    map: impl FnOnce() -> Result<Mapped, Failure>,
) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    let place = unsafe { options::out(region) }?;
    *place = ptr::null_mut();
    *place = boxed(map()?);
    Ok(())
}
