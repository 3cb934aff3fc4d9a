//! [`RemoteOptions`]: how a region is kept in remote memory.

use crate::{Codec, Layout};

/// Amount of remote memory that a region takes when it is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reserve {
    /// The region's raw size, and room for pages on their way: a write-back cannot fail because
    /// servers are full. A region that can be published takes twice its size and two page maps (32
    /// bytes per page), since the last publication stays whole until the next one is. It asks for
    /// more, which may be refused, only where pages of many sizes fragment the space, and for pages
    /// that change while a child made by `fork` may read what they held before.
    #[default]
    Full,
    /// Memory for pages as they are written: compressed regions take less. When all servers are
    /// full, a write-back fails with [`StoreError::Full`](crate::StoreError::Full).
    OnDemand,
}

/// Options of a region in remote memory.
#[derive(Clone, Debug, Default)]
pub struct RemoteOptions {
    /// Encoding of the pages. Default: raw.
    pub codec: Codec,
    /// Layout of the elements. Default: bytes without a type.
    pub layout: Layout,
    /// Memory that is granted at once. Default: the full size.
    pub reserve: Reserve,
    /// The name that the region is published under. A named region has extents of its own, and
    /// pages that change after a publication are kept in both versions until the next one, for
    /// which [`Reserve::Full`] takes twice the size. Default: none.
    pub name: Option<String>,
    /// True if the first publication replaces a region that exists under the name. Default: false.
    pub replace: bool,
}
