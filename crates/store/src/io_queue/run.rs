//! [`IoRun`]: pages next to each other that one request to an I/O queue moves, cut into parts that
//! move on their own; the frame that holds their bytes ([`RunBuffer`]), and the end
//! ([`RunCompletion`]).
//!
//! The rule it keeps: the parts are cut out of one frame and cover it; when the last part has
//! ended, all are put together again, in page order. Moving the parts is left to the I/O queue.

use std::{io, sync::Arc, time::Instant};

use crossbeam_channel::Sender;
use farpage_fabric::{ChannelError, ExtentId, Since, Verb, regmem::RegBuf};

use crate::{
    EntryWords, PageIndex, PageStore, StoreError, StoreStatsSnapshot,
    blocking::{BlockingStore, StoreCallError, StoreJob, Waker},
    codec::{Form, READ, WRITE},
    parity::SET_MAX,
    place::SlotPlace,
    remote::RemoteStore,
};

/// Most bytes that one READ of neighbouring pages brings, so that they are hashed while they are in
/// the second-level cache. A larger page is one operation. Measured over shm: READ and hash of 512
/// KiB take a quarter less time in pieces of 64 to 128 KiB than as a whole; over tcp the pieces
/// travel as one batch, and their length makes no difference.
const READ_BYTES_MAX: u32 = 128 << 10;

/// A local buffer that holds the bytes of a run of pages and can be cut between them and put
/// together again. Never registered with a network adapter: its pages circulate, and pinned pages
/// do not move.
pub trait RunBuffer: AsRef<[u8]> + AsMut<[u8]> + Sized + Send + 'static {
    /// Keeps the first `bytes` (whole pages, not all, not none) and returns the rest.
    fn split_off(&mut self, bytes: usize) -> Self;

    /// Appends `next` if it lies directly behind.
    ///
    /// # Errors
    /// `next`, if it lies elsewhere.
    fn join(&mut self, next: Self) -> Result<(), Self>;
}

impl RunBuffer for Vec<u8> {
    fn split_off(&mut self, bytes: usize) -> Self {
        self.split_off(bytes)
    }

    fn join(&mut self, next: Self) -> Result<(), Self> {
        self.extend(next);
        Ok(())
    }
}

/// Completion of one request.
#[derive(Debug)]
pub struct RunCompletion<R, F> {
    /// The request, as given.
    pub request: R,
    /// The frame, as given. Bytes of failed fills are unspecified; a write-back changes none.
    pub frame: F,
    /// Counts of the pages that did not fail.
    pub outcome: RunCounts,
    /// The pages that failed, in ascending order, and why. All other pages are done.
    pub failed: Vec<(PageIndex, StoreError)>,
    /// Beginning of the request.
    pub timing: RunTiming,
}

/// Beginning of a request: when the queue had room for it.
#[derive(Clone, Copy, Debug)]
pub struct RunTiming {
    /// Time of the beginning.
    pub began: Instant,
    /// True if nothing was under way before.
    pub alone: bool,
    /// True if the request began and ended in one [turn](super::IoQueue::begin_turn) of the queue's
    /// driver, which says nothing about the link.
    pub at_once: bool,
}

/// Counts of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunCounts {
    /// Pages of a write-back that were unchanged.
    pub clean: u32,
    /// Pages of a write-back whose new bytes are in their store now.
    pub written: u32,
    /// Payload bytes that moved; 0 when no request was needed.
    pub wire_bytes: u64,
}

/// Direction in which the pages of a run move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Fill,
    WriteBack,
}

impl Direction {
    /// Returns the verb on the fabric.
    pub(super) fn verb(self) -> Verb {
        match self {
            Self::Fill => Verb::Read,
            Self::WriteBack => Verb::Write,
        }
    }

    /// Returns the index of the direction in counters.
    pub(super) fn index(self) -> usize {
        match self {
            Self::Fill => READ,
            Self::WriteBack => WRITE,
        }
    }

    /// Returns the operation's name in errors.
    pub(super) fn operation(self) -> &'static str {
        match self {
            Self::Fill => "fill",
            Self::WriteBack => "write-back",
        }
    }
}

