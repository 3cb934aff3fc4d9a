//! [`Form`]: the encoding of one page, and its number in page entries. [`Page`] and [`Encoded`]:
//! the input and output of an encoder.
//!
//! The rule it keeps: numbers never change their meaning, since published maps contain them.

use crate::PageIndex;

/// Encoding of one page. The region's scheme has the parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Raw,
    Lz4,
    Shuffled(Width),
    Zfp,
}

impl Form {
    pub(crate) const ALL: [Self; 6] = [
        Self::Raw,
        Self::Lz4,
        Self::Shuffled(Width::Two),
        Self::Shuffled(Width::Four),
        Self::Shuffled(Width::Eight),
        Self::Zfp,
    ];

    /// Returns the form's number in page entries, and so in published maps.
    pub(crate) fn id(self) -> u8 {
        match self {
            Self::Raw => 0,
            Self::Lz4 => 1,
            Self::Shuffled(Width::Two) => 2,
            Self::Shuffled(Width::Four) => 3,
            Self::Shuffled(Width::Eight) => 4,
            Self::Zfp => 5,
        }
    }

    pub(crate) fn from_id(id: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|form| form.id() == id)
    }
}

/// Bytes of an element that is shuffled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    Two,
    Four,
    Eight,
}

impl Width {
    pub(super) fn of(bytes: usize) -> Option<Self> {
        [Self::Two, Self::Four, Self::Eight]
            .into_iter()
            .find(|width| width.bytes() == bytes)
    }

    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::Two => 2,
            Self::Four => 4,
            Self::Eight => 8,
        }
    }
}

/// A page that changed.
#[derive(Clone, Copy)]
pub(crate) struct Page<'a> {
    pub(crate) number: PageIndex,
    pub(crate) bytes: &'a [u8],
    pub(crate) hash: u128,
    /// The seed of the region's hashes.
    pub(crate) seed: u64,
}

/// The outcome of encoding a page.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Encoded {
    pub(crate) form: Form,
    /// Length of the block; of a raw page, the page's length.
    pub(crate) bytes: u32,
    /// The hash of the page as it will come back.
    pub(crate) hash: u128,
    /// The largest difference between a value and the same value as it will come back.
    pub(crate) error: f64,
    /// True if ZFP was asked for and could not serve the page.
    pub(crate) declined: bool,
}

impl Encoded {
    /// Returns the outcome of storing the page as it is.
    pub(super) fn raw(page: Page<'_>) -> Self {
        Self {
            form: Form::Raw,
            bytes: page.bytes.len() as u32,
            hash: page.hash,
            error: 0.0,
            declined: false,
        }
    }
}
