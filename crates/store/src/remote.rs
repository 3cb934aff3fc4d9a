//! SKELETON.
use std::{fmt, sync::Arc};
use crate::*;

/// A region, as errors and counters call it. Given by the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionId(pub u64);
impl fmt::Display for RegionId { fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { fmt::Display::fmt(&self.0, f) } }

/// How much remote memory a region takes when it is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reserve {
    /// Its raw size plus what writes in flight need: an eviction cannot fail for lack of remote memory.
    #[default]
    Full,
    /// What its pages need as they are written back; when the servers are full, a write-back fails with a typed error.
    OnDemand,
}

/// What a remote region is to be like.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RemoteOptions {
    /// Codec. Default: raw.
    pub codec: Codec,
    /// Reservation. Default: full.
    pub reserve: Reserve,
    /// Extents of its own, so that it can be published under a name. Default: false.
    pub named: bool,
}
impl Default for RemoteOptions { fn default() -> Self { Self { codec: Codec::Raw, reserve: Reserve::Full, named: false } } }

/// The pages of one region.
pub struct PageStore { _p: () }
impl PageStore {
    /// Zeroed pages kept by the cluster's servers.
    pub fn remote(cluster: &Arc<Cluster>, region: RegionId, bytes: u64, page_bytes: usize, options: &RemoteOptions) -> Result<Arc<Self>, CreateError> { let _ = (cluster, region, bytes, page_bytes, options); todo!() }
    /// Opens a published region; its size, page size and codec come from its manifest.
    pub fn open(cluster: &Arc<Cluster>, region: RegionId, name: &str) -> Result<Arc<Self>, OpenStoreError> { let _ = (cluster, region, name); todo!() }
    /// Pages kept by a user's own store.
    pub fn blocking(cluster: &Arc<Cluster>, region: RegionId, bytes: u64, page_bytes: usize, store: Arc<dyn Store>, options: &BlockingOptions) -> Result<Arc<Self>, CreateError> { let _ = (cluster, region, bytes, page_bytes, store, options); todo!() }
    /// Publishes what has been written back so far under `name`, atomically. Pages may move meanwhile.
    pub fn publish(&self, name: &str) -> Result<(), PublishStoreError> { let _ = name; todo!() }
    /// Makes what has been written back durable (a user's own store); nothing to do for remote memory.
    pub fn flush(&self) -> std::io::Result<()> { todo!() }
    /// Region.
    pub fn region(&self) -> RegionId { todo!() }
    /// Size of the region in bytes.
    pub fn bytes(&self) -> u64 { todo!() }
    /// Page size.
    pub fn page_bytes(&self) -> usize { todo!() }
    /// Number of pages.
    pub fn pages(&self) -> u64 { todo!() }
    /// Whether a fill of this page ends at once, without a request (read-ahead need not bother).
    pub fn is_immediate(&self, page: u64) -> bool { let _ = page; todo!() }
    /// Counters.
    pub fn stats(&self) -> StoreStatsSnapshot { todo!() }
}
