//! [`PageStore::publish`]: writes a region's page map to remote memory and binds its name to it.
//!
//! The rule it keeps: until the name is bound, the previous publication is whole on all servers;
//! and the name is bound by one request to the region's first server.

use farpage_fabric::{ControlError, PublishError, Versions, log::later};

use super::{
    manifest::{Manifest, RegionManifest, VERSION, bytes_of, places_of, span_of, words_of},
    persist::Additions,
};
use crate::{
    PageStore, PublishStoreError,
    codec::{self, Form},
    entry::{EntryWords, PUBLISHED, PageEntry, portable},
    mover::{MoveError, Mover},
    place::SlotSpan,
    pool::SlotPool,
    publications::{Ended, PIECE_BYTES, map_bytes},
    remote::{Backing, RemoteStore},
};

impl PageStore {
    /// Publishes what has been written back so far under the region's name, atomically. A program
    /// that opens the name gets this state or, if this call fails or the process dies in it, the
    /// previous one. (If the connection breaks in the last step, either of the two.) Pages may be
    /// filled and written back meanwhile.
    ///
    /// # Errors
    /// [`PublishStoreError`].
    pub fn publish(&self) -> Result<(), PublishStoreError> {
        let Backing::Remote(
            remote @ RemoteStore {
                claim: Some(claim),
                publications: Some(publications),
                ..
            },
        ) = &self.backing
        else {
            return Err(PublishStoreError::NotNamed {
                region: self.label.clone(),
            });
        };
        let (pool, name) = (&remote.pool, claim.name());
        let map_bytes = map_bytes(self.bytes, self.page_bytes);
        let full = |source| PublishStoreError::Alloc {
            name: name.to_owned(),
            source,
        };
        let mut additions = Additions::new(pool);
        let mut publication = publications.begin(pool, map_bytes).map_err(full)?;
        // 1. Copy the map.
        let map = publication.copy(|| self.copy_map(map_bytes, &mut additions));
        let places = places_of(&map, publication.area());
        // 2. Write it, put what is new on the servers' disks, and bind the name to the map.
        let result = match self.write_map(pool, name, &map, publication.area()) {
            Ok(entries) => {
                (entries.iter().filter_map(span_of)).for_each(|slot| additions.add(slot));
                let written = additions.write(pool, name);
                written.and_then(|()| self.bind(remote, name, map_bytes, entries))
            }
            Err(failure) => {
                let (failed, error) = *failure;
                publication.give_up_area(pool, failed);
                Err(error)
            }
        };
        // 3. Slots that only the previous map referred to are free now. After a failure, or when
        //    the server has ended, slots are free that only this map refers to.
        let (_, first) = &pool.servers()[0];
        let ended = match &result {
            Ok(versions) => Ended::Bound(versions.clone()),
            Err(error) if may_have_happened(error) && !first.has_outlived_server() => {
                Ended::Unknown
            }
            Err(_) => Ended::Failed,
        };
        publication.end(pool, ended, places, || self.mark_published(&map));
        // 4. Give back what was needed beside the reservation while older versions were read.
        if result.is_ok() && remote.reservation.is_some() {
            pool.shrink();
        }
        result.map(drop)
    }

    /// Copies the map. Slots that the last published map does not refer to are `additions`.
    fn copy_map(&self, map_bytes: u64, additions: &mut Additions) -> Vec<u8> {
        let mut map = Vec::with_capacity(map_bytes as usize);
        for page in self.all() {
            let words = self.table.load_words(page);
            let entry = portable(words);
            if words[1] & PUBLISHED == 0
                && let Some(slot) = span_of(&entry)
            {
                additions.add(slot);
            }
            map.extend(bytes_of(entry));
        }
        map.resize(map_bytes as usize, 0);
        map
    }

    /// Marks the pages whose entries are still those of the map.
    fn mark_published(&self, map: &[u8]) {
        for (page, words) in self.all().iter().zip(map.as_chunks::<32>().0) {
            if span_of(&words_of(words)).is_some()
                && bytes_of(portable(self.table.load_words(page))) == *words
            {
                self.table.mark_published(page);
            }
        }
    }

