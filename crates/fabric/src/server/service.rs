//! [`Service`]: state that the listeners of one server share.
//!
//! The rule it keeps: whatever bounds a server bounds all of its listeners together.

use std::{
    io,
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use farpage_wire::{ServerStat, SessionId};
use nix::sys::eventfd::{EfdFlags, EventFd};
use parking_lot::Mutex;

use super::{
    frames::RequestBudget,
    kept::{Asked, KeptConnection},
    lines::Lines,
    places::{ConnectionLimits, ConnectionPlaces},
    traffic::ServerTraffic,
};
use crate::{
    exchange::poller::Exchange,
    host::{Host, Peer, Transport},
    stream::PeerStream,
};

/// Switch that ends [`Service::serve`]. Clones are the same switch.
#[derive(Clone, Debug)]
pub struct Shutdown(pub(super) Arc<(AtomicBool, EventFd)>);

impl Shutdown {
    /// Makes a switch that is off.
    ///
    /// # Errors
    /// The kernel's error: no descriptors left.
    pub fn new() -> io::Result<Self> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self(Arc::new((AtomicBool::new(false), wake))))
    }

    /// Switches on. Safe to call in a signal handler.
    pub fn begin(&self) {
        self.0.0.store(true, Ordering::Release);
        // Stays readable for every thread that sleeps on it.
        let _ = self.0.1.write(1);
    }

    /// Switches off again, once all threads that slept on the switch have ended.
    fn take_back(&self) {
        self.0.0.store(false, Ordering::Release);
        // Fails if the switch was off.
        let _ = self.0.1.read();
    }

    /// True if the switch is on.
    pub fn has_begun(&self) -> bool {
        self.0.0.load(Ordering::Acquire)
    }
}

/// A server's connections, over all of its listeners.
pub struct Service {
    pub(crate) host: Arc<dyn Host>,
    pub(crate) traffic: Arc<ServerTraffic>,
    pub(crate) shutdown: Shutdown,
    pub(super) lines: Lines,
    pub(super) frames: RequestBudget,
    pub(super) places: Arc<ConnectionPlaces>,
    pub(super) limits: ConnectionLimits,
    pub(super) accepted: AtomicU64,
    /// True once a connection's thread did not end in time.
    pub(super) unsettled: AtomicBool,
    /// Number of control connections that are served. Counted down when all that a connection's
    /// thread did is visible.
    controls: AtomicUsize,
    /// Control connections that go on in the next process. Present while the server hands over.
    kept: Mutex<Option<Vec<KeptConnection>>>,
    /// The longest wait of a hand-over for requests under way.
    pub(super) patience: Mutex<Duration>,
    pub(crate) exchange: Exchange,
}

impl Service {
    /// Makes a service. Clients can connect once it [serves](Self::serve) a listener.
    pub fn new(
        host: Arc<dyn Host>,
        limits: ConnectionLimits,
        traffic: Arc<ServerTraffic>,
        shutdown: Shutdown,
    ) -> Arc<Self> {
        Arc::new(Self {
            host,
            traffic,
            shutdown,
            lines: Lines::default(),
            frames: RequestBudget::default(),
            places: ConnectionPlaces::new(limits),
            limits,
            accepted: AtomicU64::new(0),
            unsettled: AtomicBool::new(false),
            controls: AtomicUsize::new(0),
            kept: Mutex::default(),
            patience: Mutex::default(),
            exchange: Exchange::default(),
        })
    }

    /// Returns the host's figures, and those of the connections.
    pub fn stat(&self) -> ServerStat {
        ServerStat {
            bytes_read: self.traffic.bytes_read(),
            bytes_written: self.traffic.bytes_written(),
            request_bytes: self.frames.bytes(),
            ..self.host.stat()
        }
    }

    /// Ends [`serve`](Self::serve) as the shutdown does, except that control connections between
    /// two requests stay open for the next process: see [`take_kept`](Self::take_kept). Requests
    /// under way are waited for, for `patience` at most. Data connections are served meanwhile.
    pub fn hand_over(&self, patience: Duration) {
        *self.patience.lock() = patience;
        // Before the shutdown begins: a thread that sees the shutdown sees this.
        *self.kept.lock() = Some(Vec::new());
        self.shutdown.begin();
    }

    /// Takes the connections for the next process, once [`serve`](Self::serve) has returned. A
    /// connection whose request ends later stays with this process.
    pub fn take_kept(&self) -> Vec<KeptConnection> {
        self.kept.lock().take().unwrap_or_default()
    }

    /// True if all work of clients has ended, once [`serve`](Self::serve) has returned.
    pub fn is_settled(&self) -> bool {
        !self.unsettled.load(Ordering::Relaxed) && !self.has_controls()
    }

    /// Lets listeners be [served](Self::serve) again after a hand-over that failed.
    pub fn reopen(&self) {
        self.unsettled.store(false, Ordering::Relaxed);
        self.frames.open();
        self.shutdown.take_back();
    }

    /// True if control connections are to stay open.
    pub(super) fn is_handing_over(&self) -> bool {
        self.kept.lock().is_some()
    }

    /// True if a control connection is served.
    pub(super) fn has_controls(&self) -> bool {
        self.controls.load(Ordering::Acquire) > 0
    }

    /// Counts a control connection until the result is dropped.
    pub(super) fn count_control(&self) -> ServedControl<'_> {
        self.controls.fetch_add(1, Ordering::Relaxed);
        ServedControl(&self.controls)
    }

    /// Keeps a connection between two requests for the next process. False if the server does not
    /// hand over any more.
    pub(super) fn keep(
        &self,
        stream: &PeerStream,
        transport: Transport,
        peer: &Peer,
        (session, lease): (SessionId, Duration),
        asked: Asked,
    ) -> io::Result<bool> {
        let mut kept = self.kept.lock();
        let Some(kept) = &mut *kept else {
            return Ok(false);
        };
        kept.push(KeptConnection {
            socket: stream.as_fd().try_clone_to_owned()?,
            transport,
            peer: peer.clone(),
            session,
            lease,
            asked,
        });
        Ok(true)
    }
}

/// A control connection that is served, until this is dropped.
pub(super) struct ServedControl<'a>(&'a AtomicUsize);

impl Drop for ServedControl<'_> {
    fn drop(&mut self) {
        // Pairs with the load that finds no connection left.
        self.0.fetch_sub(1, Ordering::Release);
    }
}
