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
//! A member that is to leave its server ([`drain`](crate::drain)) is replaced in the same way, also
//! one that is Good and the group's only one. It stays Good, and readable, until step 4, and may be
//! the source of step 3: by step 2 no entry comes to refer to a slot that is written meanwhile.
//! After step 4 nothing is read or written there but by READs that began before. Their bytes are
//! right as long as the extent is there: slots that an entry refers to are not written to. The
//! extent goes back to its server at once. From then on such a READ is refused, or brings zeros or
//! whatever the server has there: bytes of other clients never, since an extent's number is not
//! used twice and shared memory is not lent again. The hash tells right bytes from all others, and
//! the I/O queue repeats the READ where the table says by then (`io_queue/copies.rs`,
//! `io_queue/fill.rs`).
//!
//! A thread does this for a cluster with copies, or with a server that leaves. The thread sleeps
//! while nothing is to be done. Nothing here verifies hashes: pages are verified when they are
//! filled.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, Builder},
    time::{Duration, Instant},
};

use farpage_fabric::{AllocError, Session, log::later, regmem::RegBuf};

use crate::{
    Cluster,
    drain::DrainOutlook,
    groups::ExtentGroup,
    pool::SlotPool,
    roster::SERVERS_MAX,
    sealed::{Refusals, Repair, SealedGroup},
    set_maker::SetMaker,
};

/// Pause between looks at servers that do not answer, and at groups whose writes have not ended.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Interval at which servers are asked for a sign of life, so that the death of one that no page
/// is read from is noticed before another one dies.
const LISTEN_EVERY: Duration = Duration::from_secs(1);
/// Interval of attempts to reach a silent server that was emptied: it may have ended, or keep
/// names.
const LISTEN_LEFT_EVERY: Duration = Duration::from_secs(5);
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
    /// Findings of the last turn about servers that are being emptied.
    drains: DrainOutlook,
    sets: SetMaker,
}

/// A copy that is missing, or that is to leave its server.
struct WantedCopy {
    pool: Arc<SlotPool>,
    index: u32,
    /// Number of deaths that the group outlives.
    spare: usize,
    need: Need,
    /// Ports of the servers that members are to leave.
    leaves: Vec<usize>,
}

/// Reason why a copy is wanted, the most pressing first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Need {
    /// The copy is missing.
    Lost,
    /// A copy is to leave its server.
    Move,
    /// The group's parity set is to be dissolved.
    Open,
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
        let cluster = Arc::downgrade(self);
        let thread = Builder::new().name("farpage-repair".to_owned());
        let thread = farpage_tables::spawn(thread, move || work(&cluster))?;
        self.health.set_repairer(thread.thread().clone());
        *is_started = true;
        Ok(())
    }
}

