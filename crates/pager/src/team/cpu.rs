//! CPUs: which ones the program may use, where a thread has run, and [`Affinity`] to one of them.

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

/// Handlers whose CPU refused them try again when they have slept so many times.
const SET_AGAIN: u32 = 1 << 12;

/// Keeps a handler on its CPU.
pub(super) struct Affinity {
    cpu: usize,
    /// Turns until it is tried, where it was not done.
    in_turns: Option<u32>,
}

impl Affinity {
    /// `wanted`: there are others, on other CPUs.
    pub(super) fn new(cpu: usize, wanted: bool) -> Affinity {
        Affinity {
            cpu,
            in_turns: wanted.then_some(0),
        }
    }

    /// A CPU that is refused, because the program may not use it any more, is tried again later.
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

/// The CPUs that the calling thread may use. Unknown: one, on which no handler is held.
pub(crate) fn cpus() -> Vec<usize> {
    let cpus = sched_getaffinity(Pid::from_raw(0)).map_or(Vec::new(), |set| {
        let is_set = |&cpu: &usize| set.is_set(cpu).unwrap_or(false);
        (0..CpuSet::count()).filter(is_set).collect()
    });
    if cpus.is_empty() { vec![0] } else { cpus }
}

/// The CPU on which a thread has run last. Nothing is allocated.
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

/// What a line of `/proc/PID/stat` says of the CPU, its 39th field.
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
