//! Small requests by jemalloc (`--small`), which takes its memory by our `mmap`.
//!
//! Jemalloc is loaded for itself: no name of the program's resolves to one of its functions, so
//! that the C library's allocator and `operator new` stay what they are. Until the program's small
//! objects pass a quarter of the budget, the C library serves small requests.
//!
//! The rule it keeps: a block is jemalloc's exactly if its address lies in the arena, or in the
//! memory that jemalloc has mapped while it was loaded. So calls of jemalloc get no other memory
//! (`mmap` in `maps.rs`, and [`sbrk`]), and nothing else gives out small blocks of the arena:
//! jemalloc is not loaded if another allocator than the C library's is next in line.

use std::{
    cell::Cell,
    ffi::{CStr, CString, c_int, c_void},
    mem,
    ops::Range,
    ptr,
    sync::{
        OnceLock,
        atomic::{AtomicIsize, AtomicPtr, AtomicU8, Ordering},
    },
};

use farpage::Ranges;
use farpage_signals::Mutex;

use crate::{
    Inside, environment::variable, next::next, say, set_errno, state, state::KERNEL_PAGE_BYTES,
};

/// Part of the budget that small objects may take before jemalloc serves them.
const LOCAL_PART: u64 = 4;
/// Bytes that a thread counts on its own.
const COUNTED_ALONE_BYTES: isize = 16 << 10;

/// One block in as many is counted, for all of them: which ones, follows from their addresses.
const SAMPLED: isize = 8;

/// Functions of jemalloc.
pub(crate) struct Jemalloc {
    malloc: unsafe extern "C" fn(usize) -> *mut c_void,
    calloc: unsafe extern "C" fn(usize, usize) -> *mut c_void,
    realloc: unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void,
    memalign: unsafe extern "C" fn(usize, usize) -> *mut c_void,
    free: unsafe extern "C" fn(*mut c_void),
    usable: unsafe extern "C" fn(*mut c_void) -> usize,
    /// Memory that jemalloc has mapped while it was loaded.
    loaded_with: Vec<Range<usize>>,
}

static JEMALLOC: OnceLock<Jemalloc> = OnceLock::new();
/// Reason why jemalloc serves nothing, although it was to.
static WHY_LOCAL: OnceLock<String> = OnceLock::new();

/// Allocator of small requests: [`OWN`], [`COUNTING`] or [`SWITCHED`]. Relaxed: jemalloc is loaded
/// before the program has threads, and either allocator is right at any time.
static MODE: AtomicU8 = AtomicU8::new(OWN);
/// The next allocator, for good.
const OWN: u8 = 0;
/// The next allocator, until enough is counted.
const COUNTING: u8 = 1;
/// Jemalloc.
const SWITCHED: u8 = 2;

/// A page that is zeros in a child made by `fork`, by whatever call, and begins with 1 before.
static ALIVE: AtomicPtr<AtomicU8> = AtomicPtr::new(ptr::null_mut());

/// Bytes of small objects that the C library has made for the program, until the switch.
static LIVE_BYTES: AtomicIsize = AtomicIsize::new(0);
/// Bytes of small objects that cause the switch.
static LIMIT_BYTES: AtomicIsize = AtomicIsize::new(isize::MAX);

/// Mappings of the thread that loads jemalloc.
static LOADED_WITH: Mutex<Ranges<bool>> = Mutex::new(Ranges::new());

thread_local! {
    /// Depth of this thread in functions of jemalloc.
    static CALLS: Cell<u32> = const { Cell::new(0) };
    /// True while this thread loads jemalloc.
    static LOADS: Cell<bool> = const { Cell::new(false) };
    /// Bytes of this thread that [`LIVE_BYTES`] does not have yet.
    static COUNTED: Cell<isize> = const { Cell::new(0) };
}

unsafe extern "C" {
    fn __libc_malloc(bytes: usize) -> *mut c_void;
}

