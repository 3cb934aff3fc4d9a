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
//! server is still written to.
//!
//! A request that has waited for long while nothing at all came from its server breaks the
//! connection, if the request has another place, and if a server there has answered a request that
//! was sent in the meantime: a READ is sent to ask for such an answer. What then happens to all
//! requests of the connection is what happens when a server dies. Time in which this thread stood
//! still does not count.
//!
//! The clock is not read for a request that is answered before the next *look*, and the age of any
//! other one counts from the first look that finds it under way. Requests for pages without copies
//! are not looked at.
//!
//! Deliberately absent: hedges of the READs that a page is decoded from. They have no copies.

use std::time::{Duration, Instant};

use farpage_fabric::{ChannelError, Op, Verb};

use super::{
    IoQueue,
    allowance::READS_PER_HEDGE,
    late::{LateRead, LateReads},
    place_of,
    run::{Direction, IoRun, READ_BYTES_MAX, RunBuffer, SlotTransfer, Task},
    sources::{SourceRead, SourceReads},
    staging::IoBuf,
    tag_of,
};
use crate::{
    PageStore,
    groups::{ExtentGroup, Member},
    parity::positions,
    remote::{Backing, RemoteStore},
};

/// Multiple of the patience with a server after which a silent connection is given up.
const SILENCE: u32 = 2;
/// Shortest such time, where others can take what is written meanwhile: as long as the periods in
/// which Linux hands out processor time to control groups.
const SILENCE_MIN: Duration = Duration::from_millis(100);
/// Shortest such time, where memory that misses WRITEs would have to be copied again.
const SILENCE_ALONE_MIN: Duration = Duration::from_millis(250);
/// Silence after which other servers have to answer before a connection is given up.
const ASK_AFTER: Duration = Duration::from_millis(50);
/// Bytes of a READ that asks for an answer.
const ASK_BYTES: u32 = 64;
/// Most times that the silence doubles after which a server's connections are given up.
const DOUBLINGS_MAX: u32 = 5;
/// Buffers for late answers that a queue of signal handlers keeps.
const PREPARED: usize = 2;

/// Wait for the answer of a request.
struct Wait {
    /// Number of the port.
    port: usize,
    /// Time since the request was first seen under way.
    age: Duration,
    /// Time when the server was last heard, or the first request there was first seen.
    silent_since: Instant,
    /// Time since then.
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
            self.sources.prepare(ASK_BYTES as usize, 1);
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
        let Some((now, stood_still)) = self.hedges.begin_look() else {
            return;
        };
        self.ports.iter_mut().for_each(|port| port.note_look(now));
        // 1. All slow servers are known before any READ goes elsewhere.
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
            if !is_hedged && wait.silence >= ASK_AFTER {
                io.doubt_silent(tag, &wait, now);
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
            self.sources.see(tag, now);
            read.owner?;
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
        let opened = way.opened().unwrap_or(now);
        // READs that were hedged wait for the server, too.
        let first = self
            .hedges
            .late
            .since(port)
            .map_or(seen, |late| seen.min(late));
        let silent_since = first.max(opened).max(way.heard());
        way.is_open().then(|| Wait {
            port,
            age: since(seen.max(opened)),
            silent_since,
            silence: since(silent_since),
            patience: way.patience(),
        })
    }

    /// Gives the silent connection of a request up, if it has been silent for too long and the
    /// request has another place. Asks the servers there for an answer first.
    fn doubt_silent(&mut self, tag: u64, wait: &Wait, now: Instant) {
        let Some(part_tag) = self.part_of(tag) else {
            return;
        };
        let (run, part) = (self.run_of(part_tag), place_of(part_tag).1);
        let (store, way, transfer) = (run.store.clone(), run.way, run.moving(part));
        let has_moved = run.parts[part].has_moved;
        let pool = &store.remote_backing().pool;
        let Some(group) = pool.group(transfer.place) else {
            return;
        };
        let since = wait.silent_since + ASK_AFTER;
        let answers = |io: &Self, server: u8| {
            let port = pool.port(server);
            port != wait.port && io.ports[port].has_answered(since)
        };
        let others = self.ports.iter().filter(|port| port.has_answered(since));
        // The silent server has not answered.
        let others = others.count();
        let can_move = others >= group.members().count();
        let has_copy = group.good().any(|(at, member)| {
            let is_tried = way == Direction::Fill && transfer.tried & (1 << at) != 0;
            !is_tried && answers(self, member.server)
        });
        let has_place = has_copy
            || match way {
                Direction::WriteBack => can_move && !has_moved,
                Direction::Fill => {
                    let mut decoded = transfer;
                    group.column.is_some()
                        && others > 0
                        && self.aim_prompt_decoding(store.remote_backing(), &mut decoded)
                }
            };
        if !has_place {
            let set = pool.groups.set_of(transfer.place.extent);
            let copies = group.good().map(|(_, member)| member);
            let sources = set.iter().flat_map(|view| view.others());
            for member in copies.chain(sources) {
                let port = pool.port(member.server);
                if port != wait.port && !self.ports[port].has_answered(since) {
                    self.ask(port, &member, transfer.place.offset, now);
                }
            }
            return;
        }
        let shortest = match can_move {
            true => SILENCE_MIN,
            false => SILENCE_ALONE_MIN,
        };
        let port = &mut self.ports[wait.port];
        let limit = shortest.max(SILENCE * wait.patience);
        let doublings = port.give_ups().min(DOUBLINGS_MAX);
        if wait.silence >= limit * (1 << doublings) && port.give_up_channel(wait.silence) {
            let run = self.runs[place_of(part_tag).0].as_mut();
            run.expect("the run is here").tally.connections_given_up += 1;
        }
    }

