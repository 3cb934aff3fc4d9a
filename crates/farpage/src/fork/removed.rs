//! [`Removed`]: what a child has dropped of its regions since the fork.
//!
//! The rule it keeps: addresses are known by byte, whatever ranges they were dropped in.

use std::{collections::BTreeMap, ops::Range};

/// Addresses that a child has dropped: ranges by their start, apart from each other.
#[derive(Clone, Default)]
pub(super) struct Removed(BTreeMap<usize, usize>);

impl Removed {
    /// Notes that `range` was dropped.
    pub(super) fn insert(&mut self, range: Range<usize>) {
        let (mut start, mut end) = (range.start, range.end);
        while let Some((&first, &last)) = self.0.range(..=end).next_back()
            && last >= start
        {
            self.0.remove(&first);
            (start, end) = (start.min(first), end.max(last));
        }
        self.0.insert(start, end);
    }

    /// Forgets that parts of `range` were dropped: other bytes are known for them.
    pub(super) fn forget(&mut self, range: &Range<usize>) {
        let parts: Vec<_> = self.within(range).collect();
        for part in parts {
            let (&start, &end) = (self.0.range(..=part.start).next_back()).expect("it was dropped");
            self.0.remove(&start);
            if start < part.start {
                self.0.insert(start, part.start);
            }
            if part.end < end {
                self.0.insert(part.end, end);
            }
        }
    }

    /// True if all of `range` was dropped.
    pub(super) fn covers(&self, range: &Range<usize>) -> bool {
        self.within(range).map(|part| part.len()).sum::<usize>() == range.len()
    }

    /// Makes the parts of `bytes`, which lie at `address`, zeros that were dropped.
    pub(super) fn clear(&self, address: usize, bytes: &mut [u8]) {
        for part in self.within(&(address..address + bytes.len())) {
            bytes[part.start - address..part.end - address].fill(0);
        }
    }

    /// Returns the parts of `range` that were dropped.
    pub(super) fn within(&self, range: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let before = self.0.range(..range.end).rev();
        let touched = before.take_while(|&(_, &end)| end > range.start);
        touched.map(|(&start, &end)| start.max(range.start)..end.min(range.end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_dropped_is_known_by_byte() {
        let mut removed = Removed::default();
        let mut model = [false; 64];
        let mut state = 1_u64;
        for _ in 0..200 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let (start, len) = ((state >> 33) as usize % 60, (state >> 50) as usize % 4 + 1);
            removed.insert(start..start + len);
            model[start..start + len].fill(true);
            if state.is_multiple_of(3) {
                let known = start / 2..start / 2 + len;
                removed.forget(&known);
                model[known].fill(false);
            }
            let mut told = [false; 64];
            for part in removed.within(&(3..50)) {
                assert!(
                    told[part.clone()].iter().all(|told| !told),
                    "twice: {part:?}"
                );
                told[part].fill(true);
            }
            assert_eq!(told[3..50], model[3..50]);
            if state.is_multiple_of(7) {
                (removed, model) = (Removed::default(), [false; 64]);
            }
        }
    }
}
