//! Protections of memory and advice on it: `mprotect`, `madvise` and `mincore`.
//!
//! Protections are the kernel's own: it raises SIGSEGV whether a page is present or not, and pages
//! come and go under any of them.
//!
//! The rule it keeps: memory that is given back to the arena is neither protected nor locked.

use std::{
    ffi::{c_int, c_uchar, c_void},
    ops::Range,
};

use farpage::Advice;
use farpage_signals::Mutex;

use crate::{
    Inside, answer, ceded, errno, fail,
    locks::{self, expect_some, is_all_plain, lock_range, unlock},
    ranges::Ranges,
    say_once,
    state::{self, KERNEL_PAGE_BYTES, State},
};

/// Protection for reading and writing.
pub(crate) const PLAIN: c_int = libc::PROT_READ | libc::PROT_WRITE;

/// Protections of ranges, except reading and writing.
static PROTECTED: Mutex<Ranges<c_int>> = Mutex::new(Ranges::new());

/// Protects addresses of the arena, or lifts a protection. The error is an `errno`.
pub(crate) fn set(addresses: Range<usize>, protection: c_int) -> Result<(), c_int> {
    match protection == PLAIN && is_all_plain() {
        true => Ok(()),
        false => change(addresses, protection),
    }
}

fn change(addresses: Range<usize>, protection: c_int) -> Result<(), c_int> {
    let mut protected = PROTECTED.lock();
    expect_some();
    kernel_protects(&addresses, protection)?;
    protected.remove(addresses.clone());
    if protection != PLAIN {
        protected.insert(addresses, protection);
    }
    Ok(())
}

/// Forgets the protections of pages that are ceded. Returns them.
pub(crate) fn forget(addresses: Range<usize>) -> Vec<(Range<usize>, c_int)> {
    PROTECTED.lock().remove(addresses)
}

fn kernel_protects(addresses: &Range<usize>, protection: c_int) -> Result<(), c_int> {
    // SAFETY: addresses of the arena, which stay mapped. What may be done there is the program's
    // own wish.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mprotect,
            addresses.start,
            addresses.len(),
            protection,
        )
    };
    if done == 0 { Ok(()) } else { Err(errno()) }
}

/// Returns the protections of `addresses`.
pub(crate) fn of(addresses: &Range<usize>) -> Vec<(Range<usize>, c_int)> {
    if is_all_plain() {
        return Vec::new();
    }
    PROTECTED.lock().within(addresses)
}

/// Makes `addresses` readable, writable and not locked. Returns false if the kernel cannot, for
/// lack of mappings.
pub(crate) fn lift(state: &State, addresses: Range<usize>) -> bool {
    if is_all_plain() {
        return true;
    }
    unlock(state, addresses.clone());
    for (part, _) in of(&addresses) {
        if set(part, PLAIN).is_err() {
            say_once(
                "a protection cannot be lifted (see `sysctl vm.max_map_count`): that memory is not used again",
            );
            return false;
        }
    }
    true
}

/// Moves the mapping at `old` to the front of `new`, with its protections and locks. All of `new`
/// is locked if the program locks all. Returns false if nothing has moved.
///
/// # Safety
/// Nobody uses `old` meanwhile, and `new` is fresh memory that nobody has seen.
pub(crate) unsafe fn relocate(state: &State, old: Range<usize>, new: Range<usize>) -> bool {
    let protected = of(&old);
    // Locked pages would not move.
    let locked = unlock(state, old.clone());
    let is_moved = lift(state, old.clone()) && {
        // SAFETY: the caller's promise.
        let moved = unsafe { state.arena.relocate(old.clone(), new.start) };
        let is_locked = || locks::made(state, new.clone());
        moved.is_ok()
            && (is_locked() || {
                // SAFETY: as before.
                let back = unsafe {
                    state
                        .arena
                        .relocate(new.start..new.start + old.len(), old.start)
                };
                back.is_err()
            })
    };
    let place = if is_moved { new.start } else { old.start };
    restore(state, protected, locked, old.start, place);
    is_moved
}

/// Restores protections and locks of memory of the arena, with a line if that fails.
pub(crate) fn renew(
    state: &State,
    protected: Vec<(Range<usize>, c_int)>,
    locked: Vec<(Range<usize>, ())>,
) {
    restore(state, protected, locked, 0, 0);
}

