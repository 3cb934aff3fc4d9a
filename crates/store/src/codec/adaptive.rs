//! [`Chooser`]: chooses the best form for a region's pages from what it measures while the program
//! runs.
//!
//! The rule it keeps: **a form is judged by the time that the whole run takes with it, and that is
//! the time of the busiest resource.** Compression moves work from the link to the processors. It
//! pays exactly as long as the link is the busiest.
//!
//! # The model
//!
//! In one epoch (at least [`EPOCH`] and [`EPOCH_PAGES`]) the region wrote `w` pages and read `r`.
//! With a form that stores `b` bytes, encodes in `e` and decodes in `d`, the epoch would have taken
//!
//! ```text
//! cpu  = (all processor time of the process - its codecs then + w e + r d) / processors
//! link = the longer of (bytes read) / (read rate) and (bytes written) / (write rate)
//! T    = longest + overlap (cpu + link - longest),   longest = max(cpu, link)
//! ```
//!
//! `overlap` is 0 where everything goes on at the same time (streams read ahead) and 1 where one
//! follows the other (each access waits for its page). It is fitted so that T is right for past
//! epochs. A written page will be read, so `r` is at least `w`. Programs repeat themselves, so a
//! form is judged by the sum of T over the last epochs (`adaptive/model.rs`).
//!
//! Stretches of a region may differ and are judged apart, but by one measure: the **price** of a
//! byte in processor time. At each price every stretch has a cheapest form. The right price is the
//! one whose forms give the least T; of those within two in a hundred, the lowest. So similar
//! stretches are stored alike, although a single stretch hardly changes T.
//!
//! # Where the figures come from
//!
//! - `e`, `d` and `b`: the first page that is written of each [part](PARTS), and a page now and
//!   then, is a sample. It is encoded and decoded in all forms, twice, on the thread's own clock,
//!   so that preemption counts nothing and a disturbance little. Forms that take long to try and
//!   are far from being chosen, such as ZFP over a fast link, are tried seldom
//!   (`Model::is_worth_a_trial`). After the first samples, sampling takes one part in
//!   [`SAMPLE_SHARE`] of the time. So changes of the data are noticed, and where compression does
//!   not pay only that part is spent on it.
//! - Rates: the bytes that arrived while an I/O queue slept that had requests in flight all the
//!   time (`adaptive/link.rs`). As long as no I/O queue waits for the link its rate is unknown and
//!   taken as infinite, and pages stay raw.
//! - Processor time: the process's own clock.

mod link;
mod model;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use farpage_signals::Mutex;
use nix::time::{ClockId, clock_gettime};

pub(crate) use self::link::{LinkTraffic, READ, WRITE, Watch};
use self::{
    link::LinkSnapshot,
    model::{CLASSES, Epoch, Forms, Model, Sample},
};
use super::{
    coder::Coder,
    form::{Encoded, Form, Page},
    scheme::Scheme,
};
use crate::PageIndex;

/// Number of parts of a region, one bit of a word each. Each part gives a sample at once, so that a
/// stretch is not judged by a single page.
const PARTS: u64 = 64;
/// Period of full samples: one in this many of a stretch is tried in all forms.
const ALL_FORMS: u32 = 16;
/// Least time of an epoch, which also has at least [`EPOCH_PAGES`] pages.
const EPOCH: Duration = Duration::from_millis(10);
const EPOCH_PAGES: u64 = 32;
/// Inverse of the share of a worker's time that samples take.
const SAMPLE_SHARE: u64 = 200;

/// Chooser of the forms of one region's pages. See the module.
#[derive(Debug)]
pub(crate) struct Chooser {
    traffic: Arc<LinkTraffic>,
    forms: Vec<Form>,
    pages: u64,
    classes: [Class; CLASSES],
    /// Bits of the parts that have given a sample.
    seen: AtomicU64,
    /// The earliest end of the epoch.
    turn_ns: AtomicU64,
    learnt: Mutex<Learnt>,
}

/// A stretch's data that workers share.
#[derive(Debug)]
struct Class {
    /// The chosen form's number.
    form: AtomicU8,
    /// Time from which on the next page is a sample.
    due_ns: AtomicU64,
    /// Pages that moved, by direction and form.
    moved: [[Moved; Form::ALL.len()]; 2],
}

