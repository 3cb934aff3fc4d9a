//! [`Table`]: a descriptor table of a runtime's, with threads that run calls and errands on it.
//!
//! The rule it keeps: the threads exist before memory is remote. A thread that is started later runs
//! code of the C library that asks the program's allocator for memory, whose own state may be
//! remote. One more is started only where all are in long calls, and no caller waits for that one
//! alone.
//!
//! One thread, the *starter*, exists from the table's beginning, and starts all others: a thread
//! inherits neither filters of system calls nor signal masks that the program's threads have by
//! then. A private table cannot be used without its threads. Those of the program's table start with
//! the first errand, or by [`Table::start`].

use std::{
    cell::Cell,
    io, mem,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    process, ptr,
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread::{Builder, JoinHandle},
};

use farpage_signals::SignalGuard;

use crate::{
    private::leave_programs_table,
    queue::{Job, Queue},
};

thread_local! {
    /// Table that this thread works on; null: the program's. Without a destructor, which would ask
    /// the program's allocator for memory.
    static CURRENT: Cell<*const Table> = const { Cell::new(ptr::null()) };
}

/// A descriptor table, and threads that work on it.
pub struct Table {
    /// Process that has the threads.
    process: u32,
    is_private: bool,
    /// Calls that threads of the program ask for, and wait for.
    calls: Arc<Queue>,
    /// Calls that threads of the runtime ask for, and do not wait for.
    errands: Arc<Queue>,
    /// Starts of threads on this table.
    starts: Arc<Queue>,
    /// Starts of threads on the program's table.
    outside: Arc<Queue>,
    /// Errands on the program's table.
    outside_errands: Arc<Queue>,
    /// True once the threads beside the starter are there.
    is_started: Mutex<bool>,
}

impl Table {
    /// Makes a table of its own, which has nothing but standard error yet.
    ///
    /// # Errors
    /// No thread can be started, or the kernel has no `close_range` (5.9).
    pub fn private() -> io::Result<Arc<Table>> {
        let table = Table::new(true)?;
        table.start().map(|()| table)
    }

