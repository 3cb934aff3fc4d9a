//! [`Cluster`]: the memory servers of a runtime, and the [`SlotPool`]s that its regions share.
//!
//! The rule it keeps: regions of one page size share a pool, those with a codec and those without
//! apart, so that small regions share extents and raw pages, all of one size, never fragment.
//! Regions that reserve nothing share other pools: they must not use up what others were promised.
//! A region that can be published has a pool of its own.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use farpage_fabric::{
    Session,
    regmem::{RegPool, RegPoolOptions, RegPoolStats},
};
use farpage_signals::Mutex;

use crate::{
    Redundancy, Reserve, StoreStats, StoreStatsSnapshot,
    codec::LinkTraffic,
    drains::DrainCalls,
    health::ServerHealth,
    pool::{Purpose, SlotPool},
    roster::{Roster, RosterFull, SERVERS_MAX},
};

/// Options of a cluster.
#[derive(Clone, Debug)]
pub struct ClusterOptions {
    /// Time from the start of a page operation within which it is repeated if it fails for a
    /// transient reason. Default: 10 s. The sessions' own deadline should be shorter, or a lost
    /// message leaves no time to repeat it.
    pub deadline: Duration,
    /// Time without a sign of a server after which its copies of pages are given up, and made anew
    /// on other servers. Default: 3 s.
    pub dead_after: Duration,
    /// Time from a server's first failure for which a write-back waits for a new channel before a
    /// copy misses it. Default: 50 ms. An I/O queue looks each 50 ms, so the wait takes up to twice
    /// that.
    pub reopen_within: Duration,
    /// Time without a new page in an extent after which the extent gets parity, of regions with
    /// [`Redundancy::Parity`]. Default: 3 s.
    pub seal_after: Duration,
    /// Upper bound of the bytes per second that are copied to replace lost copies. `None`: no
    /// bound. Default: 256 MiB.
    pub repair_rate: Option<u64>,
}

impl Default for ClusterOptions {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(10),
            dead_after: Duration::from_secs(3),
            reopen_within: Duration::from_millis(50),
            seal_after: Duration::from_secs(3),
            // A quarter of what one core moves over TCP: faults go on beside it.
            repair_rate: Some(256 << 20),
        }
    }
}

/// The memory servers of a runtime, shared by its regions and I/O queues.
pub struct Cluster {
    sessions: Roster<Arc<Session>>,
    pub(crate) deadline: Duration,
    pub(crate) dead_after: Duration,
    pub(crate) repair_rate: Option<u64>,
    pub(crate) seal_after: Duration,
    pub(crate) health: Arc<ServerHealth>,
    /// True once a region has copies: unreachable servers are borne from then on.
    has_copies: AtomicBool,
    /// True once the thread that repairs was started.
    pub(crate) repairs_started: Mutex<bool>,
    /// Buffers that are registered with the adapters of all sessions.
    pub(crate) registered: RegPool,
    pub(crate) traffic: Arc<LinkTraffic>,
    pools: Mutex<HashMap<PoolKey, Arc<SlotPool>>>,
    /// Pools of one named region each, or of one version of it.
    own_pools: Mutex<Vec<Weak<SlotPool>>>,
    /// Calls that wait until a server is empty.
    pub(crate) drains: DrainCalls,
    stats: Mutex<Ledger>,
    /// Bytes of the slots of all pools that are held for snapshots.
    held_bytes: Arc<AtomicU64>,
    /// Held while a server is added.
    pub(crate) adding: Mutex<()>,
    /// Names of regions of this cluster that are open.
    pub(crate) names_open: Mutex<HashSet<String>>,
}

/// Properties that the regions of a shared pool have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PoolKey {
    pub(crate) page_bytes: usize,
    pub(crate) is_raw: bool,
    pub(crate) reserve: Reserve,
    pub(crate) redundancy: Redundancy,
}

/// Counters of open stores, and the sum of the closed ones.
#[derive(Default)]
struct Ledger {
    open: Vec<Weak<StoreStats>>,
    closed: StoreStatsSnapshot,
}

impl Drop for Cluster {
    /// Ends the thread that repairs.
    fn drop(&mut self) {
        self.health.wake();
    }
}

