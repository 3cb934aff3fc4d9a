//! Bytes of a hand-over: [`HandedServer`], and the records that it consists of.
//!
//! The rule it keeps: [`VERSION`] changes with every change of these records, and a state is
//! decoded only if its checksum is right. Instants do not outlive a process, so times are the
//! milliseconds that have passed.
//!
//! A state begins with [`MAGIC`], [`VERSION`] in 4 bytes and the body's length in 8. Then come the
//! body (postcard) and the XXH3-128 of everything before it.

use farpage_fabric::host::{Origin, Transport};
use farpage_wire::{
    Challenge, Endpoint, ExtentId, ExtentRange, PublicKey, Secret, ServerId, SessionId,
    register::{Answer, Register},
};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;

/// Number of the format of the records in this file.
const VERSION: u32 = 2;

const MAGIC: &[u8; 16] = b"farpage handover";
const HEAD_BYTES: usize = MAGIC.len() + 4 + 8;
const HASH_BYTES: usize = 16;

/// A server between two processes. Descriptors are given by their place in `descriptors`.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct HandedServer {
    /// Numbers of the descriptors, where the next process inherits them.
    pub(crate) descriptors: Vec<i32>,
    pub(crate) capacity_bytes: u64,
    pub(crate) listeners: Vec<HandedListener>,
    pub(crate) connections: Vec<HandedConnection>,
    /// Payload bytes that the server's CPU has read and written.
    pub(crate) traffic: [u64; 2],
    pub(crate) books: HandedBooks,
    pub(crate) durable: Option<HandedDurable>,
    pub(crate) tier: Option<HandedTier>,
}

/// A listening socket.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct HandedListener {
    /// Endpoint of the settings.
    pub(crate) asked: Endpoint,
    /// Endpoint with the port that was found.
    pub(crate) found: Endpoint,
    pub(crate) socket: u32,
    /// Number of a Unix socket's file, 0 for others.
    pub(crate) inode: u64,
}

/// A control connection between two requests.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct HandedConnection {
    pub(crate) socket: u32,
    pub(crate) transport: Transport,
    pub(crate) peer: String,
    pub(crate) origin: Origin,
    pub(crate) session: SessionId,
    pub(crate) lease_ms: u64,
    pub(crate) challenge: Option<Challenge>,
    pub(crate) is_leaving: bool,
}

/// Sessions, extents and names.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct HandedBooks {
    pub(crate) server: ServerId,
    pub(crate) uptime_ms: u64,
    pub(crate) sessions_ever: u64,
    pub(crate) extents_ever: u64,
    pub(crate) versions_ever: u64,
    pub(crate) sessions: Vec<HandedSession>,
    pub(crate) extents: Vec<HandedExtent>,
    pub(crate) names: Vec<HandedName>,
    pub(crate) versions: Vec<HandedVersion>,
    pub(crate) views: Vec<HandedView>,
    pub(crate) retained: Vec<HandedRetained>,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct HandedSession {
    pub(crate) id: SessionId,
    pub(crate) client: String,
    pub(crate) address: String,
    pub(crate) secret: Secret,
    pub(crate) transport: Transport,
    pub(crate) origin: Origin,
    pub(crate) connections: u64,
    pub(crate) lease_ms: u64,
    /// Time since the last renewal.
    pub(crate) renewed_ms: u64,
    /// Time since the connection was lost, if it was.
    pub(crate) lost_ms: Option<u64>,
    pub(crate) key: Option<PublicKey>,
    pub(crate) contents: [u64; 2],
    pub(crate) given: Option<(u64, HandedGiven)>,
}

/// Result of a session's last request that gave something.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) enum HandedGiven {
    Extent(ExtentId),
    Name(PublicKey, String),
    Reading(ExtentId),
}

