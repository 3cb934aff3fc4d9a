//! The program's real memory: regions, their userfaultfds, and the ways in which pages change
//! sides.
//!
//! The rule it keeps: one caller at a time acts on a page (the pager's protocol), program threads
//! do as they please, and every page is whole on one side whatever the kernel refuses.
//!
//! | module | what it does |
//! |---|---|
//! | `addresses`, `occupied`, `ranges` | reserve, register and give back a region's addresses |
//! | `messages`, `fence` | read faults and unmaps; keep unmaps and transfers apart |
//! | `moving`, `holes` | move pages in and out (kernel 6.8); its arithmetic |
//! | `copying` | copy them instead (kernel 5.7) |
//! | `scattered` | copy single pages out beside running threads |
//! | `dropping` | drop pages that the program may only read |
//! | `poison` | make absent pages raise a signal |
//! | `sharing` | end the sharing of pages with processes made by `fork` |

mod addresses;
mod copying;
mod dropping;
mod fence;
mod holes;
mod messages;
mod moving;
mod occupied;
mod poison;
mod ranges;
mod scattered;
mod shard;
mod sharing;

use std::{
    io,
    ops::Range,
    os::fd::AsFd,
    sync::{Arc, OnceLock},
};

use farpage_tables::{Keeper, is_private};

use self::{fence::Fence, poison::Poison, shard::KernelShard};
pub(crate) use self::{occupied::begin_child, sharing::begin as begin_sharing};
use crate::{
    frame::{self, KernelFrame, Pools},
    pagemap::Pagemap,
    pages::{Pages, Shard},
    space::{
        AddressSpace, Batch, Cede, DetachError, Detached, EventScope, EventSources, Events, Frame,
        Geometry, InstallError, InstallErrorKind, PageIn, PageOut, RegionMapping,
    },
    sys::{self, KERNEL_PAGE_BYTES},
    uffd::{Features, RegisterMode, Uffd, UserfaultfdError},
};

/// Way in which pages change sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Transfer {
    /// `UFFDIO_MOVE` (kernel 6.8): the physical page changes its address, nothing is copied.
    Move,
    /// Copying (kernel 5.7). Pages of 2 MiB are not huge then. Each transfer in progress takes more
    /// memory than its frame: out one page, in one run. A device's writes into a page that is being
    /// taken out are lost.
    Copy,
}

/// Options of a [`KernelSpace`].
#[derive(Clone, Debug)]
pub struct KernelSpaceOptions {
    /// Number of shards, each with a userfaultfd of its own. Default: 1.
    pub shards: usize,
    /// Bytes of frames that may be held at once, per page size: of frames that are not installed,
    /// not of pages in regions. This is addresses, not memory (twice as many, so that pages of a
    /// run find room next to each other). Default: 1 GiB.
    pub frame_bytes_max: usize,
    /// Way in which pages change sides. Default: `None`, the best that the kernel offers.
    pub transfer: Option<Transfer>,
    /// True to catch only faults of the program's own instructions. A system call that touches an
    /// absent page fails with `EFAULT`. Needs no permission. Default: false.
    pub user_mode_only: bool,
    /// True if a fault is not reported to its shard but raises SIGBUS in the thread that faults,
    /// which serves the fault itself (see [`sigbus`](crate::sigbus)). No other thread is woken,
    /// which is most of a fault's cost. The price: a system call that touches an absent page fails
    /// with `EFAULT`, and a thread that blocks SIGBUS is killed by its first fault. Default: false.
    pub in_thread: bool,
}

impl Default for KernelSpaceOptions {
    fn default() -> Self {
        Self {
            shards: 1,
            frame_bytes_max: 1 << 30,
            transfer: None,
            user_mode_only: false,
            in_thread: false,
        }
    }
}

/// The program's real memory.
#[derive(Debug)]
pub struct KernelSpace {
    /// Number that tells the space's regions from those of other spaces.
    number: u64,
    shards: Vec<KernelShard>,
    pools: Pools,
    pagemap: Arc<Pagemap>,
    transfer: Transfer,
    /// True if single pages can be copied out (`scattered`).
    scatters: bool,
    in_thread: bool,
    /// Second references to the shards' userfaultfds, where the program can close the first: absent
    /// pages would then read as zeros.
    keeper: OnceLock<Keeper>,
}

