//! [`Bounce`]: registered memory that operations pass through, as a ring.
//!
//! The rule it keeps: places never overlap, and when all are given back there is room for any
//! operation that fits at all.

use std::ops::Range;

/// Operations start at cache lines, so that no two share one.
const ALIGN: usize = 64;

/// Bytes of the bounce memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) bytes: Range<usize>,
    /// What goes back with it: its own length and what was skipped to find it.
    cost: usize,
}

/// The bounce memory as a ring: operations end in their order, so it is given back in the order
/// that it was taken.
#[derive(Debug)]
pub(super) struct Bounce {
    capacity: usize,
    next: usize,
    used: usize,
}

impl Bounce {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            capacity,
            next: 0,
            used: 0,
        }
    }

    pub(super) fn take(&mut self, len: usize) -> Option<Place> {
        let rounded = len.next_multiple_of(ALIGN);
        let skipped = match self.next + rounded > self.capacity {
            true => self.capacity - self.next,
            false => 0,
        };
        let cost = skipped + rounded;
        if self.used + cost > self.capacity {
            // With nothing in it, the place does not matter.
            if self.used == 0 && self.next > 0 {
                self.next = 0;
                return self.take(len);
            }
            return None;
        }
        let start = (self.next + skipped) % self.capacity;
        self.next = start + rounded;
        self.used += cost;
        Some(Place {
            bytes: start..start + len,
            cost,
        })
    }

    pub(super) fn give_back(&mut self, place: &Place) {
        self.used -= place.cost;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use farpage_wire::MAX_OP_BYTES;
    use proptest::prelude::*;

    use super::*;

    const CAPACITY: usize = 2 * MAX_OP_BYTES as usize;

    proptest! {
        #[test]
        fn places_of_the_ring_never_overlap_and_an_empty_ring_has_room_for_any_operation(
            lens in prop::collection::vec(1..=MAX_OP_BYTES as usize, 1..200), keep in 0..12usize,
        ) {
            let mut bounce = Bounce::new(CAPACITY);
            let mut out: VecDeque<Place> = VecDeque::new();
            for len in lens {
                let place = loop {
                    if let Some(place) = bounce.take(len) {
                        break place;
                    }
                    let oldest = out.pop_front().expect("an empty ring has room");
                    bounce.give_back(&oldest);
                };
                prop_assert!(place.bytes.len() == len && place.bytes.end <= CAPACITY);
                for other in &out {
                    prop_assert!(
                        place.bytes.end <= other.bytes.start || other.bytes.end <= place.bytes.start,
                        "{place:?} {other:?}"
                    );
                }
                out.push_back(place);
                while out.len() > keep {
                    bounce.give_back(&out.pop_front().expect("not empty"));
                }
            }
        }
    }
}
