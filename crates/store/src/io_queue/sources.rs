//! [`SourceReads`]: READs of the extents that pages are decoded from, and their buffers.
//!
//! The rule it keeps: a buffer is used again once its READ has ended, and not before. A READ whose
//! decoding has ended or has begun anew is *abandoned*: nobody waits for it, and its bytes go
//! nowhere. READs that are not abandoned have at most [`BYTES_MAX`] of buffers together, or one
//! buffer. Choosing extents and summing them up is left to `decode.rs`.

use farpage_fabric::regmem::{RegBuf, RegError, RegPool};

/// Upper bound of the bytes of buffers that are out: local memory beside the budget.
const BYTES_MAX: usize = 4 << 20;

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
    pub(super) bytes: u32,
}

/// READs of sources of an I/O queue.
pub(super) struct SourceReads {
    pool: RegPool,
    /// Buffers kept for this I/O queue, as many as were [`prepare`](Self::prepare)d: taking one
    /// takes no lock and allocates nothing.
    kept: Vec<RegBuf>,
    /// Length of each prepared buffer; 0 if there is none.
    prepared_bytes: usize,
    /// READs by the number in their tags.
    reads: Vec<Option<SourceRead>>,
    vacant: Vec<usize>,
    /// Bytes of the READs that are not abandoned.
    bytes_out: usize,
}

impl SourceReads {
    pub(super) fn new(pool: RegPool) -> Self {
        Self {
            pool,
            kept: Vec::new(),
            prepared_bytes: 0,
            reads: Vec::new(),
            vacant: Vec::new(),
            bytes_out: 0,
        }
    }

    /// True if the tag is that of a READ of a source.
    pub(super) fn is_one(tag: u64) -> bool {
        tag & TAG_BIT != 0
    }

    /// Keeps buffers for up to `count` READs of `bytes` at a time, as many as may be out. Buffers
    /// that cannot be had are asked for when they are needed.
    pub(super) fn prepare(&mut self, bytes: usize, count: usize) {
        self.reads.reserve(count);
        self.vacant.reserve(count);
        let kept = count.min(BYTES_MAX / bytes).max(1);
        if self.prepared_bytes < bytes {
            self.kept.clear();
            self.prepared_bytes = bytes;
        }
        let lacking = kept.saturating_sub(self.kept.len());
        self.kept.reserve_exact(lacking);
        let (pool, bytes) = (&self.pool, self.prepared_bytes);
        let made = (0..lacking).map_while(|_| pool.acquire(bytes).ok());
        self.kept.extend(made);
    }

    /// Begins a READ. Returns its tag and buffer. `None`: too many buffers are out, one of which
    /// comes back when a READ ends.
    pub(super) fn begin(&mut self, read: SourceRead) -> Result<Option<(u64, RegBuf)>, RegError> {
        let bytes = read.bytes as usize;
        let is_prepared = bytes <= self.prepared_bytes;
        let kept = self.kept.pop_if(|_| is_prepared);
        let is_full = self.bytes_out > 0 && (is_prepared || self.bytes_out + bytes > BYTES_MAX);
        let buf = match kept {
            Some(buf) => buf,
            None if is_full => return Ok(None),
            None => self.pool.acquire(bytes)?,
        };
        self.bytes_out += bytes;
        let number = self.vacant.pop().unwrap_or_else(|| {
            self.reads.push(None);
            self.reads.len() - 1
        });
        self.reads[number] = Some(read);
        Ok(Some((TAG_BIT | number as u64, buf)))
    }

    /// Returns the READ with a tag.
    pub(super) fn get(&self, tag: u64) -> SourceRead {
        let read = self.reads[(tag & !TAG_BIT) as usize];
        read.expect("a READ that has not ended is here")
    }

    /// Ends a READ, and keeps its buffer if as many were prepared.
    pub(super) fn end(&mut self, tag: u64, buf: RegBuf) {
        let number = (tag & !TAG_BIT) as usize;
        let read = self.reads[number].take();
        self.vacant.push(number);
        if let Some(read) = read.filter(|read| read.owner.is_some()) {
            self.bytes_out -= read.bytes as usize;
        }
        let is_prepared = buf.as_ref().len() == self.prepared_bytes;
        if is_prepared && self.kept.len() < self.kept.capacity() {
            self.kept.push(buf);
        }
    }

    /// Abandons the READs of a part.
    pub(super) fn abandon(&mut self, owner: (usize, usize)) {
        for read in self.reads.iter_mut().flatten() {
            if read.owner == Some(owner) {
                read.owner = None;
                self.bytes_out -= read.bytes as usize;
            }
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

    fn read(owner: usize, bytes: usize) -> SourceRead {
        SourceRead {
            owner: Some((owner, 0)),
            at: 0,
            server: 0,
            bytes: bytes as u32,
        }
    }

    fn begin(reads: &mut SourceReads, owner: usize, bytes: usize) -> Option<(u64, RegBuf)> {
        reads.begin(read(owner, bytes)).expect("there is memory")
    }

    #[test]
    fn buffers_have_a_bound_but_for_those_of_abandoned_reads() {
        let mut reads = reads();
        let whole = begin(&mut reads, 1, 2 * BYTES_MAX).expect("one buffer may be longer");
        assert!(begin(&mut reads, 2, 1).is_none());
        reads.abandon((1, 0));
        let half = || begin(&mut reads, 2, BYTES_MAX / 2).expect("nothing else is out");
        let halves: Vec<_> = std::iter::repeat_with(half).take(2).collect();
        assert!(begin(&mut reads, 2, 1).is_none());
        assert_eq!(reads.get(whole.0).owner, None);
        reads.end(whole.0, whole.1);
        assert!(begin(&mut reads, 2, 1).is_none(), "it did not count");
        for (tag, buf) in halves {
            assert_eq!(reads.get(tag).owner, Some((2, 0)));
            reads.end(tag, buf);
        }
        assert!(begin(&mut reads, 2, BYTES_MAX).is_some());
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
        reads.end(one.0, one.1);
        let again = begin(&mut reads, 2, 100).expect("it is back");
        assert_eq!(reads.pool.stats().acquisitions, acquired);
        // A READ that nobody waits for may end late: it is not waited for.
        reads.abandon((1, 0));
        reads.end(again.0, again.1);
        let again = [1, 2].map(|owner| begin(&mut reads, owner, 4096));
        assert!(again[0].is_some() && again[1].is_none());
        reads.abandon((1, 0));
        let new = begin(&mut reads, 2, 4096).expect("nothing else is out");
        assert_eq!(reads.pool.stats().acquisitions, acquired + 1);
        for (tag, buf) in again.into_iter().flatten().chain([other, new]) {
            reads.end(tag, buf);
        }
        assert_eq!(reads.kept.len(), 2);
    }
}
