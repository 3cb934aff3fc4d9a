//! Static arrays: the parts of `.bss` of the program, and of libraries that are loaded with it,
//! that have a mebibyte, or `--min-bytes` if that is larger. They become regions where they are.
//!
//! The rule it keeps: bytes that the runtime's threads may read stay local. So the first pages stay
//! if the loader has written to them (it copies `environ` and `stdout` there), and all of a library
//! that is an allocator.
//!
//! Initialised arrays (`.data`) are a private mapping of a file, which no userfaultfd takes.
//! Libraries that are loaded later (`dlopen`) have code that runs before anybody could act.

use std::{
    ffi::{CStr, CString, c_int, c_void},
    fs, io,
    ops::Range,
    ptr, slice,
};

use libc::c_long;

use farpage::{CreateError, Region, RegionOptions, Reserve, Runtime};

use crate::{
    give_up, next, say_once,
    state::{self, KERNEL_PAGE_BYTES},
};

/// Largest number of bytes at the beginning of `.bss` that stay local because they are in memory.
const COPIED_BYTES: usize = 64 << 10;
/// Smallest size of arrays that are worth an arena from the start.
const BYTES_MIN: usize = 1 << 20;
/// Largest number of arrays, and of pieces of 4 GiB that they lie in: each costs each system call
/// some comparisons.
const ARRAYS_MAX: usize = 4;
const PIECES_MAX: usize = 8;
/// `ADDR_NO_RANDOMIZE`, of `personality`.
const NO_RANDOMIZE: c_int = 0x0004_0000;

/// Finds arrays of `min_bytes` and more, before the program has threads. `by_filter`: a filter of
/// system calls will look for their addresses. They are those of all of `.bss`: an array may begin
/// in a page that stays local, and end in one that does not.
pub(crate) fn find(min_bytes: usize, by_filter: bool) {
    let min_bytes = min_bytes.max(BYTES_MIN);
    let mut found = Vec::new();
    for object in objects() {
        let large = object
            .zeroed
            .iter()
            .filter(|&part| part.len() >= min_bytes && remote_part(part).len() >= min_bytes);
        let large: Vec<_> = large.cloned().collect();
        if !large.is_empty() && !object.is_own() && !object.is_allocator() {
            found.extend(large);
        }
    }
    found.sort_by_key(|part| (usize::MAX - part.len(), part.start));
    if !found.is_empty()
        && let Some(why) = why_local(by_filter)
    {
        say_once(&format!("static arrays (.bss) stay local: {why}"));
        found.clear();
    }
    if found.len() > ARRAYS_MAX {
        say_once(&format!(
            "static arrays (.bss) of {} libraries stay local: farpage serves the {ARRAYS_MAX} largest",
            found.len() - ARRAYS_MAX
        ));
        found.truncate(ARRAYS_MAX);
    }
    let pieces = |part: &Range<usize>| ((part.end - 1) >> 32) - (part.start >> 32) + 1;
    if by_filter && found.iter().map(pieces).sum::<usize>() > PIECES_MAX {
        say_once(
            "static arrays (.bss) stay local: no filter of system calls looks for so many addresses (--fillers does without)",
        );
        found.clear();
    }
    state::set_statics(found);
}

/// Returns the reason why no static array can be remote in this process.
fn why_local(by_filter: bool) -> Option<&'static str> {
    let threads = fs::read_dir("/proc/self/task").map_or(0, Iterator::count);
    if threads != 1 {
        return Some("a library has started threads before farpage's constructor");
    }
    // SAFETY: asks, and changes nothing.
    let personality = unsafe { libc::personality(0xffff_ffff) };
    let random = fs::read_to_string("/proc/sys/kernel/randomize_va_space").unwrap_or_default();
    // Programs that this one starts would meet the filter at the same addresses.
    let is_fixed = personality & NO_RANDOMIZE != 0 || random.trim() == "0";
    (by_filter && is_fixed).then_some("addresses are not random here (--fillers does without)")
}

