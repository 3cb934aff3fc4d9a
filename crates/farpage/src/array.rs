//! [`RemoteArray`]: a slice whose pages come and go.

use std::{
    fmt,
    marker::PhantomData,
    mem,
    ops::{Deref, DerefMut, Range, RangeBounds},
    slice,
};

use bytemuck::Pod;

use crate::{Advice, CloseError, FlushError, PageError, PinError, Region, region::byte_range};

/// A fixed-size array of plain values whose pages live on memory servers or in a
/// [`Store`](crate::Store).
///
/// It dereferences to a slice, so everything that works on slices works on it, from any number of
/// threads.
pub struct RemoteArray<T> {
    region: Region,
    len: usize,
    _elements: PhantomData<T>,
}

impl<T: Pod> RemoteArray<T> {
    pub(crate) fn new(region: Region, len: usize) -> RemoteArray<T> {
        const {
            assert!(
                mem::size_of::<T>() > 0,
                "elements without bytes need no memory"
            );
            assert!(
                mem::align_of::<T>() <= 4096,
                "a region is aligned to its page, which may be as small as 4 KiB"
            );
        };
        assert!(
            len * mem::size_of::<T>() <= region.len(),
            "the region holds the array"
        );
        RemoteArray {
            region,
            len,
            _elements: PhantomData,
        }
    }

    /// Returns the elements per dimension, the slowest first. Their product is the array's length.
    /// One dimension unless the array was created with [several](crate::RegionOptions::shape).
    pub fn shape(&self) -> Vec<usize> {
        let shape = self.region.shape();
        if shape.is_empty() {
            vec![self.len]
        } else {
            shape
        }
    }

    /// Returns the bytes of a range of elements.
    fn bytes(&self, range: impl RangeBounds<usize>) -> Range<usize> {
        byte_range(range, self.len, mem::size_of::<T>())
    }

    /// Returns the region that holds the array's bytes.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Says how the program will use a range of elements: see [`Region::advise`].
    ///
    /// # Errors
    /// As [`Region::advise`].
    ///
    /// # Panics
    /// If the range does not lie in the array.
    pub fn advise(&self, range: impl RangeBounds<usize>, advice: Advice) -> Result<(), PageError> {
        self.region.advise(self.bytes(range), advice)
    }

    /// Brings a range of elements in and waits for it: see [`Region::prefetch_now`].
    ///
    /// # Errors
    /// As [`Region::prefetch_now`].
    ///
    /// # Panics
    /// If the range does not lie in the array.
    pub fn prefetch_now(&self, range: impl RangeBounds<usize>) -> Result<(), PageError> {
        self.region.prefetch_now(self.bytes(range))
    }

    /// Brings a range of elements in and keeps it in memory: see [`Region::pin`].
    ///
    /// # Errors
    /// As [`Region::pin`].
    ///
    /// # Panics
    /// If the range does not lie in the array.
    pub fn pin(&self, range: impl RangeBounds<usize>) -> Result<(), PinError> {
        self.region.pin(self.bytes(range))
    }

    /// Takes back one [`pin`](Self::pin) of each page that a range of elements touches: see
    /// [`Region::unpin`].
    ///
    /// # Panics
    /// If the range does not lie in the array.
    pub fn unpin(&self, range: impl RangeBounds<usize>) {
        self.region.unpin(self.bytes(range));
    }

    /// Copies `elements` to the array from index `start` on. Lost pages that `elements` cover
    /// wholly come back: see [`Region::overwrite`].
    ///
    /// # Errors
    /// As [`Region::overwrite`].
    ///
    /// # Panics
    /// As [`Region::overwrite`].
    pub fn overwrite(&mut self, start: usize, elements: &[T]) -> Result<(), PageError> {
        let at = byte_range(start..start + elements.len(), self.len, mem::size_of::<T>());
        (self.region).overwrite(at.start, bytemuck::cast_slice(elements))
    }

    /// Makes a range of elements zeros and gives up their contents: see [`Region::discard_range`].
    ///
    /// # Errors
    /// As [`Region::discard_range`].
    ///
    /// # Panics
    /// As [`Region::discard_range`].
    pub fn discard_range(&mut self, range: impl RangeBounds<usize>) -> Result<(), PageError> {
        self.region.discard_range(self.bytes(range))
    }

    /// Writes all changes back and keeps the pages: see [`Region::flush`].
    ///
    /// # Errors
    /// As [`Region::flush`].
    pub fn flush(&self) -> Result<(), FlushError> {
        self.region.flush()
    }

    /// Takes the first error in the background since the last call: see [`Region::take_error`].
    pub fn take_error(&self) -> Option<PageError> {
        self.region.take_error()
    }

    /// Closes the array: see [`Region::close`].
    ///
    /// # Errors
    /// As [`Region::close`]; the error holds the array.
    pub fn close(mut self) -> Result<(), CloseError<RemoteArray<T>>> {
        (self.region.end()).map_err(|source| CloseError::new(self, source))
    }
}

impl<T> CloseError<RemoteArray<T>> {
    /// Returns the array, open and unchanged.
    pub fn into_inner(self) -> RemoteArray<T> {
        let mut array = self.into_closed();
        array.region.reopen();
        array
    }
}

impl<T: Pod> Deref for RemoteArray<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &bytemuck::cast_slice(&self.region[..self.len * mem::size_of::<T>()])[..self.len]
    }
}

impl<T: Pod> DerefMut for RemoteArray<T> {
    /// # Panics
    /// If the array is [read-only](crate::RegionOptions::read_only).
    fn deref_mut(&mut self) -> &mut [T] {
        let bytes = self.len * mem::size_of::<T>();
        &mut bytemuck::cast_slice_mut(&mut self.region[..bytes])[..self.len]
    }
}

impl<T: Pod> AsRef<[T]> for RemoteArray<T> {
    fn as_ref(&self) -> &[T] {
        self
    }
}

impl<T: Pod> AsMut<[T]> for RemoteArray<T> {
    fn as_mut(&mut self) -> &mut [T] {
        self
    }
}

impl<'a, T: Pod> IntoIterator for &'a RemoteArray<T> {
    type Item = &'a T;
    type IntoIter = slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<'a, T: Pod> IntoIterator for &'a mut RemoteArray<T> {
    type Item = &'a mut T;
    type IntoIter = slice::IterMut<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter_mut()
    }
}

impl<T> fmt::Debug for RemoteArray<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The elements are left out: printing them would bring all pages in.
        f.debug_struct("RemoteArray")
            .field("len", &self.len)
            .field("region", &self.region)
            .finish_non_exhaustive()
    }
}
