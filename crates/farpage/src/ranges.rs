//! [`Ranges`]: facts about addresses.

use std::{collections::BTreeMap, iter, ops::Range};

/// A fact about each address. Entries are the addresses at which another fact begins; the default
/// fact holds before the first entry.
#[derive(Clone, Default)]
pub struct Ranges<T>(BTreeMap<usize, T>);

impl<T: Copy + Default + PartialEq> Ranges<T> {
    /// Makes ranges of which the default fact holds everywhere.
    pub const fn new() -> Ranges<T> {
        Ranges(BTreeMap::new())
    }

    /// Returns the fact about an address.
    pub fn at(&self, address: usize) -> T {
        let entry = self.0.range(..=address).next_back();
        entry.map_or_else(T::default, |(_, &fact)| fact)
    }

    /// Changes the facts about `addresses`.
    pub fn change(&mut self, addresses: &Range<usize>, change: impl Fn(&mut T)) {
        if addresses.is_empty() {
            return;
        }
        let before = addresses.start.checked_sub(1);
        let mut before = before.map_or_else(T::default, |before| self.at(before));
        for bound in [addresses.start, addresses.end] {
            self.0.insert(bound, self.at(bound));
        }
        for (_, fact) in self.0.range_mut(addresses.clone()) {
            change(fact);
        }
        // Neighbours of one fact are one range.
        let touched = self.0.range(addresses.start..=addresses.end);
        for (bound, fact) in Vec::from_iter(touched.map(|(&bound, &fact)| (bound, fact))) {
            if fact == before {
                self.0.remove(&bound);
            }
            before = fact;
        }
    }

    /// Returns the parts of `addresses`, ascending, of which `of` says different things.
    pub fn parts<K: PartialEq>(
        &self,
        addresses: &Range<usize>,
        of: impl Fn(T) -> K,
    ) -> Vec<(Range<usize>, K)> {
        let mut parts: Vec<(Range<usize>, K)> = Vec::new();
        if addresses.is_empty() {
            return parts;
        }
        let first = (addresses.start, self.at(addresses.start));
        let rest = self.0.range(addresses.start + 1..addresses.end);
        for (start, fact) in iter::once(first).chain(rest.map(|(&start, &fact)| (start, fact))) {
            let known = of(fact);
            if let Some((last, before)) = parts.last_mut() {
                if *before == known {
                    continue;
                }
                last.end = start;
            }
            parts.push((start..addresses.end, known));
        }
        parts
    }

    /// Returns the parts of `addresses`, ascending, whose facts `are` so.
    pub fn those(&self, addresses: &Range<usize>, are: impl Fn(T) -> bool) -> Vec<Range<usize>> {
        let parts = self.parts(addresses, are).into_iter();
        parts
            .filter_map(|(part, are)| are.then_some(part))
            .collect()
    }

    /// True if the fact about one of `addresses` `is` so.
    pub fn has(&self, addresses: &Range<usize>, is: impl Fn(T) -> bool) -> bool {
        self.parts(addresses, is).iter().any(|(_, is)| *is)
    }

    /// True if the fact about each of `addresses` `is` so.
    pub fn all(&self, addresses: &Range<usize>, is: impl Fn(T) -> bool) -> bool {
        !self.has(addresses, |fact| !is(fact))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_of_one_fact_are_one_range() {
        let mut ranges = Ranges::new();
        let put = |ranges: &mut Ranges<i32>, addresses, known| {
            ranges.change(&addresses, |fact| *fact = known);
        };
        let all = |ranges: &Ranges<i32>| {
            let mut all = ranges.parts(&(0..40), |known| known);
            all.retain(|(_, known)| *known != 0);
            all
        };
        for (addresses, known) in [(0..4, 1), (8..12, 1), (4..8, 1), (12..16, 2), (16..20, 1)] {
            put(&mut ranges, addresses, known);
        }
        assert_eq!(all(&ranges), [(0..12, 1), (12..16, 2), (16..20, 1)]);
        assert_eq!(ranges.0.len(), 4);
        // In place of the fact between two equal ones, and of parts of both.
        put(&mut ranges, 10..18, 1);
        assert_eq!((all(&ranges), ranges.0.len()), (vec![(0..20, 1)], 2));
        put(&mut ranges, 6..9, 3);
        assert_eq!(all(&ranges), [(0..6, 1), (6..9, 3), (9..20, 1)]);
        let within = ranges.parts(&(4..10), |known| known);
        assert_eq!(within, [(4..6, 1), (6..9, 3), (9..10, 1)]);
        assert_eq!(ranges.those(&(4..10), |known| known == 1), [4..6, 9..10]);
        assert!(ranges.has(&(5..7), |known| known == 3));
        assert!(!ranges.has(&(9..30), |known| known == 3));
        assert!(ranges.all(&(6..9), |known| known == 3));
        assert!(!ranges.all(&(6..10), |known| known == 3));
        put(&mut ranges, 4..10, 0);
        put(&mut ranges, 5..5, 1);
        assert_eq!(all(&ranges), [(0..4, 1), (10..20, 1)]);
        assert_eq!((ranges.at(3), ranges.at(4), ranges.at(19)), (1, 0, 1));
    }
    #[test]
    fn facts_are_known_by_address() {
        let (mut ranges, mut model) = (Ranges::new(), [false; 64]);
        let mut state = 1_u64;
        for _ in 0..200 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let (start, len) = ((state >> 33) as usize % 60, (state >> 50) as usize % 4 + 1);
            ranges.change(&(start..start + len), |fact| *fact = true);
            model[start..start + len].fill(true);
            if state.is_multiple_of(3) {
                let known = start / 2..start / 2 + len;
                ranges.change(&known, |fact| *fact = false);
                model[known].fill(false);
            }
            let mut told = [false; 64];
            for part in ranges.those(&(3..50), |fact| fact) {
                let is_new = told[part.clone()].iter().all(|told| !told);
                assert!(is_new, "twice: {part:?}");
                told[part].fill(true);
            }
            assert_eq!(told[3..50], model[3..50]);
            if state.is_multiple_of(7) {
                (ranges, model) = (Ranges::new(), [false; 64]);
            }
        }
    }
}
