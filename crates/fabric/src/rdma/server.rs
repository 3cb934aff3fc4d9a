//! The server half: listens, gives each session a protection domain, and registers what is leased to it.
//!
//! The rule it keeps: a data connection belongs to the domain of the session that its client proved to hold, and an extent is registered in that
//! domain alone, for as long as the lease lasts. What one client was told opens nothing for another.

use std::{
    collections::HashMap,
    io,
    net::ToSocketAddrs,
    os::fd::{AsFd, BorrowedFd},
    ptr::NonNull,
    sync::{Arc, Weak},
};

use farpage_wire::{
    Endpoint, SessionId,
    control::{HELLO_BYTES, Hello, Purpose, RemoteKey},
};
use parking_lot::Mutex;

use super::{
    Greeting, REJECT_BYTES, address, devices, explain_registration, explain_start,
    stream::{CONTROL, CONTROL_BYTES, PASSIVE, RdmaStream, Side},
    verbs::{Depths, Device, Domain, Event, EventKind, Id, Mr, Pair, Pd, Request, Slab},
};
use crate::{
    host::Host,
    memory::ExtentMemory,
    regmem::{Access, RegPool, RegPoolOptions, Registrar},
    server::BindError,
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

/// An extent that the adapter knows. Part of a lease.
#[derive(Debug)]
pub(crate) struct Registration {
    mr: Mr,
    address: u64,
}

impl Registration {
    /// # Safety
    /// `memory` stays mapped where it is, by the same physical pages, until the returned value is dropped.
    unsafe fn new(pd: &Arc<Pd>, memory: NonNull<[u8]>) -> io::Result<Self> {
        // SAFETY: promised by the caller.
        let mr = unsafe { Mr::register(pd, memory, Access::Remote) }?;
        let address = memory.as_ptr().cast::<u8>() as u64;
        Ok(Self { mr, address })
    }

    fn key(&self) -> RemoteKey {
        RemoteKey {
            address: self.address,
            rkey: self.mr.rkey(),
        }
    }
}

impl RdmaStream {
    /// Makes memory that was just leased known to the adapter; its keys, in the order of `memories`.
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
        let pd = domains.of(session, device)?;
        let keys = memories.iter().map(|memory| {
            let registered = memory.register(|slice| {
                // SAFETY: the lease keeps the mapping, drops the registration before it, and gives no page of it back meanwhile.
                let registration = unsafe { Registration::new(&pd, slice) }?;
                Ok((registration.key(), registration))
            });
            registered.map_err(|error| explain_registration(memory.bytes(), &error))
        });
        keys.collect()
    }
}

/// A place where clients connect.
#[derive(Debug)]
pub(crate) struct Listener {
    id: Id,
    port: u16,
    domains: Arc<Domains>,
    /// Domains and memory of control connections, one per device.
    controls: Mutex<Vec<(Domain, RegPool)>>,
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
                        controls: Mutex::default(),
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

    /// The next connection and its peer's name, `None` when nobody waits or who waited was turned away.
    pub(crate) fn accept(&self, host: &dyn Host) -> io::Result<Option<(RdmaStream, String)>> {
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
            tracing::warn!(
                event = event.kind.describe(),
                "the RDMA listener was told something that it does not expect"
            );
            return Ok(None);
        };
        let greeting = match Greeting::decode(&said) {
            Ok(greeting) => greeting,
            Err(error) => {
                tracing::warn!(reason = %error, "connection refused");
                request.reject(&rejection(&error.to_string()));
                return Ok(None);
            }
        };
        match self.admit(request, &greeting, host) {
            Ok(admitted) => Ok(Some(admitted)),
            Err(reason) => {
                tracing::warn!(reason, "connection refused");
                Ok(None)
            }
        }
    }

    fn admit(
        &self,
        request: Request,
        greeting: &Greeting,
        host: &dyn Host,
    ) -> Result<(RdmaStream, String), String> {
        let refuse = |request: Request, reason: String| {
            request.reject(&rejection(&reason));
            Err(reason)
        };
        let Some(device) = request.device() else {
            return refuse(request, "no device".to_owned());
        };
        let equipped = match greeting.claim {
            None => self.equip_control(device),
            Some((session, secret)) => host
                .attach(session, &secret)
                .map_err(|refusal| refusal.to_string())
                .and_then(|()| self.domains.of(session, device))
                .map(|pd| (pd, PASSIVE, None)),
        };
        let (pd, depths, slab) = match equipped {
            Ok(equipped) => equipped,
            Err(reason) => return refuse(request, reason),
        };
        let peer = request
            .peer()
            .map_or_else(|| "an unknown address".to_owned(), |peer| peer.to_string());
        let side = Side::Server {
            domains: Arc::clone(&self.domains),
            claim: greeting.claim,
        };
        let stream = request
            .into_id()
            .and_then(|id| Pair::new(id, pd, depths, slab))
            .and_then(|pair| RdmaStream::new(pair, side))
            .map_err(|error| format!("the RDMA device has no queue pair for {peer}: {error}"))?;
        let purpose = match greeting.claim {
            None => Purpose::Control,
            Some(_) => Purpose::Data,
        };
        stream
            .with_pair(|pair| pair.accept(&Hello::new(purpose).encode()))
            .map_err(|error| format!("{peer} could not be accepted: {error}"))?;
        Ok((stream, peer))
    }
}

impl Listener {
    /// What a control connection needs. All of them share a domain, in which nothing is registered for peers.
    fn equip_control(&self, device: Device) -> Result<Equipment, String> {
        let mut homes = self.controls.lock();
        let home = match homes.iter().find(|home| home.0.0.device() == device) {
            Some(home) => home.clone(),
            None => {
                let domain = Domain(
                    Pd::new(device)
                        .map_err(|error| format!("no protection domain left: {error}"))?,
                );
                let registrar: Arc<dyn Registrar> = Arc::new(domain.clone());
                let pool = RegPool::new([registrar], RegPoolOptions::default());
                homes.push((domain.clone(), pool.clone()));
                (domain, pool)
            }
        };
        let (Domain(pd), pool) = home;
        let slab = Slab::new(&pool, &pd, CONTROL_BYTES).map_err(|error| error.to_string())?;
        Ok((pd, CONTROL, Some(slab)))
    }
}

/// What a queue pair is made of.
type Equipment = (Arc<Pd>, Depths, Option<Slab>);

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