/// Repairs until the cluster is gone.
fn work(cluster: &Weak<Cluster>) {
    let body = AssertUnwindSafe(|| {
        let mut repairer = Repairer::new();
        let mut next_copy = Instant::now();
        while let Some(alive) = cluster.upgrade() {
            repairer.listen(&alive);
            let turn = match next_copy.checked_duration_since(Instant::now()) {
                None => repairer.turn(&alive),
                Some(_) => {
                    repairer.look_at_servers(&alive, &alive.pools_to_repair());
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

impl WantedCopy {
    /// Returns the copies that a pool lacks, and those that are to leave their servers.
    fn all_of(pool: &Arc<SlotPool>) -> Vec<Self> {
        // A published region stays where it is.
        let any_leaving = pool.any_leaving() && !pool.is_own();
        let groups = (0..).zip(pool.groups.all());
        let wanted = groups.filter_map(|(index, group)| {
            // Nothing can be copied from a server that has lost the program's session.
            let is_lost = |server| pool.session(server).loss(false).is_some();
            let has_copy = |group: &ExtentGroup| group.good().any(|(_, it)| !is_lost(it.server));
            let view = group.and_then(|_| pool.groups.set_of(index));
            let can_decode = || {
                let sources = view.and_then(|view| view.sources(0, |it| !is_lost(it.server)));
                sources.is_some()
            };
            let group = group.filter(|group| has_copy(group) || can_decode())?;
            let leaves: Vec<usize> = match any_leaving {
                true => (pool.leaving(&group))
                    .map(|(_, member)| pool.port(member.server))
                    .collect(),
                false => Vec::new(),
            };
            let need = match group.is_under_protected() {
                true => Need::Lost,
                false if !leaves.is_empty() => Need::Move,
                false if group.lacks_copies() => Need::Open,
                false => return None,
            };
            let spare = match view {
                Some(view) => view.spare(),
                None => group.good_count().saturating_sub(1),
            };
            Some(Self {
                pool: pool.clone(),
                index,
                spare,
                need,
                leaves,
            })
        });
        wanted.collect()
    }

    /// True if the copy is that of a sealed group.
    fn is_of(&self, sealed: &SealedGroup) -> bool {
        Arc::ptr_eq(&sealed.pool, &self.pool) && sealed.index == self.index
    }
}

impl Repairer {
    pub(crate) fn new() -> Self {
        Self {
            probes: (0..SERVERS_MAX).map(|_| Arc::default()).collect(),
            probed: vec![None; SERVERS_MAX],
            told_dead: vec![false; SERVERS_MAX],
            told_full: false,
            told_few: false,
            failures: 0,
            sealed: None,
            drains: DrainOutlook::default(),
            sets: SetMaker::default(),
        }
    }

    /// Looks after silent servers, and makes at most one copy.
    pub(crate) fn turn(&mut self, cluster: &Arc<Cluster>) -> RepairTurn {
        cluster.drains.see();
        let pools = cluster.pools_to_repair();
        pools.iter().for_each(tell_of_damage);
        pools.iter().for_each(|pool| pool.release_owed());
        let any_silent = self.look_at_servers(cluster, &pools);
        let is_tended = self.sets.tend(cluster, &pools);
        let turn = self.repair_one(cluster, &pools);
        let turn = match turn {
            RepairTurn::Idle | RepairTurn::NoRoom
                if is_tended || self.sets.make(cluster, &pools) =>
            {
                RepairTurn::Repaired
            }
            turn => turn,
        };
        cluster.answer_drains(&pools, &self.drains);
        match turn {
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
            if cluster.health.is_left(server) {
                continue;
            }
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
            if cluster.health.is_left(server) && !pools.iter().any(|pool| pool.is_on(server)) {
                // Nothing waits for a server that was emptied. It may have ended, or keep names.
                let since = self.probed[server].map(|probed| probed.elapsed());
                if session.loss(false).is_none() && since.is_none_or(|it| it >= LISTEN_LEFT_EVERY) {
                    self.probe(cluster, server, session);
                }
                continue;
            }
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
            let copied = pools.iter().filter(|pool| pool.has_copies());
            let mark = |pool: &Arc<SlotPool>| pool.mark_dead(server as u8, lost.is_some());
            let marked: usize = copied.map(mark).sum();
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

    /// Makes one copy: of the group that has the fewest, or, where no copies are missing, of a
    /// member that is to leave its server.
    fn repair_one(&mut self, cluster: &Cluster, pools: &[Arc<SlotPool>]) -> RepairTurn {
        self.drains.begin_turn();
        let mut wanted: Vec<WantedCopy> = pools.iter().flat_map(WantedCopy::all_of).collect();
        // A group that was sealed comes first: its writes may have ended.
        let sealed = self.sealed.take();
        let is_sealed = |it: &WantedCopy| sealed.as_ref().is_some_and(|sealed| it.is_of(sealed));
        wanted.sort_by_key(|it| (!is_sealed(it), it.need, it.spare));
        let any_sealed = wanted.first().is_some_and(is_sealed);
        let mut sealed = match sealed {
            Some(sealed) if !any_sealed => {
                sealed.give_up();
                None
            }
            sealed => sealed,
        };
        let (mut turn, mut failure) = (RepairTurn::Idle, None);
        let mut refusals = Refusals::new();
        for it in wanted {
            if self.sealed.is_some() && !it.pool.is_at_rest(it.index) {
                // One group stays sealed until its writes have ended. Others are tried again.
                self.drains.wait(&it.leaves);
                turn = RepairTurn::Waits;
                continue;
            }
            self.sets.let_go(&it.pool, it.index);
            let group = match sealed.take() {
                Some(sealed) if sealed.fits() => Ok(sealed),
                unfit => {
                    unfit.into_iter().for_each(SealedGroup::give_up);
                    SealedGroup::new(&it.pool, it.index, &mut refusals, cluster.dead_after)
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
                    self.drains.go_on();
                    return RepairTurn::Repaired;
                }
                Repair::Waits | Repair::Silent => {
                    self.drains.wait(&it.leaves);
                    turn = RepairTurn::Waits;
                }
                Repair::Failed(error) => {
                    self.drains.fail(&it.leaves, &error);
                    failure = Some(error);
                }
                Repair::NoRoom(refusal) => {
                    self.drains.refuse(&it.leaves, refusal.as_ref());
                    if it.need == Need::Lost {
                        self.tell_of_lack(refusal);
                    }
                    if it.need != Need::Move {
                        self.sets.refuse(&it.pool, it.index);
                    }
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
                    "pages have fewer copies than asked for, since too few servers answer; start them again with their memory, or add a server to the running program"
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
