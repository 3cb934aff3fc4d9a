//! [`Repairer`]: notices dead servers, and makes lost copies of extents anew on servers that have
//! room.
//!
//! The rule it keeps: a member of a group becomes Good when it has the bytes of every slot that an
//! entry refers to, and no write can have passed it by. Why that holds:
//!
//! 1. The group is *sealed*: none of its holes is given out, so no new write begins in it.
//! 2. The repair waits until every write that began before has ended. A write ends after its entry
//!    is published, or when it is given up and will never be published. So from here on no entry
//!    comes to refer to a slot of the group that it did not refer to before. Slots of writes that
//!    were given up may still receive late WRITEs. Nothing refers to these slots, and they are no
//!    holes before the line of each such WRITE is settled.
//! 3. All that is no hole is copied from a Good member, which has the bytes of all these slots.
//! 4. The new member takes its position as Good, in one step under the table's lock.
//! 5. The group is unsealed. Writes that begin now go to all Good members, the new one included.
//!
//! A Stale member is not written to again: a late WRITE could still land in it. The copy is made in
//! a new extent, on the same server if that has room. The Stale one goes back afterwards: pages of
//! it may be right nowhere else. Only where no server has room for both, it goes back first.
//!
//! A group is sealed once a source and an extent for the copy are there, so that nothing is taken
//! out of use in vain.
//!
//! A thread does this for a cluster with copies, and sleeps while nothing is missing. Nothing here
//! verifies hashes: pages are verified when they are filled.

use std::{
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, Builder},
    time::{Duration, Instant},
};

use farpage_fabric::{AllocError, ExtentId, Session, log::later, regmem::RegBuf};

use crate::{
    Cluster,
    copier::Copier,
    groups::{ExtentGroup, Member, MemberState},
    pool::SlotPool,
};

/// Pause between looks at servers that do not answer, and at groups whose writes have not ended.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Interval at which servers are asked for a sign of life, so that the death of one that no page
/// is read from is noticed before another one dies.
const LISTEN_EVERY: Duration = Duration::from_secs(1);
/// Pause before servers without room are asked again.
const ROOM_EVERY: Duration = Duration::from_secs(1);
/// Longest pause after repairs that failed: doubled from [`LOOK_EVERY`].
const FAILED_PAUSE_MAX: Duration = Duration::from_secs(2);
/// Number of failures in a row after which they are logged: single ones are deaths, which are.
const FAILURES_TO_TELL: u32 = 3;

/// State of a cluster's repairs between two turns.
pub(crate) struct Repairer {
    /// Flags of the servers, true while an attempt to reach the server is under way.
    probes: Vec<Arc<AtomicBool>>,
    /// Times when the last attempt to reach each server began.
    probed: Vec<Option<Instant>>,
    /// Flags of the servers whose death was reported. False again for one that answers.
    told_dead: Vec<bool>,
    /// True once a lack of room was reported. False again after a repair.
    told_full: bool,
    /// True once a lack of servers was reported. False again after a repair.
    told_few: bool,
    /// Number of turns in a row that failed.
    failures: u32,
    /// The group that is sealed until its writes have ended.
    sealed: Option<SealedGroup>,
}

/// A sealed group, whose copy is to be made.
struct SealedGroup {
    pool: Arc<SlotPool>,
    index: u32,
    plan: CopyPlan,
}

/// Preparation of a copy.
#[derive(Clone, Copy)]
struct CopyPlan {
    /// Position of the copy.
    at: u8,
    /// Member that is replaced.
    lost: Option<Member>,
    /// Server and extent that were granted for the copy. `None`: the stale member's server has room
    /// only for one of both, so that the stale one goes back first.
    target: Option<(u8, ExtentId)>,
}

/// Outcome of a turn: what is left to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RepairTurn {
    /// Every group has its copies, and every server answers.
    Idle,
    /// A copy was made.
    Repaired,
    /// A server is silent, or writes to a sealed group have not ended.
    Waits,
    /// A server failed while a copy was made.
    Failed,
    /// Copies are missing that no server has room for.
    NoRoom,
}

