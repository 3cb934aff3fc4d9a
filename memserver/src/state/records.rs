//! Records of the ledger: sessions, extents, names, and memory whose lease has ended.

use std::{
    collections::HashSet,
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_fabric::{
    host::{Origin, Refusal, Transport},
    log::later,
    memory::{ExtentFile, ExtentMemory},
};
use farpage_wire::{ExtentId, ExtentRange, PublicKey, Secret, SessionId, register::Register};
use tracing::warn;

use super::accounts::{charge_of, charge_of_name};
use crate::durable::{Binding, Damage};

pub(super) struct SessionRecord {
    pub(super) client: String,
    /// Address of the client, for people.
    pub(super) address: String,
    pub(super) secret: Secret,
    pub(super) transport: Transport,
    pub(super) origin: Origin,
    /// Control connections that have not ended: a resumed session's old one may be noticed late.
    pub(super) connections: usize,
    /// Time after which the session ends if it is not renewed, as its client was told.
    pub(super) lease: Duration,
    pub(super) renewed: Instant,
    /// Number of the client's requests that wait for the disk. Its renewals wait behind them, so
    /// the session does not end meanwhile.
    pub(super) in_disk: usize,
    /// Time at which the connection closed without a goodbye, if it did.
    pub(super) lost: Option<Instant>,
    pub(super) extents: HashSet<ExtentId>,
    pub(super) names: HashSet<NameId>,
    /// Leases to read published versions.
    pub(super) views: HashSet<ExtentId>,
    /// Owner of the names that the session uses, once its client has shown its key.
    pub(super) key: Option<PublicKey>,
    /// Bytes of the client's pages, and bytes that they are stored in, as the client reports.
    pub(super) contents: [u64; 2],
    /// The last numbered request that gave something, and its result.
    pub(super) given: Option<(u64, Given)>,
}

impl SessionRecord {
    pub(super) fn remember(&mut self, serial: Option<u64>, given: Given) {
        self.given = serial.map(|serial| (serial, given));
    }

    pub(super) fn is_connected(&self) -> bool {
        self.lost.is_none()
    }

    pub(super) fn holds_nothing(&self) -> bool {
        self.extents.is_empty() && self.names.is_empty() && self.views.is_empty()
    }

    /// Returns the origin that maps the session's extents, if the transport hands out descriptors.
    pub(super) fn maps_as(&self) -> Option<Origin> {
        (self.transport == Transport::Shm).then_some(self.origin)
    }
}

/// Result of a request, which is not given twice if only the answer was lost.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Given {
    Extent(ExtentId),
    Name(NameId),
    /// The first of a reading's views.
    Reading(ExtentId),
}

pub(super) struct ExtentRecord {
    pub(super) memory: Arc<ExtentMemory>,
    pub(super) lessee: Option<SessionId>,
    /// Name of the extent, at most one: two could be open in two sessions at once.
    pub(super) name: Option<NameId>,
    /// Origin that is charged for the bytes: where the last lessee connected from.
    pub(super) origin: Origin,
    /// Origin that was given the memory's descriptor over shared memory, and may map it for ever.
    pub(super) mapped_by: Option<Origin>,
    /// Number of leases to read the extent.
    pub(super) views: usize,
    /// Number of publications that are being written to the disk and refer to the extent.
    pub(super) pins: usize,
    /// True if a reader was given a descriptor. Readers cannot write, and need nothing but the
    /// name's key to read again: they are no reason for a copy. But they may keep the memory.
    pub(super) mapped_to_read: bool,
}

impl ExtentRecord {
    /// True if the bytes are needed although nobody leases the extent.
    pub(super) fn is_kept(&self) -> bool {
        self.name.is_some() || self.views > 0 || self.pins > 0
    }
}

/// A name and the key that it belongs to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct NameId {
    pub(super) owner: PublicKey,
    pub(super) name: String,
}

