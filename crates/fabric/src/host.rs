//! The seam between a transport's server half and the daemon: [`Host`].
//!
//! The server halves in this crate move bytes and parse frames; access to memory is decided behind
//! this trait. The rule it keeps: a transport never touches memory that [`Host::extent`] did not
//! hand out for that very session.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use farpage_wire::{
    ExtentId, ExtentRange, Persistence, PublicKey, Secret, ServerStat, SessionId,
    register::{Answer, Ballot, Epoch, NotAccepted, Register},
};
pub use farpage_wire::{NamedRegion, Refusal, VersionRead, Versions};
use serde::{Deserialize, Serialize};

use crate::memory::ExtentMemory;

/// A host's answer when a session begins or is resumed.
#[derive(Clone, Debug)]
pub struct Admission {
    /// Id of the session.
    pub session: SessionId,
    /// Proof that later connections belong to the session.
    pub secret: Secret,
    /// Longest time between two renewals. The session ends when it is not renewed for this long.
    pub lease: Duration,
    /// True if memory lent to the session may be [paged](ExtentMemory::is_paged).
    pub paged: bool,
    /// Time at which published names are on a disk.
    pub persistence: Persistence,
}

/// Transport of a session's bytes; decides how the loss of its control connection is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Transport {
    /// A Unix socket of the same host: a closed socket is the client's death.
    Shm,
    /// A network: a closed connection may come back within the lease.
    Tcp,
    /// A network adapter that reads and writes the memory itself. A closed connection may come
    /// back, as over TCP. The adapter knows a lease's memory from its grant until
    /// [`ExtentMemory::deregister`], so the memory is physically backed all that time, unless it is
    /// [paged](ExtentMemory::is_paged).
    Rdma,
}

/// Origin of a client's connection. Limits per client count by origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Origin {
    /// A user of this machine, over a Unix socket.
    User(u32),
    /// Another machine, or this one over the network. Only the first half of an IPv6 address
    /// counts, since a client chooses the rest itself.
    Address(IpAddr),
    /// An origin that the system did not tell.
    Unknown,
}

impl From<IpAddr> for Origin {
    fn from(address: IpAddr) -> Self {
        Self::Address(match address.to_canonical() {
            IpAddr::V6(address) => {
                let network = u128::from(address) & !u128::from(u64::MAX);
                std::net::Ipv6Addr::from(network).into()
            }
            address => address,
        })
    }
}

/// The client at the other end of a connection.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Address and port, or over shared memory process and user, for people.
    pub name: String,
    /// Origin that limits count by.
    pub origin: Origin,
}

impl From<Origin> for Peer {
    fn from(origin: Origin) -> Self {
        Self {
            name: format!("{origin:?}"),
            origin,
        }
    }
}

impl Peer {
    pub(crate) fn at(address: SocketAddr) -> Self {
        Self {
            name: address.to_string(),
            origin: address.ip().into(),
        }
    }

    pub(crate) fn unknown() -> Self {
        Self {
            name: "an unknown address".to_owned(),
            origin: Origin::Unknown,
        }
    }
}

/// An opened named region.
#[derive(Clone, Debug)]
pub struct OpenedRegion {
    /// Manifest that the region's last publisher stored.
    pub manifest: Arc<Vec<u8>>,
    /// Extents that the manifest refers to, leased to the opener from now on.
    pub extents: Vec<Arc<ExtentMemory>>,
    /// Number of the opened version, and the older versions that are still read.
    pub versions: Versions,
    /// The host, and what it remembers of the name's writers.
    pub vote: Answer,
}

/// A name that a session has claimed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimedName {
    /// The host, and what it remembers of the name's writers.
    pub vote: Answer,
    /// True if the name is bound: to a region, a part of one, or a tombstone.
    pub is_bound: bool,
}

/// A binding of a name that a session proposes.
#[derive(Clone, Debug)]
pub struct Proposal<'a> {
    /// Manifest of the region, opaque to the host.
    pub manifest: Vec<u8>,
    /// Extents of the session that live as long as the name.
    pub extents: &'a [ExtentId],
    /// Number and holders of the binding. `None`: the binding is the host's alone, or with `keeps`
    /// and a binding that has a number, stays as it is.
    pub ballot: Option<Ballot>,
    /// True if the extents of the version before stay until the next proposal.
    pub keeps: bool,
}

