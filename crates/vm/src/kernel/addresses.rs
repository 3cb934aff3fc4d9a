//! Addresses of regions: reserved, registered stripe by stripe, and given back.
//!
//! The rule it keeps: no page of zeros ever appears in a region, not even while it ends. Addresses
//! that the program has unmapped of a region are not touched again.

use std::{io, iter, ops::Range};

use super::{occupied, ranges::Ranges, shard::KernelShard, sharing};
use crate::{
    frame::{self, check_page_bytes},
    pages::Shard,
    protections::protections,
    space::{Cede, Geometry},
    sys::{self, Backing},
    uffd::RegisterMode,
};

/// Reserves addresses for a region of the space with number `space`, and registers them with its
/// `shards`. Returns the first address.
pub(super) fn map(
    shards: &[KernelShard],
    space: u64,
    geometry: &Geometry,
    mode: RegisterMode,
) -> io::Result<usize> {
    check_geometry(geometry)?;
    let address = reserve(space, geometry).map_err(|error| match error.raw_os_error() {
        None => error,
        Some(_) => io::Error::new(
            error.kind(),
            format!(
                "cannot reserve {} bytes of addresses: {error} (see `ulimit -v`, \
                 `sysctl vm.overcommit_memory`, which 2 makes count addresses as memory, and \
                 `sysctl vm.max_map_count`)",
                geometry.bytes
            ),
        ),
    })?;
    // Earlier unmaps are not about this region.
    catch_up(shards);
    occupied::begin(address);
    if let Err(error) = set_up(shards, address, geometry, mode) {
        unmap(shards, address, geometry);
        return Err(cannot_register(geometry, &error));
    }
    Ok(address)
}

fn cannot_register(geometry: &Geometry, error: &io::Error) -> io::Error {
    let text = format!(
        "cannot register {} bytes with userfaultfd: {error}; when out of memory, a mapping per \
         stripe exceeds `sysctl vm.max_map_count`: raise it \
         (`sudo sysctl -w vm.max_map_count=1000000`) or choose larger stripes",
        geometry.bytes
    );
    io::Error::new(error.kind(), text)
}

/// Registers the addresses of a region that was mapped as ordinary memory.
///
/// # Errors
/// The operating system's. The region is ordinary memory as before, but for advice that concerns
/// later pages, dumps and `fork`.
pub(super) fn begin_paging(
    shards: &[KernelShard],
    address: usize,
    geometry: &Geometry,
    mode: RegisterMode,
) -> io::Result<()> {
    catch_up(shards);
    sharing::begin();
    // Each shard knows all ceded addresses.
    let kept = (shards[0].fence.lock().gone).outside(address..address + geometry.bytes);
    let begin = |part: &Range<usize>| {
        register(shards, address, geometry, mode, part)?;
        let backing = frame::backing(geometry.page_bytes);
        // SAFETY: the region's addresses. From here on `fork` leaves them out, since absent pages
        // are caught.
        Ok(unsafe { sys::advise(part.start, part.len(), backing) }?)
    };
    kept.iter().try_for_each(begin).map_err(|error| {
        for part in &kept {
            unregister(shards, address, geometry, part);
            // SAFETY: the region's addresses, which are memory of the kernel's own again.
            let _ = unsafe { sys::madvise(part.start, part.len(), libc::MADV_DOFORK) };
        }
        cannot_register(geometry, &error)
    })
}

