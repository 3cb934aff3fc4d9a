//! A contiguous address range under paging: [`Region`].
//!
//! The rule: the owner of a page holds a [`RegionGuard`], and publishes the page's stable state
//! before it drops the guard. A closing region hands out no new guards, and is given up when the
//! last is dropped.

use std::{
    collections::BTreeMap,
    fmt,
    ops::{Deref, Range, RangeInclusive},
    sync::{
        Arc, RwLock, RwLockReadGuard,
        atomic::{AtomicBool, AtomicI8, AtomicU8, AtomicU64, AtomicUsize, Ordering},
    },
};

use farpage_signals::{Condvar, Mutex};
use farpage_store::{PageIndex, PageRange, PageStore};
use farpage_vm::{Geometry, RegionMapping, Shard};

use crate::{
    Advice, PageError,
    beginning::Beginning,
    protocol::{self, OnLeft, PageWord, PageWords},
};

/// Pages per chunk, the unit in which the clock hand passes over a region: eight cache lines of
/// words.
pub(crate) const CHUNK_PAGES: usize = 64;
/// Number of runs of a region that may be overdue at once. With more, none of its pages is taken
/// out until some of them are gone.
const OVERDUE_RUNS_MAX: usize = 8;

/// Id of a region of a pager. Internal: messages say the region's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RegionId(pub(crate) u64);

/// A mapped region, shared by the program and the workers.
pub(crate) struct Region {
    pub(crate) id: RegionId,
    pub(crate) address: usize,
    /// True if single pages may come as copies, and leave as copies.
    pub(crate) copies_in: bool,
    pub(crate) copies_out: bool,
    pub(crate) geometry: Geometry,
    pub(crate) words: PageWords,
    pub(crate) store: Arc<PageStore>,
    /// Upper bound of the pages of a read-ahead window: over links that answer at once, and over
    /// slow ones. 0 and 0 switch read-ahead off.
    pub(crate) read_ahead: RangeInclusive<usize>,
    /// Upper bound of the pages that move together.
    pub(crate) run_pages: usize,
    /// One bit per chunk, set if a page of the chunk was ever filled. Keeps passes over sparse
    /// regions cheap.
    touched: Vec<AtomicU64>,
    /// One bit per chunk, set if the kernel may hold references to pages of it
    /// ([`Advice::ZeroCopy`]). User space cannot see when these end, so bits are never cleared.
    zero_copy: Vec<AtomicU64>,
    resident: AtomicUsize,
    /// Number of mapped pages of each chunk, so that the clock hand passes over empty chunks: where
    /// few pages of a large region are used, most chunks that were ever touched are empty. Pages
    /// that come and go may not be counted yet, so 0 is no proof.
    resident_in: Vec<AtomicI8>,
    /// Number of pages that have been on their way out for too long.
    overdue: AtomicUsize,
    /// Number of pages that the program has pinned.
    pinned: AtomicUsize,
    /// Number of times that the kernel has stopped to report faults at some addresses.
    released: AtomicUsize,
    advice: AtomicU8,
    /// Beginning as ordinary memory.
    pub(crate) beginning: Beginning,
    closing: AtomicBool,
    /// Number of guards.
    guards: AtomicUsize,
    quiet: (Mutex<()>, Condvar),
    /// The first error of background work since it was last taken.
    error: Mutex<Option<PageError>>,
    /// Reason for each lost page.
    lost: Mutex<BTreeMap<PageIndex, PageError>>,
}

