//! The simulated twin: an address space without a kernel, for seeded single-threaded simulations
//! and for model tests.
//!
//! The rule it keeps: it does what the kernel does where that matters to a pager, and nothing else.
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
//! - a page that cannot be mapped ([`SimSpace::refuse_installs`]).
//!
//! Deliberately absent: pages that are partly there, time, and memory pressure.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    ops::Range,
    sync::Arc,
    sync::atomic::{AtomicUsize, Ordering},
};

use parking_lot::Mutex;

use crate::{
    pages::{Pages, Shard},
    space::{
        AddressSpace, Asked, Batch, DetachError, Events, Fault, Frame, In, InstallError,
        InstallErrorKind, Layout, Left, Mapping, Out, Wait,
    },
};

/// How a [`SimSpace`] is made.
#[derive(Clone, Debug)]
pub struct SimOptions {
    /// Number of shards. Default: 1.
    pub shards: usize,
    /// What the injected faults follow from. Default: 0.
    pub seed: u64,
    /// How often [`AddressSpace::detach`] meets a page that is busy ([`DetachError::Busy`]), 0 to
    /// 1. Default: 0.
    pub busy_probability: f64,
    /// How often a fault is reported a second time, later, 0 to 1. Default: 0.
    pub duplicate_probability: f64,
    /// Whether pages leave by copying, too ([`Mapping::copies_out`]). Default: true.
    pub copies_out: bool,
    /// For a [`new_frame`](AddressSpace::new_frame) of more pages there is no room. Default: any
    /// number finds room.
    pub frame_pages_max: usize,
}

impl Default for SimOptions {
    fn default() -> Self {
        Self {
            shards: 1,
            seed: 0,
            busy_probability: 0.0,
            duplicate_probability: 0.0,
            copies_out: true,
            frame_pages_max: usize::MAX,
        }
    }
}

/// Why an access did not happen.
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
    /// No region is there, or it may only be read.
    #[error("SIGSEGV: no region is mapped there that allows this")]
    Sigsegv,
}

/// A simulated program's memory.
pub struct SimSpace {
    state: Mutex<State>,
    shards: usize,
    frames: Arc<Frames>,
    moves: AtomicUsize,
    scattered: AtomicUsize,
    copied_in: AtomicUsize,
}

/// What is known of all frames together.
#[derive(Debug, Default)]
struct Frames {
    /// Pages that they hold.
    pages: AtomicUsize,
    /// Where the next one lies: a number of its own for every page.
    next_place: AtomicUsize,
}

struct State {
    options: SimOptions,
    random: u64,
    next_address: usize,
    regions: BTreeMap<usize, SimRegion>,
    queues: Vec<VecDeque<Message>>,
    /// Per shard, what the program has unmapped, until it is told.
    news: Vec<Vec<Range<usize>>>,
    /// Per thread, the page on whose fault it sleeps.
    asleep: BTreeMap<usize, usize>,
    /// Addresses at which no page can be mapped.
    refused: Option<Range<usize>>,
}

struct SimRegion {
    layout: Layout,
    pages: BTreeMap<usize, Content>,
}

enum Content {
    Bytes(Box<[u8]>),
    Poison,
    /// The program has unmapped the page.
    Gone,
}

#[derive(Clone, Copy)]
struct Message {
    /// `None` for an injected duplicate, which no waking takes back.
    thread: Option<usize>,
    fault: Fault,
}

/// The bytes of a run of pages while they are not mapped.
#[derive(Debug)]
pub struct SimFrame {
    bytes: Vec<u8>,
    page_bytes: usize,
    /// The first page's number: frames lie behind one another if their numbers do.
    place: usize,
    frames: Arc<Frames>,
}

impl SimFrame {
    fn pages(&self) -> usize {
        self.bytes.len() / self.page_bytes
    }
}

impl AsRef<[u8]> for SimFrame {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl AsMut<[u8]> for SimFrame {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl Frame for SimFrame {
    fn split_off(&mut self, bytes: usize) -> Self {
        assert!(
            bytes > 0 && bytes < self.bytes.len() && bytes.is_multiple_of(self.page_bytes),
            "{} bytes in pages of {} can not be split after {bytes}",
            self.bytes.len(),
            self.page_bytes
        );
        let rest = self.bytes.split_off(bytes);
        Self {
            bytes: rest,
            page_bytes: self.page_bytes,
            place: self.place + self.pages(),
            frames: Arc::clone(&self.frames),
        }
    }

