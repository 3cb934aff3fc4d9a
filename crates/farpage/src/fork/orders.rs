//! Messages between the keeper and an agent: [`Command`] and [`Report`].
//!
//! The rule it keeps: both are plain words, so that the agent needs no code of a library for them.

use std::{ffi::CStr, ops::Range};

/// Name of an agent's thread.
pub(super) const AGENT_NAME: &CStr = c"farpage-agent";
/// Bytes of the memory that pages are moved to: the largest page.
pub(super) const SCRATCH_BYTES: usize = 2 << 20;
/// Upper bound of the bytes that move at once, unless a page is larger.
const BATCH_BYTES: usize = 512 << 10;
/// Upper bound of the pages that move at once.
const BATCH_PAGES_MAX: usize = 64;
const _: () = assert!(BATCH_BYTES <= SCRATCH_BYTES, "a batch fits the scratch");
/// Length of the kernel's page.
pub(super) const KERNEL_PAGE: usize = 4096;
/// Words of a report's bits, one for each kernel page that one look is about.
const BITS_WORDS: usize = LOOK_BYTES / KERNEL_PAGE / 64;
/// Bytes of the addresses that the agent looks at at once.
pub(super) const LOOK_BYTES: usize = 16 << 20;
/// Number in place of that of pages, in the order to look.
pub(super) const LOOK: u64 = u64::MAX;

/// Returns the number of pages that one command may move.
pub(super) fn batch_pages(page_bytes: usize) -> usize {
    (BATCH_BYTES / page_bytes).clamp(1, BATCH_PAGES_MAX)
}

/// Order to move pages out: their number, the length of each, and their addresses. Without pages it
/// frees the scratch. Or the order to [look](LOOK) for pages: the length and the first of the
/// addresses, of [`LOOK_BYTES`] at most.
pub(super) type Command = [u64; 2 + BATCH_PAGES_MAX];

/// Answer to a command, and first word of a new agent: the address of the scratch, a number, and
/// bits. After a move there is a bit for each kernel page of the scratch that a page has been moved
/// to. After a look there is one for each kernel page that this process alone has. The number is
/// that of the kernel pages that were found shared.
pub(super) type Report = [u64; 2 + BITS_WORDS];

/// Report without pages.
pub(super) const EMPTY_REPORT: Report = [0; 2 + BITS_WORDS];

/// Returns the command to move these pages out.
pub(super) fn command(addresses: &[usize], page_bytes: usize) -> Command {
    let mut command = [0; 2 + BATCH_PAGES_MAX];
    command[..2].copy_from_slice(&[addresses.len() as u64, page_bytes as u64]);
    for (word, &address) in command[2..].iter_mut().zip(addresses) {
        *word = address as u64;
    }
    command
}

/// Returns the order to look for pages.
pub(super) fn look(addresses: &Range<usize>) -> Command {
    let mut command = [0; 2 + BATCH_PAGES_MAX];
    let (start, len) = (addresses.start as u64, addresses.len() as u64);
    command[..3].copy_from_slice(&[LOOK, len, start]);
    command
}

/// True if the report's bit is set for the kernel page at `offset` in the scratch, or in the
/// addresses that were looked at.
pub(super) fn has_bit(report: &Report, offset: usize) -> bool {
    let page = offset / KERNEL_PAGE;
    report[2 + page / 64] >> (page % 64) & 1 == 1
}

/// Returns the number of kernel pages that were found shared.
pub(super) fn shared(report: &Report) -> u64 {
    report[1]
}
