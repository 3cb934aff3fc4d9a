//! The threads of an application: [`Team`].
//!
//! The rule it keeps: pieces of work are handed out in the order that they are given in, so that
//! all threads walk through memory close together and the read-ahead of one is of use to all.

use std::{
    iter::Rev,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
};

use anyhow::{Context, Result, bail};
use rayon::{ThreadPool, ThreadPoolBuilder, iter::Either};

/// A number of threads, and the flag that stops them.
pub(crate) struct Team {
    threads: usize,
    stop: Arc<AtomicBool>,
    pool: ThreadPool,
}

impl Team {
    pub(crate) fn new(threads: usize, stop: Arc<AtomicBool>) -> Result<Self> {
        let pool = ThreadPoolBuilder::new().num_threads(threads).build();
        let pool = pool.context("cannot start threads")?;
        Ok(Self {
            threads,
            stop,
            pool,
        })
    }

    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    /// Calls `f` for all pieces of `work`. A thread takes the next when it is done with its last.
    pub(crate) fn each<I>(&self, work: I, f: impl Fn(I::Item) + Sync)
    where
        I: Iterator<Item: Send> + Send,
    {
        self.fold(work, || (), |(), piece| f(piece));
    }

    /// Calls `f` for all pieces of `work`, with a value of each thread's own. Returns the values.
    pub(crate) fn fold<I, S: Send>(
        &self,
        work: I,
        own: impl Fn() -> S + Sync,
        f: impl Fn(&mut S, I::Item) + Sync,
    ) -> Vec<S>
    where
        I: Iterator<Item: Send> + Send,
    {
        let work = Mutex::new(work);
        let next = || {
            let mut work = work
                .lock()
                .expect("no thread panics while it takes a piece");
            work.next().filter(|_| !self.stop.load(Relaxed))
        };
        thread::scope(|scope| {
            let member = || {
                let mut own = own();
                while let Some(piece) = next() {
                    f(&mut own, piece);
                }
                own
            };
            let members: Vec<_> = (0..self.threads).map(|_| scope.spawn(member)).collect();
            let join = |member: thread::ScopedJoinHandle<'_, S>| {
                member
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            members.into_iter().map(join).collect()
        })
    }

    pub(crate) fn sort<T: Ord + Send>(&self, keys: &mut [T]) {
        use rayon::slice::ParallelSliceMut;
        self.pool.install(|| keys.par_sort_unstable());
    }

    /// Copies `from` to `to`, each thread some of it.
    pub(crate) fn copy<T: Copy + Send + Sync>(&self, from: &[T], to: &mut [T]) {
        const PIECE: usize = 1 << 17;
        self.each(
            to.chunks_mut(PIECE).zip(from.chunks(PIECE)),
            |(to, from)| {
                to.copy_from_slice(from);
            },
        );
    }

    /// Returns an error if work was cut short, so that its results count for nothing.
    pub(crate) fn check(&self) -> Result<()> {
        if self.stop.load(Relaxed) {
            bail!("stopped by a signal");
        }
        Ok(())
    }
}

/// Orders pieces front to back in even passes and back to front in odd ones. A pass begins with
/// what the last one left in local memory; passes that all begin at the front find none of it. Each
/// piece is still walked through from its front.
pub(crate) fn there_and_back<I: DoubleEndedIterator>(pass: usize, work: I) -> Either<I, Rev<I>> {
    match pass % 2 {
        0 => Either::Left(work),
        _ => Either::Right(work.rev()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_is_done_once() {
        let team = Team::new(3, Arc::default()).unwrap();
        let mut sums = [0_u32; 100];
        for pass in 0..2 {
            let pieces = there_and_back(pass, sums.iter_mut().zip(0..100));
            team.each(pieces, |(sum, x)| *sum += x);
        }
        assert!(sums.iter().zip(0..).all(|(&sum, x)| sum == 2 * x));
        let own = team.fold(0..1000_u64, || 0, |own, x| *own += x);
        assert_eq!((own.len(), own.iter().sum::<u64>()), (3, 499_500));
    }

    #[test]
    fn a_stopped_team_takes_no_more_pieces() {
        let stop = Arc::new(AtomicBool::new(false));
        let team = Team::new(2, stop.clone()).unwrap();
        let done = team.fold(
            0..1_000_000,
            || 0,
            |done, _| {
                *done += 1;
                stop.store(true, Relaxed);
            },
        );
        assert!(done.iter().sum::<i32>() <= 4, "{done:?}");
        team.check().unwrap_err();
    }
}
