//! Memory of processes: `process_vm_readv` and `process_vm_writev`.
//!
//! The rule it keeps: the kernel sees a local buffer in place of the caller's own memory. What the
//! call names in another process is the kernel's to find. What it names in this process, in remote
//! memory, is copied here, because the kernel would not find absent pages.

use std::{mem, ptr, slice};

use super::{
    local::{Buffers, IsRemote, PIECE_BYTES},
    raw::{Arguments, system_call},
    transfer::{BUFFERS_MAX, TransferPlan, error, pull, push},
};

/// True if the call `number` is one of these.
pub(super) const fn has_lists(number: libc::c_long) -> bool {
    matches!(
        number,
        libc::SYS_process_vm_readv | libc::SYS_process_vm_writev
    )
}

/// The lists of a call.
struct Lists<'a> {
    /// Memory of the caller.
    own: Buffers<'a>,
    /// Memory of the process that the call names.
    others: Buffers<'a>,
    /// Id of that process.
    process: usize,
}

impl Lists<'_> {
    /// Returns the lists. `None`: the call is another one, or its lists are none that the kernel
    /// takes.
    ///
    /// # Safety
    /// As [`super::call`].
    unsafe fn of<'a>(number: libc::c_long, args: Arguments) -> Option<Lists<'a>> {
        let [process, own, own_count, others, others_count, flags] = args;
        let list = |at: usize, count: usize| {
            let is_list = at != 0 && (1..=BUFFERS_MAX).contains(&count) && flags == 0;
            // SAFETY: the caller's promise: the call may read as many there.
            is_list.then(|| Buffers(unsafe { slice::from_raw_parts(at as *const _, count) }))
        };
        if !has_lists(number) {
            return None;
        }
        Some(Lists {
            own: list(own, own_count)?,
            others: list(others, others_count)?,
            process,
        })
    }

    /// True if the process that the call names is this one.
    fn are_ours(&self) -> bool {
        // SAFETY: asks only.
        self.process as libc::pid_t == unsafe { libc::getpid() }
    }

    fn are_remote(&self, is_remote: IsRemote<'_>) -> bool {
        let is_list_remote =
            |list: Buffers<'_>| is_remote(list.0.as_ptr() as usize, mem::size_of_val(list.0));
        is_list_remote(self.own)
            || is_list_remote(self.others)
            || self.own.are_remote(is_remote)
            || self.are_ours() && self.others.are_remote(is_remote)
    }

    /// Moves bytes between `local` and the other memory, `at` bytes behind its beginning. Returns
    /// their number: fewer than `bytes` at the end of that memory, or of what can be read.
    ///
    /// # Safety
    /// As [`super::call`]; `local` has `bytes` bytes.
    unsafe fn transfer(
        &self,
        number: libc::c_long,
        local: *mut u8,
        bytes: usize,
        at: usize,
        is_remote: IsRemote<'_>,
    ) -> isize {
        let (mut moved, mut failed) = (0, None);
        self.others.parts(at, bytes, |other, done, part| {
            // A part that was cut short ends the call.
            if moved < done || failed.is_some() {
                return;
            }
            let local = local.wrapping_add(done);
            if self.are_ours() && is_remote(other as usize, part) {
                let (from, to) = match number {
                    libc::SYS_process_vm_readv => (other, local),
                    _ => (local, other),
                };
                // SAFETY: this function's contract; `local` is nobody else's.
                unsafe { ptr::copy_nonoverlapping(from, to, part) };
                moved += part;
                return;
            }
            let (local, other) = ([local as usize, part], [other as usize, part]);
            let (own, others) = (local.as_ptr() as usize, other.as_ptr() as usize);
            // SAFETY: this function's contract.
            let result = unsafe { system_call(number, [self.process, own, 1, others, 1, 0]) };
            match result {
                0.. => moved += result as usize,
                _ => failed = Some(result),
            }
        });
        match failed {
            Some(error) if moved == 0 => error,
            _ => moved as isize,
        }
    }
}

/// True if a call's memory is remote, as far as it lies in this process.
///
/// # Safety
/// As [`super::call`].
pub(super) unsafe fn are_remote(
    number: libc::c_long,
    args: Arguments,
    is_remote: IsRemote<'_>,
) -> bool {
    // SAFETY: the caller's promise.
    unsafe { Lists::of(number, args) }.is_some_and(|lists| lists.are_remote(is_remote))
}

/// Makes a call. `None`: the call is another one, or has no remote part.
///
/// # Safety
/// As [`super::call`].
pub(super) unsafe fn call(
    number: libc::c_long,
    args: Arguments,
    is_remote: IsRemote<'_>,
) -> Option<isize> {
    // SAFETY: the caller's promise.
    let lists = unsafe { Lists::of(number, args) }?;
    if !lists.are_remote(is_remote) {
        return None;
    }
    let Some(bytes) = lists.own.bytes() else {
        return Some(error(libc::EINVAL));
    };
    let plan = TransferPlan {
        piece: PIECE_BYTES.min(bytes),
        goes_on: true,
    };
    // SAFETY: the caller's promise; the local buffer is the call's own.
    Some(unsafe {
        let transfer = |local, piece, done| lists.transfer(number, local, piece, done, is_remote);
        match number {
            libc::SYS_process_vm_readv => pull(lists.own, plan, transfer),
            _ => push(lists.own, plan, transfer),
        }
    })
}
