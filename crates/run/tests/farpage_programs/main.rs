//! Programs of the distribution and of Python's packages, unmodified, with a part of their memory:
//! beside a plain run, and beside swap.
//!
//! The rule it keeps: the output is compared byte for byte with a plain run's, and the budget is
//! enforced by a memory cgroup. Programs, inputs and arguments are left to [`cases`].
//!
//! It takes minutes: `cargo xtask test --programs [NAME...]` installs the programs and runs it.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a measurement, which ends by panicking and prints what it found"
)]

mod cases;
#[path = "../common/mod.rs"]
mod common;

use std::{
    env,
    ffi::OsString,
    fs,
    io::{self, BufRead, BufReader},
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use cases::{Case, Folder};
use common::said;
use farpage_bench_limits::{
    cgroup::{Cgroup, Parent, SwapUse},
    swap::Swap,
};

const MIB: u64 = 1 << 20;

/// Variable with the names of the programs to run, separated by spaces. Default: all.
const ONLY: &str = "FARPAGE_PROGRAMS";
/// Variable with the number of timed runs; medians count.
const TURNS: &str = "FARPAGE_TURNS";
/// Variable with the number of parts that the memory of a program has, one of which is local: 4.
const PARTS: &str = "FARPAGE_PARTS";
/// Variable that makes each run print a line.
const PROGRESS: &str = "FARPAGE_PROGRESS";
/// Variable with the folder of the release build, if it is not the one under test.
const BINARIES: &str = "FARPAGE_BINARIES";

/// The longest time of a run.
const LONGEST: Duration = Duration::from_secs(120);
/// Budget that exceeds the need of each program.
const ROOMY: &str = "4GiB";
/// Memory of farpage itself in the program's cgroup, beside the budget and the figures of each
/// page: code, threads and their buffers.
const OWN_BYTES: u64 = 48 * MIB;
/// Memory that a run with swap has in its cgroup beside the same budget.
const SPARE_BYTES: u64 = 4 * MIB;

/// Result of a run.
struct Ended {
    seconds: f64,
    /// Output of the program if it ended well; else the reason.
    output: std::result::Result<Vec<u8>, String>,
    said: String,
}

/// Runs a command to its end.
fn run(words: &[OsString], folder: &Folder) -> Ended {
    run_with(words, folder, |_| {}, &mut || ())
}

/// Runs a case with the kernel's huge pages off: a program has the pages that it touches, and not 2
/// MiB around each. Returns its peak of anonymous memory, too. Pages of files do not count: they
/// are the kernel's, in memory before and charged to no program here.
fn run_in_small_pages(case: &Case, folder: &Folder) -> (Ended, Result<u64>) {
    let small = |command: &mut Command| {
        // SAFETY: a flag of this process; no memory is passed.
        let small = || match unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        };
        // SAFETY: a system call alone, which allocates nothing and takes no lock.
        unsafe { command.pre_exec(small) };
    };
    let cgroup = Parent::find().and_then(|parent| {
        Cgroup::remove_leftovers(&parent)?;
        Cgroup::set_up(&parent, 1 << 40, SwapUse::Never)
    });
    match cgroup {
        Ok(cgroup) => {
            let mut peak = Ok(0);
            let mut look = || {
                peak = match (&peak, cgroup.anonymous_bytes()) {
                    (Ok(peak), Ok(now)) => Ok(now.max(*peak)),
                    (_, now) => now,
                }
            };
            let words = case.command(&cgroup.words(), folder);
            let ended = run_with(&words, folder, small, &mut look);
            (ended, peak)
        }
        Err(why) => (
            run_with(&case.command(&[], folder), folder, small, &mut || ()),
            Err(why),
        ),
    }
}

