//! Push and pull through a parameter server, beside a program that does the same over TCP and
//! copies.
//!
//! The rule it keeps: both do the same arithmetic in the same order and take turns in one run, and
//! the resulting parameters are compared bit for bit. Learning itself is left to `train`.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use farpage::ByteSize;
use farpage_bench_kit::{
    cpus::time_of_threads,
    options::{Fabric, Run},
    report::{self, filled_table, median, run_table, spread, yes},
    server::own_endpoint,
};
use farpage_fabric::SessionOptions;
use farpage_fabric_measure::ring;
use farpage_train::{Address, Aggregator, Layout, Optimizer, Plan, Rule, Through};
use serde::Serialize;
use serde_json::{Value, json};

const KIB: usize = 1 << 10;
/// Sizes in KiB.
const SIZES: [usize; 8] = [1, 4, 16, 64, 256, 1024, 4096, 16384];
const SMOKE_SIZES: [usize; 2] = [1, 64];
/// Bytes of the messages that a worker sends one after the other, like small pushes.
const LADDER_SIZES: [usize; 3] = [8, 512, 4096];
/// Least speed of a ring, over that of a transfer without a ring.
const RING_OVER_NO_RING: f64 = 2.0;
/// Least bytes of parameters from which push and pull shall be faster than copying.
const FASTER_FROM: usize = 4 * KIB;
/// Bytes of parameters in a round, which set its steps between `STEPS_MIN` and `STEPS_MAX`.
const ROUND_BYTES: usize = 64 << 20;
const STEPS_MIN: usize = 6;
const STEPS_MAX: usize = 300;
/// Number of steps at the begin of a turn that do not count: the turn's server slept before.
const WARM_UP: usize = 3;
/// Number of pulls without a push, during which the aggregator's CPU time is measured.
const PULLS: usize = 300;
const SMOKE_PULLS: usize = 20;
/// Name of an aggregator's own thread; `AGGREGATORS_THREADS` adds those of its connections.
const AGGREGATOR: &str = "aggregator";
const AGGREGATORS_THREADS: [&str; 3] = [AGGREGATOR, "farpage-conn", "farpage-listen"];
/// Upper bound of every wait: a peer that takes longer has failed.
const PATIENCE: Duration = Duration::from_secs(30);
const RULE: Rule = Rule::Sgd {
    rate: 1e-3,
    momentum: 0.9,
};

#[derive(Args, Debug)]
pub(crate) struct ParameterServerOptions {
    /// Fabric between workers and aggregator
    #[arg(long, value_enum, default_value_t = Fabric::Shm)]
    fabric: Fabric,
    /// Sizes of the parameters, instead of 1 KiB to 16 MiB, such as `4KiB,1MiB`
    #[arg(long, value_delimiter = ',', value_name = "SIZES")]
    bytes: Vec<ByteSize>,
    /// Numbers of workers, instead of 1 to 3, such as `1,3`
    #[arg(long, value_delimiter = ',', value_name = "NUMBERS")]
    workers: Vec<usize>,
    #[command(flatten)]
    run: Run,
}

#[derive(Debug, Serialize)]
struct Report {
    benchmark: &'static str,
    verified: bool,
    config: Value,
    #[serde(skip)]
    fabric: Fabric,
    rows: Vec<Row>,
    /// Figures of small pushes, message by message.
    ladder: Vec<ring::BySize>,
}

#[derive(Debug, Serialize)]
struct Row {
    bytes: usize,
    workers: usize,
    /// Time of a push and the pull after it, at the first worker: median of the rounds' medians.
    farpage_us: f64,
    copying_us: f64,
    /// Median, least and greatest of the rounds' ratios.
    copying_over_farpage: [f64; 3],
    /// Copies in user space for a push and a pull, as counted by the program that copies.
    copies: f64,
    /// True if farpage is faster, by the median; absent where no target is set.
    is_met: Option<bool>,
    /// Bytes that were copied through an adapter's own registered memory, in all steps and pulls;
    /// absent where there is no adapter.
    bounced_bytes: Option<u64>,
    pulls: Pulls,
}

