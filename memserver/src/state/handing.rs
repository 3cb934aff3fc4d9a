//! The books of a server between two processes.
//!
//! The rule it keeps: books are written when no request is under way, and read whole or not at all.
//! Books leave out what other records say, so that they agree with each other.

use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_fabric::memory::ExtentMemory;
use farpage_wire::{ExtentId, SessionId};

use super::{
    State,
    accounts::charge_of_name,
    ledger::Ledger,
    readers::{VersionRecord, View},
    records::{ExtentRecord, Given, NameId, NameRecord, Retained, SessionRecord},
};
use crate::{
    durable::Damage,
    handover::{
        Carried, Descriptors, HandedBooks, HandedExtent, HandedGiven, HandedName, HandedRetained,
        HandedSession, HandedTiered, HandedVersion, HandedView, HandoverError,
    },
};

impl State {
    /// Notes that of all connections only the control connections of the sessions in `kept` are
    /// left.
    pub(crate) fn disconnect(&self, kept: &HashMap<SessionId, usize>) {
        let now = Instant::now();
        for (id, session) in &mut self.ledger.lock().sessions {
            session.connections = kept.get(id).copied().unwrap_or(0);
            session.lost = match session.connections {
                0 => session.lost.or(Some(now)),
                _ => None,
            };
        }
    }

    /// Renews the leases of sessions that have connections: no request was read until now.
    pub(crate) fn renew_connected(&self, now: Instant) {
        let mut ledger = self.ledger.lock();
        // From here on a gap between two looks is one in which the process did not run.
        ledger.reaped = Some(now);
        for session in ledger.sessions.values_mut() {
            if session.connections > 0 {
                session.renewed = now;
            }
        }
    }

    /// Writes the books, and adds the memory to `carried`. No thread serves clients meanwhile.
    ///
    /// # Errors
    /// The disk has not taken a publication.
    pub(crate) fn hand_over(
        &self,
        carried: &mut Carried<'_>,
    ) -> Result<HandedBooks, HandoverError> {
        let ledger = self.ledger.lock();
        let now = Instant::now();
        let names = ledger
            .names
            .iter()
            .map(|(id, record)| hand_name(id, record));
        let mut books = HandedBooks {
            server: ledger.id,
            uptime_ms: millis(now, self.started),
            sessions_ever: ledger.sessions_ever,
            extents_ever: ledger.extents_ever,
            names: names.collect::<Result<_, _>>()?,
            ..HandedBooks::default()
        };
        for (id, session) in &ledger.sessions {
            books.sessions.push(hand_session(*id, session, now));
        }
        for (id, extent) in &ledger.extents {
            let ExtentRecord {
                memory,
                lessee,
                name: _,
                origin,
                mapped_by,
                views: _,
                pins: _,
                mapped_to_read,
            } = extent;
            books.extents.push(HandedExtent {
                id: *id,
                bytes: memory.bytes(),
                atomics: memory.has_atomics(),
                memory: carried.add(memory.file()),
                lessee: *lessee,
                origin: *origin,
                mapped_by: *mapped_by,
                mapped_to_read: *mapped_to_read,
            });
        }
        let holder_of = |view: &ExtentId| {
            let mut sessions = ledger.sessions.iter();
            sessions.find_map(|(id, session)| session.views.contains(view).then_some(*id))
        };
        for (id, view) in &ledger.readings.views {
            books.views.push(HandedView {
                id: *id,
                of: view.of,
                version: view.version,
                reading: view.reading,
                session: holder_of(id).expect("a view belongs to a session"),
            });
        }
        (books.versions_ever, books.versions) = ledger.readings.hand_over();
        for retained in &*self.retained.lock() {
            let file = retained.file();
            books.retained.push(HandedRetained {
                id: file.id(),
                bytes: file.bytes(),
                has_marks: file.marks_bytes() > 0,
                memory: carried.add(file),
                origin: retained.origin,
            });
        }
        Ok(books)
    }

