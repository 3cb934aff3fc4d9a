//! Objects by which an adapter knows this process: [`Device`], protection domains ([`Pd`]),
//! registrations ([`Mr`]), and memory cut from them.

use std::{
    ffi::{CStr, c_int, c_void},
    fmt, io,
    ops::Range,
    ptr::{self, NonNull},
    sync::Arc,
};

use rdma_sys as sys;

use super::errno::{check, not_null};
use crate::{
    log::later,
    regmem::{Access, DomainId, Keys, MemoryRegistration, RegBuf, RegError, RegPool, Registrar},
};

/// Vendor id of Linux's software adapter.
const SOFT_ROCE: u32 = 0x00ff_ffff;

/// An opened device. The connection manager keeps it open for the life of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rdma) struct Device(pub(super) NonNull<sys::ibv_context>);

// SAFETY: contexts may be used by any thread; the pointer stays valid as said above.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// True if the adapter does atomics. They need not be atomic for processors too, which few
    /// adapters offer.
    fn has_atomics(self) -> io::Result<bool> {
        Ok(self.attributes()?.atomic_cap != sys::ibv_atomic_cap::IBV_ATOMIC_NONE)
    }

    /// Returns the number of completions that a queue of this device can hold.
    pub(in crate::rdma) fn completions_max(self) -> io::Result<usize> {
        Ok(self.attributes()?.max_cqe.max(0) as usize)
    }

    /// Returns the number that the place of each packet into [`OnDemand`](Sight::OnDemand) memory
    /// has to be a multiple of. Linux's software adapter (7.3) takes every packet for the beginning
    /// of its page there, and moves the bytes to and from the wrong place otherwise.
    pub(in crate::rdma) fn on_demand_granule(self) -> io::Result<u32> {
        Ok(match self.attributes()?.vendor_id {
            SOFT_ROCE => 4096,
            _ => 1,
        })
    }

    fn attributes(self) -> io::Result<sys::ibv_device_attr> {
        // SAFETY: plain data.
        let mut attributes: sys::ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open, and the structure is ours to be written.
        check(unsafe { sys::ibv_query_device(self.0.as_ptr(), &raw mut attributes) })?;
        Ok(attributes)
    }

    pub(in crate::rdma) fn name(self) -> String {
        // SAFETY: the context is open, and its device's name is a C string that lives as long.
        let name = unsafe { CStr::from_ptr(sys::ibv_get_device_name(self.0.as_ref().device)) };
        name.to_string_lossy().into_owned()
    }
}

/// A protection domain: keys of one open nothing through queue pairs of another.
#[derive(Debug)]
pub(in crate::rdma) struct Pd {
    pub(super) raw: NonNull<sys::ibv_pd>,
    pub(super) device: Device,
    domain: DomainId,
    has_atomics: bool,
}

// SAFETY: protection domains may be used by any thread.
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl Pd {
    pub(in crate::rdma) fn new(device: Device) -> io::Result<Arc<Self>> {
        let has_atomics = device.has_atomics()?;
        // SAFETY: the context is open.
        let raw = not_null(unsafe { sys::ibv_alloc_pd(device.0.as_ptr()) })?;
        let domain = DomainId::unique();
        Ok(Arc::new(Self {
            raw,
            device,
            domain,
            has_atomics,
        }))
    }

    /// True if the domain's device does atomics.
    pub(in crate::rdma) fn has_atomics(&self) -> bool {
        self.has_atomics
    }

    pub(in crate::rdma) fn device(&self) -> Device {
        self.device
    }

    /// Returns the id of this domain, where its keys are valid.
    pub(in crate::rdma) fn domain(&self) -> DomainId {
        self.domain
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: registrations and queue pairs of the domain hold it, so they are gone.
        let left = unsafe { sys::ibv_dealloc_pd(self.raw.as_ptr()) };
        if left != 0 {
            later(move || {
                tracing::error!(errno = left, "a protection domain could not be given back");
            });
        }
    }
}

/// View that an adapter has of registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rdma) enum Sight {
    /// Memory whose pages are pinned.
    Pinned(Access),
    /// Memory whose pages are not pinned. The adapter asks the kernel for the pages that an
    /// operation of a peer needs, and forgets pages that the kernel takes away.
    OnDemand(Access),
}

/// Registered memory, known to the adapter until this value is dropped.
#[derive(Debug)]
pub(in crate::rdma) struct Mr {
    raw: NonNull<sys::ibv_mr>,
    pd: Arc<Pd>,
}

// SAFETY: registrations may be used by any thread.
unsafe impl Send for Mr {}
// SAFETY: as above.
unsafe impl Sync for Mr {}

