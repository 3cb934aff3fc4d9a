//! [`Outgoing`]: pages that the keeper has brought into a child, and their way out again.
//!
//! A page is *present* once it was brought in; *sent* while the agent is told to move it; *leaving*
//! while its changed bytes are written to the child's store. In all other states the
//! [`View`](super::forked::View) says what it holds.
//!
//! The rules it keeps:
//! - No page is sent that is on its way in, and none is brought in while it is sent. So what has
//!   moved is what was written since the page was put, and a late READ replaces nothing.
//! - The kernel tells of a drop before the pages go, and the thread that drops them sleeps until
//!   the event is read. So no event is read while a move is under way. Until something is put
//!   there anew, a page with dropped addresses is *stale*, and is not sent: it may have what the
//!   child has dropped, or what the child has written since.
//! - A changed page is in the child's store when its WRITE is complete. Until then the keeper has
//!   the bytes, and puts them back if the WRITE fails. Drops meanwhile are the view's.
//! - A page that is not the region's any more as a whole stays. Not covered: a thread of the child
//!   that maps other memory where another has just unmapped a page that is sent.
//! - Nothing is sent while a process that the child is making by `fork` has not called: its view
//!   has no page that leaves later.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    io, mem,
    ops::Range,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use super::{
    hooks::grown,
    orders::{Command, EMPTY_REPORT, LOOK_BYTES, Report, batch_pages, command, look},
};
use crate::ranges::Ranges;

/// Bytes of a child that are worth an agent.
const GROWN_BYTES: usize = 16 << 20;
/// Time for which an agent may take to come, and to answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// Time for which nothing is sent after an answer that no page has left, and for which each page
/// waits for an agent that was called.
const REST: Duration = Duration::from_millis(100);
/// Least and longest time between two looks at pages that a child shares: it doubles where none has
/// become the child's own, as in pools of workers.
const LOOK_PAUSE: Duration = Duration::from_millis(500);
const LOOK_PAUSE_MAX: Duration = Duration::from_secs(8);
/// Upper bound of the bytes of a child that are being written.
const LEAVING_BYTES_MAX: usize = 2 << 20;

/// Pages of a child that the keeper has brought in.
#[derive(Default)]
pub(super) struct Outgoing {
    agent: Agent,
    /// Pages in the child's memory, by address.
    present: BTreeMap<usize, Present>,
    /// Addresses in the order in which the pages were brought in, with the stamp of that moment.
    order: VecDeque<(usize, u64)>,
    stamp: u64,
    /// Bytes of the pages that are present.
    bytes: usize,
    /// Bytes of all pages that were brought in.
    brought_bytes: usize,
    /// Time of the last page that came while the agent was called and not there.
    brought_at: Option<Instant>,
    /// Addresses that the child has dropped, and where nothing has been mapped since.
    pub(super) stale: Ranges<bool>,
    /// Addresses that are not the region's any more, whatever is mapped there. A page that has some
    /// of them stays.
    foreign: Ranges<bool>,
    sent: Option<Sent>,
    /// True if the scratch has pages that nobody needs.
    is_scratch_used: bool,
    /// Changed pages that the I/O queue has had no room for.
    pub(super) to_write: VecDeque<(usize, Vec<u8>)>,
    /// Changed pages that are not written yet: true if a thread of the child waits for the page.
    leaving: HashMap<usize, bool>,
    leaving_bytes: usize,
    /// Parts of pages that are to be put back as they are.
    pub(super) back: Vec<(usize, Vec<u8>)>,
    rests_until: Option<Instant>,
    /// Time of the first try to call the child while it held the signal back.
    postponed_since: Option<Instant>,
    /// Addresses to look for pages at that were there at the fork.
    looks: VecDeque<Range<usize>>,
    /// Addresses that have been looked at and are to be looked at again, and the time for it.
    again: Vec<Range<usize>>,
    looks_at: Option<Instant>,
    /// Time between two looks, once one has taken up no page.
    look_pause: Option<Duration>,
    /// True if a page was taken up since the last look began.
    has_adopted: bool,
    /// True from the first failure on: nothing is sent any more.
    has_ended: bool,
    is_told: bool,
}

