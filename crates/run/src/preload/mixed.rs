//! Programs that define a part of the allocator's functions themselves, such as `free` alone.
//!
//! The rule it keeps: a block that a function of ours makes is never given to a function of the
//! program's, which would pass it to the C library. `malloc` and its kind of such a program are the
//! C library's. Its `mmap` is served.

use std::{
    ffi::CStr,
    sync::atomic::{AtomicBool, Ordering},
};

use crate::{code, next, say};

/// Functions that make blocks.
const MAKE: [&CStr; 6] = [
    c"malloc",
    c"calloc",
    c"realloc",
    c"memalign",
    c"aligned_alloc",
    c"posix_memalign",
];
/// Functions that are given blocks.
const TAKE: [&CStr; 3] = [c"free", c"realloc", c"malloc_usable_size"];

/// True if the program has some of [`TAKE`], and not all of [`MAKE`]. Relaxed: set before `main`.
static IS: AtomicBool = AtomicBool::new(false);

/// Finds out what the program defines. Writes a line if that is a part. Called by our constructor.
pub(crate) fn begin() {
    let Some(taken) = TAKE.iter().find(|name| is_programs(name)) else {
        return;
    };
    if !MAKE.iter().all(|name| is_programs(name)) {
        IS.store(true, Ordering::Relaxed);
        say(&format!(
            "the program has a `{}` of its own, and not all of the allocator: what it allocates by malloc and its kind stays local",
            taken.to_string_lossy()
        ));
    }
}

/// True if requests of the C library and its loader come to this library.
pub(crate) fn serves_c_library() -> bool {
    !MAKE.iter().any(|name| is_programs(name))
}

/// True if the program, or a library before this one, defines a function of the allocator.
fn is_programs(name: &CStr) -> bool {
    let found = next::look_up(libc::RTLD_DEFAULT, name);
    !found.is_null() && !code::is_own(found as usize) && !code::is_entry(found)
}

/// True if all blocks are to be the C library's.
pub(crate) fn is() -> bool {
    IS.load(Ordering::Relaxed)
}
