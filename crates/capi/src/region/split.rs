//! Splitting a region in two, each of which ends for itself.

use std::{io, ops::Range, ptr, sync::Arc};

use farpage::{ByteSize, Store};

use super::{
    end::{give_up, keep_addresses},
    mapped::{Kept, Mapped, boxed, farpage_region},
};
use crate::{
    error::{Failure, farpage_code, guard},
    options,
};

/// The part of a store from `offset` on.
struct Behind {
    store: Arc<dyn Store>,
    offset: u64,
}

impl Store for Behind {
    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.store.read(self.offset + offset, buf)
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.store.write(self.offset + offset, buf)
    }

    fn flush(&self) -> io::Result<()> {
        self.store.flush()
    }

    fn may_block(&self) -> bool {
        self.store.may_block()
    }

    fn name(&self) -> String {
        self.store.name()
    }
}

/// Splits the region in two at `offset`, a multiple of its page size: `*region` ends there, and
/// `*rest` begins there. All bytes keep their addresses, and each part is unmapped for itself. Only
/// a region with a store or a file can be split. Changes are written back first, as
/// `farpage_region_unmap` does. Advice and pins end.
///
/// On failure `*rest` is null. `*region` is as it was if the arguments were wrong or writing back
/// failed. It is null if the parts could not be mapped (no memory, or too many mappings): then the
/// store has all bytes, and touching the addresses raises SIGSEGV.
///
/// # Safety
/// `*region` came from a function that maps, and has not been unmapped; nobody else uses it or
/// touches its memory meanwhile; `rest` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_region_split(
    region: *mut *mut farpage_region,
    offset: u64,
    rest: *mut *mut farpage_region,
) -> farpage_code {
    guard(|| {
        // SAFETY: the caller's promise.
        let (region, rest) = unsafe { (options::out(region)?, options::out(rest)?) };
        *rest = ptr::null_mut();
        // SAFETY: the caller's promise.
        let whole = unsafe { farpage_region::get(*region) }?;
        let Some(kept) = whole.kept.clone() else {
            return Err(Failure::invalid(
                "a region without a store or a file cannot be split: servers keep it as a whole",
            ));
        };
        let (bytes, page_bytes) = (whole.region.len(), whole.region.page_bytes());
        if offset == 0 || offset >= bytes as u64 || !offset.is_multiple_of(page_bytes as u64) {
            return Err(Failure::invalid(format!(
                "a region of {bytes} bytes cannot be split at {offset}: need a multiple of its page size, {page_bytes}, inside it"
            )));
        }
        let (at, offset) = (whole.region.as_ptr().addr(), offset as usize);
        let (read_only, at_end) = (whole.read_only, whole.at_end);
        whole.keep_changes()?;
        keep_addresses(&whole.region)?;
        // SAFETY: the caller's promise.
        unsafe { give_up(*region) }?;
        *region = ptr::null_mut();
        let map = |part: Range<usize>| {
            let kept = Kept {
                offset: kept.offset + part.start as u64,
                ..kept.clone()
            };
            let store = Behind {
                store: kept.store.clone(),
                offset: kept.offset,
            };
            let options = kept
                .options
                .clone()
                .store(store)
                .page_size(ByteSize(page_bytes as u64));
            // SAFETY: nothing but the pages of no access is there, see `keep_addresses`.
            let options = unsafe { options.address(at + part.start) };
            Ok::<_, Failure>(Mapped {
                region: kept.runtime.region_with(part.len(), options)?,
                read_only,
                at_end,
                kept: Some(kept),
            })
        };
        let (first, second) = (map(0..offset)?, map(offset..bytes)?);
        *region = boxed(first);
        *rest = boxed(second);
        Ok(())
    })
}
