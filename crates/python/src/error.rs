//! Python's exceptions for farpage's errors.
//!
//! The rule it keeps: an exception's text is the error's own, which says what to do. Arguments that
//! make no sense are `ValueError`; everything that the world refuses is an `OSError`, of the
//! subclass that Python programs already catch where there is one. Where memory is lacking it is a
//! `MemoryError`, too, as numpy's own.

use std::fmt::Display;

use farpage::{
    BuildError, CreateError, OpenError,
    error::{
        AllocError, ControlError, MapError, NamesError, OpenStoreError, PublishError,
        StoreCreateError,
    },
};
use nix::libc;
use pyo3::{
    create_exception,
    exceptions::{
        PyBufferError, PyConnectionError, PyFileExistsError, PyFileNotFoundError, PyMemoryError,
        PyOSError, PyPermissionError, PyValueError,
    },
    prelude::*,
    sync::PyOnceLock,
    types::{PyDict, PyType},
};

create_exception!(
    farpage,
    Error,
    PyOSError,
    "The operating system or a memory server refused; the text says what to do."
);
create_exception!(
    farpage,
    PageError,
    Error,
    "Pages could not be brought in or written back. What had changed is still in memory, unless \
     the text says that a page's newest bytes are lost."
);

create_exception!(
    farpage,
    InUseError,
    Error,
    "A region of that name is open for writing, here or in another program: it can be had when that \
     closes it."
);

/// Returns `farpage.CapacityError`, which has two bases.
pub(crate) fn capacity_error(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    static TYPE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let made = TYPE.get_or_try_init(py, || {
        let members = PyDict::new(py);
        members.set_item("__module__", "farpage")?;
        members.set_item(
            "__doc__",
            "There is no memory for an array: the servers are full, or this process is.",
        )?;
        let bases = (py.get_type::<Error>(), py.get_type::<PyMemoryError>());
        let made = (py.get_type::<PyType>()).call1(("CapacityError", bases, members))?;
        PyResult::Ok(made.cast_into::<PyType>()?.unbind())
    })?;
    Ok(made.bind(py))
}

fn capacity(py: Python<'_>, text: String) -> PyErr {
    match capacity_error(py) {
        Ok(kind) => PyErr::from_type(kind.clone(), text),
        Err(error) => error,
    }
}

create_exception!(
    farpage._farpage,
    Closed,
    PyValueError,
    "What a call was for has been closed."
);

/// Reason why a runtime, a region or an arena stays open.
pub(crate) enum CloseError {
    /// Arrays show the memory.
    InUse(String),
    /// Pages could not be written back.
    Pages(String),
}

impl CloseError {
    pub(crate) fn exception(self, py: Python<'_>) -> PyErr {
        match self {
            Self::InUse(mut text) => {
                let modules = py.import("sys").and_then(|sys| sys.getattr("modules"));
                if modules.is_ok_and(|modules| modules.contains("IPython").unwrap_or(false)) {
                    text += ". A notebook keeps what cells showed in `Out` and `_`: `%xdel a` deletes \
                             `a` there, too, and `%xdel _3` what cell 3 showed";
                }
                PyBufferError::new_err(text)
            }
            Self::Pages(text) => pages(text),
        }
    }
}

/// Makes the error of a call on `what`, which has been closed.
pub(crate) fn closed(what: &str) -> PyErr {
    Closed::new_err(format!("{what} is closed"))
}

/// Makes the error of an argument that makes no sense.
pub(crate) fn value(error: impl Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

pub(crate) fn system(error: impl Display) -> PyErr {
    Error::new_err(error.to_string())
}

/// Makes the error of pages that could not be moved.
pub(crate) fn pages(error: impl Display) -> PyErr {
    PageError::new_err(error.to_string())
}

pub(crate) fn build(error: &BuildError) -> PyErr {
    let text = error.to_string();
    match error {
        BuildError::Option(_)
        | BuildError::Endpoint(_)
        | BuildError::Start(farpage::error::StartError::Option(_)) => PyValueError::new_err(text),
        BuildError::Connect(_) => PyConnectionError::new_err(text),
        BuildError::Userfaultfd(_) => PyPermissionError::new_err(text),
        _ => Error::new_err(text),
    }
}

pub(crate) fn create(py: Python<'_>, error: &CreateError) -> PyErr {
    let text = error.to_string();
    match error {
        CreateError::Store(StoreCreateError::Alloc {
            region,
            needed_bytes,
            named,
            r#source,
            ..
        }) if !matches!(r#source, AllocError::Control(_)) => {
            let versions = match named {
                true => ", twice its size, since a name keeps two versions while it is published",
                false => "",
            };
            let text = format!(
                "no remote memory for {region}, which needs {needed_bytes} bytes{versions}: \
                 {source}. `farpage.local` takes the server's capacity as `capacity=`"
            );
            capacity(py, text)
        }
        CreateError::Store(StoreCreateError::Table(_) | StoreCreateError::Size { .. }) => {
            capacity(py, text)
        }
        CreateError::Map(map) if lacks_memory(map) => capacity(py, text),
        CreateError::Store(StoreCreateError::Claim(PublishError::Exists { .. })) => {
            PyFileExistsError::new_err(text)
        }
        CreateError::Store(StoreCreateError::InUse { .. } | StoreCreateError::Held { .. }) => {
            InUseError::new_err(text)
        }
        CreateError::Store(
            StoreCreateError::Codec { .. }
            | StoreCreateError::PageSize { .. }
            | StoreCreateError::NoServer { .. }
            | StoreCreateError::Redundancy { .. }
            | StoreCreateError::TooFewServers { .. }
            | StoreCreateError::Mixed { .. }
            | StoreCreateError::NamedParity { .. },
        )
        | CreateError::Name(_)
        | CreateError::Shape { .. } => PyValueError::new_err(text),
        _ => Error::new_err(text),
    }
}

fn lacks_memory(error: &MapError) -> bool {
    matches!(error, MapError::Os { r#source, .. } if r#source.raw_os_error() == Some(libc::ENOMEM))
}

pub(crate) fn open(py: Python<'_>, error: &OpenError) -> PyErr {
    let text = error.to_string();
    match error {
        OpenError::Store(OpenStoreError::Alloc { r#source, .. })
            if !matches!(r#source, AllocError::Control(_)) =>
        {
            capacity(py, text)
        }
        OpenError::Store(OpenStoreError::Table(_)) => capacity(py, text),
        OpenError::Map(map) if lacks_memory(map) => capacity(py, text),
        OpenError::Store(OpenStoreError::NotFound { .. }) => PyFileNotFoundError::new_err(text),
        OpenError::Store(OpenStoreError::InUse { .. } | OpenStoreError::Held { .. }) => {
            InUseError::new_err(text)
        }
        OpenError::Store(OpenStoreError::Connect { .. }) => PyConnectionError::new_err(text),
        _ => Error::new_err(text),
    }
}

pub(crate) fn names(error: &NamesError) -> PyErr {
    let text = error.to_string();
    match error {
        NamesError::NotFound { .. } => PyFileNotFoundError::new_err(text),
        NamesError::InUse { .. } | NamesError::Held { .. } => InUseError::new_err(text),
        NamesError::List(ControlError::Disconnected { .. }) => PyConnectionError::new_err(text),
        _ => Error::new_err(text),
    }
}
