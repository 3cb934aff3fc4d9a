//! [`ZfpCoder`]: pages of numbers to ZFP blocks and back.
//!
//! The rules it keeps: the ZFP library checks no bounds, so a block begins with eight bytes of its
//! own hash, and is decoded only if they are right. **A loss is certified**: a page's block is
//! decoded here and compared with the page, and the page's hash is that of the decoded bytes.

use bytemuck::Pod;
use farpage_codec::zfp::{self, Mode, Zfp};

use super::{
    form::{Encoded, Form, Page},
    plain,
    scheme::{Number, Scheme, ZFP_HEADER_BYTES, pieces},
    spec::ZfpMode,
};
use crate::PageIndex;

/// The coder of ZFP, made at the first page that needs it.
#[derive(Default)]
pub(super) struct ZfpCoder {
    /// Length of the largest page that the coder serves, and the coder.
    coder: Option<(usize, Zfp)>,
}

impl ZfpCoder {
    /// Allocates the memory for pages of `page_bytes`.
    pub(super) fn prepare(&mut self, page_bytes: usize) {
        self.zfp(page_bytes);
    }

    /// Encodes a page into `block`. `None` if the block would be longer than `limit`, or if the
    /// page would not come back as the scheme promises. `scratch` has room for the page.
    pub(super) fn encode(
        &mut self,
        scheme: &Scheme,
        page: Page<'_>,
        limit: usize,
        block: &mut [u8],
        scratch: &mut [u64],
    ) -> Option<Encoded> {
        let (mode, number) = scheme.zfp()?;
        let pieces = Pieces::of(scheme, number, page.number, page.bytes.len());
        match number {
            Number::F32 => self.encode_values::<f32>(mode, pieces, page, limit, block, scratch),
            Number::F64 => self.encode_values::<f64>(mode, pieces, page, limit, block, scratch),
            Number::I32 => self.encode_values::<i32>(mode, pieces, page, limit, block, scratch),
            Number::I64 => self.encode_values::<i64>(mode, pieces, page, limit, block, scratch),
        }
    }

    /// Decodes the block of page `number` into `page`. `false`: the library found no page in it.
    /// `scratch` has room for the page.
    ///
    /// # Errors
    /// The block was damaged, or is none of this scheme.
    pub(super) fn decode(
        &mut self,
        scheme: &Scheme,
        block: &[u8],
        seed: u64,
        number: PageIndex,
        page: &mut [u8],
        scratch: &mut [u64],
    ) -> Result<bool, &'static str> {
        let Some((mode, kind)) = scheme.zfp() else {
            return Err("its region has no such codec");
        };
        let Some((header, block)) = block.split_first_chunk() else {
            return Err("it is shorter than its header");
        };
        if *header != header_of(block, seed) {
            return Err("the hash of its block does not match");
        }
        let pieces = Pieces::of(scheme, kind, number, page.len());
        Ok(match kind {
            Number::F32 => self.decode_values::<f32>(mode, pieces, block, page, scratch),
            Number::F64 => self.decode_values::<f64>(mode, pieces, block, page, scratch),
            Number::I32 => self.decode_values::<i32>(mode, pieces, block, page, scratch),
            Number::I64 => self.decode_values::<i64>(mode, pieces, block, page, scratch),
        })
    }

    fn encode_values<N: Value>(
        &mut self,
        mode: ZfpMode,
        pieces: Pieces<'_>,
        page: Page<'_>,
        limit: usize,
        block: &mut [u8],
        scratch: &mut [u64],
    ) -> Option<Encoded> {
        // 1. Values that the library is known to break, or cannot encode, are not tried.
        let lossless = mode == ZfpMode::Reversible;
        let aligned;
        let values: &[N] = match bytemuck::try_cast_slice(page.bytes) {
            Ok(values) => values,
            Err(_) => {
                aligned = bytemuck::pod_collect_to_vec::<u8, N>(page.bytes);
                &aligned
            }
        };
        if !lossless && !N::are_tame(values) {
            return None;
        }
        // 2. Encode.
        let zfp = self.zfp(page.bytes.len());
        let encoded = zfp.encode(mode.into(), values, pieces.each())?;
        let bytes = ZFP_HEADER_BYTES + encoded.len();
        if bytes > limit {
            return None;
        }
        let (header, rest) = block.split_first_chunk_mut()?;
        rest[..encoded.len()].copy_from_slice(encoded);
        *header = header_of(encoded, page.seed);
        // 3. Decode, and compare.
        let back: &mut [N] = &mut bytemuck::cast_slice_mut(scratch)[..values.len()];
        let encoded = &block[ZFP_HEADER_BYTES..bytes];
        if !zfp.decode(mode.into(), encoded, pieces.each(), back) {
            return None;
        }
        let back_bytes: &[u8] = bytemuck::cast_slice(back);
        let (hash, error) = match mode {
            ZfpMode::Reversible if back_bytes == page.bytes => (page.hash, 0.0),
            ZfpMode::Reversible => return None,
            ZfpMode::Accuracy(bound) => (
                plain::hash(back_bytes, page.seed),
                largest_error(values, back, bound)?,
            ),
            ZfpMode::Rate(_) | ZfpMode::Precision(_) => (
                plain::hash(back_bytes, page.seed),
                largest_error(values, back, f64::MAX)?,
            ),
        };
        Some(Encoded {
            form: Form::Zfp,
            bytes: bytes as u32,
            hash,
            error,
            declined: false,
        })
    }

    fn decode_values<N: Value>(
        &mut self,
        mode: ZfpMode,
        pieces: Pieces<'_>,
        block: &[u8],
        page: &mut [u8],
        scratch: &mut [u64],
    ) -> bool {
        let zfp = self.zfp(page.len());
        if let Ok(values) = bytemuck::try_cast_slice_mut::<u8, N>(page) {
            return zfp.decode(mode.into(), block, pieces.each(), values);
        }
        let values = &mut bytemuck::cast_slice_mut(scratch)[..page.len() / size_of::<N>()];
        let whole = zfp.decode::<N>(mode.into(), block, pieces.each(), values);
        page.copy_from_slice(bytemuck::cast_slice(values));
        whole
    }

    fn zfp(&mut self, page_bytes: usize) -> &mut Zfp {
        let fits = |(longest, _): &(usize, Zfp)| *longest >= page_bytes;
        if !self.coder.as_ref().is_some_and(fits) {
            self.coder = Some((page_bytes, Zfp::new(page_bytes)));
        }
        &mut self.coder.as_mut().expect("made above").1
    }
}

