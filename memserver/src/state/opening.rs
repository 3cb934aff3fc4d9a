//! Making a name's extents ready for their next holder: quiet, and mapped by nobody else.
//!
//! The rule it keeps: what takes time is done while the ledger is unlocked.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use farpage_fabric::{
    host::{Origin, Refusal},
    memory::ExtentMemory,
};
use farpage_wire::SessionId;
use parking_lot::MutexGuard;
use tracing::warn;

use super::{
    State,
    ledger::{ExtentRecord, Leaving, Ledger},
    names::NameId,
};

/// A connection that waits for its client looks once a second whether its leases have ended; this
/// is a second more.
const QUIET: Duration = Duration::from_secs(2);

impl State {
    /// Waits for operations that began under an earlier lease of the name's extents and have not
    /// ended: a late WRITE must not land among the next holder's bytes, nor a late READ see them.
    /// Returns the ledger in which the name is free and quiet.
    ///
    /// # Errors
    /// Somebody holds it, or the operations do not end in time.
    fn free_and_quiet(&self, id: &NameId) -> Result<MutexGuard<'_, Ledger>, Refusal> {
        let until = Instant::now() + QUIET;
        loop {
            let ledger = self.ledger.lock();
            let record = ledger.names.get(id).ok_or(Refusal::NotFound)?;
            if record.holder.is_some() {
                return Err(Refusal::InUse);
            }
            // Nobody leases these handles: each beyond the ledger's own belongs to an operation.
            let mut extents = record.extents.iter();
            if !extents.any(|id| Arc::strong_count(&ledger.extents[id].memory) > 1) {
                return Ok(ledger);
            }
            drop(ledger);
            if Instant::now() >= until {
                return Err(Refusal::InUse);
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// As [`free_and_quiet`](Self::free_and_quiet), with memory that nobody but the session's user
    /// maps.
    ///
    /// Who was lent memory over shared memory may map it ever after. The next holder who is not
    /// that user, or whom the system does not say, gets copies, one extent after the other, made
    /// while the ledger is unlocked: one extent at a time exists twice. The handles that are kept
    /// meanwhile make other sessions wait.
    pub(super) fn free_and_private(
        &self,
        session: SessionId,
        id: &NameId,
    ) -> Result<MutexGuard<'_, Ledger>, Refusal> {
        loop {
            let mut ledger = self.free_and_quiet(id)?;
            let user = ledger.known(session)?.origin;
            let is_foreign = |extent: &&ExtentRecord| {
                let by = extent.mapped_by;
                by.is_some_and(|by| by != user || by == Origin::Unknown)
            };
            let foreign: Vec<Arc<ExtentMemory>> = (ledger.names[id].extents.iter())
                .map(|id| &ledger.extents[id])
                .filter(is_foreign)
                .map(|extent| extent.memory.clone())
                .collect();
            if foreign.is_empty() {
                return Ok(ledger);
            }
            drop(ledger);
            for memory in foreign {
                self.replace_memory(session, memory)?;
            }
        }
    }

    /// Puts a copy in the place of an extent's memory that nobody leases.
    fn replace_memory(&self, session: SessionId, old: Arc<ExtentMemory>) -> Result<(), Refusal> {
        let fresh = old.copy_afresh().map_err(|error| {
            let extent = old.id();
            warn!(%session, %extent, %error, "cannot copy an extent for another user");
            Refusal::Invalid(format!(
                "the server cannot copy extent {extent}, which another user may still map: {error}"
            ))
        })?;
        let mut ledger = self.ledger.lock();
        // Copying is no silence of the client, whose renewals wait behind this request.
        ledger.known(session)?.renewed = Instant::now();
        let record = ledger.extents.get_mut(&old.id());
        // The name may have been removed meanwhile; it cannot have been opened.
        let Some(record) = record.filter(|record| Arc::ptr_eq(&record.memory, &old)) else {
            return Ok(());
        };
        record.memory = fresh;
        let charged = record.mapped_by.take();
        if let Some(holder) = charged {
            ledger.accounts.put_extent_on(holder, old.bytes());
        }
        drop(ledger);
        self.give_back([Leaving {
            memory: old,
            is_kept: false,
            charged,
        }]);
        Ok(())
    }
}
