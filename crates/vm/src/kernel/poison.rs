//! Pages that cannot be had: touching one is a signal until its bytes come ([`Poison`]).
//!
//! The rule it keeps: only absent pages are changed, as far as the program has not unmapped them.
//!
//! From kernel 6.6 on `UFFDIO_POISON` does this, and the signal is SIGBUS. Before, the page is
//! barred: no access is allowed to it, and the signal is SIGSEGV.

use std::{collections::BTreeSet, io, ops::Range};

use farpage_signals::Mutex;

use super::{fence::Fence, occupied};
use crate::{
    pages::Pages,
    sys::{self, KERNEL_PAGE_BYTES, Refusal, Stopped},
};

/// Way in which pages of a shard are poisoned.
#[derive(Debug)]
pub(super) enum Poison {
    /// `UFFDIO_POISON`. A page that is put there replaces the poison.
    ByKernel,
    /// `mprotect`. Holds the addresses of the pages that are barred now.
    Barred(Mutex<BTreeSet<usize>>),
}

impl Poison {
    pub(super) fn new(by_kernel: bool) -> Self {
        if by_kernel {
            Self::ByKernel
        } else {
            Self::Barred(Mutex::default())
        }
    }

    /// Poisons the pages in `range`, as far as the program has not unmapped them, and wakes the
    /// threads that sleep there.
    pub(super) fn put(&self, fence: &Fence, range: Range<usize>) -> io::Result<()> {
        let poisoned = match self {
            Self::ByKernel => put_by_kernel(fence, range.clone()),
            Self::Barred(barred) => bar(fence, range.clone(), barred),
        };
        fence.wake(range);
        poisoned
    }

    /// Lets the program touch barred pages again, which have got their bytes.
    pub(super) fn lift(&self, pages: Pages) {
        let Self::Barred(barred) = self else {
            return;
        };
        for address in pages.addresses() {
            let page = address..address + pages.page_bytes();
            if !take_out(barred, &page) {
                continue;
            }
            let write = if occupied::is_read_only(address) {
                0
            } else {
                libc::PROT_WRITE
            };
            // SAFETY: a page of a region, which gets back the protection that it was mapped with.
            let _ = unsafe { sys::protect(page.start, page.len(), libc::PROT_READ | write) };
        }
    }

    /// Forgets the pages of a region that ends.
    pub(super) fn forget(&self, region: &Range<usize>) {
        if let Self::Barred(barred) = self {
            take_out(barred, region);
        }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        match self {
            Self::ByKernel => true,
            Self::Barred(barred) => barred.lock().is_empty(),
        }
    }
}

fn put_by_kernel(fence: &Fence, pages: Range<usize>) -> io::Result<()> {
    let (mut at, mut end) = (pages.start, pages.end);
    while at < pages.end {
        let poisoned = fence.fill(at..end, |uffd, done, len| {
            // SAFETY: an absent page of a region, whose end the pager has decided.
            unsafe { uffd.poison(at + done, len) }
        });
        match poisoned {
            Ok(()) => at = end,
            Err(Stopped { done_bytes, why }) => {
                at += done_bytes;
                match why {
                    // The program has divided the mapping (by `mprotect`, say), and the kernel
                    // poisons nothing across two. Or it has unmapped the first of them.
                    Refusal::Missing if end - at > KERNEL_PAGE_BYTES => {
                        end = at + KERNEL_PAGE_BYTES;
                        continue;
                    }
                    // A fill that failed has poisoned it before, or the program has unmapped it.
                    Refusal::Exists | Refusal::Missing | Refusal::Ended => at += KERNEL_PAGE_BYTES,
                    why => return Err(why.into()),
                }
            }
        }
        end = pages.end;
    }
    Ok(())
}

fn bar(fence: &Fence, range: Range<usize>, barred: &Mutex<BTreeSet<usize>>) -> io::Result<()> {
    // Noted before the protection changes: a fill of the page lifts it from now on.
    barred.lock().insert(range.start);
    let fenced = fence.lock();
    let parts = fenced.gone.outside(range.clone());
    let protected = parts.iter().try_for_each(|part| {
        // SAFETY: an absent page of a region, whose end the pager has decided. The fence is locked,
        // so that the program has not unmapped it.
        unsafe { sys::protect(part.start, part.len(), libc::PROT_NONE) }
    });
    drop(fenced);
    if protected.is_err() {
        take_out(barred, &range);
    }
    protected.map_err(io::Error::from)
}

/// Strikes the addresses in `range` off the list. True if there were any.
fn take_out(barred: &Mutex<BTreeSet<usize>>, range: &Range<usize>) -> bool {
    let mut barred = barred.lock();
    let inside = barred.extract_if(range.clone(), |_| true).count();
    inside > 0
}