pub(super) struct NameRecord {
    /// Manifest of the last publication; `None` while the name is only claimed.
    pub(super) manifest: Option<Arc<Vec<u8>>>,
    pub(super) extents: Vec<ExtentId>,
    /// Number of the bound version; 0 while the name is only claimed.
    pub(super) version: u64,
    /// Promise to writers, and the ballot of the bound version.
    pub(super) register: Register,
    pub(super) holder: Option<SessionId>,
    /// True if the holder keeps the name even without leasing any of its extents.
    pub(super) claimed: bool,
    /// Origin that is charged: where the publisher connected from, or the first claimant.
    pub(super) origin: Origin,
    /// Number of the version that is on the disk; 0 without one.
    pub(super) on_disk: u64,
    /// True while the name's file is being written or removed. The name changes hands afterwards.
    pub(super) is_writing: bool,
    /// True if the holder let go of something of the name while it was being written.
    pub(super) is_unsettled: bool,
    /// Bytes that the next publication is to put on the disk.
    pub(super) unwritten: Vec<ExtentRange>,
    /// Publication that the disk has refused.
    pub(super) failed: Option<Failed>,
    /// Damage of the name's files. The name cannot be opened then.
    pub(super) damage: Option<Damage>,
}

impl NameId {
    pub(super) fn new(owner: PublicKey, name: &str) -> Self {
        Self {
            owner,
            name: name.to_owned(),
        }
    }
}

impl NameRecord {
    pub(super) fn new(origin: Origin) -> Self {
        Self {
            manifest: None,
            extents: Vec::new(),
            version: 0,
            register: Register::default(),
            holder: None,
            claimed: false,
            origin,
            on_disk: 0,
            is_writing: false,
            is_unsettled: false,
            unwritten: Vec::new(),
            failed: None,
            damage: None,
        }
    }

    /// Returns the manifest of the published version.
    ///
    /// # Errors
    /// Nothing is published, or its files are damaged.
    pub(super) fn published(&self) -> Result<&Arc<Vec<u8>>, Refusal> {
        if let Some(Damage { reason, .. }) = &self.damage {
            return Err(Refusal::Invalid(format!(
                "the region is damaged on the server's disk ({reason}): put a copy of the file in its place and start the server anew, or remove the name"
            )));
        }
        self.manifest.as_ref().ok_or(Refusal::NotFound)
    }

    /// True if the name is bound to a region, and not to a tombstone.
    pub(super) fn is_published(&self) -> bool {
        self.manifest.is_some() && !self.register.is_removed()
    }

    pub(super) fn charge(&self) -> u64 {
        charge_of_name(self.manifest.as_ref().map_or(0, |manifest| manifest.len()))
    }
}

/// A publication that is answered already, and waits for the disk.
pub(crate) struct Job {
    pub(super) id: NameId,
    pub(super) binding: Binding,
    /// Bytes that the version on the disk does not have.
    pub(super) ranges: Vec<ExtentRange>,
    /// Extents of the ranges, and those that the name has before or afterwards.
    pub(super) pinned: HashSet<ExtentId>,
    /// True if the disk has refused the job before, and a client waits to hear of it.
    pub(super) is_retry: bool,
}

/// A job that the disk has refused, and may take later.
pub(super) struct Failed {
    pub(super) reason: String,
    pub(super) job: Job,
}

/// Memory whose lease has ended. Adapters and the kernel take milliseconds to let gigabytes go, so
/// it is [given back](super::State::give_back) after the ledger is unlocked. Until then its handle
/// keeps others from [opening](super::State::free_and_private) the name that it belongs to.
pub(super) struct Leaving {
    pub(super) memory: Arc<ExtentMemory>,
    /// True if the bytes stay: a name or a reader keeps them.
    pub(super) is_kept: bool,
    /// Origin that is still charged: a client that may have kept the memory.
    pub(super) charged: Option<Origin>,
}

pub(super) type Freed = Vec<Leaving>;

/// Memory that a client gave back and has not let go of.
pub(super) struct Retained {
    pub(super) file: ExtentFile,
    /// Origin that is charged for the memory.
    pub(super) origin: Origin,
}

impl Retained {
    pub(super) fn charge(&self) -> u64 {
        charge_of(self.file.bytes())
    }

    pub(super) fn file(&self) -> ExtentFile {
        self.file.clone()
    }

    /// True if a client still has the memory.
    pub(super) fn is_held(&self) -> bool {
        self.file.is_held_elsewhere().unwrap_or_else(|error| {
            let extent = self.file.id();
            later(move || {
                warn!(%extent, %error, "cannot tell whether a client has let go of memory: it is not charged for it");
            });
            false
        })
    }
}
