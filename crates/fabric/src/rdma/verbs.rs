//! The verbs and connection-manager libraries, made safe: one owner per object, in an order of dropping that the adapter allows.
//!
//! The law of this file: memory that an adapter may touch outlives the queue pair that may tell it to. A [`Pair`] owns its [`Slab`] and
//! destroys the queue pair first; for memory of others their owner promises it. All calls into C are here.

use std::{
    ffi::{CStr, c_int, c_void},
    fmt, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    ops::Range,
    os::fd::{AsFd, BorrowedFd},
    ptr::{self, NonNull},
    sync::Arc,
    time::Instant,
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl},
    poll::{PollFd, PollFlags, poll},
};
use rdma_sys as sys;

use crate::{
    regmem::{Access, DomainId, Keys, RegBuf, RegError, RegPool, Registrar, Registration},
    stream::timeout_until,
};

/// Work requests that are handed to the adapter with one ring of its doorbell, at most.
pub(super) const POSTLIST: usize = 16;

/// Completions that one look at a completion queue may bring.
pub(super) const COMPLETIONS: usize = 32;

/// The adapter waits 4.096 us * 2^17, about half a second, for an acknowledgement before it sends again; a loaded peer needs that long.
/// The connection manager's own choice is four times as long.
const ACK_TIMEOUT: u8 = 17;

/// Times that the adapter sends again: with the timeout above, a dead peer is an error within four seconds. 7 would mean for ever with
/// some adapters.
const RETRIES: u8 = 6;

/// For receivers that have no buffer ready, which the credits of our streams exclude. Here, too, 7 means for ever.
const RNR_RETRIES: u8 = 6;

/// What is asked for: WRITEs that fit cost no read of local memory by the adapter.
const INLINE_BYTES: u32 = 220;

/// Asks for what the device offers, and what of it the peer's device can meet.
pub(super) const READS_IN_FLIGHT_MAX: u8 = 0xff;

fn check(result: c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        -1 => Err(io::Error::last_os_error()),
        // Some calls return the error instead of setting it.
        errno => Err(io::Error::from_raw_os_error(errno.abs())),
    }
}

fn not_null<T>(pointer: *mut T) -> io::Result<NonNull<T>> {
    NonNull::new(pointer).ok_or_else(io::Error::last_os_error)
}

fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL)?);
    fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    Ok(())
}

/// The names of the devices that this machine has, in the system's order.
pub(super) fn device_names() -> Vec<String> {
    let mut count = 0;
    // SAFETY: `count` is ours; the list is freed below.
    let list = unsafe { sys::ibv_get_device_list(&raw mut count) };
    // Null where the kernel has no RDMA at all.
    let Some(list) = NonNull::new(list) else {
        return Vec::new();
    };
    let names = (0..count as usize)
        .map(|i| {
            // SAFETY: the list has `count` entries, and a device's name is a C string that lives as long as the list.
            let name = unsafe { CStr::from_ptr(sys::ibv_get_device_name(*list.as_ptr().add(i))) };
            name.to_string_lossy().into_owned()
        })
        .collect();
    // SAFETY: made above, and nothing of it is used from here on.
    unsafe { sys::ibv_free_device_list(list.as_ptr()) };
    names
}

/// Where the connection manager reports what happens to the ids that belong to it. Never blocks.
#[derive(Debug)]
struct EventChannel(NonNull<sys::rdma_event_channel>);

// SAFETY: the library locks what it shares; ours is one pointer.
unsafe impl Send for EventChannel {}
// SAFETY: as above.
unsafe impl Sync for EventChannel {}

impl EventChannel {
    fn new() -> io::Result<Self> {
        // SAFETY: no preconditions.
        let channel = Self(not_null(unsafe { sys::rdma_create_event_channel() })?);
        set_nonblocking(channel.as_fd())?;
        Ok(channel)
    }
}

impl AsFd for EventChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open for as long as the channel lives.
        unsafe { BorrowedFd::borrow_raw(self.0.as_ref().fd) }
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: the ids of this channel are gone: their owner drops them first.
        unsafe { sys::rdma_destroy_event_channel(self.0.as_ptr()) }
    }
}

/// Something that the connection manager reported.
#[derive(Debug)]
pub(super) struct Event {
    /// Which; one of `rdma_cm_event_type`.
    pub(super) kind: EventKind,
    /// 0, an error number below 0, or why a peer rejected.
    pub(super) status: i32,
    /// What the peer said along with it. May have zeros behind.
    pub(super) said: Vec<u8>,
    /// The connection that is asked for.
    pub(super) request: Option<Request>,
}

/// The reports that we tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EventKind {
    AddressResolved,
    RouteResolved,
    Request,
    Established,
    Rejected,
    /// Anything else is the end of what was tried or of the connection.
    Ended(sys::rdma_cm_event_type::Type),
}

