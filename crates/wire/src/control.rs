//! The control connection: a fixed [`Hello`] in both directions, then length-prefixed [`Request`]s
//! and [`Response`]s.
//!
//! The rule it keeps: a frame is bounded before it is read ([`frame_bytes`]) and decoded only when
//! it is complete. The hello has the same layout in every version, so that two versions can always
//! tell each other apart.

use std::fmt;

use serde::{
    Deserialize, Deserializer, Serialize,
    de::{DeserializeOwned, Error, SeqAccess, Visitor},
};

use crate::{Challenge, ExtentId, Limit, PublicKey, Secret, ServerStat, SessionId, Signature};

crate::debug_as_display!(NameError);

pub use crate::VERSION;

/// First bytes of every connection, in both directions.
pub const MAGIC: [u8; 8] = *b"farpage\0";

/// Length of an encoded [`Hello`].
pub const HELLO_BYTES: usize = 16;

/// Length of the prefix of a control frame.
pub const PREFIX_BYTES: usize = 4;

/// The longest control frame: a manifest of [`MAX_MANIFEST_BYTES`] with its extents.
pub const MAX_FRAME_BYTES: usize = 24 << 20;

/// The longest first frame of a connection, so that a stranger cannot make the server hold much.
pub const MAX_FIRST_FRAME_BYTES: usize = 4 << 10;

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

/// Purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Requests and responses of one session.
    Control,
    /// READs and WRITEs of a session that exists.
    Data,
}

/// The first message in each direction.
///
/// Layout, little endian: magic 8, version u16, purpose u8 (1 control, 2 data), 5 zero bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The sender's [`VERSION`].
    pub version: u16,
    /// Purpose of the connection. The server repeats the client's value.
    pub purpose: Purpose,
}

/// Reason why a hello or a frame was not understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ControlDecodeError {
    /// Bytes of another protocol.
    #[error("the peer does not speak the farpage protocol")]
    NotFarpage,
    /// A hello of another version of our protocol.
    #[error(
        "the peer speaks version {theirs} of the protocol and this build speaks {ours}: bring both to the same release"
    )]
    Version {
        /// The peer's version.
        theirs: u16,
        /// Version of this build.
        ours: u16,
    },
    /// A hello of the right version with an impossible rest.
    #[error("malformed hello")]
    Hello,
    /// A frame beyond its limit.
    #[error("control frame of {bytes} bytes exceeds the limit of {limit}")]
    TooLong {
        /// The announced or actual length.
        bytes: usize,
        /// The longest frame that is allowed here.
        limit: usize,
    },
    /// A frame that is no message.
    #[error("malformed control frame")]
    Frame,
}

impl Hello {
    /// Makes this build's hello.
    pub fn new(purpose: Purpose) -> Self {
        Self {
            version: VERSION,
            purpose,
        }
    }

    /// Returns the bytes on the wire.
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&self.version.to_le_bytes());
        bytes[10] = match self.purpose {
            Purpose::Control => 1,
            Purpose::Data => 2,
        };
        bytes
    }

    /// Reads a peer's hello.
    ///
    /// # Errors
    /// Another protocol, another version (checked before the rest), or a malformed rest.
    pub fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self, ControlDecodeError> {
        if bytes[..8] != MAGIC {
            return Err(ControlDecodeError::NotFarpage);
        }
        let version = u16::from_le_bytes([bytes[8], bytes[9]]);
        if version != VERSION {
            return Err(ControlDecodeError::Version {
                theirs: version,
                ours: VERSION,
            });
        }
        let purpose = match bytes[10] {
            1 => Purpose::Control,
            2 => Purpose::Data,
            _ => return Err(ControlDecodeError::Hello),
        };
        if bytes[11..] != [0; 5] {
            return Err(ControlDecodeError::Hello);
        }
        Ok(Self { version, purpose })
    }
}

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
    /// Binds a name to a manifest and the extents that it refers to.
    Publish {
        /// The name.
        name: String,
        /// Contents of the manifest, opaque to the server.
        manifest: Vec<u8>,
        /// Extents of this session that live as long as the name.
        #[serde(deserialize_with = "at_most_extents")]
        extents: Vec<ExtentId>,
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
    /// session may claim a name again that it holds already.
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
}

