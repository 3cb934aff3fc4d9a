//! The channels of an I/O queue: requests on their way to servers and back.
//!
//! The rule it keeps: a request that cannot be posted, or seems lost, is sent again, goes to
//! another copy, or ends when it is too late. Ports to servers that were added since are made where
//! memory may be allocated, and never in a signal handler.

use std::{mem, time::Instant};

use farpage_fabric::{ChannelError, Completion, Op, Verb};

use super::{
    IoQueue, place_of,
    port::{Port, PortState},
    run::{Direction, IoRun, RunBuffer, SlotTransfer, Task},
    sources::SourceReads,
    staging::IoBuf,
    tag_of,
};
use crate::{place::slot_bytes, remote::RemoteStore};

impl<R, F: RunBuffer> IoQueue<R, F> {
    /// Begins to open channels that were lost.
    pub fn reopen(&mut self) {
        self.add_ports();
        for port in self.ports.iter_mut() {
            port.reopen(&self.waker);
        }
    }

    /// True if copies of pages are passed over for want of channels that can be opened now. For
    /// I/O queues that open none themselves.
    pub fn lacks_channels(&self) -> bool {
        self.passive
            && (self.ports.absent.is_wanted() || self.ports.iter().any(Port::lacks_channel))
    }

    /// Begins to open the channels that the I/O queue [lacks](Self::lacks_channels).
    pub fn open_lacking(&mut self) {
        self.add_ports();
        for port in self.ports.iter_mut().filter(|port| port.lacks_channel()) {
            port.reopen(&self.waker);
        }
    }

    /// Sends the first request of a part.
    pub(super) fn post(
        &mut self,
        index: usize,
        run: &mut IoRun<R, F>,
        part: usize,
        remote: &RemoteStore,
        mut transfer: SlotTransfer,
        buf: IoBuf<F>,
    ) {
        match remote.pool.has_copies() {
            true => self.aim_first(run.way, remote, &mut transfer),
            false => _ = transfer.aim_home(remote),
        }
        run.parts[part].task = Task::Moving(transfer);
        self.ops_in_flight += 1;
        self.watch.posted(run.way.index());
        self.send((index, part), run, remote, transfer, buf);
    }

    /// Sends a request of a run again, to where the transfer says now.
    pub(super) fn send_again(&mut self, tag: u64, transfer: SlotTransfer, buf: IoBuf<F>) {
        let (index, part) = place_of(tag);
        let mut run = self.take(index);
        run.parts[part].task = Task::Moving(transfer);
        let store = run.store.clone();
        self.send(
            (index, part),
            &mut run,
            store.remote_backing(),
            transfer,
            buf,
        );
        self.put_waiting((index, part), run);
    }

    fn send(
        &mut self,
        (index, part): (usize, usize),
        run: &mut IoRun<R, F>,
        remote: &RemoteStore,
        transfer: SlotTransfer,
        buf: IoBuf<F>,
    ) {
        if transfer.is_decoded() {
            return self.begin_decoding((index, part), run, transfer, buf);
        }
        let SlotTransfer {
            place,
            server,
            extent,
            bytes,
            ..
        } = transfer;
        let verb = run.way.verb();
        let len = match verb {
            // All copies have the same bytes in all of the slot, so that they can be compared.
            Verb::Write if remote.pool.code().is_some() => slot_bytes(bytes) as u32,
            _ => bytes,
        };
        let op = Op {
            tag: tag_of(index, part),
            verb,
            extent: extent.unwrap_or_else(|| remote.pool.extent(place)),
            offset: place.offset,
            len,
            buf,
        };
        self.ports[remote.pool.port(server)].post(op);
    }

    /// Lets one port make progress.
    pub(super) fn drive(&mut self, at: usize) {
        // 1. Completions. Failed requests go to the backlog or end. A complete run is handed out
        //    first: its bytes are in the caches now.
        while self.poll_channel(at) && self.ready.is_empty() {}
        // 2. Replace a broken channel.
        let port = &mut self.ports[at];
        if port.is_open() && port.backlog.is_empty() {
            return;
        }
        let now = Instant::now();
        port.forget_doubts();
        port.recover(now, (!self.passive).then_some(&self.waker));
        // 3. The backlog: post it, or fail the operations that are too late.
        if port.backlog.is_empty() {
            return;
        }
        if port.is_open() {
            return port.post_backlog();
        }
        let is_lost = port.is_lost();
        for _ in 0..port.backlog.len() {
            let op = self.ports[at].backlog.pop_front().expect("counted above");
            if SourceReads::is_one(op.tag) {
                let waits = self.redirect_source(at, op);
                self.ports[at].backlog.extend(waits);
                continue;
            }
            let Some(op) = self.redirect(op) else {
                continue;
            };
            let in_time = self.run_of(op.tag).started.elapsed() < self.deadline;
            if in_time && !self.passive && !is_lost {
                self.ports[at].backlog.push_back(op);
            } else {
                let error = self.ports[at].why_late(self.deadline);
                self.finish(op.tag, op.buf, Err(error));
            }
        }
    }

