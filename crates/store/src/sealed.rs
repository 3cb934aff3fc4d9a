//! [`SealedGroup`]: a group of extents out of which one member is replaced.
//!
//! The rule it keeps: a member is replaced as the head of [`repair`](crate::repair) says. The
//! choice of the groups, and the repeats, are left to that.

use std::{cmp::Reverse, collections::HashMap, sync::Arc, time::Duration};

use farpage_fabric::{AllocError, ExtentId, log::later};

use crate::{
    Cluster,
    groups::{ExtentGroup, Member, MemberState, SetView},
    mover::Mover,
    pool::SlotPool,
};

/// A sealed group, whose copy is to be made.
pub(crate) struct SealedGroup {
    pub(crate) pool: Arc<SlotPool>,
    pub(crate) index: u32,
    plan: CopyPlan,
}

/// Preparation of a copy.
pub(crate) struct CopyPlan {
    /// The group that the copy was prepared for. Boxed: results that carry this plan stay small.
    group: Box<ExtentGroup>,
    /// Position of the copy.
    at: u8,
    /// Member that is replaced.
    lost: Option<Member>,
    /// Server and extent that were granted for the copy. `None`: the stale member's server has room
    /// only for one of both, so that the stale one goes back first.
    target: Option<(u8, ExtentId)>,
    /// True if a WRITE may still land in the target.
    is_doubtful: bool,
}

/// Outcome of one repair.
pub(crate) enum Repair {
    Done,
    /// Writes to the group have not ended.
    Waits,
    /// A server that is needed is silent: it answers again, or is given up soon.
    Silent,
    /// No server has room for the copy. Holds the last refusal; `None` if there is no server to
    /// ask.
    NoRoom(Option<AllocError>),
    /// A server failed on the way. Holds its error.
    Failed(String),
}

/// Reason why no server granted an extent.
enum NoExtent {
    /// A call failed, so that nobody knows if there is room. Holds its error.
    Failed(String),
    /// A server that may have room is silent: it answers again, or is given up soon.
    Silent,
    /// No server has room. Holds the last refusal; `None` if there is no server to ask.
    Full(Option<AllocError>),
}

/// Servers that refused memory in this turn, by port, each with the fewest bytes it refused.
pub(crate) type Refusals = HashMap<usize, (u64, AllocError)>;

impl CopyPlan {
    /// Prepares the first copy that a group lacks, or whose server it is to leave.
    ///
    /// # Errors
    /// The reason why nothing can be done, or nothing needs to be.
    pub(crate) fn new(
        pool: &SlotPool,
        index: u32,
        refusals: &mut Refusals,
        dead_after: Duration,
    ) -> Result<Self, Repair> {
        let group = pool.groups.get(index).ok_or(Repair::Done)?;
        let (mut at, mut lost) = to_replace(pool, &group).ok_or(Repair::Done)?;
        let mut good = group.good();
        let has_copy = good.any(|(_, member)| pool.is_usable(member.server));
        if !has_copy && pool.sources(index).is_none() {
            return Err(Repair::Silent);
        }
        let stale = lost.filter(|lost| lost.state == MemberState::Stale);
        if stale.is_some_and(|stale| !pool.is_usable(stale.server)) {
            return Err(Repair::Silent);
        }
        let opens = is_opening(pool, &group);
        let may_share = opens && at > 0;
        let mut target = new_extent(pool, index, &group, (at, may_share), refusals, dead_after);
        if opens && group.is_under_protected() && matches!(target, Err(NoExtent::Full(_))) {
            // The home comes last. Then the group has all its copies without it.
            at = first_lacking(&group, 1).unwrap_or(0);
            lost = group.member(at);
            target = new_extent(pool, index, &group, (at, true), refusals, dead_after);
        }
        let target = match target {
            Ok(target) => Some(target),
            Err(NoExtent::Failed(error)) => return Err(Repair::Failed(error)),
            Err(_)
                if group.column.is_none()
                    && stale.is_some_and(|it| !pool.is_leaving(it.server)) =>
            {
                None
            }
            Err(NoExtent::Silent) => return Err(Repair::Silent),
            Err(NoExtent::Full(refusal)) => return Err(Repair::NoRoom(refusal)),
        };
        Ok(Self {
            group: Box::new(group),
            at,
            lost,
            target,
            is_doubtful: false,
        })
    }
}

