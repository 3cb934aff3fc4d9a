//! The server half: listens, gives each session a protection domain, and registers leased memory
//! there.
//!
//! The rule it keeps: a data connection belongs to the domain of the session that its client proved
//! to hold, and an extent is registered in that domain alone, for as long as the lease lasts. The
//! keys of one client open nothing for another.

use std::{
    io,
    net::ToSocketAddrs,
    os::fd::{AsFd, BorrowedFd},
    ptr::NonNull,
    sync::Arc,
};

use farpage_wire::{
    Endpoint, Refusal, Secret, SessionId,
    control::{HELLO_BYTES, Hello, LeaseKeys, PagedKeys, Purpose, RemoteKey},
};
use memmap2::MmapMut;

use super::{
    control::Control,
    domains::Domains,
    greeting::{Greeting, encode_key},
    reasons::{devices, explain_pair, explain_registration, explain_start},
    stream::{LISTENING, PASSIVE, RdmaStream, Side, StreamKind, listen},
    verbs::{Cq, Device, Domain, Event, EventKind, Id, Mr, Pair, Pd, REJECT_BYTES, Request, Sight},
};
use crate::{
    errors::BindError,
    home,
    host::Peer,
    log::later,
    memory::{self, ExtentMemory, Residency},
    regmem::{Access, Keys, MemoryRegistration, RegPool, RegPoolOptions, Registrar},
};

impl RdmaStream {
    /// Registers `memories`, which were just leased, with the adapter. Returns their keys in the
    /// same order.
    ///
    /// # Errors
    /// A text for the client. Registrations end with their leases.
    pub(crate) fn register(
        &self,
        session: SessionId,
        memories: &[Arc<ExtentMemory>],
    ) -> Result<Vec<LeaseKeys>, String> {
        let domains = self.domains().expect("only a server leases memory");
        let device = self.with_pair(|pair| pair.pd().device());
        let domain = Domain(domains.of(session, device)?);
        let mut keys = Vec::with_capacity(memories.len());
        for memory in memories {
            if let Some(residency) = memory.residency() {
                keys.push(register_paged(&domain, memory, residency)?);
                continue;
            }
            let access = match (memory.is_read_only(), memory.has_atomics()) {
                (true, _) => Access::RemoteRead,
                (false, true) => Access::RemoteAtomic,
                (false, false) => Access::Remote,
            };
            let registered = memory.register(|slice| {
                // SAFETY: the lease keeps the mapping, drops the registration before it, and gives
                // no page of it back meanwhile.
                let registration = unsafe { domain.register(slice, access) }?;
                Ok((key_of(slice, registration.keys().rkey), registration))
            });
            let key = registered.map_err(|error| explain_registration(memory.bytes(), &error))?;
            keys.push(LeaseKeys {
                memory: key,
                paged: None,
            });
        }
        Ok(keys)
    }
}

/// Registers memory whose pages come and go, the words that say which are there, and the marks.
fn register_paged(
    domain: &Domain,
    memory: &ExtentMemory,
    residency: &Arc<dyn Residency>,
) -> Result<LeaseKeys, String> {
    let device = domain.0.device();
    let access = match memory.is_read_only() {
        true => Access::RemoteRead,
        false => Access::Remote,
    };
    let registered = memory.register(|all| {
        let (bytes, marks) = split(all, memory::marks(memory.bytes()).0);
        let words = residency.share()?.place();
        // SAFETY: the lease keeps the mapping, and drops the registration before it.
        let of_bytes = unsafe { Mr::register(&domain.0, bytes, Sight::OnDemand(access)) }?;
        // SAFETY: as above. Nobody gives pages of the marks back as long as the lease lasts.
        let of_marks = unsafe { Mr::register(&domain.0, marks, Sight::Pinned(Access::Remote)) }?;
        // SAFETY: the residency, which the registration keeps, has the words as long as it lives,
        // and gives no page of them back.
        let of_words =
            unsafe { Mr::register(&domain.0, words, Sight::Pinned(Access::RemoteRead)) }?;
        let keys = LeaseKeys {
            memory: key_of(bytes, of_bytes.rkey()),
            paged: Some(PagedKeys {
                words: key_of(words, of_words.rkey()),
                marks: key_of(marks, of_marks.rkey()),
                granule_bytes: device.on_demand_granule()?,
            }),
        };
        // The residency, which guards the words, comes last.
        let guard = (of_bytes, of_marks, of_words, Arc::clone(residency));
        Ok((keys, MemoryRegistration::new(Keys::default(), guard)))
    });
    registered.map_err(|error| match check_on_demand(device) {
        Ok(()) => explain_registration(memory.bytes(), &error),
        Err(reason) => reason,
    })
}

