//! One page to fewer bytes and back: [`Codec`], and the check for one repeated value that comes before any codec.
//!
//! The rule it keeps: decoding is safe on any input. What comes out of a damaged block may still be wrong; the caller
//! compares its hash. Choosing a codec by what it saves is left to the caller.
//!
//! The hash is XXH3-128, by the library that computes it fastest and picks its instructions when the program runs. Measured on one core with
//! AVX2 and AVX-512, in a build for any x86-64, GB/s:
//!
//! | | 4 KiB in cache | 64 KiB in cache | 1 MiB in cache | in memory |
//! |---|---|---|---|---|
//! | `twox-hash` 2.1 (AVX2, NEON) | 47 | 58 | 56 | 33 |
//! | `xxh3` 0.1 (AVX2, NEON; dormant) | 45 | 56 | 55 | 34 |
//! | `rscrypto` 0.9 (AVX-512) | 43 | 53 | 52 | 34 |
//! | xxHash 0.8.3, in C, with its dispatcher (AVX-512) | 31 | 45 | 45 | 27 |
//! | `xxhash-rust` 0.8 (picks when compiled: SSE2) | 28 | 31 | 31 | 28 |
//! | `xxhash-c-sys` 0.8 (picks when compiled: SSE2) | 25 | 29 | 29 | 27 |
//!
//! Looking for one repeated value costs 3 ns on a page that has other bytes at its beginning, and 0.8 us at most on 64 KiB.

use lz4_flex::block::{
    CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size,
};
use twox_hash::XxHash3_128;

/// How a region's pages are stored. Pages of one repeated 8-byte value need no codec and no slot; a page that does not
/// shrink is stored raw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Codec {
    /// As they are.
    #[default]
    Raw,
    /// LZ4 blocks.
    Lz4,
}

impl Codec {
    pub(crate) fn id(self) -> u8 {
        match self {
            Self::Raw => 0,
            Self::Lz4 => 1,
        }
    }

    pub(crate) fn from_id(id: u8) -> Option<Self> {
        [Self::Raw, Self::Lz4]
            .into_iter()
            .find(|codec| codec.id() == id)
    }
}

/// Encodes pages; keeps the match table, so that no page allocates.
pub(crate) struct Encoder {
    table: CompressTable,
}

impl Encoder {
    pub(crate) fn new() -> Self {
        Self {
            table: CompressTable::small(),
        }
    }

    /// How long an output buffer must be.
    pub(crate) fn bound(page_bytes: usize) -> usize {
        get_maximum_output_size(page_bytes)
    }

    /// The length of the block that `page` became, at the beginning of `out`.
    pub(crate) fn lz4(&mut self, page: &[u8], out: &mut [u8]) -> usize {
        // The small table serves pages below 64 KiB and is faster on them; the library replaces it by the large one
        // when a longer page comes, and does not go back. Lanes mostly see one page size, so neither do we.
        compress_into_with_table(page, out, &mut self.table)
            .expect("the output has its greatest length")
    }
}

/// Decodes a block into exactly `page.len()` bytes; false if it is none of that length.
pub(crate) fn decode_lz4(block: &[u8], page: &mut [u8]) -> bool {
    decompress_into(block, page).is_ok_and(|len| len == page.len())
}

/// The value that the page repeats, if it does. A page whose length is no multiple of eight repeats none.
pub(crate) fn repeated(page: &[u8]) -> Option<u64> {
    let (first, _) = page.split_first_chunk::<8>()?;
    if !page.len().is_multiple_of(8) {
        return None;
    }
    // A page repeats an 8-byte value if it equals itself shifted by eight bytes; memcmp does that at memory speed.
    // The first chunks alone settle nearly every other page.
    let near = page.len().min(64);
    (page[8..near] == page[..near - 8] && page[8..] == page[..page.len() - 8])
        .then(|| u64::from_ne_bytes(*first))
}

/// Fills the page with a repeated value.
pub(crate) fn fill_repeated(page: &mut [u8], value: u64) {
    let bytes = value.to_ne_bytes();
    if bytes == [bytes[0]; 8] {
        page.fill(bytes[0]);
    } else {
        let (chunks, rest) = page.as_chunks_mut::<8>();
        chunks.fill(bytes);
        rest.copy_from_slice(&bytes[..rest.len()]);
    }
}

/// The hash of a page's plain bytes: XXH3-128, which published regions keep, so that it can never be another. Seeded, so that contents
/// from outside cannot be made to collide.
pub(crate) fn hash(page: &[u8], seed: u64) -> u128 {
    XxHash3_128::oneshot_with_seed(seed, page)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_repeated_value_is_seen_only_where_it_is() {
        for len in [8, 16, 64, 72, 4096] {
            let mut page = vec![0u8; len];
            for value in [0u64, 0x0101_0101_0101_0101, 0x1122_3344_5566_7788] {
                fill_repeated(&mut page, value);
                assert_eq!(repeated(&page), Some(value), "{len}");
                if len > 8 {
                    for at in 0..len {
                        page[at] ^= 1;
                        assert_eq!(repeated(&page), None, "{len} {at}");
                        page[at] ^= 1;
                    }
                }
            }
        }
        assert_eq!(repeated(&[]), None);
        assert_eq!(repeated(&[0; 9]), None);
    }

    /// Values of the reference implementation in C: what was published under them must be readable for ever.
    #[test]
    fn the_hash_is_xxh3_128_with_seed() {
        let page: Vec<u8> = (0..4096u32).map(|at| (at * at % 251) as u8).collect();
        for (len, expected) in [
            (0, 0x5e11_f131_4c06_d011_7589_dadf_11fb_87fc),
            (8, 0x7338_7b10_6414_2898_8b24_356a_6a21_8297),
            (4096, 0x4f5e_0fd9_a374_669d_62b6_cd9c_c284_abb9),
        ] {
            assert_eq!(
                hash(&page[..len], 0x1122_3344_5566_7788),
                expected,
                "{len} bytes"
            );
        }
    }

    proptest! {
        #[test]
        fn pages_come_back_from_lz4(page in prop::collection::vec(0u8..4, 1..8192)) {
            let mut out = vec![0; Encoder::bound(page.len())];
            let len = Encoder::new().lz4(&page, &mut out);
            let mut back = vec![0; page.len()];
            prop_assert!(decode_lz4(&out[..len], &mut back));
            prop_assert_eq!(back, page);
        }

        #[test]
        fn damaged_blocks_decode_to_something_or_nothing_but_never_out_of_bounds(
            page in prop::collection::vec(0u8..4, 64..4096), at: prop::sample::Index, bit in 0u8..8, cut: prop::sample::Index,
        ) {
            let mut out = vec![0; Encoder::bound(page.len())];
            let len = Encoder::new().lz4(&page, &mut out);
            out[at.index(len)] ^= 1 << bit;
            let mut back = vec![0; page.len()];
            let whole = decode_lz4(&out[..len], &mut back);
            prop_assert!(!whole || back != page || at.index(len) < len);
            decode_lz4(&out[..cut.index(len)], &mut back);
        }

        #[test]
        fn arbitrary_bytes_are_safe_to_decode(block in prop::collection::vec(any::<u8>(), 0..4096)) {
            decode_lz4(&block, &mut [0; 4096]);
        }
    }
}
