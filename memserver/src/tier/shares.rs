//! [`Books`]: the memory of each share, and the choice of the chunk that leaves next.
//!
//! The rule it keeps: a chunk leaves the share that has the most memory for its weight, a share
//! being all that the clients of one [`Origin`] are lent. So a client that goes through much pushes
//! out its own chunks, and a share within the part that its weight gives keeps them, however many
//! sessions others open. In a share, the session with the most chunks gives one up.

use std::{
    cmp::{Ordering, Reverse},
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Weak},
};

use farpage_fabric::host::Origin;
use farpage_wire::{ExtentId, SessionId, ShareStat};

use super::{
    chunk::{CHUNK_BYTES, SEGMENT_CHUNKS},
    extent::TieredExtent,
};

/// Memory per lent chunk: its entry, a free slot's number, and the kernel's page table of 16 pages
/// of 8 bytes.
pub(super) const TABLE_BYTES_PER_CHUNK: u64 = 176;

/// Weight of a share that was given none.
const WEIGHT: u32 = 1;
/// Number of shares that `stat` shows, the largest: there may be as many as sessions.
const SHOWN_MOST: usize = 64;

/// Lessee of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tenant {
    pub(crate) session: SessionId,
    /// Origin of the session; `None` if no session leases the extent.
    pub(crate) origin: Option<Origin>,
}

impl Tenant {
    /// Tenant of extents that only names or readers keep.
    pub(crate) const NOBODY: Self = Self {
        session: SessionId(0),
        origin: None,
    };
}

/// Counts of memory: in all, by share and by session.
#[derive(Default)]
pub(super) struct Books {
    pub(super) held_bytes: u64,
    /// Memory that tables wait for. Fetches of chunks wait behind them.
    pub(super) wanted_bytes: u64,
    /// Part of `held_bytes` for tables, words and marks, which never leave memory.
    pub(super) table_bytes: u64,
    /// Slots that lent chunks may need.
    pub(super) slots_kept: u64,
    /// Chunks of discarded extents that are still being moved, and give their slots and tables back
    /// at the end. Below zero for a moment if a chunk arrives before it is counted.
    pub(super) orphans: i64,
    pub(super) extents: HashMap<ExtentId, Entry>,
    shares: HashMap<Option<Origin>, Share>,
    /// Weights of the origins whose weight is not [`WEIGHT`].
    weights: HashMap<Origin, u32>,
    pub(super) stops: bool,
}

pub(super) struct Entry {
    pub(super) extent: Weak<TieredExtent>,
    pub(super) tenant: Tenant,
    /// Chunks that are hot, or about to be, or were [stray](super::Tier::punch_strays) last time.
    pub(super) chunks: u64,
    pub(super) strays: u64,
}

/// Memory that the clients of one origin are lent.
struct Share {
    weight: u32,
    chunks: u64,
    sessions: HashMap<SessionId, Part>,
}

/// Memory that one session is lent.
#[derive(Default)]
struct Part {
    chunks: u64,
    extents: Vec<ExtentId>,
    /// The clock's hand: an index into `extents`, and a segment of that extent.
    hand: (usize, usize),
}

impl Books {
    pub(super) fn new(held_bytes: u64, weights: HashMap<Origin, u32>) -> Self {
        Self {
            held_bytes,
            weights,
            ..Self::default()
        }
    }

    /// Gives back the slots and tables of `chunks` chunks, and `own_bytes` for words and marks.
    pub(super) fn give_table_back(&mut self, chunks: u64, own_bytes: u64) {
        let bytes = chunks * TABLE_BYTES_PER_CHUNK + own_bytes;
        self.held_bytes -= bytes;
        self.table_bytes -= bytes;
        self.slots_kept -= chunks;
    }

    /// Adds `change` to the hot chunks of extent `id`.
    pub(super) fn count(&mut self, id: ExtentId, change: i64) {
        if let Some(entry) = self.extents.get_mut(&id) {
            entry.chunks = entry.chunks.wrapping_add_signed(change);
            let tenant = entry.tenant;
            let (share, part) = of(&mut self.shares, tenant);
            *share = share.wrapping_add_signed(change);
            part.chunks = part.chunks.wrapping_add_signed(change);
        }
    }

    /// Puts an extent into the share of its tenant.
    pub(super) fn join_share(&mut self, id: ExtentId, entry: Entry) {
        let Tenant { session, origin } = entry.tenant;
        let weight = origin.and_then(|origin| self.weights.get(&origin));
        let share = self.shares.entry(origin).or_insert_with(|| Share {
            weight: *weight.unwrap_or(&WEIGHT),
            chunks: 0,
            sessions: HashMap::new(),
        });
        share.chunks += entry.chunks;
        let part = share.sessions.entry(session).or_default();
        part.chunks += entry.chunks;
        part.extents.push(id);
        self.extents.insert(id, entry);
    }

