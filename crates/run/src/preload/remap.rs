//! `mremap` of memory of the arena, and into it.
//!
//! The rule it keeps: remote memory moves page by page within the arena, without coming in. What
//! the kernel has (ceded pages, and mappings elsewhere) the kernel moves. Bytes are copied where
//! memory changes sides.

use std::{
    ffi::{c_int, c_void},
    ops::Range,
    ptr,
};

use farpage_vm::calls::system_call;

use crate::{
    Inside,
    foreign::{self, Failure},
    locks::{kernel_locks, lock_range},
    mappings::{self, Fact, Map, PLAIN, protects},
    maps::{self, Claim, change_for, failed, fails, note, unmap},
    protect, say_once,
    state::{self, KERNEL_PAGE_BYTES, State},
};

/// Flags of `mremap`.
const KNOWN: c_int = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;

/// Arguments of a call of `mremap`.
#[derive(Clone)]
struct Request {
    old: Range<usize>,
    /// Bytes of the old mapping as the program gave them: 0 duplicates shared memory.
    old_bytes: usize,
    new_bytes: usize,
    flags: c_int,
    new_address: usize,
}

impl Request {
    fn has(&self, flag: c_int) -> bool {
        self.flags & flag != 0
    }

    /// Makes the call, with other flags and another new address. The error is an `errno`.
    ///
    /// # Safety
    /// As `mremap`.
    unsafe fn call(&self, flags: c_int, new_address: usize) -> Result<usize, c_int> {
        let args = [
            self.old.start,
            self.old_bytes,
            self.new_bytes,
            flags as usize,
            new_address,
            0,
        ];
        // SAFETY: the caller's promise.
        match unsafe { system_call(libc::SYS_mremap, args) } {
            made @ 0.. => Ok(made as usize),
            errno => Err(-errno as c_int),
        }
    }
}

/// `mremap`.
///
/// # Safety
/// As `mremap`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mremap(
    address: *mut c_void,
    bytes: usize,
    new_bytes: usize,
    flags: c_int,
    new_address: *mut c_void,
) -> *mut c_void {
    if let Some(old) = state::inherited(address, bytes)
        && !mappings::was_ceded(&old)
    {
        // SAFETY: the caller's promise.
        return unsafe { remap_copy(old, new_bytes, flags) };
    }
    let old = state::ours(address, bytes);
    let is_fixed = flags & libc::MREMAP_FIXED != 0;
    let new = is_fixed
        .then(|| state::ours(new_address, new_bytes))
        .flatten();
    let request = Request {
        old: address as usize..(address as usize).saturating_add(bytes),
        old_bytes: bytes,
        new_bytes,
        flags,
        new_address: new_address as usize,
    };
    let (Some(state), false, true) = (state::get(), Inside::is(), old.is_some() || new.is_some())
    else {
        // SAFETY: the caller's promise.
        return match unsafe { request.call(flags, request.new_address) } {
            Ok(made) => ptr::with_exposed_provenance_mut(made),
            Err(errno) => failed(errno),
        };
    };
    let inside = Inside::enter();
    // SAFETY: the caller's promise.
    let made = unsafe {
        match old {
            Some(old) => remap(state, &Request { old, ..request }, new),
            None => move_in(state, &request, new),
        }
    };
    drop(inside);
    match made {
        Ok(made) => ptr::with_exposed_provenance_mut(made),
        Err(errno) => failed(errno),
    }
}

/// Moves a mapping of the kernel's into the arena, to `new`.
///
/// # Safety
/// As `mremap`.
unsafe fn move_in(
    state: &State,
    request: &Request,
    new: Option<Range<usize>>,
) -> Result<usize, c_int> {
    let new = new.filter(|new| new.start.is_multiple_of(KERNEL_PAGE_BYTES));
    let (Some(new), true) = (new, request.has(libc::MREMAP_MAYMOVE)) else {
        return Err(libc::EINVAL);
    };
    can_move(state, request)?;
    let mut map = change_for(state, &new);
    let claim = Claim::make(state, &map, &new, false).ok_or(libc::EINVAL)?;
    // The source moves last, and once: it has no way back if others map what it leaves.
    // SAFETY: the program gives up what is there.
    let moved = match unsafe { foreign::cede(&mut map, state, &new) } {
        false => Err(Failure::Refused(libc::ENOMEM)),
        // SAFETY: the caller's promise.
        true => unsafe { request.call(request.flags, new.start) }.map_err(Failure::Lost),
    };
    match moved {
        Ok(_) => {
            note(&mut map, &new);
            Ok(new.start)
        }
        Err(failure) => Err(fails(&mut map, state, claim, &new, failure)),
    }
}

