//! The program's signals, with in-thread faults.
//!
//! The program's threads serve faults in a handler of SIGBUS, and make some system calls in a
//! handler of SIGSYS (`filter.rs`). The kernel kills a thread that raises one of these signals
//! while it is held back. The rules: both handlers stay, neither signal is ever held back, and the
//! program sees the state that it has asked for. A SIGBUS that is not a fault of ours goes to the
//! program's handler, with the kernel's own information.
//!
//! All other signals are the program's own; only their handlers must not hold SIGBUS and SIGSYS
//! back.
//!
//! Left out: a SIGBUS or SIGSYS that a process *sends* does not wait while the program holds it
//! back.

use std::{
    cell::Cell,
    ffi::{c_int, c_void},
    mem, ptr,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
};

use farpage_signals::{Mutex, MutexGuard};
use farpage_vm::sigbus;
use libc::{sigaction as Action, sigset_t, timespec};

use crate::{INSIDE, Inside, next::next, signal_stack};

/// Looks `ppoll` up, in which the runtime's threads sleep. A thread that starts while the program
/// loads a library would wait there for the loader's lock.
pub(crate) fn look_up() {
    let now = timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: looks at no descriptors.
    unsafe { later_ppoll(ptr::null_mut(), 0, &raw const now, ptr::null()) };
}

next! {
    /// `sigaction`.
    later_sigaction = c"sigaction"(signal: c_int, new: *const Action, old: *mut Action) -> c_int, else -1;
    /// `sigprocmask`.
    later_sigprocmask = c"sigprocmask"(how: c_int, new: *const sigset_t, old: *mut sigset_t) -> c_int, else -1;
    /// `pthread_sigmask`.
    later_pthread_sigmask = c"pthread_sigmask"(how: c_int, new: *const sigset_t, old: *mut sigset_t) -> c_int, else libc::EINVAL;
    /// `sigsuspend`.
    later_sigsuspend = c"sigsuspend"(held: *const sigset_t) -> c_int, else -1;
    /// `pselect`.
    later_pselect = c"pselect"(count: c_int, read: *mut libc::fd_set, write: *mut libc::fd_set, except: *mut libc::fd_set, timeout: *const timespec, held: *const sigset_t) -> c_int, else -1;
    /// `ppoll`.
    later_ppoll = c"ppoll"(fds: *mut libc::pollfd, count: libc::nfds_t, timeout: *const timespec, held: *const sigset_t) -> c_int, else -1;
    /// `epoll_pwait`.
    later_epoll_pwait = c"epoll_pwait"(fd: c_int, events: *mut libc::epoll_event, most: c_int, timeout: c_int, held: *const sigset_t) -> c_int, else -1;
    /// `signal`.
    later_signal = c"signal"(signal: c_int, handler: usize) -> usize, else libc::SIG_ERR;
    /// `__sysv_signal`.
    later_sysv_signal = c"__sysv_signal"(signal: c_int, handler: usize) -> usize, else libc::SIG_ERR;
    /// `pthread_attr_setsigmask_np`.
    later_set_attribute = c"pthread_attr_setsigmask_np"(attributes: *mut libc::pthread_attr_t, held: *const sigset_t) -> c_int, else libc::EINVAL;
}

/// Signals that are never held back.
const OURS: u64 = bit(libc::SIGBUS) | bit(libc::SIGSYS);
const SIGNALS: usize = 65;
/// Bytes of the kernel's signal set.
const SET_BYTES: usize = 8;

/// Signals that end a process by default, and that a program or its user may send or cause.
const FATAL: [c_int; 16] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGILL,
    libc::SIGABRT,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGSEGV,
    libc::SIGPIPE,
    libc::SIGALRM,
    libc::SIGTERM,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGXCPU,
    libc::SIGXFSZ,
    libc::SIGSYS,
];

/// Handler that takes all arguments of the kernel.
pub(crate) type Handler = extern "C-unwind" fn(c_int, *mut libc::siginfo_t, *mut c_void);

/// The runtime's handler of SIGBUS.
static RUNTIMES: AtomicUsize = AtomicUsize::new(0);

/// Handler of signals that the program does not handle. 0 for none.
static UNHANDLED: AtomicUsize = AtomicUsize::new(0);

