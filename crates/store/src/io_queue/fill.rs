//! Fills from memory servers: made on the spot, read into the frame, or read into a staging buffer
//! and decoded.
//!
//! The rule it keeps: each page that is handed out as filled has the hash that its entry says. An
//! entry out of another process is checked before anything is read.
//! Bytes that do not match are read a second time: a link that was cut and came back may have
//! damaged them on their way, while the server has them as they were written.

use std::{sync::Arc, time::Instant};

use farpage_fabric::ChannelError;

use super::{
    IoQueue,
    copies::Outlook,
    run::{Decoding, IoRun, RunBuffer, RunPart, SlotTransfer, Task},
    staging::{IoBuf, no_memory},
};
use crate::{
    EntryWords, StoreError,
    codec::{self, Coder, Form},
    entry::PageEntry,
    groups::{Member, MemberState},
    parity::positions,
    place::SlotSpan,
    remote::RemoteStore,
};

impl<R, F: RunBuffer> IoQueue<R, F> {
    /// Posts all READs that can go now. False if some have to wait.
    pub(super) fn fetch(
        &mut self,
        index: usize,
        run: &mut IoRun<R, F>,
        remote: &RemoteStore,
    ) -> bool {
        for part in 0..run.parts.len() {
            let Task::Fetch(transfer) = run.parts[part].task else {
                continue;
            };
            let buf = match transfer.form {
                Form::Raw => Some(IoBuf::Frame(run.take_frame(part))),
                _ => match self.staging.take(run.store.page_bytes) {
                    Ok(block) => block.map(IoBuf::Staging),
                    Err(error) => {
                        run.fail(part, no_memory(&run.store, error));
                        continue;
                    }
                },
            };
            if let Some(buf) = buf {
                self.post(index, run, part, remote, transfer, buf);
            }
        }
        !(run.parts.iter()).any(|part| matches!(part.task, Task::Fetch(_)))
    }
}

/// Entry out of another process.
enum CopiedEntry {
    Repeated { value: u64 },
    Stored { transfer: SlotTransfer, hash: u128 },
}

/// Checks an entry out of another process, which may be any words.
///
/// # Errors
/// The damage.
fn copied(remote: &RemoteStore, entry: EntryWords) -> Result<CopiedEntry, &'static str> {
    match PageEntry::decode_timed(entry) {
        None => Err("it is none"),
        Some(PageEntry::Kept { .. }) => Err("it refers to a store of the user's own"),
        Some(PageEntry::Never) => Ok(CopiedEntry::Repeated { value: 0 }),
        Some(PageEntry::Repeated { value }) => Ok(CopiedEntry::Repeated { value }),
        Some(PageEntry::Stored {
            place,
            stored_bytes: bytes,
            form,
            hash,
            ..
        }) => {
            if !(remote.scheme).allows(form, bytes as usize, remote.page_bytes) {
                return Err("no page of the region has its form and length");
            }
            let extent = remote.pool.find(SlotSpan { place, bytes });
            let extent = extent.ok_or("it refers to no slot")?;
            let transfer = SlotTransfer {
                extent: Some(extent),
                ..SlotTransfer::new(place, bytes, form)
            };
            Ok(CopiedEntry::Stored { transfer, hash })
        }
    }
}

impl<R, F: RunBuffer> IoRun<R, F> {
    /// Cuts a fill into parts, as the entries of its pages say. Pages that need no request are
    /// made.
    pub(super) fn cut_fill(&mut self, mut frame: F) {
        let store = self.store.clone();
        let pages = frame.as_mut().chunks_exact_mut(store.page_bytes);
        for (page, bytes) in self.page.onwards().zip(pages) {
            match store.table.load(page) {
                PageEntry::Never | PageEntry::Kept { .. } => {
                    bytes.fill(0);
                    self.tally.fills_never += 1;
                    self.add(Task::Ended, 0);
                }
                PageEntry::Repeated { value } => {
                    codec::fill_repeated(bytes, value);
                    self.tally.fills_repeated += 1;
                    self.add(Task::Ended, 0);
                }
                PageEntry::Stored {
                    place,
                    stored_bytes,
                    form,
                    hash,
                    ..
                } => {
                    let transfer = SlotTransfer::new(place, stored_bytes, form);
                    self.add(Task::Fetch(transfer), hash);
                }
            }
        }
        self.cut(frame);
    }

