//! Pages that the program may only read, out by dropping them.
//!
//! What such a page holds is what it was filled with, so that nothing is looked at, carried or
//! copied. Many runs share one call, and the processors that run the program are interrupted once
//! for all of them. A touch of a dropped page is a fault, as if it had never been there.
//!
//! The rule it keeps: what the program has unmapped is not touched, since something else may be
//! there. As in `scattered`, what it maps there within the call that drops is lost, if another of
//! its threads unmaps the place just then.
//!
//! The downside: nobody sees what a program has written that made the region writable by itself.

use super::shard::KernelShard;
use crate::{pages::Pages, sys};

/// Also drops what the program has locked (`mlock`): a page of which a part is locked would be
/// dropped up to there, and its front would be lost.
const DROP: libc::c_int = libc::MADV_DONTNEED_LOCKED;

/// Drops the leading ones of `runs`, which ascend. Returns how many.
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
