//! A progress bar on standard error, for people: a step for each phase of a run.
//!
//! The rule it keeps: the bar appears on a terminal only, and never on standard output, where the
//! results go.

use std::{borrow::Cow, cell::Cell, time::Duration};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Progress bar over the phases of a run.
pub struct Progress {
    bar: ProgressBar,
    /// True once a phase has begun.
    begun: Cell<bool>,
}

impl Progress {
    /// Shows a bar of `phases`.
    pub fn new(phases: u64) -> Self {
        // indicatif draws nothing when standard error is no terminal.
        let bar = ProgressBar::with_draw_target(Some(phases), ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("{elapsed_precise} {wide_bar} {pos}/{len} {msg}")
            .expect("the template above is well formed");
        bar.set_style(style);
        // Steps can take seconds; the clock should go on.
        bar.enable_steady_tick(Duration::from_millis(250));
        let begun = Cell::new(false);
        Self { bar, begun }
    }

    /// Counts the phase before as done. Shows `what`, the name of the phase that begins.
    pub fn phase(&self, what: impl Into<Cow<'static, str>>) {
        self.bar.inc(self.begun.replace(true).into());
        self.bar.set_message(what);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
