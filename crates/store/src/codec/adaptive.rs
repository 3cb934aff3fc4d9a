//! [`Chooser`]: which form suits the pages of a region best, from what is measured while the program runs.
//!
//! The rule it keeps: **a form is chosen by the time that the whole run takes with it, and that is the time of whatever has most to do.** Compression
//! moves work from the link to the processors, so that it pays for as long as the link is what everybody waits for, and not a page longer.
//!
//! # The model
//!
//! In one epoch (at least [`EPOCH`] and [`EPOCH_PAGES`]) the region wrote `w` pages and read `r`. With form *f* of `b` stored bytes, `e` to
//! encode and `d` to decode, the epoch would have taken
//!
//! ```text
//! cpu    = (all processor time of the process - codecs then + w e + r d) / processors
//! link   = the longer of (bytes read) / (read rate) and (bytes written) / (write rate), with r b and w b in place of what it was then
//! encode = w e / workers that encode          decode = r d / workers that decode
//! T      = longest + overlap (cpu + link - longest),   longest = max(cpu, link, encode, decode)
//! ```
//!
//! `overlap` is 0 where everything goes on at the same time (streams read ahead) and 1 where one follows the other (each access waits for its page); it
//! is what makes T right for the epoch that was. A page that is written will be read: `r` is at least `w`.
//!
//! # Where the figures come from
//!
//! - `e`, `d` and `b`: every now and then one page is encoded and decoded in all forms, on the thread's own clock, so that being preempted counts nothing. How
//!   often follows from what it costs: one part in [`SAMPLE_SHARE`] of the time. So data that changes is found out about, and where compression
//!   does not pay it is switched off but for that part.
//! - Rates: bytes of all adaptive regions over the time in which at least one request of that direction was under way. Waiting for a processor makes a link
//!   look slow and never fast, so that the best of the recent epochs counts; and an epoch in which processors or workers had more to do than half of
//!   the time says nothing against the link. (Otherwise a slow codec makes the link look slow, which calls for a slow codec.)
//! - Processor time: the process's own clock.
//!
//! Pages are alike if they are near each other: a region is cut into [`CLASSES`] stretches that are judged apart.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use nix::time::{ClockId, clock_gettime};
use parking_lot::Mutex;

use super::{
    coder::{Coder, Form, Page},
    scheme::Scheme,
};

/// Stretches of a region that are judged apart.
const CLASSES: usize = 16;
/// An epoch has at least this time and so many pages.
const EPOCH: Duration = Duration::from_millis(10);
const EPOCH_PAGES: u64 = 32;
/// One part in so many of a worker's time goes into samples.
const SAMPLE_SHARE: u64 = 100;
/// What a new sample counts against all before it.
const SAMPLE_WEIGHT: f64 = 0.25;
/// A rate is believed from so many bytes on.
const RATE_BYTES: u64 = 64 << 10;
/// The best of so many epochs counts: requests that nobody looked after in time make any link look slow.
const RATE_EPOCHS: usize = 128;
/// Processors or workers that had more to do than this part of an epoch make a link look slow.
const BUSY: f64 = 0.5;
/// Another form has to be better by this factor, lest the choice follows noise.
const MARGIN: f64 = 0.98;

/// What the adaptive regions of a cluster have on the way. Counters only: signal handlers report here, too.
#[derive(Debug)]
pub(crate) struct Traffic {
    began: Instant,
    /// Reads and writes.
    ways: [Way; 2],
    encoders: AtomicU32,
    decoders: AtomicU32,
}

#[derive(Debug, Default)]
struct Way {
    under_way: AtomicU32,
    busy_since_ns: AtomicU64,
    busy_ns: AtomicU64,
    bytes: AtomicU64,
}

/// A direction: what the fields of pairs stand for.
pub(crate) const READ: usize = 0;
pub(crate) const WRITE: usize = 1;