impl Mr {
    /// Registers `memory` in the domain `pd`.
    ///
    /// # Safety
    /// `memory` stays mapped where it is until the returned value is dropped, and by the same
    /// physical pages unless it is [`OnDemand`](Sight::OnDemand).
    pub(in crate::rdma) unsafe fn register(
        pd: &Arc<Pd>,
        memory: NonNull<[u8]>,
        sight: Sight,
    ) -> io::Result<Self> {
        use sys::ibv_access_flags as flag;
        let both = flag::IBV_ACCESS_REMOTE_READ.0 | flag::IBV_ACCESS_REMOTE_WRITE.0;
        let (access, paging) = match sight {
            Sight::Pinned(access) => (access, 0),
            Sight::OnDemand(access) => (access, flag::IBV_ACCESS_ON_DEMAND.0),
        };
        let remote = match access {
            Access::Local => 0,
            Access::RemoteRead => flag::IBV_ACCESS_REMOTE_READ.0,
            // Devices that have no atomics may refuse the whole registration.
            Access::RemoteAtomic if pd.has_atomics => both | flag::IBV_ACCESS_REMOTE_ATOMIC.0,
            Access::Remote | Access::RemoteAtomic => both,
        };
        let flags = flag::IBV_ACCESS_LOCAL_WRITE.0 | remote | paging;
        let address = memory.as_ptr().cast::<c_void>();
        // SAFETY: the domain lives in `pd`; the caller promises for the memory.
        let raw =
            unsafe { sys::ibv_reg_mr(pd.raw.as_ptr(), address, memory.len(), flags as c_int) };
        Ok(Self {
            raw: not_null(raw)?,
            pd: Arc::clone(pd),
        })
    }

    pub(in crate::rdma) fn lkey(&self) -> u32 {
        // SAFETY: valid until `self` is dropped.
        unsafe { self.raw.as_ref().lkey }
    }

    pub(in crate::rdma) fn rkey(&self) -> u32 {
        // SAFETY: as above.
        unsafe { self.raw.as_ref().rkey }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: made by `register` and dropped once. When it returns, the keys open nothing any
        // more.
        let left = unsafe { sys::ibv_dereg_mr(self.raw.as_ptr()) };
        if left != 0 {
            let device = format!("{:?}", self.pd.device);
            later(move || {
                tracing::error!(errno = left, device, "memory could not be deregistered");
            });
        }
    }
}

/// A protection domain as the pools of registered memory know it.
#[derive(Clone)]
pub(in crate::rdma) struct Domain(pub(in crate::rdma) Arc<Pd>);

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the RDMA device {}", self.0.device.name())
    }
}

impl Registrar for Domain {
    fn domain(&self) -> DomainId {
        self.0.domain
    }

    unsafe fn register(
        &self,
        memory: NonNull<[u8]>,
        access: Access,
    ) -> io::Result<MemoryRegistration> {
        // SAFETY: promised by the caller.
        let mr = unsafe { Mr::register(&self.0, memory, Sight::Pinned(access)) }?;
        let keys = Keys {
            lkey: mr.lkey(),
            rkey: mr.rkey(),
        };
        Ok(MemoryRegistration::new(keys, mr))
    }
}

/// A pair's own registered memory. Reached by bounds-checked copies only: the adapter may change it
/// at any time.
#[derive(Debug)]
pub(in crate::rdma) struct LocalMemory {
    memory: RegBuf,
    bytes: usize,
    lkey: u32,
}

impl LocalMemory {
    /// Takes `bytes` bytes from a pool that serves the domain.
    pub(in crate::rdma) fn new(pool: &RegPool, pd: &Pd, bytes: usize) -> Result<Self, RegError> {
        let memory = pool.acquire(bytes)?;
        let keys = memory.keys(pd.domain)?;
        let lkey = keys.expect("the pool serves the domain").lkey;
        Ok(Self {
            memory,
            bytes,
            lkey,
        })
    }

    /// Copies bytes out; panics outside of this memory.
    pub(in crate::rdma) fn copy_out(&self, offset: usize, to: &mut [u8]) {
        let from = self.place(offset, to.len());
        // SAFETY: `place` checked the source; the destination is an exclusive slice elsewhere. If
        // the adapter writes meanwhile, some mix of old and new bytes is copied, and no reference
        // to them exists.
        unsafe { ptr::copy_nonoverlapping(from.cast_const(), to.as_mut_ptr(), to.len()) };
    }

    /// Copies bytes in; panics outside of this memory.
    pub(in crate::rdma) fn copy_in(&self, offset: usize, from: &[u8]) {
        let to = self.place(offset, from.len());
        // SAFETY: as above with source and destination exchanged.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
    }

    /// Returns the adapter's view of a part of this memory; panics outside of this memory.
    pub(in crate::rdma) fn local(&self, place: &Range<usize>) -> Sge {
        Sge {
            address: self.place(place.start, place.len()) as u64,
            bytes: place.len() as u32,
            lkey: self.lkey,
        }
    }

    fn place(&self, offset: usize, len: usize) -> *mut u8 {
        let end = offset.checked_add(len);
        assert!(
            end.is_some_and(|end| end <= self.bytes),
            "{len} bytes at {offset} of local memory of {}",
            self.bytes
        );
        // SAFETY: inside the buffer, or at its end.
        unsafe { self.memory.as_ptr().add(offset) }
    }
}

/// Registered memory of this process, as the adapter is told of it.
#[derive(Clone, Copy, Debug)]
pub(in crate::rdma) struct Sge {
    pub(in crate::rdma) address: u64,
    pub(in crate::rdma) bytes: u32,
    pub(in crate::rdma) lkey: u32,
}

impl Sge {
    pub(super) fn sge(self) -> sys::ibv_sge {
        sys::ibv_sge {
            addr: self.address,
            length: self.bytes,
            lkey: self.lkey,
        }
    }
}
