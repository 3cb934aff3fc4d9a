//! Messages from one thread to another over the fabric, in the steps of Yamabe's case study ("RDMA
//! programming design and case studies"): without a ring, with one, with a thread that looks for
//! arrivals instead of being woken, and with several messages to a WRITE. Over RDMA also with
//! WRITEs that travel inside their work requests, and with immediate data that wakes the receiver.
//!
//! The rule it keeps: every message is checked, in its order. The steps take turns in one run and
//! the median of the rounds counts, so that their ratios hold where absolute figures do not:
//! sender, receiver and, over TCP, two server threads share this machine.

use clap::Args;
use std::{
    io,
    os::fd::AsFd,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use farpage_fabric::{
    RdmaOptions, Session, SessionOptions,
    areas::Areas,
    patterns::{
        Notifier, RingError, RingPlace, RingReceiver, RingSender, SendError, Source, WaitMode,
        Waiter,
    },
    regmem::{RegPool, RegPoolOptions},
    server::ServerThread,
};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, ppoll},
    sys::time::TimeSpec,
};
use serde::Serialize;

use farpage_bench_kit::{
    options::{Fabric, Run},
    raw::sleep_on,
    report::{self, filled_table, median, run_table},
    server::own_endpoint,
};

/// Upper bound of the bytes of messages on their way.
const CAPACITY: usize = 256 << 10;
/// Messages to a WRITE in [`Step::Batch`].
const BATCH: usize = 16;
const SIZES: [usize; 5] = [8, 64, 512, 4096, 16 << 10];
const SMOKE_SIZES: [usize; 2] = [8, 4096];
/// Upper bound of every wait: only a peer that has failed takes longer.
const PATIENCE: Duration = Duration::from_secs(30);

/// Results of the measurement.
#[derive(Debug, Serialize)]
struct Report {
    benchmark: &'static str,
    verified: bool,
    config: Config,
    sizes: Vec<BySize>,
}

#[derive(Debug, Serialize)]
struct Config {
    smoke: bool,
    endpoint: String,
    /// Event that wakes a receiver that sleeps.
    event: &'static str,
    messages: u32,
    rounds: usize,
}

/// All steps with messages of one size.
#[derive(Debug, Serialize)]
pub struct BySize {
    /// Bytes of a message.
    pub bytes: usize,
    steps: Vec<Figures>,
    /// Message rates: ring and event over no ring and event.
    pub ring_over_no_ring: f64,
    /// Message rates: ring and polling over ring and event.
    polling_over_event: f64,
    /// Message rates: 16 messages to a WRITE over one.
    batch_over_single: f64,
    /// Message rates, over RDMA: polling with inline over polling without.
    inline_over_polling: Option<f64>,
    /// Message rates, over RDMA: immediate data over an event that the sender makes.
    immediate_over_event: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Figures {
    step: &'static str,
    messages_per_s: f64,
    /// Median of the time there and back.
    round_trip_us: f64,
}

/// A step of the case study.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    NoRing,
    Ring,
    Polling,
    Batch,
    Inline,
    Immediate,
}

const STEPS: [Step; 6] = [
    Step::NoRing,
    Step::Ring,
    Step::Polling,
    Step::Batch,
    Step::Inline,
    Step::Immediate,
];

/// Returns the steps that need an adapter, where there is none.
pub fn absent(fabric: Fabric) -> &'static str {
    match fabric {
        Fabric::Rdma => "none",
        _ => "inline and immediate data: there is no adapter",
    }
}

impl Step {
    fn name(self) -> &'static str {
        match self {
            Self::NoRing => "STEP 0: no ring, event",
            Self::Ring => "STEP 1: ring, event",
            Self::Polling => "STEP 2: ring, polling thread",
            Self::Batch => "STEP 2 and 16 per WRITE",
            Self::Inline => "STEP 2 and inline",
            Self::Immediate => "STEP 1 by immediate data",
        }
    }

    fn waiting(self) -> WaitMode {
        match self {
            Self::NoRing | Self::Ring | Self::Immediate => WaitMode::Event,
            Self::Polling | Self::Batch | Self::Inline => WaitMode::Poll,
        }
    }

    fn needs_an_adapter(self) -> bool {
        matches!(self, Self::Inline | Self::Immediate)
    }
}

/// Options of `ring`.
#[derive(Args, Debug)]
pub struct RingOptions {
    /// Fabric between the two threads
    #[arg(long, value_enum, default_value_t = Fabric::Shm)]
    fabric: Fabric,
    /// Messages per round and direction [default: 2000, with --smoke 40]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    messages: Option<u32>,
    #[command(flatten)]
    run: Run,
}

