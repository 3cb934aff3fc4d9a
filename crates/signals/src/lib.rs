//! Critical sections that no signal handler interrupts: [`SignalGuard`], [`Mutex`], [`Condvar`] and
//! [`spawn`]; and memory for the threads inside them: [`Allocator`].
//!
//! A handler of the program may touch an absent page at any instruction, and a collector that stops
//! the world keeps its threads in one. Serving that fault must not need anything that the
//! interrupted thread holds: a lock, a page that it owns, or a message that it has begun to send.
//!
//! The rule: a thread of the program holds signals back while it holds anything of the runtime's,
//! and lets them in where it waits and holds nothing ([`SignalGuard::wait`]). Threads of the
//! runtime hold signals back for good ([`hold_back_for_good`]).
//!
//! Two kinds of signals are never held back: those that an instruction raises, since the kernel
//! kills a thread that blocks one and raises it, and the C library's for `setuid`, which every
//! thread answers.

mod heap;

use std::{
    cell::{Cell, UnsafeCell},
    io,
    marker::PhantomData,
    mem,
    ops::{Deref, DerefMut},
    panic::RefUnwindSafe,
    ptr, sync,
    sync::{
        Arc, Barrier, PoisonError, TryLockError,
        atomic::{Ordering::SeqCst, compiler_fence},
    },
    thread::{self, Builder, JoinHandle},
    time::{Duration, Instant},
};

pub use heap::Allocator;

/// Signals that are never held back: an instruction's, and the C library's for `setuid`.
const LET_IN: [i32; 7] = [
    libc::SIGBUS,
    libc::SIGSEGV,
    libc::SIGSYS,
    libc::SIGILL,
    libc::SIGFPE,
    libc::SIGTRAP,
    33,
];

/// Signals that a guard holds back: the kernel's set of all but those in [`LET_IN`].
static HELD: u64 = {
    let (mut set, mut at) = (u64::MAX, 0);
    while at < LET_IN.len() {
        set &= !(1 << (LET_IN[at] - 1));
        at += 1;
    }
    set
};

/// Size of the kernel's signal set.
const SET_BYTES: usize = 8;

thread_local! {
    /// Number of guards of this thread that are alive and do not wait.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// Signal mask that the outermost guard found.
    static BEFORE: Cell<u64> = const { Cell::new(0) };
}

/// A guard that holds signals back in its thread while it lives. Guards nest: the outermost one
/// changes the signal mask, by one system call at either end, and the others count.
#[derive(Debug)]
#[must_use = "signals are let in again when it is dropped"]
pub struct SignalGuard {
    /// Marker that is not `Send`: a guard belongs to its thread.
    _thread: PhantomData<*const ()>,
}

impl SignalGuard {
    /// Holds signals back from here on.
    #[expect(
        clippy::new_without_default,
        reason = "a value that changes the thread is made where that is seen"
    )]
    pub fn new() -> SignalGuard {
        enter();
        SignalGuard {
            _thread: PhantomData,
        }
    }

    /// Calls `wait` with signals let in, unless another guard of this thread holds something. To be
    /// called where this guard holds nothing: a handler may run there, and leave by `longjmp`.
    pub fn wait<T>(&self, wait: impl FnOnce() -> T) -> T {
        if DEPTH.get() > 1 {
            return wait();
        }
        leave();
        let waited = wait();
        enter();
        waited
    }
}

/// Signals by which users end a process.
const ENDING: [i32; 4] = [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM];

impl SignalGuard {
    /// Calls `wait` with those signals let in that end the process and that the program neither
    /// handles nor holds back. No handler runs, so that this thread may hold something, unless
    /// another thread sets a handler meanwhile.
    pub fn wait_mortal<T>(&self, wait: impl FnOnce() -> T) -> T {
        let endings = ENDING.into_iter().filter(|&signal| is_default(signal));
        let set = endings.fold(0, |set, signal| set | 1 << (signal - 1)) & !BEFORE.get();
        exchange(libc::SIG_UNBLOCK, &set);
        let waited = wait();
        exchange(libc::SIG_BLOCK, &set);
        waited
    }
}