    /// Polls a channel. True if more can end without waiting.
    fn poll_channel(&mut self, at: usize) -> bool {
        let PortState::Open { channel, .. } = &mut self.ports[at].state else {
            return false;
        };
        let mut completions = mem::take(&mut self.completions);
        channel.poll(&mut completions);
        let until = channel.wait().until;
        for completion in completions.drain(..) {
            self.complete(at, completion);
        }
        self.completions = completions;
        until.is_some_and(|until| until <= Instant::now())
    }

    fn complete(&mut self, at: usize, completion: Completion<IoBuf<F>>) {
        let Completion {
            tag, buf, result, ..
        } = completion;
        match &result {
            Ok(()) => self.ports[at].succeeded(),
            Err(error) if error.is_transient() => self.ports[at].failed(error),
            Err(_) => {}
        }
        match result {
            result if SourceReads::is_one(tag) => self.complete_source(tag, buf, result),
            result if self.has_copies(tag) => self.complete_copy(tag, buf, result),
            Err(error) if error.is_transient() || self.has_moved(tag) => {
                self.repeat(tag, buf, error);
            }
            result => self.finish(tag, buf, result),
        }
    }

    /// Repeats a request that seems lost, if there is time.
    fn repeat(&mut self, tag: u64, buf: IoBuf<F>, error: ChannelError) {
        let (index, part) = place_of(tag);
        let run = self.runs[index]
            .as_mut()
            .expect("a request belongs to a run that has not ended");
        let (remote, mut transfer) = (run.store.remote_backing(), run.moving(part));
        match run.way {
            Direction::WriteBack => transfer.doubt = 1,
            Direction::Fill => _ = transfer.aim_home(remote),
        }
        let is_lost = remote.pool.session(transfer.server).loss(false).is_some();
        if is_lost || run.started.elapsed() >= self.deadline {
            run.parts[part].task = Task::Moving(transfer);
            return self.finish(tag, buf, Err(error));
        }
        transfer.attempts += 1;
        run.tally.retries += 1;
        self.send_again(tag, transfer, buf);
    }

    /// Makes ports to servers that were added since, closed ones. Allocates.
    pub(super) fn add_ports(&mut self) {
        let sessions = self.cluster.sessions();
        for (server, session) in sessions.iter().enumerate().skip(self.ports.len()) {
            let mut port = Port::added(session, &self.cluster.health, server);
            port.backlog.reserve(self.prepared);
            self.ports.push(port);
        }
        self.ports.absent.forget_want();
    }

    /// Hands requests to servers without a port over to their ports, which are made now. An I/O
    /// queue of signal handlers makes none: its requests go to another copy, or end.
    pub(super) fn meet_servers(&mut self) {
        if !self.passive && self.ports.len() < self.cluster.sessions().len() {
            self.add_ports();
        }
        for _ in 0..self.ports.absent.backlog.len() {
            let stray = self.ports.absent.backlog.pop_front();
            let op = stray.expect("counted above");
            let Some(port) = self.port_of(op.tag) else {
                self.end_source(op.tag, op.buf);
                continue;
            };
            if port < self.ports.len() {
                self.ports[port].post(op);
                continue;
            }
            self.ports.absent.want_channel();
            if SourceReads::is_one(op.tag) {
                let waits = self.redirect_source(port, op);
                debug_assert!(
                    waits.is_none(),
                    "a queue without the port waits for nothing"
                );
            } else if let Some(op) = self.redirect(op) {
                let error = self.ports.absent.why_late(self.deadline);
                self.finish(op.tag, op.buf, Err(error));
            }
        }
    }

    /// Returns the port that a request goes to. `None` if the request is abandoned.
    fn port_of(&self, tag: u64) -> Option<usize> {
        let part = self.part_of(tag)?;
        let run = self.run_of(part);
        let server = match SourceReads::is_one(tag) {
            true => self.sources.get(tag).server,
            false => run.moving(place_of(part).1).server,
        };
        Some(run.store.remote_backing().pool.port(server))
    }
}
