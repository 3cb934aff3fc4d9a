//! READs of pages whose column cannot be read: the bytes are decoded out of other extents of the
//! parity set.
//!
//! The rule it keeps: decoded bytes are verified by the page's hash, like any others. The READs of
//! all sources are under way at once, as far as there are [buffers](super::sources), and each
//! source is added to a sum as it comes. The sum lies where the bytes of a plain READ would. If a
//! member of the set is replaced meanwhile, or a source cannot be read, the decoding starts again,
//! and READs of the former one are abandoned. After damage, the same sources are read once more,
//! since bytes may be damaged on their way; then one source after the other is left out, if there
//! are more than are needed. No READ begins after the deadline.

use std::time::Instant;

use farpage_fabric::{Buf, ChannelError, Op, Verb, regmem::RegError};

use super::{
    IoQueue,
    port::Ports,
    run::{Decoding, Direction, IoRun, RunBuffer, RunPart, SlotTransfer, Task},
    sources::SourceRead,
    staging::{IoBuf, no_memory},
    tag_of,
};
use crate::{
    PageStore,
    groups::{ExtentGroup, Member, MemberState, SetView},
    parity::{add_product, positions},
    remote::{Backing, RemoteStore},
};

/// Position that a transfer of a source has instead of that of a copy.
const DECODED: u8 = 7;

/// Channels that the sources of a decoding may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Open channels.
    Open,
    /// Open channels, or such that may open again.
    Awaited,
}

impl<B: Buf> Ports<B> {
    /// True if bytes that came damaged can be decoded: from sources that have not brought damaged
    /// bytes, or once more from the first ones.
    pub(super) fn can_decode(
        &self,
        remote: &RemoteStore,
        transfer: &SlotTransfer,
        way: Way,
    ) -> bool {
        let decoding = transfer.decoding_after_damage();
        let view = remote.pool.groups.set_of(transfer.place.extent);
        view.is_some_and(|view| self.sources(remote, &view, decoding, way).is_some())
    }

    /// Chooses the sources of a decoding, those first whose servers are not suspect. Damaged
    /// extents serve if too few others can be had, also later. Returns the sources, and the one
    /// that is left out on purpose.
    fn sources(
        &self,
        remote: &RemoteStore,
        view: &SetView,
        decoding: Decoding,
        way: Way,
    ) -> Option<(u16, u16)> {
        let port = |home: &Member| &self[remote.pool.port(home.server)];
        let choose = |but: u16| {
            let fine = view.sources(but, |home| port(home).is_open() && port(home).is_fine());
            let open = || view.sources(but, |home| port(home).is_open());
            let any = || view.sources(but, |home| !port(home).is_lost());
            // Most of a damaged extent is right.
            let is_there = |home: &Member| home.state != MemberState::Dead && port(home).is_open();
            let damaged = || view.any_sources(but, is_there);
            fine.or_else(open).or_else(|| match (any(), way) {
                (None, _) => damaged(),
                (any, Way::Awaited) => any,
                (Some(_), Way::Open) => None,
            })
        };
        let first = choose(decoding.refused)?;
        // The first choice serves twice. Then one source after the other is left out.
        match decoding.damaged.checked_sub(2) {
            None => Some((first, 0)),
            Some(before) => {
                let left_out = 1 << positions(first).nth(usize::from(before))?;
                Some((choose(decoding.refused | left_out)?, left_out))
            }
        }
    }
}

impl SlotTransfer {
    /// True if the request is for a source of the bytes.
    pub(super) fn is_decoded(&self) -> bool {
        self.member == DECODED
    }

    /// Returns the state of the decoding after the bytes that came were damaged.
    pub(super) fn decoding_after_damage(&self) -> Decoding {
        Decoding {
            damaged: self.decoding.damaged + u8::from(self.is_decoded()),
            ..self.decoding
        }
    }
}

impl<F: RunBuffer> RunPart<F> {
    /// Keeps the buffer that sources are summed up in.
    fn keep_sum(&mut self, buf: IoBuf<F>) {
        match buf {
            IoBuf::Frame(frame) => self.frame = Some(frame),
            IoBuf::Staging(block) => self.sum = Some(block),
        }
    }

    /// Takes the buffer that sources are summed up in.
    fn take_sum(&mut self) -> IoBuf<F> {
        match self.sum.take() {
            Some(block) => IoBuf::Staging(block),
            None => IoBuf::Frame(self.frame.take().expect("the sum of raw pages is here")),
        }
    }

    /// Adds a source, times `coefficient`, to the sum. The sum begins with zeros at the `first`.
    fn add_source(&mut self, bytes: &[u8], coefficient: u8, first: bool) {
        let sum = match (&mut self.sum, &mut self.frame) {
            (Some(block), _) => block.as_mut(),
            (None, frame) => frame
                .as_mut()
                .expect("the sum of raw pages is here")
                .as_mut(),
        };
        let sum = &mut sum[..bytes.len()];
        if first {
            sum.fill(0);
        }
        add_product(sum, bytes, coefficient);
    }
}

