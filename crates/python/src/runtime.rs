//! [`Runtime`]: memory servers and a budget.

use std::time::Duration;

use farpage::{ByteSize, Codec, FaultMode, RegionOptions, Reserve, error::NamesError};
use pyo3::{prelude::*, types::PyDict};

use crate::{
    arena::Arena,
    error,
    process::{End, Held},
    region::{Region, element_type},
};

/// Addresses of an arena whose memory is granted on demand: more than servers lend.
const ARENA_BYTES: usize = 1 << 40;

/// A runtime of the crate `farpage`.
#[pyclass(frozen, module = "farpage._farpage")]
pub(crate) struct Runtime {
    held: Held<farpage::Runtime>,
    /// What is to live longer than the runtime.
    _keep: Option<Py<PyAny>>,
}

impl End for farpage::Runtime {
    fn end(self) -> Result<(), String> {
        Ok(())
    }
}

#[pymethods]
impl Runtime {
    /// What is `None` comes from the environment, else it is the default.
    #[new]
    #[pyo3(signature = (servers, *, keep=None, budget_bytes=None, page_bytes=None, codec=None, fault_mode=None, deadline_s=None, key_file=None))]
    #[expect(clippy::too_many_arguments, reason = "all have names")]
    fn new(
        py: Python<'_>,
        servers: Vec<String>,
        keep: Option<Py<PyAny>>,
        budget_bytes: Option<u64>,
        page_bytes: Option<u64>,
        codec: Option<&str>,
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
        Ok(Self {
            held: Held::new("runtime", built),
            _keep: keep,
        })
    }

    /// A region of zeros that holds elements of `dtype`, in numpy's words, in `shape`.
    #[pyo3(signature = (shape, dtype, element_bytes, align, *, keep=None, name=None, replace=false, page_bytes=None, codec=None))]
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
    ) -> PyResult<Region> {
        let len = (shape.iter()).try_fold(element_bytes, |len, &side| {
            len.checked_mul(u64::try_from(side).ok()?)
        });
        let bytes = len.filter(|&bytes| bytes < isize::MAX as u64);
        let bytes = bytes
            .ok_or_else(|| error::value("an array of that shape does not fit the address space"))?;
        let mut options =
            RegionOptions::new().element_type(element_type(dtype, element_bytes, align));
        if bytes > 0 {
            options = options.shape(&shape);
        }
        if let Some(name) = name {
            options = options.name(name).replace(replace);
        }
        if let Some(bytes) = page_bytes {
            options = options.page_size(ByteSize(bytes));
        }
        if let Some(codec) = codec {
            options = options.codec(codec.parse().map_err(error::value)?);
        }
        // A region has at least one byte; an empty array does not use it.
        let create =
            |runtime: &farpage::Runtime| runtime.region_with(bytes.max(1) as usize, options);
        let region = self.held.with(py, create)?;
        let region = region.map_err(|error| error::create(&error))?;
        Ok(Region::new(region, keep))
    }

    /// The region that was published under a name, to be read alone or written, too.
    #[pyo3(signature = (name, *, to_read, keep=None))]
    fn open(
        &self,
        py: Python<'_>,
        name: &str,
        to_read: bool,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Region> {
        let region = self.held.with(py, |runtime| match to_read {
            true => runtime.open_region_to_read(name),
            false => runtime.open_region(name),
        })?;
        let region = region.map_err(|error| error::open(&error))?;
        Ok(Region::new(region, keep))
    }

    /// An arena of so many bytes, which servers reserve at once; or of as many as there are
    /// addresses for, which they grant when pages are written back.
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
        let arena = (self.held).with(py, |runtime| runtime.arena_with(bytes, options))?;
        let arena = arena.map_err(|error| error::create(&error))?;
        Ok(Arena::new(arena, keep))
    }

    /// The user's names: name, bytes on the servers, and whether a program has it open.
    fn names(&self, py: Python<'_>) -> PyResult<Vec<(String, u64, bool)>> {
        let names = self.held.with(py, farpage::Runtime::names)?;
        let names = names.map_err(|error: NamesError| error::names(&error))?;
        let named = names.into_iter();
        Ok(named.map(|it| (it.name, it.bytes, it.in_use)).collect())
    }

    fn remove(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        let removed = self.held.with(py, |runtime| runtime.remove(name))?;
        removed.map_err(|error| error::names(&error))
    }

    /// Where its servers are.
    fn endpoints(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.held.with(py, |runtime| {
            let sessions = runtime.sessions().iter();
            sessions.map(|it| it.endpoint().to_string()).collect()
        })
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let all = self.held.with(py, farpage::Runtime::stats)?;
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

    /// Gives the runtime up; its threads end with its last region.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.held.take(py, |runtime| {
            drop(runtime);
            (None, ())
        })?;
        Ok(())
    }
}
