//! The simulated twin: an address space without a kernel, for seeded single-threaded simulations
//! and for model tests.
//!
//! The rule it keeps: the twin does what the kernel does where a pager notices, and nothing else.
//! - A touch of an absent page enqueues one fault and puts the thread to sleep.
//! - A sleeping thread wakes by [`install`](AddressSpace::install),
//!   [`poison`](AddressSpace::poison), [`wake`](AddressSpace::wake) or
//!   [`unmap`](AddressSpace::unmap) on its page, and tries again.
//! - A fault that is ended before it is read is not reported.
//! - At most one page lies at an address.
//! - Only a frame that was cut can be joined again.
//!
//! Faults that can be injected, and must be survived:
//! - a page that is busy, at the start of a run or later ([`SimOptions::busy_probability`]);
//! - a fault that is reported twice ([`SimOptions::duplicate_probability`]);
//! - a page that the program drops ([`SimSpace::drop_page`]) or unmaps ([`SimSpace::unmap_page`]);
//! - a page that cannot be mapped ([`SimSpace::refuse_installs`]), or not be ceded
//!   ([`SimSpace::refuse_to_cede`]).
//!
//! Deliberately absent: pages that are partly there, time, and memory pressure.

mod frame;
mod options;
mod program;
mod state;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    io,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use farpage_signals::Mutex;

use self::{
    frame::Frames,
    state::{Content, SimRegion, State},
};
pub use self::{frame::SimFrame, options::SimOptions};
use crate::{
    pages::{Pages, Shard},
    space::{
        AddressSpace, Batch, Cede, DetachError, Detached, EventScope, EventSources, Events,
        Geometry, InstallError, PageIn, PageOut, RegionMapping,
    },
};

/// Reason why an access did not happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Faulted {
    /// The page is absent: a fault is enqueued and the thread sleeps, until [`SimSpace::is_asleep`]
    /// says that it may try again.
    #[error("the thread sleeps on an absent page")]
    Asleep,
    /// The page is poisoned.
    #[error("SIGBUS: the page is poisoned")]
    Sigbus,
    /// The address is in no region, or its region may only be read.
    #[error("SIGSEGV: no region is mapped there that allows this")]
    Sigsegv,
}

/// Memory of a simulated program.
pub struct SimSpace {
    state: Mutex<State>,
    shards: usize,
    frames: Arc<Frames>,
    moves: AtomicUsize,
    scattered: AtomicUsize,
    copied_in: AtomicUsize,
}

impl SimSpace {
    /// Makes an empty space.
    ///
    /// # Panics
    /// If `options.shards` is 0.
    pub fn new(options: SimOptions) -> Self {
        assert!(options.shards > 0, "a space has at least one shard");
        Self {
            shards: options.shards,
            state: Mutex::new(State::new(options)),
            frames: Arc::default(),
            moves: AtomicUsize::new(0),
            scattered: AtomicUsize::new(0),
            copied_in: AtomicUsize::new(0),
        }
    }

    /// Makes mapping a page at one of these addresses fail from now on, as for lack of the kernel's
    /// memory. `None` ends that.
    pub fn refuse_installs(&self, addresses: Option<Range<usize>>) {
        self.state.lock().refused = addresses;
    }

    /// Makes ceding addresses fail from now on, as for lack of mappings, or not.
    pub fn refuse_to_cede(&self, refuses: bool) {
        self.state.lock().refuses_to_cede = refuses;
    }

    /// Returns the number of pages mapped in all regions.
    pub fn resident_pages(&self) -> usize {
        let state = self.state.lock();
        let pages = state
            .regions
            .values()
            .flat_map(|region| region.pages.values());
        pages
            .filter(|content| matches!(content, Content::Bytes(_)))
            .count()
    }

    /// Returns the number of pages held in frames: those in existence that are not mapped.
    pub fn frame_pages(&self) -> usize {
        self.frames.pages.load(Ordering::Relaxed)
    }

    /// Returns how often pages were moved in or out so far; a run counts once.
    pub fn moves(&self) -> usize {
        self.moves.load(Ordering::Relaxed)
    }

