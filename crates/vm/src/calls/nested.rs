//! Calls whose arguments lead to more memory by structures: `ioctl`, `setsockopt`, `keyctl`, `bpf`
//! and their kind ([`follow`]).
//!
//! The kernel knows thousands of such structures. A few are known here, with the lengths of what
//! they lead to. All others are looked through for words that are remote addresses, and a part of
//! what these lead to is guessed: more with each try.
//!
//! The rule it keeps: all of this is for a call that has failed with `EFAULT`. Only what is known
//! exactly is loaded, where the kernel says that it can be read. A guess brings in what is there,
//! within bounds, and raises no fault.
//!
//! Memory that the kernel goes on using after the call (registered with a device, `io_submit`) is
//! not for this file: it would have to stay for longer.

use std::mem;

use super::{
    local::{Guesses, IsRemote, bring_in},
    pointers,
    raw::{Arguments, system_call},
};
use crate::sys::KERNEL_PAGE_BYTES;

const WORD: usize = mem::size_of::<usize>();
/// Words of a structure that are looked at: more than those of any structure with addresses that is
/// no list.
const WORDS: usize = 64;
/// Most bytes of an argument or of what a structure leads to that are brought in.
const KNOWN_MAX: usize = 1 << 20;

/// Distance that is guessed from a call's arguments.
#[derive(Clone, Copy)]
struct Reach {
    /// Structures on the way to the last bytes.
    depth: u32,
    /// Bytes from an address on, whose own length is unknown.
    bytes: usize,
    /// True if arguments are followed that are no structures as far as is known.
    all: bool,
}

impl Reach {
    /// Returns the distance after as many repetitions of a call.
    fn after(tries: usize) -> Reach {
        let (depth, bytes) = match tries {
            0 => (1, KERNEL_PAGE_BYTES),
            1 => (1, 32 << 10),
            2 => (2, 16 << 10),
            _ => (2, 64 << 10),
        };
        let all = tries > 0;
        Reach { depth, bytes, all }
    }
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
    /// Length of `keyctl_kdf_params`.
    const KDF_BYTES: usize = 56;
    let list = |at: usize, count: usize| (args[at], count.saturating_mul(VECTOR));
    match number {
        libc::SYS_ioctl => [(args[2], ioctl_bytes(args[1])), NONE],
        libc::SYS_setsockopt => [(args[3], args[4] as u32 as usize), NONE],
        libc::SYS_bpf => [(args[1], args[2] as u32 as usize), NONE],
        libc::SYS_ptrace => [list(3, 1), NONE],
        libc::SYS_keyctl => match args[0] as u32 as usize {
            KEYCTL_INSTANTIATE_IOV => [list(2, args[3]), NONE],
            KEYCTL_DH_COMPUTE => [(args[4], KDF_BYTES), NONE],
            _ => [NONE; 2],
        },
        _ => [NONE; 2],
    }
}

/// Returns the bytes of the structure of an `ioctl`; 0 if unknown. Newer requests tell.
fn ioctl_bytes(request: usize) -> usize {
    /// Requests of network interfaces, whose structures are `ifreq` and smaller ones.
    const INTERFACES: std::ops::RangeInclusive<usize> = 0x8910..=0x89ff;
    /// `BLKPG`, whose structure is `blkpg_ioctl_arg`.
    const BLKPG: usize = 0x1269;
    match request as u32 as usize {
        request if INTERFACES.contains(&request) => 40,
        BLKPG => 24,
        request => request >> 16 & 0x3fff,
    }
}

/// Returns the command of an `ioctl` that passes it on to a device, and its length. Such a request
/// may have acted when it fails.
pub(super) fn command(number: libc::c_long, args: Arguments) -> Option<(usize, usize)> {
    /// `SG_IO`, and the length of `sg_io_hdr`.
    const SG_IO: (usize, usize) = (0x2285, 88);
    /// `SCSI_IOCTL_SEND_COMMAND` and the length of its lengths; `CDROM_SEND_PACKET` and the length
    /// of `cdrom_generic_command`.
    const SCSI_SEND: (usize, usize) = (1, 8);
    const CDROM_SEND: (usize, usize) = (0x5393, 64);
    /// `HDIO_DRIVE_TASKFILE`, `HDIO_DRIVE_TASK` and `HDIO_DRIVE_CMD`, and the length of registers.
    const DRIVE: std::ops::RangeInclusive<usize> = 0x31d..=0x31f;
    const DRIVE_BYTES: usize = 4;
    /// Kinds of the requests of NVMe (`N`) and MMC, whose numbers tell the length.
    const NVME: usize = 0x4e;
    const MMC: usize = 0xb3;
    let request = args[1] as u32 as usize;
    let bytes = match request {
        _ if number != libc::SYS_ioctl => None,
        _ if request == SG_IO.0 => Some(SG_IO.1),
        _ if request == SCSI_SEND.0 => Some(SCSI_SEND.1),
        _ if request == CDROM_SEND.0 => Some(CDROM_SEND.1),
        _ if DRIVE.contains(&request) => Some(DRIVE_BYTES),
        _ if [NVME, MMC].contains(&(request >> 8 & 0xff)) => Some(ioctl_bytes(request)),
        _ => None,
    };
    bytes.map(|bytes| (args[2], bytes))
}

