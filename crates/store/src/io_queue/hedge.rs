//! Servers that are silent with their connections open: *hedges*, READs that are sent again to
//! another copy because their answers are late, and the end of connections that have been silent
//! for too long.
//!
//! The rule it keeps: slowness is relative. Nothing happens while all servers that pages could be
//! read from are slow, and at most one READ in 20 is hedged. The first answer counts. The later one
//! lands in a [buffer of its own](super::late) and is dropped.
//!
//! A request whose answer is half late makes its server *slow*, for all I/O queues, until one of
//! its answers is in time. READs go elsewhere meanwhile, but for a probe now and then. A slow
//! server is still written to. A WRITE, or a READ that cannot be hedged, for which nothing at all
//! has come for [`SILENCE`] times the patience with the server, breaks its connection: what then
//! happens to all requests there is what happens when a server dies.
//!
//! The clock is not read for a request that is answered before the next *look*, and the age of any
//! other one counts from the first look that finds it under way. Requests for pages without copies
//! are not looked at.
//!
//! Deliberately absent: hedges of the READs that a page is decoded from. They have no copies.

use std::time::{Duration, Instant};

use farpage_fabric::ChannelError;

use super::{
    IoQueue,
    allowance::{LOOK, READS_PER_HEDGE},
    late::{LateRead, LateReads},
    place_of,
    run::{Direction, IoRun, READ_BYTES_MAX, RunBuffer, SlotTransfer, Task},
    sources::SourceReads,
    staging::IoBuf,
    tag_of,
};
use crate::{
    PageStore,
    groups::{ExtentGroup, Member},
    parity::positions,
    remote::{Backing, RemoteStore},
};

/// Multiple of the patience with a server after which a silent connection is given up, and the
/// shortest such time: longer than a busy machine mostly keeps a server from its processor.
const SILENCE: u32 = 2;
const SILENCE_MIN: Duration = Duration::from_millis(25);
/// Delay of a look after which the thread stood still, and may lack answers that have come.
const STILL: Duration = Duration::from_millis(2);
/// Buffers for late answers that a queue of signal handlers keeps.
const PREPARED: usize = 2;

/// Wait for the answer of a request.
struct Wait {
    /// Number of the port.
    port: usize,
    /// Time since the request was first seen under way.
    age: Duration,
    /// Time since the server was last heard, or the request was first seen.
    silence: Duration,
    /// Patience with the server.
    patience: Duration,
}

impl Wait {
    /// True if the server is slow.
    fn is_slow(&self) -> bool {
        self.age >= self.patience / 2
    }

    /// True if the answer is late.
    fn is_late(&self) -> bool {
        self.age >= self.patience
    }

    /// True if the connection is silent for too long.
    fn is_silent(&self) -> bool {
        self.silence >= SILENCE_MIN.max(SILENCE * self.patience)
    }
}

impl<R, F: RunBuffer> IoQueue<R, F> {
    /// Keeps buffers for late answers to a fill of `pages` pages, if the store has copies.
    pub(super) fn prepare_hedges(&mut self, store: &PageStore, pages: usize) {
        if let Backing::Remote(remote) = &store.backing
            && remote.pool.has_copies()
        {
            let bytes = (pages * store.page_bytes).min(READ_BYTES_MAX as usize);
            let bytes = bytes.max(store.page_bytes);
            self.hedges.late.prepare(bytes, PREPARED);
        }
    }

    /// Looks at the requests under way, if it is time. Call after the channels were polled.
    pub(super) fn look_for_silence(&mut self) {
        if !self.hedges.is_used {
            return;
        }
        if self.ops_in_flight == 0 {
            self.hedges.look_at = None;
            return;
        }
        let now = Instant::now();
        let look_at = *self.hedges.look_at.get_or_insert(now + LOOK);
        if now < look_at {
            return;
        }
        self.hedges.look_at = Some(now + LOOK);
        self.ports.iter_mut().for_each(|port| port.note_look(now));
        // 1. All slow servers are known before any READ goes elsewhere.
        let stood_still = now - look_at > STILL;
        self.for_each_wait(now, |io, _, wait| {
            if wait.is_slow() && !stood_still {
                io.ports[wait.port].note_late();
            }
        });
        if stood_still {
            return;
        }
        // 2. What is late goes elsewhere, or ends its connection.
        self.for_each_wait(now, |io, tag, wait| {
            let is_hedged = wait.is_late() && !SourceReads::is_one(tag) && io.hedge(tag);
            if !is_hedged && wait.is_silent() && io.has_prompt_port() {
                io.ports[wait.port].give_up_channel(wait.silence);
            }
        });
    }