impl EventKind {
    fn new(kind: sys::rdma_cm_event_type::Type) -> Self {
        use sys::rdma_cm_event_type::*;
        match kind {
            RDMA_CM_EVENT_ADDR_RESOLVED => Self::AddressResolved,
            RDMA_CM_EVENT_ROUTE_RESOLVED => Self::RouteResolved,
            RDMA_CM_EVENT_CONNECT_REQUEST => Self::Request,
            RDMA_CM_EVENT_ESTABLISHED => Self::Established,
            RDMA_CM_EVENT_REJECTED => Self::Rejected,
            other => Self::Ended(other),
        }
    }

    /// In the library's words.
    pub(super) fn describe(self) -> String {
        let Self::Ended(kind) = self else {
            return format!("{self:?}");
        };
        // SAFETY: the library returns a static string for any number.
        let text = unsafe { CStr::from_ptr(sys::rdma_event_str(kind)) };
        text.to_string_lossy().into_owned()
    }
}

/// One end of a connection, or a listener, with an event channel of its own.
#[derive(Debug)]
pub(super) struct Id {
    raw: NonNull<sys::rdma_cm_id>,
    events: EventChannel,
}

// SAFETY: the library locks what ids share; what an id owns is changed only through `&mut self`, but for the calls that the library says
// may come from any thread (events, disconnect).
unsafe impl Send for Id {}
// SAFETY: as above.
unsafe impl Sync for Id {}

/// A connection that a peer asks for; dropping it turns the peer away.
#[derive(Debug)]
pub(super) struct Request(NonNull<sys::rdma_cm_id>);

// SAFETY: nobody else knows the id.
unsafe impl Send for Request {}

impl Id {
    pub(super) fn new() -> io::Result<Self> {
        let events = EventChannel::new()?;
        let mut raw = ptr::null_mut();
        let (channel, space) = (events.0.as_ptr(), sys::rdma_port_space::RDMA_PS_TCP);
        // SAFETY: the channel lives as long as the id: `Drop` destroys the id, and the field is dropped after that.
        check(unsafe { sys::rdma_create_id(channel, &raw mut raw, ptr::null_mut(), space) })?;
        Ok(Self {
            raw: not_null(raw)?,
            events,
        })
    }

    /// Listens; returns the port, which was found when 0 was asked for.
    pub(super) fn listen(&self, address: SocketAddr) -> io::Result<u16> {
        const BACKLOG: c_int = 128;
        let mut address = RawAddress::new(address);
        // SAFETY: the address is a valid `sockaddr` of its family, only read during the call.
        check(unsafe { sys::rdma_bind_addr(self.raw.as_ptr(), address.get()) })?;
        // SAFETY: the id is ours.
        check(unsafe { sys::rdma_listen(self.raw.as_ptr(), BACKLOG) })?;
        // SAFETY: the id is ours.
        Ok(u16::from_be(unsafe {
            sys::rdma_get_src_port(self.raw.as_ptr())
        }))
    }

    /// Finds the device and the way to a peer.
    pub(super) fn resolve(&self, address: SocketAddr, until: Instant) -> io::Result<()> {
        let mut address = RawAddress::new(address);
        let left_ms = || {
            let left = until.saturating_duration_since(Instant::now());
            left.as_millis().clamp(1, 60_000) as c_int
        };
        // SAFETY: the address is a valid `sockaddr` of its family, only read during the call; no source address is given.
        check(unsafe {
            sys::rdma_resolve_addr(self.raw.as_ptr(), ptr::null_mut(), address.get(), left_ms())
        })?;
        self.expect(EventKind::AddressResolved, until)?;
        // Before the route, which the timeout becomes a part of. Kernels before 5.3 have no such option: their own timeout is longer, and
        // the operation deadline comes first.
        let mut timeout = ACK_TIMEOUT;
        // SAFETY: level 0 (the id) option 3 (acknowledgement timeout) takes one byte, which is only read.
        let _ =
            unsafe { sys::rdma_set_option(self.raw.as_ptr(), 0, 3, (&raw mut timeout).cast(), 1) };
        // SAFETY: the id is ours and its address resolved.
        check(unsafe { sys::rdma_resolve_route(self.raw.as_ptr(), left_ms()) })?;
        self.expect(EventKind::RouteResolved, until)
    }

    fn expect(&self, kind: EventKind, until: Instant) -> io::Result<()> {
        let event = self.wait_event(until)?;
        match event.kind == kind {
            true => Ok(()),
            false if event.status < 0 => Err(io::Error::from_raw_os_error(-event.status)),
            false => Err(io::Error::other(event.kind.describe())),
        }
    }

