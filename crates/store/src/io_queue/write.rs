//! Write-backs to memory servers: changed pages go out of place, encoded if that saves at least a
//! sixteenth of the page.
//!
//! The rule it keeps: a page's entry changes when its new bytes are complete, and not before; a
//! failure on the way leaves the last good copy.

use std::{mem, time::Instant};

use farpage_fabric::{AllocError, ChannelError, MAX_OP_BYTES, regmem::RegError};

use super::{
    IoQueue, ROOM_PAUSE,
    run::{IoRun, RunBuffer, RunPart, SlotTransfer, Task},
    staging::{IoBuf, no_memory},
};
use crate::{
    PageIndex, PageStore, StoreError, StoreStatsSnapshot,
    codec::{self, Coder, Form, Page},
    entry::PageEntry,
    place::SlotPlace,
    remote::{NoSlot, RemoteStore},
};

impl<R, F: RunBuffer> IoQueue<R, F> {
    /// Cuts a write-back into parts.
    pub(super) fn cut_write(&mut self, run: &mut IoRun<R, F>, frame: F) {
        let store = run.store.clone();
        let remote = store.remote_backing();
        // 1. Which pages are unchanged? A page of one repeated value needs no hash and no slot.
        for (page, bytes) in (run.page)
            .onwards()
            .zip(frame.as_ref().chunks_exact(store.page_bytes))
        {
            let value = codec::repeated(bytes);
            let Err(hash) = store.compare(page, bytes, value) else {
                run.tally.write_backs_clean += 1;
                run.add(Task::Ended, 0);
                continue;
            };
            if let Some(value) = value {
                self.entries.push((page, PageEntry::Repeated { value }));
                run.tally.write_backs_repeated += 1;
                run.tally.bytes_plain += bytes.len() as u64;
                run.add(Task::Ended, 0);
                continue;
            }
            let hash = hash.unwrap_or_else(|| store.hash(bytes));
            let page = Page {
                number: page,
                bytes,
                hash,
                seed: store.seed,
            };
            // A page without a staging buffer asks again in `write`, which also reports the error.
            let encoded = self.encode(remote, page, &mut run.tally);
            let (task, hash) = encoded.unwrap_or((Task::Encode, hash));
            run.add(task, hash);
        }
        // 2. Pages of one value are complete.
        if !self.entries.is_empty() {
            remote.commit(&store.table, self.entries.drain(..), &mut self.freed);
        }
        // 3. The others need slots.
        run.cut(frame);
    }

    /// Encodes a changed page if it can. Returns the page's task, and the hash of its new entry.
    fn encode(
        &mut self,
        remote: &RemoteStore,
        page: Page<'_>,
        tally: &mut StoreStatsSnapshot,
    ) -> Result<(Task, u128), RegError> {
        let (scheme, chooser) = (&remote.scheme, remote.chooser.as_deref());
        // `None`: a sample, which the chooser tries in several forms.
        let wish = match chooser {
            Some(chooser) => chooser.form(page.number),
            None => scheme.form(),
        };
        if wish == Some(Form::Raw) {
            return Ok((Task::Raw, page.hash));
        }
        let page_bytes = page.bytes.len();
        let Some(mut block) = self.staging.take(page_bytes)? else {
            return Ok((Task::Encode, page.hash));
        };
        let (limit, coder) = (Coder::limit(page_bytes), &mut self.coder);
        let began = Instant::now();
        let encoded = match wish {
            Some(wish) => coder.encode(scheme, wish, page, limit, block.as_mut()),
            None => chooser.expect("an adaptive scheme has one").sample(
                coder,
                scheme,
                page,
                limit,
                block.as_mut(),
            ),
        };
        tally.encode_ns += began.elapsed().as_nanos() as u64;
        tally.zfp_declined += u64::from(encoded.declined);
        tally.see_error(encoded.error);
        let task = match encoded.form {
            Form::Raw => {
                self.staging.put(block, page_bytes);
                Task::Raw
            }
            form => Task::Encoded {
                block,
                form,
                bytes: encoded.bytes,
            },
        };
        Ok((task, encoded.hash))
    }

