//! Files, code and shared memory at addresses of the arena: pages are ceded for them, and regained.
//!
//! The rule it keeps: a page is ceded as a whole. Bytes of its other mappings move to memory of the
//! kernel's own, with their protections and locks, while other threads use them.

use std::{ffi::c_int, ops::Range};

use farpage_vm::calls::system_call;

use crate::{
    locks::{kernel_locks, unlock},
    mappings::{self, Fact, Map, PLAIN},
    protect, say_once,
    state::State,
};

/// Failure to map something over memory of the arena, with an `errno`.
pub(crate) enum Failure {
    /// Mappings are as before. If memory could be ceded in part only, some of it is zeros.
    Refused(c_int),
    /// Memory at the addresses is gone, as where the kernel fails half way through a call.
    Lost(c_int),
}

/// Arguments of a call of `mmap` beside its addresses.
pub(crate) struct Wanted {
    pub(crate) bytes: usize,
    pub(crate) protection: c_int,
    pub(crate) flags: c_int,
    pub(crate) fd: c_int,
    pub(crate) offset: libc::off_t,
}

impl Wanted {
    /// Makes the call at `address`, with other flags. The error is an `errno`.
    ///
    /// # Safety
    /// As `mmap`.
    pub(crate) unsafe fn call(&self, address: usize, flags: c_int) -> Result<usize, c_int> {
        let args = [
            address,
            self.bytes,
            self.protection as usize,
            flags as usize,
            self.fd as usize,
            self.offset as usize,
        ];
        // SAFETY: the caller's promise.
        match unsafe { system_call(libc::SYS_mmap, args) } {
            made @ 0.. => Ok(made as usize),
            errno => Err(-errno as c_int),
        }
    }

    /// Maps at `address`, or anywhere if that is 0. The error is an `errno`.
    ///
    /// # Safety
    /// With an address, nothing relies on what is mapped there.
    unsafe fn map(&self, address: usize) -> Result<usize, c_int> {
        let anywhere = self.flags & !(libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE);
        let fixed = if address == 0 { 0 } else { libc::MAP_FIXED };
        // SAFETY: the caller's promise.
        unsafe { self.call(address, anywhere | fixed) }
    }
}

/// Maps what the program wants over `addresses` of the arena. What the kernel refuses changes
/// nothing.
///
/// # Safety
/// As `mmap` with `MAP_FIXED`.
pub(crate) unsafe fn map_over(
    map: &mut Map,
    state: &State,
    addresses: &Range<usize>,
    wanted: &Wanted,
) -> Result<(), Failure> {
    // The kernel maps elsewhere first, since only the kernel knows what it refuses.
    // SAFETY: replaces nothing.
    let made = unsafe { wanted.map(0) }.map_err(Failure::Refused)?;
    let bytes = addresses.len();
    // SAFETY: made above, and nobody has seen it.
    let unmake = || unsafe { system_call(libc::SYS_munmap, [made, bytes, 0, 0, 0, 0]) };
    // SAFETY: the program gives up what is there.
    if let Err(undo) = unsafe { try_cede(map, state, addresses) } {
        // First, since locks and protections may need its place under `vm.max_map_count`.
        unmake();
        undo.finish(map, state);
        return Err(Failure::Refused(libc::ENOMEM));
    }
    let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as usize;
    let args = [made, bytes, bytes, flags, addresses.start, 0];
    // SAFETY: the addresses are ceded, and the program gives up what is there.
    if unsafe { system_call(libc::SYS_mremap, args) } >= 0 {
        return Ok(());
    }
    unmake();
    // Mappings of some devices cannot move.
    // SAFETY: the caller's promise.
    let placed = unsafe { wanted.map(addresses.start) };
    placed.map(drop).map_err(Failure::Lost)
}

/// Returns the first and the last page of `addresses` as far as they have bytes of other mappings,
/// and are not ceded.
pub(crate) fn borders(map: &Map, state: &State, addresses: &Range<usize>) -> Vec<Range<usize>> {
    let page_bytes = state.arena.region().page_bytes();
    let pages = state.pages_of(addresses);
    let mut borders = vec![
        pages.start..pages.start + page_bytes,
        pages.end - page_bytes..pages.end,
    ];
    borders.dedup();
    borders.retain(|page| {
        let before = page.start..addresses.start.clamp(page.start, page.end);
        let behind = addresses.end.clamp(page.start, page.end)..page.end;
        let is_mapped = |part| map.has(part, |fact| fact.is_mapped);
        !map.has(page, |fact| fact.is_ceded) && (is_mapped(&before) || is_mapped(&behind))
    });
    borders
}

