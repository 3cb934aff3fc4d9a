//! `mmap` and `munmap`. Private anonymous memory for reading and writing comes from the arena. At
//! fixed addresses of the arena anything else is mapped by the kernel, in ceded pages.
//!
//! The rule it keeps: mappings in the arena are recorded by byte, whosever the page is. A page of
//! the arena is given back when it has no mapping any more. All other calls go to the kernel
//! unchanged, except that jemalloc gets memory of the arena or none (`small.rs`).

use std::{
    ffi::{c_int, c_void},
    ops::Range,
    ptr,
};

use farpage_signals::{Mutex, MutexGuard};

use crate::{
    Inside,
    allocate::Holds,
    arena,
    ceded::{self, Hold},
    foreign::{self, Failure, Wanted},
    locks,
    protect::{self, PLAIN},
    ranges::Ranges,
    say_once, set_errno, small,
    state::{self, KERNEL_PAGE_BYTES, State},
};

/// Flags of private anonymous memory that may be remote. Stacks (`MAP_STACK`) are local: handlers
/// of faults run there.
const PLAIN_FLAGS: c_int =
    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_POPULATE;
const FIXED: c_int = libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE;

/// Mapped addresses in the arena. Locked after the table of ceded pages.
static MAPPED: Mutex<Ranges<()>> = Mutex::new(Ranges::new());

