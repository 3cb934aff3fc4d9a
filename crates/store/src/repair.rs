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
//! A Stale member is not written to again: a late WRITE could still land in it. Its extent goes
//! back and the copy is made in a new one, on the same server if that has room.
//!
//! A thread does this for a cluster with copies, and sleeps while nothing is missing. Nothing here
//! verifies hashes: pages are verified when they are filled.

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, Builder},
    time::{Duration, Instant},
};

use farpage_fabric::{
    AllocError, Channel, ChannelError, ConnectError, ExtentId, Op, Session, Verb,
    log::later,
    regmem::{RegBuf, RegPool},
};
use nix::poll::{PollFd, PollFlags};

use crate::{
    Cluster,
    groups::{ExtentGroup, Member, MemberState},
    lane::sleep,
    pool::SlotPool,
};

/// Bytes that are copied at a time: as many as a run of pages has.
const PIECE_BYTES: u64 = 512 << 10;
/// Pause between looks at servers that do not answer, and at groups whose writes have not ended.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Interval at which servers are asked for a sign of life, so that the death of one that no page
/// is read from is noticed before another one dies.
const LISTEN_EVERY: Duration = Duration::from_secs(1);
/// Pause before servers without room are asked again.
const ROOM_EVERY: Duration = Duration::from_secs(1);

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
    /// The group that is sealed.
    sealed: Option<(Arc<SlotPool>, u32)>,
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
    /// Copies are missing that no server has room for, or that cannot be read.
    NoRoom,
}

/// Outcome of one repair.
enum Repair {
    Done,
    /// Writes to the group have not ended: it stays sealed.
    Waits,
    /// No server has room for the copy. Holds the last refusal.
    NoRoom(Option<AllocError>),
    /// A server failed on the way.
    Failed,
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
    let mut repairer = Repairer::new(servers);
    loop {
        let Some(alive) = cluster.upgrade() else {
            return;
        };
        repairer.listen(&alive);
        let turn = repairer.turn(&alive);
        drop(alive);
        match turn {
            RepairTurn::Idle => thread::park_timeout(LISTEN_EVERY),
            RepairTurn::Repaired => {}
            RepairTurn::Waits => thread::park_timeout(LOOK_EVERY),
            RepairTurn::NoRoom => thread::park_timeout(ROOM_EVERY),
        }
    }
}

impl Repairer {
    pub(crate) fn new(servers: usize) -> Self {
        Self {
            probes: (0..servers).map(|_| Arc::default()).collect(),
            probed: vec![None; servers],
            told_dead: vec![false; servers],
            told_full: false,
            sealed: None,
        }
    }

    /// Looks after silent servers, and makes at most one copy.
    pub(crate) fn turn(&mut self, cluster: &Arc<Cluster>) -> RepairTurn {
        let pools = cluster.pools_with_copies();
        pools.iter().for_each(tell_of_damage);
        let any_silent = self.look_at_servers(cluster, &pools);
        match self.repair_one(cluster, &pools) {
            RepairTurn::Idle if any_silent => RepairTurn::Waits,
            RepairTurn::NoRoom if any_silent => RepairTurn::Waits,
            turn => turn,
        }
    }

