//! Regions: memory whose pages come and go.

use std::{
    ffi::{c_char, c_int, c_void},
    io,
    num::NonZero,
    ops::Range,
    ptr, slice,
    sync::Arc,
};

use farpage::{Advice, ByteSize, Region, RegionOptions, Reserve, Runtime, Store};
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};

use crate::{
    FARPAGE_SYSTEM,
    error::{Failure, farpage_code, guard},
    file::FdStore,
    handle::Handle,
    options::{self, Growing},
    runtime::farpage_runtime,
    store::{CStore, farpage_store},
};

/// Memory whose pages come and go, from `farpage_region_address` on. A program may unmap parts of
/// it, or map over them: the pages that have addresses there are gone then, and the store keeps
/// what was written back last; but `mremap` leaves zeros for what is not in memory. Its functions
/// may be called from any thread, except that nothing else may be called, and its memory not be
/// touched, during and after `farpage_region_unmap`.
pub struct farpage_region(Box<Handle<Mapped>>);

struct Mapped {
    region: Region,
    read_only: bool,
    at_end: AtEnd,
    kept: Option<Kept>,
}

/// What a region that keeps its pages in a store is mapped from, so that parts of it can be.
#[derive(Clone)]
struct Kept {
    runtime: Runtime,
    options: RegionOptions,
    store: Arc<dyn Store>,
    /// Where the region begins in the store.
    offset: u64,
}

/// What of a store lies behind `offset`.
struct Behind {
    store: Arc<dyn Store>,
    offset: u64,
}

/// What becomes of a region's changes when it is unmapped.
#[derive(Clone, Copy)]
enum AtEnd {
    /// They go with it.
    Drop,
    /// They are written back, no more: as `munmap` does with a file.
    WriteBack,
    /// They are written back and made durable, or published.
    Flush,
}

/// How a region is to be. Set all of it to zero, then `struct_bytes`, then what is to differ: zero
/// and null mean the runtime's choice.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct farpage_region_options {
    /// `sizeof(farpage_region_options)`.
    pub struct_bytes: usize,
    /// Page size: a power of two, 4096 to 2097152.
    pub page_bytes: u64,
    /// Pages that are read ahead of a sequential run at most, or FARPAGE_READ_AHEAD_OFF.
    pub read_ahead: u32,
    /// How pages are encoded on servers: as of the runtime. Not for stores and files.
    pub codec: *const c_char,
    /// 1: take remote memory when pages need it instead of all of it at once (twice the size where
    /// there is a name); then evictions may fail for lack of it. Not for stores and files.
    pub on_demand: u32,
    /// 1: the program may only read: a write to the region's memory raises SIGSEGV. Not for
    /// servers.
    pub read_only: u32,
    /// Publishes the region on its servers under this name at each flush and when it is unmapped:
    /// it outlives the program. Not for stores and files.
    pub name: *const c_char,
    /// Keeps the pages here instead of on the servers. Copied.
    pub store: *const farpage_store,
    /// Maps the region here and nowhere else: a multiple of its page size. What is mapped there is
    /// replaced, all of it up to the end of the region's last page and nothing beside it; but not
    /// another region, that is FARPAGE_INVALID.
    pub address: *mut c_void,
    /// 1: `name` may exist already; what is published under it stays until this region is
    /// published. Otherwise mapping fails with FARPAGE_EXISTS then.
    pub replace: u32,
}

// SAFETY: integers and pointers, beginning with the length.
unsafe impl Growing for farpage_region_options {}

/// Nothing known: sequential runs are found from the faults. Holds for the whole region.
pub const FARPAGE_ADVICE_NORMAL: u32 = 0;
/// In order: reads ahead from the first fault on. Holds for the whole region.
pub const FARPAGE_ADVICE_SEQUENTIAL: u32 = 1;
/// In no order: never reads ahead. Holds for the whole region.
pub const FARPAGE_ADVICE_RANDOM: u32 = 2;
/// The range is needed soon: brought in while there is room. Does not wait.
pub const FARPAGE_ADVICE_WILL_NEED: u32 = 3;
/// The range is not needed soon: written back where it changed, and given up. The data stays.
pub const FARPAGE_ADVICE_DONT_NEED: u32 = 4;