#[derive(Debug, Default)]
struct Moved {
    pages: AtomicU64,
    bytes: AtomicU64,
}

#[derive(Debug)]
struct Learnt {
    model: Model,
    /// The counters when the epoch began.
    marks: Marks,
    /// Time that samples took in this epoch.
    samples_ns: u64,
    /// Scratch for a sample that is decoded.
    page: Vec<u8>,
}

#[derive(Debug, Default)]
struct Marks {
    at_ns: u64,
    cpu_ns: u64,
    ways: [LinkSnapshot; 2],
    /// Pages and bytes that moved, by stretch, direction and form.
    moved: [[[(u64, u64); Form::ALL.len()]; 2]; CLASSES],
}

impl Chooser {
    /// Makes a chooser for a region of `pages` pages. `None`: the scheme leaves no choice.
    pub(crate) fn new(traffic: &Arc<LinkTraffic>, scheme: &Scheme, pages: u64) -> Option<Self> {
        let forms = scheme.candidates()?;
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let class = || Class {
            form: AtomicU8::new(Form::Raw.id()),
            due_ns: AtomicU64::new(0),
            moved: Default::default(),
        };
        Some(Self {
            classes: std::array::from_fn(|_| class()),
            seen: AtomicU64::new(0),
            turn_ns: AtomicU64::new(0),
            learnt: Mutex::new(Learnt {
                model: Model::new(forms.len(), processors),
                marks: Marks {
                    at_ns: traffic.now_ns(),
                    cpu_ns: cpu_ns(ClockId::CLOCK_PROCESS_CPUTIME_ID),
                    ways: traffic.counts(),
                    ..Marks::default()
                },
                samples_ns: 0,
                page: Vec::new(),
            }),
            traffic: traffic.clone(),
            forms,
            pages,
        })
    }

    /// Returns the form for a page. `None`: the page is a sample.
    pub(crate) fn form(&self, page: PageIndex) -> Option<Form> {
        let class = &self.classes[self.class_of(page)];
        let now_ns = self.traffic.now_ns();
        if self.seen.load(Relaxed) & self.part_of(page) == 0 || now_ns >= class.due_ns.load(Relaxed)
        {
            return None;
        }
        if now_ns >= self.turn_ns.load(Relaxed)
            && let Some(mut learnt) = self.learnt.try_lock()
        {
            self.turn(&mut learnt);
        }
        Some(self.chosen(class))
    }

    /// Counts `pages` pages that moved in one request.
    pub(crate) fn moved(&self, way: usize, form: Form, page: PageIndex, pages: usize, bytes: u64) {
        let moved = &self.classes[self.class_of(page)].moved[way];
        let moved = &moved[usize::from(form.id())];
        moved.pages.fetch_add(pages as u64, Relaxed);
        moved.bytes.fetch_add(bytes, Relaxed);
    }

    /// Encodes a changed page that is a sample: tries all forms that are worth it, twice, then
    /// takes the chosen one. `block` as in [`Coder::encode`].
    pub(crate) fn sample(
        &self,
        coder: &mut Coder,
        scheme: &Scheme,
        page: Page<'_>,
        limit: usize,
        block: &mut [u8],
    ) -> Encoded {
        let class = self.class_of(page.number);
        let chosen = || self.chosen(&self.classes[class]);
        // Another worker is sampling: this page takes the current form.
        let Some(mut learnt) = self.learnt.try_lock() else {
            return coder.encode(scheme, chosen(), page, limit, block);
        };
        let learnt = &mut *learnt;
        let began_ns = cpu_ns(ClockId::CLOCK_THREAD_CPUTIME_ID);
        self.seen.fetch_or(self.part_of(page.number), Relaxed);
        // The form that is chosen now comes last: its block can stay, if it is chosen again.
        let last = chosen();
        let mut left = None;
        let all = (0..self.forms.len()).filter(|&at| self.forms[at] != last);
        let last_at = self.forms.iter().position(|&form| form == last);
        let tries_all = learnt.model.pages_tried(class).is_multiple_of(ALL_FORMS);
        for at in all.chain(last_at) {
            if tries_all || learnt.model.is_worth_a_trial(class, at) {
                let mut tried = TrialResult::raw(page);
                if self.forms[at] != Form::Raw {
                    let mut attempt = Attempt {
                        coder: &mut *coder,
                        scheme,
                        page,
                        limit,
                        back: &mut learnt.page,
                    };
                    tried = attempt.twice(self.forms[at], block);
                }
                learnt.model.samples[class][at].see(tried.sample);
                left = Some((self.forms[at], tried.encoded));
            }
        }
        let spent_ns = cpu_ns(ClockId::CLOCK_THREAD_CPUTIME_ID) - began_ns;
        learnt.samples_ns += spent_ns;
        self.turn(learnt);
        self.pause(class, spent_ns);
        match left {
            Some((form, Some(encoded))) if form == chosen() => encoded,
            _ => coder.encode(scheme, chosen(), page, limit, block),
        }
    }

