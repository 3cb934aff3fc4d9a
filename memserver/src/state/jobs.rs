//! Publications that are written to the disk after their answer.
//!
//! The rule it keeps: a name has one [`Job`] at a time, and all extents that the name has before or
//! afterwards are pinned until the job is done. A job that the disk refuses stays with its name,
//! and the name's next publication has it done first: that one uses places of the version on the
//! disk.

use std::{
    sync::mpsc::{self, Receiver},
    time::Instant,
};

use farpage_fabric::{host::Refusal, log::later};
use farpage_wire::{ExtentRange, Persistence, SessionId};
use parking_lot::MutexGuard;
use tracing::warn;

use super::{
    State,
    ledger::Ledger,
    records::{Failed, Job, NameId, SessionRecord},
};

/// The most ranges that a session keeps for its next publications. Further ones are written at
/// once.
const RANGES_MAX: usize = 1 << 16;
/// The most bytes that a session keeps for its next publications, so that a job is soon done.
const BYTES_MAX: u64 = 1 << 30;

impl State {
    /// True if publications are written after their answer.
    pub(crate) fn has_jobs(&self) -> bool {
        let durable = self.durable.as_ref();
        durable.is_some_and(|durable| durable.when() == Persistence::Soon)
    }

    /// Returns the publications that are written after their answer, for the writer's thread.
    pub(crate) fn take_jobs(&self) -> Receiver<Job> {
        let (jobs, left) = mpsc::channel();
        *self.jobs.lock() = Some(jobs);
        left
    }

    /// Lets [`write_publications`](Self::write_publications) return when all jobs are done.
    pub(crate) fn end_jobs(&self) {
        *self.jobs.lock() = None;
    }

    /// Writes publications until `jobs` ends.
    pub(crate) fn write_publications(&self, jobs: &Receiver<Job>) {
        while let Ok(job) = jobs.recv() {
            self.write_job(job);
        }
    }

    /// Waits until all jobs are done, or until `deadline`. True if they are. Logs the names whose
    /// last publication is not on the disk.
    pub(crate) fn wait_jobs(&self, deadline: Instant) -> bool {
        let is_done = self.wait_written(deadline);
        let ledger = self.ledger.lock();
        for (id, record) in &ledger.names {
            if record.is_writing || record.failed.is_some() {
                let (owner, name) = (id.owner, id.name.clone());
                let reason = match &record.failed {
                    Some(failed) => failed.reason.clone(),
                    None => "its disk takes too long".to_owned(),
                };
                later(move || {
                    warn!(%owner, name, reason, "this server ends, and the last publication is not on the disk: the one before is");
                });
            }
        }
        is_done
    }

    /// Waits until no name's file is being written, or until `deadline`. True if none is.
    pub(crate) fn wait_written(&self, deadline: Instant) -> bool {
        let mut ledger = self.ledger.lock();
        let is_done = |ledger: &Ledger| !ledger.names.values().any(|it| it.is_writing);
        while !is_done(&ledger) && !self.written.wait_until(&mut ledger, deadline).timed_out() {}
        is_done(&ledger)
    }

    /// Hands `job` to the writer. Without a writer, does the job.
    pub(super) fn follow_up(&self, job: Job) {
        let jobs = self.jobs.lock();
        let left = match &*jobs {
            Some(writer) => writer.send(job).err().map(|unsent| unsent.0),
            None => Some(job),
        };
        drop(jobs);
        if let Some(job) = left {
            self.write_job(job);
        }
    }

