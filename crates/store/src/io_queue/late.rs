//! [`LateReads`]: READs whose answers nobody waits for in the first place, and their buffers.
//!
//! The rule it keeps: a late answer lands in a buffer of its own, which is used again once the READ
//! has ended, and not before. The buffers of an I/O queue have at most [`BYTES_MAX`] together:
//! local memory beside the budget. The choice of READs is left to `hedge.rs`.

use std::time::Instant;

use farpage_fabric::regmem::{RegBuf, RegPool};

use super::run::SlotTransfer;

/// Upper bound of the bytes of buffers that are out.
const BYTES_MAX: usize = 1 << 20;

/// Bit that tells tags of these READs from all others.
const TAG_BIT: u64 = 1 << 62;

/// READ that was sent again elsewhere because its answer is late.
#[derive(Clone, Copy)]
pub(super) struct LateRead {
    /// Run and part that the bytes were for. The part knows the READ by its tag, as long as the
    /// answer is of use.
    pub(super) place: (usize, usize),
    pub(super) transfer: SlotTransfer,
    /// Number of the port that the READ went to.
    pub(super) port: usize,
    /// Time of the first look that found the READ under way.
    pub(super) seen: Instant,
}

/// Late READs of an I/O queue.
pub(super) struct LateReads {
    pool: RegPool,
    /// Prepared buffers that are not out, and the length of each. Once that is not zero, there are
    /// no others: taking one takes no lock and allocates nothing.
    kept: Vec<RegBuf>,
    prepared_bytes: usize,
    /// Buffers of other lengths whose READs have ended since. The next preparation frees them:
    /// signal handlers free nothing.
    retired: Vec<RegBuf>,
    /// READs by the number in their tags, each with the length of its buffer.
    reads: Vec<Option<(LateRead, usize)>>,
    vacant: Vec<usize>,
    bytes_out: usize,
}

impl LateReads {
    pub(super) fn new(pool: RegPool) -> Self {
        Self {
            pool,
            kept: Vec::new(),
            prepared_bytes: 0,
            retired: Vec::new(),
            reads: Vec::new(),
            vacant: Vec::new(),
            bytes_out: 0,
        }
    }

    /// True if the tag is that of a late READ.
    pub(super) fn is_one(tag: u64) -> bool {
        tag >> 62 == TAG_BIT >> 62
    }

    /// Keeps buffers for up to `count` late READs of up to `bytes`. There are no others from now
    /// on.
    pub(super) fn prepare(&mut self, bytes: usize, count: usize) {
        self.reads.reserve(count);
        self.vacant.reserve(count);
        self.retired.clear();
        self.retired.reserve(self.reads.iter().flatten().count());
        let bytes = bytes.next_power_of_two();
        if bytes <= self.prepared_bytes {
            return;
        }
        let mut kept = Vec::with_capacity(count);
        kept.extend((0..count).map_while(|_| self.pool.acquire(bytes).ok()));
        (self.kept, self.prepared_bytes) = (kept, bytes);
    }

    /// Begins a late READ. Returns its tag, and its buffer. `None`: no buffer can be had.
    pub(super) fn begin(&mut self, read: LateRead) -> Option<(u64, RegBuf)> {
        let bytes = (read.transfer.bytes as usize).next_power_of_two();
        let buf = match self.prepared_bytes {
            0 if self.bytes_out + bytes > BYTES_MAX => None,
            0 => self.pool.acquire(bytes).ok(),
            prepared if bytes > prepared => None,
            _ => self.kept.pop(),
        }?;
        let buf_bytes = buf.as_ref().len();
        self.bytes_out += buf_bytes;
        let number = self.vacant.pop().unwrap_or_else(|| {
            self.reads.push(None);
            self.reads.len() - 1
        });
        self.reads[number] = Some((read, buf_bytes));
        Some((TAG_BIT | number as u64, buf))
    }

    /// Returns the READ with a tag.
    pub(super) fn get(&self, tag: u64) -> LateRead {
        let read = self.reads[(tag & !TAG_BIT) as usize];
        read.expect("a READ that has not ended is here").0
    }