impl Region {
    pub(crate) fn new(
        id: RegionId,
        mapping: RegionMapping,
        geometry: Geometry,
        store: Arc<PageStore>,
        read_ahead: RangeInclusive<usize>,
        run_pages: usize,
    ) -> Region {
        let pages = geometry.bytes / geometry.page_bytes;
        Region {
            id,
            address: mapping.address,
            copies_in: mapping.copies_in,
            copies_out: mapping.copies_out,
            geometry,
            words: PageWords::new(pages),
            store,
            read_ahead,
            run_pages,
            touched: bytemuck::zeroed_vec(pages.div_ceil(CHUNK_PAGES).div_ceil(64)),
            zero_copy: bytemuck::zeroed_vec(pages.div_ceil(CHUNK_PAGES).div_ceil(64)),
            resident: AtomicUsize::new(0),
            resident_in: bytemuck::zeroed_vec(pages.div_ceil(CHUNK_PAGES)),
            overdue: AtomicUsize::new(0),
            pinned: AtomicUsize::new(0),
            released: AtomicUsize::new(0),
            advice: AtomicU8::new(Advice::Normal as u8),
            beginning: Beginning::new(geometry.ordinary),
            closing: AtomicBool::new(false),
            guards: AtomicUsize::new(0),
            quiet: Default::default(),
            error: Mutex::new(None),
            lost: Mutex::default(),
        }
    }

    /// Returns the region's name in messages.
    pub(crate) fn label(&self) -> Arc<str> {
        self.store.label().clone()
    }

    pub(crate) fn pages(&self) -> usize {
        self.words.len()
    }

    pub(crate) fn page_bytes(&self) -> usize {
        self.geometry.page_bytes
    }

    /// True if the program may only read, so that pages hold what they were filled with.
    pub(crate) fn is_read_only(&self) -> bool {
        self.geometry.read_only
    }

    pub(crate) fn address_of(&self, page: PageIndex) -> usize {
        self.address + page.offset(self.geometry.page_bytes)
    }

    /// Returns the page that holds `address`, which must lie in the region.
    pub(crate) fn page_at(&self, address: usize) -> PageIndex {
        PageIndex((address - self.address) >> self.geometry.page_bytes.trailing_zeros())
    }

    pub(crate) fn contains(&self, address: usize) -> bool {
        address.wrapping_sub(self.address) < self.geometry.bytes
    }

    pub(crate) fn shard_of(&self, page: PageIndex, shards: usize) -> Shard {
        self.geometry
            .shard_of(page.offset(self.geometry.page_bytes), shards)
    }

    /// Returns the number of the stripe that holds `page`.
    pub(crate) fn stripe_of(&self, page: PageIndex) -> usize {
        page.offset(self.geometry.page_bytes) / self.geometry.stripe_bytes
    }

    /// Returns the part of `pages` in the same stripe as its first one, or as its last one when
    /// going `down`.
    pub(crate) fn in_one_stripe(&self, pages: PageRange, down: bool) -> PageRange {
        let stripe_pages = self.geometry.stripe_bytes / self.geometry.page_bytes;
        if down {
            let start = pages.end.0.saturating_sub(1) / stripe_pages * stripe_pages;
            pages.start.max(PageIndex(start)).until(pages.end)
        } else {
            let end = (pages.start.0 / stripe_pages + 1) * stripe_pages;
            pages.start.until(pages.end.min(PageIndex(end)))
        }
    }

    /// True if a thread waits for one of `pages`, which are owned.
    pub(crate) fn is_wanted(&self, pages: PageRange) -> bool {
        pages.iter().any(|page| self.words.load(page).wanted())
    }

    /// Owns the leading ones of `pages` by `own`, up to the first that refuses. Returns them.
    pub(crate) fn own(
        &self,
        pages: PageRange,
        own: impl Fn(PageWord) -> Option<PageWord> + Copy,
    ) -> PageRange {
        let mine = |page: &PageIndex| self.words.try_apply(*page, own).is_some();
        pages.start.and_on(pages.iter().take_while(mine).count())
    }

    /// Publishes an owned page whose bytes are safe as remote, unless it is wanted or pinned.
    /// Returns whether the page has left.
    pub(crate) fn leave(&self, page: PageIndex, stamp: u32) -> bool {
        let has_left = self.words.apply(page, |w| protocol::left(w, stamp)) == OnLeft::Gone;
        if has_left {
            self.store.count_left(page);
        }
        has_left
    }