/// The most names in one answer.
pub const NAMES_PER_ANSWER: usize = 1024;

/// Reads a list of extents, and stops at [`MAX_EXTENTS`]: an id may take eight times as many bytes
/// in memory as in a frame.
fn at_most_extents<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<ExtentId>, D::Error> {
    struct Extents;
    impl<'de> Visitor<'de> for Extents {
        type Value = Vec<ExtentId>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "at most {MAX_EXTENTS} extents")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut ids: A) -> Result<Self::Value, A::Error> {
            let mut extents = Vec::new();
            while let Some(id) = ids.next_element()? {
                if extents.len() == MAX_EXTENTS {
                    return Err(Error::invalid_length(MAX_EXTENTS + 1, &self));
                }
                extents.push(id);
            }
            Ok(extents)
        }
    }
    from.deserialize_seq(Extents)
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
    },
    /// Versions of a name that was published, or whose readers were asked for.
    Versions(Versions),
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
}

/// Returns the frame of `message`: its length as a little-endian u32, then its bytes.
///
/// # Errors
/// [`ControlDecodeError::TooLong`] when the message exceeds [`MAX_FRAME_BYTES`].
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, ControlDecodeError> {
    let mut frame = postcard::to_extend(message, vec![0; PREFIX_BYTES])
        .expect("messages hold only types that postcard can write, and a vector grows");
    let bytes = frame.len() - PREFIX_BYTES;
    if bytes > MAX_FRAME_BYTES {
        return Err(ControlDecodeError::TooLong {
            bytes,
            limit: MAX_FRAME_BYTES,
        });
    }
    frame[..PREFIX_BYTES].copy_from_slice(&(bytes as u32).to_le_bytes());
    Ok(frame)
}

/// Returns the number of bytes that follow a frame's `prefix`.
///
/// # Errors
/// [`ControlDecodeError::TooLong`] beyond `limit`, before anything is read or allocated.
pub fn frame_bytes(prefix: [u8; PREFIX_BYTES], limit: usize) -> Result<usize, ControlDecodeError> {
    let bytes = u32::from_le_bytes(prefix) as usize;
    if bytes > limit {
        return Err(ControlDecodeError::TooLong { bytes, limit });
    }
    Ok(bytes)
}

