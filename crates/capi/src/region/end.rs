//! Ends of regions: with their changes written back, without, or with their addresses kept.

use std::num::NonZero;

use farpage::Region;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};

use super::mapped::farpage_region;
use crate::{
    FARPAGE_SYSTEM,
    error::{Failure, farpage_code, guard},
};

/// Writes back changes that outlive the region (in a store, a file or under a name), gives its
/// addresses up and frees it. A store is flushed; a file is not, so call `farpage_region_flush`
/// before if its changes must survive a power failure. If the writeback fails, the region stays
/// unchanged: call this again, or `farpage_region_discard`. Null is allowed.
///
/// # Safety
/// `region` is null or came from a function that maps; if this succeeds, neither it nor its memory
/// may be used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_unmap(region: *mut farpage_region) -> farpage_code {
    guard(|| {
        if region.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        let mapped = unsafe { farpage_region::get(region) }?;
        mapped.keep_changes()?;
        // SAFETY: as above, and nobody uses it any more.
        unsafe { give_up(region) }
    })
}

/// Gives the region up as `farpage_region_unmap` does, but writes nothing back: changes since the
/// last flush are lost. Null is allowed.
///
/// # Safety
/// As `farpage_region_unmap`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_discard(region: *mut farpage_region) -> farpage_code {
    guard(|| {
        if region.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { give_up(region) }
    })
}

/// Unmaps the region as `farpage_region_unmap` does, but keeps its addresses: touching them raises
/// SIGSEGV until the program maps memory over them, for example another region, or unmaps them. So
/// no memory of another thread can come there in between.
///
/// # Safety
/// As `farpage_region_unmap`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_vacate(region: *mut farpage_region) -> farpage_code {
    guard(|| {
        // SAFETY: the caller's promise.
        let mapped = unsafe { farpage_region::get(region) }?;
        mapped.keep_changes()?;
        keep_addresses(&mapped.region)?;
        // SAFETY: as above, and nobody uses it any more.
        unsafe { give_up(region) }
    })
}

/// # Safety
/// `region` came from a function that maps and is not used again, unless this fails.
pub(super) unsafe fn give_up(region: *mut farpage_region) -> Result<(), Failure> {
    // SAFETY: the caller's promise; a child of `fork` gets its failure here and frees nothing.
    unsafe { farpage_region::get(region) }?;
    // SAFETY: the caller's promise.
    let region = unsafe { Box::from_raw(region) };
    region.0.into_value()?.region.discard();
    Ok(())
}

/// Takes a region's pages away. Its addresses stay taken, without access: another thread's `mmap`
/// cannot get them.
pub(super) fn keep_addresses(region: &Region) -> Result<(), Failure> {
    let bytes = region.len().next_multiple_of(region.page_bytes());
    let (at, bytes) = (
        NonZero::new(region.as_ptr().addr()),
        NonZero::new(bytes).expect("no region is empty"),
    );
    let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE | MapFlags::MAP_FIXED;
    // SAFETY: the region's own addresses, which its holder gives up.
    let mapped = unsafe { mmap_anonymous(at, bytes, ProtFlags::PROT_NONE, flags) };
    match mapped {
        Ok(_) => Ok(()),
        Err(errno) => Err(Failure::new(
            FARPAGE_SYSTEM,
            format!("cannot keep the addresses of a region: {errno}"),
        )),
    }
}
