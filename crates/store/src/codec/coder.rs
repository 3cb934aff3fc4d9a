//! [`Coder`]: one page to fewer bytes and back.
//!
//! The rule it keeps: decoding is safe on any input. A damaged block may decode to wrong bytes, so
//! the caller compares the hash.
//!
//! [`Coder::encode`] tries the form that it is given, and the next best form if that one cannot
//! serve the page. The choice of the form is left to the region's scheme and, for an adaptive
//! codec, to the [`Chooser`](super::adaptive::Chooser). ZFP is in `zfp.rs`.

use farpage_codec::unlz4;
use lz4_flex::block::{CompressTable, compress_into_with_table, get_maximum_output_size};

use super::{
    form::{Encoded, Form, Page},
    scheme::{FormPlan, Scheme},
    shuffle::{shuffle, unshuffle},
    zfp::ZfpCoder,
};
use crate::PageIndex;

/// Number of unshrunk pages in a row, after which a sample of a page is tried first. LZ4 passes
/// over random bytes at 12 GB/s, which a program with a fast link would still notice.
const HOPELESS_PAGES: u32 = 8;
/// Period of whole trials in such a row: one page in this many is tried without a sample.
const HOPELESS_RETRY: u32 = 64;
const SAMPLE_BYTES: usize = 4096;

/// Encoder and decoder of pages. It keeps tables and scratch, so that no page allocates.
pub(crate) struct Coder {
    table: CompressTable,
    /// A page with its bytes shuffled, or aligned for ZFP.
    scratch: Vec<u64>,
    /// Pages in a row that did not shrink.
    hopeless: u32,
    zfp: ZfpCoder,
}

impl Coder {
    pub(crate) fn new() -> Self {
        Self {
            table: CompressTable::small(),
            scratch: Vec::new(),
            hopeless: 0,
            zfp: ZfpCoder::default(),
        }
    }

    /// Returns the length that a block's buffer must have.
    pub(crate) fn bound(page_bytes: usize) -> usize {
        get_maximum_output_size(page_bytes)
    }

    /// Returns the longest block that is kept. Raw pages move many at a time, by one request:
    /// saving a few bytes is not worth losing that.
    pub(crate) fn limit(page_bytes: usize) -> usize {
        page_bytes - page_bytes / 16
    }

    /// Allocates the memory for decoding pages of `page_bytes` in this scheme.
    pub(crate) fn prepare(&mut self, scheme: &Scheme, page_bytes: usize) {
        if !scheme.is_raw() {
            self.grow_scratch(page_bytes);
        }
        if scheme.zfp().is_some() {
            self.zfp.prepare(page_bytes);
        }
    }

    /// Encodes a page in `wish` or, where ZFP cannot serve it, without loss. Unless the form that
    /// comes out is raw, the block is at the start of `block` and no longer than `limit`.
    pub(crate) fn encode(
        &mut self,
        scheme: &Scheme,
        wish: Form,
        page: Page<'_>,
        limit: usize,
        block: &mut [u8],
    ) -> Encoded {
        let found = match (wish, scheme.zfp()) {
            (Form::Raw, _) => None,
            (Form::Zfp, Some((_, number))) => {
                let shuffled = Form::Shuffled(number.width());
                self.encode_as(scheme, Form::Zfp, page, limit, block)
                    .or_else(|| self.encode_lossless(scheme, shuffled, page, limit, block))
            }
            (form, _) => self.encode_lossless(scheme, form, page, limit, block),
        };
        let mut encoded = found.unwrap_or_else(|| Encoded::raw(page));
        encoded.declined = matches!(scheme.plan, FormPlan::Zfp(..)) && encoded.form != Form::Zfp;
        encoded
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
    pub(super) fn encode_as(
        &mut self,
        scheme: &Scheme,
        form: Form,
        page: Page<'_>,
        limit: usize,
        block: &mut [u8],
    ) -> Option<Encoded> {
        let len = page.bytes.len();
        let bytes = match form {
            Form::Raw => unreachable!("a raw page is not encoded"),
            Form::Lz4 => lz4(&mut self.table, page.bytes, block),
            Form::Shuffled(width) => {
                self.grow_scratch(len);
                let shuffled = &mut bytemuck::cast_slice_mut(&mut self.scratch)[..len];
                shuffle(width, page.bytes, shuffled);
                lz4(&mut self.table, shuffled, block)
            }
            Form::Zfp => {
                self.grow_scratch(len);
                let scratch = &mut self.scratch;
                return self.zfp.encode(scheme, page, limit, block, scratch);
            }
        };
        (bytes <= limit).then_some(Encoded {
            form,
            bytes: bytes as u32,
            ..Encoded::raw(page)
        })
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
        number: PageIndex,
        page: &mut [u8],
    ) -> Result<(), &'static str> {
        let len = page.len();
        let whole = match form {
            Form::Raw => unreachable!("a raw page is not decoded"),
            Form::Lz4 => unlz4(block, page),
            Form::Shuffled(width) => {
                self.grow_scratch(len);
                let shuffled = &mut bytemuck::cast_slice_mut(&mut self.scratch)[..len];
                let whole = unlz4(block, shuffled);
                if whole {
                    unshuffle(width, shuffled, page);
                }
                whole
            }
            Form::Zfp => {
                self.grow_scratch(len);
                let scratch = &mut self.scratch;
                self.zfp
                    .decode(scheme, block, seed, number, page, scratch)?
            }
        };
        whole.then_some(()).ok_or("it does not decode to a page")
    }

    fn grow_scratch(&mut self, page_bytes: usize) {
        if self.scratch.len() * 8 < page_bytes {
            self.scratch.resize(page_bytes / 8, 0);
        }
    }
}

/// Encodes `plain` into `block`. Returns the block's length.
fn lz4(table: &mut CompressTable, plain: &[u8], block: &mut [u8]) -> usize {
    // The small table is faster, and serves pages below 64 KiB. At the first longer page the
    // library replaces it by the large one, for good. That is fine here, because an I/O queue
    // mostly sees one page size.
    compress_into_with_table(plain, block, table).expect("the output has its greatest length")
}

#[cfg(test)]
mod tests;
