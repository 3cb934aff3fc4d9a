//! [`Zfp`]: the ZFP library on small pieces of numbers, behind a safe interface.
//!
//! The rule it keeps: **no input makes it read or write outside its memory.** The library checks no
//! bounds. It writes at most `zfp_stream_maximum_size` bytes, so that size is checked before each
//! call. It reads at most as many, even from a damaged block, because each block ends at a number
//! of bits that does not depend on the data. So a block is decoded from a buffer of that size,
//! filled up with zeros. The caller checks that a decoded block is the encoded one, and the size of
//! the error.
//!
//! One thread encodes one page at a time: the library's own threads (OpenMP, CUDA) are not built.

use std::{ffi::c_void, ptr, slice};

use zfp_sys as sys;

/// Mode of compression: the part of the values that is kept, as the [library's
/// documentation](https://zfp.readthedocs.io/en/release1.0.1/modes.html) calls it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mode {
    /// Number of bits per value.
    Rate(f64),
    /// Number of bits of each value that are kept below its block's largest exponent.
    Precision(u32),
    /// Upper bound of the absolute error, for `f32` and `f64`. The library promises it for finite
    /// values only.
    Accuracy(f64),
    /// Lossless: all bits of the values are kept.
    Reversible,
}

/// Lengths of a piece: of the fastest dimension, the next and the slowest; 1 where there is none.
pub type Lengths = [usize; 3];

mod sealed {
    pub trait Sealed {
        const TYPE: zfp_sys::zfp_type;
    }
}

/// A type of numbers that ZFP compresses.
pub trait Number: sealed::Sealed + Copy {}

macro_rules! numbers {
    ($($number:ty = $tag:ident),*) => {$(
        impl sealed::Sealed for $number { const TYPE: sys::zfp_type = sys::$tag; }
        impl Number for $number {}
    )*};
}

numbers!(
    f32 = zfp_type_zfp_type_float,
    f64 = zfp_type_zfp_type_double,
    i32 = zfp_type_zfp_type_int32,
    i64 = zfp_type_zfp_type_int64
);

/// Words behind the longest block, because the library reads one ahead.
const SPARE_WORDS: usize = 2;

/// A coder with one buffer and one stream. No call allocates after [`new`](Self::new).
pub struct Zfp {
    stream: *mut sys::zfp_stream,
    bits: *mut sys::bitstream,
    /// Owned buffer. Touched through this pointer only, since the stream has it, too.
    buffer: *mut [u64],
}

// SAFETY: all three pointers are to memory that nobody else has, and the library keeps nothing per
// thread.
unsafe impl Send for Zfp {}

impl Zfp {
    /// Makes a coder for pages of up to `bytes` bytes, cut into any pieces.
    pub fn new(bytes: usize) -> Self {
        // The worst case for pieces of at least four values in each dimension: five values become
        // eight, in three dimensions, and an incompressible `f32` takes 39 bits. A piece that needs
        // more is refused. Untouched memory costs nothing.
        let words = bytes.div_ceil(8) * 5 + 1024 + SPARE_WORDS;
        let buffer = Box::into_raw(vec![0u64; words].into_boxed_slice());
        // SAFETY: the buffer is as long as said and lives until the stream is closed in `drop`; the
        // streams are checked below.
        let (stream, bits) = unsafe {
            let bits = sys::stream_open(buffer.cast::<c_void>(), words * 8);
            (sys::zfp_stream_open(bits), bits)
        };
        assert!(!stream.is_null() && !bits.is_null(), "out of memory");
        Self {
            stream,
            bits,
            buffer,
        }
    }

    /// Encodes `values`, cut into `pieces`. The block is valid until the next call. `None` if it
    /// would not fit the buffer.
    ///
    /// # Panics
    /// If the pieces do not cover the values.
    pub fn encode<N: Number>(
        &mut self,
        mode: Mode,
        values: &[N],
        pieces: impl Iterator<Item = Lengths> + Clone,
    ) -> Option<&[u8]> {
        self.longest_words::<N>(mode, values.len(), pieces.clone())?;
        let mut rest = values.as_ptr();
        let bytes = self.each::<N>(mode, pieces, |stream, field| {
            field.data = rest.cast_mut().cast::<c_void>();
            // SAFETY:
            // - the pieces together are as long as the values, so that each lies in them;
            // - `compress` does not write to them, and writes no more to the stream than was found
            //   to fit.
            unsafe {
                rest = rest.add(field.nx * field.ny.max(1) * field.nz.max(1));
                sys::zfp_compress(stream, field)
            }
        })?;
        // SAFETY: the library wrote these bytes; the borrow of `self` keeps others from writing.
        Some(unsafe { slice::from_raw_parts(self.buffer.cast::<u8>(), bytes) })
    }

