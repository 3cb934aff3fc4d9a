//! The field's own yardstick: whole applications with a part of their memory local, against the
//! same code with all of it local.
//!
//! The rule it keeps: an application is written once and cannot tell where its arrays are; every
//! result is verified, and only the application's work is timed, neither making nor loading nor
//! verifying its data. Each timed run has a local one right before it, so that other load on the
//! machine meets both.

// `println!` panics when standard output is closed: results go through `out::say`.
#![deny(clippy::print_stdout)]

mod app;
mod bfs;
mod graph;
mod groupby;
mod join;
mod kmeans;
mod pagerank;
mod picture;
mod place;
mod report;
mod sort;
mod spmv;
mod stencil;
mod team;
mod xsbench;

use std::{
    iter,
    path::PathBuf,
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use bytesize::ByteSize;
use clap::{Args, ValueEnum};
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};

use self::{
    app::{App, Verdict},
    place::{Far, Local},
    report::{AppFigures, AppsReport, Config, OneThread, ShareFigures, summarise},
    team::Team,
};
use farpage_bench_kit::{
    arena::runtime,
    cpus::own_time,
    options::{self, ServerOptions, Threads, name_of},
    paging::Counts,
    progress::Progress,
    report::{conclude, median, spread},
    server::{self, MemoryServer},
    work::{self, Rates},
};

/// Whole applications with 100 to 12.5 % of their memory local, against the same code all local.
///
/// The local share of an application's memory is the budget of its remote arrays together with
/// everything that it keeps local by design and that grows with its data, over all of its data.
/// Everything fits at 100 %. Performance is the time of the same code on ordinary vectors (in huge
/// pages, if the kernel has them), run right before, over the time with paging: the median of
/// --repeat such pairs. Making, loading and verifying the data is not timed. Every result is
/// verified, each time.
///
/// Floor: the performance that the same bytes would leave without a pager, if the local run's CPU
/// time and the work on the pages that moved (READ, hash, moving in and out, WRITE, measured right
/// before) were spread perfectly over the threads. Only moving fewer bytes leads beyond it.
///
/// Where there are several threads, everything is also run by one, beside one thread on ordinary
/// vectors: there paging has the other cores to itself.
#[derive(Args, Debug)]
pub struct AppsOptions {
    /// Applications to run, separated by commas [default: all]
    #[arg(long, value_name = "LIST", value_enum, value_delimiter = ',')]
    apps: Vec<AppName>,
    /// Shares of local memory in percent, separated by commas [default: 100,75,50,25,12.5, with
    /// --smoke 100,25]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = share)]
    shares: Vec<f64>,
    /// Data of each application; graphs have powers of two of vertices, so that theirs are up to
    /// 1.4 times larger or smaller [default: 256MiB, with --smoke 4MiB]
    #[arg(long, value_name = "SIZE", value_parser = options::some_bytes)]
    size: Option<ByteSize>,
    /// Page size of all applications: a power of two, 4KiB to 2MiB [default: what suits each, as in
    /// the list above; smaller where there would be fewer than 160 pages, 4KiB with --smoke]
    #[arg(long, value_name = "SIZE", value_parser = options::page_size)]
    page_size: Option<ByteSize>,
    #[command(flatten)]
    at: ServerOptions,
    #[command(flatten)]
    threads: Threads,
    /// Timed runs of each application with each share [default: 3, with --smoke 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=99))]
    repeat: Option<u16>,
    /// File to draw performance over local memory to
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    run: options::Run,
    /// Starts even if the data and its own memory server do not fit into memory: the kernel may
    /// then end programs to make room
    #[arg(long)]
    force: bool,
}

