//! [`Ready`]: pages that children could not take yet.
//!
//! The rule it keeps: what waits here is not read from a store once more. The bytes may be the only
//! ones of a page, which could not be written: the store has older ones.

use super::forked::Arriving;

/// Pages on their way into children that change their mappings just now, and their bytes.
#[derive(Default)]
pub(super) struct Ready(Vec<(Arriving, Vec<u8>)>);

impl Ready {
    pub(super) fn push(&mut self, arriving: Arriving, bytes: Vec<u8>) {
        self.0.push((arriving, bytes));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// True if a page of a child waits.
    pub(super) fn has(&self, child: u64, address: usize) -> bool {
        let mut pages = self.0.iter();
        pages.any(|(it, _)| (it.child, it.address) == (child, address))
    }

    /// True if a page of the child waits whose bytes are nowhere else.
    pub(super) fn has_only_copy(&self, child: u64) -> bool {
        let mut pages = self.0.iter();
        pages.any(|(it, _)| it.child == child && it.is_only_copy)
    }
}

impl IntoIterator for Ready {
    type Item = (Arriving, Vec<u8>);
    type IntoIter = std::vec::IntoIter<(Arriving, Vec<u8>)>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

/// Returns the number of pages to read at once: the first of `count`, and those behind it up to one
/// that `is_taken`.
pub(super) fn readable(count: usize, is_taken: impl Fn(usize) -> bool) -> usize {
    (1..count).find(|&at| is_taken(at)).unwrap_or(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_read_ahead_up_to_one_that_waits_for_the_same_child() {
        let mut ready = Ready::default();
        for (child, address, is_only_copy) in [(1, 0x5000, true), (2, 0x2000, false)] {
            let arriving = Arriving {
                child,
                address,
                is_wanted: false,
                is_only_copy,
            };
            ready.push(arriving, vec![1]);
        }
        let from = |child, start: usize| readable(4, |at| ready.has(child, start + at * 0x1000));
        assert_eq!((from(1, 0x3000), from(2, 0x1000)), (2, 1));
        assert_eq!((from(1, 0x1000), from(2, 0x2000)), (4, 4));
        assert!(ready.has_only_copy(1) && !ready.has_only_copy(2));
    }
}
