//! CPUs that the program may use, the CPU where a thread has run, and [`Affinity`] to one.

use std::{
    ffi::OsStr,
    fs::File,
    io::{Cursor, Read, Write},
    os::unix::ffi::OsStrExt,
};

use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};

/// Number of turns after which a handler whose CPU refused it tries again.
const SET_AGAIN: u32 = 1 << 12;

/// Binding of a handler to its CPU.
pub(super) struct Affinity {
    cpu: usize,
    /// Number of turns until the next attempt; `None`: the binding is made, or not wanted.
    in_turns: Option<u32>,
}

impl Affinity {
    /// Returns the affinity to `cpu`. `wanted`: there are other handlers, on other CPUs.
    pub(super) fn new(cpu: usize, wanted: bool) -> Affinity {
        Affinity {
            cpu,
            in_turns: wanted.then_some(0),
        }
    }

    /// Binds the thread when due. A CPU that the program may not use any more is tried again later.
    pub(super) fn keep(&mut self) {
        self.in_turns = match self.in_turns {
            Some(0) => {
                let mut cpus = CpuSet::new();
                let set = cpus
                    .set(self.cpu)
                    .and_then(|()| sched_setaffinity(Pid::from_raw(0), &cpus));
                set.is_err().then_some(SET_AGAIN)
            }
            turns => turns.map(|turns| turns - 1),
        };
    }
}

/// Returns the CPUs that the calling thread may use. If unknown: CPU 0 alone, to which no handler
/// is bound.
pub(crate) fn cpus() -> Vec<usize> {
    let cpus = sched_getaffinity(Pid::from_raw(0)).map_or(Vec::new(), |set| {
        let is_set = |&cpu: &usize| set.is_set(cpu).unwrap_or(false);
        (0..CpuSet::count()).filter(is_set).collect()
    });
    if cpus.is_empty() { vec![0] } else { cpus }
}

/// Returns the CPU on which a thread has run last. Allocates nothing.
pub(super) fn cpu_of(thread: u32) -> Option<usize> {
    let mut path = Cursor::new([0; 40]);
    write!(path, "/proc/self/task/{thread}/stat").ok()?;
    let path_len = path.position() as usize;
    let path = OsStr::from_bytes(&path.get_ref()[..path_len]);
    let mut text = [0; 512];
    let mut stat = File::open(path).ok()?;
    let len = stat.read(&mut text).ok()?;
    cpu_in(&text[..len])
}

/// Parses the CPU in a line of `/proc/PID/stat`, its 39th field.
fn cpu_in(stat: &[u8]) -> Option<usize> {
    // The second field is a name in brackets, which may have any bytes.
    let behind_name = stat.iter().rposition(|&byte| byte == b')')? + 2;
    let field = stat[behind_name..]
        .split(|&byte| byte == b' ')
        .nth(39 - 3)?;
    str::from_utf8(field).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_of_a_thread_is_found_behind_any_name() {
        let line = b"12 (a ) b) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 5 0 0\n";
        assert_eq!(cpu_in(line), Some(5));
        assert_eq!(cpu_in(b"12 (a) S 1"), None);
        let cpu = cpu_of(nix::unistd::gettid().as_raw().cast_unsigned());
        assert!(cpu.is_some_and(|cpu| cpu < CpuSet::count()), "{cpu:?}");
        assert_eq!(cpu_of(0), None);
    }
}