    /// Calls `look` for each request under way that is looked at, with its tag.
    fn for_each_wait(&mut self, now: Instant, look: impl Fn(&mut Self, u64, Wait)) {
        for index in 0..self.runs.len() {
            let parts = self.runs[index].as_ref().map_or(0, |run| run.parts.len());
            for part in 0..parts {
                let tag = tag_of(index, part);
                if let Some(wait) = self.wait_for(tag, now) {
                    look(self, tag, wait);
                }
            }
        }
        for tag in self.sources.tags() {
            if let Some(wait) = self.wait_for(tag, now) {
                look(self, tag, wait);
            }
        }
    }

    /// Sees a request under way, and returns the wait for its answer. `None` if there is no such
    /// request, or it is not looked at.
    fn wait_for(&mut self, tag: u64, now: Instant) -> Option<Wait> {
        let (port, seen) = if SourceReads::is_one(tag) {
            let read = self.sources.find(tag)?;
            read.owner?;
            self.sources.see(tag, now);
            (read.port, read.seen)
        } else {
            let (index, part) = place_of(tag);
            let run = self.runs[index].as_mut()?;
            let Task::Moving(transfer) = run.parts.get(part)?.task else {
                return None;
            };
            let pool = &run.store.remote_backing().pool;
            if !pool.has_copies() || transfer.is_decoded() {
                return None;
            }
            let port = pool.port(transfer.server);
            let seen = run.parts[part].seen;
            run.parts[part].seen.get_or_insert(now);
            (port, seen)
        };
        let seen = seen.unwrap_or(now);
        let since = |moment: Instant| now.saturating_duration_since(moment);
        let way = &self.ports[port];
        way.is_open().then(|| Wait {
            port,
            age: since(seen.max(way.opened())),
            silence: since(seen.max(way.heard())),
            patience: way.patience(),
        })
    }

    /// True if a server answers as it should.
    fn has_prompt_port(&self) -> bool {
        let mut ports = self.ports.iter();
        ports.any(|port| port.is_open() && port.is_prompt())
    }

    /// Sends a READ whose answer is late to another copy, or to the sources of a decoding. False if
    /// that is not possible, or not allowed now.
    fn hedge(&mut self, tag: u64) -> bool {
        let (index, part) = place_of(tag);
        let run = self.run_of(tag);
        let (late, seen) = (run.moving(part), run.parts[part].seen);
        let (Direction::Fill, Some(seen)) = (run.way, seen) else {
            return false;
        };
        let store = run.store.clone();
        let remote = store.remote_backing();
        let group = remote.pool.group(late.place);
        let group = group.filter(|group| group.changes == late.changes && !late.is_second_look);
        let Some(group) = group.filter(|_| self.hedges.credit >= READS_PER_HEDGE) else {
            return false;
        };
        let mut hedge = SlotTransfer {
            tried: late.tried | 1 << late.member,
            attempts: late.attempts + 1,
            ..late
        };
        if !self.aim_prompt(remote, &group, &mut hedge) {
            return false;
        }
        let read = LateRead {
            place: (index, part),
            transfer: late,
            seen,
        };
        let Some((late_tag, spare)) = self.hedges.late.begin(read) else {
            return false;
        };
        let port = remote.pool.port(late.server);
        let buf = match self.ports[port].exchange(tag, (late_tag, IoBuf::Staging(spare))) {
            Ok(buf) => buf,
            Err(spare) => {
                self.end_late(late_tag, spare);
                return false;
            }
        };
        self.hedges.credit -= READS_PER_HEDGE;
        let mut run = self.take(index);
        run.parts[part].late = Some(late_tag);
        run.tally.hedges += 1;
        self.runs[index] = Some(run);
        self.send_again(tag, hedge, buf);
        true
    }

