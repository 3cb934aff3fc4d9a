//! Byte shuffle: the first bytes of all elements, then the second, and so on.
//!
//! The rule it keeps: shuffling and unshuffling undo each other.
//!
//! Sixteen elements of W bytes are W vectors of 16 bytes. Interleaving the bytes of the first half
//! of all vectors with those of the second half moves the topmost bit of every byte's position to
//! the bottom. The topmost four bits of a byte's position are its element's number. Four rounds
//! move them to the bottom and bring the byte's number within its element to the top: shuffled.
//! log2(W) more rounds come full circle: unshuffled. One round is W interleavings, one instruction
//! each on every x86-64.

use farpage_codec::interleave;

use super::form::Width;

type Vector = [u8; 16];

/// Writes the bytes of `plain` to `out`, shuffled. Both have the same length, a multiple of 128.
pub(super) fn shuffle(width: Width, plain: &[u8], out: &mut [u8]) {
    match width {
        Width::Two => shuffle_by::<2>(plain, out),
        Width::Four => shuffle_by::<4>(plain, out),
        Width::Eight => shuffle_by::<8>(plain, out),
    }
}

/// Writes the bytes of `shuffled` to `out`, in their original order.
pub(super) fn unshuffle(width: Width, shuffled: &[u8], out: &mut [u8]) {
    match width {
        Width::Two => unshuffle_by::<2>(shuffled, out),
        Width::Four => unshuffle_by::<4>(shuffled, out),
        Width::Eight => unshuffle_by::<8>(shuffled, out),
    }
}

fn shuffle_by<const W: usize>(plain: &[u8], out: &mut [u8]) {
    let plane = out.len() / W;
    for (at, vectors) in plain
        .as_chunks::<16>()
        .0
        .as_chunks::<W>()
        .0
        .iter()
        .enumerate()
    {
        let mut vectors = *vectors;
        for _ in 0..4 {
            vectors = round(vectors);
        }
        for (byte, vector) in vectors.iter().enumerate() {
            out[byte * plane + at * 16..][..16].copy_from_slice(vector);
        }
    }
}

fn unshuffle_by<const W: usize>(shuffled: &[u8], out: &mut [u8]) {
    let plane = shuffled.len() / W;
    let groups = out.as_chunks_mut::<16>().0.as_chunks_mut::<W>().0;
    for (at, vectors) in groups.iter_mut().enumerate() {
        for (byte, vector) in vectors.iter_mut().enumerate() {
            vector.copy_from_slice(&shuffled[byte * plane + at * 16..][..16]);
        }
        for _ in 0..W.ilog2() {
            *vectors = round(*vectors);
        }
    }
}

#[inline(always)]
fn round<const W: usize>(vectors: [Vector; W]) -> [Vector; W] {
    let mut next = [[0; 16]; W];
    for i in 0..W / 2 {
        let [first, last] = interleave(vectors[i], vectors[i + W / 2]);
        (next[2 * i], next[2 * i + 1]) = (first, last);
    }
    next
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn bytes_are_where_a_naive_shuffle_puts_them_and_come_back(groups in 1usize..40, seed in any::<u8>()) {
            let plain: Vec<u8> = (0..groups * 128).map(|at| (at as u8).wrapping_mul(7) ^ (at >> 8) as u8 ^ seed).collect();
            for (width, bytes) in [(Width::Two, 2), (Width::Four, 4), (Width::Eight, 8)] {
                let (mut out, mut back) = (vec![0; plain.len()], vec![0; plain.len()]);
                shuffle(width, &plain, &mut out);
                for (at, byte) in plain.iter().enumerate() {
                    prop_assert_eq!(out[at % bytes * (plain.len() / bytes) + at / bytes], *byte);
                }
                unshuffle(width, &out, &mut back);
                prop_assert_eq!(&back, &plain);
            }
        }
    }
}