/// Outcome of one repair.
enum Repair {
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

/// Servers that refused memory in this turn, by port, each with the fewest bytes it refused.
type Refusals = HashMap<usize, (u64, AllocError)>;

impl Cluster {
    /// Starts the thread that repairs, unless it runs.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn start_repairs(self: &Arc<Self>) -> std::io::Result<()> {
        let mut is_started = self.repairs_started.lock();
        if *is_started {
            return Ok(());
        }
        let (cluster, servers) = (Arc::downgrade(self), self.sessions().len());
        let thread = Builder::new().name("farpage-repair".to_owned());
        let thread = farpage_tables::spawn(thread, move || work(&cluster, servers))?;
        self.health.set_repairer(thread.thread().clone());
        *is_started = true;
        Ok(())
    }
}

/// Repairs until the cluster is gone.
fn work(cluster: &Weak<Cluster>, servers: usize) {
    let body = AssertUnwindSafe(|| {
        let mut repairer = Repairer::new(servers);
        let mut next_copy = Instant::now();
        while let Some(alive) = cluster.upgrade() {
            repairer.listen(&alive);
            let turn = match next_copy.checked_duration_since(Instant::now()) {
                None => repairer.turn(&alive),
                Some(_) => {
                    repairer.look_at_servers(&alive, &alive.pools_with_copies());
                    RepairTurn::Waits
                }
            };
            drop(alive);
            match turn {
                RepairTurn::Idle => thread::park_timeout(LISTEN_EVERY),
                RepairTurn::Repaired => {}
                RepairTurn::Waits => thread::park_timeout(LOOK_EVERY),
                RepairTurn::NoRoom => thread::park_timeout(ROOM_EVERY),
                RepairTurn::Failed => next_copy = Instant::now() + repairer.pause(),
            }
        }
    });
    if catch_unwind(body).is_err() {
        // The panic hook has told why. Without repairs the next death would lose pages.
        eprintln!("farpage: the thread that repairs copies panicked; aborting the process");
        std::process::abort();
    }
}

impl Repairer {
    pub(crate) fn new(servers: usize) -> Self {
        Self {
            probes: (0..servers).map(|_| Arc::default()).collect(),
            probed: vec![None; servers],
            told_dead: vec![false; servers],
            told_full: false,
            told_few: false,
            failures: 0,
            sealed: None,
        }
    }

    /// Looks after silent servers, and makes at most one copy.
    pub(crate) fn turn(&mut self, cluster: &Arc<Cluster>) -> RepairTurn {
        let pools = cluster.pools_with_copies();
        pools.iter().for_each(tell_of_damage);
        pools.iter().for_each(|pool| pool.release_owed());
        let any_silent = self.look_at_servers(cluster, &pools);
        match self.repair_one(cluster, &pools) {
            RepairTurn::Idle if any_silent => RepairTurn::Waits,
            RepairTurn::NoRoom if any_silent => RepairTurn::Waits,
            turn => turn,
        }
    }

    /// Returns the pause after a turn that failed.
    pub(crate) fn pause(&self) -> Duration {
        let doubled = LOOK_EVERY * 2u32.pow(self.failures.saturating_sub(1).min(10));
        doubled.min(FAILED_PAUSE_MAX)
    }

    /// Asks servers for a sign of life now and then, unless operations succeed there. One that owes
    /// the sign for long is suspect.
    fn listen(&mut self, cluster: &Arc<Cluster>) {
        for (server, session) in cluster.sessions().iter().enumerate() {
            let since = self.probed[server].map_or(LISTEN_EVERY, |probed| probed.elapsed());
            if self.probes[server].load(Ordering::Acquire) {
                if since > cluster.dead_after / 2 {
                    cluster.health.failed(server);
                }
            } else if since >= LISTEN_EVERY && session.loss(false).is_none() {
                match cluster.health.take_heard(server) {
                    true => self.probed[server] = Some(Instant::now()),
                    false => self.probe(cluster, server, session),
                }
            }
        }
    }

