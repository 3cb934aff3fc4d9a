//! Filters of system calls (seccomp): their statements, and their answers to the calls that the
//! runtime makes in the program's threads ([`forbidden`]).
//!
//! The rule it keeps: a filter is run as the kernel runs it, on calls as the runtime makes them.

use std::{ffi::c_int, mem};

use libc::{SYS_ioctl, c_long, seccomp_data, sock_filter};

/// The `ioctl`s of a userfaultfd that bring pages in, take them out, and wake threads.
const UFFDIO: [usize; 4] = [0xc028_aa03, 0xc028_aa05, 0x8010_aa02, 0xc018_aa06];

/// Calls that the runtime makes in the program's threads.
const NEEDED: [(&str, c_long); 15] = [
    ("futex", libc::SYS_futex),
    ("read", libc::SYS_read),
    ("write", libc::SYS_write),
    ("pread64", libc::SYS_pread64),
    ("mmap", libc::SYS_mmap),
    ("munmap", libc::SYS_munmap),
    ("mprotect", libc::SYS_mprotect),
    ("mremap", libc::SYS_mremap),
    ("madvise", libc::SYS_madvise),
    ("process_madvise", libc::SYS_process_madvise),
    ("process_vm_readv", libc::SYS_process_vm_readv),
    ("clock_nanosleep", libc::SYS_clock_nanosleep),
    ("sched_yield", libc::SYS_sched_yield),
    ("gettid", libc::SYS_gettid),
    ("rt_sigprocmask", libc::SYS_rt_sigprocmask),
];

/// Number of a descriptor that filters do not take for one of the first.
const SOME_DESCRIPTOR: usize = 1000;

/// Returns a call that the runtime needs and `filter` forbids.
pub(crate) fn forbidden(filter: &[sock_filter]) -> Option<&'static str> {
    let allows = |number: c_long, args: [u64; 6]| {
        let call = seccomp_data {
            nr: number as c_int,
            arch: ARCHITECTURE,
            instruction_pointer: 0,
            args,
        };
        let answer = run(filter, &call).unwrap_or(libc::SECCOMP_RET_KILL_PROCESS);
        let action = answer & libc::SECCOMP_RET_ACTION_FULL;
        action == libc::SECCOMP_RET_ALLOW || action == libc::SECCOMP_RET_LOG
    };
    let descriptor = SOME_DESCRIPTOR as u64;
    if !UFFDIO
        .iter()
        .all(|&what| allows(SYS_ioctl, [descriptor, what as u64, 0, 0, 0, 0]))
    {
        return Some("ioctl");
    }
    let plain = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let anonymous = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    let args = |number| match number {
        libc::SYS_mmap => [0, 4096, plain, anonymous, u64::MAX, 0],
        libc::SYS_mprotect => [0, 4096, plain, 0, 0, 0],
        libc::SYS_read | libc::SYS_write | libc::SYS_pread64 => [descriptor, 0, 8, 0, 0, 0],
        libc::SYS_madvise => [0, 4096, libc::MADV_DONTNEED as u64, 0, 0, 0],
        libc::SYS_futex => [
            0,
            libc::FUTEX_WAIT as u64 | libc::FUTEX_PRIVATE_FLAG as u64,
            0,
            0,
            0,
            0,
        ],
        _ => [0; 6],
    };
    let missing = NEEDED
        .iter()
        .find(|&&(_, number)| !allows(number, args(number)));
    missing.map(|&(name, _)| name)
}

#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xc000_00b7;

/// Returns the filter, changed to kill the process instead of the calling thread. A program with
/// one thread would not end otherwise, while the runtime's threads live.
pub(crate) fn killing_all(filter: &[sock_filter]) -> Vec<sock_filter> {
    let kills_all = |statement: &sock_filter| {
        let action = statement.k & libc::SECCOMP_RET_ACTION_FULL;
        let is_answer = u32::from(statement.code) == libc::BPF_RET | libc::BPF_K;
        sock_filter {
            k: match is_answer && action == libc::SECCOMP_RET_KILL_THREAD {
                true => libc::SECCOMP_RET_KILL_PROCESS,
                false => statement.k,
            },
            ..*statement
        }
    };
    filter.iter().map(kills_all).collect()
}

