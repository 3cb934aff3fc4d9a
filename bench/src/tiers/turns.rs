//! Cost of less memory for a program that pages: two servers in turns, one with all that it lends
//! in memory, one with less.
//!
//! The rule it keeps: both sides have the same program, budget and accesses, and take turns. A
//! figure is the median of the sides' pairs with the interval that holds it with 95 %. Every word
//! that is read is compared.

use std::{
    hint::black_box,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use farpage::{Advice, ByteSize, RemoteArray, Runtime};
use farpage_bench_kit::{
    arena::runtime,
    cgroup::{Cgroup, Parent, SwapUse},
    held::Held,
    options::Fabric,
    pick::{Picker, mix},
    report::{Pairs, filled_table, ranged},
    server::MemoryServer,
};
use farpage_wire::TierStat;
use serde::Serialize;

/// Accesses of a thousand that go anywhere; all others go to a tenth of the pages.
pub(super) const ANYWHERE: u64 = 2;
/// Page size of the program.
const PAGE_BYTES: u64 = 64 << 10;
const PAGE_WORDS: u64 = PAGE_BYTES / 8;
const LEAST_MEMORY_BYTES: u64 = 16 << 20;
/// Least budget of a program, so that it can have pages at all.
const LEAST_BUDGET_BYTES: u64 = 4 << 20;
/// Bytes that a server may hold beside `--memory`: its code, stacks and sockets.
const BESIDE_BYTES: u64 = 32 << 20;
const ZIPF: f64 = 0.99;
/// Pause between looks at what a server holds, while nothing is timed.
const LOOK: Duration = Duration::from_millis(20);

/// Law by which the program chooses pages to read.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Law {
    /// All accesses but [`ANYWHERE`] of a thousand go to a tenth of the pages.
    Tenth,
    Zipf,
}

#[derive(Debug, Serialize)]
pub(super) struct Row {
    law: Law,
    memory_bytes: u64,
    /// `memory_bytes` over the bytes lent.
    pub(super) memory_share: f64,
    budget_bytes: u64,
    /// Mean access with all in memory; `mean_us` is that with less. Medians of all rounds.
    all_in_memory_us: f64,
    mean_us: f64,
    /// Mean access over that of the server with all in memory: median of the pairs, and its
    /// interval.
    pub(super) slowdown: [f64; 3],
    /// Share of the accesses whose bytes the server had to fetch.
    cold_share: f64,
    /// Mean of accesses whose bytes the server had to fetch, one at a time.
    cold_us: f64,
    /// 1 + `cold_share` * `cold_us` / `all_in_memory_us`.
    explained: f64,
    slowdown_over_explained: f64,
    /// Most bytes that the server held at once; `all_in_memory_held_bytes` is the other server's.
    held_bytes_max: u64,
    /// Most bytes of the spill file that the page cache held at once. They count as held, too.
    cached_bytes_max: u64,
    all_in_memory_held_bytes: u64,
    /// Bytes that the server held over time: seconds since its program began, and bytes.
    pub(super) held: Vec<(f64, u64)>,
    /// `1 - held_bytes_max / all_in_memory_held_bytes`.
    saved: f64,
    fetches: u64,
    evictions: u64,
    /// Number of requests that the server asked to repeat.
    no_room: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    group: Option<Group>,
}

/// A memory cgroup around the server.
#[derive(Debug, Serialize)]
struct Group {
    limit_bytes: u64,
    peak_bytes: u64,
    oom_kills: u64,
}

/// A program with its own server. Fields are dropped in this order.
struct Side {
    array: RemoteArray<u64>,
    runtime: Runtime,
    server: MemoryServer,
    wrong: u64,
}

impl Side {
    fn start(lent_bytes: u64, budget_bytes: u64, server: MemoryServer) -> Result<Self> {
        let runtime = runtime(server.endpoint(), budget_bytes, PAGE_BYTES)?;
        let words = usize::try_from(lent_bytes / 8).context("--size is too large")?;
        let array = runtime.array(words).context("cannot create the array")?;
        Ok(Self {
            array,
            runtime,
            server,
            wrong: 0,
        })
    }

