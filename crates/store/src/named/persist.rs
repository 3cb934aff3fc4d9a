//! [`Additions`]: the bytes that a publication adds to those that the servers' disks have.
//!
//! The rule it keeps: the disk of each server has the bytes before the name is bound on any. That
//! includes older pages of a copy that was made anew, or whose server has missed a publication: see
//! [`OnDisk`]. A region on one server may be written later, in the order of its publications: the
//! server sees to that.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_fabric::{ControlError, ExtentRange, Persistence, Session, log::later};

use crate::{
    PublishStoreError,
    groups::{ExtentGroup, Member},
    names::check_disks,
    on_disk::OnDisk,
    place::{SlotPlace, SlotSpan, slot_bytes},
    pool::SlotPool,
};

/// Bytes of one request: a disk of 50 MB/s writes them within a second, far within a deadline.
const REQUEST_BYTES: u64 = 16 << 20;
/// Ranges of one request: each may be a write of its own, and a slow disk does 3000 a second.
const REQUEST_RANGES: usize = 512;
/// The longest wait for a publication before, which a server writes after its answer.
const LAST_WRITTEN: Duration = Duration::from_secs(600);

/// Slots that a map refers to, and that some disk lacks.
pub(super) struct Additions<'a> {
    on_disk: &'a OnDisk,
    is_kept: bool,
    /// True if a copy is not on its server's disk, which then lacks published slots, too.
    any_lacks: bool,
    rows: Vec<Row>,
}

/// Slots of an extent that lie in a row.
struct Row {
    start: SlotPlace,
    bytes: u64,
    /// True if no published map refers to the slots yet.
    is_new: bool,
}

impl<'a> Additions<'a> {
    /// Makes an empty list, for the servers of `pool`, whose members are
    /// [fixed](SlotPool::fix_members).
    pub(super) fn new(pool: &SlotPool, on_disk: &'a OnDisk) -> Self {
        let keeps =
            |(_, session): &(usize, Arc<Session>)| session.persistence() != Persistence::Never;
        let is_kept = pool.servers().iter().any(keeps);
        Self {
            on_disk,
            is_kept,
            any_lacks: is_kept
                && pool.has_copies()
                && pool.good_copies().any(|copy| !on_disk.has(copy)),
            rows: Vec::new(),
        }
    }

    /// Adds a slot, if a disk is to have it. `is_new`: no published map refers to it yet.
    pub(super) fn add(&mut self, slot: SlotSpan, is_new: bool) {
        if !self.is_kept || !(is_new || self.any_lacks) {
            return;
        }
        let (place, bytes) = (slot.place, slot_bytes(slot.bytes));
        match self.rows.last_mut() {
            Some(row) if row.is_new == is_new && row.is_followed_by(place) => row.bytes += bytes,
            _ => self.rows.push(Row {
                start: place,
                bytes,
                is_new,
            }),
        }
    }

    /// Sends the slots to those of their servers that are in `takers`, to be written to the disks.
    /// Waits for all. Of a pool with copies, takes servers out of `takers` whose disk does not take
    /// the slots: they have no part in the publication.
    ///
    /// # Errors
    /// The error of a server; or one of the servers that have slots, or the name, has no disk.
    pub(super) fn write(
        self,
        pool: &SlotPool,
        name: &str,
        takers: &mut Vec<u8>,
    ) -> Result<(), PublishStoreError> {
        if !self.is_kept {
            return Ok(());
        }
        let ranges_of = |row: &Row| {
            let group = pool.group(row.start);
            let (offset, bytes, is_new) = (row.start.offset, row.bytes, row.is_new);
            let members = group.iter().flat_map(ExtentGroup::good);
            let lack = |(_, it): &(u8, Member)| is_new || !self.on_disk.has((it.server, it.id));
            let members: Vec<_> = members.filter(lack).collect();
            members.into_iter().map(move |(_, member)| {
                let range = ExtentRange {
                    extent: member.id,
                    offset,
                    bytes,
                };
                (member.server, range)
            })
        };
        let mut ranges: Vec<_> = self.rows.iter().flat_map(ranges_of).collect();
        ranges.retain(|(server, _)| takers.contains(server));
        ranges.sort_unstable();
        // The first server has the name, and is asked in any case: it may be writing still.
        let mut sessions: BTreeMap<u8, &Arc<Session>> = BTreeMap::new();
        let asked = takers.first().copied();
        for server in ranges.iter().map(|(server, _)| *server).chain(asked) {
            sessions.insert(server, pool.session(server));
        }
        let mixed = |source| PublishStoreError::Mixed {
            name: name.to_owned(),
            source,
        };
        if !check_disks(sessions.values().copied()).map_err(mixed)? {
            // Servers that were added have disks, and nothing of the region.
            return Ok(());
        }
        // Each of several servers is waited for: the first must not bind the name before the others
        // have all.
        let wait = pool.servers().len() > 1;
        for (server, session) in sessions {
            let its = ranges.iter().filter(|(on, _)| *on == server);
            let mut requests = requests(its.map(|(_, range)| *range)).into_iter();
            match requests.try_for_each(|request| ask(session, name, request, wait)) {
                Ok(()) => {}
                Err(error) if pool.has_copies() => {
                    takers.retain(|taker| *taker != server);
                    let (endpoint, name) = (session.endpoint().clone(), name.to_owned());
                    later(move || {
                        tracing::warn!(%endpoint, name, %error, "the server has no part in a publication");
                    });
                }
                Err(source) => {
                    return Err(PublishStoreError::Persist {
                        name: name.to_owned(),
                        source,
                    });
                }
            }
        }
        let copies = pool.good_copies();
        (self.on_disk).note(copies.filter(|(server, _)| takers.contains(server)));
        Ok(())
    }
}

impl Row {
    fn is_followed_by(&self, next: SlotPlace) -> bool {
        let Self { start, bytes, .. } = self;
        let end = (start.server, start.extent, start.offset + bytes);
        end == (next.server, next.extent, next.offset)
    }
}

/// Joins neighbours among ascending ranges, and divides all into requests: one at least, which
/// waits for the publication before.
fn requests(ranges: impl Iterator<Item = ExtentRange>) -> Vec<Vec<ExtentRange>> {
    let (mut all, mut left) = (Vec::new(), REQUEST_BYTES);
    let mut request: Vec<ExtentRange> = Vec::new();
    for mut range in ranges {
        while range.bytes > 0 {
            let bytes = range.bytes.min(left);
            match request.last_mut() {
                Some(last) if last.is_followed_by(&range) => last.bytes += bytes,
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
        let large = requests([range(1, MIB, 19 * MIB), range(1, 20 * MIB, MIB)].into_iter());
        let expected = [
            vec![range(1, MIB, 16 * MIB)],
            vec![range(1, 17 * MIB, 4 * MIB)],
        ];
        assert_eq!(large, expected);
        let many = (0..REQUEST_RANGES as u64 + 1).map(|i| range(1, i * 128, 64));
        let lengths: Vec<_> = requests(many).iter().map(Vec::len).collect();
        assert_eq!(lengths, [REQUEST_RANGES, 1]);
        assert_eq!(requests([].into_iter()), [vec![]]);
    }
}
