//! Pages to remote bytes: where each page of a region is kept, how it is encoded, and whether it
//! came back as it left.
//!
//! The rule this crate keeps: **a fill hands out what the last finished write-back took in, or an
//! error.** Every page has a 128-bit hash in its entry; pages are written out of place, so that a
//! write that fails half way leaves the last good copy alone. The choice of pages to move and the
//! handling of errors are left to the pager.
//!
//! - [`Cluster`]: the memory servers of a runtime and the slots carved out of what they granted.
//! - [`PageStore`]: the pages of one region, kept by memory servers or by a user's own [`Store`].
//! - [`IoQueue`]: the I/O of one worker thread, which moves pages.
#![forbid(unsafe_code)]

mod adds;
mod blocking;
mod cluster;
mod codec;
mod drain;
mod drains;
mod elements;
mod entry;
mod error;
mod file;
mod groups;
mod health;
mod io_queue;
mod mover;
mod named;
mod names;
mod on_disk;
mod options;
mod page;
mod parity;
mod place;
mod pool;
mod publications;
mod readers;
mod remote;
mod repair;
mod roster;
mod sealed;
mod set_maker;
mod slots;
mod snapshot;
mod snapshots;
mod stats;
#[cfg(test)]
mod tests;
mod turn;

pub use adds::AddServerError;
pub use blocking::{BlockingOptions, Store};
pub use cluster::{Cluster, ClusterOptions};
pub use codec::{Block, Codec, CodecError, CodecTrial, Element, Layout, ZfpMode};
pub use drain::Drain;
pub use drains::{DrainError, DrainReport};
pub use elements::{ElementType, Elements};
pub use entry::EntryWords;
pub use error::{
    CreateError, MixedServersError, OpenStoreError, PublishStoreError, StoreError, TableError,
};
pub use farpage_fabric::regmem::RegPoolStats;
pub use file::{FileStore, FileStoreError};
pub use io_queue::{IoLoad, IoQueue, RunBuffer, RunCompletion, RunCounts, RunTiming, StoreCall};
pub use names::{NamedRegion, NamesError};
pub use options::{Redundancy, RedundancyError, RemoteOptions, Reserve};
pub use page::{PageIndex, PageIter, PageRange};
pub use remote::PageStore;
pub use snapshot::Snapshot;
pub use stats::{StoreStats, StoreStatsSnapshot};