impl Mapped {
    /// Writes back what outlives the region.
    fn keep_changes(&self) -> Result<(), Failure> {
        match self.at_end {
            AtEnd::Drop => {}
            AtEnd::WriteBack => self.region.advise(.., Advice::DontNeed)?,
            AtEnd::Flush => self.region.flush_out()?,
        }
        Ok(())
    }
}

impl farpage_region {
    /// # Safety
    /// `region` is null or came from one of the functions that map, and has not been unmapped.
    unsafe fn get<'a>(region: *const farpage_region) -> Result<&'a Mapped, Failure> {
        // SAFETY: the caller's promise.
        match unsafe { region.as_ref() } {
            Some(region) => region.0.check(),
            None => Err(Failure::invalid("no region: it is null")),
        }
    }

    /// # Safety
    /// As [`get`](Self::get), and nobody else uses it meanwhile.
    unsafe fn get_mut<'a>(region: *mut farpage_region) -> Result<&'a mut Mapped, Failure> {
        // SAFETY: the caller's promise.
        match unsafe { region.as_mut() } {
            Some(region) => region.0.check_mut(),
            None => Err(Failure::invalid("no region: it is null")),
        }
    }
}

/// Maps `bytes` bytes, zeroed or what `options->store` holds, and puts the region into `*region`:
/// the caller's until `farpage_region_unmap`. On failure `*region` is null.
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
/// What lies beyond the end of the file reads as zeros; the file grows only when others than zeros
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

