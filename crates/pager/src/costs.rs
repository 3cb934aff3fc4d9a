//! Costs of moving and of copying a page on this machine, now: [`Costs`].
//!
//! Other load decides which of the two is cheaper. A page that moves makes all other processors
//! that run the program forget an address, and then takes several times as long. So both ways are
//! timed now and then, and the cheaper one is used.
//!
//! A page that leaves by moving leaves a frame behind, which a copy coming in does not take. So
//! such a copy costs as much more as giving a frame up does.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Instant,
};

/// One fill in `TIMED` is timed. One in `TRIED` uses the method that currently looks slower, so
/// that a change is noticed.
const TIMED: u32 = 8;
const TRIED: u32 = 64;

/// Costs per page, in and out.
#[derive(Debug, Default)]
pub(crate) struct Costs {
    pub(crate) moved_in: Cost,
    pub(crate) copied_in: Cost,
    pub(crate) copied_out: Cost,
    pub(crate) given_up: Cost,
    #[cfg(test)]
    pretended: std::sync::OnceLock<bool>,
}

/// Method of one fill.
pub(crate) struct FillMethod {
    /// True if the page is copied: copying looks cheaper, or is tried.
    pub(crate) copies: bool,
    /// True if the method that currently looks slower is tried.
    pub(crate) is_trial: bool,
    /// True if the fill is timed.
    pub(crate) is_timed: bool,
}

impl Costs {
    /// True if a page had better be copied in, where pages leave by moving.
    pub(crate) fn copying_in_is_cheaper(&self) -> bool {
        #[cfg(test)]
        if let Some(&pretended) = self.pretended.get() {
            return pretended;
        }
        let (moved, copied) = (self.moved_in.get(), self.copied_in.get());
        copied > 0 && copied + self.given_up.get() < moved
    }

    /// True if a page had better be copied in and out.
    pub(crate) fn copying_is_cheaper(&self) -> bool {
        #[cfg(test)]
        if let Some(&pretended) = self.pretended.get() {
            return pretended;
        }
        let (moved, copied) = (self.moved_in.get(), self.copied_in.get());
        let out = match self.copied_out.get() {
            0 => copied,
            out => out,
        };
        // Pages that move in also move out.
        copied > 0 && copied + out < 2 * moved
    }

    /// Chooses the method of the fill that a thread makes after `count` others. `both`: pages may
    /// leave by copying, too.
    pub(crate) fn trial(&self, count: u32, both: bool) -> FillMethod {
        let is_trial = count % TRIED == 1;
        let is_cheaper = if both {
            self.copying_is_cheaper()
        } else {
            self.copying_in_is_cheaper()
        };
        if both && is_trial && !is_cheaper {
            self.copied_out.fade();
        }
        FillMethod {
            copies: is_cheaper != is_trial,
            is_trial,
            is_timed: is_trial || count.is_multiple_of(TIMED),
        }
    }

    /// Learns from `pages` that were copied out `since`.
    pub(crate) fn copied_out(&self, since: Instant, pages: usize) {
        self.copied_out.learn(since, pages, self.copied_in.get());
    }

    /// Fixes the answer for tests: copying is the cheaper way, or never is, whatever is measured.
    #[cfg(test)]
    pub(crate) fn pretend(&self, is_cheaper: bool) {
        self.pretended.set(is_cheaper).expect("said once");
    }
}

/// Nanoseconds per page, a mean in which older values fade. 0: not known.
#[derive(Debug, Default)]
pub(crate) struct Cost(AtomicU32);

impl Cost {
    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed).into()
    }

    /// Learns from `pages` that took the time `since`. `expected`: the value used while none is
    /// known. Threads may overwrite each other's values: more follow.
    pub(crate) fn learn(&self, since: Instant, pages: usize, expected: u64) {
        let nanos = since.elapsed().as_nanos() as u64 / pages.max(1) as u64;
        let mean = match (self.get(), expected) {
            (0, 0) => nanos,
            (0, mean) | (mean, _) => {
                // A thread that lost its processor meanwhile tells nothing.
                (mean * 7 + nanos.min(mean * 4)) / 8
            }
        };
        self.0
            .store(mean.clamp(1, u32::MAX.into()) as u32, Ordering::Relaxed);
    }

    /// Lowers a cost that looks too high, a little each time, until its method is tried again.
    fn fade(&self) {
        let faded = self.get() * 15 / 16;
        self.0.store(faded as u32, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Learns a page that took `nanos` nanoseconds.
    fn learn(cost: &Cost, nanos: u64) {
        let since = Instant::now() - Duration::from_nanos(nanos);
        cost.learn(since, 1, 0);
    }

    #[test]
    fn what_costs_less_is_done_and_what_went_badly_once_is_tried_again() {
        let costs = Costs::default();
        assert!(!costs.copying_is_cheaper(), "nothing is known");
        learn(&costs.moved_in, 20_000_000);
        learn(&costs.copied_in, 4_000_000);
        assert!(costs.copying_is_cheaper());
        (0..9).for_each(|_| learn(&costs.copied_out, 400_000_000));
        assert!(!costs.copying_is_cheaper(), "taking out takes too long");
        let trials = (0..).take_while(|_| {
            costs.copied_out.fade();
            !costs.copying_is_cheaper()
        });
        assert!(trials.count() < 60);
    }

    #[test]
    fn a_copy_costs_a_frame_that_is_given_up() {
        let costs = Costs::default();
        assert!(
            costs.trial(1, false).copies,
            "nothing is known: it is tried"
        );
        learn(&costs.moved_in, 20_000_000);
        learn(&costs.copied_in, 12_000_000);
        assert!(costs.trial(0, false).copies);
        learn(&costs.given_up, 12_000_000);
        assert!(!costs.trial(0, false).copies && costs.trial(0, true).copies);
    }

    #[test]
    fn a_lost_processor_is_no_cost() {
        let cost = Cost::default();
        (0..20).for_each(|_| learn(&cost, 1_000_000));
        learn(&cost, 1_000_000_000);
        assert!((1_000_000..1_600_000).contains(&cost.get()), "{cost:?}");
    }
}