static ARE_OURS: AtomicBool = AtomicBool::new(false);

/// Actions that the program believes to be set, where the kernel has others.
struct Believed {
    /// Action of SIGBUS.
    sigbus: Action,
    sigsys: Action,
    /// SIGBUS and SIGSYS in the mask of each other signal's action.
    held: [u64; SIGNALS],
}

/// Locked by `sigaction`, which a handler may call, too: the lock holds signals back.
static BELIEVED: Mutex<Option<Believed>> = Mutex::new(None);

thread_local! {
    /// SIGBUS and SIGSYS, if the program believes that this thread holds them back.
    static HELD: Cell<u64> = const { Cell::new(0) };
}

const fn bit(signal: c_int) -> u64 {
    1 << (signal - 1)
}

/// True if SIGBUS and SIGSYS are ours.
pub(crate) fn are_ours() -> bool {
    ARE_OURS.load(Ordering::Relaxed)
}

/// Takes SIGBUS and SIGSYS over. The runtime's handler is installed already.
pub(crate) fn begin() {
    let held = change_held(libc::SIG_UNBLOCK, OURS);
    HELD.set(held & OURS);
    // SAFETY: all zeros is SIG_DFL.
    let [mut sigsys, mut runtimes]: [Action; 2] = unsafe { mem::zeroed() };
    // SAFETY: asks only.
    unsafe {
        later_sigaction(libc::SIGSYS, ptr::null(), &raw mut sigsys);
        later_sigaction(libc::SIGBUS, ptr::null(), &raw mut runtimes);
    }
    let sigbus = sigbus::set_previous(None);
    *believed() = Some(Believed {
        sigbus,
        sigsys,
        held: [0; SIGNALS],
    });
    RUNTIMES.store(runtimes.sa_sigaction, Ordering::Relaxed);
    runtimes.sa_sigaction = on_sigbus as *const () as usize;
    install(libc::SIGBUS, &runtimes);
    ARE_OURS.store(true, Ordering::Relaxed);
    exchange(libc::SIGBUS, Some(sigbus));
}

/// Serves a fault. The thread works for the runtime meanwhile.
extern "C-unwind" fn on_sigbus(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    INSIDE.set(INSIDE.get() + 1);
    // SAFETY: the handler that the runtime has installed, which takes these.
    let runtimes: Handler = unsafe { mem::transmute(RUNTIMES.load(Ordering::Relaxed)) };
    runtimes(signal, info, context);
    // SAFETY: the kernel's.
    unsafe { signal_stack::attach(context) };
    INSIDE.set(INSIDE.get() - 1);
}

/// Handles a SIGBUS that is not the runtime's own by the program's handler, which works for the
/// program and may leave by `longjmp`.
extern "C-unwind" fn to_program(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let action = believed().as_ref().map(|believed| believed.sigbus);
    let action = action.expect("there since they are ours");
    let inside = INSIDE.replace(INSIDE.get() - 1);
    call(&action, signal, info, context);
    INSIDE.set(inside);
}

/// Calls a handler, if the action has one.
fn call(action: &Action, signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    match action.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => {}
        handler if action.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: what was installed with SA_SIGINFO takes these.
            let handler: Handler = unsafe { mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: what was installed without SA_SIGINFO takes this.
            let handler: extern "C-unwind" fn(c_int) = unsafe { mem::transmute(handler) };
            handler(signal);
        }
    }
}

/// Holds the program's signals back in this thread, which works for the runtime. Signals that a
/// mistake of our own raises still end the process. So would SIGSYS, by which the filter stops a
/// call of a thread that was started after the filter: also one with such a number in a register
/// that the call does not use. Signals of the C library below `SIGRTMIN` reach every thread:
/// `setuid` waits until each has followed.
pub(crate) fn leave_to_program() {
    let raised = [
        libc::SIGSEGV,
        libc::SIGBUS,
        libc::SIGFPE,
        libc::SIGILL,
        libc::SIGABRT,
        libc::SIGSYS,
    ];
    let of_the_library = 32..libc::SIGRTMIN();
    let set = raised
        .into_iter()
        .chain(of_the_library)
        .fold(u64::MAX, |set, signal| set & !bit(signal));
    change_held(libc::SIG_BLOCK, set);
}

