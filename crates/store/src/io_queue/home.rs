//! Requests to pages that are on one server: the extent that has their bytes now.
//!
//! The rule it keeps: a READ that fails, or brings wrong bytes, is repeated where the bytes are now
//! if they have moved since the READ began. Moving them is left to the [repairs](crate::repair).
//!
//! A WRITE needs no such look: an extent does not move while a write to it is under way.

use farpage_fabric::Op;

use super::{
    IoQueue, RunBuffer, place_of,
    run::{Direction, SlotTransfer, Task},
    staging::IoBuf,
};
use crate::remote::{Backing, RemoteStore};

impl SlotTransfer {
    /// Directs the next request to the extent that has the bytes now. True if that is another one
    /// than before.
    pub(super) fn aim_home(&mut self, remote: &RemoteStore) -> bool {
        let Some((server, id)) = remote.pool.home(self.place) else {
            // A place that another process names may be gone: its server refuses the READ.
            return false;
        };
        let has_moved = (self.server, self.extent) != (server, Some(id));
        (self.server, self.extent) = (server, Some(id));
        has_moved
    }

    /// True if another extent has the bytes now than the one that the request went to.
    pub(super) fn has_moved_home(&self, remote: &RemoteStore) -> bool {
        let home = remote.pool.home(self.place);
        home.is_some_and(|(server, id)| (self.server, self.extent) != (server, Some(id)))
    }

    /// True if the bytes may have come from an extent that does not hold them any more: they have
    /// moved since the READ began.
    pub(super) fn is_stale(&self, remote: &RemoteStore) -> bool {
        if !remote.pool.has_copies() {
            return self.has_moved_home(remote);
        }
        let group = remote.pool.group(self.place);
        group.is_some_and(|group| group.changes != self.changes)
    }
}

impl<F: RunBuffer> IoQueue<F> {
    /// True if the bytes of a page without copies have moved since its READ began.
    pub(super) fn has_moved(&self, tag: u64) -> bool {
        let (_, part) = place_of(tag);
        let run = self.run_of(tag);
        match (&run.store.backing, &run.parts[part].task) {
            (Backing::Remote(remote), Task::Moving(transfer)) => {
                run.way == Direction::Fill && transfer.has_moved_home(remote)
            }
            _ => false,
        }
    }

    /// Sends a READ that waits for a channel where its bytes have moved to, if they have. Returns
    /// it otherwise.
    pub(super) fn redirect_home(&mut self, op: Op<IoBuf<F>>) -> Option<Op<IoBuf<F>>> {
        if !self.has_moved(op.tag) {
            return Some(op);
        }
        let (index, part) = place_of(op.tag);
        let run = self.runs[index].as_mut().expect("looked at just now");
        let store = run.store.clone();
        let (Backing::Remote(remote), Task::Moving(transfer)) =
            (&store.backing, &mut run.parts[part].task)
        else {
            unreachable!("a request belongs to a part that moves")
        };
        transfer.aim_home(remote);
        let (verb, transfer) = (run.way.verb(), *transfer);
        self.repost(op.tag, verb, remote, transfer, op.buf);
        None
    }
}