/// Gives the addresses of a region back, except those that the program has unmapped itself.
pub(super) fn unmap(shards: &[KernelShard], address: usize, geometry: &Geometry) {
    let all = address..address + geometry.bytes;
    catch_up(shards);
    let mut gone = Ranges::default();
    for shard in shards {
        let fenced = shard.fence.lock();
        for part in fenced.gone.inside(&all) {
            gone.insert(part);
        }
    }
    for part in gone.outside(all.clone()) {
        // 1. No access: threads that sleep on a fault there, and wake now, meet SIGSEGV and not a
        //    page of zeros.
        // SAFETY: the region's, which the caller gives up; the program has not unmapped it.
        let _ = unsafe { sys::protect(part.start, part.len(), libc::PROT_NONE) };
        // 2. No faults: otherwise this thread would wait for its own message to be read.
        unregister(shards, address, geometry, &part);
        // 3. No mapping.
        // SAFETY: the region's, which the caller gives up; the program has not unmapped it.
        unsafe { sys::release(part.start, part.len()) };
    }
    for shard in shards {
        shard.poison.forget(&all);
        shard.fence.forget(&all);
    }
    occupied::give_up(address);
}

/// Takes `addresses` of a region out of paging: memory of the kernel's own lies there then.
///
/// # Errors
/// The operating system's. The addresses are the region's as before.
pub(super) fn cede(
    shards: &[KernelShard],
    addresses: &Range<usize>,
    how: Cede<'_>,
) -> io::Result<()> {
    // Without a list of mappings the memory can be read and written, until the caller protects it.
    let (bytes, protected) = match how {
        Cede::With(bytes) => (Some(bytes), protections(addresses).unwrap_or_default()),
        Cede::Barred | Cede::InPlace => (None, Vec::new()),
    };
    // The shards leave the addresses alone from here on, before the kernel's messages of them come.
    for shard in shards {
        shard.fence.cede(addresses.clone());
        shard.poison.forget(addresses);
    }
    if let Cede::InPlace = how {
        return Ok(());
    }
    // SAFETY: the region's absent pages, for which memory is mapped here.
    // Contents of ordinary memory are given up.
    let replaced = unsafe { sys::replace(addresses.start, addresses.len(), bytes, &protected) };
    replaced.map_err(|errno| {
        (shards.iter()).for_each(|shard| shard.fence.forget(addresses));
        errno.into()
    })
}

/// Takes ceded `addresses` back into paging: what is mapped there is gone, and pages are absent.
///
/// # Errors
/// The operating system's. The addresses are ceded as before, or without access.
pub(super) fn regain(
    shards: &[KernelShard],
    address: usize,
    geometry: &Geometry,
    mode: RegisterMode,
    addresses: &Range<usize>,
) -> io::Result<()> {
    let (start, len) = (addresses.start, addresses.len());
    // 1. No access: a touch before the end of these steps must not make a page of zeros.
    // SAFETY: ceded addresses, whose contents the caller gives up.
    unsafe { sys::reserve_barred(start, len, backing(geometry)) }?;
    // 2. Registration with the shards, which catch the faults there from then on.
    if !geometry.ordinary {
        register(shards, address, geometry, mode, addresses)?;
    }
    // 3. Access. The program has none to the addresses before this function returns.
    let read_only = geometry.read_only;
    let write = if read_only { 0 } else { libc::PROT_WRITE };
    // SAFETY: the region's addresses, of which no page is there.
    unsafe { sys::protect(start, len, libc::PROT_READ | write) }?;
    // 4. Paging, which cannot fail: the shards bring pages in there again.
    for shard in shards {
        shard.fence.forget(addresses);
    }
    Ok(())
}

/// Waits until all that was unmapped before this call is known to all shards.
fn catch_up(shards: &[KernelShard]) {
    shards.iter().for_each(|shard| shard.fence.catch_up());
}

fn set_up(
    shards: &[KernelShard],
    address: usize,
    geometry: &Geometry,
    mode: RegisterMode,
) -> io::Result<()> {
    if !geometry.ordinary {
        let all = address..address + geometry.bytes;
        register(shards, address, geometry, mode, &all)?;
    }
    if geometry.read_only {
        // SAFETY: reserved by the caller, and nobody else has learned of it.
        unsafe { sys::protect(address, geometry.bytes, libc::PROT_READ) }?;
    }
    Ok(())
}