    /// Decodes a block that [`encode`](Self::encode) made in the same mode with the same pieces.
    /// Returns false for any other block, or leaves arbitrary numbers in `values`.
    ///
    /// # Panics
    /// If the pieces do not cover the values.
    pub fn decode<N: Number>(
        &mut self,
        mode: Mode,
        block: &[u8],
        pieces: impl Iterator<Item = Lengths> + Clone,
        values: &mut [N],
    ) -> bool {
        let Some(longest) = self.longest_words::<N>(mode, values.len(), pieces.clone()) else {
            return false;
        };
        let padded = (longest + SPARE_WORDS) * 8;
        if block.len() > longest * 8 {
            return false;
        }
        // SAFETY: the buffer has `longest` words and the spare ones; nobody else has it while
        // `self` is borrowed.
        unsafe {
            let buffer = self.buffer.cast::<u8>();
            ptr::copy_nonoverlapping(block.as_ptr(), buffer, block.len());
            ptr::write_bytes(buffer.add(block.len()), 0, padded - block.len());
        }
        let mut rest = values.as_mut_ptr();
        self.each::<N>(mode, pieces, |stream, field| {
            field.data = rest.cast::<c_void>();
            // SAFETY:
            // - the pieces together are as long as the values, so that each lies in them, and any
            //   bytes are a number;
            // - `decompress` reads no more of the stream than its longest block has, and that much
            //   is there.
            unsafe {
                rest = rest.add(field.nx * field.ny.max(1) * field.nz.max(1));
                sys::zfp_decompress(stream, field)
            }
        })
        .is_some()
    }

    /// Calls the library for each piece. Returns the stream's length, or `None` if the library
    /// refuses.
    fn each<N: Number>(
        &mut self,
        mode: Mode,
        pieces: impl Iterator<Item = Lengths>,
        mut call: impl FnMut(*mut sys::zfp_stream, &mut sys::zfp_field) -> usize,
    ) -> Option<usize> {
        // SAFETY: the stream is open.
        unsafe { sys::zfp_stream_rewind(self.stream) };
        let mut bytes = 0;
        for lengths in pieces {
            let mut field = field::<N>(lengths);
            self.set(mode, &field);
            bytes = call(self.stream, &mut field);
            if bytes == 0 {
                return None;
            }
        }
        Some(bytes)
    }

    /// Returns the longest that a block can become, in words. `None` if the buffer is too small.
    fn longest_words<N: Number>(
        &mut self,
        mode: Mode,
        len: usize,
        pieces: impl Iterator<Item = Lengths>,
    ) -> Option<usize> {
        let (mut words, mut values) = (0usize, 0);
        for lengths in pieces {
            values += lengths.iter().product::<usize>();
            let field = field::<N>(lengths);
            self.set(mode, &field);
            // SAFETY: stream and field are valid; nothing is followed from the field's data, which
            // is null.
            let bytes = unsafe { sys::zfp_stream_maximum_size(self.stream, &field) };
            words += bytes.div_ceil(8);
        }
        assert_eq!(values, len, "the pieces cover the values");
        (words + SPARE_WORDS <= self.buffer.len()).then_some(words)
    }

    fn set(&mut self, mode: Mode, field: &sys::zfp_field) {
        // SAFETY: the stream is open; these calls only set its figures.
        unsafe {
            match mode {
                Mode::Rate(bits) => {
                    let dimensions = sys::zfp_field_dimensionality(field);
                    sys::zfp_stream_set_rate(self.stream, bits, field.type_, dimensions, 0);
                }
                Mode::Precision(bits) => {
                    sys::zfp_stream_set_precision(self.stream, bits);
                }
                Mode::Accuracy(bound) => {
                    sys::zfp_stream_set_accuracy(self.stream, bound);
                }
                Mode::Reversible => sys::zfp_stream_set_reversible(self.stream),
            }
        }
    }
}

fn field<N: Number>([x, y, z]: Lengths) -> sys::zfp_field {
    // A length of zero means that there is no such dimension.
    let (y, z) = match (y, z) {
        (1, 1) => (0, 0),
        (y, 1) => (y, 0),
        (y, z) => (y, z),
    };
    sys::zfp_field {
        type_: N::TYPE,
        nx: x,
        ny: y,
        nz: z,
        nw: 0,
        sx: 0,
        sy: 0,
        sz: 0,
        sw: 0,
        data: ptr::null_mut(),
    }
}