    /// Cuts a fill of one page by an entry that a copy of the process has. Pages that need no
    /// request are not counted: this process has none of them in memory.
    pub(super) fn cut_copied(&mut self, mut frame: F, entry: EntryWords) {
        match copied(self.store.remote_backing(), entry) {
            Ok(CopiedEntry::Repeated { value }) => {
                codec::fill_repeated(frame.as_mut(), value);
                self.add(Task::Ended, 0);
            }
            Ok(CopiedEntry::Stored { transfer, hash }) => self.add(Task::Fetch(transfer), hash),
            Err(detail) => {
                self.add(Task::Ended, 0);
                let error = StoreError::Entry {
                    region: self.store.label.clone(),
                    page: self.page.number(),
                    detail,
                };
                self.fail_page(0, error);
            }
        }
        self.cut(frame);
    }

    /// Ends a part that has arrived or failed. Damaged bytes are [fetched](IoQueue::fetch) once
    /// more.
    pub(super) fn fetched(
        &mut self,
        part: usize,
        remote: &RemoteStore,
        (transfer, outlook): (SlotTransfer, impl FnOnce() -> Outlook),
        coder: &mut Coder,
        block: Option<&[u8]>,
        result: Result<(), ChannelError>,
    ) {
        if let Err(source) = result {
            // No Good copy can be right: the bytes may have been damaged on their way.
            let outlook = outlook();
            let is_damaged = transfer.damaged != 0 || transfer.decoding.damaged != 0;
            let may_be_right = outlook.good & !transfer.damaged != 0 || outlook.can_decode;
            let all_damaged = is_damaged && !may_be_right;
            let may_look = !transfer.is_second_look && outlook.in_time && outlook.open != 0;
            if all_damaged && may_look {
                self.tally.retries += 1;
                return self.look_again(part, transfer);
            }
            if all_damaged && transfer.is_second_look && source.is_transient() {
                let (region, server) = (&self.store.label, remote.pool.endpoints(transfer.place));
                let (region, server) = (region.clone(), Arc::<str>::from(server));
                return self.fail(part, |page| StoreError::Corrupt {
                    region: region.clone(),
                    page: page.number(),
                    server: server.clone(),
                    detail: "its hash does not match",
                });
            }
            return self.fail(part, self.remote_error(remote, transfer, source));
        }
        let (store, page) = (self.store.clone(), self.page);
        let RunPart { first, pages, .. } = self.parts[part];
        let mut frame = self.take_frame(part);
        let mut damaged: Vec<(usize, &str)> = Vec::new();
        let arrived = frame.as_mut().chunks_exact_mut(store.page_bytes);
        for (number, bytes) in (first..).zip(arrived) {
            let decoded = match block {
                None => Ok(()),
                Some(block) => {
                    let began = Instant::now();
                    let block = &block[..transfer.bytes as usize];
                    let page = page + number;
                    let decoded = coder.decode(
                        &remote.scheme,
                        transfer.form,
                        block,
                        store.seed,
                        page,
                        bytes,
                    );
                    self.tally.decode_ns += began.elapsed().as_nanos() as u64;
                    decoded
                }
            };
            match decoded {
                Err(detail) => damaged.push((number, detail)),
                Ok(()) if codec::hash(bytes, store.seed) != self.hashes[number] => {
                    damaged.push((number, "its hash does not match"));
                }
                Ok(()) => {}
            }
        }
        self.parts[part].frame = Some(frame);
        self.tally.bytes_read += u64::from(transfer.bytes);
        let outlook = (!damaged.is_empty()).then(outlook);
        if outlook.is_some_and(|outlook| outlook.in_time) && transfer.is_stale(remote) {
            // The old extent may have gone back to its server while the READ was under way: zeros
            // or anything else came, and no copy is damaged.
            self.tally.retries += 1;
            self.parts[part].task = Task::Fetch(SlotTransfer {
                attempts: transfer.attempts + 1,
                is_second_look: false,
                ..transfer
            });
            return;
        }
        let session = remote.pool.session(transfer.server);
        if remote.pool.has_copies() {
            self.tally.corrupt += damaged.len() as u64;
            let is_read_again = match outlook {
                Some(outlook) => self.read_another(part, transfer, outlook),
                None => {
                    self.note_right(remote, transfer);
                    false
                }
            };
            if is_read_again {
                self.tally.retries += 1;
                return;
            }
        }
        let may_look = !remote.pool.has_copies() && !transfer.is_second_look;
        if !damaged.is_empty() && may_look && session.loss(true).is_none() {
            self.tally.retries += 1;
            self.parts[part].task = Task::Fetch(SlotTransfer {
                attempts: transfer.attempts + 1,
                is_second_look: true,
                ..transfer
            });
            return;
        }
        self.tally.fills += (pages - damaged.len()) as u64;
        for (number, detail) in damaged {
            // Memory that the server has taken back is no damage.
            let error = match session.loss(true) {
                Some(reason) => {
                    let endpoint = session.endpoint().to_string();
                    let lost = ChannelError::Lost { endpoint, reason };
                    self.remote_error(remote, transfer, lost)(page + number)
                }
                None => {
                    let server = match remote.pool.has_copies() {
                        true => remote.pool.endpoints(transfer.place).into(),
                        false => {
                            self.tally.corrupt += 1;
                            remote.pool.endpoint(transfer.server)
                        }
                    };
                    StoreError::Corrupt {
                        region: store.label.clone(),
                        page: (page + number).number(),
                        server,
                        detail,
                    }
                }
            };
            self.fail_page(number, error);
        }
        self.end(part);
    }

