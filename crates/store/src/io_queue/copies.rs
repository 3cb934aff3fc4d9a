//! Requests to pages that are on several servers: which copy is read, and how a write-back reaches
//! all of them.
//!
//! The rule it keeps: an entry is published when the new bytes are complete at every Good member of
//! their group. A member that missed them is marked [Stale](crate::groups) first. WRITEs go to one
//! member after the other, from the same buffer; so a fill waits for one server, and a write-back
//! for all. What a suspect server misses is left to the [repairs](crate::repair).
//!
//! A page on one server has a home: the extent that has its bytes now. A READ that fails, or brings
//! wrong bytes, is repeated there if they have moved since. A WRITE needs no such look: an extent
//! does not move while a write to it is under way.
//!
//! A page in a parity set has a home, too. A READ that cannot go there is decoded (`decode.rs`).

use farpage_fabric::{Buf, ChannelError, Op};

use super::{
    IoQueue,
    decode::Way,
    place_of,
    port::{DoubtfulSlots, Ports},
    run::{Decoding, Direction, IoRun, RunBuffer, RunPart, SlotTransfer, Task},
    staging::IoBuf,
    tag_of,
};
use crate::{
    groups::{ExtentGroup, Member},
    place::SlotSpan,
    remote::RemoteStore,
    slots::Choice,
};

/// Prospect of another READ of bytes that came damaged.
#[derive(Clone, Copy, Default)]
pub(super) struct Outlook {
    /// True until the run's deadline.
    pub(super) in_time: bool,
    /// Positions of the members whose ports are open, as bits.
    pub(super) open: u8,
    /// Positions of the Good members, as bits.
    pub(super) good: u8,
    /// True if the bytes can be decoded from sources that may be right.
    pub(super) can_decode: bool,
}

/// Next step of a request.
enum Step {
    /// Request for the same bytes, to the member that the transfer names now.
    Send,
    /// New slots for the pages; those that the transfer has are given up.
    Move,
    /// The end, with the result for the pages.
    End(Result<(), ChannelError>),
}

impl SlotTransfer {
    /// Directs the next request to a member.
    pub(super) fn aim(&mut self, (at, member): (u8, Member)) {
        (self.member, self.server, self.extent) = (at, member.server, Some(member.id));
    }

    /// Returns the position that the request goes to, as a bit.
    fn bit(&self) -> u8 {
        1 << self.member
    }

    /// Forgets the positions of copies that were tried, if a member was replaced since: they may
    /// name other extents now. No member is replaced while a WRITE to its group is under way.
    pub(super) fn follow(&mut self, group: &ExtentGroup) {
        if self.changes != group.changes {
            (self.tried, self.damaged, self.changes) = (0, 0, group.changes);
            self.decoding = Decoding::default();
        }
    }

    /// Returns the positions that a READ does not go to, whichever port is open. The second look
    /// tries each copy once. The first waits for copies that are out of reach, and not for bytes
    /// that are damaged.
    fn useless(&self) -> u8 {
        match self.is_second_look {
            true => self.tried,
            false => self.damaged,
        }
    }

    /// Directs the next request to the extent that has the bytes now. True if that is another one
    /// than before.
    pub(super) fn aim_home(&mut self, remote: &RemoteStore) -> bool {
        let Some((server, id)) = remote.pool.home(self.place) else {
            // A place that another process names may be gone: its server refuses the READ.
            return false;
        };
        let has_moved = (self.server, self.extent) != (server, Some(id));
        (self.server, self.extent) = (server, Some(id));
        has_moved
    }

    /// True if another extent has the bytes now than the one that the request went to.
    fn has_moved_home(&self, remote: &RemoteStore) -> bool {
        let home = remote.pool.home(self.place);
        home.is_some_and(|(server, id)| (self.server, self.extent) != (server, Some(id)))
    }

    /// True if the bytes may have come from an extent that does not hold them any more: they have
    /// moved since the READ began.
    pub(super) fn is_stale(&self, remote: &RemoteStore) -> bool {
        if !remote.pool.has_copies() {
            return self.has_moved_home(remote);
        }
        let group = remote.pool.group(self.place);
        group.is_some_and(|group| group.changes != self.changes)
    }
}

impl<B: Buf> Ports<B> {
    /// Returns the positions of the members whose ports are open, as bits.
    fn open_bits(&self, remote: &RemoteStore, group: &ExtentGroup) -> u8 {
        let is_open = |(_, it): &(u8, Member)| self[remote.pool.port(it.server)].is_open();
        group.members().filter(is_open).map(|(at, _)| 1 << at).sum()
    }

