//! Requests of a program to a region: its address, and that its pages come, stay or are written
//! back.

use std::{ffi::c_void, ops::Range, ptr, slice};

use farpage::{Advice, Region};

use super::mapped::farpage_region;
use crate::error::{Failure, farpage_code, guard};

/// Unknown use: sequential runs are found from the faults. Holds for the whole region.
pub const FARPAGE_ADVICE_NORMAL: u32 = 0;
/// Sequential use: reads ahead from the first fault on. Holds for the whole region.
pub const FARPAGE_ADVICE_SEQUENTIAL: u32 = 1;
/// Random use: never reads ahead. Holds for the whole region.
pub const FARPAGE_ADVICE_RANDOM: u32 = 2;
/// The range is needed soon: brought in while there is room. Does not wait.
pub const FARPAGE_ADVICE_WILL_NEED: u32 = 3;
/// The range is not needed soon: written back where it changed, and given up. The data stays.
pub const FARPAGE_ADVICE_DONT_NEED: u32 = 4;
/// The contents of the range are not needed any more: it becomes zeros, its remote memory is free,
/// and nothing is written back. An allocator means this by `madvise(MADV_DONTNEED)`. A write of
/// another thread lands either before, and is gone, or after, on zeros.
pub const FARPAGE_ADVICE_DISCARD: u32 = 5;
/// The kernel will be given the range by a call that keeps references to memory: `vmsplice`, a send
/// with MSG_ZEROCOPY, a zero-copy send of io_uring. Must be given before the call. The call sends
/// the contents of that moment, even if the pages leave meanwhile. Holds until the region ends.
pub const FARPAGE_ADVICE_ZERO_COPY: u32 = 6;

/// Returns the first byte of the region, aligned to its page size; null for null.
///
/// # Safety
/// `region` is null or came from a function that maps, and has not been unmapped.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_address(region: *const farpage_region) -> *mut c_void {
    // SAFETY: the caller's promise.
    let region = unsafe { farpage_region::get(region) };
    region.map_or(ptr::null_mut(), |it| it.region.as_ptr().cast_mut().cast())
}

/// Returns the length of the region in bytes, as it was mapped.
///
/// # Safety
/// As `farpage_region_address`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_bytes(region: *const farpage_region) -> u64 {
    // SAFETY: the caller's promise.
    let region = unsafe { farpage_region::get(region) };
    region.map_or(0, |it| it.region.len() as u64)
}

/// Returns the page size of the region in bytes.
///
/// # Safety
/// As `farpage_region_address`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_page_bytes(region: *const farpage_region) -> u64 {
    // SAFETY: the caller's promise.
    let region = unsafe { farpage_region::get(region) };
    region.map_or(0, |it| it.region.page_bytes() as u64)
}

/// Returns the number of the region's pages in local memory.
///
/// # Safety
/// As `farpage_region_address`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_resident_pages(region: *const farpage_region) -> u64 {
    // SAFETY: the caller's promise.
    let region = unsafe { farpage_region::get(region) };
    region.map_or(0, |it| it.region.resident_pages() as u64)
}

/// Writes all changes back and keeps the pages. Then calls the store's `flush` or `fdatasync`, or
/// publishes the region under its name.
///
/// # Safety
/// As `farpage_region_address`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_flush(region: *const farpage_region) -> farpage_code {
    // SAFETY: the caller's promise.
    unsafe { with(region, |it| Ok(it.flush()?)) }
}

/// Copies `bytes` bytes from `data` to `offset`. Brings pages back whose newest bytes were lost
/// (the store failed, and the kernel refused the page) and that the copy covers wholly. Until then
/// touching such a page raises SIGBUS, and functions that flush the region fail. FARPAGE_PAGES if
/// such a page is covered in part only: nothing was copied.
///
/// # Safety
/// As `farpage_region_address`; `data` points to `bytes` readable bytes outside the region; nobody
/// else uses the region's bytes meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_overwrite(
    region: *mut farpage_region,
    offset: u64,
    bytes: u64,
    data: *const c_void,
) -> farpage_code {
    guard(|| {
        // SAFETY: the caller's promise.
        let it = unsafe { farpage_region::get_mut(region) }?;
        let range = range(&it.region, offset, bytes)?;
        if range.is_empty() {
            return Ok(());
        }
        if it.read_only {
            return Err(Failure::invalid("a read-only region cannot be overwritten"));
        }
        if data.is_null() {
            return Err(Failure::invalid("no data: it is null"));
        }
        // SAFETY: the caller's promise.
        let data = unsafe { slice::from_raw_parts(data.cast::<u8>(), range.len()) };
        Ok(it.region.overwrite(range.start, data)?)
    })
}

