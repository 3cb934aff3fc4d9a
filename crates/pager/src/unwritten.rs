//! Reason why pages cannot leave, for threads that find no frame: [`Unwritten`].
//!
//! The rule: no call waits here. A thread of the program may be stopped while it looks.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use farpage_signals::Mutex;
use farpage_store::StoreError;

/// Reason why the last write-back failed, or waits for remote memory, until one succeeds.
#[derive(Default)]
pub(crate) struct Unwritten {
    /// False while `why` is empty: then write-backs that succeed take no lock. A hint, so relaxed.
    failed: AtomicBool,
    why: Mutex<Option<Arc<StoreError>>>,
}

impl Unwritten {
    /// Notes the error of a write-back that failed, or waits.
    pub(crate) fn set(&self, error: &StoreError) {
        if let Some(mut why) = self.why.try_lock() {
            *why = Some(Arc::new(error.clone()));
            self.failed.store(true, Ordering::Relaxed);
        }
    }

    /// Notes that a write-back succeeded.
    pub(crate) fn clear(&self) {
        if self.failed.load(Ordering::Relaxed)
            && let Some(mut why) = self.why.try_lock()
        {
            *why = None;
            self.failed.store(false, Ordering::Relaxed);
        }
    }

    /// Returns the reason why pages cannot be written back, if there is one.
    pub(crate) fn why(&self) -> Option<Arc<StoreError>> {
        self.why.try_lock()?.clone()
    }
}