/// Loads jemalloc, if the launcher has found it. Called by our constructor, before requests are
/// served here. This thread must not be inside: our `__register_atfork` would not register the
/// runtime's handlers before jemalloc's.
pub(crate) fn load() {
    let Some(path) = variable("JEMALLOC") else {
        if let Some(why) = variable("SMALL_LOCAL") {
            let _ = WHY_LOCAL.set(why);
        }
        return;
    };
    LOADS.set(true);
    let loaded = Jemalloc::load(&path);
    LOADS.set(false);
    match loaded {
        Ok(jemalloc) => {
            let _ = JEMALLOC.set(jemalloc);
        }
        Err(why) => {
            if variable("SMALL_AT_ONCE").is_some() {
                say(&format!("--small yes: small objects stay local: {why}"));
            }
            let _ = WHY_LOCAL.set(why);
        }
    }
}

/// Begins to count small objects, or, with `--small yes`, to serve them. Called after [`load`].
pub(crate) fn begin() {
    if JEMALLOC.get().is_none() {
        return;
    }
    if let Some(Ok(bytes)) = variable("BUDGET").map(|bytes| bytes.parse()) {
        set_budget(bytes);
    }
    let mode = match variable("SMALL_AT_ONCE") {
        Some(_) => SWITCHED,
        None => COUNTING,
    };
    MODE.store(mode, Ordering::Relaxed);
}

/// Returns the reason why small objects stay local, if they were not to.
pub(crate) fn why_local() -> Option<&'static str> {
    WHY_LOCAL.get().map(String::as_str)
}

/// Returns the bytes of small objects at which jemalloc began to serve them. `None` if it did not,
/// or did from the beginning.
pub(crate) fn switched_at() -> Option<u64> {
    let bytes = LIVE_BYTES.load(Ordering::Relaxed);
    let is_switched = MODE.load(Ordering::Relaxed) == SWITCHED;
    (is_switched && bytes > 0).then_some(bytes as u64)
}

/// Sets the size of small objects that causes the switch, to a part of the process's budget.
pub(crate) fn set_budget(bytes: u64) {
    LIMIT_BYTES.store((bytes / LOCAL_PART) as isize, Ordering::Relaxed);
}

/// True if a block of the C library at `address` is to be counted.
pub(crate) fn counts(address: usize) -> bool {
    // Neighbours of one size have all residues: by Fibonacci hashing.
    let hash = (address as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    MODE.load(Ordering::Relaxed) == COUNTING && hash >> (u64::BITS - SAMPLED.ilog2()) == 0
}

/// Counts a block of the C library that the program gets. Returns true if jemalloc is to serve
/// small requests from now on: the caller makes the arena, and calls [`switch`].
///
/// # Safety
/// `block` is a block of the C library.
pub(crate) unsafe fn add(block: *mut c_void) -> bool {
    // SAFETY: the caller's promise.
    count(SAMPLED * unsafe { bytes_of(block) })
}

/// Counts a block of the C library that the program gives up.
///
/// # Safety
/// As [`add`].
pub(crate) unsafe fn remove(block: *mut c_void) {
    // SAFETY: the caller's promise.
    count(-SAMPLED * unsafe { bytes_of(block) });
}

/// Counts `bytes` more. Returns true if there are enough.
fn count(bytes: isize) -> bool {
    let counted = COUNTED.get() + bytes;
    if counted.abs() < COUNTED_ALONE_BYTES {
        COUNTED.set(counted);
        return false;
    }
    COUNTED.set(0);
    let live = LIVE_BYTES.fetch_add(counted, Ordering::Relaxed) + counted;
    live > LIMIT_BYTES.load(Ordering::Relaxed) && is_alive()
}

/// Returns the bytes that a block of the C library takes, from the word before it. The C library's
/// `malloc_usable_size` also looks behind the block, at memory that nothing else needs.
///
/// # Safety
/// As [`add`].
unsafe fn bytes_of(block: *mut c_void) -> isize {
    // SAFETY: the C library keeps the size there, with flags in three bits.
    (unsafe { *block.cast::<usize>().sub(1) } & !7) as isize
}

/// Serves small requests by jemalloc from now on.
pub(crate) fn switch() {
    MODE.store(SWITCHED, Ordering::Relaxed);
}

/// Returns jemalloc if it serves small requests now. A child made by `fork` allocates locally.
pub(crate) fn serves() -> Option<&'static Jemalloc> {
    match MODE.load(Ordering::Relaxed) == SWITCHED && is_alive() {
        true => JEMALLOC.get(),
        false => None,
    }
}

