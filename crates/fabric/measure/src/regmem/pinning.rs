//! Cost of registration: a registrar that pins, and the cache by address that farpage does not
//! have.
//!
//! The rule it keeps: with an adapter, memory is registered with it; without one it is locked and
//! unlocked, which is the part of a registration that any kernel can do, and the report says so.
//! Nothing is modelled.

use std::{
    collections::{HashMap, VecDeque},
    hint::black_box,
    io,
    ptr::NonNull,
    sync::Arc,
};

use farpage_fabric::{
    Session,
    regmem::{Access, DomainId, Keys, MemoryRegistration, Registrar},
};
use nix::sys::mman::{mlock, munlock};

/// Number of registrations that a cache keeps. More than any of the patterns has addresses would
/// change nothing.
const CACHED_MAX: usize = 1024;

/// Returns the registrar of the session's adapter, or else [`Locks`], and its name in a report.
pub(super) fn registrar(session: &Session) -> (Arc<dyn Registrar>, &'static str) {
    let registrar = session.registrar();
    if registrar.domain() == DomainId::NULL {
        let name = "mlock and munlock: the pinning part of a registration, since there is no adapter on this fabric";
        (Arc::new(Locks(DomainId::unique())), name)
    } else {
        (registrar, "ibv_reg_mr and ibv_dereg_mr")
    }
}

/// Registrar that locks memory, and unlocks it when the registration ends.
#[derive(Debug)]
struct Locks(DomainId);

impl Registrar for Locks {
    fn domain(&self) -> DomainId {
        self.0
    }

    unsafe fn register(
        &self,
        memory: NonNull<[u8]>,
        _access: Access,
    ) -> io::Result<MemoryRegistration> {
        // SAFETY: the caller keeps the memory mapped; locking changes nothing about its bytes.
        unsafe { mlock(memory.cast(), memory.len())? };
        Ok(MemoryRegistration::new(Keys::default(), Locked(memory)))
    }
}

struct Locked(NonNull<[u8]>);

// SAFETY: an address range for a system call; nothing is read or written through it.
unsafe impl Send for Locked {}
// SAFETY: as above.
unsafe impl Sync for Locked {}

impl Drop for Locked {
    fn drop(&mut self) {
        // SAFETY: unlocking changes nothing about bytes. What a cache by address holds on to may be
        // unmapped by now: then it fails.
        let _ = unsafe { munlock(self.0.cast(), self.0.len()) };
    }
}

/// Registers the whole capacity of a vector, and ends the registration: the cost of a single
/// transfer.
pub(super) fn register_once(registrar: &dyn Registrar, buf: &mut Vec<u8>) -> io::Result<()> {
    // SAFETY: borrowed for longer than the registration lasts.
    let registration = unsafe { register(registrar, buf)? };
    drop(black_box(registration));
    Ok(())
}

/// # Safety
/// The vector is kept as it is until the registration ends.
unsafe fn register(registrar: &dyn Registrar, buf: &mut Vec<u8>) -> io::Result<MemoryRegistration> {
    let start = NonNull::new(buf.as_mut_ptr()).expect("vectors never have address zero");
    let memory = NonNull::slice_from_raw_parts(start, buf.capacity());
    // SAFETY: the caller's promise.
    unsafe { registrar.register(memory, Access::Local) }
}

/// A cache of registrations by address, as message-passing libraries have: freed memory stays
/// registered, and later memory at the same address is taken for it. The oldest registration goes
/// when there are too many.
pub(super) struct ByAddress {
    registrar: Arc<dyn Registrar>,
    known: HashMap<usize, (usize, MemoryRegistration)>,
    order: VecDeque<usize>,
}

impl ByAddress {
    pub(super) fn new(registrar: Arc<dyn Registrar>) -> Self {
        Self {
            registrar,
            known: HashMap::new(),
            order: VecDeque::new(),
        }
    }

    /// Returns the keys of a registration at the vector's address that is as long as its capacity.
    /// Registers the memory if there is none.
    pub(super) fn look_up(&mut self, buf: &mut Vec<u8>) -> io::Result<Keys> {
        let (at, bytes) = (buf.as_ptr() as usize, buf.capacity());
        if let Some((known_bytes, registration)) = self.known.get(&at)
            && *known_bytes >= bytes
        {
            return Ok(registration.keys());
        }
        // SAFETY: this is the promise that such a cache breaks: the memory is freed long before the
        // registration ends. Here it harms nobody, since no operation ever uses the keys.
        let registration = unsafe { register(&*self.registrar, buf)? };
        let keys = registration.keys();
        if self.known.insert(at, (bytes, registration)).is_none() {
            self.order.push_back(at);
        }
        if self.order.len() > CACHED_MAX {
            let oldest = self.order.pop_front().expect("longer than the bound");
            self.known.remove(&oldest);
        }
        Ok(keys)
    }
}