/// Cedes the pages of `addresses`, whose contents the program gives up. Bytes of other mappings
/// in the first and the last page stay. Returns false, with a line, if some pages cannot be ceded:
/// mappings are as before then, of which some may be zeros.
///
/// # Safety
/// There are no references to bytes of `addresses`.
pub(crate) unsafe fn cede(map: &mut Map, state: &State, addresses: &Range<usize>) -> bool {
    // SAFETY: the caller's promise.
    let ceded = unsafe { try_cede(map, state, addresses) };
    ceded.map_err(|undo| undo.finish(map, state)).is_ok()
}

/// Cedes pages as [`cede`] does. The error has to be finished.
///
/// # Safety
/// As [`cede`].
unsafe fn try_cede(map: &mut Map, state: &State, addresses: &Range<usize>) -> Result<(), Undo> {
    let mut emptied = Vec::new();
    // Borders come first: they keep all of their bytes, so that a failure there loses nothing.
    for page in borders(map, state, addresses) {
        let known = facts(map, state, &page);
        if let Err(error) = state.arena.cede_with_bytes(page.start) {
            return Err(Undo::because(&error, emptied, known));
        }
        note_ceded(map, &page);
        keep_others(map, &page, &known);
    }
    for pages in map.those(&state.pages_of(addresses), |fact| !fact.is_ceded) {
        let known = facts(map, state, &pages);
        // SAFETY: the caller's promise; no other mapping has bytes there.
        if let Err(error) = unsafe { state.arena.cede(pages.clone()) } {
            // Some of the pages may have been ceded for a moment, and were regained unprotected.
            return Err(Undo::because(&error, emptied, known));
        }
        note_ceded(map, &pages);
        emptied.push((pages, known));
    }
    Ok(())
}

/// Facts about addresses, ascending.
type Facts = Vec<(Range<usize>, Fact)>;

/// Unlocks pages that are about to be ceded. Returns the facts about them.
fn facts(map: &mut Map, state: &State, pages: &Range<usize>) -> Facts {
    let facts = map.parts(pages, |fact| fact);
    unlock(map, state, pages);
    facts
}

/// Records that pages are ceded: protections and locks are the kernel's from now on.
fn note_ceded(map: &mut Map, pages: &Range<usize>) {
    map.change(pages, |fact| {
        (fact.is_ceded, fact.protection) = (true, PLAIN);
    });
}

/// Restores what was `known` of a page that is ceded with its bytes, which other threads may use.
fn keep_others(map: &Map, page: &Range<usize>, known: &Facts) {
    for part in map.those(page, |fact| !fact.is_mapped) {
        mappings::bar(&part);
    }
    for (part, fact) in known {
        if fact.is_protected() && mappings::protects(part, fact.protection).is_err() {
            say_once("a protection is lost: see `sysctl vm.max_map_count`");
        }
        if fact.is_locked {
            kernel_locks(std::slice::from_ref(part));
        }
    }
}

/// Rest of the work after pages could not be ceded.
struct Undo {
    /// Pages that were ceded without their bytes, with the facts about them before.
    emptied: Vec<(Range<usize>, Facts)>,
    /// Facts about the pages that are not ceded.
    known: Facts,
}

impl Undo {
    /// Says why pages could not be ceded.
    fn because(
        error: &farpage::PageError,
        emptied: Vec<(Range<usize>, Facts)>,
        known: Facts,
    ) -> Undo {
        say_once(&format!(
            "nothing can be mapped over remote memory: {error}"
        ));
        Undo { emptied, known }
    }

    /// Regains pages as zeros, with the protections and locks that they had.
    fn finish(self, map: &mut Map, state: &State) {
        protect::restore(map, state, self.known, 0, 0);
        for (pages, known) in self.emptied {
            // SAFETY: nothing was mapped there since.
            if unsafe { regain(map, state, &pages) } {
                protect::restore(map, state, known, 0, 0);
            }
        }
    }
}

/// Takes ceded pages back: what is mapped there is gone, and they are zeros. Returns false,
/// with a line, if they cannot be used.
///
/// # Safety
/// Nobody uses what is mapped there.
pub(crate) unsafe fn regain(map: &mut Map, state: &State, pages: &Range<usize>) -> bool {
    // SAFETY: the caller's promise.
    if let Err(error) = unsafe { state.arena.regain(pages.clone()) } {
        say_once(&format!(
            "addresses of files or code cannot be used for memory again (see `sysctl vm.max_map_count`): {error}"
        ));
        return false;
    }
    map.change(pages, |fact| fact.is_ceded = false);
    true
}
