//! [`Ranges`]: facts about ranges of addresses.

use std::{collections::BTreeMap, ops::Range};

/// Addresses with a fact about each. No two ranges overlap, and neighbours have different facts.
pub(crate) struct Ranges<T>(BTreeMap<usize, (usize, T)>);

impl<T: Copy + PartialEq> Ranges<T> {
    pub(crate) const fn new() -> Ranges<T> {
        Ranges(BTreeMap::new())
    }

    /// Records `known` for `addresses`, in place of earlier facts.
    pub(crate) fn insert(&mut self, addresses: Range<usize>, known: T) {
        self.remove(addresses.clone());
        if addresses.is_empty() {
            return;
        }
        let Range { mut start, mut end } = addresses;
        if let Some((&before, &(its_end, fact))) = self.0.range(..start).next_back()
            && its_end == start
            && fact == known
        {
            start = before;
        }
        if let Some(&(its_end, fact)) = self.0.get(&end)
            && fact == known
        {
            self.0.remove(&end);
            end = its_end;
        }
        self.0.insert(start, (end, known));
    }

    /// Forgets the facts about `addresses`. Returns the forgotten facts, ascending.
    pub(crate) fn remove(&mut self, addresses: Range<usize>) -> Vec<(Range<usize>, T)> {
        let touched = self.touched(&addresses);
        for &(start, end, known) in &touched {
            self.0.remove(&start);
            if start < addresses.start {
                self.0.insert(start, (addresses.start, known));
            }
            if addresses.end < end {
                self.0.insert(addresses.end, (end, known));
            }
        }
        inside(touched, &addresses)
    }

    /// Returns the facts about `addresses`, ascending.
    pub(crate) fn within(&self, addresses: &Range<usize>) -> Vec<(Range<usize>, T)> {
        inside(self.touched(addresses), addresses)
    }

    /// True if a fact is recorded for one of `addresses`.
    pub(crate) fn touches(&self, addresses: &Range<usize>) -> bool {
        let before = self.0.range(..addresses.end).next_back();
        before.is_some_and(|(_, &(end, _))| end > addresses.start)
    }

    /// True if a fact is recorded for each of `addresses`.
    pub(crate) fn cover(&self, addresses: &Range<usize>) -> bool {
        let known = self.within(addresses);
        known.iter().map(|(part, _)| part.len()).sum::<usize>() == addresses.len()
    }

    /// Returns the parts of `addresses`, ascending, and whether a fact is recorded for each.
    pub(crate) fn parts(&self, addresses: &Range<usize>) -> Vec<(Range<usize>, bool)> {
        let mut parts = Vec::new();
        let mut at = addresses.start;
        for (known, _) in self.within(addresses) {
            if at < known.start {
                parts.push((at..known.start, false));
            }
            at = known.end;
            parts.push((known, true));
        }
        if at < addresses.end {
            parts.push((at..addresses.end, false));
        }
        parts
    }

    /// Returns the parts of `addresses` about which no fact is recorded, ascending.
    pub(crate) fn gaps(&self, addresses: &Range<usize>) -> Vec<Range<usize>> {
        let parts = self.parts(addresses).into_iter();
        parts
            .filter_map(|(part, is_known)| (!is_known).then_some(part))
            .collect()
    }

    fn touched(&self, addresses: &Range<usize>) -> Vec<(usize, usize, T)> {
        let mut touched: Vec<_> = (self.0.range(..addresses.end).rev())
            .map(|(&start, &(end, known))| (start, end, known))
            .take_while(|&(_, end, _)| end > addresses.start)
            .collect();
        touched.reverse();
        touched
    }
}

fn inside<T>(touched: Vec<(usize, usize, T)>, within: &Range<usize>) -> Vec<(Range<usize>, T)> {
    let part = |(start, end, known): (usize, usize, T)| {
        (start.max(within.start)..end.min(within.end), known)
    };
    touched.into_iter().map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_of_one_fact_are_one_range() {
        let mut ranges = Ranges::new();
        for (addresses, known) in [(0..4, 1), (8..12, 1), (4..8, 1), (12..16, 2), (16..20, 1)] {
            ranges.insert(addresses, known);
        }
        let all = |ranges: &Ranges<i32>| ranges.within(&(0..40));
        assert_eq!(all(&ranges), [(0..12, 1), (12..16, 2), (16..20, 1)]);
        assert_eq!(ranges.0.len(), 3);
        // In place of the fact between two equal ones, and of parts of both.
        ranges.insert(10..18, 1);
        assert_eq!((all(&ranges), ranges.0.len()), (vec![(0..20, 1)], 1));
        ranges.insert(6..9, 3);
        assert_eq!(all(&ranges), [(0..6, 1), (6..9, 3), (9..20, 1)]);
        assert_eq!(ranges.remove(4..10), [(4..6, 1), (6..9, 3), (9..10, 1)]);
        ranges.insert(5..5, 1);
        assert_eq!(all(&ranges), [(0..4, 1), (10..20, 1)]);
    }
}