impl Default for Traffic {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            ways: Default::default(),
            encoders: AtomicU32::new(0),
            decoders: AtomicU32::new(0),
        }
    }
}

impl Traffic {
    /// A request goes out.
    pub(crate) fn posted(&self, way: usize) {
        let way = &self.ways[way];
        // Two threads that meet here or in `ended` may miscount one request's time; nothing else depends on it.
        if way.under_way.fetch_add(1, Relaxed) == 0 {
            way.busy_since_ns.store(self.now_ns(), Relaxed);
        }
    }

    /// It has ended.
    pub(crate) fn ended(&self, way: usize, bytes: u64) {
        let way = &self.ways[way];
        way.bytes.fetch_add(bytes, Relaxed);
        let now = self.now_ns();
        let since = way.busy_since_ns.swap(now, Relaxed);
        way.busy_ns.fetch_add(now.saturating_sub(since), Relaxed);
        way.under_way.fetch_sub(1, Relaxed);
    }

    /// A worker encodes, or decodes, for the first time; or, with -1, it has gone.
    pub(crate) fn count_worker(&self, way: usize, by: i32) {
        let workers = if way == WRITE {
            &self.encoders
        } else {
            &self.decoders
        };
        workers.fetch_add(by as u32, Relaxed);
    }

    fn now_ns(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }
}

/// Which form suits the pages of one region best. See the module.
#[derive(Debug)]
pub(crate) struct Chooser {
    traffic: Arc<Traffic>,
    forms: Vec<Form>,
    pages: u64,
    classes: [Class; CLASSES],
    /// When the epoch is over at the earliest.
    turn_ns: AtomicU64,
    learnt: Mutex<Learnt>,
}

/// What workers share of a stretch.
#[derive(Debug)]
struct Class {
    /// The chosen form's number.
    form: AtomicU8,
    /// When the next page is a sample.
    due_ns: AtomicU64,
    /// Of pages that moved: reads and writes.
    moved: [Moved; 2],
}

#[derive(Debug, Default)]
struct Moved {
    pages: AtomicU64,
    bytes: AtomicU64,
}

#[derive(Debug)]
struct Learnt {
    /// By stretch and by place in `forms`.
    samples: [Vec<Sample>; CLASSES],
    epoch: Epoch,
    /// As they were when the epoch began.
    marks: Marks,
    overlap: f64,
    /// Of the last epochs that say something, the oldest first.
    ns_per_byte: [VecDeque<f64>; 2],
    /// For a page that is decoded to see what that takes.
    page: Vec<u8>,
}

/// What one page takes in one form.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    bytes: f64,
    encode_ns: f64,
    decode_ns: f64,
}

/// What happened in the last epoch.
#[derive(Clone, Debug, Default)]
struct Epoch {
    wall_ns: f64,
    /// Processor time without this region's codecs.
    other_cpu_ns: f64,
    /// Bytes of other regions.
    other_bytes: [f64; 2],
    /// Pages that were read and written.
    pages: [[f64; 2]; CLASSES],
    workers: [f64; 2],
    processors: f64,
}

#[derive(Debug, Default)]
struct Marks {
    at_ns: u64,
    cpu_ns: u64,
    /// Of all regions: time in which a request was under way, and bytes.
    ways: [(u64, u64); 2],
    /// Of this one: pages and bytes.
    classes: [[(u64, u64); 2]; CLASSES],
}

impl Chooser {
    /// For a region of so many pages.
    pub(crate) fn new(traffic: &Arc<Traffic>, scheme: &Scheme, pages: u64) -> Option<Self> {
        let forms = scheme.candidates()?;
        let samples = || vec![Sample::default(); forms.len()];
        let class = || Class {
            form: AtomicU8::new(Form::Raw.id()),
            due_ns: AtomicU64::new(0),
            moved: Default::default(),
        };
        Some(Self {
            classes: std::array::from_fn(|_| class()),
            turn_ns: AtomicU64::new(0),
            learnt: Mutex::new(Learnt {
                samples: std::array::from_fn(|_| samples()),
                epoch: Epoch::default(),
                marks: Marks {
                    at_ns: traffic.now_ns(),
                    cpu_ns: cpu_ns(ClockId::CLOCK_PROCESS_CPUTIME_ID),
                    ..Marks::default()
                },
                overlap: 1.0,
                ns_per_byte: Default::default(),
                page: Vec::new(),
            }),
            traffic: traffic.clone(),
            forms,
            pages,
        })
    }