/// Checks what the kernel would refuse of a move into the arena, as far as that can be known before
/// the memory there is given up. The error is an `errno`.
fn can_move(state: &State, request: &Request) -> Result<(), c_int> {
    let (old, arena) = (&request.old, state.arena.addresses());
    let stays = request.has(libc::MREMAP_DONTUNMAP);
    let is_page = |at: usize| at.is_multiple_of(KERNEL_PAGE_BYTES);
    let whole = |bytes: usize| bytes.next_multiple_of(KERNEL_PAGE_BYTES);
    if request.has(!KNOWN)
        || !is_page(old.start)
        || stays && whole(request.old_bytes) != whole(request.new_bytes)
    {
        return Err(libc::EINVAL);
    }
    // A mapping of the kernel's that ends in the arena would be another one there.
    if old.start < arena.end && arena.start < old.end {
        return Err(libc::EFAULT);
    }
    let bytes = whole(request.old_bytes.max(1));
    let args = [old.start, bytes, libc::MS_ASYNC as usize, 0, 0, 0];
    // SAFETY: changes nothing, and fails where something is not mapped.
    match unsafe { system_call(libc::SYS_msync, args) } {
        0.. => Ok(()),
        _ => Err(libc::EFAULT),
    }
}

/// Remaps memory of the arena. `new`: where to, if that is the arena's as well.
///
/// # Safety
/// As `mremap`.
unsafe fn remap(
    state: &State,
    request: &Request,
    new: Option<Range<usize>>,
) -> Result<usize, c_int> {
    let (old, page) = (&request.old, KERNEL_PAGE_BYTES);
    let whole = request.new_bytes.checked_next_multiple_of(page);
    let (Some(whole @ 1..), true) = (whole, old.start.is_multiple_of(page)) else {
        return Err(libc::EINVAL);
    };
    let (stays, is_fixed) = (
        request.has(libc::MREMAP_DONTUNMAP),
        request.has(libc::MREMAP_FIXED),
    );
    let target = request.new_address..request.new_address.saturating_add(whole);
    if request.has(!KNOWN)
        || (stays || is_fixed) && !request.has(libc::MREMAP_MAYMOVE)
        || stays && whole != old.len()
        || is_fixed && !target.start.is_multiple_of(page)
        || is_fixed && target.start < old.end && old.start < target.end
    {
        return Err(libc::EINVAL);
    }
    let pages = state.pages_of(old);
    let is_ceded = |fact: Fact| fact.is_ceded;
    let mut map = match &new {
        Some(new) if mappings::look().all(old, is_ceded) => change_for(state, new),
        _ => mappings::change(),
    };
    if !map.all(old, |fact| fact.is_mapped) {
        return Err(libc::EFAULT);
    }
    if !stays && !is_fixed {
        if whole <= old.len() {
            unmap(&mut map, state, &(old.start + whole..old.end));
            return Ok(old.start);
        }
        if !map.has(&pages, is_ceded) && grow_in_place(&mut map, state, old, old.start + whole) {
            return Ok(old.start);
        }
        if !request.has(libc::MREMAP_MAYMOVE) {
            return Err(libc::ENOMEM);
        }
    }
    if map.all(old, is_ceded) {
        // SAFETY: the caller's promise.
        return unsafe { move_ceded(&mut map, state, request, new) };
    }
    // Old addresses that stay mapped keep their protections.
    let protected = match stays {
        true => map.parts(old, |fact| fact.protection),
        false => Vec::new(),
    };
    let kept = old.start..old.end.min(old.start + whole);
    // SAFETY: the caller's promise.
    let made = unsafe {
        let made = match (is_fixed, new) {
            (true, None) => {
                move_out(&mut map, state, &kept, target.clone())?;
                target.start
            }
            (true, Some(new)) => {
                move_within(&mut map, state, &kept, &new)?;
                target.start
            }
            (false, _) => move_elsewhere(&mut map, state, old, whole)?,
        };
        leave(&mut map, state, old, stays)?;
        made
    };
    for (part, protection) in protected {
        protect::set(&mut map, &part, protection)?;
    }
    Ok(made)
}

