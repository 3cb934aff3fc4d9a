//! [`RemoteOptions`]: how a region is kept in remote memory.

use crate::{Codec, Layout};

/// How much remote memory a region takes when it is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reserve {
    /// Its raw size, and room for pages on their way: a write-back cannot fail because servers are
    /// full. A region that can be published takes twice its size and two page maps (32 bytes per
    /// page), since the last publication stays whole until the next one is. Only where compressed
    /// pages of many sizes fragment the space does it ask for more, which may be refused.
    #[default]
    Full,
    /// As much as its pages need, as they are written: compressed regions take less. When all
    /// servers are full, a write-back fails with [`StoreError::Full`](crate::StoreError::Full).
    OnDemand,
}

/// How a region is kept in remote memory.
#[derive(Clone, Debug, Default)]
pub struct RemoteOptions {
    /// How pages are stored. Default: raw.
    pub codec: Codec,
    /// What the bytes are. Default: bytes.
    pub layout: Layout,
    /// What is granted at once. Default: the full size.
    pub reserve: Reserve,
    /// The name that the region is published under. A named region has extents of its own, and
    /// pages that change after a publication are kept in both versions until the next one, for
    /// which [`Reserve::Full`] takes twice the size. Default: none.
    pub name: Option<String>,
    /// Whether a region that exists under the name is replaced by the first publication. Default:
    /// no.
    pub replace: bool,
}