/// Makes regions of ordinary memory of the arrays, with the bytes that they have. An array that
/// cannot become one stays local, with a line.
pub(crate) fn make(runtime: &Runtime, page_bytes: usize) -> Result<Vec<Region>, CreateError> {
    // Servers may have lent all that they have to the arena, which most programs fill in part.
    let on_demand = RegionOptions::new().reserve(Reserve::OnDemand).ordinary();
    let mut regions = Vec::new();
    let bytes: usize = state::statics().iter().map(ExactSizeIterator::len).sum();
    if bytes > 0 && room(runtime).is_some_and(|room| room < bytes as u64) {
        say_once(
            "static arrays (.bss) stay local: the servers have less room than they need; raise a server's --capacity",
        );
        return Ok(regions);
    }
    for part in state::statics().iter().map(remote_part) {
        let start = part.start.next_multiple_of(page_bytes);
        let bytes = (part.end / page_bytes * page_bytes).saturating_sub(start);
        if bytes == 0 {
            continue;
        }
        let Ok(aside) = take_aside(start, bytes).inspect_err(|error| {
            let place = format!("{bytes} bytes at {start:#x}");
            say_once(&format!(
                "a static array (.bss) stays local: {place} cannot be moved: {error}"
            ));
        }) else {
            continue;
        };
        // SAFETY: what is mapped there lies aside, and nobody reads it meanwhile.
        let options = unsafe { on_demand.clone().address(start) };
        let made = runtime.region_with(bytes, options);
        put_back(aside, start, bytes);
        regions.push(made?);
    }
    Ok(regions)
}

/// Returns the bytes that the servers could still lend. `None` if one does not say.
fn room(runtime: &Runtime) -> Option<u64> {
    let sessions = runtime.sessions();
    let rooms = sessions.iter().map(|session| {
        let stat = session.stat().ok()?;
        Some(stat.capacity_bytes.saturating_sub(stat.granted_bytes))
    });
    rooms.sum()
}

/// Moves the pages of `bytes` bytes at `start` to another address, and returns it. Zeros are left.
fn take_aside(start: usize, bytes: usize) -> io::Result<usize> {
    let of = |made: c_long| match made {
        -1 => Err(io::Error::last_os_error()),
        made => Ok(made as usize),
    };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: replaces nothing. The call is made by number: our own `mmap` serves the program.
    let place = unsafe {
        of(libc::syscall(
            libc::SYS_mmap,
            0,
            bytes,
            libc::PROT_NONE,
            flags,
            -1,
            0,
        ))
    }?;
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
    // SAFETY: bytes that nobody uses until they are put back, and a place made for them. The kernel
    // takes no address of its own choice for bytes near address 0.
    let moved = unsafe {
        of(libc::syscall(
            libc::SYS_mremap,
            start,
            bytes,
            bytes,
            flags,
            place,
        ))
    };
    moved.inspect_err(|_| {
        // SAFETY: made above, and nobody's.
        unsafe { libc::syscall(libc::SYS_munmap, place, bytes) };
    })
}

/// Moves `bytes` bytes back to `start`.
fn put_back(aside: usize, start: usize, bytes: usize) {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the bytes' own place, where ordinary memory without a page is.
    let back = unsafe { libc::syscall(libc::SYS_mremap, aside, bytes, bytes, flags, start) };
    if back == -1 {
        give_up("static arrays (.bss) cannot be moved back: the kernel has no memory");
    }
}

/// Returns the addresses of code that may give static arrays to the kernel: of this library, the C
/// library and its kin, and of a program that lies at a random address.
pub(crate) fn code() -> Vec<Range<usize>> {
    const KIN: [&str; 5] = [
        "libc.so",
        "libpthread",
        "ld-linux",
        "linux-vdso",
        "libstdc++",
    ];
    let is_looked_at = |object: &Object| {
        let name = object.name.to_string_lossy();
        let is_random_program = name.is_empty() && !object.is_fixed;
        is_random_program || object.is_own() || KIN.iter().any(|kin| name.contains(kin))
    };
    let objects = objects().into_iter();
    objects
        .filter(is_looked_at)
        .flat_map(|object| object.code)
        .collect()
}

