//! Steps that every page goes through: the check for one repeated value, which comes before any
//! codec, and the hash.
//!
//! The rule it keeps: all of it costs less than moving the page through memory.
//!
//! The hash is XXH3-128, by the fastest library that picks its instructions when the program runs
//! (`docs/decisions.md`, "Codecs").
//!
//! Looking for one repeated value costs 3 ns on a page that has other bytes at its beginning, and
//! 0.8 us at most on 64 KiB.

use twox_hash::XxHash3_128;

/// Returns the 8-byte value that the page repeats, if there is one. A page whose length is not a
/// multiple of eight repeats none.
pub(crate) fn repeated(page: &[u8]) -> Option<u64> {
    let (first, _) = page.split_first_chunk::<8>()?;
    if !page.len().is_multiple_of(8) {
        return None;
    }
    // A page repeats an 8-byte value if it equals itself shifted by eight bytes; memcmp does that
    // at memory speed. The first chunks alone settle nearly every other page.
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

/// Returns the hash of a page's plain bytes: XXH3-128. Published regions keep these hashes, so the
/// function can never change. It is seeded, so that nobody can craft contents that collide.
pub(crate) fn hash(page: &[u8], seed: u64) -> u128 {
    XxHash3_128::oneshot_with_seed(seed, page)
}

#[cfg(test)]
mod tests {
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

    /// Values of the reference implementation in C. Regions that were published with them must stay
    /// readable.
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
}
