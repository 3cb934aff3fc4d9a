//! [`Bounce`]: registered memory that operations pass through, as a ring.
//!
//! The rule it keeps: segments never overlap. When all have been given back there is room for any
//! operation that is no longer than the ring.

use std::ops::Range;

/// Alignment of operations: each starts at a cache line, so that no two share one.
const ALIGN: usize = 64;

/// The bytes of one operation in the bounce memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) bytes: Range<usize>,
    /// Bytes that go back with it: its own, and those that were skipped at the end of the ring.
    cost: usize,
}

/// The bounce memory as a ring. Operations end in the order of posting, so segments are given back
/// in the order in which they were taken.
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

    pub(super) fn take(&mut self, len: usize) -> Option<Segment> {
        let rounded = len.next_multiple_of(ALIGN);
        let skipped = match self.next + rounded > self.capacity {
            true => self.capacity - self.next,
            false => 0,
        };
        let cost = skipped + rounded;
        if self.used + cost > self.capacity {
            // The ring is empty: it may as well begin at 0.
            if self.used == 0 && self.next > 0 {
                self.next = 0;
                return self.take(len);
            }
            return None;
        }
        let start = (self.next + skipped) % self.capacity;
        self.next = start + rounded;
        self.used += cost;
        Some(Segment {
            bytes: start..start + len,
            cost,
        })
    }

    pub(super) fn give_back(&mut self, segment: &Segment) {
        self.used -= segment.cost;
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
            let mut out: VecDeque<Segment> = VecDeque::new();
            for len in lens {
                let segment = loop {
                    if let Some(segment) = bounce.take(len) {
                        break segment;
                    }
                    let oldest = out.pop_front().expect("an empty ring has room");
                    bounce.give_back(&oldest);
                };
                prop_assert!(segment.bytes.len() == len && segment.bytes.end <= CAPACITY);
                for other in &out {
                    prop_assert!(
                        segment.bytes.end <= other.bytes.start || other.bytes.end <= segment.bytes.start,
                        "{segment:?} {other:?}"
                    );
                }
                out.push_back(segment);
                while out.len() > keep {
                    bounce.give_back(&out.pop_front().expect("not empty"));
                }
            }
        }
    }
}