    /// Tries to reach servers that are suspect, and gives up the copies on those that are dead.
    /// Returns true if any server is suspect and not dead.
    pub(crate) fn look_at_servers(
        &mut self,
        cluster: &Arc<Cluster>,
        pools: &[Arc<SlotPool>],
    ) -> bool {
        let mut any_silent = false;
        for (server, session) in cluster.sessions().iter().enumerate() {
            let lost = session.loss(false);
            let silent = cluster.health.suspect_for(server);
            if lost.is_none() && silent.is_none() {
                self.told_dead[server] = false;
                continue;
            }
            if let (None, Some(silent)) = (&lost, silent) {
                let pause = (silent / 8).clamp(LOOK_EVERY, LISTEN_EVERY);
                if self.probed[server].is_none_or(|probed| probed.elapsed() >= pause) {
                    self.probe(cluster, server, session);
                }
                if silent < cluster.dead_after {
                    any_silent = true;
                    continue;
                }
            }
            let mark = |pool: &Arc<SlotPool>| pool.mark_dead(server as u8, lost.is_some());
            let marked: usize = pools.iter().map(mark).sum();
            if marked > 0 && !std::mem::replace(&mut self.told_dead[server], true) {
                let endpoint = session.endpoint().clone();
                let reason = lost.unwrap_or_else(|| format!("silent for {:?}", cluster.dead_after));
                later(move || {
                    tracing::warn!(
                        %endpoint, reason, extents = marked,
                        "memory server given up: pages are read from their other copies, and copied again"
                    );
                });
            }
        }
        any_silent
    }

    /// Tries to reach a server, on a thread of its own, unless an attempt is under way.
    fn probe(&mut self, cluster: &Arc<Cluster>, server: usize, session: &Arc<Session>) {
        let probe = &self.probes[server];
        if probe.swap(true, Ordering::AcqRel) {
            return;
        }
        self.probed[server] = Some(Instant::now());
        let (session, health) = (session.clone(), cluster.health.clone());
        let is_running = probe.clone();
        let attempt = move || {
            // Calls fail where the memory has outlived its server. A suspect server may answer
            // calls and move no bytes.
            let is_fine = health.is_fine(server);
            match is_fine && session.stat().is_ok() || session.channel::<RegBuf>().is_ok() {
                true => health.answered(server),
                false => health.failed(server),
            }
            is_running.store(false, Ordering::Release);
        };
        if farpage_tables::errand("farpage-probe", attempt).is_err() {
            // The next turn tries again.
            probe.store(false, Ordering::Release);
        }
    }

    /// Makes one copy, of the group that has the fewest.
    fn repair_one(&mut self, cluster: &Cluster, pools: &[Arc<SlotPool>]) -> RepairTurn {
        let mut lacking: Vec<(usize, Arc<SlotPool>, u32)> = Vec::new();
        for pool in pools {
            for (index, group) in (0..).zip(pool.groups()) {
                let group = group.filter(|group| group.lacks_copies() && group.good_count() > 0);
                lacking.extend(group.map(|group| (group.good_count(), pool.clone(), index)));
            }
        }
        // A group that was sealed comes first: its writes may have ended.
        let sealed = self.sealed.take();
        let is_sealed = |pool: &Arc<SlotPool>, index| {
            (sealed.as_ref()).is_some_and(|it| Arc::ptr_eq(&it.pool, pool) && it.index == index)
        };
        lacking.sort_by_key(|(good, pool, index)| (!is_sealed(pool, *index), *good));
        let any_sealed = (lacking.first()).is_some_and(|(_, pool, at)| is_sealed(pool, *at));
        let mut sealed = match sealed {
            Some(sealed) if !any_sealed => {
                sealed.give_up();
                None
            }
            sealed => sealed,
        };
        let (mut turn, mut failure) = (RepairTurn::Idle, None);
        let mut refusals = Refusals::new();
        for (_, pool, index) in lacking {
            if self.sealed.is_some() && !pool.is_at_rest(index) {
                // One group stays sealed until its writes have ended. Others are tried again.
                turn = RepairTurn::Waits;
                continue;
            }
            let group = match sealed.take() {
                Some(sealed) if sealed.fits() => Ok(sealed),
                unfit => {
                    unfit.into_iter().for_each(SealedGroup::give_up);
                    SealedGroup::new(&pool, index, &mut refusals)
                }
            };
            let repair = match group {
                Err(repair) => repair,
                Ok(group) => match group.copy(cluster) {
                    Err(group) if self.sealed.is_none() => {
                        self.sealed = Some(group);
                        Repair::Waits
                    }
                    Err(group) => {
                        group.give_up();
                        Repair::Waits
                    }
                    Ok(repair) => repair,
                },
            };
            match repair {
                Repair::Done => {
                    (self.told_full, self.told_few, self.failures) = (false, false, 0);
                    return RepairTurn::Repaired;
                }
                Repair::Waits | Repair::Silent => turn = RepairTurn::Waits,
                Repair::Failed(error) => failure = Some(error),
                Repair::NoRoom(refusal) => {
                    self.tell_of_lack(refusal);
                    if turn == RepairTurn::Idle {
                        turn = RepairTurn::NoRoom;
                    }
                }
            }
        }
        match failure {
            None => turn,
            Some(error) => {
                self.tell_of_failure(error);
                RepairTurn::Failed
            }
        }
    }

