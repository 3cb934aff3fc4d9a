//! [`Coder`]: one page to fewer bytes and back.
//!
//! The rules it keeps: decoding is safe on any input. A damaged block may decode to wrong bytes, so
//! the caller compares the hash. **A loss is certified**: the block of a lossy page is decoded here
//! and compared with the page, and the page's hash is that of the decoded bytes. So a page that
//! comes back and leaves unchanged has the hash of its entry: it is clean, is not encoded again,
//! and never drifts.
//!
//! [`Coder::encode`] alone decides how a page is stored, [`Coder::encode_as`] alone does it.
//!
//! The ZFP library checks no bounds. So a ZFP block begins with eight bytes of its own hash, and is
//! decoded only if they are right.

use std::mem;

use bytemuck::Pod;
use farpage_codec::{
    unlz4,
    zfp::{self, Mode, Zfp},
};
use lz4_flex::block::{CompressTable, compress_into_with_table, get_maximum_output_size};

use super::{
    ZfpMode,
    adaptive::Chooser,
    plain,
    scheme::{Number, Plan, Scheme, Width, pieces},
    shuffle::{shuffle, unshuffle},
};

/// Bytes before a ZFP block: the low half of its hash.
const ZFP_HEADER_BYTES: usize = 8;

/// After this many pages in a row that did not shrink, a small sample of each page is tried first.
/// LZ4 passes over random bytes at 12 GB/s, which a program with a fast link would still notice.
const HOPELESS_PAGES: u32 = 8;
/// One in this many pages of such a row is tried whole all the same.
const HOPELESS_RETRY: u32 = 64;
const SAMPLE_BYTES: usize = 4096;

/// How one page is stored. Its region's scheme has the rest.
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

    /// Its number in page entries, and so in published maps.
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

    /// Whether a page of `page_bytes` in a region of this scheme can be stored as `bytes` bytes of
    /// this form.
    pub(crate) fn is_possible(
        self,
        scheme: &Scheme,
        stored_bytes: usize,
        page_bytes: usize,
    ) -> bool {
        match self {
            Self::Raw => stored_bytes == page_bytes,
            Self::Lz4 | Self::Shuffled(_) => (1..page_bytes).contains(&stored_bytes),
            Self::Zfp => {
                scheme.zfp().is_some() && (ZFP_HEADER_BYTES..page_bytes).contains(&stored_bytes)
            }
        }
    }
}

/// A page that changed.
#[derive(Clone, Copy)]
pub(crate) struct Page<'a> {
    pub(crate) number: u64,
    pub(crate) bytes: &'a [u8],
    pub(crate) hash: u128,
    /// The seed of the region's hashes.
    pub(crate) seed: u64,
}

/// The outcome of encoding a page.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Encoded {
    pub(crate) form: Form,
    /// Length of the block; of a raw page, the page's.
    pub(crate) bytes: u32,
    /// The hash of the page as it will come back.
    pub(crate) hash: u128,
    /// The largest difference between a value and the same value as it will come back.
    pub(crate) error: f64,
    /// ZFP was asked for and could not serve the page.
    pub(crate) declined: bool,
}

/// Encodes and decodes pages. It keeps tables and scratch, so that no page allocates.
pub(crate) struct Coder {
    table: CompressTable,
    /// A page with its bytes shuffled, or aligned for ZFP.
    scratch: Vec<u64>,
    /// Pages in a row that did not shrink.
    hopeless: u32,
    /// The coder of ZFP, and the largest page that it serves.
    zfp: Option<(usize, Zfp)>,
}

impl Coder {
    pub(crate) fn new() -> Self {
        Self {
            table: CompressTable::small(),
            scratch: Vec::new(),
            hopeless: 0,
            zfp: None,
        }
    }

    /// How long a block's buffer must be.
    pub(crate) fn bound(page_bytes: usize) -> usize {
        get_maximum_output_size(page_bytes)
    }

    /// The longest block that is kept. Raw pages move many at a time, by one request: saving a few
    /// bytes is not worth losing that.
    pub(crate) fn limit(page_bytes: usize) -> usize {
        page_bytes - page_bytes / 16
    }

