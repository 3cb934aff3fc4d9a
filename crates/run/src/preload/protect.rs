//! Protections of memory and advice on it: `mprotect`, `madvise` and `mincore`.
//!
//! Protections are the kernel's own: it raises SIGSEGV whether a page is present or not, and pages
//! come and go under any of them.
//!
//! The rule it keeps: memory that is given back to the arena is neither protected nor locked.

use std::{
    ffi::{c_int, c_long, c_uchar, c_void},
    ops::Range,
};

use farpage::Advice;
use farpage_signals::Mutex;

use crate::{
    Inside, answer, fail,
    locks::{self, lock_range, unlock},
    mappings::{self, Fact, Map, PLAIN, protects},
    say_once,
    state::{self, KERNEL_PAGE_BYTES, State},
};

/// All bits of a protection; 8 is `PROT_SEM`.
const ALL: c_int = PLAIN | libc::PROT_EXEC | 8;

/// Protects addresses of the arena, or lifts a protection. The error is an `errno`.
pub(crate) fn set(map: &mut Map, addresses: &Range<usize>, protection: c_int) -> Result<(), c_int> {
    match protection == PLAIN && !map.has(addresses, Fact::is_protected) {
        true => Ok(()),
        false => change(map, addresses, protection, || {
            protects(addresses, protection)
        }),
    }
}

/// Protects used addresses of the arena that hold nothing, as [`set`] does. Without access they are
/// not used any more. The error is an `errno`.
pub(crate) fn set_empty(
    map: &mut Map,
    state: &State,
    addresses: &Range<usize>,
    protection: c_int,
) -> Result<(), c_int> {
    set(map, addresses, protection)?;
    if protection == libc::PROT_NONE {
        state.arena.end_use(addresses);
    }
    Ok(())
}

/// Counts addresses of the arena as used that are to have a protection. The error is an `errno`.
pub(crate) fn begin_use(
    state: &State,
    addresses: &Range<usize>,
    protection: c_int,
) -> Result<(), c_int> {
    if protection == libc::PROT_NONE {
        return Ok(());
    }
    let begun = state.arena.begin_use(addresses);
    begun.map_err(|error| {
        say_once(&format!("memory cannot be made accessible: {error}"));
        libc::ENOMEM
    })?;
    state.note_peak();
    Ok(())
}

fn change(
    map: &mut Map,
    addresses: &Range<usize>,
    protection: c_int,
    protect: impl FnOnce() -> Result<(), c_int>,
) -> Result<(), c_int> {
    mappings::expect_some();
    protect()?;
    map.change(addresses, |fact| fact.protection = protection);
    Ok(())
}

/// Makes `addresses` readable, writable and not locked. Returns false if the kernel cannot, for
/// lack of mappings.
pub(crate) fn lift(map: &mut Map, state: &State, addresses: &Range<usize>) -> bool {
    unlock(map, state, addresses);
    let protected = map.those(addresses, Fact::is_protected);
    let is_lifted = protected.iter().all(|part| set(map, part, PLAIN).is_ok());
    if !is_lifted {
        say_once(
            "a protection cannot be lifted (see `sysctl vm.max_map_count`): that memory is not used again",
        );
    }
    is_lifted
}

/// Lifts as [`lift`] does, for a caller without the map.
pub(crate) fn lift_allocated(state: &State, addresses: &Range<usize>) -> bool {
    mappings::is_all_plain() || lift(&mut mappings::change(), state, addresses)
}

/// Moves the memory at `old` to the front of `new`, with its protections and locks. All of `new`
/// is locked if the program locks all. Returns false if nothing has moved.
///
/// # Safety
/// Nobody uses `old` meanwhile, and `new` is fresh memory that nobody has seen.
pub(crate) unsafe fn relocate(
    map: &mut Map,
    state: &State,
    old: &Range<usize>,
    new: &Range<usize>,
) -> bool {
    let known = map.parts(old, |fact| fact);
    let relocate = |from: Range<usize>, to| {
        // SAFETY: the caller's promise.
        unsafe { state.arena.relocate(from, to) }.is_ok()
    };
    // Locked pages would not move.
    let mut is_moved = lift(map, state, old) && relocate(old.clone(), new.start);
    if is_moved && locks::lock_all() && lock_range(map, state, new, Some(0)).is_err() {
        is_moved = !relocate(new.start..new.start + old.len(), old.start);
    }
    restore(
        map,
        state,
        known,
        old.start,
        if is_moved { new.start } else { old.start },
    );
    is_moved
}