    fn fill(&mut self) -> Result<()> {
        self.array.advise(.., Advice::Sequential)?;
        for (i, word) in (0..).zip(self.array.iter_mut()) {
            *word = mix(i);
        }
        self.array.flush().context("cannot write the array back")?;
        self.array.advise(.., Advice::Random)?;
        Ok(())
    }

    /// Reads `words`, and returns the mean in microseconds.
    fn read(&mut self, words: &[u64]) -> f64 {
        let begin = Instant::now();
        for word in words {
            self.wrong += u64::from(black_box(self.array[*word as usize]) != mix(*word));
        }
        begin.elapsed().as_secs_f64() * 1e6 / words.len() as f64
    }

    fn tiers(&self) -> Result<TierStat> {
        let session = self.runtime.sessions().first();
        Ok(session.context("there is one server")?.stat()?.tiers)
    }

    /// Runs `work`, and adds to `seen` what the server holds meanwhile.
    fn watched(
        &mut self,
        seen: &mut Seen,
        work: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        let pid = self.server.pid()?;
        let ends = AtomicBool::new(false);
        thread::scope(|scope| {
            let watch = scope.spawn(|| -> Result<()> {
                loop {
                    let is_last = ends.load(Ordering::Relaxed);
                    seen.add(&Held::by(pid)?);
                    if is_last {
                        return Ok(());
                    }
                    thread::sleep(LOOK);
                }
            });
            let done = work(self);
            ends.store(true, Ordering::Relaxed);
            let watched = watch.join().expect("it only looks");
            done.and(watched)
        })
    }
}

/// Record of what a server held.
struct Seen {
    begun: Instant,
    held: Vec<(f64, u64)>,
    cached_bytes_max: u64,
}

impl Seen {
    fn begin() -> Self {
        Self {
            begun: Instant::now(),
            held: Vec::new(),
            cached_bytes_max: 0,
        }
    }

    fn add(&mut self, held: &Held) {
        let seconds = self.begun.elapsed().as_secs_f64();
        self.held.push((seconds, held.bytes()));
        self.cached_bytes_max = self.cached_bytes_max.max(held.cached_bytes);
    }

    fn bytes_max(&self) -> u64 {
        self.held.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0)
    }
}

/// Returns the indices of the words that one round reads.
fn words_of(law: Law, pages: u64, count: u64, seed: u64) -> Vec<u64> {
    let zipf = matches!(law, Law::Zipf).then_some(ZIPF);
    let mut picker = Picker::new(pages, zipf, seed);
    (0..count)
        .map(|i| {
            let random = mix(seed ^ mix(i));
            let page = match law {
                Law::Tenth if random % 1000 < ANYWHERE => picker.pick(),
                Law::Tenth => picker.pick() % (pages / 10),
                Law::Zipf => picker.pick(),
            };
            page * PAGE_WORDS + mix(random) % PAGE_WORDS
        })
        .collect()
}

/// Measures the slowdown over `--memory`, where the pages in use fit.
pub(super) fn curve(run: &mut Measurement<'_>) -> Result<Vec<Row>> {
    let rows = [50, 30, 20, 14].map(|percent| run.row(Law::Tenth, percent, 50, false));
    rows.into_iter().collect()
}

/// Measures with five times as much lent as there is memory.
pub(super) fn capacity(run: &mut Measurement<'_>) -> Result<Vec<Row>> {
    let rows = [Law::Tenth, Law::Zipf].map(|law| run.row(law, 20, 100, false));
    rows.into_iter().collect()
}

/// Measures with less memory than is used all the time, in a cgroup; or says why there is none.
pub(super) fn starved(run: &mut Measurement<'_>) -> Result<Result<Vec<Row>, String>> {
    let found = Parent::find().and_then(|parent| Cgroup::set_up(&parent, 1 << 30, SwapUse::Never));
    if let Err(error) = found {
        return Ok(Err(format!("{error:#}")));
    }
    drop(found);
    let rows = [9, 7, 5, 3].map(|percent| run.row(Law::Tenth, percent, 50, true));
    rows.into_iter().collect::<Result<_>>().map(Ok)
}

