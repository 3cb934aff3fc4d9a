//! Stub of the fabric `rdma` for builds without RDMA: connecting and listening fail with a reason,
//! and streams and routes have no values.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_wire::{
    Endpoint, ExtentId, Refusal, Secret, SessionId,
    control::{Lease, LeaseKeys},
};

use crate::{
    Buf, Channel, ConnectError, RdmaOptions,
    attachment::Attachment,
    channel::Group,
    errors::BindError,
    host::Peer,
    memory::ExtentMemory,
    regmem::{NullRegistrar, Registrar},
};

const REASON: &str = "this program was built without RDMA: build it with `--features rdma` (which needs libibverbs-dev, librdmacm-dev and \
                      libclang-dev), or use tcp://";

/// Interval between two questions to a peer. Unused: this build has no RDMA streams.
pub(crate) const ASK_AGAIN: Duration = Duration::ZERO;

#[derive(Debug)]
pub(crate) enum RdmaStream {}

#[derive(Debug)]
pub(crate) enum RdmaListener {}

#[derive(Debug)]
pub(crate) enum ConnectionRequest {}

pub(crate) type AdmitData<'a> = dyn Fn(SessionId, &Secret, u64) -> Result<(), Refusal> + 'a;

#[derive(Debug)]
pub(crate) enum Route {}

#[derive(Debug)]
pub(crate) struct Client;

pub(crate) fn devices() -> Result<Vec<String>, String> {
    Err(REASON.to_owned())
}

impl Client {
    pub(crate) fn new(_options: RdmaOptions) -> Self {
        Self
    }

    pub(crate) fn connect(
        &self,
        endpoint: &Endpoint,
        _until: Instant,
    ) -> Result<RdmaStream, ConnectError> {
        Err(ConnectError::NoRdma {
            endpoint: endpoint.to_string(),
            reason: REASON.to_owned(),
        })
    }

    pub(crate) fn registrar(&self) -> Arc<dyn Registrar> {
        Arc::new(NullRegistrar)
    }

    pub(crate) fn bounced_bytes(&self) -> u64 {
        0
    }

    pub(crate) fn insert(&self, _lease: Lease, _keys: LeaseKeys) {}

    pub(crate) fn remove(&self, _id: ExtentId) {}

    pub(crate) fn route(
        self: &Arc<Self>,
        endpoint: &Endpoint,
        _claim: (SessionId, Secret, u64),
        _attachment: Attachment,
        until: Instant,
    ) -> Result<Route, ConnectError> {
        self.connect(endpoint, until).map(|none| match none {})
    }
}

pub(crate) fn channel<B: Buf>(route: Route) -> Result<Box<dyn Channel<B>>, ConnectError> {
    match route {}
}

pub(crate) fn paged_channel<B: Buf>(
    route: Route,
    _asking: impl Channel<B> + AsFd + 'static,
) -> Result<Box<dyn Channel<B>>, ConnectError> {
    match route {}
}

pub(crate) fn channels<B: Buf>(routes: Vec<(usize, Route)>) -> Result<Vec<Group<B>>, ConnectError> {
    match routes.into_iter().next() {
        None => Ok(Vec::new()),
        Some((_, route)) => match route {},
    }
}

impl RdmaStream {
    pub(crate) fn read(&self, _buf: &mut [u8]) -> io::Result<usize> {
        match *self {}
    }

    pub(crate) fn write(&self, _buf: &[u8]) -> io::Result<usize> {
        match *self {}
    }

    pub(crate) fn close(&self) {
        match *self {}
    }

    pub(crate) fn has_ended(&self) -> bool {
        match *self {}
    }

    pub(crate) fn ended_fd(&self) -> BorrowedFd<'_> {
        match *self {}
    }

    pub(crate) fn arrivals_fd(&self) -> BorrowedFd<'_> {
        match *self {}
    }

    pub(crate) fn has_heard(&self) -> io::Result<bool> {
        match *self {}
    }

    pub(crate) fn claim(&self) -> Option<(SessionId, Secret, u64)> {
        match *self {}
    }

    pub(crate) fn accept(&self) -> io::Result<()> {
        match *self {}
    }

    pub(crate) fn register(
        &self,
        _session: SessionId,
        _memories: &[Arc<ExtentMemory>],
    ) -> Result<Vec<LeaseKeys>, String> {
        match *self {}
    }
}

impl AsFd for RdmaStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match *self {}
    }
}

impl RdmaListener {
    pub(crate) fn bind(endpoint: &Endpoint) -> Result<Self, BindError> {
        Err(BindError::NoRdma {
            endpoint: endpoint.to_string(),
            reason: REASON.to_owned(),
        })
    }

    pub(crate) fn check_paging(&self) -> Result<(), String> {
        match *self {}
    }

    pub(crate) fn port(&self) -> u16 {
        match *self {}
    }

    pub(crate) fn accept(&self) -> io::Result<Option<ConnectionRequest>> {
        match *self {}
    }

    pub(crate) fn answer(
        &self,
        _call: ConnectionRequest,
        _hears: bool,
        _admit: &AdmitData<'_>,
    ) -> Option<RdmaStream> {
        match *self {}
    }
}

impl ConnectionRequest {
    pub(crate) fn peer(&self) -> &Peer {
        match *self {}
    }
}

impl AsFd for RdmaListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match *self {}
    }
}
