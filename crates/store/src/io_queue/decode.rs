//! READs of pages whose column cannot be read: the bytes are decoded out of other extents of the
//! parity set.
//!
//! The rule it keeps: decoded bytes are verified by the page's hash, like any others. One source
//! after the other comes into the request's own buffer, and is added to a sum. So a decoded page
//! takes as many READs as there are columns, one behind the other, and one buffer per run. If a
//! member of the set is replaced meanwhile, the decoding starts again. After damage, the same
//! sources are read once more, since bytes may be damaged on their way; then one source after the
//! other is left out, if there are more than are needed. No READ begins after the deadline.

use farpage_fabric::{Buf, ChannelError, regmem::RegBuf};

use super::{
    IoQueue,
    port::Ports,
    run::{Decoding, Direction, IoRun, RunBuffer, SlotTransfer, Task},
    staging::{IoBuf, no_memory},
    tag_of,
};
use crate::{
    PageStore,
    groups::{ExtentGroup, Member, SetView},
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

    /// Chooses the sources of a decoding, those first whose servers are not suspect.
    fn sources(
        &self,
        remote: &RemoteStore,
        view: &SetView,
        decoding: Decoding,
        way: Way,
    ) -> Option<u16> {
        let port = |home: &Member| &self[remote.pool.port(home.server)];
        let choose = |but: u16| {
            let fine = view.sources(but, |home| port(home).is_open() && port(home).is_fine());
            let open = || view.sources(but, |home| port(home).is_open());
            let any = || view.sources(but, |home| !port(home).is_lost());
            let found = fine.or_else(open);
            found.or_else(|| any().filter(|_| way == Way::Awaited))
        };
        let first = choose(decoding.refused)?;
        // The first choice serves twice. Then one source after the other is left out.
        match decoding.damaged.checked_sub(2) {
            None => Some(first),
            Some(before) => {
                let left_out = positions(first).nth(usize::from(before))?;
                choose(decoding.refused | 1 << left_out)
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

    /// Directs the next request to the next source.
    fn aim_source(&mut self, view: &SetView) {
        let next = positions(self.decoding.left).next();
        let source = next.and_then(|at| view.home(at));
        self.aim((DECODED, source.expect("a source is there, and is left")));
    }
}

impl<R, F: RunBuffer> IoQueue<R, F> {
    /// Keeps a buffer to decode a fill of `pages` pages into, if the store has parity.
    pub(super) fn prepare_decoding(&mut self, store: &PageStore, pages: usize) {
        if let Backing::Remote(remote) = &store.backing
            && remote.pool.code().is_some()
        {
            self.sums.reserve_exact(1);
            // A buffer that is missing is asked for when it is needed.
            (self.sums).extend(
                remote
                    .pool
                    .registered
                    .acquire(pages * store.page_bytes)
                    .ok(),
            );
        }
    }

    /// Takes the shortest buffer of at least `bytes` that was prepared. The others stay for longer
    /// fills, which need no memory mapped in a signal handler.
    fn take_sum(&mut self, bytes: usize) -> Option<RegBuf> {
        let lengths = (0..).zip(self.sums.iter().map(|sum| sum.as_ref().len()));
        let fitting = lengths.filter(|(_, len)| *len >= bytes);
        let (at, _) = fitting.min_by_key(|(_, len)| *len)?;
        Some(self.sums.swap_remove(at))
    }

    /// Keeps the buffer of a run that ends, if as many were prepared.
    pub(super) fn keep_sum(&mut self, run: &mut IoRun<R, F>) {
        if let Some(sum) = run.sum.take()
            && self.sums.len() < self.sums.capacity()
        {
            self.sums.push(sum);
        }
    }

    /// Directs a READ of a page in a parity set: to its home, or to the first source of a decoding
    /// if the home cannot be read now and the sources can. False if neither can be read.
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

    /// Directs a READ to the first source of a decoding. False if there are too few sources.
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
        let Some(sources) = self.ports.sources(remote, &view, transfer.decoding, way) else {
            return false;
        };
        let recipe = view.set.code.recipe(view.at, sources);
        transfer.decoding = Decoding {
            sources,
            left: sources,
            recipe: recipe.expect("as many sources as columns were chosen"),
            ..transfer.decoding
        };
        transfer.aim_source(&view);
        true
    }

    /// Goes on after a READ of a source has ended.
    pub(super) fn complete_source(
        &mut self,
        index: usize,
        mut run: IoRun<R, F>,
        part: usize,
        mut transfer: SlotTransfer,
        mut buf: IoBuf<F>,
        result: Result<(), ChannelError>,
    ) {
        let store = run.store.clone();
        let remote = store.remote_backing();
        let at = positions(transfer.decoding.left)
            .next()
            .expect("a source is left");
        let view = remote.pool.groups.set_of(transfer.place.extent);
        let view = view.filter(|view| view.changes == transfer.changes);
        let Some(view) = view else {
            // The set has changed: what came may be no source any more.
            if run.started.elapsed() >= self.deadline {
                return self.end_late(index, run, part, transfer, buf);
            }
            run.tally.retries += 1;
            transfer.attempts += 1;
            self.runs[index] = Some(run);
            self.aim_first(Direction::Fill, remote, &mut transfer);
            return self.send_again(tag_of(index, part), transfer, buf);
        };
        if let Err(error) = &result {
            if !error.is_transient() {
                transfer.decoding.refused |= 1 << at;
            }
            return self.go_on(index, run, part, transfer, buf, result);
        }
        // 1. The sum, which begins with zeros.
        if run.sum.is_none() {
            let bytes = run.hashes.len() * store.page_bytes;
            let kept = self.take_sum(bytes);
            run.sum = match kept.map_or_else(|| remote.pool.registered.acquire(bytes), Ok) {
                Ok(sum) => Some(sum),
                Err(error) => {
                    self.ops_in_flight -= 1;
                    self.watch.ended(run.way.index(), u64::from(transfer.bytes));
                    run.parts[part].frame = match buf {
                        IoBuf::Frame(frame) => Some(frame),
                        IoBuf::Staging(block) => {
                            self.staging.put(block, store.page_bytes);
                            run.parts[part].frame.take()
                        }
                    };
                    run.fail(part, no_memory(&store, error));
                    return self.put(index, run);
                }
            };
        }
        let sum = run.sum.as_mut().expect("made just now");
        let sum = &mut sum.as_mut()[run.parts[part].first * store.page_bytes..];
        let sum = &mut sum[..transfer.bytes as usize];
        let Decoding { sources, left, .. } = transfer.decoding;
        if left == sources {
            sum.fill(0);
        }
        // 2. One source more.
        let bytes = &mut buf.as_mut()[..transfer.bytes as usize];
        add_product(sum, bytes, transfer.decoding.recipe[usize::from(at)]);
        transfer.decoding.left &= !(1 << at);
        // 3. The next source, or the end.
        if transfer.decoding.left != 0 {
            if run.started.elapsed() >= self.deadline {
                return self.end_late(index, run, part, transfer, buf);
            }
            transfer.aim_source(&view);
            self.runs[index] = Some(run);
            return self.send_again(tag_of(index, part), transfer, buf);
        }
        bytes.copy_from_slice(sum);
        run.parts[part].task = Task::Moving(transfer);
        self.runs[index] = Some(run);
        self.finish(tag_of(index, part), buf, Ok(()));
    }

    /// Ends a decoding whose deadline has passed. The error names the server whose READ came last.
    fn end_late(
        &mut self,
        index: usize,
        mut run: IoRun<R, F>,
        part: usize,
        transfer: SlotTransfer,
        buf: IoBuf<F>,
    ) {
        let pool = &run.store.remote_backing().pool;
        let error = ChannelError::TimedOut {
            endpoint: pool.session(transfer.server).endpoint().to_string(),
            deadline: self.deadline,
        };
        run.parts[part].task = Task::Moving(transfer);
        self.runs[index] = Some(run);
        self.finish(tag_of(index, part), buf, Err(error));
    }
}