    pub(crate) fn advice(&self) -> Advice {
        Advice::from_u8(self.advice.load(Ordering::Relaxed))
    }

    pub(crate) fn set_advice(&self, advice: Advice) {
        self.advice.store(advice as u8, Ordering::Relaxed);
    }

    /// Returns the number of pages that are mapped now.
    pub(crate) fn resident(&self) -> usize {
        self.resident.load(Ordering::Relaxed)
    }

    pub(crate) fn count_in(&self, pages: PageRange) {
        self.resident.fetch_add(pages.len(), Ordering::Relaxed);
        for (chunk, count) in by_chunk(pages) {
            self.resident_in[chunk].fetch_add(count, Ordering::Relaxed);
        }
    }

    /// Marks the chunks of `pages` as touched. Must be called before the pages are mapped, so that
    /// a search for changed pages finds them.
    pub(crate) fn touch(&self, pages: PageRange) {
        for chunk in chunks_of(pages) {
            let (word, bit) = Self::chunk_bit(chunk);
            if self.touched[word].load(Ordering::Relaxed) & bit == 0 {
                self.touched[word].fetch_or(bit, Ordering::Relaxed);
            }
        }
    }

    /// Notes that the kernel may reference these pages from now on.
    pub(crate) fn mark_zero_copy(&self, pages: PageRange) {
        for chunk in chunks_of(pages) {
            let (word, bit) = Self::chunk_bit(chunk);
            self.zero_copy[word].fetch_or(bit, Ordering::SeqCst);
        }
    }

    /// True if the kernel may reference some of `pages`.
    ///
    /// Exact for pages that were detached before this call: a call that the program makes later
    /// finds them absent. The page table's lock, which both calls take, orders the bit.
    pub(crate) fn is_zero_copy(&self, pages: PageRange) -> bool {
        let mut chunks = chunks_of(pages);
        chunks.any(|chunk| {
            let (word, bit) = Self::chunk_bit(chunk);
            self.zero_copy[word].load(Ordering::SeqCst) & bit != 0
        })
    }

    pub(crate) fn count_out(&self, pages: PageRange) {
        self.resident.fetch_sub(pages.len(), Ordering::Relaxed);
        for (chunk, count) in by_chunk(pages) {
            self.resident_in[chunk].fetch_sub(count, Ordering::Relaxed);
        }
    }

    /// True if no page is counted as mapped.
    #[cfg(test)]
    pub(crate) fn counts_nothing(&self) -> bool {
        let mut chunks = self.resident_in.iter();
        self.resident() == 0 && chunks.all(|count| count.load(Ordering::Relaxed) == 0)
    }

    /// Returns the first chunk at or behind `chunk` of which a page is counted as mapped.
    pub(crate) fn next_resident(&self, chunk: usize) -> Option<usize> {
        let mut at = self.next_touched(chunk)?;
        while self.resident_in[at].load(Ordering::Relaxed) <= 0 {
            at = self.next_touched(at + 1)?;
        }
        Some(at)
    }

    /// Returns the number of pages that the program has pinned.
    pub(crate) fn pinned(&self) -> usize {
        self.pinned.load(Ordering::Relaxed)
    }

