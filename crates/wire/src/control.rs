//! The control connection: a fixed [`Hello`] in both directions, then [`Request`]s and
//! [`Response`]s in frames.
//!
//! The rule it keeps: what a message may hold is bounded, by its frame and by the lists in it.

mod frame;
mod hello;
#[cfg(test)]
mod tests;

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer, Serialize,
    de::{Error, SeqAccess, Visitor},
};

pub use self::{
    frame::{
        ControlDecodeError, MAX_FIRST_FRAME_BYTES, MAX_FRAME_BYTES, PREFIX_BYTES, decode, encode,
        frame_bytes,
    },
    hello::{HELLO_BYTES, Hello, MAGIC, Purpose},
};
use crate::{
    Challenge, ExtentId, Limit, PublicKey, Secret, ServerStat, SessionId, Signature,
    register::{Answer, Ballot, Epoch},
};

crate::debug_as_display!(NameError);

pub use crate::VERSION;

/// The longest manifest of a named region. Larger maps belong into extents that the manifest refers
/// to.
pub const MAX_MANIFEST_BYTES: usize = 16 << 20;

/// The most extents of one region on one server.
pub const MAX_EXTENTS: usize = 1 << 18;

/// The longest name of a region.
pub const MAX_NAME_BYTES: usize = 255;

/// Checks a region's name. Names are printed in messages and lists, so none has control characters.
///
/// # Errors
/// [`NameError`] with the beginning of `name`.
pub fn check_name(name: &str) -> Result<(), NameError> {
    let good = (1..=MAX_NAME_BYTES).contains(&name.len()) && !name.chars().any(char::is_control);
    if good {
        Ok(())
    } else {
        Err(NameError(name.chars().take(40).collect()))
    }
}

/// Text that is no name. Holds its first 40 characters.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no name for an array: it has 1 to {MAX_NAME_BYTES} bytes, none of them control characters"
)]
pub struct NameError(String);

/// The longest description that a client gives of itself.
pub const MAX_CLIENT_BYTES: usize = 255;

