//! Servers that come and go, die and stall at random moments, beside a program that checks each
//! word.
//!
//! The rule it keeps: an event begins once the one before has healed: every page has all of its
//! copies. So each event is one that the program must survive. A wrong word ends the run at once.

use std::{
    fs,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use farpage::{ByteSize, Redundancy, Runtime};
use farpage_bench_kit::{
    options::{Fabric, Run},
    pick::{Random, mix},
    report::{self, Percentiles, filled_table, new_histogram, run_table},
    server::{MemoryServer, ensure_room},
};
use farpage_wire::Endpoint;
use hdrhistogram::Histogram;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde::Serialize;
use serde_json::{Value, json};

/// Least number of servers at any moment.
const SERVERS_MIN: usize = 3;
/// Number of threads that write and check.
const THREADS: usize = 2;
const PAGE_BYTES: u64 = 16 << 10;
/// Shortest access that counts as a page fault: an access to a page in memory takes less.
const FAULT_NS_MIN: u64 = 3_000;
/// Time from the beginning of an event over which faults are measured.
const MEASURED: Duration = Duration::from_secs(1);
/// Upper bound of the time until all copies are there again.
const HEALED_WITHIN: Duration = Duration::from_secs(120);

#[derive(Args, Debug)]
pub(crate) struct ChaosOptions {
    /// Minutes after which no event begins any more [default: 2; with --smoke one event of each
    /// kind]
    #[arg(long, value_name = "N", default_value_t = 2.0)]
    pub(crate) minutes: f64,
    /// Protection of pages: copies=2, parity=4+1, ... As many servers are started, and 3 at least
    #[arg(long, default_value_t = Redundancy::Copies(2))]
    pub(crate) redundancy: Redundancy,
    /// Fabric to the servers
    #[arg(long, value_enum, default_value_t = Fabric::Tcp)]
    pub(crate) fabric: Fabric,
    /// Seed of everything random
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
    #[command(flatten)]
    pub(crate) run: Run,
}

/// Kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    /// SIGKILL of a server, and a new server.
    Kill,
    /// SIGSTOP of a server, for less than the three seconds after which it is given up.
    ShortStop,
    /// SIGSTOP of a server, for longer.
    LongStop,
    /// A new server, and a drain of an old one.
    Drain,
}

impl Kind {
    const ALL: [Self; 4] = [Self::Kill, Self::ShortStop, Self::LongStop, Self::Drain];

    fn name(self) -> &'static str {
        match self {
            Self::Kill => "killed, and a new one added",
            Self::ShortStop => "stopped for a moment",
            Self::LongStop => "stopped for long",
            Self::Drain => "drained, after one was added",
        }
    }
}

/// An event, and its effect on the program.
#[derive(Debug, Serialize)]
struct Event {
    kind: Kind,
    /// Endpoint of the server that was hit.
    server: String,
    /// Time of the event since the start of the run.
    at_s: f64,
    /// Time from the event until all copies were there again.
    healed_s: f64,
    /// Faults of the second after the event.
    fault_us: Percentiles,
}

/// Findings of the benchmark `chaos`.
#[derive(Debug, Serialize)]
struct Report {
    benchmark: &'static str,
    /// True if every word was what the program had written last.
    verified: bool,
    config: Value,
    events: Vec<Event>,
    /// Faults of a second without an event.
    quiet_fault_us: Percentiles,
    accesses: u64,
    failovers: u64,
    repaired_bytes: u64,
}

pub(crate) fn run(options: &ChaosOptions) -> Result<()> {
    let report = measure(options)?;
    let format = options.run.printing.format;
    report::conclude(&report, report.verified, format, Report::human)
}

fn measure(options: &ChaosOptions) -> Result<Report> {
    ensure!(
        options.redundancy.copies() > 1,
        "without copies the first death loses pages: choose --redundancy copies=2"
    );
    let size_bytes: u64 = if options.run.smoke { 8 << 20 } else { 96 << 20 };
    let budget_bytes = size_bytes / 4;
    let count = options.redundancy.servers().max(SERVERS_MIN);
    let mut servers = Servers::start(count, options.fabric, 2 * size_bytes + (64 << 20))?;
    ensure_room(5 * size_bytes, false)?;
    let builder = Runtime::builder()
        .budget(ByteSize::b(budget_bytes))
        .page_size(ByteSize::b(PAGE_BYTES))
        .redundancy(options.redundancy);
    let add = |builder: farpage::Builder, url: String| builder.server(url);
    let runtime = servers.urls().into_iter().fold(builder, add).build();
    let runtime = runtime.context("cannot start farpage")?;
    let mut array = runtime
        .array::<u64>(size_bytes as usize / 8)
        .context("cannot create a remote array")?;
    let work = Work::default();
    let outcome = thread::scope(|scope| {
        let share = array.len().div_ceil(THREADS);
        for (thread, part) in array.chunks_mut(share).enumerate() {
            let (work, seed) = (&work, mix(options.seed ^ thread as u64));
            scope.spawn(move || work.write(part, seed));
        }
        let outcome = inject(options, &runtime, &mut servers, &work);
        work.stop.store(true, Relaxed);
        outcome
    });
    let stats = runtime.stats();
    drop(array);
    let wrong = work.wrong.load(Relaxed);
    if wrong > 0 {
        eprintln!("{wrong} words were wrong");
    }
    let (events, quiet_fault_us) = match outcome {
        // What hindered the events is said where the data is right.
        Err(error) if wrong == 0 => return Err(error),
        Err(_) => (Vec::new(), Percentiles::of(&new_histogram())),
        Ok(outcome) => outcome,
    };
    Ok(Report {
        benchmark: "chaos",
        verified: wrong == 0,
        config: json!({
            "fabric": options.fabric,
            "redundancy": options.redundancy.to_string(),
            "servers": options.redundancy.servers().max(SERVERS_MIN),
            "minutes": options.minutes,
            "seed": options.seed,
            "smoke": options.run.smoke,
            "size_bytes": size_bytes,
            "budget_bytes": budget_bytes,
            "page_size_bytes": PAGE_BYTES,
        }),
        events,
        quiet_fault_us,
        accesses: work.accesses.load(Relaxed),
        failovers: stats.store.failovers,
        repaired_bytes: stats.store.repaired_bytes,
    })
}

