//! [`Region`]: bytes under paging, as an address and a length.
//!
//! The rule it keeps: bytes are mapped while a [`View`] of them lives. Arrays hold one. A view is
//! made under the lock of the region's value, and `close` counts views under that lock.

use std::sync::{
    Arc,
    atomic::{
        AtomicBool, AtomicUsize,
        Ordering::{Acquire, Relaxed, Release},
    },
};

use farpage::{Advice, ElementType};
use parking_lot::RwLockWriteGuard;
use pyo3::prelude::*;

use crate::{
    error::{self, CloseError},
    process::{End, Held},
};

/// Bytes brought in between two looks for signals: some milliseconds over a fast network.
const PREFETCH_BYTES: usize = 16 << 20;

/// A region of the crate `farpage`.
#[pyclass(frozen, module = "farpage._farpage")]
pub(crate) struct Region {
    shared: Arc<Shared>,
    /// Object that has to live longer than the region.
    _keep: Option<Py<PyAny>>,
    /// Address of the region's first byte.
    #[pyo3(get)]
    address: usize,
    #[pyo3(get)]
    bytes: usize,
    #[pyo3(get)]
    page_bytes: usize,
    /// Name of the elements' type in numpy, and bytes of one; `None` for bytes without a type.
    #[pyo3(get)]
    dtype: Option<(String, u64)>,
    /// Number of elements.
    #[pyo3(get)]
    len: u64,
    #[pyo3(get)]
    shape: Vec<usize>,
}

/// A region as its Python object, its views and its runtime share it.
pub(crate) struct Shared {
    held: Held<Mapped>,
    /// Number of views that live. Grows under the lock of `held` only. The `Release` of a view's
    /// end pairs with the `Acquire` of [`is_viewed`](Shared::is_viewed): accesses to the bytes come
    /// before the view's end.
    views: AtomicUsize,
}

/// A promise that a region's bytes stay mapped.
#[pyclass(frozen, module = "farpage._farpage")]
pub(crate) struct View(Arc<Shared>);

impl Drop for View {
    fn drop(&mut self) {
        self.0.views.fetch_sub(1, Release);
    }
}

impl Shared {
    pub(crate) fn is_viewed(&self) -> bool {
        self.views.load(Acquire) > 0
    }

    /// Makes the region's end publish nothing. Waits while it is being closed.
    pub(crate) fn abandon(&self) {
        if let Some(mapped) = self.held.here() {
            mapped.abandoned.store(true, Relaxed);
        }
    }

    /// Closes the region unless there are views of it. Waits for calls that use it.
    fn close(&self) -> Result<(), CloseError> {
        let unviewed = || match self.is_viewed() {
            true => Err(CloseError::InUse(format!(
                "{} has arrays: delete them, and all views of them, before it is closed",
                self.held.what()
            ))),
            false => Ok(()),
        };
        // Refuses without the wait for a call that uses an array.
        unviewed()?;
        let mut closing = self.closing();
        unviewed()?;
        closing.close()
    }

    /// Keeps others from making views and from closing the region.
    pub(crate) fn closing(&self) -> Closing<'_> {
        Closing(self.held.place())
    }
}

/// A region that no other thread can use.
pub(crate) struct Closing<'a>(RwLockWriteGuard<'a, Option<Mapped>>);

impl Closing<'_> {
    /// Closes the region. If that fails it stays open. A closed one is left alone.
    pub(crate) fn close(&mut self) -> Result<(), CloseError> {
        let Some(mapped) = self.0.take() else {
            return Ok(());
        };
        mapped.close().map_err(|failed| {
            let (mapped, why) = *failed;
            *self.0 = Some(mapped);
            CloseError::Pages(why)
        })
    }
}

