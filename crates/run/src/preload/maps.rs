//! `mmap` and `munmap`. Private anonymous memory for reading and writing comes from the arena. At
//! fixed addresses of the arena anything else is mapped by the kernel, in ceded pages.
//!
//! The rule it keeps: mappings in the arena are recorded by byte, whosever the page is. A page of
//! the arena is given back when it has no mapping any more. All other calls go to the kernel
//! unchanged. So do calls of jemalloc's for its tables (`small.rs`).

use std::{
    ffi::{c_int, c_void},
    ops::Range,
    ptr,
    sync::RwLockWriteGuard,
};

use crate::{
    Inside,
    allocate::Holds,
    arena,
    foreign::{self, Failure, Wanted},
    locks,
    mappings::{self, Map, PLAIN},
    protect, say_once, set_errno, small,
    state::{self, KERNEL_PAGE_BYTES, State},
};

/// Flags of private anonymous memory that may be remote. Stacks (`MAP_STACK`) are local: handlers
/// of faults run there.
const PLAIN_FLAGS: c_int =
    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_POPULATE;
const FIXED: c_int = libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE;

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
    let is_plain = !small::is_calling()
        && flags & libc::MAP_TYPE == libc::MAP_PRIVATE
        && flags & libc::MAP_ANONYMOUS != 0
        && protection & !PLAIN == 0
        && flags & !(PLAIN_FLAGS | FIXED) == 0;
    let wanted = Wanted {
        bytes,
        protection,
        flags,
        fd,
        offset,
    };
    if flags & FIXED != 0 {
        if let (Some(addresses), Some(state), false) =
            (state::ours(address, bytes), state::get(), Inside::is())
        {
            // SAFETY: the caller's promise.
            return match unsafe { place(state, &addresses, is_plain, &wanted) } {
                Ok(()) => address,
                Err(errno) => failed(errno),
            };
        }
    } else if is_plain
        && let Some(state) = arena::serves(bytes)
        && let Some(made) = map(state, bytes, protection, flags)
    {
        // The address that the program asked for is a hint.
        return made;
    }
    // SAFETY: the caller's promise.
    let made = match unsafe { wanted.call(address as usize, flags) } {
        Ok(made) => ptr::with_exposed_provenance_mut(made),
        Err(errno) => return failed(errno),
    };
    if let Err(errno) = locks::mapped_by_kernel(made, bytes) {
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
/// never local, unless the program says that it may never need it (`MAP_NORESERVE`): without room
/// for it, the call fails.
fn map(state: &State, bytes: usize, protection: c_int, flags: c_int) -> Option<*mut c_void> {
    let whole = bytes.checked_next_multiple_of(KERNEL_PAGE_BYTES)?;
    let is_reserved = protection != PLAIN || flags & libc::MAP_NORESERVE != 0;
    if !is_reserved || state.arena.has_room(whole) {
        return map_within(state, whole, protection);
    }
    // Programs reserve addresses like this, often more than they will use.
    say_once(
        "addresses that were reserved (PROT_NONE, MAP_NORESERVE) exceed --capacity: what the program uses of them will be local; a larger --capacity makes it remote",
    );
    None
}

/// Maps `whole` bytes in the arena, or fails.
fn map_within(state: &State, whole: usize, protection: c_int) -> Option<*mut c_void> {
    if protection == PLAIN {
        let made = state.allocate(whole, KERNEL_PAGE_BYTES, Holds::Zeros);
        if made.is_null() {
            return Some(libc::MAP_FAILED);
        }
        let _inside = Inside::enter();
        note(
            &mut mappings::change(),
            &(made as usize..made as usize + whole),
        );
        return Some(made);
    }
    let _inside = Inside::enter();
    // Another thread may have been faster.
    let made = match protection {
        libc::PROT_NONE => state.arena.allocate_idle(whole, KERNEL_PAGE_BYTES),
        _ => state.arena.allocate(whole, KERNEL_PAGE_BYTES),
    };
    let made = made.ok()?;
    let addresses = made.as_ptr() as usize..made.as_ptr() as usize + whole;
    state.note_peak();
    let mut map = mappings::change();
    note(&mut map, &addresses);
    if protect::set(&mut map, &addresses, protection).is_err() {
        unmap(&mut map, state, &addresses);
        return None;
    }
    Some(made.as_ptr().cast())
}

/// Records a mapping.
pub(crate) fn note(map: &mut Map, addresses: &Range<usize>) {
    map.change(addresses, |fact| fact.is_mapped = true);
}

/// Maps at fixed addresses of the arena. The error is an `errno`.
///
/// # Safety
/// As `mmap`.
unsafe fn place(
    state: &State,
    addresses: &Range<usize>,
    is_plain: bool,
    wanted: &Wanted,
) -> Result<(), c_int> {
    if !addresses.start.is_multiple_of(KERNEL_PAGE_BYTES) {
        return Err(libc::EINVAL);
    }
    let inside = Inside::enter();
    let mut map = match is_plain {
        true => mappings::change(),
        false => change_for(state, addresses),
    };
    let replaces = wanted.flags & libc::MAP_FIXED_NOREPLACE == 0;
    if !replaces && map.has(addresses, |fact| fact.is_mapped) {
        return Err(libc::EEXIST);
    }
    let claim = Claim::make(state, &map, addresses, is_plain && replaces);
    let claim = claim.ok_or(if replaces { libc::EINVAL } else { libc::EEXIST })?;
    // SAFETY: the caller's promise.
    let placed = unsafe {
        match is_plain {
            true => {
                map_plain(&mut map, state, addresses, wanted.protection).map_err(Failure::Refused)
            }
            false => foreign::map_over(&mut map, state, addresses, wanted),
        }
    };
    let placed = placed.map_err(|failure| fails(&mut map, state, claim, addresses, failure));
    if placed.is_ok() {
        note(&mut map, addresses);
        state.note_peak();
    }
    drop((map, inside));
    if placed.is_ok() && !is_plain {
        // Under `mlockall` a file in the arena is locked like any other mapping of the kernel's.
        let start = ptr::with_exposed_provenance_mut(addresses.start);
        let _ = locks::mapped_by_kernel(start, addresses.len());
    }
    placed
}

/// Excludes other calls on memory of the arena, for ceding `addresses`. Pages at their borders come
/// in before, as far as possible: other calls do not wait for a server.
pub(crate) fn change_for(
    state: &State,
    addresses: &Range<usize>,
) -> RwLockWriteGuard<'static, Map> {
    let borders = foreign::borders(&mappings::look(), state, addresses);
    for page in borders {
        // A page that cannot come in is reported when it is ceded.
        let _ = state.arena.region().prefetch_now(state.offsets(&page));
    }
    mappings::change()
}