/// A client's request. A data connection carries a single one, its [`Attach`](Self::Attach).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Begins a session, or resumes one after its connection was lost. First on a control
    /// connection.
    Begin {
        /// The client's description of itself, for the server's log.
        client: String,
        /// Session to go on with, and its secret.
        resume: Option<(SessionId, Secret)>,
    },
    /// Claims a data connection for a session. First on a data connection. The answer comes once
    /// every earlier connection of the same line has ended: each of its operations has taken place
    /// by then, or never will.
    Attach {
        /// The session.
        session: SessionId,
        /// Secret of the session, as proof.
        secret: Secret,
        /// The line's number, which the client chooses. This connection replaces the earlier ones
        /// of the same line.
        line: u64,
    },
    /// Renews the leases: the client is alive.
    Renew,
    /// Ends the session. The server frees the session's memory.
    Goodbye,
    /// Leases zeroed memory.
    Grant {
        /// Bytes asked for.
        bytes: u64,
        /// True if the memory takes atomics. Otherwise atomics are refused.
        atomics: bool,
        /// The request's number, if its answer may be asked for again: see [`Open`](Self::Open).
        serial: Option<u64>,
    },
    /// Ends the lease of an extent.
    Release {
        /// Extent whose lease ends.
        extent: ExtentId,
    },
    /// Binds a name to a manifest and the extents that it refers to. Answered by
    /// [`Response::Bound`].
    Publish {
        /// The name.
        name: String,
        /// Contents of the manifest, opaque to the server.
        manifest: Vec<u8>,
        /// Extents of this session that live as long as the name.
        #[serde(deserialize_with = "at_most_extents")]
        extents: Vec<ExtentId>,
        /// Number of the binding, and its holders. `None`: the binding is this server's alone, or
        /// with `keeps` and a binding that has a number, stays as it is.
        ballot: Option<Box<Ballot>>,
        /// True if what the version before has stays with the name until the next `Publish`: other
        /// servers have not bound the name to this version yet.
        keeps: bool,
    },
    /// Opens a named region.
    Open {
        /// The name.
        name: String,
        /// The request's number, if its answer may be asked for again. The server remembers the
        /// session's last numbered request that gave something. It does not execute that number a
        /// second time, but repeats what it gave.
        serial: Option<u64>,
    },
    /// Forgets a name and frees its memory.
    Remove {
        /// The name.
        name: String,
        /// The key that owns the name, if the operator removes another user's name.
        owner: Option<PublicKey>,
    },
    /// Asks for the server's figures. Needs no session: it may be the first and only request on a
    /// control connection.
    Stat,
    /// Reports how much the client keeps in its extents now, for the server's figures.
    Contents {
        /// Bytes of the client's pages, before compression.
        plain_bytes: u64,
        /// Bytes that the client's pages take on the server.
        stored_bytes: u64,
    },
    /// Asks for a challenge to sign. May be first on a control connection: a client that then
    /// identifies itself may list and remove names without a session.
    Challenge,
    /// Proves the identity of the client: names belong to keys.
    Identify {
        /// The client's key.
        key: PublicKey,
        /// The signature of [`Challenge::message`].
        signature: Signature,
    },
    /// Claims a name that no other session holds. The session's first `Publish` binds the name. A
    /// session may claim a name again that it holds already. Answered by [`Response::Claimed`].
    Claim {
        /// The name.
        name: String,
        /// True if a name that is bound already may be claimed, too. The old binding stays until
        /// the next `Publish`.
        replace: bool,
    },
    /// Ends a [`Claim`](Self::Claim). A name that was never published is free again.
    Disclaim {
        /// The name.
        name: String,
    },
    /// Asks for the names of the client's key, or of all keys if it is the operator's key.
    Names {
        /// Owner and name of the last entry that the client knows already.
        after: Option<(PublicKey, String)>,
    },
    /// Opens a named region to read the version that is published now. Claims nothing.
    Read {
        /// The name.
        name: String,
        /// The request's number, as in [`Open`](Self::Open).
        serial: Option<u64>,
    },
    /// Asks which older versions of a name are still read.
    Readers {
        /// The name.
        name: String,
    },
    /// Tells that the client's process is about to end. The session goes on until its connection
    /// closes, and then ends as by a [`Goodbye`](Self::Goodbye), since no client will come back.
    Leaving,
    /// Puts bytes of this session's extents on the server's disk, for the next `Publish` of a name
    /// that the session may publish. Answered by [`Response::Later`] while the last publication of
    /// the name is being written.
    Persist {
        /// The name.
        name: String,
        /// Bytes that the last publication did not have.
        #[serde(deserialize_with = "at_most_ranges")]
        ranges: Vec<ExtentRange>,
        /// True if the answer is to come when the bytes are durable. Otherwise the bytes may be
        /// written after the `Publish`, on a server whose [`Persistence`] is `Soon`.
        wait: bool,
    },
    /// Promises to accept no binding of a name that this session holds from a writer before
    /// `epoch`.
    Promise {
        /// The name.
        name: String,
        /// Epoch of the session's writer.
        epoch: Epoch,
    },
}

/// Bytes of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ExtentRange {
    /// Extent of the bytes.
    pub extent: ExtentId,
    /// Offset of the first byte.
    pub offset: u64,
    /// Number of bytes.
    pub bytes: u64,
}

impl ExtentRange {
    /// True if `next` lies directly behind this range.
    pub fn is_followed_by(&self, next: &Self) -> bool {
        (self.extent, self.offset + self.bytes) == (next.extent, next.offset)
    }
}

/// The most ranges of one [`Request::Persist`].
pub const MAX_RANGES: usize = 1 << 16;

/// Time at which a server has published names on a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Persistence {
    /// The server has no directory for names: a restart loses them.
    #[default]
    Never,
    /// Names are on the disk soon after their publication.
    Soon,
    /// Names are on the disk before their publication is answered.
    AtOnce,
}

/// The most names in one answer.
pub const NAMES_PER_ANSWER: usize = 1024;

/// Reads a list of extents, and stops at [`MAX_EXTENTS`].
fn at_most_extents<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<ExtentId>, D::Error> {
    from.deserialize_seq(AtMost(MAX_EXTENTS, PhantomData))
}

