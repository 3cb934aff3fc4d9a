//! Addresses of code: of the C library with its loader, and of this library.

use std::{
    ffi::{c_int, c_void},
    mem::MaybeUninit,
    ops::Range,
    ptr, slice,
    sync::atomic::{AtomicUsize, Ordering},
};

/// Addresses of a library's code: none before [`begin`]. Relaxed: stored before the program's
/// threads start.
struct Code {
    start: AtomicUsize,
    bytes: AtomicUsize,
}

static C_LIBRARY: Code = Code::new();
static LOADER: Code = Code::new();
static OWN: Code = Code::new();

/// Request to `dladdr1` for the entry of a table of symbols, in which the section [`SHN_UNDEF`] is
/// that of symbols of other files.
const RTLD_DL_SYMENT: c_int = 1;
const SHN_UNDEF: u16 = 0;

unsafe extern "C" {
    fn __libc_malloc(bytes: usize) -> *mut c_void;
    /// Function of the loader's.
    fn __tls_get_addr(variable: *const c_void) -> *mut c_void;
}

/// Finds the code, unless it is found. Called by our constructor, and by earlier look-ups of names.
pub(crate) fn begin() {
    if OWN.bytes.load(Ordering::Relaxed) == 0 {
        // SAFETY: `note` takes what it is given.
        unsafe { libc::dl_iterate_phdr(Some(note), ptr::null_mut()) };
    }
}

/// True if the library with code at `address` is searched for names after this library.
pub(crate) fn is_behind(address: usize) -> bool {
    let mut search = Search {
        address,
        has_passed_own: false,
        is_behind: false,
    };
    // SAFETY: `find` takes a `Search`.
    unsafe { libc::dl_iterate_phdr(Some(find), (&raw mut search).cast()) };
    search.is_behind
}

/// Search of [`is_behind`] through the libraries in their order.
struct Search {
    address: usize,
    has_passed_own: bool,
    is_behind: bool,
}

/// Continues a [`Search`] in the next library. Returns 1 in the library that has the address.
unsafe extern "C" fn find(info: *mut libc::dl_phdr_info, _: usize, search: *mut c_void) -> c_int {
    // SAFETY: what `is_behind` passes.
    let search = unsafe { &mut *search.cast::<Search>() };
    // SAFETY: what `dl_iterate_phdr` passes.
    for part in unsafe { parts(info) } {
        search.has_passed_own |= part.contains(&(begin as *const () as usize));
        if part.contains(&search.address) {
            search.is_behind = search.has_passed_own;
            return 1;
        }
    }
    0
}

/// True if `address` lies in code of the C library or its loader.
pub(crate) fn is_c_library(address: usize) -> bool {
    C_LIBRARY.has(address) || LOADER.has(address)
}

/// True if `address` lies in code of this library.
pub(crate) fn is_own(address: usize) -> bool {
    OWN.has(address)
}

/// True if `function` is the entry by which a program at a fixed address calls one of a library.
pub(crate) fn is_entry(function: *const c_void) -> bool {
    let mut info = MaybeUninit::<libc::Dl_info>::uninit();
    let mut symbol = ptr::null_mut::<c_void>();
    // SAFETY: there is room for the answers. A symbol is there as long as its file, the program's.
    unsafe {
        let found = libc::dladdr1(function, info.as_mut_ptr(), &raw mut symbol, RTLD_DL_SYMENT);
        let symbol = symbol.cast::<libc::Elf64_Sym>();
        found != 0 && !symbol.is_null() && (*symbol).st_shndx == SHN_UNDEF
    }
}

impl Code {
    const fn new() -> Code {
        Code {
            start: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
        }
    }

    fn has(&self, address: usize) -> bool {
        let offset = address.wrapping_sub(self.start.load(Ordering::Relaxed));
        offset < self.bytes.load(Ordering::Relaxed)
    }
}

/// Returns the addresses of a library's code.
///
/// # Safety
/// `info` is what `dl_iterate_phdr` passes.
unsafe fn parts<'a>(info: *const libc::dl_phdr_info) -> impl Iterator<Item = Range<usize>> + 'a {
    // SAFETY: the caller's promise, with the loader's table of headers.
    let (base, headers) = unsafe {
        let count = (*info).dlpi_phnum.into();
        (
            (*info).dlpi_addr,
            slice::from_raw_parts((*info).dlpi_phdr, count),
        )
    };
    let is_code = |header: &&libc::Elf64_Phdr| {
        header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_X != 0
    };
    headers.iter().filter(is_code).map(move |header| {
        let start = (base + header.p_vaddr) as usize;
        start..start + header.p_memsz as usize
    })
}

/// True if a library has the code at `address`.
///
/// # Safety
/// `info` is what `dl_iterate_phdr` passes.
pub(crate) unsafe fn holds(info: *const libc::dl_phdr_info, address: usize) -> bool {
    // SAFETY: the caller's promise.
    unsafe { parts(info) }.any(|part| part.contains(&address))
}

/// Notes the code of a library that is looked for.
unsafe extern "C" fn note(info: *mut libc::dl_phdr_info, _: usize, _: *mut c_void) -> c_int {
    // SAFETY: what `dl_iterate_phdr` passes.
    for part in unsafe { parts(info) } {
        let looked_for = [
            (&C_LIBRARY, __libc_malloc as *const () as usize),
            (&LOADER, __tls_get_addr as *const () as usize),
            (&OWN, begin as *const () as usize),
        ];
        for (code, address) in looked_for {
            if part.contains(&address) {
                code.start.store(part.start, Ordering::Relaxed);
                code.bytes.store(part.len(), Ordering::Relaxed);
            }
        }
    }
    0
}
