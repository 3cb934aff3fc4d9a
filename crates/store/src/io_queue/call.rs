//! [`StoreCall`]: one call of a user's own store, made by a worker or on a thread of the store.
//!
//! The rule it keeps: the result of every call comes back to its I/O queue.

use std::{io, sync::Arc};

use crossbeam_channel::Sender;

use super::{operation::RunBuffer, run::Direction};
use crate::blocking::{BlockingStore, StoreCallError, StoreJob, Waker};

/// One call of a user's store.
pub struct StoreCall<F> {
    pub(super) index: usize,
    pub(super) part: usize,
    pub(super) blocking: Arc<BlockingStore>,
    pub(super) way: Direction,
    pub(super) offset: u64,
    /// Bytes to move: less than the frame holds for the region's last page.
    pub(super) len: usize,
    pub(super) frame: F,
    pub(super) result: Result<(), StoreCallError>,
    /// True if a worker makes the call.
    pub(super) by_worker: bool,
    pub(super) reply: Sender<Box<StoreCall<F>>>,
    pub(super) waker: Arc<Waker>,
}

impl<F: RunBuffer> StoreCall<F> {
    /// Makes the call, which may take long.
    pub fn make(&mut self) {
        let Self { offset, len, .. } = *self;
        self.result = match self.way {
            Direction::Fill => {
                let buf = &mut self.frame.as_mut()[..len];
                self.blocking.call(len, |store| store.read(offset, buf))
            }
            Direction::WriteBack => {
                let buf = &self.frame.as_ref()[..len];
                self.blocking.call(len, |store| store.write(offset, buf))
            }
        };
        if self.by_worker {
            self.blocking.leave();
        }
    }

    /// Hands the result to the I/O queue, and wakes the thread that drives the I/O queue by now.
    pub fn hand_in(self: Box<Self>) {
        let (reply, waker) = (self.reply.clone(), self.waker.clone());
        // An I/O queue that is gone wants no answer.
        if reply.send(self).is_ok() {
            waker.wake();
        }
    }
}

impl<F: RunBuffer> StoreJob for StoreCall<F> {
    fn run(mut self: Box<Self>) {
        self.make();
        self.hand_in();
    }

    fn fail(mut self: Box<Self>, why: io::Error) {
        self.result = Err(StoreCallError::Io(why));
        self.hand_in();
    }
}