/// Moves a mapping of the kernel's out of the arena, or within it, to `new`.
///
/// # Safety
/// As `mremap`.
unsafe fn move_ceded(
    map: &mut Map,
    state: &State,
    request: &Request,
    new: Option<Range<usize>>,
) -> Result<usize, c_int> {
    let mut claim = None;
    if let Some(new) = &new {
        let claimed = Claim::make(state, map, new, false).ok_or(libc::EINVAL)?;
        // SAFETY: the program gives up what is there.
        if !unsafe { foreign::cede(map, state, new) } {
            let failure = Failure::Refused(libc::ENOMEM);
            return Err(fails(map, state, claimed, new, failure));
        }
        claim = Some((claimed, new));
    }
    // SAFETY: the caller's promise.
    let made = unsafe { request.call(request.flags, request.new_address) };
    let made = made.map_err(|errno| match claim {
        Some((claim, new)) => fails(map, state, claim, new, Failure::Lost(errno)),
        None => errno,
    })?;
    if let Some(new) = &new {
        note(map, new);
    }
    if request.has(libc::MREMAP_DONTUNMAP) {
        return Ok(made);
    }
    let only_free = libc::MAP_FIXED_NOREPLACE | libc::MAP_NORESERVE;
    if mappings::map_anonymous(&request.old, libc::PROT_NONE, only_free) != Err(libc::EEXIST) {
        unmap(map, state, &request.old);
    }
    // With EEXIST another thread's mapping has got the addresses from the kernel, and stays there.
    Ok(made)
}

/// Copies a mapping to `to`, which is not the arena's.
///
/// # Safety
/// As `mremap` with `MREMAP_FIXED`.
unsafe fn move_out(
    map: &mut Map,
    state: &State,
    old: &Range<usize>,
    to: Range<usize>,
) -> Result<(), c_int> {
    mappings::map_anonymous(&to, PLAIN, libc::MAP_FIXED)?;
    // SAFETY: the caller's promise. What has replaced the old mapping goes if it gets no bytes.
    unsafe {
        copy(map, state, old, to.start).inspect_err(|_| {
            let _ = mappings::done(libc::SYS_munmap, &to, [0, 0]);
        })
    }
}

/// Moves a mapping to other addresses of the arena.
///
/// # Safety
/// As `mremap` with `MREMAP_FIXED`.
unsafe fn move_within(
    map: &mut Map,
    state: &State,
    old: &Range<usize>,
    new: &Range<usize>,
) -> Result<(), c_int> {
    let claim = Claim::make(state, map, new, true).ok_or(libc::EINVAL)?;
    // SAFETY: the caller's promise.
    if let Err(errno) = unsafe { maps::map_plain(map, state, new, PLAIN) } {
        claim.give_back(map, state);
        return Err(errno);
    }
    note(map, new);
    state.note_peak();
    let (from, to) = (state.pages_of(old), state.pages_of(new));
    let shares_a_page = from.start < to.end && to.start < from.end;
    let has_ceded = [from, to]
        .iter()
        .any(|pages| map.has(pages, |fact| fact.is_ceded));
    // SAFETY: the caller's promise.
    let moved = unsafe {
        match has_ceded || shares_a_page {
            true => copy(map, state, old, new.start),
            false => relocate(map, state, old, new),
        }
    };
    // As where the kernel fails half way: the new addresses have no mapping.
    moved.inspect_err(|_| unmap(map, state, new))
}