    /// Writes the map's pieces to the slots of `area`; a piece of zeros needs no write. An error
    /// comes with the slot whose write failed.
    fn write_map(
        &self,
        pool: &SlotPool,
        name: &str,
        map: &[u8],
        area: &[SlotSpan],
    ) -> Result<Vec<EntryWords>, Box<(Option<SlotSpan>, PublishStoreError)>> {
        let name = || name.to_owned();
        let mut mover = Mover::new(pool);
        let mut entries: Vec<EntryWords> = Vec::new();
        for (piece, &slot) in map.chunks(PIECE_BYTES).zip(area) {
            if piece.iter().all(|&byte| byte == 0) {
                entries.push(PageEntry::Never.encode());
                continue;
            }
            let failed = |slot, error| Box::new((slot, error));
            let written = mover.write(slot.place, piece);
            written.map_err(|error| match error {
                MoveError::Memory(source) => failed(
                    None,
                    PublishStoreError::Memory {
                        name: name(),
                        source,
                    },
                ),
                MoveError::Connect(source) => failed(
                    None,
                    PublishStoreError::Connect {
                        name: name(),
                        source,
                    },
                ),
                MoveError::Channel(source) => failed(
                    Some(slot),
                    PublishStoreError::Map {
                        name: name(),
                        source,
                    },
                ),
            })?;
            let entry = PageEntry::Stored {
                place: slot.place,
                stored_bytes: slot.bytes,
                form: Form::Raw,
                hash: codec::hash(piece, self.seed),
                published: false,
            };
            entries.push(entry.encode());
        }
        Ok(entries)
    }

    fn bind(
        &self,
        remote: &RemoteStore,
        name: &str,
        map_bytes: u64,
        map: Vec<EntryWords>,
    ) -> Result<Versions, PublishStoreError> {
        let pool = &remote.pool;
        let extents = pool.extents();
        let manifest = Manifest::Region(Box::new(RegionManifest {
            version: VERSION,
            bytes: self.bytes,
            page_bytes: self.page_bytes as u64,
            codec: remote.scheme.codec,
            layout: remote.scheme.layout.clone(),
            seed: self.seed,
            reserved: remote.reservation.is_some(),
            servers: pool
                .servers()
                .iter()
                .map(|(_, session)| session.endpoint().to_string())
                .collect(),
            extents: extents.clone(),
            map_bytes,
            map,
        }));
        let encode = |it: &Manifest| postcard::to_stdvec(it).expect("a manifest is plain data");
        let held = |server: usize| -> Vec<_> {
            let extents = extents.iter().flatten();
            let its = extents.filter(|(on, _)| usize::from(*on) == server);
            its.map(|(_, id)| *id).collect()
        };
        let failed = |source| PublishStoreError::Publish {
            name: name.to_owned(),
            source,
        };
        // 1. The others hold at least the extents that the first server's maps need, of this
        //    version and of the one before. A server that holds none is told so, too.
        let part = encode(&Manifest::Part);
        let mut keep_more = Vec::new();
        for (server, (_, session)) in pool.servers().iter().enumerate().skip(1) {
            let prepared = session.prepare(name, &part, &held(server));
            if prepared.map_err(failed)? {
                keep_more.push((server, session));
            }
        }
        // 2. The first server's manifest is the publication.
        let (_, first) = &pool.servers()[0];
        let versions = first.publish(name, &encode(&manifest), &held(0));
        let versions = versions.map_err(failed)?;
        // 3. The others free what only the version before has.
        for (server, session) in keep_more {
            if let Err(error) = session.publish(name, &part, &held(server)) {
                let (endpoint, name) = (session.endpoint().clone(), name.to_owned());
                later(move || {
                    tracing::warn!(%endpoint, name, %error, "memory of the version before stays until the next flush");
                });
            }
        }
        Ok(versions)
    }
}

/// True if the name may be bound despite the error. A request whose connection broke is sent again
/// on the next connection, where proving the user's key may fail.
fn may_have_happened(error: &PublishStoreError) -> bool {
    matches!(
        error,
        PublishStoreError::Publish {
            source: PublishError::Control(
                ControlError::Disconnected { .. } | ControlError::Key { .. }
            ),
            ..
        }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_answer_says_that_nothing_was_published() {
        let (endpoint, name) = ("tcp://a:1".to_owned(), "x".to_owned());
        let (attempt, reason) = ("publish".to_owned(), "because".to_owned());
        let said = |source: PublishError| {
            let name = "x".to_owned();
            may_have_happened(&PublishStoreError::Publish { name, source })
        };
        let refused = ControlError::Refused {
            endpoint: endpoint.clone(),
            attempt: attempt.clone(),
            reason: reason.clone(),
        };
        let disconnected = ControlError::Disconnected {
            endpoint: endpoint.clone(),
            attempt: attempt.clone(),
            reason: reason.clone(),
        };
        let key = ControlError::Key {
            endpoint: endpoint.clone(),
            attempt,
            reason,
        };
        assert!(!said(PublishError::InUse { endpoint, name }));
        assert!(!said(refused.into()));
        assert!(!said(PublishError::NotAsked(disconnected.clone())));
        assert!(said(disconnected.into()));
        assert!(said(key.into()));
    }
}