/// Restores protections and locks of the mapping, which has moved from `old` to `new`.
fn restore(
    state: &State,
    protected: Vec<(Range<usize>, c_int)>,
    locked: Vec<(Range<usize>, ())>,
    old: usize,
    new: usize,
) {
    let moved = |part: Range<usize>| new + (part.start - old)..new + (part.end - old);
    for (part, ()) in locked {
        // The memory was locked before, so the budget has room, unless other threads were faster.
        if lock_range(state, moved(part), 0).is_err() {
            say_once("a lock (mlock) is lost: that memory is remote again");
        }
    }
    for (part, protection) in protected {
        if set(moved(part), protection).is_err() {
            say_once("a protection is lost: see `sysctl vm.max_map_count`");
        }
    }
}

/// Protects and locks the addresses by which a mapping has grown, as its last byte is.
pub(crate) fn extend(added: Range<usize>) {
    let last = added.start - 1..added.start;
    if let Some((_, protection)) = of(&last).pop() {
        let _ = set(added.clone(), protection);
    }
    if locks::touch(&last)
        && let Some(state) = state::get()
    {
        // As the kernel does: without room, the added memory is not locked.
        let _ = lock_range(state, added, 0);
    }
}

/// Makes addresses zeros. The error is an `errno`.
///
/// # Safety
/// As [`Arena::discard`](farpage::Arena::discard).
pub(crate) unsafe fn discard(state: &State, addresses: Range<usize>) -> Result<(), c_int> {
    let page_bytes = state.arena.region().page_bytes();
    let (base, offsets) = (state.arena.addresses().start, state.offsets(&addresses));
    let first = base + offsets.start.next_multiple_of(page_bytes);
    let last = base + offsets.end / page_bytes * page_bytes;
    let (first, last) = (first.min(addresses.end), last.max(addresses.start));
    // Whole pages are discarded whatever their protection is.
    let whole = first..last.max(first);
    if !whole.is_empty() {
        // SAFETY: the caller's promise.
        unsafe { state.arena.discard(whole.clone()) }.map_err(|_| libc::EAGAIN)?;
    }
    for part in [addresses.start..whole.start, whole.end..addresses.end] {
        if !part.is_empty() {
            // SAFETY: the caller's promise.
            unsafe { overwrite(state, part) }?;
        }
    }
    Ok(())
}

/// Makes a part of a page zeros by overwriting it, which protections must allow: none changes
/// meanwhile.
///
/// # Safety
/// As [`discard`].
unsafe fn overwrite(state: &State, part: Range<usize>) -> Result<(), c_int> {
    let mut protected = PROTECTED.lock();
    let known = protected.within(&part);
    let mut lifted = known.iter().map(|(part, _)| kernel_protects(part, PLAIN));
    let done = if lifted.all(|lifted| lifted.is_ok()) {
        // SAFETY: the caller's promise.
        unsafe { state.arena.discard(part) }.map_err(|_| libc::EAGAIN)
    } else {
        say_once("memory cannot be given up: see `sysctl vm.max_map_count`");
        Err(libc::EAGAIN)
    };
    for (part, protection) in known {
        if kernel_protects(&part, protection).is_err() {
            say_once("a protection is lost: see `sysctl vm.max_map_count`");
            protected.remove(part);
        }
    }
    done
}

/// `mprotect`.
///
/// # Safety
/// As `mprotect`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mprotect(
    address: *mut c_void,
    bytes: usize,
    protection: c_int,
) -> c_int {
    match state::allocated(address, bytes) {
        // SAFETY: the caller's promise.
        None => unsafe { libc::syscall(libc::SYS_mprotect, address, bytes, protection) as c_int },
        Some((_, _, false)) => fail(libc::ENOMEM),
        Some((_, addresses, true)) => {
            let inside = Inside::enter();
            let hold = ceded::look();
            let mut parts = hold.parts(&addresses).into_iter();
            let changed = parts.try_for_each(|(part, is_ceded)| match is_ceded {
                true => ceded::protects(&part, protection),
                false => change(part, protection),
            });
            drop(hold);
            drop(inside);
            answer(changed)
        }
    }
}

/// `mincore`: the kernel knows which pages are present.
///
/// # Safety
/// As `mincore`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mincore(
    address: *mut c_void,
    bytes: usize,
    pages: *mut c_uchar,
) -> c_int {
    match state::allocated(address, bytes) {
        Some((_, _, false)) => fail(libc::ENOMEM),
        // SAFETY: the caller's promise.
        _ => unsafe { libc::syscall(libc::SYS_mincore, address, bytes, pages) as c_int },
    }
}