/// Reads a list of ranges, and stops at [`MAX_RANGES`].
fn at_most_ranges<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<ExtentRange>, D::Error> {
    from.deserialize_seq(AtMost(MAX_RANGES, PhantomData))
}

/// Visitor of a list that stops at a length: an item may take eight times as many bytes in memory
/// as in a frame.
struct AtMost<T>(usize, PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for AtMost<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at most {} items", self.0)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            if list.len() == self.0 {
                return Err(Error::invalid_length(self.0 + 1, &self));
            }
            list.push(item);
        }
        Ok(list)
    }
}

/// Answer of the server: one per request, in the order of the requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Response {
    /// The session has begun or goes on.
    Begun {
        /// The session.
        session: SessionId,
        /// Proof for later connections.
        secret: Secret,
        /// Milliseconds without a renewal after which the session ends.
        lease_ms: u64,
        /// True if the server lends more than its memory. A channel over shared memory or RDMA then
        /// needs a data connection to the server's process as well.
        paged: bool,
        /// Time at which published names are on the server's disk.
        persistence: Persistence,
    },
    /// Success, without a value.
    Done,
    /// Memory was leased. Over shared memory its descriptor follows, and that of its segments'
    /// words if it is paged; over RDMA its [`LeaseKeys`] (a vector of one, in a frame of its own).
    Granted {
        /// The new extent.
        extent: Lease,
    },
    /// A region was opened. Over shared memory the descriptors of the extents follow, over RDMA
    /// their [`LeaseKeys`], if there are any.
    Opened {
        /// Manifest that the last publisher stored.
        manifest: Vec<u8>,
        /// Leases of the extents that the manifest refers to.
        extents: Vec<Lease>,
        /// The published version, and the older versions that are still read.
        versions: Versions,
        /// The server, and what it remembers of the name's writers.
        vote: Answer,
    },
    /// Figures of the server.
    Stat(Box<ServerStat>),
    /// The request was understood and turned down.
    Refused(Refusal),
    /// The challenge to sign.
    Challenge(Challenge),
    /// Names in ascending order, [`NAMES_PER_ANSWER`] at most. An answer with fewer is the last
    /// one.
    Names(Vec<NamedRegion>),
    /// A region was opened for reading. Descriptors or keys follow as after
    /// [`Opened`](Self::Opened).
    Reading {
        /// Manifest that the last publisher stored.
        manifest: Vec<u8>,
        /// Extents that the manifest refers to, by the ids in the manifest.
        extents: Vec<ExtentId>,
        /// The client's leases of `extents`, in the same order. Each has an id of its own, so that
        /// a client can read a region that it has open for writing, or read one twice.
        leases: Vec<Lease>,
        /// The server, and what it remembers of the version's writer.
        vote: Answer,
    },
    /// Versions of a name whose readers were asked for.
    Versions(Versions),
    /// Answer to a `Persist` that was not executed, since the name's last publication is still
    /// being written to the disk: it is to be sent again.
    Later,
    /// A name was claimed.
    Claimed {
        /// The server, and what it remembers of the name's writers.
        vote: Answer,
        /// True if the name is bound: to a region, a part of one, or a tombstone.
        is_bound: bool,
    },
    /// A name was bound.
    Bound {
        /// The new version, and the older ones that are still read.
        versions: Versions,
        /// True if the name keeps extents that this version lacks: a `Publish` is wanted once the
        /// other servers have bound the name.
        keeps_more: bool,
    },
}

/// The published version of a name, and the older ones that clients still read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Versions {
    /// The number of the published version; 0 before the first. Numbers ascend. A server uses none
    /// twice.
    pub published: u64,
    /// Older versions that are still read, in ascending order. Their extents must stay.
    pub read: Vec<VersionRead>,
}

/// A version that clients read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionRead {
    /// Number of the version.
    pub version: u64,
    /// Number of times that the version is open.
    pub readers: u64,
}