/// An application, as on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum AppName {
    /// GAP's PageRank on a Kronecker graph: rows read in order, ranks local. Pages of 1MiB
    Pagerank,
    /// GAP's direction-optimising breadth-first search on the same graph: rows in order with gaps.
    /// Pages of 1MiB
    Bfs,
    /// Parallel quicksort of 64-bit keys, in place. Pages of 2MiB
    Sort,
    /// Lloyd's k-means, 16 clusters of points with 16 coordinates: points read in order. Pages of
    /// 1MiB
    Kmeans,
    /// h2o.ai's db-benchmark, group-by questions 1 to 5, 7 and 9: columns read in order. Pages of
    /// 2MiB
    Groupby,
    /// Two tables of the same size joined: scattered into 64 partitions, then joined one by one.
    /// Pages of 64KiB
    Join,
    /// Sparse matrix times vector, 32 entries per row at random columns: the matrix read in order,
    /// vectors local. Pages of 2MiB
    Spmv,
    /// XSBench's lookups in batches sorted by energy: 70 sequences at a time. Pages of 64KiB
    Xsbench,
    /// XSBench's lookups as they are drawn: small accesses anywhere. The worst case for pages;
    /// shown, but not in the mean. Pages of 4KiB
    XsbenchRandom,
    /// Heat in a plate, Jacobi's five points, 16 steps per pass: one grid read and one written, in
    /// order. Pages of 1MiB
    Stencil,
}

impl AppName {
    /// False for another form of the same application, which must not count twice.
    fn in_means(self) -> bool {
        self != Self::XsbenchRandom
    }

    /// Returns the page size that suits the application's accesses.
    fn page_size(self) -> ByteSize {
        match self {
            // A few sequences, in a sort from both ends at once: moving small page-table entries
            // costs most, and pages of 2 MiB have none.
            Self::Sort | Self::Groupby | Self::Spmv => ByteSize::mib(2),
            // Sequences too, or gaps between the rows that are read; pages of 2 MiB gained nothing
            // here.
            Self::Pagerank | Self::Kmeans | Self::Stencil | Self::Bfs => ByteSize::mib(1),
            // Dozens of places at once, whose pages have to be local together.
            Self::Join | Self::Xsbench => ByteSize::kib(64),
            Self::XsbenchRandom => ByteSize::kib(4),
        }
    }
}

/// State that all applications of a run share.
struct Run<'a> {
    options: &'a AppsOptions,
    team: Team,
    /// A single thread, where the team has more: paging has the other cores to itself.
    alone: Option<Team>,
    server: MemoryServer,
    progress: Progress,
    config: Config,
}

/// Runs the subcommand `apps` and prints the results.
pub fn run(options: &AppsOptions) -> Result<()> {
    let report = measure(options)?;
    if let Some(path) = &options.svg {
        picture::draw(&report, path)?;
    }
    let format = options.run.printing.format;
    conclude(&report, report.verified, format, AppsReport::human)
}

fn measure(options: &AppsOptions) -> Result<AppsReport> {
    let names = match &*options.apps {
        [] => AppName::value_variants(),
        some => some,
    };
    // The first signal ends the run in good order, the second at once.
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        flag::register_conditional_default(signal, stop.clone())
            .and_then(|_| flag::register(signal, stop.clone()))
            .context("cannot watch for signals")?;
    }
    let smoke = options.run.smoke;
    let (size_bytes, repeat) = if smoke { (4 << 20, 1) } else { (256 << 20, 3) };
    let size_bytes = options.size.map_or(size_bytes, |size| size.as_u64());
    let repeat = options.repeat.unwrap_or(repeat);
    let shares = match (&*options.shares, smoke) {
        ([], true) => &[100.0, 25.0],
        ([], false) => &[100.0, 75.0, 50.0, 25.0, 12.5][..],
        (some, _) => some,
    };
    // All data of an application may be local and, if the server is on this machine, there too.
    let copies = if options.at.server.is_none() { 2 } else { 1 };
    server::ensure_room(size_bytes.saturating_mul(copies), options.force)?;
    let threads = options.threads.count();
    let teams = if threads > 1 { 2 } else { 1 };
    let pairs = names.len() * shares.len() * usize::from(repeat) * teams;
    // Pages are written out of place, a graph may be larger than asked for, pages that only come
    // and leave take half a gigabyte, and nothing is taken before it is written to.
    let capacity_bytes = size_bytes.saturating_mul(4).saturating_add(1 << 30);
    let alone = (threads > 1).then(|| Team::new(1, stop.clone()));
    let server = MemoryServer::start(&options.at, capacity_bytes)?;
    let run = Run {
        options,
        team: Team::new(threads, stop)?,
        alone: alone.transpose()?,
        progress: Progress::new(pairs as u64),
        config: Config {
            server: server.endpoint().to_string(),
            size_bytes,
            shares_percent: shares.to_vec(),
            threads,
            repeat,
            smoke,
        },
        server,
    };
    let mut apps = Vec::new();
    for &name in names {
        apps.push(match name {
            AppName::Pagerank => run.measure::<pagerank::PageRank>(name),
            AppName::Bfs => run.measure::<bfs::Bfs>(name),
            AppName::Sort => run.measure::<sort::Sort>(name),
            AppName::Kmeans => run.measure::<kmeans::KMeans>(name),
            AppName::Groupby => run.measure::<groupby::GroupBy>(name),
            AppName::Join => run.measure::<join::Join>(name),
            AppName::Spmv => run.measure::<spmv::Spmv>(name),
            AppName::Xsbench => run.measure::<xsbench::ByEnergy>(name),
            AppName::XsbenchRandom => run.measure::<xsbench::AsDrawn>(name),
            AppName::Stencil => run.measure::<stencil::Stencil>(name),
        }?);
    }
    Ok(AppsReport {
        benchmark: "apps",
        verified: apps.iter().all(|app| app.verified),
        config: run.config,
        summary: summarise(&apps, shares),
        apps,
    })
}