/// Splits `memory` behind its first `bytes` bytes.
fn split(memory: NonNull<[u8]>, bytes: u64) -> (NonNull<[u8]>, NonNull<[u8]>) {
    let bytes = bytes as usize;
    let rest = memory.len() - bytes;
    let first = memory.cast::<u8>();
    // SAFETY: the subtraction has checked that it is inside the memory, or at its end.
    let second = unsafe { first.add(bytes) };
    (
        NonNull::slice_from_raw_parts(first, bytes),
        NonNull::slice_from_raw_parts(second, rest),
    )
}

fn key_of(memory: NonNull<[u8]>, rkey: u32) -> RemoteKey {
    RemoteKey {
        address: memory.as_ptr().cast::<u8>() as u64,
        rkey,
    }
}

/// Checks that memory that a server moves elsewhere can be lent through `device`. Tries a page.
fn check_on_demand(device: Device) -> Result<(), String> {
    let tried = MmapMut::map_anon(1).and_then(|mut page| {
        let pd = Pd::new(device)?;
        let place = NonNull::from(&mut page[..]);
        // SAFETY: the page outlives the registration, and nobody looks at it.
        unsafe { Mr::register(&pd, place, Sight::OnDemand(Access::Remote)) }.map(drop)
    });
    tried.map_err(|error| {
        let name = device.name();
        format!("the RDMA device {name} has no on-demand paging ({error}), which a server that lends more than its memory (--spill) needs: use tcp://")
    })
}

/// A client that asks for a connection.
#[derive(Debug)]
pub(crate) struct ConnectionRequest {
    request: Request,
    greeting: Greeting,
    peer: Peer,
}

impl ConnectionRequest {
    pub(crate) fn peer(&self) -> &Peer {
        &self.peer
    }
}

/// Check that a data connection of this session, secret and line may be made.
pub(crate) type AdmitData<'a> = dyn Fn(SessionId, &Secret, u64) -> Result<(), Refusal> + 'a;

/// A listening port.
#[derive(Debug)]
pub(crate) struct RdmaListener {
    id: Id,
    port: u16,
    domains: Arc<Domains>,
    /// Memory in which control messages are gathered.
    plain: RegPool,
}

impl RdmaListener {
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
        devices().and_then(|_| home::enter()).map_err(unusable)?;
        let Endpoint::Rdma { host, port } = endpoint else {
            unreachable!("asked for with an endpoint of this fabric only")
        };
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for address in (host.as_str(), *port).to_socket_addrs().map_err(failed)? {
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

    /// Checks that memory that a server moves elsewhere can be lent here. A listener on all
    /// addresses finds out with the first lease.
    pub(crate) fn check_paging(&self) -> Result<(), String> {
        self.id.device().map_or(Ok(()), check_on_demand)
    }

    /// Returns the port, which was found when 0 was asked for.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Takes the next client that wants to connect. `None` if there is none, or it was turned away.
    pub(crate) fn accept(&self) -> io::Result<Option<ConnectionRequest>> {
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
        Ok(Some(ConnectionRequest {
            request,
            greeting,
            peer,
        }))
    }

    /// Makes the connection of `call`, or turns its client away. `admit` decides about a data
    /// connection; `hears` says whether its WRITEs may notify.
    pub(crate) fn answer(
        &self,
        call: ConnectionRequest,
        hears: bool,
        admit: &AdmitData<'_>,
    ) -> Option<RdmaStream> {
        match self.connect(call, hears, admit) {
            Ok(admitted) => Some(admitted),
            Err(reason) => {
                later(move || tracing::warn!(reason, "connection refused"));
                None
            }
        }
    }

    fn connect(
        &self,
        call: ConnectionRequest,
        hears: bool,
        admit: &AdmitData<'_>,
    ) -> Result<RdmaStream, String> {
        let ConnectionRequest {
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
                StreamKind::Control(Box::new(control))
            }
            (Greeting::Data(..), domain) => {
                let pd = domain.expect("a data connection has its session's");
                let depths = if hears { LISTENING } else { PASSIVE };
                let pair = Cq::new(pd.device(), depths.completions())
                    .and_then(|queue| Pair::new(id, pd, queue, depths, None))
                    .and_then(|pair| listen(pair, hears));
                StreamKind::Data(pair.map_err(|error| {
                    format!("{name} cannot be served: {}", explain_pair(&error))
                })?)
            }
        };
        // 3. The client of a data connection is answered, and may WRITE, when its line is free:
        //    `RdmaStream::accept`.
        let side = Side::Server {
            domains: Arc::clone(&self.domains),
            claim,
            hears,
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

impl AsFd for RdmaListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.id.as_fd()
    }
}

/// Returns the words for a client that is turned away: our hello, for other versions, and `reason`.
fn rejection(reason: &str) -> Vec<u8> {
    let mut words = Hello::new(Purpose::Control).encode().to_vec();
    let most = reason.floor_char_boundary(REJECT_BYTES - HELLO_BYTES);
    words.extend_from_slice(&reason.as_bytes()[..most]);
    words
}