/// Page in the memory of a child.
struct Present {
    bytes: usize,
    /// Hash of the bytes that the view has of the page. `None` if only the child has the page.
    hash: Option<u128>,
    stamp: u64,
}

/// Command under way.
pub(super) struct Sent {
    pub(super) pages: Vec<usize>,
    pub(super) page_bytes: usize,
    /// Addresses that the agent looks at in place of moving pages.
    pub(super) look: Option<Range<usize>>,
    since: Instant,
}

/// Agent of a child.
#[derive(Default)]
enum Agent {
    #[default]
    NotCalled,
    Called(Instant),
    /// Connection of an agent that is there; true once its first report has come.
    Here(OwnedFd, bool),
    Gone(Instant),
}

impl Outgoing {
    /// Makes the state of a child without pages. `foreign` are addresses in regions that the child
    /// does not have.
    pub(super) fn new(foreign: impl Iterator<Item = Range<usize>>) -> Outgoing {
        let mut outgoing = Outgoing::default();
        foreign.for_each(|range| outgoing.foreign.change(&range, |it| *it = true));
        outgoing
    }

    /// Returns the bytes of the pages that are present.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Notes that the page at `address` is present. `hash` is that of the view's bytes.
    pub(super) fn brought(&mut self, address: usize, bytes: usize, hash: Option<u128>) {
        self.brought_bytes += bytes;
        if let Agent::Called(_) = self.agent {
            self.brought_at = Some(Instant::now());
        }
        if self.foreign.has(&(address..address + bytes), |it| it) {
            return;
        }
        self.stamp += 1;
        let stamp = self.stamp;
        let page = Present { bytes, hash, stamp };
        if self.present.insert(address, page).is_none() {
            self.bytes += bytes;
        }
        self.order.push_back((address, stamp));
        if self.order.len() > 2 * self.present.len() + 64 {
            let present = &self.present;
            let is_last = |&(at, stamp): &(usize, u64)| {
                present.get(&at).is_some_and(|page| page.stamp == stamp)
            };
            self.order.retain(is_last);
        }
    }

    /// Takes note of addresses that the child has dropped.
    pub(super) fn drop_range(&mut self, range: &Range<usize>) {
        let pages = self.present.range(range.clone());
        let gone = pages.filter(|(at, page)| *at + page.bytes <= range.end);
        let gone: Vec<usize> = gone.map(|(&at, _)| at).collect();
        for address in gone {
            self.leaves(address);
        }
        self.stale.change(range, |it| *it = true);
        let mut dropped = Ranges::new();
        dropped.change(range, |it| *it = true);
        for (address, bytes) in &mut self.back {
            clear(&dropped, *address, bytes);
        }
    }

    /// Takes note of addresses that the child has unmapped: no page of them is moved any more.
    pub(super) fn unmap_range(&mut self, range: &Range<usize>) {
        let before = self.present.range(..range.start).next_back();
        let before = before.filter(|(at, page)| *at + page.bytes > range.start);
        let within = self.present.range(range.clone());
        let gone: Vec<usize> = before
            .into_iter()
            .chain(within)
            .map(|(&at, _)| at)
            .collect();
        for address in gone {
            self.leaves(address);
        }
        self.drop_range(range);
        self.foreign.change(range, |it| *it = true);
    }

    /// True if changed bytes of the page at `address` are being written.
    pub(super) fn is_leaving(&self, address: usize) -> bool {
        self.leaving.contains_key(&address)
    }

    /// Takes a page out of those that are present. Returns its hash, if the view has its bytes.
    pub(super) fn leaves(&mut self, address: usize) -> Option<u128> {
        let page = self.present.remove(&address)?;
        self.bytes -= page.bytes;
        page.hash
    }

    /// Notes that a page could not be moved out: it is tried again after all others.
    pub(super) fn stays(&mut self, address: usize) {
        if let Some(page) = self.present.get(&address) {
            self.order.push_back((address, page.stamp));
        }
    }

    /// Takes changed bytes of a page that has left.
    pub(super) fn change(&mut self, address: usize, bytes: Vec<u8>) {
        self.leaving.insert(address, false);
        self.leaving_bytes += bytes.len();
        self.to_write.push_back((address, bytes));
    }

