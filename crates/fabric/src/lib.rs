//! One-sided READ, WRITE and atomics on remote memory, over shared memory, TCP, RDMA or a seeded
//! simulation.
//!
//! The rule it keeps: a transport moves bytes and never learns what they mean. A client holds a
//! [`Session`] per server and a [`Channel`] per worker thread; a daemon implements [`host::Host`]
//! and runs a [`server::Service`]. Pages, slots and retries are left to the callers above.

mod allowance;
mod attachment;
pub mod channel;
#[cfg(feature = "conformance")]
pub mod conformance;
mod devices;
mod engine;
mod errors;
mod exchange;
mod home;
pub mod host;
pub mod key;
mod link;
pub mod log;
pub mod memory;
mod nonblocking;
mod options;
pub mod patterns;
#[cfg_attr(not(feature = "rdma"), path = "no_rdma.rs")]
mod rdma;
pub mod regmem;
mod resolver;
pub mod server;
pub mod session;
mod shm;
pub mod sim;
mod since;
mod stream;
mod tcp;

pub use allowance::Allowance;
pub use channel::{Buf, Busy, Channel, ChannelError, Completion, Op, PollInterest, Verb};
pub use devices::{RdmaDevice, rdma_devices};
pub use errors::{AllocError, ConnectError, ControlError, OpenNameError, PublishError};
pub use exchange::areas;
pub use farpage_wire::{
    Atomic, Durability, Endpoint, EndpointError, ExtentId, ExtentRange, Limit, MAX_OP_BYTES,
    NamedRegion, Persistence, PublicKey, Secret, ServerId, ServerStat, SessionId, VersionRead,
    Versions, debug_as_display, register,
};
pub use link::Link;
pub use options::{RdmaOptions, SessionOptions};
pub use session::{Extent, Line, Named, Reading, Session, Visit};
pub use since::Since;

/// Begins a child made by `fork`, which may make sessions of its own. Those of its parent are not
/// its: a thread that only the parent has may just have used their records.
///
/// # Safety
/// The calling thread is the only one of this process, and outside of this crate.
pub unsafe fn begin_child() {
    // SAFETY: the caller's promise.
    unsafe {
        home::begin_child();
        session::begin_child();
    }
}
