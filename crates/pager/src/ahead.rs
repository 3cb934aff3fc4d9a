//! Read-ahead: [`Streams`] recognises sequential access and plans windows.
//!
//! A filler sees only faults, and pages that were read ahead do not fault. So each stream has a
//! *read-ahead marker*: the first page of its newest window is read like the others but held back
//! unmapped. The fault on the marker costs a round trip without a READ, says that the program has
//! come so far, and starts the next window, which travels while the program works through this one.
//! Windows double from [`FIRST_WINDOW`] up to the region's limit.
//!
//! Two random faults are neighbours by chance now and then, and a window for them is wasted. So
//! guesses are judged. A guess was good if the program came along with the stream's first window,
//! and bad if the stream was forgotten before. While most were bad, a stream has to show itself by
//! three faults in a row instead of two.
//!
//! The rule: this module decides; its callers act.

use farpage_store::{PageIndex, PageRange};

use crate::{
    protocol::{self, PageState},
    region::{Region, RegionId},
};

/// Number of pages of a stream's first window.
const FIRST_WINDOW: usize = 4;
/// Number of streams that a filler follows at once: STREAM's triad has three per thread.
pub(crate) const STREAMS: usize = 16;
/// Bad guesses in a row that end all trust, and good ones in a row that restore it.
const TRUST_MAX: i8 = 4;

/// Sequential runs of faults that a filler follows.
#[derive(Debug)]
pub(crate) struct Streams {
    /// Streams, the least recently used first.
    streams: Vec<AccessStream>,
    /// Good guesses less bad ones, within `TRUST_MAX`. Above 0, two faults in a row start a window.
    trust: i8,
}

impl Default for Streams {
    fn default() -> Self {
        // Allocated at once: faults may be served in a signal handler.
        Streams {
            streams: Vec::with_capacity(STREAMS),
            trust: TRUST_MAX,
        }
    }
}

#[derive(Debug)]
struct AccessStream {
    region: RegionId,
    /// Page of the stream's first fault, until a second one tells the direction.
    first: Option<PageIndex>,
    /// True if the program goes through the region downwards, as `memmove` sometimes does.
    down: bool,
    /// Newest planned window. A fault in or just behind this window shows that the program follows.
    ahead: PageRange,
    /// Page that the program was at when the last window was planned.
    came_from: PageIndex,
    window: usize,
    worth: Worth,
}

/// Evidence for a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Worth {
    /// Number of faults in a row so far; nothing was read ahead yet.
    Faults(u8),
    /// A first window was read.
    Guessed,
    /// The program came along.
    Proven,
}

/// Pages to read ahead after a fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReadAhead {
    /// Pages to read ahead; the nearest to the fault is the read-ahead marker, to be held back.
    pub(crate) ahead: PageRange,
    /// True if the program goes downwards: the nearest page is the last.
    pub(crate) down: bool,
}

impl ReadAhead {
    /// Plan of no pages.
    pub(crate) const NONE: ReadAhead = ReadAhead {
        ahead: PageRange::NONE,
        down: false,
    };

    /// Returns a plan of pages in ascending order.
    pub(crate) fn up(ahead: PageRange) -> ReadAhead {
        ReadAhead { ahead, down: false }
    }

    /// Returns the page that the program comes to first. The plan must not be empty.
    pub(crate) fn nearest(&self) -> PageIndex {
        if self.down {
            self.ahead.end - 1
        } else {
            self.ahead.start
        }
    }

    /// Takes off the `count` nearest pages, which the plan must have.
    pub(crate) fn take_off(&mut self, count: usize) {
        if self.down {
            self.ahead.end -= count;
        } else {
            self.ahead.start += count;
        }
    }

    /// Returns the pages of the plan from the nearest on, up to the first that is not remote or not
    /// in the same stripe, at most `most`.
    pub(crate) fn remote(&self, region: &Region, most: usize) -> PageRange {
        let pages = region.in_one_stripe(self.ahead, self.down);
        let is_there = |page: &PageIndex| region.words.load(*page).state() != PageState::Remote;
        if self.down {
            let start = PageIndex(pages.end.0.saturating_sub(most)).max(pages.start);
            let stop = start.until(pages.end).iter().rev().find(is_there);
            stop.map_or(start, |page| page + 1).until(pages.end)
        } else {
            let pages = pages.within(pages.start.and_on(most));
            let stop = pages.iter().find(is_there);
            pages.start.until(stop.unwrap_or(pages.end))
        }
    }

