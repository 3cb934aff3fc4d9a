//! [`Client`]: state of a session that its connections share.

use std::{
    collections::HashMap,
    io,
    sync::{
        Arc, Mutex, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Instant,
};

use farpage_wire::{
    Endpoint, ExtentId,
    control::{Lease, LeaseKeys},
};

use super::{
    connect::{control, unusable},
    leases::{self, LeasedExtent},
    reasons::explain_pair,
    stream::{RdmaStream, Side, StreamKind},
    verbs::{Device, Domain, Pd},
};
use crate::{
    ConnectError, RdmaOptions,
    regmem::{NullRegistrar, RegPool, RegPoolOptions, Registrar},
};

/// Number of extents that a channel remembers without allocating, as a signal handler must.
const CACHED: usize = 1024;

const NO_PANIC: &str = "nothing panics under this lock";

/// State that the channels of one session share.
#[derive(Debug)]
pub(crate) struct Client {
    pub(super) options: RdmaOptions,
    /// Leases by extent. A standard lock never allocates: a signal handler may look an extent up.
    leases: RwLock<HashMap<ExtentId, Arc<LeasedExtent>>>,
    /// Domain and pool of the device that the session's connections go through.
    home: Mutex<Option<SessionDomain>>,
    /// Memory in which control messages are gathered.
    plain: RegPool,
    /// Bytes that channels have copied through memory of their own. Only ever added to; read for
    /// display, so relaxed.
    bounced_bytes: AtomicU64,
}

/// The protection domain of a session's channels, and registered memory in it: a channel takes the
/// memory that earlier ones have left.
#[derive(Clone, Debug)]
pub(super) struct SessionDomain {
    pub(super) domain: Domain,
    pub(super) pool: RegPool,
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
            Some(paged) => leases::leases(lease, key, &paged).into(),
            None => vec![LeasedExtent {
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
        for id in leases::parts(id) {
            if let Some(leased) = leases.remove(&id) {
                leased.released.store(true, Ordering::Relaxed);
            }
        }
    }

    pub(super) fn get(&self, id: ExtentId) -> Option<Arc<LeasedExtent>> {
        self.leases.read().expect(NO_PANIC).get(&id).map(Arc::clone)
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
    pub(super) fn home(&self, device: Device) -> io::Result<SessionDomain> {
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
        Ok(known.insert(SessionDomain { domain, pool }).clone())
    }

    /// Opens a control connection, on which the hello has not been said.
    pub(crate) fn connect(
        &self,
        endpoint: &Endpoint,
        until: Instant,
    ) -> Result<RdmaStream, ConnectError> {
        let control = control(endpoint, &self.plain, |key| key, until)?;
        RdmaStream::new(StreamKind::Control(Box::new(control)), Side::Client)
            .map_err(|error| unusable(endpoint, explain_pair(&error)))
    }
}

/// Leases that a channel has found at its [`Client`] before.
pub(super) struct LeaseCache(HashMap<ExtentId, Arc<LeasedExtent>>);

impl LeaseCache {
    pub(super) fn new() -> Self {
        Self(HashMap::with_capacity(CACHED))
    }

    /// Returns the lease of an extent, if `client` has one.
    pub(super) fn get(&mut self, id: ExtentId, client: &Client) -> Option<&Arc<LeasedExtent>> {
        let is_live = |leased: &Arc<LeasedExtent>| !leased.released.load(Ordering::Relaxed);
        if !self.0.get(&id).is_some_and(is_live) {
            // Rare, so this is the time to forget released extents.
            self.0.retain(|_, leased| is_live(leased));
            self.0.insert(id, client.get(id)?);
        }
        self.0.get(&id)
    }
}
