//! Hand-over of all that a server lends to its next process.
//!
//! The earlier process writes its state into a sealed file in memory, and passes that file together
//! with the descriptors that the state refers to. The next process takes the state over, and
//! serves.
//!
//! The rule this folder keeps: nothing is lost where the next process cannot take over. The state
//! carries a version and a checksum, and is checked before anything of it is used. No number in it
//! is trusted.
//!
//! Left to others: what a session, an extent or a name is ([`State`](crate::State)), and the
//! connections ([`farpage_fabric::server`]).

mod error;
mod format;
mod received;
mod store;
mod successor;

pub use self::{
    error::HandoverError, received::Handover, store::ServiceManager, successor::Successor,
};
pub(crate) use self::{
    format::{
        HandedBooks, HandedChunk, HandedConnection, HandedDurable, HandedExtent, HandedFigures,
        HandedGiven, HandedListener, HandedName, HandedPlace, HandedPool, HandedRetained,
        HandedServer, HandedSession, HandedSlots, HandedTier, HandedTiered, HandedVersion,
        HandedView,
    },
    received::Descriptors,
    store::Kept,
    successor::{Carried, let_all_inherit, seal},
};
