//! [`Lines`]: which connections of a server are which lines of which sessions.
//!
//! The rule it keeps: of each line at most one connection serves operations. A newer one closes the
//! older ones and waits until they have left their last operation, so that a client that is
//! answered knows: what was under way before has taken place, or never will. Without that, a WRITE
//! that seemed lost could land among bytes that were written to the same place later.

use std::{
    collections::HashMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use farpage_wire::SessionId;
use parking_lot::{Condvar, Mutex};

use crate::stream::Stream;

/// A line: its session, and the number that the client gave it; none for the control connection.
pub(super) type LineName = (SessionId, Option<u64>);

/// The connections of a server, over all its listeners. A line is known for as long as it has
/// connections.
#[derive(Debug, Default)]
pub(super) struct Lines {
    /// Of each line, oldest first. The first one serves; those behind it wait until they are first.
    table: Mutex<HashMap<LineName, Vec<Arc<Member>>>>,
    /// Signalled when a connection has left.
    left: Condvar,
}

/// A connection of a line.
#[derive(Debug)]
struct Member {
    stream: Weak<Stream>,
    /// Set when a newer connection has come, and read between system calls. Relaxed: the lock
    /// orders everything else.
    replaced: AtomicBool,
}

/// The right to serve a line. Dropped when the last operation has been left.
#[derive(Debug)]
pub(super) struct Held<'a> {
    lines: &'a Lines,
    name: LineName,
    member: Arc<Member>,
}

impl Lines {
    /// Takes a line over for `stream`: closes its older connections, calls `wake` for those that
    /// wait for something else than their sockets, and waits until they have left. `None` when they
    /// have not at `until`, or when a newer one has come meanwhile.
    pub(super) fn take(
        &self,
        name: LineName,
        stream: &Arc<Stream>,
        until: Instant,
        wake: &dyn Fn(),
    ) -> Option<Held<'_>> {
        let member = Arc::new(Member {
            stream: Arc::downgrade(stream),
            replaced: AtomicBool::new(false),
        });
        let older = {
            let mut table = self.table.lock();
            let members = table.entry(name).or_default();
            let older = members.clone();
            members.push(Arc::clone(&member));
            older
        };
        // From here on dropping it leaves the line.
        let held = Held {
            lines: self,
            name,
            member,
        };
        // Not under the lock: closing may wait for an adapter.
        for member in &older {
            member.replaced.store(true, Ordering::Relaxed);
            if let Some(stream) = member.stream.upgrade() {
                stream.close();
            }
        }
        if !older.is_empty() {
            wake();
        }
        let mut table = self.table.lock();
        // Wakes older connections that wait here in vain.
        self.left.notify_all();
        while !Arc::ptr_eq(&table[&name][0], &held.member) {
            if held.is_replaced() || self.left.wait_until(&mut table, until).timed_out() {
                drop(table);
                return None;
            }
        }
        drop(table);
        Some(held)
    }
}

impl Held<'_> {
    /// Whether a newer connection waits for this one to leave.
    pub(super) fn is_replaced(&self) -> bool {
        self.member.replaced.load(Ordering::Relaxed)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut table = self.lines.table.lock();
        let members = table
            .get_mut(&self.name)
            .expect("a line with a connection is known");
        members.retain(|member| !Arc::ptr_eq(member, &self.member));
        if members.is_empty() {
            table.remove(&self.name);
        }
        self.lines.left.notify_all();
    }
}