impl SealedGroup {
    /// Prepares a copy of a group, and seals the group. A server that has been silent for less than
    /// `dead_after` may have room for the copy.
    ///
    /// # Errors
    /// The reason why nothing can be done, or nothing needs to be. The group is not sealed then.
    pub(crate) fn new(
        pool: &Arc<SlotPool>,
        index: u32,
        refusals: &mut Refusals,
        dead_after: Duration,
    ) -> Result<Self, Repair> {
        let plan = CopyPlan::new(pool, index, refusals, dead_after)?;
        Self::seal(pool, index, plan)
    }

    /// Seals a group that a copy was prepared for. Another group may have its index by now, since
    /// the preparation calls servers.
    ///
    /// # Errors
    /// The reason why nothing can be done. The group is not sealed then.
    pub(crate) fn seal(pool: &Arc<SlotPool>, index: u32, plan: CopyPlan) -> Result<Self, Repair> {
        let sealed = Self {
            pool: pool.clone(),
            index,
            plan,
        };
        if !pool.seal(index) {
            sealed.return_target();
            return Err(Repair::Done);
        }
        if !sealed.fits() {
            sealed.give_up();
            return Err(Repair::Waits);
        }
        Ok(sealed)
    }

    /// True if the preparation is still right: servers may have failed since, and the index may be
    /// that of another group.
    pub(crate) fn fits(&self) -> bool {
        let CopyPlan {
            at, lost, target, ..
        } = self.plan;
        let group = self.pool.groups.get(self.index);
        let group = group.filter(|group| group.has_extents_of(&self.plan.group));
        let is_wanted = |group: &ExtentGroup| {
            let found = to_replace(&self.pool, group).map(|(now, _)| now);
            let instead = is_opening(&self.pool, group).then(|| first_lacking(group, 1));
            found == Some(at) || found == Some(0) && instead.flatten() == Some(at)
        };
        let is_there = group.is_some_and(|group| is_wanted(&group) && group.member(at) == lost);
        is_there && target.is_none_or(|(server, _)| self.pool.may_grant(server))
    }

    /// Gives the preparation up.
    pub(crate) fn give_up(self) {
        self.return_target();
        self.unseal();
    }

    /// Gives up the extent for the copy: it is kept or goes back, and only goes back if something
    /// may still land there.
    fn return_target(&self) {
        if let Some((server, id)) = self.plan.target {
            let bytes = self.plan.group.bytes;
            match self.plan.is_doubtful {
                true => self.pool.renew_spare(server, id, bytes),
                false => self.pool.return_spare(server, id, bytes),
            }
        }
    }

    /// Puts the group back into use. A region may have ended meanwhile, which gives back no sealed
    /// extent.
    fn unseal(&self) {
        let pieces = self.pool.pieces_at_rest(self.index);
        self.pool.unseal(self.index);
        if pieces.is_some_and(|pieces| pieces.is_empty()) {
            self.pool.shrink();
        }
    }

    /// Makes the copy, and unseals the group.
    ///
    /// # Errors
    /// The group: writes to it have not ended.
    pub(crate) fn copy(mut self, cluster: &Cluster) -> Result<Repair, Self> {
        let Some(pieces) = self.pool.pieces_at_rest(self.index) else {
            return Err(self);
        };
        let pool = self.pool.clone();
        let Some(fixed) = pool.try_fix_members() else {
            return Err(self);
        };
        let repair = self.copy_pieces(cluster, &pieces);
        drop(fixed);
        if !matches!(repair, Repair::Done) {
            self.return_target();
        }
        self.unseal();
        Ok(repair)
    }