    /// Allocates what decoding pages of this length and scheme needs.
    pub(crate) fn prepare(&mut self, scheme: &Scheme, page_bytes: usize) {
        if !scheme.is_raw() {
            self.scratch(page_bytes);
        }
        if scheme.zfp().is_some() {
            self.zfp(page_bytes);
        }
    }

    /// Finds the form for a page and encodes it. Unless the form is raw, the block is at the start
    /// of `block` and no longer than `limit`.
    pub(crate) fn encode(
        &mut self,
        scheme: &Scheme,
        chooser: Option<&Chooser>,
        page: Page<'_>,
        limit: usize,
        block: &mut [u8],
    ) -> Encoded {
        let chosen = chooser.map_or(Form::Raw, |chooser| {
            chooser.decide(self, scheme, page, limit, block)
        });
        let found = match scheme.plan {
            Plan::Raw => None,
            Plan::Lz4 => self.encode_lossless(scheme, Form::Lz4, page, limit, block),
            Plan::Shuffle(width) => {
                self.encode_lossless(scheme, Form::Shuffled(width), page, limit, block)
            }
            Plan::Zfp(_, number) => self.encode_zfp(scheme, number, page, limit, block),
            Plan::Adaptive(_, zfp) => match (chosen, zfp) {
                (Form::Raw, _) => None,
                (Form::Zfp, Some((_, number))) => {
                    self.encode_zfp(scheme, number, page, limit, block)
                }
                (form, _) => self.encode_lossless(scheme, form, page, limit, block),
            },
        };
        let mut encoded = found.unwrap_or(Encoded {
            form: Form::Raw,
            bytes: page.bytes.len() as u32,
            hash: page.hash,
            error: 0.0,
            declined: false,
        });
        encoded.declined = matches!(scheme.plan, Plan::Zfp(..)) && encoded.form != Form::Zfp;
        encoded
    }

    /// Encodes by ZFP; without loss what ZFP cannot serve.
    fn encode_zfp(
        &mut self,
        scheme: &Scheme,
        number: Number,
        page: Page<'_>,
        limit: usize,
        block: &mut [u8],
    ) -> Option<Encoded> {
        let shuffled = Form::Shuffled(number.width());
        self.encode_as(scheme, Form::Zfp, page, limit, block)
            .or_else(|| self.encode_lossless(scheme, shuffled, page, limit, block))
    }

    /// Encodes by LZ4, shuffled or not, unless earlier pages and a sample of this one did not
    /// shrink.
    fn encode_lossless(
        &mut self,
        scheme: &Scheme,
        form: Form,
        page: Page<'_>,
        limit: usize,
        block: &mut [u8],
    ) -> Option<Encoded> {
        let samples = page.bytes.len() / SAMPLE_BYTES;
        let sampled = self.hopeless >= HOPELESS_PAGES
            && !self.hopeless.is_multiple_of(HOPELESS_RETRY)
            && samples > 2;
        if sampled {
            // Each page is sampled at another place.
            let from = self.hopeless as usize % samples * SAMPLE_BYTES;
            let bytes = &page.bytes[from..][..SAMPLE_BYTES];
            let sample = Page { bytes, ..page };
            let limit = Self::limit(SAMPLE_BYTES);
            if (self.encode_as(scheme, form, sample, limit, block)).is_none() {
                self.hopeless = self.hopeless.wrapping_add(1);
                return None;
            }
        }
        let encoded = self.encode_as(scheme, form, page, limit, block);
        self.hopeless = match encoded {
            Some(_) => 0,
            None => self.hopeless.wrapping_add(1),
        };
        encoded
    }

