//! A range of addresses whose faults are served ([`FaultRegistration`]).
//!
//! The rule it keeps: a fault handler is called from its registration's beginning to its end, and
//! not after it.

use std::{
    io,
    ops::Range,
    process,
    sync::{Arc, atomic::Ordering::SeqCst},
    thread,
    time::Duration,
};

use super::{
    contract::FaultHandler,
    handler,
    table::{self, HandlerEntry, OWNER, PROCESS},
};

/// Pause between two looks at the handlers that still serve a registration which ends: a fill takes
/// about as long.
const DRAIN_PAUSE: Duration = Duration::from_micros(50);

/// A range of addresses whose faults a [`FaultHandler`] serves, until this is dropped. Dropping
/// waits for the handlers that are at work on it.
///
/// In a child after `fork` nothing is registered.
pub struct FaultRegistration {
    entry: Arc<HandlerEntry>,
}

impl FaultRegistration {
    /// Makes `handler` serve the faults in `addresses`. The first call installs the process's
    /// SIGBUS handler.
    ///
    /// # Errors
    /// The operating system's, when there is no memory for a stack.
    ///
    /// # Panics
    /// If the range is empty or part of it is registered already.
    pub fn new(addresses: Range<usize>, handler: Arc<dyn FaultHandler>) -> io::Result<Self> {
        assert!(!addresses.is_empty(), "a range of addresses has some");
        let entry = HandlerEntry::new(addresses, handler);
        let process = process::id();
        let owner = OWNER.lock();
        match PROCESS.load(SeqCst) {
            0 => handler::install(&owner)?,
            before if before != process => table::disown(&owner),
            _ => {}
        }
        PROCESS.store(process, SeqCst);
        table::change(&owner, |table| {
            // The parent's memory has gone from there.
            table.retain(|other| other.process == process || !other.overlaps(&entry.addresses));
            let at = table.partition_point(|other| other.addresses.end <= entry.addresses.start);
            let next = table.get(at).map(|next| &next.addresses);
            assert!(
                next.is_none_or(|next| entry.addresses.end <= next.start),
                "{:#x?} overlaps {next:#x?}, which is registered",
                entry.addresses
            );
            table.insert(at, Arc::clone(&entry));
        });
        drop(owner);
        Ok(Self { entry })
    }
}

impl Drop for FaultRegistration {
    fn drop(&mut self) {
        // A child after `fork` has neither the range nor the threads that serve it.
        if self.entry.process != process::id() {
            return;
        }
        let owner = OWNER.lock();
        table::change(&owner, |table| {
            table.retain(|entry| !Arc::ptr_eq(entry, &self.entry));
        });
        drop(owner);
        while self.entry.is_served() {
            thread::sleep(DRAIN_PAUSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use farpage_testkit::passes_in_child;

    use super::{
        super::{
            contract::Served,
            table::{Looking, TABLE, begin_child, serves},
        },
        *,
    };
    use crate::space::PageFault;

    struct Nobody;

    // SAFETY: does nothing.
    unsafe impl FaultHandler for Nobody {
        fn fault(&self, _: PageFault) -> Served {
            Served::NotMine
        }
    }

    #[test]
    fn what_a_table_has_is_kept_while_somebody_looks_at_it() {
        let registration = FaultRegistration::new(4096..8192, Arc::new(Nobody)).unwrap();
        let entry = Arc::downgrade(&registration.entry);
        let looking = Looking::begin();
        let seen = TABLE.load(SeqCst);
        let ending = thread::spawn(|| drop(registration));
        while TABLE.load(SeqCst) == seen {
            thread::yield_now();
        }
        // Time to free the entry in, if it were freed.
        (0..1000).for_each(|_| thread::yield_now());
        assert!(looking.table().unwrap().is_empty());
        assert!(entry.upgrade().is_some());
        drop(looking);
        ending.join().unwrap();
        assert!(entry.upgrade().is_none());
    }

    #[test]
    fn a_child_made_while_somebody_looks_keeps_what_it_inherits_beside_its_own() {
        let handler = || Arc::new(Nobody);
        let _first = FaultRegistration::new(1 << 20..2 << 20, handler()).unwrap();
        let _second = FaultRegistration::new(2 << 20..3 << 20, handler()).unwrap();
        let _looking = Looking::begin();
        let locked = OWNER.lock();
        let passes = passes_in_child(|| {
            // SAFETY: the only thread, and the lock is its parent's.
            unsafe { begin_child() };
            let own = FaultRegistration::new(4096..(1 << 20) + 4096, handler()).unwrap();
            let inherits = serves(2 << 20..3 << 20) && !serves((1 << 20) + 4096..2 << 20);
            let is_right = inherits && serves(4096..8192);
            drop(own);
            is_right && serves(2 << 20..3 << 20) && !serves(4096..8192)
        });
        drop(locked);
        assert!(passes);
    }
}
