//! Named regions: the page map in remote memory, so that another process can open the region.
//!
//! The rule it keeps: **until the last step of a publication, the previous one is whole.** The map
//! goes to blocks of its own, slots that the published map refers to are not reused before the next
//! publication has succeeded (`publications.rs`), and the name is bound last, on the servers that
//! hold it: the region's first, or all of a region with copies ([`turn`](crate::turn)). A process
//! that dies on the way leaves what was published before. If some holders had the new binding by
//! then, the next writer finds either of the two, and makes it the only one before it changes
//! anything.
//!
//! The map is the entries of all pages, four little-endian words each, and zeros up to a whole
//! granule. It is cut into pieces of [`PIECE_BYTES`](crate::publications::PIECE_BYTES), each with
//! an entry of its own in the manifest. So the manifest stays small, and stretches without entries
//! cost nothing. Entries name servers and extents by their index in the manifest.
//!
//! Servers that keep names on a disk are told which bytes a publication adds, and have them there
//! before the name is bound (`persist.rs`).

mod manifest;
mod open;
mod persist;
mod publish;