/// Opens the region that was published under `name` and puts it into `*region`. It is this
/// program's alone until it is unmapped.
///
/// # Safety
/// `runtime` as in `farpage_region_map`; `name` is a string that ends with a zero byte; `region`
/// may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_open(
    runtime: *const farpage_runtime,
    name: *const c_char,
    region: *mut *mut farpage_region,
) -> farpage_code {
    // SAFETY: the caller's promise.
    let map = || unsafe {
        let name = options::text(name, "the name")?;
        let name = name.ok_or_else(|| Failure::invalid("no name: it is null"))?;
        Ok(Mapped {
            region: farpage_runtime::get(runtime)?.open_region(name)?,
            read_only: false,
            at_end: AtEnd::Flush,
            kept: None,
        })
    };
    // SAFETY: as above.
    guard(|| unsafe { put(region, map) })
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
    let (runtime, name, codec) = unsafe {
        (
            farpage_runtime::get(runtime)?,
            options::text(given.name, "`name`")?,
            options::codec(given.codec)?,
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
    if given.page_bytes > 0 {
        options = options.page_size(ByteSize(given.page_bytes));
    }
    if let Some(pages) = options::read_ahead(given.read_ahead) {
        options = options.read_ahead(pages);
    }
    if let Some(codec) = codec {
        options = options.codec(codec);
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

impl Store for Behind {
    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.store.read(self.offset + offset, buf)
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.store.write(self.offset + offset, buf)
    }

    fn flush(&self) -> io::Result<()> {
        self.store.flush()
    }

    fn may_block(&self) -> bool {
        self.store.may_block()
    }

    fn name(&self) -> String {
        self.store.name()
    }
}

/// Splits the region in two at `offset`, a multiple of its page size: `*region` ends there, and
/// `*rest` begins there. All bytes keep their addresses, and each part is unmapped for itself. Only
/// a region with a store or a file can be split. Changes are written back first, as
/// `farpage_region_unmap` does. Advice and pins end.
///
/// On failure `*rest` is null. `*region` is as it was if the arguments were wrong or writing back
/// failed. It is null if the parts could not be mapped (no memory, or too many mappings): then the
/// store has all bytes, and touching the addresses raises SIGSEGV.
///
/// # Safety
/// `*region` came from a function that maps, and has not been unmapped; nobody else uses it or
/// touches its memory meanwhile; `rest` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_split(
    region: *mut *mut farpage_region,
    offset: u64,
    rest: *mut *mut farpage_region,
) -> farpage_code {
    guard(|| {
        // SAFETY: the caller's promise.
        let (region, rest) = unsafe { (options::out(region)?, options::out(rest)?) };
        *rest = ptr::null_mut();
        // SAFETY: the caller's promise.
        let whole = unsafe { farpage_region::get(*region) }?;
        let Some(kept) = whole.kept.clone() else {
            return Err(Failure::invalid(
                "a region without a store or a file cannot be split: servers keep it as a whole",
            ));
        };
        let (bytes, page_bytes) = (whole.region.len(), whole.region.page_bytes());
        if offset == 0 || offset >= bytes as u64 || !offset.is_multiple_of(page_bytes as u64) {
            return Err(Failure::invalid(format!(
                "a region of {bytes} bytes cannot be split at {offset}: need a multiple of its page size, {page_bytes}, inside it"
            )));
        }
        let (at, offset) = (whole.region.as_ptr().addr(), offset as usize);
        let (read_only, at_end) = (whole.read_only, whole.at_end);
        whole.keep_changes()?;
        keep_addresses(&whole.region)?;
        // SAFETY: the caller's promise.
        unsafe { give_up(*region) }?;
        *region = ptr::null_mut();
        let map = |part: Range<usize>| {
            let kept = Kept {
                offset: kept.offset + part.start as u64,
                ..kept.clone()
            };
            let store = Behind {
                store: kept.store.clone(),
                offset: kept.offset,
            };
            let options = kept
                .options
                .clone()
                .store(store)
                .page_size(ByteSize(page_bytes as u64));
            // SAFETY: nothing but the pages of no access is there, see `keep_addresses`.
            let options = unsafe { options.address(at + part.start) };
            Ok::<_, Failure>(Mapped {
                region: kept.runtime.region_with(part.len(), options)?,
                read_only,
                at_end,
                kept: Some(kept),
            })
        };
        let (first, second) = (map(0..offset)?, map(offset..bytes)?);
        *region = boxed(first);
        *rest = boxed(second);
        Ok(())
    })
}

/// Takes a region's pages away. Its addresses stay taken, without access: another thread's `mmap`
/// cannot be given them.
fn keep_addresses(region: &Region) -> Result<(), Failure> {
    let bytes = region.len().next_multiple_of(region.page_bytes());
    let (at, bytes) = (
        NonZero::new(region.as_ptr().addr()),
        NonZero::new(bytes).expect("no region is empty"),
    );
    let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE | MapFlags::MAP_FIXED;
    // SAFETY: the region's own addresses, which its holder gives up.
    let mapped = unsafe { mmap_anonymous(at, bytes, ProtFlags::PROT_NONE, flags) };
    match mapped {
        Ok(_) => Ok(()),
        Err(errno) => Err(Failure::new(
            FARPAGE_SYSTEM,
            format!("cannot keep the addresses of a region: {errno}"),
        )),
    }
}

fn boxed(mapped: Mapped) -> *mut farpage_region {
    Box::into_raw(Box::new(farpage_region(Handle::new(mapped))))
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

/// Runs the body of a function of a region.
///
/// # Safety
/// As `farpage_region::get`.
unsafe fn with(
    region: *const farpage_region,
    body: impl FnOnce(&Region) -> Result<(), Failure>,
) -> farpage_code {
    // SAFETY: the caller's promise.
    guard(|| body(&unsafe { farpage_region::get(region) }?.region))
}

/// The first byte of the region, aligned to its page size; null for null.
///
/// # Safety
/// `region` is null or came from a function that maps, and has not been unmapped.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_address(region: *const farpage_region) -> *mut c_void {
    // SAFETY: the caller's promise.
    let region = unsafe { farpage_region::get(region) };
    region.map_or(ptr::null_mut(), |it| it.region.as_ptr().cast_mut().cast())
}

/// The length of the region in bytes, as it was asked for.
///
/// # Safety
/// As `farpage_region_address`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_bytes(region: *const farpage_region) -> u64 {
    // SAFETY: the caller's promise.
    let region = unsafe { farpage_region::get(region) };
    region.map_or(0, |it| it.region.len() as u64)
}

/// The page size of the region in bytes.
///
/// # Safety
/// As `farpage_region_address`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_page_bytes(region: *const farpage_region) -> u64 {
    // SAFETY: the caller's promise.
    let region = unsafe { farpage_region::get(region) };
    region.map_or(0, |it| it.region.page_bytes() as u64)
}