    /// Returns the number of pages that went out one by one so far, each at an address of its own.
    pub fn scattered_pages(&self) -> usize {
        self.scattered.load(Ordering::Relaxed)
    }

    /// Returns the number of runs that came in as copies so far.
    pub fn copied_in(&self) -> usize {
        self.copied_in.load(Ordering::Relaxed)
    }

    fn move_in(&self, pages: Pages, mut frame: SimFrame) -> Result<(), InstallError<SimFrame>> {
        assert_eq!(frame.as_ref().len(), pages.bytes(), "as long as its pages");
        self.moves.fetch_add(1, Ordering::Relaxed);
        let mut state = self.state.lock();
        let mut rest = Some(pages);
        while let Some(here) = rest {
            let page = here.first(1);
            let put = state.put(page, &frame.as_ref()[..page.bytes()]);
            state.wake(page.range());
            if let Err(kind) = put {
                return Err(InstallError { frame, kind });
            }
            frame.drop_first();
            rest = here.behind(page.bytes());
        }
        Ok(())
    }

    fn move_out(&self, pages: Pages) -> Result<SimFrame, DetachError> {
        self.moves.fetch_add(1, Ordering::Relaxed);
        let mut state = self.state.lock();
        let busy_probability = state.options.busy_probability;
        let mut out = Vec::new();
        for page in pages.addresses() {
            let held = state.chance(busy_probability);
            let region = state.region_of(pages).ok_or(DetachError::Absent)?;
            let refused = match region.pages.get(&page) {
                None | Some(Content::Gone | Content::Own(_)) => DetachError::Absent,
                Some(_) if held => DetachError::Busy,
                Some(Content::Poison) => {
                    DetachError::Os(io::Error::from_raw_os_error(libc::EFAULT))
                }
                Some(Content::Bytes(bytes)) => {
                    out.extend_from_slice(bytes);
                    region.pages.remove(&page);
                    continue;
                }
            };
            if out.is_empty() {
                return Err(refused);
            }
            break;
        }
        Ok(SimFrame::new(&self.frames, out, pages.page_bytes()))
    }

    fn copy_out(
        &self,
        pages: &[Pages],
        frames: &mut [SimFrame],
        own: &mut dyn FnMut(usize) -> bool,
    ) -> usize {
        let mut state = self.state.lock();
        let busy_probability = state.options.busy_probability;
        let (mut dealt_with, mut taken) = (0, 0);
        for (&page, frame) in pages.iter().zip(frames) {
            if state.chance(busy_probability) {
                break;
            }
            let Some(region) = state.region_of(page) else {
                break;
            };
            let Some(Content::Bytes(bytes)) = region.pages.get(&page.address()) else {
                break;
            };
            frame.as_mut().copy_from_slice(bytes);
            if own(dealt_with) {
                region.pages.remove(&page.address());
                taken += 1;
            }
            dealt_with += 1;
        }
        self.scattered.fetch_add(taken, Ordering::Relaxed);
        dealt_with
    }

    fn drop_runs(&self, runs: &[Pages]) -> usize {
        let mut state = self.state.lock();
        let busy_probability = state.options.busy_probability;
        let mut dropped = 0;
        for &run in runs {
            if state.chance(busy_probability) {
                break;
            }
            let Some(region) = state.region_of(run) else {
                break;
            };
            assert!(region.geometry.read_only, "nobody knows what {run:x?} hold");
            let is_gone = |page| region.is_gone(page);
            if run.addresses().any(is_gone) {
                break;
            }
            for page in run.addresses() {
                region.pages.remove(&page);
            }
            dropped += 1;
        }
        dropped
    }
}

impl AddressSpace for SimSpace {
    type Frame = SimFrame;

    fn shards(&self) -> usize {
        self.shards
    }