/// True if the kernel acts on a signal by itself. Asks the kernel by number, as [`exchange`].
fn is_default(signal: i32) -> bool {
    /// Words of the kernel's action, the first of which is the handler.
    const ACTION_WORDS: usize = 4;
    let mut action = [usize::MAX; ACTION_WORDS];
    let none = ptr::null::<usize>();
    // SAFETY: there is room for the answer, and nothing is set.
    unsafe {
        libc::syscall(
            libc::SYS_rt_sigaction,
            signal,
            none,
            action.as_mut_ptr(),
            SET_BYTES,
        );
    }
    action[0] == libc::SIG_DFL
}

impl Drop for SignalGuard {
    fn drop(&mut self) {
        leave();
    }
}

// A handler sees a depth of 0: the depth is set to 1 after the mask is, and back before. The fences
// keep the compiler from moving that across the system call, which runs handlers of this thread.

fn enter() {
    let depth = DEPTH.get();
    if depth == 0 {
        let before = exchange(libc::SIG_BLOCK, &HELD);
        compiler_fence(SeqCst);
        BEFORE.set(before);
    }
    DEPTH.set(depth + 1);
}

fn leave() {
    let depth = DEPTH.get() - 1;
    DEPTH.set(depth);
    if depth == 0 {
        let before = BEFORE.get();
        compiler_fence(SeqCst);
        exchange(libc::SIG_SETMASK, &before);
    }
}

/// Changes this thread's signal mask, and returns the old one. The call goes to the kernel by its
/// number: the program may have a `sigprocmask` of its own.
fn exchange(how: i32, set: &u64) -> u64 {
    let mut before = 0u64;
    // SAFETY: two sets of the kernel's size.
    let changed = unsafe {
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            how,
            ptr::from_ref(set),
            &raw mut before,
            SET_BYTES,
        )
    };
    debug_assert_eq!(changed, 0, "valid sets are never refused");
    before
}

/// Bounds of a nap between two looks at a lock for which there is a deadline.
const NAP_MIN: Duration = Duration::from_micros(20);
const NAP_MAX: Duration = Duration::from_millis(1);

/// A lock that holds signals back while it is held. It never allocates, also where threads wait for
/// it, and a panic of its holder leaves it usable.
#[derive(Debug, Default)]
pub struct Mutex<T>(UnsafeCell<sync::Mutex<T>>);

// SAFETY: the lock itself may be shared. Only `renew` writes to the cell, whose caller promises
// that nobody else uses the lock meanwhile.
unsafe impl<T: Send> Sync for Mutex<T> {}
impl<T> RefUnwindSafe for Mutex<T> {}

impl<T> Mutex<T> {
    /// Makes an unlocked lock around `value`.
    pub const fn new(value: T) -> Mutex<T> {
        Mutex(UnsafeCell::new(sync::Mutex::new(value)))
    }

    /// Makes the lock an unlocked one around `value`, in a child made by `fork`: a thread that only
    /// the parent has may have held the lock at the fork. The old value is not dropped.
    ///
    /// # Safety
    /// No other thread of this process uses the lock meanwhile, and no guard of it is alive.
    pub unsafe fn renew(&self, value: T) {
        // SAFETY: the caller's promise.
        unsafe { self.0.get().write(sync::Mutex::new(value)) };
    }

    fn inner(&self) -> &sync::Mutex<T> {
        // SAFETY: `renew` alone writes to the cell, while nobody has this reference.
        unsafe { &*self.0.get() }
    }

