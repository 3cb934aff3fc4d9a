//! [`RemoteOptions`]: how a region is kept in remote memory.

use std::{fmt, str::FromStr};

use crate::{
    Codec, Layout,
    parity::{DATA_MAX, PARITY_MAX, ParityCode},
};

/// Upper bound of the copies of a page.
pub(crate) const COPIES_MAX: usize = 4;

/// Protection of a region's pages against the death of memory servers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Redundancy {
    /// One copy of each page. Pages are lost with their server.
    #[default]
    None,
    /// Copies of each page on so many different servers, 2 to 4. The region takes as many times its
    /// size, and each write-back goes to all of the servers. Pages outlive the death of all but one
    /// of their servers, and are copied again to servers that have room.
    Copies(u8),
    /// Parity of pages on different servers: each page is on one of `data` servers, 2 to 8, and
    /// `parity` more servers, 1 or 2, have the parity of what these have. Pages outlive the death
    /// of as many servers as there are parities. What was just written has `parity + 1` copies,
    /// until its servers have the parity in the background. So the region takes little more than
    /// `(data + parity) / data` times its size, and a fill reads one server.
    Parity {
        /// Number of servers that pages are spread over.
        data: u8,
        /// Number of servers with parity: as many may die.
        parity: u8,
    },
}

impl Redundancy {
    /// Returns the number of servers that have each page, with parity at first.
    pub fn copies(self) -> usize {
        match self {
            Self::None => 1,
            Self::Copies(copies) => usize::from(copies),
            Self::Parity { parity, .. } => usize::from(parity) + 1,
        }
    }

    /// Returns the number of servers that a region makes use of at the least, so that all of its
    /// pages are kept as asked for.
    pub fn servers(self) -> usize {
        match self {
            Self::Parity { data, parity } => usize::from(data) + usize::from(parity),
            _ => self.copies(),
        }
    }

    /// Returns the code of regions with parity.
    pub(crate) fn code(self) -> Option<ParityCode> {
        match self {
            Self::Parity { data, parity } => Some(ParityCode { data, parity }),
            _ => None,
        }
    }

    /// Returns the most bytes of pages for which different servers with these `rooms` have room. A
    /// server has at most one copy of each page. So the answer is the largest number of which the
    /// rooms, each counted up to that number, are together as many times as much as there are
    /// copies.
    pub fn room(self, rooms: &[u64]) -> u64 {
        let mut rooms = rooms.to_vec();
        rooms.sort_unstable_by(|a, b| b.cmp(a));
        let mut rest: u64 = rooms.iter().sum();
        // The largest servers have a copy of everything, and the others share what is left.
        for (copies, room) in (1..=self.copies() as u64).rev().zip(rooms) {
            let most = rest / copies;
            if room <= most {
                return most;
            }
            rest -= room;
        }
        0
    }

    /// True if pages can be kept so: copies are 2 to 4, parity is 2+1 to 8+2.
    pub(crate) fn is_valid(self) -> bool {
        match self {
            Self::None => true,
            Self::Copies(copies) => (2..=COPIES_MAX).contains(&usize::from(copies)),
            Self::Parity { data, parity } => {
                (2..=DATA_MAX).contains(&usize::from(data))
                    && (1..=PARITY_MAX).contains(&usize::from(parity))
            }
        }
    }
}

/// `none`, `copies=2`, `parity=4+1`.
impl fmt::Display for Redundancy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Copies(copies) => write!(f, "copies={copies}"),
            Self::Parity { data, parity } => write!(f, "parity={data}+{parity}"),
        }
    }
}

/// Text that is no [`Redundancy`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{text}` is no redundancy: need `none`, `copies=2` to `copies={COPIES_MAX}`, or `parity=2+1` to `parity={DATA_MAX}+{PARITY_MAX}`"
)]
pub struct RedundancyError {
    text: String,
}

impl FromStr for Redundancy {
    type Err = RedundancyError;

    fn from_str(text: &str) -> Result<Self, RedundancyError> {
        let copies = text.strip_prefix("copies=").map(str::parse);
        let sum = text
            .strip_prefix("parity=")
            .and_then(|sum| sum.split_once('+'));
        let parity = sum.map(|(data, parity)| (data.parse(), parity.parse()));
        let redundancy = match (text, copies, parity) {
            ("none", ..) => Some(Self::None),
            (_, Some(Ok(copies)), _) => Some(Self::Copies(copies)),
            (_, _, Some((Ok(data), Ok(parity)))) => Some(Self::Parity { data, parity }),
            _ => None,
        };
        let valid = redundancy.filter(|it| it.is_valid() && it.to_string() == text);
        valid.ok_or_else(|| RedundancyError {
            text: text.to_owned(),
        })
    }
}

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
    /// Encoding of the pages. Default: `None`, raw.
    pub codec: Option<Codec>,
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
    /// Copies of each page on different servers. A named region has one. Default: `None`, one.
    pub redundancy: Option<Redundancy>,
}

impl RemoteOptions {
    /// Returns the redundancy of the pages.
    pub(crate) fn redundancy(&self) -> Redundancy {
        self.redundancy.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_counted_where_each_copy_is_on_another_server() {
        let two = Redundancy::Copies(2);
        assert_eq!(Redundancy::None.room(&[3, 5]), 8);
        assert_eq!(two.room(&[10, 10]), 10);
        assert_eq!(two.room(&[100, 1]), 1, "the rest has no second server");
        assert_eq!(two.room(&[100, 6, 4]), 10);
        assert_eq!(two.room(&[7, 5, 4]), 8);
        assert_eq!((two.room(&[100]), two.room(&[])), (0, 0));
        assert_eq!(Redundancy::Copies(3).room(&[9, 9, 1, 1]), 2);
        // All sums of small rooms, against a search.
        for rooms in (0..6u64.pow(4)).map(|n| [n % 6, n / 6 % 6, n / 36 % 6, n / 216]) {
            for copies in 1..=4 {
                let fits = |x: &u64| {
                    rooms.iter().map(|room| room.min(x)).sum::<u64>() >= u64::from(copies) * x
                };
                let most = (0..=24).rev().find(fits).expect("zero fits");
                assert_eq!(Redundancy::Copies(copies).room(&rooms), most, "{rooms:?}");
            }
        }
    }

    #[test]
    fn a_redundancy_is_read_as_it_is_written() {
        let all = [
            Redundancy::None,
            Redundancy::Copies(2),
            Redundancy::Copies(3),
            Redundancy::Copies(4),
            Redundancy::Parity { data: 2, parity: 1 },
            Redundancy::Parity { data: 8, parity: 2 },
        ];
        for redundancy in all {
            assert_eq!(redundancy.to_string().parse(), Ok(redundancy));
        }
        for text in [
            "",
            "copies",
            "copies=",
            "copies=1",
            "copies=5",
            "parity=1+1",
            "parity=9+1",
            "parity=4+0",
            "parity=4+3",
            "parity=4",
            "parity=04+1",
            "copies=02x",
            "2",
            "None",
        ] {
            let error = text.parse::<Redundancy>().unwrap_err();
            assert!(error.to_string().contains("copies=2"), "{error}");
        }
    }
}
