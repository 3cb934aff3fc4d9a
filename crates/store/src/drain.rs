//! Emptying a server: [`Cluster::drain_server`].
//!
//! The rule it keeps: from the beginning of a drain nothing is granted on the server, and the drain
//! has ended when no unnamed region has an extent there. Moving the extents is left to the
//! [repairs](crate::repair), whose thread judges after each turn if a drain has ended.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Weak},
};

use crossbeam_channel::Receiver;
use farpage_fabric::{AllocError, Endpoint, Session};

use crate::{
    Cluster,
    drains::{DrainCall, DrainError, DrainReport},
    pool::SlotPool,
};

/// Number of turns in which extents cannot be copied, and none moves, after which a drain ends in
/// an error. The pauses between them take five seconds: longer than a server's silence, which ends
/// by itself.
const FAILURES_TO_END: u32 = 8;

/// Reasons for which extents did not leave their servers in a turn of the repairs, by port.
#[derive(Default)]
pub(crate) struct DrainOutlook {
    /// Servers whose extents wait for something that ends by itself.
    waiting: HashSet<usize>,
    /// Servers for whose extents there is no room elsewhere, with the last refusal.
    refused: HashMap<usize, Option<AllocError>>,
    /// Servers extents of which could not be copied since an extent last moved: the number of turns
    /// in which that was so, and the last reason. Kept from turn to turn.
    failed: HashMap<usize, (u32, String)>,
    /// Servers that `failed` has counted this turn for.
    failed_now: HashSet<usize>,
    /// True if the turn ended before it had looked at all extents.
    is_partial: bool,
}

impl DrainOutlook {
    /// Forgets what was found in the last turn.
    pub(crate) fn begin_turn(&mut self) {
        self.waiting.clear();
        self.refused.clear();
        self.failed_now.clear();
        self.is_partial = false;
    }

    /// Notes that an extent leaves its servers later.
    pub(crate) fn wait(&mut self, leaves: &[usize]) {
        self.waiting.extend(leaves);
    }

    /// Notes that there is no room for an extent elsewhere.
    pub(crate) fn refuse(&mut self, leaves: &[usize], refusal: Option<&AllocError>) {
        for &port in leaves {
            let known = self.refused.entry(port).or_default();
            *known = refusal.cloned().or_else(|| known.take());
        }
    }

    /// Notes that an extent could not be copied. It waits, unless that has been so for long.
    pub(crate) fn fail(&mut self, leaves: &[usize], reason: &str) {
        for &port in leaves {
            let (turns, last) = self.failed.entry(port).or_default();
            *turns += u32::from(self.failed_now.insert(port));
            reason.clone_into(last);
            if *turns < FAILURES_TO_END {
                self.waiting.insert(port);
            }
        }
    }

    /// Notes that the turn moved an extent and looked no further.
    pub(crate) fn go_on(&mut self) {
        self.is_partial = true;
        self.failed.clear();
    }

    /// True if all extents on the servers lack room elsewhere, or cannot be copied.
    fn is_stuck(&self, ports: &[usize]) -> bool {
        let waits = |port| self.waiting.contains(port);
        let is_stuck = |port| self.refused.contains_key(port) || self.failed_now.contains(port);
        !self.is_partial && !ports.iter().any(waits) && ports.iter().any(is_stuck)
    }

    /// Returns the reason why extents on the servers cannot be copied.
    fn failure(&self, ports: &[usize]) -> Option<&str> {
        let mut failing = ports.iter().filter(|port| self.failed_now.contains(port));
        let (_, reason) = failing.find_map(|port| self.failed.get(port))?;
        Some(reason)
    }
}

/// Call that empties a server. The server goes on being emptied if it is dropped.
pub struct Drain {
    cluster: Arc<Cluster>,
    ports: Vec<usize>,
    /// Bytes that had been moved away before.
    moved_before: u64,
    answer: Receiver<Result<(), DrainError>>,
}

impl Drain {
    /// Waits until the server is empty. Holds nothing of the cluster's meanwhile. Call it once.
    ///
    /// # Errors
    /// [`DrainError`]
    pub fn wait(&self) -> Result<(), DrainError> {
        let answer = self.answer.recv();
        answer.expect("the thread that repairs answers, or aborts the process")
    }

    /// Returns what was moved during the call, and what stays.
    pub fn report(&self) -> DrainReport {
        let Self { cluster, ports, .. } = self;
        let on_server =
            |pool: Arc<SlotPool>| -> u64 { ports.iter().map(|&port| pool.bytes_on(port)).sum() };
        DrainReport {
            moved_bytes: cluster.drains.moved_bytes(ports) - self.moved_before,
            named_bytes: cluster.own_pools().into_iter().map(on_server).sum(),
        }
    }
}

impl Cluster {
    /// Empties a server: moves the extents of all unnamed regions from there to the other servers,
    /// while the regions are in use. Nothing new is granted there from now on, also after an error.
    /// Waits until the server is empty. Call it from any thread but a worker.
    ///
    /// # Errors
    /// [`DrainError`]. What was moved stays moved. The drain goes on after [`DrainError::NoRoom`],
    /// [`DrainError::Lost`] and [`DrainError::Failed`] as far as that is possible, without a
    /// caller; another call waits for it.
    pub fn drain_server(self: &Arc<Self>, endpoint: &Endpoint) -> Result<DrainReport, DrainError> {
        let drain = self.begin_drain(endpoint)?;
        drain.wait()?;
        Ok(drain.report())
    }