    /// Posts all WRITEs that can go now. False if some have to wait.
    pub(super) fn write(
        &mut self,
        index: usize,
        run: &mut IoRun<R, F>,
        remote: &RemoteStore,
    ) -> bool {
        // 1. Encode the pages that waited for a staging buffer.
        for part in 0..run.parts.len() {
            if matches!(run.parts[part].task, Task::Encode) {
                let number = run.parts[part].first;
                let mut tally = mem::take(&mut run.tally);
                let page = Page {
                    number: run.page + number,
                    bytes: run.bytes(part),
                    hash: run.hashes[number],
                    seed: run.store.seed,
                };
                let encoded = self.encode(remote, page, &mut tally);
                run.tally = tally;
                match encoded {
                    Ok((task, hash)) => {
                        run.parts[part].task = task;
                        run.hashes[number] = hash;
                    }
                    Err(error) => run.fail(part, no_memory(&run.store, error)),
                }
            }
        }
        // 2. Take slots, and post.
        let placed = self.write_raw(index, run, remote) & self.write_encoded(index, run, remote);
        placed && !(run.parts.iter()).any(|part| matches!(part.task, Task::Encode))
    }

    /// Takes slots for all raw pages, as many in a row as possible. Posts one WRITE for each row.
    fn write_raw(&mut self, index: usize, run: &mut IoRun<R, F>, remote: &RemoteStore) -> bool {
        let page_bytes = run.store.page_bytes;
        let is_raw = |part: &&RunPart<F>| matches!(part.task, Task::Raw);
        let count = run.parts.iter().filter(is_raw).map(|part| part.pages).sum();
        if count == 0 {
            return true;
        }
        let mut places = mem::take(&mut self.places);
        let room = remote.alloc_run(page_bytes, count, &mut places);
        let mut rest = &places[..];
        // Parts that are split off go to the end, so this loop reaches them, too.
        for mut part in 0..run.parts.len() {
            if !is_raw(&&run.parts[part]) {
                continue;
            }
            let mine;
            (mine, rest) = rest.split_at(rest.len().min(run.parts[part].pages));
            for row in rows(mine, page_bytes) {
                let next = (row.len() < run.parts[part].pages).then(|| run.split(part, row.len()));
                let transfer =
                    SlotTransfer::new(row[0], (row.len() * page_bytes) as u32, Form::Raw);
                let frame = run.take_frame(part);
                self.post(index, run, part, remote, transfer, IoBuf::Frame(frame));
                part = next.unwrap_or(part);
            }
        }
        places.clear();
        self.places = places;
        let Err(no_room) = room else { return true };
        let Some(source) = self.refusal(run, no_room) else {
            return false;
        };
        for part in 0..run.parts.len() {
            if is_raw(&&run.parts[part]) {
                run.fail(part, full(&run.store, source.clone()));
            }
        }
        true
    }

    fn write_encoded(&mut self, index: usize, run: &mut IoRun<R, F>, remote: &RemoteStore) -> bool {
        let mut all = true;
        for part in 0..run.parts.len() {
            let Task::Encoded { form, bytes, .. } = run.parts[part].task else {
                continue;
            };
            let room = match remote.alloc(bytes, run.page + run.parts[part].first) {
                Ok(place) => Ok(place),
                Err(no_room) => match self.refusal(run, no_room) {
                    Some(source) => Err(source),
                    None => {
                        all = false;
                        continue;
                    }
                },
            };
            let Task::Encoded { block, .. } = mem::replace(&mut run.parts[part].task, Task::Encode)
            else {
                unreachable!("seen above")
            };
            match room {
                Ok(place) => {
                    let transfer = SlotTransfer::new(place, bytes, form);
                    self.post(index, run, part, remote, transfer, IoBuf::Staging(block));
                }
                Err(source) => {
                    self.staging.put(block, run.store.page_bytes);
                    run.fail(part, full(&run.store, source));
                }
            }
        }
        all
    }