/// Ends a call that has made no mapping at `addresses`, and has a claim to their free pages.
/// Returns the `errno`.
pub(crate) fn fails(
    map: &mut Map,
    state: &State,
    claim: Claim,
    addresses: &Range<usize>,
    failure: Failure,
) -> c_int {
    let (Failure::Refused(errno) | Failure::Lost(errno)) = failure;
    if let Failure::Lost(_) = failure {
        unmap(map, state, addresses);
    }
    claim.give_back(map, state);
    errno
}

/// Pages of the arena that were free, and are allocated for a mapping at fixed addresses.
pub(crate) struct Claim(Vec<Range<usize>>);

impl Claim {
    /// Allocates the pages of `addresses` that have no mapping. `None`, with a line, if some of
    /// them belong to an allocation that is not mapped (`malloc`), unless it `may_be_allocated`.
    pub(crate) fn make(
        state: &State,
        map: &Map,
        addresses: &Range<usize>,
        may_be_allocated: bool,
    ) -> Option<Claim> {
        let mut claim = Claim(Vec::new());
        for gap in without_mapping(state, map, &state.pages_of(addresses)) {
            if state.arena.claim(gap.clone()) {
                claim.0.push(gap);
            } else if !may_be_allocated || !state.arena.is_allocated(gap) {
                say_once(
                    "mmap with MAP_FIXED over memory of malloc is refused; a larger --min-bytes keeps such memory local",
                );
                claim.release(state);
                return None;
            }
        }
        Some(claim)
    }

    /// Frees the pages, for which no mapping could be made.
    pub(crate) fn give_back(self, map: &mut Map, state: &State) {
        let ceded = |gap| map.those(gap, |fact| fact.is_ceded);
        for pages in Vec::from_iter(self.0.iter().flat_map(ceded)) {
            // SAFETY: nobody has seen what is mapped there.
            if !unsafe { foreign::regain(map, state, &pages) } {
                return;
            }
        }
        self.release(state);
    }

    fn release(self, state: &State) {
        for gap in self.0 {
            // SAFETY: nobody has seen it. Pages that cannot be discarded now are tried again.
            let _ = unsafe { state.arena.release(gap) };
        }
    }
}