    /// Holds signals back and waits for the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let signals = SignalGuard::new();
        MutexGuard {
            lock: self.inner().lock().unwrap_or_else(PoisonError::into_inner),
            signals,
        }
    }

    /// Holds signals back and takes the lock, unless another thread holds it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let signals = SignalGuard::new();
        let lock = match self.inner().try_lock() {
            Ok(lock) => lock,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(MutexGuard { lock, signals })
    }

    /// Waits for the lock until a deadline.
    pub fn try_lock_until(&self, until: Instant) -> Option<MutexGuard<'_, T>> {
        let mut nap = NAP_MIN;
        loop {
            let locked = self.try_lock();
            let left = until.saturating_duration_since(Instant::now());
            if locked.is_some() || left.is_zero() {
                return locked;
            }
            thread::sleep(nap.min(left));
            nap = (2 * nap).min(NAP_MAX);
        }
    }

    /// Returns the value, which nobody else has.
    pub fn into_inner(self) -> T {
        (self.0.into_inner().into_inner()).unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the value, which nobody else has.
    pub fn get_mut(&mut self) -> &mut T {
        (self.0.get_mut().get_mut()).unwrap_or_else(PoisonError::into_inner)
    }
}

/// A condition that threads wait for under a [`Mutex`]. It never allocates.
#[derive(Debug, Default)]
pub struct Condvar(sync::Condvar);

impl Condvar {
    /// Makes a condition.
    pub const fn new() -> Condvar {
        Condvar(sync::Condvar::new())
    }

    /// Gives the lock up, waits for a notice, and takes the lock again.
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        let MutexGuard { lock, signals } = guard;
        let lock = self.0.wait(lock).unwrap_or_else(PoisonError::into_inner);
        MutexGuard { lock, signals }
    }

    /// Waits as [`wait`](Self::wait) does, until a deadline.
    pub fn wait_until<'a, T>(&self, guard: MutexGuard<'a, T>, until: Instant) -> MutexGuard<'a, T> {
        let MutexGuard { lock, signals } = guard;
        let left = until.saturating_duration_since(Instant::now());
        let waited = self.0.wait_timeout(lock, left);
        let (lock, _) = waited.unwrap_or_else(PoisonError::into_inner);
        MutexGuard { lock, signals }
    }

    /// Wakes one thread.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all threads.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// A [`Mutex`] that is locked. Fields are dropped in their order: the lock goes first.
#[derive(Debug)]
pub struct MutexGuard<'a, T> {
    lock: sync::MutexGuard<'a, T>,
    signals: SignalGuard,
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.lock
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.lock
    }
}

/// True if this thread belongs to the runtime or is inside a critical section of it.
pub fn holds_signals_back() -> bool {
    DEPTH.get() > 0
}

/// Calls `work` in a signal handler during which the kernel holds signals back: as inside a
/// [`SignalGuard`], without a system call.
pub fn in_handler<T>(work: impl FnOnce() -> T) -> T {
    DEPTH.set(DEPTH.get() + 1);
    let done = work();
    DEPTH.set(DEPTH.get() - 1);
    done
}

/// Holds signals back in this thread from here on: it becomes one of the runtime's.
pub fn hold_back_for_good() {
    mem::forget(SignalGuard::new());
}

/// Starts a thread that holds signals back for good.
///
/// # Errors
/// The operating system's error.
pub fn spawn<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    spawn_with(Builder::new().name(name.to_owned()), work)
}

/// Starts `thread`, which holds signals back for good. Waits until the thread has begun: the
/// standard library's first steps there ask the program's allocator.
///
/// # Errors
/// The operating system's error.
pub fn spawn_with<T: Send + 'static>(
    thread: Builder,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    // The new thread inherits the mask: no handler runs in it before it holds signals back itself.
    let _signals = SignalGuard::new();
    let begun = Arc::new(Barrier::new(2));
    let begins = begun.clone();
    let started = thread.spawn(move || {
        hold_back_for_good();
        begins.wait();
        drop(begins);
        work()
    })?;
    begun.wait();
    Ok(started)
}