    /// The form for a page. `None`: it is a sample.
    pub(crate) fn form(&self, page: u64) -> Option<Form> {
        let class = &self.classes[self.class_of(page)];
        let now_ns = self.traffic.now_ns();
        if now_ns >= class.due_ns.load(Relaxed) {
            return None;
        }
        if now_ns >= self.turn_ns.load(Relaxed)
            && let Some(mut learnt) = self.learnt.try_lock()
        {
            self.turn(&mut learnt);
        }
        Some(self.chosen(class))
    }

    /// A request of this region goes out.
    pub(crate) fn posted(&self, way: usize) {
        self.traffic.posted(way);
    }

    /// It has ended, and moved so many pages.
    pub(crate) fn ended(&self, way: usize, page: u64, pages: usize, bytes: u64) {
        self.traffic.ended(way, bytes);
        let moved = &self.classes[self.class_of(page)].moved[way];
        moved.pages.fetch_add(pages as u64, Relaxed);
        moved.bytes.fetch_add(bytes, Relaxed);
    }

    /// The form for a page that changed; a sample is tried in all of them first. `block` is scratch.
    pub(super) fn decide(
        &self,
        coder: &mut Coder,
        scheme: &Scheme,
        page: Page<'_>,
        limit: usize,
        block: &mut [u8],
    ) -> Form {
        if let Some(form) = self.form(page.number) {
            return form;
        }
        let class = self.class_of(page.number);
        // Another worker is at it: this page is as the others.
        let Some(mut learnt) = self.learnt.try_lock() else {
            return self.chosen(&self.classes[class]);
        };
        let learnt = &mut *learnt;
        let began_ns = cpu_ns(ClockId::CLOCK_THREAD_CPUTIME_ID);
        let mut back = std::mem::take(&mut learnt.page);
        back.resize(page.bytes.len(), 0);
        for (at, form) in self.forms.iter().enumerate() {
            let sample = match form {
                Form::Raw => Sample {
                    bytes: page.bytes.len() as f64,
                    ..Sample::default()
                },
                form => time(*form, coder, scheme, page, limit, block, &mut back),
            };
            learnt.samples[class][at].see(sample);
        }
        learnt.page = back;
        self.turn(learnt);
        let spent_ns = cpu_ns(ClockId::CLOCK_THREAD_CPUTIME_ID) - began_ns;
        let next_ns = self.traffic.now_ns() + spent_ns * SAMPLE_SHARE;
        // Stretches take turns, so that the share is that of all of them together.
        self.classes[class]
            .due_ns
            .store(next_ns + spent_ns * (CLASSES as u64 - 1), Relaxed);
        for other in &self.classes {
            if other.due_ns.load(Relaxed) != 0 {
                other.due_ns.fetch_max(next_ns, Relaxed);
            }
        }
        self.chosen(&self.classes[class])
    }

    fn chosen(&self, class: &Class) -> Form {
        Form::from_id(class.form.load(Relaxed)).expect("stored below, from a form")
    }

    fn class_of(&self, page: u64) -> usize {
        (page as u128 * CLASSES as u128 / u128::from(self.pages.max(1))) as usize
    }

