//! `/proc/self/pagemap`: which pages are mapped, and which were written.
//!
//! The rule it keeps: it only looks (the one exception, re-protecting what was found written, is in the name of its caller's wish).

use std::{
    fs::File,
    io,
    ops::Range,
    os::{fd::AsFd, unix::fs::FileExt},
};

use linux_raw_sys::general::page_region;

use crate::sys::{self, KERNEL_PAGE_BYTES};

/// Bits 63 (present) and 62 (swapped) of an entry: an access then raises no userfault. A poison marker counts as swapped.
const OCCUPIED: u64 = 0b11 << 62;

/// Kernel pages looked at with one `read`.
const ENTRIES_PER_READ: usize = 64;

/// What to do about a page map that cannot be opened.
pub(crate) fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "the kernel hides this process from itself, because it changed its user after its start or may not read its own \
             program file: start it as the user that it runs as, or call prctl(PR_SET_DUMPABLE, 1) after the change"
        }
        _ => "mount /proc (`sudo mount -t proc proc /proc`)",
    }
}

/// The page map of this process.
#[derive(Debug)]
pub struct Pagemap(File);

impl Pagemap {
    /// Opens it.
    ///
    /// # Errors
    /// The operating system's, when `/proc` is not mounted, or hidden from a process that changed its user.
    pub fn open() -> io::Result<Self> {
        File::open("/proc/self/pagemap").map(Self)
    }

    /// Whether any kernel page of the range is mapped, swapped out or poisoned.
    ///
    /// # Errors
    /// The operating system's.
    pub fn any_occupied(&self, start: usize, len: usize) -> io::Result<bool> {
        let mut bytes = [0; 8 * ENTRIES_PER_READ];
        let mut page = start / KERNEL_PAGE_BYTES;
        let end = (start + len).div_ceil(KERNEL_PAGE_BYTES);
        while page < end {
            let count = ENTRIES_PER_READ.min(end - page);
            self.0
                .read_exact_at(&mut bytes[..8 * count], 8 * page as u64)?;
            let (entries, _) = bytes[..8 * count].as_chunks::<8>();
            if entries
                .iter()
                .any(|entry| u64::from_ne_bytes(*entry) & OCCUPIED != 0)
            {
                return Ok(true);
            }
            page += count;
        }
        Ok(false)
    }

    /// Appends the ranges of a mapping that were written since they were protected, and protects them again, atomically (`PAGEMAP_SCAN`,
    /// kernel 6.7). The mapping is registered for write protection with a [`Uffd`](crate::Uffd) that agreed on
    /// [`WP_ASYNC`](crate::Features::WP_ASYNC).
    ///
    /// # Errors
    /// `EPERM` when the mapping is not so registered, `ENOTTY` before kernel 6.7.
    pub fn written(&self, range: Range<usize>, out: &mut Vec<Range<usize>>) -> io::Result<()> {
        let mut found = [page_region {
            start: 0,
            end: 0,
            categories: 0,
        }; 64];
        let mut start = range.start;
        while start < range.end {
            let (count, end) = sys::scan_written(self.0.as_fd(), start, range.end, &mut found)?;
            out.extend(
                found[..count]
                    .iter()
                    .map(|region| region.start as usize..region.end as usize),
            );
            start = end;
        }
        Ok(())
    }

    /// Whether this kernel knows `PAGEMAP_SCAN`.
    pub(crate) fn can_scan(&self) -> io::Result<()> {
        sys::scan_written(self.0.as_fd(), 0, 0, &mut []).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Features, RegisterMode, Uffd};

    #[test]
    fn writes_are_found_once_with_asynchronous_protection() {
        let features = Features::WP | Features::WP_UNPOPULATED | Features::WP_ASYNC;
        let uffd = Uffd::open(features, false).unwrap();
        let start = sys::reserve(16 * KERNEL_PAGE_BYTES, KERNEL_PAGE_BYTES, false).unwrap();
        uffd.register(start, 16 * KERNEL_PAGE_BYTES, RegisterMode::WRITE_PROTECT)
            .unwrap();
        uffd.write_protect(start, 16 * KERNEL_PAGE_BYTES).unwrap();
        let third = start + 3 * KERNEL_PAGE_BYTES;
        // SAFETY: the mapping made above.
        unsafe { (third as *mut u8).write_volatile(1) };
        let pagemap = Pagemap::open().unwrap();
        pagemap.can_scan().unwrap();
        let mut written = Vec::new();
        pagemap
            .written(start..start + 16 * KERNEL_PAGE_BYTES, &mut written)
            .unwrap();
        assert_eq!(written.len(), 1);
        assert_eq!(written[0], third..third + KERNEL_PAGE_BYTES);
        written.clear();
        pagemap
            .written(start..start + 16 * KERNEL_PAGE_BYTES, &mut written)
            .unwrap();
        assert_eq!(written, []);
        uffd.write_unprotect(start, 16 * KERNEL_PAGE_BYTES).unwrap();
        // SAFETY: the mapping made above, unused from here on.
        unsafe { sys::release(start, 16 * KERNEL_PAGE_BYTES) };
    }
}