impl KernelSpace {
    /// Opens the userfaultfds. Takes no memory yet.
    ///
    /// # Errors
    /// See [`UserfaultfdError`].
    ///
    /// # Panics
    /// If `options.shards` is 0.
    pub fn new(options: KernelSpaceOptions) -> Result<Self, UserfaultfdError> {
        let supported = Uffd::supported(options.user_mode_only)?;
        Self::with_features(&options, supported)
    }

    /// Opens a space as on a kernel that has the features `supported`.
    fn with_features(
        options: &KernelSpaceOptions,
        supported: Features,
    ) -> Result<Self, UserfaultfdError> {
        assert!(options.shards > 0, "a space has at least one shard");
        let kernel_page_bytes = page_size();
        if kernel_page_bytes != KERNEL_PAGE_BYTES {
            return Err(UserfaultfdError::KernelPage {
                bytes: kernel_page_bytes,
            });
        }
        let transfer = match options.transfer {
            Some(transfer) => transfer,
            None if supported.contains(Features::MOVE) => Transfer::Move,
            None => Transfer::Copy,
        };
        // Elsewhere a system call that writes to a page that is being copied would fail.
        let scatters = (options.in_thread || !options.user_mode_only)
            && transfer == Transfer::Move
            && supported.contains(Features::WP)
            && sys::can_copy_and_drop_each();
        let moving = match transfer {
            Transfer::Move => Features::MOVE,
            Transfer::Copy => Features::MISSING,
        };
        let poison = supported & Features::POISON;
        let threads = supported & Features::THREAD_ID;
        let mut features = moving | poison | threads | Features::EVENT_UNMAP;
        if scatters {
            features = features | Features::WP;
        }
        if options.in_thread {
            features = features | Features::SIGBUS;
        }
        let number = occupied::next_space();
        let pagemap = Arc::new(Pagemap::open().map_err(UserfaultfdError::Pagemap)?);
        let shards = (0..options.shards)
            .map(|_| {
                let uffd = Uffd::open(features, options.user_mode_only)?;
                Ok(KernelShard {
                    fence: Fence::new(uffd, number),
                    poison: Poison::new(poison == Features::POISON),
                    pagemap: Arc::clone(&pagemap),
                })
            })
            .collect::<Result<Vec<_>, UserfaultfdError>>()?;
        let pools = Pools::new(options.frame_bytes_max, options.user_mode_only, moving)?;
        Ok(Self {
            number,
            shards,
            pools,
            pagemap,
            transfer,
            scatters,
            in_thread: options.in_thread,
            keeper: OnceLock::new(),
        })
    }

    /// Returns the way in which pages change sides here.
    pub fn transfer(&self) -> Transfer {
        self.transfer
    }

    fn shard(&self, shard: Shard) -> &KernelShard {
        &self.shards[shard.0]
    }

    /// Tells if pages of a region go out by copying, too, and how its addresses are registered.
    fn copies_out(&self, geometry: &Geometry) -> (bool, RegisterMode) {
        let is_safe = self.in_thread || geometry.no_direct_io;
        match self.scatters && is_single(geometry) && is_safe {
            true => (true, RegisterMode::MISSING | RegisterMode::WRITE_PROTECT),
            false => (false, RegisterMode::MISSING),
        }
    }

    /// Moves a frame in, or copies it where pages cannot move.
    fn install_frame(
        &self,
        pages: Pages,
        frame: KernelFrame,
    ) -> Result<(), InstallError<KernelFrame>> {
        let (page_bytes, shard) = (pages.page_bytes(), self.shard(pages.shard()));
        assert!(
            frame.pool().page_bytes() == page_bytes && frame.len() == pages.bytes(),
            "{frame:?} is not of {pages:x?}"
        );
        let refused = |frame: &KernelFrame| pages.behind(pages.bytes() - frame.len());
        let installed = match self.install_run(pages, frame) {
            // Or the program has divided the mapping (by `mprotect`, say), and the kernel refuses a
            // range that spans two.
            Err(InstallError {
                frame,
                kind: InstallErrorKind::Gone,
            }) if frame.len() > page_bytes => {
                let rest = refused(&frame).expect("an error hands pages back");
                self.install_page_by_page(rest, frame)
            }
            installed => installed,
        };
        let rest = installed
            .as_ref()
            .err()
            .and_then(|error| refused(&error.frame));
        let count = pages.count() - rest.map_or(0, |rest| rest.count());
        if count > 0 {
            shard.poison.lift(pages.first(count));
        }
        if let Err(InstallError {
            kind: InstallErrorKind::Exists,
            ..
        }) = &installed
            && let Some(rest) = rest
        {
            // The page that exists may have come after its fault was reported.
            shard.fence.wake(rest.first(1).range());
        }
        installed
    }