/// Request to an I/O queue, from its call until its end.
pub(super) struct IoRun<R, F> {
    pub(super) request: R,
    pub(super) store: Arc<PageStore>,
    pub(super) way: Direction,
    /// The first page.
    pub(super) page: PageIndex,
    pub(super) started: Since,
    timing: RunTiming,
    /// Numbers of the poll and of the driver's turn in which the run began, or was made if it has
    /// not begun.
    begun_in: (u64, u64),
    /// Parts, in page order at first. Parts that are split off later follow in any order, since
    /// tags refer to positions.
    pub(super) parts: Vec<RunPart<F>>,
    /// Hash of each page, which a fill must bring or a write-back stores.
    pub(super) hashes: Vec<u128>,
    /// Number of parts that have not ended.
    open: usize,
    /// Counts of the ended pages, for the store's counters.
    pub(super) tally: StoreStatsSnapshot,
    failed: Vec<(PageIndex, StoreError)>,
}

/// The vectors of a run that has ended, empty, so that the next one allocates nothing.
pub(super) type Spare<F> = (Vec<RunPart<F>>, Vec<u128>);

/// Pages of a run that move together.
pub(super) struct RunPart<F> {
    /// Number of the first page within the run.
    pub(super) first: usize,
    pub(super) pages: usize,
    /// The part's bytes, unless they travel.
    pub(super) frame: Option<F>,
    /// Sum of the sources of an encoded page. That of raw pages is in `frame`.
    pub(super) sum: Option<RegBuf>,
    pub(super) task: Task,
    /// True if the pages were given other slots because a copy of the first ones missed a WRITE.
    pub(super) has_moved: bool,
}

/// Next step of a part.
pub(super) enum Task {
    /// All pages of a run that has not begun: the queue has no room yet. A page of another process
    /// comes with its entry.
    Held(Option<EntryWords>),
    /// The part has ended.
    Ended,
    /// A READ to be posted; an encoded page needs a staging buffer first.
    Fetch(SlotTransfer),
    /// One changed page, to be encoded once there is a staging buffer.
    Encode,
    /// One changed page, encoded, which needs a slot.
    Encoded {
        block: RegBuf,
        form: Form,
        bytes: u32,
    },
    /// Changed pages, to be written as they are once there are slots.
    Raw,
    /// A request under way.
    Moving(SlotTransfer),
    /// A call of a user's store.
    Call,
}

/// Pages in a row in remote memory.
#[derive(Clone, Copy)]
pub(super) struct SlotTransfer {
    pub(super) place: SlotPlace,
    /// Server that the request goes to, and the server's position among the copies.
    pub(super) server: u8,
    pub(super) member: u8,
    /// Extent that the request goes to: a copy, the page's only one, or that of a place that
    /// another process names, which may cease to be one. `None` before the first request.
    pub(super) extent: Option<ExtentId>,
    pub(super) bytes: u32,
    pub(super) form: Form,
    /// Number of attempts.
    pub(super) attempts: u32,
    /// Positions of copies, as bits, that have all bytes of a WRITE.
    pub(super) done: u8,
    /// Positions of copies where the request failed since all were last tried.
    pub(super) tried: u8,
    /// Positions where a WRITE seemed lost: it may still arrive unless it succeeds on a new
    /// channel.
    pub(super) doubt: u8,
    /// Positions of copies whose bytes did not match their hash, or that refused the request for
    /// good.
    pub(super) damaged: u8,
    /// Positions of copies whose servers were given time to open a broken channel again.
    pub(super) awaited: u8,
    /// Number of the group's replaced members when the positions were noted.
    pub(super) changes: u32,
    /// True for a READ that repeats one whose bytes did not match their hash.
    pub(super) is_second_look: bool,
    /// Decoding of the bytes out of other columns of the parity set.
    pub(super) decoding: Decoding,
}