    /// Copies the pieces of a group at rest to the new member, from the first Good member that can
    /// be read.
    fn copy_pieces(&mut self, cluster: &Cluster, pieces: &[(u64, u64)]) -> Repair {
        let (pool, index) = (&self.pool, self.index);
        let CopyPlan {
            at, lost, target, ..
        } = self.plan;
        // Looked up now: the writes that were waited for may have changed the group.
        let Some(group) = pool.groups.get(index) else {
            // The region has ended, and gives back what is in its table.
            self.return_target();
            return Repair::Done;
        };
        // 1. The extent.
        let (server, id) = match (target, lost) {
            (Some(target), _) => target,
            (None, Some(stale)) => {
                pool.replace(index, at, None);
                match pool.grant_copy(stale.server, group.bytes) {
                    Ok(extent) => (stale.server, extent.id),
                    Err(refusal) => return Repair::NoRoom(Some(refusal)),
                }
            }
            (None, None) => return Repair::NoRoom(None),
        };
        self.plan.target = Some((server, id));
        // 2. The bytes: of a copy, or computed.
        let mut failure = None;
        let copies = group.good().filter(|(_, it)| pool.is_usable(it.server));
        let sources = pool.sources(index);
        let decoded = sources.map(|_| None);
        // Of a column that gets its copies before a home, the home is read.
        let is_damaged = |it: &Member| {
            it.state == MemberState::Stale && group.column.is_some() && pool.is_usable(it.server)
        };
        let damaged = lost.or(group.member(0)).filter(is_damaged);
        for source in copies.map(|(_, copy)| Some(copy)).chain(decoded) {
            // A write may wait for the opening of a parity set.
            let rate = cluster.repair_rate.filter(|_| !pool.is_room_awaited());
            let mut mover = Mover::new(pool);
            let moved = match (source, &sources) {
                (Some(copy), _) => mover.copy(pieces, copy, (server, id), rate),
                (None, Some((view, bits))) => match damaged {
                    Some(it) => {
                        let ranges = pool.damaged_ranges(it);
                        let old = (it, ranges.as_slice());
                        let from = (view, *bits);
                        let mended = mover.mend(group.bytes, old, from, (server, id), rate);
                        mended.map(|kept| tell_of_doubt(pool, it.server, kept))
                    }
                    None => mover.decode(group.bytes, (view, *bits), (server, id), rate),
                },
                (None, None) => unreachable!("bytes are computed from sources"),
            };
            match moved {
                // 3. The table.
                Ok(()) => {
                    pool.replace(index, at, Some((server, id)));
                    let bytes = pieces.iter().map(|(_, len)| len).sum();
                    match lost.filter(|lost| lost.state == MemberState::Good) {
                        Some(left) => cluster.drains.count(pool.port(left.server), bytes),
                        None => pool.count_repaired(bytes),
                    }
                    return Repair::Done;
                }
                Err((failed, error)) => {
                    self.plan.is_doubtful |= mover.may_land_in((server, id));
                    if error.is_silence() {
                        cluster.health.failed(pool.port(failed));
                    }
                    failure = Some(error.to_string());
                }
            }
            if !pool.is_usable(server) {
                break;
            }
        }
        failure.map_or(Repair::Silent, Repair::Failed)
    }
}

/// Counts and logs blocks of a damaged extent that differ from what its set says, and stay: nobody
/// knows which extent is damaged until the pages are filled.
fn tell_of_doubt(pool: &SlotPool, server: u8, blocks: usize) {
    if blocks > 0 {
        pool.count_differing();
        let endpoint = pool.endpoint(server);
        later(move || {
            tracing::warn!(
                %endpoint,
                blocks,
                "an extent of a memory server was damaged, and it or another of its parity set has more damage: each page is read as its hash confirms; check the servers' memory"
            );
        });
    }
}

/// Finds the first copy that a group lacks, or else that is to leave its server: the copy's
/// position, and the member that is to be replaced.
fn to_replace(pool: &SlotPool, group: &ExtentGroup) -> Option<(u8, Option<Member>)> {
    let leaves = |member: &Option<Member>| member.is_some_and(|it| pool.is_leaving(it.server));
    let leaving = || group.positions().find(|(_, member)| leaves(member));
    let lacking = first_lacking(group, 0).map(|at| (at, group.member(at)));
    lacking.or_else(leaving)
}