    /// Returns what decides if a part that came damaged is read once more.
    pub(super) fn outlook(
        &self,
        remote: &RemoteStore,
        transfer: &SlotTransfer,
        in_time: bool,
        may_wait: bool,
    ) -> Outlook {
        if !remote.pool.has_copies() {
            return Outlook {
                in_time,
                ..Outlook::default()
            };
        }
        let group = remote.pool.group(transfer.place);
        let way = if may_wait { Way::Awaited } else { Way::Open };
        let has_column = group.is_some_and(|group| group.column.is_some());
        Outlook {
            in_time,
            open: group.map_or(0, |group| self.open_bits(remote, &group)),
            good: group.map_or(0, |group| group.good_bits()),
            can_decode: has_column
                && !transfer.is_second_look
                && self.can_decode(remote, transfer, way),
        }
    }
}

impl<R, F: RunBuffer> IoQueue<R, F> {
    /// True if the request is about pages that have copies.
    pub(super) fn has_copies(&self, tag: u64) -> bool {
        let store = &self.run_of(tag).store;
        store.remote_backing().pool.has_copies()
    }

    /// Chooses the member that the first request of a part goes to.
    pub(super) fn aim_first(
        &mut self,
        way: Direction,
        remote: &RemoteStore,
        transfer: &mut SlotTransfer,
    ) {
        let Some(group) = remote.pool.group(transfer.place) else {
            // A place that another process names may be gone: its server refuses the READ.
            (transfer.member, transfer.server) = (0, transfer.place.server);
            return;
        };
        transfer.follow(&group);
        if way == Direction::Fill && self.aim_column(remote, &group, transfer) {
            return;
        }
        let first = match way {
            Direction::Fill => self.choose_copy(remote, &group, transfer, transfer.tried),
            Direction::WriteBack => self.next_write(remote, &group, transfer),
        };
        let first = first.or_else(|| self.choose_any(remote, &group, transfer.tried));
        if way == Direction::Fill
            && first.is_none()
            && self.aim_decoding(remote, transfer, Way::Awaited)
        {
            return;
        }
        let first = first
            .or_else(|| self.choose_any(remote, &group, 0))
            .or_else(|| group.members().next());
        if let Some(first) = first {
            transfer.aim(first);
        }
    }

    /// Chooses the copy to read next: as [`choose_read`](Self::choose_read), and in a second look
    /// also one that is not Good. `None` if no port is open.
    pub(super) fn choose_copy(
        &mut self,
        remote: &RemoteStore,
        group: &ExtentGroup,
        transfer: &SlotTransfer,
        tried: u8,
    ) -> Option<(u8, Member)> {
        let open = self.ports.open_bits(remote, group) & !tried;
        let found = self.choose_read(remote, group, tried);
        let mut others = group.members().filter(|_| transfer.is_second_look);
        found.or_else(|| others.find(|(at, _)| open & (1 << at) != 0))
    }

    /// Chooses the copy to read: the first one that is Good and whose port is open, of a server
    /// that is not suspect if there is one. `tried` are positions that do not come into question.
    fn choose_read(
        &mut self,
        remote: &RemoteStore,
        group: &ExtentGroup,
        tried: u8,
    ) -> Option<(u8, Member)> {
        let port = |member: &Member| remote.pool.port(member.server);
        let is_open = |(_, member): &(u8, Member)| self.ports[port(member)].is_open();
        let is_fine = |(_, member): &(u8, Member)| self.ports[port(member)].is_fine();
        let untried = || group.good().filter(|(at, _)| tried & (1 << at) == 0);
        let found = untried()
            .find(|it| is_open(it) && is_fine(it))
            .or_else(|| untried().find(is_open))?;
        for (_, member) in untried().take_while(|(at, _)| *at < found.0) {
            // The copy is read again once the way to it is open.
            self.ports[port(&member)].want_channel();
        }
        Some(found)
    }

    /// Chooses a Good member to wait for: with an open port, else of a session that is not lost.
    /// Without an open port, asks for channels to all: the first that opens serves.
    fn choose_any(
        &mut self,
        remote: &RemoteStore,
        group: &ExtentGroup,
        skipped: u8,
    ) -> Option<(u8, Member)> {
        let port = |member: &Member| remote.pool.port(member.server);
        let rest = || group.good().filter(|(at, _)| skipped & (1 << at) == 0);
        let open = rest().find(|(_, member)| self.ports[port(member)].is_open());
        if open.is_some() {
            return open;
        }
        for (_, member) in rest() {
            self.ports[port(&member)].want_channel();
        }
        rest().find(|(_, member)| !self.ports[port(member)].is_lost())
    }

