//! [`DamagedRanges`]: ranges of extents in parity sets whose bytes fills found to be damaged.
//!
//! The rule it keeps: nothing here allocates, since signal handlers note ranges. A range that is
//! forgotten does no harm: the fill that finds it again notes it again.

use farpage_fabric::ExtentId;

/// Number of ranges that are kept: more than fills find between two repairs.
const RANGES_MAX: usize = 64;

/// Range of an extent whose bytes are damaged.
#[derive(Clone, Copy)]
pub(super) struct DamagedRange {
    pub(super) server: u8,
    pub(super) id: ExtentId,
    pub(super) offset: u64,
    pub(super) bytes: u32,
}

/// The ranges that were found last.
#[derive(Clone, Copy)]
pub(super) struct DamagedRanges {
    ranges: [Option<DamagedRange>; RANGES_MAX],
    next: usize,
}

impl Default for DamagedRanges {
    fn default() -> Self {
        Self {
            ranges: [None; RANGES_MAX],
            next: 0,
        }
    }
}

impl DamagedRanges {
    pub(super) fn note(&mut self, range: DamagedRange) {
        self.ranges[self.next] = Some(range);
        self.next = (self.next + 1) % RANGES_MAX;
    }

    /// Returns offset and length of each range of an extent.
    pub(super) fn of(&self, server: u8, id: ExtentId) -> Vec<(u64, u64)> {
        let ranges = self.ranges.iter().flatten();
        let ranges = ranges.filter(|it| (it.server, it.id) == (server, id));
        ranges.map(|it| (it.offset, u64::from(it.bytes))).collect()
    }
}
