//! Messages through rings: senders WRITE into the receiver's memory and wait for no answer.
//!
//! The rule it keeps: each sender has a ring of its own, so a sender that dies or lies harms no
//! other. The receiver reads only bytes that are complete: one WRITE places them, and a second one
//! behind it places the position up to which they are valid.
//!
//! A ring lies in memory that its receiver owns and its sender can WRITE and READ, an extent or a
//! registered buffer:
//!
//! ```text
//!   0  tail: how many bytes were sent, ever       WRITten by the sender
//!  64  consumed: how many of them are taken       READ by the sender when its credits are used up
//! 128  messages in `capacity` bytes, each behind its length (8 bytes) and padded to 8;
//!      position p lies at p modulo `capacity`
//! ```
//!
//! A check value follows each of tail and consumed, because a word may be placed byte by byte. A
//! receiver notices messages by looking at the tail. A sender in the same process wakes a sleeping
//! receiver by a [`Notifier`] once the tail has been placed. A sender on another host wakes it by
//! the WRITE of the tail itself, where that can carry immediate data
//! ([`Channel::post_notifying`](crate::Channel::post_notifying)). Control connections over RDMA do
//! so.

mod board;
mod layout;
mod receiver;
mod sender;

#[cfg(feature = "rdma")]
pub(crate) use self::layout::HEADER_BYTES;
pub(crate) use self::layout::STREAM_MESSAGE_BYTES;
#[cfg(all(test, feature = "rdma"))]
pub(crate) use self::layout::sealed;
pub use self::{
    board::Board,
    layout::{Notifier, RingError, RingMemory, RingPlace},
    receiver::{RingInbox, RingReceiver},
    sender::{RingSender, SendError},
};