    /// The next report; `TimedOut` at `until`.
    pub(super) fn wait_event(&self, until: Instant) -> io::Result<Event> {
        loop {
            if let Some(event) = self.next_event()? {
                return Ok(event);
            }
            if Instant::now() >= until {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let mut fds = [PollFd::new(self.as_fd(), PollFlags::POLLIN)];
            match poll(&mut fds, timeout_until(until)) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// The next report, `None` when there is none.
    pub(super) fn next_event(&self) -> io::Result<Option<Event>> {
        let mut raw = ptr::null_mut();
        // SAFETY: the channel is ours and `raw` is written only on success.
        match check(unsafe { sys::rdma_get_cm_event(self.events.0.as_ptr(), &raw mut raw) }) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            other => other?,
        }
        // SAFETY: an event that the library made, ours until it is acknowledged.
        let event = unsafe { &*raw };
        let kind = EventKind::new(event.event);
        // SAFETY: the events of connections (`RDMA_PS_TCP`) carry this arm of the union; the others carry zeros there.
        let conn = unsafe { event.param.conn };
        let said = match kind {
            EventKind::Request | EventKind::Established | EventKind::Rejected
                if !conn.private_data.is_null() =>
            {
                // SAFETY: the library says how many bytes there are; they live until the event is acknowledged.
                unsafe {
                    std::slice::from_raw_parts(
                        conn.private_data.cast::<u8>(),
                        usize::from(conn.private_data_len),
                    )
                }
                .to_vec()
            }
            _ => Vec::new(),
        };
        let request = (kind == EventKind::Request)
            .then(|| NonNull::new(event.id).map(Request))
            .flatten();
        let status = event.status;
        // SAFETY: acknowledged once; nothing refers to it from here on.
        check(unsafe { sys::rdma_ack_cm_event(raw) })?;
        Ok(Some(Event {
            kind,
            status,
            said,
            request,
        }))
    }

    /// Ends the connection: the peer hears of it, and what is posted here comes back flushed.
    fn disconnect(&self) {
        // SAFETY: the id is ours. Fails only when there is no connection.
        unsafe { sys::rdma_disconnect(self.raw.as_ptr()) };
    }

    /// The device that the connection goes through, once it is resolved.
    pub(super) fn device(&self) -> Option<Device> {
        // SAFETY: the id is ours.
        NonNull::new(unsafe { self.raw.as_ref().verbs }).map(Device)
    }
}

impl AsFd for Id {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        // SAFETY:
        // - the id is ours; its queue pair is destroyed first, as the library wants it, if it still has one;
        // - every event was acknowledged where it was taken, so the call does not wait.
        unsafe {
            if !self.raw.as_ref().qp.is_null() {
                sys::rdma_destroy_qp(self.raw.as_ptr());
            }
            sys::rdma_destroy_id(self.raw.as_ptr());
        }
    }
}

impl Request {
    /// The device that the peer came to.
    pub(super) fn device(&self) -> Option<Device> {
        // SAFETY: the id is ours.
        NonNull::new(unsafe { self.0.as_ref().verbs }).map(Device)
    }

    /// The peer's address.
    pub(super) fn peer(&self) -> Option<SocketAddr> {
        // SAFETY: the id is ours, and the address was filled in when its connection was asked for.
        let storage = unsafe { &self.0.as_ref().route.addr.dst_addr_union.dst_storage };
        match c_int::from(storage.ss_family) {
            libc::AF_INET => {
                // SAFETY: this family has this layout, which `sockaddr_storage` is large enough and aligned for.
                let v4 = unsafe { &*ptr::from_ref(storage).cast::<libc::sockaddr_in>() };
                let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
                Some((ip, u16::from_be(v4.sin_port)).into())
            }
            libc::AF_INET6 => {
                // SAFETY: as above.
                let v6 = unsafe { &*ptr::from_ref(storage).cast::<libc::sockaddr_in6>() };
                let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
                Some((ip, u16::from_be(v6.sin6_port)).into())
            }
            _ => None,
        }
    }

    /// Takes it out of its listener's event channel into one of its own.
    pub(super) fn into_id(self) -> io::Result<Id> {
        let events = EventChannel::new()?;
        // SAFETY: both are ours, and the listener's thread, which runs this, acknowledged all events of its channel.
        check(unsafe { sys::rdma_migrate_id(self.0.as_ptr(), events.0.as_ptr()) })?;
        let raw = self.0;
        std::mem::forget(self);
        Ok(Id { raw, events })
    }

