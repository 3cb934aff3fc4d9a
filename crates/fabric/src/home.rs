//! [`choose`]: the descriptor table that RDMA devices are opened on.
//!
//! The connection manager opens each device once and keeps it open until the process ends, so that
//! its descriptor is a number of one table. The rule: RDMA is used only on the first user's table.
//! Other tables are refused before they use a device.

use std::{
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use farpage_tables::Table;
use farpage_wire::Endpoint;

/// The table that RDMA devices are opened on.
enum Home {
    Programs,
    /// Kept for good, as the devices are.
    Private(Arc<Table>),
}

static HOME: Mutex<Option<Home>> = Mutex::new(None);

fn home() -> MutexGuard<'static, Option<Home>> {
    HOME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the table for sessions of which one may go over RDMA: `new`'s, unless this process has
/// used RDMA on another table. RDMA is used on the returned table alone from then on.
///
/// # Errors
/// The errors of `new` and of [`Table::programs`].
pub(crate) fn choose(new: impl FnOnce() -> io::Result<Arc<Table>>) -> io::Result<Arc<Table>> {
    let mut home = home();
    match &*home {
        Some(Home::Programs) => Table::programs(),
        Some(Home::Private(table)) => Ok(table.clone()),
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
    match &*home() {
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
    let mut home = home();
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
