//! [`Leases`]: extent to owner and memory, for the data path.
//!
//! The rule it keeps: a READ or WRITE never waits for the ledger. A lease changes here and in the
//! ledger together, while the ledger is locked.

use std::{collections::HashMap, sync::Arc};

use farpage_fabric::memory::ExtentMemory;
use farpage_wire::{ExtentId, SessionId};
use parking_lot::RwLock;

/// Number of shards: threads of a large machine rarely meet in one. Each is a small table.
const SHARDS: usize = 64;

type Shard = RwLock<HashMap<ExtentId, (SessionId, Arc<ExtentMemory>)>>;

/// Map from extent to owner and memory, for the data path.
pub(super) struct Leases {
    shards: [Shard; SHARDS],
}

impl Default for Leases {
    fn default() -> Self {
        Self {
            shards: std::array::from_fn(|_| RwLock::default()),
        }
    }
}

impl Leases {
    fn shard(&self, id: ExtentId) -> &Shard {
        // Ids are handed out one after the other, which spreads them evenly.
        &self.shards[(id.0 % SHARDS as u64) as usize]
    }

    pub(super) fn get(&self, session: SessionId, id: ExtentId) -> Option<Arc<ExtentMemory>> {
        let shard = self.shard(id).read();
        let (owner, memory) = shard.get(&id)?;
        (*owner == session).then(|| memory.clone())
    }

    pub(super) fn insert(&self, id: ExtentId, session: SessionId, memory: Arc<ExtentMemory>) {
        self.shard(id).write().insert(id, (session, memory));
    }

    pub(super) fn remove(&self, id: ExtentId) {
        self.shard(id).write().remove(&id);
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.shards.iter().map(|shard| shard.read().len()).sum()
    }
}