/// Settings of all rows, and the number of words that were wrong.
pub(super) struct Measurement<'a> {
    pub(super) fabric: Fabric,
    pub(super) lent_bytes: u64,
    pub(super) spill: &'a Path,
    pub(super) smoke: bool,
    pub(super) seed: u64,
    pub(super) wrong: u64,
}

impl Measurement<'_> {
    /// Measures a server with a share of the bytes lent as memory, beside one with enough. The
    /// programs' budget is one of `budgets` parts of the bytes lent.
    fn row(&mut self, law: Law, percent: u64, budgets: u64, is_grouped: bool) -> Result<Row> {
        // Accesses are those of a turn; cold ones come one at a time.
        let (pairs, accesses, cold) = match self.smoke {
            true => (3, 300, 5),
            false => (40, 3000, 200),
        };
        let lent_bytes = self.lent_bytes;
        let memory_bytes = (lent_bytes * percent / 100).max(LEAST_MEMORY_BYTES);
        let budget_bytes = (lent_bytes / budgets).max(LEAST_BUDGET_BYTES);
        let pages = lent_bytes / PAGE_BYTES;
        let limit_bytes = memory_bytes + BESIDE_BYTES;
        let group = || Cgroup::set_up(&Parent::find()?, limit_bytes, SwapUse::Never);
        let cgroup = is_grouped.then(group).transpose()?;
        // Pages are written out of place: a few are there twice.
        let capacity_bytes = lent_bytes + lent_bytes / 8 + (64 << 20);
        let server = MemoryServer::own(self.fabric, capacity_bytes)?;
        let mut plain = Side::start(lent_bytes, budget_bytes, server)?;
        let (spill, group) = (self.spill, cgroup.as_ref());
        let server = MemoryServer::tiered(self.fabric, capacity_bytes, memory_bytes, spill, group)?;
        let mut tiered = Side::start(lent_bytes, budget_bytes, server)?;
        // 1. All is written, and the pages in use come into memory.
        let warm: Vec<u64> = match law {
            Law::Tenth => {
                let pages = (0..pages / 10).chain(0..pages / 10);
                pages.map(|page| page * PAGE_WORDS).collect()
            }
            Law::Zipf => words_of(law, pages, 10 * accesses, self.seed),
        };
        let begin = |side: &mut Side| {
            side.fill()?;
            side.read(&warm);
            Ok(())
        };
        let mut plain_seen = Seen::begin();
        plain.watched(&mut plain_seen, begin)?;
        let mut seen = Seen::begin();
        tiered.watched(&mut seen, begin)?;
        // 2. In turns.
        let before = tiered.tiers()?;
        let mut turns = Pairs::default();
        for pair in 0..pairs {
            let words = words_of(law, pages, accesses, mix(self.seed ^ (pair + 1)));
            turns.measure(|| Ok(plain.read(&words)), || Ok(tiered.read(&words)))?;
            seen.add(&Held::by(tiered.server.pid()?)?);
        }
        let after = tiered.tiers()?;
        let cold_share = (after.fetches - before.fetches) as f64 / (pairs * accesses) as f64;
        // 3. Accesses that are fetched, one at a time, and the server's memory meanwhile.
        let cold_us = tiered.cold_us(law, pages, cold, self.seed)?;
        let words = words_of(law, pages, accesses, mix(self.seed));
        tiered.watched(&mut seen, |side| {
            side.read(&words);
            Ok(())
        })?;
        let memory = ByteSize(memory_bytes);
        let lives = tiered.server.is_running();
        ensure!(lives, "the server was killed with {memory} of memory");
        let ([all_in_memory_us, mean_us], slowdown) = (turns.medians(), turns.other_over_one());
        let explained = 1.0 + cold_share * cold_us / all_in_memory_us;
        let group = cgroup.as_ref().map(|cgroup| {
            let (peak_bytes, oom_kills) = cgroup.peak_and_kills()?;
            Ok::<_, anyhow::Error>(Group {
                limit_bytes,
                peak_bytes,
                oom_kills,
            })
        });
        self.wrong += plain.wrong + tiered.wrong;
        Ok(Row {
            law,
            memory_bytes,
            memory_share: memory_bytes as f64 / lent_bytes as f64,
            budget_bytes,
            all_in_memory_us,
            mean_us,
            slowdown,
            cold_share,
            cold_us,
            explained,
            slowdown_over_explained: slowdown[0] / explained,
            held_bytes_max: seen.bytes_max(),
            cached_bytes_max: seen.cached_bytes_max,
            all_in_memory_held_bytes: plain_seen.bytes_max(),
            saved: 1.0 - seen.bytes_max() as f64 / plain_seen.bytes_max() as f64,
            held: seen.held,
            fetches: after.fetches - before.fetches,
            evictions: after.evictions - before.evictions,
            no_room: tiered.tiers()?.no_room,
            group: group.transpose()?,
        })
    }
}

