//! Patterns of communication over one-sided operations: waiting for completions, and messages
//! through a ring.
//!
//! The rule it keeps: built on [`Channel`](crate::Channel) alone, so that each works on every
//! fabric. After Yamabe, "RDMA programming design and case studies".
//!
//! - [`CompletionEngine`]: waits for the operations of one channel or of many, by polling, by
//!   events, or by whichever has paid off lately.
//! - [`RingSender`], [`RingReceiver`], [`RingInbox`]: messages that senders WRITE into the
//!   receiver's memory without waiting for it.

pub use crate::{
    engine::{CompletionEngine, Source, WaitMode, Waiter, sleep},
    exchange::ring::{
        Notifier, RingError, RingInbox, RingMemory, RingPlace, RingReceiver, RingSender, SendError,
    },
};
