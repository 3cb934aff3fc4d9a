//! Addresses of code: of the C library with its loader, and of this library.

use std::{
    ffi::{c_int, c_void},
    ops::Range,
    slice,
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

unsafe extern "C" {
    fn __libc_malloc(bytes: usize) -> *mut c_void;
    /// Function of the loader's.
    fn __tls_get_addr(variable: *const c_void) -> *mut c_void;
}

/// Finds the code. Called by our constructor.
pub(crate) fn begin() {
    // SAFETY: `note` takes what it is given.
    unsafe { libc::dl_iterate_phdr(Some(note), std::ptr::null_mut()) };
}

/// True if `address` lies in code of the C library or its loader.
pub(crate) fn is_c_library(address: usize) -> bool {
    C_LIBRARY.has(address) || LOADER.has(address)
}

/// True if `address` lies in code of this library.
pub(crate) fn is_own(address: usize) -> bool {
    OWN.has(address)
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

/// Notes the code of a library that is looked for.
unsafe extern "C" fn note(info: *mut libc::dl_phdr_info, _: usize, _: *mut c_void) -> c_int {
    // SAFETY: what `dl_iterate_phdr` passes, with the loader's table of headers.
    let (info, headers) = unsafe {
        let info = &*info;
        let count = info.dlpi_phnum.into();
        (info, slice::from_raw_parts(info.dlpi_phdr, count))
    };
    let is_code = |header: &&libc::Elf64_Phdr| {
        header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_X != 0
    };
    for header in headers.iter().filter(is_code) {
        let start = (info.dlpi_addr + header.p_vaddr) as usize;
        let part: Range<usize> = start..start + header.p_memsz as usize;
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
