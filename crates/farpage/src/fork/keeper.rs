//! [`Keeper`]: a thread that brings absent pages in for processes made by `fork`.
//!
//! A child has a copy of the page table of its moment, and the slots that the table refers to are
//! held as long as the child lives. So the keeper reads a page's entry out of the child, reads the
//! page from the servers, and copies it into the child. What the child has dropped since holds
//! zeros.
//!
//! The rule it keeps: a child gets the bytes that the parent had at the fork, zeros where those
//! were, or SIGBUS. The keeper waits for no child, and takes no lock that a fault can need.

use std::{
    io,
    ops::Range,
    os::fd::{AsRawFd, RawFd},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use farpage_pager::Pager;
use farpage_store::Snapshot;
use farpage_tables::Doorbell;
use farpage_vm::{KernelSpace, child::ChildFeatures};

use super::{
    hooks::say,
    image::{Census, Image},
    link::{self, LinkName},
    serving::Serving,
    shared::{AcceptHold, SETTLE, Shared, locked},
};

/// Time between two calls that make the thread look for ended children.
const RETRY: Duration = Duration::from_millis(1);

/// Handle on the thread of one runtime. Dropping it ends the thread when no child is left.
pub(super) struct Keeper {
    pub(super) name: LinkName,
    pub(super) features: ChildFeatures,
    /// Socket that children inherit, where the thread works on the program's table.
    pub(super) listener: Option<RawFd>,
    shared: Arc<Shared>,
}

impl Keeper {
    /// Starts the thread, on the table of the calling one.
    ///
    /// # Errors
    /// The reason in words.
    pub(super) fn start(pager: &Pager<KernelSpace>) -> Result<Keeper, String> {
        let features = ChildFeatures::find().map_err(|error| error.to_string())?;
        let name = LinkName::new();
        let start = || -> io::Result<(RawFd, Arc<Shared>)> {
            let listener = link::listen(&name)?;
            let number = listener.as_raw_fd();
            let shared = Arc::new(Shared {
                expected: Mutex::default(),
                census: Arc::new(Census::new(farpage_tables::is_private())),
                turns: AtomicU64::new(0),
                accepting: Mutex::default(),
                is_held: AtomicBool::new(false),
                is_due: AtomicBool::new(false),
                ends: AtomicBool::new(false),
                waker: Doorbell::new()?,
            });
            let (cluster, lender) = (pager.cluster().clone(), pager.lender());
            let serving = Serving::new(listener, shared.clone(), cluster, lender);
            let builder = thread::Builder::new().name("farpage-children".into());
            let serve = move || {
                if catch_unwind(AssertUnwindSafe(|| serving.serve())).is_err() {
                    // Children would be ended without a word.
                    say("ends: the thread that serves processes made by fork has failed");
                    std::process::abort();
                }
            };
            farpage_tables::spawn(builder, serve)?;
            Ok((number, shared))
        };
        let (listener, shared) =
            start().map_err(|error| format!("cannot start a thread: {error}"))?;
        Ok(Keeper {
            name,
            features,
            listener: (!shared.census.is_apart).then_some(listener),
            shared,
        })
    }

    /// Returns the count of images, which outlives the runtime.
    pub(super) fn census(&self) -> &Arc<Census> {
        &self.shared.census
    }

    /// Expects a child that has copies of these regions, which it names by `number`. Returns the
    /// addresses of the regions.
    pub(super) fn expect(
        &self,
        number: u64,
        regions: impl Iterator<Item = (Range<usize>, Vec<Range<usize>>, Snapshot)>,
    ) -> Vec<Range<usize>> {
        let image = Image::new(regions, &self.shared.census);
        let addresses = image.kept();
        locked(&self.shared.expected).insert(number, Arc::new(image));
        addresses
    }

    /// Holds the thread back from accepting connections until the result is released.
    pub(super) fn hold(&self) -> AcceptHold<'_> {
        self.shared.hold()
    }

    /// Waits until the thread has noticed the ends of all children that have ended by now. To be
    /// called on the table of the thread.
    pub(super) fn settle(&self) {
        let (turns, until) = (&self.shared.turns, Instant::now() + SETTLE);
        // After a turn that is under way: one that accepts a child, one that hears of its end.
        let enough = turns.load(Ordering::SeqCst) + 4;
        let census = &self.shared.census;
        let is_over = || turns.load(Ordering::SeqCst) >= enough && !census.is_ending();
        census.wait_unless(is_over, || self.shared.wake(), (RETRY, until));
    }

    /// Expects the child of this number no longer.
    pub(super) fn forget(&self, number: u64) {
        let image = locked(&self.shared.expected).remove(&number);
        drop(image);
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Release);
        self.shared.wake();
    }
}
