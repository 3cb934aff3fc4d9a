//! Errors of each operation, and the errors of the layers below that are their causes.
//!
//! An error's text is whole: it contains its cause's text and the remedy. Printing it with `{}` is
//! enough, and [`Error::source`] has nothing to add. `Debug` prints the same text, for programs
//! whose `main` returns an error, and for `unwrap`. The variants' fields tell the cause to
//! programs.
//!
//! Texts call a region or an array by its name, and one without a name by a number: "array 3 (f64,
//! 12.0 MiB)" is the third that the runtime created without a name.

use std::{error::Error, fmt};

pub use farpage_fabric::{AllocError, ChannelError, ConnectError, ControlError, PublishError};
use farpage_pager::FORKED;
pub use farpage_pager::{FlushError as PageFlushError, MapError, PageError, PinError, StartError};
pub use farpage_store::{
    AddServerError, CodecError, CreateError as StoreCreateError, DrainError, FileStoreError,
    NamesError, OpenStoreError, PublishStoreError, StoreError, TableError,
};
pub use farpage_vm::UserfaultfdError;
pub use farpage_wire::{EndpointError, control::NameError};

farpage_wire::debug_as_display!(BuildError, CreateError, OpenError, FlushError);

/// The reason why a runtime could not be built.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// An option's value makes no sense; the text names the option and what it accepts.
    #[error("{0}")]
    Option(String),
    /// A server's address cannot be read.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    /// A server cannot be reached.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The kernel does not let this process page its own memory; the text says what to do.
    #[error(transparent)]
    Userfaultfd(#[from] UserfaultfdError),
    /// The workers could not be started.
    #[error(transparent)]
    Start(#[from] StartError),
}

/// The reason why a region or an array could not be created.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// The servers have no memory for the pages, or an option does not fit them.
    #[error("{why}{advice}", why = .0, advice = advice_for(.0))]
    Store(StoreCreateError),
    /// The region could not be mapped.
    #[error(transparent)]
    Map(#[from] MapError),
    /// The region cannot have its name.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The process is a child of the one that built the runtime.
    #[error("{FORKED}")]
    Forked,
    /// The array would be larger than the address space.
    #[error("an array of {len} elements of {element_bytes} bytes does not fit the address space")]
    TooLarge {
        /// Elements of the array.
        len: usize,
        /// Bytes of one element.
        element_bytes: usize,
    },
    /// The product of the shape's dimensions is not the array's length.
    #[error(
        "an array of {len} elements does not have the shape {shape:?}: its sides must multiply to its length"
    )]
    Shape {
        /// Elements per dimension.
        shape: Vec<usize>,
        /// Elements of the array.
        len: usize,
    },
}

impl From<StoreCreateError> for CreateError {
    fn from(error: StoreCreateError) -> Self {
        Self::Store(error)
    }
}

/// Returns further advice in words of Rust: options have other names in other languages.
fn advice_for(error: &StoreCreateError) -> &'static str {
    match error {
        StoreCreateError::Alloc { .. } => {
            ", or let the region take what its pages turn out to need (`Reserve::OnDemand`)"
        }
        _ => "",
    }
}

/// The reason why a named region could not be opened.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The servers do not have the region, or another client holds it.
    #[error(transparent)]
    Store(#[from] OpenStoreError),
    /// The region could not be mapped.
    #[error(transparent)]
    Map(#[from] MapError),
    /// The process is a child of the one that built the runtime.
    #[error("{FORKED}")]
    Forked,
    /// The region holds elements of another type, or its length is no whole number of elements.
    #[error(
        "`{name}` holds {stored}, and is no array of {asked}: open it with the type that it was created with, or as bytes by `open_region`"
    )]
    Type {
        /// The array's name.
        name: String,
        /// The contents of the region.
        stored: String,
        /// The type of elements that the caller asked for.
        asked: String,
    },
}

/// The reason why a region's changes could not be made safe. The changes are still in memory.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum FlushError {
    /// Pages could not be written back.
    #[error(transparent)]
    Pages(#[from] PageFlushError),
    /// Pages were written back, but not published under the region's name. The version that was
    /// published before still exists.
    #[error(transparent)]
    Publish(#[from] PublishStoreError),
}

/// The reason why a [`Region`](crate::Region) or [`RemoteArray`](crate::RemoteArray) could not be
/// closed. Nothing is lost: `into_inner` returns the region or array. Dropping the error drops it,
/// with the changes since its last flush.
pub struct CloseError<C>(Box<Unclosed<C>>);

/// Contents of a [`CloseError`]. Boxed, so that the result of a `close` that succeeds is small.
struct Unclosed<C> {
    closed: C,
    why: FlushError,
}

impl<C> CloseError<C> {
    pub(crate) fn new(closed: C, why: FlushError) -> CloseError<C> {
        CloseError(Box::new(Unclosed { closed, why }))
    }

    pub(crate) fn into_closed(self) -> C {
        self.0.closed
    }

    /// Returns the reason why the close failed.
    pub fn error(&self) -> &FlushError {
        &self.0.why
    }
}

impl<C> fmt::Debug for CloseError<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The reason's text.
impl<C> fmt::Display for CloseError<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0.why, f)
    }
}

impl<C> Error for CloseError<C> {}
