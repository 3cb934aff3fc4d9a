//! Faults served by the thread that faults: the process's SIGBUS handler, and who answers for which addresses.
//!
//! The rule it keeps: a SIGBUS that nobody here serves ends as it would have ended without this module, with its own `si_addr`: in the handler that
//! was installed before, or by killing the process. Nothing in the handler allocates or takes a lock. What serving means is up to
//! [`FaultHandler`]; the faults come from a [`KernelSpace`](crate::KernelSpace) whose option `in_thread` is set.
//!
//! The handler is installed with the first [`Registration`] and stays: whoever installed one after it may call it.
//! A handler that is installed later has to pass on what is not its own, as that of Wasmtime does; one that does not takes the faults of regions away.
//!
//! **Whose address.** A sorted table behind one pointer. Changing it makes a new one, and waits until no handler looks at the old one, by two
//! counters used in turn (as in signal-hook's "half lock"): looking takes nanoseconds, so that waiting does, too. Serving may take long and is counted per
//! registration: only the end of that registration waits for it.
//!
//! **Which stack.** A handler here talks to a server, hashes and decodes: [`STACK_BYTES`] are meant to be enough for anything. No stack at hand is: what
//! Rust gives its threads for signals is 8 KiB, about half of which the kernel fills with registers; other threads have none; a fibre or goroutine has little
//! left of its own. So the handler enters on whatever there is (`SA_ONSTACK`), needs a few hundred bytes there, and serves on a stack of its own from a
//! process-wide stock, which grows to as many as ever serve at once. No thread has to be prepared, and nothing is left to clean up when one ends. (Wasmtime prepares
//! each thread, because each enters through it; ExtMem serves on the thread's own stack, which breaks whoever is deep in it.)
//! The price: meanwhile the kernel takes the alternate stack for unused and would place the next signal over the first. Hence all
//! signals wait until the page is there, but those that a bug in the handler raises. So they do when the kernel itself swaps.
//!
//! **What it can not do.** The kernel kills a thread that faults while it blocks SIGBUS: threads that block "all" signals have to leave this one out.
//! System calls that touch absent pages fail with `EFAULT`, without a signal.

