//! Alternate signal stacks of local memory, for threads whose program has set none.
//!
//! The kernel writes the frame of SIGBUS to the stack of the thread that faults. Where that is
//! remote memory, as a coroutine's stack from `malloc`, its page may be the absent one, and the
//! thread would end by SIGSEGV. So each thread has an alternate stack, on which the runtime's
//! handler begins.
//!
//! The rule it keeps: the program does not see these stacks. A handler of the program's that asks
//! for the alternate stack, where the program has set none, runs on such a one.

use std::{
    cell::Cell,
    ffi::{c_int, c_void},
    mem, ptr,
    sync::atomic::{AtomicI64, Ordering},
};

use crate::next::Start;

/// Bytes of a stack: a program's handler may run there. Pages that are not touched take no memory.
const STACK_BYTES: usize = 256 << 10;
/// Bytes below a stack that nobody may touch.
const GUARD_BYTES: usize = 64 << 10;

/// Start of a thread, which may end by `pthread_exit`: its unwinding passes through.
type Unwinding = extern "C-unwind" fn(*mut c_void) -> *mut c_void;

/// Number of times that the C library calls destructors of keys whose value was set again.
const LAST_ROUND: u32 = 3;

/// Key whose destructor gives a thread's stack back when the thread ends; -1 for none, so that
/// stacks stay.
static KEY: AtomicI64 = AtomicI64::new(-1);

thread_local! {
    /// Start of this thread's stack; null for none.
    static OWN: Cell<*mut c_void> = const { Cell::new(ptr::null_mut()) };
    /// Number of calls of the key's destructor.
    static ROUND: Cell<u32> = const { Cell::new(0) };
}

/// Makes the key. To be called once, before there are such stacks.
pub(crate) fn begin() {
    let mut key = 0;
    // SAFETY: a destructor that takes what `own` sets.
    if unsafe { libc::pthread_key_create(&raw mut key, Some(end)) } == 0 {
        KEY.store(key.into(), Ordering::Release);
    }
}

/// Makes `stack` the calling thread's, until the thread ends.
fn own(stack: *mut c_void) {
    OWN.set(stack);
    if let Ok(key) = KEY.load(Ordering::Acquire).try_into() {
        // SAFETY: a key of this file's. A handler may do this: it stores a value.
        unsafe { libc::pthread_setspecific(key, stack) };
    }
}

/// Start of a new thread, kept at the low end of its stack until then.
struct Errand {
    start: Start,
    argument: *mut c_void,
}

/// Maps a stack, by the kernel's own call: nothing else may see it. `None` for lack of memory.
fn map() -> Option<*mut c_void> {
    let (none, bytes) = (ptr::null_mut::<c_void>(), GUARD_BYTES + STACK_BYTES);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_STACK;
    // SAFETY: new memory, of which the guard loses its access.
    unsafe {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let mapped = libc::syscall(libc::SYS_mmap, none, bytes, access, flags, -1, 0_u64);
        if mapped == -1 {
            return None;
        }
        libc::syscall(libc::SYS_mprotect, mapped, GUARD_BYTES, libc::PROT_NONE);
        Some((mapped as *mut c_void).byte_add(GUARD_BYTES))
    }
}

fn unmap(stack: *mut c_void) {
    let bytes = GUARD_BYTES + STACK_BYTES;
    // SAFETY: mapped by `map`, and no thread's any more.
    unsafe { libc::syscall(libc::SYS_munmap, stack.byte_sub(GUARD_BYTES), bytes) };
}

fn stack_at(start: *mut c_void) -> libc::stack_t {
    libc::stack_t {
        ss_sp: start,
        ss_flags: 0,
        ss_size: STACK_BYTES,
    }
}

fn none() -> libc::stack_t {
    libc::stack_t {
        ss_sp: ptr::null_mut(),
        ss_flags: libc::SS_DISABLE,
        ss_size: 0,
    }
}

/// Makes the kernel's call. Returns 0, or -1 with `errno`.
fn call(new: Option<&libc::stack_t>, old: &mut libc::stack_t) -> c_int {
    let new = new.map_or(ptr::null(), ptr::from_ref);
    // SAFETY: what the caller has borrowed.
    unsafe { libc::syscall(libc::SYS_sigaltstack, new, ptr::from_mut(old)) as c_int }
}

/// Gives the calling thread a stack, if it has no alternate one.
pub(crate) fn give() {
    let mut before = none();
    if call(None, &mut before) != 0 || before.ss_flags & libc::SS_DISABLE == 0 {
        return;
    }
    if let Some(stack) = map() {
        take(stack);
    }
}

/// Makes `stack` the calling thread's.
fn take(stack: *mut c_void) {
    own(stack);
    call(Some(&stack_at(stack)), &mut none());
}

/// Gives a stack back at the end of its thread, after the destructors of other keys, which may
/// touch remote memory.
extern "C" fn end(stack: *mut c_void) {
    let round = ROUND.replace(ROUND.get() + 1);
    if round < LAST_ROUND {
        return own(stack);
    }
    OWN.set(ptr::null_mut());
    let mut before = none();
    call(None, &mut before);
    if before.ss_sp == stack {
        call(Some(&none()), &mut before);
    }
    unmap(stack);
}

/// Returns what `pthread_create` has to start so that the new thread has a stack before it does
/// anything else, and the argument. To be [forgotten](forget) if no thread is made.
pub(crate) fn before_start(start: Start, argument: *mut c_void) -> (Start, *mut c_void) {
    let Some(stack) = map() else {
        return (start, argument);
    };
    // SAFETY: the stack's memory, which has room.
    unsafe { stack.cast::<Errand>().write(Errand { start, argument }) };
    (begin_start(), stack)
}

fn begin_start() -> Start {
    // SAFETY: the same function; who starts threads lets unwinding pass.
    unsafe { mem::transmute::<Unwinding, Start>(start_thread) }
}

/// Gives back what [`before_start`] has returned.
pub(crate) fn forget((start, argument): (Start, *mut c_void)) {
    if ptr::fn_addr_eq(start, begin_start()) {
        unmap(argument);
    }
}

extern "C-unwind" fn start_thread(stack: *mut c_void) -> *mut c_void {
    // SAFETY: written by `before_start`, for this thread.
    let Errand { start, argument } = unsafe { stack.cast::<Errand>().read() };
    take(stack);
    // SAFETY: the same function.
    let start = unsafe { mem::transmute::<Start, Unwinding>(start) };
    start(argument)
}

/// Gives the interrupted thread a stack when the handler returns, if it has no alternate one: a
/// thread that began before the arena, or by a call inside the C library.
///
/// # Safety
/// `context` is what the kernel gave the handler.
pub(crate) unsafe fn attach(context: *mut c_void) {
    // SAFETY: the caller's promise.
    let told = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_stack };
    if told.ss_flags & libc::SS_DISABLE != 0
        && OWN.get().is_null()
        && let Some(stack) = map()
    {
        own(stack);
        *told = stack_at(stack);
    }
}

/// Does what `sigaltstack` does for the program: its own stack, or none, is set and told.
pub(crate) fn exchange(new: Option<libc::stack_t>, old: Option<&mut libc::stack_t>) -> c_int {
    let own = OWN.get();
    let mut before = none();
    let kernels = match new {
        Some(new) if new.ss_flags & libc::SS_DISABLE != 0 && !own.is_null() => Some(stack_at(own)),
        new => new,
    };
    let done = call(kernels.as_ref(), &mut before);
    if let (0, Some(old)) = (done, old) {
        *old = match !own.is_null() && before.ss_sp == own {
            true => none(),
            false => before,
        };
    }
    done
}
