//! [`Slab`]: a mapping that is registered once and given back with its pool.
//!
//! The rule it keeps: the registration ends before the mapping does. The pool carves buffers out of
//! the slab.

use std::{io, num::NonZeroUsize, ptr::NonNull};

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

use super::registrar::{Access, Registered, Registrars};

/// Unit of the sizes of slabs.
pub(super) const PAGE_BYTES: usize = 4096;

/// Size of a huge page. Slabs are aligned to it.
pub(super) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A piece of a pool's memory, mapped and registered at once.
pub(super) struct Slab {
    // Dropped in this order.
    pub(super) registered: Registered,
    mapping: SlabMapping,
}

impl Slab {
    /// Makes zeroed memory that no adapter knows yet. `bytes` is a multiple of [`PAGE_BYTES`].
    pub(super) fn new(bytes: usize, access: Access, registrars: &Registrars) -> io::Result<Self> {
        let mapping = SlabMapping::new(bytes)?;
        let memory = NonNull::slice_from_raw_parts(mapping.start, bytes);
        // SAFETY: the mapping is ours alone, nothing here ever changes it, and it is dropped after
        // `registered`.
        let registered = unsafe { Registered::new(memory, access, registrars) };
        Ok(Self {
            registered,
            mapping,
        })
    }

    pub(super) fn bytes(&self) -> usize {
        self.mapping.bytes
    }

    /// Returns the bytes at `offset`; valid as long as `self`.
    pub(super) fn at(&self, offset: usize, bytes: usize) -> NonNull<[u8]> {
        assert!(
            offset + bytes <= self.bytes(),
            "{bytes} bytes at {offset} of a slab of {}",
            self.bytes()
        );
        // SAFETY: inside the mapping, as asserted.
        let start = unsafe { self.mapping.start.add(offset) };
        NonNull::slice_from_raw_parts(start, bytes)
    }
}

/// Zeroed private anonymous memory, aligned to huge pages and backed by them where the kernel
/// grants it.
struct SlabMapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: an address range that this value owns; the pool that carves it keeps track of who may
// touch which bytes.
unsafe impl Send for SlabMapping {}
// SAFETY: as above.
unsafe impl Sync for SlabMapping {}

impl SlabMapping {
    fn new(bytes: usize) -> io::Result<Self> {
        let whole_bytes = bytes + HUGE_PAGE_BYTES;
        let length = NonZeroUsize::new(whole_bytes).expect("more than a huge page");
        let (protection, flags) = (
            ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
            MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE,
        );
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let whole = unsafe { mmap_anonymous(None, length, protection, flags)? }.cast::<u8>();
        let before = whole.as_ptr().align_offset(HUGE_PAGE_BYTES);
        // SAFETY: `before` is less than the huge page that was mapped beyond `bytes`.
        let start = unsafe { whole.add(before) };
        let mapping = Self { start, bytes };
        // Unmaps what was mapped for the alignment only: a huge page in all, before the aligned
        // part, behind it, or both.
        for (at, len) in [
            (whole, before),
            // SAFETY: the end of the aligned part, inside of what was mapped or at its end.
            (unsafe { start.add(bytes) }, HUGE_PAGE_BYTES - before),
        ] {
            if len > 0 {
                // SAFETY: whole kernel pages of the mapping made above, of which nobody knows yet.
                unsafe { munmap(at.cast(), len)? };
            }
        }
        // SAFETY: advice on the mapping made above. Huge pages are a wish: a kernel without them
        // says EINVAL.
        let _ = unsafe { madvise(start.cast(), bytes, MmapAdvise::MADV_HUGEPAGE) };
        // A child that shared these pages would make them copy-on-write, and the adapter would go
        // on with the old pages.
        // SAFETY: as above.
        unsafe { madvise(start.cast(), bytes, MmapAdvise::MADV_DONTFORK)? };
        Ok(mapping)
    }
}

impl Drop for SlabMapping {
    fn drop(&mut self) {
        // SAFETY: made by `new`; whoever was given a part of it kept the slab alive until now.
        let unmapped = unsafe { munmap(self.start.cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "a mapping of ours can be unmapped");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slabs_are_aligned_zeroed_and_whole() {
        for huge_pages in [1, 3] {
            let bytes = huge_pages * HUGE_PAGE_BYTES;
            let slab = Slab::new(bytes, Access::Local, &Registrars::default()).unwrap();
            let memory = slab.at(0, bytes);
            assert_eq!(memory.as_ptr().cast::<u8>() as usize % HUGE_PAGE_BYTES, 0);
            // SAFETY: the slab is ours alone.
            let memory = unsafe { &mut *memory.as_ptr() };
            assert!(memory.iter().all(|byte| *byte == 0));
            memory.fill(1);
        }
    }
}
