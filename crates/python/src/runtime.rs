//! [`Runtime`]: memory servers and a budget.
//!
//! The rule it keeps: a runtime knows each region and arena before the runtime can be closed, since
//! making one reads the runtime's value under the lock that `close` takes for itself.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use farpage::{ByteSize, Codec, FaultMode, RegionOptions, Reserve, error::NamesError};
use parking_lot::Mutex;
use pyo3::{prelude::*, types::PyDict};

use crate::{
    arena::{self, Arena},
    error::{self, CloseError},
    process::{End, Held},
    region::{self, Region, element_type},
};

/// Bytes of an arena whose memory is granted on demand: more than servers lend.
const ARENA_BYTES: usize = 1 << 40;

/// A runtime of the crate `farpage`.
#[pyclass(frozen, module = "farpage._farpage")]
pub(crate) struct Runtime {
    held: Held<Open>,
    /// Object that has to live longer than the runtime.
    _keep: Option<Py<PyAny>>,
}

/// A runtime, with the regions and arenas made of it that may live.
struct Open {
    runtime: farpage::Runtime,
    regions: Mutex<Vec<Weak<region::Shared>>>,
    arenas: Mutex<Vec<Weak<Held<farpage::Arena>>>>,
}

impl End for Open {
    fn end(self) -> Result<(), String> {
        Ok(())
    }
}

impl Open {
    /// Makes a region known to the runtime.
    fn region(&self, what: String, region: farpage::Region) -> Region {
        let region = Region::new(what, region);
        add(&self.regions, region.shared());
        region
    }
}

/// Adds `value` to a list. Entries of dead values leave when the list would grow.
fn add<T>(list: &Mutex<Vec<Weak<T>>>, value: &Arc<T>) {
    let mut list = list.lock();
    if list.len() == list.capacity() {
        list.retain(|it| it.strong_count() > 0);
    }
    list.push(Arc::downgrade(value));
}

/// Lists the values that live.
fn living<T>(list: &Mutex<Vec<Weak<T>>>) -> Vec<Arc<T>> {
    list.lock().iter().filter_map(Weak::upgrade).collect()
}

impl Runtime {
    /// Calls `body` with the runtime, without the interpreter's lock.
    fn with<R: Send>(
        &self,
        py: Python<'_>,
        body: impl FnOnce(&farpage::Runtime) -> R + Send,
    ) -> PyResult<R> {
        self.held.with(py, |open| body(&open.runtime))
    }

    /// Closes all regions, arenas and the runtime unless there are arrays. Waits for calls that use
    /// any of them.
    fn close_all(&self, publish: bool) -> Result<(), CloseError> {
        // Declared first, to be dropped without the lock.
        let (regions, arenas);
        let mut place = self.held.place();
        let Some(open) = place.as_ref() else {
            return Ok(());
        };
        (regions, arenas) = (living(&open.regions), living(&open.arenas));
        if !publish {
            regions.iter().for_each(|region| region.abandon());
        }
        let unused = || {
            let viewed = regions.iter().filter(|region| region.is_viewed()).count();
            if viewed > 0 {
                return Err(CloseError::InUse(format!(
                    "this runtime has {viewed} arrays: delete them, and all views of them, before \
                     it is closed"
                )));
            }
            let allocated = |arena: &Arc<Held<farpage::Arena>>| {
                arena.here().map_or(0, |arena| arena.allocated_bytes())
            };
            arena::unallocated(arenas.iter().map(allocated).sum())
        };
        // Refuses without the wait for calls that use an array.
        unused()?;
        let mut closing: Vec<_> = regions.iter().map(|region| region.closing()).collect();
        unused()?;
        closing.iter_mut().try_for_each(region::Closing::close)?;
        for arena in &arenas {
            arena::close(arena)?;
        }
        *place = None;
        Ok(())
    }
}