    pub(crate) fn count_pinned(&self) {
        self.pinned.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_unpinned(&self) {
        self.pinned.fetch_sub(1, Ordering::Relaxed);
    }

    /// Returns how often the kernel has stopped to report faults at some addresses.
    pub(crate) fn times_released(&self) -> usize {
        self.released.load(Ordering::Relaxed)
    }

    /// Counts that the kernel has stopped to report faults at some addresses: pages are ceded, or
    /// ordinary memory stays so. Must be called before their words say so.
    pub(crate) fn count_released(&self) {
        self.released.fetch_add(1, Ordering::Relaxed);
    }

    /// True if the region's store is so slow that no more of its pages shall be taken out.
    pub(crate) fn is_stalled(&self) -> bool {
        self.overdue.load(Ordering::Relaxed) >= OVERDUE_RUNS_MAX * self.run_pages
    }

    /// Returns the number of pages that have been on their way out for too long.
    #[cfg(test)]
    pub(crate) fn overdue(&self) -> usize {
        self.overdue.load(Ordering::Relaxed)
    }

    pub(crate) fn count_overdue(&self, pages: usize) {
        self.overdue.fetch_add(pages, Ordering::Relaxed);
    }

    pub(crate) fn count_overdue_out(&self, pages: usize) {
        self.overdue.fetch_sub(pages, Ordering::Relaxed);
    }

    /// Returns the first chunk at or behind `chunk` of which a page was ever filled.
    pub(crate) fn next_touched(&self, chunk: usize) -> Option<usize> {
        let chunks = self.pages().div_ceil(CHUNK_PAGES);
        let mut at = chunk;
        while at < chunks {
            let (word, _) = Self::chunk_bit(at);
            let rest = self.touched[word].load(Ordering::Relaxed) >> (at % 64);
            if rest != 0 {
                return Some(at + rest.trailing_zeros() as usize);
            }
            at = (word + 1) * 64;
        }
        None
    }

    /// Returns the pages of a chunk.
    pub(crate) fn chunk(&self, chunk: usize) -> PageRange {
        let pages = PageIndex(chunk * CHUNK_PAGES).and_on(CHUNK_PAGES);
        pages.within(PageRange::first(self.pages()))
    }

    fn chunk_bit(chunk: usize) -> (usize, u64) {
        (chunk / 64, 1 << (chunk % 64))
    }

    /// Enters the region, before one of its pages is owned. `None`: the region is closing, leave it
    /// alone.
    pub(crate) fn enter(self: &Arc<Self>) -> Option<RegionGuard> {
        // Sequentially consistent with `close`: either `close` sees the guard, or the region is
        // seen closing here.
        self.guards.fetch_add(1, Ordering::SeqCst);
        let guard = RegionGuard(self.clone());
        (!self.closing.load(Ordering::SeqCst)).then_some(guard)
    }

    /// Enters also while the region is closing, as long as there is another guard.
    pub(crate) fn enter_beside(self: &Arc<Self>) -> Option<RegionGuard> {
        let one_more = |guards: usize| (guards > 0).then(|| guards + 1);
        let entered = (self.guards).fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_more);
        entered.is_ok().then(|| RegionGuard(self.clone()))
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }

    /// Closes the region: no thread enters any more. `false`: the region was closed already.
    pub(crate) fn close(&self) -> bool {
        !self.closing.swap(true, Ordering::SeqCst)
    }

    /// Waits until all guards are dropped.
    pub(crate) fn wait_until_quiet(&self) {
        let mut lock = self.quiet.0.lock();
        while self.guards.load(Ordering::SeqCst) != 0 {
            lock = self.quiet.1.wait(lock);
        }
    }

    /// Keeps the first error of background work until it is taken.
    pub(crate) fn record(&self, error: PageError) {
        self.error.lock().get_or_insert(error);
    }

    pub(crate) fn take_error(&self) -> Option<PageError> {
        self.error.lock().take()
    }

    /// Keeps the reason why a page's newest bytes are gone. Must be called before its word says so:
    /// a thread that sees the page lost looks for the reason.
    pub(crate) fn lose(&self, page: PageIndex, error: PageError) {
        self.lost.lock().insert(page, error);
    }

    /// Returns the lost pages among `pages`, and why each is lost.
    pub(crate) fn lost(&self, pages: PageRange) -> Vec<(PageIndex, PageError)> {
        let lost = self.lost.lock();
        let among = lost.range(pages.start..pages.end);
        among.map(|(&page, error)| (page, error.clone())).collect()
    }