impl<R, F: RunBuffer> IoQueue<R, F> {
    /// Keeps buffers for the sources of a fill of `pages` pages, if the store has parity.
    pub(super) fn prepare_decoding(&mut self, store: &PageStore, pages: usize) {
        if let Backing::Remote(remote) = &store.backing
            && let Some(code) = remote.pool.code()
        {
            let bytes = pages * store.page_bytes;
            self.sources.prepare(bytes, usize::from(code.data));
        }
    }

    /// Directs a READ of a page in a parity set: to its home, or to the sources of a decoding if
    /// the home cannot be read now and the sources can. False if neither can be read.
    pub(super) fn aim_column(
        &mut self,
        remote: &RemoteStore,
        group: &ExtentGroup,
        transfer: &mut SlotTransfer,
    ) -> bool {
        if group.column.is_none() || transfer.is_second_look {
            return false;
        }
        let home = self.choose_copy(remote, group, transfer, transfer.tried);
        let is_fine =
            |(_, home): &(u8, Member)| self.ports[remote.pool.port(home.server)].is_fine();
        if !home.as_ref().is_some_and(is_fine) && self.aim_decoding(remote, transfer, Way::Open) {
            return true;
        }
        if let Some(home) = home {
            transfer.aim(home);
        }
        home.is_some()
    }

    /// Directs a READ to the sources of a decoding. False if there are too few.
    pub(super) fn aim_decoding(
        &mut self,
        remote: &RemoteStore,
        transfer: &mut SlotTransfer,
        way: Way,
    ) -> bool {
        let view = remote.pool.groups.set_of(transfer.place.extent);
        let Some(view) = view.filter(|_| !transfer.is_second_look) else {
            return false;
        };
        for home in view.others() {
            let port = &mut self.ports[remote.pool.port(home.server)];
            if !port.is_open() {
                port.want_channel();
            }
        }
        if transfer.changes != view.changes {
            transfer.changes = view.changes;
            transfer.decoding = Decoding::default();
        }
        let found = self.ports.sources(remote, &view, transfer.decoding, way);
        let Some((sources, left_out)) = found else {
            return false;
        };
        let recipe = view.set.code.recipe(view.at, sources);
        transfer.decoding = Decoding {
            sources,
            left: sources,
            unsent: sources,
            left_out,
            recipe: recipe.expect("as many sources as columns were chosen"),
            ..transfer.decoding
        };
        transfer.member = DECODED;
        true
    }

    /// Begins a decoding into `sum`.
    pub(super) fn begin_decoding(
        &mut self,
        place: (usize, usize),
        run: &mut IoRun<R, F>,
        transfer: SlotTransfer,
        sum: IoBuf<F>,
    ) {
        run.parts[place.1].keep_sum(sum);
        let view = run
            .store
            .remote_backing()
            .pool
            .groups
            .set_of(transfer.place.extent);
        self.ask_for_sources(place, run, transfer, view);
    }

    /// Asks for sources, as far as there are buffers. Without any source under way, the part waits.
    fn ask_for_sources(
        &mut self,
        place: (usize, usize),
        run: &mut IoRun<R, F>,
        mut transfer: SlotTransfer,
        view: Option<SetView>,
    ) {
        let part = place.1;
        if run.started.elapsed() >= self.deadline {
            self.sources.abandon(place);
            return self.fail_late(run, part, transfer);
        }
        let store = run.store.clone();
        let sent = match view.filter(|view| view.changes == transfer.changes) {
            Some(view) => self.send_sources(place, store.remote_backing(), &mut transfer, &view),
            // The set has changed since its sources were chosen: the part looks again.
            None => {
                self.look_again = Some(Instant::now());
                Ok(())
            }
        };
        let Decoding { left, unsent, .. } = transfer.decoding;
        run.parts[part].task = Task::Moving(transfer);
        match sent {
            _ if left != unsent => {}
            Ok(()) => {
                if self.sources.is_idle() {
                    // The part that comes first may have ended: no READ ends that could wake.
                    self.look_again = Some(Instant::now());
                }
                self.stop_decoding(run, part);
                run.parts[part].task = Task::Fetch(transfer);
            }
            Err(error) => {
                self.stop_decoding(run, part);
                run.fail(part, no_memory(&store, error));
            }
        }
    }

    /// Posts READs of sources, as far as there are buffers for each server.
    fn send_sources(
        &mut self,
        place: (usize, usize),
        remote: &RemoteStore,
        transfer: &mut SlotTransfer,
        view: &SetView,
    ) -> Result<(), RegError> {
        for at in positions(transfer.decoding.unsent) {
            let Member { server, id, .. } = view.home(at).expect("a source is there");
            let source = SourceRead {
                owner: Some(place),
                at,
                server,
                port: remote.pool.port(server),
                bytes: transfer.bytes,
            };
            let Some((tag, buf)) = self.sources.begin(source, self.polls)? else {
                continue;
            };
            transfer.decoding.unsent &= !(1 << at);
            self.ports[source.port].post(Op {
                tag,
                verb: Verb::Read,
                extent: id,
                offset: transfer.place.offset,
                len: transfer.bytes,
                buf: IoBuf::Staging(buf),
            });
        }
        Ok(())
    }

