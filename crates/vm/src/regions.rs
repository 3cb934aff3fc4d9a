//! Which addresses of this process are regions, whichever space they belong to: [`Claim`].
//!
//! The rule it keeps: no two regions have an address in common, not even one that the program has unmapped out of a region, since what is known of
//! an address (which shard, whether it is gone) is known by the address alone. The kernel does not see to that: it hands out unmapped addresses again.

use std::{
    collections::BTreeMap,
    ops::Range,
    process,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// A number for a space.
pub(crate) fn next_space() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

struct Entry {
    end: usize,
    space: u64,
    read_only: bool,
    /// Whether what the kernel says of these addresses is about the region, and not about what was there before.
    live: bool,
}

/// By first address. Of the standard library: it never allocates when contended, and is asked in a signal handler.
static REGIONS: Mutex<(u32, BTreeMap<usize, Entry>)> = Mutex::new((0, BTreeMap::new()));

fn regions() -> MutexGuard<'static, (u32, BTreeMap<usize, Entry>)> {
    let mut regions = REGIONS.lock().unwrap_or_else(PoisonError::into_inner);
    // A child made by `fork` does not have its parent's regions.
    let process = process::id();
    if regions.0 != process {
        *regions = (process, BTreeMap::new());
    }
    regions
}

/// Claims addresses for a region. `false`: part of them belong to another.
pub(crate) fn claim(addresses: &Range<usize>, space: u64, read_only: bool) -> bool {
    let mut regions = regions();
    let before = regions.1.range(..addresses.end).next_back();
    if before.is_some_and(|(_, entry)| entry.end > addresses.start) {
        return false;
    }
    let entry = Entry {
        end: addresses.end,
        space,
        read_only,
        live: false,
    };
    regions.1.insert(addresses.start, entry);
    true
}

/// From here on [`of_space`] knows the region that begins at `start`.
pub(crate) fn begin(start: usize) {
    if let Some(entry) = regions().1.get_mut(&start) {
        entry.live = true;
    }
}

/// Takes back a [`claim`].
pub(crate) fn give_up(start: usize) {
    regions().1.remove(&start);
}

/// Whether `address` lies in a region that the program may only read.
pub(crate) fn is_read_only(address: usize) -> bool {
    let regions = regions();
    let before = regions.1.range(..=address).next_back();
    before.is_some_and(|(_, entry)| address < entry.end && entry.read_only)
}

/// The parts of `addresses` that lie in regions of a space.
pub(crate) fn of_space(space: u64, addresses: &Range<usize>) -> Vec<Range<usize>> {
    let regions = regions();
    let below = regions.1.range(..addresses.end).rev();
    below
        .take_while(|(_, entry)| entry.end > addresses.start)
        .filter(|(_, entry)| entry.live && entry.space == space)
        .map(|(&start, entry)| start.max(addresses.start)..entry.end.min(addresses.end))
        .collect()
}

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

    /// Takes out what lies in `range`; no range may reach beyond it.
    pub(crate) fn remove(&mut self, range: &Range<usize>) {
        self.0
            .retain(|other| other.end <= range.start || other.start >= range.end);
    }

    /// How many bytes of `range` lie before the first address that is here.
    pub(crate) fn free_bytes(&self, range: &Range<usize>) -> usize {
        let next = self.0.partition_point(|other| other.end <= range.start);
        let end = self.0.get(next).map_or(range.end, |next| next.start);
        end.clamp(range.start, range.end) - range.start
    }

    /// What of `range` is here.
    pub(crate) fn inside(&self, range: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let (start, end) = (range.start, range.end);
        let parts = self
            .0
            .iter()
            .map(move |other| other.start.max(start)..other.end.min(end));
        parts.filter(|part| part.start < part.end)
    }

    /// What of `range` is not here.
    pub(crate) fn outside(&self, range: Range<usize>) -> Vec<Range<usize>> {
        let mut parts = Vec::new();
        let mut at = range.start;
        for other in &self.0 {
            if at < other.start.min(range.end) {
                parts.push(at..other.start.min(range.end));
            }
            at = at.max(other.end);
        }
        if at < range.end {
            parts.push(at..range.end);
        }
        parts
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
            let expected: Vec<usize> = range.filter(|&at| !set[at]).collect();
            assert_eq!(outside, expected, "{ranges:?}");
        }
        let mut ranges = Ranges::default();
        for range in [4..6, 10..12, 20..22] {
            ranges.insert(range);
        }
        ranges.remove(&(9..13));
        assert_eq!(ranges.outside(0..30), [0..4, 6..20, 22..30]);
    }

    #[test]
    fn regions_have_no_address_in_common() {
        // Addresses that no mapping has.
        let base = 1 << 60;
        let space = next_space();
        assert!(claim(&(base..base + 100), space, false));
        assert!(claim(&(base + 200..base + 300), space, true));
        for wrong in [0..1, 99..101, 150..201, 0..400, 299..300] {
            assert!(!claim(
                &(base + wrong.start..base + wrong.end),
                space,
                false
            ));
        }
        assert!(claim(&(base + 100..base + 200), next_space(), false));
        assert!(is_read_only(base + 299) && !is_read_only(base + 300) && !is_read_only(base + 199));
        assert_eq!(of_space(space, &(base..base + 300)), []);
        for at in [0, 100, 200] {
            begin(base + at);
        }
        let parts = of_space(space, &(base + 50..base + 250));
        assert_eq!(parts, [base + 200..base + 250, base + 50..base + 100]);
        for at in [0, 100, 200] {
            give_up(base + at);
        }
        assert_eq!(of_space(space, &(base..base + 300)), []);
    }
}
