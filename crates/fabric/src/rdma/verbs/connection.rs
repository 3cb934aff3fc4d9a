//! The connection manager: [`Id`], one end of a connection or a listener, and its [`Event`]s.

use std::{
    ffi::{CStr, c_int},
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::{AsFd, BorrowedFd},
    ptr::{self, NonNull},
    time::Instant,
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, poll},
};
use rdma_sys as sys;

use super::{
    errno::{check, not_null, set_nonblocking},
    memory::Device,
};
use crate::nonblocking::timeout_until;

/// The most bytes that a rejection can carry: what is left of a management datagram of InfiniBand,
/// the least of the networks.
pub(in crate::rdma) const REJECT_BYTES: usize = 148;

/// Exponent of the adapter's wait for an acknowledgement before it sends again: 4.096 us * 2^17 is
/// half a second, as a loaded peer needs. The connection manager's choice is four times as long.
const ACK_TIMEOUT: u8 = 17;

/// Channel of the connection manager's reports about the ids that belong to it. Never blocks.
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

/// A report of the connection manager.
#[derive(Debug)]
pub(in crate::rdma) struct Event {
    /// Kind of the event, by `rdma_cm_event_type`.
    pub(in crate::rdma) kind: EventKind,
    /// 0, an error number below 0, or why a peer rejected.
    pub(in crate::rdma) status: i32,
    /// Words of the peer that came along. Zeros may follow them.
    pub(in crate::rdma) said: Vec<u8>,
    /// Connection that a peer asks for.
    pub(in crate::rdma) request: Option<Request>,
}

/// Kinds of events that we tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rdma) enum EventKind {
    AddressResolved,
    RouteResolved,
    Request,
    Established,
    Rejected,
    /// Any other event: the end of what was tried, or of the connection.
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

    /// Returns the library's text for an end, and otherwise the name of the kind.
    pub(in crate::rdma) fn describe(self) -> String {
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
pub(in crate::rdma) struct Id {
    pub(super) raw: NonNull<sys::rdma_cm_id>,
    events: EventChannel,
}

// SAFETY: the library locks what ids share; what an id owns is changed only through `&mut self`,
// but for the calls that the library says may come from any thread (events, disconnect).
unsafe impl Send for Id {}
// SAFETY: as above.
unsafe impl Sync for Id {}

/// A connection that a peer asks for; dropping it turns the peer away.
#[derive(Debug)]
pub(in crate::rdma) struct Request(NonNull<sys::rdma_cm_id>);

// SAFETY: nobody else knows the id.
unsafe impl Send for Request {}

impl Id {
    pub(in crate::rdma) fn new() -> io::Result<Self> {
        let events = EventChannel::new()?;
        let mut raw = ptr::null_mut();
        let (channel, space) = (events.0.as_ptr(), sys::rdma_port_space::RDMA_PS_TCP);
        // SAFETY: the channel lives as long as the id: `Drop` destroys the id, and the field is
        // dropped after that.
        check(unsafe { sys::rdma_create_id(channel, &raw mut raw, ptr::null_mut(), space) })?;
        Ok(Self {
            raw: not_null(raw)?,
            events,
        })
    }

    /// Listens. Returns the port, which was found when 0 was asked for.
    pub(in crate::rdma) fn listen(&self, address: SocketAddr) -> io::Result<u16> {
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
    pub(in crate::rdma) fn resolve(&self, address: SocketAddr, until: Instant) -> io::Result<()> {
        let mut address = RawAddress::new(address);
        let left_ms = || {
            let left = until.saturating_duration_since(Instant::now());
            left.as_millis().clamp(1, 60_000) as c_int
        };
        // SAFETY: the address is a valid `sockaddr` of its family, only read during the call; no
        // source address is given.
        check(unsafe {
            sys::rdma_resolve_addr(self.raw.as_ptr(), ptr::null_mut(), address.get(), left_ms())
        })?;
        self.expect(EventKind::AddressResolved, until)?;
        // Before the route, which the timeout becomes a part of. Kernels before 5.3 have no such
        // option: their own timeout is longer, and the operation deadline comes first.
        let mut timeout = ACK_TIMEOUT;
        // SAFETY: level 0 (the id) option 3 (acknowledgement timeout) takes one byte, which is only
        // read.
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

    /// Waits for the next report; `TimedOut` at `until`.
    pub(in crate::rdma) fn wait_event(&self, until: Instant) -> io::Result<Event> {
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

    /// Takes the next report, `None` when there is none.
    pub(in crate::rdma) fn next_event(&self) -> io::Result<Option<Event>> {
        let mut raw = ptr::null_mut();
        // SAFETY: the channel is ours and `raw` is written only on success.
        match check(unsafe { sys::rdma_get_cm_event(self.events.0.as_ptr(), &raw mut raw) }) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            other => other?,
        }
        // SAFETY: an event that the library made, ours until it is acknowledged.
        let event = unsafe { &*raw };
        let kind = EventKind::new(event.event);
        // SAFETY: the events of connections (`RDMA_PS_TCP`) carry this arm of the union; the others
        // carry zeros there.
        let conn = unsafe { event.param.conn };
        let said = match kind {
            EventKind::Request | EventKind::Established | EventKind::Rejected
                if !conn.private_data.is_null() =>
            {
                // SAFETY: the library says how many bytes there are; they live until the event is
                // acknowledged.
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
    pub(super) fn disconnect(&self) {
        // SAFETY: the id is ours. Fails only when there is no connection.
        unsafe { sys::rdma_disconnect(self.raw.as_ptr()) };
    }

    /// Returns the device that the connection goes through, once it is resolved.
    pub(in crate::rdma) fn device(&self) -> Option<Device> {
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
        // - the id is ours; its queue pair is destroyed first, as the library wants it, if it still
        //   has one;
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
    /// Returns the device that the peer came to.
    pub(in crate::rdma) fn device(&self) -> Option<Device> {
        // SAFETY: the id is ours.
        NonNull::new(unsafe { self.0.as_ref().verbs }).map(Device)
    }

    /// Returns the peer's address.
    pub(in crate::rdma) fn peer(&self) -> Option<SocketAddr> {
        // SAFETY: the id is ours, and the address was filled in when its connection was asked for.
        let storage = unsafe { &self.0.as_ref().route.addr.dst_addr_union.dst_storage };
        match c_int::from(storage.ss_family) {
            libc::AF_INET => {
                // SAFETY: this family has this layout, which `sockaddr_storage` is large enough and
                // aligned for.
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

    /// Moves the connection from its listener's event channel into one of its own.
    pub(in crate::rdma) fn into_id(self) -> io::Result<Id> {
        let events = EventChannel::new()?;
        // SAFETY: both are ours, and the listener's thread, which runs this, acknowledged all
        // events of its channel.
        check(unsafe { sys::rdma_migrate_id(self.0.as_ptr(), events.0.as_ptr()) })?;
        let raw = self.0;
        std::mem::forget(self);
        Ok(Id { raw, events })
    }

    /// Turns the peer away with `words`, cut to what a rejection can carry.
    pub(in crate::rdma) fn reject(self, words: &[u8]) {
        let words = &words[..words.len().min(REJECT_BYTES)];
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
