//! `mmap` of private anonymous memory, `munmap` and `mremap`.
//!
//! The rule it keeps: mappings in the arena are recorded by byte. A page of the arena is given back
//! when it has no mapping any more. All other calls go to the kernel unchanged.

use std::{
    ffi::{c_int, c_void},
    ops::Range,
    ptr,
};

use farpage_signals::{Mutex, MutexGuard};

use crate::{
    Inside,
    allocate::Holds,
    arena, locks,
    protect::{self, PLAIN},
    ranges::Ranges,
    say_once, set_errno,
    state::{self, KERNEL_PAGE_BYTES, State},
};

/// Mapped addresses in the arena.
static MAPPED: Mutex<Ranges<()>> = Mutex::new(Ranges::new());

fn mapped() -> MutexGuard<'static, Ranges<()>> {
    MAPPED.lock()
}

/// `mmap`.
///
/// # Safety
/// As `mmap`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mmap(
    address: *mut c_void,
    bytes: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: libc::off_t,
) -> *mut c_void {
    let may_be = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_POPULATE;
    let is_anonymous = flags & libc::MAP_TYPE == libc::MAP_PRIVATE
        && flags & libc::MAP_ANONYMOUS != 0
        && protection & !PLAIN == 0;
    if flags & libc::MAP_FIXED != 0 {
        if let (Some(addresses), Some(state), false) =
            (state::ours(address, bytes), state::get(), Inside::is())
        {
            return match is_anonymous {
                true => map_over(state, addresses, protection),
                false => refuse_to_map_over(),
            };
        }
    } else if is_anonymous
        && flags & !may_be == 0
        && let Some(state) = arena::serves(bytes)
        && let Some(made) = map(state, bytes, protection)
    {
        // The address that the program asked for is a hint.
        return made;
    }
    // SAFETY: the caller's promise.
    let made = unsafe {
        libc::syscall(
            libc::SYS_mmap,
            address,
            bytes,
            protection,
            flags,
            fd,
            offset,
        ) as *mut c_void
    };
    if made != libc::MAP_FAILED
        && let Err(errno) = locks::mapped_by_kernel(made, bytes)
    {
        // SAFETY: made just now, and nobody has seen it.
        unsafe { libc::syscall(libc::SYS_munmap, made, bytes) };
        return failed(errno);
    }
    made
}

/// `mmap64`, which is equal to `mmap` here.
///
/// # Safety
/// As `mmap`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mmap64(
    address: *mut c_void,
    bytes: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: libc::off64_t,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { mmap(address, bytes, protection, flags, fd, offset) }
}

/// Maps memory in the arena. `None`: the kernel is to be asked. Readable and writable memory is
/// never local: without room for it, the call fails.
fn map(state: &State, bytes: usize, protection: c_int) -> Option<*mut c_void> {
    let whole = bytes.checked_next_multiple_of(KERNEL_PAGE_BYTES)?;
    if protection == PLAIN {
        let made = state.allocate(whole, KERNEL_PAGE_BYTES, Holds::Zeros);
        if made.is_null() {
            return Some(libc::MAP_FAILED);
        }
        let _inside = Inside::enter();
        note(made as usize..made as usize + whole);
        return Some(made);
    }
    // Programs reserve addresses like this, often more than they will use.
    let _inside = Inside::enter();
    let Ok(made) = state.arena.allocate(whole, KERNEL_PAGE_BYTES) else {
        say_once(
            "addresses that were reserved without access (PROT_NONE) exceed --capacity: what the program uses of them will be local",
        );
        return None;
    };
    let start = made.as_ptr() as usize;
    state.note_peak();
    note(start..start + whole);
    if protect::set(start..start + whole, protection).is_err() {
        unmap(state, start..start + whole);
        return None;
    }
    Some(made.as_ptr().cast())
}

fn note(addresses: Range<usize>) {
    mapped().insert(addresses, ());
}

/// Maps new memory over addresses of the arena, which may have mappings already.
fn map_over(state: &State, addresses: Range<usize>, protection: c_int) -> *mut c_void {
    let _inside = Inside::enter();
    if !state.arena.is_allocated(addresses.clone()) {
        drop(_inside);
        return refuse_to_map_over();
    }
    locks::unlock(state, addresses.clone());
    // SAFETY: the program gives the contents up.
    let emptied = unsafe { protect::discard(state, addresses.clone()) };
    if emptied.is_err() || protect::set(addresses.clone(), protection).is_err() {
        drop(_inside);
        return failed(libc::ENOMEM);
    }
    let start = addresses.start;
    note(addresses);
    start as *mut c_void
}

fn refuse_to_map_over() -> *mut c_void {
    say_once(
        "mmap with MAP_FIXED over remote memory is refused, except of private anonymous memory over what is mapped; a larger --min-bytes keeps such memory local",
    );
    failed(libc::EINVAL)
}

