//! Safe functions over the unsafe parts of codecs: the C libraries of ZFP and LZ4, and an
//! instruction that compilers do not find.
//!
//! The rule it keeps: no input makes anything here read or write outside its memory. The store
//! decides which codec serves which page.

mod interleave;
mod lz4;
pub mod zfp;

pub use interleave::interleave;
pub use lz4::unlz4;