    fn map(&self, geometry: Geometry) -> io::Result<RegionMapping> {
        let mut state = self.state.lock();
        let address = state.next_address.next_multiple_of(geometry.page_bytes);
        // A page's distance between regions: an access beyond a region's end must not meet the next
        // one.
        state.next_address = address + geometry.bytes + geometry.page_bytes;
        state.regions.insert(
            address,
            SimRegion {
                geometry,
                is_ordinary: geometry.ordinary,
                pages: BTreeMap::new(),
            },
        );
        let copies_in = !geometry.read_only;
        let copies_out = copies_in && (state.options.copies_out || geometry.no_direct_io);
        Ok(RegionMapping {
            address,
            copies_in,
            copies_out,
        })
    }

    fn begin_paging(&self, address: usize, _: Geometry) -> io::Result<()> {
        let mut state = self.state.lock();
        let refuses = state.refused.is_some();
        let (region, _) = state.region(address).ok_or(io::ErrorKind::NotFound)?;
        assert!(region.is_ordinary, "the region at {address:#x} is caught");
        if refuses {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        region.is_ordinary = false;
        Ok(())
    }

    fn drop_memory(&self, addresses: Range<usize>) -> io::Result<()> {
        let mut state = self.state.lock();
        let (region, _) = (state.region(addresses.start)).ok_or(io::ErrorKind::NotFound)?;
        let is_dropped = |page: &usize, content: &Content| {
            addresses.contains(page) && matches!(content, Content::Bytes(_))
        };
        (region.pages).retain(|page, content| !is_dropped(page, content));
        Ok(())
    }

    fn advise_huge(&self, _: Range<usize>, _: bool) {}

    fn present(&self, addresses: Range<usize>, out: &mut Vec<Range<usize>>) {
        let mut state = self.state.lock();
        let Some((region, _)) = state.region(addresses.start) else {
            return;
        };
        let page_bytes = region.geometry.page_bytes;
        let there = region.pages.range(addresses);
        let there = there.filter(|(_, content)| matches!(content, Content::Bytes(_)));
        out.extend(there.map(|(&page, _)| page..page + page_bytes));
    }

    /// Never called, since no page is partly there.
    fn put_zeros(&self, _: Shard, part: Range<usize>) -> io::Result<()> {
        unreachable!("no page is partly there, and {part:x?} is a part of one")
    }

    fn unmap(&self, address: usize, geometry: Geometry) {
        let mut state = self.state.lock();
        let region = state.regions.remove(&address);
        assert!(
            region.is_some_and(|region| region.geometry == geometry),
            "{address:#x} is not mapped with {geometry:?}"
        );
        state.wake(address..address + geometry.bytes);
    }

    fn cede(&self, addresses: Range<usize>, how: Cede<'_>) -> io::Result<()> {
        let mut state = self.state.lock();
        if state.refuses_to_cede {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        let (region, _) = state
            .region(addresses.start)
            .ok_or(io::ErrorKind::NotFound)?;
        let page_bytes = region.geometry.page_bytes;
        for (at, page) in addresses.clone().step_by(page_bytes).enumerate() {
            let before = region.pages.remove(&page);
            let is_there = matches!(before, Some(Content::Bytes(_)));
            assert!(
                !is_there || region.is_ordinary,
                "the page at {page:#x} is mapped and ceded"
            );
            let own = match (how, before) {
                (Cede::With(bytes), _) => bytes[at * page_bytes..][..page_bytes].into(),
                (Cede::InPlace, Some(Content::Bytes(bytes))) => bytes,
                (Cede::Barred | Cede::InPlace, _) => vec![0; page_bytes].into(),
            };
            region.pages.insert(page, Content::Own(own));
        }
        state.wake(addresses);
        Ok(())
    }

    fn regain(&self, address: usize, _: Geometry, ceded: Range<usize>) -> io::Result<()> {
        let mut state = self.state.lock();
        let (region, _) = state.region(address).ok_or(io::ErrorKind::NotFound)?;
        let page_bytes = region.geometry.page_bytes;
        for page in ceded.step_by(page_bytes) {
            let before = region.pages.remove(&page);
            let is_ceded = matches!(before, Some(Content::Own(_)));
            assert!(
                is_ceded,
                "the page at {page:#x} is regained and was not ceded"
            );
        }
        Ok(())
    }

    fn kept(&self, addresses: Range<usize>) -> Vec<Range<usize>> {
        let mut state = self.state.lock();
        let Some((region, _)) = state.region(addresses.start) else {
            return Vec::new();
        };
        let page_bytes = region.geometry.page_bytes;
        let pages = addresses.step_by(page_bytes);
        let pages = pages.filter(|&page| !region.is_gone(page));
        pages.map(|page| page..page + page_bytes).collect()
    }

    fn is_gone(&self, address: usize) -> bool {
        let mut state = self.state.lock();
        (state.region(address)).is_some_and(|(region, page)| region.is_gone(page))
    }

    fn new_frame(&self, page_bytes: usize, pages: usize) -> io::Result<SimFrame> {
        if pages > self.state.lock().options.frame_pages_max {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        Ok(SimFrame::new(
            &self.frames,
            vec![0; page_bytes * pages],
            page_bytes,
        ))
    }

    fn drop_frames(&self, frames: Batch<SimFrame>) {
        drop(frames);
    }

    fn install(
        &self,
        pages: Pages,
        how: PageIn<'_, SimFrame>,
    ) -> Result<Option<SimFrame>, InstallError<SimFrame>> {
        match how {
            PageIn::Move(frame) => self.move_in(pages, frame).map(|()| None),
            PageIn::Copy(frame, room) => {
                let page_bytes = pages.page_bytes();
                let mut state = self.state.lock();
                let mut rest = Some(pages);
                let bytes = frame.as_ref().chunks_exact(page_bytes);
                for bytes in bytes {
                    let here = rest.expect("as long as its pages");
                    let put = state.put(here.first(1), bytes);
                    if let Err(kind) = put {
                        state.take_back(pages.address()..here.address());
                        return Err(InstallError { frame, kind });
                    }
                    rest = here.behind(page_bytes);
                }
                state.wake(pages.range());
                self.copied_in.fetch_add(1, Ordering::Relaxed);
                room.use_up();
                Ok(Some(frame))
            }
        }
    }

    fn detach(&self, out: PageOut<'_, SimFrame>) -> Result<Detached<SimFrame>, DetachError> {
        match out {
            PageOut::Move(pages) => self.move_out(pages).map(Detached::Moved),
            PageOut::Copy(pages, frames, own) => {
                Ok(Detached::Copied(self.copy_out(pages, frames, own)))
            }
            PageOut::Drop(runs) => Ok(Detached::Dropped(self.drop_runs(runs))),
        }
    }

    fn unprotect(&self, _pages: Pages) {}

    fn wake(&self, pages: Pages) {
        self.state.lock().wake(pages.range());
    }

    fn poison(&self, pages: Pages) -> io::Result<()> {
        let mut state = self.state.lock();
        let address = pages.address();
        let (region, page) = state.region(address).ok_or(io::ErrorKind::NotFound)?;
        // Poisoned before: a fill that was tried again has failed again.
        let exists = matches!(region.pages.get(&page), Some(Content::Bytes(_)));
        let gone = region.is_gone(page);
        if !exists && !gone {
            region.pages.insert(page, Content::Poison);
        }
        state.wake(pages.range());
        if exists {
            Err(io::ErrorKind::AlreadyExists.into())
        } else {
            Ok(())
        }
    }

    fn is_present(&self, address: usize) -> bool {
        let mut state = self.state.lock();
        state.region(address).is_some_and(|(region, page)| {
            matches!(
                region.pages.get(&page),
                Some(Content::Bytes(_) | Content::Poison | Content::Own(_))
            )
        })
    }

    /// Hands out all events as kept, since no descriptor tells of any.
    fn events(&self, shard: Shard, _asked: EventScope, out: &mut Events) -> io::Result<()> {
        let mut state = self.state.lock();
        let faults = state.queues[shard.0].drain(..);
        out.faults.extend(faults.map(|message| message.fault));
        out.unmapped.append(&mut state.news[shard.0]);
        Ok(())
    }

    fn wait(&self, shard: Shard) -> EventSources<'_> {
        let state = self.state.lock();
        EventSources {
            fd: None,
            kept: !state.queues[shard.0].is_empty() || !state.news[shard.0].is_empty(),
        }
    }
}
