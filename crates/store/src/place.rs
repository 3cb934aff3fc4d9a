//! [`SlotPlace`] and [`SlotSpan`]: the position of a slot, and its length.
//!
//! The rule it keeps: a place fits one word, so that page entries stay short.

/// Unit of offsets in bytes; slots are multiples of it.
pub(crate) const PLACE_UNIT: u64 = 64;

/// Start of a slot. `server` and `extent` are indices into the tables of the region's pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct SlotPlace {
    pub(crate) server: u8,
    pub(crate) extent: u32,
    pub(crate) offset: u64,
}

impl SlotPlace {
    pub(crate) const EXTENTS_MAX: u32 = 1 << 24;
    pub(crate) const OFFSET_MAX: u64 = (u32::MAX as u64) * PLACE_UNIT;

    pub(crate) fn pack(self) -> u64 {
        assert!(
            self.extent < Self::EXTENTS_MAX
                && self.offset <= Self::OFFSET_MAX
                && self.offset.is_multiple_of(PLACE_UNIT),
            "{self:?} has no encoding"
        );
        (u64::from(self.server) << 56) | (u64::from(self.extent) << 32) | (self.offset / PLACE_UNIT)
    }

    pub(crate) fn unpack(word: u64) -> Self {
        Self {
            server: (word >> 56) as u8,
            extent: (word >> 32) as u32 & (Self::EXTENTS_MAX - 1),
            offset: (word & u64::from(u32::MAX)) * PLACE_UNIT,
        }
    }
}

/// Whole slot: its start, and the length that it was allocated for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotSpan {
    pub(crate) place: SlotPlace,
    pub(crate) bytes: u32,
}

impl SlotSpan {
    /// True if `next` lies directly behind this slot.
    pub(crate) fn is_followed_by(&self, next: &Self) -> bool {
        let (a, b) = (self.place, next.place);
        let end = a.offset + slot_bytes(self.bytes);
        (a.server, a.extent, end) == (b.server, b.extent, b.offset)
    }
}

/// Returns the bytes that a slot for `bytes` bytes takes.
pub(crate) fn slot_bytes(bytes: u32) -> u64 {
    u64::from(bytes).max(1).next_multiple_of(PLACE_UNIT)
}
