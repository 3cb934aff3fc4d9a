//! [`Lines`]: the connections of a server by session and line.
//!
//! The rule it keeps: at most one connection of each line serves operations. A newer one closes the
//! older ones and waits until they have left their last operation. Once a client is answered, each
//! earlier operation has taken place or never will. Otherwise a WRITE that seemed lost could land
//! among bytes that were written to the same place later.

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

use crate::stream::PeerStream;

/// Name of a line: its session, and the client's number for it; `None` for the control connection.
pub(super) type LineName = (SessionId, Option<u64>);

/// The connections of a server, over all its listeners. A line is known for as long as it has
/// connections.
#[derive(Debug, Default)]
pub(super) struct Lines {
    /// Connections of each line, oldest first. The first one serves; the others wait to be first.
    table: Mutex<HashMap<LineName, Vec<Arc<Member>>>>,
    /// Signalled when a connection has left.
    left: Condvar,
}

/// A connection of a line.
#[derive(Debug)]
struct Member {
    stream: Weak<PeerStream>,
    /// True once a newer connection has come. Read between system calls. Relaxed: the lock orders
    /// everything else.
    replaced: AtomicBool,
}

/// The right to serve a line. Dropped when the last operation has been left.
#[derive(Debug)]
pub(crate) struct LineHold<'a> {
    lines: &'a Lines,
    name: LineName,
    member: Arc<Member>,
}

impl Lines {
    /// Takes the line `name` over for `stream`: closes its older connections, calls `wake` for
    /// those that wait for something else than their sockets, and waits until all have left. `None`
    /// if some are left at `until`, or if a newer connection has come meanwhile.
    pub(super) fn take(
        &self,
        name: LineName,
        stream: &Arc<PeerStream>,
        until: Instant,
        wake: &dyn Fn(),
    ) -> Option<LineHold<'_>> {
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
        // From here on dropping `held` leaves the line.
        let held = LineHold {
            lines: self,
            name,
            member,
        };
        // Closing may wait for an adapter, so not under the lock.
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

impl LineHold<'_> {
    /// True if a newer connection waits for this one to leave.
    pub(crate) fn is_replaced(&self) -> bool {
        self.member.replaced.load(Ordering::Relaxed)
    }
}

impl Drop for LineHold<'_> {
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
