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
/// are all mappings. What the kernel refuses changes nothing. The error is an `errno`.
///
/// # Safety
/// As `mmap` with `MAP_FIXED`.
pub(crate) unsafe fn map_over(
    hold: &mut Hold,
    state: &State,
    addresses: &Range<usize>,
    wanted: &Wanted,
    mapped: &Ranges<()>,
) -> Result<(), c_int> {
    // 1. Elsewhere, since only the kernel knows what it refuses.
    // SAFETY: replaces nothing.
    let made = unsafe { wanted.map(0) }?;
    let from = made..made + addresses.len();
    let Err(errno) = move_over(hold, state, from, addresses.start, mapped) else {
        return Ok(());
    };
    // SAFETY: made above, and nobody has seen it.
    unsafe { system_call(libc::SYS_munmap, [made, addresses.len(), 0, 0, 0, 0]) };
    if !hold.cover(addresses) {
        return Err(errno);
    }
    // Mappings of some devices cannot move.
    // SAFETY: the caller's promise.
    unsafe { wanted.map(addresses.start) }.map(drop)
}

/// Moves a mapping of the kernel's to addresses of the arena from `to` on, in place of memory of
/// which `mapped` are all mappings. The error is an `errno`.
pub(crate) fn move_over(
    hold: &mut Hold,
    state: &State,
    from: Range<usize>,
    to: usize,
    mapped: &Ranges<()>,
) -> Result<(), c_int> {
    // SAFETY: the program gives up what is there.
    if !unsafe { cede(hold, state, &(to..to + from.len()), mapped) } {
        return Err(libc::ENOMEM);
    }
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    let args = [from.start, from.len(), from.len(), flags as usize, to, 0];
    // SAFETY: the addresses are ceded, and the program gives up what is there.
    match unsafe { system_call(libc::SYS_mremap, args) } {
        0.. => Ok(()),
        errno => Err(-errno as c_int),
    }
}

/// Cedes the pages of `addresses`, whose contents the program gives up. Bytes of other mappings
/// in the first and the last page stay, of which `mapped` are all. Returns false, with a line,
/// if some pages cannot be ceded.
///
/// # Safety
/// There are no references to bytes of `addresses`.
pub(crate) unsafe fn cede(
    hold: &mut Hold,
    state: &State,
    addresses: &Range<usize>,
    mapped: &Ranges<()>,
) -> bool {
    let page_bytes = state.arena.region().page_bytes();
    for pages in hold.kept(&state.pages_of(addresses)) {
        let mut whole = pages.clone();
        let ends = [pages.start, pages.end - page_bytes];
        for page in ends.map(|start| start..start + page_bytes) {
            let others = others(&page, addresses);
            if !others.iter().any(|other| mapped.touches(other)) || hold.touches(&page) {
                continue;
            }
            if !cede_shared(hold, state, &page, &others, mapped) {
                return false;
            }
            if page.start == whole.start {
                whole.start = page.end;
            } else {
                whole.end = page.start;
            }
        }
        if whole.is_empty() {
            continue;
        }
        locks::unlock(state, whole.clone());
        // SAFETY: the caller's promise; no other mapping has bytes there.
        if let Err(error) = unsafe { state.arena.cede(whole.clone()) } {
            say_once(&cannot(&error.to_string()));
            return false;
        }
        protect::forget(whole.clone());
        hold.insert(whole);
    }
    true
}

/// Cedes a page of which the parts `others` may have other mappings. Other threads may use
/// these.
fn cede_shared(
    hold: &mut Hold,
    state: &State,
    page: &Range<usize>,
    others: &[Range<usize>],
    mapped: &Ranges<()>,
) -> bool {
    let locked = locks::unlock(state, page.clone());
    if let Err(error) = state.arena.cede_with_bytes(page.start) {
        say_once(&cannot(&error.to_string()));
        return false;
    }
    let protected = protect::forget(page.clone());
    hold.insert(page.clone());
    for other in others {
        for part in mapped.gaps(other) {
            ceded::bar(&part);
        }
    }
    for (part, protection) in protected {
        // The mapping is new and divided nowhere: there is room for its parts.
        let _ = ceded::protects(&part, protection);
    }
    kernel_locks(&locked);
    true
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