    /// Chooses the next member that a write-back goes to: one that lacks the bytes, was not tried,
    /// and whose server answers; with an open port if there is one.
    fn next_write(
        &self,
        remote: &RemoteStore,
        group: &ExtentGroup,
        transfer: &SlotTransfer,
    ) -> Option<(u8, Member)> {
        let past = transfer.done | transfer.tried;
        let rest = || {
            let rest = group.good().filter(move |(at, _)| past & (1 << at) == 0);
            rest.filter(|(_, member)| remote.pool.is_usable(member.server))
        };
        let open = self.ports.open_bits(remote, group);
        (rest().find(|(at, _)| open & (1 << at) != 0)).or_else(|| rest().next())
    }

    /// Chooses a member that lacks a write-back and whose server fell silent a moment ago: it may
    /// answer again before the copy has to be given up. Each member is chosen once.
    fn next_awaited(
        &self,
        remote: &RemoteStore,
        group: &ExtentGroup,
        transfer: &SlotTransfer,
    ) -> Option<(u8, Member)> {
        let past = transfer.done | transfer.awaited | transfer.damaged;
        let port = |member: &Member| &self.ports[remote.pool.port(member.server)];
        let mut rest = group.good().filter(|(at, _)| past & (1 << at) == 0);
        rest.find(|(_, member)| port(member).may_reopen_soon())
    }

    /// Goes on after a request has ended: at the next member, or to the end.
    pub(super) fn complete_copy(
        &mut self,
        tag: u64,
        buf: IoBuf<F>,
        result: Result<(), ChannelError>,
    ) {
        let (index, part) = place_of(tag);
        let run = self.take(index);
        let mut transfer = run.moving(part);
        let bit = transfer.bit();
        match (run.way, &result) {
            (Direction::Fill, Ok(())) => {}
            (Direction::WriteBack, Ok(())) => {
                // All WRITEs of a port are on one line: the earlier ones to this member have ended.
                (transfer.done, transfer.doubt) = (transfer.done | bit, transfer.doubt & !bit);
            }
            (way, Err(error)) => {
                transfer.tried |= bit;
                let is_for_good = matches!(
                    error,
                    ChannelError::Refused { .. } | ChannelError::Unreadable { .. }
                );
                if is_for_good {
                    transfer.damaged |= bit;
                }
                if way == Direction::WriteBack && error.is_transient() {
                    transfer.doubt |= bit;
                }
            }
        }
        self.go_on(index, run, part, transfer, buf, result);
    }

    /// Sends a request that waits for a channel to another copy, or ends it, if that is possible.
    /// Returns it otherwise.
    pub(super) fn redirect(&mut self, op: Op<IoBuf<F>>) -> Option<Op<IoBuf<F>>> {
        if !self.has_copies(op.tag) {
            return self.redirect_home(op);
        }
        let (index, part) = place_of(op.tag);
        let run = self.run_of(op.tag);
        let (store, way) = (run.store.clone(), run.way);
        let (remote, mut transfer) = (store.remote_backing(), run.moving(part));
        let Some(group) = remote.pool.group(transfer.place) else {
            return Some(op);
        };
        transfer.follow(&group);
        let late = self.passive || run.started.elapsed() >= self.deadline;
        if way == Direction::WriteBack && transfer.done != 0 {
            let port = &self.ports[remote.pool.port(transfer.server)];
            let is_awaited = transfer.awaited & transfer.bit() != 0 && port.may_reopen_soon();
            let next = self.next_write(remote, &group, &transfer);
            let is_next_open =
                next.is_some_and(|(at, _)| self.ports.open_bits(remote, &group) & (1 << at) != 0);
            // The channel to a server that answers others is open soon.
            let may_wait = port.is_fine() && !port.is_lost() || is_awaited;
            if !late && may_wait && !is_next_open {
                return Some(op);
            }
            // The WRITE was not posted: nothing of it may still land. Its turn comes again behind
            // that of a member whose port is open.
            if late || !may_wait {
                transfer.tried |= transfer.bit();
            }
            let error = port.why_late(self.deadline);
            let run = self.take(index);
            self.go_on(index, run, part, transfer, op.buf, Err(error));
            return None;
        }
        if way == Direction::Fill && self.aim_column(remote, &group, &mut transfer) {
            self.send_again(op.tag, transfer, op.buf);
            return None;
        }
        let other = match way {
            Direction::Fill => self.choose_copy(remote, &group, &transfer, transfer.useless()),
            Direction::WriteBack => self.next_write(remote, &group, &transfer),
        };
        let is_vain = transfer.is_second_look || group.good_bits() & transfer.bit() == 0;
        if way == Direction::Fill && other.is_none() && is_vain {
            // The second look waits for nothing, and nobody waits for a copy that was given up.
            transfer.tried |= transfer.bit();
            let port = &self.ports[remote.pool.port(transfer.server)];
            let error = port.why_late(self.deadline);
            let run = self.take(index);
            self.go_on(index, run, part, transfer, op.buf, Err(error));
            return None;
        }
        let other = other.or_else(|| {
            let is_lost = self.ports[remote.pool.port(transfer.server)].is_lost();
            let skipped = transfer.bit() | transfer.damaged;
            let (found, member) = self.choose_any(remote, &group, skipped)?;
            let is_open = self.ports[remote.pool.port(member.server)].is_open();
            (is_lost || is_open).then_some((found, member))
        });
        match other {
            Some((at, member)) if (at, Some(member.id)) != (transfer.member, transfer.extent) => {
                transfer.aim((at, member));
                self.send_again(op.tag, transfer, op.buf);
                None
            }
            _ => Some(op),
        }
    }

