//! Encoding and decoding of pages: [`Codec`] is what a user asks for.
//!
//! The rule it keeps: **each page has a form of its own, which its entry remembers.** The region's
//! codec says which forms may be tried; a page is stored in the [`Form`] that was found for it, raw
//! if no other is shorter. `spec` holds the codecs' names and what they accept. `scheme` fits a
//! codec to an array, `coder` encodes, `adaptive` chooses forms, `shuffle` transposes bytes,
//! `plain` has the steps of every page. Imports run in that direction alone: `adaptive` uses
//! `coder`, and `coder` uses `form` and `scheme`.
//!
//! Why these implementations, with figures: `docs/decisions.md`, "Codecs".

mod adaptive;
mod coder;
mod element;
mod form;
mod plain;
mod scheme;
mod shuffle;
mod spec;
mod trial;
mod zfp;

pub(crate) use self::{
    adaptive::{Chooser, LinkTraffic, READ, WRITE, Watch},
    coder::Coder,
    form::{Form, Page},
    plain::{fill_repeated, hash, repeated},
    scheme::Scheme,
};
pub use self::{
    element::Element,
    scheme::Layout,
    spec::{Codec, CodecError, ZfpMode},
    trial::{Block, CodecTrial},
};
