//! Connecting: the control connection of a session, or of a visit.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_wire::{
    Endpoint, Request, Response, Secret, SessionId,
    control::{MAX_FRAME_BYTES, Purpose},
};

use super::talk::{ControlLine, Talk};
use crate::{
    ConnectError, rdma,
    stream::{PeerStream, ReceiveError},
};

/// Lower bound of a server's lease. A shorter one counts as this long.
const SHORTEST_LEASE: Duration = Duration::from_millis(100);

/// True if the connection was refused because no process listens at the endpoint.
pub(super) fn is_refused(error: &ConnectError) -> bool {
    matches!(error, ConnectError::Unreachable { source, .. }
        if source.kind() == std::io::ErrorKind::ConnectionRefused)
}

/// Connects and says hello.
pub(super) fn open(
    endpoint: &Endpoint,
    rdma: &rdma::Client,
    purpose: Purpose,
    until: Instant,
) -> Result<PeerStream, ConnectError> {
    let name = endpoint.to_string();
    let stream = match endpoint {
        Endpoint::Rdma { .. } => PeerStream::Rdma(Box::new(rdma.connect(endpoint, until)?)),
        _ => PeerStream::connect(endpoint, until).map_err(|source| ConnectError::Unreachable {
            endpoint: name.clone(),
            source,
        })?,
    };
    stream
        .greet(purpose, until)
        .map_err(|error| not_connected(&name, error))?;
    Ok(stream)
}

/// Begins a session or resumes one.
pub(super) fn begin(
    endpoint: &Endpoint,
    rdma: &rdma::Client,
    client: &str,
    resume: Option<(SessionId, Secret)>,
    until: Instant,
) -> Result<ControlLine, ConnectError> {
    let name = endpoint.to_string();
    let stream = open(endpoint, rdma, Purpose::Control, until)?;
    let request = Request::Begin {
        client: client.to_owned(),
        resume,
    };
    let answer = stream
        .send(&request, until)
        .and_then(|()| stream.receive(MAX_FRAME_BYTES, until));
    match answer.map_err(|error| not_connected(&name, error))? {
        Response::Begun {
            session,
            secret,
            lease_ms,
            paged,
            persistence,
        } => Ok(ControlLine {
            stream: Arc::new(stream),
            death: Arc::default(),
            session,
            secret,
            // The bound keeps the keeper from spinning at a server that says 0.
            lease: Duration::from_millis(lease_ms).max(SHORTEST_LEASE),
            identified: false,
            held: 0,
            over: false,
            paged,
            persistence,
            talk: Talk::default(),
        }),
        answer => Err(turned_away(&name, answer)),
    }
}

pub(super) fn not_connected(name: &str, error: ReceiveError) -> ConnectError {
    let endpoint = name.to_owned();
    match error {
        ReceiveError::Io(source) => ConnectError::Unreachable { endpoint, source },
        ReceiveError::Refused(refusal) => ConnectError::Refused {
            endpoint,
            reason: refusal.to_string(),
        },
        ReceiveError::Decode(error) => ConnectError::Protocol {
            endpoint,
            reason: error.to_string(),
        },
    }
}

pub(super) fn turned_away(name: &str, answer: Response) -> ConnectError {
    let endpoint = name.to_owned();
    match answer {
        Response::Refused(refusal) => ConnectError::Refused {
            endpoint,
            reason: refusal.to_string(),
        },
        _ => ConnectError::Protocol {
            endpoint,
            reason: "with something that was not asked for".to_owned(),
        },
    }
}
