//! The library that `farpage run` preloads: large requests for memory come from an
//! [`Arena`](farpage::Arena), all others from the next allocator.
//!
//! The rules, without which a program would wait for itself:
//!
//! - The runtime's own Rust code allocates from glibc directly ([`Glibc`]), never from here, and
//!   never from the program's allocator, whose metadata may be remote.
//! - A thread that works for the runtime is *inside* ([`Inside`]): its requests are served locally
//!   (`local.rs`), and signals wait, as they do for a system call. So are all threads that it
//!   starts.
//! - Before the runtime exists (constructors that run before ours, `dlsym`), all requests go to the
//!   next allocator.
//! - `free` and its kind decide by address alone, and by where our own allocations begin
//!   (`made.rs`). A child made by `fork` has several arenas: its own, and those of its parents.
//!
//! Its files lie in layers. A file imports lower layers, and files of its own layer:
//!
//! 1. this file: threads that are inside, and lines to the user;
//! 2. what knows no arena: `next.rs` and `symbols.rs` (the next library's functions),
//!    `environment.rs`, `seccomp.rs`, `destructors.rs`, `code.rs`, `mixed.rs` (programs that define
//!    `free` alone), and the program's `signals.rs`, `old_signals.rs` and `signal_stack.rs`;
//! 3. `state.rs`: the runtime, the arenas and the options, and `made.rs`;
//! 4. what begins and ends with these: `local.rs`, `family.rs`, `limits.rs` (set by the program),
//!    `descriptors.rs`, `share.rs`, `exec.rs`, `report.rs`, `statics.rs`, `thread_stacks.rs`,
//!    `small.rs` (the allocator of small requests), `guesses.rs` and `filter.rs` (the system calls
//!    that in-thread faults need);
//! 5. `arena.rs`, which begins them all, and makes the arena at the first large request;
//! 6. memory of the arena: `mappings.rs` (the map of its addresses), `locks.rs`, `protect.rs`,
//!    `allocate.rs`, `jemalloc.rs` and `foreign.rs`;
//! 7. calls of the program: `heap.rs`, `maps.rs`, `remap.rs`, `process.rs`, `clone.rs`,
//!    `confine.rs`, `calls.rs`, `debug.rs`, `plugins.rs`.
//!
//! An interposed function stands beside the table that it is about: `mlock` in `locks.rs`.

#[path = "preload/allocate.rs"]
mod allocate;
#[path = "preload/arena.rs"]
mod arena;
#[path = "preload/calls.rs"]
mod calls;
#[path = "preload/clone.rs"]
mod clone;
#[path = "preload/code.rs"]
mod code;
#[path = "preload/confine.rs"]
mod confine;
#[path = "preload/debug.rs"]
mod debug;
#[path = "preload/descriptors.rs"]
mod descriptors;
#[path = "preload/destructors.rs"]
mod destructors;
#[path = "elf.rs"]
mod elf;
#[path = "preload/environment.rs"]
mod environment;
#[path = "preload/exec.rs"]
mod exec;
#[path = "preload/family.rs"]
mod family;
#[path = "preload/filter.rs"]
mod filter;
#[path = "preload/foreign.rs"]
mod foreign;
#[path = "preload/guesses.rs"]
mod guesses;
#[path = "preload/heap.rs"]
mod heap;
#[path = "preload/jemalloc.rs"]
mod jemalloc;
#[path = "preload/limits.rs"]
mod limits;
#[path = "preload/local.rs"]
mod local;
#[path = "preload/local_strings.rs"]
mod local_strings;
#[path = "preload/locks.rs"]
mod locks;
#[path = "preload/made.rs"]
mod made;
#[path = "preload/mappings.rs"]
mod mappings;
#[path = "preload/maps.rs"]
mod maps;
#[path = "preload/mixed.rs"]
mod mixed;
#[path = "preload/next.rs"]
mod next;
#[path = "preload/old_signals.rs"]
mod old_signals;
#[cfg(target_arch = "x86_64")]
#[path = "preload/plugins.rs"]
mod plugins;
#[path = "preload/process.rs"]
mod process;
#[path = "program.rs"]
#[allow(
    dead_code,
    reason = "`--explain` alone says the size of static variables"
)]
mod program;
#[path = "preload/protect.rs"]
mod protect;
#[path = "preload/remap.rs"]
mod remap;
#[path = "preload/report.rs"]
mod report;
#[path = "sanitizer.rs"]
mod sanitizer;
#[path = "preload/seccomp.rs"]
mod seccomp;
#[path = "preload/share.rs"]
mod share;
#[path = "preload/signal_stack.rs"]
mod signal_stack;
#[path = "preload/signals.rs"]
mod signals;
#[path = "preload/small.rs"]
mod small;
#[path = "starts.rs"]
mod starts;
#[path = "preload/state.rs"]
mod state;
#[path = "preload/statics.rs"]
mod statics;
#[path = "preload/symbols.rs"]
mod symbols;
#[path = "preload/thread_stacks.rs"]
mod thread_stacks;

use std::{
    alloc::{GlobalAlloc, Layout},
    cell::Cell,
    ffi::c_void,
};

use farpage_signals::{Allocator, Mutex, SignalGuard};

