//! The server half: listens, gives each session a protection domain, and registers what is leased
//! to it.
//!
//! The rule it keeps: a data connection belongs to the domain of the session that its client proved
//! to hold, and an extent is registered in that domain alone, for as long as the lease lasts. What
//! one client was told opens nothing for another.

use std::{
    collections::HashMap,
    io,
    net::ToSocketAddrs,
    os::fd::{AsFd, BorrowedFd},
    sync::{Arc, Weak},
};

use farpage_wire::{
    Endpoint, Refusal, Secret, SessionId,
    control::{HELLO_BYTES, Hello, Purpose, RemoteKey},
};
use parking_lot::Mutex;

use super::{
    Greeting, REJECT_BYTES, address,
    control::Control,
    devices, encode_key, explain_pair, explain_registration, explain_start,
    stream::{Line, PASSIVE, RdmaStream, Side},
    verbs::{Cq, Device, Domain, Event, EventKind, Id, Pair, Pd, Request},
};
use crate::{
    errors::BindError,
    host::Peer,
    log::later,
    memory::ExtentMemory,
    regmem::{Access, RegPool, RegPoolOptions, Registrar},
};

/// The domains of the sessions of one listener. Registrations and connections hold them.
#[derive(Debug, Default)]
pub(super) struct Domains(Mutex<HashMap<SessionId, Weak<Pd>>>);

impl Domains {
    /// The session's domain: as long as anything of the session lives in it, the same.
    fn of(&self, session: SessionId, device: Device) -> Result<Arc<Pd>, String> {
        let mut domains = self.0.lock();
        if let Some(pd) = domains.get(&session).and_then(Weak::upgrade) {
            return match pd.device() == device {
                true => Ok(pd),
                false => Err(
                    "the session's memory is registered with another device of the server: connect to the same address".to_owned(),
                ),
            };
        }
        domains.retain(|_, pd| pd.strong_count() > 0);
        let pd = Pd::new(device)
            .map_err(|error| format!("the server has no protection domain left: {error}"))?;
        domains.insert(session, Arc::downgrade(&pd));
        Ok(pd)
    }
}

impl RdmaStream {
    /// Makes memory that was just leased known to the adapter; its keys, in the order of
    /// `memories`.
    ///
    /// # Errors
    /// In words for the client; what was registered goes with its leases.
    pub(crate) fn register(
        &self,
        session: SessionId,
        memories: &[Arc<ExtentMemory>],
    ) -> Result<Vec<RemoteKey>, String> {
        let domains = self.domains().expect("only a server leases memory");
        let device = self.with_pair(|pair| pair.pd().device());
        let domain = Domain(domains.of(session, device)?);
        let keys = memories.iter().map(|memory| {
            let access = match memory.has_atomics() {
                true => Access::RemoteAtomic,
                false => Access::Remote,
            };
            let registered = memory.register(|slice| {
                // SAFETY: the lease keeps the mapping, drops the registration before it, and gives
                // no page of it back meanwhile.
                let registration = unsafe { domain.register(slice, access) }?;
                let key = RemoteKey {
                    address: slice.as_ptr().cast::<u8>() as u64,
                    rkey: registration.keys().rkey,
                };
                Ok((key, registration))
            });
            registered.map_err(|error| explain_registration(memory.bytes(), &error))
        });
        keys.collect()
    }
}

/// A client that asks for a connection.
#[derive(Debug)]
pub(crate) struct Call {
    request: Request,
    greeting: Greeting,
    peer: Peer,
}

impl Call {
    pub(crate) fn peer(&self) -> &Peer {
        &self.peer
    }
}

/// Whether a data connection of this session, with this secret and on this line, may be made.
pub(crate) type AdmitData<'a> = dyn Fn(SessionId, &Secret, u64) -> Result<(), Refusal> + 'a;

/// A place where clients connect.
#[derive(Debug)]
pub(crate) struct Listener {
    id: Id,
    port: u16,
    domains: Arc<Domains>,
    /// Where control messages are gathered.
    plain: RegPool,
}

impl Listener {
    pub(crate) fn bind(endpoint: &Endpoint) -> Result<Self, BindError> {
        let name = endpoint.to_string();
        let unusable = |reason| BindError::NoRdma {
            endpoint: name.clone(),
            reason,
        };
        let failed = |source: io::Error| match source.raw_os_error() {
            Some(libc::EADDRINUSE) => BindError::InUse {
                endpoint: name.clone(),
            },
            Some(libc::ENODEV) => BindError::NoRdma {
                endpoint: name.clone(),
                reason: "that address belongs to no RDMA device".to_owned(),
            },
            _ => BindError::Io {
                endpoint: name.clone(),
                source,
            },
        };
        devices().map_err(unusable)?;
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for address in address(endpoint).to_socket_addrs().map_err(failed)? {
            let id = Id::new().map_err(|error| unusable(explain_start(&error)))?;
            match id.listen(address) {
                Ok(port) => {
                    return Ok(Self {
                        id,
                        port,
                        domains: Arc::default(),
                        plain: RegPool::new([], RegPoolOptions::default()),
                    });
                }
                Err(error) => last = error,
            }
        }
        Err(failed(last))
    }