    fn install_run(
        &self,
        pages: Pages,
        frame: KernelFrame,
    ) -> Result<(), InstallError<KernelFrame>> {
        let shard = self.shard(pages.shard());
        match self.transfer {
            Transfer::Move => moving::install(shard, pages, frame),
            Transfer::Copy => copying::install(shard, pages, frame),
        }
    }

    fn install_page_by_page(
        &self,
        mut pages: Pages,
        mut frame: KernelFrame,
    ) -> Result<(), InstallError<KernelFrame>> {
        let page_bytes = pages.page_bytes();
        while let Some(behind) = pages.behind(page_bytes) {
            let rest = frame.split_off(page_bytes);
            if let Err(mut error) = self.install_run(pages.first(1), frame) {
                error.frame.join(rest).expect("they were one a moment ago");
                return Err(error);
            }
            (pages, frame) = (behind, rest);
        }
        self.install_run(pages, frame)
    }

    /// Moves a run out, or copies it where pages cannot move.
    fn detach_run(&self, pages: Pages) -> Result<KernelFrame, DetachError> {
        let page_bytes = pages.page_bytes();
        let pool = self.pools.of(page_bytes).map_err(DetachError::Os)?;
        let mut frame = pool.vacant(pages.count(), 1).map_err(DetachError::Os)?;
        let shard = self.shard(pages.shard());
        let fenced = shard.fence.lock();
        // A page that the program has unmapped in part is gone: the rest of it must not get into
        // the store.
        let there = fenced.gone.free_bytes(&pages.range()) / page_bytes * page_bytes;
        if there == 0 {
            return Err(DetachError::Absent);
        }
        if there < frame.len() {
            drop(frame.split_off(there));
        }
        let pages = pages.first(frame.len() / page_bytes);
        match self.transfer {
            Transfer::Move => moving::detach(shard, pages, frame, fenced),
            Transfer::Copy => copying::detach(shard, pages, frame, fenced),
        }
    }
}

impl AddressSpace for KernelSpace {
    type Frame = KernelFrame;

    fn shards(&self) -> usize {
        self.shards.len()
    }

    fn keep_open(&self) -> io::Result<()> {
        if !is_private() && self.keeper.get().is_none() {
            let shards = self.shards.iter();
            let kept: Vec<_> = shards.map(|shard| shard.fence.uffd().as_fd()).collect();
            // Another thread's may be there by now: either one keeps them.
            let _ = self.keeper.set(Keeper::new(&kept)?);
        }
        Ok(())
    }

    fn map(&self, geometry: Geometry) -> io::Result<RegionMapping> {
        let copies_in = self.transfer == Transfer::Move && is_single(&geometry);
        let (copies_out, mode) = self.copies_out(&geometry);
        let address = addresses::map(&self.shards, self.number, &geometry, mode)?;
        Ok(RegionMapping {
            address,
            copies_in,
            copies_out,
        })
    }

    fn begin_paging(&self, address: usize, geometry: Geometry) -> io::Result<()> {
        // Pages that leave need it, when the program may have used up all mappings.
        self.pools.of(geometry.page_bytes)?;
        let (_, mode) = self.copies_out(&geometry);
        addresses::begin_paging(&self.shards, address, &geometry, mode)
    }

    fn drop_memory(&self, addresses: Range<usize>) -> io::Result<()> {
        // SAFETY: a region's, whose owner gives the bytes up.
        Ok(unsafe { sys::madvise(addresses.start, addresses.len(), libc::MADV_DONTNEED) }?)
    }