#[pymethods]
impl Runtime {
    /// Builds a runtime. A setting that is `None` comes from the environment, or is the default.
    #[new]
    #[pyo3(signature = (servers, *, keep=None, budget_bytes=None, page_bytes=None, codec=None, redundancy=None, fault_mode=None, deadline_s=None, key_file=None))]
    #[expect(clippy::too_many_arguments, reason = "all have names")]
    fn new(
        py: Python<'_>,
        servers: Vec<String>,
        keep: Option<Py<PyAny>>,
        budget_bytes: Option<u64>,
        page_bytes: Option<u64>,
        codec: Option<&str>,
        redundancy: Option<&str>,
        fault_mode: Option<&str>,
        deadline_s: Option<f64>,
        key_file: Option<std::path::PathBuf>,
    ) -> PyResult<Self> {
        let mut builder = farpage::Runtime::builder();
        for server in servers {
            builder = builder.server(server);
        }
        if let Some(bytes) = budget_bytes {
            builder = builder.budget(ByteSize(bytes));
        }
        if let Some(bytes) = page_bytes {
            builder = builder.page_size(ByteSize(bytes));
        }
        if let Some(codec) = codec {
            builder = builder.codec(codec.parse::<Codec>().map_err(error::value)?);
        }
        if let Some(redundancy) = redundancy {
            builder = builder.redundancy(redundancy.parse().map_err(error::value)?);
        }
        if let Some(mode) = fault_mode {
            let mode: FaultMode = (mode.parse())
                .map_err(|need| error::value(format_args!("fault_mode={mode:?}: {need}")))?;
            builder = builder.fault_mode(mode);
        }
        if let Some(seconds) = deadline_s {
            let deadline = Duration::try_from_secs_f64(seconds)
                .map_err(|why| error::value(format_args!("deadline={seconds}: {why}")))?;
            builder = builder.deadline(deadline);
        }
        if let Some(file) = key_file {
            builder = builder.key_file(file);
        }
        let built = py.detach(|| builder.build());
        let built = built.map_err(|error| error::build(&error))?;
        let open = Open {
            runtime: built,
            regions: Mutex::default(),
            arenas: Mutex::default(),
        };
        Ok(Self {
            held: Held::new("this runtime", open),
            _keep: keep,
        })
    }

    /// Makes a region of zeros, for elements of `dtype`, in numpy's words, in `shape`.
    #[pyo3(signature = (shape, dtype, element_bytes, align, *, keep=None, name=None, replace=false, page_bytes=None, codec=None, redundancy=None))]
    #[expect(clippy::too_many_arguments, reason = "all have names")]
    fn create(
        &self,
        py: Python<'_>,
        shape: Vec<usize>,
        dtype: &str,
        element_bytes: u64,
        align: u64,
        keep: Option<Py<PyAny>>,
        name: Option<&str>,
        replace: bool,
        page_bytes: Option<u64>,
        codec: Option<&str>,
        redundancy: Option<&str>,
    ) -> PyResult<Region> {
        let len = (shape.iter()).try_fold(element_bytes, |len, &side| {
            len.checked_mul(u64::try_from(side).ok()?)
        });
        let bytes = len.filter(|&bytes| bytes < isize::MAX as u64);
        let bytes = bytes
            .ok_or_else(|| error::value("an array of that shape does not fit the address space"))?;
        let mut options = RegionOptions::new()
            .element_type(element_type(dtype, element_bytes, align))
            .shape(&shape);
        if let Some(name) = name {
            options = options.name(name).replace(replace);
        }
        if let Some(bytes) = page_bytes {
            options = options.page_size(ByteSize(bytes));
        }
        if let Some(codec) = codec {
            options = options.codec(codec.parse().map_err(error::value)?);
        }
        if let Some(redundancy) = redundancy {
            options = options.redundancy(redundancy.parse().map_err(error::value)?);
        }
        // A region has at least one byte; an empty array does not use it.
        let create = |open: &Open| {
            let region = open.runtime.region_with(bytes.max(1) as usize, options)?;
            Ok(open.region(what(name), region))
        };
        let region = self.held.with(py, create)?;
        let region = region.map_err(|error| error::create(py, &error))?;
        Ok(region.keeping(keep))
    }

