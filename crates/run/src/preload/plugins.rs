//! Libraries that the program loads, and what it looks up in them: `dlopen` and `dlsym`.
//!
//! The rule it keeps: only one allocator is used. With `RTLD_DEEPBIND` a library would find the C
//! library's `free` before ours and give it memory of the arena. The flag is left out, with a line.
//! A look-up by a handle on the C library gives our function of the name, if there is one.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    mem::MaybeUninit,
    ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

use crate::{
    code,
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
/// the program's call.
///
/// # Safety
/// As `dlsym`.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    std::arch::naked_asm!(
        "push rdi",
        "push rsi",
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

/// Returns the function that looks names up by `handle`; null during its own look-up.
extern "C" fn by(handle: *mut c_void) -> *mut c_void {
    match handle == libc::RTLD_DEFAULT || handle == libc::RTLD_NEXT {
        true => next::next_dlsym().unwrap_or(ptr::null_mut()),
        false => dlsym_of_library as *mut c_void,
    }
}

/// `dlsym` in the library of a handle. What the C library has and this library defines, too, is
/// this library's.
unsafe extern "C" fn dlsym_of_library(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: the program's promise.
    let name = unsafe { CStr::from_ptr(name) };
    let found = next::look_up(handle, name);
    if !code::is_c_library(found as usize) {
        return found;
    }
    // Searched before the libraries that it needs, of which the C library is one.
    match next::look_up(this_library(), name) {
        ours if code::is_own(ours as usize) => ours,
        _ => found,
    }
}

/// Returns a handle on this library. The program's own `malloc` and its kind are not searched then,
/// nor the entries by which a program at a fixed address calls those of libraries.
fn this_library() -> *mut c_void {
    static HANDLE: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    let before = HANDLE.load(Ordering::Relaxed);
    if !before.is_null() {
        return before;
    }
    let mut info = MaybeUninit::<libc::Dl_info>::uninit();
    let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD;
    // SAFETY: there is room for the answer, which names the file of this library.
    let handle = unsafe {
        libc::dladdr(this_library as *const c_void, info.as_mut_ptr());
        libc::dlopen(info.assume_init().dli_fname, flags)
    };
    HANDLE.store(handle, Ordering::Relaxed);
    handle
}
