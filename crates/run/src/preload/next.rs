//! The functions of the next library in line, which the program would have called without us.
//!
//! The rule it keeps: looking a function up may itself need memory. That memory comes from a few
//! pages of our own and is never freed.

use std::{
    cell::Cell,
    ffi::{CStr, c_char, c_int, c_void},
    mem, ptr, slice,
    sync::atomic::{AtomicPtr, AtomicUsize, Ordering},
};

use crate::{give_up, symbols};

thread_local! {
    static LOOKING_UP: Cell<bool> = const { Cell::new(false) };
}

/// A function's name and its address, looked up once.
pub(crate) struct Next {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Next {
    pub(crate) const fn new(name: &'static CStr) -> Next {
        Next {
            name,
            found: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Returns the function. `None` while this very thread looks one up.
    pub(crate) fn get(&self) -> Option<*mut c_void> {
        // Found first, since its own look-up counts as one, too.
        next_dlsym()?;
        found_or(&self.found, self.name, || {
            look_up(libc::RTLD_NEXT, self.name)
        })
    }
}

unsafe extern "C" {
    /// Beginning of the section that holds a reference to each function of `next!`.
    #[link_name = "__start_farpage_next"]
    static FIRST: u8;
    /// End of that section.
    #[link_name = "__stop_farpage_next"]
    static END: u8;
}

/// Looks up all functions of `next!` that there are. Afterwards threads of the runtime do not wait
/// for the loader's lock, which the program holds while it loads a library.
pub(crate) fn look_up_all() {
    if next_dlsym().is_none() {
        return;
    }
    let (first, end) = (
        (&raw const FIRST).cast::<&Next>(),
        (&raw const END).cast::<&Next>(),
    );
    // SAFETY: the linker puts both around the entries of the section.
    let entries = unsafe { slice::from_raw_parts(first, end.offset_from_unsigned(first)) };
    for next in entries {
        if next.found.load(Ordering::Relaxed).is_null() {
            let found = look_up(libc::RTLD_NEXT, next.name);
            next.found.store(found, Ordering::Relaxed);
        }
    }
    // The program does not find the error of a function that its C library lacks.
    // SAFETY: the text is not used.
    unsafe { libc::dlerror() };
}

/// Looks a name up, as the next library's `dlsym` does for this library. Null: it is not there, or
/// this very thread looks `dlsym` up.
pub(crate) fn look_up(handle: *mut c_void, name: &CStr) -> *mut c_void {
    let Some(dlsym) = next_dlsym() else {
        return ptr::null_mut();
    };
    // SAFETY: `dlsym` has this type.
    let dlsym: unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void =
        unsafe { mem::transmute(dlsym) };
    // SAFETY: the name is a string of C's.
    unsafe { dlsym(handle, name.as_ptr()) }
}

/// Returns the next library's `dlsym`, which our own stands before. `None` while this very thread
/// looks it up.
pub(crate) fn next_dlsym() -> Option<*mut c_void> {
    static DLSYM: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    found_or(&DLSYM, c"dlsym", || symbols::find(c"dlsym"))
}

/// Returns what `found` holds, or else what `find` returns, for good. `None` while this very thread
/// looks up.
fn found_or(
    found: &AtomicPtr<c_void>,
    name: &CStr,
    find: impl FnOnce() -> *mut c_void,
) -> Option<*mut c_void> {
    let before = found.load(Ordering::Relaxed);
    if !before.is_null() {
        return Some(before);
    }
    if LOOKING_UP.replace(true) {
        return None;
    }
    let now = find();
    LOOKING_UP.set(false);
    if now.is_null() {
        give_up(&format!("no library has {name:?}"));
    }
    found.store(now, Ordering::Relaxed);
    Some(now)
}

/// Returns the name of a function, which ends with a zero byte.
pub(crate) const fn name(name: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("a name has one end"),
    }
}

/// Function that a thread is started with.
pub(crate) type Start = extern "C" fn(*mut c_void) -> *mut c_void;

macro_rules! next {
    ($($(#[$doc:meta])* $name:ident = $of:tt($($arg:ident: $type:ty),*) -> $result:ty, else $otherwise:expr;)+) => {
        $($(#[$doc])*
        ///
        /// # Safety
        /// As the function of this name.
        pub(crate) unsafe fn $name($($arg: $type),*) -> $result {
            static NEXT: $crate::next::Next = $crate::next::Next::new($of);
            #[used]
            #[unsafe(link_section = "farpage_next")]
            static LISTED: &$crate::next::Next = &NEXT;
            let Some(found) = NEXT.get() else { return $otherwise };
            // SAFETY: the function of this name has this type.
            let function: unsafe extern "C" fn($($type),*) -> $result = unsafe { ::std::mem::transmute(found) };
            // SAFETY: the caller's promise.
            unsafe { function($($arg),*) }
        })+
    };
}

pub(crate) use next;

next! {
    /// `malloc`.
    malloc = c"malloc"(bytes: usize) -> *mut c_void, else early(bytes, 16);
    /// `calloc`.
    calloc = c"calloc"(count: usize, bytes: usize) -> *mut c_void, else early(count * bytes, 16);
    /// `realloc` of memory that is not early.
    later_realloc = c"realloc"(old: *mut c_void, bytes: usize) -> *mut c_void, else early(bytes, 16);
    /// `free` of memory that is not early.
    later_free = c"free"(old: *mut c_void) -> (), else debug_assert!(!old.is_null());
    /// `memalign`.
    memalign = c"memalign"(align: usize, bytes: usize) -> *mut c_void, else early(bytes, align);
    /// `malloc_usable_size` of memory that is not early.
    later_usable = c"malloc_usable_size"(of: *mut c_void) -> usize, else 0;
    /// `pthread_create`.
    pthread_create = c"pthread_create"(thread: *mut libc::pthread_t, attributes: *const libc::pthread_attr_t, start: Start, argument: *mut c_void) -> c_int, else libc::EAGAIN;
}

/// `realloc`.
///
/// # Safety
/// As `realloc`.
pub(crate) unsafe fn realloc(old: *mut c_void, bytes: usize) -> *mut c_void {
    if !is_early(old) {
        // SAFETY: the caller's promise.
        return unsafe { later_realloc(old, bytes) };
    }
    // SAFETY: as much is copied as lies in both; what lies behind `old` is ours as well.
    unsafe {
        let made = malloc(bytes);
        if !made.is_null() {
            let most = EARLY.0.as_ptr() as usize + EARLY_BYTES - old as usize;
            ptr::copy(old.cast::<u8>(), made.cast::<u8>(), bytes.min(most));
        }
        made
    }
}

/// `free`.
///
/// # Safety
/// As `free`.
pub(crate) unsafe fn free(old: *mut c_void) {
    if !is_early(old) {
        // SAFETY: the caller's promise.
        unsafe { later_free(old) }
    }
}

/// `malloc_usable_size`.
///
/// # Safety
/// As `malloc_usable_size`.
pub(crate) unsafe fn usable(of: *mut c_void) -> usize {
    if is_early(of) {
        // More than the block has, but all of it can be read.
        return EARLY.0.as_ptr() as usize + EARLY_BYTES - of as usize;
    }
    // SAFETY: the caller's promise.
    unsafe { later_usable(of) }
}

/// Size of early memory: enough for all requests of `dlsym` seen so far.
const EARLY_BYTES: usize = 64 << 10;

#[repr(align(4096))]
struct Early([Cell<u8>; EARLY_BYTES]);

// SAFETY: handed out in parts, each to one caller.
unsafe impl Sync for Early {}

static EARLY: Early = Early([const { Cell::new(0) }; EARLY_BYTES]);
static EARLY_USED: AtomicUsize = AtomicUsize::new(0);

/// Returns zeroed memory from our own pages.
fn early(bytes: usize, align: usize) -> *mut c_void {
    let whole = bytes.saturating_add(align.max(16));
    let at = EARLY_USED.fetch_add(whole.min(EARLY_BYTES), Ordering::Relaxed);
    if at.saturating_add(whole) > EARLY_BYTES {
        return ptr::null_mut();
    }
    let start = EARLY.0.as_ptr() as usize;
    (start + at).next_multiple_of(align.max(16)) as *mut c_void
}

/// True if `at` is early memory.
pub(crate) fn is_early(at: *mut c_void) -> bool {
    (at as usize).wrapping_sub(EARLY.0.as_ptr() as usize) < EARLY_BYTES
}
