//! The verbs and connection-manager libraries, made safe: one owner per object, in an order of
//! dropping that the adapter allows.
//!
//! The law of this module: memory that an adapter may touch outlives the queue pair that may tell
//! it to. A [`Pair`] owns its [`LocalMemory`] and destroys the queue pair first. The owner of other
//! memory promises the same. All calls into C are here.

mod connection;
mod errno;
mod memory;
mod pair;
mod queue;

use std::{ffi::CStr, ptr::NonNull};

use rdma_sys as sys;

pub(super) use self::{
    connection::{Event, EventKind, Id, REJECT_BYTES, Request},
    memory::{Device, Domain, LocalMemory, Mr, Pd, Sge, Sight},
    pair::{Depths, Opcode, POSTLIST, Pair, READS_IN_FLIGHT_MAX, WorkRequest},
    queue::{COMPLETIONS, Cq, Failure, WorkCompletion},
};

/// Returns the names of this machine's devices, in the system's order.
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