/// Runs the subcommand `ring` and prints what it found.
///
/// # Errors
/// Something could not be measured or verified.
pub fn run(options: &RingOptions) -> Result<()> {
    let report = measure(options)?;
    report::conclude(
        &report,
        report.verified,
        options.run.printing.format,
        Report::human,
    )
}

fn measure(options: &RingOptions) -> Result<Report> {
    let (messages, rounds) = match (options.messages, options.run.smoke) {
        (Some(messages), _) => (messages, 5),
        (None, false) => (2_000, 5),
        (None, true) => (40, 1),
    };
    let sizes = match options.run.smoke {
        true => &SMOKE_SIZES[..],
        false => &SIZES[..],
    };
    let (sizes, endpoint) = ladder(options.fabric, sizes, messages, rounds)?;
    Ok(Report {
        benchmark: "ring",
        // A message that is not what was sent ends the run.
        verified: true,
        config: Config {
            smoke: options.run.smoke,
            endpoint,
            event: "an eventfd that the sender writes when its WRITE has been placed",
            messages,
            rounds,
        },
        sizes,
    })
}

/// Measures the steps in turns with messages of `sizes`. Returns the receiver's endpoint as well.
///
/// # Errors
/// Something could not be measured or verified.
pub fn ladder(
    fabric: Fabric,
    sizes: &[usize],
    messages: u32,
    rounds: usize,
) -> Result<(Vec<BySize>, String)> {
    let peers = [Peer::start(fabric, 0)?, Peer::start(fabric, 1)?];
    let mut by_size = Vec::new();
    for &bytes in sizes {
        let mut lines = Vec::new();
        let has_adapter = matches!(fabric, Fabric::Rdma);
        for step in STEPS {
            if step.needs_an_adapter() && !has_adapter {
                continue;
            }
            lines.push((Line::new(&peers, step)?, Vec::new(), Vec::new()));
        }
        for _ in 0..rounds {
            for (line, rates, round_trips) in &mut lines {
                rates.push(line.rate(bytes, messages)?);
                round_trips.push(line.round_trip(bytes, messages / 10 + 1)?);
            }
        }
        let steps: Vec<_> = lines
            .iter()
            .map(|(line, rates, round_trips)| Figures {
                step: line.step.name(),
                messages_per_s: median(rates),
                round_trip_us: median(round_trips),
            })
            .collect();
        let over = |a: usize, b: usize| steps[a].messages_per_s / steps[b].messages_per_s;
        let over_if = |a, b| has_adapter.then(|| over(a, b));
        by_size.push(BySize {
            bytes,
            ring_over_no_ring: over(1, 0),
            polling_over_event: over(2, 1),
            batch_over_single: over(3, 2),
            inline_over_polling: over_if(4, 2),
            immediate_over_event: over_if(5, 1),
            steps,
        });
    }
    Ok((by_size, peers[0].serving.endpoint().to_string()))
}

/// Returns the steps of messages of several sizes as a table for people.
pub fn table_of(sizes: &[BySize]) -> String {
    let steps = sizes.iter().flat_map(|size| {
        let row = |step: &Figures| {
            let (name, rate, us) = (step.step, step.messages_per_s, step.round_trip_us);
            format!("{} | {name} | {rate:.0} | {us:.1}", size.bytes)
        };
        size.steps.iter().map(row)
    });
    let steps = filled_table("bytes | step | messages/s | round trip, us", steps);
    let ratios = sizes.iter().map(|size| {
        let figures = [
            Some(size.ring_over_no_ring),
            Some(size.polling_over_event),
            Some(size.batch_over_single),
            size.inline_over_polling,
            size.immediate_over_event,
        ];
        let figures = figures.map(|ratio| match ratio {
            Some(ratio) => format!("{ratio:.2}"),
            None => "no adapter".to_owned(),
        });
        format!("{} | {}", size.bytes, figures.join(" | "))
    });
    let ratios = filled_table(
        "message rates, bytes | ring / no ring | polling / event | 16 per WRITE / 1 | inline / not | immediate data / event",
        ratios,
    );
    format!("{steps}\n{ratios}")
}

/// One side: a program that lends memory which the other side WRITEs into.
struct Peer {
    serving: ServerThread,
    areas: Arc<Areas>,
}

impl Peer {
    fn start(fabric: Fabric, number: usize) -> Result<Self> {
        let endpoint = own_endpoint(fabric, &format!("ring-{number}"))?;
        let areas = Areas::new(PATIENCE);
        let serving = ServerThread::start(&endpoint, Arc::clone(&areas) as _)?;
        Ok(Self { serving, areas })
    }
}

/// A sender and its receiver.
struct RingPair {
    sender: RingSender,
    receiver: RingReceiver,
    /// Notifier of arrivals, if the receiver sleeps until then.
    arrived: Option<Notifier>,
    /// Notifier of free room, if the sender sleeps until then.
    room: Option<Notifier>,
}