/// State of the decoding of a transfer's bytes. Positions are those of the parity set, as bits.
#[derive(Clone, Copy, Default)]
pub(super) struct Decoding {
    /// Positions of the extents that the bytes are computed from.
    pub(super) sources: u16,
    /// Positions of the sources that have not come.
    pub(super) left: u16,
    /// Positions of the sources that have not been asked for.
    pub(super) unsent: u16,
    /// Positions of extents that refused to be read.
    pub(super) refused: u16,
    /// Position of a source of earlier decodings that is left out, since these brought damaged
    /// bytes.
    pub(super) left_out: u16,
    /// Number of decodings that brought damaged bytes.
    pub(super) damaged: u8,
    /// Coefficients of the sources, by position.
    pub(super) recipe: [u8; SET_MAX],
}

impl SlotTransfer {
    pub(super) fn new(place: SlotPlace, bytes: u32, form: Form) -> Self {
        Self {
            place,
            server: place.server,
            member: 0,
            extent: None,
            bytes,
            form,
            attempts: 1,
            done: 0,
            tried: 0,
            doubt: 0,
            damaged: 0,
            awaited: 0,
            changes: 0,
            is_second_look: false,
            decoding: Decoding::default(),
        }
    }

    /// Returns the places of the transfer's pages.
    pub(super) fn places(
        self,
        pages: usize,
        page_bytes: usize,
    ) -> impl ExactSizeIterator<Item = SlotPlace> {
        (0..pages).map(move |i| SlotPlace {
            offset: self.place.offset + (i * page_bytes) as u64,
            ..self.place
        })
    }

    /// True if `next` may become the end of this transfer.
    fn is_followed_by(&self, next: &Self) -> bool {
        let end = self.place.offset + u64::from(self.bytes);
        (self.form, next.form) == (Form::Raw, Form::Raw)
            && (self.place.server, self.place.extent, end)
                == (next.place.server, next.place.extent, next.place.offset)
            && self.bytes + next.bytes <= READ_BYTES_MAX
    }
}

impl Task {
    /// Takes the next page's task in, if both pages can move together.
    fn join(&mut self, next: &Self) -> bool {
        match (self, next) {
            (Self::Ended, Self::Ended) | (Self::Raw, Self::Raw) | (Self::Call, Self::Call) => true,
            (Self::Fetch(transfer), Self::Fetch(next)) if transfer.is_followed_by(next) => {
                transfer.bytes += next.bytes;
                true
            }
            _ => false,
        }
    }
}

impl<R, F: RunBuffer> IoRun<R, F> {
    /// Makes a run in this poll and turn of the queue. The run is held until it
    /// [begins](Self::begin).
    pub(super) fn new(
        way: Direction,
        (request, store, page): (R, &Arc<PageStore>, PageIndex),
        (frame, entry): (F, Option<EntryWords>),
        (mut parts, hashes): Spare<F>,
        begun_in: (u64, u64),
    ) -> Self {
        parts.push(RunPart {
            first: 0,
            pages: frame.as_ref().len() / store.page_bytes,
            frame: Some(frame),
            sum: None,
            task: Task::Held(entry),
            has_moved: false,
        });
        Self {
            request,
            store: store.clone(),
            way,
            page,
            started: Since::now(),
            timing: RunTiming {
                began: Instant::now(),
                alone: false,
                at_once: false,
            },
            begun_in,
            parts,
            hashes,
            open: 1,
            tally: StoreStatsSnapshot::default(),
            failed: Vec::new(),
        }
    }

    /// True until the run begins.
    pub(super) fn is_held(&self) -> bool {
        matches!(self.parts[0].task, Task::Held(_))
    }

    /// Begins the run in this poll and turn of the queue, without pages: the caller
    /// [adds](Self::add) them and [cuts](Self::cut) the frame. Returns the frame, and the entry of
    /// a page of another process.
    pub(super) fn begin(&mut self, alone: bool, begun_in: (u64, u64)) -> (F, Option<EntryWords>) {
        if begun_in.0 != self.begun_in.0 {
            // The queue had no room until now.
            (self.started, self.timing.began) = (Since::now(), Instant::now());
        }
        self.begun_in = begun_in;
        self.timing.alone = alone;
        self.open = 0;
        let part = self.parts.pop().expect("a held run is one part");
        let Task::Held(entry) = part.task else {
            unreachable!("a run begins once")
        };
        (part.frame.expect("a held run is here"), entry)
    }

