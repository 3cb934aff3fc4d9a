//! Read-ahead markers that are complete and not mapped: [`Markers`].
//!
//! A marker is the first run of a read-ahead window. It stays unmapped, so that the fault on it
//! says that the program has come so far. Its filler puts it here; the filler, or a thread that
//! serves its own fault, takes it out and maps it: no thread waits for a hand-off then.
//!
//! The rule: whoever takes a marker out maps it. No lock is held meanwhile.

use std::sync::Arc;

use farpage_signals::Mutex;
use farpage_store::PageIndex;
use farpage_vm::AddressSpace;

use crate::{ahead::STREAMS, frames::FrameAllocator, region::Region, requests::Fill, run::PageRun};

/// Complete run that is not mapped.
pub(crate) type Marker<F> = (Fill, PageRun<F>);

/// Markers of one filler.
pub(crate) struct Markers<A: AddressSpace> {
    frames: Arc<FrameAllocator<A>>,
    /// Markers, the one held back longest first.
    runs: Mutex<Vec<Marker<A::Frame>>>,
}

impl<A: AddressSpace> Markers<A> {
    pub(crate) fn new(frames: Arc<FrameAllocator<A>>) -> Self {
        Markers {
            frames,
            // Allocated at once: threads take markers out in signal handlers.
            runs: Mutex::new(Vec::with_capacity(STREAMS)),
        }
    }

    /// Keeps a marker. With as many as there are streams, the oldest one is returned: its stream
    /// has ended.
    pub(crate) fn keep(&self, fill: Fill, run: PageRun<A::Frame>) -> Option<Marker<A::Frame>> {
        self.frames.budget().begin_holding_back(fill.bytes());
        let mut runs = self.runs.lock();
        let oldest = (runs.len() == STREAMS).then(|| runs.remove(0));
        runs.push((fill, run));
        drop(runs);
        oldest.inspect(|oldest| self.let_go(oldest))
    }

    /// Takes the marker that has `page`. For signal handlers, too.
    pub(crate) fn take(&self, region: &Region, page: PageIndex) -> Option<Marker<A::Frame>> {
        self.take_where(|fill| fill.region.id == region.id && fill.pages.contains(page))
    }

    /// Takes any marker of the region.
    pub(crate) fn take_of(&self, region: &Region) -> Option<Marker<A::Frame>> {
        self.take_where(|fill| fill.region.id == region.id)
    }

    /// Takes the oldest marker if some fill finds no frame.
    pub(crate) fn take_called(&self) -> Option<Marker<A::Frame>> {
        match self.frames.budget().is_starving() {
            true => self.take_where(|_| true),
            false => None,
        }
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.runs.lock().is_empty()
    }

    fn take_where(&self, is_meant: impl Fn(&Fill) -> bool) -> Option<Marker<A::Frame>> {
        let mut runs = self.runs.lock();
        let at = runs.iter().position(|(fill, _)| is_meant(fill))?;
        let marker = runs.remove(at);
        drop(runs);
        self.let_go(&marker);
        Some(marker)
    }

    fn let_go(&self, (fill, _): &Marker<A::Frame>) {
        self.frames.budget().end_holding_back(fill.bytes());
    }
}
