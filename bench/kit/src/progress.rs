//! A progress bar on standard error, for people.
//!
//! The rule it keeps: the bar appears on a terminal only, and never on standard output, where the
//! results go.

use std::{borrow::Cow, time::Duration};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Progress bar over the phases of a run, each with its steps.
pub struct Progress(ProgressBar);

impl Progress {
    /// Shows a bar of `steps`, the sum of all phases.
    pub fn new(steps: u64) -> Self {
        // indicatif draws nothing when standard error is no terminal.
        let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("{elapsed_precise} {wide_bar} {pos}/{len} {msg}")
            .expect("the template above is well formed");
        bar.set_style(style);
        // Steps can take seconds; the clock should go on.
        bar.enable_steady_tick(Duration::from_millis(250));
        Self(bar)
    }

    /// Shows `what`, the name of the phase that begins.
    pub fn phase(&self, what: impl Into<Cow<'static, str>>) {
        self.0.set_message(what);
    }

    /// Counts `steps` as done.
    pub fn step(&self, steps: u64) {
        self.0.inc(steps);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
