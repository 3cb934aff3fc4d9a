//! Shared parts of the tests of in-thread faults: a counting allocator and the smallest pager that
//! serves in-thread.

use std::{
    alloc::{GlobalAlloc, Layout as AllocLayout, System},
    cell::Cell,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
};

use farpage_vm::{
    AddressSpace, Geometry, KernelFrame, KernelSpace, KernelSpaceOptions, PageFault, PageIn,
    PageOut, Pages, ReservedRoom,
    sigbus::{FaultHandler, FaultRegistration, Served},
};

pub(crate) use crate::moves::{Moves, events, geometry, pages};

pub(crate) const PAGE: usize = 4096;

/// Allocator that counts what each thread allocates and frees.
pub(crate) struct Counting;

thread_local! {
    pub(crate) static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

pub(crate) fn count() {
    ALLOCATIONS.set(ALLOCATIONS.get() + 1);
}

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: AllocLayout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: AllocLayout) {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
pub(crate) static ALLOCATOR: Counting = Counting;

pub(crate) fn space() -> Arc<KernelSpace> {
    let options = KernelSpaceOptions {
        in_thread: true,
        frame_bytes_max: 16 << 20,
        ..KernelSpaceOptions::default()
    };
    Arc::new(KernelSpace::new(options).unwrap())
}

pub(crate) fn counter(address: usize) -> &'static AtomicU64 {
    // SAFETY: an aligned address in a region that its test keeps mapped.
    unsafe { AtomicU64::from_ptr(address as *mut u64) }
}

/// A region with the smallest pager that serves in-thread: pages lie in a list while they are not
/// mapped.
pub(crate) struct Toy {
    pub(crate) space: Arc<KernelSpace>,
    pub(crate) base: usize,
    pub(crate) geometry: Geometry,
    pub(crate) away: Vec<Mutex<Option<KernelFrame>>>,
    /// A page that can not be had.
    pub(crate) refused: Option<usize>,
    /// True if pages are copied in.
    pub(crate) copies: bool,
    pub(crate) faults: AtomicUsize,
    pub(crate) writes: AtomicUsize,
    /// Number of the handler's allocations.
    pub(crate) allocations: AtomicUsize,
}

impl Toy {
    pub(crate) fn new(pages: usize, refused: Option<usize>) -> Arc<Self> {
        let space = space();
        let geometry = geometry(pages * PAGE, PAGE);
        let mapping = space.map(geometry).unwrap();
        let (base, copies) = (mapping.address, mapping.copies_out);
        let away = (0..pages)
            .map(|_| Mutex::new(Some(space.new_frame(PAGE, 1).unwrap())))
            .collect();
        Arc::new(Self {
            space,
            base,
            geometry,
            away,
            refused,
            copies,
            faults: AtomicUsize::new(0),
            writes: AtomicUsize::new(0),
            allocations: AtomicUsize::new(0),
        })
    }

    pub(crate) fn register(self: &Arc<Self>) -> FaultRegistration {
        let handler = Arc::clone(self);
        FaultRegistration::new(self.base..self.base + self.geometry.bytes, handler).unwrap()
    }

    pub(crate) fn address(&self, page: usize) -> usize {
        self.base + page * PAGE
    }

    /// Takes pages out by copying. Returns their number.
    pub(crate) fn evict_scattered(&self, numbers: impl Iterator<Item = usize>) -> usize {
        let mut away: Vec<_> = numbers
            .map(|page| (page, self.away[page].lock().unwrap()))
            .filter(|(_, away)| away.is_none())
            .collect();
        let page = |page: &usize| pages(0, self.address(*page), PAGE, 1);
        let out: Vec<_> = away.iter().map(|(number, _)| page(number)).collect();
        let frame = |_: &Pages| self.space.new_frame(PAGE, 1).unwrap();
        let mut frames: Vec<_> = out.iter().map(frame).collect();
        let left = self
            .space
            .detach(PageOut::Copy(&out, &mut frames, &mut |_| true))
            .unwrap();
        let taken = left.count();
        for ((_, away), frame) in away.iter_mut().zip(frames).take(taken) {
            **away = Some(frame);
        }
        taken
    }

