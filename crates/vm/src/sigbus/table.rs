//! Ranges of addresses and their handlers: a sorted table behind one pointer.
//!
//! The rule it keeps: looking at the table neither allocates nor locks, and a table is freed only
//! when nobody looks at it any more. Changing it makes a new one, and waits by two counters used in
//! turn (as in signal-hook's "half lock"). Looking takes nanoseconds, so that waiting does, too.
//! Serving may take long and is counted per registration: only the end of that registration waits
//! for it.

use std::{
    ops::Range,
    process,
    ptr::{self, NonNull},
    sync::{
        Arc,
        atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering::SeqCst},
    },
    thread,
};

use farpage_signals::{Mutex, MutexGuard};

use super::{
    contract::{FaultHandler, STACK_BYTES, Served},
    stack::Stack,
};
use crate::space::PageFault;

/// A range of addresses, and its handler.
pub(super) struct HandlerEntry {
    pub(super) addresses: Range<usize>,
    /// Process that has registered the range. A child made by `fork` has the entries of its parent,
    /// so that it knows which memory system calls may not be given.
    pub(super) process: u32,
    handler: Arc<dyn FaultHandler>,
    /// Number of handlers at work on the range.
    serving: AtomicUsize,
}

impl HandlerEntry {
    pub(super) fn new(addresses: Range<usize>, handler: Arc<dyn FaultHandler>) -> Arc<Self> {
        Arc::new(Self {
            addresses,
            process: process::id(),
            handler,
            serving: AtomicUsize::new(0),
        })
    }

    pub(super) fn overlaps(&self, addresses: &Range<usize>) -> bool {
        self.addresses.start < addresses.end && addresses.start < self.addresses.end
    }

    /// True if a handler is at work on the range.
    pub(super) fn is_served(&self) -> bool {
        self.serving.load(SeqCst) > 0
    }
}

/// Entries, sorted and without overlaps.
pub(super) type HandlerTable = Vec<Arc<HandlerEntry>>;

/// Permission to change the table. Never waited for by the handler.
pub(super) static OWNER: Mutex<()> = Mutex::new(());
pub(super) type TableGuard = MutexGuard<'static, ()>;
/// Process whose entries are served; 0 before the handler is installed.
pub(super) static PROCESS: AtomicU32 = AtomicU32::new(0);
/// The table, or null for an empty one.
pub(super) static TABLE: AtomicPtr<HandlerTable> = AtomicPtr::new(ptr::null_mut());
/// Number of handlers that are looking at the table, by the turn that they saw.
static LOOKING: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(0)];
/// Index of the counter for handlers that come now.
static TURN: AtomicUsize = AtomicUsize::new(0);

/// Puts a changed copy in the table's place.
pub(super) fn change(_owner: &TableGuard, edit: impl FnOnce(&mut HandlerTable)) {
    // SAFETY:
    // - The pointer is null or that of a table, which only this function frees.
    // - Only one thread is in this function: it has `OWNER`.
    let mut table = unsafe { TABLE.load(SeqCst).as_ref() }
        .cloned()
        .unwrap_or_default();
    edit(&mut table);
    let old = TABLE.swap(Box::into_raw(Box::new(table)), SeqCst);
    // Handlers that come from here on see the new table and count for the other turn, whose last
    // handlers left when it ended.
    let turn = TURN.fetch_xor(1, SeqCst);
    while LOOKING[turn].load(SeqCst) > 0 {
        thread::yield_now();
    }
    if !old.is_null() {
        // SAFETY:
        // - It was made by `Box::into_raw`, in an earlier call.
        // - Nobody looks at it any more: those who may have seen it have left.
        drop(unsafe { Box::from_raw(old) });
    }
}

/// Forgets what a parent had before a call that has run no handlers of `fork`: its table, whose
/// addresses are free here, and its threads.
pub(super) fn disown(_owner: &TableGuard) {
    TABLE.store(ptr::null_mut(), SeqCst);
    forget_lookers();
}

fn forget_lookers() {
    LOOKING.iter().for_each(|looking| looking.store(0, SeqCst));
}

/// Begins a child made by `fork`. Threads that only its parent has may have locked the table, or
/// looked at it.
///
/// # Safety
/// The calling thread is the only one of this process, and outside of this module.
pub(crate) unsafe fn begin_child() {
    forget_lookers();
    // SAFETY: the caller's promise.
    unsafe { OWNER.renew(()) };
    if PROCESS.load(SeqCst) != 0 {
        PROCESS.store(process::id(), SeqCst);
    }
}

/// Finds the entry that an address belongs to, and counts it as being served.
pub(super) fn find(address: usize) -> Option<ServingGuard> {
    let looking = Looking::begin();
    let table = looking.table()?;
    let at = table.partition_point(|entry| entry.addresses.end <= address);
    let entry = table
        .get(at)
        .filter(|entry| entry.addresses.contains(&address))
        .filter(|entry| entry.process == PROCESS.load(SeqCst))?;
    entry.serving.fetch_add(1, SeqCst);
    Some(ServingGuard(NonNull::from(&**entry)))
}

/// True if faults in some of these addresses are served by the threads that raise them: system
/// calls fail with `EFAULT` where such a page is absent. Neither allocates nor locks.
pub fn serves(addresses: Range<usize>) -> bool {
    let looking = Looking::begin();
    let Some(table) = looking.table() else {
        return false;
    };
    let at = table.partition_point(|entry| entry.addresses.end <= addresses.start);
    table
        .get(at)
        .is_some_and(|entry| entry.addresses.start < addresses.end)
}

/// A look at the table, which is not freed before the look ends.
pub(super) struct Looking(&'static AtomicUsize);

impl Looking {
    pub(super) fn begin() -> Self {
        loop {
            let turn = TURN.load(SeqCst);
            LOOKING[turn].fetch_add(1, SeqCst);
            let looking = Self(&LOOKING[turn]);
            // Otherwise the turn may have ended before this was counted, with nobody waiting for
            // it.
            if TURN.load(SeqCst) == turn {
                return looking;
            }
        }
    }

    pub(super) fn table(&self) -> Option<&HandlerTable> {
        // SAFETY: null, or a table that is not freed while this counts.
        unsafe { TABLE.load(SeqCst).as_ref() }
    }
}

impl Drop for Looking {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

/// An entry that a handler is at work on: its registration waits before it lets go.
pub(super) struct ServingGuard(NonNull<HandlerEntry>);

impl ServingGuard {
    pub(super) fn serve(&self, fault: PageFault) -> Served {
        let stack = Stack::take();
        // SAFETY: counted as serving, hence not freed.
        let handler = &unsafe { self.0.as_ref() }.handler;
        // SAFETY:
        // - The stack is aligned, has `STACK_BYTES`, and is used by nobody else until it is given
        //   back.
        // - A panic does not leave the closure: it aborts, since the handler was called from C.
        let served = unsafe { psm::on_stack(stack.base(), STACK_BYTES, || handler.fault(fault)) };
        stack.give_back();
        served
    }
}

impl Drop for ServingGuard {
    fn drop(&mut self) {
        // SAFETY: counted as serving, hence not freed; not touched after this.
        unsafe { self.0.as_ref() }.serving.fetch_sub(1, SeqCst);
    }
}