    /// Turns the peer away with words; cut to what a rejection can carry.
    pub(super) fn reject(self, words: &[u8]) {
        let words = &words[..words.len().min(super::REJECT_BYTES)];
        // SAFETY: the id is ours, and the bytes are only read. A peer that is gone needs no answer.
        unsafe {
            sys::rdma_reject(self.0.as_ptr(), words.as_ptr().cast(), words.len() as u8);
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        // SAFETY: nobody else knows the id, and it has no queue pair.
        unsafe { sys::rdma_destroy_id(self.0.as_ptr()) };
    }
}

/// A socket address as C has it.
struct RawAddress(libc::sockaddr_storage);

impl RawAddress {
    fn new(address: SocketAddr) -> Self {
        // SAFETY: plain data, and all zeros is an address of no family.
        let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        let port = address.port().to_be();
        match address.ip() {
            IpAddr::V4(ip) => {
                // SAFETY: `sockaddr_storage` is large enough and aligned for every family.
                let v4 = unsafe { &mut *(&raw mut storage).cast::<libc::sockaddr_in>() };
                v4.sin_family = libc::AF_INET as _;
                v4.sin_port = port;
                v4.sin_addr.s_addr = u32::from(ip).to_be();
            }
            IpAddr::V6(ip) => {
                // SAFETY: as above.
                let v6 = unsafe { &mut *(&raw mut storage).cast::<libc::sockaddr_in6>() };
                v6.sin6_family = libc::AF_INET6 as _;
                v6.sin6_port = port;
                v6.sin6_addr.s6_addr = ip.octets();
            }
        }
        Self(storage)
    }

    fn get(&mut self) -> *mut libc::sockaddr {
        (&raw mut self.0).cast()
    }
}

/// An opened device. The connection manager keeps it open for the life of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Device(NonNull<sys::ibv_context>);

// SAFETY: contexts may be used by any thread; the pointer stays valid as said above.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    fn name(self) -> String {
        // SAFETY: the context is open, and its device's name is a C string that lives as long.
        let name = unsafe { CStr::from_ptr(sys::ibv_get_device_name(self.0.as_ref().device)) };
        name.to_string_lossy().into_owned()
    }
}

/// A protection domain: keys of one open nothing through queue pairs of another.
#[derive(Debug)]
pub(super) struct Pd {
    raw: NonNull<sys::ibv_pd>,
    device: Device,
    domain: DomainId,
}

// SAFETY: protection domains may be used by any thread.
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl Pd {
    pub(super) fn new(device: Device) -> io::Result<Arc<Self>> {
        // SAFETY: the context is open.
        let raw = not_null(unsafe { sys::ibv_alloc_pd(device.0.as_ptr()) })?;
        let domain = DomainId::unique();
        Ok(Arc::new(Self {
            raw,
            device,
            domain,
        }))
    }

    pub(super) fn device(&self) -> Device {
        self.device
    }

    /// Where keys of this domain are valid.
    pub(super) fn domain(&self) -> DomainId {
        self.domain
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: registrations and queue pairs of the domain hold it, so they are gone.
        let left = unsafe { sys::ibv_dealloc_pd(self.raw.as_ptr()) };
        if left != 0 {
            tracing::error!(errno = left, "a protection domain could not be given back");
        }
    }
}

/// Registered memory: pinned, and known to the adapter until this is dropped.
#[derive(Debug)]
pub(super) struct Mr {
    raw: NonNull<sys::ibv_mr>,
    pd: Arc<Pd>,
}

// SAFETY: registrations may be used by any thread.
unsafe impl Send for Mr {}
// SAFETY: as above.
unsafe impl Sync for Mr {}

impl Mr {
    /// Registers memory.
    ///
    /// # Safety
    /// `memory` stays mapped where it is, by the same physical pages, until the returned value is dropped.
    pub(super) unsafe fn register(
        pd: &Arc<Pd>,
        memory: NonNull<[u8]>,
        access: Access,
    ) -> io::Result<Self> {
        let mut flags = sys::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;
        if access == Access::Remote {
            flags |= sys::ibv_access_flags::IBV_ACCESS_REMOTE_READ.0
                | sys::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0
                | sys::ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC.0;
        }
        let address = memory.as_ptr().cast::<c_void>();
        // SAFETY: the domain lives in `pd`; the caller promises for the memory.
        let raw =
            unsafe { sys::ibv_reg_mr(pd.raw.as_ptr(), address, memory.len(), flags as c_int) };
        Ok(Self {
            raw: not_null(raw)?,
            pd: Arc::clone(pd),
        })
    }

    pub(super) fn lkey(&self) -> u32 {
        // SAFETY: valid until `self` is dropped.
        unsafe { self.raw.as_ref().lkey }
    }

