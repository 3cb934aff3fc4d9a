//! Facts that all interposed processes of a run share, on a page of the launcher's folder.
//!
//! The rule it keeps: a process needs neither a right nor a descriptor to note a fact.

use std::{
    fs::File,
    os::fd::AsRawFd,
    path::Path,
    ptr,
    sync::atomic::{AtomicPtr, AtomicU8, Ordering},
};

use farpage::ByteSize;

use crate::say;

/// File of the page.
const FILE: &str = "facts";
const PAGE_BYTES: usize = 4096;
/// Index of the byte that says that a process has made an arena. The launcher reads it.
const ARENA: usize = 0;
/// Index of the byte that says that the line about children made by `fork` has been written.
const FORK: usize = 1;
/// Index of the byte that says that the line about what such children touch has been written.
const TOUCHED: usize = 2;
/// Index of the byte that says that a child made by `fork` has got remote memory. The launcher
/// reads it.
const COPIED: usize = 3;

/// Address of the mapped page. Null if it is not mapped.
static PAGE: AtomicPtr<AtomicU8> = AtomicPtr::new(ptr::null_mut());

/// Maps the page.
pub(crate) fn begin(folder: &Path) {
    let file = File::options()
        .read(true)
        .write(true)
        .open(folder.join(FILE));
    let Ok(file) = file else { return };
    // SAFETY: the kernel chooses the place, and the file has a page. The call is made by number:
    // our own `mmap` serves the program.
    let page = unsafe {
        libc::syscall(
            libc::SYS_mmap,
            0_usize,
            PAGE_BYTES,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0_usize,
        )
    };
    if page > 0 {
        PAGE.store(page as *mut AtomicU8, Ordering::Release);
    }
}

/// Notes a fact. Returns whether it was noted before.
fn note(fact: usize) -> bool {
    let page = PAGE.load(Ordering::Acquire);
    // SAFETY: the page is never unmapped, and has as many bytes.
    !page.is_null() && unsafe { &*page.add(fact) }.swap(1, Ordering::Relaxed) == 1
}

/// Notes that this process has made an arena.
pub(crate) fn note_arena() {
    note(ARENA);
}

/// Notes that a child made by `fork` has got remote memory of this process.
pub(crate) fn note_copied() {
    note(COPIED);
}

/// Writes a line, once in a run, that the memory of a child made by `fork` is local because of
/// `why`.
pub(crate) fn say_of_fork(why: &str) {
    if !note(FORK) {
        say(&format!(
            "what a child made by fork allocates is local, and not under the budget: {why}"
        ));
    }
}

/// Writes a line, once in a run, that a child made by `fork` has touched `bytes` bytes of its
/// parent's remote memory, which stay local because of `why`.
pub(crate) fn say_of_touched(bytes: usize, why: &str) {
    if !note(TOUCHED) {
        say(&format!(
            "a child made by fork has touched {} of its parent's memory, which stay local and are not under the budget: {why}",
            ByteSize(bytes as u64)
        ));
    }
}