    /// True if the plan's nearest page lies next to `page` in the same stripe.
    pub(crate) fn is_next_to(&self, region: &Region, page: PageIndex) -> bool {
        if self.down {
            self.ahead.end == page
                && region
                    .in_one_stripe(PageRange::first(page.0 + 1), true)
                    .start
                    < page
        } else {
            self.ahead.start == page + 1 && region.in_one_stripe(page.and_on(2), false).len() == 2
        }
    }
}

impl AccessStream {
    /// Returns the program's direction, true for downwards; `None`: `page` is not of this stream.
    fn direction(&self, page: PageIndex) -> Option<bool> {
        let goes_on = if self.down {
            (self.ahead.start..=self.ahead.end).contains(&(page + 1))
        } else {
            (self.ahead.start..=self.ahead.end).contains(&page)
        };
        let turns = self.first == Some(page + 1);
        (goes_on || turns).then_some(turns || self.down)
    }
}

impl Streams {
    /// Takes note of a fault on `page`. Returns the plan to read ahead, and the pages that the
    /// program has gone through since the stream's last plan.
    ///
    /// - `limit`: the region's largest window in pages, 0 for none.
    /// - `eager`: the program goes through the region in order, so the first fault starts a stream.
    /// - `missed`: the page was not on its way, so neither are the pages planned behind it.
    pub(crate) fn fault(
        &mut self,
        region: RegionId,
        page: PageIndex,
        limit: usize,
        eager: bool,
        missed: bool,
    ) -> (ReadAhead, PageRange) {
        if limit == 0 {
            return (ReadAhead::NONE, PageRange::NONE);
        }
        let known = self.streams.iter().enumerate().find_map(|(at, stream)| {
            let down = (stream.region == region).then(|| stream.direction(page))??;
            Some((at, down))
        });
        let mut stream = match known {
            Some((at, down)) => AccessStream {
                first: None,
                down,
                ..self.streams.remove(at)
            },
            None => {
                if self.streams.len() == STREAMS && self.streams.remove(0).worth == Worth::Guessed {
                    self.judge(-1);
                }
                // The neighbours are expected; a fault there makes it a stream.
                AccessStream {
                    region,
                    first: Some(page),
                    down: false,
                    ahead: (page + 1).and_on(0),
                    came_from: page,
                    window: 0,
                    worth: Worth::Faults(0),
                }
            }
        };
        let needed = if self.trust > 0 { 2 } else { 3 };
        stream.worth = match stream.worth {
            Worth::Faults(seen) if eager || seen + 1 >= needed => Worth::Guessed,
            Worth::Faults(seen) => Worth::Faults(seen + 1),
            Worth::Guessed => {
                self.judge(1);
                Worth::Proven
            }
            Worth::Proven => Worth::Proven,
        };
        let (mut plan, mut passed) = (ReadAhead::NONE, PageRange::NONE);
        if let Worth::Faults(_) = stream.worth {
            stream.ahead = if stream.down {
                page.and_on(0)
            } else {
                (page + 1).and_on(0)
            };
        } else {
            stream.window = (stream.window * 2).clamp(FIRST_WINDOW.min(limit), limit);
            stream.ahead = if stream.down {
                let end = if missed {
                    page
                } else {
                    stream.ahead.start.min(page)
                };
                PageIndex(end.0.saturating_sub(stream.window)).until(end)
            } else {
                let start = if missed {
                    page + 1
                } else {
                    stream.ahead.end.max(page + 1)
                };
                start.and_on(stream.window)
            };
            let from = std::mem::replace(&mut stream.came_from, page);
            passed = if stream.down {
                (page + 1).until(from + 1)
            } else {
                from.until(page)
            };
            plan = ReadAhead {
                ahead: stream.ahead,
                down: stream.down,
            };
        }
        self.streams.push(stream);
        (plan, passed)
    }

