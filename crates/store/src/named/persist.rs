//! [`Additions`]: the bytes that a publication adds to those that the servers' disks have.
//!
//! The rule it keeps: the disk of each server has the bytes before the name is bound on any. A
//! region on one server may be written later, in the order of its publications: the server sees to
//! that.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_fabric::{ControlError, ExtentRange, Persistence, Session};

use crate::{
    PublishStoreError,
    names::check_disks,
    place::{SlotSpan, slot_bytes},
    pool::SlotPool,
};

/// Bytes of one request: a slow disk writes them well within a deadline.
const REQUEST_BYTES: u64 = 64 << 20;
/// Ranges of one request: a server takes 65536.
const REQUEST_RANGES: usize = 1 << 15;
/// The longest wait for a publication before, which a server writes after its answer.
const LAST_WRITTEN: Duration = Duration::from_secs(600);

/// Slots that no published map refers to yet.
pub(super) struct Additions {
    is_kept: bool,
    slots: Vec<SlotSpan>,
}

impl Additions {
    /// Makes an empty list, for the servers of `pool`.
    pub(super) fn new(pool: &SlotPool) -> Self {
        let keeps =
            |(_, session): &(usize, Arc<Session>)| session.persistence() != Persistence::Never;
        Self {
            is_kept: pool.servers().iter().any(keeps),
            slots: Vec::new(),
        }
    }

    /// Adds a slot, if a disk is to have it.
    pub(super) fn add(&mut self, slot: SlotSpan) {
        if self.is_kept {
            self.slots.push(slot);
        }
    }

    /// Sends the slots to their servers, to be written to the disks. Waits for all.
    ///
    /// # Errors
    /// The error of a server; or one of the servers that have slots, or the name, has no disk.
    pub(super) fn write(self, pool: &SlotPool, name: &str) -> Result<(), PublishStoreError> {
        if !self.is_kept {
            return Ok(());
        }
        let homes = pool.extents();
        let range = |slot: &SlotSpan| {
            let (server, extent) = homes.get(slot.place.extent as usize).copied().flatten()?;
            let (offset, bytes) = (slot.place.offset, slot_bytes(slot.bytes));
            let range = ExtentRange {
                extent,
                offset,
                bytes,
            };
            Some((server, range))
        };
        let mut ranges: Vec<_> = self.slots.iter().filter_map(range).collect();
        ranges.sort_unstable();
        // The first server has the name, and is asked in any case: it may be writing still.
        let mut sessions: BTreeMap<u8, &Arc<Session>> = BTreeMap::new();
        for server in ranges.iter().map(|(server, _)| *server).chain([0]) {
            sessions.insert(server, pool.session(server));
        }
        let mixed = |source| PublishStoreError::Mixed {
            name: name.to_owned(),
            source,
        };
        check_disks(sessions.values().copied()).map_err(mixed)?;
        // Each of several servers is waited for: the first must not bind the name before the others
        // have all.
        let wait = pool.servers().len() > 1;
        for (server, session) in sessions {
            let its = ranges.iter().filter(|(on, _)| *on == server);
            for request in requests(its.map(|(_, range)| *range)) {
                ask(session, name, request, wait).map_err(|source| PublishStoreError::Persist {
                    name: name.to_owned(),
                    source,
                })?;
            }
        }
        Ok(())
    }
}

/// Joins neighbours among ascending ranges, and divides all into requests: one at least, which
/// waits for the publication before.
fn requests(ranges: impl Iterator<Item = ExtentRange>) -> Vec<Vec<ExtentRange>> {
    let (mut all, mut request, mut left) = (Vec::new(), Vec::new(), REQUEST_BYTES);
    for mut range in ranges {
        while range.bytes > 0 {
            let bytes = range.bytes.min(left);
            match request.last_mut() {
                Some(last) if is_followed_by(last, &range) => last.bytes += bytes,
                _ => request.push(ExtentRange { bytes, ..range }),
            }
            (range.offset, range.bytes) = (range.offset + bytes, range.bytes - bytes);
            left -= bytes;
            if left == 0 || request.len() == REQUEST_RANGES {
                all.push(std::mem::take(&mut request));
                left = REQUEST_BYTES;
            }
        }
    }
    if !request.is_empty() || all.is_empty() {
        all.push(request);
    }
    all
}

fn is_followed_by(range: &ExtentRange, next: &ExtentRange) -> bool {
    (range.extent, range.offset + range.bytes) == (next.extent, next.offset)
}

/// Asks until the server takes the request.
fn ask(
    session: &Session,
    name: &str,
    ranges: Vec<ExtentRange>,
    wait: bool,
) -> Result<(), ControlError> {
    let until = Instant::now() + LAST_WRITTEN;
    while !session.persist(name, ranges.clone(), wait)? {
        if Instant::now() >= until {
            return Err(ControlError::Refused {
                endpoint: session.endpoint().to_string(),
                attempt: format!("write `{name}` to its disk"),
                reason: format!(
                    "its disk has not taken the last publication within {LAST_WRITTEN:?}"
                ),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use farpage_fabric::ExtentId;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn range(extent: u64, offset: u64, bytes: u64) -> ExtentRange {
        let extent = ExtentId(extent);
        ExtentRange {
            extent,
            offset,
            bytes,
        }
    }

    #[test]
    fn neighbours_are_joined_and_requests_are_bounded() {
        let slots = [(1, 0, 64), (1, 64, 64), (1, 192, 64), (2, 256, 64)];
        let joined = requests(slots.map(|(id, at, len)| range(id, at, len)).into_iter());
        assert_eq!(
            joined,
            [[range(1, 0, 128), range(1, 192, 64), range(2, 256, 64)]]
        );
        let large = requests([range(1, MIB, 100 * MIB), range(1, 101 * MIB, MIB)].into_iter());
        let expected = [
            vec![range(1, MIB, 64 * MIB)],
            vec![range(1, 65 * MIB, 37 * MIB)],
        ];
        assert_eq!(large, expected);
        let many = (0..REQUEST_RANGES as u64 + 1).map(|i| range(1, i * 128, 64));
        let lengths: Vec<_> = requests(many).iter().map(Vec::len).collect();
        assert_eq!(lengths, [REQUEST_RANGES, 1]);
        assert_eq!(requests([].into_iter()), [vec![]]);
    }
}
