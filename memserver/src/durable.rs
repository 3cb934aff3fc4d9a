//! Published names on a disk: [`DurableNames`] writes them, [`Stored`] is what a start finds.
//!
//! The directory has a file of each extent, sparse and with the extent's bytes at their offsets,
//! and a file of each name, its [`Binding`]. A publication writes the bytes that it added into the
//! extents' files, in places that the version before does not use, and makes them durable. Then it
//! replaces the name's file by a rename, and makes that durable.
//!
//! The rule this folder keeps: **a name's file on the disk is whole, and so is all that it refers
//! to, at every moment.** The client keeps its half: it never reuses a place that the last
//! published version refers to. A disk that tears a sector apart is taken to damage no other
//! sector.
//!
//! Left to others: rights and memory ([`State`](crate::State)), and the meaning of the bytes, whose
//! hashes are in the client's page map.

#[cfg(test)]
pub(crate) mod cut;
mod folder;
mod format;
mod loading;
mod writer;

pub use self::loading::PersistError;
pub(crate) use self::{
    format::{Binding, BoundExtent, name_file},
    loading::{Damage, LoadError, Stored, StoredName},
    writer::{DurableNames, Written},
};
