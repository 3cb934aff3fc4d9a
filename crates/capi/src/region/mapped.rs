//! [`Mapped`]: a region behind a handle of the program, and what it takes to end or split it.

use std::sync::Arc;

use farpage::{Advice, Region, RegionOptions, Runtime, Store};

use crate::{error::Failure, handle::Handle};

/// Memory whose pages come and go. Its first byte is at `farpage_region_address`.
///
/// A program may unmap parts of a region, or map over them. Pages of these parts are gone then, and
/// the store keeps their last written-back bytes. `mremap` moves pages that are in memory; all
/// others read as zeros at the new addresses.
///
/// All functions of a region may be called from any thread. During and after `farpage_region_unmap`
/// no other function of the region may be called, and its memory may not be touched.
pub struct farpage_region(pub(super) Box<Handle<Mapped>>);

pub(super) struct Mapped {
    pub(super) region: Region,
    pub(super) read_only: bool,
    pub(super) at_end: AtEnd,
    pub(super) kept: Option<Kept>,
}

impl Mapped {
    /// Writes back changes that outlive the region.
    pub(super) fn keep_changes(&self) -> Result<(), Failure> {
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
pub(super) struct Kept {
    pub(super) runtime: Runtime,
    pub(super) options: RegionOptions,
    pub(super) store: Arc<dyn Store>,
    /// Offset of the region in the store.
    pub(super) offset: u64,
}

/// Fate of a region's changes when it is unmapped.
#[derive(Clone, Copy)]
pub(super) enum AtEnd {
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
    pub(super) unsafe fn get<'a>(region: *const farpage_region) -> Result<&'a Mapped, Failure> {
        // SAFETY: the caller's promise.
        match unsafe { region.as_ref() } {
            Some(region) => region.0.check(),
            None => Err(Failure::invalid("no region: it is null")),
        }
    }

    /// # Safety
    /// As [`get`](Self::get), and nobody else uses the region meanwhile.
    pub(super) unsafe fn get_mut<'a>(
        region: *mut farpage_region,
    ) -> Result<&'a mut Mapped, Failure> {
        // SAFETY: the caller's promise.
        match unsafe { region.as_mut() } {
            Some(region) => region.0.check_mut(),
            None => Err(Failure::invalid("no region: it is null")),
        }
    }
}

pub(super) fn boxed(mapped: Mapped) -> *mut farpage_region {
    Box::into_raw(Box::new(farpage_region(Handle::new(mapped))))
}