    /// Takes the step behind a request that has ended, or that cannot be posted.
    pub(super) fn go_on(
        &mut self,
        index: usize,
        mut run: IoRun<R, F>,
        part: usize,
        mut transfer: SlotTransfer,
        buf: IoBuf<F>,
        result: Result<(), ChannelError>,
    ) {
        let store = run.store.clone();
        let remote = store.remote_backing();
        let in_time = run.started.elapsed() < self.deadline;
        if result.is_err() {
            transfer.attempts += 1;
            run.tally.retries += 1;
        }
        let RunPart {
            pages, has_moved, ..
        } = run.parts[part];
        let step = match run.way {
            Direction::Fill => self.read_on(remote, &mut transfer, result, in_time),
            Direction::WriteBack => {
                let outlook = (in_time, !has_moved);
                self.write_on(remote, &mut transfer, pages, result, outlook)
            }
        };
        match step {
            Step::End(result) => self.end_part((index, part), run, (transfer, buf), result),
            Step::Move => self.write_elsewhere(index, run, part, transfer, buf),
            Step::Send => {
                self.runs[index] = Some(run);
                self.send_again(tag_of(index, part), transfer, buf);
            }
        }
    }

    /// Chooses the step behind a READ.
    fn read_on(
        &mut self,
        remote: &RemoteStore,
        transfer: &mut SlotTransfer,
        result: Result<(), ChannelError>,
        in_time: bool,
    ) -> Step {
        let Err(error) = result else {
            return Step::End(Ok(()));
        };
        let group = remote.pool.group(transfer.place);
        let Some(group) = group.filter(|_| in_time) else {
            return Step::End(Err(error));
        };
        transfer.follow(&group);
        if self.aim_column(remote, &group, transfer) {
            return Step::Send;
        }
        let mut next = self.choose_copy(remote, &group, transfer, transfer.tried);
        let may_wait = !self.passive && !transfer.is_second_look;
        if next.is_none() && may_wait {
            next = self.choose_any(remote, &group, transfer.tried);
        }
        if next.is_none() && may_wait && error.is_transient() {
            // Every copy was tried: wait for any whose bytes are not damaged.
            transfer.tried = transfer.damaged;
            next = self.choose_any(remote, &group, transfer.tried);
        }
        if next.is_none() && may_wait && self.aim_decoding(remote, transfer, Way::Awaited) {
            return Step::Send;
        }
        match next {
            Some(next) => {
                transfer.aim(next);
                Step::Send
            }
            None => Step::End(Err(error)),
        }
    }