    /// Takes an extent out of its share. A share without extents is removed.
    pub(super) fn leave_share(&mut self, id: ExtentId) -> Option<Entry> {
        let entry = self.extents.remove(&id)?;
        let Tenant { session, origin } = entry.tenant;
        let (chunks, part) = of(&mut self.shares, entry.tenant);
        *chunks -= entry.chunks;
        part.chunks -= entry.chunks;
        part.extents.retain(|other| *other != id);
        if part.extents.is_empty() {
            let share = self.shares.get_mut(&origin).expect("looked up above");
            share.sessions.remove(&session);
            if share.sessions.is_empty() {
                self.shares.remove(&origin);
            }
        }
        Some(entry)
    }

    /// Counts the chunks in memory, of all shares.
    pub(super) fn chunks(&self) -> u64 {
        self.shares.values().map(|share| share.chunks).sum()
    }

    /// Lists `SHOWN_MOST` shares at most, the largest first.
    pub(super) fn stat(&self) -> Vec<ShareStat> {
        let mut shares: Vec<_> = self.shares.iter().collect();
        shares.sort_by_key(|(_, share)| Reverse(share.chunks));
        let shown = shares.into_iter().take(SHOWN_MOST);
        shown
            .map(|(origin, share)| ShareStat {
                of: name_of(*origin),
                weight: share.weight,
                hot_bytes: share.chunks * CHUNK_BYTES,
                sessions: share.sessions.len() as u64,
            })
            .collect()
    }

    /// Owns a chunk of the share that has the most for its weight, and there of the session that
    /// has the most. Takes one that was not used for a turn of the clock, or any if all are used
    /// all the time. If none can leave, a chunk of the next session or share is taken.
    pub(super) fn victim(&mut self) -> Option<(Arc<TieredExtent>, usize)> {
        let largest = *self.shares.iter().max_by(by_weight)?.0;
        let found = self.victim_of(largest);
        if found.is_some() {
            return found;
        }
        // Rare: all chunks of the largest share are held, being moved, or stray.
        let mut shares: Vec<_> = self.shares.iter().collect();
        shares.sort_by(|one, other| by_weight(other, one));
        let shares: Vec<_> = shares.into_iter().map(|(origin, _)| *origin).collect();
        (shares.into_iter()).find_map(|origin| self.victim_of(origin))
    }

    fn victim_of(&mut self, origin: Option<Origin>) -> Option<(Arc<TieredExtent>, usize)> {
        let Self {
            shares, extents, ..
        } = self;
        let mut parts: Vec<_> = shares.get_mut(&origin)?.sessions.values_mut().collect();
        parts.sort_by_key(|part| Reverse(part.chunks));
        parts.into_iter().find_map(|part| part.victim(extents))
    }

    /// Moves the clock's hand on if it is still at the segment of a chunk that could not be stored.
    /// The others there are likely to fail as well.
    pub(super) fn pass_by(&mut self, id: ExtentId, chunk: usize) {
        let Some(entry) = self.extents.get(&id) else {
            return;
        };
        let (_, Part { extents, hand, .. }) = of(&mut self.shares, entry.tenant);
        let segment = chunk / SEGMENT_CHUNKS;
        if extents.get(hand.0) == Some(&id) && hand.1 == segment {
            hand.1 += 1;
        }
    }
}

impl Part {
    fn victim(&mut self, known: &HashMap<ExtentId, Entry>) -> Option<(Arc<TieredExtent>, usize)> {
        let Self { extents, hand, .. } = self;
        // In the first whole turn all may be young, in the second those that were used meanwhile. A
        // client can claim that all are used, all the time: then any leaves.
        let mut turns = 0;
        while turns <= 2 {
            let (at, segment) = *hand;
            let Some(id) = extents.get(at) else {
                *hand = (0, 0);
                turns += 1;
                continue;
            };
            if let Some(extent) = known[id].extent.upgrade() {
                for segment in segment..extent.segments() {
                    if let Some(chunk) = extent.take_cold(segment, turns == 2) {
                        *hand = (at, segment);
                        return Some((extent, chunk));
                    }
                }
            }
            *hand = (at + 1, 0);
        }
        None
    }
}

/// Returns the chunk count of a tenant's share, and the tenant's own part.
fn of(
    shares: &mut HashMap<Option<Origin>, Share>,
    Tenant { session, origin }: Tenant,
) -> (&mut u64, &mut Part) {
    let share = shares.get_mut(&origin).expect("an extent has a share");
    let part = share.sessions.get_mut(&session);
    (&mut share.chunks, part.expect("and its session a part"))
}

type Known<'a> = (&'a Option<Origin>, &'a Share);

/// Compares two shares by their memory for their weight.
fn by_weight(one: &Known<'_>, other: &Known<'_>) -> Ordering {
    let over = |share: &Share, weight: u32| share.chunks * u64::from(weight);
    over(one.1, other.1.weight).cmp(&over(other.1, one.1.weight))
}

/// Returns the name of an origin as an operator writes it.
fn name_of(origin: Option<Origin>) -> String {
    match origin {
        None => "names that nobody has open".to_owned(),
        Some(Origin::User(user)) => format!("user:{user}"),
        Some(Origin::Address(address @ IpAddr::V4(_))) => address.to_string(),
        Some(Origin::Address(network @ IpAddr::V6(_))) => format!("{network}/64"),
        Some(Origin::Unknown) => "unknown".to_owned(),
    }
}