/// Finds the first position from `from` on without a Good member.
fn first_lacking(group: &ExtentGroup, from: u8) -> Option<u8> {
    let is_good = |member: Option<Member>| member.is_some_and(|it| it.state == MemberState::Good);
    let mut positions = group.positions().skip(usize::from(from));
    let (at, _) = positions.find(|(_, member)| !is_good(*member))?;
    Some(at)
}

/// True if a group is a column whose set is being opened.
fn is_opening(pool: &SlotPool, group: &ExtentGroup) -> bool {
    let set = group.column.and_then(|column| {
        let set = pool.groups.set(column.set)?;
        (column.at < set.code.data).then_some(set)
    });
    set.is_some_and(|set| set.is_opening)
}

/// Asks servers for the extent of a new member at a position: first that of the lost one, if it
/// answers, then those that have no copy of the group, and no other extent of its parity set. A
/// server that refused as much in this turn is not asked.
///
/// An extent that `may_share` is taken where the set's other extents are, too: a copy of a column
/// whose set is being opened, since the set does not need it; and a lost home there, once the group
/// has all its copies without it.
///
/// # Errors
/// [`NoExtent`]. A server is passed over as silent if that has been so for less than `dead_after`.
fn new_extent(
    pool: &SlotPool,
    index: u32,
    group: &ExtentGroup,
    (at, may_share): (u8, bool),
    refusals: &mut Refusals,
    dead_after: Duration,
) -> Result<(u8, ExtentId), NoExtent> {
    let servers = pool.servers().len() as u32;
    let before = group.member(at).map(|lost| lost.server);
    let view = pool.groups.set_of(index);
    let first = match group.member(0) {
        Some(home) if may_share => u32::from(home.server) + 1,
        _ => index,
    };
    let mut others: Vec<u8> = (0..servers)
        .map(|i| ((first + i) % servers) as u8)
        .collect();
    if may_share {
        // First where most room was kept for copies, and behind the home.
        others.sort_by_key(|&server| Reverse(pool.spares_on(server, group.bytes)));
    }
    let is_free = |server: &u8| {
        let is_elsewhere = |member: Member| !pool.is_same(member.server, *server);
        let mut members = group.members().map(|(_, member)| member);
        let mut others = view.iter().flat_map(SetView::others);
        Some(*server) == before
            || members.all(is_elsewhere) && (may_share || others.all(is_elsewhere))
    };
    let (mut refusal, mut any_silent) = (None, false);
    let mut note = |error| {
        if !matches!(refusal, Some(AllocError::Control(_))) {
            refusal = Some(error);
        }
    };
    let others = others.into_iter().filter(|server| Some(*server) != before);
    for server in before.into_iter().chain(others).filter(is_free) {
        if !pool.may_grant(server) {
            any_silent |= pool.may_grant_soon(server, dead_after);
            continue;
        }
        let port = pool.port(server);
        if let Some((_, error)) = (refusals.get(&port)).filter(|(least, _)| *least <= group.bytes) {
            if may_share && let Some(id) = pool.take_spare(server, group.bytes) {
                return Ok((server, id));
            }
            note(error.clone());
            continue;
        }
        match pool.grant_copy(server, group.bytes) {
            Ok(extent) if extent.bytes >= group.bytes => return Ok((server, extent.id)),
            Ok(extent) => pool.drop_copy(server, extent.id),
            Err(error) => {
                if may_share && let Some(id) = pool.take_spare(server, group.bytes) {
                    return Ok((server, id));
                }
                refusals.insert(port, (group.bytes, error.clone()));
                note(error);
            }
        }
    }
    Err(match refusal {
        Some(AllocError::Control(error)) => NoExtent::Failed(error.to_string()),
        _ if any_silent => NoExtent::Silent,
        refusal => NoExtent::Full(refusal),
    })
}
