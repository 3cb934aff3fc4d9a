//! Pages that the program may only read, out by dropping them.
//!
//! Such a page holds the bytes that it was filled with, so that nothing is looked at, carried or
//! copied. Many runs share one call, and the processors that run the program are interrupted once
//! for all of them. A touch of a dropped page is a fault, as if it had never been there.
//!
//! The rule it keeps: addresses that the program has unmapped are not touched, since something else
//! may be there. As in `scattered`, memory that the program maps there within the call that drops
//! is lost, if another of its threads unmaps the place just then.
//!
//! The downside: writes of a program that made the region writable by itself are lost.

use super::shard::KernelShard;
use crate::{pages::Pages, sys};

/// Advice that also drops locked pages (`mlock`): otherwise a page of which a part is locked would
/// be dropped up to there, and its front would be lost.
const DROP: libc::c_int = libc::MADV_DONTNEED_LOCKED;

/// Drops the leading runs of `runs`, which ascend. Returns their number.
pub(super) fn detach(shard: &KernelShard, runs: &[Pages]) -> usize {
    let (Some(first), Some(last)) = (runs.first(), runs.last()) else {
        return 0;
    };
    let start = first.address();
    let fenced = shard.fence.lock();
    let there = start + fenced.gone.free_bytes(&(start..last.range().end));
    let runs = &runs[..runs.partition_point(|run| run.range().end <= there)];
    if shard.fence.uffd().is_changing() {
        return 0;
    }
    // SAFETY:
    // - The pager owns these pages, and what they held can be had again: nobody could write.
    // - They are the region's: the fence is locked, and no mapping is changing.
    let dropped = unsafe { sys::drop_each(runs.iter().map(Pages::range), DROP) };
    // Before kernel 6.14, one by one.
    dropped.unwrap_or_else(|_| {
        let drop_alone = |run: &&Pages| {
            // SAFETY: as above.
            unsafe { sys::madvise(run.address(), run.bytes(), DROP) }.is_ok()
        };
        runs.iter().take_while(drop_alone).count()
    })
}
