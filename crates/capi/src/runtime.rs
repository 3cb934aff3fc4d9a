//! Runtimes: memory servers, a budget, and the threads that move pages.

use std::{ffi::c_char, ptr, time::Duration};

use farpage::{Allowance, ByteSize, FaultMode, Runtime};

use crate::{
    error::{Failure, farpage_code, guard},
    handle::Handle,
    options::{self, Growing},
};

/// Connections to memory servers, a budget, and the threads that move pages. All functions of a
/// runtime may be called from any thread.
pub struct farpage_runtime(Box<Handle<Runtime>>);

/// Options of a runtime. Set the whole struct to zero, then `struct_bytes`, then other fields: zero
/// and null mean the environment variable named, else the default.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct farpage_runtime_options {
    /// `sizeof(farpage_runtime_options)`.
    pub struct_bytes: usize,
    /// Memory servers, separated by commas: `shm:///run/farpage.sock` or `tcp://host:7400`.
    /// FARPAGE_SERVER. Default: none, so that only regions with a store or a file work.
    pub servers: *const c_char,
    /// Bytes of pages that may be in local memory at once, over all regions; never exceeded, at
    /// most the limit of `farpage_memory`. FARPAGE_BUDGET. Default: a quarter of the available
    /// memory.
    pub budget_bytes: u64,
    /// Page size of regions that do not set their own: a power of two, 4096 to 2097152.
    /// FARPAGE_PAGE_SIZE. Default: 65536, less for regions below 1 MiB.
    pub page_bytes: u64,
    /// Number of shards into which addresses are divided for fills. FARPAGE_FILLERS. Default: one
    /// per CPU, 4 at most.
    pub fillers: u32,
    /// Threads that take pages out. FARPAGE_EVICTORS. Default: as many as keep up, 4 at most.
    pub evictors: u32,
    /// Fraction of the budget above which evictors start. FARPAGE_HIGH_WATER. Default: 0.95.
    pub high_water: f64,
    /// Fraction at which evictors stop; set both or none. FARPAGE_LOW_WATER. Default: 0.90.
    pub low_water: f64,
    /// The most pages that are read ahead of sequential access, or FARPAGE_READ_AHEAD_OFF.
    /// FARPAGE_READ_AHEAD. Default: a megabyte, or more if the link needs it.
    pub read_ahead: u32,
    /// Codec of pages on servers, by name: "raw", "lz4", "shuffle4" (bytes of elements of 2, 4 or 8
    /// bytes are sorted before LZ4), "zfp:accuracy=1e-6,f64" (numbers of f32 or f64, each within
    /// this error or stored without loss), "zfp:precision=20,f32" (bits), "zfp:rate=8,f32" (bits
    /// per value), "zfp:reversible,f32" (nothing is lost; the last three also with i32 and i64),
    /// "adaptive,f32" (the lossless codec that makes the program fastest; without the element, of
    /// raw and LZ4), or "adaptive:accuracy=1e-6,f64" (the same, and ZFP within this error).
    /// FARPAGE_CODEC. Default: "raw".
    pub codec: *const c_char,
    /// Time for which a page operation is tried before it fails. FARPAGE_DEADLINE. Default: 10.
    pub deadline_seconds: f64,
    /// 1: catch only faults of the program's own instructions. Needs no permission, but a system
    /// call that is given absent memory fails with EFAULT. FARPAGE_USER_MODE_ONLY. Default: 0.
    pub user_mode_only: u32,
    /// Threads that serve page faults: one of the FARPAGE_FAULTS_ constants. FARPAGE_FAULT_MODE.
    /// Default: threads of the runtime.
    pub fault_mode: u32,
    /// The user's key file. Named regions belong to its key. Made when a name is first used.
    /// FARPAGE_KEY_FILE. Default: `farpage/key` in `$XDG_CONFIG_HOME` or `~/.config`.
    pub key_file: *const c_char,
    /// Protection of pages of regions without a name: "none", "copies=2" to "copies=4", or
    /// "parity=2+1" to "parity=8+2". With copies, pages are on so many different servers, and
    /// outlive the death of all but one of them. With parity, they are spread over so many servers,
    /// and outlive the death of as many as the number behind the plus. Regions with a name have one
    /// copy.
    /// FARPAGE_REDUNDANCY. Default: "none".
    pub redundancy: *const c_char,
}

/// The environment variable's mode, else threads of the runtime.
pub const FARPAGE_FAULTS_DEFAULT: u32 = 0;
/// Threads of the runtime serve faults.
pub const FARPAGE_FAULTS_FILLER: u32 = 1;
/// The thread that faults serves it, in a handler of SIGBUS: faster on small pages. A system call
/// that is given absent memory fails with EFAULT. A thread that blocks SIGBUS is killed by its
/// first fault. A handler of SIGBUS that the program installs afterwards has to pass on signals
/// that are not its own. Bytes that a device writes into memory that is not pinned may be lost. So
/// may bytes that other threads write to new mappings at addresses that one thread is just
/// unmapping from a region.
pub const FARPAGE_FAULTS_IN_THREAD: u32 = 2;