unsafe extern "C" {
    fn __libc_malloc(bytes: usize) -> *mut c_void;
    fn __libc_calloc(count: usize, bytes: usize) -> *mut c_void;
    fn __libc_realloc(old: *mut c_void, bytes: usize) -> *mut c_void;
    fn __libc_memalign(align: usize, bytes: usize) -> *mut c_void;
    fn __libc_free(old: *mut c_void);
}

/// glibc's allocator by its internal names, which no library replaces. All of its memory is local.
/// Under [`Allocator`], glibc serves threads of the program that do not work for the runtime. Where
/// the kernel gives glibc nothing, for lack of mappings, memory of `local.rs` is there: Rust ends
/// the process if it gets none.
struct Glibc;

#[global_allocator]
static ALLOCATOR: Allocator<Glibc> = Allocator::over(Glibc);

/// Alignment of glibc's allocations by default.
const ALIGN: usize = 16;

// SAFETY: both allocators keep the contract, and the address of a block tells which one made it.
// Alignments above glibc's own go to `memalign`, and what that made is freed by `free`.
unsafe impl GlobalAlloc for Glibc {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: any size and any power of two are fine.
        let made = unsafe {
            match layout.align() <= ALIGN {
                true => __libc_malloc(layout.size()),
                false => __libc_memalign(layout.align(), layout.size()),
            }
        };
        or_local(made, layout)
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above; the bytes that are zeroed were allocated.
        unsafe {
            if layout.align() <= ALIGN {
                return or_local(__libc_calloc(1, layout.size()), layout);
            }
            let made = self.alloc(layout);
            if !made.is_null() {
                made.write_bytes(0, layout.size());
            }
            made
        }
    }

    unsafe fn dealloc(&self, old: *mut u8, _: Layout) {
        // SAFETY: made above.
        unsafe {
            match local::holds(old.cast()) {
                true => local::free(old.cast()),
                false => __libc_free(old.cast()),
            }
        }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: made above; both sizes are of the memory that is copied.
        unsafe {
            if layout.align() <= ALIGN && !local::holds(old.cast()) {
                let made = __libc_realloc(old.cast(), bytes).cast::<u8>();
                if !made.is_null() {
                    return made;
                }
            }
            let made = self.alloc(Layout::from_size_align_unchecked(bytes, layout.align()));
            if !made.is_null() {
                made.copy_from_nonoverlapping(old, layout.size().min(bytes));
                self.dealloc(old, layout);
            }
            made
        }
    }
}

/// Returns what glibc has `made`, or local memory in place of null.
fn or_local(made: *mut c_void, layout: Layout) -> *mut u8 {
    match made.is_null() {
        true => local::allocate(layout.size(), layout.align()).cast(),
        false => made.cast(),
    }
}

// The library is loaded from the start, so that thread-local storage is static: reading allocates
// nothing.
thread_local! {
    /// Nesting depth of this thread inside the runtime.
    static INSIDE: Cell<u32> = const { Cell::new(0) };
    /// Depth of this thread in `pthread_create`: a handler may interrupt one call by another.
    static STARTING: Cell<u32> = const { Cell::new(0) };
}

/// True while this thread of the program starts another.
fn is_starting() -> bool {
    STARTING.get() > 0
}

/// Guard while which this thread works for the runtime. Keeps `errno`, and holds signals back: a
/// handler of the program would be taken for the runtime, and find its locks held.
struct Inside {
    errno: i32,
    /// Dropped last, when this thread works for the program again.
    signals: SignalGuard,
}

impl Inside {
    fn enter() -> Inside {
        let errno = errno();
        let signals = SignalGuard::new();
        INSIDE.set(INSIDE.get() + 1);
        Inside { errno, signals }
    }

    fn is() -> bool {
        INSIDE.get() > 0
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        set_errno(self.errno);
        INSIDE.set(INSIDE.get() - 1);
    }
}

fn errno() -> i32 {
    // SAFETY: glibc's own, of this thread.
    unsafe { *libc::__errno_location() }
}

fn set_errno(errno: i32) {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno }
}

/// Fails a call with `errno`.
fn fail(errno: i32) -> i32 {
    set_errno(errno);
    -1
}

/// Returns the result of a call, whose error is an `errno`.
fn answer(done: Result<(), i32>) -> i32 {
    done.map_or_else(fail, |()| 0)
}

/// Writes a line to standard error at once.
fn say(line: &str) {
    say_to(2, line);
}

fn say_to(descriptor: i32, line: &str) {
    let line = format!("farpage: {line}\n");
    // SAFETY: the bytes are there. A closed descriptor is the program's business.
    unsafe { libc::write(descriptor, line.as_ptr().cast(), line.len()) };
}

/// Writes a line once, however often the program gives reason for it.
fn say_once(line: &str) {
    static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let _inside = Inside::enter();
    let mut said = SAID.lock();
    let is_new = !said.iter().any(|before| before == line);
    if is_new {
        said.push(line.to_owned());
    }
    // Written without the lock, as somebody may have to read first.
    drop(said);
    if is_new {
        say(line);
    }
}

/// Ends the process with a line: a request cannot be served, or the program has misused memory.
fn give_up(line: &str) -> ! {
    say(line);
    std::process::abort()
}
