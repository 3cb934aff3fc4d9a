//! Making a name's extents ready for their next holder: quiet, and mapped by nobody else.
//!
//! The rule it keeps: slow work is done while the ledger is unlocked.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use farpage_fabric::{
    host::{Origin, Refusal},
    log::later,
    memory::ExtentMemory,
};
use farpage_wire::SessionId;
use parking_lot::MutexGuard;
use tracing::warn;

use super::{
    State,
    ledger::Ledger,
    records::{ExtentRecord, Leaving, NameId},
};

/// The longest wait for earlier operations. A connection that waits for its client looks once a
/// second whether its leases have ended; `QUIET` is a second more.
const QUIET: Duration = Duration::from_secs(2);

impl State {
    /// Waits for operations that began under an earlier lease of the name's extents and have not
    /// ended: a late WRITE must not land among the next holder's bytes, nor a late READ see them.
    /// Returns the ledger in which the name is free and quiet.
    ///
    /// # Errors
    /// A session holds the name, or the operations do not end in time.
    fn free_and_quiet(&self, id: &NameId) -> Result<MutexGuard<'_, Ledger>, Refusal> {
        let until = Instant::now() + QUIET;
        loop {
            let mut ledger = self.ledger.lock();
            self.wait_name(&mut ledger, id)?;
            let record = ledger.names.get(id).ok_or(Refusal::NotFound)?;
            if record.holder.is_some() {
                return Err(Refusal::InUse);
            }
            record.published()?;
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

    /// Waits as [`free_and_quiet`](Self::free_and_quiet) does, for memory that nobody but the
    /// session's user maps.
    ///
    /// A client that was lent memory over shared memory may map it ever after. If the next holder
    /// is another user, or of unknown user, it gets copies, one extent after the other, made while
    /// the ledger is unlocked: one extent at a time exists twice. The handles that are kept
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
            let read = (foreign.iter())
                .map(|memory| ledger.extents[&memory.id()].views)
                .max();
            if let Some(readers @ 1..) = read {
                return Err(Refusal::Invalid(format!(
                    "the region was held over shm by another user of the server's machine, who may still map it, and it cannot be copied while it is read ({readers} readers): open it when they have closed it"
                )));
            }
            drop(ledger);
            if self.tier.is_some() {
                return Err(Refusal::Invalid(
                    "the region was held over shm by another user of the server's machine, who may still map it, and a server that lends more than its memory makes no copies: copy the region as that user".to_owned(),
                ));
            }
            for memory in foreign {
                self.replace_memory(session, memory)?;
            }
        }
    }

    /// Puts a copy in the place of `old`, memory that nobody leases. The last holder of `old` is
    /// charged for it until the holder has let go.
    ///
    /// The charge comes before the copy, so that nobody is granted the same room meanwhile. There
    /// must be room for memory that somebody has open or mapped. Other memory is gone as soon as
    /// the copy is made, so a full server can do without.
    fn replace_memory(&self, session: SessionId, old: Arc<ExtentMemory>) -> Result<(), Refusal> {
        let is_kept = old.file().is_held_elsewhere().unwrap_or(true);
        let mut ledger = self.ledger.lock();
        ledger.known(session)?;
        let Some(holder) = ledger.mapper_of(&old) else {
            return Ok(());
        };
        let bytes = old.bytes();
        match is_kept {
            true => ledger.accounts.keep(&self.limits, holder, bytes)?,
            false => ledger.accounts.put_extent_on(holder, bytes),
        }
        drop(ledger);
        let fresh = old.copy_afresh();
        let mut ledger = self.ledger.lock();
        // Copying is no silence of the client, whose renewals wait behind this request.
        let renewed = ledger
            .known(session)
            .map(|record| record.renewed = Instant::now());
        // The name may have been removed meanwhile; it cannot have been opened.
        let is_there = ledger.mapper_of(&old).is_some();
        let fresh = match fresh {
            Ok(fresh) if is_there && renewed.is_ok() => fresh,
            not_wanted => {
                ledger.accounts.take_extent_off(holder, bytes);
                drop(ledger);
                renewed?;
                return not_wanted.map(drop).map_err(|error| {
                    let extent = old.id();
                    let refusal = Refusal::Invalid(format!(
                        "the server cannot copy extent {extent}, which another user may still map: {error}"
                    ));
                    later(move || {
                        warn!(%session, %extent, %error, "cannot copy an extent for another user");
                    });
                    refusal
                });
            }
        };
        let record = ledger.extents.get_mut(&old.id());
        let record = record.expect("it is there");
        (record.memory, record.mapped_by) = (fresh, None);
        drop(ledger);
        self.give_back([Leaving {
            memory: old,
            is_kept: false,
            charged: Some(holder),
        }]);
        Ok(())
    }
}
