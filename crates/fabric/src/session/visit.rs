//! [`Visit`]: a look at a server without a session, for people and monitors: figures and names.
//!
//! The rule it keeps: a visit takes no client's place at the server, so that it is answered when no
//! new client is admitted.

use std::time::Instant;

use farpage_tables::Held;
use farpage_wire::{
    Endpoint, NamedRegion, PublicKey, Request, Response, ServerStat,
    control::{MAX_FRAME_BYTES, Purpose},
};

use super::{
    connect::{not_connected, open, turned_away},
    requests::all_names,
};
use crate::{
    ConnectError, SessionOptions, home,
    key::Key,
    rdma,
    stream::{PeerStream, ReceiveError},
};

/// A connection to a server that borrows nothing.
#[derive(Debug)]
pub struct Visit {
    endpoint: String,
    connection: Held<VisitConnection>,
    until: Instant,
}

#[derive(Debug)]
struct VisitConnection {
    stream: PeerStream,
    /// Owner of the parts of a connection over RDMA.
    _rdma: rdma::Client,
}

impl Visit {
    /// Connects to the server at `endpoint`. The whole visit takes at most the deadline of
    /// `options`.
    ///
    /// # Errors
    /// [`ConnectError`]
    pub fn connect(endpoint: &Endpoint, options: &SessionOptions) -> Result<Self, ConnectError> {
        let until = Instant::now() + options.deadline;
        let endpoint = match endpoint {
            // A TCP connection is made faster than an adapter is found.
            Endpoint::Auto { host, port } => &Endpoint::Tcp {
                host: host.clone(),
                port: *port,
            },
            Endpoint::Sim(_) => {
                return Err(ConnectError::Protocol {
                    endpoint: endpoint.to_string(),
                    reason: "a simulated server lives in its client's process".to_owned(),
                });
            }
            other => other,
        };
        let connect = || {
            let rdma = rdma::Client::new(options.rdma);
            let stream = open(endpoint, &rdma, Purpose::Control, until)?;
            let _rdma = rdma;
            Ok(Held::new(VisitConnection { stream, _rdma }))
        };
        Ok(Self {
            endpoint: endpoint.to_string(),
            connection: match home::elsewhere(endpoint) {
                Some(table) => table.run(connect),
                None => connect(),
            }?,
            until,
        })
    }

    /// Shows the user's key: names belong to keys.
    ///
    /// # Errors
    /// [`ConnectError`]
    pub fn identify(&mut self, key: &Key) -> Result<(), ConnectError> {
        let challenge = match self.ask(&Request::Challenge)? {
            Response::Challenge(challenge) => challenge,
            other => return Err(turned_away(&self.endpoint, other)),
        };
        let identify = Request::Identify {
            key: key.public(),
            signature: key.sign(&challenge),
        };
        self.done(&identify)
    }

    /// Asks for the server's figures.
    ///
    /// # Errors
    /// [`ConnectError`]
    pub fn stat(&mut self) -> Result<ServerStat, ConnectError> {
        match self.ask(&Request::Stat)? {
            Response::Stat(stat) => Ok(*stat),
            other => Err(turned_away(&self.endpoint, other)),
        }
    }

    /// Returns the names of the identified key, ascending, or of all keys if it is the operator's.
    ///
    /// # Errors
    /// [`ConnectError`]
    pub fn names(&mut self) -> Result<Vec<NamedRegion>, ConnectError> {
        let names = all_names(|request| self.ask(&request));
        names.map_err(|other| {
            (*other).map_or_else(|error| error, |other| turned_away(&self.endpoint, other))
        })
    }

    /// Forgets a name and frees its memory. `owner` is the key of the name, if the operator removes
    /// another user's name.
    ///
    /// # Errors
    /// [`ConnectError::Refused`] when there is no such name, or a client holds it.
    pub fn remove(&mut self, name: &str, owner: Option<PublicKey>) -> Result<(), ConnectError> {
        self.done(&Request::Remove {
            name: name.to_owned(),
            owner,
        })
    }

    fn done(&mut self, request: &Request) -> Result<(), ConnectError> {
        match self.ask(request)? {
            Response::Done => Ok(()),
            other => Err(turned_away(&self.endpoint, other)),
        }
    }

    fn ask(&mut self, request: &Request) -> Result<Response, ConnectError> {
        let answer = self.connection.with(
            |VisitConnection { stream, .. }| -> Result<_, ReceiveError> {
                stream.send(request, self.until)?;
                stream.receive(MAX_FRAME_BYTES, self.until)
            },
        );
        answer.map_err(|error| not_connected(&self.endpoint, error))
    }
}