impl Side {
    /// Returns the mean microseconds of accesses whose bytes the server had to fetch.
    fn cold_us(&mut self, law: Law, pages: u64, count: usize, seed: u64) -> Result<f64> {
        // Under `Law::Tenth`, all pages beyond the tenth are equally likely.
        let zipf = matches!(law, Law::Zipf).then_some(ZIPF);
        let mut picker = Picker::new(pages, zipf, mix(seed));
        let mut times = Vec::new();
        for _ in 0..20 * count {
            let word = picker.pick() * PAGE_WORDS;
            let before = self.tiers()?.fetches;
            let took = self.read(&[word]);
            if self.tiers()?.fetches > before {
                times.push(took);
            }
            if times.len() == count {
                break;
            }
        }
        ensure!(!times.is_empty(), "everything is in memory");
        Ok(times.iter().sum::<f64>() / times.len() as f64)
    }
}

pub(super) fn human(rows: &[Row]) -> String {
    let costs = rows.iter().map(|row| {
        let law = match row.law {
            Law::Tenth => "a tenth".to_owned(),
            Law::Zipf => format!("Zipf {ZIPF}"),
        };
        let (memory, share) = (ByteSize(row.memory_bytes), 100.0 * row.memory_share);
        let (all, mean, slowdown) = (row.all_in_memory_us, row.mean_us, ranged(row.slowdown, 3));
        let (cold, cold_us) = (100.0 * row.cold_share, row.cold_us);
        let (explained, over) = (row.explained, row.slowdown_over_explained);
        let means = format!("{all:.1} | {mean:.1} | {slowdown}");
        let explained = format!("{cold:.2} % | {cold_us:.1} | {explained:.3} | {over:.3}");
        format!("{memory} | {share:.0} % | {law} | {means} | {explained}")
    });
    let costs = filled_table(
        "--memory | of the lent | accesses | all in memory us | mean us | slowdown | cold | cold us | explained | over explained",
        costs,
    );
    let holds = rows.iter().map(|row| {
        let sizes = [row.memory_bytes, row.held_bytes_max, row.cached_bytes_max];
        let [memory, held, cached] = sizes.map(ByteSize);
        let (saved, fetches) = (100.0 * row.saved, row.fetches);
        let (evictions, no_room) = (row.evictions, row.no_room);
        let group = row.group.as_ref().map_or("- | -".to_owned(), |group| {
            let [peak, limit] = [group.peak_bytes, group.limit_bytes].map(ByteSize);
            format!("{peak} of {limit} | {}", group.oom_kills)
        });
        let counts = format!("{fetches} | {evictions} | {no_room}");
        format!("{memory} | {held} | {cached} | {saved:.1} % | {counts} | {group}")
    });
    let holds = filled_table(
        "--memory | most held | of it page cache | saved | fetched | moved out | no room | cgroup's peak of limit | killed",
        holds,
    );
    format!("{costs}\n{holds}")
}