impl Drop for Zfp {
    fn drop(&mut self) {
        // SAFETY: all three came from `new` and are given up here, the streams before the buffer
        // that they refer to.
        unsafe {
            sys::zfp_stream_close(self.stream);
            sys::stream_close(self.bits);
            drop(Box::from_raw(self.buffer));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MODES: [Mode; 4] = [
        Mode::Rate(12.0),
        Mode::Precision(20),
        Mode::Accuracy(1e-3),
        Mode::Reversible,
    ];

    fn field_of(lengths: Lengths) -> Vec<f64> {
        let [x, y, z] = lengths;
        let value = |i: usize| {
            let (x, y, z) = (i % x, i / x % y, i / x / y);
            ((x as f64) * 0.05).sin() + ((y as f64) * 0.03).cos() * (z as f64 + 1.0)
        };
        (0..x * y * z).map(value).collect()
    }

    #[test]
    fn values_come_back_within_what_the_mode_keeps() {
        for lengths in [[4096, 1, 1], [64, 64, 1], [16, 16, 16], [17, 5, 9]] {
            let values = field_of(lengths);
            let mut zfp = Zfp::new(values.len() * 8);
            for (mode, bound) in MODES.into_iter().zip([1e-1, 1e-3, 1e-3, 0.0]) {
                let block = zfp
                    .encode(mode, &values, [lengths].into_iter())
                    .expect("fits")
                    .to_vec();
                let mut back = vec![0.0; values.len()];
                assert!(zfp.decode(mode, &block, [lengths].into_iter(), &mut back));
                let error = values
                    .iter()
                    .zip(&back)
                    .map(|(a, b)| (a - b).abs())
                    .fold(0.0, f64::max);
                assert!(error <= bound, "{mode:?} {lengths:?}: {error}");
                assert!(
                    block.len() < values.len() * 8,
                    "{mode:?} {lengths:?}: {}",
                    block.len()
                );
            }
        }
    }

    #[test]
    fn pieces_follow_each_other_in_one_block() {
        let values: Vec<f32> = (0..5000).map(|i| (i as f32 * 0.01).sin()).collect();
        let pieces = [[500, 1, 1], [20, 100, 1], [10, 10, 25]].into_iter();
        let mut zfp = Zfp::new(values.len() * 4);
        let block = zfp
            .encode(Mode::Accuracy(1e-4), &values, pieces.clone())
            .expect("fits")
            .to_vec();
        let mut back = vec![0.0f32; values.len()];
        assert!(zfp.decode(Mode::Accuracy(1e-4), &block, pieces, &mut back));
        assert!(values.iter().zip(&back).all(|(a, b)| (a - b).abs() <= 1e-4));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let values = [1.0f64; 64 * 64];
        let mut zfp = Zfp::new(8);
        assert!(
            zfp.encode(Mode::Reversible, &values, [[64, 64, 1]].into_iter())
                .is_none()
        );
        assert!(!zfp.decode(
            Mode::Reversible,
            &[0; 80],
            [[64, 64, 1]].into_iter(),
            &mut [0.0; 64 * 64]
        ));
        assert!(
            !Zfp::new(64).decode(
                Mode::Reversible,
                &[0; 800],
                [[8, 1, 1]].into_iter(),
                &mut [0.0; 8]
            ),
            "longer than any block"
        );
    }

    proptest! {
        #[test]
        fn integers_come_back_from_the_reversible_mode(values in prop::collection::vec(any::<i64>(), 1..600)) {
            let mut zfp = Zfp::new(values.len() * 8);
            let pieces = [[values.len(), 1, 1]].into_iter();
            let block = zfp.encode(Mode::Reversible, &values, pieces.clone()).expect("fits").to_vec();
            let mut back = vec![0; values.len()];
            prop_assert!(zfp.decode(Mode::Reversible, &block, pieces, &mut back));
            prop_assert_eq!(back, values);
        }

        /// Checks that a coder that held another block before decodes as a new one does: it reads
        /// nothing beside the block and writes nothing beside the values.
        #[test]
        fn arbitrary_bytes_decode_to_what_they_alone_say(
            block in prop::collection::vec(any::<u8>(), 0..3000), x in 1usize..40, y in 1usize..10, z in 1usize..5, mode in 0usize..4,
        ) {
            let (lengths, len) = ([x, y, z], x * y * z);
            let mut used = Zfp::new(len * 8);
            let noise: Vec<f64> = (0..len).map(|i| (i as f64).sin() * 1e300).collect();
            used.encode(Mode::Reversible, &noise, [[len, 1, 1]].into_iter()).expect("fits");
            let [fresh, used] = [Zfp::new(len * 8), used].map(|mut zfp| {
                let mut values = vec![-1.0f64; len + 2];
                let decoded = zfp.decode(MODES[mode], &block, [lengths].into_iter(), &mut values[1..=len]);
                assert_eq!((values[0], values[len + 1]), (-1.0, -1.0));
                decoded.then(|| values.into_iter().map(f64::to_bits).collect::<Vec<_>>())
            });
            prop_assert_eq!(fresh, used);
        }
    }
}
