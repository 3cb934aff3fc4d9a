//! [`Child`]: a process made by `fork`, as the keeper knows it, and its [`View`].
//!
//! The rule it keeps: the view alone says what a page holds that is not in the child's memory.

use std::{
    io, mem,
    ops::Range,
    os::fd::{AsRawFd, OwnedFd},
    sync::Arc,
};

use farpage_store::{EntryWords, PageIndex};
use farpage_vm::{Refusal, child::ChildMemory};

use super::{
    call::has_agents_alone,
    hooks::failed,
    image::Image,
    link,
    orders::{KERNEL_PAGE, Report, has_bit, shared},
    outgoing::{Outgoing, clear},
    stored::{Place, Stored},
};
use crate::ranges::Ranges;

/// Bytes of the pages that a child does not have in its memory: those of `stored` or else of the
/// image, and zeros where the child has dropped them since.
pub(super) struct View {
    pub(super) image: Arc<Image>,
    /// True where the child has dropped something since the fork.
    pub(super) removed: Ranges<bool>,
    pub(super) stored: Stored,
}

impl View {
    pub(super) fn of(image: Arc<Image>) -> View {
        View {
            image,
            removed: Ranges::new(),
            stored: Stored::default(),
        }
    }

    /// Returns the view of a process that the child makes by `fork` now.
    pub(super) fn inherit(&self) -> View {
        View {
            image: self.image.clone(),
            removed: self.removed.clone(),
            stored: self.stored.inherit(),
        }
    }
}

/// A process made by `fork`.
pub(super) struct Child {
    /// Number by which the child calls itself.
    pub(super) number: u64,
    /// Id of the process, if it has one here.
    pub(super) process: Option<libc::pid_t>,
    /// True if the process cannot be called to start an agent.
    pub(super) is_deaf: bool,
    /// Connection that the child keeps: its end kills the child, whose pages nobody brings then.
    pub(super) socket: OwnedFd,
    pub(super) is_hung_up: bool,
    /// Outcome of [`Child::tether`], once the child lives without its connection.
    tether: Option<io::Result<OwnedFd>>,
    pub(super) memory: ChildMemory,
    pub(super) outgoing: Outgoing,
    pub(super) view: View,
    /// Address behind the last pages that were asked for, and their number.
    pub(super) ahead: (usize, usize),
}

impl Child {
    /// Makes the state of a child with its number, its id here, and true if it
    /// [is deaf](Child::is_deaf).
    pub(super) fn new(
        (number, process, is_deaf): (u64, Option<libc::pid_t>, bool),
        socket: OwnedFd,
        memory: ChildMemory,
        view: View,
    ) -> Child {
        Child {
            number,
            process,
            is_deaf,
            socket,
            is_hung_up: false,
            tether: None,
            memory,
            outgoing: Outgoing::new(view.image.foreign().into_iter()),
            view,
            ahead: (0, 0),
        }
    }

    /// True if the child still has its memory.
    pub(super) fn is_alive(&self) -> bool {
        let Some(region) = self.view.image.regions.first() else {
            return false;
        };
        let entry = region.snapshot.store().entry_address(PageIndex(0));
        self.memory.read(entry, &mut [0]).unwrap_or(false)
    }

    /// Takes note of a range that the child has dropped. `is_idle` says that nothing reads a page
    /// just now.
    pub(super) fn drop_range(&mut self, range: Range<usize>, is_idle: impl Fn(usize) -> bool) {
        self.outgoing.drop_range(&range);
        self.forget(range, is_idle);
    }

    /// Takes note of a range that the child has unmapped, as of one that it has dropped.
    pub(super) fn unmap_range(&mut self, range: Range<usize>, is_idle: impl Fn(usize) -> bool) {
        self.outgoing.unmap_range(&range);
        self.forget(range, is_idle);
    }

    fn forget(&mut self, range: Range<usize>, is_idle: impl Fn(usize) -> bool) {
        let outgoing = &self.outgoing;
        let is_idle = |address| is_idle(address) && !outgoing.is_leaving(address);
        (self.view.stored).forget(&self.view.image, &range, is_idle);
        self.view.removed.change(&range, |it| *it = true);
    }

    /// Maps `bytes` at `address`, where nothing is.
    ///
    /// # Errors
    /// As [`ChildMemory::put`].
    pub(super) fn put(&mut self, address: usize, bytes: &[u8]) -> Result<(), Refusal> {
        let stale = &mut self.outgoing.stale;
        (self.memory).put(address, bytes, |mapped| {
            stale.change(&mapped, |it| *it = false)
        })
    }