/// How many of its pages are in local memory now.
///
/// # Safety
/// As `farpage_region_address`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_resident_pages(region: *const farpage_region) -> u64 {
    // SAFETY: the caller's promise.
    let region = unsafe { farpage_region::get(region) };
    region.map_or(0, |it| it.region.resident_pages() as u64)
}

/// Writes all changes back and keeps the pages; a store's `flush`, `fdatasync`, or the publication
/// under its name follows.
///
/// # Safety
/// As `farpage_region_address`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_flush(region: *const farpage_region) -> farpage_code {
    // SAFETY: the caller's promise.
    unsafe { with(region, |it| Ok(it.flush()?)) }
}

/// Copies `bytes` bytes from `data` to `offset`, and so brings pages back whose newest bytes were
/// lost (the store failed, and the kernel refused the page) and that they cover wholly. Until then
/// touching such a page raises SIGBUS, and functions that flush the region fail. FARPAGE_PAGES if
/// such a page is covered in part only: nothing was copied.
///
/// # Safety
/// As `farpage_region_address`; `data` points to `bytes` readable bytes outside the region; nobody
/// else uses the region's bytes meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_overwrite(
    region: *mut farpage_region,
    offset: u64,
    bytes: u64,
    data: *const c_void,
) -> farpage_code {
    guard(|| {
        // SAFETY: the caller's promise.
        let it = unsafe { farpage_region::get_mut(region) }?;
        let range = range(&it.region, offset, bytes)?;
        if range.is_empty() {
            return Ok(());
        }
        if it.read_only {
            return Err(Failure::invalid("a read-only region cannot be overwritten"));
        }
        if data.is_null() {
            return Err(Failure::invalid("no data: it is null"));
        }
        // SAFETY: the caller's promise.
        let data = unsafe { slice::from_raw_parts(data.cast::<u8>(), range.len()) };
        Ok(it.region.overwrite(range.start, data)?)
    })
}

/// Tells how `bytes` bytes at `offset` will be used: one of the FARPAGE_ADVICE_ constants.
/// FARPAGE_ADVICE_DONT_NEED waits until what had changed is written back, and fails if that fails.
///
/// # Safety
/// As `farpage_region_address`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_advise(
    region: *const farpage_region,
    offset: u64,
    bytes: u64,
    advice: u32,
) -> farpage_code {
    let advise = |it: &Region| {
        let advice = match advice {
            FARPAGE_ADVICE_NORMAL => Advice::Normal,
            FARPAGE_ADVICE_SEQUENTIAL => Advice::Sequential,
            FARPAGE_ADVICE_RANDOM => Advice::Random,
            FARPAGE_ADVICE_WILL_NEED => Advice::WillNeed,
            FARPAGE_ADVICE_DONT_NEED => Advice::DontNeed,
            _ => {
                return Err(Failure::invalid(format!(
                    "an advice of {advice}: need one of the FARPAGE_ADVICE_ constants"
                )));
            }
        };
        Ok(it.advise(range(it, offset, bytes)?, advice)?)
    };
    // SAFETY: the caller's promise.
    unsafe { with(region, advise) }
}

/// Brings `bytes` bytes at `offset` in and waits for them; pages that were lost are tried again. So
/// a program learns of a dead server by a code instead of SIGBUS.
///
/// # Safety
/// As `farpage_region_address`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_prefetch(
    region: *const farpage_region,
    offset: u64,
    bytes: u64,
) -> farpage_code {
    // SAFETY: the caller's promise.
    unsafe { with(region, |it| Ok(it.prefetch_now(range(it, offset, bytes)?)?)) }
}

