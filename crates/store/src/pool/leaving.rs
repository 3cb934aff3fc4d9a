//! Servers that are being emptied, as a [`SlotPool`] sees them.
//!
//! The rule it keeps: nothing is granted on a server that is being emptied, but for two cases. A
//! named region grows where it has extents, since these stay. A pool none of whose servers stays
//! grows on those that were not reported as empty, since its writes would fail otherwise. Moving
//! what is there is left to the [repairs](crate::repair).

use std::time::Duration;

use super::SlotPool;
use crate::groups::{ExtentGroup, Member};

impl SlotPool {
    /// True if the server is being emptied, or was.
    pub(crate) fn is_leaving(&self, server: u8) -> bool {
        self.health.is_leaving(self.port(server))
    }

    /// True if new memory may be asked for at the server.
    pub(crate) fn may_grant(&self, server: u8) -> bool {
        self.is_usable(server) && !self.is_leaving(server)
    }

    /// True if the server has been silent for less than `dead_after`, and may be asked for memory
    /// when it answers again.
    pub(crate) fn may_grant_soon(&self, server: u8, dead_after: Duration) -> bool {
        let silent = self.health.suspect_for(self.port(server));
        let is_soon = silent.is_some_and(|silent| silent < dead_after);
        is_soon && !self.is_leaving(server) && !self.is_lost(server)
    }

    /// True if the pool may grow on the server, which may be one that leaves: see the head of this
    /// file.
    pub(super) fn may_grow_on(&self, server: u8) -> bool {
        if !self.is_leaving(server) {
            return true;
        }
        let port = self.port(server);
        if self.is_own() && self.bytes_on(port) > 0 {
            return true;
        }
        let stays = |other: u8| !self.is_leaving(other) && !self.is_lost(other);
        let any_stays = (0..self.servers.len()).any(|other| stays(other as u8));
        !any_stays && !self.health.is_emptied(port)
    }

    /// True if the server has lost the program's session.
    fn is_lost(&self, server: u8) -> bool {
        self.session(server).loss(false).is_some()
    }

    /// True if any server is being emptied, or was.
    pub(crate) fn any_leaving(&self) -> bool {
        self.health.any_leaving()
    }

    /// Waits for requests for memory that are under way. Later ones see which servers are being
    /// emptied by now.
    pub(crate) fn finish_grants(&self) {
        drop(self.growing.lock());
    }

    /// Returns the members on servers that are being emptied, each with its position.
    pub(crate) fn leaving(&self, group: &ExtentGroup) -> impl Iterator<Item = (u8, Member)> {
        (group.members()).filter(|(_, member)| self.is_leaving(member.server))
    }

    /// Returns the bytes of the extents that the pool has at a server, by its port.
    pub(crate) fn bytes_on(&self, port: usize) -> u64 {
        let on_port = |(_, member): &(u8, Member)| self.port(member.server) == port;
        let groups = self.groups.all().into_iter().flatten();
        let bytes = |group: ExtentGroup| {
            let members = group.members().filter(on_port).count();
            members as u64 * group.bytes
        };
        groups.map(bytes).sum::<u64>() + self.spare_bytes(|server| self.port(server) == port)
    }

    /// True if the pool has anything at a server, by its port, or owes the server an extent.
    pub(crate) fn is_on(&self, port: usize) -> bool {
        self.bytes_on(port) > 0 || self.owes(port)
    }

    /// Returns the bytes on a server, by its port, that have no Good copy elsewhere.
    pub(crate) fn bytes_only_on(&self, port: usize) -> u64 {
        let is_on_port = |(_, member): &(u8, Member)| self.port(member.server) == port;
        let groups = (0..).zip(self.groups.all());
        let groups = groups.filter_map(|(index, group)| Some((index, group?)));
        let is_elsewhere = |it: &Member| self.port(it.server) != port;
        let is_only_there = |(index, group): &(u32, ExtentGroup)| {
            let view = self.groups.set_of(*index);
            group.members().any(|it| is_on_port(&it))
                && group.good().all(|it| is_on_port(&it))
                && view.is_none_or(|view| view.sources(0, is_elsewhere).is_none())
        };
        (groups.filter(is_only_there))
            .map(|(_, group)| group.bytes)
            .sum()
    }

    /// True if extents are to go back to a server, by its port, once it answers.
    pub(crate) fn owes(&self, port: usize) -> bool {
        let owed = self.owed.lock();
        owed.iter().any(|(server, _)| self.port(*server) == port)
    }

    /// Returns the bytes that are left on servers that are being emptied.
    pub(crate) fn draining_bytes(&self) -> u64 {
        if !self.health.any_leaving() {
            return 0;
        }
        let servers = (0..self.servers.len()).map(|server| server as u8);
        let leaving = servers.filter(|server| self.is_leaving(*server));
        leaving.map(|server| self.bytes_on(self.port(server))).sum()
    }
}