    /// Notes that the WRITE of a page has ended. Returns true if a thread waits for the page.
    pub(super) fn has_left(&mut self, address: usize, bytes: usize) -> bool {
        self.leaving_bytes -= bytes;
        self.leaving.remove(&address).unwrap_or(false)
    }

    /// Marks the page at `address`, if it is leaving, as one that a thread waits for. Returns false
    /// if the page is not leaving.
    pub(super) fn want(&mut self, address: usize) -> bool {
        let leaving = self.leaving.get_mut(&address);
        leaving.map(|is_wanted| *is_wanted = true).is_some()
    }

    /// True if nothing can be brought to the page at `address` now: it is sent, or put back.
    pub(super) fn is_held(&self, page: &Range<usize>) -> bool {
        let is_sent = |sent: &Sent| sent.pages.contains(&page.start);
        self.sent.as_ref().is_some_and(is_sent)
            || (self.back.iter()).any(|(address, _)| page.contains(address))
    }

    /// True if the page at `address` need not be read ahead: it is in the child's memory, or on its
    /// way out.
    pub(super) fn has(&self, page: &Range<usize>) -> bool {
        self.present.contains_key(&page.start)
            || self.leaving.contains_key(&page.start)
            || self.is_held(page)
    }

    /// True if nothing is on its way out.
    pub(super) fn is_settled(&self) -> bool {
        self.sent.is_none() && self.leaving.is_empty() && self.back.is_empty()
    }

    /// True if a move is under way. The child's events are not read meanwhile: a thread that drops
    /// or unmaps pages goes on when its event is read, and may write there at once. Events are read
    /// again if the answer is late.
    pub(super) fn is_moving(&self) -> bool {
        let is_move = |sent: &Sent| !sent.pages.is_empty() && sent.since.elapsed() < PATIENCE;
        matches!(self.agent, Agent::Here(..)) && self.sent.as_ref().is_some_and(is_move)
    }

    /// True if pages have to leave before another of `bytes` bytes comes.
    pub(super) fn is_full(&self, bytes: usize, share: usize) -> bool {
        let is_late = |sent: &Sent| sent.since.elapsed() > PATIENCE;
        let has_agent = match &self.agent {
            Agent::Here(_, true) => !self.rests() && !self.sent.as_ref().is_some_and(is_late),
            Agent::Here(_, false) => true,
            // A thread that waits for a page inside a system call runs no handler, so that pages
            // come one by one.
            Agent::Called(since) => self.brought_at.unwrap_or(*since).elapsed() < REST,
            Agent::NotCalled => self.wants_agent(),
            Agent::Gone(_) => false,
        };
        // Pages leave from this threshold on: below it, a page would be waited for without end.
        let may_leave = self.bytes > threshold(share);
        self.bytes + bytes > share && may_leave && has_agent && !self.has_ended
    }

    fn rests(&self) -> bool {
        self.rests_until.is_some_and(|until| Instant::now() < until)
    }

    /// Sends nothing for a while.
    pub(super) fn rest(&mut self) {
        self.rests_until = Some(Instant::now() + REST);
    }

    /// True if an agent should be called.
    pub(super) fn wants_agent(&self) -> bool {
        let is_grown = self.brought_bytes >= GROWN_BYTES;
        matches!(self.agent, Agent::NotCalled) && is_grown && !self.rests()
    }

    /// Notes that the child cannot be called for a while.
    pub(super) fn postpone(&mut self) {
        self.rest();
        let since = *self.postponed_since.get_or_insert_with(Instant::now);
        if since.elapsed() > PATIENCE && !self.is_told {
            self.is_told = true;
            grown(self.brought_bytes, "it holds SIGURG back");
        }
    }

    /// Notes that the agent has been called.
    pub(super) fn has_called(&mut self) {
        self.agent = Agent::Called(Instant::now());
        self.brought_at = None;
    }

    /// Takes the connection of the agent, of a child that has these parts of regions.
    pub(super) fn welcome(&mut self, socket: OwnedFd, parts: &[Range<usize>]) {
        self.agent = Agent::Here(socket, false);
        for part in parts {
            let starts = part.clone().step_by(LOOK_BYTES);
            let look = |start| start..part.end.min(start + LOOK_BYTES);
            self.looks.extend(starts.map(look));
        }
    }