    /// Begins to empty a server, as [`drain_server`](Self::drain_server) does, and waits for no
    /// more than calls to servers that are under way.
    ///
    /// # Errors
    /// [`DrainError::Unknown`] and [`DrainError::Thread`].
    pub fn begin_drain(self: &Arc<Self>, endpoint: &Endpoint) -> Result<Drain, DrainError> {
        let sessions = self.sessions().iter().enumerate();
        let mut ports: Vec<usize> = (sessions.filter(|(_, it)| it.endpoint() == endpoint))
            .map(|(port, _)| port)
            .collect();
        // A server that was started anew has nothing of what was lost with its predecessor.
        let is_lost = |port: &usize| self.sessions()[*port].loss(false).is_some();
        if !ports.iter().all(is_lost) {
            ports.retain(|port| !is_lost(port));
        }
        if ports.is_empty() {
            let all = self.sessions().iter().map(|it| it.endpoint().to_string());
            return Err(DrainError::Unknown {
                endpoint: endpoint.to_string(),
                servers: all.collect::<Vec<_>>().join(", "),
            });
        }
        self.start_repairs()
            .map_err(|source| DrainError::Thread { source })?;
        for &port in &ports {
            self.health.set_leaving(port, true);
        }
        // A request that began before may still be granted. No extent comes behind it.
        let pools = self.shared_pools().into_iter().chain(self.own_pools());
        pools.for_each(|pool| pool.finish_grants());
        let moved_before = self.drains.moved_bytes(&ports);
        let answer = self.drains.add(endpoint.to_string(), ports.clone());
        self.health.wake();
        Ok(Drain {
            cluster: self.clone(),
            ports,
            moved_before,
            answer,
        })
    }

    /// Empties the session's server by itself, once, when it says that it is about to end.
    pub(crate) fn heed(self: &Arc<Self>, session: &Arc<Session>) {
        let (cluster, endpoint) = (Arc::downgrade(self), session.endpoint().clone());
        let drain = move |cluster: Weak<Cluster>, endpoint: Endpoint| {
            let Some(cluster) = cluster.upgrade() else {
                return;
            };
            // The drain goes on without a caller.
            match cluster.begin_drain(&endpoint) {
                Ok(_) => tracing::warn!(
                    %endpoint,
                    "memory server is about to end: what this program has there moves to its other servers"
                ),
                Err(error) => tracing::warn!(%endpoint, %error, "memory server is about to end"),
            }
        };
        session.when_draining(move || {
            let name = endpoint.clone();
            // The thread of the session renews the lease, and must not wait for calls.
            let begun = farpage_tables::errand("farpage-drain", move || drain(cluster, endpoint));
            if let Err(error) = begun {
                tracing::warn!(endpoint = %name, %error, "memory server is about to end, and no thread can be started to move what this program has there; drain it");
            }
        });
    }

    /// Answers the calls whose servers are empty, and those whose servers cannot be emptied.
    pub(crate) fn answer_drains(&self, pools: &[Arc<SlotPool>], outlook: &DrainOutlook) {
        self.drains.answer(|call| self.judge(call, pools, outlook));
    }

    fn judge(
        &self,
        call: &DrainCall,
        pools: &[Arc<SlotPool>],
        outlook: &DrainOutlook,
    ) -> Option<Result<(), DrainError>> {
        let (ports, endpoint) = (&call.ports, call.endpoint.clone());
        if !ports.iter().all(|&port| self.health.is_leaving(port)) {
            return Some(Err(DrainError::Cancelled { endpoint }));
        }
        let sum = |bytes: fn(&SlotPool, usize) -> u64, port| -> u64 {
            pools.iter().map(|pool| bytes(pool, port)).sum()
        };
        // Each port by itself: another may be that of a server before it at the same address.
        let is_empty = |port: &usize| {
            let owes = || pools.iter().any(|pool| pool.owes(*port));
            sum(SlotPool::bytes_on, *port) == 0 && (self.why_silent(*port).is_some() || !owes())
        };
        if ports.iter().all(is_empty) {
            // A pool none of whose servers stays may grow here until now.
            (ports.iter()).for_each(|&port| self.health.set_emptied(port, true));
            pools.iter().for_each(|pool| pool.finish_grants());
            if ports.iter().all(is_empty) {
                return Some(Ok(()));
            }
            (ports.iter()).for_each(|&port| self.health.set_emptied(port, false));
            return None;
        }
        let left: Vec<usize> = (ports.iter().copied())
            .filter(|port| !is_empty(port))
            .collect();
        for &port in &left {
            let left_bytes = sum(SlotPool::bytes_only_on, port);
            if let Some(reason) = self.why_silent(port).filter(|_| left_bytes > 0) {
                return Some(Err(DrainError::Lost {
                    endpoint,
                    left_bytes,
                    reason,
                }));
            }
        }
        outlook.is_stuck(&left).then(|| {
            let left_bytes = left.iter().map(|&port| sum(SlotPool::bytes_on, port)).sum();
            if let Some(reason) = outlook.failure(&left) {
                return Err(DrainError::Failed {
                    endpoint,
                    left_bytes,
                    reason: reason.to_owned(),
                });
            }
            let refusals = left
                .iter()
                .filter_map(|port| outlook.refused.get(port)?.as_ref());
            Err(DrainError::NoRoom {
                endpoint,
                left_bytes,
                refusal: refusals.map(ToString::to_string).next(),
            })
        })
    }

    /// Returns the reason why a server does not answer any more, if it is given up.
    pub(crate) fn why_silent(&self, port: usize) -> Option<String> {
        let lost = self.sessions()[port].loss(false);
        let silent = self.health.suspect_for(port);
        let given_up = silent.filter(|silent| *silent >= self.dead_after);
        lost.or_else(|| given_up.map(|silent| format!("silent for {} ms", silent.as_millis())))
    }
}
