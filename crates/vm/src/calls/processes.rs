//! Memory of processes: `process_vm_readv` and `process_vm_writev`.
//!
//! The rule it keeps: the kernel copies, and says what cannot be copied. Where it has stopped at an
//! absent page of this process, the page is brought in, and the copy goes on.

use std::{mem, ops::RangeInclusive};

use super::{
    local::{IsRemote, bring_in},
    nested::Words,
    raw::{Arguments, system_call},
    transfer::BUFFERS_MAX,
};
use crate::sys::KERNEL_PAGE_BYTES;

/// Numbers of buffers of a list.
const COUNTS: RangeInclusive<usize> = 1..=BUFFERS_MAX;
const ENTRY: usize = mem::size_of::<libc::iovec>();
/// Number of tries for a piece of a page, which may leave in between.
const TRIES: usize = 200;

/// True if the call `number` is one of these.
pub(super) const fn has_lists(number: libc::c_long) -> bool {
    matches!(
        number,
        libc::SYS_process_vm_readv | libc::SYS_process_vm_writev
    )
}

/// Place in a list of buffers.
struct Cursor {
    /// Address of the entry of the next buffer, and the number of entries from there on.
    next: usize,
    left: usize,
    /// Rest of the current buffer.
    at: usize,
    bytes: usize,
}

impl Cursor {
    /// Returns the place behind `skipped` bytes of a list.
    fn new(list: usize, count: usize, skipped: usize) -> Cursor {
        let mut cursor = Cursor {
            next: list,
            left: count,
            at: 0,
            bytes: 0,
        };
        let mut skipped = skipped;
        while skipped > 0 && cursor.is_there() {
            let step = skipped.min(cursor.bytes);
            cursor.skip(step);
            skipped -= step;
        }
        cursor
    }

    /// Goes to the next byte. Returns false at the end of the list.
    fn is_there(&mut self) -> bool {
        while self.bytes == 0 && self.left > 0 {
            [self.at, self.bytes, ..] = Words::read(self.next, ENTRY).words;
            self.next += ENTRY;
            self.left -= 1;
        }
        self.bytes > 0
    }

    /// Returns the bytes of the current buffer up to the end of their page.
    fn piece(&self) -> usize {
        self.bytes
            .min(KERNEL_PAGE_BYTES - self.at % KERNEL_PAGE_BYTES)
    }

    fn skip(&mut self, bytes: usize) {
        self.at = self.at.wrapping_add(bytes);
        self.bytes -= bytes;
    }
}

/// True if a process or thread is of this process.
fn is_ours(process: usize) -> bool {
    // SAFETY: a signal of number 0 is none.
    unsafe {
        let this = libc::getpid() as usize;
        process as libc::pid_t == this as libc::pid_t
            || system_call(libc::SYS_tgkill, [this, process, 0, 0, 0, 0]) == 0
    }
}

/// Goes on with a call that the kernel has answered with `first`.
///
/// # Safety
/// As [`super::call`].
pub(super) unsafe fn complete(
    number: libc::c_long,
    args: Arguments,
    first: isize,
    is_remote: IsRemote<'_>,
) -> isize {
    let [process, own, own_count, others, others_count, flags] = args;
    let is_refused = first < 0 && first != -(libc::EFAULT as isize);
    if is_refused || flags != 0 || !COUNTS.contains(&own_count) || !COUNTS.contains(&others_count) {
        return first;
    }
    bring_in(own, own_count * ENTRY, is_remote);
    bring_in(others, others_count * ENTRY, is_remote);
    let mut moved = first.max(0) as usize;
    let mut own = Cursor::new(own, own_count, moved);
    let mut others = Cursor::new(others, others_count, moved);
    let (mut tries, mut was_absent, is_ours) = (0, true, is_ours(process));
    while tries < TRIES && own.is_there() && others.is_there() {
        let bytes = own.piece().min(others.piece());
        let (here, there) = ([own.at, bytes], [others.at, bytes]);
        let lists = [&here, &there].map(|list| list.as_ptr().expose_provenance());
        // SAFETY: the caller's promise, for a part of the call.
        let result = unsafe { system_call(number, [process, lists[0], 1, lists[1], 1, 0]) };
        if result > 0 {
            own.skip(result as usize);
            others.skip(result as usize);
            moved += result as usize;
            (tries, was_absent) = (0, true);
            continue;
        }
        // Another thread may have brought a page in since the kernel looked: one more try.
        let is_absent =
            bring_in(own.at, bytes, is_remote) | (is_ours && bring_in(others.at, bytes, is_remote));
        if !is_absent && !was_absent {
            break;
        }
        was_absent = is_absent;
        tries += 1;
    }
    match moved {
        0 => first,
        _ => moved as isize,
    }
}