    /// Returns the time when the first READ that is under way at a port was seen.
    pub(super) fn since(&self, port: usize) -> Option<Instant> {
        let reads = self.reads.iter().flatten();
        let here = reads.filter(|(read, _)| read.port == port);
        here.map(|(read, _)| read.seen).min()
    }

    /// Lets another READ take the place and the buffer of the one with a tag, which has ended.
    pub(super) fn replace(&mut self, tag: u64, read: LateRead) {
        let late = self.reads[(tag & !TAG_BIT) as usize].as_mut();
        late.expect("a READ that has not ended is here").0 = read;
    }

    /// Ends a READ, and keeps its buffer if that was prepared.
    pub(super) fn end(&mut self, tag: u64, buf: RegBuf) {
        let number = (tag & !TAG_BIT) as usize;
        let (_, bytes) = self.reads[number].take().expect("a READ ends once");
        self.vacant.push(number);
        self.bytes_out -= bytes;
        if bytes == self.prepared_bytes && self.kept.len() < self.kept.capacity() {
            self.kept.push(buf);
        } else if self.prepared_bytes > 0 {
            self.retired.push(buf);
        }
    }
}

#[cfg(test)]
mod tests {
    use farpage_fabric::regmem::RegPoolOptions;

    use super::*;
    use crate::{codec::Form, place::SlotPlace};

    fn read(bytes: u32) -> LateRead {
        let place = SlotPlace {
            server: 0,
            extent: 0,
            offset: 0,
        };
        LateRead {
            place: (0, 0),
            port: 0,
            transfer: SlotTransfer::new(place, bytes, Form::Raw),
            seen: Instant::now(),
        }
    }

    fn reads() -> LateReads {
        LateReads::new(RegPool::new([], RegPoolOptions::default()))
    }

    #[test]
    fn buffers_have_a_bound() {
        let mut reads = reads();
        let begun: Vec<_> = std::iter::from_fn(|| reads.begin(read(100_000))).collect();
        assert_eq!(begun.len(), BYTES_MAX / (128 << 10));
        for (tag, buf) in begun {
            assert!(LateReads::is_one(tag) && buf.as_ref().len() == 128 << 10);
            reads.end(tag, buf);
        }
        assert!(reads.begin(read(BYTES_MAX as u32)).is_some());
    }

    #[test]
    fn prepared_buffers_serve_again_once_their_reads_have_ended() {
        let mut reads = reads();
        reads.prepare(10_000, 2);
        reads.prepare(4096, 2);
        let acquired = reads.pool.stats().acquisitions;
        for _ in 0..3 {
            let both = [10_000, 1].map(|bytes| reads.begin(read(bytes)).expect("it was prepared"));
            assert!(reads.begin(read(1)).is_none() && both[0].0 != both[1].0);
            for (tag, buf) in both {
                reads.end(tag, buf);
            }
        }
        assert!(reads.begin(read(20_000)).is_none(), "no buffer is as long");
        assert_eq!(reads.pool.stats().acquisitions, acquired);
    }

    #[test]
    fn a_buffer_that_is_out_while_longer_ones_are_prepared_is_freed_by_the_next_preparation() {
        let mut reads = reads();
        reads.prepare(4096, 2);
        let (tag, buf) = reads.begin(read(4096)).expect("it was prepared");
        reads.prepare(10_000, 2);
        reads.end(tag, buf);
        assert_eq!((reads.retired.len(), reads.kept.len()), (1, 2));
        reads.prepare(4096, 2);
        assert!(reads.retired.is_empty());
    }

    #[test]
    fn nothing_is_acquired_after_a_preparation_that_found_no_memory() {
        let options = RegPoolOptions {
            bytes_max: 0,
            ..RegPoolOptions::default()
        };
        let mut reads = LateReads::new(RegPool::new([], options));
        reads.prepare(4096, 2);
        let acquired = reads.pool.stats();
        assert!(reads.begin(read(4096)).is_none() && reads.prepared_bytes == 4096);
        assert_eq!(reads.pool.stats().acquisitions, acquired.acquisitions);
    }
}
