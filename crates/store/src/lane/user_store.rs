//! Fills from and write-backs to a user's own store: one call per stretch of pages, made by the
//! worker itself or on a thread of the store.
//!
//! The rule it keeps: bytes that we wrote must come back; bytes that others put into the store are
//! theirs to change. After a failed write the store's bytes are unknown, and the page is not clean
//! again before a write succeeds.

use std::sync::Arc;

use super::{
    Lane, OPS_MAX,
    call::StoreCall,
    operation::RunBuffer,
    run::{Direction, LaneRun, Task},
};
use crate::{
    PageIndex, PageStore, Store, StoreError,
    blocking::{BlockingStore, StoreCallError},
    codec,
    entry::PageEntry,
};

impl<F: RunBuffer> Lane<F> {
    pub(super) fn call_user(
        &mut self,
        store: &Arc<PageStore>,
        page: PageIndex,
        frame: F,
        tag: u64,
        way: Direction,
    ) -> Result<(), F> {
        if self.calls_in_flight >= OPS_MAX {
            return Err(frame);
        }
        let mut run = LaneRun::new((tag, store, page), way, self.spare());
        for (page, bytes) in page
            .onwards()
            .zip(frame.as_ref().chunks_exact(store.page_bytes))
        {
            let rehashed = || store.hash(&bytes[..store.page_len(page)]);
            let changed = match way {
                Direction::Fill => Some(0),
                Direction::WriteBack => {
                    (store.compare(page, bytes).err()).map(|hash| hash.unwrap_or_else(rehashed))
                }
            };
            run.tally.write_backs_clean += u64::from(changed.is_none());
            let task = changed.map_or(Task::Ended, |_| Task::Call);
            run.add(task, changed.unwrap_or(0));
        }
        run.cut(frame);
        self.launch(run);
        Ok(())
    }

    /// Begins the calls for the stretches that need one.
    pub(super) fn call(
        &mut self,
        index: usize,
        run: &mut LaneRun<F>,
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

    /// Keeps calls in the lane from now on. The lane's driver takes them by
    /// [`take_call`](Self::take_call) after each turn, until there are none.
    pub fn keep_calls(&mut self) {
        self.keeps_calls = true;
    }

    /// Takes a call to be made at once, without holding up other users of the lane: its store has
    /// returned at once so far. [`end_call`](Self::end_call) gives the call back. Calls of other
    /// stores go to threads of those stores.
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

    /// Expects all calls that were taken to be handed in: their thread does not drive the lane any
    /// more.
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

    /// True if calls are under way that ring when they have returned.
    pub(super) fn has_calls_elsewhere(&self) -> bool {
        self.calls_in_flight > self.calls_by_worker
    }
}

/// Ends a part whose call has returned: its pages are done or have failed.
fn called<F: RunBuffer>(run: &mut LaneRun<F>, call: StoreCall<F>) {
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
                        let (written, unsure) = (false, false);
                        let entry = PageEntry::Kept {
                            hash,
                            written,
                            unsure,
                        };
                        store.table.store(page, entry);
                    }
                }
                run.tally.fills += 1;
            }
            run.tally.bytes_read += len as u64;
        }
        (Direction::WriteBack, Ok(())) => {
            for (number, page) in pages {
                let entry = PageEntry::Kept {
                    hash: run.hashes[number],
                    written: true,
                    unsure: false,
                };
                store.table.store(page, entry);
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
                    let unsure = true;
                    let entry = PageEntry::Kept {
                        hash,
                        written,
                        unsure,
                    };
                    store.table.store(page, entry);
                }
            }
            run.parts[part].frame = Some(frame);
            return run.fail(part, failure(&store, &**blocking.store, way, error));
        }
    }
    run.parts[part].frame = Some(frame);
    run.end(part);
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
