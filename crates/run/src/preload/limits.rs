//! Limits that the program sets to its own address space: `setrlimit` and its kind.
//!
//! The arena's addresses are reserved from the start, and count in the kernel's sums. The rule: a
//! limit counts the program's allocations. So the kernel is given a limit that is higher by
//! farpage's own addresses, and the arena refuses requests beyond the program's limit.
//!
//! The rule holds from our constructor on, before there is an arena.
//!
//! Left out: a child is limited by the kernel's limit.

use std::{
    ffi::c_int,
    fs, process, ptr,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use farpage_vm::sigbus::on_stock_stack;
use libc::rlimit;

use crate::{
    Inside,
    state::{self, KERNEL_PAGE_BYTES},
};

/// Limits of sums that the kernel counts the arena in.
const COUNTED: [libc::__rlimit_resource_t; 2] = [libc::RLIMIT_AS, libc::RLIMIT_DATA];

/// Addresses of the heap that the C library may give to each thread of the runtime, and of a
/// thread's stack.
const HEAP_BYTES: u64 = 64 << 20;
const STACK_BYTES: u64 = 3 << 20;

/// Bytes of addresses that farpage takes.
static OURS: AtomicU64 = AtomicU64::new(0);
/// Bytes that the program may allocate in the arena, by the limits that it has set.
static MOST: AtomicU64 = AtomicU64::new(u64::MAX);
/// Limits that the program has set, in the order of [`COUNTED`].
static SET: Mutex<[Option<rlimit>; 2]> = Mutex::new([None; 2]);

/// Returns the bytes of addresses that this process has mapped.
pub(crate) fn addresses() -> u64 {
    let sizes = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = sizes.split(' ').next().and_then(|pages| pages.parse().ok());
    pages.unwrap_or(0u64) * KERNEL_PAGE_BYTES as u64
}

/// Returns the bytes of addresses that the program has mapped, roughly in a child made by `fork`.
pub(crate) fn addresses_of_program() -> u64 {
    addresses().saturating_sub(OURS.load(Ordering::Relaxed))
}

/// Notes the addresses that the runtime takes: those beyond `before`, up to `lent` bytes that a
/// server on this machine lends, and those of `threads_to_come`.
pub(crate) fn begin(before: u64, lent: u64, threads_to_come: usize) {
    let threads = fs::read_dir("/proc/self/task").map_or(0, |tasks| tasks.count() as u64);
    let to_come = threads_to_come as u64 * (HEAP_BYTES + STACK_BYTES);
    let ours = addresses().saturating_sub(before) + lent + threads * HEAP_BYTES + to_come;
    OURS.store(ours, Ordering::Relaxed);
}

/// Returns true if the addresses of this process are not limited.
pub(crate) fn are_none() -> bool {
    kernels(libc::RLIMIT_AS).rlim_cur == libc::RLIM_INFINITY
}

/// Returns true if no limit of this process counts the stacks of threads.
pub(crate) fn leave_room_for_threads() -> bool {
    let mut limits = COUNTED.iter().map(|&counted| kernels(counted));
    limits.all(|limit| limit.rlim_cur == libc::RLIM_INFINITY)
}

/// Returns true if the program's own limits allow `bytes` to be allocated in all.
pub(crate) fn allow(bytes: usize) -> bool {
    bytes as u64 <= MOST.load(Ordering::Relaxed)
}

fn kernels(resource: libc::__rlimit_resource_t) -> rlimit {
    let mut limit = rlimit {
        rlim_cur: libc::RLIM_INFINITY,
        rlim_max: libc::RLIM_INFINITY,
    };
    // SAFETY: asks only.
    unsafe {
        libc::syscall(
            libc::SYS_prlimit64,
            0,
            resource,
            ptr::null::<rlimit>(),
            &raw mut limit,
        )
    };
    limit
}

/// Returns the limit for the kernel where the program has set `asked`.
fn raised(asked: rlimit, believed: rlimit, kernels: rlimit) -> rlimit {
    let ours = OURS.load(Ordering::Relaxed);
    let raise = |limit: u64| match limit {
        libc::RLIM_INFINITY => limit,
        // Infinity would be no limit.
        limit => limit.saturating_add(ours).min(libc::RLIM_INFINITY - 1),
    };
    let mut max = raise(asked.rlim_max);
    if asked.rlim_max <= believed.rlim_max {
        // A maximum that does not grow needs no right.
        max = max.min(kernels.rlim_max);
    }
    rlimit {
        rlim_cur: raise(asked.rlim_cur).min(max),
        rlim_max: max,
    }
}

/// `prlimit`.
///
/// # Safety
/// As `prlimit`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn prlimit(
    process: libc::pid_t,
    resource: libc::__rlimit_resource_t,
    new: *const rlimit,
    old: *mut rlimit,
) -> c_int {
    let is_own = process == 0 || process == process::id() as libc::pid_t;
    // SAFETY: the caller's promise. Read before a lock is taken: it may be remote.
    let asked = (!new.is_null()).then(|| unsafe { *new });
    if is_own
        && resource == libc::RLIMIT_NPROC
        && asked.is_some_and(|asked| asked.rlim_cur < kernels(resource).rlim_cur)
    {
        begin_work();
    }
    let counted = COUNTED.iter().position(|&counted| counted == resource);
    let (Some(at), true, Some(_)) = (counted, is_own, state::runtime()) else {
        // SAFETY: the caller's promise.
        return unsafe { libc::syscall(libc::SYS_prlimit64, process, resource, new, old) as c_int };
    };
    let (before, code) = exchange(at, asked);
    if code == 0 && !old.is_null() {
        // SAFETY: the caller's promise.
        unsafe { *old = before };
    }
    code
}