    pub(super) fn rkey(&self) -> u32 {
        // SAFETY: as above.
        unsafe { self.raw.as_ref().rkey }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: made by `register` and dropped once. When it returns, the keys open nothing any more.
        let left = unsafe { sys::ibv_dereg_mr(self.raw.as_ptr()) };
        if left != 0 {
            tracing::error!(errno = left, device = ?self.pd.device, "memory could not be deregistered");
        }
    }
}

/// A protection domain as the pools of registered memory know it.
#[derive(Clone)]
pub(super) struct Domain(pub(super) Arc<Pd>);

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the RDMA device {}", self.0.device.name())
    }
}

impl Registrar for Domain {
    fn domain(&self) -> DomainId {
        self.0.domain
    }

    unsafe fn register(&self, memory: NonNull<[u8]>, access: Access) -> io::Result<Registration> {
        // SAFETY: promised by the caller.
        let mr = unsafe { Mr::register(&self.0, memory, access) }?;
        let keys = Keys {
            lkey: mr.lkey(),
            rkey: mr.rkey(),
        };
        Ok(Registration::new(keys, mr))
    }
}

/// A pair's own registered memory. Reached by bounds-checked copies only: the adapter changes it when it likes.
#[derive(Debug)]
pub(super) struct Slab {
    memory: RegBuf,
    bytes: usize,
    lkey: u32,
}

impl Slab {
    /// Memory of a pool that serves the domain.
    pub(super) fn new(pool: &RegPool, pd: &Pd, bytes: usize) -> Result<Self, RegError> {
        let memory = pool.acquire(bytes)?;
        let keys = memory.keys(pd.domain)?;
        let lkey = keys.expect("the pool serves the domain").lkey;
        Ok(Self {
            memory,
            bytes,
            lkey,
        })
    }

    /// Copies bytes out; panics outside of the slab.
    pub(super) fn copy_out(&self, offset: usize, to: &mut [u8]) {
        let from = self.place(offset, to.len());
        // SAFETY: `place` checked the source; the destination is an exclusive slice elsewhere. If the adapter writes meanwhile, some mix
        // of old and new bytes is copied, and no reference to them exists.
        unsafe { ptr::copy_nonoverlapping(from.cast_const(), to.as_mut_ptr(), to.len()) };
    }

    /// Copies bytes in; panics outside of the slab.
    pub(super) fn copy_in(&self, offset: usize, from: &[u8]) {
        let to = self.place(offset, from.len());
        // SAFETY: as above with source and destination exchanged.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
    }

    /// What the adapter is told of a part of it; panics outside of the slab.
    pub(super) fn local(&self, place: &Range<usize>) -> Local {
        Local {
            address: self.place(place.start, place.len()) as u64,
            bytes: place.len() as u32,
            lkey: self.lkey,
        }
    }

    fn place(&self, offset: usize, len: usize) -> *mut u8 {
        let end = offset.checked_add(len);
        assert!(
            end.is_some_and(|end| end <= self.bytes),
            "{len} bytes at {offset} of a slab of {}",
            self.bytes
        );
        // SAFETY: inside the buffer, or at its end.
        unsafe { self.memory.as_ptr().add(offset) }
    }
}

/// Registered memory of this process, as the adapter is told of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Local {
    pub(super) address: u64,
    pub(super) bytes: u32,
    pub(super) lkey: u32,
}

impl Local {
    fn sge(self) -> sys::ibv_sge {
        sys::ibv_sge {
            addr: self.address,
            length: self.bytes,
            lkey: self.lkey,
        }
    }
}

/// A completion queue that can be slept on.
#[derive(Debug)]
struct Cq {
    raw: NonNull<sys::ibv_cq>,
    events: NonNull<sys::ibv_comp_channel>,
}

// SAFETY: completion queues may be used by any thread.
unsafe impl Send for Cq {}
// SAFETY: as above.
unsafe impl Sync for Cq {}

impl Cq {
    fn new(device: Device, depth: usize) -> io::Result<Self> {
        let context = device.0.as_ptr();
        // SAFETY: the context is open.
        let events = not_null(unsafe { sys::ibv_create_comp_channel(context) })?;
        // SAFETY: the channel was just made and is destroyed after the queue.
        let raw = not_null(unsafe {
            sys::ibv_create_cq(context, depth as c_int, ptr::null_mut(), events.as_ptr(), 0)
        });
        let raw = match raw {
            Ok(raw) => raw,
            Err(error) => {
                // SAFETY: made above and used by nobody.
                unsafe { sys::ibv_destroy_comp_channel(events.as_ptr()) };
                return Err(error);
            }
        };
        let queue = Self { raw, events };
        set_nonblocking(queue.as_fd())?;
        Ok(queue)
    }
}