/// Moves remote memory page by page. The error is an `errno`.
///
/// # Safety
/// As [`protect::relocate`].
unsafe fn relocate(
    map: &mut Map,
    state: &State,
    old: &Range<usize>,
    new: &Range<usize>,
) -> Result<(), c_int> {
    // SAFETY: the caller's promise.
    match unsafe { protect::relocate(map, state, old, new) } {
        true => Ok(()),
        false => Err(libc::ENOMEM),
    }
}

/// Copies bytes with their protections and the locks of remote memory, which the new addresses do
/// not have yet. The old addresses keep their protections. The error is an `errno`: the old
/// addresses keep their locks, too.
///
/// # Safety
/// Nobody uses the old bytes or the new ones.
unsafe fn copy(map: &mut Map, state: &State, old: &Range<usize>, to: usize) -> Result<(), c_int> {
    let known = protections(map, old)?;
    let is_readable = known
        .iter()
        .try_for_each(|(part, fact)| match fact.is_ceded {
            true => make_readable(part, fact.protection),
            false if protect::lift(map, state, part) => Ok(()),
            false => Err(libc::ENOMEM),
        });
    let copied = is_readable.and_then(|()| {
        let from = ptr::with_exposed_provenance::<u8>(old.start);
        let into = ptr::with_exposed_provenance_mut::<u8>(to);
        // SAFETY: the caller's promise; the ranges do not overlap.
        unsafe { into.copy_from_nonoverlapping(from, old.len()) };
        known.iter().try_for_each(|(part, fact)| {
            let part = to + (part.start - old.start)..to + (part.end - old.start);
            lock_and_protect(map, state, &part, *fact)
        })
    });
    for (part, mut fact) in known {
        fact.is_locked &= copied.is_err();
        if !fact.is_ceded {
            protect::restore(map, state, vec![(part, fact)], 0, 0);
        } else if protects(&part, fact.protection).is_err() {
            say_once("a protection is lost: see `sysctl vm.max_map_count`");
        }
    }
    copied
}

/// Returns the facts about `addresses`, ascending, with the kernel's protections of ceded pages.
fn protections(map: &Map, addresses: &Range<usize>) -> Result<Vec<(Range<usize>, Fact)>, c_int> {
    let mut known = Vec::new();
    for (part, fact) in map.parts(addresses, |fact| fact) {
        if !fact.is_ceded {
            known.push((part, fact));
            continue;
        }
        let protections = farpage_vm::protections(&part).map_err(|error| {
            say_once(&format!("memory cannot be moved: /proc/self/maps: {error}"));
            libc::ENOMEM
        })?;
        let with = |(part, protection)| (part, Fact { protection, ..fact });
        known.extend(protections.into_iter().map(with));
    }
    Ok(known)
}

/// Makes ceded addresses readable and brings them in, so that reading them raises no signal: a
/// file may have ended before.
fn make_readable(part: &Range<usize>, protection: c_int) -> Result<(), c_int> {
    if protection & libc::PROT_READ == 0 {
        protects(part, protection | libc::PROT_READ)?;
    }
    let populate = libc::MADV_POPULATE_READ as usize;
    // SAFETY: brings memory in.
    let populated = unsafe { mappings::done(libc::SYS_madvise, part, [populate, 0]) };
    populated.map_err(|_| libc::EFAULT)
}

/// Locks and protects a part of a copy, as the copied bytes were.
fn lock_and_protect(
    map: &mut Map,
    state: &State,
    part: &Range<usize>,
    known: Fact,
) -> Result<(), c_int> {
    let is_outside = !state.arena.contains(part.start);
    for (part, is_kernels) in map.parts(part, |fact| fact.is_ceded || is_outside) {
        if known.is_locked && is_kernels {
            kernel_locks(std::slice::from_ref(&part));
        } else if known.is_locked && lock_range(map, state, &part, Some(0)).is_err() {
            say_once("a lock (mlock) is lost: that memory is remote again");
        }
        match is_kernels {
            true if known.is_protected() => protects(&part, known.protection)?,
            true => {}
            false => protect::set(map, &part, known.protection)?,
        }
    }
    Ok(())
}