    /// Goes on after a READ of a source has ended.
    pub(super) fn complete_source(
        &mut self,
        tag: u64,
        buf: IoBuf<F>,
        result: Result<(), ChannelError>,
    ) {
        let SourceRead {
            owner, at, server, ..
        } = self.sources.get(tag);
        let Some(place) = owner else {
            return self.end_source(tag, buf);
        };
        let (index, part) = place;
        let mut run = self.take(index);
        let store = run.store.clone();
        let remote = store.remote_backing();
        let mut transfer = run.moving(part);
        // Errors name the server whose READ came last.
        transfer.server = server;
        let view = remote.pool.groups.set_of(transfer.place.extent);
        let view = view.filter(|view| view.changes == transfer.changes);
        if view.is_some() && result.is_ok() {
            let Decoding {
                sources,
                left,
                recipe,
                ..
            } = transfer.decoding;
            let bytes = &buf.as_ref()[..transfer.bytes as usize];
            run.parts[part].add_source(bytes, recipe[usize::from(at)], left == sources);
            self.end_source(tag, buf);
            transfer.decoding.left &= !(1 << at);
            if transfer.decoding.left == 0 {
                let sum = run.parts[part].take_sum();
                return self.end_part((index, part), run, (transfer, sum), Ok(()));
            }
            run.parts[part].task = Task::Moving(transfer);
            if transfer.decoding.unsent != 0 {
                self.ask_for_sources(place, &mut run, transfer, view);
            }
            return self.put_waiting(place, run);
        }
        self.end_source(tag, buf);
        self.sources.abandon(place);
        let sum = run.parts[part].take_sum();
        match result {
            Err(error) if view.is_some() => {
                if !error.is_transient() {
                    transfer.decoding.refused |= 1 << at;
                }
                self.go_on(index, run, part, transfer, sum, Err(error));
            }
            // The set has changed: what came may be no source any more.
            _ => {
                run.tally.retries += 1;
                transfer.attempts += 1;
                self.runs[index] = Some(run);
                self.aim_first(Direction::Fill, remote, &mut transfer);
                self.send_again(tag_of(index, part), transfer, sum);
            }
        }
    }

    /// Goes on with a READ of a source that waits for the channel of a port. Returns it if it is to
    /// wait on. Reads the page otherwise, or other sources, if that is possible by now.
    pub(super) fn redirect_source(
        &mut self,
        port: usize,
        op: Op<IoBuf<F>>,
    ) -> Option<Op<IoBuf<F>>> {
        let Some(place) = self.sources.get(op.tag).owner else {
            self.end_source(op.tag, op.buf);
            return None;
        };
        let tag = tag_of(place.0, place.1);
        let run = self.run_of(tag);
        let late = self.passive || run.started.elapsed() >= self.deadline;
        if late || self.ports[port].is_lost() {
            let error = self.ports[port].why_late(self.deadline);
            self.complete_source(op.tag, op.buf, Err(error));
            return None;
        }
        let (store, mut transfer) = (run.store.clone(), run.moving(place.1));
        let remote = store.remote_backing();
        let group = remote.pool.group(transfer.place);
        let is_aimed = group.is_some_and(|group| {
            transfer.follow(&group);
            self.aim_column(remote, &group, &mut transfer)
        });
        if !is_aimed {
            return Some(op);
        }
        self.end_source(op.tag, op.buf);
        self.sources.abandon(place);
        let mut run = self.take(place.0);
        let sum = run.parts[place.1].take_sum();
        self.runs[place.0] = Some(run);
        self.send_again(tag, transfer, sum);
        None
    }

    /// Ends a READ of a source, whose bytes are of no use any more.
    pub(super) fn end_source(&mut self, tag: u64, buf: IoBuf<F>) {
        let IoBuf::Staging(buf) = buf else {
            unreachable!("sources come into buffers of their own");
        };
        self.sources.end(tag, buf);
    }

    /// Ends a decoding whose deadline has passed. The error names the server whose READ came last.
    fn fail_late(&mut self, run: &mut IoRun<R, F>, part: usize, transfer: SlotTransfer) {
        let store = run.store.clone();
        let remote = store.remote_backing();
        let error = ChannelError::TimedOut {
            endpoint: remote.pool.endpoint(transfer.server).to_string(),
            deadline: self.deadline,
        };
        self.stop_decoding(run, part);
        run.fail(part, run.remote_error(remote, transfer, error));
    }

    /// Takes a decoding that delivered nothing out of the requests under way.
    fn stop_decoding(&mut self, run: &mut IoRun<R, F>, part: usize) {
        self.ops_in_flight -= 1;
        self.watch.ended(run.way.index(), 0);
        if let Some(block) = run.parts[part].sum.take() {
            self.staging.put(block, run.store.page_bytes);
        }
    }
}