/// Locks the record of mappings in the arena.
pub(crate) fn mapped() -> MutexGuard<'static, Ranges<()>> {
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
    let is_plain = flags & libc::MAP_TYPE == libc::MAP_PRIVATE
        && flags & libc::MAP_ANONYMOUS != 0
        && protection & !PLAIN == 0
        && flags & !(PLAIN_FLAGS | FIXED) == 0;
    if flags & FIXED != 0 {
        if let (Some(addresses), Some(state), false) =
            (state::ours(address, bytes), state::get(), Inside::is())
        {
            let wanted = Wanted {
                bytes,
                protection,
                flags,
                fd,
                offset,
            };
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
    } else if is_plain && small::is_calling() {
        return failed(libc::ENOMEM);
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
    if made != libc::MAP_FAILED {
        small::note(made, bytes, true);
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
        note(made as usize..made as usize + whole);
        return Some(made);
    }
    let _inside = Inside::enter();
    // Another thread may have been faster.
    let made = state.arena.allocate(whole, KERNEL_PAGE_BYTES).ok()?;
    let start = made.as_ptr() as usize;
    state.note_peak();
    note(start..start + whole);
    if protect::set(start..start + whole, protection).is_err() {
        unmap(state, start..start + whole);
        return None;
    }
    Some(made.as_ptr().cast())
}

/// Records a mapping.
pub(crate) fn note(addresses: Range<usize>) {
    mapped().insert(addresses, ());
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
    let mut hold = match is_plain {
        true => ceded::change_if_ceded(&state.pages_of(addresses)),
        false => change_for(state, addresses),
    };
    let mut mapped = mapped();
    let replaces = wanted.flags & libc::MAP_FIXED_NOREPLACE == 0;
    if !replaces && mapped.touches(addresses) {
        return Err(libc::EEXIST);
    }
    let claim = Claim::make(state, &mapped, addresses, is_plain && replaces);
    let claim = claim.ok_or(if replaces { libc::EINVAL } else { libc::EEXIST })?;
    // SAFETY: the caller's promise.
    let placed = unsafe {
        match is_plain {
            true => {
                map_plain(&mut hold, state, addresses, wanted.protection).map_err(Failure::Refused)
            }
            false => foreign::map_over(&mut hold, state, addresses, wanted, &mapped),
        }
    };
    let placed = match placed {
        Ok(()) => {
            mapped.insert(addresses.clone(), ());
            state.note_peak();
            Ok(())
        }
        Err(failure) => Err(fails(
            &mut hold,
            state,
            &mut mapped,
            claim,
            addresses,
            failure,
        )),
    };
    drop((mapped, hold, inside));
    if placed.is_ok() && !is_plain {
        // Under `mlockall` a file in the arena is locked like any other mapping of the kernel's.
        let start = ptr::with_exposed_provenance_mut(addresses.start);
        let _ = locks::mapped_by_kernel(start, addresses.len());
    }
    placed
}

/// Excludes other calls on memory of the arena, for ceding `addresses`. Pages at their borders come
/// in before, as far as possible: other calls do not wait for a server.
pub(crate) fn change_for(state: &State, addresses: &Range<usize>) -> Hold {
    let borders = foreign::borders(&ceded::look(), state, addresses, &mapped());
    for page in borders {
        // A page that cannot come in is reported when it is ceded.
        let _ = state.arena.region().prefetch_now(state.offsets(&page));
    }
    ceded::change()
}

/// Ends a call that has made no mapping at `addresses`, and has a claim to their free pages.
/// Returns the `errno`.
pub(crate) fn fails(
    hold: &mut Hold,
    state: &State,
    mapped: &mut Ranges<()>,
    claim: Claim,
    addresses: &Range<usize>,
    failure: Failure,
) -> c_int {
    let errno = match failure {
        Failure::Refused(errno) => errno,
        Failure::Lost(errno) => {
            unmap_under(hold, state, mapped, addresses.clone());
            errno
        }
    };
    claim.give_back(hold, state);
    errno
}

/// Pages of the arena that were free, and are allocated for a mapping at fixed addresses.
pub(crate) struct Claim(Vec<Range<usize>>);

impl Claim {
    /// Allocates the pages of `addresses` that have no mapping. `None`, with a line, if some of
    /// them belong to an allocation that is not mapped (`malloc`), unless it `may_be_allocated`.
    pub(crate) fn make(
        state: &State,
        mapped: &Ranges<()>,
        addresses: &Range<usize>,
        may_be_allocated: bool,
    ) -> Option<Claim> {
        let mut claim = Claim(Vec::new());
        for gap in without_mapping(state, mapped, state.pages_of(addresses)) {
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
    pub(crate) fn give_back(self, hold: &mut Hold, state: &State) {
        let ceded = self.0.iter().flat_map(|gap| hold.ceded(gap));
        for pages in ceded.collect::<Vec<_>>() {
            // SAFETY: nobody has seen what is mapped there.
            if !unsafe { foreign::regain(hold, state, &pages) } {
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
    hold: &mut Hold,
    state: &State,
    addresses: &Range<usize>,
    protection: c_int,
) -> Result<(), c_int> {
    for (part, is_ceded) in hold.parts(addresses) {
        if !is_ceded {
            locks::unlock(state, part.clone());
            // SAFETY: the program gives the contents up.
            unsafe { protect::discard(state, part.clone()) }.map_err(|_| libc::ENOMEM)?;
            protect::set(part, protection).map_err(|_| libc::ENOMEM)?;
            continue;
        }
        let whole = whole_pages(state, &part);
        for rest in [part.start..whole.start, whole.end..part.end] {
            if !rest.is_empty() {
                let flags = libc::MAP_FIXED | libc::MAP_NORESERVE;
                ceded::map_anonymous(&rest, protection, flags)?;
            }
        }
        if !whole.is_empty() {
            // SAFETY: the caller's promise.
            if !unsafe { foreign::regain(hold, state, &whole) } {
                return Err(libc::ENOMEM);
            }
            protect::set(whole, protection).map_err(|_| libc::ENOMEM)?;
        }
    }
    Ok(())
}

/// Returns the pages of the arena that lie wholly in `addresses`.
fn whole_pages(state: &State, addresses: &Range<usize>) -> Range<usize> {
    let page_bytes = state.arena.region().page_bytes();
    let pages = state.pages_of(addresses);
    let start = match pages.start == addresses.start {
        true => pages.start,
        false => (pages.start + page_bytes).min(addresses.end),
    };
    let end = match pages.end == addresses.end {
        true => pages.end,
        false => pages.end - page_bytes,
    };
    start..end.max(start)
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
            unmap(state, addresses);
            0
        }
        _ => {
            small::note(address, bytes, false);
            // SAFETY: the caller's promise.
            unsafe { libc::syscall(libc::SYS_munmap, address, bytes) as c_int }
        }
    }
}

/// Unmaps addresses of the arena.
pub(crate) fn unmap(state: &State, addresses: Range<usize>) {
    let _inside = Inside::enter();
    let mut hold = ceded::change_if_ceded(&state.pages_of(&addresses));
    // The lock of the mappings is held until the end: a page of which other threads unmap parts is
    // released once.
    unmap_under(&mut hold, state, &mut mapped(), addresses);
}

/// Unmaps addresses of the arena, of which `mapped` are all mappings. Ceded pages without a mapping
/// are regained.
pub(crate) fn unmap_under(
    hold: &mut Hold,
    state: &State,
    mapped: &mut Ranges<()>,
    addresses: Range<usize>,
) {
    // Parts that share a page are joined: the page is released once.
    let mut gone: Vec<Range<usize>> = Vec::new();
    for (part, ()) in mapped.remove(addresses.clone()) {
        match gone.last_mut() {
            Some(last) if state.pages_of(last).end > state.pages_of(&part).start => {
                last.end = part.end;
            }
            _ => gone.push(part),
        }
    }
    hold.ceded(&addresses).iter().for_each(ceded::bar);
    for pages in hold.ceded(&state.pages_of(&addresses)) {
        for pages in without_mapping(state, mapped, pages) {
            // SAFETY: the program has unmapped all that was there. Pages that cannot be regained
            // stay ceded, and are not given out.
            let _ = unsafe { foreign::regain(hold, state, &pages) };
        }
    }
    for part in gone.iter().flat_map(|gone| hold.kept(gone)) {
        release(state, mapped, &part);
    }
}

/// Returns the ranges of `pages` of which no part is mapped.
fn without_mapping(state: &State, mapped: &Ranges<()>, pages: Range<usize>) -> Vec<Range<usize>> {
    let mut taken = Ranges::new();
    for (part, ()) in mapped.within(&pages) {
        taken.insert(state.pages_of(&part), ());
    }
    taken.gaps(&pages)
}

/// Gives addresses back to the arena that have no mapping any more.
fn release(state: &State, mapped: &mut Ranges<()>, gone: &Range<usize>) {
    if !protect::lift(state, gone.clone()) {
        return;
    }
    let pages = state.pages_of(gone);
    // Pages at the ends are released, too, if they have no other mapping.
    let ends = [pages.start..gone.start, gone.end..pages.end];
    let [before, behind] = ends.map(|end| !end.is_empty() && mapped.touches(&end));
    let start = if before { gone.start } else { pages.start };
    let end = if behind { gone.end } else { pages.end };
    // SAFETY: the program has unmapped it. Whole pages that cannot be discarded are tried again.
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