/// Returns memory of a call whose length is known, and that may be longer than a page.
fn known(number: libc::c_long, args: Arguments) -> Option<(usize, usize)> {
    const KEYCTL_READ: usize = 11;
    /// `SO_ATTACH_REUSEPORT_CBPF`, absent from the published bindings.
    const SO_ATTACH_REUSEPORT_CBPF: usize = 51;
    /// Length of a statement of a filter.
    const STATEMENT: usize = 8;
    const SIOCGIFCONF: usize = 0x8912;
    let [first, second, third, fourth, ..] = args;
    let is_filter = |name: usize| {
        let name = name as u32 as usize;
        name == libc::SO_ATTACH_FILTER as usize || name == SO_ATTACH_REUSEPORT_CBPF
    };
    match number {
        libc::SYS_setxattr
        | libc::SYS_lsetxattr
        | libc::SYS_fsetxattr
        | libc::SYS_getxattr
        | libc::SYS_lgetxattr
        | libc::SYS_fgetxattr
        | libc::SYS_add_key => Some((third, fourth)),
        libc::SYS_keyctl if first as u32 as usize == KEYCTL_READ => Some((third, fourth)),
        libc::SYS_msgsnd | libc::SYS_msgrcv => Some((second, third.saturating_add(WORD))),
        libc::SYS_setsockopt if second == libc::SOL_SOCKET as usize && is_filter(third) => {
            let [statements, at, ..] = Words::read(fourth, 2 * WORD).words;
            Some((at, statements as u16 as usize * STATEMENT))
        }
        libc::SYS_ioctl if second as u32 as usize == SIOCGIFCONF => {
            let [bytes, at, ..] = Words::read(third, 2 * WORD).words;
            Some((at, bytes as u32 as usize))
        }
        _ => None,
    }
}

/// Brings in what the arguments of a call lead to, as far as its `tries` tell. Returns true if some
/// of that is remote.
pub(super) fn follow(
    number: libc::c_long,
    args: Arguments,
    is_remote: IsRemote<'_>,
    guesses: Guesses<'_>,
    tries: usize,
) -> bool {
    let reach = Reach::after(tries);
    let structures = structures(number, args);
    for (at, bytes) in structures {
        bring_in(at, bytes.min(KNOWN_MAX), is_remote);
    }
    let mut walk = Walk {
        is_remote,
        guesses,
        reach,
        left: guesses.max_bytes,
        leads: false,
    };
    if let Some((at, bytes)) = known(number, args).filter(|&(at, bytes)| is_remote(at, bytes)) {
        bring_in(at, bytes.min(KNOWN_MAX), is_remote);
        walk.leads = true;
    }
    for (at, bytes) in structures {
        walk.structure(at, bytes, reach.depth);
    }
    if reach.all {
        let depth = if leads(number) { reach.depth } else { 0 };
        for at in pointers::of(number, args) {
            // An array may follow a structure.
            walk.guess(at, reach.bytes);
            if !structures.iter().any(|it| it.0 == at && it.1 > 0) {
                walk.structure(at, WORDS * WORD, depth);
            }
        }
    }
    walk.leads
}

/// Walk through the memory that a call leads to.
struct Walk<'a> {
    is_remote: IsRemote<'a>,
    guesses: Guesses<'a>,
    reach: Reach,
    /// Bytes that may still be guessed.
    left: usize,
    /// True if remote memory was met.
    leads: bool,
}