impl RingPair {
    fn new(to: &Peer, step: Step) -> Result<Self> {
        let options = SessionOptions {
            rdma: RdmaOptions {
                inline: step == Step::Inline,
                immediate: step == Step::Immediate,
                ..RdmaOptions::default()
            },
            ..SessionOptions::default()
        };
        let session = Session::connect(to.serving.endpoint(), &options)?;
        // Offered anew for each size; earlier areas are not used any more.
        let landing = to.areas.offer(step.name(), 2 * CAPACITY as u64)?;
        let opened = session.open(step.name())?;
        let mut place = RingPlace {
            extent: opened.extents.first().context("an area has memory")?.id,
            offset: 0,
            capacity: CAPACITY,
        };
        if step == Step::NoRing {
            // The longest message; `Outgoing::send` sees to it that there is one at a time.
            place.capacity = SIZES[SIZES.len() - 1] + 64;
        }
        let mut receiver = RingReceiver::new(landing, place);
        let channel = session.channel()?;
        // The way there is known by now, and with it the adapter.
        let pool = RegPool::new([session.registrar()], RegPoolOptions::default());
        let mut sender = RingSender::new(channel, &pool, place);
        let notifier = || -> Result<Option<Notifier>> {
            let sleeps = step.waiting() == WaitMode::Event;
            Ok(sleeps.then(Notifier::new).transpose()?)
        };
        let (arrived, room) = (notifier()?, notifier()?);
        if let (Some(arrived), Some(room)) = (&arrived, &room) {
            if step == Step::Immediate {
                // The adapter's completion wakes the connection's thread, and that the receiver.
                let arrived = arrived.clone();
                let tell = move || arrived.notify();
                to.areas.on_arrival(Some(Arc::new(tell)));
            } else {
                sender = sender.with_notifier(arrived.clone());
            }
            receiver = receiver.with_notifier(room.clone());
        }
        Ok(Self {
            sender,
            receiver,
            arrived,
            room,
        })
    }
}

/// Rings in both directions between two threads.
struct Line {
    step: Step,
    there: RingPair,
    back: RingPair,
}

impl Line {
    fn new([near, far]: &[Peer; 2], step: Step) -> Result<Self> {
        Ok(Self {
            step,
            there: RingPair::new(far, step)?,
            back: RingPair::new(near, step)?,
        })
    }

    /// Measures messages per second in one direction.
    fn rate(&mut self, bytes: usize, count: u32) -> Result<f64> {
        let step = self.step;
        let ring = &mut self.there;
        let mut out = Outgoing {
            step,
            sender: &mut ring.sender,
            room: ring.room.as_ref(),
        };
        let mut arriving = Incoming::new(step, &mut ring.receiver, ring.arrived.as_ref());
        thread::scope(|scope| {
            let receiver = scope.spawn(move || -> Result<Instant> {
                for number in 0..count {
                    arriving.next(number, bytes)?;
                }
                Ok(Instant::now())
            });
            let begin = Instant::now();
            let mut message = Vec::new();
            for number in 0..count {
                write(&mut message, number, bytes);
                let last = number + 1 == count;
                let flush =
                    step != Step::Batch || (number + 1).is_multiple_of(BATCH as u32) || last;
                out.send(&message, flush)?;
            }
            out.finish()?;
            let end = joined(receiver.join())?;
            Ok(f64::from(count) / (end - begin).as_secs_f64())
        })
    }

    /// Measures microseconds there and back.
    fn round_trip(&mut self, bytes: usize, count: u32) -> Result<f64> {
        let step = self.step;
        let (there, back) = (&mut self.there, &mut self.back);
        let mut out = Outgoing {
            step,
            sender: &mut there.sender,
            room: there.room.as_ref(),
        };
        let mut arriving = Incoming::new(step, &mut there.receiver, there.arrived.as_ref());
        let mut answer = Outgoing {
            step,
            sender: &mut back.sender,
            room: back.room.as_ref(),
        };
        let mut answers = Incoming::new(step, &mut back.receiver, back.arrived.as_ref());
        thread::scope(|scope| {
            let echo = scope.spawn(move || -> Result<Instant> {
                for number in 0..count {
                    arriving.next(number, bytes)?;
                    answer.send(&arriving.message, true)?;
                    // The notifier rings when the WRITE has been placed.
                    answer.finish()?;
                }
                Ok(Instant::now())
            });
            let (mut message, mut times) = (Vec::new(), Vec::new());
            for number in 0..count {
                write(&mut message, number, bytes);
                let begin = Instant::now();
                out.send(&message, true)?;
                out.finish()?;
                answers.next(number, bytes)?;
                times.push(begin.elapsed().as_nanos() as f64 / 1000.0);
            }
            joined(echo.join())?;
            Ok(median(&times))
        })
    }
}

