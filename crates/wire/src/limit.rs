//! [`Limit`]: the limit of a server that stands in the way of a request for memory.

use serde::{Deserialize, Serialize};

use crate::units::told_apart;

/// A limit of the bytes that a server lends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Limit {
    /// Bytes that the server lends in all.
    Capacity(u64),
    /// Bytes that the server lends to one address, or over shared memory to one user.
    PerAddress(u64),
    /// Memory of a server that lends more than it has. Tables of lent bytes stay in memory.
    Memory(u64),
}

impl Limit {
    /// Says that there is no room for `asked` bytes since only `available` are left.
    pub fn refusal(self, asked: u64, available: u64) -> String {
        let (Self::Capacity(most) | Self::PerAddress(most) | Self::Memory(most)) = self;
        let [asked, available, most] = told_apart([asked, available, most]);
        let of = match self {
            Self::Capacity(_) => format!("its capacity of {most}"),
            Self::PerAddress(_) => {
                format!("the {most} that it lends to one address (--capacity-per-address)")
            }
            Self::Memory(_) => format!("what its memory of {most} (--memory) has tables for"),
        };
        format!("no room for {asked}: {available} left of {of}")
    }
}