    /// Returns the reason why a part cannot be written. `None`: there may be room in time, since
    /// servers are being asked for memory or other writes are about to end. The I/O queue looks
    /// again soon.
    fn refusal(&mut self, run: &IoRun<R, F>, no_room: NoSlot) -> Option<AllocError> {
        let now = Instant::now();
        let (refusal, may_wait) = match no_room {
            NoSlot::Growing { refused } => (refused, true),
            NoSlot::Full { source, later } => (Some(source), later),
        };
        // Without a refusal the wait is short: the thread that asks the servers has its own
        // deadline.
        let waits = may_wait && run.started.elapsed() < self.deadline || refusal.is_none();
        if waits {
            self.look_again = Some(now + ROOM_PAUSE);
            if let (None, Some(source)) = (&self.refused, &refusal) {
                self.refused = Some(full(&run.store, source.clone())(run.page));
            }
        }
        refusal.filter(|_| !waits)
    }

    /// Ends a part whose WRITE has ended, well or not.
    pub(super) fn written(
        &mut self,
        run: &mut IoRun<R, F>,
        part: usize,
        remote: &RemoteStore,
        transfer: SlotTransfer,
        result: Result<(), ChannelError>,
    ) {
        let page_bytes = run.store.page_bytes;
        let (first, pages) = (run.parts[part].first, run.parts[part].pages);
        let places = transfer.places(pages, page_bytes);
        let stored_bytes = transfer.bytes / pages as u32;
        if let Err(source) = result {
            self.give_up_slots(run, part, transfer);
            return run.fail(part, run.remote_error(remote, transfer, source));
        }
        debug_assert!(
            remote.pool.may_publish(transfer.place, transfer.done),
            "an entry refers to bytes that a Good member lacks"
        );
        let entries = (first..).zip(places).map(|(number, place)| {
            let entry = PageEntry::Stored {
                place,
                stored_bytes,
                form: transfer.form,
                hash: run.hashes[number],
                published: false,
            };
            (run.page + number, entry)
        });
        remote.commit(&run.store.table, entries, &mut self.freed);
        remote.pool.settle(transfer.place, pages);
        let kind = match transfer.form {
            Form::Raw => &mut run.tally.write_backs_raw,
            Form::Lz4 => &mut run.tally.write_backs_lz4,
            Form::Shuffled(_) => &mut run.tally.write_backs_shuffled,
            Form::Zfp => &mut run.tally.write_backs_zfp,
        };
        *kind += pages as u64;
        let writes = transfer.done.count_ones().max(1);
        run.tally.bytes_written += u64::from(transfer.bytes) * u64::from(writes);
        run.tally.bytes_stored += u64::from(transfer.bytes);
        run.tally.bytes_plain += (pages * page_bytes) as u64;
        run.end(part);
    }
}

fn full(store: &PageStore, source: AllocError) -> impl Fn(PageIndex) -> StoreError + use<> {
    let (region, held_bytes) = (store.label.clone(), store.held_bytes_in_all());
    move |page| StoreError::Full {
        region: region.clone(),
        page: page.number(),
        held_bytes,
        source: source.clone(),
    }
}

/// Cuts places into rows that one operation can write.
fn rows(places: &[SlotPlace], page_bytes: usize) -> impl Iterator<Item = &[SlotPlace]> {
    let behind = move |a: &SlotPlace, b: &SlotPlace| {
        let end = a.offset + page_bytes as u64;
        (a.server, a.extent, end) == (b.server, b.extent, b.offset)
    };
    places
        .chunk_by(behind)
        .flat_map(move |row| row.chunks(MAX_OP_BYTES as usize / page_bytes))
}
