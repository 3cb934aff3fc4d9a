//! Servers that come and go, die, stall, are cut off and forget bits at random moments, beside a
//! program that checks each word.
//!
//! The rule it keeps: an event begins once the one before has healed: every page has all of its
//! copies. So each event is one that the program must survive. A wrong word ends the run at once.

mod acts;
mod end;
mod flip;
mod kind;
mod picture;
mod report;
mod servers;
mod work;

use std::{
    path::PathBuf,
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use farpage::{ByteSize, Redundancy, Runtime};
use farpage_bench_kit::{
    options::{Fabric, FaultMode, Run, some_bytes},
    pick::{Random, mix},
    report::{conclude, new_histogram},
    server::ensure_room,
};
use serde_json::json;

use self::{
    acts::{Scene, tells_death},
    end::DEADLINE,
    flip::Fixed,
    kind::Kind,
    report::{Event, Faults, Moment, Report},
    servers::{Servers, Settings},
    work::{THREADS, Work},
};

/// Least number of servers at any moment.
const SERVERS_MIN: usize = 3;
const PAGE_BYTES: u64 = 16 << 10;
/// Bytes of the words that are written once.
const FIXED_BYTES: u64 = 2 << 20;
/// Time between two moments of the timeline.
const SAMPLED: Duration = Duration::from_millis(100);

#[derive(Args, Debug)]
pub(crate) struct ChaosOptions {
    /// Minutes after which no event begins any more [default: 2; with --smoke one event of each
    /// kind]
    #[arg(long, value_name = "N", default_value_t = 2.0)]
    minutes: f64,
    /// Protection of pages: copies=2, parity=4+1, ... As many servers are started, and 3 at least
    #[arg(long, default_value_t = Redundancy::Copies(2))]
    redundancy: Redundancy,
    /// Kinds of events, in turns [default: all that can happen]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "KIND")]
    only: Vec<Kind>,
    /// Kills at the end more servers than pages outlive: each page is right or an error then
    #[arg(long)]
    to_the_end: bool,
    /// Size of the array that is written and checked [default: 96MiB, with --smoke 24MiB]
    #[arg(long, value_name = "SIZE", value_parser = some_bytes)]
    size: Option<ByteSize>,
    /// Fabric to the servers
    #[arg(long, value_enum, default_value_t = Fabric::Tcp)]
    fabric: Fabric,
    /// Memory of each server [default: what it lends]. The rest goes to --spill, and is lost with
    /// its server also over shm
    #[arg(long, value_name = "SIZE", value_parser = some_bytes)]
    memory: Option<ByteSize>,
    /// Directory of the spill files, on a disk
    #[arg(
        long,
        value_name = "DIR",
        default_value = "/var/tmp",
        requires = "memory"
    )]
    spill: PathBuf,
    /// Threads that serve page faults
    #[arg(long, value_enum, default_value_t = FaultMode::Filler)]
    fault_mode: FaultMode,
    /// File to draw to: words checked per second, and missing copies, over time
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Seed of everything random
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    run: Run,
}

impl ChaosOptions {
    fn size_bytes(&self) -> u64 {
        let default = if self.run.smoke { 24 << 20 } else { 96 << 20 };
        let bytes = self.size.map_or(default, |size| size.as_u64());
        bytes.next_multiple_of(PAGE_BYTES)
    }

    /// Returns the kinds of events that happen.
    ///
    /// # Errors
    /// A kind that was asked for cannot happen.
    fn kinds(&self) -> Result<Vec<Kind>> {
        let why_not =
            |kind: Kind| kind.why_not(self.fabric, self.redundancy, self.memory.is_some());
        if self.only.is_empty() {
            let all = Kind::value_variants().iter().copied();
            return Ok(all.filter(|kind| why_not(*kind).is_none()).collect());
        }
        for kind in &self.only {
            if let Some(why) = why_not(*kind) {
                anyhow::bail!("--only {}: {why}", kind.name());
            }
        }
        Ok(self.only.clone())
    }

    fn servers(&self) -> usize {
        self.redundancy.servers().max(SERVERS_MIN)
    }
}

pub(crate) fn run(options: &ChaosOptions) -> Result<()> {
    let report = measure(options)?;
    if let Some(path) = &options.svg {
        picture::draw(&report, path)?;
    }
    let format = options.run.printing.format;
    conclude(&report, report.verified, format, Report::human)
}

