//! SKELETON.
use std::{sync::Arc, time::Duration};
use farpage_fabric::Session;
use crate::StoreStatsSnapshot;

/// How a cluster behaves.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ClusterOptions {
    /// Transient failures of one page operation are repeated for so long. Default: 10 s.
    pub deadline: Duration,
}
impl Default for ClusterOptions { fn default() -> Self { Self { deadline: Duration::from_secs(10) } } }

/// The memory servers of a runtime.
pub struct Cluster { _p: () }
impl Cluster {
    /// A cluster of these servers; none is fine for regions with stores of their own.
    pub fn new(sessions: Vec<Arc<Session>>, options: ClusterOptions) -> Arc<Self> { let _ = (sessions, options); todo!() }
    /// All sessions.
    pub fn sessions(&self) -> &[Arc<Session>] { todo!() }
    /// Sum over all stores, also closed ones.
    pub fn stats(&self) -> StoreStatsSnapshot { todo!() }
}