    /// Gives a held run up. Returns its request and frame, and its vectors for the next run.
    pub(super) fn withdraw(mut self) -> (R, F, Spare<F>) {
        let (frame, _) = self.begin(false, self.begun_in);
        (self.request, frame, (self.parts, self.hashes))
    }

    /// Adds the next page. `hash` means nothing if the task has ended.
    pub(super) fn add(&mut self, task: Task, hash: u128) {
        let first = self.hashes.len();
        self.hashes.push(hash);
        if let Some(last) = self.parts.last_mut()
            && last.task.join(&task)
        {
            last.pages += 1;
            return;
        }
        self.open += usize::from(!matches!(task, Task::Ended));
        self.parts.push(RunPart {
            first,
            pages: 1,
            frame: None,
            sum: None,
            task,
            has_moved: false,
        });
    }

    /// Gives each part its piece of the frame.
    pub(super) fn cut(&mut self, frame: F) {
        let page_bytes = self.store.page_bytes;
        let mut rest = Some(frame);
        let last = self.parts.len() - 1;
        for (i, part) in self.parts.iter_mut().enumerate() {
            let mut frame = rest.take().expect("the parts cover the frame");
            if i < last {
                rest = Some(frame.split_off(part.pages * page_bytes));
            }
            part.frame = Some(frame);
        }
    }

    /// Splits the pages behind the first `pages` off a part. Returns the index of the new part.
    pub(super) fn split(&mut self, part: usize, pages: usize) -> usize {
        let page_bytes = self.store.page_bytes;
        let part = &mut self.parts[part];
        let frame = part.frame.as_mut().expect("a part that waits is here");
        let rest = RunPart {
            first: part.first + pages,
            pages: part.pages - pages,
            frame: Some(frame.split_off(pages * page_bytes)),
            sum: None,
            task: Task::Raw,
            has_moved: part.has_moved,
        };
        part.pages = pages;
        self.parts.push(rest);
        self.open += 1;
        self.parts.len() - 1
    }

    /// Returns the bytes of a part that does not travel.
    pub(super) fn bytes(&self, part: usize) -> &[u8] {
        let frame = self.parts[part].frame.as_ref();
        frame.expect("a part that waits is here").as_ref()
    }

    /// Takes the bytes of a part, to send them on their way.
    pub(super) fn take_frame(&mut self, part: usize) -> F {
        let frame = self.parts[part].frame.take();
        frame.expect("a part that waits is here")
    }

    /// Ends a part, which has nothing to do any more.
    pub(super) fn end(&mut self, part: usize) {
        let ended = std::mem::replace(&mut self.parts[part].task, Task::Ended);
        debug_assert!(!matches!(ended, Task::Ended), "a part ends once");
        self.open -= 1;
    }

    /// Ends a part whose pages have failed.
    pub(super) fn fail(&mut self, part: usize, error: impl Fn(PageIndex) -> StoreError) {
        let RunPart { first, pages, .. } = self.parts[part];
        let pages = (self.page + first).and_on(pages);
        self.failed
            .extend(pages.iter().map(|page| (page, error(page))));
        self.end(part);
    }

    /// Notes that one page has failed.
    pub(super) fn fail_page(&mut self, number: usize, error: StoreError) {
        self.failed.push((self.page + number, error));
    }