impl AsFd for Cq {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: open for as long as the channel lives.
        unsafe { BorrowedFd::borrow_raw(self.events.as_ref().fd) }
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: its queue pair is gone (fields of `Pair` are dropped in that order) and every event was acknowledged where it was taken.
        unsafe {
            sys::ibv_destroy_cq(self.raw.as_ptr());
            sys::ibv_destroy_comp_channel(self.events.as_ptr());
        }
    }
}

/// How large a [`Pair`] is to be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Depths {
    pub(super) sends: usize,
    pub(super) receives: usize,
    /// READs of ours, and of the peer, on their way at a time, as far as both devices can.
    pub(super) reads_in_flight: u8,
}

/// A reliable-connected queue pair with its completion queue, its memory and its connection. When it is dropped, the peer hears of it.
#[derive(Debug)]
pub(super) struct Pair {
    /// Destroys the queue pair, so that what follows is out of the adapter's reach when it goes.
    id: Id,
    queue: Cq,
    slab: Option<Slab>,
    pd: Arc<Pd>,
    inline_bytes: usize,
    /// Asked for.
    reads_in_flight_max: u8,
    alive: bool,
}

/// What the adapter is to do.
#[derive(Clone, Copy, Debug)]
pub(super) enum Verb {
    Send,
    Read { address: u64, rkey: u32 },
    Write { address: u64, rkey: u32 },
}

/// One work request.
#[derive(Clone, Debug)]
pub(super) struct Work {
    /// Comes back with the completion.
    pub(super) tag: u64,
    pub(super) verb: Verb,
    pub(super) local: Local,
    /// Whether its completion is reported when it succeeds. A failure always is.
    pub(super) signalled: bool,
}

impl Work {
    /// Fills lists.
    pub(super) const NONE: Self = Self {
        tag: 0,
        verb: Verb::Send,
        local: Local {
            address: 0,
            bytes: 0,
            lkey: 0,
        },
        signalled: false,
    };
}

/// The end of a work request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Done {
    pub(super) tag: u64,
    /// Received bytes. Means nothing for other work, nor after a failure.
    pub(super) bytes: usize,
    pub(super) result: Result<(), Failure>,
}

/// Why a work request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Failure(sys::ibv_wc_status::Type);

impl Failure {
    /// Whether the connection was ended, by whichever side, before the work was done.
    pub(super) fn is_flush(self) -> bool {
        self.0 == sys::ibv_wc_status::IBV_WC_WR_FLUSH_ERR
    }

    /// What it means to somebody who waits for a peer.
    pub(super) fn describe(self) -> String {
        use sys::ibv_wc_status::*;
        // SAFETY: the library returns a static string for any status.
        let text = unsafe { CStr::from_ptr(sys::ibv_wc_status_str(self.0)) }.to_string_lossy();
        let meaning = match self.0 {
            IBV_WC_RETRY_EXC_ERR => "the peer does not answer",
            IBV_WC_REM_ACCESS_ERR => {
                "the peer's memory is out of reach: it died, or the lease has ended"
            }
            IBV_WC_WR_FLUSH_ERR => "the connection is down",
            IBV_WC_RNR_RETRY_EXC_ERR => "the peer does not receive",
            _ => return format!("the adapter reports: {text}"),
        };
        format!("{meaning} ({text})")
    }
}

impl Pair {
    /// Makes a queue pair for a connection that is resolved or asked for.
    pub(super) fn new(id: Id, pd: Arc<Pd>, depths: Depths, slab: Option<Slab>) -> io::Result<Self> {
        let queue = Cq::new(pd.device, (depths.sends + depths.receives).max(1))?;
        // Inline is a favour: a device that has less, or none, says no to the whole queue pair.
        let mut inline_bytes = INLINE_BYTES;
        loop {
            // SAFETY: plain data, and zeros mean "none" in every field.
            let mut attributes: sys::ibv_qp_init_attr = unsafe { std::mem::zeroed() };
            attributes.send_cq = queue.raw.as_ptr();
            attributes.recv_cq = queue.raw.as_ptr();
            attributes.qp_type = sys::ibv_qp_type::IBV_QPT_RC;
            attributes.cap = sys::ibv_qp_cap {
                max_send_wr: depths.sends.max(1) as u32,
                max_recv_wr: depths.receives.max(1) as u32,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: inline_bytes,
            };
            // SAFETY: id, domain and queue are alive and of one device; the queue pair is destroyed with the id, before them.
            let made = check(unsafe {
                sys::rdma_create_qp(id.raw.as_ptr(), pd.raw.as_ptr(), &raw mut attributes)
            });
            match made {
                Ok(()) => break inline_bytes = attributes.cap.max_inline_data.min(inline_bytes),
                Err(_) if inline_bytes > 0 => inline_bytes = 0,
                Err(error) => return Err(error),
            }
        }
        Ok(Self {
            id,
            queue,
            slab,
            pd,
            inline_bytes: inline_bytes as usize,
            reads_in_flight_max: depths.reads_in_flight,
            alive: true,
        })
    }

