//! Single pages in and out by copying, for threads that serve their own faults while others of the program run.
//!
//! A page that moves leaves an address behind which every processor that runs the program has to forget: a shootdown, which takes several times as long as all
//! else in the move. A run pays for one; pages that are used at random have no neighbours that go with them. A copy that is mapped leaves no address behind, and
//! pages that are taken out by copying are forgotten together:
//!
//! 1. write-protect all that lies from the first of them to the last: one call, one shootdown;
//! 2. copy them by `process_vm_readv`, to which a page that the program has dropped is an error and not a fault;
//! 3. give their memory back by one `process_madvise`, and one shootdown;
//! 4. lift the protection.
//!
//! The rule it keeps: from the first step on no write reaches these pages, so that what is given back is what was copied. It holds as long as nobody else lifts the protection: calls do not
//! overlap. A write to a protected page raises SIGBUS, and the thread waits until the protection is lifted, or the page is gone.
//!
//! The downsides: a page that a device is writing to goes along unseen, which `UFFDIO_MOVE` refuses, so this is for in-thread faults alone, where the program has to pin what
//! it hands to the kernel. And if the program unmaps a part of the region at this moment, and another thread maps something there before that call has returned, within the instant between
//! the last look whether mappings change and the third step, it is dropped.

use std::{io, ops::Range};

use nix::errno::Errno;

use crate::{
    frame::KernelFrame,
    kernel::KernelSpace,
    sys::{self, KERNEL_PAGE_BYTES},
};

impl KernelSpace {
    /// See [`AddressSpace::install_copy`](crate::AddressSpace::install_copy).
    pub(crate) fn copy_one_in(&self, shard: usize, address: usize, frame: &KernelFrame) -> bool {
        assert_eq!(frame.len(), KERNEL_PAGE_BYTES, "copied whole or not at all");
        // SAFETY: the frame is readable; a region's absent pages are the pager's to fill.
        unsafe { self.copy_in(shard, address, frame.address(), KERNEL_PAGE_BYTES) }.is_ok()
    }

    /// See [`AddressSpace::detach_scattered`](crate::AddressSpace::detach_scattered).
    pub(crate) fn copy_out_scattered(
        &self,
        shard: usize,
        addresses: &[usize],
        frames: &mut [KernelFrame],
    ) -> usize {
        let Some(&start) = addresses.first() else {
            return 0;
        };
        let heard = self.heard(shard);
        let last = addresses[addresses.len() - 1];
        // Up to what the program has unmapped: what is there now is none of ours.
        let free_bytes = heard.gone.free_bytes(&(start..last + KERNEL_PAGE_BYTES));
        let is_there = |&&address: &&usize| address + KERNEL_PAGE_BYTES <= start + free_bytes;
        let addresses = &addresses[..addresses.iter().take_while(is_there).count()];
        let Some(&last) = addresses.last() else {
            return 0;
        };
        let window = start..last + KERNEL_PAGE_BYTES;
        let uffd = self.uffd(shard);
        if uffd.write_protect(window.start, window.len()).is_err() {
            drop(heard);
            self.lift(shard, window);
            return 0;
        }
        let mut slots = [0; sys::RANGES_MAX];
        for (slot, frame) in slots.iter_mut().zip(&*frames) {
            *slot = frame.address();
        }
        let slots = &slots[..addresses.len()];
        // SAFETY: the slots are the frames'.
        let copied = unsafe { sys::copy_each(addresses, slots, KERNEL_PAGE_BYTES) };
        let taken = match copied {
            // SAFETY: pages of a region of which the frames have all bytes, and that nobody writes to any more.
            Ok(copied) if !uffd.is_changing() => unsafe {
                sys::drop_each(&addresses[..copied], KERNEL_PAGE_BYTES)
            },
            Ok(_) | Err(_) => Ok(0),
        };
        // Lifting has to wait while mappings change.
        drop(heard);
        self.lift(shard, window);
        taken.unwrap_or(0)
    }

    /// Lifts write protection, of whatever the program has not unmapped.
    pub(crate) fn lift(&self, shard: usize, window: Range<usize>) {
        let mut since = None;
        let mut lift = |start: usize, len: usize| {
            loop {
                let heard = self.heard(shard);
                let lifted = self.uffd(shard).write_unprotect(start, len);
                drop(heard);
                let is_changing =
                    |error: &io::Error| error.raw_os_error() == Some(Errno::EAGAIN as i32);
                match lifted {
                    Err(error)
                        if is_changing(&error) && self.wait_for_change(shard, &mut since) => {}
                    other => return other,
                }
            }
        };
        if lift(window.start, window.len()).is_err() {
            for start in window.step_by(KERNEL_PAGE_BYTES) {
                // An error: it is not the region's any more, or its messages are not read, and whoever writes there lifts it.
                let _ = lift(start, KERNEL_PAGE_BYTES);
            }
        }
    }
}
