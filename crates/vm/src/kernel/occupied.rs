//! Addresses of this process that are regions, whichever space the regions belong to.
//!
//! The rule it keeps: no two regions have an address in common, not even one that the program has
//! unmapped out of a region. The shard of an address, and its loss, are known by the address alone.
//! The kernel does not see to that: it hands out unmapped addresses again.

use std::{
    collections::BTreeMap,
    ops::Range,
    process,
    sync::atomic::{AtomicU64, Ordering},
};

use farpage_signals::{Mutex, MutexGuard};

/// Returns a number for a new space.
pub(crate) fn next_space() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

struct OccupiedRegion {
    end: usize,
    space: u64,
    read_only: bool,
    /// True if the kernel's messages on these addresses are about the region, and not about what
    /// was there before.
    live: bool,
}

/// Process and its regions by first address. The lock is taken in a signal handler, too.
static REGIONS: Mutex<(u32, BTreeMap<usize, OccupiedRegion>)> = Mutex::new((0, BTreeMap::new()));

/// Begins a child made by `fork`: a thread that only its parent has may have locked the regions.
///
/// # Safety
/// The calling thread is the only one of this process, and outside of this module.
pub(crate) unsafe fn begin_child() {
    // SAFETY: the caller's promise.
    unsafe { REGIONS.renew((0, BTreeMap::new())) };
}

fn regions() -> MutexGuard<'static, (u32, BTreeMap<usize, OccupiedRegion>)> {
    let mut regions = REGIONS.lock();
    // A child made by `fork` does not have its parent's regions.
    let process = process::id();
    if regions.0 != process {
        *regions = (process, BTreeMap::new());
    }
    regions
}

/// Takes addresses for a region. `false`: part of them belong to another region.
pub(crate) fn occupy(addresses: &Range<usize>, space: u64, read_only: bool) -> bool {
    let mut regions = regions();
    let before = regions.1.range(..addresses.end).next_back();
    if before.is_some_and(|(_, entry)| entry.end > addresses.start) {
        return false;
    }
    let entry = OccupiedRegion {
        end: addresses.end,
        space,
        read_only,
        live: false,
    };
    regions.1.insert(addresses.start, entry);
    true
}

/// Makes the region that begins at `start` known to [`of_space`] from here on.
pub(crate) fn begin(start: usize) {
    if let Some(entry) = regions().1.get_mut(&start) {
        entry.live = true;
    }
}

/// Takes back an [`occupy`].
pub(crate) fn give_up(start: usize) {
    regions().1.remove(&start);
}

/// True if `address` lies in a region that the program may only read.
pub(crate) fn is_read_only(address: usize) -> bool {
    let regions = regions();
    let before = regions.1.range(..=address).next_back();
    before.is_some_and(|(_, entry)| address < entry.end && entry.read_only)
}

/// Returns the parts of `addresses` that lie in regions of a space.
pub(crate) fn of_space(space: u64, addresses: &Range<usize>) -> Vec<Range<usize>> {
    let regions = regions();
    let below = regions.1.range(..addresses.end).rev();
    below
        .take_while(|(_, entry)| entry.end > addresses.start)
        .filter(|(_, entry)| entry.live && entry.space == space)
        .map(|(&start, entry)| start.max(addresses.start)..entry.end.min(addresses.end))
        .collect()
}

#[cfg(test)]
mod tests {
    use farpage_testkit::passes_in_child;

    use super::*;

    #[test]
    fn a_child_made_while_regions_are_locked_has_regions_of_its_own() {
        let space = next_space();
        let locked = regions();
        let passes = passes_in_child(|| {
            // SAFETY: the only thread, and the lock is its parent's.
            unsafe { begin_child() };
            occupy(&(1 << 60..2 << 60), space, false)
        });
        drop(locked);
        assert!(passes);
    }

    #[test]
    fn regions_have_no_address_in_common() {
        // Addresses that no mapping has.
        let base = 1 << 60;
        let space = next_space();
        assert!(occupy(&(base..base + 100), space, false));
        assert!(occupy(&(base + 200..base + 300), space, true));
        for wrong in [0..1, 99..101, 150..201, 0..400, 299..300] {
            assert!(!occupy(
                &(base + wrong.start..base + wrong.end),
                space,
                false
            ));
        }
        assert!(occupy(&(base + 100..base + 200), next_space(), false));
        assert!(is_read_only(base + 299) && !is_read_only(base + 300) && !is_read_only(base + 199));
        assert!(of_space(space, &(base..base + 300)).is_empty());
        for at in [0, 100, 200] {
            begin(base + at);
        }
        let parts = of_space(space, &(base + 50..base + 250));
        assert_eq!(parts, [base + 200..base + 250, base + 50..base + 100]);
        for at in [0, 100, 200] {
            give_up(base + at);
        }
        assert!(of_space(space, &(base..base + 300)).is_empty());
    }
}