/// Returns the filter's answer to a call, as the kernel runs it (classic BPF). `None` if the kernel
/// does not accept the filter, which its own error then says.
fn run(filter: &[sock_filter], call: &seccomp_data) -> Option<u32> {
    // SAFETY: plain numbers without padding.
    let data: &[u8; mem::size_of::<seccomp_data>()] = unsafe { mem::transmute(call) };
    let (mut a, mut x, mut memory) = (0u32, 0u32, [0u32; 16]);
    let mut at = 0;
    loop {
        let &sock_filter { code, jt, jf, k } = filter.get(at)?;
        at += 1;
        let code = u32::from(code);
        let operand = if code & 8 == libc::BPF_X { x } else { k };
        let slot = |k: u32| (k < 16).then_some(k as usize);
        match code & 7 {
            libc::BPF_LD | libc::BPF_LDX => {
                let value = match code & 0xe0 {
                    libc::BPF_ABS => {
                        let at = k as usize;
                        u32::from_ne_bytes(data.get(at..at.checked_add(4)?)?.try_into().ok()?)
                    }
                    libc::BPF_IMM => k,
                    libc::BPF_MEM => memory[slot(k)?],
                    libc::BPF_LEN => data.len() as u32,
                    _ => return None,
                };
                *(if code & 7 == libc::BPF_LD {
                    &mut a
                } else {
                    &mut x
                }) = value;
            }
            libc::BPF_ST => memory[slot(k)?] = a,
            libc::BPF_STX => memory[slot(k)?] = x,
            libc::BPF_ALU => {
                a = match code & 0xf0 {
                    libc::BPF_ADD => a.wrapping_add(operand),
                    libc::BPF_SUB => a.wrapping_sub(operand),
                    libc::BPF_MUL => a.wrapping_mul(operand),
                    libc::BPF_DIV => a.checked_div(operand)?,
                    libc::BPF_OR => a | operand,
                    libc::BPF_AND => a & operand,
                    libc::BPF_LSH => a.checked_shl(operand).unwrap_or(0),
                    libc::BPF_RSH => a.checked_shr(operand).unwrap_or(0),
                    libc::BPF_NEG => a.wrapping_neg(),
                    libc::BPF_XOR => a ^ operand,
                    _ => return None,
                }
            }
            libc::BPF_JMP => {
                let is_met = match code & 0xf0 {
                    libc::BPF_JA => {
                        at += k as usize;
                        continue;
                    }
                    libc::BPF_JEQ => a == operand,
                    libc::BPF_JGT => a > operand,
                    libc::BPF_JGE => a >= operand,
                    libc::BPF_JSET => a & operand != 0,
                    _ => return None,
                };
                at += usize::from(if is_met { jt } else { jf });
            }
            libc::BPF_RET => return Some(if code & 0x18 == libc::BPF_A { a } else { k }),
            libc::BPF_MISC if code & 0xf8 == libc::BPF_TAX => x = a,
            libc::BPF_MISC => a = x,
            _ => return None,
        }
    }
}

/// Returns the statement that loads the 4 bytes of a call at `at`.
pub(crate) fn load(at: usize) -> sock_filter {
    statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, at as u32)
}

/// Returns the statement that ends a filter with `answer`.
pub(crate) fn answer(answer: u32) -> sock_filter {
    statement(libc::BPF_RET | libc::BPF_K, answer)
}

/// Returns a statement without a jump.
pub(crate) fn statement(code: u32, k: u32) -> sock_filter {
    let code = code as u16;
    sock_filter {
        code,
        jt: 0,
        jf: 0,
        k,
    }
}