/// Gives up the old addresses of a mapping that has moved, or empties them if it `stays`.
///
/// # Safety
/// As `mremap`.
unsafe fn leave(
    map: &mut Map,
    state: &State,
    old: &Range<usize>,
    stays: bool,
) -> Result<(), c_int> {
    if !stays {
        unmap(map, state, old);
        return Ok(());
    }
    let empty = [libc::MADV_DONTNEED as usize, 0];
    for (part, is_ceded) in map.parts(old, |fact| fact.is_ceded) {
        // SAFETY: the caller's promise.
        unsafe {
            match is_ceded {
                true => mappings::done(libc::SYS_madvise, &part, empty)?,
                false => protect::discard(map, state, &part)?,
            }
        }
    }
    Ok(())
}

/// `mremap` in a child made by `fork`, where a mapping that grows becomes a copy: absent pages are
/// caught at their old addresses alone.
///
/// # Safety
/// As `mremap`.
unsafe fn remap_copy(old: Range<usize>, new_bytes: usize, flags: c_int) -> *mut c_void {
    let whole = new_bytes.checked_next_multiple_of(KERNEL_PAGE_BYTES);
    let (Some(whole @ 1..), 0) = (whole, flags & !libc::MREMAP_MAYMOVE) else {
        return failed(libc::EINVAL);
    };
    // SAFETY: the program's own mapping, which it gives up as far as it is unmapped here.
    unsafe {
        let unmap = |start: usize, end: usize| libc::syscall(libc::SYS_munmap, start, end - start);
        if whole <= old.len() {
            if whole < old.len() {
                unmap(old.start + whole, old.end);
            }
            return ptr::with_exposed_provenance_mut(old.start);
        }
        if flags & libc::MREMAP_MAYMOVE == 0 {
            return failed(libc::ENOMEM);
        }
        let (access, kind) = (PLAIN, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let made = maps::mmap(ptr::null_mut(), whole, access, kind, -1, 0);
        if made != libc::MAP_FAILED {
            let from = ptr::with_exposed_provenance::<u8>(old.start);
            ptr::copy_nonoverlapping(from, made.cast::<u8>(), old.len());
            unmap(old.start, old.end);
        }
        made
    }
}

/// Makes a mapping end at `end`, if nothing is mapped or allocated up to there.
fn grow_in_place(map: &mut Map, state: &State, old: &Range<usize>, end: usize) -> bool {
    let page_end = state.pages_of(old).end;
    let rest_of_page = old.end..end.min(page_end).max(old.end);
    let is_free = !map.has(&rest_of_page, |fact| fact.is_mapped)
        && (end <= page_end || state.arena.extend(page_end, end - page_end));
    if is_free {
        note(map, &(old.end..end));
        protect::extend(map, state, &(old.end..end));
        state.note_peak();
    }
    is_free
}

/// Moves a mapping to a place of the arena where it has `whole` bytes. Returns the place.
///
/// # Safety
/// Nobody uses the mapping meanwhile.
unsafe fn move_elsewhere(
    map: &mut Map,
    state: &State,
    old: &Range<usize>,
    whole: usize,
) -> Result<usize, c_int> {
    let has_ceded = map.has(old, |fact| fact.is_ceded);
    let offset = match has_ceded {
        true => 0,
        // The mapping keeps its offset in its first page, so that pages move and not bytes.
        false => old.start - state.pages_of(old).start,
    };
    let made = state.allocate_to_grow(offset + whole, KERNEL_PAGE_BYTES);
    if made.is_null() {
        return Err(libc::ENOMEM);
    }
    let new = made as usize + offset..made as usize + offset + whole;
    note(map, &new);
    // SAFETY: nobody uses the old bytes, and the new ones are nobody's but ours.
    let moved = unsafe {
        match has_ceded {
            true => copy(map, state, old, new.start),
            false => relocate(map, state, old, &new),
        }
    };
    if let Err(errno) = moved {
        unmap(map, state, &new);
        return Err(errno);
    }
    if whole > old.len() {
        protect::extend(map, state, &(new.start + old.len()..new.end));
    }
    Ok(new.start)
}