    /// Ends the epoch if it is over, and chooses anew.
    fn turn(&self, learnt: &mut Learnt) {
        let next_ns = self.traffic.now_ns() + EPOCH.as_nanos() as u64;
        self.turn_ns.store(next_ns, Relaxed);
        let choice = |class: &Class| {
            let form = self.chosen(class);
            (self.forms.iter().position(|other| *other == form)).expect("chosen from these")
        };
        let mut choices: [usize; CLASSES] = std::array::from_fn(|at| choice(&self.classes[at]));
        learnt.end_epoch(&self.traffic, &self.classes, &choices);
        learnt.choose(self.forms.len(), &mut choices);
        for (class, choice) in self.classes.iter().zip(choices) {
            class.form.store(self.forms[choice].id(), Relaxed);
        }
    }
}

impl Sample {
    fn is_known(&self) -> bool {
        self.bytes > 0.0
    }

    fn see(&mut self, new: Self) {
        let weight = if self.is_known() { SAMPLE_WEIGHT } else { 1.0 };
        let blend = |old: &mut f64, new: f64| *old += (new - *old) * weight;
        blend(&mut self.bytes, new.bytes);
        blend(&mut self.encode_ns, new.encode_ns);
        blend(&mut self.decode_ns, new.decode_ns);
    }
}

/// Encodes and decodes one page. What would be stored raw has its bytes and costs its attempt.
fn time(
    form: Form,
    coder: &mut Coder,
    scheme: &Scheme,
    page: Page<'_>,
    limit: usize,
    block: &mut [u8],
    back: &mut [u8],
) -> Sample {
    let clock = || cpu_ns(ClockId::CLOCK_THREAD_CPUTIME_ID);
    let began = clock();
    let encoded = coder.encode_as(scheme, form, page, limit, block);
    let between = clock();
    let Some(encoded) = encoded else {
        return Sample {
            bytes: page.bytes.len() as f64,
            encode_ns: (between - began) as f64,
            decode_ns: 0.0,
        };
    };
    let block = &block[..encoded.bytes as usize];
    // What comes back is compared when the page does; here only the time matters.
    let _ = coder.decode(scheme, form, block, page.seed, page.number, back);
    Sample {
        bytes: f64::from(encoded.bytes),
        encode_ns: (between - began) as f64,
        decode_ns: (clock() - between) as f64,
    }
}

impl Learnt {
    fn end_epoch(
        &mut self,
        traffic: &Traffic,
        classes: &[Class; CLASSES],
        choices: &[usize; CLASSES],
    ) {
        let now_ns = traffic.now_ns();
        let wall_ns = now_ns - self.marks.at_ns;
        let mut marks = Marks {
            at_ns: now_ns,
            cpu_ns: cpu_ns(ClockId::CLOCK_PROCESS_CPUTIME_ID),
            ..Marks::default()
        };
        let mut epoch = Epoch {
            wall_ns: wall_ns as f64,
            ..Epoch::default()
        };
        let mut own_bytes = [0; 2];
        let mut all_pages = 0;
        for (at, class) in classes.iter().enumerate() {
            for way in [READ, WRITE] {
                let moved = &class.moved[way];
                let mark = (moved.pages.load(Relaxed), moved.bytes.load(Relaxed));
                let old = self.marks.classes[at][way];
                marks.classes[at][way] = mark;
                epoch.pages[at][way] = (mark.0 - old.0) as f64;
                own_bytes[way] += mark.1 - old.1;
                all_pages += mark.0 - old.0;
            }
        }
        if wall_ns < EPOCH.as_nanos() as u64 || all_pages < EPOCH_PAGES {
            return;
        }
        let mut rates = [None; 2];
        for way in [READ, WRITE] {
            let counters = &traffic.ways[way];
            let mark = (counters.busy_ns.load(Relaxed), counters.bytes.load(Relaxed));
            let old = self.marks.ways[way];
            marks.ways[way] = mark;
            let (busy_ns, bytes) = (mark.0 - old.0, mark.1 - old.1);
            epoch.other_bytes[way] = bytes.saturating_sub(own_bytes[way]) as f64;
            rates[way] = (bytes >= RATE_BYTES).then(|| busy_ns as f64 / bytes as f64);
        }
        let codecs_ns: f64 = (epoch.pages.iter().zip(choices).zip(&self.samples))
            .map(|((pages, choice), samples)| {
                let sample = samples[*choice];
                pages[READ] * sample.decode_ns + pages[WRITE] * sample.encode_ns
            })
            .sum();
        epoch.other_cpu_ns = ((marks.cpu_ns - self.marks.cpu_ns) as f64 - codecs_ns).max(0.0);
        epoch.workers = [&traffic.decoders, &traffic.encoders]
            .map(|workers| workers.load(Relaxed).max(1) as f64);
        epoch.processors = std::thread::available_parallelism().map_or(1, usize::from) as f64;
        self.marks = marks;
        self.epoch = epoch;
        let is_busy = self.work_ns(choices) > BUSY * self.epoch.wall_ns;
        for (known, new) in self.ns_per_byte.iter_mut().zip(rates) {
            if let Some(new) = new
                && (!is_busy || known.iter().all(|old| new < *old))
            {
                if known.len() == RATE_EPOCHS {
                    known.pop_front();
                }
                known.push_back(new);
            }
        }
        // The overlap that explains how long it took.
        let (longest, sum) = self.times(choices);
        if sum > longest {
            let overlap = ((self.epoch.wall_ns - longest) / (sum - longest)).clamp(0.0, 1.0);
            self.overlap += (overlap - self.overlap) * SAMPLE_WEIGHT;
        }
    }