// SAFETY: integers, floats and pointers, beginning with the length.
unsafe impl Growing for farpage_runtime_options {}

impl farpage_runtime {
    /// # Safety
    /// `runtime` is null or came from `farpage_runtime_new` and has not been freed.
    pub(crate) unsafe fn get<'a>(runtime: *const farpage_runtime) -> Result<&'a Runtime, Failure> {
        // SAFETY: the caller's promise.
        match unsafe { runtime.as_ref() } {
            Some(runtime) => runtime.0.check(),
            None => Err(Failure::invalid("no runtime: it is null")),
        }
    }
}

/// Returns the version of this library, for example "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn farpage_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Tells the memory that this process may have, as the machine and its control groups (v1 or v2)
/// allow: in all, and now without swapping. Either pointer may be null.
///
/// # Safety
/// Each pointer is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_memory(bytes: *mut u64, available_bytes: *mut u64) {
    let allowance = Allowance::of_this_process();
    for (place, value) in [
        (bytes, allowance.bytes),
        (available_bytes, allowance.available_bytes),
    ] {
        // SAFETY: the caller's promise.
        if let Some(place) = unsafe { place.as_mut() } {
            *place = value;
        }
    }
}

/// Connects to the servers, starts the threads and puts the runtime into `*runtime`, which the
/// caller owns until `farpage_runtime_free`. On failure `*runtime` is null.
///
/// # Safety
/// `options` is null (all defaults) or points to as many bytes as it says; `runtime` may be
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_runtime_new(
    options: *const farpage_runtime_options,
    runtime: *mut *mut farpage_runtime,
) -> farpage_code {
    guard(|| {
        // SAFETY: the caller's promise.
        let place = unsafe { options::out(runtime) }?;
        *place = ptr::null_mut();
        // SAFETY: the caller's promise.
        let options = unsafe { options::read(options) }?;
        // SAFETY: the caller's promise.
        let servers = unsafe { options::text(options.servers, "`servers`") }?.unwrap_or_default();

        let mut builder = Runtime::builder();
        let named = servers.split(',').map(str::trim).filter(|s| !s.is_empty());
        for server in named {
            builder = builder.server(server);
        }
        if options.user_mode_only != 0 {
            builder = builder.user_mode_only(true);
        }
        if options.budget_bytes > 0 {
            builder = builder.budget(ByteSize(options.budget_bytes));
        }
        if options.page_bytes > 0 {
            builder = builder.page_size(ByteSize(options.page_bytes));
        }
        if options.fillers > 0 {
            builder = builder.fillers(options.fillers as usize);
        }
        if options.evictors > 0 {
            builder = builder.evictors(options.evictors as usize);
        }
        if options.low_water != 0.0 || options.high_water != 0.0 {
            builder = builder.water_marks(options.low_water, options.high_water);
        }
        if let Some(pages) = options::read_ahead(options.read_ahead) {
            builder = builder.read_ahead(pages);
        }
        // SAFETY: the caller's promise.
        if let Some(codec) = unsafe { options::codec(options.codec) }? {
            builder = builder.codec(codec);
        }
        // SAFETY: the caller's promise.
        if let Some(redundancy) = unsafe { options::redundancy(options.redundancy) }? {
            builder = builder.redundancy(redundancy);
        }
        match options.fault_mode {
            FARPAGE_FAULTS_DEFAULT => {}
            FARPAGE_FAULTS_FILLER => builder = builder.fault_mode(FaultMode::Filler),
            FARPAGE_FAULTS_IN_THREAD => builder = builder.fault_mode(FaultMode::InThread),
            other => {
                return Err(Failure::invalid(format!(
                    "a fault mode of {other}: need one of the FARPAGE_FAULTS_ constants"
                )));
            }
        }
        if options.deadline_seconds != 0.0 {
            let deadline = Duration::try_from_secs_f64(options.deadline_seconds)
                .map_err(|e| Failure::invalid(format!("`deadline_seconds`: {e}")))?;
            builder = builder.deadline(deadline);
        }
        // SAFETY: the caller's promise.
        if let Some(file) = unsafe { options::text(options.key_file, "`key_file`") }? {
            builder = builder.key_file(file);
        }
        let built = farpage_runtime(Handle::new(builder.build()?));
        *place = Box::into_raw(Box::new(built));
        Ok(())
    })
}

/// Gives a runtime back. Regions that are still mapped go on working: the runtime's threads end
/// with the last region. Null is allowed; a child made by `fork` frees nothing.
///
/// # Safety
/// `runtime` is null or came from `farpage_runtime_new`; it must not be used after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_runtime_free(runtime: *mut farpage_runtime) {
    if runtime.is_null() {
        return;
    }
    guard(|| {
        // SAFETY: the caller gives back what `farpage_runtime_new` made.
        let handle = unsafe { Box::from_raw(runtime) };
        handle.0.into_value().map(drop)
    });
}