/// Tells how `bytes` bytes at `offset` will be used: one of the FARPAGE_ADVICE_ constants.
/// FARPAGE_ADVICE_DONT_NEED waits until changes are written back, and fails if the writeback fails.
/// FARPAGE_ADVICE_DISCARD fails with FARPAGE_INVALID on a read-only region.
///
/// # Safety
/// As `farpage_region_address`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_advise(
    region: *const farpage_region,
    offset: u64,
    bytes: u64,
    advice: u32,
) -> farpage_code {
    if advice == FARPAGE_ADVICE_DISCARD {
        return guard(|| {
            // SAFETY: the caller's promise.
            let it = unsafe { farpage_region::get(region) }?;
            let range = range(&it.region, offset, bytes)?;
            if it.read_only {
                return Err(Failure::invalid("a read-only region cannot be discarded"));
            }
            // SAFETY: C has no references; who uses these bytes meanwhile sees them change.
            Ok(unsafe { it.region.discard_shared(range) }?)
        });
    }
    let advise = |it: &Region| {
        let advice = match advice {
            FARPAGE_ADVICE_NORMAL => Advice::Normal,
            FARPAGE_ADVICE_SEQUENTIAL => Advice::Sequential,
            FARPAGE_ADVICE_RANDOM => Advice::Random,
            FARPAGE_ADVICE_WILL_NEED => Advice::WillNeed,
            FARPAGE_ADVICE_DONT_NEED => Advice::DontNeed,
            FARPAGE_ADVICE_ZERO_COPY => Advice::ZeroCopy,
            _ => {
                return Err(Failure::invalid(format!(
                    "an advice of {advice}: need one of the FARPAGE_ADVICE_ constants"
                )));
            }
        };
        Ok(it.advise(range(it, offset, bytes)?, advice)?)
    };
    // SAFETY: the caller's promise.
    unsafe { with(region, advise) }
}

/// Brings `bytes` bytes at `offset` in and waits for them; lost pages are tried again. So a program
/// learns of a dead server by a code instead of SIGBUS.
///
/// # Safety
/// As `farpage_region_address`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_prefetch(
    region: *const farpage_region,
    offset: u64,
    bytes: u64,
) -> farpage_code {
    // SAFETY: the caller's promise.
    unsafe { with(region, |it| Ok(it.prefetch_now(range(it, offset, bytes)?)?)) }
}

/// Brings `bytes` bytes at `offset` in and keeps them in memory until `farpage_region_unpin`, or
/// until the region is unmapped. All pages that the range touches are pinned; pins are counted, up
/// to 255 per page. FARPAGE_NO_MEMORY if too little of the budget would be left for other pages. On
/// failure nothing more is pinned than before.
///
/// # Safety
/// As `farpage_region_address`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_pin(
    region: *const farpage_region,
    offset: u64,
    bytes: u64,
) -> farpage_code {
    // SAFETY: the caller's promise.
    unsafe { with(region, |it| Ok(it.pin(range(it, offset, bytes)?)?)) }
}

/// Takes back one pin of each page that the range touches; a page without a pin is left alone.
///
/// # Safety
/// As `farpage_region_address`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_unpin(
    region: *const farpage_region,
    offset: u64,
    bytes: u64,
) -> farpage_code {
    // SAFETY: the caller's promise.
    unsafe {
        with(region, |it| {
            it.unpin(range(it, offset, bytes)?);
            Ok(())
        })
    }
}

/// Fails with the first error of work in the background since the last call, an eviction or a fill
/// that failed. FARPAGE_OK if there was none.
///
/// # Safety
/// As `farpage_region_address`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_error(region: *const farpage_region) -> farpage_code {
    let take = |it: &Region| it.take_error().map_or(Ok(()), |error| Err(error.into()));
    // SAFETY: the caller's promise.
    unsafe { with(region, take) }
}

fn range(region: &Region, offset: u64, bytes: u64) -> Result<Range<usize>, Failure> {
    let end = offset.checked_add(bytes);
    match end.filter(|&end| end <= region.len() as u64) {
        Some(end) => Ok(offset as usize..end as usize),
        None => Err(Failure::invalid(format!(
            "{bytes} bytes at offset {offset} of a region of {}",
            region.len()
        ))),
    }
}

/// Runs the body of a function of a region.
///
/// # Safety
/// As `farpage_region::get`.
unsafe fn with(
    region: *const farpage_region,
    body: impl FnOnce(&Region) -> Result<(), Failure>,
) -> farpage_code {
    // SAFETY: the caller's promise.
    guard(|| body(&unsafe { farpage_region::get(region) }?.region))
}