#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct HandedExtent {
    pub(crate) id: ExtentId,
    pub(crate) bytes: u64,
    pub(crate) atomics: bool,
    pub(crate) memory: u32,
    pub(crate) lessee: Option<SessionId>,
    pub(crate) origin: Origin,
    pub(crate) mapped_by: Option<Origin>,
    pub(crate) mapped_to_read: bool,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct HandedName {
    pub(crate) owner: PublicKey,
    pub(crate) name: String,
    pub(crate) manifest: Option<Vec<u8>>,
    pub(crate) extents: Vec<ExtentId>,
    pub(crate) version: u64,
    pub(crate) register: Register,
    pub(crate) holder: Option<SessionId>,
    pub(crate) claimed: bool,
    pub(crate) origin: Origin,
    pub(crate) on_disk: u64,
    pub(crate) unwritten: Vec<ExtentRange>,
    /// Reason, file and extents of the damage of the name's files.
    pub(crate) damage: Option<(String, String, Vec<ExtentId>)>,
}

/// A version that is read.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct HandedVersion {
    pub(crate) version: u64,
    pub(crate) owner: PublicKey,
    pub(crate) name: String,
    pub(crate) manifest: Vec<u8>,
    pub(crate) origin: Origin,
    pub(crate) vote: Answer,
    pub(crate) extents: u64,
    pub(crate) is_bound: bool,
}

/// A lease to read one extent.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct HandedView {
    pub(crate) id: ExtentId,
    pub(crate) of: ExtentId,
    pub(crate) version: u64,
    pub(crate) reading: ExtentId,
    pub(crate) session: SessionId,
}

/// Memory that a client gave back and has not let go of.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct HandedRetained {
    pub(crate) id: ExtentId,
    pub(crate) bytes: u64,
    pub(crate) has_marks: bool,
    pub(crate) memory: u32,
    pub(crate) origin: Origin,
}

/// The directory of names.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct HandedDurable {
    pub(crate) directory: String,
    /// The locked file, whose lock goes along.
    pub(crate) lock: u32,
    pub(crate) files: Vec<ExtentId>,
    pub(crate) has_new_files: bool,
    pub(crate) sizes: Vec<(String, u64)>,
    pub(crate) written_bytes: u64,
    pub(crate) broken: Option<String>,
}

/// Parts of a server that lends more than its memory, and their counts.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct HandedTier {
    pub(crate) memory_bytes: u64,
    pub(crate) spill_bytes: u64,
    pub(crate) directory: String,
    /// The spill file.
    pub(crate) disk: u32,
    pub(crate) slots: HandedSlots,
    pub(crate) pool: HandedPool,
    pub(crate) figures: HandedFigures,
    pub(crate) extents: Vec<HandedTiered>,
}

/// Slots of the spill file that hold nothing.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct HandedSlots {
    pub(crate) fresh: u32,
    pub(crate) free: Vec<u32>,
    pub(crate) failed: Vec<u32>,
    pub(crate) suspect: Vec<u32>,
}

/// Cells of the pool. Chunks say which they begin in.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct HandedPool {
    pub(crate) memory: u32,
    pub(crate) next: Vec<u32>,
    pub(crate) free: Vec<u32>,
    pub(crate) hollow: Vec<u32>,
    pub(crate) used: u64,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct HandedFigures {
    pub(crate) evictions: u64,
    pub(crate) forced_seals: u64,
    pub(crate) stray_bytes: u64,
    pub(crate) no_room: u64,
    pub(crate) spill_errors: u64,
    pub(crate) ticks: u32,
    /// Durations of fetches, each with its number.
    pub(crate) fetches: Vec<(u64, u64)>,
}

/// Places of an extent's chunks.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct HandedTiered {
    pub(crate) id: ExtentId,
    pub(crate) session: SessionId,
    pub(crate) origin: Option<Origin>,
    /// True if clients have been lent the memory itself.
    pub(crate) is_shared: bool,
    /// Segments that were touched, by their numbers, with all their chunks.
    pub(crate) segments: Vec<(u32, Vec<HandedChunk>)>,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(crate) struct HandedChunk {
    pub(crate) place: HandedPlace,
    pub(crate) is_young: bool,
    pub(crate) stored_bytes: u32,
    pub(crate) slot: u32,
    pub(crate) fetched: u32,
    pub(crate) hash: [u64; 2],
}