    fn join(&mut self, mut next: Self) -> Result<(), Self> {
        let behind = Arc::ptr_eq(&self.frames, &next.frames)
            && self.page_bytes == next.page_bytes
            && self.place + self.pages() == next.place;
        if !behind {
            return Err(next);
        }
        self.bytes.append(&mut next.bytes);
        Ok(())
    }
}

impl Drop for SimFrame {
    fn drop(&mut self) {
        self.frames.pages.fetch_sub(self.pages(), Ordering::Relaxed);
    }
}

impl SimSpace {
    /// An empty space.
    ///
    /// # Panics
    /// If `options.shards` is 0.
    pub fn new(options: SimOptions) -> Self {
        assert!(options.shards > 0, "a space has at least one shard");
        let shards = options.shards;
        let state = State {
            random: options.seed,
            // Any address that is not 0 and is aligned to the largest page.
            next_address: 1 << 40,
            regions: BTreeMap::new(),
            queues: vec![VecDeque::new(); shards],
            news: vec![Vec::new(); shards],
            asleep: BTreeMap::new(),
            refused: None,
            options,
        };
        Self {
            state: Mutex::new(state),
            shards,
            frames: Arc::default(),
            moves: AtomicUsize::new(0),
            scattered: AtomicUsize::new(0),
            copied_in: AtomicUsize::new(0),
        }
    }

    /// Reads 8 bytes at `address`, a multiple of 8, as program thread `thread`.
    ///
    /// # Errors
    /// See [`Faulted`].
    pub fn try_load(&self, thread: usize, address: usize) -> Result<u64, Faulted> {
        self.access(thread, address, false, |word| u64::from_ne_bytes(*word))
    }

    /// Writes 8 bytes at `address`, a multiple of 8, as program thread `thread`.
    ///
    /// # Errors
    /// See [`Faulted`].
    pub fn try_store(&self, thread: usize, address: usize, value: u64) -> Result<(), Faulted> {
        self.access(thread, address, true, |word| *word = value.to_ne_bytes())
    }

    /// Whether `thread` sleeps on a fault.
    pub fn is_asleep(&self, thread: usize) -> bool {
        self.state.lock().asleep.contains_key(&thread)
    }

    /// What the program does with `madvise(MADV_DONTNEED)`: the page's bytes are gone, and its next
    /// touch is a fault. Returns whether there was a page.
    pub fn drop_page(&self, address: usize) -> bool {
        let mut state = self.state.lock();
        let Some((region, page)) = state.region(address) else {
            return false;
        };
        let is_there = matches!(
            region.pages.get(&page),
            Some(Content::Bytes(_) | Content::Poison)
        );
        if is_there {
            region.pages.remove(&page);
        }
        is_there
    }

    /// What the program does with `munmap`: the page's bytes are gone, and so are its addresses,
    /// until the region's end.
    pub fn unmap_page(&self, address: usize) {
        let mut state = self.state.lock();
        let Some((region, page)) = state.region(address) else {
            return;
        };
        let page_bytes = region.layout.page_bytes;
        region.pages.insert(page, Content::Gone);
        state.wake(page..page + page_bytes);
        for news in &mut state.news {
            news.push(page..page + page_bytes);
        }
    }

    /// From now on mapping a page at one of these addresses fails, as for lack of the kernel's
    /// memory; `None`: no more.
    pub fn refuse_installs(&self, addresses: Option<Range<usize>>) {
        self.state.lock().refused = addresses;
    }

    /// Pages mapped in all regions.
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

    /// Pages held in frames: those in existence that are not mapped.
    pub fn frame_pages(&self) -> usize {
        self.frames.pages.load(Ordering::Relaxed)
    }

    /// How often pages were moved in or out so far; a run counts once.
    pub fn moves(&self) -> usize {
        self.moves.load(Ordering::Relaxed)
    }

    /// Pages that went out one by one, each at an address of its own, so far.
    pub fn scattered_pages(&self) -> usize {
        self.scattered.load(Ordering::Relaxed)
    }