/// Fails a call that returns addresses with `errno`.
fn failed(errno: c_int) -> *mut c_void {
    set_errno(errno);
    libc::MAP_FAILED
}

/// `munmap`.
///
/// # Safety
/// As `munmap`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn munmap(address: *mut c_void, bytes: usize) -> c_int {
    match (state::ours(address, bytes), state::get()) {
        (Some(addresses), Some(state)) if !Inside::is() => {
            unmap(state, addresses);
            0
        }
        // SAFETY: the caller's promise.
        _ => unsafe { libc::syscall(libc::SYS_munmap, address, bytes) as c_int },
    }
}

fn unmap(state: &State, addresses: Range<usize>) {
    let _inside = Inside::enter();
    // Held until the end: a page of which other threads unmap parts is released once.
    let mut mapped = mapped();
    // Joined, so that a page of which several parts are unmapped is released once, too.
    let mut gone: Vec<Range<usize>> = Vec::new();
    for (part, ()) in mapped.remove(addresses) {
        match gone.last_mut() {
            Some(last) if state.pages_of(last).end > state.pages_of(&part).start => {
                last.end = part.end;
            }
            _ => gone.push(part),
        }
    }
    for gone in gone {
        if !protect::lift(state, gone.clone()) {
            continue;
        }
        let pages = state.pages_of(&gone);
        // Pages at the ends are released, too, if they have no other mapping.
        let ends = [pages.start..gone.start, gone.end..pages.end];
        let [before, behind] = ends.map(|end| !end.is_empty() && mapped.touches(&end));
        let start = if before { gone.start } else { pages.start };
        let end = if behind { gone.end } else { pages.end };
        // SAFETY: the program has unmapped it. Whole pages that cannot be discarded are tried
        // again.
        if unsafe { state.arena.release(start..end) }.is_err() {
            // Parts of pages may keep their old bytes, so they are never given out.
            let page_bytes = state.arena.region().page_bytes();
            if before {
                mapped.insert(gone.start..gone.end.min(pages.start + page_bytes), ());
            }
            if behind {
                mapped.insert(gone.start.max(pages.end - page_bytes)..gone.end, ());
            }
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
    if let Some(old) = state::ours(address, bytes)
        && state::is_forked()
    {
        // SAFETY: the caller's promise.
        return unsafe { remap_copy(old, new_bytes, flags) };
    }
    let (Some(old), Some(state), false) = (state::ours(address, bytes), state::get(), Inside::is())
    else {
        // SAFETY: the caller's promise.
        return unsafe {
            libc::syscall(
                libc::SYS_mremap,
                address,
                bytes,
                new_bytes,
                flags,
                new_address,
            ) as *mut c_void
        };
    };
    let whole = new_bytes.checked_next_multiple_of(KERNEL_PAGE_BYTES);
    let (Some(whole @ 1..), true) = (whole, old.start.is_multiple_of(KERNEL_PAGE_BYTES)) else {
        return failed(libc::EINVAL);
    };
    if flags & !libc::MREMAP_MAYMOVE != 0 {
        say_once("mremap with MREMAP_FIXED or MREMAP_DONTUNMAP is refused on remote memory");
        return failed(libc::EINVAL);
    }
    if !mapped().cover(&old) {
        return failed(libc::EFAULT);
    }
    if whole <= old.len() {
        if whole < old.len() {
            unmap(state, old.start + whole..old.end);
        }
        return address;
    }
    if grow_in_place(state, &old, old.start + whole) {
        return address;
    }
    if flags & libc::MREMAP_MAYMOVE == 0 {
        return failed(libc::ENOMEM);
    }
    // SAFETY: the caller's promise.
    unsafe { grow_elsewhere(state, old, whole) }
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
        let made = mmap(ptr::null_mut(), whole, access, kind, -1, 0);
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
    let _inside = Inside::enter();
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

/// Moves a mapping to a place where it has `whole` bytes.
///
/// # Safety
/// Nobody uses the mapping meanwhile.
unsafe fn grow_elsewhere(state: &State, old: Range<usize>, whole: usize) -> *mut c_void {
    // The mapping keeps its offset in its first page, so that pages move and not bytes.
    let offset = old.start - state.pages_of(&old).start;
    let made = state.allocate_to_grow(offset + whole, KERNEL_PAGE_BYTES);
    if made.is_null() {
        return libc::MAP_FAILED;
    }
    let _inside = Inside::enter();
    let new = made as usize + offset..made as usize + offset + whole;
    note(new.clone());
    // SAFETY: nobody uses the old bytes, and the new ones are nobody's but ours.
    if !unsafe { protect::relocate(state, old.clone(), new.clone()) } {
        unmap(state, new);
        drop(_inside);
        return failed(libc::ENOMEM);
    }
    unmap(state, old.clone());
    protect::extend(new.start + old.len()..new.end);
    ptr::with_exposed_provenance_mut(new.start)
}