/// Returns a jump over `jt` statements if `test` is met by `k`, and over `jf` if not.
pub(crate) fn jump(test: u32, k: u32, jt: u8, jf: u8) -> sock_filter {
    let code = (libc::BPF_JMP | test | libc::BPF_K) as u16;
    sock_filter { code, jt, jf, k }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a filter that answers `listed` to some calls, and `otherwise` to all others.
    fn list(numbers: &[c_long], listed: u32, otherwise: u32) -> Vec<sock_filter> {
        let mut filter = vec![load(0)];
        for (at, &number) in numbers.iter().enumerate() {
            let left = (numbers.len() - at) as u8;
            filter.push(jump(libc::BPF_JEQ, number as u32, left, 0));
        }
        filter.push(answer(otherwise));
        filter.push(answer(listed));
        filter
    }

    #[test]
    fn filter_is_refused_for_the_call_that_it_forbids() {
        let (allow, kill) = (libc::SECCOMP_RET_ALLOW, libc::SECCOMP_RET_KILL_PROCESS);
        let errno = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
        let needed: Vec<_> = NEEDED.iter().map(|&(_, number)| number).collect();
        let all = [&needed[..], &[libc::SYS_ioctl]].concat();
        assert_eq!(forbidden(&list(&[], kill, allow)), None);
        assert_eq!(forbidden(&list(&[libc::SYS_ptrace], errno, allow)), None);
        assert_eq!(forbidden(&list(&all, allow, kill)), None);
        assert_eq!(forbidden(&list(&needed, allow, kill)), Some("ioctl"));
        for &(name, number) in &NEEDED {
            assert_eq!(forbidden(&list(&[number], errno, allow)), Some(name));
        }
        // The filter falls off its end.
        assert_eq!(forbidden(&[load(0)]), Some("ioctl"));
    }

    #[test]
    fn filter_that_looks_at_arguments_is_followed() {
        // Allows `ioctl` of a terminal only.
        let arg = mem::offset_of!(seccomp_data, args) + 8;
        let mut filter = vec![
            load(0),
            jump(libc::BPF_JEQ, libc::SYS_ioctl as u32, 0, 3),
            load(arg),
            jump(libc::BPF_JEQ, libc::TIOCGWINSZ as u32, 1, 0),
            answer(libc::SECCOMP_RET_KILL_PROCESS),
            answer(libc::SECCOMP_RET_ALLOW),
        ];
        assert_eq!(forbidden(&filter), Some("ioctl"));
        filter[3] = jump(libc::BPF_JEQ, libc::TIOCGWINSZ as u32, 0, 1);
        assert_eq!(forbidden(&filter), None);
    }

    #[test]
    fn what_kills_a_thread_kills_the_process() {
        let numbers = [libc::SYS_ptrace, 0];
        let given = list(
            &numbers,
            libc::SECCOMP_RET_KILL_THREAD,
            libc::SECCOMP_RET_ALLOW,
        );
        let made = killing_all(&given);
        let wanted = list(
            &numbers,
            libc::SECCOMP_RET_KILL_PROCESS,
            libc::SECCOMP_RET_ALLOW,
        );
        let parts = |filter: &[sock_filter]| -> Vec<_> {
            let part = |it: &sock_filter| (it.code, it.jt, it.jf, it.k);
            filter.iter().map(part).collect()
        };
        assert_eq!(parts(&made), parts(&wanted));
    }

    #[test]
    fn arithmetic_is_the_kernels() {
        let call = seccomp_data {
            nr: 7,
            arch: ARCHITECTURE,
            instruction_pointer: 0,
            args: [0; 6],
        };
        let filter = [
            load(0),
            statement(libc::BPF_MISC | libc::BPF_TAX, 0),
            statement(libc::BPF_ALU | libc::BPF_MUL, 6),
            statement(libc::BPF_ST, 3),
            statement(libc::BPF_MISC | libc::BPF_TXA, 0),
            statement(libc::BPF_ALU | libc::BPF_LSH, 4),
            statement(libc::BPF_LDX | libc::BPF_MEM, 3),
            statement(libc::BPF_ALU | libc::BPF_ADD | libc::BPF_X, 0),
            statement(libc::BPF_RET | libc::BPF_A, 0),
        ];
        assert_eq!(run(&filter, &call), Some((7 << 4) + 42));
    }
}