    /// Improves one stretch after the other. Before the first epoch has ended all stays as it is: raw, which shows best what the link can do.
    fn choose(&self, forms: usize, choices: &mut [usize; CLASSES]) {
        if self.epoch.wall_ns == 0.0 {
            return;
        }
        for class in 0..CLASSES {
            let samples = &self.samples[class];
            if !samples[0].is_known() {
                continue;
            }
            let mut best = (self.cost(choices), choices[class]);
            for form in 0..forms {
                let mut other = *choices;
                other[class] = form;
                let cost = self.cost(&other);
                if cost < best.0 * MARGIN {
                    best = (cost, form);
                }
            }
            choices[class] = best.1;
        }
    }

    fn cost(&self, choices: &[usize; CLASSES]) -> f64 {
        let (longest, sum) = self.times(choices);
        longest + self.overlap * (sum - longest).max(0.0)
    }

    /// What the last epoch would have taken: the longest of all, and one after the other.
    fn times(&self, choices: &[usize; CLASSES]) -> (f64, f64) {
        let (load, work) = (self.load(choices), self.work_ns(choices));
        let [read_rate, write_rate] = [READ, WRITE].map(|way| self.ns_per_byte(way));
        let write_rate = write_rate.or(read_rate).unwrap_or(0.0);
        let read_rate = read_rate.unwrap_or(write_rate);
        let link = (load.bytes[READ] * read_rate).max(load.bytes[WRITE] * write_rate);
        let longest = work.max(link);
        (longest, (self.cpu_ns(&load) + link).max(longest))
    }

    fn ns_per_byte(&self, way: usize) -> Option<f64> {
        self.ns_per_byte[way].iter().copied().reduce(f64::min)
    }

    /// What processors, or the workers that encode or decode, would have had to do.
    fn work_ns(&self, choices: &[usize; CLASSES]) -> f64 {
        let load = self.load(choices);
        let workers = load.codec_ns.iter().zip(self.epoch.workers);
        workers.fold(self.cpu_ns(&load), |longest, (ns, workers)| {
            longest.max(ns / workers)
        })
    }

    fn cpu_ns(&self, load: &Load) -> f64 {
        (self.epoch.other_cpu_ns + load.codec_ns[READ] + load.codec_ns[WRITE])
            / self.epoch.processors
    }

