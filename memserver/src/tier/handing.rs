//! A tier between two processes.
//!
//! The rule it keeps: no chunk is on its way when the records are written, and none is moved before
//! all of them are read. Memory is counted anew.

use std::{
    collections::HashMap,
    path::Path,
    sync::{Arc, Weak},
};

use farpage_fabric::{
    host::Origin,
    memory::{ExtentMemory, paging_bytes},
};

use super::{
    Tier,
    chunk::{CHUNK_BYTES, Place},
    disk::SpillFile,
    extent::TieredExtent,
    moves::Tiered,
    pool::Owner,
    shares::{Entry, TABLE_BYTES_PER_CHUNK, Tenant},
};
use crate::handover::{Carried, Descriptors, HandedTier, HandedTiered, HandoverError};

impl Tier {
    /// Writes where all chunks are, once the evictors have ended. Tells clients over shared memory
    /// to ask the server, which [`go_on`](Self::go_on) takes back.
    ///
    /// # Errors
    /// A chunk is being moved: the disk has not answered.
    pub(crate) fn hand_over(&self, carried: &mut Carried<'_>) -> Result<HandedTier, HandoverError> {
        let busy = || {
            HandoverError::Refused(
                "the disk of --spill does not answer: try again when it does".to_owned(),
            )
        };
        let storage = &self.mover.storage;
        let disk = storage
            .disk()
            .and_then(|disk| disk.try_clone_to_owned().ok());
        let books = self.mover.room.books.lock();
        let mut extents = Vec::new();
        for (id, entry) in &books.extents {
            let Some(extent) = entry.extent.upgrade() else {
                continue;
            };
            extent.tell_all(true);
            extents.push(HandedTiered {
                id: *id,
                session: entry.tenant.session,
                origin: entry.tenant.origin,
                is_shared: extent.is_shared(),
                segments: extent.hand_over().ok_or_else(busy)?,
            });
        }
        if books.orphans != 0 {
            return Err(busy());
        }
        Ok(HandedTier {
            memory_bytes: self.memory_bytes(),
            spill_bytes: self.spill.1,
            directory: self.spill.0.display().to_string(),
            disk: carried.add(disk.ok_or_else(busy)?),
            slots: storage.hand_over(),
            pool: storage.pool.hand_over(|memory| carried.add(memory)),
            figures: self.mover.figures.hand_over(),
            extents,
        })
    }

    /// Goes on after a hand-over that failed.
    pub(crate) fn go_on(&self) {
        let books = self.mover.room.books.lock();
        for extent in books.extents.values().filter_map(|it| it.extent.upgrade()) {
            extent.tell_all(false);
        }
    }

    /// Makes a tier of the parts of an earlier process. The settings are those of this one.
    ///
    /// # Errors
    /// The settings have changed, or a part is missing.
    pub(crate) fn take_over(
        handed: &mut HandedTier,
        descriptors: &mut Descriptors,
        (memory_bytes, capacity_bytes): (u64, u64),
        directory: &Path,
        weights: HashMap<Origin, u32>,
    ) -> Result<Arc<Self>, HandoverError> {
        let spill_bytes = capacity_bytes.next_multiple_of(CHUNK_BYTES);
        for (setting, before, now) in [
            ("--memory", handed.memory_bytes, memory_bytes),
            (
                "--capacity of a server with --spill",
                handed.spill_bytes,
                spill_bytes,
            ),
        ] {
            if before != now {
                let (before, now) = (before.to_string(), now.to_string());
                return Err(HandoverError::Setting {
                    setting,
                    before,
                    now,
                });
            }
        }
        let now = directory.display().to_string();
        if handed.directory != now {
            return Err(HandoverError::Setting {
                setting: "--spill",
                before: handed.directory.clone(),
                now,
            });
        }
        let disk = Box::new(SpillFile::from(descriptors.take(handed.disk)?));
        let tier = Self::make(memory_bytes, spill_bytes, disk, weights);
        let mut tier = tier.map_err(|error| HandoverError::State(format!("its tiers: {error}")))?;
        tier.spill.0 = directory.to_owned();
        let mover = Arc::get_mut(&mut tier.mover).expect("made just now");
        let memory = descriptors.take(handed.pool.memory)?;
        mover
            .storage
            .take_over(handed.slots.clone(), handed.pool.clone(), memory)?;
        mover.figures.take_over(&handed.figures);
        mover.room.books.get_mut().held_bytes += mover.storage.pool.bytes();
        Ok(Arc::new(tier))
    }

    /// Makes `memory` a tiered extent, whose chunks are where they were at an earlier process.
    ///
    /// # Errors
    /// The records fit no such extent.
    pub(crate) fn take_extent(
        &self,
        memory: &ExtentMemory,
        handed: &HandedTiered,
    ) -> Result<Arc<ExtentMemory>, HandoverError> {
        let mover = &self.mover;
        let made = TieredExtent::take_over(Arc::clone(&mover.figures), memory.file(), handed);
        let (extent, hot) = made?;
        let extent = Arc::new(extent);
        for (chunk, cell) in extent.compressed() {
            let owner = Owner {
                extent: Arc::downgrade(&extent),
                chunk,
            };
            if !mover.storage.pool.own(cell, owner) {
                return Err(HandoverError::State(format!(
                    "a cell of extent {}",
                    handed.id
                )));
            }
        }
        let (chunks, own_bytes) = (extent.chunks(), paging_bytes(extent.bytes()));
        let table_bytes = chunks * TABLE_BYTES_PER_CHUNK + own_bytes;
        let entry = Entry {
            extent: Weak::clone(&Arc::downgrade(&extent)),
            tenant: Tenant {
                session: handed.session,
                origin: handed.origin,
            },
            chunks: hot,
            strays: 0,
        };
        let mut books = mover.room.books.lock();
        books.slots_kept += chunks;
        books.table_bytes += table_bytes;
        books.held_bytes += table_bytes + hot * CHUNK_BYTES;
        books.join_share(handed.id, entry);
        drop(books);
        Ok(memory.paged(|_| {
            Arc::new(Tiered {
                mover: Arc::clone(mover),
                extent,
            })
        }))
    }
}

impl TieredExtent {
    /// Lists the chunks in the pool, each with the cell that it begins in.
    fn compressed(&self) -> Vec<(usize, u32)> {
        let chunks = (0..self.chunks() as usize).filter_map(|number| {
            let chunk = self.looked_at(number)?;
            (chunk.place == Place::Compressed).then_some((number, chunk.cell))
        });
        chunks.collect()
    }
}