/// `madvise`.
///
/// # Safety
/// As `madvise`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn madvise(
    address: *mut c_void,
    bytes: usize,
    advice: c_int,
) -> c_int {
    if let Some((region, range)) = state::static_region(address, bytes)
        && let libc::MADV_DONTNEED | libc::MADV_FREE = advice
    {
        let inside = Inside::enter();
        let (base, end) = (region.as_ptr() as usize, address as usize + bytes);
        let [first, last] = [range.start, range.end].map(|offset| base + offset);
        // SAFETY: the program gives the contents up.
        let gone = unsafe { region.discard_shared(range) }.map_err(|_| libc::EINVAL);
        let beside = [address as usize..first, last..end];
        let gone = beside
            .iter()
            .filter(|part| !part.is_empty())
            .fold(gone, |gone, part| {
                // SAFETY: as above.
                unsafe { ceded::done(libc::SYS_madvise, part, [advice as usize, 0]) }.and(gone)
            });
        drop(inside);
        return answer(gone);
    }
    let Some((state, addresses, is_there)) = state::allocated(address, bytes) else {
        // SAFETY: the caller's promise.
        return unsafe { libc::syscall(libc::SYS_madvise, address, bytes, advice) as c_int };
    };
    if !(address as usize).is_multiple_of(KERNEL_PAGE_BYTES) {
        return fail(libc::EINVAL);
    }
    if !is_there {
        return fail(libc::ENOMEM);
    }
    let inside = Inside::enter();
    let hold = ceded::look();
    let mut parts = hold.parts(&addresses).into_iter();
    let advised = parts.try_for_each(|(part, is_ceded)| match is_ceded {
        // SAFETY: the program's own memory, and its own wish.
        true => unsafe { ceded::done(libc::SYS_madvise, &part, [advice as usize, 0]) },
        false => advise(state, part, advice),
    });
    drop(hold);
    drop(inside);
    answer(advised)
}

fn not_locked(addresses: &Range<usize>) -> Result<(), c_int> {
    match locks::touch(addresses) {
        true => Err(libc::EINVAL),
        false => Ok(()),
    }
}

/// Advises on `addresses` of the arena. The error is an `errno`.
fn advise(state: &State, addresses: Range<usize>, advice: c_int) -> Result<(), c_int> {
    let bytes = state.offsets(&addresses);
    match advice {
        libc::MADV_DONTNEED | libc::MADV_FREE => {
            not_locked(&addresses)?;
            // SAFETY: the program gives the contents up.
            unsafe { discard(state, addresses) }
        }
        libc::MADV_DONTNEED_LOCKED => {
            // SAFETY: as above.
            locks::without(state, &addresses.clone(), || unsafe {
                discard(state, addresses)
            })
        }
        libc::MADV_WILLNEED => {
            let _ = state.arena.region().advise(bytes, Advice::WillNeed);
            Ok(())
        }
        libc::MADV_POPULATE_READ | libc::MADV_POPULATE_WRITE => {
            let here = state.arena.region().prefetch_now(bytes);
            here.map_err(|_| libc::EFAULT)
        }
        libc::MADV_COLD | libc::MADV_PAGEOUT => {
            not_locked(&addresses)?;
            // A page that is locked in another part stays: the first or the last.
            let page_bytes = state.arena.region().page_bytes();
            let mut pages = state.pages_of(&addresses);
            if not_locked(&(pages.start..pages.start + page_bytes)).is_err() {
                pages.start += page_bytes;
            }
            if pages.start < pages.end && not_locked(&(pages.end - page_bytes..pages.end)).is_err()
            {
                pages.end -= page_bytes;
            }
            if pages.start < pages.end {
                let bytes = state.offsets(&pages);
                let _ = state.arena.region().advise(bytes, Advice::DontNeed);
            }
            Ok(())
        }
        // Backing of memory is the program's until the arena is under paging.
        libc::MADV_HUGEPAGE | libc::MADV_NOHUGEPAGE => {
            let huge = advice == libc::MADV_HUGEPAGE;
            state.arena.advise_huge(addresses, huge);
            Ok(())
        }
        // Dumps and read-ahead of memory are not the program's here. Children have all of it.
        libc::MADV_NORMAL
        | libc::MADV_RANDOM
        | libc::MADV_SEQUENTIAL
        | libc::MADV_DONTFORK
        | libc::MADV_DOFORK
        | libc::MADV_MERGEABLE
        | libc::MADV_UNMERGEABLE
        | libc::MADV_COLLAPSE
        | libc::MADV_DONTDUMP
        | libc::MADV_DODUMP => Ok(()),
        _ => Err(libc::EINVAL),
    }
}
