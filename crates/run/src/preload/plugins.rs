//! Libraries that the program loads: `dlopen`.
//!
//! The rule it keeps: only one allocator is used. With `RTLD_DEEPBIND` a library would find the C
//! library's `free` before ours and give it memory of the arena. The flag is left out, with a line.

#[cfg(target_arch = "x86_64")]
use std::ffi::{c_char, c_int, c_void};

#[cfg(target_arch = "x86_64")]
use crate::{next::Next, say_once};

/// `dlopen`.
///
/// The C library searches by the `RUNPATH` of its caller's file. So its function is jumped to and
/// not called: it sees the program's call.
///
/// # Safety
/// As `dlopen`.
#[cfg(target_arch = "x86_64")]
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
#[cfg(target_arch = "x86_64")]
extern "C" fn next_dlopen(flags: c_int) -> *mut c_void {
    static DLOPEN: Next = Next::new(c"dlopen");
    if flags & libc::RTLD_DEEPBIND != 0 {
        say_once(
            "dlopen: RTLD_DEEPBIND is left out, since the library would free the program's memory with another allocator",
        );
    }
    DLOPEN.get().unwrap_or(std::ptr::null_mut())
}