    /// Makes a handle on the program's table. The threads that run errands start later.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn programs() -> io::Result<Arc<Table>> {
        Table::new(false)
    }

    fn new(is_private: bool) -> io::Result<Arc<Table>> {
        let outside = Arc::<Queue>::default();
        let starts = match is_private {
            true => Arc::default(),
            false => outside.clone(),
        };
        let errands = Arc::<Queue>::default();
        let outside_errands = match is_private {
            true => Arc::default(),
            false => errands.clone(),
        };
        let table = Arc::new(Table {
            process: process::id(),
            is_private,
            calls: Arc::default(),
            errands,
            starts,
            outside,
            outside_errands,
            is_started: Mutex::default(),
        });
        let _signals = SignalGuard::new();
        start("farpage-start", table.outside.clone(), || Ok(()))?;
        Ok(table)
    }

    /// Starts the table's threads, unless they are there. After an error the next call tries again.
    ///
    /// # Errors
    /// No thread can be started, or the kernel has no `close_range` (5.9).
    pub fn start(&self) -> io::Result<()> {
        let _signals = SignalGuard::new();
        let is_started = self.is_started.lock();
        let mut is_started = is_started.unwrap_or_else(PoisonError::into_inner);
        if !*is_started {
            self.start_threads()?;
            *is_started = true;
        }
        Ok(())
    }

    fn start_threads(&self) -> io::Result<()> {
        if self.is_private {
            let apart = || leave_programs_table(&[]);
            start("farpage-table", self.starts.clone(), apart)?;
            self.grow("farpage-call", &self.calls)?;
            start("farpage-outside", self.outside_errands.clone(), || Ok(()))?;
        }
        // An errand may send another and wait for it: one that connects looks a name up.
        for _ in 0..2 {
            self.grow("farpage-errand", &self.errands)?;
        }
        Ok(())
    }

    /// Starts one more thread of this table for a queue.
    fn grow(&self, name: &'static str, queue: &Arc<Queue>) -> io::Result<()> {
        let queue = queue.clone();
        self.by_starter(move || start(name, queue, || Ok(())))
    }

    /// Has the starter of this table start a thread by `start`, and waits for the result.
    fn by_starter<R: Send + 'static>(
        &self,
        start: impl FnOnce() -> io::Result<R> + Send + 'static,
    ) -> io::Result<R> {
        let _signals = SignalGuard::new();
        let slot = Slot::new();
        let told = slot.clone();
        self.starts.push(Box::new(move || told.put(start())));
        slot.wait()
    }

    /// Returns the table of the calling thread, if it works on a [`Table`].
    pub fn current() -> Option<Arc<Table>> {
        let current = CURRENT.get();
        if current.is_null() {
            return None;
        }
        // SAFETY: from an `Arc` that `enter` borrows as long as the pointer is set.
        unsafe {
            Arc::increment_strong_count(current);
            Some(Arc::from_raw(current))
        }
    }

    /// True in a child made by `fork`, which has neither the threads nor the descriptors.
    pub(crate) fn is_parents(&self) -> bool {
        self.process != process::id()
    }

    /// True if the program does not share this table.
    pub fn is_private(&self) -> bool {
        self.is_private
    }

    /// True if the calling thread works on this table.
    pub fn is_here(&self) -> bool {
        ptr::eq(CURRENT.get(), self)
    }

    /// Runs `call` on this table and returns its result. Panics if `call` does. In a child made by
    /// `fork`, `call` runs on the calling thread.
    pub fn run<R: Send>(self: &Arc<Self>, call: impl FnOnce() -> R + Send) -> R {
        if self.is_here() || self.is_parents() {
            return call();
        }
        if !self.is_private {
            return self.enter(call);
        }
        let slot = Slot::new();
        let told = slot.clone();
        let job: Box<dyn FnOnce() + Send + '_> = Box::new(move || {
            told.put(catch_unwind(AssertUnwindSafe(|| self.enter(call))));
        });
        // SAFETY: what the job borrows outlives it: it has been used up when the slot is filled,
        // which is waited for below, and the job is run in any case.
        let job = unsafe { mem::transmute::<Box<dyn FnOnce() + Send + '_>, Job>(job) };
        // Workers take the same locks: a handler of the program's that touches an absent page must
        // not run while they are held.
        let signals = SignalGuard::new();
        give(&self.calls, &self.starts, "farpage-call", job);
        drop(signals);
        slot.wait().unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Runs `errand` on this table some time soon, without waiting for it.
    fn errand(self: &Arc<Self>, errand: impl FnOnce() + Send + 'static) -> io::Result<()> {
        self.start()?;
        let table = self.clone();
        let job = Box::new(move || table.enter(errand));
        let _signals = SignalGuard::new();
        give(&self.errands, &self.starts, "farpage-errand", job);
        Ok(())
    }

    /// Runs `work` with this table as the thread's [`current`](Table::current) one.
    fn enter<R>(self: &Arc<Self>, work: impl FnOnce() -> R) -> R {
        struct Left(*const Table);
        impl Drop for Left {
            fn drop(&mut self) {
                CURRENT.set(self.0);
            }
        }
        let _left = Left(CURRENT.replace(Arc::as_ptr(self)));
        work()
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        if self.is_parents() {
            return;
        }
        let queues = [
            &self.calls,
            &self.errands,
            &self.starts,
            &self.outside,
            &self.outside_errands,
        ];
        queues.iter().for_each(|queue| queue.close());
    }
}

/// True if the calling thread works on a table that the program does not share.
pub fn is_private() -> bool {
    Table::current().is_some_and(|table| table.is_private)
}

/// Starts a thread on the calling thread's table, which holds signals back for good.
///
/// # Errors
/// The errors of [`Builder::spawn`].
pub fn spawn<T: Send + 'static>(
    thread: Builder,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let Some(table) = Table::current() else {
        return farpage_signals::spawn_with(thread, work);
    };
    let inside = table.clone();
    let start = move || farpage_signals::spawn_with(thread, move || inside.enter(work));
    // The threads of a private table are no thread of the program's.
    match table.is_private || table.is_parents() {
        true => start(),
        false => table.by_starter(start),
    }
}