impl Proposal<'_> {
    /// Decides on the proposal by the register of the name. True if the manifest of the binding
    /// before, if it [is bound](ClaimedName::is_bound), stays.
    ///
    /// # Errors
    /// The binding is not accepted. `register` is as it was.
    pub fn decide(&self, register: &mut Register, is_bound: bool) -> Result<bool, Refusal> {
        match &self.ballot {
            Some(_) if is_bound && !register.is_shared() => Err(Refusal::OtherRegion),
            Some(ballot) => {
                let accepted = register.accept(ballot, !self.keeps);
                accepted.map(|()| false).map_err(|error| match error {
                    NotAccepted::Outdated => Refusal::Outdated,
                    NotAccepted::OtherLife => Refusal::OtherRegion,
                })
            }
            None if register.is_shared() && !self.keeps => Err(Refusal::Shared),
            None => Ok(register.is_shared()),
        }
    }
}

/// A binding that a host has accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bound {
    /// The new version, and the older ones that are still read.
    pub versions: Versions,
    /// True if the name keeps extents that this version lacks.
    pub keeps_more: bool,
}

/// A version of a named region, opened for reading.
#[derive(Clone, Debug)]
pub struct OpenedVersion {
    /// Manifest that the version's publisher stored.
    pub manifest: Arc<Vec<u8>>,
    /// Extents that the manifest refers to: each one's id in the manifest, and the reader's own
    /// lease of it, a [view](ExtentMemory::view) that takes READs alone.
    pub extents: Vec<(ExtentId, Arc<ExtentMemory>)>,
    /// The host, and what it remembers of the version's writer.
    pub vote: Answer,
}

/// Client that asks about names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asker {
    /// A session. [`Host::identify`] has told which key it holds.
    Session(SessionId),
    /// A client without a session, which proved that it holds this key.
    Key(PublicKey),
}