/// Place of a chunk that is not being moved.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(crate) enum HandedPlace {
    Hole,
    Hot,
    /// Cell of the pool at which the chunk begins.
    Compressed(u32),
    Spilled,
}

impl HandedServer {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let body = postcard::to_stdvec(self).expect("records are made of plain values");
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((body.len() as u64).to_le_bytes());
        bytes.extend(body);
        let hash = XxHash3_128::oneshot(&bytes);
        bytes.extend(hash.to_le_bytes());
        bytes
    }

    /// Decodes a state.
    ///
    /// # Errors
    /// The reason, for people.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let damaged = || "its state is damaged".to_owned();
        let rest = bytes.strip_prefix(MAGIC).ok_or_else(damaged)?;
        let (version, rest) = rest.split_first_chunk().ok_or_else(damaged)?;
        let version = u32::from_le_bytes(*version);
        if version != VERSION {
            return Err(format!(
                "its state has format {version}, and this version reads format {VERSION}"
            ));
        }
        let (len, rest) = rest.split_first_chunk().ok_or_else(damaged)?;
        let len = usize::try_from(u64::from_le_bytes(*len)).map_err(|_| damaged())?;
        let (body, hash) = rest.split_last_chunk::<HASH_BYTES>().ok_or_else(damaged)?;
        if body.len() != len
            || XxHash3_128::oneshot(&bytes[..HEAD_BYTES + len]).to_le_bytes() != *hash
        {
            return Err(damaged());
        }
        postcard::from_bytes(body).map_err(|_| damaged())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server() -> HandedServer {
        let (origin, key) = (Origin::User(7), PublicKey([3; 32]));
        HandedServer {
            descriptors: vec![3, 4, 5],
            capacity_bytes: 1 << 30,
            listeners: vec![HandedListener {
                asked: "tcp://127.0.0.1:0".parse().expect("an endpoint"),
                found: "tcp://127.0.0.1:7400".parse().expect("an endpoint"),
                socket: 0,
                inode: 7,
            }],
            connections: vec![HandedConnection {
                socket: 1,
                transport: Transport::Shm,
                peer: "pid 1 of user 7".to_owned(),
                origin,
                session: SessionId(1),
                lease_ms: 60_000,
                challenge: Some(Challenge([9; 32])),
                is_leaving: true,
            }],
            traffic: [1, 2],
            books: HandedBooks {
                uptime_ms: 5,
                sessions_ever: 1,
                names: vec![HandedName {
                    owner: key,
                    name: "squares".to_owned(),
                    manifest: Some(vec![1; 100]),
                    extents: vec![ExtentId(1)],
                    version: 3,
                    register: Register::default(),
                    holder: Some(SessionId(1)),
                    claimed: true,
                    origin,
                    on_disk: 2,
                    unwritten: vec![],
                    damage: None,
                }],
                ..HandedBooks::default()
            },
            durable: None,
            tier: None,
        }
    }

    #[test]
    fn a_state_is_the_same_after_its_bytes() {
        let server = server();
        let again = HandedServer::decode(&server.encode()).expect("decoded");
        assert_eq!(format!("{again:?}"), format!("{server:?}"));
    }

    #[test]
    fn no_damaged_or_shortened_state_is_decoded() {
        let bytes = server().encode();
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert!(HandedServer::decode(&damaged).is_err(), "byte {at}");
            assert!(HandedServer::decode(&bytes[..at]).is_err(), "{at} bytes");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert!(HandedServer::decode(&longer).is_err());
    }

    #[test]
    fn a_state_of_another_format_is_refused_by_its_number() {
        let mut bytes = server().encode();
        bytes[MAGIC.len()] = 77;
        let refused = HandedServer::decode(&bytes).expect_err("another format");
        assert!(refused.contains("format 77"), "{refused}");
    }
}