    /// Sets the time of the next samples, after one of this stretch took `spent_ns`.
    fn pause(&self, class: usize, spent_ns: u64) {
        let pause_ns = (spent_ns * SAMPLE_SHARE).max(EPOCH.as_nanos() as u64);
        let next_ns = self.traffic.now_ns() + pause_ns;
        // Stretches take turns, so that all of them together keep the share.
        self.classes[class]
            .due_ns
            .fetch_max(next_ns + spent_ns * (CLASSES as u64 - 1), Relaxed);
        for other in &self.classes {
            if other.due_ns.load(Relaxed) != 0 {
                other.due_ns.fetch_max(next_ns, Relaxed);
            }
        }
    }

    fn chosen(&self, class: &Class) -> Form {
        Form::from_id(class.form.load(Relaxed)).expect("stored below, from a form")
    }

    fn class_of(&self, page: PageIndex) -> usize {
        (u128::from(page.number()) * CLASSES as u128 / u128::from(self.pages.max(1))) as usize
    }

    /// Returns the bit of the part that the page belongs to.
    fn part_of(&self, page: PageIndex) -> u64 {
        1 << (u128::from(page.number()) * u128::from(PARTS) / u128::from(self.pages.max(1)))
    }

    /// Ends the epoch if it is over, and chooses anew.
    fn turn(&self, learnt: &mut Learnt) {
        let now_ns = self.traffic.now_ns();
        self.turn_ns
            .store(now_ns + EPOCH.as_nanos() as u64, Relaxed);
        if let Some(epoch) = self.end_epoch(learnt, now_ns) {
            learnt.model.see(epoch);
        }
        // Also in mid-epoch: a stretch may just have given its first sample.
        let forms: Forms = learnt.model.choose();
        for (class, form) in self.classes.iter().zip(forms) {
            class.form.store(self.forms[form].id(), Relaxed);
        }
    }

    /// Returns the epoch, if it has had enough time and pages.
    fn end_epoch(&self, learnt: &mut Learnt, now_ns: u64) -> Option<Epoch> {
        let mut marks = Marks {
            at_ns: now_ns,
            cpu_ns: cpu_ns(ClockId::CLOCK_PROCESS_CPUTIME_ID),
            ways: self.traffic.counts(),
            ..Marks::default()
        };
        let old = &learnt.marks;
        let model = &mut learnt.model;
        let mut epoch = Epoch {
            wall_ns: (now_ns - old.at_ns) as f64,
            cpu_ns: (marks.cpu_ns - old.cpu_ns).saturating_sub(learnt.samples_ns) as f64,
            ..Epoch::default()
        };
        // 1. The pages that moved, and what encoding and decoding them took.
        let mut all_pages = 0;
        for (at, class) in self.classes.iter().enumerate() {
            for way in [READ, WRITE] {
                for (id, moved) in class.moved[way].iter().enumerate() {
                    let mark = (moved.pages.load(Relaxed), moved.bytes.load(Relaxed));
                    marks.moved[at][way][id] = mark;
                    let old = old.moved[at][way][id];
                    let (pages, bytes) = (mark.0 - old.0, mark.1 - old.1);
                    all_pages += pages;
                    epoch.pages[at][way] += pages as f64;
                    epoch.own_bytes[way] += bytes as f64;
                    let form = self
                        .forms
                        .iter()
                        .position(|form| usize::from(form.id()) == id);
                    let sample = form.map_or(Sample::default(), |form| model.samples[at][form]);
                    let codec_ns = [sample.decode_ns, sample.encode_ns][way];
                    epoch.codecs_ns += pages as f64 * codec_ns;
                }
            }
        }
        if epoch.wall_ns < EPOCH.as_nanos() as f64 || all_pages < EPOCH_PAGES {
            return None;
        }
        // 2. The link.
        for way in [READ, WRITE] {
            let (new, old) = (marks.ways[way], old.ways[way]);
            epoch.bytes[way] = (new.delivered - old.delivered) as f64;
            let bytes = new.waited_bytes - old.waited_bytes;
            let ns = new.waited_ns - old.waited_ns;
            model.rates[way].see(bytes as f64, ns as f64, epoch.wall_ns);
        }
        learnt.marks = marks;
        learnt.samples_ns = 0;
        Some(epoch)
    }
}

