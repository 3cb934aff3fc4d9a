//! The client half: makes connections, and knows the leases of a session.

use std::{
    collections::HashMap,
    io,
    os::fd::AsFd,
    sync::{
        Arc, Mutex, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use farpage_wire::{
    Endpoint, ExtentId, Secret, SessionId,
    control::{ControlDecodeError, HELLO_BYTES, Hello, Lease, LeaseKeys, RemoteKey},
};

use super::{
    Greeting, address,
    bundle::{Bundle, RdmaChannel},
    channel::{BOUNCE_BYTES, CHANNEL, QUEUES_MAX, SendQueue},
    control::Control,
    decode_key, devices, explain_pair, explain_start,
    paged::{self, Paged, PagedChannel},
    stream::{Line, RdmaStream, Side},
    verbs::{Cq, Depths, Device, Domain, EventKind, Id, LocalMemory, Pair, Pd},
};
use crate::{
    Buf, Channel, ConnectError, RdmaOptions,
    attachment::Attachment,
    channel::Group,
    home,
    log::later,
    nonblocking::describe,
    regmem::{NullRegistrar, RegPool, RegPoolOptions, Registrar},
    resolver::resolve as look_up,
};

const NO_PANIC: &str = "nothing panics under this lock";

/// An extent that is leased to this client.
#[derive(Debug)]
pub(super) struct Leased {
    pub(super) id: ExtentId,
    pub(super) bytes: u64,
    /// True if the extent takes atomics. An atomic on another makes the adapter end the connection.
    pub(super) atomics: bool,
    /// True if the extent takes READs only. A WRITE makes the adapter end the connection.
    pub(super) read_only: bool,
    pub(super) key: RemoteKey,
    /// State of memory that the server may have moved elsewhere.
    pub(super) paged: Option<Paged>,
    /// True once the lease is given back, so that channels drop what they cached. Relaxed: it
    /// guards nothing else.
    pub(super) released: AtomicBool,
}

/// State that the channels of one session share.
#[derive(Debug)]
pub(crate) struct Client {
    options: RdmaOptions,
    /// Leases by extent. A standard lock never allocates: a signal handler may look an extent up.
    leases: RwLock<HashMap<ExtentId, Arc<Leased>>>,
    /// Domain and pool of the device that the session's connections go through.
    home: Mutex<Option<Home>>,
    /// Memory in which control messages are gathered.
    plain: RegPool,
    /// Bytes that channels have copied through memory of their own. Only ever added to; read for
    /// display, so relaxed.
    bounced_bytes: AtomicU64,
}

/// The protection domain of a session's channels, and registered memory in it: a channel takes the
/// memory that earlier ones have left.
#[derive(Clone, Debug)]
struct Home {
    domain: Domain,
    pool: RegPool,
}

impl Client {
    pub(crate) fn new(options: RdmaOptions) -> Self {
        Self {
            options,
            leases: RwLock::default(),
            home: Mutex::default(),
            plain: RegPool::new([], RegPoolOptions::default()),
            bounced_bytes: AtomicU64::new(0),
        }
    }

    pub(super) fn count_bounced(&self, bytes: u32) {
        self.bounced_bytes
            .fetch_add(bytes.into(), Ordering::Relaxed);
    }

    pub(crate) fn bounced_bytes(&self) -> u64 {
        self.bounced_bytes.load(Ordering::Relaxed)
    }

    /// Remembers a lease and the keys that came with it.
    pub(crate) fn insert(&self, lease: Lease, keys: LeaseKeys) {
        let key = keys.memory;
        let leased = match keys.paged {
            Some(paged) => paged::leases(lease, key, &paged).into(),
            None => vec![Leased {
                id: lease.id,
                bytes: lease.bytes,
                atomics: lease.atomics,
                read_only: lease.read_only,
                key,
                paged: None,
                released: AtomicBool::new(false),
            }],
        };
        let mut leases = self.leases.write().expect(NO_PANIC);
        leases.extend((leased.into_iter()).map(|leased| (leased.id, Arc::new(leased))));
    }

    /// Forgets a lease that is about to be given back.
    pub(crate) fn remove(&self, id: ExtentId) {
        let mut leases = self.leases.write().expect(NO_PANIC);
        for id in paged::parts(id) {
            if let Some(leased) = leases.remove(&id) {
                leased.released.store(true, Ordering::Relaxed);
            }
        }
    }

    pub(super) fn get(&self, id: ExtentId) -> Option<Arc<Leased>> {
        self.leases.read().expect(NO_PANIC).get(&id).map(Arc::clone)
    }

    /// Finds the way for a data connection.
    pub(crate) fn route(
        self: &Arc<Self>,
        endpoint: &Endpoint,
        claim: (SessionId, Secret, u64),
        attachment: Attachment,
        until: Instant,
    ) -> Result<Route, ConnectError> {
        let id = resolve(endpoint, until)?;
        Ok(Route {
            device: id.device().expect("a resolved id has a device"),
            id,
            endpoint: endpoint.clone(),
            attachment,
            client: Arc::clone(self),
            claim,
            until,
        })
    }

    pub(super) fn doorbell(&self) -> usize {
        self.options.doorbell
    }

    /// Returns the registrar of the adapter that the session's channels go through.
    pub(crate) fn registrar(&self) -> Arc<dyn Registrar> {
        match &*self.home.lock().expect(NO_PANIC) {
            Some(home) => Arc::new(home.domain.clone()),
            None => Arc::new(NullRegistrar),
        }
    }

    /// Returns the session's domain, so that memory registered once serves all its channels. Makes
    /// another one when the way to the server changed.
    fn home(&self, device: Device) -> io::Result<Home> {
        let mut known = self.home.lock().expect(NO_PANIC);
        if let Some(home) = known
            .as_ref()
            .filter(|home| home.domain.0.device() == device)
        {
            return Ok(home.clone());
        }
        let domain = Domain(Pd::new(device)?);
        let registrar: Arc<dyn Registrar> = Arc::new(domain.clone());
        let pool = RegPool::new([registrar], RegPoolOptions::default());
        Ok(known.insert(Home { domain, pool }).clone())
    }

    /// Opens a control connection, on which the hello has not been said.
    pub(crate) fn connect(
        &self,
        endpoint: &Endpoint,
        until: Instant,
    ) -> Result<RdmaStream, ConnectError> {
        let control = control(endpoint, &self.plain, |key| key, until)?;
        RdmaStream::new(Line::Control(Box::new(control)), Side::Client)
            .map_err(|error| unusable(endpoint, explain_pair(&error)))
    }
}

/// The way to a server for a data connection that is to be made.
pub(crate) struct Route {
    id: Id,
    device: Device,
    endpoint: Endpoint,
    attachment: Attachment,
    client: Arc<Client>,
    claim: (SessionId, Secret, u64),
    until: Instant,
}

impl Route {
    /// Opens the connection as send queue `number` of a bundle, whose completion queue is `cq`.
    fn open<B: Buf>(self, cq: &Arc<Cq>, number: usize) -> Result<SendQueue<B>, ConnectError> {
        let endpoint = &self.endpoint;
        let no_pair = |error: io::Error| unusable(endpoint, explain_pair(&error));
        let Home { domain, pool } = self.client.home(self.device).map_err(no_pair)?;
        let memory = LocalMemory::new(&pool, &domain.0, BOUNCE_BYTES)
            .map_err(|error| unusable(endpoint, error.to_string()))?;
        let depths = Depths {
            reads_in_flight: self.client.options.reads_in_flight,
            inline: self.client.options.inline,
            ..CHANNEL
        };
        let pair = Pair::new(self.id, domain.0, Arc::clone(cq), depths, Some(memory));
        let pair = pair.map_err(no_pair)?;
        let greeting = Greeting::Data(self.claim.0, self.claim.1, self.claim.2);
        let said = establish(endpoint, &pair, &greeting, self.until)?;
        let notifies = self.client.options.immediate && said.first() == Some(&1);
        let (to, inline_bytes) = (endpoint.to_owned(), pair.inline_bytes());
        let reads_in_flight = pair.reads_in_flight().map_err(no_pair)?;
        later(move || {
            tracing::debug!(
                endpoint = %to,
                reads_in_flight,
                inline_bytes,
                "data connection established"
            );
        });
        Ok(SendQueue::new(
            number,
            self.attachment,
            self.client,
            pair,
            notifies,
        ))
    }
}

/// Opens a data connection with a completion queue of its own.
pub(crate) fn channel<B: Buf>(route: Route) -> Result<Box<dyn Channel<B>>, ConnectError> {
    Ok(Box::new(RdmaChannel(bundle(vec![route])?)))
}

/// Opens a channel to a server that lends more than its memory. `asking` reaches absent bytes.
pub(crate) fn paged_channel<B: Buf>(
    route: Route,
    asking: impl Channel<B> + AsFd + 'static,
) -> Result<Box<dyn Channel<B>>, ConnectError> {
    let (client, endpoint) = (Arc::clone(&route.client), route.endpoint.clone());
    let queue = RdmaChannel(bundle(vec![route])?);
    let channel = PagedChannel::new(client, queue, asking);
    let channel = channel.map_err(|error| unusable(&endpoint, explain_pair(&error)))?;
    Ok(Box::new(channel))
}

/// Opens data connections with one completion queue per adapter. Each route has the number that its
/// channel gets.
pub(crate) fn channels<B: Buf>(routes: Vec<(usize, Route)>) -> Result<Vec<Group<B>>, ConnectError> {
    let mut by_device: Vec<(Device, Vec<usize>, Vec<Route>)> = Vec::new();
    for (number, route) in routes {
        let device = route.device;
        match by_device.iter_mut().find(|known| known.0 == device) {
            Some((_, numbers, routes)) => {
                numbers.push(number);
                routes.push(route);
            }
            None => by_device.push((device, vec![number], vec![route])),
        }
    }
    let bundles = by_device.into_iter().map(|(_, numbers, routes)| {
        Ok(Group {
            channels: Box::new(bundle(routes)?),
            numbers,
        })
    });
    bundles.collect()
}

/// Opens `routes`, at least one and all of one device, with one completion queue.
fn bundle<B: Buf>(routes: Vec<Route>) -> Result<Bundle<B>, ConnectError> {
    let (device, count) = (routes[0].device, routes.len());
    let endpoint = routes[0].endpoint.clone();
    let no_pair = |error: io::Error| unusable(&endpoint, explain_pair(&error));
    let completions = device.completions_max().map_err(no_pair)?;
    let depth = queue_depth(count, completions)
        .map_err(|reason| unusable(&endpoint, format!("{}: {reason}", device.name())))?;
    let cq = Cq::new(device, depth).map_err(no_pair)?;
    let queues = routes.into_iter().enumerate();
    let queues = queues.map(|(number, route)| route.open(&cq, number));
    Bundle::new(Arc::clone(&cq), queues.collect::<Result<_, _>>()?).map_err(no_pair)
}

/// Returns the depth of a completion queue that `channels` channels share, if a device whose queues
/// hold `most` completions has room for it.
fn queue_depth(channels: usize, most: usize) -> Result<usize, String> {
    let fit = (most / CHANNEL.completions()).min(QUEUES_MAX);
    if channels > fit {
        return Err(format!(
            "{channels} channels cannot share one of its completion queues, which hold {most} completions: at most {fit} can"
        ));
    }
    Ok(channels * CHANNEL.completions())
}

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
fn resolve(endpoint: &Endpoint, until: Instant) -> Result<Id, ConnectError> {
    devices()
        .and_then(|_| home::enter())
        .map_err(|reason| unusable(endpoint, reason))?;
    let unreachable = |source| ConnectError::Unreachable {
        endpoint: endpoint.to_string(),
        source,
    };
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    let (host, port) = address(endpoint);
    for address in look_up(host, port, until).map_err(unreachable)? {
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
fn establish(
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

fn unusable(endpoint: &Endpoint, reason: String) -> ConnectError {
    ConnectError::NoRdma {
        endpoint: endpoint.to_string(),
        reason,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_queue_has_room_for_all_that_its_channels_post_or_is_refused() {
        assert_eq!(queue_depth(1, 64), Ok(64));
        assert_eq!(queue_depth(511, 32_767), Ok(32_704));
        let refusal = queue_depth(512, 32_767).expect_err("one too many");
        assert!(refusal.contains("at most 511"), "{refusal}");
        assert!(queue_depth(QUEUES_MAX, usize::MAX).is_ok());
        assert!(queue_depth(QUEUES_MAX + 1, usize::MAX).is_err());
    }
}