    /// Waits until nobody writes the name's file, and has the job done again that the disk has
    /// refused. False if that takes beyond `until`.
    ///
    /// # Errors
    /// The disk has refused the job again.
    pub(super) fn settle_job(
        &self,
        ledger: &mut MutexGuard<'_, Ledger>,
        id: &NameId,
        until: Instant,
    ) -> Result<bool, Refusal> {
        loop {
            while ledger.names.get(id).is_some_and(|it| it.is_writing) {
                if self.written.wait_until(ledger, until).timed_out() {
                    return Ok(false);
                }
            }
            let Some(record) = ledger.names.get_mut(id) else {
                return Ok(true);
            };
            match record.failed.take() {
                None => return Ok(true),
                Some(mut failed) if failed.job.is_retry => {
                    let reason = failed.reason.clone();
                    failed.job.is_retry = false;
                    record.failed = Some(failed);
                    return Err(Refusal::Invalid(format!(
                        "the region's last publication is not on the disk yet: {reason}"
                    )));
                }
                Some(Failed { job, .. }) => {
                    record.is_writing = true;
                    let is_retry = true;
                    MutexGuard::unlocked(ledger, || self.follow_up(Job { is_retry, ..job }));
                }
            }
        }
    }

    /// Works on the disk for `session` while the ledger is unlocked. The session's client, whose
    /// renewals wait behind its request, lives meanwhile.
    pub(super) fn in_disk<T>(
        &self,
        ledger: &mut MutexGuard<'_, Ledger>,
        session: SessionId,
        work: impl FnOnce() -> T,
    ) -> T {
        if let Ok(record) = ledger.known(session) {
            record.in_disk += 1;
        }
        let result = MutexGuard::unlocked(ledger, work);
        if let Ok(record) = ledger.known(session) {
            record.in_disk -= 1;
            record.renewed = Instant::now();
        }
        result
    }

    fn write_job(&self, job: Job) {
        let durable = self.durable.as_ref().expect("a job is for the disk");
        let Job { id, binding, .. } = &job;
        let bytes = self.ledger.lock().written(&job.ranges);
        let written = durable.write(&bytes);
        let written = written.and_then(|()| durable.bind(id.owner, &id.name, binding));
        // The handles would keep the next client from the memory.
        drop(bytes);
        let mut ledger = self.ledger.lock();
        match written {
            Ok(()) => ledger.name(id).on_disk = binding.version,
            Err(reason) if durable.check().is_ok() => {
                let (owner, name, says) = (id.owner, id.name.clone(), reason.clone());
                later(move || {
                    warn!(%owner, name, reason = says, "a publication is not on the disk: the name's next one tries again");
                });
                let id = id.clone();
                ledger.name(&id).failed = Some(Failed { reason, job });
                ledger.stop_writing(&id);
                drop(ledger);
                self.written.notify_all();
                return;
            }
            // Nothing is written any more, and the log says why.
            Err(_) => {}
        }
        self.end_writing(ledger, id, &job.pinned);
    }
}

impl Ledger {
    /// Keeps `ranges` for the name's next publication by `session`. False, and nothing is kept, if
    /// the session has too many.
    pub(super) fn keep_for_later(
        &mut self,
        session: SessionId,
        id: &NameId,
        ranges: &[ExtentRange],
    ) -> bool {
        let names = self
            .sessions
            .get(&session)
            .map(|it: &SessionRecord| &it.names);
        let kept = names
            .into_iter()
            .flatten()
            .map(|id| &self.names[id].unwritten);
        let (mut count, mut bytes) = (ranges.len(), 0);
        for range in kept
            .inspect(|kept| count += kept.len())
            .flatten()
            .chain(ranges)
        {
            bytes += range.bytes;
        }
        let record = self.names.get_mut(id);
        let Some(record) = record.filter(|_| count <= RANGES_MAX && bytes <= BYTES_MAX) else {
            return false;
        };
        for range in ranges {
            match record.unwritten.last_mut() {
                Some(last) if last.is_followed_by(range) => last.bytes += range.bytes,
                _ => record.unwritten.push(*range),
            }
        }
        true
    }

    /// Notes that nobody writes the name's file any more.
    pub(super) fn stop_writing(&mut self, id: &NameId) {
        let record = self.name(id);
        record.is_writing = false;
        if std::mem::take(&mut record.is_unsettled) {
            self.settle(id);
        }
    }
}