/// Decides which client may have which memory. Implemented by the daemon; called by the server half
/// of every transport, from any thread.
pub trait Host: Send + Sync + 'static {
    /// Begins the session of a client's control connection, or resumes one after a loss.
    fn admit(
        &self,
        client: &str,
        transport: Transport,
        peer: &Peer,
        resume: Option<(SessionId, Secret)>,
    ) -> Result<Admission, Refusal>;
    /// Checks that a data connection belongs to `session`, by the session's `secret`.
    fn attach(&self, session: SessionId, secret: &Secret) -> Result<(), Refusal>;
    /// Notes that the session's client lives.
    fn renew(&self, session: SessionId) -> Result<(), Refusal>;
    /// Notes that a control connection ended without a goodbye: its client is dead, or was cut off
    /// and may come back.
    fn lost(&self, session: SessionId);
    /// Closes a session in an orderly way: frees all that it held. Named regions that it published
    /// stay.
    fn close(&self, session: SessionId);

    /// Leases zeroed memory to the session. `atomics` says whether the memory takes atomics.
    /// Default, as of all that concerns names but [`open`](Self::open): a refusal.
    ///
    /// A `serial` equal to that of the session's last request that gave something means that its
    /// answer was lost. Then the same is given again, and no more.
    fn grant(
        &self,
        _session: SessionId,
        _bytes: u64,
        _atomics: bool,
        _serial: Option<u64>,
    ) -> Result<Arc<ExtentMemory>, Refusal> {
        Err(lends_by_name())
    }
    /// Ends the lease of one extent. Published names keep theirs.
    fn release(&self, session: SessionId, extent: ExtentId) -> Result<(), Refusal>;
    /// Returns the memory of an extent, if the extent is leased to the session. On the data path:
    /// called per operation.
    fn extent(&self, session: SessionId, extent: ExtentId) -> Option<Arc<ExtentMemory>>;

    /// True if clients exchange messages and wait for one another. Then the host hears of
    /// [WRITEs](Self::written), which costs each data connection over RDMA receive requests at the
    /// adapter, and one thread serves the small batches of all data connections over TCP. A slow
    /// call on that thread holds all of them up. The memory of such a host is neither
    /// [paged](ExtentMemory::is_paged) nor made for atomics. Default: false.
    fn exchanges(&self) -> bool {
        false
    }

    /// Notes that WRITEs of the session have been placed, if the host
    /// [exchanges](Self::exchanges). Over TCP, called per batch, before the batch's answers, by the
    /// thread that has placed its bytes. Over RDMA, called for WRITEs that
    /// [notify](crate::Channel::post_notifying). Over shared memory, never called: clients place
    /// bytes by themselves. Default: does nothing.
    fn written(&self, _session: SessionId) {}

    /// Notes that the session's client proved that it holds `key`: names belong to keys. The proof
    /// holds as long as the session does, also after a resumption.
    fn identify(&self, session: SessionId, key: PublicKey) -> Result<(), Refusal>;
    /// Holds a name for the session. No other session may hold it, and unless `replace` it must not
    /// be bound. Its binding stays as it is.
    fn claim(
        &self,
        _session: SessionId,
        _name: &str,
        _replace: bool,
    ) -> Result<ClaimedName, Refusal> {
        Err(lends_by_name())
    }
    /// Promises to accept no binding of a name that the session holds from a writer before `epoch`.
    fn promise(&self, _session: SessionId, _name: &str, _epoch: Epoch) -> Result<(), Refusal> {
        Err(lends_by_name())
    }
    /// Ends a claim. An unbound name is free again.
    fn disclaim(&self, _session: SessionId, _name: &str) -> Result<(), Refusal> {
        Err(lends_by_name())
    }
    /// Puts bytes of the session's extents on the host's disk, for the next publication of a name
    /// that the session may publish. With `wait` the bytes are durable after the return. Returns
    /// `false`, and does nothing, while the last publication of the name is being written.
    fn persist(
        &self,
        _session: SessionId,
        _name: &str,
        _ranges: &[ExtentRange],
        _wait: bool,
    ) -> Result<bool, Refusal> {
        Err(Refusal::Invalid(
            "this server keeps no names on a disk (--persist)".to_owned(),
        ))
    }
    /// Binds a name to a manifest and extents of the session, and replaces an earlier binding
    /// atomically. A host that keeps names on a disk binds the name there as well. Either the
    /// session holds the name, or the name is not bound.
    fn bind(
        &self,
        _session: SessionId,
        _name: &str,
        _proposal: Proposal<'_>,
    ) -> Result<Bound, Refusal> {
        Err(lends_by_name())
    }
    /// [Binds](Self::bind) a name whose binding nobody else holds.
    fn publish(
        &self,
        session: SessionId,
        name: &str,
        manifest: Vec<u8>,
        extents: &[ExtentId],
    ) -> Result<Versions, Refusal> {
        let proposal = Proposal {
            manifest,
            extents,
            ballot: None,
            keeps: false,
        };
        (self.bind(session, name, proposal)).map(|bound| bound.versions)
    }
    /// Opens a named region for writing. No other session can, until this one closes or releases
    /// the extents. `serial` is as for [`grant`](Self::grant).
    fn open(
        &self,
        session: SessionId,
        name: &str,
        serial: Option<u64>,
    ) -> Result<OpenedRegion, Refusal>;
    /// Opens the published version of a named region for reading, also while another session holds
    /// the region. The version's memory stays until the session closes or releases the extents.
    fn read(
        &self,
        _session: SessionId,
        _name: &str,
        _serial: Option<u64>,
    ) -> Result<OpenedVersion, Refusal> {
        Err(lends_by_name())
    }
    /// Returns the older versions of a name that are still read.
    fn readers(&self, _session: SessionId, _name: &str) -> Result<Versions, Refusal> {
        Err(lends_by_name())
    }
    /// Forgets a name and frees its memory, except what is still read. `owner` is the key of the
    /// name, if the operator removes another user's name.
    fn remove(&self, _asker: Asker, _name: &str, _owner: Option<PublicKey>) -> Result<(), Refusal> {
        Err(lends_by_name())
    }
    /// Returns the names of the asker's key, or of all keys if the asker is the operator. The names
    /// ascend, begin behind `after`, and are at most
    /// [`NAMES_PER_ANSWER`](farpage_wire::control::NAMES_PER_ANSWER). Default: none.
    fn names(
        &self,
        _asker: Asker,
        _after: Option<(PublicKey, String)>,
    ) -> Result<Vec<NamedRegion>, Refusal> {
        Ok(Vec::new())
    }
    /// Notes the bytes of the client's pages, before compression and as stored, for the figures.
    fn report_contents(
        &self,
        _session: SessionId,
        _plain_bytes: u64,
        _stored_bytes: u64,
    ) -> Result<(), Refusal> {
        Ok(())
    }
    /// Returns figures for people and monitors.
    fn stat(&self) -> ServerStat;
}

/// Returns the refusal of a host that grants no extents and keeps no names.
fn lends_by_name() -> Refusal {
    Refusal::Invalid("this program lends what it offers by name, and nothing else".to_owned())
}