/// Maps new memory over addresses of the arena. Ceded pages that lie wholly in `addresses` are
/// regained; of other ceded pages the kernel maps the bytes. The error is an `errno`.
///
/// # Safety
/// As `mmap` with `MAP_FIXED`.
pub(crate) unsafe fn map_plain(
    map: &mut Map,
    state: &State,
    addresses: &Range<usize>,
    protection: c_int,
) -> Result<(), c_int> {
    // A refusal comes before anything is given up.
    protect::begin_use(state, addresses, protection)?;
    for (part, is_ceded) in map.parts(addresses, |fact| fact.is_ceded) {
        if !is_ceded {
            locks::unlock(map, state, &part);
            // SAFETY: the program gives the contents up.
            unsafe { protect::discard(map, state, &part) }.map_err(|_| libc::ENOMEM)?;
            protect::set_empty(map, state, &part, protection).map_err(|_| libc::ENOMEM)?;
            continue;
        }
        let whole = state.whole_pages_of(&part);
        for rest in [part.start..whole.start, whole.end..part.end] {
            if !rest.is_empty() {
                let flags = libc::MAP_FIXED | libc::MAP_NORESERVE;
                mappings::map_anonymous(&rest, protection, flags)?;
            }
        }
        if !whole.is_empty() {
            // SAFETY: the caller's promise.
            if !unsafe { foreign::regain(map, state, &whole) } {
                return Err(libc::ENOMEM);
            }
            protect::set_empty(map, state, &whole, protection).map_err(|_| libc::ENOMEM)?;
        }
    }
    Ok(())
}

/// Fails a call that returns addresses with `errno`.
pub(crate) fn failed(errno: c_int) -> *mut c_void {
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
            let _inside = Inside::enter();
            unmap(&mut mappings::change(), state, &addresses);
            0
        }
        // SAFETY: the caller's promise.
        _ => unsafe { libc::syscall(libc::SYS_munmap, address, bytes) as c_int },
    }
}

/// Unmaps addresses of the arena. Ceded pages without a mapping are regained.
pub(crate) fn unmap(map: &mut Map, state: &State, addresses: &Range<usize>) {
    // Parts that share a page are joined: the page is released once.
    let mut gone: Vec<Range<usize>> = Vec::new();
    for part in map.those(addresses, |fact| fact.is_mapped) {
        match gone.last_mut() {
            Some(last) if state.pages_of(last).end > state.pages_of(&part).start => {
                last.end = part.end;
            }
            _ => gone.push(part),
        }
    }
    map.change(addresses, |fact| fact.is_mapped = false);
    let ceded = |map: &Map, of| map.those(of, |fact| fact.is_ceded);
    ceded(map, addresses).iter().for_each(mappings::bar);
    for pages in ceded(map, &state.pages_of(addresses)) {
        for pages in without_mapping(state, map, &pages) {
            // SAFETY: the program has unmapped all that was there. Pages that cannot be regained
            // stay ceded, and are not given out.
            let _ = unsafe { foreign::regain(map, state, &pages) };
        }
    }
    let kept = |gone| map.those(gone, |fact| !fact.is_ceded);
    for part in Vec::from_iter(gone.iter().flat_map(kept)) {
        release(map, state, &part);
    }
}

/// Returns the ranges of `pages` of which no part is mapped.
fn without_mapping(state: &State, map: &Map, pages: &Range<usize>) -> Vec<Range<usize>> {
    let gaps = map.those(pages, |fact| !fact.is_mapped);
    let whole = gaps.iter().map(|gap| state.whole_pages_of(gap));
    whole.filter(|pages| !pages.is_empty()).collect()
}

/// Gives addresses back to the arena that have no mapping any more.
fn release(map: &mut Map, state: &State, gone: &Range<usize>) {
    if !protect::lift(map, state, gone) {
        return;
    }
    let pages = state.pages_of(gone);
    // Pages at the ends are released, too, if they have no other mapping.
    let ends = [pages.start..gone.start, gone.end..pages.end];
    let [before, behind] = ends.map(|end| map.has(&end, |fact| fact.is_mapped));
    let start = if before { gone.start } else { pages.start };
    let end = if behind { gone.end } else { pages.end };
    // SAFETY: the program has unmapped it. Whole pages that cannot be discarded are tried again.
    if unsafe { state.arena.release(start..end) }.is_err() {
        // Parts of pages may keep their old bytes, so they are never given out.
        let page_bytes = state.arena.region().page_bytes();
        if before {
            note(map, &(gone.start..gone.end.min(pages.start + page_bytes)));
        }
        if behind {
            note(map, &(gone.start.max(pages.end - page_bytes)..gone.end));
        }
    }
}
