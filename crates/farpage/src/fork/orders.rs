//! Messages between the keeper and an agent: [`Command`] and [`Report`].
//!
//! The rule it keeps: both are plain words, so that the agent needs no code of a library for them.

/// Bytes of the memory that pages are moved to: the largest page.
pub(super) const SCRATCH_BYTES: usize = 2 << 20;
/// Upper bound of the bytes that move at once, unless a page is larger.
const BATCH_BYTES: usize = 512 << 10;
/// Upper bound of the pages that move at once.
const BATCH_PAGES_MAX: usize = 64;
/// Length of the kernel's page.
pub(super) const KERNEL_PAGE: usize = 4096;
/// Words of a report's bits, one bit for each kernel page of the scratch.
const MOVED_WORDS: usize = SCRATCH_BYTES / KERNEL_PAGE / 64;

/// Returns the number of pages that one command may move.
pub(super) fn batch_pages(page_bytes: usize) -> usize {
    (BATCH_BYTES / page_bytes).clamp(1, BATCH_PAGES_MAX)
}

/// Order to move pages out: their number, the length of each, and their addresses. Without pages it
/// frees the scratch.
pub(super) type Command = [u64; 2 + BATCH_PAGES_MAX];

/// Answer to a command, and first word of a new agent: the address of the scratch, and a bit for
/// each kernel page of the scratch that a page has been moved to.
pub(super) type Report = [u64; 1 + MOVED_WORDS];

/// Report without pages.
pub(super) const EMPTY_REPORT: Report = [0; 1 + MOVED_WORDS];

/// Returns the command to move these pages out.
pub(super) fn command(addresses: &[usize], page_bytes: usize) -> Command {
    let mut command = [0; 2 + BATCH_PAGES_MAX];
    command[..2].copy_from_slice(&[addresses.len() as u64, page_bytes as u64]);
    for (word, &address) in command[2..].iter_mut().zip(addresses) {
        *word = address as u64;
    }
    command
}

/// True if the report says that the kernel page at `offset` in the scratch has been moved there.
pub(super) fn has_moved(report: &Report, offset: usize) -> bool {
    let page = offset / KERNEL_PAGE;
    report[1 + page / 64] >> (page % 64) & 1 == 1
}