/// Registers each stripe of `addresses` of a region with its shard.
fn register(
    shards: &[KernelShard],
    address: usize,
    geometry: &Geometry,
    mode: RegisterMode,
    addresses: &Range<usize>,
) -> io::Result<()> {
    for (shard, stripe) in stripes_within(shards.len(), address, geometry, addresses) {
        let uffd = shards[shard.0].fence.uffd();
        uffd.register(stripe.start, stripe.len(), mode)?;
    }
    Ok(())
}

/// Takes each stripe of `addresses` of a region back from its shard.
fn unregister(
    shards: &[KernelShard],
    address: usize,
    geometry: &Geometry,
    addresses: &Range<usize>,
) {
    for (shard, stripe) in stripes_within(shards.len(), address, geometry, addresses) {
        let uffd = shards[shard.0].fence.uffd();
        let _ = uffd.unregister(stripe.start, stripe.len());
    }
}

/// Returns the parts of `within`, addresses of a region, that belong to one shard each.
fn stripes_within(
    shards: usize,
    address: usize,
    geometry: &Geometry,
    within: &Range<usize>,
) -> impl Iterator<Item = (Shard, Range<usize>)> {
    let step = match shards {
        1 => geometry.bytes,
        _ => geometry.stripe_bytes,
    };
    let (mut at, end) = (within.start - address, within.end - address);
    iter::from_fn(move || {
        let start = at;
        at = (start / step + 1).saturating_mul(step).min(end);
        (start < end).then(|| {
            let part = address + start..address + at;
            (geometry.shard_of(start, shards), part)
        })
    })
}

/// Reserves the addresses of a region, which no other region gets from then on.
fn reserve(space: u64, geometry: &Geometry) -> io::Result<usize> {
    let backing = backing(geometry);
    let occupy =
        |start| occupied::occupy(&(start..start + geometry.bytes), space, geometry.read_only);
    if let Some(start) = geometry.address {
        let end = start.checked_add(geometry.bytes);
        if start == 0 || !start.is_multiple_of(geometry.page_bytes) || end.is_none() {
            let text = format!(
                "no region of {} bytes can begin at {start:#x}: need a multiple of its page size, {}",
                geometry.bytes, geometry.page_bytes
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        if !occupy(start) {
            let text = format!(
                "the {} bytes at {start:#x} belong to another region, at least in part: \
                 unmap that first",
                geometry.bytes
            );
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
        }
        // SAFETY: whoever asks for an address gives up what is mapped there (`Geometry::address`),
        // and no other region is there: that was seen to above.
        unsafe { sys::reserve_at(start, geometry.bytes, backing) }
            .inspect_err(|_| occupied::give_up(start))?;
        return Ok(start);
    }
    // The kernel may hand out again addresses that the program has unmapped out of a region. Such
    // addresses are kept until others have been found.
    let mut unfit = Vec::new();
    let found = loop {
        match sys::reserve_apart(geometry.bytes, geometry.page_bytes, backing) {
            Ok(start) if occupy(start) => break Ok(start),
            Ok(start) => unfit.push(start),
            Err(errno) => break Err(errno.into()),
        }
    };
    for start in unfit {
        // SAFETY: reserved above, and nobody else has learned of it.
        unsafe { sys::release(start, geometry.bytes) };
    }
    found
}

fn backing(geometry: &Geometry) -> Backing {
    match geometry.ordinary {
        true => Backing::Ordinary,
        false => frame::backing(geometry.page_bytes),
    }
}

fn check_geometry(geometry: &Geometry) -> io::Result<()> {
    check_page_bytes(geometry.page_bytes)?;
    let is_whole = |bytes: usize| bytes > 0 && bytes.is_multiple_of(geometry.page_bytes);
    if is_whole(geometry.bytes) && is_whole(geometry.stripe_bytes) {
        return Ok(());
    }
    let text = format!("{geometry:?}: region and stripe must be a positive multiple of the page");
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}
