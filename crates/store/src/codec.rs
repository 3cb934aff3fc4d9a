//! One page to fewer bytes and back.
//!
//! The rule it keeps: decoding is safe on any input. What comes back may still be wrong; the caller compares its hash.

/// How a region's pages are stored. Pages of one repeated value never need a codec; pages that do not shrink are stored raw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Codec {
    /// As they are.
    #[default]
    Raw,
    /// LZ4 blocks.
    Lz4,
}
