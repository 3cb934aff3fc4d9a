//! Messages of a shard's userfaultfd: faults, and addresses that the program has unmapped.
//!
//! The rule it keeps: an address that the program has unmapped of a region counts as gone from the
//! moment its message is read until the region ends. A ceded address counts as gone before its
//! message is read, until it is regained, and is no news. The reading thread, and its time, are
//! left to [`Fence`](super::fence::Fence).

use std::{io, ops::Range};

use super::{occupied, ranges::Ranges};
use crate::{
    space::PageFault,
    uffd::{FaultBuffer, Uffd, UffdMessage},
};

/// News from the messages of one shard.
#[derive(Default)]
pub(super) struct Messages {
    buffer: FaultBuffer,
    /// Addresses that the program has unmapped of the space's regions, and ceded ones, also
    /// addresses of other shards.
    pub(super) gone: Ranges,
    /// The part of `gone` that has not been handed on yet.
    news: Vec<Range<usize>>,
}

impl Messages {
    /// Reads the messages that wait in `uffd`, which belongs to space number `space`, and appends
    /// the faults among them. True if the program has unmapped anything.
    pub(super) fn read(
        &mut self,
        uffd: &Uffd,
        space: u64,
        faults: &mut Vec<PageFault>,
    ) -> io::Result<bool> {
        let Self { buffer, gone, news } = self;
        let mut unmapped = false;
        uffd.messages(buffer, |message| match message {
            UffdMessage::Fault(fault) => faults.push(fault),
            UffdMessage::Unmapped(range) => {
                for part in occupied::of_space(space, &range) {
                    news.extend(gone.outside(part.clone()));
                    gone.insert(part);
                }
                unmapped = true;
                // Threads that sleep there meet what is there now. Waking fails for unaligned
                // addresses only, and the kernel's are aligned.
                let _ = uffd.wake(range.start, range.len());
            }
            // Not agreed upon.
            UffdMessage::Removed(_) => {}
        })?;
        Ok(unmapped)
    }

    /// Appends the addresses that were unmapped since the last call.
    pub(super) fn take_news(&mut self, out: &mut Vec<Range<usize>>) {
        out.append(&mut self.news);
    }
}