impl Run<'_> {
    /// Measures an application with all shares.
    fn measure<A: App>(&self, name: AppName) -> Result<AppFigures> {
        let app = A::generate(self.config.size_bytes, &self.team);
        let local = Local::default();
        let mut data = app.load(&local)?;
        let (remote_bytes, local_bytes) = (local.bytes(), app.local_bytes(&self.team));
        let mut figures = AppFigures {
            name: name_of(&name),
            in_means: name.in_means(),
            verified: true,
            page_size_bytes: self.page_bytes(name, remote_bytes),
            remote_bytes,
            local_bytes,
            shares: Vec::new(),
        };
        let pages = self.page_rates(figures.page_size_bytes)?;
        let wrong = pages.wrong;
        if wrong > 0 {
            eprintln!("{wrong} pages came back other than they were written");
            figures.verified = false;
        }
        let mut verify = |run: &str, verdict: Verdict| {
            if let Err(wrong) = verdict {
                eprintln!("{}, {run}: {wrong}", name_of(&name));
                figures.verified = false;
            }
        };

        // The first run also warms up memory and caches for the local runs that are timed.
        let mut teams = Vec::new();
        for team in iter::once(&self.team).chain(&self.alone) {
            let (answer, ..) = time(team, &app, &mut data)?;
            let verdict = app.verify::<Local>(&data, &answer, &answer);
            verify(&format!("local, {} threads", team.threads()), verdict);
            teams.push((team, answer));
        }

        for &share in &self.config.shares_percent {
            let page_bytes = figures.page_size_bytes;
            let budget_bytes = budget_bytes(share, remote_bytes, local_bytes, page_bytes);
            let budget_bytes =
                budget_bytes.with_context(|| format!("{} with {share} % local", name_of(&name)))?;
            let far = Far(runtime(self.server.endpoint(), budget_bytes, page_bytes)?);
            let mut far_data = app.load(&far)?;
            let mut of_teams = Vec::new();
            for (team, answer) in &teams {
                let (mut pairs, mut paging) = (Vec::new(), Counts::default());
                let mut local_cpu = Duration::ZERO;
                for _ in 0..self.config.repeat {
                    self.progress.phase(name_of(&name));
                    let (local_answer, local_s, cpu) = time(team, &app, &mut data)?;
                    local_cpu += cpu;
                    verify("local", app.verify::<Local>(&data, &local_answer, answer));

                    app.reset::<Far>(&mut far_data, team);
                    let begin = Counts::of(&far.0.stats());
                    let start = Instant::now();
                    let far_answer = app.work::<Far>(&mut far_data, team);
                    let far_s = start.elapsed().as_secs_f64();
                    let events = Counts::of(&far.0.stats()).with(begin, |end, begin| end - begin);
                    paging = paging.with(events, |sum, events| sum + events);
                    team.check()?;
                    let verdict = app.verify::<Far>(&far_data, &far_answer, answer);
                    verify(&format!("{share} % local"), verdict);
                    pairs.push((local_s, far_s));
                }
                let paging = paging.with(paging, |sum, _| sum / u64::from(self.config.repeat));
                let cpu_s = local_cpu.as_secs_f64() / f64::from(self.config.repeat);
                let work_s = cpu_s / team.threads() as f64 + moving_s(&paging, &pages);
                of_teams.push(share_figures(share, budget_bytes, &pairs, paging, work_s));
            }
            let mut of_teams = of_teams.into_iter();
            let mut share = of_teams.next().expect("the whole team has run");
            share.one_thread = of_teams.next().map(|alone| OneThread {
                seconds: alone.seconds,
                local_seconds: alone.local_seconds,
                performance: alone.performance,
            });
            figures.shares.push(share);
        }
        Ok(figures)
    }

    /// Measures the cost of pages that come and leave, on this machine now.
    fn page_rates(&self, page_bytes: u64) -> Result<Rates> {
        let smoke = self.options.run.smoke;
        let setting = work::Setting {
            link: None,
            threads: self.team.threads(),
            page_bytes: page_bytes as usize,
            smoke,
            time: Duration::from_millis(if smoke { 20 } else { 500 }),
        };
        work::page_rates(&setting, &self.server)
    }

    fn page_bytes(&self, name: AppName, remote_bytes: u64) -> u64 {
        /// Least number of pages. With fewer, the smallest share, an eighth, has too few for
        /// read-ahead and for all threads. With many more, pages are small, and small ones cost
        /// more than a few more of them save.
        const PAGES_MIN: u64 = 160;
        let limit = (remote_bytes / PAGES_MIN + 1).next_power_of_two() / 2;
        let limit = limit.max(4 << 10);
        match self.options.page_size {
            Some(page_size) => page_size.as_u64(),
            None if self.options.run.smoke => 4 << 10,
            None => name.page_size().as_u64().min(limit),
        }
    }
}

