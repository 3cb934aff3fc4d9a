//! The client half of making a connection: the way to the server, the request and its acceptance.

use std::{
    io,
    time::{Duration, Instant},
};

use farpage_wire::{
    Endpoint,
    control::{ControlDecodeError, HELLO_BYTES, Hello, RemoteKey},
};

use super::{
    control::Control,
    greeting::{Greeting, decode_key},
    reasons::{devices, explain_start},
    verbs::{EventKind, Id, Pair},
};
use crate::{
    ConnectError, home, nonblocking::describe, regmem::RegPool, resolver::resolve as look_up,
};

/// Opens a control connection on which nothing was said. `tell` turns the key of our ring into what
/// the server is told, which tests lie about.
pub(super) fn control(
    endpoint: &Endpoint,
    plain: &RegPool,
    tell: impl FnOnce(RemoteKey) -> RemoteKey,
    until: Instant,
) -> Result<Control, ConnectError> {
    let id = resolve(endpoint, until)?;
    let mut control = Control::new(id, plain).map_err(|reason| unusable(endpoint, reason))?;
    let greeting = Greeting::Control(tell(control.key()));
    let said = establish(endpoint, control.pair(), &greeting, until)?;
    let ring = decode_key(&said).map_err(|error| ConnectError::Protocol {
        endpoint: endpoint.to_string(),
        reason: error.to_string(),
    })?;
    control.meet(ring);
    Ok(control)
}

/// Upper bound of one question for the way to a server, which is then asked anew. Kernels (7.2,
/// adapters in network namespaces) have been seen to miss the neighbour's answer to the first
/// question, and then to know it at once.
const RESOLVE_AGAIN: Duration = Duration::from_secs(1);

/// Finds the device and the way to the server.
pub(super) fn resolve(endpoint: &Endpoint, until: Instant) -> Result<Id, ConnectError> {
    devices()
        .and_then(|_| home::enter())
        .map_err(|reason| unusable(endpoint, reason))?;
    let unreachable = |source| ConnectError::Unreachable {
        endpoint: endpoint.to_string(),
        source,
    };
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    let Endpoint::Rdma { host, port } = endpoint else {
        unreachable!("asked for with an endpoint of this fabric only")
    };
    for address in look_up(host, *port, until).map_err(unreachable)? {
        loop {
            let id = Id::new().map_err(|error| unusable(endpoint, explain_start(&error)))?;
            match id.resolve(address, until.min(Instant::now() + RESOLVE_AGAIN)) {
                Ok(()) => return Ok(id),
                Err(error) => last = error,
            }
            if last.kind() != io::ErrorKind::TimedOut || Instant::now() >= until {
                break;
            }
        }
    }
    match last.raw_os_error() {
        Some(libc::ENODEV) => {
            let names = devices().unwrap_or_default().join(", ");
            let reason = format!(
                "the way there does not lead through an RDMA device (this machine has {names}): name the server by the address of its \
                 RDMA interface, or use tcp://"
            );
            Err(unusable(endpoint, reason))
        }
        _ => Err(unreachable(last)),
    }
}

/// Asks the server for the connection and waits. Returns what the server says behind its hello.
pub(super) fn establish(
    endpoint: &Endpoint,
    pair: &Pair,
    greeting: &Greeting,
    until: Instant,
) -> Result<Vec<u8>, ConnectError> {
    let name = endpoint.to_string();
    let unreachable = |source| ConnectError::Unreachable {
        endpoint: name.clone(),
        source,
    };
    pair.connect(&greeting.encode()).map_err(unreachable)?;
    let event = pair
        .id()
        .wait_event(until)
        .map_err(|error| unreachable(io::Error::new(error.kind(), describe(&error))))?;
    let failed = |error: ControlDecodeError| ConnectError::Protocol {
        endpoint: name.clone(),
        reason: error.to_string(),
    };
    let (hello, rest) = event.said.split_at(event.said.len().min(HELLO_BYTES));
    let hello = <&[u8; HELLO_BYTES]>::try_from(hello)
        .map_err(|_| ControlDecodeError::NotFarpage)
        .and_then(Hello::decode);
    match (event.kind, hello) {
        (EventKind::Established, hello) => hello.map(|_| rest.to_vec()).map_err(failed),
        // No server listens there: the peer's connection manager rejected the connection by itself.
        (EventKind::Rejected, Err(ControlDecodeError::NotFarpage)) => {
            Err(unreachable(io::ErrorKind::ConnectionRefused.into()))
        }
        (EventKind::Rejected, Err(error)) => Err(failed(error)),
        (EventKind::Rejected, Ok(_)) => Err(ConnectError::Refused {
            endpoint: name,
            reason: String::from_utf8_lossy(rest)
                .trim_end_matches('\0')
                .to_owned(),
        }),
        (kind, _) if event.status < 0 => {
            let error = io::Error::from_raw_os_error(-event.status);
            let text = format!("{}: {error}", kind.describe());
            Err(unreachable(io::Error::new(error.kind(), text)))
        }
        (kind, _) => Err(unreachable(io::Error::other(kind.describe()))),
    }
}

pub(super) fn unusable(endpoint: &Endpoint, reason: String) -> ConnectError {
    ConnectError::NoRdma {
        endpoint: endpoint.to_string(),
        reason,
    }
}
