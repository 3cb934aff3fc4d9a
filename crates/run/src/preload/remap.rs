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
    ceded::{self, Hold},
    foreign::{self, Failure},
    locks::{self, kernel_locks, lock_range},
    maps::{self, Claim, change_for, failed, fails, mapped, note, unmap_under},
    protect::{self, PLAIN},
    say_once,
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
    let old = state::ours(address, bytes);
    if let Some(old) = &old
        && state::is_forked()
        && !ceded::was_ceded(old)
    {
        // SAFETY: the caller's promise.
        return unsafe { remap_copy(old.clone(), new_bytes, flags) };
    }
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
    let mut hold = change_for(state, &new);
    let mut mapped = mapped();
    let claim = Claim::make(state, &mapped, &new, false).ok_or(libc::EINVAL)?;
    // The source moves last, and once: it has no way back if others map what it leaves.
    // SAFETY: the program gives up what is there.
    let moved = match unsafe { foreign::cede(&mut hold, state, &new, &mapped) } {
        false => Err(Failure::Refused(libc::ENOMEM)),
        // SAFETY: the caller's promise.
        true => unsafe { request.call(request.flags, new.start) }.map_err(Failure::Lost),
    };
    match moved {
        Ok(_) => {
            mapped.insert(new.clone(), ());
            Ok(new.start)
        }
        Err(failure) => Err(fails(&mut hold, state, &mut mapped, claim, &new, failure)),
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
    let mut hold = match (is_fixed || stays, &new) {
        (true, Some(new)) if ceded::look().cover(old) => change_for(state, new),
        (true, _) => ceded::change(),
        (false, _) => ceded::change_if_ceded(&pages),
    };
    let all = (mapped().cover(old), hold.cover(old), hold.touches(old));
    let (true, is_kernels, is_ceded) = all else {
        return Err(libc::EFAULT);
    };
    if !stays && !is_fixed {
        if whole <= old.len() {
            if whole < old.len() {
                unmap_under(&mut hold, state, &mut mapped(), old.start + whole..old.end);
            }
            return Ok(old.start);
        }
        if !is_ceded && !hold.touches(&pages) && grow_in_place(state, old, old.start + whole) {
            return Ok(old.start);
        }
        if !request.has(libc::MREMAP_MAYMOVE) {
            return Err(libc::ENOMEM);
        }
    }
    // Old addresses that stay mapped keep their protections.
    let protected = match stays && !is_kernels {
        true => protect::of(old),
        false => Vec::new(),
    };
    // SAFETY: the caller's promise.
    unsafe {
        if is_kernels {
            return move_ceded(&mut hold, state, request, new);
        }
        let kept = old.start..old.end.min(old.start + whole);
        match (is_fixed, new) {
            (true, None) => move_out(&hold, state, &kept, target.clone())?,
            (true, Some(new)) => move_within(&mut hold, state, &kept, &new)?,
            (false, _) if is_ceded => {
                let made = allocate(state, 0, whole)?;
                if let Err(errno) = copy(&hold, state, &kept, made.start) {
                    unmap_under(&mut hold, state, &mut mapped(), made);
                    return Err(errno);
                }
                if whole > old.len() {
                    protect::extend(made.start + old.len()..made.end);
                }
                leave(&mut hold, state, old, stays)?;
                return Ok(made.start);
            }
            (false, _) => return move_elsewhere(&mut hold, state, old, whole, stays),
        }
        leave(&mut hold, state, old, stays)?;
    }
    for (part, protection) in protected {
        protect::set(part, protection)?;
    }
    Ok(target.start)
}

/// Moves a mapping of the kernel's out of the arena, or within it, to `new`.
///
/// # Safety
/// As `mremap`.
unsafe fn move_ceded(
    hold: &mut Hold,
    state: &State,
    request: &Request,
    new: Option<Range<usize>>,
) -> Result<usize, c_int> {
    let mut mapped = mapped();
    let mut claim = None;
    if let Some(new) = &new {
        let claimed = Claim::make(state, &mapped, new, false).ok_or(libc::EINVAL)?;
        // SAFETY: the program gives up what is there.
        if !unsafe { foreign::cede(hold, state, new, &mapped) } {
            let failure = Failure::Refused(libc::ENOMEM);
            return Err(fails(hold, state, &mut mapped, claimed, new, failure));
        }
        claim = Some((claimed, new));
    }
    // SAFETY: the caller's promise.
    let made = match unsafe { request.call(request.flags, request.new_address) } {
        Ok(made) => made,
        Err(errno) => {
            return Err(match claim {
                Some((claim, new)) => {
                    let failure = Failure::Lost(errno);
                    fails(hold, state, &mut mapped, claim, new, failure)
                }
                None => errno,
            });
        }
    };
    if let Some(new) = new {
        mapped.insert(new, ());
    }
    if request.has(libc::MREMAP_DONTUNMAP) {
        return Ok(made);
    }
    let only_free = libc::MAP_FIXED_NOREPLACE | libc::MAP_NORESERVE;
    if ceded::map_anonymous(&request.old, libc::PROT_NONE, only_free) != Err(libc::EEXIST) {
        unmap_under(hold, state, &mut mapped, request.old.clone());
    }
    // With EEXIST another thread's mapping has got the addresses from the kernel, and stays there.
    Ok(made)
}

