//! `clone`, and the system calls by number that copy the process: `fork`, `clone` and `clone3`.
//!
//! The rule it keeps: until the child catches its faults, the kernel writes to no memory of the
//! program's in the child: an absent page there would become a page of zeros.
//!
//! A child that shares the memory of this process has no alternate stack for signals: the kernel
//! writes the frame of SIGBUS to its stack, all of which is kept in local memory ([`keep`]).

use std::{
    ffi::{c_int, c_long, c_void},
    mem,
    ops::Range,
    ptr,
};

use farpage_vm::calls;

use crate::{
    errno, locks,
    next::next,
    process::{begins, end, freezes},
    say, set_errno, signals, state,
};

next! {
    /// `clone`.
    later_clone = c"clone"(start: extern "C" fn(*mut c_void) -> c_int, stack: *mut c_void, flags: c_int, argument: *mut c_void, parent: *mut c_int, tls: *mut c_void, child: *mut c_int) -> c_int, else -1;
}

/// Flags of `clone` that the kernel does not get for a copy of the process. It would write to
/// memory of the child whose faults are not caught yet ([`note_child`] writes later), and stop the
/// parent, which the child needs.
const LEFT_OUT: c_int = libc::CLONE_CHILD_SETTID | libc::CLONE_VFORK;
/// Flags of `clone` that make the kernel write to memory of the parent, which may be absent.
const TELLS_PARENT: c_int = libc::CLONE_PARENT_SETTID | libc::CLONE_PIDFD;

/// True if a child by `clone` with these flags can have what its parent has. Writes a line and sets
/// `errno` if not.
fn can_copy(flags: c_int) -> bool {
    let shares = flags & libc::CLONE_FILES != 0;
    if shares {
        say(
            "clone fails: a child with CLONE_FILES and without CLONE_VM would close descriptors of its parent's",
        );
        set_errno(libc::EINVAL);
    }
    !shares
}

/// Writes the id of this process, which `clone` has just made, where the flags ask for that.
///
/// # Safety
/// As `clone`.
unsafe fn note_child(flags: c_int, to: *mut c_int) {
    if flags & libc::CLONE_CHILD_SETTID != 0 {
        // SAFETY: the caller's promise.
        unsafe { to.write(libc::gettid()) };
    }
}

/// Keeps the stack of a child that shares memory, until the stack is freed.
fn keep(flags: c_int, stack: Option<Range<usize>>) {
    if let Some(stack) = stack
        && flags & libc::CLONE_VM != 0
        && signals::are_ours()
    {
        locks::keep_stack(stack);
    }
}

/// Keeps the stack of a child by `clone` of `syscall`.
#[cfg(target_arch = "x86_64")]
pub(crate) extern "C" fn keep_by_number(_number: c_long, flags: usize, stack: usize) {
    keep(flags as c_int, locks::stack_below(stack));
}

/// Start of a process made by `clone`, its argument, and where its id is written.
struct Start {
    start: extern "C" fn(*mut c_void) -> c_int,
    argument: *mut c_void,
    flags: c_int,
    child: *mut c_int,
}

/// Runs in a process made by `clone`, of whose memory it has a copy.
extern "C" fn start_copy(start: *mut c_void) -> c_int {
    end(true);
    // SAFETY: on the stack of the thread that has called `clone`, of which this is a copy.
    let start = unsafe { &*start.cast::<Start>() };
    // SAFETY: the promise of the caller of `clone`.
    unsafe { note_child(start.flags, start.child) };
    (start.start)(start.argument)
}

/// `clone`, which copies the process unless its flags share memory.
///
/// # Safety
/// As `clone`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn clone(
    start: extern "C" fn(*mut c_void) -> c_int,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent: *mut c_int,
    tls: *mut c_void,
    child: *mut c_int,
) -> c_int {
    if flags & libc::CLONE_VM != 0 || state::newest().is_none() {
        keep(flags, locks::stack_below(stack.addr()));
        // SAFETY: the caller's promise.
        return unsafe { later_clone(start, stack, flags, argument, parent, tls, child) };
    }
    if !can_copy(flags) || !begins() {
        return -1;
    }
    // The C library writes to the child's stack, which may be absent memory.
    // SAFETY: below the top of a stack.
    unsafe {
        let top = stack.cast::<u64>().sub(1);
        top.write_volatile(top.read_volatile());
    }
    if !freezes() {
        return -1;
    }
    let mut copied = Start {
        start,
        argument,
        flags,
        child,
    };
    let copied = (&raw mut copied).cast();
    let mut told = 0;
    let tells = flags & TELLS_PARENT != 0;
    let to = if tells { &raw mut told } else { parent };
    let left = flags & !LEFT_OUT;
    // SAFETY: the caller's promise; the copy of this process has a copy of `copied`.
    let made = unsafe { later_clone(start_copy, stack, left, copied, to, tls, child) };
    end(false);
    if tells && made > 0 {
        // SAFETY: the caller's promise.
        unsafe { parent.write(told) };
    }
    made
}

/// Copies this process by a call of the kernel's, and returns its result: 0 in the child.
///
/// # Safety
/// `call` is as the program has asked for, with `flags` and `child`, but for [`LEFT_OUT`] and
/// without a stack.
#[cfg(target_arch = "x86_64")]
unsafe fn copy(flags: c_int, child: usize, call: impl FnOnce() -> isize) -> isize {
    if !can_copy(flags) || !begins() || !freezes() {
        return -(errno() as isize);
    }
    let made = call();
    end(made == 0);
    if made == 0 {
        // SAFETY: this function's contract.
        unsafe { note_child(flags, integer(child)) };
    }
    made
}

