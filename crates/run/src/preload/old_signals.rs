//! Calls on signals of System V and of BSD, which the C library makes without its own `sigaction`
//! and `sigprocmask`: here they are made by those of [`signals`](super::signals).
//!
//! The rule they keep: a program that holds all signals back, or sets an action, by an old call
//! holds back no signal of the runtime's, and replaces none of its handlers.

use std::{ffi::c_int, mem, ptr};

use libc::{sigaction as Action, sigset_t};

use super::signals::{act, hold, suspend};

/// Disposition of `sigset` that holds a signal back: `SIG_HOLD`, which the `libc` crate lacks.
const SIG_HOLD: usize = 2;

/// Returns the set of the signals of BSD's `mask`: bit 0 is signal 1.
fn set_of(mask: c_int) -> sigset_t {
    // SAFETY: all zeros is the empty set.
    let mut set: sigset_t = unsafe { mem::zeroed() };
    for signal in (1..=32).filter(|signal| mask >> (signal - 1) & 1 == 1) {
        // SAFETY: the set is this function's.
        unsafe { libc::sigaddset(&raw mut set, signal) };
    }
    set
}

/// Returns the signals up to 32 of `set`, as BSD's masks have them.
fn mask_of(set: &sigset_t) -> c_int {
    // SAFETY: reads the set alone.
    let is_in = |signal: &c_int| unsafe { libc::sigismember(set, *signal) == 1 };
    let signals = (1..=32).filter(is_in);
    signals.fold(0, |mask, signal| mask | 1 << (signal - 1))
}

/// Changes the signals that this thread holds back by BSD's `mask`. Returns those before.
fn change(how: c_int, mask: c_int) -> c_int {
    // SAFETY: all zeros is the empty set.
    let mut before: sigset_t = unsafe { mem::zeroed() };
    // SAFETY: sets of this function's.
    match unsafe { hold(how, &set_of(mask), &raw mut before) } {
        0 => mask_of(&before),
        _ => -1,
    }
}

/// Changes whether this thread holds one signal back.
fn change_one(how: c_int, signal: c_int) -> c_int {
    // SAFETY: all zeros is the empty set; what is no signal is refused with `EINVAL`.
    unsafe {
        let mut set: sigset_t = mem::zeroed();
        match libc::sigaddset(&raw mut set, signal) {
            0 => hold(how, &raw const set, ptr::null_mut()),
            failed => failed,
        }
    }
}

/// `sigblock`.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn sigblock(mask: c_int) -> c_int {
    change(libc::SIG_BLOCK, mask)
}

/// `sigsetmask`.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn sigsetmask(mask: c_int) -> c_int {
    change(libc::SIG_SETMASK, mask)
}

/// `siggetmask`.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn siggetmask() -> c_int {
    change(libc::SIG_BLOCK, 0)
}

/// `sighold`.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn sighold(signal: c_int) -> c_int {
    change_one(libc::SIG_BLOCK, signal)
}

/// `sigrelse`.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn sigrelse(signal: c_int) -> c_int {
    change_one(libc::SIG_UNBLOCK, signal)
}

/// Sets the plain action `handler`. Returns the handler before, or `SIG_ERR`.
fn set_handler(signal: c_int, handler: usize) -> usize {
    // SAFETY: all zeros is a valid action.
    let [mut action, mut before]: [Action; 2] = unsafe { mem::zeroed() };
    action.sa_sigaction = handler;
    // SAFETY: the program's handler, for which the program answers.
    match unsafe { act(signal, &raw const action, &raw mut before) } {
        0 => before.sa_sigaction,
        _ => libc::SIG_ERR,
    }
}

/// `sigignore`.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn sigignore(signal: c_int) -> c_int {
    match set_handler(signal, libc::SIG_IGN) {
        libc::SIG_ERR => -1,
        _ => 0,
    }
}

/// `sigset`.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn sigset(signal: c_int, disposition: usize) -> usize {
    // SAFETY: all zeros is a valid action, and the empty set.
    let (mut seen, mut held): (Action, sigset_t) = unsafe { mem::zeroed() };
    // SAFETY: asks only.
    let before = unsafe {
        if act(signal, ptr::null(), &raw mut seen) != 0 {
            return libc::SIG_ERR;
        }
        hold(libc::SIG_BLOCK, ptr::null(), &raw mut held);
        match libc::sigismember(&raw const held, signal) {
            1 => SIG_HOLD,
            _ => seen.sa_sigaction,
        }
    };
    if disposition == SIG_HOLD {
        change_one(libc::SIG_BLOCK, signal);
        return before;
    }
    match set_handler(signal, disposition) {
        libc::SIG_ERR => libc::SIG_ERR,
        _ => {
            change_one(libc::SIG_UNBLOCK, signal);
            before
        }
    }
}

/// Waits for a signal while exactly those of BSD's `mask` are held back.
fn pause_with(mask: c_int) -> c_int {
    // SAFETY: a set of this function's.
    unsafe { suspend(&set_of(mask)) }
}

/// Waits for a signal while `signal` is not held back.
fn pause_for(signal: c_int) -> c_int {
    // SAFETY: a set of this function's; what is no signal is refused with `EINVAL`.
    unsafe {
        let mut held: sigset_t = mem::zeroed();
        hold(libc::SIG_BLOCK, ptr::null(), &raw mut held);
        match libc::sigdelset(&raw mut held, signal) {
            0 => suspend(&raw const held),
            failed => failed,
        }
    }
}

/// `sigpause` of BSD.
#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn sigpause(mask: c_int) -> c_int {
    pause_with(mask)
}

/// `sigpause` of System V.
#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn __xpg_sigpause(signal: c_int) -> c_int {
    pause_for(signal)
}

/// Waits as [`__xpg_sigpause`] or [`sigpause`] does, by the C library's name for both.
#[unsafe(no_mangle)]
pub(crate) extern "C-unwind" fn __sigpause(signal_or_mask: c_int, is_signal: c_int) -> c_int {
    match is_signal {
        0 => pause_with(signal_or_mask),
        _ => pause_for(signal_or_mask),
    }
}