impl Walk<'_> {
    /// Brings in the remote bytes at an address, within the walk's bound.
    fn guess(&mut self, at: usize, bytes: usize) {
        if (self.is_remote)(at, 1) {
            let bytes = bytes.min(self.left);
            (self.guesses.fetch)(at, bytes);
            self.left -= bytes;
            self.leads = true;
        }
    }

    /// Brings in what the words of a structure lead to.
    fn structure(&mut self, at: usize, bytes: usize, depth: u32) {
        if bytes == 0 || depth == 0 {
            return;
        }
        self.leads |= (self.is_remote)(at, bytes);
        let words = Words::read(at, bytes);
        for word in words.remote(self.is_remote) {
            self.guess(word, self.reach.bytes);
            self.structure(word, WORDS * WORD, depth - 1);
        }
    }
}

/// First words of a structure. Those that cannot be read are 0.
pub(super) struct Words {
    pub(super) words: [usize; WORDS],
    count: usize,
}

impl Words {
    /// Reads at most `bytes` bytes. Memory that cannot be read has no words.
    pub(super) fn read(at: usize, bytes: usize) -> Words {
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

    /// Returns the words that are remote addresses.
    fn remote<'a>(&'a self, is_remote: IsRemote<'a>) -> impl Iterator<Item = usize> + 'a {
        let words = self.words[..self.count].iter().copied();
        words.filter(move |&word| is_remote(word, 1))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// Returns what is guessed for a call if `remote` is all that is remote, by offsets and
    /// lengths.
    fn guessed(
        number: libc::c_long,
        args: Arguments,
        remote: &[u64],
        tries: usize,
    ) -> Vec<(usize, usize)> {
        let start = remote.as_ptr().expose_provenance();
        let end = start + mem::size_of_val(remote);
        let is_remote = |at: usize, bytes: usize| bytes > 0 && (start..end).contains(&at);
        let guessed = RefCell::new(Vec::new());
        let guesses = Guesses {
            fetch: &|at, bytes| guessed.borrow_mut().push((at - start, bytes)),
            max_bytes: GUESSED_MAX,
        };
        let leads = follow(number, args, &is_remote, guesses, tries);
        let guessed = guessed.into_inner();
        assert!(leads || guessed.is_empty());
        guessed
    }

    const GUESSED_MAX: usize = 256 << 10;

    #[test]
    fn guesses_go_where_the_words_of_a_structure_lead() {
        let mut remote = vec![0_u64; 1000];
        let start = remote.as_ptr().expose_provenance();
        remote[500] = start as u64 + 7200;
        let local = [3, start + 4000, 100 << 10, 5];
        // A request of 32 bytes.
        let args = [1, 0xc020_4500, local.as_ptr().expose_provenance(), 0, 0, 0];
        let first = guessed(libc::SYS_ioctl, args, &remote, 0);
        assert_eq!(first, [(4000, KERNEL_PAGE_BYTES)]);
        let further = guessed(libc::SYS_ioctl, args, &remote, 3);
        assert_eq!(further, [(4000, 64 << 10), (7200, 64 << 10)]);
        // The structure itself is remote.
        let args = [1, 0xc020_4500, start + 4000, 0, 0, 0];
        let first = guessed(libc::SYS_ioctl, args, &remote, 0);
        assert_eq!(first, [(7200, KERNEL_PAGE_BYTES)]);
        // An argument that is a number, and memory that is not there.
        for at in [1, 1 << 60] {
            let args = [1, 0xc020_4500, at, 0, 0, 0];
            assert_eq!(guessed(libc::SYS_ioctl, args, &remote, 3), []);
        }
    }

    #[test]
    fn no_call_guesses_more_than_its_bound() {
        let mut remote = vec![0_u64; 64 * 64];
        let start = remote.as_ptr().expose_provenance();
        remote.fill(start as u64);
        let args = [0, start, 0, 0, 0, 0];
        let all = guessed(libc::SYS_bpf, args, &remote, 3);
        let bytes = all.iter().map(|(_, bytes)| bytes).sum::<usize>();
        assert_eq!(bytes, GUESSED_MAX);
    }

    #[test]
    fn requests_that_pass_commands_on_are_known() {
        const SG_IO: usize = 0x2285;
        const NVME_IOCTL_ADMIN_CMD: usize = 0xc048_4e41;
        const FIONREAD: usize = 0x541b;
        let of = |number, request| command(number, [3, request, 4096, 0, 0, 0]);
        assert_eq!(of(libc::SYS_ioctl, SG_IO), Some((4096, 88)));
        assert_eq!(of(libc::SYS_ioctl, NVME_IOCTL_ADMIN_CMD), Some((4096, 72)));
        assert_eq!(of(libc::SYS_ioctl, FIONREAD), None);
        assert_eq!(of(libc::SYS_setsockopt, SG_IO), None);
    }
}
