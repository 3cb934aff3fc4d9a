//! [`Service`]: state that the listeners of one server share.
//!
//! The rule it keeps: whatever bounds a server bounds all of its listeners together.

use std::{
    io,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
};

use farpage_wire::ServerStat;
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::{
    frames::RequestBudget,
    lines::Lines,
    places::{ConnectionLimits, ConnectionPlaces},
    together::Together,
    traffic::ServerTraffic,
};
use crate::{host::Host, log::later};

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

    /// Switches on, for good. Safe to call in a signal handler.
    pub fn begin(&self) {
        self.0.0.store(true, Ordering::Release);
        // Never read again, so it stays readable for every thread that sleeps on it.
        let _ = self.0.1.write(1);
    }

    /// True if the switch is on.
    pub fn has_begun(&self) -> bool {
        self.0.0.load(Ordering::Acquire)
    }
}

/// A server's connections, over all of its listeners.
pub struct Service {
    pub(super) host: Arc<dyn Host>,
    pub(super) traffic: Arc<ServerTraffic>,
    pub(super) shutdown: Shutdown,
    pub(super) lines: Lines,
    pub(super) frames: RequestBudget,
    pub(super) places: Arc<ConnectionPlaces>,
    pub(super) limits: ConnectionLimits,
    pub(super) accepted: AtomicU64,
    /// Number of data connections over sockets.
    data_connections: AtomicUsize,
    together: OnceLock<Option<Together>>,
}

/// A data connection, counted until this is dropped.
pub(super) struct Counted<'a>(&'a AtomicUsize);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
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
            data_connections: AtomicUsize::new(0),
            together: OnceLock::new(),
        })
    }

    pub(super) fn count_data_connection(&self) -> Counted<'_> {
        self.data_connections.fetch_add(1, Ordering::Relaxed);
        Counted(&self.data_connections)
    }

    /// Returns the thread that serves small batches, if there are several connections whose clients
    /// wait for one another.
    pub(super) fn together(&self) -> Option<&Together> {
        if !self.host.serves_together() || self.data_connections.load(Ordering::Relaxed) < 2 {
            return None;
        }
        let start = || {
            let started = Together::start();
            // Each connection then goes on with its own thread.
            let failed = |error| tracing::warn!(%error, "no thread for all data connections");
            started.map_err(|error| later(move || failed(error))).ok()
        };
        self.together.get_or_init(start).as_ref()
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
}