/// Runs `work` some time soon, on a thread of the calling thread's table. Does not wait for it.
///
/// # Errors
/// No thread can be started.
pub fn errand(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    match Table::current() {
        Some(table) => table.errand(work),
        None => farpage_signals::spawn(name, work).map(drop),
    }
}

/// Runs `work` some time soon, on a thread of the program's table. Does not wait for it.
///
/// # Errors
/// No thread can be started.
pub fn errand_outside(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let Some(table) = Table::current().filter(|table| table.is_private) else {
        return errand(name, work);
    };
    let _signals = SignalGuard::new();
    let (queue, starts) = (&table.outside_errands, &table.outside);
    give(queue, starts, "farpage-outside", Box::new(work));
    Ok(())
}

/// Runs `call` on a thread of the program's table, and waits for it: code of the program's, which
/// uses its own descriptors. Runs it here if the calling thread works on that table.
///
/// # Errors
/// No thread can be started.
pub fn run_outside<R: Send + 'static>(
    name: &str,
    call: impl FnOnce() -> R + Send + 'static,
) -> io::Result<R> {
    if !is_private() {
        return Ok(call());
    }
    let slot = Slot::new();
    let told = slot.clone();
    spawn_outside(name, move || told.put(catch_unwind(AssertUnwindSafe(call))))?;
    Ok(slot.wait().unwrap_or_else(|panic| resume_unwind(panic)))
}

/// Starts a thread on the program's table, which holds signals back for good.
///
/// # Errors
/// The errors of [`Builder::spawn`].
pub fn spawn_outside(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let Some(table) = Table::current().filter(|table| table.is_private) else {
        return farpage_signals::spawn(name, work).map(drop);
    };
    let thread = Builder::new().name(name.to_owned());
    let slot = Slot::new();
    let told = slot.clone();
    (table.outside).push(Box::new(move || {
        told.put(farpage_signals::spawn_with(thread, work).map(drop));
    }));
    slot.wait()
}

/// Starts a thread as [`start`] does, by the starter of the calling thread's table.
pub(crate) fn start_apart(
    name: &'static str,
    queue: Arc<Queue>,
    first: impl FnOnce() -> io::Result<()> + Send + 'static,
) -> io::Result<()> {
    match Table::current() {
        Some(table) => table.by_starter(move || start(name, queue, first)),
        None => start(name, queue, first),
    }
}

/// Adds a job to `queue`. If its threads are in long calls, a job of `starts` starts one more.
fn give(queue: &Arc<Queue>, starts: &Queue, name: &'static str, job: Job) {
    if queue.push(job) {
        let queue = queue.clone();
        starts.push(Box::new(move || {
            if queue.is_stuck() {
                // If no thread can be started, the job waits for the others.
                let _ = start(name, queue, || Ok(()));
            }
        }));
    }
}

/// Starts a thread that takes jobs from `queue` when `first` has succeeded there.
pub(crate) fn start(
    name: &str,
    queue: Arc<Queue>,
    first: impl FnOnce() -> io::Result<()> + Send + 'static,
) -> io::Result<()> {
    let slot = Slot::new();
    let told = slot.clone();
    farpage_signals::spawn(name, move || {
        let begun = first();
        let is_begun = begun.is_ok();
        told.put(begun);
        if is_begun {
            queue.work();
        }
    })?;
    slot.wait()
}

/// A place where one thread waits for a value of another one. Shared by both, so that it lives
/// until both have left it.
struct Slot<R> {
    value: Mutex<Option<R>>,
    filled: Condvar,
}

impl<R> Slot<R> {
    fn new() -> Arc<Slot<R>> {
        Arc::new(Slot {
            value: Mutex::new(None),
            filled: Condvar::new(),
        })
    }

    fn put(&self, value: R) {
        *self.value.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
        self.filled.notify_one();
    }

    fn wait(&self) -> R {
        let mut value = self.value.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match value.take() {
                Some(value) => return value,
                None => {
                    value = self
                        .filled
                        .wait(value)
                        .unwrap_or_else(PoisonError::into_inner)
                }
            }
        }
    }
}