pub(super) fn header_of(block: &[u8], seed: u64) -> [u8; ZFP_HEADER_BYTES] {
    (plain::hash(block, seed) as u64).to_le_bytes()
}

/// Parameters of a page's cut into pieces.
#[derive(Clone, Copy)]
struct Pieces<'a> {
    shape: &'a [u64],
    first: u64,
    len: usize,
}

impl<'a> Pieces<'a> {
    fn of(scheme: &'a Scheme, number: Number, page: PageIndex, page_bytes: usize) -> Self {
        let len = page_bytes / number.width().bytes();
        Self {
            shape: &scheme.layout.shape,
            first: page.number() * len as u64,
            len,
        }
    }

    fn each(self) -> impl Iterator<Item = zfp::Lengths> + Clone {
        pieces(self.shape, self.first, self.len)
    }
}

impl From<ZfpMode> for Mode {
    fn from(mode: ZfpMode) -> Self {
        match mode {
            ZfpMode::Rate(bits) => Self::Rate(bits),
            ZfpMode::Precision(bits) => Self::Precision(bits),
            ZfpMode::Accuracy(bound) => Self::Accuracy(bound),
            ZfpMode::Reversible => Self::Reversible,
        }
    }
}

/// A number that ZFP compresses.
trait Value: zfp::Number + Pod {
    /// True if the library's lossy modes can be trusted with these values. A value that is not
    /// finite spoils its whole block, and integers need two bits of headroom.
    fn are_tame(values: &[Self]) -> bool;

    fn difference(self, other: Self) -> f64;
}

macro_rules! floats {
    ($($float:ty),*) => {$(
        impl Value for $float {
            fn are_tame(values: &[Self]) -> bool {
                // No early end, so that the compiler uses vectors.
                values.iter().fold(true, |tame, value| tame & value.is_finite())
            }

            fn difference(self, other: Self) -> f64 {
                (f64::from(self) - f64::from(other)).abs()
            }
        }
    )*};
}

macro_rules! integers {
    ($($integer:ty),*) => {$(
        impl Value for $integer {
            fn are_tame(values: &[Self]) -> bool {
                let limit = 1 << (Self::BITS - 2);
                values.iter().fold(true, |tame, value| tame & (-limit..limit).contains(value))
            }

            fn difference(self, other: Self) -> f64 {
                self.abs_diff(other) as f64
            }
        }
    )*};
}

floats!(f32, f64);
integers!(i32, i64);

/// Returns the largest difference of two values at the same place. `None` if one is larger than
/// `bound`, or is no number.
fn largest_error<N: Value>(values: &[N], back: &[N], bound: f64) -> Option<f64> {
    // Eight lanes, because one maximum would be one long chain; no early end, so that the
    // compiler uses vectors.
    let (mut worst, mut good) = ([0.0f64; 8], true);
    let (values, back) = (values.as_chunks::<8>().0, back.as_chunks::<8>().0);
    for (values, back) in values.iter().zip(back) {
        for (lane, worst) in worst.iter_mut().enumerate() {
            let error = values[lane].difference(back[lane]);
            good &= error <= bound;
            *worst = if error > *worst { error } else { *worst };
        }
    }
    good.then(|| worst.into_iter().fold(0.0, f64::max))
}