    /// Chooses the step behind a WRITE, or one that cannot be posted.
    fn write_on(
        &mut self,
        remote: &RemoteStore,
        transfer: &mut SlotTransfer,
        pages: usize,
        result: Result<(), ChannelError>,
        (in_time, may_move): (bool, bool),
    ) -> Step {
        let pool = &remote.pool;
        let group = (pool.group(transfer.place)).expect("an extent with live slots is kept");
        // 1. All members whose servers answer, one after the other. After the deadline only those
        //    whose ports are open: nothing is waited for.
        let open = self.ports.open_bits(remote, &group);
        let next = self.next_write(remote, &group, transfer);
        if let Some(next) = next.filter(|(at, _)| in_time || open & (1 << at) != 0) {
            transfer.aim(next);
            return Step::Send;
        }
        // 2. A member misses the bytes: other slots are better, if there are any that no member
        //    will miss; or, where all members miss them, any that a server takes that answers. Not
        //    twice: a server may answer, and take nothing. A refusal has nothing to do with slots.
        let good = group.good_bits();
        let bytes = transfer.bytes / pages as u32;
        let may_move = in_time && may_move && transfer.damaged == 0;
        let is_better = |choice| may_move && pool.has_room(bytes, choice);
        if good & !transfer.done != 0
            && (is_better(Choice::First) || good & transfer.done == 0 && is_better(Choice::Second))
        {
            return Step::Move;
        }
        // 3. A connection that broke just now may be back in a moment.
        if good & transfer.done != 0
            && in_time
            && !self.passive
            && let Some(next) = self.next_awaited(remote, &group, transfer)
        {
            transfer.aim(next);
            transfer.awaited |= transfer.bit();
            transfer.tried &= !transfer.bit();
            return Step::Send;
        }
        // 4. The members that miss the bytes are marked before any entry refers to them.
        if pool.settle_copies(transfer.place, transfer.done) {
            return Step::End(Ok(()));
        }
        // 5. No Good member has the bytes: wait for one.
        let is_transient = result.as_ref().err().is_none_or(ChannelError::is_transient);
        let next = self.choose_any(remote, &group, transfer.done);
        match next.filter(|_| in_time && is_transient) {
            Some(next) => {
                transfer.tried = 0;
                transfer.aim(next);
                Step::Send
            }
            None => {
                let port = &self.ports[pool.port(transfer.server)];
                let error = result.err();
                Step::End(Err(error.unwrap_or_else(|| port.why_late(self.deadline))))
            }
        }
    }

    /// Gives the slots of a write-back up, and lets its pages look for others.
    fn write_elsewhere(
        &mut self,
        index: usize,
        mut run: IoRun<R, F>,
        part: usize,
        transfer: SlotTransfer,
        buf: IoBuf<F>,
    ) {
        self.ops_in_flight -= 1;
        self.watch.ended(run.way.index(), u64::from(transfer.bytes));
        self.give_up_slots(&run, part, transfer);
        run.parts[part].has_moved = true;
        run.parts[part].task = match buf {
            IoBuf::Frame(frame) => {
                run.parts[part].frame = Some(frame);
                Task::Raw
            }
            IoBuf::Staging(block) => Task::Encoded {
                block,
                form: transfer.form,
                bytes: transfer.bytes,
            },
        };
        self.runs[index] = Some(run);
        self.wait_again(index);
    }

    /// Gives up the slots of a write-back that did not take place. The slots are used again once no
    /// WRITE can land there any more at a member that is read.
    pub(super) fn give_up_slots(&mut self, run: &IoRun<R, F>, part: usize, transfer: SlotTransfer) {
        let (pool, place) = (&run.store.remote_backing().pool, transfer.place);
        let pages = run.parts[part].pages;
        let bytes = transfer.bytes / pages as u32;
        let slots = transfer.places(pages, run.store.page_bytes);
        let slots = slots.map(|place| SlotSpan { place, bytes }).collect();
        // In this order: a group without writes under way and without doubts is settled.
        let slots = DoubtfulSlots::new(pool, slots);
        pool.end_writes(place, pages);
        if transfer.doubt == 0 {
            return;
        }
        if !pool.has_copies() {
            return self.ports[pool.port(transfer.server)].doubt(&slots, transfer.extent);
        }
        let group = pool.group(place);
        for (at, member) in group.iter().flat_map(ExtentGroup::good) {
            if transfer.doubt & (1 << at) != 0 {
                self.ports[pool.port(member.server)].doubt(&slots, Some(member.id));
            }
        }
    }

    /// True if the bytes of a page without copies have moved since its READ began.
    pub(super) fn has_moved(&self, tag: u64) -> bool {
        let run = self.run_of(tag);
        let transfer = run.moving(place_of(tag).1);
        run.way == Direction::Fill && transfer.has_moved_home(run.store.remote_backing())
    }

    /// Sends a READ that waits for a channel where its bytes have moved to, if they have. Returns
    /// it otherwise.
    pub(super) fn redirect_home(&mut self, op: Op<IoBuf<F>>) -> Option<Op<IoBuf<F>>> {
        if !self.has_moved(op.tag) {
            return Some(op);
        }
        let run = self.run_of(op.tag);
        let mut transfer = run.moving(place_of(op.tag).1);
        transfer.aim_home(run.store.remote_backing());
        self.send_again(op.tag, transfer, op.buf);
        None
    }
}