    /// Counts a fill whose bytes are right, and marks the copies that had damaged ones before.
    fn note_right(&mut self, remote: &RemoteStore, transfer: SlotTransfer) {
        self.tally.failovers += u64::from(transfer.member != 0);
        if transfer.is_decoded() {
            let SlotTransfer {
                place,
                changes,
                bytes,
                ..
            } = transfer;
            let home = (transfer.damaged & 1 != 0).then_some(None);
            // The bytes are right without the sources that were left out, and were not with them.
            let out = transfer.decoding.left_out | transfer.decoding.refused;
            for at in home.into_iter().chain(positions(out).map(Some)) {
                remote.pool.mark_extent_damaged(place, at, (changes, bytes));
            }
        } else if let (true, Some(id)) = (transfer.damaged != 0, transfer.extent) {
            let (server, state) = (transfer.server, MemberState::Good);
            let right = Member { server, id, state };
            let bit = 1 << transfer.member;
            let damaged = (transfer.damaged & !bit, transfer.changes);
            remote.pool.mark_damaged(transfer.place, damaged, right);
        }
    }

    /// Notes which copies of a part are damaged. The pages are fetched one by one, each from a copy
    /// or from sources of a decoding that may be right, and after the last of these by a
    /// [second look](Self::look_again). Returns false if there is nothing to fetch.
    fn read_another(&mut self, part: usize, transfer: SlotTransfer, outlook: Outlook) -> bool {
        if !outlook.in_time {
            return false;
        }
        // Damage of decoded bytes is that of a source, and of no copy.
        let bit = match transfer.is_decoded() {
            true => 0,
            false => 1 << transfer.member,
        };
        let damaged = transfer.damaged | bit;
        let (rest, tried) = match transfer.is_second_look {
            true => (outlook.open & !transfer.tried & !bit, transfer.tried | bit),
            false => (outlook.good & !damaged, damaged),
        };
        let again = SlotTransfer {
            attempts: transfer.attempts + 1,
            tried,
            damaged,
            decoding: transfer.decoding_after_damage(),
            ..transfer
        };
        let is_alone = self.parts[part].pages == 1;
        let may_be_right = rest != 0 || outlook.can_decode;
        if is_alone && may_be_right {
            self.parts[part].task = Task::Fetch(again);
        } else if !transfer.is_second_look {
            self.look_again(part, again);
        }
        may_be_right || !transfer.is_second_look
    }

    /// Fetches the pages of a part that came damaged one by one, since each may be right in another
    /// copy. A page alone is fetched from all copies that can be reached, also from those that are
    /// not Good: its hash says that it is right.
    fn look_again(&mut self, part: usize, transfer: SlotTransfer) {
        let RunPart { pages, .. } = self.parts[part];
        let again = SlotTransfer {
            tried: 0,
            is_second_look: pages == 1,
            ..transfer
        };
        let again = match pages {
            1 => again,
            // The damage may be in other pages.
            _ => SlotTransfer {
                damaged: 0,
                decoding: Decoding::default(),
                ..again
            },
        };
        let bytes = transfer.bytes / pages as u32;
        let mut part = part;
        for (number, place) in (1..).zip(transfer.places(pages, self.store.page_bytes)) {
            let next = (number < pages).then(|| self.split(part, 1));
            self.parts[part].task = Task::Fetch(SlotTransfer {
                place,
                bytes,
                ..again
            });
            part = next.unwrap_or(part);
        }
    }
}
