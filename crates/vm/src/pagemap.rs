//! `/proc/self/pagemap`: which pages are mapped.
//!
//! The rule it keeps: nothing is changed here, only read.

use std::{
    fs::File,
    io,
    ops::Range,
    os::{fd::AsFd, unix::fs::FileExt},
};

use farpage_tables::lost;

use crate::sys::{self, KERNEL_PAGE_BYTES};

/// Bits 63 (present) and 62 (swapped) of an entry: an access then raises no userfault. A poison
/// marker counts as swapped.
const OCCUPIED: u64 = 0b11 << 62;

/// Number of kernel pages that one `read` looks at.
const ENTRIES_PER_READ: usize = 64;

/// Returns the remedy for a page map that cannot be opened.
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
    /// Opens the page map of this process.
    ///
    /// # Errors
    /// The operating system's, when `/proc` is not mounted, or hidden from a process that changed
    /// its user.
    pub fn open() -> io::Result<Self> {
        File::open("/proc/self/pagemap").map(Self)
    }

    /// True if any kernel page of the range is mapped, swapped out or poisoned.
    ///
    /// # Errors
    /// The operating system's.
    pub fn any_occupied(&self, start: usize, len: usize) -> io::Result<bool> {
        let mut occupied = false;
        self.each(start..start + len, |_, is_occupied| {
            occupied = is_occupied;
            !occupied
        })?;
        Ok(occupied)
    }

    /// Tells `take` the start of each kernel page that has some of `addresses`, ascending, and
    /// whether the page is mapped, swapped out or poisoned, until `take` returns false.
    fn each(
        &self,
        addresses: Range<usize>,
        mut take: impl FnMut(usize, bool) -> bool,
    ) -> io::Result<()> {
        let mut bytes = [0; 8 * ENTRIES_PER_READ];
        let mut page = addresses.start / KERNEL_PAGE_BYTES;
        let end = addresses.end.div_ceil(KERNEL_PAGE_BYTES);
        while page < end {
            let count = ENTRIES_PER_READ.min(end - page);
            let bytes = &mut bytes[..8 * count];
            let read = self.0.read_exact_at(bytes, 8 * page as u64);
            read.map_err(closed)?;
            for entry in bytes.as_chunks::<8>().0 {
                let is_occupied = u64::from_ne_bytes(*entry) & OCCUPIED != 0;
                if !take(page * KERNEL_PAGE_BYTES, is_occupied) {
                    return Ok(());
                }
                page += 1;
            }
        }
        Ok(())
    }

    /// Appends the parts of `addresses`, of whole kernel pages, where memory is mapped or swapped
    /// out, ascending.
    ///
    /// # Errors
    /// The operating system's.
    pub(crate) fn occupied(
        &self,
        addresses: Range<usize>,
        out: &mut Vec<Range<usize>>,
    ) -> io::Result<()> {
        let before = out.len();
        let scanned = sys::scan(self.0.as_fd(), addresses.start, addresses.end, out);
        match scanned.map_err(closed) {
            // The kernel does not know the call.
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
                out.truncate(before);
                self.read_occupied(addresses, out)
            }
            scanned => scanned,
        }
    }

    /// Appends as [`occupied`](Self::occupied) does, by reading an entry for each kernel page.
    fn read_occupied(
        &self,
        addresses: Range<usize>,
        out: &mut Vec<Range<usize>>,
    ) -> io::Result<()> {
        let first = addresses.start;
        self.each(addresses, |start, is_occupied| {
            match out.last_mut() {
                _ if !is_occupied => {}
                Some(last) if last.end == start && start > first => last.end += KERNEL_PAGE_BYTES,
                _ => out.push(start..start + KERNEL_PAGE_BYTES),
            }
            true
        })
    }

    /// Succeeds if this kernel knows `PAGEMAP_SCAN`.
    pub(crate) fn can_scan(&self) -> io::Result<()> {
        sys::can_scan(self.0.as_fd())
    }
}

/// Ends the process if the program has closed the page map, or put a file in its place.
fn closed(error: io::Error) -> io::Error {
    let is_closed = error.raw_os_error() == Some(libc::EBADF);
    if is_closed || error.kind() == io::ErrorKind::UnexpectedEof {
        lost("/proc/self/pagemap");
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::uffd::{Features, Uffd};

    #[test]
    fn one_page_that_is_mapped_is_found_among_many_that_are_not() {
        const PAGES: usize = 3 * ENTRIES_PER_READ;
        let bytes = PAGES * KERNEL_PAGE_BYTES;
        let start = sys::reserve(bytes, KERNEL_PAGE_BYTES, sys::Backing::Small).unwrap();
        let pagemap = Pagemap::open().unwrap();
        assert!(!pagemap.any_occupied(start, bytes).unwrap());
        let page = start + (PAGES - 1) * KERNEL_PAGE_BYTES;
        // SAFETY: the mapping made above.
        unsafe { (page as *mut u8).write_volatile(1) };
        assert!(pagemap.any_occupied(start, bytes).unwrap());
        assert!(!pagemap.any_occupied(start, page - start).unwrap());
        assert!(pagemap.any_occupied(page, 1).unwrap());
        // SAFETY: the mapping made above, unused from here on.
        unsafe { sys::release(start, bytes) };
    }

    #[test]
    fn parts_that_are_mapped_are_found_by_both_ways() {
        const PAGES: usize = 5 * ENTRIES_PER_READ;
        let bytes = PAGES * KERNEL_PAGE_BYTES;
        let start = sys::reserve(bytes, KERNEL_PAGE_BYTES, sys::Backing::Ordinary).unwrap();
        let pagemap = Pagemap::open().unwrap();
        // Two neighbours across two reads, every other page of a stretch, and the last page.
        let touched = [ENTRIES_PER_READ - 1, ENTRIES_PER_READ, PAGES - 1];
        let other = (100..300).step_by(2);
        let mut touched: Vec<_> = touched.into_iter().chain(other).collect();
        touched.sort_unstable();
        for page in &touched {
            let page = start + page * KERNEL_PAGE_BYTES;
            // SAFETY: the mapping made above.
            unsafe { (page as *mut u8).write_volatile(1) };
        }
        // The parts continue no range that was found before.
        let before = start - KERNEL_PAGE_BYTES..start;
        let (mut scanned, mut read) = (vec![before.clone()], vec![before]);
        pagemap
            .occupied(start..start + bytes, &mut scanned)
            .unwrap();
        pagemap
            .read_occupied(start..start + bytes, &mut read)
            .unwrap();
        assert_eq!(scanned, read);
        let pages = |part: &Range<usize>| {
            let number = |address| (address - start) / KERNEL_PAGE_BYTES;
            number(part.start)..number(part.end)
        };
        let found: Vec<_> = scanned[1..].iter().flat_map(pages).collect();
        assert_eq!(found, touched);
        assert_eq!(scanned.len(), 1 + touched.len() - 1);
        // SAFETY: the mapping made above, unused from here on.
        unsafe { sys::release(start, bytes) };
    }

    #[test]
    fn whether_this_kernel_can_scan_follows_from_its_features() {
        // Both features came with kernel 6.7.
        let features = Uffd::supported(true).unwrap();
        let can_scan = Pagemap::open().unwrap().can_scan().is_ok();
        assert_eq!(can_scan, features.contains(Features::WP_ASYNC));
    }
}
