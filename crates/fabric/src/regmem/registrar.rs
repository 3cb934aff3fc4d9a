//! [`Registrar`] makes memory known to a network adapter; [`MemoryRegistration`] is the proof that
//! it is.
//!
//! The rule it keeps: memory stays registered as long as its [`MemoryRegistration`] lives, and the
//! holder of a registration keeps the memory mapped. The choice of memory to register is left to
//! [`RegPool`](super::RegPool).

use std::{
    fmt, io,
    ptr::NonNull,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use super::error::RegError;

/// A protection domain: keys of one open nothing in another. The number is unique in this process
/// and never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DomainId(u64);

impl DomainId {
    /// The domain of all fabrics without an adapter. They can share it, because its keys open
    /// nothing.
    pub const NULL: Self = Self(0);

    /// Makes a domain that differs from all others.
    pub fn unique() -> Self {
        // Relaxed: only that no two are the same matters.
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// The keys of registered memory, in the meaning of the InfiniBand specification.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keys {
    /// Key of the memory in operations of this process.
    pub lkey: u32,
    /// Key of the memory in operations of a peer. Opens nothing unless the memory was registered
    /// with [`Access::Remote`] or more.
    pub rkey: u32,
}

/// Users of registered memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// The process itself. A peer that guesses a key cannot reach the memory.
    #[default]
    Local,
    /// Peers, too, by READ and WRITE. The bytes may change at any time: touch them through raw
    /// pointers only.
    Remote,
    /// Peers, too, by READ, WRITE and atomics.
    RemoteAtomic,
    /// Peers, too, by READ only.
    RemoteRead,
}

/// A handle that makes memory known to one protection domain.
pub trait Registrar: Send + Sync + fmt::Debug {
    /// Returns the domain in which the keys are valid.
    fn domain(&self) -> DomainId;

    /// Registers memory; the adapter pins its pages.
    ///
    /// # Safety
    /// Until the returned value is dropped, the memory stays mapped where it is, by the same
    /// physical pages: it is not unmapped or mapped over, and its pages are not given back
    /// (`MADV_DONTNEED`) or moved away.
    ///
    /// # Errors
    /// The system's error; `ENOMEM` is usually the limit on locked memory.
    unsafe fn register(
        &self,
        memory: NonNull<[u8]>,
        access: Access,
    ) -> io::Result<MemoryRegistration>;
}

/// Memory that is registered until this value is dropped.
pub struct MemoryRegistration {
    keys: Keys,
    /// Value whose drop ends the registration.
    _guard: Box<dyn Send + Sync>,
}

impl MemoryRegistration {
    /// Makes a registration that ends when `guard` is dropped.
    pub fn new(keys: Keys, guard: impl Send + Sync + 'static) -> Self {
        Self {
            keys,
            _guard: Box::new(guard),
        }
    }

    /// Returns the memory's keys.
    pub fn keys(&self) -> Keys {
        self.keys
    }
}

impl fmt::Debug for MemoryRegistration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryRegistration")
            .field("keys", &self.keys)
            .finish_non_exhaustive()
    }
}

/// The registrar of fabrics without an adapter (`shm`, `tcp`, `sim`): succeeds and does nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NullRegistrar;

impl Registrar for NullRegistrar {
    fn domain(&self) -> DomainId {
        DomainId::NULL
    }

    unsafe fn register(
        &self,
        _memory: NonNull<[u8]>,
        _access: Access,
    ) -> io::Result<MemoryRegistration> {
        Ok(MemoryRegistration::new(Keys::default(), ()))
    }
}

/// The registrars of a pool, one per protection domain.
pub(super) type Registrars = Arc<[Arc<dyn Registrar>]>;

/// A piece of memory and its registrations, one per registrar of its pool.
pub(super) struct Registered {
    memory: NonNull<[u8]>,
    access: Access,
    registrars: Registrars,
    /// Registrations, one per registrar, in the registrars' order.
    registrations: Box<[OnceLock<MemoryRegistration>]>,
    /// Lock held while a registration is made.
    registering: Mutex<()>,
}

// SAFETY: the address is only handed to registrars, never read or written through.
unsafe impl Send for Registered {}
// SAFETY: as above; everything else in it is `Sync`.
unsafe impl Sync for Registered {}

impl Registered {
    /// Notes memory that is not registered yet.
    ///
    /// # Safety
    /// Until the returned value is dropped, `memory` stays as [`Registrar::register`] asks.
    pub(super) unsafe fn new(
        memory: NonNull<[u8]>,
        access: Access,
        registrars: &Registrars,
    ) -> Self {
        Self {
            memory,
            access,
            registrars: registrars.clone(),
            registrations: registrars.iter().map(|_| OnceLock::new()).collect(),
            registering: Mutex::default(),
        }
    }

    /// Registers the memory with all registrars that do not know it yet.
    pub(super) fn register_all(&self, registrations: &AtomicU64) -> Result<(), RegError> {
        (0..self.registrars.len()).try_for_each(|at| self.register(at, registrations).map(drop))
    }

    /// Returns the memory's keys in `domain`, and registers it now if it was not registered.
    /// `None`: no registrar of this pool serves the domain.
    pub(super) fn keys(
        &self,
        domain: DomainId,
        registrations: &AtomicU64,
    ) -> Result<Option<Keys>, RegError> {
        let found = self.registrars.iter().position(|r| r.domain() == domain);
        found.map(|at| self.register(at, registrations)).transpose()
    }

    fn register(&self, at: usize, registrations: &AtomicU64) -> Result<Keys, RegError> {
        let known = &self.registrations[at];
        if let Some(registration) = known.get() {
            return Ok(registration.keys);
        }
        let _one_at_a_time = (self.registering.lock()).unwrap_or_else(PoisonError::into_inner);
        if let Some(registration) = known.get() {
            return Ok(registration.keys);
        }
        let registrar = &self.registrars[at];
        // SAFETY: `new`'s caller promised it for as long as `self` lives, and the registration goes
        // with `self`.
        let made = unsafe { registrar.register(self.memory, self.access) };
        let registration = made.map_err(|source| RegError::Register {
            bytes: self.memory.len(),
            registrar: format!("{registrar:?}"),
            advice: advice(&source),
            source,
        })?;
        registrations.fetch_add(1, Ordering::Relaxed);
        Ok(known.get_or_init(|| registration).keys)
    }
}

/// Returns the remedy of a registration that failed.
fn advice(error: &io::Error) -> String {
    use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
    let limited = matches!(
        error.raw_os_error(),
        Some(libc::ENOMEM | libc::EAGAIN | libc::EPERM)
    );
    match getrlimit(Resource::RLIMIT_MEMLOCK) {
        Ok((soft, _)) if limited && soft != RLIM_INFINITY => format!(
            "; registered memory is locked, and this process may lock {} KiB: raise the limit (`ulimit -l unlimited`, \
             LimitMEMLOCK=infinity in a systemd unit, `memlock` in /etc/security/limits.conf, or CAP_IPC_LOCK)",
            soft >> 10
        ),
        _ if limited => {
            "; the limit on locked memory is not to blame, so memory or the adapter's tables are full: lower the cap of the pool"
                .to_owned()
        }
        _ => String::new(),
    }
}
