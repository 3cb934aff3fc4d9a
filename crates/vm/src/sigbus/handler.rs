//! The process's SIGBUS handler: its installation, and the end of a signal that is not ours.
//!
//! The rule it keeps: a SIGBUS that is not served here ends as it would have ended without this
//! module, with its own `si_addr`. Nothing in the handler needs a lock that the interrupted code
//! may hold, or the program's allocator: faults are served inside
//! [`in_handler`](farpage_signals::in_handler).

use std::{
    io, ptr,
    sync::atomic::{AtomicPtr, Ordering::SeqCst},
};

use farpage_signals::Mutex;
use nix::errno::Errno;

use super::{
    contract::{STACK_BYTES, Served},
    stack::Stack,
    table::{self, TableGuard},
};
use crate::space::PageFault;

/// Signals that are not held back while a fault is served: those that a bug in serving raises must
/// kill there and then, and `abort` must work.
const NEVER_HELD: [libc::c_int; 6] = [
    libc::SIGSEGV,
    libc::SIGILL,
    libc::SIGFPE,
    libc::SIGTRAP,
    libc::SIGSYS,
    libc::SIGABRT,
];

/// Bytes of the kernel's signal set: the C library's set is larger, and the kernel fills in only
/// these.
const SIGNAL_SET_BYTES: usize = 8;

/// The action for SIGBUS before ours. Not null once the handler is installed, and never freed.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());

/// Installs the handler, once.
pub(super) fn install(_owner: &TableGuard) -> io::Result<()> {
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
    // Known before the first signal can come, and again afterwards, should somebody else have
    // installed one in between.
    // SAFETY: asks only.
    Errno::result(unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &mut before) })?;
    BEFORE.store(Box::leak(Box::new(before)), SeqCst);
    action.sa_sigaction = on_sigbus as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // SIGBUS stays in the set: one that is raised while serving kills.
    // SAFETY: the set is this function's.
    unsafe { libc::sigfillset(&mut action.sa_mask) };
    for signal in NEVER_HELD {
        // SAFETY: the set is this function's.
        unsafe { libc::sigdelset(&mut action.sa_mask, signal) };
    }
    // SAFETY:
    // - `on_sigbus` has the signature that SA_SIGINFO asks for.
    // - It puts `errno` back. What it calls is under `FaultHandler`'s contract.
    Errno::result(unsafe { libc::sigaction(libc::SIGBUS, &action, &mut before) })?;
    BEFORE.store(Box::leak(Box::new(before)), SeqCst);
    Ok(())
}

/// The action SIG_DFL.
static DEFAULT: Default = Default({
    // SAFETY: all zeros is SIG_DFL.
    unsafe { std::mem::zeroed() }
});

struct Default(libc::sigaction);

// SAFETY: only read.
unsafe impl Sync for Default {}

/// Actions with which the program has handled SIGBUS. Few programs have more than one or two, so
/// that each is kept once and for good: a handler may be looking at it.
static KNOWN: Mutex<Vec<&'static libc::sigaction>> = Mutex::new(Vec::new());

/// Makes a SIGBUS that is not ours end as with `action`, for a library that keeps the program's own
/// calls of `sigaction` from replacing the handler. Returns the action before or, without an
/// `action`, the present one.
///
/// Not to be called by a signal handler: it locks and allocates.
pub fn set_previous(action: Option<&libc::sigaction>) -> libc::sigaction {
    let before = match action {
        None => BEFORE.load(SeqCst),
        Some(action) => {
            let mut known = KNOWN.lock();
            let found = known.iter().find(|known| is_same(known, action));
            let kept = match found {
                Some(kept) => *kept,
                None => {
                    let kept: &libc::sigaction = Box::leak(Box::new(*action));
                    known.push(kept);
                    kept
                }
            };
            BEFORE.swap(ptr::from_ref(kept).cast_mut(), SeqCst)
        }
    };
    // SAFETY: null before the handler is installed, else never freed.
    match unsafe { before.as_ref() } {
        Some(before) => *before,
        // SAFETY: all zeros is SIG_DFL.
        None => unsafe { std::mem::zeroed() },
    }
}