/// Result of trying a form on a page.
struct TrialResult {
    sample: Sample,
    /// `None`: the page would be stored raw.
    encoded: Option<Encoded>,
}

impl TrialResult {
    fn raw(page: Page<'_>) -> Self {
        let bytes = page.bytes.len() as f64;
        let sample = Sample {
            bytes,
            ..Sample::default()
        };
        Self {
            sample,
            encoded: Some(Encoded::raw(page)),
        }
    }
}

/// State of trying forms on a page.
struct Attempt<'a> {
    coder: &'a mut Coder,
    scheme: &'a Scheme,
    page: Page<'a>,
    limit: usize,
    /// Buffer that the page is decoded to.
    back: &'a mut Vec<u8>,
}

impl Attempt<'_> {
    /// Tries a form twice and takes the shorter times: they contain less of what the host's other
    /// guests take, and nothing of touching tables for the first time.
    fn twice(&mut self, form: Form, block: &mut [u8]) -> TrialResult {
        let (first, second) = (self.once(form, block), self.once(form, block));
        TrialResult {
            sample: first.sample.shorter(second.sample),
            encoded: second.encoded,
        }
    }

    /// Times the page's encoding and decoding. A page that would be stored raw counts with its own
    /// length and the time of the attempt.
    fn once(&mut self, form: Form, block: &mut [u8]) -> TrialResult {
        let clock = || cpu_ns(ClockId::CLOCK_THREAD_CPUTIME_ID);
        let (coder, page) = (&mut *self.coder, self.page);
        self.back.resize(page.bytes.len(), 0);
        let began = clock();
        let encoded = coder.encode_as(self.scheme, form, page, self.limit, block);
        let between = clock();
        let mut sample = Sample {
            bytes: page.bytes.len() as f64,
            encode_ns: (between - began) as f64,
            ..Sample::default()
        };
        if let Some(encoded) = encoded {
            let block = &block[..encoded.bytes as usize];
            // The result is verified when the page comes back; here only the time matters.
            let _ = coder.decode(self.scheme, form, block, page.seed, page.number, self.back);
            sample.bytes = f64::from(encoded.bytes);
            sample.decode_ns = (clock() - between) as f64;
        }
        TrialResult { sample, encoded }
    }
}