/// Figures of one worker's pulls, without pushes.
#[derive(Clone, Copy, Debug, Serialize)]
struct Pulls {
    /// Mean time of a pull.
    pull_us: f64,
    /// CPU time of the aggregator's threads per pull.
    aggregator_cpu_us: f64,
    /// CPU time of the aggregator's threads in as long a time without pulls, per pull.
    idle_cpu_us: f64,
}

/// Runs the subcommand and prints the results.
pub(crate) fn run(options: &ParameterServerOptions) -> Result<()> {
    let report = measure(options)?;
    let format = options.run.printing.format;
    report::conclude(&report, report.verified, format, Report::human)
}

fn measure(options: &ParameterServerOptions) -> Result<Report> {
    let smoke = options.run.smoke;
    let (sizes, workers_max, rounds) = match smoke {
        true => (&SMOKE_SIZES[..], 2, 1),
        false => (&SIZES[..], 3, 7),
    };
    let asked = options.bytes.iter().map(|size| size.as_u64() as usize);
    let sizes: Vec<usize> = match options.bytes.is_empty() {
        true => sizes.iter().map(|kib| kib * KIB).collect(),
        false => asked.collect(),
    };
    let numbers = match options.workers.is_empty() {
        true => (1..=workers_max).collect(),
        false => options.workers.clone(),
    };
    let are_whole = |bytes: &usize| *bytes >= 4 && bytes.is_multiple_of(4);
    ensure!(
        sizes.iter().all(are_whole),
        "parameters have 4 bytes each: give sizes that are multiples of 4"
    );
    let is_nobody = numbers.contains(&0);
    ensure!(!is_nobody, "there is nobody to push without workers");
    let mut rows = Vec::new();
    for &workers in &numbers {
        for &bytes in &sizes {
            let steps = (ROUND_BYTES / bytes).clamp(STEPS_MIN, STEPS_MAX);
            let turns = Turns {
                rounds,
                steps: if smoke { STEPS_MIN } else { steps },
                pulls: if smoke { SMOKE_PULLS } else { PULLS },
            };
            rows.push(compare(options.fabric, bytes, workers, turns)?);
        }
    }
    let messages = match (smoke, options.fabric) {
        (true, _) => 40,
        // Emulated RDMA is slow.
        (false, Fabric::Rdma) => 100,
        (false, _) => 2000,
    };
    let sizes = if smoke {
        &LADDER_SIZES[..1]
    } else {
        &LADDER_SIZES
    };
    let (ladder, _) = ring::ladder(options.fabric, sizes, messages, rounds.min(5))?;
    Ok(Report {
        benchmark: "parameter-server",
        // Parameters that differ, or another number of copies, end the run with an error.
        verified: true,
        config: json!({ "smoke": smoke, "fabric": options.fabric, "rounds": rounds }),
        fabric: options.fabric,
        rows,
        ladder,
    })
}

/// Numbers of rounds, of steps in a round, and of pulls.
#[derive(Clone, Copy, Debug)]
struct Turns {
    rounds: usize,
    steps: usize,
    pulls: usize,
}