/// Restores protections and locks, as they are `known`, of memory of the arena that has moved from
/// `old` to `new`, with a line if that fails.
pub(crate) fn restore(
    map: &mut Map,
    state: &State,
    known: Vec<(Range<usize>, Fact)>,
    old: usize,
    new: usize,
) {
    for (part, fact) in known {
        let part = new + (part.start - old)..new + (part.end - old);
        // The memory was locked before, so the budget has room, unless other threads were faster.
        if fact.is_locked && lock_range(map, state, &part, Some(0)).is_err() {
            say_once("a lock (mlock) is lost: that memory is remote again");
        }
        if set(map, &part, fact.protection).is_err() {
            say_once("a protection is lost: see `sysctl vm.max_map_count`");
        }
    }
}

/// Protects and locks the addresses by which a mapping has grown, as its last byte is.
pub(crate) fn extend(map: &mut Map, state: &State, added: &Range<usize>) {
    let last = map.at(added.start - 1);
    let _ = set_empty(map, state, added, last.protection);
    if last.is_locked {
        // As the kernel does: without room, the added memory is not locked.
        let _ = lock_range(map, state, added, Some(0));
    }
}

/// Makes addresses zeros. The error is an `errno`.
///
/// # Safety
/// As [`Arena::discard`](farpage::Arena::discard).
pub(crate) unsafe fn discard(
    map: &Map,
    state: &State,
    addresses: &Range<usize>,
) -> Result<(), c_int> {
    let page_bytes = state.arena.region().page_bytes();
    let (base, offsets) = (state.arena.addresses().start, state.offsets(addresses));
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
            unsafe { overwrite(map, state, &part) }?;
        }
    }
    Ok(())
}

