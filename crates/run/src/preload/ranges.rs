//! [`Ranges`]: facts about ranges of addresses.

use std::{collections::BTreeMap, ops::Range};

/// Addresses with a fact about each. No two ranges overlap.
pub(crate) struct Ranges<T>(BTreeMap<usize, (usize, T)>);

impl<T: Copy> Ranges<T> {
    pub(crate) const fn new() -> Ranges<T> {
        Ranges(BTreeMap::new())
    }

    /// Records `known` for `addresses`, in place of earlier facts.
    pub(crate) fn insert(&mut self, addresses: Range<usize>, known: T) {
        self.remove(addresses.clone());
        if !addresses.is_empty() {
            self.0.insert(addresses.start, (addresses.end, known));
        }
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

    /// Returns the parts of `addresses` about which no fact is recorded, ascending.
    pub(crate) fn gaps(&self, addresses: &Range<usize>) -> Vec<Range<usize>> {
        let mut gaps = Vec::new();
        let mut at = addresses.start;
        for (known, _) in self.within(addresses) {
            if at < known.start {
                gaps.push(at..known.start);
            }
            at = known.end;
        }
        if at < addresses.end {
            gaps.push(at..addresses.end);
        }
        gaps
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
