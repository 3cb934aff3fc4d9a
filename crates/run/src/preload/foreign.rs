//! Files, code and shared memory at addresses of the arena: pages are ceded for them, and regained.
//!
//! The rule it keeps: a page is ceded as a whole. Bytes of its other mappings move to memory of the
//! kernel's own, with their protections and locks, while other threads use them.

use std::{ffi::c_int, ops::Range};

use farpage_vm::calls::system_call;

use crate::{
    ceded::{self, Hold},
    locks::{self, kernel_locks},
    protect,
    ranges::Ranges,
    say_once,
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
    /// Maps at `address`, or anywhere if that is 0. The error is an `errno`.
    ///
    /// # Safety
    /// With an address, nothing relies on what is mapped there.
    unsafe fn map(&self, address: usize) -> Result<usize, c_int> {
        let fixed = libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE;
        let flags = match address {
            0 => self.flags & !fixed,
            _ => self.flags & !fixed | libc::MAP_FIXED,
        };
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
}

/// Maps what the program wants over `addresses` of the arena, in place of memory of which `mapped`
/// are all mappings. What the kernel refuses changes nothing.
///
/// # Safety
/// As `mmap` with `MAP_FIXED`.
pub(crate) unsafe fn map_over(
    hold: &mut Hold,
    state: &State,
    addresses: &Range<usize>,
    wanted: &Wanted,
    mapped: &Ranges<()>,
) -> Result<(), Failure> {
    // The kernel maps elsewhere first, since only the kernel knows what it refuses.
    // SAFETY: replaces nothing.
    let made = unsafe { wanted.map(0) }.map_err(Failure::Refused)?;
    let bytes = addresses.len();
    // SAFETY: made above, and nobody has seen it.
    let unmake = || unsafe { system_call(libc::SYS_munmap, [made, bytes, 0, 0, 0, 0]) };
    // SAFETY: the program gives up what is there.
    if let Err(undo) = unsafe { try_cede(hold, state, addresses, mapped) } {
        // First, since locks and protections may need its place under `vm.max_map_count`.
        unmake();
        undo.finish(hold, state);
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
/// of which `mapped` are all, and are not ceded.
pub(crate) fn borders(
    hold: &Hold,
    state: &State,
    addresses: &Range<usize>,
    mapped: &Ranges<()>,
) -> Vec<Range<usize>> {
    let page_bytes = state.arena.region().page_bytes();
    let pages = state.pages_of(addresses);
    let mut borders = vec![
        pages.start..pages.start + page_bytes,
        pages.end - page_bytes..pages.end,
    ];
    borders.dedup();
    let is_shared = |page: &Range<usize>| {
        let mut others = others(page, addresses).into_iter();
        others.any(|other| mapped.touches(&other))
    };
    borders.retain(|page| !hold.touches(page) && is_shared(page));
    borders
}

/// Cedes the pages of `addresses`, whose contents the program gives up. Bytes of other mappings
/// in the first and the last page stay, of which `mapped` are all. Returns false, with a line,
/// if some pages cannot be ceded: mappings are as before then, of which some may be zeros.
///
/// # Safety
/// There are no references to bytes of `addresses`.
pub(crate) unsafe fn cede(
    hold: &mut Hold,
    state: &State,
    addresses: &Range<usize>,
    mapped: &Ranges<()>,
) -> bool {
    // SAFETY: the caller's promise.
    let ceded = unsafe { try_cede(hold, state, addresses, mapped) };
    ceded.map_err(|undo| undo.finish(hold, state)).is_ok()
}

/// Cedes pages as [`cede`] does. The error has to be finished.
///
/// # Safety
/// As [`cede`].
unsafe fn try_cede(
    hold: &mut Hold,
    state: &State,
    addresses: &Range<usize>,
    mapped: &Ranges<()>,
) -> Result<(), Undo> {
    // Borders come first: they keep all of their bytes, so that a failure there loses nothing.
    for page in borders(hold, state, addresses, mapped) {
        cede_shared(hold, state, &page, mapped)?;
    }
    let mut emptied = Vec::new();
    for pages in hold.kept(&state.pages_of(addresses)) {
        let locked = locks::unlock(state, pages.clone());
        // SAFETY: the caller's promise; no other mapping has bytes there.
        if let Err(error) = unsafe { state.arena.cede(pages.clone()) } {
            say_once(&cannot(&error.to_string()));
            // Some of the pages may have been ceded for a moment, and were regained unprotected.
            let protected = protect::of(&pages);
            return Err(Undo {
                emptied,
                protected,
                locked,
            });
        }
        let protected = protect::forget(pages.clone());
        hold.insert(pages.clone());
        emptied.push(Emptied {
            pages,
            protected,
            locked,
        });
    }
    Ok(())
}

/// Pages that were ceded without their bytes, with what they had before.
struct Emptied {
    pages: Range<usize>,
    protected: Vec<(Range<usize>, c_int)>,
    locked: Vec<(Range<usize>, ())>,
}

/// Rest of the work after pages could not be ceded.
struct Undo {
    emptied: Vec<Emptied>,
    /// Protections of the pages that are not ceded.
    protected: Vec<(Range<usize>, c_int)>,
    /// Locks of the pages that are not ceded.
    locked: Vec<(Range<usize>, ())>,
}

impl Undo {
    /// Regains pages as zeros, with the protections and locks that they had.
    fn finish(self, hold: &mut Hold, state: &State) {
        protect::renew(state, self.protected, self.locked);
        for emptied in self.emptied {
            // SAFETY: nothing was mapped there since.
            if unsafe { regain(hold, state, &emptied.pages) } {
                protect::renew(state, emptied.protected, emptied.locked);
            }
        }
    }
}

/// Cedes a page in which several mappings may have bytes, of which `mapped` are all. Other threads
/// may use these. If the page cannot be ceded, it is as before but for its locks, and a line says
/// why.
fn cede_shared(
    hold: &mut Hold,
    state: &State,
    page: &Range<usize>,
    mapped: &Ranges<()>,
) -> Result<(), Undo> {
    let locked = locks::unlock(state, page.clone());
    if let Err(error) = state.arena.cede_with_bytes(page.start) {
        say_once(&cannot(&error.to_string()));
        return Err(Undo {
            emptied: Vec::new(),
            protected: Vec::new(),
            locked,
        });
    }
    let protected = protect::forget(page.clone());
    hold.insert(page.clone());
    for part in mapped.gaps(page) {
        ceded::bar(&part);
    }
    for (part, protection) in protected {
        if ceded::protects(&part, protection).is_err() {
            say_once("a protection is lost: see `sysctl vm.max_map_count`");
        }
    }
    kernel_locks(&locked);
    Ok(())
}

/// Takes ceded pages back: what is mapped there is gone, and they are zeros. Returns false,
/// with a line, if they cannot be used.
///
/// # Safety
/// Nobody uses what is mapped there.
pub(crate) unsafe fn regain(hold: &mut Hold, state: &State, pages: &Range<usize>) -> bool {
    // SAFETY: the caller's promise.
    if let Err(error) = unsafe { state.arena.regain(pages.clone()) } {
        say_once(&format!(
            "addresses of files or code cannot be used for memory again (see `sysctl vm.max_map_count`): {error}"
        ));
        return false;
    }
    hold.remove(pages.clone());
    true
}

fn cannot(why: &str) -> String {
    format!("nothing can be mapped over remote memory: {why}")
}

/// Returns the parts of `page` that are not in `addresses`.
fn others(page: &Range<usize>, addresses: &Range<usize>) -> Vec<Range<usize>> {
    let before = page.start..addresses.start.clamp(page.start, page.end);
    let after = addresses.end.clamp(page.start, page.end)..page.end;
    let parts = [before, after].into_iter();
    parts.filter(|part| !part.is_empty()).collect()
}
