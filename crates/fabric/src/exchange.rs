//! Exchanges among programs that wait for one another: rings of messages, boards with a number that
//! READs wait for, and the areas that a program lends to its peers.
//!
//! The rule it keeps: traffic of pages passes nothing of this folder. It is a folder and no crate,
//! because control connections over RDMA are rings, too, and because the server answers READs that
//! wait.

pub(crate) mod announcements;
pub mod areas;
pub(crate) mod poller;
pub(crate) mod ring;
mod serving;
