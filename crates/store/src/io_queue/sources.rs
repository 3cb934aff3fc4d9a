//! [`SourceReads`]: READs of the extents that pages are decoded from, and their buffers.
//!
//! The rule it keeps: a buffer is used again once its READ has ended, and not before. A READ whose
//! decoding has ended or has begun anew is *abandoned*: nobody waits for it, and its bytes go
//! nowhere. READs of one server have at most [`BYTES_MAX`] of buffers together, or one buffer, so
//! that a silent server stops no READs of others. The part that finds no room first goes first:
//! long READs do not wait behind all short ones. Choosing extents and summing them up is left to
//! `decode.rs`.

use farpage_fabric::regmem::{RegBuf, RegError, RegPool};

use crate::roster::SERVERS_MAX;

/// Upper bound of the bytes of the READs of one server that are out: local memory beside the
/// budget.
const BYTES_MAX: usize = 1 << 20;

/// Bit that tells tags of these READs from those of parts.
const TAG_BIT: u64 = 1 << 63;

/// READ of a source that is under way, or waits to be posted.
#[derive(Clone, Copy)]
pub(super) struct SourceRead {
    /// Run and part that the bytes are for. `None`: the READ is abandoned.
    pub(super) owner: Option<(usize, usize)>,
    /// Position of the source in the parity set.
    pub(super) at: u8,
    pub(super) server: u8,
    /// Number of the server's port.
    pub(super) port: usize,
    pub(super) bytes: u32,
}

/// READs of sources on one server.
#[derive(Clone, Default)]
struct PortReads {
    /// Bytes of the READs that have not ended, abandoned ones included.
    bytes_out: usize,
    /// Part that found no room first, and the number of the poll in which it asked last.
    first: Option<((usize, usize), u64)>,
}

/// READs of sources of an I/O queue.
pub(super) struct SourceReads {
    pool: RegPool,
    /// Prepared buffers that are not out: taking one takes no lock and allocates nothing.
    kept: Vec<RegBuf>,
    /// Number of buffers that were [`prepare`](Self::prepare)d, and the length of each.
    prepared: usize,
    prepared_bytes: usize,
    /// READs by the number in their tags.
    reads: Vec<Option<SourceRead>>,
    vacant: Vec<usize>,
    /// READs by the numbers of their ports.
    ports: Box<[PortReads]>,
}

impl SourceReads {
    pub(super) fn new(pool: RegPool) -> Self {
        Self {
            pool,
            kept: Vec::new(),
            prepared: 0,
            prepared_bytes: 0,
            reads: Vec::new(),
            vacant: Vec::new(),
            ports: vec![PortReads::default(); SERVERS_MAX].into(),
        }
    }

    /// True if the tag is that of a READ of a source.
    pub(super) fn is_one(tag: u64) -> bool {
        tag & TAG_BIT != 0
    }

    /// Keeps buffers for up to `count` READs of `bytes` at a time. READs of such lengths have no
    /// other buffers from now on, unless none can be had.
    pub(super) fn prepare(&mut self, bytes: usize, count: usize) {
        self.reads.reserve(count);
        self.vacant.reserve(count);
        if self.prepared_bytes < bytes {
            self.kept.clear();
            self.prepared = 0;
            self.prepared_bytes = bytes.next_power_of_two();
        }
        let lacking = count.saturating_sub(self.prepared);
        self.kept.reserve_exact(count);
        let (pool, bytes) = (&self.pool, self.prepared_bytes);
        let made = (0..lacking).map_while(|_| pool.acquire(bytes).ok());
        let before = self.kept.len();
        self.kept.extend(made);
        self.prepared += self.kept.len() - before;
    }

    /// True if no buffer is out.
    pub(super) fn is_idle(&self) -> bool {
        self.vacant.len() == self.reads.len()
    }