    /// Directs a READ to a copy whose server is not slow, or to the sources of a decoding whose
    /// servers are not. False if there are none.
    fn aim_prompt(
        &mut self,
        remote: &RemoteStore,
        group: &ExtentGroup,
        transfer: &mut SlotTransfer,
    ) -> bool {
        let is_prompt = |(at, member): &(u8, Member)| {
            let port = &self.ports[remote.pool.port(member.server)];
            transfer.tried & (1 << at) == 0 && port.is_open() && port.is_prompt()
        };
        match group.good().find(is_prompt) {
            Some(copy) => transfer.aim(copy),
            None => return group.column.is_some() && self.aim_prompt_decoding(remote, transfer),
        }
        true
    }

    /// Directs a READ to the sources of a decoding, if none of their servers is slow.
    pub(super) fn aim_prompt_decoding(
        &mut self,
        remote: &RemoteStore,
        transfer: &mut SlotTransfer,
    ) -> bool {
        let mut decoded = *transfer;
        let view = remote.pool.groups.set_of(transfer.place.extent);
        let Some(view) = view.filter(|_| self.aim_open_decoding(remote, &mut decoded)) else {
            return false;
        };
        let is_prompt = |at| {
            let home = view.home(at);
            home.is_some_and(|home| self.ports[remote.pool.port(home.server)].is_prompt())
        };
        let are_prompt = positions(decoded.decoding.sources).all(is_prompt);
        if are_prompt {
            *transfer = decoded;
        }
        are_prompt
    }

    /// Notes that a request has ended well, and how long that took.
    pub(super) fn note_answer(&mut self, at: usize, tag: u64) {
        if !self.hedges.is_used {
            return;
        }
        let seen = if LateReads::is_one(tag) {
            Some(self.hedges.late.get(tag).seen)
        } else if SourceReads::is_one(tag) {
            self.sources.get(tag).seen
        } else {
            self.run_of(tag).parts[place_of(tag).1].seen
        };
        self.ports[at].answered(seen);
    }

    /// Takes the answer of a READ that was hedged. The answer counts if it came first.
    pub(super) fn complete_late(
        &mut self,
        tag: u64,
        mut buf: IoBuf<F>,
        result: Result<(), ChannelError>,
    ) {
        let LateRead {
            place, transfer, ..
        } = self.hedges.late.get(tag);
        let (index, part) = place;
        let is_awaited = |run: &&IoRun<R, F>| {
            let part = run.parts.get(part);
            part.is_some_and(|it| it.late == Some(tag) && matches!(it.task, Task::Moving(_)))
        };
        let run = self.runs.get(index).and_then(Option::as_ref);
        let Some(run) = run.filter(|run| result.is_ok() && is_awaited(run)) else {
            return self.end_late(tag, buf);
        };
        let (hedge, seen) = (run.moving(part), run.parts[part].seen);
        let port = run.store.remote_backing().pool.port(hedge.server);
        let bytes = transfer.bytes as usize;
        let first = if hedge.is_decoded() {
            let mut run = self.take(index);
            let mut sum = run.parts[part].take_sum();
            sum.as_mut()[..bytes].copy_from_slice(&buf.as_ref()[..bytes]);
            self.runs[index] = Some(run);
            self.sources.abandon(place);
            self.end_late(tag, buf);
            sum
        } else {
            // The hedge becomes the late READ.
            match self.ports[port].exchange(tag_of(index, part), (tag, buf)) {
                Ok(first) => {
                    let read = LateRead {
                        place,
                        transfer: hedge,
                        seen: seen.unwrap_or_else(Instant::now),
                    };
                    self.hedges.late.replace(tag, read);
                    first
                }
                Err(unused) => {
                    buf = unused;
                    return self.end_late(tag, buf);
                }
            }
        };
        let mut run = self.take(index);
        run.parts[part].late = None;
        let attempts = hedge.attempts;
        let transfer = SlotTransfer {
            attempts,
            ..transfer
        };
        self.end_part(place, run, (transfer, first), Ok(()));
    }

    /// Ends a late READ, whose bytes are of no use.
    fn end_late(&mut self, tag: u64, buf: IoBuf<F>) {
        let IoBuf::Staging(buf) = buf else {
            unreachable!("late answers come into buffers of their own");
        };
        self.hedges.late.end(tag, buf);
    }
}