    /// Notes that the agent is to look at addresses again: the child shares pages there, which may
    /// be its own later.
    pub(super) fn look_again(&mut self, addresses: Range<usize>) {
        self.again.push(addresses);
    }

    /// Takes up a page that has been in the child's memory since the fork.
    pub(super) fn adopt(&mut self, address: usize, bytes: usize) {
        if !self.present.contains_key(&address) {
            let brought_bytes = self.brought_bytes;
            self.brought(address, bytes, None);
            self.brought_bytes = brought_bytes;
            self.has_adopted = true;
        }
    }

    /// Returns the next addresses to look at, if it is time. Looks again only at a child that has
    /// more than half of its share.
    fn next_look(&mut self, share: usize) -> Option<Range<usize>> {
        if self.looks.is_empty() && !self.again.is_empty() {
            if self.bytes <= share / 2 {
                self.looks_at = None;
                return None;
            }
            let pause = self.look_pause.unwrap_or(LOOK_PAUSE);
            let at = *(self.looks_at).get_or_insert_with(|| Instant::now() + pause);
            if Instant::now() < at {
                return None;
            }
            self.looks_at = None;
            let is_idle = !mem::take(&mut self.has_adopted);
            self.look_pause = is_idle.then(|| (2 * pause).min(LOOK_PAUSE_MAX));
            self.looks.extend(self.again.drain(..));
        }
        self.looks.pop_front()
    }

    /// Ends the agent, if it is there: its connection ends.
    pub(super) fn let_go(&mut self) {
        if matches!(self.agent, Agent::Here(..)) {
            self.agent = Agent::Gone(Instant::now());
        }
    }

    /// Gives up moving pages out, and says why.
    pub(super) fn give_up(&mut self, why: &str) {
        self.has_ended = true;
        if matches!(self.agent, Agent::NotCalled) {
            self.agent = Agent::Gone(Instant::now());
        }
        if !self.is_told {
            self.is_told = true;
            grown(self.brought_bytes, why);
        }
    }