#[expect(clippy::zombie_processes, reason = "`wait` waits for it")]
fn run_with(
    words: &[OsString],
    folder: &Folder,
    change: impl Fn(&mut Command),
    look: &mut dyn FnMut(),
) -> Ended {
    let since = Instant::now();
    let (out, err) = (folder.file("stdout"), folder.file("stderr"));
    let mut command = Command::new(&words[0]);
    command
        .args(&words[1..])
        .envs(cases::ENVIRONMENT)
        .stdin(Stdio::null())
        .stdout(fs::File::create(&out).unwrap())
        .stderr(fs::File::create(&err).unwrap())
        .process_group(0);
    change(&mut command);
    let child = command.spawn().unwrap();
    let status = wait(&child, since, look);
    let seconds = since.elapsed().as_secs_f64();
    let said = String::from_utf8_lossy(&fs::read(err).unwrap()).into_owned();
    let output = match status {
        Some(0) => Ok(fs::read(out).unwrap()),
        Some(status) => Err(format!("status {status:#x}: {}", said.trim())),
        None => Err(format!("had not ended after {} s", LONGEST.as_secs())),
    };
    if env::var_os(PROGRESS).is_some() {
        let ended = output.as_ref().map(Vec::len);
        println!("    {seconds:.1} s: {words:?}: {ended:?}");
    }
    Ended {
        seconds,
        output,
        said,
    }
}

/// Waits for a process, and calls `look` meanwhile. Returns its status. `None` if it was killed
/// because it took too long.
fn wait(child: &Child, since: Instant, look: &mut dyn FnMut()) -> Option<i32> {
    let pid = child.id() as i32;
    let mut killed = false;
    loop {
        let mut status = 0;
        // SAFETY: there is room for the answer; nobody else waits for our child.
        if unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG) } == pid {
            return Some(status).filter(|_| !killed);
        }
        if since.elapsed() > LONGEST && !killed {
            // SAFETY: our own child's group, which has not been waited for.
            unsafe { libc::kill(-pid, libc::SIGKILL) };
            killed = true;
        }
        look();
        thread::sleep(Duration::from_millis(2));
    }
}

fn binary(name: &str) -> PathBuf {
    match env::var_os(BINARIES) {
        Some(folder) => PathBuf::from(folder).join(name),
        None => PathBuf::from(env!("CARGO_BIN_EXE_farpage")).with_file_name(name),
    }
}

fn words(of: &[&str]) -> Vec<OsString> {
    of.iter().map(Into::into).collect()
}

fn farpage(options: &[&str]) -> Vec<OsString> {
    let mut all = vec![binary("farpage").into()];
    all.extend(words(&["run", "--stats"]));
    all.extend(words(options));
    all.push("--".into());
    all
}

/// A memory server in a process of its own, outside of the program's cgroups.
struct Server {
    process: Child,
    endpoint: String,
}

