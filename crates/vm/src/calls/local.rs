//! Local memory that the kernel may be given in remote memory's place ([`LocalBuffer`]).

use std::ptr;

use super::raw::system_call;
use crate::{
    sigbus::{STACK_BYTES, Stack},
    sys::KERNEL_PAGE_BYTES,
};

/// Predicate: true if the kernel cannot bring in some of `bytes` bytes at an address.
pub type IsRemote<'a> = &'a dyn Fn(usize, usize) -> bool;

/// Way to bring in memory that a call may be about: what its structures may lead to, for a length
/// that nobody knows.
#[derive(Clone, Copy)]
pub struct Guesses<'a> {
    /// Function that brings in `bytes` bytes at an address without a fault. Memory that cannot be
    /// read is passed over.
    pub fetch: &'a dyn Fn(usize, usize),
    /// Most bytes that are fetched before a call is made again.
    pub max_bytes: usize,
}

impl Guesses<'_> {
    /// Guesses that bring nothing in.
    pub const NONE: Guesses<'static> = Guesses {
        fetch: &|_, _| (),
        max_bytes: 0,
    };
}

/// True if the page at an address can be read, and is absent. The kernel is asked, so that nothing
/// is loaded. Before Linux 5.14 it does not know, and the answer is false.
pub fn is_absent(at: usize) -> bool {
    let page = at & !(KERNEL_PAGE_BYTES - 1);
    let advice = libc::MADV_POPULATE_READ as usize;
    // SAFETY: the kernel reads a page, or says why it cannot. Protected memory is `EINVAL`.
    let answer = unsafe {
        system_call(
            libc::SYS_madvise,
            [page, KERNEL_PAGE_BYTES, advice, 0, 0, 0],
        )
    };
    answer == -(libc::EFAULT as isize)
}

/// Brings in the absent pages among `bytes` bytes of a call at an address. Memory that is not
/// mapped or protected is passed over. Returns true if a page was absent.
pub(super) fn bring_in(at: usize, bytes: usize, is_remote: IsRemote<'_>) -> bool {
    let end = at.saturating_add(bytes);
    let first = at & !(KERNEL_PAGE_BYTES - 1);
    let mut was_absent = false;
    for page in (first..end).step_by(KERNEL_PAGE_BYTES) {
        let at = page.max(at);
        if is_remote(at, 1) && is_absent(at) {
            // SAFETY: the kernel has said that the page can be read.
            unsafe { ptr::read_volatile(ptr::with_exposed_provenance::<u8>(at)) };
            was_absent = true;
        }
    }
    was_absent
}

/// Number of bytes that move at once, where a call may move a part.
pub(super) const PIECE_BYTES: usize = STACK_BYTES;

/// A buffer of this process's own, of bytes that no other code uses.
///
/// Code that leaves a signal handler by `longjmp` leaves the buffer behind.
pub(super) enum LocalBuffer {
    /// One of the stacks that faults are served on.
    Stack(Option<Stack>),
    /// A mapping, for buffers longer than a stack.
    Mapped(*mut u8, usize),
}

impl LocalBuffer {
    /// Takes a buffer of at least `bytes` bytes. `None`: there is no memory.
    pub(super) fn of(bytes: usize) -> Option<LocalBuffer> {
        if bytes <= PIECE_BYTES {
            return Some(LocalBuffer::Stack(Some(Stack::take())));
        }
        Self::mapped(bytes)
    }

    /// Maps a buffer. Its memory is never used again: a call's references to it may stay, and the
    /// kernel has the pages alone once the buffer is dropped. `None`: there is no memory.
    pub(super) fn mapped(bytes: usize) -> Option<LocalBuffer> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: no address is asked for, so that no mapping is replaced. The call goes to the
        // kernel by itself: whoever replaces `mmap` gives none of this.
        let start = unsafe {
            libc::syscall(
                libc::SYS_mmap,
                ptr::null_mut::<u8>(),
                bytes.max(1),
                prot,
                flags,
                -1,
                0,
            )
        };
        (start != -1).then_some(LocalBuffer::Mapped(start as *mut u8, bytes.max(1)))
    }

    pub(super) fn start(&self) -> *mut u8 {
        match self {
            LocalBuffer::Stack(stack) => stack.as_ref().expect("taken by `drop` alone").base(),
            LocalBuffer::Mapped(start, _) => *start,
        }
    }
}

impl Drop for LocalBuffer {
    fn drop(&mut self) {
        match self {
            LocalBuffer::Stack(stack) => {
                if let Some(stack) = stack.take() {
                    stack.give_back();
                }
            }
            // SAFETY: mapped in `of`, and given up by its owner.
            LocalBuffer::Mapped(start, bytes) => unsafe {
                libc::syscall(libc::SYS_munmap, *start, *bytes);
            },
        }
    }
}

/// The buffers of a call, one behind the other.
#[derive(Clone, Copy)]
pub(super) struct Buffers<'a>(pub(super) &'a [libc::iovec]);

impl Buffers<'_> {
    /// Returns the bytes of all buffers. `None`: more than a call may have.
    pub(super) fn bytes(self) -> Option<usize> {
        let mut lengths = self.0.iter().map(|buffer| buffer.iov_len);
        let sum = lengths.try_fold(0usize, usize::checked_add)?;
        (sum <= isize::MAX as usize).then_some(sum)
    }

    pub(super) fn are_remote(self, is_remote: IsRemote<'_>) -> bool {
        let mut buffers = self.0.iter();
        buffers.any(|buffer| is_remote(buffer.iov_base as usize, buffer.iov_len))
    }

    /// Copies `bytes` bytes from `local` to the buffers, `at` bytes behind their beginning.
    ///
    /// # Safety
    /// `local` has `bytes` bytes, and the buffers may be written.
    pub(super) unsafe fn scatter(self, at: usize, local: *const u8, bytes: usize) {
        self.parts(at, bytes, |buffer, from, bytes| {
            // SAFETY: within both, which do not overlap: `local` is nobody else's.
            unsafe { buffer.copy_from_nonoverlapping(local.add(from), bytes) }
        });
    }

    /// Copies `bytes` bytes to `local`, from `at` bytes behind the buffers' beginning.
    ///
    /// # Safety
    /// `local` has room for `bytes` bytes, and the buffers may be read.
    pub(super) unsafe fn gather(self, at: usize, local: *mut u8, bytes: usize) {
        self.parts(at, bytes, |buffer, to, bytes| {
            // SAFETY: as above.
            unsafe { local.add(to).copy_from_nonoverlapping(buffer, bytes) }
        });
    }

    /// Calls `copy` for each part of the `bytes` bytes from `at` on, with the part's address, its
    /// distance from `at`, and its length.
    fn parts(self, mut at: usize, bytes: usize, mut copy: impl FnMut(*mut u8, usize, usize)) {
        let mut done = 0;
        for buffer in self.0 {
            let part = buffer.iov_len.saturating_sub(at).min(bytes - done);
            if part > 0 {
                copy(buffer.iov_base.cast::<u8>().wrapping_add(at), done, part);
                done += part;
            }
            at = at.saturating_sub(buffer.iov_len);
        }
    }
}