    /// Runs that came in as copies so far.
    pub fn copied_in(&self) -> usize {
        self.copied_in.load(Ordering::Relaxed)
    }

    fn access<T>(
        &self,
        thread: usize,
        address: usize,
        write: bool,
        with: impl FnOnce(&mut [u8; 8]) -> T,
    ) -> Result<T, Faulted> {
        assert!(address.is_multiple_of(8), "simulated accesses are aligned");
        let mut state = self.state.lock();
        assert!(
            !state.asleep.contains_key(&thread),
            "thread {thread} touches {address:#x} in its sleep"
        );
        let (region, page) = state.region(address).ok_or(Faulted::Sigsegv)?;
        if write && region.layout.read_only {
            return Err(Faulted::Sigsegv);
        }
        match region.pages.get_mut(&page) {
            Some(Content::Bytes(bytes)) => {
                let word = bytes[address - page..][..8]
                    .as_mut_array()
                    .expect("8 bytes were cut out");
                Ok(with(word))
            }
            Some(Content::Poison) => Err(Faulted::Sigbus),
            Some(Content::Gone) => Err(Faulted::Sigsegv),
            None => {
                state.fault(thread, address, page, write);
                Err(Faulted::Asleep)
            }
        }
    }

    fn move_in(&self, pages: Pages, mut frame: SimFrame) -> Result<(), InstallError<SimFrame>> {
        assert_eq!(frame.bytes.len(), pages.bytes(), "as long as its pages");
        self.moves.fetch_add(1, Ordering::Relaxed);
        let mut state = self.state.lock();
        let mut rest = Some(pages);
        while let Some(here) = rest {
            let page = here.first(1);
            let put = state.put(page, &frame.bytes[..page.bytes()]);
            state.wake(page.range());
            if let Err(kind) = put {
                return Err(InstallError { frame, kind });
            }
            frame.bytes.drain(..page.bytes());
            frame.place += 1;
            self.frames.pages.fetch_sub(1, Ordering::Relaxed);
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
                None | Some(Content::Gone) => DetachError::Absent,
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
        Ok(self.frame(out, pages.page_bytes()))
    }

    fn copy_out(&self, pages: &[Pages], frames: &mut [SimFrame]) -> usize {
        let mut state = self.state.lock();
        let busy_probability = state.options.busy_probability;
        let mut taken = 0;
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
            frame.bytes.copy_from_slice(bytes);
            region.pages.remove(&page.address());
            taken += 1;
        }
        self.scattered.fetch_add(taken, Ordering::Relaxed);
        taken
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
            assert!(region.layout.read_only, "nobody knows what {run:x?} hold");
            let is_gone = |page| matches!(region.pages.get(&page), Some(Content::Gone));
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

    fn frame(&self, bytes: Vec<u8>, page_bytes: usize) -> SimFrame {
        let pages = bytes.len() / page_bytes;
        self.frames.pages.fetch_add(pages, Ordering::Relaxed);
        // A gap of one keeps frames that were made one after the other from being joined.
        let place = self
            .frames
            .next_place
            .fetch_add(pages + 1, Ordering::Relaxed);
        SimFrame {
            bytes,
            page_bytes,
            place,
            frames: Arc::clone(&self.frames),
        }
    }
}

impl State {
    /// The region that `address` lies in, and the first address of its page.
    fn region(&mut self, address: usize) -> Option<(&mut SimRegion, usize)> {
        let (start, region) = self.regions.range_mut(..=address).next_back()?;
        let offset = address - start;
        let page = address - offset % region.layout.page_bytes;
        (offset < region.layout.bytes).then_some((region, page))
    }

    /// The region in which `pages` lie.
    ///
    /// # Panics
    /// If they are no pages of it, or not in one stripe of their shard.
    fn region_of(&mut self, pages: Pages) -> Option<&mut SimRegion> {
        let shards = self.queues.len();
        let (address, page_bytes) = (pages.address(), pages.page_bytes());
        let (&start, region) = self.regions.range_mut(..=address).next_back()?;
        let Layout {
            bytes,
            page_bytes: its_page_bytes,
            stripe_bytes,
            ..
        } = region.layout;
        let offset = address - start;
        if offset >= bytes {
            return None;
        }
        assert!(
            page_bytes == its_page_bytes && offset.is_multiple_of(page_bytes),
            "{address:#x} is no page of {page_bytes} bytes"
        );
        let last = offset + pages.bytes() - page_bytes;
        assert!(
            last < bytes && offset / stripe_bytes == last / stripe_bytes,
            "{pages:x?} leave their stripe"
        );
        assert_eq!(
            pages.shard(),
            region.layout.shard_of(offset, shards),
            "{pages:x?} are another shard's"
        );
        Some(region)
    }