/// Makes a part of a page zeros by overwriting it, which protections must allow: none changes
/// meanwhile.
///
/// # Safety
/// As [`discard`].
unsafe fn overwrite(map: &Map, state: &State, part: &Range<usize>) -> Result<(), c_int> {
    /// Right to lift protections while others hold the map shared, too.
    static LIFTING: Mutex<()> = Mutex::new(());
    let mut known = map.parts(part, |fact| fact.protection);
    known.retain(|(_, protection)| *protection != PLAIN);
    let _right = (!known.is_empty()).then(|| LIFTING.lock());
    let mut lifted = known.iter().map(|(part, _)| protects(part, PLAIN));
    let done = if lifted.all(|lifted| lifted.is_ok()) {
        // SAFETY: the caller's promise.
        unsafe { state.arena.discard(part.clone()) }.map_err(|_| libc::EAGAIN)
    } else {
        say_once("memory cannot be given up: see `sysctl vm.max_map_count`");
        Err(libc::EAGAIN)
    };
    for (part, protection) in known {
        if protects(&part, protection).is_err() {
            say_once("a protection is lost: see `sysctl vm.max_map_count`");
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
    // SAFETY: the caller's promise.
    unsafe { protect_with(libc::SYS_mprotect, address, bytes, [protection, 0]) }
}

/// `pkey_mprotect`.
///
/// # Safety
/// As `pkey_mprotect`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pkey_mprotect(
    address: *mut c_void,
    bytes: usize,
    protection: c_int,
    key: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { protect_with(libc::SYS_pkey_mprotect, address, bytes, [protection, key]) }
}

/// Makes a system call that protects addresses, with its arguments behind these.
///
/// # Safety
/// As `mprotect`.
unsafe fn protect_with(
    number: c_long,
    address: *mut c_void,
    bytes: usize,
    [protection, key]: [c_int; 2],
) -> c_int {
    // What the kernel refuses changes nothing.
    let is_known = (address as usize).is_multiple_of(KERNEL_PAGE_BYTES) && protection & !ALL == 0;
    let call = |part: &Range<usize>| {
        // SAFETY: the program's own memory, and its own wish.
        unsafe { mappings::done(number, part, [protection as usize, key as usize]) }
    };
    match state::allocated(address, bytes) {
        Some((_, _, false)) => fail(libc::ENOMEM),
        Some((state, addresses, true)) if is_known => {
            let inside = Inside::enter();
            let mut map = mappings::change();
            let mut parts = map.parts(&addresses, |fact| fact.is_ceded).into_iter();
            let changed = parts.try_for_each(|(part, is_ceded)| {
                if is_ceded {
                    return call(&part);
                }
                begin_use(state, &part, protection)?;
                change(&mut map, &part, protection, || call(&part))
            });
            drop((map, inside));
            answer(changed)
        }
        // SAFETY: the caller's promise.
        _ => unsafe { libc::syscall(number, address, bytes, protection, key) as c_int },
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
    // As of the kernel, advice is about whole pages.
    let is_aligned = (address as usize).is_multiple_of(KERNEL_PAGE_BYTES);
    let bytes = bytes
        .checked_next_multiple_of(KERNEL_PAGE_BYTES)
        .unwrap_or(bytes);
    if is_aligned
        && let Some((region, range)) = state::static_region(address, bytes)
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
                unsafe { mappings::done(libc::SYS_madvise, part, [advice as usize, 0]) }.and(gone)
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
    let advised = match advice {
        // The kernel's locks are lifted for a moment.
        libc::MADV_DONTNEED_LOCKED => advise_all(&mappings::change(), state, &addresses, advice),
        _ => advise_all(&mappings::look(), state, &addresses, advice),
    };
    drop(inside);
    answer(advised)
}

/// Advises on `addresses` of the arena, parts of which may be ceded. The error is an `errno`.
pub(crate) fn advise_all(
    map: &Map,
    state: &State,
    addresses: &Range<usize>,
    advice: c_int,
) -> Result<(), c_int> {
    let mut parts = map.parts(addresses, |fact| fact.is_ceded).into_iter();
    parts.try_for_each(|(part, is_ceded)| match is_ceded {
        // SAFETY: the program's own memory, and its own wish.
        true => unsafe { mappings::done(libc::SYS_madvise, &part, [advice as usize, 0]) },
        false => advise(map, state, &part, advice),
    })
}

/// Advises on `addresses` of the arena. The error is an `errno`.
fn advise(map: &Map, state: &State, addresses: &Range<usize>, advice: c_int) -> Result<(), c_int> {
    let bytes = state.offsets(addresses);
    let is_locked = |addresses: &Range<usize>| map.has(addresses, |fact| fact.is_locked);
    match advice {
        libc::MADV_DONTNEED | libc::MADV_FREE | libc::MADV_COLD | libc::MADV_PAGEOUT
            if is_locked(addresses) =>
        {
            Err(libc::EINVAL)
        }
        libc::MADV_DONTNEED | libc::MADV_FREE => {
            // SAFETY: the program gives the contents up.
            unsafe { discard(map, state, addresses) }?;
            let barred = map.those(addresses, |fact| fact.protection == libc::PROT_NONE);
            barred.iter().for_each(|part| state.arena.end_use(part));
            Ok(())
        }
        libc::MADV_DONTNEED_LOCKED => {
            // SAFETY: as above.
            locks::without(map, state, addresses, || unsafe {
                discard(map, state, addresses)
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
            // A page that is locked in another part stays: the first or the last.
            let page_bytes = state.arena.region().page_bytes();
            let mut pages = state.pages_of(addresses);
            if is_locked(&(pages.start..pages.start + page_bytes)) {
                pages.start += page_bytes;
            }
            if pages.start < pages.end && is_locked(&(pages.end - page_bytes..pages.end)) {
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
            state.arena.advise_huge(addresses.clone(), huge);
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
