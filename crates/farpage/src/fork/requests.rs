//! [`Requests`]: what the keeper's I/O queue reads and writes just now.
//!
//! The rule it keeps: the end of a store or of a snapshot may ask servers, so none ends inside the
//! I/O queue, whose request may be the last to hold it.

use std::{collections::HashMap, mem, sync::Arc};

use farpage_fabric::ConnectError;
use farpage_store::{Cluster, IoQueue};

use super::{image::Image, stored::Place};

/// Place that a request reads or writes, and the image of its child.
pub(super) type Source = (Place, Arc<Image>);

/// Sources of all requests that the I/O queue has not completed.
#[derive(Default)]
pub(super) struct Requests {
    sources: HashMap<u64, Source>,
    /// Sources of completed requests whose child has ended.
    spent: Vec<Source>,
}

impl Requests {
    /// Notes what the request of this tag reads or writes.
    pub(super) fn begin(&mut self, tag: u64, source: Source) {
        self.sources.insert(tag, source);
    }

    /// Notes that the request of this tag has ended. `is_alive` says that its child has not.
    pub(super) fn end(&mut self, tag: u64, is_alive: bool) {
        let source = self.sources.remove(&tag);
        self.spent.extend(source.filter(|_| !is_alive));
    }

    /// Returns the sources of requests whose child has ended, which may be the last to be dropped.
    pub(super) fn take_spent(&mut self) -> Option<Vec<Source>> {
        (!self.spent.is_empty()).then(|| mem::take(&mut self.spent))
    }
}

/// Returns the I/O queue to the servers. Made at the first call.
///
/// # Errors
/// As [`IoQueue::new`].
pub(super) fn queue_of<'a>(
    io_queue: &'a mut Option<IoQueue<Vec<u8>>>,
    cluster: &Arc<Cluster>,
) -> Result<&'a mut IoQueue<Vec<u8>>, ConnectError> {
    match io_queue {
        Some(io_queue) => Ok(io_queue),
        None => Ok(io_queue.insert(IoQueue::new(cluster)?)),
    }
}