    fn fault(&mut self, thread: usize, address: usize, page: usize, write: bool) {
        let shards = self.queues.len();
        let (start, region) = self
            .regions
            .range(..=address)
            .next_back()
            .expect("the caller has found the region");
        let Shard(shard) = region.layout.shard_of(address - start, shards);
        let fault = Fault {
            address,
            write,
            thread: 0,
        };
        self.queues[shard].push_back(Message {
            thread: Some(thread),
            fault,
        });
        if self.chance(self.options.duplicate_probability) {
            self.queues[shard].push_back(Message {
                thread: None,
                fault,
            });
        }
        self.asleep.insert(thread, page);
    }

    /// Puts bytes at one page, if it is absent.
    fn put(&mut self, page: Pages, bytes: &[u8]) -> Result<(), InstallErrorKind> {
        let address = page.address();
        let is_refused = self
            .refused
            .as_ref()
            .is_some_and(|at| at.contains(&address));
        let region = self.region_of(page).ok_or(InstallErrorKind::Gone)?;
        match region.pages.get(&address) {
            Some(Content::Bytes(_)) => Err(InstallErrorKind::Exists),
            Some(Content::Gone) => Err(InstallErrorKind::Gone),
            Some(Content::Poison) | None if is_refused => Err(InstallErrorKind::Os(
                io::Error::from_raw_os_error(libc::ENOMEM),
            )),
            Some(Content::Poison) | None => {
                region.pages.insert(address, Content::Bytes(bytes.into()));
                Ok(())
            }
        }
    }

    /// Drops what was put at these addresses of one region a moment ago.
    fn take_back(&mut self, addresses: Range<usize>) {
        if let Some((region, _)) = self.region(addresses.start) {
            region.pages.retain(|page, _| !addresses.contains(page));
        }
    }

    fn wake(&mut self, addresses: Range<usize>) {
        let woken: Vec<_> = self
            .asleep
            .iter()
            .filter(|(_, page)| addresses.contains(page))
            .map(|(&thread, _)| thread)
            .collect();
        for thread in woken {
            self.asleep.remove(&thread);
            for queue in &mut self.queues {
                queue.retain(|message| message.thread != Some(thread));
            }
        }
    }

    /// SplitMix64 (Steele, Lea and Flood, 2014).
    fn chance(&mut self, probability: f64) -> bool {
        if probability <= 0.0 {
            return false;
        }
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        ((z >> 11) as f64) < probability * (1u64 << 53) as f64
    }
}

impl AddressSpace for SimSpace {
    type Frame = SimFrame;

    fn shards(&self) -> usize {
        self.shards
    }

    fn map(&self, layout: Layout) -> io::Result<Mapping> {
        let mut state = self.state.lock();
        let address = state.next_address.next_multiple_of(layout.page_bytes);
        // A page's distance between regions: an access beyond a region's end must not meet the next
        // one.
        state.next_address = address + layout.bytes + layout.page_bytes;
        state.regions.insert(
            address,
            SimRegion {
                layout,
                pages: BTreeMap::new(),
            },
        );
        let copies_in = !layout.read_only;
        let copies_out = copies_in && state.options.copies_out;
        Ok(Mapping {
            address,
            copies_in,
            copies_out,
        })
    }

    fn unmap(&self, address: usize, layout: Layout) {
        let mut state = self.state.lock();
        let region = state.regions.remove(&address);
        assert!(
            region.is_some_and(|region| region.layout == layout),
            "{address:#x} is not mapped with {layout:?}"
        );
        state.wake(address..address + layout.bytes);
    }