impl Cluster {
    /// Makes a cluster of up to 256 `sessions`. Regions with stores of their own need none.
    ///
    /// # Panics
    /// With more than 256 sessions.
    pub fn new(sessions: Vec<Arc<Session>>, options: ClusterOptions) -> Arc<Self> {
        assert!(
            sessions.len() <= SERVERS_MAX,
            "a page entry names one of at most 256 servers"
        );
        let registrars = sessions.iter().map(|session| session.registrar());
        let cluster = Arc::new(Self {
            registered: RegPool::new(registrars, RegPoolOptions::default()),
            health: Arc::new(ServerHealth::new(options.reopen_within)),
            sessions: Roster::new(sessions),
            deadline: options.deadline,
            dead_after: options.dead_after,
            repair_rate: options.repair_rate,
            seal_after: options.seal_after,
            has_copies: AtomicBool::new(false),
            repairs_started: Mutex::default(),
            traffic: Arc::default(),
            pools: Mutex::default(),
            own_pools: Mutex::default(),
            drains: DrainCalls::default(),
            stats: Mutex::default(),
            held_bytes: Arc::default(),
            adding: Mutex::default(),
            names_open: Mutex::default(),
        });
        for session in cluster.sessions() {
            cluster.heed(session);
        }
        cluster
    }

    /// Returns the sessions, in the order given, and behind them those that were added.
    pub fn sessions(&self) -> &[Arc<Session>] {
        &self.sessions
    }

    /// Adds a server to the cluster and to the pools that regions share.
    pub(crate) fn add_session(self: &Arc<Self>, session: Arc<Session>) -> Result<(), RosterFull> {
        let (port, before) = {
            // Pools that are made later have all servers.
            let pools = self.pools.lock();
            let port = self.sessions.push(session.clone())?;
            (port, pools.values().cloned().collect::<Vec<_>>())
        };
        // Each waits for requests for memory, which nothing else is to wait for.
        for pool in before {
            pool.add_server(port, session.clone());
        }
        self.heed(&session);
        self.health.changed();
        Ok(())
    }

    /// Returns the sum over all stores, closed ones included.
    pub fn stats(&self) -> StoreStatsSnapshot {
        let ledger = self.stats.lock();
        let mut sum = ledger
            .open
            .iter()
            .filter_map(Weak::upgrade)
            .fold(ledger.closed, |sum, stats| sum + stats.snapshot());
        sum.held_bytes = self.held_bytes();
        drop(ledger);
        for pool in self.pools_to_repair() {
            sum.under_protected_bytes += pool.under_protected_bytes();
            sum.repaired_bytes += pool.repaired_bytes();
            sum.draining_bytes += pool.draining_bytes();
            let (sealed, parity) = pool.sealed_bytes();
            sum.sealed_bytes += sealed;
            sum.parity_bytes += parity;
            sum.corrupt += pool.differing();
        }
        sum
    }

    /// Returns the ports of the servers that keep names: all but those that do not answer after
    /// they were emptied, or after which another was started at their address. All, if none is
    /// left.
    pub(crate) fn name_ports(&self) -> Vec<usize> {
        let sessions = self.sessions();
        let is_lost = |port: usize| sessions[port].loss(false).is_some();
        let is_replaced = |port: usize| {
            let mut later = port + 1..sessions.len();
            later.any(|other| sessions[other].endpoint() == sessions[port].endpoint())
        };
        let is_left = |port: usize| self.health.is_leaving(port) && self.why_silent(port).is_some();
        let is_out = |port: usize| is_left(port) || is_lost(port) && is_replaced(port);
        let ports: Vec<usize> = (0..sessions.len()).filter(|&port| !is_out(port)).collect();
        match ports.is_empty() {
            true => (0..sessions.len()).collect(),
            false => ports,
        }
    }

    /// Returns the sessions of the servers that keep [names](Self::name_ports).
    pub(crate) fn name_sessions(&self) -> Vec<Arc<Session>> {
        let session = |port: usize| self.sessions[port].clone();
        self.name_ports().into_iter().map(session).collect()
    }