    /// Removes the reason of a lost page that has new bytes.
    pub(crate) fn found(&self, page: PageIndex) {
        self.lost.lock().remove(&page);
    }
}

/// Guard that keeps a closing region from being given up. Travels with the pages that its holder
/// owns; dropping it leaves the region.
#[derive(Debug)]
pub(crate) struct RegionGuard(Arc<Region>);

impl RegionGuard {
    /// Enters for one more owner of pages, also while the region is closing.
    pub(crate) fn again(&self) -> RegionGuard {
        self.guards.fetch_add(1, Ordering::Relaxed);
        RegionGuard(self.0.clone())
    }
}

impl Deref for RegionGuard {
    type Target = Arc<Region>;

    fn deref(&self) -> &Arc<Region> {
        &self.0
    }
}

impl Drop for RegionGuard {
    fn drop(&mut self) {
        if self.guards.fetch_sub(1, Ordering::SeqCst) == 1 && self.closing.load(Ordering::SeqCst) {
            let _lock = self.quiet.0.lock();
            self.quiet.1.notify_all();
        }
    }
}

/// Returns the number of the chunk that a page lies in.
pub(crate) fn chunk_of(page: PageIndex) -> usize {
    page.0 / CHUNK_PAGES
}

/// Returns the chunks that pages lie in.
pub(crate) fn chunks_of(pages: PageRange) -> Range<usize> {
    chunk_of(pages.start)..pages.end.0.div_ceil(CHUNK_PAGES)
}

/// Returns the chunks that a run of pages lies in, and how many of its pages lie in each.
fn by_chunk(pages: PageRange) -> impl Iterator<Item = (usize, i8)> {
    chunks_of(pages).map(move |chunk| {
        let of_chunk = PageIndex(chunk * CHUNK_PAGES).and_on(CHUNK_PAGES);
        (chunk, pages.within(of_chunk).len() as i8)
    })
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region")
            .field("label", self.store.label())
            .field("geometry", &self.geometry)
            .finish_non_exhaustive()
    }
}

/// All mapped regions by their first address. A signal handler may read the table. So its lock is
/// the standard library's, which never allocates, and a thread that holds it touches no page of the
/// program's.
#[derive(Debug, Default)]
pub(crate) struct RegionTable(RwLock<BTreeMap<usize, Arc<Region>>>);

impl RegionTable {
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, BTreeMap<usize, Arc<Region>>> {
        self.0.read().expect("nothing panics under this lock")
    }

    pub(crate) fn insert(&self, region: Arc<Region>) {
        let mut regions = self.0.write().expect("nothing panics under this lock");
        regions.insert(region.address, region);
    }

    pub(crate) fn remove(&self, address: usize) {
        let mut regions = self.0.write().expect("nothing panics under this lock");
        regions.remove(&address);
    }

    /// Returns the region at an address, if one is mapped there.
    pub(crate) fn at(&self, address: usize) -> Option<Arc<Region>> {
        let regions = self.read();
        let (_, region) = regions.range(..=address).next_back()?;
        region.contains(address).then(|| region.clone())
    }

    /// Returns the regions that have some of these addresses.
    pub(crate) fn overlapping(&self, addresses: &Range<usize>) -> Vec<Arc<Region>> {
        let regions = self.read();
        let below = regions.range(..addresses.end).rev();
        below
            .take_while(|(_, region)| region.address + region.geometry.bytes > addresses.start)
            .map(|(_, region)| region.clone())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_counted_in_each_chunk_that_it_lies_in() {
        let counts: Vec<_> = by_chunk(PageIndex(60).until(PageIndex(200))).collect();
        assert_eq!(counts, [(0, 4), (1, 64), (2, 64), (3, 8)]);
        assert_eq!(
            by_chunk(PageIndex(64).and_on(64)).collect::<Vec<_>>(),
            [(1, 64)]
        );
        assert_eq!(
            by_chunk(PageIndex(70).alone()).collect::<Vec<_>>(),
            [(1, 1)]
        );
    }
}
