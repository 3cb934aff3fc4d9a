//! [`Cq`], the completion queue, and its reports: [`WorkCompletion`] and [`Failure`].

use std::{
    ffi::{CStr, c_int},
    io,
    os::fd::{AsFd, BorrowedFd},
    ptr::{self, NonNull},
    sync::Arc,
};

use rdma_sys as sys;

use super::{
    errno::{check, not_null, set_nonblocking},
    memory::Device,
};

/// Upper bound of the completions that one look at a completion queue brings.
pub(in crate::rdma) const COMPLETIONS: usize = 32;

/// A completion queue that can be slept on. Its maker polls it, for all queue pairs that report to
/// it.
#[derive(Debug)]
pub(in crate::rdma) struct Cq {
    pub(super) raw: NonNull<sys::ibv_cq>,
    events: NonNull<sys::ibv_comp_channel>,
}

// SAFETY: completion queues may be used by any thread.
unsafe impl Send for Cq {}
// SAFETY: as above.
unsafe impl Sync for Cq {}

impl Cq {
    /// Makes a queue for `depth` completions that were not taken: all work requests of its queue
    /// pairs, since it must never overflow.
    pub(in crate::rdma) fn new(device: Device, depth: usize) -> io::Result<Arc<Self>> {
        let context = device.0.as_ptr();
        // SAFETY: the context is open.
        let events = not_null(unsafe { sys::ibv_create_comp_channel(context) })?;
        // SAFETY: the channel was just made and is destroyed after the queue.
        let raw = not_null(unsafe {
            sys::ibv_create_cq(context, depth as c_int, ptr::null_mut(), events.as_ptr(), 0)
        });
        let raw = match raw {
            Ok(raw) => raw,
            Err(error) => {
                // SAFETY: made above and used by nobody.
                unsafe { sys::ibv_destroy_comp_channel(events.as_ptr()) };
                return Err(error);
            }
        };
        let queue = Self { raw, events };
        set_nonblocking(queue.as_fd())?;
        Ok(Arc::new(queue))
    }

    /// Takes completions. Returns how many of `done` were filled.
    pub(in crate::rdma) fn poll(
        &self,
        done: &mut [Option<WorkCompletion>; COMPLETIONS],
    ) -> io::Result<usize> {
        // SAFETY: plain data.
        let mut completions: [sys::ibv_wc; COMPLETIONS] = unsafe { std::mem::zeroed() };
        // SAFETY: the queue is ours, and there is room for so many.
        let count = unsafe {
            sys::ibv_poll_cq(
                self.raw.as_ptr(),
                COMPLETIONS as i32,
                completions.as_mut_ptr(),
            )
        };
        let count = usize::try_from(count)
            .map_err(|_| io::Error::other("the completion queue cannot be read"))?;
        for (completion, done) in completions[..count].iter().zip(done) {
            let ok = completion.status == sys::ibv_wc_status::IBV_WC_SUCCESS;
            *done = Some(WorkCompletion {
                tag: completion.wr_id,
                result: if ok {
                    Ok(())
                } else {
                    Err(Failure(completion.status))
                },
            });
        }
        Ok(count)
    }

    /// Asks for one wake-up at the next completion. Poll once more afterwards: earlier completions
    /// do not wake.
    pub(in crate::rdma) fn arm(&self) -> io::Result<()> {
        // SAFETY: the queue is ours.
        check(unsafe { sys::ibv_req_notify_cq(self.raw.as_ptr(), 0) })
    }

    /// Takes wake-ups out of the descriptor. True if there was one: the queue then has to be armed
    /// anew.
    pub(in crate::rdma) fn take_wakeups(&self) -> bool {
        let mut count = 0;
        loop {
            let (mut queue, mut context) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: the channel is ours, non-blocking, and both pointers are written only on
            // success.
            let taken = unsafe {
                sys::ibv_get_cq_event(self.events.as_ptr(), &raw mut queue, &raw mut context)
            };
            if taken != 0 {
                break;
            }
            count += 1;
        }
        if count > 0 {
            // SAFETY: so many were taken, all of this queue, the only one of its channel.
            unsafe { sys::ibv_ack_cq_events(self.raw.as_ptr(), count) };
        }
        count > 0
    }
}

/// Descriptor that is readable when an armed queue has completions.
impl AsFd for Cq {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: open for as long as the channel lives.
        unsafe { BorrowedFd::borrow_raw(self.events.as_ref().fd) }
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: its queue pairs are gone (each [`Pair`](super::Pair) holds the queue until after
        // its own) and every event was acknowledged where it was taken.
        unsafe {
            sys::ibv_destroy_cq(self.raw.as_ptr());
            sys::ibv_destroy_comp_channel(self.events.as_ptr());
        }
    }
}

/// The end of a work request.
#[derive(Clone, Copy, Debug)]
pub(in crate::rdma) struct WorkCompletion {
    pub(in crate::rdma) tag: u64,
    pub(in crate::rdma) result: Result<(), Failure>,
}

/// Reason why a work request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rdma) struct Failure(sys::ibv_wc_status::Type);

impl Failure {
    /// End of the connection before the work was done.
    pub(in crate::rdma) const FLUSH: Self = Self(sys::ibv_wc_status::IBV_WC_WR_FLUSH_ERR);

    /// Refusal of the adapter to take the work at all.
    pub(in crate::rdma) const REFUSED: Self = Self(sys::ibv_wc_status::IBV_WC_LOC_QP_OP_ERR);

    /// True if the connection was ended, by whichever side, before the work was done.
    pub(in crate::rdma) fn is_flush(self) -> bool {
        self == Self::FLUSH
    }

    /// Describes the failure to a user who waits for a peer.
    pub(in crate::rdma) fn describe(self) -> String {
        use sys::ibv_wc_status::*;
        // SAFETY: the library returns a static string for any status.
        let text = unsafe { CStr::from_ptr(sys::ibv_wc_status_str(self.0)) }.to_string_lossy();
        let meaning = match self.0 {
            IBV_WC_RETRY_EXC_ERR => "the peer does not answer",
            IBV_WC_REM_ACCESS_ERR => {
                "the peer's memory is out of reach: it died, or the lease has ended"
            }
            IBV_WC_WR_FLUSH_ERR => "the connection is down",
            IBV_WC_RNR_RETRY_EXC_ERR => "the peer does not receive",
            IBV_WC_REM_INV_REQ_ERR => {
                "the peer's adapter does not do this: an atomic, and it has none?"
            }
            IBV_WC_LOC_QP_OP_ERR => {
                "the adapter does not take this work: WRITE with immediate data, and it has none?"
            }
            _ => return format!("the adapter reports: {text}"),
        };
        format!("{meaning} ({text})")
    }
}