/// Measures both ways in turns, for parameters of `bytes` bytes.
fn compare(fabric: Fabric, bytes: usize, workers: usize, turns: Turns) -> Result<Row> {
    let layout = Layout {
        aggregators: 1,
        plan: Plan::of_all(workers),
        parameters: bytes / 4,
    };
    let all_steps = turns.rounds * (WARM_UP + turns.steps);
    let initial = vec![0.0; layout.parameters];
    let endpoint = own_endpoint(fabric, "parameter-server")?;
    let aggregator = Aggregator::open(layout, 0, &endpoint, PATIENCE)?;
    let address = aggregator.address();
    let (far, near) = connections(workers)?;
    let (figures, copied, bounced_bytes) = thread::scope(|scope| {
        let initial = &initial;
        let named = thread::Builder::new().name(AGGREGATOR.to_owned());
        let served = named.spawn_scoped(scope, move || {
            aggregator.serve(initial, RULE, all_steps as u64, PATIENCE)
        })?;
        let copying = scope.spawn(move || serve_copying(far, initial, all_steps));
        let ranks = near.into_iter().enumerate().map(|(rank, stream)| {
            let address = address.clone();
            scope.spawn(move || {
                let copying = Copying::new(stream, layout.parameters);
                work(layout, rank, address, copying, turns)
            })
        });
        let ranks: Vec<_> = ranks.collect();
        let (mut figures, mut errors) = (Vec::new(), Vec::new());
        for rank in ranks {
            match joined(rank)? {
                Ok(worked) => figures.push(worked),
                Err(error) => errors.push(format!("{error:#}")),
            }
        }
        let (served, copied) = (joined(served)?, joined(copying)?);
        errors.extend(served.err().map(|error| error.to_string()));
        errors.extend(copied.as_ref().err().map(|error| format!("{error:#}")));
        ensure!(errors.is_empty(), "{}", errors.join("; "));
        let sum = |of: fn(&Worked) -> u64| figures.iter().map(of).sum::<u64>();
        let copied = copied? + sum(|worked| worked.copied_bytes);
        let bounced = sum(|worked| worked.bounced_bytes);
        Ok((figures, copied, bounced))
    })?;
    let copies = copied as f64 / (bytes * workers * all_steps) as f64;
    ensure!(copies == 4.0, "{copies} copies where 4 belong");
    // The first worker's times stand for all: a step ends for all workers at once.
    let first = &figures[0];
    let (farpage, copying): (Vec<f64>, Vec<f64>) = first.times.iter().copied().unzip();
    let ratios = copying.iter().zip(&farpage).map(|(a, b)| a / b);
    let ratios: Vec<f64> = ratios.collect();
    let is_judged = bytes >= FASTER_FROM && !matches!(fabric, Fabric::Rdma);
    Ok(Row {
        bytes,
        workers,
        farpage_us: median(&farpage),
        copying_us: median(&copying),
        copying_over_farpage: spread(&ratios),
        copies,
        is_met: is_judged.then(|| median(&ratios) > 1.0),
        bounced_bytes: matches!(fabric, Fabric::Rdma).then_some(bounced_bytes),
        pulls: first.pulls.context("the first worker pulls")?,
    })
}

fn joined<T>(thread: thread::ScopedJoinHandle<'_, T>) -> Result<T> {
    thread
        .join()
        .map_err(|_| anyhow!("a worker or a server panicked"))
}

/// Findings of a worker.
struct Worked {
    /// Median step of each round, through farpage and by copying, in microseconds.
    times: Vec<(f64, f64)>,
    /// Bytes copied by the program that copies.
    copied_bytes: u64,
    /// Bytes that farpage copied through an adapter's registered memory.
    bounced_bytes: u64,
    /// Pulls of the first worker; `None` of others.
    pulls: Option<Pulls>,
}

