//! [`PagedChannel`]: READs and WRITEs of memory that the server may move elsewhere at any time.
//!
//! The rule it keeps: an operation counts only if its chunks were in the server's memory before it,
//! by the [words](farpage_wire::segment), and nothing has left that memory since. The words that
//! were seen last are the look before the operation. The look after it is a READ of the words
//! behind it in the same queue, which the server's adapter executes after it. So an operation on
//! present chunks takes one round trip, as on other memory.
//!
//! The server does the rest on a second connection: atomics, absent chunks, and operations that do
//! not count. A client that has seen that a chunk is absent looks again before it touches it.

use std::{collections::VecDeque, io, os::fd::AsFd, sync::Arc, time::Instant};

use farpage_wire::{
    ExtentId,
    data::WORD_BYTES,
    segment::{Look, pieces},
};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

use super::{
    bundle::RdmaChannel,
    channel::DEPTH as QUEUE_DEPTH,
    client::{Client, LeaseCache},
    control::ASK_AGAIN,
    leases::{LeasedExtent, MARKS, OpWords, Paged, SEGMENTS, WORDS},
};
use crate::{
    Buf, Busy, Channel, ChannelError, Completion, Op, PollInterest, Verb,
    channel::{check_len, is_aligned},
    memory::MARK_BYTES,
    regmem::RegBuf,
};

/// Upper bound of operations in flight: each takes four places of the queue below, two for marks.
const DEPTH: usize = 16;
const _: () = assert!(4 * DEPTH <= QUEUE_DEPTH);

/// Number of times that an operation is done while chunks leave, before the server is asked.
const TRIES: u32 = 3;

/// Buffer that passes through the queue below: one of the program, or words.
pub(super) enum Parcel<B> {
    Program(B),
    Words(OpWords),
}

impl<B: Buf> AsRef<[u8]> for Parcel<B> {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Program(buf) => buf.as_ref(),
            Self::Words(words) => words,
        }
    }
}

impl<B: Buf> AsMut<[u8]> for Parcel<B> {
    fn as_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Program(buf) => buf.as_mut(),
            Self::Words(words) => words,
        }
    }
}

impl<B: Buf> Buf for Parcel<B> {
    fn registered(&self) -> Option<&RegBuf> {
        match self {
            Self::Program(buf) => buf.registered(),
            Self::Words(_) => None,
        }
    }
}

/// A program's operation.
struct PagedOp<B> {
    tag: u64,
    verb: Verb,
    extent: ExtentId,
    offset: u64,
    len: u32,
    /// The program's buffer; `None` while the queue below has it.
    buf: Option<B>,
    /// Lease of paged memory; `None` for memory that stays where it is.
    leased: Option<Arc<LeasedExtent>>,
    looks: [Option<Look>; SEGMENTS],
    words: OpWords,
    tries: u32,
    /// Number of requests under way: the operation, the look at its words, its marks. All of them
    /// end before the operation does: the program may release the extent then, and with it their
    /// keys.
    under_way: u32,
    failed: Option<ChannelError>,
}

impl<B> PagedOp<B> {
    fn op(self) -> Op<B> {
        Op {
            tag: self.tag,
            verb: self.verb,
            extent: self.extent,
            offset: self.offset,
            len: self.len,
            buf: self.buf.expect("it has come back"),
        }
    }
}

/// A data connection over RDMA to a server that lends more than its memory.
pub(super) struct PagedChannel<B, A> {
    client: Arc<Client>,
    leases: LeaseCache,
    queue: RdmaChannel<Parcel<B>>,
    /// Connection to the server's process.
    asking: A,
    flying: [Option<PagedOp<B>>; DEPTH],
    /// Operations for `asking`, which was full.
    unasked: VecDeque<Op<B>>,
    scratch: Vec<Completion<Parcel<B>>>,
    /// Readable when `queue` or `asking` is.
    ready: Epoll,
    mtu_bytes: u32,
}