/// Calls the C library's `sigaction`.
pub(crate) fn install(signal: c_int, action: &Action) -> c_int {
    // SAFETY: a valid action, whose handler the caller answers for.
    unsafe { later_sigaction(signal, action, ptr::null_mut()) }
}

/// Handles signals that end the process, and that the program does not handle, by `handler`. The
/// program sees no handler.
pub(crate) fn handle_fatal(handler: Handler) {
    UNHANDLED.store(handler as usize, Ordering::Relaxed);
    if are_ours() {
        // The runtime's handler is installed, and calls the handler that stands for none.
        let (believed, _) = exchange(libc::SIGBUS, None);
        exchange(libc::SIGBUS, Some(believed));
    }
    for signal in FATAL {
        // SAFETY: all zeros is a valid action; the handler takes what SA_SIGINFO gives.
        unsafe {
            let [mut action, mut before]: [Action; 2] = mem::zeroed();
            let code = later_sigaction(signal, ptr::null(), &raw mut before);
            if code != 0 || before.sa_sigaction != libc::SIG_DFL {
                continue;
            }
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            install(signal, &action);
        }
    }
}

/// Returns the handler of signals that the program does not handle.
fn unhandled() -> Option<usize> {
    Some(UNHANDLED.load(Ordering::Relaxed)).filter(|&handler| handler != 0)
}

/// Hides the handler of [`handle_fatal`] from the program.
fn as_told(mut action: Action) -> Action {
    if unhandled() == Some(action.sa_sigaction) {
        // SAFETY: all zeros is SIG_DFL.
        action = unsafe { mem::zeroed() };
    }
    action
}

/// Calls the C library's `sigaction` before a signal is ours, and stops holding the signal back.
pub(crate) fn exchange_kernels(signal: c_int, new: &Action, old: &mut Action) -> c_int {
    change_held(libc::SIG_UNBLOCK, bit(signal));
    // SAFETY: a valid action, whose handler the caller answers for.
    unsafe { later_sigaction(signal, new, old) }
}

fn believed() -> MutexGuard<'static, Option<Believed>> {
    BELIEVED.lock()
}

/// Changes the signals that the kernel holds back for this thread. Returns the signals before.
fn change_held(how: c_int, set: u64) -> u64 {
    let mut before = 0u64;
    // SAFETY: sets of the kernel's size.
    unsafe {
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            how,
            &raw const set,
            &raw mut before,
            SET_BYTES,
        );
    }
    before
}

/// Returns the kernel's part of a set.
fn word(set: &mut sigset_t) -> &mut u64 {
    // SAFETY: a set begins with the kernel's 8 bytes, and is aligned as those.
    unsafe { &mut *ptr::from_mut(set).cast::<u64>() }
}

/// Copies a set without SIGBUS and SIGSYS. `None` if `set` is null or they are not ours.
///
/// # Safety
/// `set` is null or valid.
unsafe fn without_ours(set: *const sigset_t) -> Option<sigset_t> {
    if set.is_null() || !are_ours() {
        return None;
    }
    // SAFETY: the caller's promise.
    let mut set = unsafe { *set };
    *word(&mut set) &= !OURS;
    Some(set)
}

fn address<T>(of: Option<&T>, otherwise: *const T) -> *const T {
    of.map_or(otherwise, ptr::from_ref)
}

/// Does what `sigaction` does, also in a program that has a `sigaction` of its own, which calls the
/// exported one.
///
/// # Safety
/// As `sigaction`.
pub(crate) unsafe fn act(signal: c_int, new: *const Action, old: *mut Action) -> c_int {
    if !are_ours() || !(1..SIGNALS as c_int).contains(&signal) {
        // SAFETY: the caller's promise.
        unsafe {
            let code = later_sigaction(signal, new, old);
            if code == 0 && !old.is_null() {
                *old = as_told(*old);
            }
            return code;
        }
    }
    // Before all signals are held back: `new` may point to remote memory.
    // SAFETY: the caller's promise.
    let new = (!new.is_null()).then(|| unsafe { *new });
    let (before, code) = exchange(signal, new);
    if code == 0 && !old.is_null() {
        // SAFETY: the caller's promise.
        unsafe { *old = before };
    }
    code
}