    /// Takes over the books of an earlier process. Nobody knows this state yet.
    ///
    /// # Errors
    /// [`HandoverError`]: the books do not agree with each other, or memory is missing.
    pub(crate) fn take_over(
        &mut self,
        books: HandedBooks,
        tiered: Vec<HandedTiered>,
        descriptors: &mut Descriptors,
    ) -> Result<(), HandoverError> {
        let now = Instant::now();
        let tiered: HashMap<_, _> = tiered.into_iter().map(|it| (it.id, it)).collect();
        let tier = self.tier.clone();
        self.started = before(now, books.uptime_ms);
        let ledger = self.ledger.get_mut();
        ledger.id = books.server;
        (ledger.sessions_ever, ledger.extents_ever) = (books.sessions_ever, books.extents_ever);
        for session in books.sessions {
            let (id, record) = take_session(session, now);
            ledger.accounts.put_session_on(record.origin);
            put(&mut ledger.sessions, id, record, "session")?;
        }
        for extent in books.extents {
            let memory = descriptors.take(extent.memory)?;
            let memory = ExtentMemory::inherited(
                extent.id,
                extent.bytes,
                extent.atomics,
                tier.is_some(),
                memory,
            );
            let mut memory = memory.map_err(|error| {
                HandoverError::State(format!("memory of extent {}: {error}", extent.id))
            })?;
            if let Some(tier) = &tier {
                let handed = tiered.get(&extent.id);
                let handed = handed.ok_or_else(|| disagrees("the chunks of an extent"))?;
                memory = tier.take_extent(&memory, handed)?;
            }
            if let Some(session) = extent.lessee {
                known(ledger, session)?.extents.insert(extent.id);
                self.leases.insert(extent.id, session, Arc::clone(&memory));
            }
            ledger.accounts.put_extent_on(extent.origin, extent.bytes);
            let record = ExtentRecord {
                memory,
                lessee: extent.lessee,
                name: None,
                origin: extent.origin,
                mapped_by: extent.mapped_by,
                views: 0,
                pins: 0,
                mapped_to_read: extent.mapped_to_read,
            };
            put(&mut ledger.extents, extent.id, record, "extent")?;
        }
        for name in books.names {
            take_name(ledger, name)?;
        }
        ledger.readings.at_least(books.versions_ever);
        self.take_views(books.versions, books.views)?;
        for retained in books.retained {
            let HandedRetained {
                id,
                bytes,
                has_marks,
                memory,
                origin,
            } = retained;
            let memory = descriptors.take(memory)?;
            let memory = ExtentMemory::inherited(id, bytes, false, has_marks, memory);
            let file = memory
                .map_err(|error| HandoverError::State(format!("memory of extent {id}: {error}")))?
                .file();
            self.ledger.get_mut().accounts.put_extent_on(origin, bytes);
            self.retained.get_mut().push(Retained { file, origin });
        }
        Ok(())
    }

    fn take_views(
        &mut self,
        versions: Vec<HandedVersion>,
        views: Vec<HandedView>,
    ) -> Result<(), HandoverError> {
        let ledger = self.ledger.get_mut();
        let mut records = HashMap::new();
        for version in versions {
            let record = VersionRecord {
                name: NameId::new(version.owner, &version.name),
                manifest: Arc::new(version.manifest),
                origin: version.origin,
                vote: version.vote,
                extents: version.extents as usize,
                readers: 0,
                is_bound: version.is_bound,
            };
            if !record.is_bound {
                let charge = charge_of_name(record.manifest.len());
                ledger.accounts.put_on(record.origin, charge);
            }
            put(&mut records, version.version, record, "version")?;
        }
        for view in views {
            let extent = ledger.extents.get_mut(&view.of);
            let extent = extent.ok_or_else(|| disagrees("an extent that is read"))?;
            extent.views += 1;
            let memory = extent.memory.view(view.id);
            known(ledger, view.session)?.views.insert(view.id);
            self.leases
                .insert(view.id, view.session, Arc::clone(&memory));
            let lease = View {
                of: view.of,
                memory,
                version: view.version,
                reading: view.reading,
            };
            if !records.contains_key(&view.version) {
                return Err(disagrees("a version that is read"));
            }
            put(&mut ledger.readings.views, view.id, lease, "view")?;
        }
        ledger.readings.take_over(records);
        Ok(())
    }
}

fn hand_session(id: SessionId, session: &SessionRecord, now: Instant) -> HandedSession {
    let SessionRecord {
        client,
        address,
        secret,
        transport,
        origin,
        connections,
        lease,
        renewed,
        in_disk: _,
        lost,
        extents: _,
        names: _,
        views: _,
        key,
        contents,
        given,
    } = session;
    let given = given.as_ref().map(|(serial, given)| {
        let given = match given {
            Given::Extent(id) => HandedGiven::Extent(*id),
            Given::Name(id) => HandedGiven::Name(id.owner, id.name.clone()),
            Given::Reading(first) => HandedGiven::Reading(*first),
        };
        (*serial, given)
    });
    HandedSession {
        id,
        client: client.clone(),
        address: address.clone(),
        secret: *secret,
        transport: *transport,
        origin: *origin,
        connections: *connections as u64,
        lease_ms: lease.as_millis() as u64,
        renewed_ms: millis(now, *renewed),
        lost_ms: lost.map(|lost| millis(now, lost)),
        key: *key,
        contents: *contents,
        given,
    }
}