    /// Asks the peer for the connection; what comes of it is an event.
    pub(super) fn connect(&self, words: &[u8]) -> io::Result<()> {
        let mut parameters = parameters(words, self.reads_in_flight_max);
        // SAFETY: the id is ours and resolved; the parameters and the bytes that they point to are only read during the call.
        check(unsafe { sys::rdma_connect(self.id.raw.as_ptr(), &raw mut parameters) })
    }

    /// Grants a peer the connection that it asked for.
    pub(super) fn accept(&self, words: &[u8]) -> io::Result<()> {
        let mut parameters = parameters(words, self.reads_in_flight_max);
        // SAFETY: as above; the id was asked for by a peer.
        check(unsafe { sys::rdma_accept(self.id.raw.as_ptr(), &raw mut parameters) })
    }

    pub(super) fn id(&self) -> &Id {
        &self.id
    }

    pub(super) fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// The memory that work requests refer to.
    pub(super) fn slab(&self) -> &Slab {
        self.slab
            .as_ref()
            .expect("a pair that moves bytes was made with memory")
    }

    /// How many READs and atomics the two devices agreed to have in flight.
    pub(super) fn reads_in_flight(&self) -> io::Result<u8> {
        let qp = self.qp()?;
        // SAFETY: plain data.
        let (mut attributes, mut initial) = unsafe {
            (
                std::mem::zeroed::<sys::ibv_qp_attr>(),
                std::mem::zeroed::<sys::ibv_qp_init_attr>(),
            )
        };
        let mask = sys::ibv_qp_attr_mask::IBV_QP_MAX_QP_RD_ATOMIC.0 as c_int;
        // SAFETY: the queue pair is alive, and both structures are ours to be written.
        check(unsafe { sys::ibv_query_qp(qp, &raw mut attributes, mask, &raw mut initial) })?;
        Ok(attributes.max_rd_atomic)
    }

    /// What the device lets a work request carry in itself.
    pub(super) fn inline_bytes(&self) -> usize {
        self.inline_bytes
    }

    /// Whether a WRITE of so many bytes can travel inside its work request.
    fn is_inline(&self, work: &Work) -> bool {
        matches!(work.verb, Verb::Write { .. } | Verb::Send)
            && work.local.bytes as usize <= self.inline_bytes
    }

    /// Hands work to the adapter, all with one ring of its doorbell.
    ///
    /// # Safety
    /// Local memory outside of the pair's slab stays registered and nobody else's until the work has completed or [`kill`](Self::kill) has
    /// returned.
    ///
    /// # Errors
    /// What the library says; the connection is then of no use.
    ///
    /// # Panics
    /// With more than [`POSTLIST`] requests.
    pub(super) unsafe fn post(&mut self, works: &[Work]) -> io::Result<()> {
        assert!(works.len() <= POSTLIST, "{} work requests", works.len());
        if works.is_empty() {
            return Ok(());
        }
        let qp = self.qp()?;
        // SAFETY: plain data, and zeros are valid in every field.
        let mut sges: [sys::ibv_sge; POSTLIST] = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let mut requests: [sys::ibv_send_wr; POSTLIST] = unsafe { std::mem::zeroed() };
        let first = requests.as_mut_ptr();
        for (i, work) in works.iter().enumerate() {
            sges[i] = work.local.sge();
            // SAFETY: below POSTLIST, as asserted.
            let request = unsafe { &mut *first.add(i) };
            request.wr_id = work.tag;
            request.sg_list = &raw mut sges[i];
            request.num_sge = 1;
            let remote = |address, rkey| sys::wr_t {
                rdma: sys::rdma_t {
                    remote_addr: address,
                    rkey,
                },
            };
            match work.verb {
                Verb::Send => request.opcode = sys::ibv_wr_opcode::IBV_WR_SEND,
                Verb::Read { address, rkey } => {
                    request.opcode = sys::ibv_wr_opcode::IBV_WR_RDMA_READ;
                    request.wr = remote(address, rkey);
                }
                Verb::Write { address, rkey } => {
                    request.opcode = sys::ibv_wr_opcode::IBV_WR_RDMA_WRITE;
                    request.wr = remote(address, rkey);
                }
            }
            if work.signalled {
                request.send_flags |= sys::ibv_send_flags::IBV_SEND_SIGNALED.0;
            }
            if self.is_inline(work) {
                request.send_flags |= sys::ibv_send_flags::IBV_SEND_INLINE.0;
            }
            if i + 1 < works.len() {
                // SAFETY: below POSTLIST, as asserted.
                request.next = unsafe { first.add(i + 1) };
            }
        }
        let mut refused = ptr::null_mut();
        // SAFETY:
        // - the queue pair is alive, and the list is ours for the call, which copies what it keeps;
        // - the memory lies in the slab, which outlives the queue pair, or the caller promises for it.
        check(unsafe { sys::ibv_post_send(qp, first, &raw mut refused) })
    }