/// Lets events happen. Returns them, and the faults of a second before the first one.
fn inject(
    options: &ChaosOptions,
    runtime: &Runtime,
    servers: &mut Servers,
    work: &Work,
) -> Result<(Vec<Event>, Percentiles)> {
    let began = Instant::now();
    let until = began + Duration::from_secs_f64(60.0 * options.minutes);
    let mut random = Random(mix(options.seed));
    work.faults();
    thread::sleep(MEASURED);
    let quiet = Percentiles::of(&work.faults());
    let mut events = Vec::new();
    loop {
        let kind = match options.run.smoke {
            true => Kind::ALL.get(events.len()).copied(),
            false => (Instant::now() < until).then(|| Kind::ALL[random.below(4) as usize]),
        };
        let Some(kind) = kind.filter(|_| work.wrong.load(Relaxed) == 0) else {
            return Ok((events, quiet));
        };
        if !options.run.smoke {
            thread::sleep(Duration::from_millis(random.below(2_000)));
        }
        let event = servers.hit(kind, &mut random, runtime, work, began)?;
        eprintln!(
            "{:7.1} s: {} {}: fault p99.9 {:.0} us, healed after {:.1} s",
            event.at_s,
            event.server,
            kind.name(),
            event.fault_us.p999,
            event.healed_s
        );
        events.push(event);
    }
}

/// The servers that run now, each a process of its own.
struct Servers {
    fabric: Fabric,
    capacity_bytes: u64,
    running: Vec<MemoryServer>,
    /// Number of servers that were started.
    started: usize,
}

impl Servers {
    fn start(count: usize, fabric: Fabric, capacity_bytes: u64) -> Result<Self> {
        let mut servers = Self {
            fabric,
            capacity_bytes,
            running: Vec::new(),
            started: 0,
        };
        for _ in 0..count {
            let server = servers.one_more()?;
            servers.running.push(server);
        }
        Ok(servers)
    }

    fn one_more(&mut self) -> Result<MemoryServer> {
        self.started += 1;
        MemoryServer::another(self.fabric, self.capacity_bytes, self.started)
    }

    fn urls(&self) -> Vec<String> {
        let url = |server: &MemoryServer| server.endpoint().to_string();
        self.running.iter().map(url).collect()
    }

    /// Lets an event happen to a random server, and waits until all copies are there again.
    fn hit(
        &mut self,
        kind: Kind,
        random: &mut Random,
        runtime: &Runtime,
        work: &Work,
        began: Instant,
    ) -> Result<Event> {
        let at = random.below(self.running.len() as u64) as usize;
        let pid = Pid::from_raw(self.running[at].pid()? as i32);
        let url = self.running[at].endpoint().to_string();
        let added = match kind {
            Kind::Drain => Some(self.one_more()?),
            _ => None,
        };
        if let Some(added) = &added {
            runtime.add_server(&added.endpoint().to_string())?;
        }
        let repaired_before = runtime.stats().store.repaired_bytes;
        let begin = Instant::now();
        work.faults();
        let faults = match kind {
            Kind::Kill => {
                kill(pid, Signal::SIGKILL).context("cannot kill a server")?;
                let faults = measured(work, begin);
                drop(self.running.remove(at));
                if let Ok(Endpoint::Shm(socket)) = url.parse() {
                    // The killed server has left its socket behind.
                    let _ = fs::remove_file(socket);
                }
                let new = self.one_more()?;
                runtime.add_server(&new.endpoint().to_string())?;
                self.running.push(new);
                faults
            }
            Kind::ShortStop | Kind::LongStop => {
                let ms = match kind {
                    Kind::ShortStop => 100 + random.below(2_000),
                    _ => 3_500 + random.below(4_000),
                };
                let stopped = Stopped::new(pid)?;
                match Duration::from_millis(ms) {
                    short if short < MEASURED => {
                        thread::sleep(short);
                        drop(stopped);
                        measured(work, begin)
                    }
                    long => {
                        let faults = measured(work, begin);
                        thread::sleep(long - MEASURED);
                        drop(stopped);
                        faults
                    }
                }
            }
            Kind::Drain => thread::scope(|scope| {
                let drain = scope.spawn(|| runtime.drain_server(&url));
                let faults = measured(work, begin);
                let report = drain.join().expect("a drain does not panic");
                report.context("a server cannot be emptied")?;
                drop(self.running.remove(at));
                self.running.extend(added);
                anyhow::Ok(faults)
            })?,
        };
        // A death is noticed after a while, and until then nothing is missing. Memory that is
        // shared with a server outlives the server, so that its death may never be noticed.
        let mut is_noticed = kind != Kind::Kill || self.fabric == Fabric::Shm;
        let mut is_healed = || {
            let store = runtime.stats().store;
            is_noticed |= store.under_protected_bytes > 0 || store.repaired_bytes > repaired_before;
            is_noticed && store.under_protected_bytes == 0 && store.draining_bytes == 0
        };
        while !is_healed() && work.wrong.load(Relaxed) == 0 {
            let healed = begin.elapsed() < HEALED_WITHIN;
            ensure!(
                healed,
                "copies are missing {HEALED_WITHIN:?} after {url} was {}",
                kind.name()
            );
            thread::sleep(Duration::from_millis(10));
        }
        Ok(Event {
            kind,
            server: url,
            at_s: (begin - began).as_secs_f64(),
            healed_s: begin.elapsed().as_secs_f64(),
            fault_us: Percentiles::of(&faults),
        })
    }
}

