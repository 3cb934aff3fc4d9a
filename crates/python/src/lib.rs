//! `farpage._farpage`: the native part of the Python package `farpage`.
//!
//! The rule it keeps: whatever waits for a server, a worker or a lock runs without the
//! interpreter's lock. Arrays, lifetimes and pickling, which users see, are written in Python, in
//! `python/farpage`; memory is handed over as addresses, and that package keeps regions alive as
//! long as arrays need them.

mod arena;
mod error;
mod process;
mod region;
mod runtime;
mod serve;

use farpage::Allowance;
use pyo3::prelude::*;

/// Allocator of this library's own. The program's serves threads that do not belong to a runtime.
#[global_allocator]
static ALLOCATOR: farpage::Allocator = farpage::Allocator::new();

/// Native parts of the package `farpage`; use that package.
#[pymodule(gil_used = false)]
mod _farpage {
    use pyo3::prelude::*;

    use super::error::capacity_error;
    #[pymodule_export]
    use super::{
        arena::{Arena, is_allocated, set_handler},
        available_bytes,
        error::{Closed, Error, InUseError, PageError},
        parse_size,
        process::sigbus_handler,
        region::{Region, View},
        runtime::Runtime,
        serve::serve,
    };

    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "Python's name for it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_init]
    fn add_capacity_error(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("CapacityError", capacity_error(module.py())?)
    }
}

/// Returns the bytes that this process could use now without swapping, within its cgroups' limits.
#[pyfunction]
fn available_bytes(py: Python<'_>) -> u64 {
    py.detach(|| Allowance::of_this_process().available_bytes)
}

/// Returns the bytes of a size such as `4GiB`.
#[pyfunction]
fn parse_size(text: &str) -> PyResult<u64> {
    let size = farpage_wire::parse_size(text).map_err(error::value)?;
    Ok(size.as_u64())
}