fn cpu_ns(clock: ClockId) -> u64 {
    let time = clock_gettime(clock).expect("Linux has these clocks");
    time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::{Codec, Element, Layout, plain};

    const PAGE: usize = 65536;

    fn chooser(traffic: &Arc<LinkTraffic>) -> (Chooser, Scheme) {
        let scheme = Scheme::new(Codec::ADAPTIVE, Layout::new(Element::F64, [])).expect("fits");
        let chooser = Chooser::new(traffic, &scheme, 1000).expect("adaptive");
        (chooser, scheme)
    }

    /// Writes a page of steps, of which LZ4 makes next to nothing. Returns the form that comes out.
    fn write(chooser: &Chooser, scheme: &Scheme, number: usize) -> Form {
        let number = PageIndex(number);
        let values: Vec<f64> = (0..8192).map(|at| 1.0 + f64::from(at / 64)).collect();
        let bytes: &[u8] = bytemuck::cast_slice(&values);
        let mut block = vec![0; Coder::bound(PAGE)];
        let page = Page {
            number,
            bytes,
            hash: plain::hash(bytes, 1),
            seed: 1,
        };
        let limit = Coder::limit(PAGE);
        let mut coder = Coder::new();
        let encoded = match chooser.form(number) {
            Some(form) => coder.encode(scheme, form, page, limit, &mut block),
            None => chooser.sample(&mut coder, scheme, page, limit, &mut block),
        };
        if encoded.form != Form::Raw {
            let (block, mut back) = (&block[..encoded.bytes as usize], vec![0; PAGE]);
            coder
                .decode(scheme, encoded.form, block, 1, number, &mut back)
                .expect("it was just encoded");
            assert!(back == bytes, "the block is that of {:?}", encoded.form);
        }
        encoded.form
    }

    #[test]
    fn samples_come_at_once_and_then_seldom() {
        let (chooser, scheme) = chooser(&Arc::default());
        assert_eq!(chooser.form(PageIndex(3)), None, "never seen");
        let form = write(&chooser, &scheme, 3);
        assert_eq!(form, Form::Raw, "nothing is known of the link yet");
        assert_eq!(chooser.form(PageIndex(3)), Some(form));
        assert_eq!(chooser.form(PageIndex(999)), None, "another stretch");
        assert_eq!(
            chooser.form(PageIndex(20)),
            None,
            "another part of the stretch"
        );
        let mut learnt = chooser.learnt.lock();
        let due_ns = chooser.classes[0].due_ns.load(Relaxed);
        assert!(learnt.samples_ns > 0 && due_ns >= learnt.samples_ns * SAMPLE_SHARE);
        let samples = &mut learnt.model.samples[0];
        assert_eq!(samples[0].bytes, PAGE as f64);
        let shrunk = |sample: &Sample| sample.bytes < PAGE as f64 / 2.0 && sample.encode_ns > 0.0;
        assert!(samples[1..].iter().all(shrunk), "{samples:?}");
        // The last form is tried again when all forms are.
        samples.last_mut().expect("some").encode_ns = 1e9;
        drop(learnt);
        write(&chooser, &scheme, 20);
        assert_eq!(chooser.form(PageIndex(20)), Some(form));
        let samples = &chooser.learnt.lock().model.samples[0];
        let tried = samples.iter().map(|sample| sample.pages);
        assert_eq!(tried.collect::<Vec<_>>(), [2, 2, 2, 1]);
    }

    /// 32 pages are written in each epoch, at 0.1 Gb/s.
    #[test]
    fn what_queues_wait_for_decides() {
        let traffic = Arc::default();
        let (chooser, scheme) = chooser(&traffic);
        write(&chooser, &scheme, 3);
        let bytes = EPOCH_PAGES * PAGE as u64;
        let epoch = |waited_ns: u64| {
            chooser.moved(WRITE, Form::Raw, PageIndex(3), EPOCH_PAGES as usize, bytes);
            let mut learnt = chooser.learnt.lock();
            let now_ns = learnt.marks.at_ns + 170_000_000;
            if waited_ns > 0 {
                traffic.waited(WRITE, bytes, waited_ns);
            }
            let epoch = chooser.end_epoch(&mut learnt, now_ns);
            learnt.model.see(epoch.expect("long enough"));
            let forms = learnt.model.choose();
            chooser.forms[forms[0]]
        };
        for _ in 0..5 {
            assert_eq!(epoch(0), Form::Raw, "nobody waits");
        }
        assert_ne!(epoch(160_000_000), Form::Raw);
        {
            let mut learnt = chooser.learnt.lock();
            // The clock has not gone on as far as the epochs above say.
            learnt.marks.at_ns = 0;
            chooser.turn(&mut learnt);
        }
        // Another part: a sample, whose block is kept where its form is chosen again.
        assert_eq!(chooser.form(PageIndex(20)), None);
        assert_ne!(write(&chooser, &scheme, 20), Form::Raw);
    }
}