    /// Where it listens; found when 0 was asked for.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Who wants to connect next, `None` when nobody does, or who did was turned away.
    pub(crate) fn accept(&self) -> io::Result<Option<Call>> {
        let Some(event) = self.id.next_event()? else {
            return Ok(None);
        };
        let Event {
            kind: EventKind::Request,
            said,
            request: Some(request),
            ..
        } = event
        else {
            let event = event.kind.describe();
            later(move || {
                tracing::warn!(
                    event,
                    "the RDMA listener was told something that it does not expect"
                );
            });
            return Ok(None);
        };
        let greeting = match Greeting::decode(&said) {
            Ok(greeting) => greeting,
            Err(error) => {
                request.reject(&rejection(&error.to_string()));
                later(move || tracing::warn!(reason = %error, "connection refused"));
                return Ok(None);
            }
        };
        let peer = request.peer().map_or_else(Peer::unknown, Peer::at);
        Ok(Some(Call {
            request,
            greeting,
            peer,
        }))
    }

    /// Makes the connection, or turns its client away. A data connection has to be admitted.
    pub(crate) fn answer(&self, call: Call, admit: &AdmitData<'_>) -> Option<RdmaStream> {
        match self.connect(call, admit) {
            Ok(admitted) => Some(admitted),
            Err(reason) => {
                later(move || tracing::warn!(reason, "connection refused"));
                None
            }
        }
    }

    fn connect(&self, call: Call, admit: &AdmitData<'_>) -> Result<RdmaStream, String> {
        let Call {
            request,
            greeting,
            peer: Peer { name, .. },
        } = call;
        let refuse = |request: Request, reason: String| {
            request.reject(&rejection(&reason));
            Err(reason)
        };
        let Some(device) = request.device() else {
            return refuse(request, "no device".to_owned());
        };
        // 1. Whose it is, and whether there is a place for it: both before anything is made.
        let claim = match &greeting {
            Greeting::Control(_) => None,
            Greeting::Data(session, secret, line) => Some((*session, *secret, *line)),
        };
        let domain = claim.map(|(session, secret, line)| {
            admit(session, &secret, line)
                .map_err(|refusal| refusal.to_string())
                .and_then(|()| self.domains.of(session, device))
        });
        let domain = match domain.transpose() {
            Ok(domain) => domain,
            Err(reason) => return refuse(request, reason),
        };
        // 2. Its queue pair, and where its ring is.
        let id = request.into_id().map_err(|error| explain_pair(&error))?;
        let mut words = greeting.hello().encode().to_vec();
        let line = match (&greeting, domain) {
            (Greeting::Control(ring), _) => {
                let mut control = Control::new(id, &self.plain)
                    .map_err(|reason| format!("{name} cannot be served: {reason}"))?;
                control.meet(*ring);
                words.extend(encode_key(control.key()));
                Line::Control(Box::new(control))
            }
            (Greeting::Data(..), domain) => {
                let pd = domain.expect("a data connection has its session's");
                let pair = Cq::new(pd.device(), PASSIVE.completions())
                    .and_then(|queue| Pair::new(id, pd, queue, PASSIVE, None));
                Line::Data(pair.map_err(|error| {
                    format!("{name} cannot be served: {}", explain_pair(&error))
                })?)
            }
        };
        // 3. The client of a data connection is answered, and may WRITE, when its line is free:
        //    `RdmaStream::accept`.
        let side = Side::Server {
            domains: Arc::clone(&self.domains),
            claim,
        };
        let stream = RdmaStream::new(line, side)
            .map_err(|error| format!("{name} cannot be served: {error}"))?;
        if claim.is_none() {
            stream
                .with_pair(|pair| pair.accept(&words))
                .map_err(|error| format!("{name} could not be accepted: {error}"))?;
        }
        Ok(stream)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.id.as_fd()
    }
}

/// What a client that is turned away is told: our hello, so that another version can tell, and why.
fn rejection(reason: &str) -> Vec<u8> {
    let mut words = Hello::new(Purpose::Control).encode().to_vec();
    let most = reason.floor_char_boundary(REJECT_BYTES - HELLO_BYTES);
    words.extend_from_slice(&reason.as_bytes()[..most]);
    words
}
