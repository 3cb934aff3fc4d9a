//! Arguments and environments that the kernel reads: [`LocalStrings`].
//!
//! With in-thread faults the kernel cannot bring absent memory in, and no filter sees the strings
//! that a list leads to. The rule: lists with remote strings are copied into local memory before
//! `exec`. A child made by `vfork` leaves its copies in the parent, whose thread frees them with
//! its next call.

use std::{cell::Cell, ffi::c_char, mem, ptr};

use crate::{signals, state::is_remote};

/// List of the arguments or the environment of a program: strings, and a null behind them.
pub(crate) type Strings = *const *const c_char;

/// Number of lists of one call: a path, arguments and an environment.
const LISTS: usize = 3;

thread_local! {
    /// Mappings of this thread's copies, by address and length. Length 0: none.
    static COPIES: Cell<[(usize, usize); LISTS]> = const { Cell::new([(0, 0); LISTS]) };
}

/// Frees copies that a child made by `vfork` has left in this thread. To be called before the first
/// copy of a call.
pub(crate) fn free_left() {
    for (address, bytes) in COPIES.replace([(0, 0); LISTS]) {
        unmap(address, bytes);
    }
}

/// Records a copy, or takes the record away.
fn exchange(old: (usize, usize), new: (usize, usize)) {
    let mut copies = COPIES.get();
    if let Some(copy) = copies.iter_mut().find(|copy| **copy == old) {
        *copy = new;
    }
    COPIES.set(copies);
}

fn unmap(address: usize, bytes: usize) {
    if bytes > 0 {
        // SAFETY: a copy of this file's, which nobody reads any more. By number: our own function
        // serves the program.
        unsafe { libc::syscall(libc::SYS_munmap, address, bytes) };
    }
}

/// List that the kernel can read.
pub(crate) struct LocalStrings {
    list: Strings,
    /// Length of the mapping that holds the list and its strings. 0: the list is the program's own.
    mapped_bytes: usize,
}

impl LocalStrings {
    /// Makes all of `list` local. Where there is no memory for a copy, the list stays as it is, and
    /// `exec` fails with `EFAULT`.
    ///
    /// # Safety
    /// `list` is a list of strings of C's, or null.
    pub(crate) unsafe fn of(list: Strings) -> LocalStrings {
        let own = LocalStrings {
            list,
            mapped_bytes: 0,
        };
        if list.is_null() || !signals::are_ours() {
            return own;
        }
        let (mut count, mut text_bytes, mut any) = (0, 0, is_remote(list.addr(), 1));
        // SAFETY: the caller's promise.
        unsafe {
            while let at = *list.add(count)
                && !at.is_null()
            {
                let bytes = libc::strlen(at) + 1;
                any |= is_remote(at.addr(), bytes);
                (count, text_bytes) = (count + 1, text_bytes + bytes);
            }
        }
        match any {
            // SAFETY: the caller's promise.
            true => unsafe { copied(list, count, text_bytes) }.unwrap_or(own),
            false => own,
        }
    }

    pub(crate) fn list(&self) -> Strings {
        self.list
    }

    /// Returns the first string of the list.
    pub(crate) fn first(&self) -> *const c_char {
        // SAFETY: a list, whose end is a null.
        unsafe { *self.list }
    }
}

impl Drop for LocalStrings {
    fn drop(&mut self) {
        let copy = (self.list.addr(), self.mapped_bytes);
        if self.mapped_bytes > 0 {
            exchange(copy, (0, 0));
            unmap(copy.0, copy.1);
        }
    }
}

/// Copies `count` strings of `text_bytes` bytes in all into a mapping of the kernel's.
///
/// # Safety
/// `list` has as many, of that length.
unsafe fn copied(list: Strings, count: usize, text_bytes: usize) -> Option<LocalStrings> {
    let list_bytes = (count + 1) * mem::size_of::<*const c_char>();
    let mapped_bytes = list_bytes + text_bytes;
    // SAFETY: a new mapping, which has room for the list and its strings. Its bytes are zero, so
    // that a null stands behind the list.
    unsafe {
        let (access, kind) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        let nowhere = ptr::null::<u8>();
        let made = libc::syscall(libc::SYS_mmap, nowhere, mapped_bytes, access, kind, -1, 0);
        let made = made as *mut u8;
        if made.cast() == libc::MAP_FAILED {
            return None;
        }
        let to = made.cast::<*const c_char>();
        let mut text = made.add(list_bytes).cast::<c_char>();
        for at in 0..count {
            let from = *list.add(at);
            let bytes = libc::strlen(from) + 1;
            ptr::copy_nonoverlapping(from, text, bytes);
            to.add(at).write(text);
            text = text.add(bytes);
        }
        exchange((0, 0), (to.addr(), mapped_bytes));
        Some(LocalStrings {
            list: to,
            mapped_bytes,
        })
    }
}