    /// Opens the region that was published as `name`, to be read alone or written, too.
    #[pyo3(signature = (name, *, to_read, keep=None))]
    fn open(
        &self,
        py: Python<'_>,
        name: &str,
        to_read: bool,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Region> {
        let open = |open: &Open| {
            let region = match to_read {
                true => open.runtime.open_region_to_read(name),
                false => open.runtime.open_region(name),
            }?;
            Ok(open.region(what(Some(name)), region))
        };
        let region = self.held.with(py, open)?;
        let region = region.map_err(|error| error::open(py, &error))?;
        Ok(region.keeping(keep))
    }

    /// Makes an arena of `capacity_bytes`, which servers reserve at once. Without a capacity it has
    /// as many bytes as there are addresses for, granted when pages are written back.
    #[pyo3(signature = (capacity_bytes, *, keep=None))]
    fn arena(
        &self,
        py: Python<'_>,
        capacity_bytes: Option<usize>,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Arena> {
        let reserve = capacity_bytes.map_or(Reserve::OnDemand, |_| Reserve::Full);
        let options = RegionOptions::new().reserve(reserve);
        let bytes = capacity_bytes.unwrap_or(ARENA_BYTES);
        let make = |open: &Open| {
            let arena = open.runtime.arena_with(bytes, options)?;
            let arena = Arena::new(arena);
            add(&open.arenas, arena.held());
            Ok(arena)
        };
        let arena = self.held.with(py, make)?;
        let arena = arena.map_err(|error| error::create(py, &error))?;
        Ok(arena.keeping(keep))
    }

    /// Returns the user's names: name, bytes on the servers, and true if a program has it open.
    fn names(&self, py: Python<'_>) -> PyResult<Vec<(String, u64, bool)>> {
        let names = self.with(py, farpage::Runtime::names)?;
        let names = names.map_err(|error: NamesError| error::names(&error))?;
        let named = names.into_iter();
        Ok(named.map(|it| (it.name, it.bytes, it.in_use)).collect())
    }

    fn remove(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        let removed = self.with(py, |runtime| runtime.remove(name))?;
        removed.map_err(|error| error::names(&error))
    }

    /// Returns the endpoints of the runtime's servers.
    fn endpoints(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.with(py, |runtime| {
            let sessions = runtime.sessions().iter();
            sessions.map(|it| it.endpoint().to_string()).collect()
        })
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let all = self.with(py, farpage::Runtime::stats)?;
        let figures = PyDict::new(py);
        for (name, value) in [
            ("faults", all.pager.faults),
            ("fills", all.pager.fills),
            ("prefetches", all.pager.prefetches),
            ("evictions", all.pager.evictions),
            ("clean_evictions", all.pager.clean_evictions),
            ("poisoned", all.pager.poisoned),
            ("failed_evictions", all.pager.failed_evictions),
            ("resident_bytes", all.pager.resident_bytes),
            ("peak_resident_bytes", all.pager.peak_resident_bytes),
            ("budget_bytes", all.pager.budget_bytes),
            ("bytes_read", all.store.bytes_read),
            ("bytes_written", all.store.bytes_written),
        ] {
            figures.set_item(name, value)?;
        }
        figures.set_item("compression_ratio", all.compression_ratio())?;
        figures.set_item("summary", all.to_string())?;
        Ok(figures)
    }

    /// True if the runtime is closed. Waits while it is being closed.
    #[getter]
    fn closed(&self, py: Python<'_>) -> bool {
        !self.held.is_open(py)
    }

    /// Closes all regions, which publishes those with a name unless `publish` is false, and gives
    /// the runtime up. Raises `BufferError` if there are arrays.
    fn close(&self, py: Python<'_>, publish: bool) -> PyResult<()> {
        self.held.check_process()?;
        let closed = py.detach(|| self.close_all(publish));
        closed.map_err(|error| error.exception(py))
    }
}

/// Names a region in errors.
fn what(name: Option<&str>) -> String {
    name.map_or_else(
        || "this array".to_owned(),
        |name| format!("region `{name}`"),
    )
}
