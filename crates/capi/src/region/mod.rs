//! Regions: memory whose pages come and go.
//!
//! A region is made (`mapping.rs`), used as memory (`pages.rs` asks for more than touching does),
//! may become two (`split.rs`), and ends (`end.rs`). The rule: a handle that a function has put
//! into `*region` is good until a function that ends regions has succeeded.

// In the order of the header.
mod mapped;

mod mapping;

mod pages;

mod split;

mod end;

pub use end::*;
pub use mapped::farpage_region;
pub use mapping::*;
pub use pages::*;
pub use split::*;
