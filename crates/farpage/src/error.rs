//! What can go wrong, per operation, and the errors of the layers below that say why.
//!
//! An error's text is whole: it holds its cause's, and says what to do. Printing it with `{}` is
//! enough, and [`Error::source`] has nothing to add. `Debug` prints the same text, for programs
//! whose `main` returns an error, and for `unwrap`. Which cause it was, the variants' fields say.
//!
//! Texts call a region or an array by its name, and one without a name by a number: "array 3 (f64,
//! 12.0 MiB)" is the third that the runtime created without one.

use std::{error::Error, fmt};

pub use farpage_fabric::{AllocError, ChannelError, ConnectError, ControlError, PublishError};
use farpage_pager::FORKED;
pub use farpage_pager::{FlushError as PageFlushError, MapError, PageError, PinError, StartError};
pub use farpage_store::{
    CodecError, CreateError as StoreCreateError, FileStoreError, NamesError, OpenStoreError,
    PublishStoreError, StoreError, TableError,
};
pub use farpage_vm::OpenError as UserfaultfdError;
pub use farpage_wire::{EndpointError, control::NameError};

farpage_wire::debug_as_display!(BuildError, CreateError, OpenError, FlushError);

/// A runtime could not be built.
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

/// A region or an array could not be created.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// The servers have no memory for its pages, or an option does not fit them.
    #[error("{why}{advice}", why = .0, advice = advice_for(.0))]
    Store(StoreCreateError),
    /// It could not be mapped.
    #[error(transparent)]
    Map(#[from] MapError),
    /// It cannot have the name that it was given.
    #[error(transparent)]
    Name(#[from] NameError),
    /// This process is a child of the one that built the runtime.
    #[error("{FORKED}")]
    Forked,
    /// The array would be larger than the address space.
    #[error("an array of {len} elements of {element_bytes} bytes does not fit the address space")]
    TooLarge {
        /// Elements asked for.
        len: usize,
        /// Bytes of one.
        element_bytes: usize,
    },
    /// The product of the shape's dimensions is not the array's length.
    #[error(
        "an array of {len} elements does not have the shape {shape:?}: its sides must multiply to its length"
    )]
    Shape {
        /// Elements per dimension.
        shape: Vec<usize>,
        /// Elements asked for.
        len: usize,
    },
}

impl From<StoreCreateError> for CreateError {
    fn from(error: StoreCreateError) -> Self {
        Self::Store(error)
    }
}

/// Says what helps besides, in words of Rust: other languages have options of other names.
fn advice_for(error: &StoreCreateError) -> &'static str {
    match error {
        StoreCreateError::Alloc { .. } => {
            ", or let the region take what its pages turn out to need (`Reserve::OnDemand`)"
        }
        _ => "",
    }
}

/// A named region could not be opened.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The servers do not have it, or another client holds it.
    #[error(transparent)]
    Store(#[from] OpenStoreError),
    /// It could not be mapped.
    #[error(transparent)]
    Map(#[from] MapError),
    /// This process is a child of the one that built the runtime.
    #[error("{FORKED}")]
    Forked,
    /// It holds elements of another type, or bytes that are no whole number of elements.
    #[error(
        "`{name}` holds {stored}, and is no array of {asked}: open it with the type that it was created with, or as bytes by `open_region`"
    )]
    Type {
        /// The array's name.
        name: String,
        /// What it holds.
        stored: String,
        /// The type that was asked for.
        asked: String,
    },
}

/// A region's changes could not be made safe. They are still in memory.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum FlushError {
    /// Pages could not be written back.
    #[error(transparent)]
    Pages(#[from] PageFlushError),
    /// Pages were written back, but not published under the region's name. The version that was
    /// published before is still there.
    #[error(transparent)]
    Publish(#[from] PublishStoreError),
}

/// A [`Region`](crate::Region) or [`RemoteArray`](crate::RemoteArray) could not be closed. Nothing
/// is lost: `into_inner` gives it back. Dropping the error gives it up, with the changes since its
/// last flush.
pub struct CloseError<C>(Box<Unclosed<C>>);

/// Behind a pointer, so that the result of a `close` that succeeds is small.
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

    /// Why it could not be closed.
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