/// Copies a mapping to `to`, which is not the arena's.
///
/// # Safety
/// As `mremap` with `MREMAP_FIXED`.
unsafe fn move_out(
    hold: &Hold,
    state: &State,
    old: &Range<usize>,
    to: Range<usize>,
) -> Result<(), c_int> {
    ceded::map_anonymous(&to, PLAIN, libc::MAP_FIXED)?;
    // SAFETY: the caller's promise. What has replaced the old mapping goes if it gets no bytes.
    unsafe {
        copy(hold, state, old, to.start).inspect_err(|_| {
            let _ = ceded::done(libc::SYS_munmap, &to, [0, 0]);
        })
    }
}

/// Moves a mapping to other addresses of the arena.
///
/// # Safety
/// As `mremap` with `MREMAP_FIXED`.
unsafe fn move_within(
    hold: &mut Hold,
    state: &State,
    old: &Range<usize>,
    new: &Range<usize>,
) -> Result<(), c_int> {
    let mut mapped = mapped();
    let claim = Claim::make(state, &mapped, new, true).ok_or(libc::EINVAL)?;
    // SAFETY: the caller's promise.
    if let Err(errno) = unsafe { maps::map_plain(hold, state, new, PLAIN) } {
        claim.give_back(hold, state);
        return Err(errno);
    }
    mapped.insert(new.clone(), ());
    drop(mapped);
    state.note_peak();
    let shares_a_page = state.pages_of(old).start < state.pages_of(new).end
        && state.pages_of(new).start < state.pages_of(old).end;
    let has_ceded = hold.touches(&state.pages_of(old)) || hold.touches(&state.pages_of(new));
    // SAFETY: the caller's promise.
    let moved = unsafe {
        match has_ceded || shares_a_page {
            true => copy(hold, state, old, new.start),
            false => match protect::relocate(state, old.clone(), new.clone()) {
                true => Ok(()),
                false => Err(libc::ENOMEM),
            },
        }
    };
    // As where the kernel fails half way: the new addresses have no mapping.
    moved.inspect_err(|_| unmap_under(hold, state, &mut self::mapped(), new.clone()))
}

/// Part of a mapping that is copied, with its protection.
struct Protected {
    part: Range<usize>,
    protection: c_int,
    is_ceded: bool,
}

impl Protected {
    fn protects(&self, protection: c_int) -> Result<(), c_int> {
        match self.is_ceded {
            true => ceded::protects(&self.part, protection),
            false => protect::set(self.part.clone(), protection),
        }
    }
}

/// Copies bytes with their protections and the locks of remote memory, which the new addresses do
/// not have yet. The old addresses keep their protections. The error is an `errno`: the old
/// addresses keep their locks, too.
///
/// # Safety
/// Nobody uses the old bytes or the new ones.
unsafe fn copy(hold: &Hold, state: &State, old: &Range<usize>, to: usize) -> Result<(), c_int> {
    let (mut protected, mut locked) = (Vec::new(), Vec::new());
    let mut parts = hold.parts(old).into_iter();
    let is_readable = parts.try_for_each(|(part, is_ceded)| {
        locked.extend(match is_ceded {
            true => Vec::new(),
            false => locks::unlock(state, part.clone()),
        });
        protected.extend(protections(&part, is_ceded)?);
        match is_ceded {
            true => make_readable(&protected, &part),
            false if protect::lift(state, part) => Ok(()),
            false => Err(libc::ENOMEM),
        }
    });
    let moved = |part: &Range<usize>| to + (part.start - old.start)..to + (part.end - old.start);
    let copied = is_readable.and_then(|()| {
        let from = ptr::with_exposed_provenance::<u8>(old.start);
        let into = ptr::with_exposed_provenance_mut::<u8>(to);
        // SAFETY: the caller's promise; the ranges do not overlap.
        unsafe { into.copy_from_nonoverlapping(from, old.len()) };
        for (part, ()) in &locked {
            lock_copy(hold, state, &moved(part));
        }
        let mut protected = protected.iter();
        protected.try_for_each(|known| protect_copy(hold, state, &moved(&known.part), known))
    });
    for known in &protected {
        if known.protects(known.protection).is_err() {
            say_once("a protection is lost: see `sysctl vm.max_map_count`");
        }
    }
    if copied.is_err() {
        protect::renew(state, Vec::new(), locked);
    }
    copied
}