fn work(
    layout: Layout,
    rank: usize,
    address: Address,
    mut copying: Copying,
    turns: Turns,
) -> Result<Worked> {
    let options = SessionOptions::default();
    let mut through = Through::join(layout, rank, &[address], &options, PATIENCE)?;
    // Values differ by place and by rank, so that none can stand for another.
    let gradient = (0..layout.parameters).map(|at| ((at * 31 + rank * 977) % 4093) as f32 / 4093.0);
    let gradient: Vec<f32> = gradient.collect();
    let mut theirs = vec![0.0; layout.parameters];
    // A program computes its gradient in the buffer that is sent.
    through.buffers()?.1.copy_from_slice(&gradient);
    let (mut step, mut times) = (0, Vec::new());
    for round in 0..turns.rounds {
        let farpage = turn(turns.steps, || {
            through.step_in_place(step)?;
            step += 1;
            Ok(())
        })?;
        let copied = turn(turns.steps, || {
            copying.send(&gradient)?;
            copying.receive(&mut theirs)
        })?;
        let ours = through.buffers()?.0;
        let mut pairs = ours.iter().zip(&theirs);
        ensure!(
            pairs.all(|(a, b)| a.to_bits() == b.to_bits())
                && ours.iter().any(|value| *value != 0.0),
            "worker {rank} has other parameters in round {round} than the program that copies"
        );
        times.push((farpage, copied));
    }
    let pulls = (rank == 0).then(|| pull(&mut through, step - 1, turns.pulls));
    let pulls = pulls.transpose()?;
    let (ours, _) = through.buffers()?;
    ensure!(ours == theirs, "a pull alone brings something else");
    Ok(Worked {
        times,
        copied_bytes: copying.copied_bytes,
        bounced_bytes: through.bounced_bytes(),
        pulls,
    })
}

/// Pulls the parameters that followed `step`, `pulls` times, when all steps are done.
fn pull(through: &mut Through, step: u64, pulls: usize) -> Result<Pulls> {
    // The other workers leave, and the aggregator's last step ends.
    thread::sleep(Duration::from_millis(50));
    through.resume(step + 1)?;
    let cpu = || time_of_threads(&AGGREGATORS_THREADS);
    let (begin, before) = (Instant::now(), cpu()?);
    for _ in 0..pulls {
        through.resume(step + 1)?;
    }
    let (took, pulled) = (begin.elapsed(), cpu()?);
    thread::sleep(took);
    let idle = cpu()?;
    let us_of_each = |time: Duration| time.as_secs_f64() * 1e6 / pulls as f64;
    Ok(Pulls {
        pull_us: us_of_each(took),
        aggregator_cpu_us: us_of_each(pulled.saturating_sub(before)),
        idle_cpu_us: us_of_each(idle.saturating_sub(pulled)),
    })
}

/// Returns the median time of `steps` steps in microseconds, after [`WARM_UP`] others.
fn turn(steps: usize, mut step: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut times = Vec::with_capacity(steps);
    for number in 0..WARM_UP + steps {
        let begin = Instant::now();
        step()?;
        if number >= WARM_UP {
            times.push(begin.elapsed().as_nanos() as f64 / 1000.0);
        }
    }
    Ok(median(&times))
}

/// Connects the server that copies with its workers. Returns the server's ends, and the workers'.
fn connections(workers: usize) -> Result<(Vec<TcpStream>, Vec<TcpStream>)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let (mut far, mut near) = (Vec::new(), Vec::new());
    for _ in 0..workers {
        near.push(TcpStream::connect(listener.local_addr()?)?);
        far.push(listener.accept()?.0);
    }
    for stream in far.iter().chain(&near) {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
    }
    Ok((far, near))
}

/// A connection that copies each message into a buffer before sending and out of one after
/// receiving, as programs do that keep messages and data apart.
struct Copying {
    stream: TcpStream,
    outgoing: Vec<u8>,
    incoming: Vec<u8>,
    copied_bytes: u64,
}

impl Copying {
    fn new(stream: TcpStream, floats: usize) -> Self {
        Self {
            stream,
            outgoing: vec![0; 4 * floats],
            incoming: vec![0; 4 * floats],
            copied_bytes: 0,
        }
    }

    fn send(&mut self, floats: &[f32]) -> Result<()> {
        let bytes = self.outgoing.as_chunks_mut().0.iter_mut();
        for (bytes, float) in bytes.zip(floats) {
            *bytes = float.to_le_bytes();
        }
        self.copied_bytes += 4 * floats.len() as u64;
        Ok(self.stream.write_all(&self.outgoing)?)
    }

