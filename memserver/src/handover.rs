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

mod format;
mod received;
mod store;
mod successor;

pub(crate) use self::{
    format::{
        HandedBooks, HandedChunk, HandedConnection, HandedDurable, HandedExtent, HandedFigures,
        HandedGiven, HandedListener, HandedName, HandedPlace, HandedPool, HandedRetained,
        HandedServer, HandedSession, HandedSlots, HandedTier, HandedTiered, HandedVersion,
        HandedView,
    },
    received::Descriptors,
    successor::{Carried, let_all_inherit, seal},
};
pub use self::{received::Handover, store::ServiceManager, successor::Successor};

farpage_wire::debug_as_display!(HandoverError);

/// Reason why a server's next process cannot take over.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum HandoverError {
    /// The state cannot be used.
    #[error("cannot take over from the earlier process: {0}")]
    State(String),
    /// The settings decide where lent bytes are, and have changed.
    #[error(
        "cannot take over from the earlier process: {setting} was {before:?} and is {now:?} now; stop the server and start it anew to change that, which loses what it lends"
    )]
    Setting {
        /// The setting.
        setting: &'static str,
        /// Value at the earlier process.
        before: String,
        /// Value now.
        now: String,
    },
    /// The server cannot hand over now.
    #[error("cannot hand over to a next process: {0}")]
    Refused(String),
    /// The next process has found, before anything was handed over, that it could not serve.
    #[error("the new process would not serve, so this one goes on: {0}")]
    Rehearsal(String),
}