impl<B: Buf, A: Channel<B> + AsFd> PagedChannel<B, A> {
    /// Makes a channel of two connections of the session that `client` belongs to.
    pub(super) fn new(
        client: Arc<Client>,
        queue: RdmaChannel<Parcel<B>>,
        asking: A,
    ) -> io::Result<Self> {
        let ready = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        for fd in [queue.as_fd(), asking.as_fd()] {
            ready.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
        }
        let mtu_bytes = queue.pair().mtu_bytes()?;
        Ok(Self {
            client,
            leases: LeaseCache::new(),
            queue,
            asking,
            flying: [const { None }; DEPTH],
            unasked: VecDeque::with_capacity(DEPTH),
            scratch: Vec::with_capacity(4 * DEPTH),
            ready,
            mtu_bytes,
        })
    }

    /// True if the server's adapter moves bytes from `offset` on to the right places.
    fn can_reach(&self, leased: &LeasedExtent, offset: u64) -> bool {
        (leased.paged.as_ref()).is_none_or(|Paged { granule_bytes, .. }| {
            let granule_bytes = *granule_bytes;
            // Packets follow each other at multiples of the path's unit.
            granule_bytes == 1
                || offset.is_multiple_of(u64::from(granule_bytes))
                    && self.mtu_bytes.is_multiple_of(granule_bytes)
        })
    }

    /// Hands the operation at `place` to the queue, or looks at its words first.
    fn start(&mut self, place: usize) {
        let Some(flying) = &mut self.flying[place] else {
            return;
        };
        let (extent, offset, len) = (flying.extent, flying.offset, flying.len);
        let known = (flying.leased.as_ref()).and_then(|leased| leased.paged.as_ref());
        let looks = known.map(|known| known.looks(offset, u64::from(len)));
        flying.looks = looks.flatten().unwrap_or_default();
        let mut send = |op| {
            // There is room for all that `DEPTH` operations post.
            let posted = self.queue.post(op);
            debug_assert!(posted.is_ok());
            flying.under_way += 1;
        };
        let tag = place as u64;
        // 1. The operation, unless something is known to be elsewhere.
        if looks.is_none_or(|looks| looks.is_some()) {
            send(Op {
                tag,
                verb: flying.verb,
                extent,
                offset,
                len,
                buf: Parcel::Program(flying.buf.take().expect("it is at rest")),
            });
        }
        let Some(known) = known else {
            return;
        };
        // 2. Its words, behind it.
        let mut segments = pieces(offset, u64::from(len)).map(|piece| piece.segment as u64);
        let first = segments.next().unwrap_or_default();
        let count = 1 + segments.count() as u32;
        send(Op {
            tag,
            verb: Verb::Read,
            extent: ExtentId(extent.0 | WORDS),
            offset: first * u64::from(WORD_BYTES),
            len: count * WORD_BYTES,
            buf: Parcel::Words(OpWords::default()),
        });
        // 3. Marks for the server, which does not see what an adapter touches.
        if looks.flatten().is_none() {
            return;
        }
        for piece in pieces(offset, u64::from(len)) {
            if let Some(bits) = known.mark(piece.segment, piece.chunks) {
                let mut words = OpWords::default();
                words[..MARK_BYTES as usize].copy_from_slice(&bits.to_le_bytes());
                send(Op {
                    tag,
                    verb: Verb::Write,
                    extent: ExtentId(extent.0 | MARKS),
                    offset: piece.segment as u64 * MARK_BYTES,
                    len: MARK_BYTES as u32,
                    buf: Parcel::Words(words),
                });
            }
        }
    }