/// Returns jemalloc if the block at `address`, which is not our own, is a block of jemalloc's.
pub(crate) fn owner(address: usize) -> Option<&'static Jemalloc> {
    if MODE.load(Ordering::Relaxed) != SWITCHED {
        return None;
    }
    let jemalloc = JEMALLOC.get()?;
    let is_loaded_with = || (jemalloc.loaded_with.iter()).any(|part| part.contains(&address));
    (state::owns(address) || is_loaded_with()).then_some(jemalloc)
}

/// True if this thread is in a call of jemalloc's, which gets memory of the arena or none.
pub(crate) fn is_calling() -> bool {
    CALLS.get() > 0
}

/// Notes a mapping that the kernel has made (`is_there`) or taken away, while jemalloc is loaded.
pub(crate) fn note(address: *mut c_void, bytes: usize, is_there: bool) {
    if LOADS.get() {
        let start = address as usize;
        let part = start..start + bytes.next_multiple_of(KERNEL_PAGE_BYTES);
        let _inside = Inside::enter();
        LOADED_WITH.lock().change(&part, |it| *it = is_there);
    }
}

next! {
    /// `sbrk`.
    later_sbrk = c"sbrk"(bytes: isize) -> *mut c_void, else libc::MAP_FAILED;
}

/// `sbrk`, which has no memory for jemalloc: it would be taken for the C library's.
///
/// # Safety
/// As `sbrk`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn sbrk(bytes: isize) -> *mut c_void {
    if LOADS.get() || is_calling() {
        set_errno(libc::ENOMEM);
        return libc::MAP_FAILED;
    }
    // SAFETY: the caller's promise.
    unsafe { later_sbrk(bytes) }
}

/// True if this process is not a child made by `fork`. Costs no system call.
fn is_alive() -> bool {
    let page = ALIVE.load(Ordering::Relaxed);
    // SAFETY: the page is never unmapped.
    !page.is_null() && unsafe { &*page }.load(Ordering::Relaxed) == 1
}

/// Calls a function of jemalloc's.
fn within<T>(call: impl FnOnce() -> T) -> T {
    CALLS.set(CALLS.get() + 1);
    let result = call();
    CALLS.set(CALLS.get() - 1);
    result
}

