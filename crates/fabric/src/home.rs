//! [`choose`]: the descriptor table that RDMA devices are opened on.
//!
//! The connection manager opens each device once and keeps it open until the process ends, so that
//! its descriptor is a number of one table. The rule: RDMA is used only on the first user's table.
//! Other tables are refused before they use a device.

use std::{io, sync::Arc};

use farpage_signals::Mutex;
use farpage_tables::Table;
use farpage_wire::Endpoint;

/// The table that RDMA devices are opened on.
enum Home {
    Programs,
    /// Kept for good, as the devices are.
    Private(Arc<Table>),
    /// Table of the process that this one was forked from. No device is opened a second time.
    Parents,
}

static HOME: Mutex<Option<Home>> = Mutex::new(None);

/// Begins a child made by `fork`. The devices are its parent's, if it may have any.
///
/// # Safety
/// The calling thread is the only one of this process, and outside of this module.
pub(crate) unsafe fn begin_child() {
    if !HOME.try_lock().is_some_and(|home| home.is_none()) {
        // SAFETY: the caller's promise.
        unsafe { HOME.renew(Some(Home::Parents)) };
    }
}

/// Returns the table for sessions of which one may go over RDMA: `new`'s, unless this process has
/// used RDMA on another table. RDMA is used on the returned table alone from then on.
///
/// # Errors
/// The errors of `new` and of [`Table::programs`].
pub(crate) fn choose(new: impl FnOnce() -> io::Result<Arc<Table>>) -> io::Result<Arc<Table>> {
    let mut home = HOME.lock();
    match &*home {
        Some(Home::Programs) => Table::programs(),
        Some(Home::Private(table)) => Ok(table.clone()),
        Some(Home::Parents) => new(),
        None => {
            let table = new()?;
            *home = Some(match table.is_private() {
                true => Home::Private(table.clone()),
                false => Home::Programs,
            });
            Ok(table)
        }
    }
}

/// Returns the table on which a session at `endpoint` is to begin, if the calling thread works on
/// another one.
pub(crate) fn elsewhere(endpoint: &Endpoint) -> Option<Arc<Table>> {
    match &*HOME.lock() {
        Some(Home::Private(table)) if may_be_rdma(endpoint) && !table.is_here() => {
            Some(table.clone())
        }
        _ => None,
    }
}

/// Notes that the calling thread is about to use RDMA.
///
/// # Errors
/// RDMA devices are open on another table.
#[cfg(feature = "rdma")]
pub(crate) fn enter() -> Result<(), String> {
    let here = Table::current().filter(|table| table.is_private());
    let mut home = HOME.lock();
    if matches!(*home, Some(Home::Parents)) {
        return Err(
            "the process that has made this one by fork has opened the RDMA devices: reach the server by tcp, or start this process by exec"
                .to_owned(),
        );
    }
    let is_here = match (&*home, &here) {
        (None, _) | (Some(Home::Programs), None) => true,
        (Some(Home::Private(home)), Some(here)) => Arc::ptr_eq(home, here),
        _ => false,
    };
    if home.is_none() {
        *home = Some(here.map_or(Home::Programs, Home::Private));
    }
    match is_here {
        true => Ok(()),
        false => Err(
            "this process has opened its RDMA devices on another descriptor table: start what lends or borrows by RDMA before the first \
             runtime does, or in a process of its own"
                .to_owned(),
        ),
    }
}

/// True if a session at `endpoint` may go over RDMA.
pub(crate) fn may_be_rdma(endpoint: &Endpoint) -> bool {
    matches!(endpoint, Endpoint::Rdma { .. } | Endpoint::Auto { .. })
}

#[cfg(test)]
mod tests {
    use farpage_testkit::passes_in_child;

    use super::*;

    #[test]
    fn a_child_made_while_a_home_is_chosen_chooses_its_own_tables() {
        let passes = choose_and(|| {
            passes_in_child(|| {
                // SAFETY: the only thread, and the lock is its parent's.
                unsafe { begin_child() };
                let table = Table::programs().expect("threads start");
                let chosen = choose(|| Ok(table.clone()));
                elsewhere(&"auto://localhost:1".parse().expect("an endpoint")).is_none()
                    && chosen.is_ok_and(|chosen| Arc::ptr_eq(&chosen, &table))
            })
        });
        assert!(passes);
    }

    /// Returns the result of `work` while a table is being chosen.
    fn choose_and(work: impl FnOnce() -> bool) -> bool {
        let mut done = false;
        let table = choose(|| {
            done = work();
            Table::private()
        });
        assert!(table.is_ok_and(|table| table.is_private()));
        done
    }
}