    /// Logs that there is no room for copies, unless it has been said.
    fn tell_of_lack(&mut self, refusal: Option<AllocError>) {
        match refusal {
            Some(refusal) if !std::mem::replace(&mut self.told_full, true) => later(move || {
                tracing::warn!(
                    reason = %refusal,
                    "pages have fewer copies than asked for, since no other server has room; asking again"
                );
            }),
            None if !std::mem::replace(&mut self.told_few, true) => later(|| {
                tracing::warn!(
                    "pages have fewer copies than asked for, since too few servers answer; start them again with their memory, or add a server and restart the program"
                );
            }),
            _ => {}
        }
    }

    /// Logs that copies cannot be made, once that has failed several times in a row.
    fn tell_of_failure(&mut self, error: String) {
        self.failures = self.failures.saturating_add(1);
        if self.failures == FAILURES_TO_TELL {
            later(move || {
                tracing::warn!(
                    error,
                    "a lost copy of pages cannot be made again; trying again, at longer and longer intervals"
                );
            });
        }
    }
}

/// Logs which server returned damaged bytes, unless it has been said.
fn tell_of_damage(pool: &Arc<SlotPool>) {
    if let Some(server) = pool.take_damaged() {
        let endpoint = pool.endpoint(server);
        later(move || {
            tracing::warn!(
                %endpoint,
                "a memory server returned damaged bytes, or none: they were read from another copy, and are copied again; check its memory and disk"
            );
        });
    }
}

impl Drop for Repairer {
    fn drop(&mut self) {
        self.sealed
            .take()
            .into_iter()
            .for_each(SealedGroup::give_up);
    }
}

impl CopyPlan {
    /// Prepares the first copy that a group lacks.
    ///
    /// # Errors
    /// The reason why nothing can be done, or nothing needs to be.
    fn new(pool: &SlotPool, index: u32, refusals: &mut Refusals) -> Result<Self, Repair> {
        let group = pool.group_at(index).ok_or(Repair::Done)?;
        let (at, lost) = lacking(&group).ok_or(Repair::Done)?;
        if !group
            .good()
            .any(|(_, member)| pool.is_usable(member.server))
        {
            return Err(Repair::Silent);
        }
        let stale = lost.filter(|lost| lost.state == MemberState::Stale);
        if stale.is_some_and(|stale| !pool.is_usable(stale.server)) {
            return Err(Repair::Silent);
        }
        let target = match new_extent(pool, index, &group, lost, refusals) {
            Ok(target) => Some(target),
            Err(Some(AllocError::Control(error))) => {
                return Err(Repair::Failed(error.to_string()));
            }
            Err(_) if stale.is_some() => None,
            Err(refusal) => return Err(Repair::NoRoom(refusal)),
        };
        Ok(Self { at, lost, target })
    }
}

impl SealedGroup {
    /// Prepares a copy of a group, and seals the group.
    ///
    /// # Errors
    /// The reason why nothing can be done, or nothing needs to be. The group is not sealed then.
    fn new(pool: &Arc<SlotPool>, index: u32, refusals: &mut Refusals) -> Result<Self, Repair> {
        let plan = CopyPlan::new(pool, index, refusals)?;
        let sealed = Self {
            pool: pool.clone(),
            index,
            plan,
        };
        if !pool.seal(index) {
            sealed.drop_target();
            return Err(Repair::Done);
        }
        Ok(sealed)
    }