/// Starts the runtime's threads, which could not start under a lower limit. If they cannot start
/// now, either, the request that needs them fails, with a line. A process that stays local needs
/// none.
fn begin_work() {
    if let Some(runtime) = state::runtime()
        && !state::serves_none()
    {
        let _inside = Inside::enter();
        // The caller's stack may be the smallest one of a thread.
        let _ = on_stock_stack(|| runtime.begin_work());
    }
}

/// Sets a limit of [`COUNTED`]. Returns the limit that the program had before, and the result of
/// the system call.
fn exchange(at: usize, asked: Option<rlimit>) -> (rlimit, c_int) {
    let resource = COUNTED[at];
    let mut set = SET.lock().unwrap_or_else(PoisonError::into_inner);
    let kernels = kernels(resource);
    let before = set[at].unwrap_or(kernels);
    let Some(asked) = asked else {
        return (before, 0);
    };
    let given = match asked.rlim_cur <= asked.rlim_max {
        true => raised(asked, before, kernels),
        // The kernel refuses a limit above its maximum.
        false => asked,
    };
    // SAFETY: a limit that lasts for the call.
    let code = unsafe {
        libc::syscall(
            libc::SYS_prlimit64,
            0,
            resource,
            &raw const given,
            ptr::null_mut::<rlimit>(),
        )
    };
    if code == 0 {
        set[at] = Some(asked);
        let most = set.iter().flatten().map(|limit| limit.rlim_cur).min();
        MOST.store(most.unwrap_or(u64::MAX), Ordering::Relaxed);
    }
    (before, code as c_int)
}

macro_rules! limits {
    ($($name:ident($($arg:ident: $type:ty),+) = ($process:expr, $resource:expr, $new:expr, $old:expr);)+) => {
        $(
            #[doc = concat!("`", stringify!($name), "`.")]
            ///
            /// # Safety
            /// The promises of the call.
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name($($arg: $type),+) -> c_int {
                // SAFETY: the caller's promise.
                unsafe { prlimit($process, $resource, $new, $old) }
            }
        )+
    };
}

limits! {
    prlimit64(process: libc::pid_t, resource: libc::__rlimit_resource_t, new: *const rlimit, old: *mut rlimit) = (process, resource, new, old);
    setrlimit(resource: libc::__rlimit_resource_t, new: *const rlimit) = (0, resource, new, ptr::null_mut());
    setrlimit64(resource: libc::__rlimit_resource_t, new: *const rlimit) = (0, resource, new, ptr::null_mut());
    getrlimit(resource: libc::__rlimit_resource_t, old: *mut rlimit) = (0, resource, ptr::null(), old);
    getrlimit64(resource: libc::__rlimit_resource_t, old: *mut rlimit) = (0, resource, ptr::null(), old);
}