    fn receive(&mut self, floats: &mut [f32]) -> Result<()> {
        self.stream.read_exact(&mut self.incoming)?;
        for (float, bytes) in floats.iter_mut().zip(self.incoming.as_chunks().0) {
            *float = f32::from_le_bytes(*bytes);
        }
        self.copied_bytes += 4 * floats.len() as u64;
        Ok(())
    }
}

/// Serves workers by copying, on one thread and in the order of ranks. Returns the bytes copied.
fn serve_copying(streams: Vec<TcpStream>, initial: &[f32], steps: usize) -> Result<u64> {
    let workers = streams.into_iter();
    let workers = workers.map(|stream| Copying::new(stream, initial.len()));
    let mut workers: Vec<_> = workers.collect();
    let share = 1.0 / workers.len() as f32;
    let mut parameters = initial.to_vec();
    let mut optimizer = Optimizer::new(RULE, parameters.len());
    let mut sum = vec![0.0; parameters.len()];
    let mut gradient = sum.clone();
    for _ in 0..steps {
        for (rank, worker) in workers.iter_mut().enumerate() {
            worker.receive(&mut gradient)?;
            for (sum, slope) in sum.iter_mut().zip(&gradient) {
                *sum = if rank == 0 { *slope } else { *sum + slope };
            }
        }
        sum.iter_mut().for_each(|value| *value *= share);
        optimizer.step(&mut parameters, &sum);
        for worker in &mut workers {
            worker.send(&parameters)?;
        }
    }
    Ok(workers.iter().map(|worker| worker.copied_bytes).sum())
}

impl Report {
    fn human(&self) -> String {
        let rows = self.rows.iter().map(|row| {
            let [ratio, least, greatest] = row.copying_over_farpage;
            let (ours, theirs) = (row.farpage_us, row.copying_us);
            let faster = row.is_met.map_or("not judged", yes);
            let ratios = format!("{ratio:.2} | {least:.2} to {greatest:.2} | {faster}");
            let (bytes, workers) = (row.bytes, row.workers);
            format!("{bytes} | {workers} | {ours:.1} | {theirs:.1} | {ratios}")
        });
        let rows = filled_table(
            "push and pull, bytes | workers | farpage, us | copying over TCP, us | copying / farpage | least and greatest | faster",
            rows,
        );
        let pulls = self.rows.iter().map(|row| {
            let Pulls {
                pull_us,
                aggregator_cpu_us: busy,
                idle_cpu_us: idle,
            } = row.pulls;
            let bounced = row.bounced_bytes.map(|bytes| bytes.to_string());
            let bounced = bounced.unwrap_or_else(|| "no adapter".to_owned());
            let (bytes, workers, copies) = (row.bytes, row.workers, row.copies);
            let cpu = format!("{pull_us:.1} | {busy:.2} | {idle:.2}");
            format!("{bytes} | {workers} | {cpu} | {copies:.0} | {bounced}")
        });
        let pulls = filled_table(
            "pull alone, bytes | workers | time, us | aggregator's CPU in it, us | idle for as long, us | \
             copies of a push and pull by copying | bytes bounced by farpage",
            pulls,
        );
        let mut ratios = self.ladder.iter().map(|size| size.ring_over_no_ring);
        let is_met = yes(ratios.all(|ratio| ratio >= RING_OVER_NO_RING));
        let fabric = self.fabric;
        let rows_of_run = [
            ("fabric", fabric.to_string().as_str()),
            ("copying is over", "TCP on the loopback, on every fabric"),
            ("ring at least twice as fast as none", is_met),
            ("steps that this fabric does not have", ring::absent(fabric)),
        ]
        .map(|(name, value)| (name, value.to_owned()));
        let run = run_table(self.benchmark, self.verified, rows_of_run);
        format!("{rows}\n{pulls}\n{}\n{run}", ring::table_of(&self.ladder))
    }
}
