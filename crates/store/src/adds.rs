//! Adding a server: [`Cluster::add_server`].
//!
//! The rule it keeps: a server is known to the pools after its session has begun, so that no
//! request waits for the connection. I/O queues make their ports to it when they next look
//! (`io_queue/port.rs`).

use std::sync::Arc;

use farpage_fabric::{ConnectError, ControlError, Endpoint, Session, regmem::DomainId};
use farpage_wire::EndpointError;

use crate::{Cluster, roster::SERVERS_MAX};

farpage_wire::debug_as_display!(AddServerError);

/// Failure to add a server. Nothing has changed.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum AddServerError {
    /// The server's address cannot be read.
    #[error(transparent)]
    Address(#[from] EndpointError),
    /// The process is a child made by `fork`: the parent uses the servers.
    #[error("a child made by fork cannot add servers; do so in its parent")]
    Forked,
    /// The server cannot be reached.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The runtime knows a server at this address, which does not answer, and has not been given up
    /// yet.
    #[error(
        "{source}; the server at this address is one of the runtime's and may come back: add it again once it answers, or has ended"
    )]
    Silent {
        /// The failed call.
        source: ControlError,
    },
    /// The runtime has had as many servers as it can have, counting those that have ended.
    #[error(
        "a runtime can have {SERVERS_MAX} servers over its life, and has had them; restart the program with the servers that are left"
    )]
    TooMany,
    /// The server is reached through a device for which the runtime has no registered memory.
    #[error(
        "{endpoint} is reached through an RDMA device that none of the servers was reached through when the runtime was built; add it over tcp://, or name it when the runtime is built"
    )]
    Device {
        /// The server's endpoint.
        endpoint: String,
    },
}

impl Cluster {
    /// Adds the server at `endpoint`, to which `connect` begins a session. It takes part in grants
    /// from now on. What exists stays where it is, but for copies that lacked a server. Does
    /// nothing if the server is known and answers, but that a drain of it ends. A server that was
    /// started anew where one was lost is a new one. Waits for the server.
    ///
    /// # Errors
    /// [`AddServerError`]
    pub fn add_server(
        self: &Arc<Self>,
        endpoint: &Endpoint,
        connect: impl FnOnce() -> Result<Arc<Session>, ConnectError>,
    ) -> Result<(), AddServerError> {
        let _one_at_a_time = self.adding.lock();
        let sessions = self.sessions().iter().enumerate();
        let is_known = |(_, session): &(usize, &Arc<Session>)| {
            session.endpoint() == endpoint && session.loss(false).is_none()
        };
        let known: Vec<(usize, &Arc<Session>)> = sessions.filter(is_known).collect();
        if let Some((_, session)) = known.first() {
            // The server may have been started anew since it was last heard of.
            match session.stat() {
                Ok(_) => {
                    for &(port, _) in &known {
                        self.health.answered(port);
                        self.health.set_leaving(port, false);
                    }
                    return Ok(());
                }
                Err(source) if session.loss(false).is_none() => {
                    return Err(AddServerError::Silent { source });
                }
                Err(_) => {}
            }
        }
        if self.sessions().len() == SERVERS_MAX {
            return Err(AddServerError::TooMany);
        }
        let session = connect()?;
        let domain = session.registrar().domain();
        if domain != DomainId::NULL && !self.registered.has_domain(domain) {
            let endpoint = endpoint.to_string();
            return Err(AddServerError::Device { endpoint });
        }
        self.add_session(session)
            .map_err(|_| AddServerError::TooMany)
    }
}