    /// Returns the bytes of remote memory that no page uses any more, held for snapshots.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.held_bytes.load(Ordering::Relaxed)
    }

    /// Returns figures of the registered buffers that encoded pages and page maps travel in.
    /// `registrations` stops growing once every worker has reached its peak of pages in flight.
    pub fn registered_memory(&self) -> RegPoolStats {
        self.registered.stats()
    }

    /// Returns the bytes granted by all servers to pools that regions share: at least what open
    /// regions reserved.
    pub fn granted_bytes(&self) -> u64 {
        let pools: Vec<_> = self.pools.lock().values().cloned().collect();
        (pools.iter()).map(|pool| pool.memory_bytes()).sum()
    }

    /// Returns the pools whose pages are on more than one server, and are written.
    pub(crate) fn pools_with_copies(&self) -> Vec<Arc<SlotPool>> {
        if !self.has_copies() {
            return Vec::new();
        }
        let shared = self.shared_pools().into_iter();
        let pools = shared.filter(|pool| pool.has_copies());
        pools.chain(self.named_with_copies()).collect()
    }

    /// Returns the pools that repairs look after: those with copies, and while servers leave all
    /// that regions share.
    pub(crate) fn pools_to_repair(&self) -> Vec<Arc<SlotPool>> {
        match self.health.any_leaving() {
            true => (self.shared_pools().into_iter())
                .chain(self.named_with_copies())
                .collect(),
            false => self.pools_with_copies(),
        }
    }

    /// Returns the pools of named regions with copies that are open for writing.
    fn named_with_copies(&self) -> impl Iterator<Item = Arc<SlotPool>> {
        let own = self.own_pools().into_iter();
        own.filter(|pool| pool.has_copies() && pool.is_written_whole())
    }

    /// Returns the pools that regions share.
    pub(crate) fn shared_pools(&self) -> Vec<Arc<SlotPool>> {
        self.pools.lock().values().cloned().collect()
    }

    /// Returns the pools of one named region each, or of one version of it.
    pub(crate) fn own_pools(&self) -> Vec<Arc<SlotPool>> {
        (self.own_pools.lock().iter())
            .filter_map(Weak::upgrade)
            .collect()
    }

    /// True once a region has copies: unreachable servers are borne from then on.
    pub(crate) fn has_copies(&self) -> bool {
        self.has_copies.load(Ordering::Relaxed)
    }

    /// Makes a pool of one region on the servers of `ports`, in this order.
    pub(crate) fn own_pool(
        &self,
        ports: impl IntoIterator<Item = usize>,
        purpose: Purpose,
        redundancy: Redundancy,
    ) -> Arc<SlotPool> {
        self.note_copies(redundancy);
        let pool = Arc::new(self.new_pool(ports, purpose, redundancy));
        let mut own = self.own_pools.lock();
        own.retain(|pool| pool.strong_count() > 0);
        own.push(Arc::downgrade(&pool));
        pool
    }

    fn note_copies(&self, redundancy: Redundancy) {
        if redundancy.copies() > 1 {
            self.has_copies.store(true, Ordering::Relaxed);
        }
    }

    fn new_pool(
        &self,
        ports: impl IntoIterator<Item = usize>,
        purpose: Purpose,
        redundancy: Redundancy,
    ) -> SlotPool {
        let server = |port: usize| (port, self.sessions[port].clone());
        let servers = ports.into_iter().map(server).collect();
        let held_bytes = self.held_bytes.clone();
        let (registered, health) = (self.registered.clone(), self.health.clone());
        SlotPool::new(
            servers,
            registered,
            (purpose, redundancy),
            health,
            held_bytes,
        )
    }

    /// Returns the pool of regions with these properties.
    pub(crate) fn shared_pool(&self, key: PoolKey) -> Arc<SlotPool> {
        self.note_copies(key.redundancy);
        let ports = 0..self.sessions.len();
        let new = || self.new_pool(ports, Purpose::Shared, key.redundancy);
        (self.pools.lock().entry(key))
            .or_insert_with(|| Arc::new(new()))
            .clone()
    }

    pub(crate) fn opened(&self, stats: &Arc<StoreStats>) {
        self.stats.lock().open.push(Arc::downgrade(stats));
    }

    pub(crate) fn closed(&self, stats: &Arc<StoreStats>) {
        let mut ledger = self.stats.lock();
        let weak = Arc::downgrade(stats);
        ledger.open.retain(|open| !open.ptr_eq(&weak));
        ledger.closed = ledger.closed + stats.snapshot();
    }
}