    /// Encodes a page in one form, not raw. `None` if its block would be longer than `limit`, or if
    /// the page would not come back as the scheme promises.
    pub(crate) fn encode_as(
        &mut self,
        scheme: &Scheme,
        form: Form,
        page: Page<'_>,
        limit: usize,
        block: &mut [u8],
    ) -> Option<Encoded> {
        let lossless = |bytes: usize| {
            (bytes <= limit).then_some(Encoded {
                form,
                bytes: bytes as u32,
                hash: page.hash,
                error: 0.0,
                declined: false,
            })
        };
        match form {
            Form::Raw => unreachable!("a raw page is not encoded"),
            Form::Lz4 => lossless(self.lz4(page.bytes, block)),
            Form::Shuffled(width) => {
                let mut scratch = mem::take(self.scratch(page.bytes.len()));
                let shuffled = &mut bytemuck::cast_slice_mut(&mut scratch)[..page.bytes.len()];
                shuffle(width, page.bytes, shuffled);
                let bytes = self.lz4(shuffled, block);
                self.scratch = scratch;
                lossless(bytes)
            }
            Form::Zfp => {
                let (mode, number) = scheme.zfp()?;
                let pieces = Pieces::of(scheme, number, page.number, page.bytes.len());
                match number {
                    Number::F32 => self.zfp_encode::<f32>(mode, pieces, page, limit, block),
                    Number::F64 => self.zfp_encode::<f64>(mode, pieces, page, limit, block),
                    Number::I32 => self.zfp_encode::<i32>(mode, pieces, page, limit, block),
                    Number::I64 => self.zfp_encode::<i64>(mode, pieces, page, limit, block),
                }
            }
        }
    }

    /// Decodes a block into exactly `page.len()` bytes.
    ///
    /// # Errors
    /// What is wrong with the block. A damaged block may also decode to wrong bytes: compare the
    /// hash.
    pub(crate) fn decode(
        &mut self,
        scheme: &Scheme,
        form: Form,
        block: &[u8],
        seed: u64,
        number: u64,
        page: &mut [u8],
    ) -> Result<(), &'static str> {
        let whole = match form {
            Form::Raw => unreachable!("a raw page is not decoded"),
            Form::Lz4 => unlz4(block, page),
            Form::Shuffled(width) => {
                let len = page.len();
                let shuffled = &mut bytemuck::cast_slice_mut(self.scratch(len))[..len];
                let whole = unlz4(block, shuffled);
                if whole {
                    unshuffle(width, shuffled, page);
                }
                whole
            }
            Form::Zfp => {
                let Some((mode, kind)) = scheme.zfp() else {
                    return Err("its region has no such codec");
                };
                let Some((header, block)) = block.split_first_chunk() else {
                    return Err("it is shorter than its header");
                };
                if *header != zfp_header(block, seed) {
                    return Err("the hash of its block does not match");
                }
                let pieces = Pieces::of(scheme, kind, number, page.len());
                match kind {
                    Number::F32 => self.zfp_decode::<f32>(mode, pieces, block, page),
                    Number::F64 => self.zfp_decode::<f64>(mode, pieces, block, page),
                    Number::I32 => self.zfp_decode::<i32>(mode, pieces, block, page),
                    Number::I64 => self.zfp_decode::<i64>(mode, pieces, block, page),
                }
            }
        };
        whole.then_some(()).ok_or("it does not decode to a page")
    }

    /// Encodes `plain` into `block`. Returns the block's length.
    fn lz4(&mut self, plain: &[u8], block: &mut [u8]) -> usize {
        // The small table is faster, and serves pages below 64 KiB. At the first longer page the
        // library replaces it by the large one, for good. That is fine here, because a lane mostly
        // sees one page size.
        compress_into_with_table(plain, block, &mut self.table)
            .expect("the output has its greatest length")
    }

    fn zfp_encode<N: Value>(
        &mut self,
        mode: ZfpMode,
        pieces: Pieces<'_>,
        page: Page<'_>,
        limit: usize,
        block: &mut [u8],
    ) -> Option<Encoded> {
        let len = page.bytes.len();
        let mut scratch = mem::take(self.scratch(len));
        let encoded = (|| {
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
            let zfp = self.zfp(len);
            let encoded = zfp.encode(mode.into(), values, pieces.each())?;
            let bytes = ZFP_HEADER_BYTES + encoded.len();
            if bytes > limit {
                return None;
            }
            let (header, rest) = block.split_first_chunk_mut()?;
            rest[..encoded.len()].copy_from_slice(encoded);
            *header = zfp_header(encoded, page.seed);
            // 3. Decode, and compare.
            let back: &mut [N] = &mut bytemuck::cast_slice_mut(&mut scratch)[..values.len()];
            if !zfp.decode(
                mode.into(),
                &block[ZFP_HEADER_BYTES..bytes],
                pieces.each(),
                back,
            ) {
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
        })();
        self.scratch = scratch;
        encoded
    }

    fn zfp_decode<N: Value>(
        &mut self,
        mode: ZfpMode,
        pieces: Pieces<'_>,
        block: &[u8],
        page: &mut [u8],
    ) -> bool {
        let len = page.len();
        if let Ok(values) = bytemuck::try_cast_slice_mut::<u8, N>(page) {
            return self
                .zfp(len)
                .decode(mode.into(), block, pieces.each(), values);
        }
        let mut scratch = mem::take(self.scratch(len));
        let values: &mut [N] = &mut bytemuck::cast_slice_mut(&mut scratch)[..len / size_of::<N>()];
        let whole = self
            .zfp(len)
            .decode(mode.into(), block, pieces.each(), values);
        page.copy_from_slice(bytemuck::cast_slice(values));
        self.scratch = scratch;
        whole
    }

    fn scratch(&mut self, page_bytes: usize) -> &mut Vec<u64> {
        if self.scratch.len() * 8 < page_bytes {
            self.scratch.resize(page_bytes / 8, 0);
        }
        &mut self.scratch
    }

    fn zfp(&mut self, page_bytes: usize) -> &mut Zfp {
        if self
            .zfp
            .as_ref()
            .is_none_or(|(longest, _)| *longest < page_bytes)
        {
            self.zfp = Some((page_bytes, Zfp::new(page_bytes)));
        }
        &mut self.zfp.as_mut().expect("made above").1
    }
}