    /// A stretch that nothing moved in counts as one page.
    fn load(&self, choices: &[usize; CLASSES]) -> Load {
        let mut load = Load {
            bytes: self.epoch.other_bytes,
            codec_ns: [0.0; 2],
        };
        for ((pages, choice), samples) in self.epoch.pages.iter().zip(choices).zip(&self.samples) {
            let sample = samples[*choice];
            let written = pages[WRITE].max(if sample.is_known() { 1.0 } else { 0.0 });
            let read = pages[READ].max(written);
            load.codec_ns[WRITE] += written * sample.encode_ns;
            load.codec_ns[READ] += read * sample.decode_ns;
            load.bytes[READ] += read * sample.bytes;
            load.bytes[WRITE] += written * sample.bytes;
        }
        load
    }
}

/// What an epoch would have had to do: bytes on the link, and encoding and decoding.
struct Load {
    bytes: [f64; 2],
    codec_ns: [f64; 2],
}

fn cpu_ns(clock: ClockId) -> u64 {
    let time = clock_gettime(clock).expect("Linux has these clocks");
    time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::{Codec, Element, Layout, plain};

    const PAGE: f64 = 65536.0;
    const RAW: usize = 0;
    const LZ4: usize = 1;
    const ZFP: usize = 2;

    /// Two processors, one worker of each kind; a program that needs 100 us for each of 1000 pages that it reads and 300 that it writes.
    /// LZ4 halves a page for 50 us and 20 us, ZFP takes it to an eighth for 400 us and 300 us.
    fn learnt(ns_per_byte: f64, overlap: f64) -> Learnt {
        let sample = |bytes, encode_us: f64, decode_us: f64| Sample {
            bytes,
            encode_ns: encode_us * 1e3,
            decode_ns: decode_us * 1e3,
        };
        let mut samples = std::array::from_fn(|_| vec![Sample::default(); 3]);
        samples[0] = vec![
            sample(PAGE, 0.0, 0.0),
            sample(PAGE / 2.0, 50.0, 20.0),
            sample(PAGE / 8.0, 400.0, 300.0),
        ];
        let mut pages = [[0.0; 2]; CLASSES];
        pages[0] = [1000.0, 300.0];
        Learnt {
            samples,
            epoch: Epoch {
                wall_ns: 1e8,
                other_cpu_ns: 1000.0 * 100e3,
                other_bytes: [0.0; 2],
                pages,
                workers: [1.0; 2],
                processors: 2.0,
            },
            marks: Marks::default(),
            overlap,
            ns_per_byte: [VecDeque::from([ns_per_byte]), VecDeque::from([ns_per_byte])],
            page: Vec::new(),
        }
    }

    fn choice(learnt: &Learnt) -> usize {
        let mut choices = [RAW; CLASSES];
        learnt.choose(3, &mut choices);
        assert!(choices[1..].iter().all(|choice| *choice == RAW));
        choices[0]
    }

    #[test]
    fn the_slower_the_link_the_more_is_spent_on_compression() {
        let gbps = |gbps: f64| 8.0 / gbps;
        for overlap in [0.0, 0.5, 1.0] {
            assert_eq!(choice(&learnt(gbps(0.2), overlap)), ZFP);
            assert_eq!(choice(&learnt(gbps(2.0), overlap)), LZ4);
            assert_eq!(choice(&learnt(gbps(100.0), overlap)), RAW);
        }
    }

    #[test]
    fn where_accesses_wait_for_their_pages_what_is_saved_counts_even_if_the_link_is_idle() {
        // 16 Gb/s: 33 ms on the link beside 50 ms on the processors.
        assert_eq!(choice(&learnt(0.5, 0.0)), RAW);
        let mut waiting = learnt(0.5, 1.0);
        waiting.epoch.processors = 16.0;
        waiting.epoch.workers = [16.0; 2];
        assert_eq!(choice(&waiting), LZ4);
    }

    #[test]
    fn one_encoder_must_not_become_what_all_wait_for() {
        let mut learnt = learnt(8.0 / 2.0, 0.0);
        assert_eq!(
            choice(&learnt),
            LZ4,
            "one worker decodes 1000 pages in 300 ms"
        );
        learnt.epoch.workers = [8.0; 2];
        learnt.epoch.processors = 8.0;
        assert_eq!(choice(&learnt), ZFP);
    }

    #[test]
    fn what_does_not_shrink_is_left_alone_and_noise_changes_nothing() {
        let mut data = learnt(8.0, 1.0);
        for sample in &mut data.samples[0] {
            sample.bytes = PAGE;
        }
        assert_eq!(choice(&data), RAW);
        data.samples[0][LZ4] = Sample {
            bytes: PAGE * 0.99,
            ..Sample::default()
        };
        assert_eq!(choice(&data), RAW, "one part in a hundred");
    }

    #[test]
    fn before_anything_is_known_of_the_link_pages_stay_raw() {
        let mut learnt = learnt(1e3, 1.0);
        learnt.epoch = Epoch::default();
        assert_eq!(choice(&learnt), RAW);
    }

    #[test]
    fn a_link_is_as_fast_as_its_best_recent_epoch() {
        let traffic = Arc::new(Traffic {
            began: Instant::now() - EPOCH,
            ..Traffic::default()
        });
        let scheme = Scheme::new(Codec::ADAPTIVE, Layout::new(Element::F64, [])).expect("fits");
        let chooser = Chooser::new(&traffic, &scheme, 1000).expect("adaptive");
        let mut learnt = chooser.learnt.lock();
        let mut epoch = |busy_ns: u64| {
            traffic.ways[READ].busy_ns.fetch_add(busy_ns, Relaxed);
            traffic.ways[READ].bytes.fetch_add(1 << 20, Relaxed);
            chooser.classes[3].moved[READ]
                .pages
                .fetch_add(EPOCH_PAGES, Relaxed);
            // Long ago.
            learnt.marks.at_ns = 0;
            learnt.end_epoch(&traffic, &chooser.classes, &[RAW; CLASSES]);
            learnt.ns_per_byte(READ).expect("a mebibyte was read")
        };
        assert_eq!(epoch(2 << 20), 2.0);
        assert_eq!(epoch(1 << 20), 1.0);
        for _ in 1..RATE_EPOCHS {
            assert_eq!(epoch(2 << 20), 1.0);
        }
        assert_eq!(epoch(2 << 20), 2.0, "it has become slower");
        assert_eq!(learnt.epoch.pages[3], [EPOCH_PAGES as f64, 0.0]);
    }

    #[test]
    fn samples_come_at_once_and_then_seldom() {
        let traffic = Arc::new(Traffic::default());
        let scheme = Scheme::new(Codec::ADAPTIVE, Layout::new(Element::F64, [])).expect("fits");
        let chooser = Chooser::new(&traffic, &scheme, 1000).expect("adaptive");
        let mut coder = Coder::new();
        let values: Vec<f64> = (0..8192).map(|at| 1.0 + f64::from(at / 64)).collect();
        let bytes: &[u8] = bytemuck::cast_slice(&values);
        let mut block = vec![0; Coder::bound(bytes.len())];
        let page = Page {
            number: 3,
            bytes,
            hash: plain::hash(bytes, 1),
            seed: 1,
        };
        let limit = Coder::limit(bytes.len());
        assert_eq!(chooser.form(3), None, "never seen");
        let form = chooser.decide(&mut coder, &scheme, page, limit, &mut block);
        assert_eq!(form, Form::Raw, "nothing is known of the link yet");
        assert_eq!(chooser.form(3), Some(form));
        assert_eq!(chooser.form(999), None, "another stretch");
        let learnt = chooser.learnt.lock();
        let samples = &learnt.samples[0];
        assert_eq!(samples[RAW].bytes, bytes.len() as f64);
        let shrunk = |sample: &Sample| sample.bytes < PAGE / 2.0 && sample.encode_ns > 0.0;
        assert!(samples[1..].iter().all(shrunk), "{samples:?}");
    }
}