    fn advise_huge(&self, addresses: Range<usize>, huge: bool) {
        let advice = match huge {
            true => libc::MADV_HUGEPAGE,
            false => libc::MADV_NOHUGEPAGE,
        };
        // SAFETY: a region's; the advice drops no pages. Memory is as good without it.
        let _ = unsafe { sys::madvise(addresses.start, addresses.len(), advice) };
    }

    fn present(&self, addresses: Range<usize>, out: &mut Vec<Range<usize>>) {
        self.pagemap
            .occupied(addresses, out)
            .expect("/proc/self/pagemap stays readable for its owner");
    }

    fn put_zeros(&self, shard: Shard, part: Range<usize>) -> io::Result<()> {
        copying::put_zeros(self.shard(shard), part)
    }

    fn unmap(&self, address: usize, geometry: Geometry) {
        addresses::unmap(&self.shards, address, &geometry);
    }

    fn cede(&self, addresses: Range<usize>, how: Cede<'_>) -> io::Result<()> {
        addresses::cede(&self.shards, &addresses, how)
    }

    fn regain(&self, address: usize, geometry: Geometry, ceded: Range<usize>) -> io::Result<()> {
        let (_, mode) = self.copies_out(&geometry);
        addresses::regain(&self.shards, address, &geometry, mode, &ceded)
    }

    fn kept(&self, addresses: Range<usize>) -> Vec<Range<usize>> {
        // Each shard knows all ceded addresses.
        self.shards[0].fence.lock().gone.outside(addresses)
    }

    fn is_gone(&self, address: usize) -> bool {
        let fenced = self.shards[0].fence.lock();
        fenced.gone.free_bytes(&(address..address + 1)) == 0
    }

    fn new_frame(&self, page_bytes: usize, pages: usize) -> io::Result<KernelFrame> {
        self.pools.of(page_bytes)?.new_frame(pages)
    }

    fn drop_frames(&self, frames: Batch<KernelFrame>) {
        frame::drop_together(frames);
    }

    fn install(
        &self,
        pages: Pages,
        how: PageIn<'_, KernelFrame>,
    ) -> Result<Option<KernelFrame>, InstallError<KernelFrame>> {
        match how {
            PageIn::Move(frame) => self.install_frame(pages, frame).map(|()| None),
            PageIn::Copy(frame, room) => {
                let shard = self.shard(pages.shard());
                if let Err(why) = copying::install_copy(shard, pages, &frame) {
                    let kind = why.into();
                    return Err(InstallError { frame, kind });
                }
                room.use_up();
                shard.poison.lift(pages);
                Ok(Some(frame))
            }
        }
    }

    fn detach(&self, out: PageOut<'_, KernelFrame>) -> Result<Detached<KernelFrame>, DetachError> {
        match out {
            PageOut::Move(pages) => self.detach_run(pages).map(Detached::Moved),
            PageOut::Copy(pages, frames, own) => {
                let Some(first) = pages.first() else {
                    return Ok(Detached::Copied(0));
                };
                let shard = self.shard(first.shard());
                Ok(Detached::Copied(scattered::detach(
                    shard, pages, frames, own,
                )))
            }
            PageOut::Drop(runs) => {
                let Some(first) = runs.first() else {
                    return Ok(Detached::Dropped(0));
                };
                Ok(Detached::Dropped(dropping::detach(
                    self.shard(first.shard()),
                    runs,
                )))
            }
        }
    }

    fn unprotect(&self, pages: Pages) {
        scattered::unprotect(self.shard(pages.shard()), pages.range());
    }

    fn wake(&self, pages: Pages) {
        self.shard(pages.shard()).fence.wake(pages.range());
    }

    fn poison(&self, pages: Pages) -> io::Result<()> {
        let shard = self.shard(pages.shard());
        shard.poison.put(&shard.fence, pages.range())
    }

    fn is_present(&self, address: usize) -> bool {
        self.pagemap
            .any_occupied(address, 1)
            .expect("/proc/self/pagemap stays readable for its owner")
    }

    fn events(&self, shard: Shard, asked: EventScope, out: &mut Events) -> io::Result<()> {
        self.shard(shard).fence.events(asked, out)
    }