macro_rules! actions {
    ($($name:ident)+) => {
        $(
            #[doc = concat!("`", stringify!($name), "`.")]
            ///
            /// # Safety
            /// As `sigaction`.
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name(
                signal: c_int,
                new: *const Action,
                old: *mut Action,
            ) -> c_int {
                // SAFETY: the caller's promise.
                unsafe { act(signal, new, old) }
            }
        )+
    };
}

// A program with a `sigaction` of its own, as Erlang's runtime, finds the next one by either name.
actions! { sigaction __sigaction }

/// Sets the action `new` of a signal. Returns the action that the program believes was set, and the
/// result of `sigaction`.
fn exchange(signal: c_int, new: Option<Action>) -> (Action, c_int) {
    // SAFETY: all zeros is a valid action.
    let mut before: Action = unsafe { mem::zeroed() };
    let mut lock = believed();
    let believed = lock.as_mut().expect("there since they are ours");
    let kernels = new.map(|mut action| {
        *word(&mut action.sa_mask) &= !OURS;
        action
    });
    match signal {
        libc::SIGBUS => {
            let kernels = kernels.map(|mut action| {
                if action.sa_sigaction != libc::SIG_DFL && action.sa_sigaction != libc::SIG_IGN {
                    // The handler may touch remote memory, and is called by ours.
                    action.sa_flags |= libc::SA_NODEFER | libc::SA_SIGINFO;
                    action.sa_sigaction = to_program as *const () as usize;
                } else if action.sa_sigaction == libc::SIG_DFL
                    && let Some(handler) = unhandled()
                {
                    action.sa_flags |= libc::SA_SIGINFO;
                    action.sa_sigaction = handler;
                }
                action
            });
            let was = sigbus::set_previous(kernels.as_ref());
            before = believed.sigbus;
            if was.sa_sigaction == libc::SIG_DFL {
                // Reset by SA_RESETHAND, if not by the program.
                before.sa_sigaction = libc::SIG_DFL;
            }
            believed.sigbus = new.unwrap_or(before);
        }
        libc::SIGSYS => {
            before = believed.sigsys;
            believed.sigsys = new.unwrap_or(before);
        }
        _ => {
            let new_at = address(kernels.as_ref(), ptr::null());
            // SAFETY: the caller of `sigaction` answers for its action.
            let code = unsafe { later_sigaction(signal, new_at, &raw mut before) };
            if code != 0 {
                return (before, code);
            }
            before = as_told(before);
            *word(&mut before.sa_mask) |= believed.held[signal as usize];
            if let Some(mut new) = new {
                believed.held[signal as usize] = *word(&mut new.sa_mask) & OURS;
            }
        }
    }
    (as_told(before), 0)
}

/// Passes on a SIGSYS that is not ours: to the program's handler, or ends the process.
pub(crate) fn pass_on_sigsys(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let action = {
        let lock = believed();
        let believed = lock.as_ref().expect("there since they are ours");
        believed.sigsys
    };
    if action.sa_sigaction == libc::SIG_DFL {
        // SAFETY: all zeros is SIG_DFL; the signal ends the process.
        unsafe {
            let default: Action = mem::zeroed();
            later_sigaction(signal, &raw const default, ptr::null_mut());
            libc::raise(signal);
        }
    }
    call(&action, signal, info, context);
}

/// Implements `signal` and its kind, which `flags` tell apart.
fn simple(signal: c_int, handler: usize, flags: c_int) -> usize {
    // SAFETY: all zeros is a valid action.
    let mut action: Action = unsafe { mem::zeroed() };
    action.sa_sigaction = handler;
    action.sa_flags = flags;
    if flags & libc::SA_NODEFER == 0 {
        *word(&mut action.sa_mask) = bit(signal);
    }
    let (before, code) = exchange(signal, Some(action));
    if code == 0 {
        before.sa_sigaction
    } else {
        libc::SIG_ERR
    }
}

fn is_a_signal(signal: c_int, handler: usize) -> bool {
    (1..SIGNALS as c_int).contains(&signal) && handler != libc::SIG_ERR
}