/// Returns the faults since `begin`, once the time over which they are measured is over.
fn measured(work: &Work, begin: Instant) -> Histogram<u64> {
    thread::sleep(MEASURED.saturating_sub(begin.elapsed()));
    work.faults()
}

/// A process that stands still until this is dropped: a server that stays stopped would not notice
/// the end of the benchmark.
struct Stopped(Pid);

impl Stopped {
    fn new(pid: Pid) -> Result<Self> {
        kill(pid, Signal::SIGSTOP).context("cannot stop a server")?;
        Ok(Self(pid))
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // A server that has ended needs no signal.
        let _ = kill(self.0, Signal::SIGCONT);
    }
}

/// Random writes, each of which checks the word that it replaces.
struct Work {
    stop: AtomicBool,
    wrong: AtomicU64,
    accesses: AtomicU64,
    /// Times of the faults since they were last taken.
    faults_ns: Mutex<Histogram<u64>>,
}

impl Default for Work {
    fn default() -> Self {
        Self {
            stop: AtomicBool::new(false),
            wrong: AtomicU64::new(0),
            accesses: AtomicU64::new(0),
            faults_ns: Mutex::new(new_histogram()),
        }
    }
}

impl Work {
    /// Takes the times of the faults so far.
    fn faults(&self) -> Histogram<u64> {
        let mut faults = self.faults_ns.lock().expect("nothing panics under it");
        std::mem::replace(&mut *faults, new_histogram())
    }

    /// Writes to random words of `part`, and compares them with a plain array, until it is stopped
    /// or a word is wrong. Then compares all.
    fn write(&self, part: &mut [u64], seed: u64) {
        let mut random = Random(seed);
        let mut plain = vec![0; part.len()];
        let mut is_right = true;
        while is_right && !self.stop.load(Relaxed) {
            for _ in 0..256 {
                let at = random.below(part.len() as u64) as usize;
                let begin = Instant::now();
                is_right &= part[at] == plain[at];
                plain[at] = random.bits();
                part[at] = plain[at];
                let ns = begin.elapsed().as_nanos() as u64;
                if ns >= FAULT_NS_MIN {
                    let mut faults = self.faults_ns.lock().expect("nothing panics under it");
                    faults.saturating_record(ns);
                }
            }
            self.accesses.fetch_add(256, Relaxed);
        }
        let wrong = part.iter().zip(&plain).filter(|(a, b)| a != b).count() as u64;
        self.wrong.fetch_add(wrong + u64::from(!is_right), Relaxed);
    }
}

impl Report {
    fn human(&self) -> String {
        let quiet = &self.quiet_fault_us;
        let quiet = format!("- | nothing | {:.0} | {:.0} | -", quiet.p50, quiet.p999);
        let row = |event: &Event| {
            let Percentiles { p50, p999, .. } = event.fault_us;
            let (at, healed, what) = (event.at_s, event.healed_s, event.kind.name());
            format!("{at:.1} | {what} | {p50:.0} | {p999:.0} | {healed:.1}")
        };
        let rows = std::iter::once(quiet).chain(self.events.iter().map(row));
        let table = filled_table(
            "at s | a server was | fault p50, us | fault p99.9, us | copies again after s",
            rows,
        );
        let rows = [
            ("words written and checked", self.accesses.to_string()),
            ("reads by another copy", self.failovers.to_string()),
            ("copied again", ByteSize(self.repaired_bytes).to_string()),
        ];
        let run = run_table(self.benchmark, self.verified, rows);
        format!("{table}\n{run}")
    }
}