    /// Notes that `pages` come along with the newest fault, for which nothing was planned. The
    /// fault's stream, if it goes upwards, is expected behind them.
    pub(crate) fn came_along(&mut self, pages: PageRange) {
        if let Some(stream) = self.streams.last_mut()
            && !stream.down
            && stream.ahead.end == pages.start
        {
            stream.ahead.end = pages.end;
        }
    }

    fn judge(&mut self, guess: i8) {
        self.trust = (self.trust + guess).clamp(-TRUST_MAX, TRUST_MAX);
    }

    /// Takes `pages` that are not read after all out of their stream, which goes on there.
    pub(crate) fn gave_up(&mut self, region: RegionId, pages: PageRange) {
        for stream in self.streams.iter_mut().filter(|s| s.region == region) {
            if stream.down && stream.ahead.start == pages.start {
                stream.ahead.start = pages.end;
            } else if !stream.down && stream.ahead.end == pages.end {
                stream.ahead.end = pages.start;
            }
        }
    }
}

/// Owns pages ahead of need, from the nearest on, up to the first that is not remote. Returns the
/// owned ones.
pub(crate) fn own_ahead(region: &Region, pages: PageRange, down: bool) -> PageRange {
    let refused = |page: &PageIndex| {
        let owned = region.words.try_apply(*page, protocol::prefetch);
        owned.is_none()
    };
    if down {
        let stop = pages.iter().rev().find(refused);
        stop.map_or(pages.start, |page| page + 1).until(pages.end)
    } else {
        let stop = pages.iter().find(refused);
        pages.start.until(stop.unwrap_or(pages.end))
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;

    fn pages(of: Range<usize>) -> PageRange {
        PageIndex(of.start).until(PageIndex(of.end))
    }

    fn up(ahead: Range<usize>) -> ReadAhead {
        ReadAhead::up(pages(ahead))
    }

    fn down(ahead: Range<usize>) -> ReadAhead {
        ReadAhead {
            ahead: pages(ahead),
            down: true,
        }
    }

    fn fault(
        streams: &mut Streams,
        region: u64,
        page: usize,
        limit: usize,
        eager: bool,
        missed: bool,
    ) -> ReadAhead {
        streams
            .fault(RegionId(region), PageIndex(page), limit, eager, missed)
            .0
    }

    #[test]
    fn what_the_program_has_gone_through_is_told_once() {
        for down in [false, true] {
            let at = |page: usize| if down { 1000 - page } else { page };
            let mut streams = Streams::default();
            let mut told = [0; 1000];
            let mut page = 10;
            for _ in 0..6 {
                let (plan, passed) =
                    streams.fault(RegionId(1), PageIndex(at(page)), 64, false, false);
                passed.iter().for_each(|page| told[page.0] += 1);
                page = match plan {
                    ReadAhead::NONE => page + 1,
                    plan => at(plan.nearest().0),
                };
            }
            let last = (10..).find(|&page| told[at(page)] == 0).expect("it ends");
            assert!(last > 30, "only up to {last}");
            assert_eq!(told.iter().sum::<i32>() as usize, last - 10, "each once");
        }
    }

    #[test]
    fn second_fault_in_a_row_starts_a_window_and_its_marker_the_next() {
        let mut streams = Streams::default();
        assert_eq!(fault(&mut streams, 1, 10, 64, false, true), ReadAhead::NONE);
        assert_eq!(fault(&mut streams, 1, 11, 64, false, true), up(12..16));
        assert_eq!(fault(&mut streams, 1, 12, 64, false, false), up(16..24));
        assert_eq!(fault(&mut streams, 1, 16, 64, false, false), up(24..40));
        let limited = fault(&mut streams, 1, 24, 16, false, false);
        assert_eq!(limited, up(40..56), "the limit holds");
    }

    #[test]
    fn window_that_was_given_up_is_planned_again() {
        let mut streams = Streams::default();
        fault(&mut streams, 1, 10, 64, false, true);
        fault(&mut streams, 1, 11, 64, false, true);
        assert_eq!(fault(&mut streams, 1, 13, 64, false, true), up(14..22));
        streams.gave_up(RegionId(1), pages(17..22));
        assert_eq!(fault(&mut streams, 1, 14, 64, false, false), up(17..33));
    }

    #[test]
    fn program_that_goes_downwards_is_followed() {
        for eager in [false, true] {
            let mut streams = Streams::default();
            fault(&mut streams, 1, 50, 64, eager, true);
            let window = if eager { 8 } else { 4 };
            let first = fault(&mut streams, 1, 49, 64, eager, true);
            assert_eq!(first, down(49 - window..49));
            let second = fault(&mut streams, 1, 48, 64, eager, false);
            assert_eq!(second, down(49 - 3 * window..49 - window));
            streams.gave_up(RegionId(1), pages(49 - 3 * window..30));
            let third = fault(&mut streams, 1, 48 - window, 64, eager, false);
            assert_eq!(
                third.ahead.end,
                PageIndex(30),
                "goes on where it was given up"
            );
        }
        let mut streams = Streams::default();
        fault(&mut streams, 1, 1, 64, false, true);
        assert_eq!(fault(&mut streams, 1, 0, 64, false, true), down(0..0));
    }

    #[test]
    fn random_faults_read_nothing_ahead() {
        let mut streams = Streams::default();
        for i in 0..1000 {
            let page = i * 7919 % 100_003;
            assert_eq!(
                fault(&mut streams, 1, page, 64, false, false),
                ReadAhead::NONE
            );
        }
    }

    #[test]
    fn chance_neighbours_lose_their_credit_and_true_streams_restore_it() {
        let mut streams = Streams::default();
        let mut page = 0;
        let mut chance = |streams: &mut Streams| {
            page += 1000;
            fault(streams, 1, page, 64, false, true);
            fault(streams, 1, page + 1, 64, false, true) != ReadAhead::NONE
        };
        let wasted = (0..1000).filter(|_| chance(&mut streams)).count();
        assert!(
            (1..=STREAMS + TRUST_MAX as usize).contains(&wasted),
            "{wasted} windows"
        );
        for at in 0..TRUST_MAX as usize + 1 {
            let first = 10_000_000 * (at + 1);
            for page in first..first + 2 {
                assert_eq!(
                    fault(&mut streams, 1, page, 64, false, true),
                    ReadAhead::NONE
                );
            }
            assert_eq!(
                fault(&mut streams, 1, first + 2, 64, false, true),
                up(first + 3..first + 7)
            );
            fault(&mut streams, 1, first + 3, 64, false, false);
        }
        assert!(chance(&mut streams), "two in a row are a stream again");
    }

    #[test]
    fn downwards_needs_three_faults_too_where_guesses_were_bad() {
        let mut streams = Streams {
            trust: 0,
            ..Streams::default()
        };
        assert_eq!(fault(&mut streams, 1, 50, 64, false, true), ReadAhead::NONE);
        assert_eq!(fault(&mut streams, 1, 49, 64, false, true), ReadAhead::NONE);
        assert_eq!(fault(&mut streams, 1, 48, 64, false, true), down(44..48));
    }

    #[test]
    fn interleaved_streams_are_told_apart() {
        let mut streams = Streams::default();
        for page in 0..2 {
            for region in 0..6 {
                let plan = fault(&mut streams, region, page, 8, false, false);
                assert_eq!(plan != ReadAhead::NONE, page == 1);
            }
        }
    }

    #[test]
    fn stream_is_expected_behind_what_came_along() {
        let mut streams = Streams::default();
        assert_eq!(fault(&mut streams, 1, 10, 64, false, true), ReadAhead::NONE);
        streams.came_along(pages(11..32));
        assert_eq!(fault(&mut streams, 1, 32, 64, false, true), up(33..37));
        // Pages of others change nothing.
        fault(&mut streams, 1, 1000, 64, false, true);
        streams.came_along(pages(2000..2010));
        assert_eq!(
            fault(&mut streams, 1, 1001, 64, false, true),
            up(1002..1006)
        );
    }

    #[test]
    fn advice_starts_at_the_first_fault() {
        let plan = fault(&mut Streams::default(), 1, 0, 8, true, false);
        assert_eq!(plan, up(1..5));
    }
}
