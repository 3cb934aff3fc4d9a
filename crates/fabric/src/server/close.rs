//! [`CloseReason`]: the error that ends a connection, for the log.

use std::io;

use farpage_wire::Refusal;

use crate::stream::ReceiveError;

/// Reason why a connection is closed before its client closed it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CloseReason {
    #[error(transparent)]
    Receive(#[from] ReceiveError),
    #[error(transparent)]
    Header(#[from] farpage_wire::data::DataDecodeError),
    #[error("{0}")]
    Refused(Refusal),
    #[error("{0}")]
    Violation(String),
    /// A valid request that the server cannot fulfil.
    #[error("{0}")]
    Unable(String),
}

impl CloseReason {
    pub(crate) fn replaced() -> Self {
        Self::Violation("its client has opened another in its place".to_owned())
    }
}

impl From<io::Error> for CloseReason {
    fn from(error: io::Error) -> Self {
        Self::Receive(error.into())
    }
}