/// Brings `bytes` bytes at `offset` in and keeps them in memory until `farpage_region_unpin`, or
/// until the region is unmapped. All pages that the range touches are pinned; pins are counted, up
/// to 255 per page. FARPAGE_NO_MEMORY if too little of the budget were left for all others. On
/// failure nothing more is pinned than before.
///
/// # Safety
/// As `farpage_region_address`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_pin(
    region: *const farpage_region,
    offset: u64,
    bytes: u64,
) -> farpage_code {
    // SAFETY: the caller's promise.
    unsafe { with(region, |it| Ok(it.pin(range(it, offset, bytes)?)?)) }
}

/// Takes one pin of each page back that the range touches; a page without one is left alone.
///
/// # Safety
/// As `farpage_region_address`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_unpin(
    region: *const farpage_region,
    offset: u64,
    bytes: u64,
) -> farpage_code {
    // SAFETY: the caller's promise.
    unsafe {
        with(region, |it| {
            it.unpin(range(it, offset, bytes)?);
            Ok(())
        })
    }
}

fn range(region: &Region, offset: u64, bytes: u64) -> Result<Range<usize>, Failure> {
    let end = offset.checked_add(bytes);
    match end.filter(|&end| end <= region.len() as u64) {
        Some(end) => Ok(offset as usize..end as usize),
        None => Err(Failure::invalid(format!(
            "{bytes} bytes at offset {offset} of a region of {}",
            region.len()
        ))),
    }
}

/// The first error of work in the background since this was last called, an eviction or a fill that
/// failed, as this function's own. FARPAGE_OK if there was none.
///
/// # Safety
/// As `farpage_region_address`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_error(region: *const farpage_region) -> farpage_code {
    let take = |it: &Region| it.take_error().map_or(Ok(()), |error| Err(error.into()));
    // SAFETY: the caller's promise.
    unsafe { with(region, take) }
}

/// Writes back what outlives the region (what a store, a file or a name keeps), gives its addresses
/// up and frees it. A store is flushed; a file is not, so call `farpage_region_flush` before if its
/// changes must survive a power failure. If writing back fails, the region stays as it was, so that
/// this can be called again or the changes be given up by `farpage_region_discard`. Null is
/// allowed.
///
/// # Safety
/// `region` is null or came from a function that maps; if this succeeds, neither it nor its memory
/// may be used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_unmap(region: *mut farpage_region) -> farpage_code {
    guard(|| {
        if region.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        let mapped = unsafe { farpage_region::get(region) }?;
        mapped.keep_changes()?;
        // SAFETY: as above, and nobody uses it any more.
        unsafe { give_up(region) }
    })
}

/// Gives the region up as `farpage_region_unmap` does, but writes nothing back: what changed since
/// the last flush is lost. Null is allowed.
///
/// # Safety
/// As `farpage_region_unmap`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_discard(region: *mut farpage_region) -> farpage_code {
    guard(|| {
        if region.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { give_up(region) }
    })
}

/// Unmaps the region as `farpage_region_unmap` does, but keeps its addresses: touching them raises
/// SIGSEGV until the program maps something over them, for example another region, or unmaps them.
/// So no other thread's memory can come there in between.
///
/// # Safety
/// As `farpage_region_unmap`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_vacate(region: *mut farpage_region) -> farpage_code {
    guard(|| {
        // SAFETY: the caller's promise.
        let mapped = unsafe { farpage_region::get(region) }?;
        mapped.keep_changes()?;
        keep_addresses(&mapped.region)?;
        // SAFETY: as above, and nobody uses it any more.
        unsafe { give_up(region) }
    })
}

/// # Safety
/// `region` came from a function that maps and is not used again, unless this fails.
unsafe fn give_up(region: *mut farpage_region) -> Result<(), Failure> {
    // SAFETY: the caller's promise; a child of `fork` gets its failure here and frees nothing.
    unsafe { farpage_region::get(region) }?;
    // SAFETY: the caller's promise.
    let region = unsafe { Box::from_raw(region) };
    region.0.into_value()?.region.discard();
    Ok(())
}