    /// Sends a READ whose bytes nobody needs, unless one is under way there.
    fn ask(&mut self, port: usize, member: &Member, offset: u64, now: Instant) {
        // A signal handler takes no buffer that was not prepared.
        let can_ask = !self.passive || self.sources.is_prepared();
        if !can_ask || !self.ports[port].is_open() || self.sources.is_asked(port) {
            return;
        }
        let read = SourceRead {
            owner: None,
            at: 0,
            server: member.server,
            port,
            bytes: ASK_BYTES,
            seen: Some(now),
        };
        if let Ok(Some((tag, buf))) = self.sources.begin(read, self.polls) {
            self.ports[port].post(Op {
                tag,
                verb: Verb::Read,
                extent: member.id,
                offset,
                len: ASK_BYTES,
                buf: IoBuf::Staging(buf),
            });
        }
    }

    /// Sends a READ whose answer is late to another copy, or to the sources of a decoding. False if
    /// that is not possible, or not allowed now.
    fn hedge(&mut self, tag: u64) -> bool {
        let (index, part) = place_of(tag);
        let run = self.run_of(tag);
        let (late, seen) = (run.moving(part), run.parts[part].seen);
        let is_hedge = run.parts[part].late.is_some();
        let (Direction::Fill, Some(seen), false) = (run.way, seen, is_hedge) else {
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
            port: remote.pool.port(late.server),
            seen,
        };
        let Some((late_tag, spare)) = self.hedges.late.begin(read) else {
            return false;
        };
        let buf = match self.ports[read.port].exchange(tag, (late_tag, IoBuf::Staging(spare))) {
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

    /// Makes the late READ of a part, whose hedge is a decoding that cannot go on, the part's only
    /// READ again. False if there is none under way.
    pub(super) fn take_hedge_back(
        &mut self,
        (index, part): (usize, usize),
        run: &mut IoRun<R, F>,
    ) -> bool {
        let Some(late) = run.parts[part].late else {
            return false;
        };
        let LateRead {
            transfer,
            port,
            seen,
            ..
        } = self.hedges.late.get(late);
        let own = run.parts[part].take_sum();
        match self.ports[port].exchange(late, (tag_of(index, part), own)) {
            Ok(spare) => self.end_late(late, spare),
            Err(own) => {
                run.parts[part].keep_sum(own);
                return false;
            }
        }
        self.hedges.credit += READS_PER_HEDGE;
        run.tally.hedges -= 1;
        let part = &mut run.parts[part];
        (part.late, part.seen, part.task) = (None, Some(seen), Task::Moving(transfer));
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
        self.ports[at].note_heard();
        let seen = if LateReads::is_one(tag) {
            Some(self.hedges.late.get(tag).seen)
        } else if SourceReads::is_one(tag) {
            self.sources.get(tag).seen
        } else if self.has_copies(tag) {
            self.run_of(tag).parts[place_of(tag).1].seen
        } else {
            // No look sees it: its age is not known.
            return;
        };
        let took = |seen| self.hedges.now().saturating_duration_since(seen);
        let took = seen.map_or(Duration::ZERO, took);
        self.ports[at].answered(seen.unwrap_or(self.hedges.looked), took);
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
        let Some(run) = run.filter(is_awaited) else {
            return self.end_late(tag, buf);
        };
        if result.is_err() {
            let run = self.runs[index].as_mut();
            run.expect("the run is here").parts[part].late = None;
            return self.end_late(tag, buf);
        }
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
        } else if let Some(mut first) = self.ports[port].take_back(tag_of(index, part)) {
            first.as_mut()[..bytes].copy_from_slice(&buf.as_ref()[..bytes]);
            self.end_late(tag, buf);
            first
        } else {
            // The hedge becomes the late READ.
            match self.ports[port].exchange(tag_of(index, part), (tag, buf)) {
                Ok(first) => {
                    let read = LateRead {
                        place,
                        transfer: hedge,
                        port,
                        seen: seen.unwrap_or(self.hedges.looked),
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

#[cfg(test)]
impl<R, F: RunBuffer> IoQueue<R, F> {
    /// Returns the time, without the time in which the thread stood still.
    pub(crate) fn now(&self) -> Instant {
        self.hedges.now()
    }

    /// Takes the buffers of sources of decodings from another pool.
    pub(crate) fn set_source_buffers(&mut self, pool: farpage_fabric::regmem::RegPool) {
        self.sources = SourceReads::new(pool);
    }
}
