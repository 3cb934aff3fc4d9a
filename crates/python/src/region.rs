//! [`Region`]: bytes under paging, as an address and a length.
//!
//! The rule it keeps: whoever uses the address holds this object, and does not close it meanwhile.
//! The Python layer sees to that: arrays hold it, and `close` is refused while there are any.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use farpage::{Advice, ElementType};
use pyo3::prelude::*;

use crate::{
    error,
    process::{End, Held},
};

/// What is brought in between two looks for signals: some milliseconds over a fast network.
const PREFETCH_BYTES: usize = 16 << 20;

/// A region of the crate `farpage`.
#[pyclass(frozen, module = "farpage._farpage")]
pub(crate) struct Region {
    held: Held<Mapped>,
    /// What is to live longer than the region.
    _keep: Option<Py<PyAny>>,
    /// Of its first byte.
    #[pyo3(get)]
    address: usize,
    #[pyo3(get)]
    bytes: usize,
    #[pyo3(get)]
    page_bytes: usize,
    /// What numpy calls the elements, and bytes of one; `None` for bytes without a type.
    #[pyo3(get)]
    dtype: Option<(String, u64)>,
    /// How many elements there are.
    #[pyo3(get)]
    len: u64,
    #[pyo3(get)]
    shape: Vec<usize>,
}

/// A region, and whether its end publishes what changed.
struct Mapped {
    region: farpage::Region,
    abandoned: AtomicBool,
}

impl Mapped {
    fn close(self) -> Result<(), Box<(Mapped, String)>> {
        if self.abandoned.load(Relaxed) {
            self.region.discard();
            return Ok(());
        }
        self.region.close().map_err(|error| {
            let (why, region) = (error.to_string(), error.into_inner());
            let abandoned = AtomicBool::new(false);
            Box::new((Mapped { region, abandoned }, why))
        })
    }
}

impl End for Mapped {
    fn end(self) -> Result<(), String> {
        self.close().map_err(|failed| {
            let (mapped, why) = *failed;
            mapped.region.discard();
            format!("an array that nobody holds any more could not be published: {why}")
        })
    }
}

impl Region {
    pub(crate) fn new(region: farpage::Region, keep: Option<Py<PyAny>>) -> Self {
        let elements = region.elements();
        Self {
            address: region.as_ptr() as usize,
            bytes: region.len(),
            page_bytes: region.page_bytes(),
            dtype: elements.map(|it| (it.of.number.clone(), it.of.bytes)),
            len: elements.map_or(region.len() as u64, |it| it.len),
            shape: region.shape(),
            held: Held::new(
                "region",
                Mapped {
                    region,
                    abandoned: AtomicBool::new(false),
                },
            ),
            _keep: keep,
        }
    }
}

/// How the servers remember numpy's type `name`: numbers by Rust's name, so that programs in Rust
/// open them as arrays.
pub(crate) fn element_type(name: &str, bytes: u64, align: u64) -> ElementType {
    ElementType::number(name)
        .unwrap_or_else(|| ElementType::foreign(format!("numpy:{name}"), bytes, align))
}

#[pymethods]
impl Region {
    /// Brings bytes in and waits for them, with a look for signals now and then.
    fn prefetch(&self, py: Python<'_>, start: usize, end: usize) -> PyResult<()> {
        let end = end.min(self.bytes);
        let mut from = start;
        while from < end {
            let to = end.min(from.saturating_add(PREFETCH_BYTES));
            let brought = self
                .held
                .with(py, |mapped| mapped.region.prefetch_now(from..to))?;
            brought.map_err(error::pages)?;
            py.check_signals()?;
            from = to;
        }
        Ok(())
    }

    /// Says how bytes will be used.
    fn advise(&self, py: Python<'_>, start: usize, end: usize, advice: &str) -> PyResult<()> {
        let advice = match advice {
            "normal" => Advice::Normal,
            "sequential" => Advice::Sequential,
            "random" => Advice::Random,
            "willneed" => Advice::WillNeed,
            "dontneed" => Advice::DontNeed,
            other => {
                return Err(error::value(format_args!(
                    "no such advice: {other:?}; need normal, sequential, random, willneed or dontneed"
                )));
            }
        };
        let range = start..end.min(self.bytes);
        let advised = (self.held).with(py, |mapped| mapped.region.advise(range, advice))?;
        advised.map_err(error::pages)
    }

    /// Writes all changes back; a region with a name is published.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        let flushed = self.held.with(py, |mapped| mapped.region.flush())?;
        flushed.map_err(error::pages)
    }

    /// Pages that are in local memory now.
    fn resident_pages(&self, py: Python<'_>) -> PyResult<usize> {
        self.held.with(py, |mapped| mapped.region.resident_pages())
    }

    /// Closes the region; one with a name is published first. If that fails the region stays open.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let closed = self.held.take(py, |mapped| match mapped.close() {
            Ok(()) => (None, Ok(())),
            Err(failed) => (Some(failed.0), Err(error::pages(failed.1))),
        })?;
        closed.unwrap_or(Ok(()))
    }

    /// From now on the region's end publishes nothing.
    fn abandon(&self, py: Python<'_>) -> PyResult<()> {
        (self.held).with(py, |mapped| mapped.abandoned.store(true, Relaxed))
    }
}