    fn new_frame(&self, page_bytes: usize, pages: usize) -> io::Result<SimFrame> {
        if pages > self.state.lock().options.frame_pages_max {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        Ok(self.frame(vec![0; page_bytes * pages], page_bytes))
    }

    fn drop_frames(&self, frames: Batch<SimFrame>) {
        drop(frames);
    }

    fn install(
        &self,
        pages: Pages,
        how: In<'_, SimFrame>,
    ) -> Result<Option<SimFrame>, InstallError<SimFrame>> {
        match how {
            In::Move(frame) => self.move_in(pages, frame).map(|()| None),
            In::Copy(frame, room) => {
                let page_bytes = pages.page_bytes();
                let mut state = self.state.lock();
                let mut rest = Some(pages);
                let bytes = frame.bytes.chunks_exact(page_bytes);
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

    fn detach(&self, out: Out<'_, SimFrame>) -> Result<Left<SimFrame>, DetachError> {
        match out {
            Out::Move(pages) => self.move_out(pages).map(Left::Moved),
            Out::Copy(pages, frames) => Ok(Left::Copied(self.copy_out(pages, frames))),
            Out::Drop(runs) => Ok(Left::Dropped(self.drop_runs(runs))),
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
        let gone = matches!(region.pages.get(&page), Some(Content::Gone));
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
                Some(Content::Bytes(_) | Content::Poison)
            )
        })
    }

    /// No descriptor tells of any, so all of them count as kept.
    fn events(&self, shard: Shard, _asked: Asked, out: &mut Events) -> io::Result<()> {
        let mut state = self.state.lock();
        let faults = state.queues[shard.0].drain(..);
        out.faults.extend(faults.map(|message| message.fault));
        out.unmapped.append(&mut state.news[shard.0]);
        Ok(())
    }

    fn wait(&self, shard: Shard) -> Wait<'_> {
        let state = self.state.lock();
        Wait {
            fd: None,
            kept: !state.queues[shard.0].is_empty() || !state.news[shard.0].is_empty(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: Layout = Layout {
        bytes: 4 * 4096,
        page_bytes: 4096,
        stripe_bytes: 4096,
        first_shard: 0,
        address: None,
        read_only: false,
    };

    /// Pages of 4 KiB.
    fn pages(shard: usize, address: usize, count: usize) -> Pages {
        Pages::new(Shard(shard), address, 4096, count)
    }

    fn install(
        space: &SimSpace,
        pages: Pages,
        frame: SimFrame,
    ) -> Result<(), InstallError<SimFrame>> {
        space.install(pages, In::Move(frame)).map(drop)
    }

    fn detach(space: &SimSpace, pages: Pages) -> Result<SimFrame, DetachError> {
        space.detach(Out::Move(pages)).map(Left::into_frame)
    }

    fn faults(space: &SimSpace, shard: usize) -> Vec<Fault> {
        let mut out = Events::default();
        space.events(Shard(shard), Asked::All, &mut out).unwrap();
        out.faults
    }

    #[test]
    fn absent_page_puts_its_thread_to_sleep_until_installed() {
        let space = SimSpace::new(SimOptions {
            shards: 2,
            ..SimOptions::default()
        });
        let base = space.map(LAYOUT).unwrap().address;
        assert_eq!(space.try_store(7, base + 4096 + 8, 5), Err(Faulted::Asleep));
        assert!(space.is_asleep(7));
        assert_eq!(faults(&space, 0), []);
        assert_eq!(
            faults(&space, 1),
            [Fault {
                address: base + 4096 + 8,
                write: true,
                thread: 0,
            }]
        );
        install(
            &space,
            pages(1, base + 4096, 1),
            space.new_frame(4096, 1).unwrap(),
        )
        .unwrap();
        assert!(!space.is_asleep(7));
        assert_eq!(space.try_store(7, base + 4096 + 8, 5), Ok(()));
        let frame = detach(&space, pages(1, base + 4096, 1)).unwrap();
        assert_eq!(frame.as_ref()[8], 5);
        assert_eq!((space.frame_pages(), space.resident_pages()), (1, 0));
        drop(frame);
        assert_eq!(space.frame_pages(), 0);
    }

    #[test]
    fn fault_ended_before_it_is_read_is_not_reported() {
        let space = SimSpace::new(SimOptions::default());
        let base = space.map(LAYOUT).unwrap().address;
        assert_eq!(space.try_load(1, base), Err(Faulted::Asleep));
        install(&space, pages(0, base, 1), space.new_frame(4096, 1).unwrap()).unwrap();
        assert_eq!(faults(&space, 0), []);
    }

    #[test]
    fn poison_is_sigbus_and_install_heals_it() {
        let space = SimSpace::new(SimOptions::default());
        let base = space.map(LAYOUT).unwrap().address;
        space.poison(pages(0, base, 1)).unwrap();
        assert_eq!(space.try_load(1, base), Err(Faulted::Sigbus));
        install(&space, pages(0, base, 1), space.new_frame(4096, 1).unwrap()).unwrap();
        assert_eq!(space.try_load(1, base), Ok(0));
    }

    #[test]
    fn injected_faults_happen() {
        let space = SimSpace::new(SimOptions {
            busy_probability: 1.0,
            duplicate_probability: 1.0,
            ..SimOptions::default()
        });
        let base = space.map(LAYOUT).unwrap().address;
        assert_eq!(space.try_load(1, base), Err(Faulted::Asleep));
        assert_eq!(faults(&space, 0).len(), 2);
        install(&space, pages(0, base, 1), space.new_frame(4096, 1).unwrap()).unwrap();
        assert!(matches!(
            detach(&space, pages(0, base, 1)),
            Err(DetachError::Busy)
        ));
        assert!(space.drop_page(base));
        assert!(matches!(
            detach(&space, pages(0, base, 1)),
            Err(DetachError::Absent)
        ));
    }

    #[test]
    fn second_install_and_unmap_wake_the_sleeper() {
        let space = SimSpace::new(SimOptions::default());
        let base = space.map(LAYOUT).unwrap().address;
        install(&space, pages(0, base, 1), space.new_frame(4096, 1).unwrap()).unwrap();
        let again = install(&space, pages(0, base, 1), space.new_frame(4096, 1).unwrap());
        assert!(matches!(
            again,
            Err(InstallError {
                kind: InstallErrorKind::Exists,
                ..
            })
        ));
        assert_eq!(space.try_load(1, base + 4096), Err(Faulted::Asleep));
        space.unmap(base, LAYOUT);
        assert_eq!(space.try_load(1, base + 4096), Err(Faulted::Sigsegv));
    }

    #[test]
    fn run_goes_in_and_out_as_far_as_its_pages_can() {
        let space = SimSpace::new(SimOptions::default());
        let layout = Layout {
            stripe_bytes: LAYOUT.bytes,
            ..LAYOUT
        };
        let base = space.map(layout).unwrap().address;
        install(
            &space,
            pages(0, base + 2 * 4096, 1),
            space.new_frame(4096, 1).unwrap(),
        )
        .unwrap();
        assert_eq!(space.try_load(1, base + 4096), Err(Faulted::Asleep));
        assert_eq!(space.try_load(2, base + 3 * 4096), Err(Faulted::Asleep));
        let mut frame = space.new_frame(4096, 5).unwrap();
        let behind = frame.split_off(4 * 4096);
        for (number, page) in (1..).zip(frame.as_mut().chunks_mut(4096)) {
            page.fill(number);
        }
        let mut error = install(&space, pages(0, base, 4), frame).unwrap_err();
        assert!(matches!(error.kind, InstallErrorKind::Exists));
        assert_eq!(error.frame.as_ref()[0], 3);
        error.frame.join(behind).unwrap();
        assert_eq!(
            (error.frame.as_ref().len(), space.frame_pages()),
            (3 * 4096, 3)
        );
        assert!(!space.is_asleep(1) && space.is_asleep(2));
        space.drop_page(base + 2 * 4096);
        let mut first = detach(&space, pages(0, base, 4)).unwrap();
        assert_eq!(first.as_ref().len(), 2 * 4096);
        let second = first.split_off(4096);
        let rest = first.join(error.frame).unwrap_err();
        first.join(second).unwrap();
        assert_eq!((first.as_ref()[4095], first.as_ref()[4096]), (1, 2));
        drop(rest);
        assert_eq!((space.frame_pages(), space.resident_pages()), (2, 0));
        drop(first);
        assert_eq!(space.frame_pages(), 0);
    }
}
