//! CPUs that threads run on, and the time that they spend there.
//!
//! The rule it keeps: a restriction is never lifted. A caller restricts a thread of its own, or the
//! main thread before any other starts.

use std::{fs, io, time::Duration};

use anyhow::{Context, Result};
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity},
    time::{ClockId, clock_gettime},
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

/// Returns the CPU time of this process so far.
pub fn own_time() -> Duration {
    clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID)
        .expect("every Linux has this clock")
        .into()
}

/// Returns the CPU time so far of this process's threads whose names begin with one of `names`.
/// Threads that have ended do not count.
///
/// # Errors
/// There is no such thread, or the kernel does not tell.
pub fn time_of_threads(names: &[&str]) -> Result<Duration> {
    let mut sum = None;
    for task in fs::read_dir("/proc/self/task").context("cannot list this program's threads")? {
        let task = task.context("cannot list this program's threads")?.path();
        let read = |what| fs::read_to_string(task.join(what));
        // A thread that ends meanwhile has no files.
        let (Ok(name), Ok(times)) = (read("comm"), read("schedstat")) else {
            continue;
        };
        if names.iter().any(|prefix| name.starts_with(prefix)) {
            let ns = times.split(' ').next().and_then(|ns| ns.parse().ok());
            let ns = ns.with_context(|| format!("a thread's CPU time is {times:?}"))?;
            *sum.get_or_insert(Duration::ZERO) += Duration::from_nanos(ns);
        }
    }
    sum.with_context(|| format!("this program has no threads named {}", names.join(" or ")))
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