/// A region, and a flag that its end publishes nothing.
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
    /// Wraps `region`. `what` is the region's name in errors.
    pub(crate) fn new(what: String, region: farpage::Region) -> Self {
        let elements = region.elements();
        Self {
            address: region.as_ptr() as usize,
            bytes: region.len(),
            page_bytes: region.page_bytes(),
            dtype: elements.map(|it| (it.of.number.clone(), it.of.bytes)),
            len: elements.map_or(region.len() as u64, |it| it.len),
            shape: region.shape(),
            shared: Arc::new(Shared {
                held: Held::new(
                    what,
                    Mapped {
                        region,
                        abandoned: AtomicBool::new(false),
                    },
                ),
                views: AtomicUsize::new(0),
            }),
            _keep: None,
        }
    }

    /// Makes `keep` live longer than the region.
    pub(crate) fn keeping(self, keep: Option<Py<PyAny>>) -> Self {
        Self {
            _keep: keep,
            ..self
        }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Calls `body` with the region, without the interpreter's lock.
    fn with<R: Send>(
        &self,
        py: Python<'_>,
        body: impl FnOnce(&farpage::Region) -> R + Send,
    ) -> PyResult<R> {
        self.shared.held.with(py, |mapped| body(&mapped.region))
    }
}

/// Returns the type that servers remember for numpy's type `name`: numbers by Rust's name, so that
/// programs in Rust open them as arrays.
pub(crate) fn element_type(name: &str, bytes: u64, align: u64) -> ElementType {
    ElementType::number(name)
        .unwrap_or_else(|| ElementType::foreign(format!("numpy:{name}"), bytes, align))
}

#[pymethods]
impl Region {
    /// Brings bytes in and waits for all of them. Looks for signals now and then.
    fn prefetch(&self, py: Python<'_>, start: usize, end: usize) -> PyResult<()> {
        let end = end.min(self.bytes);
        let mut from = start;
        while from < end {
            let to = end.min(from.saturating_add(PREFETCH_BYTES));
            let brought = self.with(py, |region| region.prefetch_now(from..to))?;
            brought.map_err(error::pages)?;
            py.check_signals()?;
            from = to;
        }
        Ok(())
    }

    /// Tells the pager how bytes will be used.
    fn advise(&self, py: Python<'_>, start: usize, end: usize, advice: &str) -> PyResult<()> {
        let advice = match advice {
            "normal" => Advice::Normal,
            "sequential" => Advice::Sequential,
            "random" => Advice::Random,
            "willneed" => Advice::WillNeed,
            "dontneed" => Advice::DontNeed,
            "zerocopy" => Advice::ZeroCopy,
            other => {
                return Err(error::value(format_args!(
                    "no such advice: {other:?}; need normal, sequential, random, willneed, dontneed or zerocopy"
                )));
            }
        };
        let range = start..end.min(self.bytes);
        let advised = self.with(py, |region| region.advise(range, advice))?;
        advised.map_err(error::pages)
    }

    /// Writes all changes back; a region with a name is published.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        let flushed = self.with(py, farpage::Region::flush)?;
        flushed.map_err(error::pages)
    }

    /// Returns the number of pages that are in local memory now.
    fn resident_pages(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, farpage::Region::resident_pages)
    }

    /// True if the region is closed. Waits while it is being closed.
    #[getter]
    fn closed(&self, py: Python<'_>) -> bool {
        !self.shared.held.is_open(py)
    }

    /// Promises that the region's bytes stay mapped.
    fn view(&self, py: Python<'_>) -> PyResult<View> {
        let shared = &self.shared;
        (shared.held).with(py, |_| shared.views.fetch_add(1, Relaxed))?;
        Ok(View(shared.clone()))
    }

    /// Closes the region; one with a name is published first. If that fails, or there are views,
    /// the region stays open.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.held.check_process()?;
        let closed = py.detach(|| self.shared.close());
        closed.map_err(|error| error.exception(py))
    }

    /// Makes the region's end publish nothing. A closed region is left alone.
    fn abandon(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.held.check_process()?;
        py.detach(|| self.shared.abandon());
        Ok(())
    }
}
