//! Prints what a fault costs from the touch to the value, when it is served by another thread and
//! when the faulting thread serves it itself: a page lies ready in a frame and is moved in.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Instant,
};

use farpage_vm::{
    AddressSpace, EventScope, Events, Geometry, KernelFrame, KernelSpace, KernelSpaceOptions,
    PageFault, PageIn, PageOut, Shard,
    sigbus::{FaultHandler, FaultRegistration, Served},
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

const BYTES: usize = 32 << 20;
const ROUNDS: usize = 5;

/// Thread that serves.
#[derive(Clone, Copy, Debug, PartialEq)]
enum By {
    /// Another thread, which sleeps until a fault comes.
    Sleeper,
    /// Another thread, which asks for faults all the time.
    Spinner,
    /// The thread that faults.
    Itself,
}

struct Pages {
    space: KernelSpace,
    base: usize,
    geometry: Geometry,
    away: Vec<Mutex<Option<KernelFrame>>>,
    stop: AtomicBool,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!(
        "{:>10} {:>8} {:>10} {:>10} {:>10}",
        "page KiB", "by", "p50 us", "p90 us", "to sleeper"
    );
    for page_bytes in [4 << 10, 64 << 10] {
        let mut sleeper = None;
        for by in [By::Sleeper, By::Spinner, By::Itself] {
            let mut ns = measure(page_bytes, by)?;
            ns.sort_unstable();
            let (p50, p90) = (ns[ns.len() / 2] as f64, ns[ns.len() * 9 / 10] as f64);
            let ratio = p50 / *sleeper.get_or_insert(p50);
            println!(
                "{:>10} {:>8} {:>10.2} {:>10.2} {ratio:>10.2}",
                page_bytes >> 10,
                format!("{by:?}"),
                p50 / 1e3,
                p90 / 1e3
            );
        }
    }
    Ok(())
}

fn measure(page_bytes: usize, by: By) -> Result<Vec<u64>, Box<dyn std::error::Error>> {
    let pages = Pages::new(page_bytes, by)?;
    let registration = (by == By::Itself)
        .then(|| FaultRegistration::new(pages.base..pages.base + BYTES, Arc::clone(&pages) as _))
        .transpose()?;
    let server = (by != By::Itself).then(|| {
        let pages = Arc::clone(&pages);
        thread::spawn(move || pages.serve(by))
    });
    let mut ns = Vec::new();
    for _ in 0..ROUNDS {
        for address in (pages.base..pages.base + BYTES).step_by(page_bytes) {
            let start = Instant::now();
            // SAFETY: a mapped region, whose absent pages are served.
            unsafe { (address as *const u8).read_volatile() };
            ns.push(start.elapsed().as_nanos() as u64);
        }
        for page in 0..pages.away.len() {
            let left = pages.space.detach(PageOut::Move(pages.page(page)))?;
            *pages.away(page) = Some(left.into_frame());
        }
    }
    drop(registration);
    pages.stop.store(true, Ordering::Relaxed);
    if let Some(server) = server {
        server.join().expect("the server does not panic");
    }
    pages.space.unmap(pages.base, pages.geometry);
    Ok(ns)
}

impl Pages {
    fn new(page_bytes: usize, by: By) -> Result<Arc<Self>, Box<dyn std::error::Error>> {
        let space = KernelSpace::new(KernelSpaceOptions {
            // One more may be held, by a server that has not come round to giving it back.
            frame_bytes_max: BYTES + page_bytes,
            in_thread: by == By::Itself,
            ..KernelSpaceOptions::default()
        })?;
        let geometry = Geometry {
            bytes: BYTES,
            page_bytes,
            stripe_bytes: BYTES,
            first_shard: 0,
            address: None,
            read_only: false,
            no_direct_io: false,
            ordinary: false,
        };
        let away = (0..BYTES / page_bytes)
            .map(|_| Ok(Mutex::new(Some(space.new_frame(page_bytes, 1)?))))
            .collect::<Result<_, std::io::Error>>()?;
        Ok(Arc::new(Self {
            base: space.map(geometry)?.address,
            space,
            geometry,
            away,
            stop: AtomicBool::new(false),
        }))
    }

    fn away(&self, page: usize) -> std::sync::MutexGuard<'_, Option<KernelFrame>> {
        self.away[page]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn page(&self, number: usize) -> farpage_vm::Pages {
        let page_bytes = self.geometry.page_bytes;
        farpage_vm::Pages::new(Shard(0), self.base + number * page_bytes, page_bytes, 1)
    }

    fn install(&self, fault: PageFault) {
        let page = (fault.address - self.base) / self.geometry.page_bytes;
        if let Some(frame) = self.away(page).take() {
            self.space
                .install(self.page(page), PageIn::Move(frame))
                .expect("an absent page can be installed");
        }
    }

    fn serve(&self, by: By) {
        let mut events = Events::default();
        while !self.stop.load(Ordering::Relaxed) {
            if by == By::Sleeper {
                let fd = self
                    .space
                    .wait(Shard(0))
                    .fd
                    .expect("a kernel space has one");
                let fds = &mut [PollFd::new(fd, PollFlags::POLLIN)];
                poll(fds, PollTimeout::from(10u8)).expect("polling works");
            }
            self.space
                .events(Shard(0), EventScope::All, &mut events)
                .expect("faults can be read");
            events
                .faults
                .drain(..)
                .for_each(|fault| self.install(fault));
        }
    }
}

// SAFETY: allocates nothing; the lock is not held while a page is touched.
unsafe impl FaultHandler for Pages {
    fn fault(&self, fault: PageFault) -> Served {
        self.install(fault);
        Served::Retry
    }
}