/// Returns the protections of `part`, whose pages are all ceded or all the arena's.
fn protections(part: &Range<usize>, is_ceded: bool) -> Result<Vec<Protected>, c_int> {
    let known = match is_ceded {
        true => farpage_vm::protections(part).map_err(|error| {
            say_once(&format!("memory cannot be moved: /proc/self/maps: {error}"));
            libc::ENOMEM
        })?,
        false => protect::of(part),
    };
    let protected = known.into_iter().map(|(part, protection)| Protected {
        part,
        protection,
        is_ceded,
    });
    Ok(protected.collect())
}

/// Makes ceded addresses readable and brings them in, so that reading them raises no signal: a
/// file may have ended before.
fn make_readable(protected: &[Protected], part: &Range<usize>) -> Result<(), c_int> {
    let mut inside = protected
        .iter()
        .filter(|known| part.contains(&known.part.start));
    inside.try_for_each(|known| {
        if known.protection & libc::PROT_READ == 0 {
            known.protects(known.protection | libc::PROT_READ)?;
        }
        let populate = libc::MADV_POPULATE_READ as usize;
        // SAFETY: brings memory in.
        let populated = unsafe { ceded::done(libc::SYS_madvise, &known.part, [populate, 0]) };
        populated.map_err(|_| libc::EFAULT)
    })
}

/// Locks a part of a copy, as the copied bytes were.
fn lock_copy(hold: &Hold, state: &State, part: &Range<usize>) {
    let is_arenas = state.arena.contains(part.start);
    for (part, is_ceded) in hold.parts(part) {
        if is_ceded || !is_arenas {
            kernel_locks(&[(part, ())]);
        } else if lock_range(state, part, 0).is_err() {
            say_once("a lock (mlock) is lost: that memory is remote again");
        }
    }
}

/// Protects a part of a copy, as the copied bytes are.
fn protect_copy(
    hold: &Hold,
    state: &State,
    part: &Range<usize>,
    known: &Protected,
) -> Result<(), c_int> {
    if known.protection == PLAIN {
        return Ok(());
    }
    let is_arenas = state.arena.contains(part.start);
    let mut parts = hold.parts(part).into_iter();
    parts.try_for_each(|(part, is_ceded)| match is_ceded || !is_arenas {
        true => ceded::protects(&part, known.protection),
        false => protect::set(part, known.protection),
    })
}

/// Gives up the old addresses of a mapping that has moved, or empties them if it `stays`.
///
/// # Safety
/// As `mremap`.
unsafe fn leave(
    hold: &mut Hold,
    state: &State,
    old: &Range<usize>,
    stays: bool,
) -> Result<(), c_int> {
    if !stays {
        unmap_under(hold, state, &mut mapped(), old.clone());
        return Ok(());
    }
    for (part, is_ceded) in hold.parts(old) {
        // SAFETY: the caller's promise.
        unsafe {
            match is_ceded {
                true => {
                    ceded::done(libc::SYS_madvise, &part, [libc::MADV_DONTNEED as usize, 0])?;
                }
                false => protect::discard(state, part)?,
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
fn grow_in_place(state: &State, old: &Range<usize>, end: usize) -> bool {
    let mut mapped = mapped();
    let page_end = state.pages_of(old).end;
    let is_free = !mapped.touches(&(old.end..end.min(page_end).max(old.end)))
        && (end <= page_end || state.arena.extend(page_end, end - page_end));
    if is_free {
        mapped.insert(old.end..end, ());
        drop(mapped);
        protect::extend(old.end..end);
        state.note_peak();
    }
    is_free
}

/// Maps `whole` bytes of the arena for a mapping that moves there, at `offset` in their first page.
fn allocate(state: &State, offset: usize, whole: usize) -> Result<Range<usize>, c_int> {
    let made = state.allocate_to_grow(offset + whole, KERNEL_PAGE_BYTES);
    if made.is_null() {
        return Err(libc::ENOMEM);
    }
    let new = made as usize + offset..made as usize + offset + whole;
    note(new.clone());
    Ok(new)
}

/// Moves a mapping to a place where it has `whole` bytes.
///
/// # Safety
/// Nobody uses the mapping meanwhile.
unsafe fn move_elsewhere(
    hold: &mut Hold,
    state: &State,
    old: &Range<usize>,
    whole: usize,
    stays: bool,
) -> Result<usize, c_int> {
    // The mapping keeps its offset in its first page, so that pages move and not bytes.
    let new = allocate(state, old.start - state.pages_of(old).start, whole)?;
    let protected = protect::of(old);
    // SAFETY: nobody uses the old bytes, and the new ones are nobody's but ours.
    if !unsafe { protect::relocate(state, old.clone(), new.clone()) } {
        unmap_under(hold, state, &mut mapped(), new);
        return Err(libc::ENOMEM);
    }
    // SAFETY: the caller's promise.
    unsafe { leave(hold, state, old, stays) }?;
    if stays {
        for (part, protection) in protected {
            protect::set(part, protection)?;
        }
    } else {
        protect::extend(new.start + old.len()..new.end);
    }
    Ok(new.start)
}