/// Returns the budget of remote arrays with which all local memory is the share of all memory.
fn budget_bytes(share: f64, remote_bytes: u64, local_bytes: u64, page_bytes: u64) -> Result<u64> {
    /// Part of a budget that holds data which is to fit: evictors start above it at the latest.
    const HIGH_WATER: f64 = 0.95;
    /// Least number of pages in a budget: a few for each array, thread and worker.
    const PAGES_MIN: u64 = 8;
    if share >= 100.0 {
        // One more page for each array's end.
        return Ok((remote_bytes as f64 / HIGH_WATER) as u64 + 16 * page_bytes);
    }
    let all = (remote_bytes + local_bytes) as f64 * share / 100.0;
    let budget = (all as u64).saturating_sub(local_bytes);
    ensure!(
        budget >= PAGES_MIN * page_bytes,
        "{} are left for pages of {}, which is too little: choose a larger --size, a smaller --page-size or a larger share",
        ByteSize::b(budget),
        ByteSize::b(page_bytes),
    );
    Ok(budget)
}

/// Runs `app` locally. Returns the answer, the seconds, and the CPU time of all threads.
fn time<A: App>(
    team: &Team,
    app: &A,
    data: &mut A::On<Local>,
) -> Result<(A::Answer, f64, Duration)> {
    app.reset::<Local>(data, team);
    let cpu = own_time();
    let start = Instant::now();
    let answer = app.work::<Local>(data, team);
    let seconds = start.elapsed().as_secs_f64();
    let cpu = own_time() - cpu;
    team.check()?;
    Ok((answer, seconds, cpu))
}

/// Returns the seconds that all threads together take to move the pages that came and left.
fn moving_s(paging: &Counts, pages: &Rates) -> f64 {
    let mb = |bytes: u64| bytes as f64 / 1e6;
    let writing_s_per_mb = (1.0 / pages.heavy - 1.0 / pages.light).max(0.0);
    mb(paging.bytes_read) / pages.light + mb(paging.bytes_written) * writing_s_per_mb
}

/// Sums up the pairs of a share. `work_s` is the time of all work if it is spread perfectly.
fn share_figures(
    share_percent: f64,
    budget_bytes: u64,
    pairs: &[(f64, f64)],
    paging: Counts,
    work_s: f64,
) -> ShareFigures {
    let each = |figure: fn(&(f64, f64)) -> f64| pairs.iter().map(figure).collect::<Vec<f64>>();
    let local_seconds = median(&each(|pair| pair.0));
    let [performance, performance_min, performance_max] =
        spread(&each(|(local_s, far_s)| local_s / far_s));
    ShareFigures {
        share_percent,
        budget_bytes,
        seconds: median(&each(|pair| pair.1)),
        local_seconds,
        performance,
        performance_min,
        performance_max,
        // Parts of a local run that one thread does alone have no floor below themselves.
        floor: local_seconds / work_s.max(local_seconds),
        one_thread: None,
        paging,
    }
}