    /// Takes a completion of the queue. The last one finishes, repeats or passes on its operation.
    fn hear(&mut self, completion: Completion<Parcel<B>>, done: &mut Vec<Completion<B>>) {
        let place = completion.tag as usize;
        let Some(flying) = &mut self.flying[place] else {
            return;
        };
        match completion.buf {
            Parcel::Program(buf) => flying.buf = Some(buf),
            Parcel::Words(words) if completion.verb == Verb::Read => flying.words = words,
            Parcel::Words(_) => {}
        }
        if let Err(error) = completion.result {
            flying.failed.get_or_insert(error);
        }
        flying.under_way -= 1;
        if flying.under_way > 0 {
            return;
        }
        let (offset, len) = (flying.offset, u64::from(flying.len));
        let paged = (flying.leased.as_ref()).and_then(|leased| leased.paged.as_ref());
        let was_done = flying.looks[0].is_some();
        let counts = match paged {
            Some(paged) if flying.failed.is_none() => {
                paged.see(offset, len, &flying.words, &flying.looks)
            }
            _ => true,
        };
        if counts {
            self.finish(place, done);
            return;
        }
        flying.tries += u32::from(was_done);
        let is_there = paged.is_some_and(|paged| paged.looks(offset, len).is_some());
        if is_there && flying.tries < TRIES {
            self.start(place);
        } else {
            let flying = self.flying[place].take().expect("looked at above");
            self.unasked.push_back(flying.op());
        }
    }

    /// Hands the operation at `place` back to the program.
    fn finish(&mut self, place: usize, done: &mut Vec<Completion<B>>) {
        let Some(mut flying) = self.flying[place].take() else {
            return;
        };
        let result = flying.failed.take().map_or(Ok(()), Err);
        let op = flying.op();
        done.push(op.complete(result));
    }

    fn ask(&mut self) {
        while let Some(op) = self.unasked.pop_front() {
            if let Err(Busy(op)) = self.asking.post(op) {
                self.unasked.push_front(op);
                break;
            }
        }
    }
}

impl<B: Buf, A: Channel<B> + AsFd> Channel<B> for PagedChannel<B, A> {
    fn post(&mut self, op: Op<B>) -> Result<(), Busy<B>> {
        let free = self.flying.iter().position(Option::is_none);
        let Some(place) = free.filter(|_| self.in_flight() < DEPTH) else {
            return Err(Busy(op));
        };
        check_len(&op);
        let is_in = |leased: &Arc<LeasedExtent>| {
            let end = op.offset.checked_add(u64::from(op.len));
            leased.paged.is_some() && end.is_some_and(|end| end <= leased.bytes)
        };
        // The queue refuses what is not leased.
        let leased = self.leases.get(op.extent, &self.client);
        let leased = leased.cloned().filter(is_in);
        let is_for_server = leased.as_ref().is_some_and(|leased| match op.verb {
            Verb::Atomic(_) => leased.atomics && is_aligned(&op),
            Verb::Read | Verb::Write => !self.can_reach(leased, op.offset),
        });
        if is_for_server {
            self.unasked.push_back(op);
            self.ask();
            return Ok(());
        }
        self.flying[place] = Some(PagedOp {
            tag: op.tag,
            verb: op.verb,
            extent: op.extent,
            offset: op.offset,
            len: op.len,
            buf: Some(op.buf),
            leased,
            looks: [None; SEGMENTS],
            words: OpWords::default(),
            tries: 0,
            under_way: 0,
            failed: None,
        });
        self.start(place);
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Completion<B>>) -> usize {
        let before = done.len();
        let mut scratch = std::mem::take(&mut self.scratch);
        self.queue.poll(&mut scratch);
        for completion in scratch.drain(..) {
            self.hear(completion, done);
        }
        self.scratch = scratch;
        self.ask();
        self.asking.poll(done);
        done.len() - before
    }

    fn in_flight(&self) -> usize {
        let flying = self.flying.iter().flatten().count();
        flying + self.unasked.len() + self.asking.in_flight()
    }

    fn wait(&self) -> PollInterest<'_> {
        let (queue, asking) = (self.queue.wait(), self.asking.wait());
        if self.asking.in_flight() == 0 {
            return queue;
        }
        // A peer does not tell when it has room again, so it is asked.
        let again = asking.writable.then(|| Instant::now() + ASK_AGAIN);
        // A descriptor of which nothing is expected may be readable all the time.
        let fd = match self.queue.in_flight() {
            0 => asking.fd,
            _ => Some(self.ready.0.as_fd()),
        };
        PollInterest {
            fd,
            readable: true,
            writable: false,
            until: [queue.until, asking.until, again]
                .into_iter()
                .flatten()
                .min(),
        }
    }
}
