//! [`CodecTrial`]: the effect of a codec on pages, without a region and a server.
//!
//! The rule it keeps: pages go through the code that regions use, so lengths and errors are those
//! of a region.

use super::{
    coder::Coder,
    element::Element,
    form::{Form, Page},
    plain::{fill_repeated, hash, repeated},
    scheme::{Layout, Scheme},
    spec::{Codec, CodecError},
};
use crate::PageIndex;

/// Trial of a codec on pages of an array: their encoded length, the time, and the loss.
///
/// ```
/// use farpage_store::{Codec, CodecTrial, Element};
///
/// let values: Vec<f32> = (0..1024).map(|x| x as f32).collect();
/// let page: &[u8] = bytemuck::cast_slice(&values);
/// let mut trial = CodecTrial::new(Codec::SHUFFLE, Element::F32, &[], page.len())?;
/// let block = trial.encode(0, page);
/// assert!(block.len() < page.len());
/// let mut back = vec![0; page.len()];
/// trial.decode(0, &block, &mut back)?;
/// assert_eq!(back, page);
/// # Ok::<(), farpage_store::CodecError>(())
/// ```
pub struct CodecTrial {
    scheme: Scheme,
    /// Form that pages are tried in.
    wish: Form,
    coder: Coder,
    /// Buffer that blocks are made in.
    block: Vec<u8>,
}

/// A page as a server would hold it.
#[derive(Clone, Debug)]
pub struct Block(BlockContent);

#[derive(Clone, Debug)]
enum BlockContent {
    /// One repeated value, which takes no room.
    Repeated(u64),
    Stored(Form, Vec<u8>),
}

/// Seed of the hashes: a trial has nothing to protect from crafted collisions.
const SEED: u64 = 0;

impl Block {
    /// Returns the bytes that the page takes on a server; 0 if it is one repeated value, and never
    /// more than the page has.
    #[expect(clippy::len_without_is_empty, reason = "a block is no collection")]
    pub fn len(&self) -> usize {
        match &self.0 {
            BlockContent::Repeated(_) => 0,
            BlockContent::Stored(_, bytes) => bytes.len(),
        }
    }
}

impl CodecTrial {
    /// Makes a trial of `codec` on an array of this `shape` (the slowest dimension first; empty:
    /// one dimension), whose pages have `page_bytes`: a power of two, 4 KiB to 2 MiB.
    ///
    /// # Errors
    /// The codec does not fit the elements, or is adaptive: that one chooses by how a program runs.
    pub fn new(
        codec: Codec,
        element: Element,
        shape: &[u64],
        page_bytes: usize,
    ) -> Result<Self, CodecError> {
        let scheme = Scheme::new(codec, Layout::new(element, shape))?;
        let Some(wish) = scheme.form() else {
            return Err(CodecError(format!(
                "codec {codec} chooses by how a program runs, and here none does: try those that it chooses from"
            )));
        };
        let mut coder = Coder::new();
        coder.prepare(&scheme, page_bytes);
        let block = vec![0; Coder::bound(page_bytes)];
        Ok(Self {
            scheme,
            wish,
            coder,
            block,
        })
    }

    /// Encodes page `number` of the array, as an eviction would.
    pub fn encode(&mut self, number: u64, page: &[u8]) -> Block {
        if let Some(value) = repeated(page) {
            return Block(BlockContent::Repeated(value));
        }
        let bytes = page;
        let page = Page {
            number: PageIndex(number as usize),
            bytes,
            hash: hash(bytes, SEED),
            seed: SEED,
        };
        let limit = Coder::limit(bytes.len());
        let encoded = self
            .coder
            .encode(&self.scheme, self.wish, page, limit, &mut self.block);
        let stored = match encoded.form {
            Form::Raw => bytes,
            _ => &self.block[..encoded.bytes as usize],
        };
        Block(BlockContent::Stored(encoded.form, stored.to_vec()))
    }

    /// Decodes page `number` of the array into `page`, as a fill would.
    ///
    /// # Errors
    /// The block is of another codec, or of a page of another length.
    pub fn decode(
        &mut self,
        number: u64,
        block: &Block,
        page: &mut [u8],
    ) -> Result<(), CodecError> {
        match &block.0 {
            BlockContent::Repeated(value) => fill_repeated(page, *value),
            BlockContent::Stored(Form::Raw, bytes) if bytes.len() == page.len() => {
                page.copy_from_slice(bytes);
            }
            BlockContent::Stored(Form::Raw, bytes) => {
                let (is, wanted) = (bytes.len(), page.len());
                return Err(CodecError(format!(
                    "a page of {is} bytes cannot be decoded into {wanted}"
                )));
            }
            BlockContent::Stored(form, bytes) => self
                .coder
                .decode(
                    &self.scheme,
                    *form,
                    bytes,
                    SEED,
                    PageIndex(number as usize),
                    page,
                )
                .map_err(|why| CodecError(format!("page {number} cannot be decoded: {why}")))?,
        }
        Ok(())
    }
}
