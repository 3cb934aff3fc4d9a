//! Handlers beside guards: when they run.

use std::{
    mem, ptr,
    sync::{
        Mutex as Order,
        atomic::{AtomicU32, Ordering},
    },
};

use farpage_signals::{Mutex, SignalGuard, spawn};

static HANDLED: AtomicU32 = AtomicU32::new(0);
/// Lock that lets one test run at a time: signals and their handlers belong to the process.
static ORDER: Order<()> = Order::new(());

extern "C" fn handle(_: i32) {
    HANDLED.fetch_add(1, Ordering::Relaxed);
}

/// Sets a handler that counts `signal`, and sets the count to 0.
fn count(signal: i32) {
    HANDLED.store(0, Ordering::Relaxed);
    // SAFETY: all zeros is a valid action; the handler touches an atomic.
    unsafe {
        let mut action: libc::sigaction = mem::zeroed();
        action.sa_sigaction = handle as *const () as usize;
        assert_eq!(libc::sigaction(signal, &action, ptr::null_mut()), 0);
    }
}

/// Sends a signal to this thread.
fn send(signal: i32) {
    // SAFETY: this thread is there.
    let sent = unsafe { libc::pthread_kill(libc::pthread_self(), signal) };
    assert_eq!(sent, 0);
}

fn handled() -> u32 {
    HANDLED.load(Ordering::Relaxed)
}

#[test]
fn a_signal_waits_for_the_outermost_guard() {
    let _order = ORDER.lock();
    count(libc::SIGUSR1);
    let outer = SignalGuard::new();
    let lock = Mutex::new(7);
    let mut locked = lock.lock();
    send(libc::SIGUSR1);
    *locked += 1;
    drop(locked);
    assert_eq!((*lock.lock(), handled()), (8, 0));
    drop(outer);
    assert_eq!(handled(), 1);
    send(libc::SIGUSR1);
    assert_eq!(handled(), 2);
}

#[test]
fn a_guard_that_waits_lets_signals_in_unless_another_holds_something() {
    let _order = ORDER.lock();
    count(libc::SIGUSR1);
    let outer = SignalGuard::new();
    outer.wait(|| {
        send(libc::SIGUSR1);
        assert_eq!(handled(), 1);
        // The handler and the wait have guards of their own.
        drop(SignalGuard::new());
        send(libc::SIGUSR1);
        assert_eq!(handled(), 2);
    });
    let inner = SignalGuard::new();
    send(libc::SIGUSR1);
    inner.wait(|| assert_eq!(handled(), 2));
    drop(inner);
    assert_eq!(handled(), 2);
    drop(outer);
    assert_eq!(handled(), 3);
}

#[test]
fn what_an_instruction_raises_is_let_in() {
    let _order = ORDER.lock();
    let _signals = SignalGuard::new();
    for signal in [libc::SIGBUS, libc::SIGSEGV, libc::SIGSYS] {
        count(signal);
        send(signal);
        assert_eq!(handled(), 1);
    }
}

#[test]
fn threads_of_the_runtime_hold_signals_back() {
    let _order = ORDER.lock();
    count(libc::SIGUSR1);
    let thread = spawn("held", || {
        send(libc::SIGUSR1);
        handled()
    });
    assert_eq!(thread.unwrap().join().unwrap(), 0);
    // The thread that started it lets signals in.
    send(libc::SIGUSR1);
    assert_eq!(handled(), 1);
}