fn is_same(one: &libc::sigaction, other: &libc::sigaction) -> bool {
    one.sa_sigaction == other.sa_sigaction
        && one.sa_flags == other.sa_flags
        && mask(one) == mask(other)
}

/// Returns the kernel's part of the set of signals that are held back.
fn mask(action: &libc::sigaction) -> u64 {
    // SAFETY: the set begins with the kernel's 8 bytes.
    unsafe { *(&raw const action.sa_mask).cast::<u64>() }
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
        && table::find(address).is_some_and(|serving| {
            // SAFETY: the context that the kernel gave this handler, of a fault (`BUS_ADRERR`).
            let write = unsafe { is_write(context) };
            let fault = PageFault {
                protected: false,
                address,
                write,
                thread: 0,
            };
            farpage_signals::in_handler(|| serving.serve(fault)) == Served::Retry
        });
    if !served {
        pass_on(signal, info, context);
    }
    Errno::set_raw(errno);
}

/// True if the fault was a write.
///
/// # Safety
/// `context` is what the kernel gave the handler of a page fault.
#[cfg(target_arch = "x86_64")]
unsafe fn is_write(context: *const libc::c_void) -> bool {
    /// Write bit of the page fault's error code.
    const WRITE: libc::greg_t = 1 << 1;
    // SAFETY: this function's contract: the kernel's context holds the registers.
    let registers = unsafe { &(*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    registers[libc::REG_ERR as usize] & WRITE != 0
}

/// Always true: other machines do not tell writes in the same way. A page that is taken for written
/// is only compared once more.
///
/// # Safety
/// None.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn is_write(_: *const libc::c_void) -> bool {
    true
}

/// Ends a signal that is not ours as it would have ended without this module.
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
            // Signals are held back as for that handler. It runs on this one's stack, below which
            // nothing is in use.
            let held_by_action = if before.sa_flags & libc::SA_NODEFER == 0 {
                1 << (signal - 1)
            } else {
                0
            };
            // SAFETY:
            // - The context is the kernel's, and is mapped while the handler runs.
            // - The set begins with the kernel's 8 bytes.
            let held: u64 = unsafe {
                let interrupted = &raw const (*context.cast::<libc::ucontext_t>()).uc_sigmask;
                held_by_action | *interrupted.cast::<u64>() | mask(before)
            };
            if before.sa_flags & libc::SA_RESETHAND != 0 {
                // Once only. Another thread may have set another one meanwhile.
                let at = ptr::from_ref(before).cast_mut();
                let default = (&raw const DEFAULT.0).cast_mut();
                let _ = BEFORE.compare_exchange(at, default, SeqCst, SeqCst);
            }
            // The return from this handler restores the set of the interrupted code.
            // SAFETY: `held` is a set of the kernel's size, which is passed along.
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

/// Raises the signal again, as it came, without a handler. It kills at the interrupted instruction,
/// as soon as this handler returns. Returning alone would leave the process without a handler if
/// the instruction succeeded by then.
fn die(signal: libc::c_int, info: *const libc::siginfo_t) {
    /// Length of the kernel's action, which is no `sigaction` of the C library.
    const ACTION_BYTES: usize = 32;
    let default = [0u64; ACTION_BYTES / 8];
    // SAFETY:
    // - The process is at its end: nobody needs the handler that is replaced. All zeros is SIG_DFL.
    //   The call is made by its number: a program's own `sigaction` may end at `set_previous`.
    // - The signal goes to this thread, which holds it back until it returns.
    // - `info` is the kernel's.
    unsafe {
        libc::syscall(
            libc::SYS_rt_sigaction,
            signal,
            &default,
            ptr::null_mut::<u8>(),
            SIGNAL_SET_BYTES,
        );
        libc::syscall(
            libc::SYS_rt_tgsigqueueinfo,
            libc::getpid(),
            libc::gettid(),
            signal,
            info,
        );
    }
}