impl Jemalloc {
    /// Loads jemalloc from the file `path`.
    fn load(path: &str) -> Result<Jemalloc, String> {
        // SAFETY: a string of C's. A program that defines `malloc` itself never calls ours.
        let next = unsafe { libc::dlsym(libc::RTLD_NEXT, c"malloc".as_ptr()) };
        if next != __libc_malloc as *mut c_void {
            return Err("the program has an allocator of its own, which serves them".to_owned());
        }
        make_alive()?;
        let path = CString::new(path).map_err(|error| error.to_string())?;
        // SAFETY: a string of C's. Jemalloc's constructor needs no more than a C library.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
        if library.is_null() {
            // SAFETY: the call above has failed, so there is a string.
            let why = unsafe { CStr::from_ptr(libc::dlerror()) };
            return Err(why.to_string_lossy().into_owned());
        }
        let find = |name: &CStr| {
            // SAFETY: a string of C's.
            let found = unsafe { libc::dlsym(library, name.as_ptr()) };
            match found.is_null() {
                true => Err(format!("{path:?} has no {name:?}")),
                false => Ok(found),
            }
        };
        #[expect(
            clippy::missing_transmute_annotations,
            reason = "the fields have the types"
        )]
        // SAFETY: the functions of these names have these types.
        let jemalloc = unsafe {
            Jemalloc {
                malloc: mem::transmute(find(c"malloc")?),
                calloc: mem::transmute(find(c"calloc")?),
                realloc: mem::transmute(find(c"realloc")?),
                memalign: mem::transmute(find(c"memalign")?),
                free: mem::transmute(find(c"free")?),
                usable: mem::transmute(find(c"malloc_usable_size")?),
                loaded_with: Vec::new(),
            }
        };
        // SAFETY: the function of this name has this type.
        let control: Control = unsafe { mem::transmute(find(c"mallctl")?) };
        let (mut retains, mut bytes) = (false, 1);
        // SAFETY: there is room for the answer.
        let asked = unsafe {
            control(
                c"opt.retain".as_ptr(),
                (&raw mut retains).cast(),
                &raw mut bytes,
                ptr::null_mut(),
                0,
            )
        };
        // Addresses that jemalloc gives up would be others', and taken for its own.
        if asked != 0 || !retains {
            return Err("jemalloc must keep its addresses (retain of MALLOC_CONF)".to_owned());
        }
        Ok(Jemalloc {
            loaded_with: LOADED_WITH.lock().those(&(0..usize::MAX), |it| it),
            ..jemalloc
        })
    }

    /// `malloc`. Null if there is no memory for it in the arena.
    pub(crate) fn malloc(&self, bytes: usize) -> *mut c_void {
        // SAFETY: any size is fine.
        self.make(|| unsafe { (self.malloc)(bytes) })
    }

    /// `calloc`. Null as of [`malloc`](Self::malloc).
    pub(crate) fn calloc(&self, count: usize, bytes: usize) -> *mut c_void {
        // SAFETY: as above.
        self.make(|| unsafe { (self.calloc)(count, bytes) })
    }

    /// `memalign`. Null as of [`malloc`](Self::malloc).
    pub(crate) fn memalign(&self, align: usize, bytes: usize) -> *mut c_void {
        // SAFETY: as above.
        self.make(|| unsafe { (self.memalign)(align, bytes) })
    }

    /// `realloc` of a block of jemalloc's. Null as of [`malloc`](Self::malloc): the block stays.
    ///
    /// # Safety
    /// As `realloc`.
    pub(crate) unsafe fn realloc(&self, old: *mut c_void, bytes: usize) -> *mut c_void {
        // SAFETY: the caller's promise.
        self.make(|| unsafe { (self.realloc)(old, bytes) })
    }

    /// Makes a block. A failure leaves `errno`, since the caller tries the C library.
    fn make(&self, call: impl FnOnce() -> *mut c_void) -> *mut c_void {
        let before = crate::errno();
        let made = within(call);
        set_errno(before);
        made
    }

    /// `free` of a block of jemalloc's. In a child made by `fork` nothing is freed.
    ///
    /// # Safety
    /// As `free`.
    pub(crate) unsafe fn free(&self, old: *mut c_void) {
        if is_alive() {
            // SAFETY: the caller's promise.
            within(|| unsafe { (self.free)(old) });
        }
    }

    /// `malloc_usable_size` of a block of jemalloc's.
    ///
    /// # Safety
    /// As `malloc_usable_size`.
    pub(crate) unsafe fn usable(&self, of: *mut c_void) -> usize {
        // SAFETY: the caller's promise.
        within(|| unsafe { (self.usable)(of) })
    }
}

/// `mallctl`.
type Control =
    unsafe extern "C" fn(*const libc::c_char, *mut c_void, *mut usize, *mut c_void, usize) -> c_int;

/// Makes the page of [`ALIVE`].
fn make_alive() -> Result<(), String> {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: the kernel chooses the place. The call is made by number: our own `mmap` serves the
    // program.
    let page = unsafe {
        libc::syscall(
            libc::SYS_mmap,
            0_usize,
            KERNEL_PAGE_BYTES,
            rights,
            flags,
            -1,
            0_usize,
        )
    };
    if page <= 0 {
        return Err("the kernel has no page".to_owned());
    }
    let page = page as *mut AtomicU8;
    // SAFETY: made above, of this size. By number as above.
    let wiped = unsafe {
        libc::syscall(
            libc::SYS_madvise,
            page,
            KERNEL_PAGE_BYTES,
            libc::MADV_WIPEONFORK,
        )
    };
    if wiped != 0 {
        return Err("the kernel has no MADV_WIPEONFORK".to_owned());
    }
    // SAFETY: made above.
    unsafe { &*page }.store(1, Ordering::Relaxed);
    ALIVE.store(page, Ordering::Relaxed);
    Ok(())
}
