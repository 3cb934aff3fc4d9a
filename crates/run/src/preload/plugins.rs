//! Libraries that the program loads, and what it looks up in them: `dlopen`, `dlsym` and
//! `dlvsym`.
//!
//! The rule it keeps: only one allocator is used. With `RTLD_DEEPBIND` a library would find the C
//! library's `free` before ours and give it memory of the arena. The flag is left out, with a line.
//! A look-up that would give the C library's allocator gives ours: by a handle on the C library, or
//! by `RTLD_NEXT` in a library behind ours. It does so only where no library stands between ours
//! and the C library: such a library takes the C library's function to call it, and ours would call
//! the library again.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    mem, ptr,
};

use crate::{
    code, heap,
    next::{self, Next},
    say_once,
};

/// `dlopen`.
///
/// The C library searches by the `RUNPATH` of its caller's file. So its function is jumped to and
/// not called: it sees the program's call.
///
/// # Safety
/// As `dlopen`.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub(crate) unsafe extern "C-unwind" fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void {
    std::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "mov edi, esi",
        "call {next}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "jz 2f",
        "and esi, {kept}",
        "jmp rax",
        "2:",
        "ret",
        next = sym next_dlopen,
        kept = const !libc::RTLD_DEEPBIND,
    )
}

/// Returns the C library's `dlopen`, to be called without `RTLD_DEEPBIND`; null during the look-up.
extern "C" fn next_dlopen(flags: c_int) -> *mut c_void {
    static DLOPEN: Next = Next::new(c"dlopen");
    if flags & libc::RTLD_DEEPBIND != 0 {
        say_once(
            "dlopen: RTLD_DEEPBIND is left out, since the library would free the program's memory with another allocator",
        );
    }
    DLOPEN.get().unwrap_or(ptr::null_mut())
}

/// `dlsym`.
///
/// `RTLD_NEXT` and `RTLD_DEFAULT` are about the caller, so that a function that is jumped to sees
/// the program's call. The address of that call is above two registers that are kept.
///
/// # Safety
/// As `dlsym`.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    std::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "mov rdx, [rsp + 16]",
        "sub rsp, 8",
        "call {by}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "jz 2f",
        "jmp rax",
        "2:",
        "ret",
        by = sym by,
    )
}

/// The C library's `dlvsym`.
static DLVSYM: Next = Next::new(c"dlvsym");

/// `dlvsym`, as [`dlsym`]. Whoever asks for a version of an allocator's function gets ours.
///
/// # Safety
/// As `dlvsym`.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn dlvsym(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
) -> *mut c_void {
    std::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "push rdx",
        "mov rdx, [rsp + 24]",
        "call {by}",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "jz 2f",
        "jmp rax",
        "2:",
        "ret",
        by = sym by_version,
    )
}

/// Returns the function that looks `name` up with a version, as [`by`]. Names of the allocator are
/// looked up from here whoever asks: all that has such a version is the C library.
unsafe extern "C" fn by_version(
    handle: *mut c_void,
    name: *const c_char,
    caller: usize,
) -> *mut c_void {
    // SAFETY: the program's promise.
    let found = unsafe { by(handle, name, caller) };
    // SAFETY: as above.
    let is_ours = || ours(unsafe { CStr::from_ptr(name) }).is_some();
    let next = DLVSYM.get().unwrap_or(ptr::null_mut());
    if found == dlsym_of_ours as *mut c_void || next.is_null() {
        return found;
    }
    match found == dlsym_of_library as *mut c_void || is_ours() {
        true => dlvsym_of_library as *mut c_void,
        false => next,
    }
}

/// `dlvsym` in the library of a handle.
unsafe extern "C" fn dlvsym_of_library(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
) -> *mut c_void {
    type Look = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;
    let Some(next) = DLVSYM.get() else {
        return ptr::null_mut();
    };
    // SAFETY: the function of this name has this type; the program's promise.
    let found = unsafe { mem::transmute::<*mut c_void, Look>(next)(handle, name, version) };
    // SAFETY: the program's promise.
    ours_for(found, unsafe { CStr::from_ptr(name) })
}

/// Returns the function that looks `name` up by `handle` for a caller at an address; null during
/// its own look-up.
unsafe extern "C" fn by(handle: *mut c_void, name: *const c_char, caller: usize) -> *mut c_void {
    // SAFETY: the program's promise.
    let is_ours = || ours(unsafe { CStr::from_ptr(name) }).is_some();
    let is_next = handle == libc::RTLD_NEXT;
    if is_next && is_ours() && code::is_behind(caller) {
        return dlsym_of_ours as *mut c_void;
    }
    match is_next || handle == libc::RTLD_DEFAULT {
        true => next::next_dlsym().unwrap_or(ptr::null_mut()),
        false => dlsym_of_library as *mut c_void,
    }
}

/// `dlsym` of an allocator's name in this library.
unsafe extern "C" fn dlsym_of_ours(_: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: the program's promise.
    ours(unsafe { CStr::from_ptr(name) }).unwrap_or(ptr::null_mut())
}

/// `dlsym` in the library of a handle.
unsafe extern "C" fn dlsym_of_library(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: the program's promise.
    let name = unsafe { CStr::from_ptr(name) };
    ours_for(next::look_up(handle, name), name)
}

/// Returns our function of an allocator's `name` if `found` is the C library's, and else `found`.
fn ours_for(found: *mut c_void, name: &CStr) -> *mut c_void {
    code::begin();
    match code::is_c_library(found as usize) {
        true => ours(name).unwrap_or(found),
        false => found,
    }
}

/// Returns our function of an allocator's `name`, if the next one is the C library's. A handle on
/// this library would be no way to it: `dlopen` would run our constructor, in a constructor of a
/// library behind ours.
fn ours(name: &CStr) -> Option<*mut c_void> {
    let ours = match name.to_bytes() {
        b"malloc" => heap::malloc as *const (),
        b"calloc" => heap::calloc as *const (),
        b"realloc" => heap::realloc as *const (),
        b"free" => heap::free as *const (),
        b"memalign" => heap::memalign as *const (),
        b"aligned_alloc" => heap::aligned_alloc as *const (),
        b"posix_memalign" => heap::posix_memalign as *const (),
        b"malloc_usable_size" => heap::malloc_usable_size as *const (),
        b"strdup" => heap::strdup as *const (),
        b"strndup" => heap::strndup as *const (),
        _ => return None,
    };
    // Constructors of libraries run before ours.
    code::begin();
    let next = next::look_up(libc::RTLD_NEXT, name) as usize;
    // The program's own function of the name is no function of ours.
    let is_ours = code::is_own(ours as usize) || code::is_entry(ours.cast());
    (code::is_c_library(next) && is_ours).then_some(ours.cast_mut().cast())
}