    /// Returns the connection of the agent.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.agent {
            Agent::Here(socket, _) => Some(socket.as_fd()),
            _ => None,
        }
    }

    /// Returns the time when an agent that does not come or answer is late.
    pub(super) fn is_late_at(&self) -> Option<Instant> {
        match (&self.agent, &self.sent) {
            (Agent::Called(since), _) => Some(*since + PATIENCE),
            (Agent::Gone(since), Some(_)) => Some(*since + PATIENCE),
            (_, Some(sent)) if !self.is_told || self.is_moving() => Some(sent.since + PATIENCE),
            (Agent::Here(..), None) if !self.has_ended => {
                let rests_until = self.rests_until.filter(|_| self.rests());
                rests_until.or(self.looks_at)
            }
            _ => None,
        }
    }

    /// Sees to an agent that is late. Returns false if pages are lost with it.
    pub(super) fn see_to_agent(&mut self) -> bool {
        let is_late = |since: Instant| since.elapsed() >= PATIENCE;
        match (&self.agent, &self.sent) {
            (Agent::Called(since), _) if is_late(*since) => {
                let since = *since;
                self.give_up(
                    "it has started no agent: it holds SIGURG back or handles it, or the kernel is older than 6.8",
                );
                // An agent that comes late finds pages that may leave.
                self.has_ended = false;
                self.agent = Agent::Gone(since);
            }
            (Agent::Gone(since), Some(_)) if is_late(*since) => return false,
            (Agent::Gone(since), None) if is_late(*since) && !self.is_told => {
                self.give_up("its agent has ended");
            }
            (Agent::Here(..), Some(sent)) if is_late(sent.since) && !self.is_told => {
                self.is_told = true;
                grown(
                    self.brought_bytes,
                    "its agent does not answer: is it stopped?",
                );
            }
            _ => {}
        }
        true
    }

    /// Returns the agent's report, if one has come.
    pub(super) fn hear(&mut self) -> Option<Report> {
        let Agent::Here(socket, is_ready) = &mut self.agent else {
            return None;
        };
        let mut report = EMPTY_REPORT;
        let (bytes, flags) = (size_of::<Report>(), libc::MSG_DONTWAIT);
        // SAFETY: there is room for a report.
        let received = unsafe {
            let room = report.as_mut_ptr().cast();
            libc::recv(socket.as_raw_fd(), room, bytes, flags)
        };
        if received == bytes.cast_signed() {
            let is_first = !*is_ready;
            *is_ready = true;
            return (!is_first).then_some(report);
        }
        let error = io::Error::last_os_error();
        if received >= 0 || error.kind() != io::ErrorKind::WouldBlock {
            self.agent = Agent::Gone(Instant::now());
            self.sent.take_if(|sent| sent.pages.is_empty());
        }
        None
    }

    /// Returns the command under way, which has been answered.
    pub(super) fn take_sent(&mut self) -> Option<Sent> {
        let sent = self.sent.take();
        self.is_scratch_used |= sent.as_ref().is_some_and(|sent| !sent.pages.is_empty());
        sent
    }

    /// Tells the agent to move pages out if the child has nearly more than its share, or to free
    /// the scratch. `is_busy` says that a page is on its way in.
    pub(super) fn send(&mut self, share: usize, is_busy: impl Fn(usize) -> bool) {
        let is_ready = matches!(self.agent, Agent::Here(_, true));
        if !is_ready || self.sent.is_some() {
            return;
        }
        let mut batch = (Vec::new(), 0);
        let may_send = !self.has_ended && !self.rests() && self.leaving_bytes < LEAVING_BYTES_MAX;
        if may_send && self.bytes > threshold(share) {
            batch = self.batch(self.bytes - (share - share / 4), &is_busy);
            if batch.0.is_empty() && !self.present.keys().any(|&address| is_busy(address)) {
                // All pages are stale: no fault may wait for one to leave.
                self.rest();
            }
        }
        let (pages, page_bytes) = batch;
        let is_idle = pages.is_empty() && !self.is_scratch_used;
        let looked_at = if is_idle && !self.has_ended {
            self.next_look(share)
        } else {
            None
        };
        if is_idle && looked_at.is_none() {
            return;
        }
        self.is_scratch_used = false;
        let command = match &looked_at {
            Some(addresses) => look(addresses),
            None => command(&pages, page_bytes),
        };
        let Agent::Here(socket, _) = &self.agent else {
            return;
        };
        let (bytes, flags) = (
            size_of::<Command>(),
            libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
        );
        // SAFETY: the command lasts for the call.
        let said = unsafe { libc::send(socket.as_raw_fd(), command.as_ptr().cast(), bytes, flags) };
        if said != bytes.cast_signed() {
            pages.iter().for_each(|&page| self.stays(page));
            self.agent = Agent::Gone(Instant::now());
            return;
        }
        self.sent = Some(Sent {
            pages,
            page_bytes,
            look: looked_at,
            since: Instant::now(),
        });
    }

    /// Returns the pages that came first, of one length, and that length. Passes over stale pages:
    /// a page that the kernel may free stays mapped, and a write to it raises no fault.
    fn batch(&mut self, bytes: usize, is_busy: impl Fn(usize) -> bool) -> (Vec<usize>, usize) {
        let (mut pages, mut page_bytes) = (Vec::new(), 0);
        for _ in 0..self.order.len() {
            let Some((address, stamp)) = self.order.pop_front() else {
                break;
            };
            let page = self.present.get(&address);
            let Some(page) = page.filter(|page| page.stamp == stamp) else {
                continue;
            };
            let addresses = address..address + page.bytes;
            if is_busy(address) || self.stale.has(&addresses, |it| it) {
                self.order.push_back((address, stamp));
                continue;
            }
            if !pages.is_empty() && page.bytes != page_bytes {
                self.order.push_front((address, stamp));
                break;
            }
            page_bytes = page.bytes;
            pages.push(address);
            if pages.len() == batch_pages(page_bytes) || pages.len() * page_bytes >= bytes {
                break;
            }
        }
        (pages, page_bytes)
    }
}

/// Returns the bytes of a child from which on pages leave it.
fn threshold(share: usize) -> usize {
    share - share / 8
}

/// Makes the parts of `bytes`, which lie at `address`, zeros that were dropped.
pub(super) fn clear(dropped: &Ranges<bool>, address: usize, bytes: &mut [u8]) {
    for part in dropped.those(&(address..address + bytes.len()), |it| it) {
        bytes[part.start - address..part.end - address].fill(0);
    }
}
