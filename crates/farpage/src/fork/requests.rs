//! [`KeeperRequest`]: what the keeper's I/O queue reads or writes.
//!
//! The rule it keeps: the end of a store or of a snapshot may ask servers, so none ends inside the
//! I/O queue: the request may be the last to hold it, and is handed back first.

use std::sync::Arc;

use farpage_fabric::ConnectError;
use farpage_store::{Cluster, IoQueue};

use super::{forked::Arriving, image::Image, stored::Place};

/// Place that a request reads or writes, and the image of its child.
pub(super) type Source = (Place, Arc<Image>);

/// Request to the keeper's I/O queue.
pub(super) struct KeeperRequest {
    pub(super) task: KeeperTask,
    pub(super) source: Source,
}

/// Purpose of a request.
pub(super) enum KeeperTask {
    Read(Arriving),
    /// WRITE of changed bytes of a child's page, by the page's address.
    Write {
        child: u64,
        address: usize,
    },
}

/// Answer to a fault.
pub(super) enum Begun {
    Done,
    /// The fault waits for the child's agent, or for another page.
    Waits,
    /// The I/O queue has no room.
    NoRoom,
}

pub(super) type KeeperQueue = IoQueue<KeeperRequest, Vec<u8>>;

/// Returns the pages that the I/O queue is reading.
pub(super) fn arriving(io: &Option<KeeperQueue>) -> impl Iterator<Item = &Arriving> {
    let requests = io.iter().flat_map(IoQueue::requests);
    requests.filter_map(|request| match &request.task {
        KeeperTask::Read(arriving) => Some(arriving),
        KeeperTask::Write { .. } => None,
    })
}

/// Returns the I/O queue to the servers. Made at the first call.
///
/// # Errors
/// As [`IoQueue::unopened`].
pub(super) fn queue_of<'a>(
    io: &'a mut Option<KeeperQueue>,
    cluster: &Arc<Cluster>,
) -> Result<&'a mut KeeperQueue, ConnectError> {
    match io {
        Some(io) => Ok(io),
        None => Ok(io.insert(IoQueue::unopened(cluster)?)),
    }
}