    /// Asks servers for a sign of life now and then. One that owes it for long is suspect.
    fn listen(&mut self, cluster: &Arc<Cluster>) {
        for (server, session) in cluster.sessions().iter().enumerate() {
            let since = self.probed[server].map_or(LISTEN_EVERY, |probed| probed.elapsed());
            if self.probes[server].load(Ordering::Acquire) {
                if since > cluster.dead_after / 2 {
                    cluster.health.failed(server);
                }
            } else if since >= LISTEN_EVERY && session.loss(false).is_none() {
                self.probe(cluster, server, session);
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
                true => health.succeeded(server),
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
            (sealed.as_ref()).is_some_and(|(of, at)| Arc::ptr_eq(of, pool) && *at == index)
        };
        lacking.sort_by_key(|(good, pool, index)| (!is_sealed(pool, *index), *good));
        if let Some((pool, index)) = &sealed
            && !(lacking.first()).is_some_and(|(_, of, at)| Arc::ptr_eq(of, pool) && at == index)
        {
            pool.unseal(*index);
        }
        let mut turn = RepairTurn::Idle;
        for (_, pool, index) in lacking {
            match repair(cluster, &pool, index) {
                Repair::Done => {
                    self.told_full = false;
                    return RepairTurn::Repaired;
                }
                Repair::Waits => {
                    self.sealed = Some((pool, index));
                    return RepairTurn::Waits;
                }
                Repair::Failed => turn = RepairTurn::Waits,
                Repair::NoRoom(refusal) => {
                    if let Some(refusal) = refusal
                        && !std::mem::replace(&mut self.told_full, true)
                    {
                        later(move || {
                            tracing::warn!(
                                reason = %refusal,
                                "pages have fewer copies than asked for, since no other server has room; asking again"
                            );
                        });
                    }
                    if turn == RepairTurn::Idle {
                        turn = RepairTurn::NoRoom;
                    }
                }
            }
        }
        turn
    }
}

/// Logs which server returned damaged bytes, unless it has been said.
fn tell_of_damage(pool: &Arc<SlotPool>) {
    if let Some(server) = pool.take_damaged() {
        let endpoint = pool.endpoint(server);
        later(move || {
            tracing::warn!(
                %endpoint,
                "a memory server returned damaged bytes: they were read from another copy, and are copied again; check its memory"
            );
        });
    }
}

impl Drop for Repairer {
    fn drop(&mut self) {
        if let Some((pool, index)) = self.sealed.take() {
            pool.unseal(index);
        }
    }
}

/// Makes the first copy that a group lacks. Leaves the group unsealed unless writes to it have not
/// ended.
fn repair(cluster: &Cluster, pool: &Arc<SlotPool>, index: u32) -> Repair {
    if !pool.seal(index) {
        return Repair::Done;
    }
    let Some(pieces) = pool.pieces_at_rest(index) else {
        return Repair::Waits;
    };
    let repair = copy(cluster, pool, index, &pieces);
    pool.unseal(index);
    if pieces.is_empty() {
        // A region may have ended meanwhile, which gives back no sealed extent.
        pool.shrink();
    }
    repair
}

/// Copies a sealed group at rest to a new member.
fn copy(cluster: &Cluster, pool: &Arc<SlotPool>, index: u32, pieces: &[(u64, u64)]) -> Repair {
    // Read here: writes that have ended since may have changed it.
    let Some(group) = pool.group_at(index) else {
        return Repair::Done;
    };
    let is_lacking =
        |member: &Option<Member>| member.is_none_or(|member| member.state != MemberState::Good);
    let Some((at, lacking)) = group.positions().find(|(_, member)| is_lacking(member)) else {
        return Repair::Done;
    };
    let source = (group.good()).find(|(_, member)| pool.is_usable(member.server));
    let Some((_, source)) = source else {
        return Repair::Failed;
    };
    // 1. An extent on a server that has no copy; that of a stale one goes back first.
    if let Some(member) = lacking
        && member.state == MemberState::Stale
    {
        if !pool.is_usable(member.server) {
            // The server answers again, or is dead soon.
            return Repair::Failed;
        }
        pool.replace(index, at, None);
    }
    let (server, id) = match new_extent(pool, index, &group, lacking) {
        Ok(extent) => extent,
        Err(refusal) => return Repair::NoRoom(refusal),
    };
    // 2. The bytes.
    let mut copier = match Copier::new(cluster, pool, source, server) {
        Ok(copier) => copier,
        Err(()) => {
            pool.drop_copy(server, id);
            return Repair::Failed;
        }
    };
    for &(mut offset, mut left) in pieces {
        while left > 0 {
            let len = left.min(PIECE_BYTES);
            if copier
                .copy(source, (server, id), offset, len as u32)
                .is_err()
            {
                pool.drop_copy(server, id);
                return Repair::Failed;
            }
            (offset, left) = (offset + len, left - len);
        }
    }
    // 3. The table.
    pool.replace(index, at, Some((server, id)));
    pool.count_repaired(pieces.iter().map(|(_, len)| len).sum());
    Repair::Done
}

/// Asks servers for the extent of a new member: first that of the lost one, if it answers, then
/// those that have no copy of the group.
///
/// # Errors
/// The last refusal; `None` if there is no server to ask.
fn new_extent(
    pool: &SlotPool,
    index: u32,
    group: &ExtentGroup,
    lost: Option<Member>,
) -> Result<(u8, ExtentId), Option<AllocError>> {
    let servers = pool.servers().len() as u32;
    let before = lost.map(|lost| lost.server);
    let others = (0..servers).map(|i| ((index + i) % servers) as u8);
    let is_free = |server: &u8| {
        let is_elsewhere = |(_, member): (u8, Member)| !pool.is_same(member.server, *server);
        Some(*server) == before || group.members().all(is_elsewhere)
    };
    let mut refusal = None;
    let others = others.filter(|server| Some(*server) != before);
    for server in before.into_iter().chain(others).filter(is_free) {
        if !pool.is_usable(server) {
            continue;
        }
        match pool.grant_copy(server, group.bytes) {
            Ok(extent) if extent.bytes >= group.bytes => return Ok((server, extent.id)),
            Ok(extent) => pool.drop_copy(server, extent.id),
            Err(error) => refusal = Some(error),
        }
    }
    Err(refusal)
}

/// Copies bytes from one server to another through channels of its own, at a bounded rate.
struct Copier<'a> {
    registered: &'a RegPool,
    from: Box<dyn Channel<RegBuf>>,
    to: Box<dyn Channel<RegBuf>>,
    /// Upper bound of the bytes per second.
    rate: Option<u64>,
    began: Instant,
    copied_bytes: u64,
}

