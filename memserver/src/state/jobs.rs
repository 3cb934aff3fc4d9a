//! Publications that are written to the disk after their answer.
//!
//! The rule it keeps: a name has one [`Job`] at a time, and all extents that the name has before or
//! afterwards are pinned until the job is done. A job that the disk refuses stays with its name,
//! and the name's next publication does it first: that one uses places of the version on the disk.

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

/// The most ranges that a session keeps for its next publications. Further ones are written at once.
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
        let mut ledger = self.ledger.lock();
        let is_done = |ledger: &Ledger| !ledger.names.values().any(|it| it.is_writing);
        while !is_done(&ledger) && !self.written.wait_until(&mut ledger, deadline).timed_out() {}
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

    /// Waits until nobody writes the name's file. Does the job that the disk has refused, if there
    /// is one, for `session`.
    ///
    /// # Errors
    /// The disk takes too long, or refuses the job again.
    pub(super) fn settle_job(
        &self,
        ledger: &mut MutexGuard<'_, Ledger>,
        session: SessionId,
        id: &NameId,
    ) -> Result<(), Refusal> {
        self.wait_written(ledger, id)?;
        let Some(record) = ledger.names.get_mut(id) else {
            return Ok(());
        };
        let Some(Failed { job, .. }) = record.failed.take() else {
            return Ok(());
        };
        record.is_writing = true;
        self.in_disk(ledger, session, || self.write_job(job));
        self.wait_written(ledger, id)?;
        let failed = ledger.names.get(id).and_then(|it| it.failed.as_ref());
        failed.map_or(Ok(()), |failed| {
            Err(Refusal::Invalid(format!(
                "the region's last publication is not on the disk yet: {}",
                failed.reason
            )))
        })
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
