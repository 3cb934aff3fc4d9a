//! [`Service`]: state that the listeners of one server share.
//!
//! The rule it keeps: whatever bounds a server bounds all of its listeners together.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use farpage_wire::{ServerStat, SessionId};
use nix::sys::eventfd::{EfdFlags, EventFd};
use parking_lot::Mutex;

use super::{
    frames::RequestBudget,
    gate::{Gate, Phase},
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
pub struct Shutdown(pub(super) Arc<Switch>);

/// State of a [`Shutdown`].
#[derive(Debug)]
pub(super) struct Switch {
    has_begun: AtomicBool,
    /// Readable from the beginning of the shutdown on.
    pub(super) begun: EventFd,
    /// Readable while the [`Gate`] is not open.
    pub(super) stops: EventFd,
}

impl Shutdown {
    /// Makes a switch that is off.
    ///
    /// # Errors
    /// The kernel's error: no descriptors left.
    pub fn new() -> io::Result<Self> {
        let wake = || EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        Ok(Self(Arc::new(Switch {
            has_begun: AtomicBool::new(false),
            begun: wake()?,
            stops: wake()?,
        })))
    }

    /// Switches on, for good. Safe to call in a signal handler.
    pub fn begin(&self) {
        self.0.has_begun.store(true, Ordering::Release);
        // Never read again, so it stays readable for every thread that sleeps on it.
        let _ = self.0.begun.write(1);
    }

    /// True if the switch is on.
    pub fn has_begun(&self) -> bool {
        self.0.has_begun.load(Ordering::Acquire)
    }
}

/// A server's connections, over all of its listeners.
pub struct Service {
    pub(crate) host: Arc<dyn Host>,
    pub(crate) traffic: Arc<ServerTraffic>,
    pub(crate) shutdown: Shutdown,
    pub(super) lines: Arc<Lines>,
    pub(super) frames: RequestBudget,
    pub(super) places: Arc<ConnectionPlaces>,
    pub(super) limits: ConnectionLimits,
    pub(super) accepted: AtomicU64,
    pub(super) gate: Gate,
    /// True once the server's process is to be replaced. Set before the shutdown begins.
    pub(super) hands_over: AtomicBool,
    /// True once a connection's thread did not end in time.
    pub(super) unsettled: AtomicBool,
    /// Control connections that go on in the next process.
    pub(super) kept: Mutex<Vec<KeptConnection>>,
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
            lines: Arc::default(),
            frames: RequestBudget::default(),
            places: ConnectionPlaces::new(limits),
            limits,
            accepted: AtomicU64::new(0),
            gate: Gate::default(),
            hands_over: AtomicBool::new(false),
            unsettled: AtomicBool::new(false),
            kept: Mutex::default(),
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

    /// Makes the service that goes on where this one has returned from [`serve`](Self::serve). A
    /// connection of this one that has not ended yet keeps its line and its place.
    pub fn again(&self, shutdown: Shutdown) -> Arc<Self> {
        Arc::new(Self {
            host: Arc::clone(&self.host),
            traffic: Arc::clone(&self.traffic),
            shutdown,
            lines: Arc::clone(&self.lines),
            frames: RequestBudget::default(),
            places: Arc::clone(&self.places),
            limits: self.limits,
            accepted: AtomicU64::new(self.accepted.load(Ordering::Relaxed)),
            gate: Gate::default(),
            hands_over: AtomicBool::new(false),
            unsettled: AtomicBool::new(false),
            kept: Mutex::default(),
            exchange: Exchange::default(),
        })
    }

    /// Stops all control connections between two requests. True if all stand there before `until`.
    /// Everything else goes on meanwhile. To be followed by [`take_requests`](Self::take_requests)
    /// or [`hand_over`](Self::hand_over).
    pub fn stop_requests(&self, until: Instant) -> bool {
        // Fails only when the counter is full, and then the threads are awake.
        let _ = self.shutdown.0.stops.write(1);
        self.gate.close(until)
    }

    /// Lets control connections go on that were [stopped](Self::stop_requests).
    pub fn take_requests(&self) {
        // Fails only when nothing was written.
        let _ = self.shutdown.0.stops.read();
        self.gate.open(Phase::Open);
    }

    /// Ends [`serve`](Self::serve) as the shutdown does, except that control connections between
    /// two requests stay open for the next process: see [`take_kept`](Self::take_kept). Those that
    /// were not [stopped](Self::stop_requests) there in time are closed.
    pub fn hand_over(&self) {
        // Before the shutdown begins: a thread that sees the shutdown sees this.
        self.hands_over.store(true, Ordering::Release);
        self.shutdown.begin();
        self.gate.open(Phase::HandsOver);
    }

    /// Takes the connections for the next process, once [`serve`](Self::serve) has returned.
    pub fn take_kept(&self) -> Vec<KeptConnection> {
        std::mem::take(&mut self.kept.lock())
    }

    /// True if all work of clients has ended, once [`serve`](Self::serve) has returned.
    pub fn is_settled(&self) -> bool {
        !self.unsettled.load(Ordering::Relaxed)
    }

    /// True if control connections are to stay open.
    pub(super) fn is_handing_over(&self) -> bool {
        self.hands_over.load(Ordering::Acquire)
    }

    pub(super) fn keep(
        &self,
        stream: &Arc<PeerStream>,
        transport: Transport,
        peer: &Peer,
        (session, lease): (SessionId, Duration),
        asked: Asked,
    ) {
        self.kept.lock().push(KeptConnection {
            stream: Arc::clone(stream),
            transport,
            peer: peer.clone(),
            session,
            lease,
            asked,
        });
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::exchange::areas::Areas;

    #[test]
    fn a_connection_that_has_not_ended_keeps_its_line_in_the_service_that_goes_on() {
        let shutdown = || Shutdown::new().expect("descriptors");
        let host = Areas::new(Duration::from_secs(1));
        let limits = ConnectionLimits::default();
        let first = Service::new(host, limits, Arc::default(), shutdown());
        let stream = || {
            let (ours, _) = UnixStream::pair().expect("descriptors");
            Arc::new(PeerStream::Unix(ours))
        };
        let (name, older, newer) = ((SessionId(1), Some(1)), stream(), stream());
        let soon = || Instant::now() + Duration::from_millis(10);
        let held = first.lines.take(name, &older, soon(), &|| {});
        assert!(held.is_some(), "a line that is free");
        let again = first.again(shutdown());
        let take = || again.lines.take(name, &newer, soon(), &|| {}).is_some();
        assert!(!take(), "an operation of the older one may come late");
        drop(held);
        assert!(take());
    }
}