/// Reads a message from `bytes`, which are all the bytes behind the prefix.
///
/// # Errors
/// [`ControlDecodeError::Frame`] when `bytes` are no such message or some are left over.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ControlDecodeError> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        _ => Err(ControlDecodeError::Frame),
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, option, prelude::*};

    use super::*;
    use crate::{ClientStat, ShareStat, TierStat};

    #[test]
    fn hello_has_pinned_bytes() {
        assert_eq!(
            &Hello::new(Purpose::Data).encode(),
            b"farpage\0\x0a\0\x02\0\0\0\0\0"
        );
    }

    #[test]
    fn another_version_is_named_and_not_called_garbage() {
        let mut bytes = Hello::new(Purpose::Control).encode();
        bytes[8] = 8;
        bytes[10] = 77;
        let error = Hello::decode(&bytes).expect_err("version 8");
        assert_eq!(
            error,
            ControlDecodeError::Version {
                theirs: 8,
                ours: VERSION
            }
        );
        assert_eq!(
            Hello::decode(b"GET / HTTP/1.1\r\n"),
            Err(ControlDecodeError::NotFarpage)
        );
    }

    /// A failure means that the protocol has changed: see [`VERSION`].
    #[test]
    fn every_message_has_the_bytes_of_this_version() {
        assert_eq!(VERSION, 10);
        let (session, secret) = (SessionId(300), Secret([7; 16]));
        let (id, bytes) = (ExtentId(5), 300);
        let (name, manifest) = ("n".to_owned(), vec![9]);
        let sevens = [7; 16];
        let key = PublicKey([6; 32]);
        let requests = [
            (
                Request::Begin {
                    client: "c".to_owned(),
                    resume: Some((session, secret)),
                },
                [&[0, 1, b'c', 1, 0xac, 2][..], &sevens].concat(),
            ),
            (
                Request::Attach {
                    session,
                    secret,
                    line: 300,
                },
                [&[1, 0xac, 2][..], &sevens, &[0xac, 2]].concat(),
            ),
            (Request::Renew, vec![2]),
            (Request::Goodbye, vec![3]),
            (
                Request::Grant {
                    bytes,
                    atomics: true,
                    serial: Some(300),
                },
                vec![4, 0xac, 2, 1, 1, 0xac, 2],
            ),
            (Request::Release { extent: id }, vec![5, 5]),
            (
                Request::Publish {
                    name: name.clone(),
                    manifest: manifest.clone(),
                    extents: vec![id],
                },
                vec![6, 1, b'n', 1, 9, 1, 5],
            ),
            (
                Request::Open {
                    name: name.clone(),
                    serial: None,
                },
                vec![7, 1, b'n', 0],
            ),
            (
                Request::Remove {
                    name: name.clone(),
                    owner: None,
                },
                vec![8, 1, b'n', 0],
            ),
            (
                Request::Remove {
                    name: name.clone(),
                    owner: Some(key),
                },
                [&[8, 1, b'n', 1][..], &[6; 32]].concat(),
            ),
            (Request::Stat, vec![9]),
            (
                Request::Contents {
                    plain_bytes: 300,
                    stored_bytes: 2,
                },
                vec![10, 0xac, 2, 2],
            ),
            (Request::Challenge, vec![11]),
            (
                Request::Identify {
                    key,
                    signature: Signature([[4; 32], [5; 32]]),
                },
                [&[12][..], &[6; 32], &[4; 32], &[5; 32]].concat(),
            ),
            (
                Request::Claim {
                    name: name.clone(),
                    replace: true,
                },
                vec![13, 1, b'n', 1],
            ),
            (Request::Disclaim { name: name.clone() }, vec![14, 1, b'n']),
            (Request::Names { after: None }, vec![15, 0]),
            (
                Request::Names {
                    after: Some((key, name.clone())),
                },
                [&[15, 1][..], &[6; 32], &[1, b'n']].concat(),
            ),
            (
                Request::Read {
                    name: name.clone(),
                    serial: Some(300),
                },
                vec![16, 1, b'n', 1, 0xac, 2],
            ),
            (Request::Readers { name: name.clone() }, vec![17, 1, b'n']),
            (Request::Leaving, vec![18]),
        ];
        for (request, expected) in requests {
            let frame = encode(&request).expect("short");
            assert_eq!(frame[..PREFIX_BYTES], (expected.len() as u32).to_le_bytes());
            assert_eq!(frame[PREFIX_BYTES..], expected, "{request:?}");
        }
        let stat = ServerStat {
            version: "v".to_owned(),
            uptime_ms: 1,
            draining: true,
            capacity_bytes: 2,
            granted_bytes: 3,
            resident_bytes: 4,
            sessions: 5,
            lost_sessions: 33,
            clients: vec![ClientStat {
                name: "c".to_owned(),
                address: "d".to_owned(),
                connected: true,
                granted_bytes: 34,
                extents: 35,
            }],
            extents: 6,
            named_regions: 7,
            bytes_read: 8,
            bytes_written: 9,
            logical_bytes: 10,
            stored_bytes: 11,
            retained_bytes: 12,
            request_bytes: 13,
            tiers: TierStat {
                memory_bytes: 14,
                held_bytes: 15,
                hot_bytes: 16,
                compressed_bytes: 17,
                pool_bytes: 18,
                spilled_bytes: 19,
                evictions: 20,
                fetches: 21,
                fetch_p50_us: 22,
                fetch_p99_us: 23,
                forced_seals: 24,
                stray_bytes: 25,
                no_room: 26,
                spill_errors: 27,
            },
            shares: vec![ShareStat {
                of: "a".to_owned(),
                weight: 28,
                hot_bytes: 29,
                sessions: 30,
            }],
            readers: 31,
            old_versions: 32,
        };
        let versions = Versions {
            published: 300,
            read: vec![VersionRead {
                version: 3,
                readers: 2,
            }],
        };
        let full = Refusal::Full {
            asked: 2,
            available: 1,
            limit: Limit::PerAddress(3),
        };
        let lease = Lease {
            id,
            bytes,
            atomics: true,
            paged: false,
            read_only: true,
        };
        let responses = [
            (
                Response::Begun {
                    session,
                    secret,
                    lease_ms: 1,
                    paged: true,
                },
                [&[0, 0xac, 2][..], &sevens, &[1, 1]].concat(),
            ),
            (Response::Done, vec![1]),
            (
                Response::Granted { extent: lease },
                vec![2, 5, 0xac, 2, 1, 0, 1],
            ),
            (
                Response::Opened {
                    manifest: manifest.clone(),
                    extents: vec![lease],
                    versions: versions.clone(),
                },
                vec![3, 1, 9, 1, 5, 0xac, 2, 1, 0, 1, 0xac, 2, 1, 3, 2],
            ),
            (
                Response::Stat(Box::new(stat)),
                [
                    vec![4, 1, b'v', 1],
                    (1..=5).collect(),
                    vec![33, 1, 1, b'c', 1, b'd', 1, 34, 35],
                    (6..=27).collect(),
                    vec![1, 1, b'a', 28, 29, 30, 31, 32],
                ]
                .concat(),
            ),
            (Response::Refused(full), vec![5, 0, 2, 1, 1, 3]),
            (Response::Refused(Refusal::NoSession), vec![5, 1]),
            (Response::Refused(Refusal::NotFound), vec![5, 2]),
            (Response::Refused(Refusal::InUse), vec![5, 3]),
            (Response::Refused(Refusal::NotLeased(id)), vec![5, 4, 5]),
            (Response::Refused(Refusal::Draining), vec![5, 5]),
            (
                Response::Refused(Refusal::Invalid("i".to_owned())),
                vec![5, 6, 1, b'i'],
            ),
            (Response::Refused(Refusal::Exists), vec![5, 7]),
            (Response::Refused(Refusal::Unidentified), vec![5, 8]),
            (
                Response::Challenge(Challenge([3; 32])),
                [&[6][..], &[3; 32]].concat(),
            ),
            (
                Response::Names(vec![NamedRegion {
                    owner: key,
                    name,
                    bytes: 300,
                    in_use: true,
                    readers: 4,
                    old_versions: 3,
                }]),
                [&[7, 1][..], &[6; 32], &[1, b'n', 0xac, 2, 1, 4, 3]].concat(),
            ),
            (
                Response::Reading {
                    manifest,
                    extents: vec![ExtentId(7)],
                    leases: vec![lease],
                },
                vec![8, 1, 9, 1, 7, 1, 5, 0xac, 2, 1, 0, 1],
            ),
            (Response::Versions(versions), vec![9, 0xac, 2, 1, 3, 2]),
        ];
        for (response, expected) in responses {
            let frame = encode(&response).expect("short");
            assert_eq!(frame[PREFIX_BYTES..], expected, "{response:?}");
        }
        let key = RemoteKey {
            address: 300,
            rkey: 3,
        };
        let mut keys = LeaseKeys {
            memory: key,
            paged: None,
        };
        let frame = encode(&vec![keys]).expect("short");
        assert_eq!(frame[PREFIX_BYTES..], [1, 0xac, 2, 3, 0]);
        keys.paged = Some(PagedKeys {
            words: key,
            marks: key,
            granule_bytes: 1,
        });
        let frame = encode(&vec![keys]).expect("short");
        let expected = [1, 0xac, 2, 3, 1, 0xac, 2, 3, 0xac, 2, 3, 1];
        assert_eq!(frame[PREFIX_BYTES..], expected);
    }

    #[test]
    fn a_list_of_more_extents_than_a_server_has_is_not_read_to_its_end() {
        let publish = |extents| Request::Publish {
            name: "n".to_owned(),
            manifest: vec![],
            extents: vec![ExtentId(1); extents],
        };
        let most = encode(&publish(MAX_EXTENTS)).expect("short");
        assert!(decode::<Request>(&most[PREFIX_BYTES..]).is_ok());
        let more = encode(&publish(MAX_EXTENTS + 1)).expect("short");
        assert_eq!(
            decode::<Request>(&more[PREFIX_BYTES..]),
            Err(ControlDecodeError::Frame)
        );
    }

    #[test]
    fn a_frame_beyond_its_limit_is_refused_before_it_is_read() {
        assert_eq!(
            frame_bytes([0xff; 4], 10),
            Err(ControlDecodeError::TooLong {
                bytes: 0xffff_ffff,
                limit: 10
            })
        );
        let manifest = vec![0; MAX_FRAME_BYTES + 1];
        let huge = Request::Publish {
            name: String::new(),
            manifest,
            extents: vec![],
        };
        assert!(matches!(
            encode(&huge),
            Err(ControlDecodeError::TooLong { .. })
        ));
    }

    fn request() -> impl Strategy<Value = Request> {
        let secret = any::<[u8; 16]>().prop_map(Secret);
        let resume = option::of((any::<u64>().prop_map(SessionId), secret.clone()));
        let key = any::<[u8; 32]>().prop_map(PublicKey);
        prop_oneof![
            (any::<String>(), resume)
                .prop_map(|(client, resume)| Request::Begin { client, resume }),
            (any::<u64>(), secret, any::<u64>()).prop_map(|(id, secret, line)| Request::Attach {
                session: SessionId(id),
                secret,
                line
            }),
            Just(Request::Renew),
            (any::<u64>(), any::<u64>()).prop_map(|(plain_bytes, stored_bytes)| {
                Request::Contents {
                    plain_bytes,
                    stored_bytes,
                }
            }),
            Just(Request::Goodbye),
            Just(Request::Leaving),
            (any::<u64>(), any::<bool>(), option::of(any::<u64>())).prop_map(
                |(bytes, atomics, serial)| Request::Grant {
                    bytes,
                    atomics,
                    serial
                }
            ),
            any::<u64>().prop_map(|id| Request::Release {
                extent: ExtentId(id)
            }),
            (
                any::<String>(),
                vec(any::<u8>(), 0..300),
                vec(any::<u64>().prop_map(ExtentId), 0..30)
            )
                .prop_map(|(name, manifest, extents)| Request::Publish {
                    name,
                    manifest,
                    extents
                }),
            (any::<String>(), option::of(any::<u64>()))
                .prop_map(|(name, serial)| Request::Open { name, serial }),
            (any::<String>(), option::of(key.clone()))
                .prop_map(|(name, owner)| Request::Remove { name, owner }),
            Just(Request::Stat),
            Just(Request::Challenge),
            (key.clone(), any::<[[u8; 32]; 2]>()).prop_map(|(key, halves)| Request::Identify {
                key,
                signature: Signature(halves)
            }),
            (any::<String>(), any::<bool>())
                .prop_map(|(name, replace)| Request::Claim { name, replace }),
            any::<String>().prop_map(|name| Request::Disclaim { name }),
            option::of((key, any::<String>())).prop_map(|after| Request::Names { after }),
            (any::<String>(), option::of(any::<u64>()))
                .prop_map(|(name, serial)| Request::Read { name, serial }),
            any::<String>().prop_map(|name| Request::Readers { name }),
        ]
    }

    proptest! {
        #[test]
        fn requests_survive_the_wire(request in request()) {
            let frame = encode(&request).expect("short");
            let prefix = frame[..PREFIX_BYTES].try_into().expect("four bytes");
            prop_assert_eq!(frame_bytes(prefix, MAX_FRAME_BYTES), Ok(frame.len() - PREFIX_BYTES));
            prop_assert_eq!(decode::<Request>(&frame[PREFIX_BYTES..]), Ok(request));
        }

        #[test]
        fn a_cut_or_lengthened_request_is_an_error(request in request(), extra in any::<u8>()) {
            let mut body = encode(&request).expect("short").split_off(PREFIX_BYTES);
            prop_assert!(decode::<Request>(&body[..body.len() - 1]).is_err());
            body.push(extra);
            prop_assert!(decode::<Request>(&body).is_err());
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in vec(any::<u8>(), 0..300), hello in any::<[u8; HELLO_BYTES]>()) {
            let _ = decode::<Request>(&bytes);
            let _ = decode::<Response>(&bytes);
            let _ = Hello::decode(&hello);
        }
    }
}
