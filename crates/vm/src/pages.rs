//! Neighbouring pages of one shard, the subject of a transfer ([`Pages`]).
//!
//! The rule it keeps: address, page size and count travel together and are checked once. The pages'
//! place in a region is known to the caller.

use std::ops::Range;

use crate::sys::KERNEL_PAGE_BYTES;

/// The number of a shard: one of the space's userfaultfds, with a queue of faults of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shard(pub usize);

/// Neighbouring pages of one size inside one stripe, at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages {
    shard: Shard,
    address: usize,
    page_bytes: usize,
    count: usize,
}

impl Pages {
    /// Makes `count` pages of `page_bytes` each, the first at `address`, in a stripe of `shard`.
    ///
    /// # Panics
    /// If `count` is 0, `page_bytes` is not a power of two of at least 4096, or `address` is not a
    /// multiple of `page_bytes`.
    pub fn new(shard: Shard, address: usize, page_bytes: usize, count: usize) -> Self {
        assert!(
            page_bytes.is_power_of_two()
                && page_bytes >= KERNEL_PAGE_BYTES
                && address.is_multiple_of(page_bytes)
                && count > 0,
            "{count} pages of {page_bytes} bytes at {address:#x}"
        );
        Self {
            shard,
            address,
            page_bytes,
            count,
        }
    }

    /// Returns the shard that reads the pages' faults.
    pub fn shard(&self) -> Shard {
        self.shard
    }

    /// Returns the first page's first address.
    pub fn address(&self) -> usize {
        self.address
    }

    /// Returns the bytes of each page.
    pub fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// Returns the number of pages, at least one.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the bytes of all pages together.
    pub fn bytes(&self) -> usize {
        self.count * self.page_bytes
    }

    /// Returns the addresses of all pages.
    pub fn range(&self) -> Range<usize> {
        self.address..self.address + self.bytes()
    }

    /// Iterates over each page's first address, ascending.
    pub fn addresses(&self) -> impl Iterator<Item = usize> {
        self.range().step_by(self.page_bytes)
    }

    /// Returns the pages behind the first `bytes`, a multiple of the page size, if there are any.
    pub(crate) fn behind(&self, bytes: usize) -> Option<Self> {
        debug_assert!(bytes.is_multiple_of(self.page_bytes) && bytes <= self.bytes());
        (bytes < self.bytes()).then(|| Self {
            address: self.address + bytes,
            count: self.count - bytes / self.page_bytes,
            ..*self
        })
    }

    /// Returns the first `count` of these pages.
    pub(crate) fn first(&self, count: usize) -> Self {
        debug_assert!((1..=self.count).contains(&count));
        Self { count, ..*self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_know_their_addresses() {
        let pages = Pages::new(Shard(1), 3 << 16, 1 << 16, 4);
        assert_eq!(pages.range(), 3 << 16..7 << 16);
        assert_eq!(pages.first(1).range(), 3 << 16..4 << 16);
        assert_eq!(pages.behind(1 << 16).unwrap().range(), 4 << 16..7 << 16);
        assert_eq!(pages.behind(pages.bytes()), None);
        let addresses: Vec<_> = pages.addresses().collect();
        assert_eq!(addresses, [3 << 16, 4 << 16, 5 << 16, 6 << 16]);
    }

    #[test]
    fn what_is_no_page_is_our_own_mistake() {
        for (address, page_bytes, count) in
            [(4096, 8192, 1), (0, 4096, 0), (0, 2048, 1), (0, 12288, 1)]
        {
            let made =
                std::panic::catch_unwind(|| Pages::new(Shard(0), address, page_bytes, count));
            assert!(
                made.is_err(),
                "{count} pages of {page_bytes} bytes at {address}"
            );
        }
    }
}