impl Server {
    fn start() -> Server {
        let mut process = Command::new(binary("farpage-memserver"))
            .args([
                "serve",
                "--listen",
                "tcp://127.0.0.1:0",
                "--capacity",
                "6GiB",
            ])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
        let endpoint = lines
            .by_ref()
            .map_while(Result::ok)
            .find_map(|line| {
                let mut words = line.split_whitespace();
                let endpoint = words.find_map(|word| word.strip_prefix("endpoint="))?;
                Some(endpoint.to_owned())
            })
            .unwrap();
        // The output is read on, or the server would wait for a reader.
        thread::spawn(move || lines.count());
        Server { process, endpoint }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Results of a program.
#[derive(Default)]
struct Row {
    plain: Vec<f64>,
    roomy: Vec<f64>,
    /// Seconds with a part of the memory local.
    part: Vec<f64>,
    swap: Vec<f64>,
    /// Number of times that the kernel killed the program beside swap.
    killed: usize,
    /// Seconds within the enforced budget, over TCP.
    within: Option<f64>,
    notes: Vec<String>,
    failures: Vec<String>,
}

fn median(of: &[f64]) -> Option<f64> {
    let mut sorted = of.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

fn geometric_mean(of: &[f64]) -> f64 {
    let logs = of.iter().map(|ratio| ratio.ln()).sum::<f64>();
    (logs / of.len() as f64).exp()
}

impl Row {
    /// Records a run's time, and compares its output with the plain run's.
    fn take(&mut self, what: &str, ended: &Ended, expected: &[u8]) -> Option<f64> {
        match &ended.output {
            Ok(output) if output == expected => return Some(ended.seconds),
            Ok(_) => self.failures.push(format!("{what}: the outputs differ")),
            Err(why) => self.failures.push(format!("{what}: {why}")),
        }
        None
    }
}

fn measure(case: &Case, folder: &Folder, turns: usize, parts: u64) -> Row {
    let mut row = Row::default();
    let command = |before: &[OsString]| case.command(before, folder);

    // Memory that the program needs, and the part of it in the arena.
    let (plain, needed) = run_in_small_pages(case, folder);
    let expected = match plain.output {
        Ok(output) if !output.is_empty() => output,
        other => {
            row.failures.push(format!("the plain run: {other:?}"));
            return row;
        }
    };
    let roomy = farpage(&["--budget", ROOMY]);
    // Under paging, small objects included, so that all that can be remote is known.
    let at_once = farpage(&["--budget", ROOMY, "--at-once", "--small", "yes"]);
    let first = run(&command(&at_once), folder);
    if row
        .take("at a budget above need", &first, &expected)
        .is_none()
    {
        return row;
    }
    let arena = said(&first.said, " of it in local memory");
    let budget = (arena / case.parts(parts))
        .max(4 * MIB)
        .next_multiple_of(MIB / 4);
    let needed = needed.unwrap_or_else(|why| {
        row.notes.push(format!(
            "what it needs beside the arena is not known: {why:#}"
        ));
        arena
    });
    let beside = needed.saturating_sub(arena);
    let budget_words = ["--budget", &format!("{budget}B")];
    row.notes.push(format!(
        "{} MiB at most, {} MiB of them in the arena, budget {} MiB",
        needed.div_ceil(MIB),
        arena.div_ceil(MIB),
        budget.div_ceil(MIB),
    ));

    for _ in 0..turns {
        row.plain.push(run(&command(&[]), folder).seconds);
        let ended = run(&command(&roomy), folder);
        let seconds = row.take("at a budget above need", &ended, &expected);
        row.roomy.extend(seconds);
        let ended = run(&command(&farpage(&budget_words)), folder);
        let seconds = row.take("at a part", &ended, &expected);
        row.part.extend(seconds);
        const LOCAL: &str = " of it in local memory";
        if seconds.is_some() && ended.said.contains(LOCAL) {
            let local = said(&ended.said, LOCAL);
            // `--stats` rounds the number.
            if local > budget + MIB / 10 {
                row.failures
                    .push(format!("over the budget: {}", ended.said));
            }
        }
        match Swap::set_up(beside + budget + SPARE_BYTES, 4 << 30) {
            Ok(swap) => {
                let ended = run(&command(&swap.cgroup().words()), folder);
                match (&ended.output, swap.cgroup().peak_and_kills()) {
                    (Ok(output), _) if *output == expected => row.swap.push(ended.seconds),
                    (_, Ok((_, kills))) if kills > 0 => {
                        row.killed += 1;
                        let why = "swap: the kernel killed it for lack of memory";
                        row.notes
                            .push(format!("{why} after {:.1} s", ended.seconds));
                    }
                    (Ok(_), _) => row.failures.push("swap: the outputs differ".to_owned()),
                    (Err(why), _) => row.notes.push(format!("swap: {why}")),
                }
            }
            Err(why) => row.notes.push(format!("SKIPPED: swap: {why:#}")),
        }
    }
    within_a_cgroup(&mut row, case, folder, &expected, (beside, arena, budget));
    row
}

/// Runs the program with the budget enforced by the kernel. The memory server is outside and
/// reached over TCP: shared memory would count in the cgroup that touches it first.
fn within_a_cgroup(
    row: &mut Row,
    case: &Case,
    folder: &Folder,
    expected: &[u8],
    (beside, arena, budget): (u64, u64, u64),
) {
    // A hundredth of the arena covers 40 bytes for each page of 4 KiB that is ever touched.
    let limit = beside + budget + OWN_BYTES + arena / 100;
    let cgroup = Parent::find().and_then(|parent| {
        Cgroup::remove_leftovers(&parent)?;
        Cgroup::set_up(&parent, limit, SwapUse::Never)
    });
    let cgroup = match cgroup {
        Ok(cgroup) => cgroup,
        Err(why) => return row.notes.push(format!("SKIPPED: cgroup: {why:#}")),
    };
    let server = Server::start();
    let mut before = cgroup.words().to_vec();
    let (budget, capacity) = (format!("{budget}B"), "4GiB");
    let options = [
        "--budget",
        &budget,
        "--capacity",
        capacity,
        "--server",
        &server.endpoint,
    ];
    before.extend(farpage(&options));
    let ended = run(&case.command(&before, folder), folder);
    row.within = row.take("in a cgroup", &ended, expected);
    match cgroup.peak_and_kills() {
        Ok((peak, 0)) => row.notes.push(format!(
            "{} MiB at most in a cgroup of {} MiB",
            peak.div_ceil(MIB),
            limit.div_ceil(MIB)
        )),
        Ok((_, kills)) => row.failures.push(format!("{kills} killed in the cgroup")),
        Err(why) => row.failures.push(format!("the cgroup: {why:#}")),
    }
}

#[test]
#[ignore = "takes minutes: cargo xtask test --programs"]
fn programs_give_the_same_bytes_with_a_part_of_their_memory() {
    let only = env::var(ONLY).unwrap_or_default();
    let turns = env::var(TURNS).map_or(3, |turns| turns.parse().unwrap());
    let parts = env::var(PARTS).map_or(4, |parts| parts.parse().unwrap());
    let (mut roomy, mut little) = (Vec::new(), Vec::new());
    let (mut beside_swap, mut faster, mut killed, mut failures) = (0, 0, 0, Vec::new());
    println!(
        "{:<14}{:>9}{:>9}{:>9}{:>9}{:>9}{:>11}",
        "", "plain, s", "roomy", "part", "swap", "cgroup", "swap/ours"
    );
    for case in cases::all() {
        if !only.is_empty() && !only.split_whitespace().any(|name| name == case.name) {
            continue;
        }
        if let Some(missing) = case.missing() {
            println!("SKIPPED: {}: there is no {missing}", case.name);
            continue;
        }
        let folder = Folder::new();
        case.prepare(&folder);
        let row = measure(&case, &folder, turns, parts);
        let plain = median(&row.plain);
        let over = |seconds: Option<f64>| match (seconds, plain) {
            (Some(seconds), Some(plain)) => format!("{:.2}", seconds / plain),
            _ => "-".to_owned(),
        };
        let (part, swap) = (median(&row.part), median(&row.swap));
        println!(
            "{:<14}{:>9}{:>9}{:>9}{:>9}{:>9}{:>11}",
            case.name,
            plain.map_or("-".to_owned(), |plain| format!("{plain:.2}")),
            over(median(&row.roomy)),
            over(part),
            over(swap),
            over(row.within),
            match (part, swap) {
                (Some(part), Some(swap)) => format!("{:.2}", swap / part),
                _ => "-".to_owned(),
            },
        );
        let ratio = |seconds: &[f64]| Some(median(seconds)? / plain?);
        roomy.extend(ratio(&row.roomy));
        little.extend(ratio(&row.part));
        for note in &row.notes {
            println!("    {note}");
        }
        match (part, swap) {
            (Some(part), Some(swap)) => {
                beside_swap += 1;
                faster += usize::from(part < swap);
            }
            (Some(_), None) => killed += usize::from(row.killed > 0),
            _ => {}
        }
        for failure in row.failures {
            println!("    FAILED: {failure}");
            failures.push(format!("{}: {failure}", case.name));
        }
    }
    println!(
        "geometric means over plain: {:.2} with a budget above need, {:.2} with one part of {parts} (2 at most where memory is touched at random)",
        geometric_mean(&roomy),
        geometric_mean(&little)
    );
    println!(
        "faster than swap: {faster} of {beside_swap}; beside swap, the kernel killed {killed} more, which ended well here"
    );
    assert!(failures.is_empty(), "{failures:#?}");
}