/// Result of a call that copies this process. A child goes on with `stack`, unless that is 0.
#[cfg(target_arch = "x86_64")]
#[repr(C)]
pub(crate) struct Copied {
    pub(crate) result: isize,
    pub(crate) stack: usize,
}

/// Arguments of `clone3`, as far as the kernel has had them since 5.7. Those behind must be zeros.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// Size of the first version of [`CloneArgs`].
#[cfg(target_arch = "x86_64")]
const CLONE_ARGS_MIN: usize = 64;

#[cfg(target_arch = "x86_64")]
impl CloneArgs {
    /// Reads the arguments of a call. `None` if the kernel refuses them.
    ///
    /// # Safety
    /// As `clone3`.
    unsafe fn read(from: usize, bytes: usize) -> Option<CloneArgs> {
        if from == 0 || bytes < CLONE_ARGS_MIN {
            return None;
        }
        let from = ptr::with_exposed_provenance::<u8>(from);
        let (known, mut args) = (mem::size_of::<CloneArgs>(), CloneArgs::default());
        // SAFETY: the caller's promise. All bytes are valid numbers.
        unsafe {
            let to = (&raw mut args).cast::<u8>();
            to.copy_from_nonoverlapping(from, bytes.min(known));
            let mut more = (known..bytes).map(|at| from.add(at).read());
            more.all(|byte| byte == 0).then_some(args)
        }
    }
}

/// True if `clone3` shares the memory of this process, or fails. Keeps the child's stack then.
///
/// # Safety
/// As `clone3`.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe extern "C" fn clone3_shares(args: usize, bytes: usize) -> bool {
    // SAFETY: the caller's promise.
    let Some(args) = (unsafe { CloneArgs::read(args, bytes) }) else {
        return true;
    };
    let shares = args.flags & libc::CLONE_VM as u64 != 0;
    let stack = args.stack as usize..args.stack.saturating_add(args.stack_size) as usize;
    if shares && state::is_remote(stack.start, stack.len()) {
        keep(args.flags as c_int, Some(stack));
    }
    shares
}

/// Makes a call of `syscall` that copies this process: `fork`, or `clone` or `clone3` that share no
/// memory.
///
/// # Safety
/// As the call.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe extern "C" fn copy_by_number(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
) -> Copied {
    // SAFETY: the caller's promise.
    let (result, stack) = unsafe {
        match number {
            libc::SYS_clone => (copy_by_clone([a, 0, c, d, e, 0]), b),
            libc::SYS_clone3 => copy_by_clone3(a, b),
            _ => (copy(0, 0, || calls::system_call(number, [0; 6])), 0),
        }
    };
    let stack = if result == 0 { stack } else { 0 };
    Copied { result, stack }
}

/// Copies this process by `clone` without a stack.
///
/// # Safety
/// As the call.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_by_clone(mut args: calls::Arguments) -> isize {
    let [asked, _, parent, child, ..] = args;
    let (flags, mut told) = (asked as c_int, 0);
    args[0] &= !(LEFT_OUT as usize);
    let tells = flags & TELLS_PARENT != 0;
    if tells {
        args[2] = (&raw mut told).expose_provenance();
    }
    // SAFETY: this function's contract. The kernel writes to the variable.
    unsafe {
        let call = || calls::system_call(libc::SYS_clone, args);
        let result = copy(flags, child, call);
        if tells && result > 0 {
            integer(parent).write(told);
        }
        result
    }
}

/// Copies this process by `clone3` without a stack. Returns the upper end of the stack beside the
/// result.
///
/// # Safety
/// As the call, whose arguments [can be read](CloneArgs::read).
#[cfg(target_arch = "x86_64")]
unsafe fn copy_by_clone3(args: usize, bytes: usize) -> (isize, usize) {
    // SAFETY: this function's contract.
    let asked = unsafe { CloneArgs::read(args, bytes) }.expect("the caller has looked at them");
    let (flags, mut told, mut pidfd) = (asked.flags as c_int, 0, 0);
    let args = CloneArgs {
        flags: asked.flags & !(LEFT_OUT as u64),
        parent_tid: (&raw mut told).expose_provenance() as u64,
        pidfd: (&raw mut pidfd).expose_provenance() as u64,
        stack: 0,
        stack_size: 0,
        ..asked
    };
    let args_at = (&raw const args).expose_provenance();
    let call = [args_at, mem::size_of::<CloneArgs>(), 0, 0, 0, 0];
    let outputs = [
        (libc::CLONE_PARENT_SETTID, asked.parent_tid, &raw const told),
        (libc::CLONE_PIDFD, asked.pidfd, &raw const pidfd),
    ];
    // SAFETY: this function's contract. The kernel reads and writes variables.
    let result = unsafe {
        let call = || calls::system_call(libc::SYS_clone3, call);
        let result = copy(flags, asked.child_tid as usize, call);
        for (flag, to, value) in outputs {
            if result > 0 && flags & flag != 0 {
                integer(to as usize).write(value.read());
            }
        }
        result
    };
    (result, (asked.stack + asked.stack_size) as usize)
}

/// Returns the integer at an address that the program has passed as a number.
#[cfg(target_arch = "x86_64")]
fn integer(at: usize) -> *mut c_int {
    ptr::with_exposed_provenance_mut(at)
}
