//! Requests of a [`Session`] about the server's disk.
//!
//! The rule it keeps: the caller decides on the size of a request, since the server answers once
//! the disk has all of its bytes.

use farpage_wire::{ExtentRange, Persistence, Request, Response};

use super::Session;
use crate::ControlError;

impl Session {
    /// Returns the time at which published names are on the server's disk.
    pub fn persistence(&self) -> Persistence {
        (self.remote()).map_or(Persistence::Never, |remote| remote.shared.persistence)
    }

    /// Puts bytes of this session's extents on the server's disk, for the next
    /// [`publish`](Self::publish) of a name that this session may publish. With `wait` the bytes
    /// are durable after the return. Returns `false`, and does nothing, while the last publication
    /// of the name is being written.
    ///
    /// # Errors
    /// [`ControlError`]: the server's disk failed, or the server keeps nothing on a disk.
    pub fn persist(
        &self,
        name: &str,
        ranges: Vec<ExtentRange>,
        wait: bool,
    ) -> Result<bool, ControlError> {
        let request = Request::Persist {
            name: name.to_owned(),
            ranges,
            wait,
        };
        match self.call(request) {
            Ok(Response::Done) => Ok(true),
            Ok(Response::Later) => Ok(false),
            other => Err(self.failed(format!("write `{name}` to its disk"), other)),
        }
    }
}