fn share(text: &str) -> Result<f64, String> {
    match text.trim_end_matches('%').parse() {
        Ok(share) if share > 0.0 && share <= 100.0 => Ok(share),
        _ => Err(format!(
            "`{text}` is no share: write a percentage above 0 and up to 100, like `10%` or `12.5`"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::app::verify_bits;

    pub(crate) fn team() -> Team {
        Team::new(2, Arc::default()).unwrap()
    }

    /// Runs `app` locally. Returns its data and its answer, which is right.
    pub(crate) fn ran<A: App>(app: &A) -> (A::On<Local>, A::Answer) {
        let mut on = app.load(&Local::default()).unwrap();
        let answer = app.work::<Local>(&mut on, &team());
        app.verify::<Local>(&on, &answer, &answer).unwrap();
        (on, answer)
    }

    /// Runs `app` with other data, and asserts that the answer is not taken for `right`.
    pub(crate) fn assert_rejected<A: App>(app: &A, on: &mut A::On<Local>, right: &A::Answer) {
        let wrong = app.work::<Local>(on, &team());
        app.verify::<Local>(on, &wrong, right).unwrap_err();
    }

    #[test]
    fn a_share_is_a_percentage_and_what_is_none_is_repeated() {
        assert_eq!((share("10%"), share("12.5")), (Ok(10.0), Ok(12.5)));
        for given in ["nonsense", "", "0", "101%"] {
            let error = share(given).unwrap_err();
            assert!(error.contains(&format!("`{given}`")), "{error}");
            assert!(error.contains("`10%`"), "{error}");
        }
    }

    #[test]
    fn local_memory_counts_what_is_kept_local() {
        let mib = |n: u64| n << 20;
        assert_eq!(budget_bytes(50.0, mib(90), mib(10), 4096).unwrap(), mib(40));
        assert_eq!(budget_bytes(25.0, mib(100), 0, 4096).unwrap(), mib(25));
        assert!(budget_bytes(100.0, mib(100), mib(10), 4096).unwrap() > mib(105));
        budget_bytes(12.5, mib(90), mib(20), 4096).unwrap_err();
    }

    #[test]
    fn performance_is_the_median_of_pairs() {
        let pairs = [(1.0, 2.0), (3.0, 3.0), (1.0, 4.0)];
        let figures = share_figures(50.0, 1, &pairs, Counts::default(), 4.0);
        assert_eq!(figures.performance, 0.5);
        let range = (figures.performance_min, figures.performance_max);
        assert_eq!(range, (0.25, 1.0));
        assert_eq!((figures.local_seconds, figures.seconds), (1.0, 3.0));
        assert_eq!(figures.floor, 0.25);
        let idle = share_figures(50.0, 1, &pairs, Counts::default(), 0.5);
        assert_eq!(idle.floor, 1.0);
    }

    #[test]
    fn pages_that_changed_cost_more_to_move() {
        let pages = Rates {
            light: 1000.0,
            heavy: 500.0,
            wrong: 0,
        };
        let paging = |bytes_read, bytes_written| Counts {
            bytes_read,
            bytes_written,
            ..Counts::default()
        };
        assert_eq!(moving_s(&paging(2_000_000_000, 0), &pages), 2.0);
        assert_eq!(moving_s(&paging(2_000_000_000, 1_000_000_000), &pages), 3.0);
    }

    #[test]
    fn numbers_that_differ_in_one_bit_are_rejected() {
        verify_bits(&[1.0, 2.0], &[1.0, 2.0]).unwrap();
        for wrong in [&[1.0][..], &[1.0, 2.0_f64.next_up()], &[1.0, 2.0, 3.0]] {
            verify_bits(wrong, &[1.0, 2.0]).unwrap_err();
        }
        verify_bits(&[-0.0], &[0.0]).unwrap_err();
    }
}
