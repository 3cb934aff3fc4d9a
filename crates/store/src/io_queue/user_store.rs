//! Fills from and write-backs to a user's own store: one call per stretch of pages, made by the
//! worker itself or on a thread of the store.
//!
//! The rule it keeps: bytes that we wrote must come back; bytes that others put into the store are
//! theirs to change. After a failed write the store's bytes are unknown, and the page is not clean
//! again before a write succeeds.

use std::sync::Arc;

use super::{
    IoQueue,
    run::{Direction, IoRun, RunBuffer, StoreCall, Task},
};
use crate::{
    PageIndex, PageStore, Store, StoreError,
    blocking::{BlockingStore, StoreCallError},
    codec,
    entry::PageEntry,
};

impl<R, F: RunBuffer> IoQueue<R, F> {
    /// Begins the calls for the stretches that need one.
    pub(super) fn call(
        &mut self,
        index: usize,
        run: &mut IoRun<R, F>,
        blocking: &Arc<BlockingStore>,
    ) {
        for part in 0..run.parts.len() {
            if !matches!(run.parts[part].task, Task::Call) {
                continue;
            }
            let first = run.page + run.parts[part].first;
            let offset = first.offset(run.store.page_bytes) as u64;
            let len = (run.parts[part].pages * run.store.page_bytes) as u64;
            let mut call = StoreCall {
                index,
                part,
                blocking: blocking.clone(),
                way: run.way,
                offset,
                len: len.min(run.store.bytes - offset) as usize,
                frame: run.take_frame(part),
                result: Ok(()),
                by_worker: false,
                reply: self.ended_calls_sender.clone(),
                waker: self.waker.clone(),
            };
            if blocking.is_workers() && !(self.keeps_calls && blocking.store.may_block()) {
                call.make();
                called(run, call);
                continue;
            }
            self.calls_in_flight += 1;
            if self.keeps_calls {
                self.kept_calls.push_back(call);
            } else {
                blocking.submit(Box::new(call));
            }
        }
    }

    /// Keeps calls in the I/O queue from now on. The I/O queue's driver takes them by
    /// [`take_call`](Self::take_call) after each turn, until there are none.
    pub fn keep_calls(&mut self) {
        self.keeps_calls = true;
    }

    /// Takes a call to be made at once, without holding up other users of the I/O queue: its store
    /// has returned at once so far. [`end_call`](Self::end_call) gives the call back. Calls of
    /// other stores go to threads of those stores.
    pub fn take_call(&mut self) -> Option<StoreCall<F>> {
        while let Some(mut call) = self.kept_calls.pop_front() {
            let blocking = call.blocking.clone();
            if blocking.is_trusted(call.len) {
                blocking.enter();
                call.by_worker = true;
                self.calls_by_worker += 1;
                return Some(call);
            }
            blocking.submit(Box::new(call));
        }
        None
    }

    /// Ends a call that was taken and has returned.
    pub fn end_call(&mut self, call: StoreCall<F>) {
        self.calls_by_worker -= 1;
        self.finish_call(call);
    }

    /// Expects all calls that were taken to be handed in: their thread does not drive the I/O queue
    /// any more.
    pub fn await_calls(&mut self) {
        self.calls_by_worker = 0;
    }

    /// Ends the calls that were handed in.
    pub(super) fn finish_calls(&mut self) {
        while let Ok(call) = self.ended_calls.try_recv() {
            self.finish_call(*call);
        }
    }

    fn finish_call(&mut self, call: StoreCall<F>) {
        self.calls_in_flight -= 1;
        let index = call.index;
        let mut run = self.take(index);
        called(&mut run, call);
        self.put(index, run);
    }
}

impl<R, F: RunBuffer> IoRun<R, F> {
    /// Cuts a run into stretches of pages that need a call, and of unchanged ones.
    pub(super) fn cut_calls(&mut self, frame: F) {
        let store = self.store.clone();
        let pages = frame.as_ref().chunks_exact(store.page_bytes);
        for (page, bytes) in self.page.onwards().zip(pages) {
            let rehashed = || store.hash(&bytes[..store.page_len(page)]);
            let changed = match self.way {
                Direction::Fill => Some(0),
                Direction::WriteBack => (store.compare(page, bytes, None).err())
                    .map(|hash| hash.unwrap_or_else(rehashed)),
            };
            self.tally.write_backs_clean += u64::from(changed.is_none());
            let task = changed.map_or(Task::Ended, |_| Task::Call);
            self.add(task, changed.unwrap_or(0));
        }
        self.cut(frame);
    }
}

/// Ends a part whose call has returned: its pages are done or have failed.
fn called<R, F: RunBuffer>(run: &mut IoRun<R, F>, call: StoreCall<F>) {
    let StoreCall {
        part,
        blocking,
        way,
        len,
        mut frame,
        result,
        ..
    } = call;
    let store = run.store.clone();
    let (page, first) = (run.page, run.parts[part].first);
    let pages = (first..first + run.parts[part].pages).map(|number| (number, page + number));
    match (way, result) {
        (Direction::Fill, Ok(())) => {
            frame.as_mut()[len..].fill(0);
            for ((number, page), bytes) in pages.zip(frame.as_ref().chunks(store.page_bytes)) {
                let hash = codec::hash(&bytes[..store.page_len(page)], store.seed);
                match store.table.load(page) {
                    PageEntry::Kept {
                        hash: old,
                        written: true,
                        ..
                    } if old != hash => {
                        run.tally.corrupt += 1;
                        let error = StoreError::Corrupt {
                            region: store.label.clone(),
                            page: page.number(),
                            server: blocking.store.name().into(),
                            detail: "its hash does not match what was last written",
                        };
                        run.fail_page(number, error);
                        continue;
                    }
                    PageEntry::Kept { written: true, .. } => {}
                    _ => {
                        store.table.store(page, kept(hash, false, false));
                    }
                }
                run.tally.fills += 1;
            }
            run.tally.bytes_read += len as u64;
        }
        (Direction::WriteBack, Ok(())) => {
            for (number, page) in pages {
                (store.table).store(page, kept(run.hashes[number], true, false));
                run.tally.write_backs_raw += 1;
            }
            run.tally.bytes_written += len as u64;
            run.tally.bytes_plain += len as u64;
            run.tally.bytes_stored += len as u64;
        }
        (_, Err(error)) => {
            for (_, page) in pages {
                if way == Direction::WriteBack
                    && let PageEntry::Kept { hash, written, .. } = store.table.load(page)
                {
                    store.table.store(page, kept(hash, written, true));
                }
            }
            run.parts[part].frame = Some(frame);
            return run.fail(part, failure(&store, &**blocking.store, way, error));
        }
    }
    run.parts[part].frame = Some(frame);
    run.end(part);
}

/// Returns the entry of a page that the user's store keeps.
fn kept(hash: u128, written: bool, unsure: bool) -> PageEntry {
    PageEntry::Kept {
        hash,
        written,
        unsure,
    }
}

fn failure(
    store: &PageStore,
    user: &dyn Store,
    way: Direction,
    error: StoreCallError,
) -> impl Fn(PageIndex) -> StoreError + use<> {
    let (region, store, operation) = (store.label.clone(), user.name(), way.operation());
    move |page| match &error {
        StoreCallError::Io(error) => StoreError::User {
            region: region.clone(),
            page: page.number(),
            store: store.clone(),
            operation,
            kind: error.kind(),
            message: error.to_string(),
        },
        StoreCallError::Panic(message) => StoreError::Panicked {
            region: region.clone(),
            page: page.number(),
            store: store.clone(),
            operation,
            message: message.clone(),
        },
    }
}
