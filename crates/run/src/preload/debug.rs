//! Function for debuggers: the kernel lets a debugger read no absent page, and the debugger stops
//! the threads that would bring one in.
//!
//! The rule it keeps: nothing here runs unless a debugger calls it.

use std::ffi::{c_int, c_void};

use crate::{Inside, mappings, say, state};

/// Brings memory in, so that a debugger can read it: `call (int)farpage_bring_in(&x, sizeof x)`.
/// Returns 0, also for memory that is not remote, or -1 with a line of the reason. A range smaller
/// than the budget is in memory when the call returns.
///
/// # Safety
/// None: no memory is read.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn farpage_bring_in(address: *const c_void, bytes: usize) -> c_int {
    if let Some((region, range)) = state::static_region(address, bytes) {
        let _inside = Inside::enter();
        let here = region.prefetch_now(range);
        return here.map_or_else(
            |error| {
                say(&error.to_string());
                -1
            },
            |()| 0,
        );
    }
    let (Some(addresses), Some(state)) = (state::ours(address, bytes), state::get()) else {
        return 0;
    };
    let _inside = Inside::enter();
    let base = state.arena.addresses().start;
    let end = addresses.end.min(base + state.arena.capacity_bytes());
    // Ceded pages are the kernel's own: a debugger can read them.
    let Some(map) = mappings::try_look() else {
        say("a thread is inside a call on mappings: let it go on a little, and call again");
        return -1;
    };
    for part in map.those(&(addresses.start..end), |fact| !fact.is_ceded) {
        if let Err(error) = state.arena.region().prefetch_now(state.offsets(&part)) {
            say(&error.to_string());
            return -1;
        }
    }
    0
}
