//! Places of an application's big arrays: [`Local`] or [`Far`].
//!
//! The rule it keeps: an application sees slices and cannot tell the two apart; its advice about
//! accesses reaches the pager and does nothing to a vector.

use std::{cell::Cell, ops::DerefMut};

use anyhow::{Context, Result};
use farpage::{Advice, Pod, RemoteArray, Runtime};
use nix::sys::mman::{MmapAdvise, madvise};

/// Maker of arrays.
pub(crate) trait Place {
    /// An array in this place.
    type Array<T: Pod + Send + Sync>: DerefMut<Target = [T]> + Send + Sync;

    /// Makes `len` zeroed elements. `advice` says how the whole array is used.
    fn array<T: Pod + Send + Sync>(&self, len: usize, advice: Advice) -> Result<Self::Array<T>>;

    /// Makes an array with the elements of `source`.
    fn copy_of<T: Pod + Send + Sync>(
        &self,
        source: &[T],
        advice: Advice,
    ) -> Result<Self::Array<T>> {
        let mut array = self.array(source.len(), advice)?;
        array.copy_from_slice(source);
        Ok(array)
    }
}

/// Ordinary memory, in huge pages where the kernel has them: with the kernel's small ones the
/// comparison would flatter remote arrays, whose large pages are huge pages.
#[derive(Debug, Default)]
pub(crate) struct Local {
    bytes: Cell<u64>,
}

impl Local {
    /// Returns the bytes of all arrays that were made.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.get()
    }
}

impl Place for Local {
    type Array<T: Pod + Send + Sync> = Vec<T>;

    fn array<T: Pod + Send + Sync>(&self, len: usize, _: Advice) -> Result<Vec<T>> {
        let bytes = len * size_of::<T>();
        self.bytes.set(self.bytes.get() + bytes as u64);
        let mut elements: Vec<T> = Vec::with_capacity(len);
        let start = elements.as_mut_ptr().addr();
        let (first, end) = (start.next_multiple_of(4096), (start + bytes) & !4095);
        if first < end {
            let first_page = elements.as_mut_ptr().cast::<u8>();
            let first_page = first_page.wrapping_add(first - start);
            let first_page = std::ptr::NonNull::new(first_page.cast())
                .context("a vector with capacity has an address")?;
            // SAFETY: the range lies inside the vector's own allocation, and this advice changes no
            // contents. A kernel without huge pages refuses it, and then no process has any.
            let _ = unsafe { madvise(first_page, end - first, MmapAdvise::MADV_HUGEPAGE) };
        }
        elements.resize(len, T::zeroed());
        Ok(elements)
    }
}

/// Memory under paging.
pub(crate) struct Far(pub(crate) Runtime);

impl Place for Far {
    type Array<T: Pod + Send + Sync> = RemoteArray<T>;

    fn array<T: Pod + Send + Sync>(&self, len: usize, advice: Advice) -> Result<RemoteArray<T>> {
        let array = self.0.array(len).context("cannot create a remote array")?;
        array.advise(.., advice).context("cannot advise")?;
        Ok(array)
    }
}
