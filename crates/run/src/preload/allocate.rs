//! Allocations of the arena: what `malloc` and `mmap` have in common.
//!
//! The rule it keeps: a request that the arena serves is never local. Without room, or beyond the
//! program's own limits, it fails with a line.

use std::{
    ffi::c_void,
    ptr::{self, NonNull},
    sync::atomic::{AtomicUsize, Ordering},
};

use farpage::ArenaError;

use crate::{
    ALIGN, Inside, give_up, limits, locks, mappings, protect, say, set_errno,
    state::{KERNEL_PAGE_BYTES, State},
};

const BEYOND_LIMIT: &str = "the program's own limit (setrlimit) leaves no room for the allocation";
const NOT_LOCKED: &str = "what is allocated cannot be locked in memory (mlockall)";

/// Contents of new memory.
#[derive(Clone, Copy)]
pub(crate) enum Holds {
    Zeros,
    Anything,
}

impl State {
    /// Allocates memory with contents `holds`. Null, with a line, if the arena is full.
    pub(crate) fn allocate(&self, bytes: usize, align: usize, holds: Holds) -> *mut c_void {
        let made = {
            let _inside = Inside::enter();
            let made = self.within_limits(bytes).and_then(|()| {
                let made = match holds {
                    Holds::Zeros => self.arena.allocate(bytes, align),
                    Holds::Anything => self.arena.allocate_uninit(bytes, align),
                };
                made.map_err(full)
            });
            made.and_then(|made| {
                let start = made.as_ptr() as usize;
                let end = start + bytes.next_multiple_of(KERNEL_PAGE_BYTES);
                if locks::made(self, &(start..end)) {
                    self.note_peak();
                    return Ok(made);
                }
                // SAFETY: nobody has seen it.
                let _ = unsafe { self.arena.deallocate(made) };
                Err(NOT_LOCKED.to_owned())
            })
        };
        self.hand_out(made)
    }

    /// Allocates as [`allocate`](Self::allocate), for a block that grows. The memory is not locked
    /// yet.
    pub(crate) fn allocate_to_grow(&self, bytes: usize, align: usize) -> *mut c_void {
        let made = {
            let _inside = Inside::enter();
            let made = self.within_limits(bytes);
            let made = made.and_then(|()| self.arena.allocate_to_grow(bytes, align).map_err(full));
            made.inspect(|_| self.note_peak())
        };
        self.hand_out(made)
    }

    /// Refuses `bytes` more bytes if they exceed the program's own limits.
    fn within_limits(&self, bytes: usize) -> Result<(), String> {
        match limits::allow(self.arena.allocated_bytes().saturating_add(bytes)) {
            true => Ok(()),
            false => Err(BEYOND_LIMIT.to_owned()),
        }
    }

    /// Implements `realloc` for an allocation of the arena.
    ///
    /// # Safety
    /// As `realloc`.
    pub(crate) unsafe fn reallocate(&self, old: NonNull<u8>, bytes: usize) -> *mut c_void {
        let made = {
            let _inside = Inside::enter();
            // SAFETY: the caller's promise.
            let made = unsafe { self.resize(old, bytes) };
            made.inspect(|_| self.note_peak())
        };
        self.hand_out(made)
    }

    /// # Safety
    /// As `realloc`.
    unsafe fn resize(&self, old: NonNull<u8>, bytes: usize) -> Result<NonNull<u8>, String> {
        let Some(before) = self.arena.usable_bytes(old) else {
            give_up("realloc(): invalid pointer");
        };
        let start = old.as_ptr() as usize;
        let page_bytes = self.arena.region().page_bytes();
        let too_long = || format!("{bytes} bytes are more than any arena has");
        let whole = bytes
            .checked_next_multiple_of(page_bytes)
            .ok_or_else(too_long)?;
        if whole > before {
            self.within_limits(whole - before)?;
        }
        // Bytes that are cut off are given back, so they must be neither protected nor locked.
        if whole < before && !protect::lift_allocated(self, &(start + whole..start + before)) {
            return Err("a protection cannot be lifted".to_owned());
        }
        // 1. In place. SAFETY: the caller's promise. Pages that cannot be discarded now are tried
        // again.
        if unsafe { self.arena.resize(old, bytes) }.unwrap_or(true) {
            if whole <= before || locks::made(self, &(start + before..start + whole)) {
                return Ok(old);
            }
            // SAFETY: nobody has seen what was added.
            let _ = unsafe { self.arena.resize(old, before) };
            return Err(NOT_LOCKED.to_owned());
        }
        // 2. Elsewhere.
        let made = self.arena.allocate_to_grow(bytes, ALIGN).map_err(full)?;
        let place = made.as_ptr() as usize;
        // SAFETY: nobody uses the old bytes, and the new ones are nobody's but ours.
        let is_moved = unsafe {
            let (old, new) = (start..start + before, place..place + whole);
            match mappings::is_all_plain() {
                true => self.arena.relocate(old, new.start).is_ok(),
                false => protect::relocate(&mut mappings::change(), self, &old, &new),
            }
        };
        // SAFETY: nobody uses the one that is given up. As above.
        let _ = unsafe { self.arena.deallocate(if is_moved { old } else { made }) };
        if is_moved {
            Ok(made)
        } else {
            Err("what grows cannot move, or not be locked in memory".to_owned())
        }
    }

    fn hand_out(&self, made: Result<NonNull<u8>, String>) -> *mut c_void {
        match made {
            Ok(made) => made.as_ptr().cast(),
            Err(why) => {
                // A program that tries with less hears of it once.
                static SAID: AtomicUsize = AtomicUsize::new(0);
                if SAID.fetch_add(1, Ordering::Relaxed) == 0 {
                    say(&why);
                }
                set_errno(libc::ENOMEM);
                ptr::null_mut()
            }
        }
    }
}

fn full(error: ArenaError) -> String {
    format!("{error} (farpage run --capacity)")
}
