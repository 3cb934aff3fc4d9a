//! Calls whose arguments lead to more memory by structures: `ioctl`, `setsockopt`, `keyctl`, `bpf`
//! and their kind ([`hold`]).
//!
//! The kernel knows thousands of such structures. So a structure is looked through for words that
//! are remote addresses, and what these lead to is held in memory for the length of the call. Bytes
//! in between that happen to look like an address bring a few pages in for nothing.
//!
//! The rule it keeps: a call that may act before it writes (an `ioctl`, for one) finds what its
//! structure leads to at the first try. Only what lies deeper, or behind more bytes, waits for a
//! failure of the call with `EFAULT`.
//!
//! Memory that the kernel goes on using after the call (registered with a device, `io_submit`) is
//! not for this file: it would have to stay for longer.

use std::mem;

use super::{
    local::{Hold, IsRemote},
    pointers,
    raw::{Arguments, system_call},
};
use crate::sys::KERNEL_PAGE_BYTES;

const WORD: usize = mem::size_of::<usize>();
/// Words of a structure that are looked at: more than those of any structure with addresses that is
/// no list.
const WORDS: usize = 64;
/// Most bytes that are held for one call.
const HELD_MAX: usize = 4 << 20;

/// Distance that is followed from a call's arguments.
#[derive(Clone, Copy)]
pub(super) struct Reach {
    /// Structures on the way to the last bytes that are held.
    depth: u32,
    /// Bytes that are held from an address on, whose own length is unknown.
    bytes: usize,
    /// True if arguments are followed that are no structures as far as is known.
    all: bool,
}

impl Reach {
    /// Distance before the first try.
    pub(super) const FIRST: Reach = Reach {
        depth: 1,
        bytes: 64 << 10,
        all: false,
    };
    /// Distance after a failure.
    pub(super) const FURTHER: Reach = Reach {
        depth: 2,
        bytes: 64 << 10,
        all: true,
    };
    /// Distance after more failures.
    pub(super) const FARTHEST: Reach = Reach {
        depth: 2,
        bytes: 1 << 20,
        all: true,
    };
}

/// True if the call `number` leads to memory by structures.
pub(super) const fn leads(number: libc::c_long) -> bool {
    matches!(
        number,
        libc::SYS_ioctl
            | libc::SYS_setsockopt
            | libc::SYS_keyctl
            | libc::SYS_bpf
            | libc::SYS_ptrace
    )
}

/// True if the call `number` waits for words by a list.
pub(super) const fn waits(number: libc::c_long) -> bool {
    number == libc::SYS_futex_waitv
}

/// Returns the addresses of the words that a call waits for by a list (`futex_waitv`).
pub(super) fn waited(number: libc::c_long, args: Arguments) -> impl Iterator<Item = usize> {
    /// Most words that the kernel waits for, and the length of a list's entry, whose second word is
    /// the address.
    const WAITED_MAX: usize = 128;
    const ENTRY: usize = 3 * WORD;
    let [list, count, ..] = args;
    let count = if waits(number) {
        count.min(WAITED_MAX)
    } else {
        0
    };
    let entry = move |which| Words::read(list.saturating_add(which * ENTRY), ENTRY);
    (0..count).map(move |which| entry(which).words[1])
}

/// Returns the arguments of a call that are structures, and their lengths in bytes.
fn structures(number: libc::c_long, args: Arguments) -> [(usize, usize); 2] {
    const VECTOR: usize = mem::size_of::<libc::iovec>();
    const NONE: (usize, usize) = (0, 0);
    /// `KEYCTL_DH_COMPUTE` and `KEYCTL_INSTANTIATE_IOV`, absent from the published bindings.
    const KEYCTL_DH_COMPUTE: usize = 23;
    const KEYCTL_INSTANTIATE_IOV: usize = 20;
    let list = |at: usize, count: usize| (args[at], count.saturating_mul(VECTOR));
    match number {
        libc::SYS_ioctl => [(args[2], ioctl_bytes(args[1])), NONE],
        libc::SYS_setsockopt => [(args[3], args[4] as u32 as usize), NONE],
        libc::SYS_bpf => [(args[1], args[2] as u32 as usize), NONE],
        libc::SYS_ptrace => [list(3, 1), NONE],
        libc::SYS_keyctl => match args[0] as u32 as usize {
            KEYCTL_INSTANTIATE_IOV => [list(2, args[3]), NONE],
            KEYCTL_DH_COMPUTE => [(args[4], WORDS * WORD), NONE],
            _ => [NONE; 2],
        },
        _ => [NONE; 2],
    }
}

/// Returns the bytes of the structure of an `ioctl`; 0 if unknown. Newer requests tell.
fn ioctl_bytes(request: usize) -> usize {
    /// Requests of network interfaces, whose structures are `ifreq` and smaller ones.
    const INTERFACES: std::ops::RangeInclusive<usize> = 0x8910..=0x89ff;
    /// `SG_IO`, whose structure is `sg_io_hdr`; `BLKPG`, whose structure is `blkpg_ioctl_arg`.
    const SG_IO: usize = 0x2285;
    const BLKPG: usize = 0x1269;
    match request as u32 as usize {
        request if INTERFACES.contains(&request) => 40,
        SG_IO => 88,
        BLKPG => 24,
        request => request >> 16 & 0x3fff,
    }
}

