//! The verbs and connection-manager libraries, made safe: one owner per object, in an order of
//! dropping that the adapter allows.
//!
//! The law of this module: memory that an adapter may touch outlives the queue pair that may tell
//! it to. A [`Pair`] owns its [`LocalMemory`] and destroys the queue pair first. Of other memory
//! its owner promises the same. All calls into C are here.

mod connection;
mod memory;
mod pair;
mod queue;

use std::{
    ffi::{CStr, c_int},
    io,
    os::fd::BorrowedFd,
    ptr::NonNull,
};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use rdma_sys as sys;

pub(super) use self::{
    connection::{Event, EventKind, Id, Request},
    memory::{Device, Domain, Local, LocalMemory, Mr, Pd, Sight},
    pair::{Depths, Opcode, POSTLIST, Pair, READS_IN_FLIGHT_MAX, Work},
    queue::{COMPLETIONS, Cq, Done, Failure},
};

/// The names of the devices that this machine has, in the system's order.
pub(super) fn device_names() -> Vec<String> {
    let mut count = 0;
    // SAFETY: `count` is ours; the list is freed below.
    let list = unsafe { sys::ibv_get_device_list(&raw mut count) };
    // Null where the kernel has no RDMA at all.
    let Some(list) = NonNull::new(list) else {
        return Vec::new();
    };
    let names = (0..count as usize)
        .map(|i| {
            // SAFETY: the list has `count` entries, and a device's name is a C string that lives as
            // long as the list.
            let name = unsafe { CStr::from_ptr(sys::ibv_get_device_name(*list.as_ptr().add(i))) };
            name.to_string_lossy().into_owned()
        })
        .collect();
    // SAFETY: made above, and nothing of it is used from here on.
    unsafe { sys::ibv_free_device_list(list.as_ptr()) };
    names
}

fn check(result: c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        -1 => Err(io::Error::last_os_error()),
        // Some calls return the error instead of setting it.
        errno => Err(io::Error::from_raw_os_error(errno.abs())),
    }
}

fn not_null<T>(pointer: *mut T) -> io::Result<NonNull<T>> {
    NonNull::new(pointer).ok_or_else(io::Error::last_os_error)
}

fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL)?);
    fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    Ok(())
}