use std::{
    io,
    ops::Range,
    process,
    ptr::{self, NonNull},
    sync::{
        Arc,
        atomic::{AtomicPtr, AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

use nix::errno::Errno;
use parking_lot::Mutex;

use crate::{space::Fault, sys::KERNEL_PAGE_BYTES};

/// Bytes of stack that a [`FaultHandler`] has. Memory is taken as it is touched.
pub const STACK_BYTES: usize = 128 << 10;

/// Idle stacks that are kept: more threads than that seldom fault at once, and then each maps one and gives it back.
const IDLE_STACKS: usize = 64;

/// How long the end of a registration sleeps between looks at the handlers that still serve it: a fill takes about as long.
const DRAIN_PAUSE: Duration = Duration::from_micros(50);

/// Signals that are not held back while a fault is served: what a bug in serving raises must kill there and then, and `abort` must work.
const NEVER_HELD: [libc::c_int; 6] = [
    libc::SIGSEGV,
    libc::SIGILL,
    libc::SIGFPE,
    libc::SIGTRAP,
    libc::SIGSYS,
    libc::SIGABRT,
];

/// Bytes of the kernel's signal set: that of the C library is larger, and the kernel fills in only these.
const SIGNAL_SET_BYTES: usize = 8;

/// What became of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served {
    /// The page may be there: the instruction is tried again.
    Retry,
    /// The page can not be had. The signal goes to the handler that was there before, or kills the process.
    NotMine,
}

/// Serves the faults of a range of addresses, in the threads that raise them.
///
/// # Safety
/// [`fault`](Self::fault) runs inside a signal handler, at any instruction that touches the range, on several threads at once:
/// - It neither allocates nor frees, nor does anything that may (a contended `parking_lot` lock does).
/// - It takes no lock that code which touches the range may hold: not the lock of standard output or of a log. Own locks, under which nothing touches a
///   range, are fine. Thread-local variables are read only if nobody else changes them, and have no destructor.
/// - It touches no absent page of any registered range: that kills the process.
/// - It does not end a [`Registration`].
///
/// It may call the operating system (`errno` is put back) and use [`STACK_BYTES`] of stack. A panic aborts the process.
pub unsafe trait FaultHandler: Send + Sync {
    /// Serves the fault, or waits until somebody else has.
    fn fault(&self, fault: Fault) -> Served;
}

/// A range of addresses whose faults a [`FaultHandler`] serves, until this is dropped. Dropping waits for the handlers that are at work on it.
///
/// In a child after `fork` nothing is registered.
pub struct Registration {
    entry: Arc<Entry>,
    process: u32,
}

impl Registration {
    /// Has `handler` serve the faults in `addresses`. The first call installs the process's SIGBUS handler.
    ///
    /// # Errors
    /// The operating system's, when there is no memory for a stack.
    ///
    /// # Panics
    /// If the range is empty or part of it is registered already.
    pub fn new(addresses: Range<usize>, handler: Arc<dyn FaultHandler>) -> io::Result<Self> {
        assert!(!addresses.is_empty(), "a range of addresses has some");
        let entry = Arc::new(Entry {
            addresses,
            handler,
            serving: AtomicUsize::new(0),
        });
        let process = process::id();
        let mut owner = OWNER.lock();
        match *owner {
            None => install()?,
            Some(owner) if owner != process => disown(),
            Some(_) => {}
        }
        *owner = Some(process);
        change(|table| {
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
        Ok(Self { entry, process })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // A child after `fork` has neither the range nor the threads that serve it.
        if self.process != process::id() {
            return;
        }
        let owner = OWNER.lock();
        change(|table| table.retain(|entry| !Arc::ptr_eq(entry, &self.entry)));
        drop(owner);
        while self.entry.serving.load(SeqCst) > 0 {
            thread::sleep(DRAIN_PAUSE);
        }
    }
}

struct Entry {
    addresses: Range<usize>,
    handler: Arc<dyn FaultHandler>,
    /// Handlers at work on it.
    serving: AtomicUsize,
}

/// Sorted, without overlaps.
type Table = Vec<Arc<Entry>>;

/// The process whose registrations the table has; `None` before the handler is installed. Locked while the table changes, never by the handler.
static OWNER: Mutex<Option<u32>> = Mutex::new(None);
/// The table, or null for an empty one.
static TABLE: AtomicPtr<Table> = AtomicPtr::new(ptr::null_mut());
/// Handlers that are looking at the table, by the turn that they saw.
static LOOKING: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(0)];
/// Which of the two counters those count who come now.
static TURN: AtomicUsize = AtomicUsize::new(0);
/// Who handled SIGBUS before. Not null once the handler is installed, and never freed.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());

/// Puts a changed copy in the table's place. `OWNER` is locked.
fn change(edit: impl FnOnce(&mut Table)) {
    // SAFETY: the pointer is null or that of a table that only this function frees, and only one thread is in it.
    let mut table = unsafe { TABLE.load(SeqCst).as_ref() }
        .cloned()
        .unwrap_or_default();
    edit(&mut table);
    let old = TABLE.swap(Box::into_raw(Box::new(table)), SeqCst);
    // Whoever comes from here on sees the new table and counts for the other turn, whose last ones left when it ended.
    let turn = TURN.fetch_xor(1, SeqCst);
    while LOOKING[turn].load(SeqCst) > 0 {
        thread::yield_now();
    }
    if !old.is_null() {
        // SAFETY: made by `Box::into_raw` above; nobody looks at it any more.
        drop(unsafe { Box::from_raw(old) });
    }
}

/// Forgets what a parent had before `fork`: its table, whose addresses are free here, and its threads. `OWNER` is locked.
fn disown() {
    TABLE.store(ptr::null_mut(), SeqCst);
    LOOKING.iter().for_each(|looking| looking.store(0, SeqCst));
}

/// The entry that an address belongs to, counted as being served.
fn find(address: usize) -> Option<Serving> {
    let looking = Looking::begin();
    let table = looking.table()?;
    let at = table.partition_point(|entry| entry.addresses.end <= address);
    let entry = table
        .get(at)
        .filter(|entry| entry.addresses.contains(&address))?;
    entry.serving.fetch_add(1, SeqCst);
    Some(Serving(NonNull::from(&**entry)))
}

/// A look at the table, which is not freed before it ends.
struct Looking(&'static AtomicUsize);

impl Looking {
    fn begin() -> Self {
        loop {
            let turn = TURN.load(SeqCst);
            LOOKING[turn].fetch_add(1, SeqCst);
            let looking = Self(&LOOKING[turn]);
            // Otherwise the turn may have ended before this was counted, with nobody waiting for it.
            if TURN.load(SeqCst) == turn {
                return looking;
            }
        }
    }

    fn table(&self) -> Option<&Table> {
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
struct Serving(NonNull<Entry>);

impl Serving {
    fn serve(&self, fault: Fault) -> Served {
        let stack = Stack::take();
        // SAFETY: counted as serving, hence not freed.
        let handler = &unsafe { self.0.as_ref() }.handler;
        // SAFETY: the stack is aligned, as large as said, and used by nobody else; a panic does not leave `fault`, since nothing that is
        // called from C unwinds: it aborts.
        let served = unsafe { psm::on_stack(stack.base(), STACK_BYTES, || handler.fault(fault)) };
        stack.give_back();
        served
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // SAFETY: counted as serving, hence not freed; not touched after this.
        unsafe { self.0.as_ref() }.serving.fetch_sub(1, SeqCst);
    }
}

/// A stack to serve on, with a page below it that no access is allowed to.
struct Stack(usize);

/// Stacks in stock. Taking and giving back are swaps of whole ownership, so that no stack is ever in two hands.
static IDLE: [AtomicUsize; IDLE_STACKS] = [const { AtomicUsize::new(0) }; IDLE_STACKS];

impl Stack {
    const MAPPING_BYTES: usize = KERNEL_PAGE_BYTES + STACK_BYTES;

    fn map() -> nix::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_STACK;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: no address is asked for, so that no mapping is replaced.
        let start = unsafe { libc::mmap(ptr::null_mut(), Self::MAPPING_BYTES, prot, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(Errno::last());
        }
        let stack = Self(start as usize);
        // SAFETY: the lowest page of the mapping made above.
        Errno::result(unsafe { libc::mprotect(start, KERNEL_PAGE_BYTES, libc::PROT_NONE) })
            .inspect_err(|_| stack.unmap())
            .map(|_| stack)
    }

    /// One from the stock, or a new one. Without memory for that, the next one that comes back: its handler waits for none.
    fn take() -> Self {
        loop {
            for idle in &IDLE {
                if idle.load(SeqCst) != 0 {
                    let stack = idle.swap(0, SeqCst);
                    if stack != 0 {
                        return Self(stack);
                    }
                }
            }
            if let Ok(stack) = Self::map() {
                return stack;
            }
            thread::yield_now();
        }
    }

    fn give_back(self) {
        let kept = IDLE.iter().any(|idle| {
            idle.load(SeqCst) == 0 && idle.compare_exchange(0, self.0, SeqCst, SeqCst).is_ok()
        });
        if !kept {
            self.unmap();
        }
    }

    fn unmap(&self) {
        // SAFETY: the mapping made in `map`, which nobody uses any more.
        unsafe { libc::munmap(self.0 as *mut libc::c_void, Self::MAPPING_BYTES) };
    }

    /// The lowest usable address.
    fn base(&self) -> *mut u8 {
        (self.0 + KERNEL_PAGE_BYTES) as *mut u8
    }
}

/// Installs the handler, once. `OWNER` is locked.
fn install() -> io::Result<()> {
    // One stack at least, so that waiting for one ends.
    Stack::map()
        .map_err(|errno| {
            let text =
                format!("cannot map a stack of {STACK_BYTES} bytes to serve faults on: {errno}");
            io::Error::new(io::Error::from(errno).kind(), text)
        })?
        .give_back();
    // SAFETY: all zeros is a valid sigaction.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let mut before = action;
    // Known before the first signal can come, and again afterwards, should somebody else have installed one in between.
    // SAFETY: asks only.
    Errno::result(unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &mut before) })?;
    BEFORE.store(Box::leak(Box::new(before)), SeqCst);
    action.sa_sigaction = on_sigbus as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: changes a set of this function's. SIGBUS stays in it: one that is raised while serving kills.
    unsafe { libc::sigfillset(&mut action.sa_mask) };
    for signal in NEVER_HELD {
        // SAFETY: as above.
        unsafe { libc::sigdelset(&mut action.sa_mask, signal) };
    }
    // SAFETY: the handler keeps to what is allowed in one.
    Errno::result(unsafe { libc::sigaction(libc::SIGBUS, &action, &mut before) })?;
    BEFORE.store(Box::leak(Box::new(before)), SeqCst);
    Ok(())
}

extern "C" fn on_sigbus(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    let errno = Errno::last_raw();
    // SAFETY: the kernel's, valid while the handler runs.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    // Damaged memory has another code; a signal that somebody sent has no address.
    let served = code == libc::BUS_ADRERR
        && find(address).is_some_and(|serving| {
            // SAFETY: the context of a fault.
            let write = unsafe { is_write(context) };
            serving.serve(Fault { address, write }) == Served::Retry
        });
    if !served {
        pass_on(signal, info, context);
    }
    Errno::set_raw(errno);
}

/// Whether the fault was a write.
///
/// # Safety
/// `context` is what the kernel gave the handler of a page fault.
#[cfg(target_arch = "x86_64")]
unsafe fn is_write(context: *const libc::c_void) -> bool {
    /// Bit of the page fault's error code.
    const WRITE: libc::greg_t = 1 << 1;
    // SAFETY: the caller's promise.
    let registers = unsafe { &(*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    registers[libc::REG_ERR as usize] & WRITE != 0
}

/// Elsewhere nothing says so in the same way; a page that is taken for written is only compared once more.
///
/// # Safety
/// None.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn is_write(_: *const libc::c_void) -> bool {
    true
}

/// Does what would have happened without this module.
fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: set before the handler was installed, never freed.
    let before = unsafe { &*BEFORE.load(SeqCst) };
    // SAFETY: the kernel's, valid while the handler runs.
    let sent = unsafe { (*info).si_code } <= 0;
    match before.sa_sigaction {
        // The kernel ignores only what was sent: an instruction that can not go on kills.
        libc::SIG_IGN if sent => {}
        libc::SIG_DFL | libc::SIG_IGN => die(signal, info),
        handler => {
            // Signals are held back as for that handler. Its stack is that of this one, which is not used any more below here.
            let held_by_action = if before.sa_flags & libc::SA_NODEFER == 0 {
                1 << (signal - 1)
            } else {
                0
            };
            // SAFETY: the context is the kernel's; both sets begin with the kernel's.
            let held: u64 = unsafe {
                let interrupted = &raw const (*context.cast::<libc::ucontext_t>()).uc_sigmask;
                held_by_action
                    | *interrupted.cast::<u64>()
                    | *(&raw const before.sa_mask).cast::<u64>()
            };
            // SAFETY: takes the kernel's set of signals. The return from this handler restores that of the interrupted code.
            unsafe {
                libc::syscall(
                    libc::SYS_rt_sigprocmask,
                    libc::SIG_SETMASK,
                    &held,
                    ptr::null_mut::<u64>(),
                    SIGNAL_SET_BYTES,
                );
            }
            if before.sa_flags & libc::SA_SIGINFO != 0 {
                // SAFETY: what was installed with SA_SIGINFO takes these.
                let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                    unsafe { std::mem::transmute(handler) };
                handler(signal, info, context);
            } else {
                // SAFETY: what was installed without SA_SIGINFO takes this.
                let handler: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(handler) };
                handler(signal);
            }
        }
    }
}

/// Has the signal come again, as it came, with nobody to handle it: it kills at the interrupted instruction, as soon as the handler returns. Returning alone would
/// leave the process without a handler if the instruction succeeded by then.
fn die(signal: libc::c_int, info: *const libc::siginfo_t) {
    // SAFETY: all zeros is SIG_DFL.
    let default: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: takes effect on this process, which is at its end; the signal is sent to this thread, which holds it back until it returns.
    unsafe {
        libc::sigaction(signal, &default, ptr::null_mut());
        libc::syscall(
            libc::SYS_rt_tgsigqueueinfo,
            libc::getpid(),
            libc::gettid(),
            signal,
            info,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nobody;

    // SAFETY: does nothing.
    unsafe impl FaultHandler for Nobody {
        fn fault(&self, _: Fault) -> Served {
            Served::NotMine
        }
    }

    #[test]
    fn what_a_table_has_is_kept_while_somebody_looks_at_it() {
        let registration = Registration::new(4096..8192, Arc::new(Nobody)).unwrap();
        let entry = Arc::downgrade(&registration.entry);
        let looking = Looking::begin();
        let seen = TABLE.load(SeqCst);
        let ending = thread::spawn(|| drop(registration));
        while TABLE.load(SeqCst) == seen {
            thread::yield_now();
        }
        // Time to free it in, if it were freed.
        (0..1000).for_each(|_| thread::yield_now());
        assert!(looking.table().unwrap().is_empty());
        assert!(entry.upgrade().is_some());
        drop(looking);
        ending.join().unwrap();
        assert!(entry.upgrade().is_none());
    }
}
