//! Stacks to serve faults on ([`Stack`]), and the process's stock of them. System calls borrow them
//! as local buffers (`calls/local.rs`).
//!
//! The rule it keeps: a stack is in one hand at a time. Taking one and giving it back neither
//! allocates nor locks.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    ptr,
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
    thread,
};

use nix::errno::Errno;

use super::STACK_BYTES;
use crate::sys::KERNEL_PAGE_BYTES;

/// Upper bound of idle stacks that are kept: more threads than that seldom fault at once, and then
/// each maps a stack and gives it back.
const IDLE_STACKS: usize = 64;

/// A stack to serve on, with a page below it that no access is allowed to.
pub(crate) struct Stack(usize);

/// Stacks in stock, by address; 0 is a free place. Taking and giving back swap whole ownership, so
/// that no stack is ever in two hands.
static IDLE: [AtomicUsize; IDLE_STACKS] = [const { AtomicUsize::new(0) }; IDLE_STACKS];

/// Calls `work` on a stack from the stock: memory of regions may be the calling thread's own stack,
/// and `work` may have to wait for none of its pages.
pub fn on_stock_stack<R>(work: impl FnOnce() -> R) -> R {
    let stack = Stack::take();
    let caught = || catch_unwind(AssertUnwindSafe(work));
    // SAFETY: the stack has `STACK_BYTES` bytes, which are this thread's alone until then. No panic
    // leaves it.
    let done = unsafe { psm::on_stack(stack.base(), STACK_BYTES, caught) };
    stack.give_back();
    done.unwrap_or_else(|panic| resume_unwind(panic))
}

/// Puts a stack into the stock, if there is none: who takes one waits for another thread's only.
///
/// # Errors
/// The operating system's, for lack of memory or mappings.
pub fn keep_stack() -> io::Result<()> {
    if IDLE.iter().all(|idle| idle.load(SeqCst) == 0) {
        Stack::map()?.give_back();
    }
    Ok(())
}

impl Stack {
    const MAPPING_BYTES: usize = KERNEL_PAGE_BYTES + STACK_BYTES;

    pub(crate) fn map() -> nix::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_STACK;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: no address is asked for, so that no mapping is replaced.
        let start = unsafe { libc::mmap(ptr::null_mut(), Self::MAPPING_BYTES, prot, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(Errno::last());
        }
        let stack = Self(start as usize);
        // SAFETY: the lowest page of the mapping made above.
        Errno::result(unsafe { libc::mprotect(start, KERNEL_PAGE_BYTES, libc::PROT_NONE) })
            .inspect_err(|_| stack.unmap())
            .map(|_| stack)
    }

    /// Takes a stack from the stock, or a new one. Without memory for that, waits for the next one
    /// that comes back: its handler does not wait for a stack.
    pub(crate) fn take() -> Self {
        loop {
            for idle in &IDLE {
                if idle.load(SeqCst) != 0 {
                    let stack = idle.swap(0, SeqCst);
                    if stack != 0 {
                        return Self(stack);
                    }
                }
            }
            if let Ok(stack) = Self::map() {
                return stack;
            }
            thread::yield_now();
        }
    }

    pub(crate) fn give_back(self) {
        let kept = IDLE.iter().any(|idle| {
            idle.load(SeqCst) == 0 && idle.compare_exchange(0, self.0, SeqCst, SeqCst).is_ok()
        });
        if !kept {
            self.unmap();
        }
    }

    fn unmap(&self) {
        // SAFETY: the mapping made in `map`, whose owner gives it up.
        unsafe { libc::munmap(self.0 as *mut libc::c_void, Self::MAPPING_BYTES) };
    }

    /// Returns the lowest usable address.
    pub(crate) fn base(&self) -> *mut u8 {
        (self.0 + KERNEL_PAGE_BYTES) as *mut u8
    }
}