macro_rules! signals {
    ($($name:ident = $later:ident, $flags:expr;)+) => {
        $(
            #[doc = concat!("`", stringify!($name), "`.")]
            ///
            /// # Safety
            /// As `signal`.
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name(signal: c_int, handler: usize) -> usize {
                if are_ours() && is_a_signal(signal, handler) {
                    return simple(signal, handler, $flags);
                }
                // SAFETY: the caller's promise.
                let before = unsafe { $later(signal, handler) };
                if unhandled() == Some(before) {
                    return libc::SIG_DFL;
                }
                before
            }
        )+
    };
}

signals! {
    signal = later_signal, libc::SA_RESTART;
    bsd_signal = later_signal, libc::SA_RESTART;
    ssignal = later_signal, libc::SA_RESTART;
    sysv_signal = later_sysv_signal, libc::SA_RESETHAND | libc::SA_NODEFER;
    __sysv_signal = later_sysv_signal, libc::SA_RESETHAND | libc::SA_NODEFER;
}

type Change = unsafe fn(c_int, *const sigset_t, *mut sigset_t) -> c_int;

/// Changes the signals that this thread holds back, and those that the program believes it does.
///
/// # Safety
/// As `sigprocmask`.
unsafe fn mask(later: Change, how: c_int, new: *const sigset_t, old: *mut sigset_t) -> c_int {
    if !are_ours() || Inside::is() {
        // SAFETY: the caller's promise.
        return unsafe { later(how, new, old) };
    }
    // SAFETY: the caller's promise; all zeros is a valid set. What the caller has may be remote,
    // and is not touched while signals are held back.
    unsafe {
        let asked = if new.is_null() {
            0
        } else {
            *word(&mut { *new }) & OURS
        };
        let kernels = without_ours(new);
        let mut before: sigset_t = mem::zeroed();
        let code = later(how, address(kernels.as_ref(), ptr::null()), &raw mut before);
        if code != 0 {
            return code;
        }
        let held = HELD.get();
        if !new.is_null() {
            HELD.set(match how {
                libc::SIG_BLOCK => held | asked,
                libc::SIG_UNBLOCK => held & !asked,
                _ => asked,
            });
        }
        if !old.is_null() {
            *word(&mut before) |= held;
            *old = before;
        }
        0
    }
}

/// Does what `sigprocmask` does, also in a program that has one of its own.
///
/// # Safety
/// As `sigprocmask`.
pub(crate) unsafe fn hold(how: c_int, new: *const sigset_t, old: *mut sigset_t) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { mask(later_sigprocmask, how, new, old) }
}

/// Waits as `sigsuspend` does, also in a program that has one of its own.
///
/// # Safety
/// As `sigsuspend`.
pub(crate) unsafe fn suspend(held: *const sigset_t) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let kernels = without_ours(held);
        later_sigsuspend(address(kernels.as_ref(), held))
    }
}

/// `sigprocmask`.
///
/// # Safety
/// As `sigprocmask`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn sigprocmask(
    how: c_int,
    new: *const sigset_t,
    old: *mut sigset_t,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { hold(how, new, old) }
}

/// `pthread_sigmask`.
///
/// # Safety
/// As `pthread_sigmask`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pthread_sigmask(
    how: c_int,
    new: *const sigset_t,
    old: *mut sigset_t,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { mask(later_pthread_sigmask, how, new, old) }
}

macro_rules! waits {
    ($($name:ident = $later:ident($($arg:ident: $type:ty),*);)+) => {
        $(
            #[doc = concat!("`", stringify!($name), "`.")]
            ///
            /// # Safety
            /// As the call.
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C-unwind" fn $name($($arg: $type,)* held: *const sigset_t) -> c_int {
                // SAFETY: the caller's promise.
                unsafe {
                    let kernels = without_ours(held);
                    $later($($arg,)* address(kernels.as_ref(), held))
                }
            }
        )+
    };
}

waits! {
    sigsuspend = later_sigsuspend();
    __sigsuspend = later_sigsuspend();
    pselect = later_pselect(count: c_int, read: *mut libc::fd_set, write: *mut libc::fd_set, except: *mut libc::fd_set, timeout: *const timespec);
    ppoll = later_ppoll(fds: *mut libc::pollfd, count: libc::nfds_t, timeout: *const timespec);
    epoll_pwait = later_epoll_pwait(fd: c_int, events: *mut libc::epoll_event, most: c_int, timeout: c_int);
    pthread_attr_setsigmask_np = later_set_attribute(attributes: *mut libc::pthread_attr_t);
}
