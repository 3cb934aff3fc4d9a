//! What to read before it is asked for: [`Streams`].
//!
//! A filler sees only faults, and pages that were read ahead do not fault. So each stream has a *trigger*: the first page of its
//! newest window is read like the others but held back unmapped. The fault on it costs one round trip without a READ, says that the
//! program has come so far, and starts the next window, which then travels while the program works through this one.
//! Windows double from [`FIRST_WINDOW`] up to the region's limit. This module decides; the filler acts.

use std::ops::Range;

/// Pages of a stream's first window.
const FIRST_WINDOW: usize = 4;
/// Streams that a filler follows at once: STREAM's triad has three per thread.
pub(crate) const STREAMS: usize = 16;

/// Sequential runs of faults that a filler follows.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    /// The least recently used first.
    streams: Vec<Stream>,
}

#[derive(Debug)]
struct Stream {
    region: u64,
    /// A fault on it (or on any page from here to `end`) is the program coming along.
    trigger: usize,
    /// Behind the last page that was read ahead.
    end: usize,
    window: usize,
}

/// What to do about a fault.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Pages to read ahead; the first is the trigger, to be held back.
    pub(crate) ahead: Range<usize>,
}

impl Streams {
    /// A fault on `page`. `limit`: the region's largest window in pages, 0 for none; `eager`: the program says that it goes
    /// through the region in order, so that the first fault starts a stream; `missed`: the page was not on its way, so that what
    /// was planned behind it is not either.
    pub(crate) fn fault(
        &mut self,
        region: u64,
        page: usize,
        limit: usize,
        eager: bool,
        missed: bool,
    ) -> Option<Plan> {
        if limit == 0 {
            return None;
        }
        let known = self
            .streams
            .iter()
            .position(|s| s.region == region && (s.trigger..=s.end).contains(&page));
        let mut stream = match known {
            Some(at) => self.streams.remove(at),
            None => {
                // A page's successor is expected; a fault there makes it a stream.
                if self.streams.len() == STREAMS {
                    self.streams.remove(0);
                }
                Stream {
                    region,
                    trigger: page + 1,
                    end: page + 1,
                    window: 0,
                }
            }
        };
        let plan = (known.is_some() || eager).then(|| {
            stream.window = (stream.window * 2).clamp(FIRST_WINDOW.min(limit), limit);
            let first = if missed {
                page + 1
            } else {
                stream.end.max(page + 1)
            };
            (stream.trigger, stream.end) = (first, first + stream.window);
            Plan {
                ahead: first..stream.end,
            }
        });
        self.streams.push(stream);
        plan
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_fault_in_a_row_starts_a_window_and_its_trigger_the_next() {
        let mut streams = Streams::default();
        assert_eq!(streams.fault(1, 10, 64, false, true), None);
        assert_eq!(
            streams.fault(1, 11, 64, false, true),
            Some(Plan { ahead: 12..16 })
        );
        assert_eq!(
            streams.fault(1, 12, 64, false, false),
            Some(Plan { ahead: 16..24 })
        );
        assert_eq!(
            streams.fault(1, 16, 64, false, false),
            Some(Plan { ahead: 24..40 })
        );
        assert_eq!(
            streams.fault(1, 24, 16, false, false),
            Some(Plan { ahead: 40..56 }),
            "the limit holds"
        );
    }

    #[test]
    fn window_that_was_given_up_is_planned_again() {
        let mut streams = Streams::default();
        streams.fault(1, 10, 64, false, true);
        streams.fault(1, 11, 64, false, true);
        assert_eq!(
            streams.fault(1, 13, 64, false, true),
            Some(Plan { ahead: 14..22 })
        );
    }

    #[test]
    fn random_faults_read_nothing_ahead() {
        let mut streams = Streams::default();
        for i in 0..1000 {
            assert_eq!(streams.fault(1, i * 7919 % 100_003, 64, false, false), None);
        }
    }

    #[test]
    fn interleaved_streams_are_told_apart() {
        let mut streams = Streams::default();
        for page in 0..2 {
            for region in 0..6 {
                assert_eq!(
                    streams.fault(region, page, 8, false, false).is_some(),
                    page == 1
                );
            }
        }
    }

    #[test]
    fn advice_starts_at_the_first_fault() {
        assert_eq!(
            Streams::default().fault(1, 0, 8, true, false),
            Some(Plan { ahead: 1..5 })
        );
    }
}
