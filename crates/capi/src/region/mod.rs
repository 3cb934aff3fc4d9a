//! Regions: memory whose pages come and go.
//!
//! A region is made (`mapping.rs`), used as memory (`pages.rs` asks for more than touching does),
//! may become two (`split.rs`), and ends (`end.rs`). The rule: a handle that a function has put
//! into `*region` is good until a function that ends regions has succeeded.

use std::sync::Arc;

use farpage::{Advice, Region, RegionOptions, Runtime, Store};

use crate::{error::Failure, handle::Handle};

// In the order of the header.
mod mapping;

mod pages;

mod split;

mod end;

pub use end::*;
pub use mapping::*;
pub use pages::*;
pub use split::*;

/// Memory whose pages come and go. Its first byte is at `farpage_region_address`.
///
/// A program may unmap parts of a region, or map over them. Pages of these parts are gone then, and
/// the store keeps their last written-back bytes. `mremap` moves pages that are in memory; all
/// others read as zeros at the new addresses.
///
/// All functions of a region may be called from any thread. During and after `farpage_region_unmap`
/// no other function of the region may be called, and its memory may not be touched.
pub struct farpage_region(Box<Handle<Mapped>>);

struct Mapped {
    region: Region,
    read_only: bool,
    at_end: AtEnd,
    kept: Option<Kept>,
}

impl Mapped {
    /// Writes back changes that outlive the region.
    fn keep_changes(&self) -> Result<(), Failure> {
        match self.at_end {
            AtEnd::Drop => {}
            AtEnd::WriteBack => self.region.advise(.., Advice::DontNeed)?,
            AtEnd::Flush => self.region.flush_out()?,
        }
        Ok(())
    }
}

/// Parameters of a region with a store, from which its parts can be mapped again.
#[derive(Clone)]
struct Kept {
    runtime: Runtime,
    options: RegionOptions,
    store: Arc<dyn Store>,
    /// Offset of the region in the store.
    offset: u64,
}

/// Fate of a region's changes when it is unmapped.
#[derive(Clone, Copy)]
enum AtEnd {
    /// Changes are lost with the region.
    Drop,
    /// Changes are written back and no more, as `munmap` does with a file.
    WriteBack,
    /// Changes are written back and made durable, or published.
    Flush,
}

impl farpage_region {
    /// # Safety
    /// `region` is null or came from one of the functions that map, and has not been unmapped.
    unsafe fn get<'a>(region: *const farpage_region) -> Result<&'a Mapped, Failure> {
        // SAFETY: the caller's promise.
        match unsafe { region.as_ref() } {
            Some(region) => region.0.check(),
            None => Err(Failure::invalid("no region: it is null")),
        }
    }

    /// # Safety
    /// As [`get`](Self::get), and nobody else uses the region meanwhile.
    unsafe fn get_mut<'a>(region: *mut farpage_region) -> Result<&'a mut Mapped, Failure> {
        // SAFETY: the caller's promise.
        match unsafe { region.as_mut() } {
            Some(region) => region.0.check_mut(),
            None => Err(Failure::invalid("no region: it is null")),
        }
    }
}

fn boxed(mapped: Mapped) -> *mut farpage_region {
    Box::into_raw(Box::new(farpage_region(Handle::new(mapped))))
}
