//! [`StoreCall`]: one call of a user's own store, made by a worker or on a thread of the store.
//!
//! The rule it keeps: the result of every call comes back to its lane.

use std::{io, sync::Arc};

use crossbeam_channel::Sender;

use super::{operation::Frame, run::Way};
use crate::blocking::{BlockingStore, CallError, Waker, Work};

/// One call of a user's store.
pub struct StoreCall<F> {
    pub(super) index: usize,
    pub(super) part: usize,
    pub(super) blocking: Arc<BlockingStore>,
    pub(super) way: Way,
    pub(super) offset: u64,
    /// Bytes to move: less than the frame holds for the region's last page.
    pub(super) len: usize,
    pub(super) frame: F,
    pub(super) result: Result<(), CallError>,
    /// True if a worker makes the call.
    pub(super) by_worker: bool,
    pub(super) reply: Sender<Box<StoreCall<F>>>,
    pub(super) waker: Arc<Waker>,
}

impl<F: Frame> StoreCall<F> {
    /// Makes the call, which may take long.
    pub fn make(&mut self) {
        let Self { offset, len, .. } = *self;
        self.result = match self.way {
            Way::Fill => {
                let buf = &mut self.frame.as_mut()[..len];
                self.blocking.call(len, |store| store.read(offset, buf))
            }
            Way::WriteBack => {
                let buf = &self.frame.as_ref()[..len];
                self.blocking.call(len, |store| store.write(offset, buf))
            }
        };
        if self.by_worker {
            self.blocking.leave();
        }
    }

    /// Hands the result to the lane, and wakes the thread that drives the lane by now.
    pub fn hand_in(self: Box<Self>) {
        let (reply, waker) = (self.reply.clone(), self.waker.clone());
        // A lane that is gone wants no answer.
        if reply.send(self).is_ok() {
            waker.wake();
        }
    }
}

impl<F: Frame> Work for StoreCall<F> {
    fn run(mut self: Box<Self>) {
        self.make();
        self.hand_in();
    }

    fn fail(mut self: Box<Self>, why: io::Error) {
        self.result = Err(CallError::Io(why));
        self.hand_in();
    }
}
