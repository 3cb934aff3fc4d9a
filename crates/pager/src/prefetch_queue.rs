//! Requests of streams and of the program to bring pages in while there is room:
//! [`PrefetchQueue`].
//!
//! The rule: a request owns nothing. Faults go first, and where there is no frame to spare the
//! requests of streams are forgotten: pages that come too late are worth nothing.

use std::{collections::VecDeque, mem, sync::Arc};

use farpage_vm::{AddressSpace, Shard};

use crate::{
    ahead::{ReadAhead, own_ahead},
    fills::{FillCompletion, Fills},
    installer::UsageCount,
    region::Region,
    requests::Fill,
    run::{keep_first, pages_in},
    shared::SharedParts,
};

/// Bounds of the runs that one filler has in flight when it starts more ahead of need, and of their
/// bytes: more than a fast link carries in a round trip.
const RUNS_AHEAD_MAX: usize = 32;
pub(crate) const BYTES_AHEAD_MAX: usize = 8 << 20;
/// Number of pages that one turn passes over, because they are here or another filler's, before it
/// looks for faults again.
const PASSED_OVER_PER_TURN: usize = 4096;

#[derive(Debug)]
struct PrefetchRequest {
    region: Arc<Region>,
    plan: ReadAhead,
    /// True if the first run is a stream's read-ahead marker.
    marker: bool,
}

/// Lack of frames to spare for guesses.
struct NoFrame;

/// Prefetch requests of one filler.
pub(crate) struct PrefetchQueue<A: AddressSpace> {
    shared: Arc<SharedParts<A>>,
    shard: Shard,
    /// Requests, the oldest first.
    requests: VecDeque<PrefetchRequest>,
}

impl<A: AddressSpace> PrefetchQueue<A> {
    pub(crate) fn new(shared: Arc<SharedParts<A>>, shard: Shard) -> Self {
        PrefetchQueue {
            shared,
            shard,
            requests: VecDeque::new(),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    pub(crate) fn add(&mut self, region: Arc<Region>, plan: ReadAhead, marker: bool) {
        if !plan.ahead.is_empty() {
            self.requests.push_back(PrefetchRequest {
                region,
                plan,
                marker,
            });
        }
    }

    /// Forgets the requests of a closing region.
    pub(crate) fn give_up(&mut self, region: &Region) {
        self.requests
            .retain(|request| request.region.id != region.id);
    }

    /// Posts READs, as far as frames and the I/O queue allow. Returns whether anything was done.
    pub(crate) fn serve<L: FillCompletion<A>>(&mut self, fills: &mut Fills<A, L>) -> bool {
        let (mut any, mut passed_over) = (false, 0);
        while fills.has_room_ahead(RUNS_AHEAD_MAX, BYTES_AHEAD_MAX) {
            let Some(mut request) = self.requests.pop_front() else {
                break;
            };
            match self.serve_one(&mut request, fills) {
                Ok(begun) => {
                    any |= begun;
                    passed_over += usize::from(!begun);
                    if !request.plan.ahead.is_empty() && !request.region.is_closing() {
                        self.requests.push_front(request);
                    }
                    if passed_over == PASSED_OVER_PER_TURN {
                        return true;
                    }
                }
                Err(NoFrame) => {
                    self.requests.push_front(request);
                    for request in self.requests.drain(..) {
                        fills.gave_up(&request.region, request.plan.ahead);
                    }
                }
            }
        }
        any
    }

    /// Begins the nearest run of a request and takes it off, or passes over a page that is not to
    /// be brought in. Returns whether anything was begun.
    fn serve_one<L: FillCompletion<A>>(
        &self,
        request: &mut PrefetchRequest,
        fills: &mut Fills<A, L>,
    ) -> Result<bool, NoFrame> {
        let nearest = request.plan.nearest();
        let begun = if self.shared.mapper.shard_of(&request.region, nearest) == self.shard {
            let most = fills.run_pages(&request.region);
            self.own(&request.region, &request.plan, most)?
        } else {
            None
        };
        let Some((mut fill, frame)) = begun else {
            request.plan.take_off(1);
            return Ok(false);
        };
        // The first run that comes in, since a page that is here already tells nothing.
        fill.marker = mem::take(&mut request.marker);
        request.plan.take_off(fill.pages.len());
        fills.post(fill, frame);
        Ok(true)
    }

    /// Owns the nearest run of a plan, at most `most` pages and as far as there are frames for it.
    fn own(
        &self,
        region: &Arc<Region>,
        plan: &ReadAhead,
        most: usize,
    ) -> Result<Option<(Fill, A::Frame)>, NoFrame> {
        let (run, page_bytes) = (plan.remote(region, most), region.page_bytes());
        if run.is_empty() {
            return Ok(None);
        }
        let Some(region) = region.enter() else {
            return Ok(None);
        };
        let frames = &self.shared.frames;
        let mut frame = frames.for_prefetch(page_bytes, run.len()).ok_or(NoFrame)?;
        let got = pages_in(&frame, page_bytes);
        let run = if plan.down {
            (run.end - got).until(run.end)
        } else {
            run.start.and_on(got)
        };
        let run = own_ahead(&region, run, plan.down);
        if run.is_empty() {
            // A thread of the program that serves its own faults was faster.
            frames.release(frame, page_bytes);
            return Ok(None);
        }
        if let Some(rest) = keep_first(&mut frame, run.len(), page_bytes) {
            frames.release(rest, page_bytes);
        }
        let fill = Fill::new(region, run, UsageCount::Unwanted);
        Ok(Some((fill, frame)))
    }
}