fn joined(thread: thread::Result<Result<Instant>>) -> Result<Instant> {
    thread.map_err(|_| anyhow!("the receiving thread panicked"))?
}

fn write(message: &mut Vec<u8>, number: u32, bytes: usize) {
    message.clear();
    message.resize(bytes, number as u8);
    message[..4].copy_from_slice(&number.to_ne_bytes());
}

struct Outgoing<'a> {
    step: Step,
    sender: &'a mut RingSender,
    room: Option<&'a Notifier>,
}

impl Outgoing<'_> {
    fn send(&mut self, message: &[u8], flush: bool) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        // Without a ring, the buffer is free when the last message was taken, and not before.
        while self.step == Step::NoRing && !self.sender.is_taken() {
            self.rest(RingSender::is_taken)?;
            ensure!(Instant::now() < until, "the receiver takes nothing");
        }
        loop {
            match self.sender.send(message) {
                Ok(()) => break,
                Err(SendError::Full) => {}
                Err(error) => bail!(error),
            }
            self.rest(|sender| sender.free() >= message.len() + 16)?;
            ensure!(Instant::now() < until, "the receiver takes nothing");
        }
        if flush {
            self.sender.flush()?;
        }
        Ok(())
    }

    /// Asks what the receiver has taken; if that is not enough, sleeps until it has taken more, or
    /// looks again soon.
    fn rest(&mut self, enough: impl Fn(&RingSender) -> bool) -> Result<()> {
        if let Some(room) = self.room {
            room.clear();
        }
        self.sender.ask()?;
        self.finish()?;
        match self.room {
            _ if enough(self.sender) => {}
            Some(room) => sleep(room, Instant::now() + PATIENCE)?,
            None => thread::yield_now(),
        }
        Ok(())
    }

    /// Waits until nothing is in flight.
    fn finish(&mut self) -> Result<()> {
        self.sender.progress()?;
        while self.sender.in_flight() > 0 {
            sleep_on(&self.sender.wait())?;
            self.sender.progress()?;
        }
        Ok(())
    }
}

struct Incoming<'a> {
    ring: &'a mut RingReceiver,
    notifier: Option<&'a Notifier>,
    waiter: Waiter,
    message: Vec<u8>,
}

impl<'a> Incoming<'a> {
    fn new(step: Step, ring: &'a mut RingReceiver, notifier: Option<&'a Notifier>) -> Self {
        Self {
            ring,
            notifier,
            waiter: Waiter::new(step.waiting()),
            message: Vec::new(),
        }
    }

    /// Waits for message `number`, and checks its `bytes` bytes.
    fn next(&mut self, number: u32, bytes: usize) -> Result<()> {
        let until = Some(Instant::now() + PATIENCE);
        let mut waiter = std::mem::take(&mut self.waiter);
        let arrived = waiter.wait(self, until);
        self.waiter = waiter;
        arrived?.context("no message came")??;
        let right = self.message.len() == bytes
            && self.message[..4] == number.to_ne_bytes()
            && self.message[4..].iter().all(|byte| *byte == number as u8);
        ensure!(
            right,
            "message {number} of {bytes} bytes is not what was sent"
        );
        Ok(())
    }
}

impl Source for Incoming<'_> {
    type Item = Result<(), RingError>;

    fn poll(&mut self) -> Option<Self::Item> {
        match self.ring.receive(&mut self.message) {
            Ok(false) => None,
            Ok(true) => Some(Ok(())),
            Err(error) => Some(Err(error)),
        }
    }

    fn arm(&mut self) {
        if let Some(notifier) = self.notifier {
            notifier.clear();
        }
    }

    fn sleep(&mut self, until: Option<Instant>) -> io::Result<()> {
        let notifier = self.notifier.expect("who sleeps has a notifier");
        sleep(notifier, until.unwrap_or_else(|| Instant::now() + PATIENCE))
    }
}

fn sleep(notifier: &Notifier, until: Instant) -> io::Result<()> {
    let left = until.saturating_duration_since(Instant::now());
    let mut fds = [PollFd::new(notifier.as_fd(), PollFlags::POLLIN)];
    match ppoll(&mut fds, Some(TimeSpec::from(left)), None) {
        Ok(_) | Err(Errno::EINTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

impl Report {
    fn human(&self) -> String {
        let rows = [
            ("endpoint", self.config.endpoint.as_str()),
            ("an event is", self.config.event),
        ];
        let run = run_table(self.benchmark, self.verified, rows);
        format!("{}\n{run}", table_of(&self.sizes))
    }
}
