//! `cargo xtask bench --smoke`: every benchmark once, with tiny sizes. It shows that they work, and
//! nothing about speed.
//!
//! The rule it keeps: the list below is the only one, and a benchmark outside it is not kept
//! working. Each benchmark verifies its own data; the contents of its report are checked by the
//! tests of `farpage-bench` itself.

use std::{
    path::Path,
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use anyhow::Result;

use crate::{children, programs, tests::tally::Tally};

/// Arguments of `farpage-bench`, to which `--smoke` is added. `versus-swap` is left out on purpose:
/// a test suite does not change the swap of the machine that it runs on.
const RUNS: [&str; 40] = [
    "floor --fabric shm --page-size 4KiB",
    "floor --fabric tcp",
    "stream --fabric shm",
    "stream --fabric tcp",
    "stream --page-size 4KiB --data smooth --codec lz4",
    "stream --page-size 256KiB --data constant --threads 3",
    "stream --page-size 2MiB --size 48MiB --iterations 2",
    "stream --link-gbps 10 --link-us 20 --budget 2MiB",
    "stream --read-ahead 0 --fillers 1 --evictors 2",
    "stream --plain",
    "random --fabric shm --page-size 4KiB",
    "random --fabric tcp --zipf 0.99",
    "random --no-advice --threads 1",
    "random --plain",
    "latency --fabric shm --page-size 4KiB",
    "latency --fabric tcp",
    "eviction --page-size 4KiB",
    "sparse",
    "tiers",
    "tiers --fabric shm --only latency,curve",
    "regmem --fabric shm",
    "regmem --fabric tcp",
    "ring --fabric shm",
    "ring --fabric tcp",
    "parameter-server --fabric shm",
    "parameter-server --fabric tcp",
    "train --fabric shm",
    "train --fabric tcp --mode ds --shards skewed --slow-worker 1:2 --link-gbps 1",
    "hostile",
    "targets",
    "sweep",
    "versus-umap",
    "stream --data turbulence --dtype f32 --codec shuffle",
    "traffic --data climate --codec zfp:accuracy=1e-2",
    "traffic --data graph-columns --codec lz4 --fabric tcp",
    "pages --data text",
    "figures --out target/bench-smoke/figures",
    "codecs --out target/bench-smoke/codecs",
    "apps --fabric shm",
    "apps --fabric tcp --apps pagerank,sort,stencil",
];

/// Time limit of a benchmark: more than any takes on a slow machine.
const TIME_MAX: Duration = Duration::from_secs(120);

/// Runs the command `cargo xtask bench --smoke`.
///
/// # Errors
/// A build that fails, and the errors of [`smoke`].
pub(crate) fn run() -> Result<ExitCode> {
    let mut build = children::cargo();
    build.args(["test", "--no-run", "--package", "farpage-bench"]);
    let mut tally = Tally::default();
    smoke(
        programs::build(&mut build)?.binary("farpage-bench")?,
        &mut tally,
    )?;
    print!("{}", tally.shown);
    Ok(tally.close())
}

/// Runs all benchmarks by `program`, a `farpage-bench`, and counts them.
///
/// # Errors
/// A program that cannot be started. A benchmark that fails is counted.
pub(crate) fn smoke(program: &Path, tally: &mut Tally) -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let bench = |args: &str| {
        let mut command = Command::new(program);
        command
            .current_dir(&root)
            .args(args.split(' '))
            .stdout(Stdio::null());
        command
    };
    if !children::status(&mut bench("doctor"))?.success() {
        let why = "`farpage-bench doctor` says that farpage cannot work here";
        tally.skips.extend(RUNS.map(|run| format!("{run}: {why}")));
        return Ok(());
    }
    for run in RUNS {
        let begin = Instant::now();
        let status = children::status_within(TIME_MAX, &mut bench(&format!("{run} --smoke")))?;
        let failed = match status {
            Some(status) if status.success() => None,
            Some(status) => Some(status.to_string()),
            None => Some(format!("no end after {} s", TIME_MAX.as_secs())),
        };
        let seconds = begin.elapsed().as_secs_f64();
        let result = match failed {
            None => {
                tally.passed += 1;
                "ok".to_owned()
            }
            Some(why) => {
                tally.failures.push(format!("{run}: {why}"));
                format!("FAILED ({why})")
            }
        };
        tally.say(&format!("bench {run} ... {result}, {seconds:.1} s"));
    }
    Ok(())
}