    fn wait(&self, shard: Shard) -> EventSources<'_> {
        self.shard(shard).fence.wait()
    }
}

/// True if the pages of a region are single pages of the kernel, and change.
fn is_single(geometry: &Geometry) -> bool {
    geometry.page_bytes == KERNEL_PAGE_BYTES && !geometry.read_only
}

fn page_size() -> usize {
    nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE)
        .ok()
        .flatten()
        .and_then(|bytes| usize::try_from(bytes).ok())
        .expect("every Linux tells its page size")
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 65536;
    const GEOMETRY: Geometry = Geometry {
        bytes: 2 * PAGE,
        page_bytes: PAGE,
        stripe_bytes: PAGE,
        first_shard: 0,
        address: None,
        read_only: false,
        no_direct_io: false,
        ordinary: false,
    };

    #[test]
    fn kernel_without_move_and_poison_is_served_by_copying_and_fencing() {
        let space =
            KernelSpace::with_features(&KernelSpaceOptions::default(), Features::WP).unwrap();
        assert_eq!(space.transfer(), Transfer::Copy);
        let base = space.map(GEOMETRY).unwrap().address;
        let pages = Pages::new(Shard(0), base, PAGE, 1);
        let protection = || {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            let line = maps
                .lines()
                .find(|line| line.starts_with(&format!("{base:x}-")))
                .unwrap();
            line.split(' ').nth(1).unwrap().to_owned()
        };
        space.poison(pages).unwrap();
        assert_eq!(protection(), "---p");
        let mut frame = space.new_frame(PAGE, 1).unwrap();
        frame.as_mut()[PAGE - 1] = 3;
        space.install(pages, PageIn::Move(frame)).unwrap();
        assert_eq!(protection(), "rw-p");
        assert_eq!(
            space
                .detach(PageOut::Move(pages))
                .unwrap()
                .into_frame()
                .as_ref()[PAGE - 1],
            3
        );
        space.poison(pages).unwrap();
        space.unmap(base, GEOMETRY);
        assert!(space.shards[0].poison.is_empty());
    }

    /// Calls `mprotect` on a page of which a part is taken back just then.
    #[test]
    fn part_that_is_taken_back_comes_whole_where_the_program_divides_it() {
        let space = KernelSpace::new(KernelSpaceOptions::default()).unwrap();
        let base = space.map(GEOMETRY).unwrap().address;
        let pages = Pages::new(Shard(0), base, PAGE, 1);
        let mut frame = space.new_frame(PAGE, 1).unwrap();
        frame.as_mut().fill(3);
        let pool = Arc::clone(frame.pool());
        space.install(pages, PageIn::Move(frame)).unwrap();
        let read = libc::PROT_READ;
        // SAFETY: a part of the test's own region.
        unsafe { crate::sys::protect(base + 3 * 4096, 2 * 4096, read) }.unwrap();
        let mut frame = pool.vacant(1, 1).unwrap();
        copying::carry_back(base, PAGE, frame.address(), &pool).unwrap();
        frame.fill_holes_with_zeros(0..PAGE).unwrap();
        frame.set_occupied();
        assert!(frame.as_ref().iter().all(|&byte| byte == 3));
        drop(frame);
        space.unmap(base, GEOMETRY);
    }

    #[test]
    fn geometries_that_are_no_whole_pages_are_refused() {
        let space = KernelSpace::new(KernelSpaceOptions::default()).unwrap();
        for wrong in [
            Geometry {
                bytes: PAGE + 1,
                ..GEOMETRY
            },
            Geometry {
                bytes: 0,
                ..GEOMETRY
            },
            Geometry {
                stripe_bytes: 4096,
                ..GEOMETRY
            },
            Geometry {
                page_bytes: 2048,
                ..GEOMETRY
            },
            Geometry {
                page_bytes: 4 << 20,
                bytes: 4 << 20,
                stripe_bytes: 4 << 20,
                ..GEOMETRY
            },
        ] {
            assert_eq!(
                space.map(wrong).unwrap_err().kind(),
                io::ErrorKind::InvalidInput,
                "{wrong:?}"
            );
        }
    }
}
