//! Fills from and write-backs to a user's own store: one call per stretch of pages, on a thread of
//! the store.
//!
//! The rule it keeps: what was written must come back; what others put into the store is theirs to
//! change. After a write that failed, what the store holds is unknown, and the page is never again
//! clean before a write succeeds.

use std::sync::Arc;

use crossbeam_channel::Sender;

use super::{
    Frame, Lane, OPS_MAX,
    run::{Run, Task, Way},
};
use crate::{
    PageIndex, PageStore, Store, StoreError,
    blocking::{BlockingStore, CallError, Waker, Work, call},
    codec,
    entry::Entry,
};

/// One call of a user's store.
pub(super) struct Call<F> {
    index: usize,
    part: usize,
    store: Arc<dyn Store>,
    way: Way,
    offset: u64,
    /// May be less than the frame holds: the region's last page.
    len: usize,
    frame: F,
    result: Result<(), CallError>,
    reply: Sender<Box<Call<F>>>,
    waker: Arc<Waker>,
}

impl<F: Frame> Call<F> {
    fn perform(&mut self) {
        let Self {
            store,
            offset,
            len,
            frame,
            ..
        } = self;
        self.result = match self.way {
            Way::Fill => call(|| store.read(*offset, &mut frame.as_mut()[..*len])),
            Way::WriteBack => call(|| store.write(*offset, &frame.as_ref()[..*len])),
        };
    }
}

impl<F: Frame> Work for Call<F> {
    fn run(mut self: Box<Self>) {
        self.perform();
        let (reply, waker) = (self.reply.clone(), self.waker.clone());
        // A lane that is gone wants no answer.
        if reply.send(self).is_ok() {
            waker.wake();
        }
    }
}

impl<F: Frame> Lane<F> {
    pub(super) fn call_user(
        &mut self,
        store: &Arc<PageStore>,
        page: PageIndex,
        frame: F,
        tag: u64,
        way: Way,
    ) -> Result<(), F> {
        if self.calls_in_flight >= OPS_MAX {
            return Err(frame);
        }
        let mut run = Run::new((tag, store, page), way, self.spare());
        for (page, bytes) in page
            .onwards()
            .zip(frame.as_ref().chunks_exact(store.page_bytes))
        {
            let hash = match way {
                Way::Fill => 0,
                Way::WriteBack => codec::hash(&bytes[..store.page_len(page)], store.seed),
            };
            let clean = way == Way::WriteBack
                && matches!(store.table.load(page), Entry::Kept { hash: old, unsure: false, .. } if old == hash);
            run.tally.write_backs_clean += u64::from(clean);
            run.add(if clean { Task::Ended } else { Task::Call }, hash);
        }
        run.cut(frame);
        self.launch(run);
        Ok(())
    }

    /// Hands the stretches that need a call to the store.
    pub(super) fn call(&mut self, index: usize, run: &mut Run<F>, blocking: &BlockingStore) {
        for part in 0..run.parts.len() {
            if !matches!(run.parts[part].task, Task::Call) {
                continue;
            }
            let first = run.page + run.parts[part].first;
            let offset = first.offset(run.store.page_bytes) as u64;
            let len = (run.parts[part].pages * run.store.page_bytes) as u64;
            let mut call = Call {
                index,
                part,
                store: blocking.store.clone(),
                way: run.way,
                offset,
                len: len.min(run.store.bytes - offset) as usize,
                frame: run.take_frame(part),
                result: Ok(()),
                reply: self.ended_calls_sender.clone(),
                waker: self.waker.clone(),
            };
            if blocking.store.may_block() {
                self.calls_in_flight += 1;
                blocking.submit(Box::new(call));
            } else {
                call.perform();
                called(run, call);
            }
        }
    }

    /// A call that was handed to a thread has returned.
    pub(super) fn finish_call(&mut self, call: Call<F>) {
        self.calls_in_flight -= 1;
        let index = call.index;
        let mut run = self.take(index);
        called(&mut run, call);
        self.put(index, run);
    }
}

/// A part is done, or is not.
fn called<F: Frame>(run: &mut Run<F>, call: Call<F>) {
    let Call {
        part,
        store: user,
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
        (Way::Fill, Ok(())) => {
            frame.as_mut()[len..].fill(0);
            for ((number, page), bytes) in pages.zip(frame.as_ref().chunks(store.page_bytes)) {
                let hash = codec::hash(&bytes[..store.page_len(page)], store.seed);
                match store.table.load(page) {
                    Entry::Kept {
                        hash: old,
                        written: true,
                        ..
                    } if old != hash => {
                        run.tally.corrupt += 1;
                        let error = StoreError::Corrupt {
                            region: store.label.clone(),
                            page: page.number(),
                            server: user.name().into(),
                            detail: "its hash does not match what was last written",
                        };
                        run.fail_page(number, error);
                        continue;
                    }
                    Entry::Kept { written: true, .. } => {}
                    _ => {
                        let (written, unsure) = (false, false);
                        let entry = Entry::Kept {
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
        (Way::WriteBack, Ok(())) => {
            for (number, page) in pages {
                let entry = Entry::Kept {
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
                if way == Way::WriteBack
                    && let Entry::Kept { hash, written, .. } = store.table.load(page)
                {
                    let unsure = true;
                    let entry = Entry::Kept {
                        hash,
                        written,
                        unsure,
                    };
                    store.table.store(page, entry);
                }
            }
            run.parts[part].frame = Some(frame);
            return run.fail(part, failure(&store, &*user, way, error));
        }
    }
    run.parts[part].frame = Some(frame);
    run.end(part);
}

fn failure(
    store: &PageStore,
    user: &dyn Store,
    way: Way,
    error: CallError,
) -> impl Fn(PageIndex) -> StoreError + use<> {
    let (region, store, operation) = (store.label.clone(), user.name(), way.operation());
    move |page| match &error {
        CallError::Io(error) => StoreError::User {
            region: region.clone(),
            page: page.number(),
            store: store.clone(),
            operation,
            kind: error.kind(),
            message: error.to_string(),
        },
        CallError::Panic(message) => StoreError::Panicked {
            region: region.clone(),
            page: page.number(),
            store: store.clone(),
            operation,
            message: message.clone(),
        },
    }
}