/// Holds what the arguments of a call lead to, as far as `reach` says. Returns the number of bytes.
pub(super) fn hold(
    number: libc::c_long,
    args: Arguments,
    is_remote: IsRemote<'_>,
    hold: Hold<'_>,
    reach: Reach,
) -> usize {
    let mut walk = Walk {
        is_remote,
        hold,
        reach,
        left: HELD_MAX,
    };
    for (at, bytes) in structures(number, args) {
        walk.structure(at, bytes, reach.depth);
    }
    if reach.all {
        let depth = if leads(number) { reach.depth } else { 0 };
        for at in pointers::of(number, args) {
            walk.keep(at, reach.bytes);
            walk.structure(at, WORDS * WORD, depth);
        }
    }
    HELD_MAX - walk.left
}

/// A walk through the memory that a call leads to.
struct Walk<'a> {
    is_remote: IsRemote<'a>,
    hold: Hold<'a>,
    reach: Reach,
    /// Bytes that may still be held.
    left: usize,
}

impl Walk<'_> {
    /// Holds the remote bytes at an address, within the walk's bound.
    fn keep(&mut self, at: usize, bytes: usize) {
        let bytes = bytes.min(self.left);
        if (self.is_remote)(at, bytes) {
            (self.hold)(at, bytes);
            self.left -= bytes;
        }
    }

    /// Holds a structure, and what its words lead to.
    fn structure(&mut self, at: usize, bytes: usize, depth: u32) {
        if bytes == 0 || depth == 0 {
            return;
        }
        self.keep(at, bytes);
        let words = Words::read(at, bytes);
        for (word, next) in words.remote(self.is_remote) {
            // A length often follows an address.
            let bytes = match next {
                1..=HELD_MAX => next.max(self.reach.bytes),
                _ => self.reach.bytes,
            };
            self.keep(word, bytes);
            self.structure(word, WORDS * WORD, depth - 1);
        }
    }
}

/// The first words of a structure.
struct Words {
    words: [usize; WORDS],
    count: usize,
}

impl Words {
    /// Reads at most `bytes` bytes. Memory that cannot be read has no words.
    fn read(at: usize, bytes: usize) -> Words {
        let bytes = bytes.min(WORDS * WORD);
        let mut read = Words {
            words: [0; WORDS],
            count: 0,
        };
        // An argument that is a number.
        if at < KERNEL_PAGE_BYTES || bytes < WORD {
            return read;
        }
        let to = (&raw mut read.words).expose_provenance();
        let (to, from) = ([to, bytes], [at, bytes]);
        // SAFETY: the words are this function's, and what cannot be read is an error.
        let got = unsafe {
            let this = libc::getpid() as usize;
            let (to, from) = (to.as_ptr() as usize, from.as_ptr() as usize);
            system_call(libc::SYS_process_vm_readv, [this, to, 1, from, 1, 0])
        };
        read.count = got.max(0) as usize / WORD;
        read
    }

    /// Returns the words that are remote addresses, each with the word behind it.
    fn remote<'a>(&'a self, is_remote: IsRemote<'a>) -> impl Iterator<Item = (usize, usize)> + 'a {
        let words = &self.words[..self.count];
        let next = words.iter().skip(1).chain(std::iter::once(&0));
        let pairs = words.iter().zip(next);
        pairs
            .filter(move |&(&word, _)| is_remote(word, 1))
            .map(|(&word, &next)| (word, next))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// Returns what a call holds if `remote` is all that is remote, by offsets and lengths.
    fn held(
        number: libc::c_long,
        args: Arguments,
        remote: &[u64],
        reach: Reach,
    ) -> Vec<(usize, usize)> {
        let start = remote.as_ptr().expose_provenance();
        let end = start + mem::size_of_val(remote);
        let is_remote = |at: usize, bytes: usize| bytes > 0 && (start..end).contains(&at);
        let held = RefCell::new(Vec::new());
        let note = |at: usize, bytes: usize| held.borrow_mut().push((at - start, bytes));
        let bytes = hold(number, args, &is_remote, &note, reach);
        let held = held.into_inner();
        assert_eq!(bytes, held.iter().map(|(_, bytes)| bytes).sum::<usize>());
        held
    }

    #[test]
    fn structures_are_held_with_what_their_words_lead_to() {
        let mut remote = vec![0_u64; 1000];
        let start = remote.as_ptr().expose_provenance();
        remote[500] = start as u64 + 7200;
        let local = [3, start + 4000, 100 << 10, 5];
        // A request of 32 bytes.
        let args = [1, 0xc020_4500, local.as_ptr().expose_provenance(), 0, 0, 0];
        let first = held(libc::SYS_ioctl, args, &remote, Reach::FIRST);
        assert_eq!(first, [(4000, 100 << 10)]);
        let further = held(libc::SYS_ioctl, args, &remote, Reach::FURTHER);
        assert!(further.contains(&(7200, 64 << 10)), "{further:?}");
        // The structure itself is remote.
        let args = [1, 0xc020_4500, start + 4000, 0, 0, 0];
        let first = held(libc::SYS_ioctl, args, &remote, Reach::FIRST);
        assert_eq!(first, [(4000, 32), (7200, 64 << 10)]);
        // An argument that is a number, and memory that is not there.
        for at in [1, 1 << 60] {
            let args = [1, 0xc020_4500, at, 0, 0, 0];
            assert_eq!(held(libc::SYS_ioctl, args, &remote, Reach::FIRST), []);
        }
    }

    #[test]
    fn no_call_holds_more_than_its_bound() {
        let mut remote = vec![0_u64; 64 * 64];
        let start = remote.as_ptr().expose_provenance();
        remote.fill(start as u64);
        let args = [0, start, 0, 0, 0, 0];
        let all = held(libc::SYS_bpf, args, &remote, Reach::FARTHEST);
        assert_eq!(all.iter().map(|(_, bytes)| bytes).sum::<usize>(), HELD_MAX);
    }
}
