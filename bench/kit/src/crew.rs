//! Threads that work side by side.
//!
//! The rule it keeps: all begin at the same moment, and none outlives the call.

use std::{
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow};

/// Runs `work` with each of `workers` on a thread of its own. Returns the results, and the time
/// that all together took.
///
/// # Errors
/// The error of one worker, or a panic.
pub fn together<W: Send, R: Send>(
    workers: &mut [W],
    work: impl Fn(&mut W) -> Result<R> + Sync,
) -> Result<(Vec<R>, Duration)> {
    let barrier = Barrier::new(workers.len() + 1);
    thread::scope(|scope| {
        let start = |worker| {
            let (barrier, work) = (&barrier, &work);
            scope.spawn(move || {
                barrier.wait();
                work(worker)
            })
        };
        let running: Vec<_> = workers.iter_mut().map(start).collect();
        barrier.wait();
        let begin = Instant::now();
        let ended = running.into_iter().map(|worker| worker.join());
        let results = ended.map(|result| result.map_err(|_| anyhow!("a worker panicked"))?);
        Ok((results.collect::<Result<_>>()?, begin.elapsed()))
    })
}

/// Gives each of `threads` its share of the array, always the same one, with the index of its first
/// element. Returns the number of shares.
pub fn each_share<T: Send>(
    array: &mut [T],
    threads: usize,
    work: impl Fn(usize, &mut [T]) + Sync,
) -> usize {
    let share = array.len().div_ceil(threads);
    let shares = array.chunks_mut(share);
    let count = shares.len();
    thread::scope(|scope| {
        for (thread, part) in shares.enumerate() {
            let work = &work;
            scope.spawn(move || work(thread * share, part));
        }
    });
    count
}