impl<'a> Copier<'a> {
    fn new(cluster: &Cluster, pool: &'a SlotPool, source: Member, server: u8) -> Result<Self, ()> {
        let open = |server: u8| {
            let port = pool.port(server);
            let channel = cluster.sessions()[port].channel();
            channel.map_err(|_: ConnectError| cluster.health.failed(port))
        };
        Ok(Self {
            registered: &pool.registered,
            from: open(source.server)?,
            to: open(server)?,
            rate: cluster.repair_rate,
            began: Instant::now(),
            copied_bytes: 0,
        })
    }

    fn copy(
        &mut self,
        source: Member,
        (_, id): (u8, ExtentId),
        offset: u64,
        len: u32,
    ) -> Result<(), ()> {
        let buf = self.registered.acquire(len as usize).map_err(drop)?;
        let op = |verb, extent, buf| Op {
            tag: 0,
            verb,
            extent,
            offset,
            len,
            buf,
        };
        let buf = transfer(&mut *self.from, op(Verb::Read, source.id, buf)).map_err(drop)?;
        transfer(&mut *self.to, op(Verb::Write, id, buf)).map_err(drop)?;
        self.copied_bytes += u64::from(len);
        if let Some(rate) = self.rate {
            let due = Duration::from_secs_f64(self.copied_bytes as f64 / rate as f64);
            thread::sleep(due.saturating_sub(self.began.elapsed()));
        }
        Ok(())
    }
}

/// Carries out one operation, and waits for it.
fn transfer(channel: &mut dyn Channel<RegBuf>, op: Op<RegBuf>) -> Result<RegBuf, ChannelError> {
    assert!(channel.post(op).is_ok(), "a channel takes one operation");
    let mut done = Vec::new();
    while channel.poll(&mut done) == 0 {
        let wait = channel.wait();
        let mut events = PollFlags::empty();
        events.set(PollFlags::POLLIN, wait.readable);
        events.set(PollFlags::POLLOUT, wait.writable);
        let mut fd = wait.fd.map(|fd| PollFd::new(fd, events));
        sleep(fd.as_mut_slice(), wait.until);
    }
    let completion = done.pop().expect("poll returned one");
    completion.result.map(|()| completion.buf)
}
