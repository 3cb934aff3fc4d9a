//! [`FaultMode`]: the threads that serve the program's page faults.

use std::{io, str::FromStr, sync::Arc};

use farpage_pager::{InThread, MappedRegion};
use farpage_vm::{
    KernelSpace, PageFault,
    sigbus::{FaultHandler, FaultRegistration, Served},
};

/// Threads that serve the program's page faults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultMode {
    /// Filler threads of the runtime. A system call that is given absent memory waits for it, like
    /// any access.
    #[default]
    Filler,
    /// The thread that touches an absent page fetches it itself, in a handler of SIGBUS. No other
    /// thread is woken, which is most of what a fault on a small page costs. Five things differ:
    ///
    /// - A system call that is given absent memory (`read` into an array, `write` from it) fails
    ///   with `EFAULT`. Calls of [`io`](crate::io) do not; [`Region::pin`](crate::Region::pin)
    ///   brings memory in and keeps it there for any call.
    /// - With pages of 4 KiB, bytes that a device writes into memory that is not pinned (direct
    ///   I/O) may be lost. Pin the memory until the device is done.
    /// - With pages of 4 KiB, a program that unmaps a part of a region must keep its other threads
    ///   from mapping memory until `munmap` has returned. Their mappings may get the same
    ///   addresses, and bytes written there at once may be lost.
    /// - The runtime's descriptors are in the program's table. If the program closes or replaces
    ///   one of them, the process ends with a line on standard error.
    /// - A thread that blocks SIGBUS is killed by its first fault. A handler of SIGBUS that the
    ///   program installs after the runtime was built must pass on signals that are not its own.
    InThread,
}

impl FromStr for FaultMode {
    type Err = &'static str;

    fn from_str(name: &str) -> Result<FaultMode, Self::Err> {
        match name {
            "filler" => Ok(FaultMode::Filler),
            "in-thread" => Ok(FaultMode::InThread),
            _ => Err("need filler or in-thread"),
        }
    }
}

/// Lets the program's threads serve the region's faults themselves, if its runtime has
/// [`FaultMode::InThread`].
pub(crate) fn register(
    mapped: &MappedRegion<KernelSpace>,
) -> io::Result<Option<FaultRegistration>> {
    let Some(in_thread) = mapped.pager().in_thread() else {
        return Ok(None);
    };
    let addresses = mapped.address()..mapped.address() + mapped.mapped_bytes();
    FaultRegistration::new(addresses, Arc::new(Handler(in_thread.clone()))).map(Some)
}

struct Handler(Arc<InThread<KernelSpace>>);

// SAFETY: `InThread` keeps the rules of a signal handler (see its module):
// - it takes only locks of the runtime, under which nothing touches a region and no other handler
//   runs (`tests/signals.rs`), and allocates nothing unless something fails (`tests/in_thread.rs`
//   counts the allocator's calls);
// - it works on frames and the servers' memory, never on a region's pages;
// - regions are closed by the program's own calls.
unsafe impl FaultHandler for Handler {
    fn fault(&self, fault: PageFault) -> Served {
        if self.0.serve(fault.address, fault.write) {
            Served::Retry
        } else {
            Served::NotMine
        }
    }
}
