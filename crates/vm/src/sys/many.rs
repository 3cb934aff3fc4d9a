//! Many ranges by one call: copied ([`copy_each`]), dropped ([`drop_each`]).
//!
//! The rule it keeps: neither call ever waits for a fault; an absent page ends it there.

use std::ops::Range;

use nix::errno::Errno;

use crate::calls::system_call;

/// Upper bound of the ranges that one call of [`copy_each`] or [`drop_each`] takes.
pub(crate) const RANGES_MAX: usize = 32;

/// `PIDFD_SELF` (kernel 6.14), absent from the published bindings.
const PIDFD_SELF: libc::c_int = -10_000;

/// `process_vm_readv` of this process's own memory: copies `len` bytes from each address of `from`
/// to that of `to`, at most [`RANGES_MAX`] of them. Returns how many were copied whole. Unlike a
/// plain copy, the call ends at an absent page whose fault is not served.
///
/// # Safety
/// Each of `to` is the caller's to write.
pub(crate) unsafe fn copy_each(from: &[usize], to: &[usize], len: usize) -> nix::Result<usize> {
    let ranges = |starts: &[usize]| IoVectors::new(starts.iter().map(|&start| start..start + len));
    let (from, to) = (ranges(from), ranges(to));
    // SAFETY:
    // - Each of `to` may be written: this function's contract.
    // - What cannot be read is an error and no fault.
    // - The vectors are arrays of `count` ranges, for the length of the call.
    // - The call goes to the kernel by itself: an interposed one serves the program.
    let copied = unsafe {
        let lists = [
            to.start() as usize,
            to.count as usize,
            from.start() as usize,
        ];
        let [to, count, from] = lists;
        let args = [libc::getpid() as usize, to, count, from, count, 0];
        system_call(libc::SYS_process_vm_readv, args)
    };
    match copied {
        0.. => Ok(copied as usize / len),
        error => Err(Errno::from_raw(-error as i32)),
    }
}

/// `process_madvise` with `advice`, a kind of `MADV_DONTNEED`: drops each of `ranges`, at most
/// [`RANGES_MAX`]. The processors that run the process are told once for all of them (kernel 6.16).
/// Returns how many were dropped whole.
///
/// # Safety
/// They lie in mappings of the caller's, and nothing relies on their bytes.
pub(crate) unsafe fn drop_each(
    ranges: impl Iterator<Item = Range<usize>>,
    advice: libc::c_int,
) -> nix::Result<usize> {
    let ranges = IoVectors::new(ranges);
    // SAFETY:
    // - The ranges are the caller's, and nothing relies on their bytes: this function's contract.
    // - The vectors are an array of `count` ranges, for the length of the call.
    let dropped = Errno::result(unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            PIDFD_SELF,
            ranges.start(),
            ranges.count,
            advice,
            0,
        )
    })?;
    Ok(ranges.within(dropped as usize))
}

/// True if this process may use [`copy_each`] and [`drop_each`].
pub(crate) fn can_copy_and_drop_each() -> bool {
    let (from, mut to) = (1_u64, 0_u64);
    let (start, end) = (&raw const from as usize, &raw mut to as usize);
    // SAFETY: the second number is the first's to become; nothing is dropped.
    let (copied, dropped) = unsafe {
        let copied = copy_each(&[start], &[end], size_of_val(&from));
        (copied, drop_each(std::iter::empty(), libc::MADV_DONTNEED))
    };
    copied == Ok(1) && to == from && dropped.is_ok()
}

/// Ranges, as the kernel wants them.
struct IoVectors {
    vectors: [libc::iovec; RANGES_MAX],
    count: libc::c_ulong,
}

impl IoVectors {
    fn new(ranges: impl Iterator<Item = Range<usize>>) -> IoVectors {
        let vector = |range: Range<usize>| libc::iovec {
            iov_base: range.start as *mut libc::c_void,
            iov_len: range.len(),
        };
        let mut vectors = [vector(0..0); RANGES_MAX];
        let mut count = 0;
        for range in ranges {
            assert!(count < RANGES_MAX, "more than {RANGES_MAX} ranges at once");
            vectors[count] = vector(range);
            count += 1;
        }
        IoVectors {
            vectors,
            count: count as libc::c_ulong,
        }
    }

    /// Returns the number of leading ranges that lie within the first `bytes` of all.
    fn within(&self, bytes: usize) -> usize {
        let lengths = self.vectors[..self.count as usize].iter();
        let ends = lengths.scan(0, |end, vector| {
            *end += vector.iov_len;
            Some(*end)
        });
        ends.take_while(|&end| end <= bytes).count()
    }

    fn start(&self) -> *const libc::iovec {
        self.vectors.as_ptr()
    }
}
