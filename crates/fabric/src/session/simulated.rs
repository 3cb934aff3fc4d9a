//! Sessions at a [`SimServer`]. They need no connection.

use std::sync::Arc;

use farpage_wire::Endpoint;

use super::{Backend, Session};
use crate::{
    ConnectError, SessionOptions,
    sim::{SimServer, SimSession},
};

impl SimServer {
    /// Begins a session. The deadline of `options` does not apply: time is counted in steps.
    ///
    /// # Errors
    /// [`ConnectError`] when the server is dead.
    pub fn session(
        self: &Arc<Self>,
        options: &SessionOptions,
    ) -> Result<Arc<Session>, ConnectError> {
        self.alive()?;
        let sim = SimSession::begin(Arc::clone(self), &options.client);
        let endpoint = Endpoint::Sim(self.seed());
        Ok(Arc::new(Session::new(endpoint, options, Backend::Sim(sim))))
    }
}