fn measure(options: &ChaosOptions) -> Result<Report> {
    let copies = options.redundancy.copies();
    ensure!(
        copies > 1,
        "without copies the first death loses pages: choose --redundancy copies=2"
    );
    let kinds = options.kinds()?;
    let size_bytes = options.size_bytes();
    let budget_bytes = size_bytes / 4;
    // The array, a plain one, and copies.
    ensure_room((2 + copies as u64) * size_bytes, false)?;
    let settings = Settings {
        fabric: options.fabric,
        capacity_bytes: 2 * size_bytes + (64 << 20),
        tiers: (options.memory).map(|bytes| (bytes.as_u64(), options.spill.clone())),
        has_relay: kinds.iter().any(|kind| kind.is_of_links()),
    };
    let mut servers = Servers::start(settings, options.servers())?;
    let builder = Runtime::builder()
        .budget(ByteSize::b(budget_bytes))
        .page_size(ByteSize::b(PAGE_BYTES))
        .fault_mode(options.fault_mode.into())
        .deadline(DEADLINE)
        .redundancy(options.redundancy);
    let add = |builder: farpage::Builder, url: String| builder.server(url);
    let runtime = servers.urls().into_iter().fold(builder, add).build();
    let runtime = runtime.context("cannot start farpage")?;
    let array = |bytes: u64| {
        let array = runtime.array::<u64>(bytes as usize / 8);
        array.context("cannot create a remote array")
    };
    let page_words = PAGE_BYTES as usize / 8;
    let fixed = Fixed::new(array(FIXED_BYTES)?, page_words, options.seed)?;
    let mut array = array(size_bytes)?;
    let mut random = Random(mix(options.seed));
    let has_parity = matches!(options.redundancy, Redundancy::Parity { .. });
    let work = Work::new(!has_parity);
    let timeline = Mutex::new(Vec::new());
    let (outcome, plain) = thread::scope(|scope| {
        let share = array.len().div_ceil(THREADS);
        let parts = array.chunks_mut(share).enumerate();
        let writers: Vec<_> = parts
            .map(|(thread, part)| {
                let (work, seed) = (&work, options.seed);
                scope.spawn(move || work.write(part, thread, seed))
            })
            .collect();
        scope.spawn(|| sample(&runtime, &work, &timeline));
        let scene = Scene {
            runtime: &runtime,
            work: &work,
            fixed: &fixed,
            servers: &mut servers,
            spare: copies - 1,
            has_parity,
            tells_death: tells_death(options.fabric, options.memory.is_some()),
            longer_ms: if options.run.smoke { 1 } else { 4_000 },
        };
        let outcome = inject(options, &kinds, scene, &mut random);
        work.stop();
        let plain = writers.into_iter().flat_map(|writer| {
            let plain = writer.join();
            plain.expect("a writer does not panic")
        });
        (outcome, plain.collect::<Vec<u64>>())
    });
    let mut wrong = work.wrong();
    let (events, quiet_fault_us) = match outcome {
        // What hindered the events is said where the data is right.
        Err(error) if wrong == 0 => return Err(error),
        Err(error) => {
            eprintln!("{error:#}");
            (Vec::new(), Faults::of(&new_histogram()))
        }
        Ok(outcome) => outcome,
    };
    wrong += fixed.wrong();
    let stats = runtime.stats();
    let mut end = None;
    if options.to_the_end && wrong == 0 {
        let bounds = (copies, if options.run.smoke { 1 } else { 3 });
        let found = end::act(
            &array,
            &plain,
            page_words,
            &mut servers,
            bounds,
            &mut random,
        )?;
        wrong += found.1;
        end = Some(found.0);
    }
    Ok(Report {
        benchmark: "chaos",
        verified: wrong == 0,
        config: json!({
            "fabric": options.fabric,
            "fault_mode": options.fault_mode,
            "redundancy": options.redundancy.to_string(),
            "servers": options.servers(),
            "memory_bytes": options.memory.map(|bytes| bytes.as_u64()),
            "minutes": options.minutes,
            "seed": options.seed,
            "smoke": options.run.smoke,
            "size_bytes": size_bytes,
            "budget_bytes": budget_bytes,
            "page_size_bytes": PAGE_BYTES,
        }),
        events,
        quiet_fault_us,
        timeline: timeline.into_inner().expect("nothing panics under it"),
        end,
        words_checked: work.checked(),
        wrong_words: wrong,
        failovers: stats.store.failovers,
        corrupt: stats.store.corrupt,
        repaired_bytes: stats.store.repaired_bytes,
    })
}

/// Lets events happen. Returns them, and the faults of a second before the first one.
fn inject(
    options: &ChaosOptions,
    kinds: &[Kind],
    mut scene: Scene<'_>,
    random: &mut Random,
) -> Result<(Vec<Event>, Faults)> {
    let work = scene.work;
    scene.wait_for_pages(options.size_bytes())?;
    work.measure();
    let quiet = Faults::of(&work.faults()?);
    let until = Instant::now() + Duration::from_secs_f64(60.0 * options.minutes);
    let mut events = Vec::new();
    let smoke = options.run.smoke;
    let mut deck: Vec<Kind> = kinds.iter().rev().copied().collect();
    loop {
        if deck.is_empty() && !smoke {
            deck = Kind::shuffled(kinds, random);
        }
        let is_over = work.wrong() > 0 || !smoke && Instant::now() > until;
        let Some(kind) = deck.pop().filter(|_| !is_over) else {
            return Ok((events, quiet));
        };
        if !smoke {
            thread::sleep(Duration::from_millis(random.below(2_000)));
        }
        if let Some(event) = scene.act(kind, random)? {
            eprintln!(
                "{:7.1} s: {} of {}: fault p99.9 {:.0} us, healed after {:.1} s",
                event.at_s,
                kind.name(),
                event.servers.join(", "),
                event.fault_us.us.p999,
                event.healed_s
            );
            events.push(event);
        }
    }
}

/// Notes the state of the run again and again, until its end.
fn sample(runtime: &Runtime, work: &Work, timeline: &Mutex<Vec<Moment>>) {
    let (mut before, mut checked) = (work.now(), work.checked());
    while !work.is_stopped() {
        thread::sleep(SAMPLED);
        let (now, so_far) = (work.now(), work.checked());
        let store = runtime.stats().store;
        work.note_lack(&store);
        let moment = Moment {
            at_s: now.as_secs_f64(),
            words_per_s: (so_far - checked) as f64 / (now - before).as_secs_f64(),
            under_protected_bytes: store.under_protected_bytes,
            sealed_bytes: store.sealed_bytes,
        };
        (before, checked) = (now, so_far);
        timeline
            .lock()
            .expect("nothing panics under it")
            .push(moment);
    }
}