    /// Turns a channel's last word on a transfer into the error of each page.
    pub(super) fn remote_error(
        &self,
        remote: &RemoteStore,
        transfer: SlotTransfer,
        source: ChannelError,
    ) -> impl Fn(PageIndex) -> StoreError + use<R, F> {
        let region = self.store.label.clone();
        let server: Arc<str> = match remote.pool.has_copies() {
            true => remote.pool.endpoints(transfer.place).into(),
            false => remote.pool.endpoint(transfer.server),
        };
        let operation = self.way.operation();
        let session = remote.pool.session(transfer.server);
        let source = match session.loss(matches!(source, ChannelError::Refused { .. })) {
            Some(reason) => ChannelError::Lost {
                endpoint: session.endpoint().to_string(),
                reason,
            },
            None => source,
        };
        move |page| StoreError::Remote {
            region: region.clone(),
            page: page.number(),
            server: server.clone(),
            operation,
            attempts: transfer.attempts,
            retry: source.is_transient(),
            source: source.clone(),
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.open == 0
    }

    /// Returns the transfer of a part whose request is under way.
    pub(super) fn moving(&self, part: usize) -> SlotTransfer {
        match self.parts[part].task {
            Task::Moving(transfer) => transfer,
            _ => unreachable!("a request belongs to a part that moves"),
        }
    }

    /// Ends the run in this turn of the queue. Returns its completion, and its vectors for the next
    /// run.
    pub(super) fn finish(mut self, turn: u64) -> (RunCompletion<R, F>, Spare<F>) {
        self.parts.sort_unstable_by_key(|part| part.first);
        let mut frames =
            (self.parts.drain(..)).map(|part| part.frame.expect("a part that has ended is here"));
        let mut frame = frames.next().expect("a run has pages");
        for next in frames {
            assert!(
                frame.join(next).is_ok(),
                "parts lie behind each other in the frame that they were cut out of"
            );
        }
        self.failed.sort_unstable_by_key(|(page, _)| *page);
        self.tally.errors = self.failed.len() as u64;
        self.store.stats.add(&self.tally);
        let tally = &self.tally;
        let written = tally.write_backs_repeated
            + tally.write_backs_raw
            + tally.write_backs_lz4
            + tally.write_backs_shuffled
            + tally.write_backs_zfp;
        let outcome = RunCounts {
            clean: tally.write_backs_clean as u32,
            written: written as u32,
            wire_bytes: tally.bytes_read + tally.bytes_written,
        };
        self.hashes.clear();
        let done = RunCompletion {
            request: self.request,
            frame,
            outcome,
            failed: self.failed,
            timing: RunTiming {
                at_once: turn == self.begun_in.1,
                ..self.timing
            },
        };
        (done, (self.parts, self.hashes))
    }
}

/// One call of a user's store.
pub struct StoreCall<F> {
    pub(super) index: usize,
    pub(super) part: usize,
    pub(super) blocking: Arc<BlockingStore>,
    pub(super) way: Direction,
    pub(super) offset: u64,
    /// Bytes to move: less than the frame holds for the region's last page.
    pub(super) len: usize,
    pub(super) frame: F,
    pub(super) result: Result<(), StoreCallError>,
    /// True if a worker makes the call.
    pub(super) by_worker: bool,
    pub(super) reply: Sender<Box<StoreCall<F>>>,
    pub(super) waker: Arc<Waker>,
}

impl<F: RunBuffer> StoreCall<F> {
    /// Makes the call, which may take long.
    pub fn make(&mut self) {
        let Self { offset, len, .. } = *self;
        self.result = match self.way {
            Direction::Fill => {
                let buf = &mut self.frame.as_mut()[..len];
                self.blocking.call(len, |store| store.read(offset, buf))
            }
            Direction::WriteBack => {
                let buf = &self.frame.as_ref()[..len];
                self.blocking.call(len, |store| store.write(offset, buf))
            }
        };
        if self.by_worker {
            self.blocking.leave();
        }
    }

    /// Hands the result to the I/O queue, and wakes the thread that drives the I/O queue by now.
    pub fn hand_in(self: Box<Self>) {
        let (reply, waker) = (self.reply.clone(), self.waker.clone());
        // An I/O queue that is gone wants no answer.
        if reply.send(self).is_ok() {
            waker.wake();
        }
    }
}

impl<F: RunBuffer> StoreJob for StoreCall<F> {
    fn run(mut self: Box<Self>) {
        self.make();
        self.hand_in();
    }

    fn fail(mut self: Box<Self>, why: io::Error) {
        self.result = Err(StoreCallError::Io(why));
        self.hand_in();
    }
}