/// A program or library that is loaded.
#[derive(Default)]
struct Object {
    name: CString,
    /// Addresses of all parts.
    parts: Vec<Range<usize>>,
    /// Addresses of bytes that were zeros when the object was loaded.
    zeroed: Vec<Range<usize>>,
    code: Vec<Range<usize>>,
    /// True if the object is a program that is linked for one address.
    is_fixed: bool,
}

impl Object {
    /// True if the object is this library.
    fn is_own(&self) -> bool {
        self.has(objects as *const () as usize)
    }

    /// True if the object defines `malloc`.
    fn is_allocator(&self) -> bool {
        let name = match self.name.is_empty() {
            true => ptr::null(),
            false => self.name.as_ptr(),
        };
        // SAFETY: names of C's. The library is loaded, and stays.
        unsafe {
            let handle = libc::dlopen(name, libc::RTLD_LAZY | libc::RTLD_NOLOAD);
            !handle.is_null() && self.has(next::look_up(handle, c"malloc").addr())
        }
    }

    fn has(&self, address: usize) -> bool {
        self.parts.iter().any(|part| part.contains(&address))
    }
}

/// Returns the objects that are loaded.
fn objects() -> Vec<Object> {
    unsafe extern "C" fn add(
        info: *mut libc::dl_phdr_info,
        _: usize,
        objects: *mut c_void,
    ) -> c_int {
        // SAFETY: what `dl_iterate_phdr` passes, and the list below.
        let (info, objects) = unsafe { (&*info, &mut *objects.cast::<Vec<Object>>()) };
        let mut object = Object {
            is_fixed: info.dlpi_addr == 0,
            ..Object::default()
        };
        if !info.dlpi_name.is_null() {
            // SAFETY: a string of C's.
            object.name = unsafe { CStr::from_ptr(info.dlpi_name) }.to_owned();
        }
        // SAFETY: the loader's table of headers.
        let headers = unsafe { slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
        for header in headers
            .iter()
            .filter(|header| header.p_type == libc::PT_LOAD)
        {
            let start = (info.dlpi_addr + header.p_vaddr) as usize;
            let part = start..start + header.p_memsz as usize;
            if header.p_flags & libc::PF_X != 0 {
                object.code.push(part.clone());
            }
            if header.p_flags & libc::PF_W != 0 {
                let filled = start + header.p_filesz as usize;
                object.zeroed.push(filled..part.end);
            }
            object.parts.push(part);
        }
        objects.push(object);
        0
    }
    let mut objects = Vec::<Object>::new();
    // SAFETY: `add` takes what it is given.
    unsafe { libc::dl_iterate_phdr(Some(add), (&raw mut objects).cast()) };
    objects
}

/// Returns the kernel pages of `zeroed` bytes, without the first ones that the loader, or a
/// constructor, has written to.
fn remote_part(zeroed: &Range<usize>) -> Range<usize> {
    let [start, end] = [zeroed.start, zeroed.end].map(|at| at.next_multiple_of(KERNEL_PAGE_BYTES));
    let mut is_there = [0u8; COPIED_BYTES / KERNEL_PAGE_BYTES];
    let looked_at = (end - start).min(COPIED_BYTES);
    let to = is_there.as_mut_ptr();
    // SAFETY: there is room for a byte per page.
    let asked = unsafe { libc::syscall(libc::SYS_mincore, start, looked_at, to) };
    let pages = match asked {
        0 => is_there.iter().take_while(|&&page| page & 1 != 0).count(),
        _ => is_there.len(),
    };
    (start + pages * KERNEL_PAGE_BYTES).min(end)..end
}