fn zfp_header(block: &[u8], seed: u64) -> [u8; ZFP_HEADER_BYTES] {
    (plain::hash(block, seed) as u64).to_le_bytes()
}

/// How a page is cut.
#[derive(Clone, Copy)]
struct Pieces<'a> {
    shape: &'a [u64],
    first: u64,
    len: usize,
}

impl<'a> Pieces<'a> {
    fn of(scheme: &'a Scheme, number: Number, page: u64, page_bytes: usize) -> Self {
        let len = page_bytes / number.width().bytes();
        Self {
            shape: &scheme.layout.shape,
            first: page * len as u64,
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
    /// Whether the library's lossy modes can be trusted with these values. A value that is not
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

/// The largest difference of two values at the same place. `None` if one is larger than `bound`, or
/// is no number.
fn largest_error<N: Value>(values: &[N], back: &[N], bound: f64) -> Option<f64> {
    // Eight lanes, because one maximum would be one long chain; no early end, so that the compiler
    // uses vectors.
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

#[cfg(test)]
mod tests {
    use std::env;

    use proptest::prelude::*;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::{
        Codec,
        codec::{Element, Layout},
    };

    const SEED: u64 = 7;

    fn scheme(codec: &str, element: Element, shape: &[u64]) -> Scheme {
        let codec: Codec = codec.parse().expect("a codec");
        Scheme::new(codec, Layout::new(element, shape)).expect("fits")
    }

    /// Encodes a page and decodes it. Returns the outcome and the decoded page.
    fn through(
        coder: &mut Coder,
        scheme: &Scheme,
        number: u64,
        bytes: &[u8],
    ) -> (Encoded, Vec<u8>) {
        let mut block = vec![0xaa; Coder::bound(bytes.len())];
        let page = Page {
            number,
            bytes,
            hash: plain::hash(bytes, SEED),
            seed: SEED,
        };
        let encoded = coder.encode(scheme, None, page, bytes.len() - 64, &mut block);
        let mut back = vec![0x55; bytes.len()];
        match encoded.form {
            Form::Raw => back.copy_from_slice(bytes),
            form => {
                let block = &block[..encoded.bytes as usize];
                coder
                    .decode(scheme, form, block, SEED, number, &mut back)
                    .expect("it was just encoded");
            }
        }
        assert!(encoded.bytes as usize <= bytes.len());
        assert_eq!(plain::hash(&back, SEED), encoded.hash);
        (encoded, back)
    }

    fn bytes_of<N: Pod>(values: &[N]) -> &[u8] {
        bytemuck::cast_slice(values)
    }

    /// A page of numbers of one kind or another, from smooth to hostile.
    fn values(random: &mut ChaCha8Rng, len: usize) -> Vec<f64> {
        let scale = 2f64.powi(random.random_range(-40..40));
        let step = random.random_range(0.0..0.5);
        let mut values: Vec<f64> = (0..len).map(|i| scale * (i as f64 * step).sin()).collect();
        match random.random_range(0..10) {
            0 => values
                .iter_mut()
                .for_each(|value| *value = f64::from_bits(random.random())),
            1 => values
                .iter_mut()
                .for_each(|value| *value *= 1.0 + random.random::<f64>()),
            2 => values
                .iter_mut()
                .for_each(|value| *value = f64::from_bits(random.random::<u64>() >> 12)),
            3 => values.iter_mut().for_each(|value| *value = value.round()),
            4 => {
                let odd = [
                    f64::NAN,
                    f64::INFINITY,
                    f64::NEG_INFINITY,
                    f64::MAX,
                    f64::MIN,
                    f64::MIN_POSITIVE,
                    5e-324,
                    -0.0,
                    1e300,
                ];
                for _ in 0..random.random_range(1..5) {
                    values[random.random_range(0..len)] = odd[random.random_range(0..odd.len())];
                }
            }
            5 => values
                .iter_mut()
                .step_by(17)
                .for_each(|value| *value *= 1e12),
            _ => {}
        }
        values
    }

    /// Every page of every kind meets its bound or loses nothing; `FARPAGE_FUZZ_PAGES` says how
    /// many are tried.
    #[test]
    fn no_page_is_ever_further_off_than_its_bound() {
        let pages = env::var("FARPAGE_FUZZ_PAGES")
            .map_or(20_000, |text| text.parse().expect("a number of pages"));
        let mut random = ChaCha8Rng::seed_from_u64(5);
        let mut coder = Coder::new();
        let (mut lossy, mut declined, mut plain_bytes, mut stored_bytes) = (0u64, 0, 0, 0);
        for number in 0..pages {
            let bound = 10f64.powi(random.random_range(-12..3));
            let row = [0, 16, 30, 100][random.random_range(0..4)];
            let shape = [1000, row, row];
            let double = random.random();
            let element = if double { Element::F64 } else { Element::F32 };
            let scheme = scheme(
                &format!("zfp:accuracy={bound:e}"),
                element,
                &shape[..random.random_range(1..4)],
            );
            let values = values(&mut random, if double { 512 } else { 1024 });
            let singles: Vec<f32> = values.iter().map(|&value| value as f32).collect();
            let bytes = if double {
                bytes_of(&values)
            } else {
                bytes_of(&singles)
            };
            let (encoded, back) = through(&mut coder, &scheme, number, bytes);
            if encoded.form != Form::Zfp {
                assert!(back == bytes, "page {number}: a loss by {:?}", encoded.form);
                assert!(encoded.declined && encoded.error == 0.0);
                declined += 1;
                continue;
            }
            lossy += 1;
            let error = |at: usize| match double {
                true => {
                    (values[at] - bytemuck::pod_read_unaligned::<f64>(&back[at * 8..][..8])).abs()
                }
                false => f64::from(
                    (singles[at] - bytemuck::pod_read_unaligned::<f32>(&back[at * 4..][..4])).abs(),
                ),
            };
            let worst =
                (0..bytes.len() / element.bytes())
                    .map(error)
                    .fold(0.0, |worst: f64, error| {
                        assert!(
                            error <= bound,
                            "page {number}: {error} exceeds {bound} ({scheme:?})"
                        );
                        worst.max(error)
                    });
            assert!(
                (worst - encoded.error).abs() <= 1e-6 * bound,
                "page {number}: {worst}, and {} is told",
                encoded.error
            );
            plain_bytes += bytes.len();
            stored_bytes += encoded.bytes as usize;
        }
        println!(
            "{pages} pages: {lossy} within their bounds in 1/{:.2} of the room, {declined} without loss, 0 violations",
            plain_bytes as f64 / stored_bytes as f64
        );
        assert!(
            lossy > pages / 4 && declined > pages / 20,
            "{lossy} {declined}"
        );
    }

    #[test]
    fn what_zfp_cannot_hold_comes_back_bit_by_bit() {
        let smooth: Vec<f64> = (0..512).map(|i| (f64::from(i) * 0.01).sin()).collect();
        let mut coder = Coder::new();
        for codec in [
            "zfp:accuracy=1e-3",
            "zfp:rate=16",
            "zfp:precision=20",
            "zfp:reversible",
        ] {
            let scheme = scheme(codec, Element::F64, &[]);
            let (encoded, _) = through(&mut coder, &scheme, 0, bytes_of(&smooth));
            assert_eq!(
                (encoded.form, encoded.declined),
                (Form::Zfp, false),
                "{codec}"
            );
            for odd in [
                f64::NAN,
                -f64::NAN,
                f64::INFINITY,
                f64::NEG_INFINITY,
                f64::MAX,
                1e200,
            ] {
                let mut values = smooth.clone();
                values[77] = odd;
                let (encoded, back) = through(&mut coder, &scheme, 0, bytes_of(&values));
                let finite = odd.is_finite() && codec != "zfp:accuracy=1e-3";
                assert!(
                    back == bytes_of(&values) || finite,
                    "{codec} {odd}: {encoded:?}"
                );
            }
        }
        let scheme = scheme("zfp:rate=8", Element::I32, &[]);
        let mut values: Vec<i32> = (0..1024).collect();
        assert_eq!(
            through(&mut coder, &scheme, 0, bytes_of(&values)).0.form,
            Form::Zfp
        );
        values[5] = i32::MIN;
        let (encoded, back) = through(&mut coder, &scheme, 0, bytes_of(&values));
        assert_eq!(
            (encoded.form, encoded.declined),
            (Form::Shuffled(Width::Four), true)
        );
        assert!(
            back == bytes_of(&values),
            "integers without headroom lose nothing"
        );
    }

    #[test]
    fn a_page_that_came_back_is_as_its_entry_knows_it() {
        let mut random = ChaCha8Rng::seed_from_u64(9);
        let mut coder = Coder::new();
        for codec in ["zfp:accuracy=1e-4", "zfp:rate=12", "zfp:precision=24"] {
            let scheme = scheme(codec, Element::F64, &[64, 64]);
            for number in 0..50 {
                let values = values(&mut random, 512);
                let (encoded, back) = through(&mut coder, &scheme, number, bytes_of(&values));
                assert_eq!(
                    plain::hash(&back, SEED),
                    encoded.hash,
                    "so it is clean when it leaves again"
                );
            }
        }
    }

    #[test]
    fn two_dimensions_take_less_room_than_one() {
        let field: Vec<f64> = (0..8192)
            .map(|i| (f64::from(i % 64) * 0.1).sin() * (f64::from(i / 64) * 0.1).cos())
            .collect();
        let mut coder = Coder::new();
        let mut stored = |shape: &[u64]| {
            let scheme = scheme("zfp:accuracy=1e-6", Element::F64, shape);
            through(&mut coder, &scheme, 0, bytes_of(&field)).0.bytes
        };
        let (flat, shaped, odd) = (stored(&[]), stored(&[128, 64]), stored(&[2, 64, 64]));
        assert!(shaped * 4 < flat * 3, "{shaped} and {flat}");
        assert_eq!(odd, shaped, "too few planes: rows");
    }

    #[test]
    fn a_page_that_shrinks_is_found_also_after_many_that_do_not() {
        let mut random = ChaCha8Rng::seed_from_u64(3);
        let mut coder = Coder::new();
        for codec in ["lz4", "shuffle8"] {
            let scheme = scheme(codec, Element::F64, &[]);
            let hopeless = |coder: &mut Coder, random: &mut ChaCha8Rng, pages: u32| {
                for _ in 0..pages {
                    let page: Vec<u64> = (0..8192).map(|_| random.random()).collect();
                    assert_eq!(
                        through(coder, &scheme, 0, bytes_of(&page)).0.form,
                        Form::Raw
                    );
                }
            };
            for pages in [1, 20, 100] {
                hopeless(&mut coder, &mut random, pages);
                let page: Vec<u64> = (0..8192).map(|_| random.random_range(0..1000)).collect();
                let (encoded, _) = through(&mut coder, &scheme, 0, bytes_of(&page));
                assert!(encoded.bytes < 32768, "{codec} after {pages}: {encoded:?}");
            }
            // A page of which half shrinks is missed for a while, but not for ever.
            hopeless(&mut coder, &mut random, 10);
            let page: Vec<u64> = (0..8192u64)
                .map(|at| if at < 1024 { at } else { random.random() })
                .collect();
            let found = (0..64)
                .position(|_| through(&mut coder, &scheme, 0, bytes_of(&page)).0.form != Form::Raw);
            assert!(found.is_some(), "{codec}");
        }
    }

    fn any_scheme() -> impl Strategy<Value = Scheme> {
        let codec = prop::sample::select(vec![
            "lz4",
            "shuffle2",
            "shuffle4",
            "shuffle8",
            "zfp:reversible,f32",
            "zfp:reversible,f64",
            "zfp:reversible,i32",
            "zfp:reversible,i64",
            "zfp:accuracy=1e-3,f32",
            "zfp:rate=9,f64",
            "zfp:precision=12,i32",
            "zfp:rate=7,i64",
        ]);
        (codec, prop::collection::vec(0u64..80, 0..4))
            .prop_map(|(codec, shape)| scheme(codec, Element::of::<u8>(), &shape))
    }

    /// Pages that are compressible in one way or another, at any alignment.
    fn any_page() -> impl Strategy<Value = (usize, Vec<u8>)> {
        let bits = prop_oneof![Just(0u32), 1u32..9];
        (
            any::<u64>(),
            bits,
            0usize..8,
            prop::sample::select(vec![4096usize, 8192]),
        )
            .prop_map(|(seed, bits, skew, len)| {
                let mut random = ChaCha8Rng::seed_from_u64(seed);
                let mask = ((1u32 << bits) - 1) as u8;
                let smooth =
                    |at: usize| bytemuck::bytes_of(&((at / 8) as f64 * 0.01).sin())[at % 8];
                let page = (0..len + skew).map(|at| {
                    if bits == 0 {
                        smooth(at)
                    } else {
                        random.random::<u8>() & mask
                    }
                });
                (skew, page.collect())
            })
    }

    fn is_lossless(scheme: &Scheme) -> bool {
        !matches!(scheme.plan, Plan::Zfp(mode, _) if mode != ZfpMode::Reversible)
    }

    proptest! {
        #[test]
        fn pages_come_back_from_every_codec(scheme in any_scheme(), (skew, page) in any_page(), number in 0u64..1000) {
            let (encoded, back) = through(&mut Coder::new(), &scheme, number, &page[skew..]);
            if is_lossless(&scheme) || encoded.form != Form::Zfp {
                prop_assert_eq!(&back[..], &page[skew..]);
            }
        }

        #[test]
        fn damaged_blocks_decode_to_something_or_nothing_but_never_out_of_bounds(
            scheme in any_scheme(), (skew, page) in any_page(), at in any::<prop::sample::Index>(), bit in 0u8..8, cut in any::<prop::sample::Index>(),
        ) {
            let bytes = &page[skew..];
            let mut coder = Coder::new();
            let mut block = vec![0; Coder::bound(bytes.len())];
            let encoded = coder.encode(&scheme, None, Page { number: 3, bytes, hash: plain::hash(bytes, SEED), seed: SEED }, bytes.len() - 64, &mut block);
            prop_assume!(encoded.form != Form::Raw);
            block.truncate(encoded.bytes as usize);
            let mut back = vec![0; bytes.len()];
            let at = at.index(block.len());
            block[at] ^= 1 << bit;
            let damaged = coder.decode(&scheme, encoded.form, &block, SEED, 3, &mut back);
            prop_assert!(damaged.is_err() || encoded.form != Form::Zfp, "a ZFP block that is not whole is not even decoded");
            // Even with a header that fits, the library must not leave its buffers.
            for len in [block.len(), cut.index(block.len())] {
                let block = &mut block[..len];
                if encoded.form == Form::Zfp && let Some((header, rest)) = block.split_first_chunk_mut() {
                    *header = zfp_header(rest, SEED);
                }
                let _ = coder.decode(&scheme, encoded.form, block, SEED, 3, &mut back);
            }
        }

        #[test]
        fn arbitrary_bytes_are_safe_to_decode(scheme in any_scheme(), mut block in prop::collection::vec(any::<u8>(), 0..4096)) {
            let form = match scheme.plan {
                Plan::Zfp(..) => Form::Zfp,
                Plan::Shuffle(width) => Form::Shuffled(width),
                _ => Form::Lz4,
            };
            if form == Form::Zfp && let Some((header, rest)) = block.split_first_chunk_mut() {
                *header = zfp_header(rest, SEED);
            }
            let _ = Coder::new().decode(&scheme, form, &block, SEED, 1, &mut [0; 4096]);
        }
    }
}