    /// Begins a READ in a poll with this number. Returns its tag and buffer. `None`: the READ has
    /// to wait for a buffer, and one comes back when another READ ends.
    pub(super) fn begin(
        &mut self,
        read: SourceRead,
        poll: u64,
    ) -> Result<Option<(u64, RegBuf)>, RegError> {
        let bytes = read.bytes as usize;
        if self.prepared > 0 && bytes <= self.prepared_bytes {
            let kept = self.kept.pop();
            return Ok(kept.map(|buf| (self.add(read), buf)));
        }
        let bytes_out = self.ports[read.port].bytes_out;
        let is_behind = self.is_behind(read, poll);
        if is_behind || bytes_out > 0 && bytes_out + bytes > BYTES_MAX {
            if !is_behind {
                self.ports[read.port].first = read.owner.map(|owner| (owner, poll));
            }
            return Ok(None);
        }
        match self.pool.acquire(bytes.next_power_of_two()) {
            Ok(buf) => {
                self.ports[read.port].first = None;
                Ok(Some((self.add(read), buf)))
            }
            Err(_) if !self.is_idle() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// True if another part found no room for a READ of the server before, and still waits: it
    /// asks in each poll, or has other READs under way.
    fn is_behind(&self, read: SourceRead, poll: u64) -> bool {
        let first = self.ports[read.port].first;
        first.is_some_and(|(owner, asked)| {
            let has_reads = || (self.reads.iter().flatten()).any(|it| it.owner == Some(owner));
            read.owner != Some(owner) && (poll - asked <= 1 || has_reads())
        })
    }

    /// Notes a READ. Returns its tag.
    fn add(&mut self, read: SourceRead) -> u64 {
        self.ports[read.port].bytes_out += read.bytes as usize;
        let number = self.vacant.pop().unwrap_or_else(|| {
            self.reads.push(None);
            self.reads.len() - 1
        });
        self.reads[number] = Some(read);
        TAG_BIT | number as u64
    }

    /// Returns the READ with a tag.
    pub(super) fn get(&self, tag: u64) -> SourceRead {
        let read = self.reads[(tag & !TAG_BIT) as usize];
        read.expect("a READ that has not ended is here")
    }

    /// Ends a READ, and keeps its buffer if that was prepared.
    pub(super) fn end(&mut self, tag: u64, buf: RegBuf) {
        let number = (tag & !TAG_BIT) as usize;
        let read = self.reads[number].take();
        let read = read.expect("a READ ends once");
        self.vacant.push(number);
        self.ports[read.port].bytes_out -= read.bytes as usize;
        let is_prepared = buf.as_ref().len() == self.prepared_bytes;
        if is_prepared && self.kept.len() < self.prepared {
            self.kept.push(buf);
        }
    }

    /// Abandons the READs of a part, those that wait for a buffer included.
    pub(super) fn abandon(&mut self, owner: (usize, usize)) {
        for read in self.reads.iter_mut().flatten() {
            if read.owner == Some(owner) {
                read.owner = None;
            }
        }
        for port in &mut self.ports {
            port.first = port.first.filter(|(first, _)| *first != owner);
        }
    }
}

#[cfg(test)]
mod tests {
    use farpage_fabric::regmem::RegPoolOptions;

    use super::*;

    fn reads() -> SourceReads {
        SourceReads::new(RegPool::new([], RegPoolOptions::default()))
    }

    fn read(owner: usize, port: usize, bytes: usize) -> SourceRead {
        SourceRead {
            owner: Some((owner, 0)),
            at: 0,
            server: 0,
            port,
            bytes: bytes as u32,
        }
    }

    /// Begins a READ of the server with the first port.
    fn begin(reads: &mut SourceReads, owner: usize, bytes: usize) -> Option<(u64, RegBuf)> {
        let begun = reads.begin(read(owner, 0, bytes), 1);
        begun.expect("there is memory")
    }

    #[test]
    fn reads_of_one_server_have_a_bound() {
        let mut reads = reads();
        let whole = begin(&mut reads, 1, 2 * BYTES_MAX).expect("one buffer may be longer");
        reads.abandon((1, 0));
        assert!(begin(&mut reads, 2, 1).is_none(), "its buffer is out");
        assert_eq!(reads.get(whole.0).owner, None);
        let other = reads.begin(read(2, 1, 1), 1).expect("there is memory");
        let other = other.expect("another server's READs do not count");
        reads.end(whole.0, whole.1);
        let half = || begin(&mut reads, 2, BYTES_MAX / 2).expect("nothing else is out");
        let halves: Vec<_> = std::iter::repeat_with(half).take(2).collect();
        assert!(begin(&mut reads, 2, 1).is_none());
        for (tag, buf) in halves.into_iter().chain([other]) {
            assert_eq!(reads.get(tag).owner, Some((2, 0)));
            reads.end(tag, buf);
        }
        assert!(begin(&mut reads, 2, BYTES_MAX).is_some());
    }

    #[test]
    fn long_reads_do_not_wait_behind_short_ones() {
        let mut reads = reads();
        let short = |owner| read(owner, 0, BYTES_MAX / 4);
        let (first, buf) = begin(&mut reads, 1, BYTES_MAX / 4).expect("nothing is out");
        assert!(begin(&mut reads, 2, BYTES_MAX).is_none());
        assert!(
            begin(&mut reads, 3, BYTES_MAX / 4).is_none(),
            "it is behind"
        );
        assert!(begin(&mut reads, 2, BYTES_MAX).is_none());
        reads.end(first, buf);
        assert!(
            begin(&mut reads, 3, BYTES_MAX / 4).is_none(),
            "it is behind"
        );
        let (long, buf) = begin(&mut reads, 2, BYTES_MAX).expect("it is its turn");
        assert!(begin(&mut reads, 4, BYTES_MAX).is_none());
        reads.end(long, buf);
        // The part asks no more, and has nothing under way.
        let next = reads.begin(short(5), 3).expect("there is memory");
        assert!(next.is_some());
    }

    #[test]
    fn lengths_have_few_classes() {
        let mut reads = reads();
        for bytes in 1025..2048 {
            let (tag, buf) = begin(&mut reads, 1, bytes).expect("nothing is out");
            assert_eq!(buf.as_ref().len(), 2048);
            reads.end(tag, buf);
        }
    }

    #[test]
    fn prepared_buffers_serve_again_once_their_reads_have_ended() {
        let mut reads = reads();
        reads.prepare(4096, 2);
        reads.prepare(100, 1);
        let acquired = reads.pool.stats().acquisitions;
        let one = begin(&mut reads, 1, 4096).expect("it was prepared");
        let other = begin(&mut reads, 1, 100).expect("it was prepared");
        assert!(begin(&mut reads, 2, 100).is_none(), "one comes back");
        // A READ that nobody waits for may end late: nothing is allocated instead of it.
        reads.abandon((1, 0));
        assert!(begin(&mut reads, 2, 100).is_none());
        reads.end(one.0, one.1);
        let again = begin(&mut reads, 2, 100).expect("it is back");
        assert_eq!(reads.pool.stats().acquisitions, acquired);
        for (tag, buf) in [again, other] {
            reads.end(tag, buf);
        }
        assert_eq!(reads.kept.len(), 2);
        // Buffers of the former length are of no use any more.
        reads.prepare(8192, 2);
        assert_eq!(reads.kept.len(), 2);
        let acquired = reads.pool.stats().acquisitions;
        let all = [1, 2].map(|owner| begin(&mut reads, owner, 8192).expect("it was prepared"));
        assert_eq!(reads.pool.stats().acquisitions, acquired);
        for (tag, buf) in all {
            reads.end(tag, buf);
        }
        assert_eq!(reads.kept.len(), 2);
    }
}