fn take_session(session: HandedSession, now: Instant) -> (SessionId, SessionRecord) {
    let given = session.given.map(|(serial, given)| {
        let given = match given {
            HandedGiven::Extent(id) => Given::Extent(id),
            HandedGiven::Name(owner, name) => Given::Name(NameId { owner, name }),
            HandedGiven::Reading(first) => Given::Reading(first),
        };
        (serial, given)
    });
    let record = SessionRecord {
        client: session.client,
        address: session.address,
        secret: session.secret,
        transport: session.transport,
        origin: session.origin,
        connections: session.connections as usize,
        lease: Duration::from_millis(session.lease_ms),
        renewed: before(now, session.renewed_ms),
        in_disk: 0,
        lost: session.lost_ms.map(|lost| before(now, lost)),
        extents: HashSet::new(),
        names: HashSet::new(),
        views: HashSet::new(),
        key: session.key,
        contents: session.contents,
        given,
    };
    (session.id, record)
}

fn hand_name(id: &NameId, record: &NameRecord) -> Result<HandedName, HandoverError> {
    let NameRecord {
        manifest,
        extents,
        version,
        register,
        holder,
        claimed,
        origin,
        on_disk,
        is_writing,
        is_unsettled: _,
        unwritten,
        failed,
        damage,
    } = record;
    if *is_writing || failed.is_some() {
        return Err(HandoverError::Refused(format!(
            "the last publication of {:?} is not on the disk (see `names`): try again when it is",
            id.name
        )));
    }
    let damage = damage.as_ref().map(|damage| {
        let Damage {
            reason,
            file,
            extents,
        } = damage;
        (reason.to_string(), file.clone(), extents.clone())
    });
    Ok(HandedName {
        owner: id.owner,
        name: id.name.clone(),
        manifest: manifest.as_ref().map(|manifest| manifest.to_vec()),
        extents: extents.clone(),
        version: *version,
        register: register.clone(),
        holder: *holder,
        claimed: *claimed,
        origin: *origin,
        on_disk: *on_disk,
        unwritten: unwritten.clone(),
        damage,
    })
}

fn take_name(ledger: &mut Ledger, name: HandedName) -> Result<(), HandoverError> {
    let id = NameId {
        owner: name.owner,
        name: name.name,
    };
    for extent in &name.extents {
        let extent = ledger.extents.get_mut(extent);
        let extent = extent.ok_or_else(|| disagrees("a name's extent"))?;
        if extent.name.replace(id.clone()).is_some() {
            return Err(disagrees("an extent of two names"));
        }
    }
    if let Some(holder) = name.holder {
        known(ledger, holder)?.names.insert(id.clone());
    }
    let damage = name.damage.map(|(reason, file, extents)| Damage {
        reason: reason.into(),
        file,
        extents,
    });
    let record = NameRecord {
        manifest: name.manifest.map(Arc::new),
        extents: name.extents,
        version: name.version,
        register: name.register,
        holder: name.holder,
        claimed: name.claimed,
        on_disk: name.on_disk,
        unwritten: name.unwritten,
        damage,
        ..NameRecord::new(name.origin)
    };
    ledger.accounts.put_on(record.origin, record.charge());
    match ledger.names.insert(id, record) {
        None => Ok(()),
        Some(_) => Err(disagrees("a name that is there twice")),
    }
}

fn known(ledger: &mut Ledger, id: SessionId) -> Result<&mut SessionRecord, HandoverError> {
    let session = ledger.sessions.get_mut(&id);
    session.ok_or_else(|| disagrees("a session"))
}

fn put<K: std::hash::Hash + Eq, V>(
    table: &mut HashMap<K, V>,
    key: K,
    value: V,
    what: &str,
) -> Result<(), HandoverError> {
    match table.entry(key) {
        Entry::Vacant(place) => {
            place.insert(value);
            Ok(())
        }
        Entry::Occupied(_) => Err(disagrees(&format!("a {what} that is there twice"))),
    }
}

fn disagrees(about: &str) -> HandoverError {
    HandoverError::State(format!("its books disagree about {about}"))
}

/// Returns the milliseconds from `then` to `now`.
fn millis(now: Instant, then: Instant) -> u64 {
    now.saturating_duration_since(then).as_millis() as u64
}

/// Returns the time `ms` milliseconds before `now`, or `now` if the clock does not go back so far.
fn before(now: Instant, ms: u64) -> Instant {
    now.checked_sub(Duration::from_millis(ms)).unwrap_or(now)
}