    /// Offers a place of the slab to the peer's next message.
    pub(super) fn post_receive(&mut self, tag: u64, place: Range<usize>) -> io::Result<()> {
        let qp = self.qp()?;
        let mut sge = self.slab().local(&place).sge();
        let mut request = sys::ibv_recv_wr {
            wr_id: tag,
            next: ptr::null_mut(),
            sg_list: &raw mut sge,
            num_sge: 1,
        };
        let mut refused = ptr::null_mut();
        // SAFETY: as in `post`; the place lies in the slab.
        check(unsafe { sys::ibv_post_recv(qp, &raw mut request, &raw mut refused) })
    }

    /// Takes what has completed; returns how many of `done` were filled.
    pub(super) fn poll(&mut self, done: &mut [Option<Done>; COMPLETIONS]) -> io::Result<usize> {
        // SAFETY: plain data.
        let mut completions: [sys::ibv_wc; COMPLETIONS] = unsafe { std::mem::zeroed() };
        // SAFETY: the queue is ours, and there is room for so many.
        let count = unsafe {
            sys::ibv_poll_cq(
                self.queue.raw.as_ptr(),
                COMPLETIONS as i32,
                completions.as_mut_ptr(),
            )
        };
        let count = usize::try_from(count)
            .map_err(|_| io::Error::other("the completion queue cannot be read"))?;
        for (completion, done) in completions[..count].iter().zip(done) {
            let ok = completion.status == sys::ibv_wc_status::IBV_WC_SUCCESS;
            *done = Some(Done {
                tag: completion.wr_id,
                bytes: completion.byte_len as usize,
                result: if ok {
                    Ok(())
                } else {
                    Err(Failure(completion.status))
                },
            });
        }
        Ok(count)
    }

    /// Asks for one wake-up at the next completion. Poll once more afterwards: what completed before does not wake.
    pub(super) fn arm(&mut self) -> io::Result<()> {
        // SAFETY: the queue is ours.
        check(unsafe { sys::ibv_req_notify_cq(self.queue.raw.as_ptr(), 0) })
    }

    /// Takes wake-ups out of [`completions`](Self::completions); whether there was one, so that the queue has to be armed anew.
    pub(super) fn take_wakeups(&mut self) -> bool {
        let mut count = 0;
        loop {
            let (mut queue, mut context) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: the channel is ours, non-blocking, and both pointers are written only on success.
            let taken = unsafe {
                sys::ibv_get_cq_event(self.queue.events.as_ptr(), &raw mut queue, &raw mut context)
            };
            if taken != 0 {
                break;
            }
            count += 1;
        }
        if count > 0 {
            // SAFETY: so many were taken, all of this queue, the only one of its channel.
            unsafe { sys::ibv_ack_cq_events(self.queue.raw.as_ptr(), count) };
        }
        count > 0
    }

    /// Readable when an armed queue has completions.
    pub(super) fn completions(&self) -> BorrowedFd<'_> {
        self.queue.as_fd()
    }

    /// Ends the connection in an orderly way; what is posted comes back flushed.
    pub(super) fn disconnect(&self) {
        if self.alive {
            self.id.disconnect();
        }
    }

    /// Destroys the queue pair: when this returns, the adapter touches none of our memory any more, and nothing completes.
    pub(super) fn kill(&mut self) {
        if std::mem::take(&mut self.alive) {
            self.id.disconnect();
            // SAFETY: `alive` says that it has not been destroyed before.
            unsafe { sys::rdma_destroy_qp(self.id.raw.as_ptr()) };
        }
    }

    fn qp(&self) -> io::Result<*mut sys::ibv_qp> {
        if !self.alive {
            return Err(io::ErrorKind::NotConnected.into());
        }
        // SAFETY: the id is ours.
        Ok(unsafe { self.id.raw.as_ref().qp })
    }
}

fn parameters(words: &[u8], reads_in_flight: u8) -> sys::rdma_conn_param {
    sys::rdma_conn_param {
        private_data: words.as_ptr().cast(),
        private_data_len: words.len() as u8,
        responder_resources: reads_in_flight,
        initiator_depth: reads_in_flight,
        flow_control: 1,
        retry_count: RETRIES,
        rnr_retry_count: RNR_RETRIES,
        srq: 0,
        qp_num: 0,
    }
}
