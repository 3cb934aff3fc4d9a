//! Sets of addresses: [`Ranges`].

use std::ops::Range;

/// Addresses, as ranges in order that neither overlap nor touch.
#[derive(Debug, Default)]
pub(crate) struct Ranges(Vec<Range<usize>>);

impl Ranges {
    pub(crate) fn insert(&mut self, mut range: Range<usize>) {
        let first = self.0.partition_point(|other| other.end < range.start);
        let behind = self.0.partition_point(|other| other.start <= range.end);
        if first < behind {
            range.start = range.start.min(self.0[first].start);
            range.end = range.end.max(self.0[behind - 1].end);
        }
        self.0.splice(first..behind, [range]);
    }

    /// Takes out the addresses in `range`.
    pub(crate) fn remove(&mut self, range: &Range<usize>) {
        let first = self.0.partition_point(|other| other.end <= range.start);
        let behind = self.0.partition_point(|other| other.start < range.end);
        if first >= behind {
            return;
        }
        let before = self.0[first].start..range.start;
        let after = range.end..self.0[behind - 1].end;
        let left = [before, after].into_iter().filter(|part| !part.is_empty());
        self.0.splice(first..behind, left);
    }

    /// Returns the bytes of `range` before the first address that is in the set.
    pub(crate) fn free_bytes(&self, range: &Range<usize>) -> usize {
        let next = self.0.partition_point(|other| other.end <= range.start);
        let end = self.0.get(next).map_or(range.end, |next| next.start);
        end.clamp(range.start, range.end) - range.start
    }

    /// Returns the parts of `range` that are in the set.
    pub(crate) fn inside(&self, range: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let (start, end) = (range.start, range.end);
        let parts = self.touched(range).iter();
        parts.map(move |other| other.start.max(start)..other.end.min(end))
    }

    /// Returns the parts of `range` that are not in the set.
    pub(crate) fn outside(&self, range: Range<usize>) -> Vec<Range<usize>> {
        let mut parts = Vec::new();
        let mut at = range.start;
        for other in self.touched(&range) {
            if at < other.start {
                parts.push(at..other.start);
            }
            at = other.end;
        }
        if at < range.end {
            parts.push(at..range.end);
        }
        parts
    }

    /// Returns the ranges of the set of which an address is in `range`.
    fn touched(&self, range: &Range<usize>) -> &[Range<usize>] {
        let first = self.0.partition_point(|other| other.end <= range.start);
        let behind = self.0.partition_point(|other| other.start < range.end);
        &self.0[first..behind.max(first)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_as_a_set_of_addresses() {
        let mut random = 1u64;
        let mut below = |limit: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random % limit) as usize
        };
        for _ in 0..200 {
            let (mut ranges, mut set) = (Ranges::default(), [false; 64]);
            for _ in 0..below(12) {
                let start = below(60);
                let range = start..start + 1 + below(4);
                set[range.clone()].fill(true);
                ranges.insert(range);
            }
            for pair in ranges.0.windows(2) {
                assert!(pair[0].end < pair[1].start, "{ranges:?}");
            }
            let start = below(60);
            let range = start..start + 1 + below(4);
            let free = range.clone().take_while(|&at| !set[at]).count();
            assert_eq!(ranges.free_bytes(&range), free, "{ranges:?} {range:?}");
            let outside: Vec<usize> = ranges
                .outside(range.clone())
                .into_iter()
                .flatten()
                .collect();
            let expected: Vec<usize> = range.clone().filter(|&at| !set[at]).collect();
            assert_eq!(outside, expected, "{ranges:?}");
            let inside: Vec<usize> = ranges.inside(&range).flatten().collect();
            let expected: Vec<usize> = range.clone().filter(|&at| set[at]).collect();
            assert_eq!(inside, expected, "{ranges:?}");
            let before = format!("{ranges:?}");
            ranges.remove(&range);
            set[range.clone()].fill(false);
            let outside: Vec<usize> = ranges.outside(0..64).into_iter().flatten().collect();
            let expected: Vec<usize> = (0..64).filter(|&at| !set[at]).collect();
            assert_eq!(outside, expected, "{before} without {range:?}");
        }
        let mut ranges = Ranges::default();
        for range in [4..6, 10..12, 20..22] {
            ranges.insert(range);
        }
        ranges.remove(&(9..13));
        assert_eq!(ranges.outside(0..30), [0..4, 6..20, 22..30]);
    }
}
