//! Counters of the workers: [`Counters`] for each, summed up as [`PagerStats`].

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        /// Counters of one worker; only that worker writes them.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: WorkerCounter,)+
        }

        /// Counts of what happened to pages since the runtime started.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct PagerStats {
            $($(#[$doc])* pub $name: u64,)+
            /// Highest number of bytes that frames (mapped, in flight or free) took at any time.
            pub peak_resident_bytes: u64,
            /// Bytes of pages mapped or in flight now.
            pub resident_bytes: u64,
            /// The residency budget.
            pub budget_bytes: u64,
            /// Pages that came back after they had left.
            pub returns: u64,
            /// Pages of `returns` that had been away while less than a budget of others came in:
            /// with twice the budget they would have stayed, by and large.
            pub returns_within_one_budget: u64,
            /// Pages of `returns` for which four times the budget would have been enough.
            pub returns_within_three_budgets: u64,
        }

        impl PagerStats {
            pub(crate) fn add(&mut self, worker: &Counters) {
                $(self.$name += worker.$name.get();)+
            }
        }
    };
}

counters! {
    /// Page faults that were read.
    faults,
    /// Pages brought in, for a fault or ahead of one.
    fills,
    /// Pages of `fills` that were brought in ahead of need.
    prefetches,
    /// Pages taken out to make room or because the program asked for that (`DontNeed`, a flush that
    /// gives up). Pages that were discarded or unmapped do not count.
    evictions,
    /// Pages of `evictions` that had not changed and needed no WRITE.
    clean_evictions,
    /// Pages written back.
    writes,
    /// Pages that were wanted again, or pinned, while they were leaving and came back without a
    /// READ. No part of `evictions`.
    steals,
    /// Pages that could not be brought in and raise SIGBUS.
    poisoned,
    /// Evictions that failed, so that the page stayed.
    failed_evictions,
    /// Faults that had been served by the time they were read.
    stale_faults,
    /// Times that a demand fill had to wait for a frame.
    starved,
    /// Nanoseconds that faults waited for a frame and for their page's bytes, all together. Not
    /// counted are the kernel's time to report a fault and to wake its thread, and faults on a page
    /// that is on its way already.
    waited_ns,
    /// Pages brought in for a fault while the other half of a page twice as large was in memory.
    beside_resident,
}

impl Counters {
    /// Counts `pages` that were brought in. If `demand`, a thread waited for one of them.
    pub(crate) fn filled(&self, pages: usize, demand: bool) {
        self.fills.add(pages);
        self.prefetches
            .add(pages.saturating_sub(usize::from(demand)));
    }

    /// Counts `pages` that were taken out, `clean` ones among them.
    pub(crate) fn evicted(&self, pages: usize, clean: usize) {
        self.evictions.add(pages);
        self.clean_evictions.add(clean);
    }
}

/// A counter with one writer.
#[derive(Debug, Default)]
pub(crate) struct WorkerCounter(AtomicU64);

impl WorkerCounter {
    /// Adds one.
    pub(crate) fn bump(&self) {
        self.add(1);
    }

    /// Adds `count`. Only one thread writes, so no locked instruction is needed.
    pub(crate) fn add(&self, count: usize) {
        self.0.store(
            self.0.load(Ordering::Relaxed) + count as u64,
            Ordering::Relaxed,
        );
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