    /// Takes over the pages that the agent has moved out. Those that the child has not changed are
    /// forgotten. A page of which only a part could be moved is to be put back.
    pub(super) fn take_moved(&mut self, report: &Report) {
        let Some(sent) = self.outgoing.take_sent() else {
            return;
        };
        if let Some(addresses) = sent.look {
            return self.adopt(report, &addresses);
        }
        let (scratch, page_bytes) = (report[0] as usize, sent.page_bytes);
        let mut any_left = false;
        for (at, &start) in sent.pages.iter().enumerate() {
            let offset = at * page_bytes;
            let kernel_page = |part: usize| part * KERNEL_PAGE..(part + 1) * KERNEL_PAGE;
            let parts = (0..page_bytes / KERNEL_PAGE).map(kernel_page);
            let (moved, rest): (Vec<_>, Vec<_>) =
                parts.partition(|part| has_bit(report, offset + part.start));
            if moved.is_empty() {
                self.outgoing.stays(start);
                continue;
            }
            let mut bytes = vec![0; page_bytes];
            let runs = runs(&moved);
            for run in &runs {
                let from = scratch + offset + run.start;
                match self.memory.read(from, &mut bytes[run.clone()]) {
                    Ok(true) => {}
                    Ok(false) => return,
                    Err(error) => {
                        failed(&format!(
                            "pages of a process made by fork are lost: it ends: {error}"
                        ));
                        return self.end();
                    }
                }
            }
            clear(&self.outgoing.stale, start, &mut bytes);
            let page = start..start + page_bytes;
            let is_zeros = |part: &Range<usize>| {
                let addresses = start + part.start..start + part.end;
                self.view.removed.all(&addresses, |it| it)
            };
            if !rest.iter().all(is_zeros) {
                for run in runs {
                    let back = (start + run.start, bytes[run].to_vec());
                    self.outgoing.back.push(back);
                }
                self.outgoing.stays(start);
                continue;
            }
            any_left = true;
            let region = (self.view.image.region(start)).expect("pages are in regions");
            let hash = region.snapshot.store().hash(&bytes);
            let was = self.outgoing.leaves(start);
            let is_known = match was {
                Some(was) => was == hash,
                None => self.has_parents(&page, &bytes),
            };
            if !is_known && !self.outgoing.stale.all(&page, |it| it) {
                self.view.removed.change(&page, |it| *it = false);
                self.outgoing.change(start, bytes);
            }
        }
        if !any_left && !sent.pages.is_empty() {
            self.outgoing.rest();
        }
    }

    /// Takes up pages that were found at `addresses`: they have been there since the fork.
    fn adopt(&mut self, report: &Report, addresses: &Range<usize>) {
        if shared(report) > 0 {
            self.outgoing.look_again(addresses.clone());
        }
        let Some(region) = self.view.image.region(addresses.start) else {
            return;
        };
        let page_bytes = region.page_bytes();
        let (_, first) = region.page(addresses.start);
        let pages = (first..addresses.end).step_by(page_bytes);
        for page in pages.map(|start| start..start + page_bytes) {
            let is_within = addresses.start <= page.start && page.end <= addresses.end;
            let parts = page.clone().step_by(KERNEL_PAGE);
            let mut offsets = parts.map(|part| part - addresses.start);
            let is_dropped = self.view.removed.has(&page, |it| it);
            if is_within && !is_dropped && offsets.all(|offset| has_bit(report, offset)) {
                self.outgoing.adopt(page.start, page_bytes);
            }
        }
    }

    /// True if the parent had the page that leaves with these bytes in remote memory at the fork.
    fn has_parents(&self, page: &Range<usize>, bytes: &[u8]) -> bool {
        let region = (self.view.image.region(page.start)).expect("pages are in regions");
        let is_image = matches!(self.view.stored.place(region, page.start), Place::Image);
        if !is_image || self.view.removed.has(page, |it| it) {
            return false;
        }
        let store = region.snapshot.store();
        let mut words = [0; size_of::<EntryWords>()];
        let entry = store.entry_address(region.page(page.start).0);
        let is_read = self.memory.read(entry, &mut words).unwrap_or(false);
        is_read && store.is_of(words_of(&words), bytes)
    }

    /// Puts pages back of which only a part could be moved out.
    pub(super) fn put_back(&mut self) {
        let parts = mem::take(&mut self.outgoing.back);
        for (address, bytes) in parts {
            match self.put(address, &bytes) {
                Ok(()) | Err(Refusal::Ended) => {}
                Err(_) => self.outgoing.back.push((address, bytes)),
            }
        }
    }

    /// Makes the end of the keeper kill the child, which has closed its connection and lives on.
    /// Tells people if that cannot be done.
    pub(super) fn tether(&mut self) {
        if self.tether.is_some() || !self.is_alive() {
            return;
        }
        let no_id = || io::Error::from_raw_os_error(libc::ESRCH);
        let process = self.process.ok_or_else(no_id);
        let tether = process.and_then(|process| link::tether(process, self.memory.fd()));
        let error = tether.as_ref().err().map(io::Error::to_string);
        self.tether = Some(tether);
        // The id may have been given to another process before it was used.
        if !self.is_alive() {
            return self.untether();
        }
        if let Some(error) = error {
            failed(&format!(
                "a process made by fork has closed all descriptors: it reads zeros if this one is \
                 killed: {error}"
            ));
        }
    }

    /// Keeps the end of the keeper from killing the child, which has ended or called `exec`.
    pub(super) fn untether(&mut self) {
        if let Some(Ok(tether)) = self.tether.take() {
            link::untether(tether);
        }
    }

    /// Kills the child: by its connection, or else by a tether.
    pub(super) fn end(&mut self) {
        // SAFETY: shuts down this process's own socket.
        unsafe { libc::shutdown(self.socket.as_raw_fd(), libc::SHUT_RDWR) };
        if !self.process.is_some_and(has_agents_alone) {
            self.tether();
        }
        self.tether = None;
    }
}

/// Joins parts that lie next to each other.
fn runs(parts: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for part in parts {
        match runs.last_mut() {
            Some(run) if run.end == part.start => run.end = part.end,
            _ => runs.push(part.clone()),
        }
    }
    runs
}

/// Page on its way into a child.
#[derive(Clone, Copy)]
pub(super) struct Arriving {
    pub(super) child: u64,
    pub(super) address: usize,
    /// True if a thread of the child waits for the page.
    pub(super) is_wanted: bool,
    /// True if the view has other bytes of the page, which could not be written.
    pub(super) is_only_copy: bool,
}

/// Returns the words of an entry as another process has them.
pub(super) fn words_of(bytes: &[u8; mem::size_of::<EntryWords>()]) -> EntryWords {
    let (words, _) = bytes.as_chunks::<8>();
    std::array::from_fn(|at| u64::from_ne_bytes(words[at]))
}