/// A name that a server keeps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedRegion {
    /// Key that the name belongs to.
    pub owner: PublicKey,
    /// The name.
    pub name: String,
    /// Bytes that the name keeps granted on this server.
    pub bytes: u64,
    /// True if a client holds the name now.
    pub in_use: bool,
    /// Number of times that the name is open for reading, all versions together.
    pub readers: u64,
    /// Number of replaced versions that are still read.
    pub old_versions: u64,
    /// Place of the name after a restart of the server.
    pub durability: Durability,
}

/// Place of a published name after a restart of its server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Durability {
    /// Nowhere: the server has no directory for names.
    #[default]
    Memory,
    /// The published version is on the server's disk.
    Disk,
    /// An older version or none is on the disk, and the published version will be.
    Soon,
    /// Nowhere: its files on the disk are damaged, and the name cannot be opened. Holds the reason.
    Damaged(String),
    /// An older version or none is on the disk. Holds the reason.
    Failed(String),
}

/// An extent as its lease is announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// Id of the extent.
    pub id: ExtentId,
    /// Length of the extent.
    pub bytes: u64,
    /// True if the extent takes atomics.
    pub atomics: bool,
    /// True if bytes of the extent may be elsewhere than in the server's memory. A client that
    /// reaches the memory by itself then looks at its [words](crate::segment).
    pub paged: bool,
    /// True if the extent takes no WRITE and no atomics: other clients hold it, too.
    pub read_only: bool,
}

/// Keys that open an extent to an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseKeys {
    /// Key of the extent's bytes.
    pub memory: RemoteKey,
    /// Further keys of an extent whose bytes may be elsewhere.
    pub paged: Option<PagedKeys>,
}

/// Keys by which a client over RDMA learns which bytes are in the server's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PagedKeys {
    /// Key of the [words](crate::segment) of the extent's segments, 8 bytes each, to be READ.
    pub words: RemoteKey,
    /// Key of the marks of the segments, 4 bytes each. A client WRITEs a bit for each chunk that it
    /// has touched, since the server does not see its accesses.
    pub marks: RemoteKey,
    /// Each packet to the extent's bytes has to begin at a multiple of this number, 1 or the size
    /// of a page. The server does the operations whose packets cannot.
    pub granule_bytes: u32,
}

/// The address and key of memory for an adapter, in the meaning of the InfiniBand specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteKey {
    /// The address of the first byte.
    pub address: u64,
    /// The key. It opens the memory for this session only, until the lease ends.
    pub rkey: u32,
}

/// Reason why a server refuses a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The server lacks room. The session goes on.
    #[error("{}", limit.refusal(*asked, *available))]
    Full {
        /// Bytes asked for.
        asked: u64,
        /// Bytes that could be granted now.
        available: u64,
        /// The limit that stands in the way.
        limit: Limit,
    },
    /// An unknown session, a wrong secret, or a session whose lease has ended.
    #[error("no such session, or its lease has ended")]
    NoSession,
    /// A name under which the key has no region.
    #[error("no region of that name belongs to this key")]
    NotFound,
    /// The named region is open in another session.
    #[error("the region is in use by another client")]
    InUse,
    /// The extent is not leased to this session.
    #[error("extent {0} is not leased to this client")]
    NotLeased(ExtentId),
    /// The server is shutting down and takes no new work.
    #[error("the server is shutting down")]
    Draining,
    /// Anything else that is wrong with the request.
    #[error("{0}")]
    Invalid(String),
    /// The name is bound already, and replacing was not asked for.
    #[error("a region of that name exists already")]
    Exists,
    /// Names belong to keys, and the client has shown none.
    #[error("names belong to keys, and this client has not shown its own")]
    Unidentified,
    /// A later writer has taken the name over.
    #[error(
        "another client has opened the region for writing since, while this one was cut off: close it, and open it again"
    )]
    Outdated,
    /// The name's binding is held by several servers, which forget it together.
    #[error("the region is kept by several servers, which remove it together")]
    Shared,
    /// The name is bound to another region than the one that the ballot is of.
    #[error(
        "the server keeps another region of this name, which was created apart from this one: remove it there (`farpage-memserver remove`), or use another name"
    )]
    OtherRegion,
}
