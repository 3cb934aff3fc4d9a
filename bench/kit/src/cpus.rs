//! CPUs that threads run on.
//!
//! The rule it keeps: a restriction is never lifted. A caller restricts a thread of its own, or the
//! main thread before any other starts.

use std::io;

use nix::{
    sched::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity},
    unistd::Pid,
};

const THIS_THREAD: Pid = Pid::from_raw(0);

/// Keeps this thread, and all threads and processes that it starts from now on, to the CPU that it
/// is on.
pub fn stay_here() -> io::Result<()> {
    stay_on(sched_getcpu()?)
}

/// Keeps this thread, and all threads and processes that it starts from now on, to `cpu`.
pub fn stay_on(cpu: usize) -> io::Result<()> {
    let mut cpus = CpuSet::new();
    cpus.set(cpu)?;
    Ok(sched_setaffinity(THIS_THREAD, &cpus)?)
}

/// Returns the CPU of this thread, and another one on which the thread may run, if there is one.
pub fn two() -> io::Result<(usize, Option<usize>)> {
    let (here, allowed) = (sched_getcpu()?, sched_getaffinity(THIS_THREAD)?);
    let another = (0..CpuSet::count()).find(|&cpu| cpu != here && allowed.is_set(cpu) == Ok(true));
    Ok((here, another))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn who_stays_has_no_other_cpu_and_what_it_starts_has_none_either() {
        let alone = thread::spawn(|| {
            stay_here().unwrap();
            let started = thread::spawn(|| two().unwrap());
            (two().unwrap(), started.join().unwrap())
        });
        let (it, started) = alone.join().unwrap();
        assert_eq!((it.1, started), (None, it));
    }
}
