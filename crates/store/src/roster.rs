//! [`Roster`]: a list that grows while other threads read it.
//!
//! The rule it keeps: reading takes no lock and allocates nothing, so that signal handlers may. The
//! downside: each item that is added leaves one older, shorter list behind until the roster ends.

use std::{
    ops::Deref,
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use farpage_signals::Mutex;

/// Upper bound of the servers of a runtime over its life: a page entry names one of 256.
pub(crate) const SERVERS_MAX: usize = 256;

/// List of up to [`SERVERS_MAX`] items.
pub(crate) struct Roster<T> {
    /// Lists, each one item longer than the one before.
    versions: Box<[OnceLock<Box<[T]>>]>,
    /// Index of the newest list. Release on storing pairs with Acquire on reading: the list is
    /// there.
    newest: AtomicUsize,
    /// Held while an item is added.
    adding: Mutex<()>,
}

/// Refusal of an item: the list is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RosterFull;

impl<T: Clone> Roster<T> {
    /// Makes a list of `items`, at most [`SERVERS_MAX`].
    pub(crate) fn new(items: impl IntoIterator<Item = T>) -> Self {
        let first: Box<[T]> = items.into_iter().collect();
        let versions: Box<[OnceLock<Box<[T]>>]> = (first.len()..=SERVERS_MAX)
            .map(|_| OnceLock::new())
            .collect();
        let is_set = versions[0].set(first).is_ok();
        debug_assert!(is_set, "a new cell is empty");
        Self {
            versions,
            newest: AtomicUsize::new(0),
            adding: Mutex::default(),
        }
    }

    /// Adds an item. Returns its index.
    pub(crate) fn push(&self, item: T) -> Result<usize, RosterFull> {
        let _one_at_a_time = self.adding.lock();
        let newest = self.newest.load(Ordering::Acquire);
        let next = self.versions.get(newest + 1).ok_or(RosterFull)?;
        let longer: Box<[T]> = self.iter().cloned().chain([item]).collect();
        let index = longer.len() - 1;
        let is_set = next.set(longer).is_ok();
        debug_assert!(is_set, "one thread at a time adds");
        self.newest.store(newest + 1, Ordering::Release);
        Ok(index)
    }
}

impl<T> Deref for Roster<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let newest = self.newest.load(Ordering::Acquire);
        self.versions[newest]
            .get()
            .expect("stored before its index")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_grows_up_to_its_cap_and_older_views_stay() {
        let roster = Roster::new([0, 1]);
        let before = &roster[..];
        for item in 2..SERVERS_MAX {
            assert_eq!(roster.push(item), Ok(item));
        }
        assert_eq!(roster.push(SERVERS_MAX), Err(RosterFull));
        assert_eq!(before, [0, 1]);
        assert!(roster.iter().copied().eq(0..SERVERS_MAX));
    }
}