    /// True if the preparation is still right: servers may have failed since.
    fn fits(&self) -> bool {
        let CopyPlan { at, lost, target } = self.plan;
        let group = self.pool.group_at(self.index);
        let found = group.as_ref().and_then(lacking);
        let is_there = found.is_some_and(|(now, _)| now == at)
            && group.is_some_and(|group| group.member(at) == lost);
        is_there && target.is_none_or(|(server, _)| self.pool.is_usable(server))
    }

    /// Gives the preparation up.
    fn give_up(self) {
        self.drop_target();
        self.unseal();
    }

    fn drop_target(&self) {
        if let Some((server, id)) = self.plan.target {
            self.pool.drop_copy(server, id);
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
    fn copy(mut self, cluster: &Cluster) -> Result<Repair, Self> {
        let Some(pieces) = self.pool.pieces_at_rest(self.index) else {
            return Err(self);
        };
        let repair = self.copy_pieces(cluster, &pieces);
        if !matches!(repair, Repair::Done) {
            self.drop_target();
        }
        self.unseal();
        Ok(repair)
    }

    /// Copies the pieces of a group at rest to the new member, from the first Good member that can
    /// be read.
    fn copy_pieces(&mut self, cluster: &Cluster, pieces: &[(u64, u64)]) -> Repair {
        let (pool, index) = (&self.pool, self.index);
        let CopyPlan { at, lost, target } = self.plan;
        // Looked up now: the writes that were waited for may have changed the group.
        let Some(group) = pool.group_at(index) else {
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
        // 2. The bytes.
        let mut failure = None;
        for (_, source) in group.good().filter(|(_, it)| pool.is_usable(it.server)) {
            let copied = Copier::new(cluster, pool, source, server)
                .and_then(|mut copier| copier.copy_all(source, (server, id), pieces));
            match copied {
                // 3. The table.
                Ok(()) => {
                    pool.replace(index, at, Some((server, id)));
                    pool.count_repaired(pieces.iter().map(|(_, len)| len).sum());
                    return Repair::Done;
                }
                Err(error) => failure = Some(error),
            }
            if !pool.is_usable(server) {
                break;
            }
        }
        failure.map_or(Repair::Silent, Repair::Failed)
    }
}

/// Finds the first copy that a group lacks: its position, and the member that is to be replaced.
fn lacking(group: &ExtentGroup) -> Option<(u8, Option<Member>)> {
    let is_lacking =
        |member: &Option<Member>| member.is_none_or(|member| member.state != MemberState::Good);
    group.positions().find(|(_, member)| is_lacking(member))
}

/// Asks servers for the extent of a new member: first that of the lost one, if it answers, then
/// those that have no copy of the group. A server that refused as much in this turn is not asked.
///
/// # Errors
/// The last refusal, or failure of a call, after which nobody knows if there is room; `None` if
/// there is no server to ask.
fn new_extent(
    pool: &SlotPool,
    index: u32,
    group: &ExtentGroup,
    lost: Option<Member>,
    refusals: &mut Refusals,
) -> Result<(u8, ExtentId), Option<AllocError>> {
    let servers = pool.servers().len() as u32;
    let before = lost.map(|lost| lost.server);
    let others = (0..servers).map(|i| ((index + i) % servers) as u8);
    let is_free = |server: &u8| {
        let is_elsewhere = |(_, member): (u8, Member)| !pool.is_same(member.server, *server);
        Some(*server) == before || group.members().all(is_elsewhere)
    };
    let mut refusal = None;
    let mut note = |error| {
        if !matches!(refusal, Some(AllocError::Control(_))) {
            refusal = Some(error);
        }
    };
    let others = others.filter(|server| Some(*server) != before);
    for server in before.into_iter().chain(others).filter(is_free) {
        if !pool.is_usable(server) {
            continue;
        }
        let port = pool.port(server);
        if let Some((_, error)) = (refusals.get(&port)).filter(|(least, _)| *least <= group.bytes) {
            note(error.clone());
            continue;
        }
        match pool.grant_copy(server, group.bytes) {
            Ok(extent) if extent.bytes >= group.bytes => return Ok((server, extent.id)),
            Ok(extent) => pool.drop_copy(server, extent.id),
            Err(error) => {
                refusals.insert(port, (group.bytes, error.clone()));
                note(error);
            }
        }
    }
    Err(refusal)
}