    /// Takes a page out. Returns the number of pages that went: 0 if it was out already.
    pub(crate) fn evict(&self, page: usize) -> usize {
        let mut away = self.away[page].lock().unwrap();
        if away.is_some() {
            return 0;
        }
        let frame = self
            .space
            .move_out(pages(0, self.address(page), PAGE, 1))
            .unwrap();
        *away = Some(frame);
        1
    }
}

// SAFETY: std's mutex neither allocates nor is held while a page is touched.
unsafe impl FaultHandler for Toy {
    fn fault(&self, fault: PageFault) -> Served {
        let before = ALLOCATIONS.get();
        self.faults.fetch_add(1, Ordering::Relaxed);
        self.writes
            .fetch_add(usize::from(fault.write), Ordering::Relaxed);
        let page = (fault.address - self.base) / PAGE;
        let served = if self.refused == Some(page) {
            Served::NotMine
        } else {
            let mut away = self.away[page].lock().unwrap();
            if let Some(frame) = away.take() {
                let address = self.address(page);
                let page = pages(0, address, PAGE, 1);
                let mut room = Counted(0);
                let rest = if self.copies {
                    match self.space.install(page, PageIn::Copy(frame, &mut room)) {
                        Ok(_copied) => {
                            assert_eq!(room.0, 1, "a copy takes a page's room");
                            None
                        }
                        Err(refused) => Some(refused.frame),
                    }
                } else {
                    Some(frame)
                };
                if let Some(frame) = rest {
                    assert_eq!(room.0, 0, "what is refused takes no room");
                    self.space.move_in(0, address, PAGE, frame).unwrap();
                }
            }
            Served::Retry
        };
        self.allocations
            .fetch_add(ALLOCATIONS.get() - before, Ordering::Relaxed);
        served
    }
}

/// Room that counts the pages for which it was used up.
struct Counted(usize);

impl ReservedRoom for Counted {
    fn use_up(&mut self) {
        self.0 += 1;
    }
}

/// A region of one page whose handler calls `serve` and then lets the page be.
pub(crate) struct Calling<F> {
    pub(crate) toy: Arc<Toy>,
    pub(crate) serve: F,
}

// SAFETY: as `Toy`; what the tests call is allowed in a handler.
unsafe impl<F: Fn() + Send + Sync> FaultHandler for Calling<F> {
    fn fault(&self, fault: PageFault) -> Served {
        (self.serve)();
        self.toy.fault(fault)
    }
}

pub(crate) fn calling(serve: impl Fn() + Send + Sync + 'static) -> (usize, FaultRegistration) {
    let toy = Toy::new(1, None);
    let base = toy.base;
    let handler = Arc::new(Calling { toy, serve });
    let registration = FaultRegistration::new(base..base + PAGE, handler).unwrap();
    (base, registration)
}

/// Lets threads count up in all pages, half of them walking together and half against them, while
/// `evict`, told which time it is, takes some out again and again and says how many. The threads
/// walk `rounds` times, and on until as many pages as there are have gone out. No count is lost.
pub(crate) fn count_up(
    toy: &Toy,
    threads: usize,
    rounds: usize,
    mut evict: impl FnMut(usize) -> usize + Send,
) {
    let (pages, stop) = (toy.away.len(), AtomicBool::new(false));
    let evicted = AtomicUsize::new(0);
    let rounds: u64 = thread::scope(|scope| {
        let (stop, evicted) = (&stop, &evicted);
        let evictor = scope.spawn(move || {
            for time in 0.. {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                evicted.fetch_add(evict(time), Ordering::Relaxed);
            }
        });
        let writers: Vec<_> = (0..threads)
            .map(|thread| {
                scope.spawn(move || {
                    let mut done = 0;
                    while done < rounds || evicted.load(Ordering::Relaxed) < pages {
                        for page in 0..pages {
                            let page = if thread % 2 == 0 {
                                page
                            } else {
                                pages - 1 - page
                            };
                            counter(toy.address(page)).fetch_add(1, Ordering::Relaxed);
                        }
                        done += 1;
                    }
                    done as u64
                })
            })
            .collect();
        let rounds = writers.into_iter().map(|writer| writer.join().unwrap());
        let rounds = rounds.sum();
        stop.store(true, Ordering::Relaxed);
        evictor.join().unwrap();
        rounds
    });
    for page in 0..pages {
        let count = counter(toy.address(page)).load(Ordering::Relaxed);
        assert_eq!(count, rounds, "page {page}");
    }
}
