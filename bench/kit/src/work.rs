//! STREAM's triad without a pager: the cost of the work itself on this machine's cores. Also pages
//! that only come and leave.
//!
//! Each page that comes in is read, verified by its hash, computed with, and hashed again to find
//! changes; the changed third is written. The pager's layers do the work, in runs of the same
//! length, with as much local memory and one thread per core. No page ever faults: there is no
//! userfaultfd, no wake-up and no guess. A second measurement moves each run into the program's
//! memory and out of it, still without a fault.
//!
//! The rule it keeps: every thread has memory of its own and knows beforehand which pages are next,
//! so that only less work could be faster. Pages that come in are checked against what was written.

use std::{
    collections::VecDeque,
    iter,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use bytemuck::cast_slice_mut;
use farpage_fabric::{Link, Session, SessionOptions};
use farpage_store::{
    Cluster, ClusterOptions, IoQueue, PageIndex, PageStore, RemoteOptions, RunCompletion,
};
use farpage_vm::{
    AddressSpace, Detached, Frame, Geometry, KernelFrame, KernelSpace, KernelSpaceOptions, PageIn,
    PageOut, Pages, Shard,
};

use crate::{
    bare, crew,
    options::{Common, threads},
    pick::mix,
    raw::{LOCAL_BYTES, SMOKE_LOCAL_BYTES, sleep_until},
    server::MemoryServer,
};

/// Bytes of each of the three arrays, of all threads together: as many as STREAM has in `targets`.
const ARRAY_BYTES: usize = 128 << 20;
const SMOKE_ARRAY_BYTES: usize = 4 << 20;
/// Bytes of the longest run, as in the pager.
const RUN_BYTES_MAX: usize = 512 << 10;
const RUN_PAGES_MAX: usize = 64;
/// Steps that are read ahead: about as many as a thread of STREAM has in its windows.
const STEPS_AHEAD: usize = 3;

/// Settings of a measurement.
pub struct Setting {
    /// Model of a slower network than the real one.
    pub link: Option<Arc<Link>>,
    /// Threads that work.
    pub threads: usize,
    /// Bytes of a page.
    pub page_bytes: usize,
    /// True if sizes are tiny.
    pub smoke: bool,
    /// Time for which each rate is measured.
    pub time: Duration,
}

impl Setting {
    /// Takes the settings from a benchmark's options.
    pub fn of(common: &Common, time: Duration) -> Self {
        Self {
            link: common.link(),
            threads: threads(common.fillers),
            page_bytes: common.page_size.as_u64() as usize,
            smoke: common.run.smoke,
            time,
        }
    }
}

/// Work on pages that have come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Job {
    /// STREAM's triad, which changes a third of the pages. `moving`: runs move into a region and
    /// out of it. Otherwise local memory stays where it is.
    Triad { moving: bool },
    /// A pass in and out, with one element of each page changed if `changed`.
    Pass { changed: bool },
}

impl Job {
    fn moving(self) -> bool {
        !matches!(self, Self::Triad { moving: false })
    }
}

/// Rates in MB/s.
pub struct Rates {
    /// Rate of the triad in local memory that stays where it is, or of pages that leave as they
    /// came.
    pub light: f64,
    /// Rate of the triad with runs that move into a region and out of it, or of pages that are
    /// written back.
    pub heavy: f64,
    /// Number of elements that did not come back as they were written.
    pub wrong: u64,
}

/// Measures the triad.
pub fn rates(setting: &Setting, server: &MemoryServer) -> Result<Rates> {
    let jobs = [false, true].map(|moving| Job::Triad { moving });
    both(setting, server, jobs)
}

/// Measures pages that come in, move into a region and out of it, and leave, whatever a program
/// does with them.
pub fn page_rates(setting: &Setting, server: &MemoryServer) -> Result<Rates> {
    let jobs = [false, true].map(|changed| Job::Pass { changed });
    both(setting, server, jobs)
}

fn both(setting: &Setting, server: &MemoryServer, jobs: [Job; 2]) -> Result<Rates> {
    let [light, heavy] = jobs.map(|job| rate(setting, server, job));
    let ((light, wrong), (heavy, more)) = (light?, heavy?);
    let wrong = wrong + more;
    Ok(Rates {
        light,
        heavy,
        wrong,
    })
}

fn rate(setting: &Setting, server: &MemoryServer, job: Job) -> Result<(f64, u64)> {
    let (threads, page_bytes, time) = (setting.threads, setting.page_bytes, setting.time);
    let options = SessionOptions {
        link: setting.link.clone(),
        ..SessionOptions::default()
    };
    let session = Session::connect(server.endpoint(), &options)?;
    let cluster = Cluster::new(vec![session], ClusterOptions::default());
    let (array, local) = match setting.smoke {
        true => (SMOKE_ARRAY_BYTES, SMOKE_LOCAL_BYTES as usize),
        false => (ARRAY_BYTES, LOCAL_BYTES as usize),
    };
    let space = KernelSpace::new(KernelSpaceOptions {
        shards: threads,
        // Tiny local memory is smaller than the frames under way.
        frame_bytes_max: 2 * local + threads * 3 * (STEPS_AHEAD + 2) * run_bytes(page_bytes),
        // No thread serves faults: a fault would be a mistake, and has to end the program instead
        // of sleeping for ever.
        in_thread: true,
        ..KernelSpaceOptions::default()
    })?;
    let mut workers = (0..threads)
        .map(|thread| {
            let sizes = [array / threads, local / threads];
            Worker::new(&space, &cluster, thread, page_bytes, sizes, job)
        })
        .collect::<Result<Vec<_>>>()?;

    crew::together(&mut workers, Worker::prepare)?;
    let (bytes_per_s, _) = crew::together(&mut workers, |worker| worker.run(time))?;
    let wrong = workers.iter().map(|worker| worker.wrong).sum();
    Ok((bytes_per_s.iter().sum::<f64>() / 1e6, wrong))
}

fn run_bytes(page_bytes: usize) -> usize {
    let bytes = RUN_BYTES_MAX.min(RUN_PAGES_MAX * page_bytes);
    bytes.max(page_bytes)
}

/// Kernel frame with the traits that the store asks for.
struct Local(KernelFrame);

impl AsRef<[u8]> for Local {
    fn as_ref(&self) -> &[u8] {
        self.0.as_ref()
    }
}

impl AsMut<[u8]> for Local {
    fn as_mut(&mut self) -> &mut [u8] {
        self.0.as_mut()
    }
}

impl farpage_store::RunBuffer for Local {
    fn split_off(&mut self, bytes: usize) -> Self {
        Local(self.0.split_off(bytes))
    }

    fn join(&mut self, next: Self) -> Result<(), Self> {
        self.0.join(next.0).map_err(Local)
    }
}

/// Runs at the same place of a, b and c.
struct Step {
    /// Number of the step, counted from the beginning of the phase.
    number: u64,
    frames: [Option<Local>; 3],
    /// Number of frames under way.
    open: usize,
}

struct Worker<'a> {
    space: &'a KernelSpace,
    io: IoQueue<(u64, usize), Local>,
    store: Arc<PageStore>,
    thread: usize,
    page_bytes: usize,
    run_bytes: usize,
    /// Number of runs of an array.
    runs: u64,
    /// Number of steps that fit into local memory.
    steps: usize,
    /// Address of the arrays, which are mapped one behind the other.
    region: usize,
    geometry: Geometry,
    job: Job,
    wrong: u64,
}

impl<'a> Worker<'a> {
    fn new(
        space: &'a KernelSpace,
        cluster: &Arc<Cluster>,
        thread: usize,
        page_bytes: usize,
        [array, local]: [usize; 2],
        job: Job,
    ) -> Result<Self> {
        let run_bytes = run_bytes(page_bytes);
        // A step must not be wanted again while its frames are under way.
        let runs = array.div_ceil(run_bytes).max(4 * STEPS_AHEAD);
        let bytes = 3 * runs * run_bytes;
        let store = PageStore::remote(
            cluster,
            format!("arrays of thread {thread}"),
            bytes as u64,
            page_bytes,
            &RemoteOptions::default(),
        )?;
        let geometry = Geometry {
            bytes,
            page_bytes,
            stripe_bytes: bytes,
            first_shard: thread,
            address: None,
            read_only: false,
            no_direct_io: false,
            ordinary: false,
        };
        Ok(Self {
            space,
            io: IoQueue::new(cluster)?,
            store,
            thread,
            page_bytes,
            run_bytes,
            runs: runs as u64,
            steps: (local / (3 * run_bytes)).clamp(1, runs - 2 * STEPS_AHEAD),
            region: space.map(geometry).context("cannot map memory")?.address,
            geometry,
            job,
            wrong: 0,
        })
    }

    fn new_frame(&self) -> Result<Local> {
        let pages = self.run_bytes / self.page_bytes;
        Ok(Local(self.space.new_frame(self.page_bytes, pages)?))
    }

    /// Writes the initial values of all arrays.
    fn prepare(&mut self) -> Result<()> {
        let mut done = Vec::new();
        for run in 0..3 * self.runs {
            let mut frame = self.new_frame()?;
            for (at, element) in elements(&mut frame).iter_mut().enumerate() {
                *element = original(self.thread, run, at);
            }
            self.write_back(run, frame, (0, 0));
            while self.io.in_flight() > 0 {
                self.poll(&mut done)?;
                for done in done.drain(..) {
                    ensure!(done.failed.is_empty(), "cannot write: {:?}", done.failed);
                }
            }
        }
        Ok(())
    }

    /// Runs the job again and again from the beginning, each time with other values, so that pages
    /// do change. Returns bytes per second, the first time excluded.
    fn run(&mut self, time: Duration) -> Result<f64> {
        let mut resident: VecDeque<Step> = VecDeque::new();
        let mut coming: VecDeque<Step> = VecDeque::new();
        let mut leaving: Vec<Step> = Vec::new();
        let mut free: Vec<[Option<Local>; 3]> = Vec::new();
        for _ in 0..self.steps + STEPS_AHEAD {
            let [a, b, c] = [(); 3].map(|()| self.new_frame());
            free.push([Some(a?), Some(b?), Some(c?)]);
        }
        let (mut begun, mut computed) = (0, 0);
        let mut start: Option<Instant> = None;
        let mut done = Vec::new();
        loop {
            // 1. The clock starts when local memory has been used up once.
            if start.is_none() && computed == self.runs {
                start = Some(Instant::now());
            }
            let ends = start.is_some_and(|start| start.elapsed() >= time);
            // 2. READs for the next steps.
            while !ends && coming.len() < STEPS_AHEAD {
                let Some(frames) = free.pop() else { break };
                coming.push_back(self.read(begun, frames));
                begun += 1;
            }
            // 3. The step that was used longest ago leaves.
            if resident.len() > self.steps || ends && !resident.is_empty() {
                let step = resident.pop_front().expect("there is one");
                leaving.push(self.write(step)?);
            }
            if ends && coming.is_empty() && leaving.is_empty() && resident.is_empty() {
                break;
            }
            // 4. Frames that have arrived, or have left.
            self.poll(&mut done)?;
            for done in done.drain(..) {
                let failed = done.failed;
                ensure!(failed.is_empty(), "cannot move pages: {failed:?}");
                let (number, array) = done.request;
                let mut steps = coming.iter_mut().chain(&mut leaving);
                let step = steps.find(|step| step.number == number);
                let step = step.expect("what is done was begun");
                step.frames[array] = Some(done.frame);
                step.open -= 1;
            }
            while let Some(at) = leaving.iter().position(|step| step.open == 0) {
                free.push(leaving.swap_remove(at).frames);
            }
            // 5. The work.
            if coming.front().is_some_and(|step| step.open == 0) {
                let mut step = coming.pop_front().expect("there is one");
                self.compute(&mut step)?;
                computed += 1;
                resident.push_back(step);
            }
        }
        let start = start.expect("it does not end before");
        let bytes = (computed - self.runs) * 3 * self.run_bytes as u64;
        Ok(bytes as f64 / start.elapsed().as_secs_f64())
    }

    fn run_of(&self, number: u64, array: usize) -> u64 {
        array as u64 * self.runs + number % self.runs
    }

    fn pages_of(&self, run: u64) -> Pages {
        let (shard, count) = (Shard(self.thread), self.run_bytes / self.page_bytes);
        Pages::new(shard, self.address_of(run), self.page_bytes, count)
    }

    fn first_of(&self, run: u64) -> PageIndex {
        PageIndex(run as usize * (self.run_bytes / self.page_bytes))
    }

    fn address_of(&self, run: u64) -> usize {
        self.region + run as usize * self.run_bytes
    }

    fn read(&mut self, number: u64, mut frames: [Option<Local>; 3]) -> Step {
        for (array, frame) in frames.iter_mut().enumerate() {
            let first = self.first_of(self.run_of(number, array));
            let frame = frame.take().expect("a free step has its frames");
            (self.io).fill(&self.store, first, frame, (number, array));
        }
        Step {
            number,
            frames,
            open: 3,
        }
    }

    /// Detaches a step, hashes it, and starts to write changed pages.
    fn write(&mut self, mut step: Step) -> Result<Step> {
        for array in 0..3 {
            let run = self.run_of(step.number, array);
            let frame = match self.job.moving() {
                true => {
                    let out = PageOut::Move(self.pages_of(run));
                    let frame = self.space.detach(out).map(Detached::into_frame)?;
                    let bytes = frame.as_ref().len();
                    ensure!(bytes == self.run_bytes, "a run came out in pieces");
                    Local(frame)
                }
                false => step.frames[array]
                    .take()
                    .expect("a resident step has its frames"),
            };
            self.write_back(run, frame, (step.number, array));
        }
        step.open = 3;
        Ok(step)
    }

    fn write_back(&mut self, run: u64, frame: Local, request: (u64, usize)) {
        let first = self.first_of(run);
        (self.io).write_back(&self.store, first, frame, request);
    }

    fn compute(&mut self, step: &mut Step) -> Result<()> {
        let frames = step.frames.each_mut();
        let mut frames = frames.map(|frame| frame.take().expect("it has arrived"));
        if self.job.moving() {
            for (array, frame) in frames.into_iter().enumerate() {
                let pages = self.pages_of(self.run_of(step.number, array));
                self.space
                    .install(pages, PageIn::Move(frame.0))
                    .map_err(|error| error.kind)?;
            }
            let addresses = [0, 1, 2].map(|array| self.address_of(self.run_of(step.number, array)));
            // SAFETY: three runs of this worker's region that were installed above; nobody else
            // touches them before `write` takes them out.
            let arrays =
                addresses.map(|address| unsafe { bare::installed(address, self.run_bytes) });
            self.wrong += self.work(step.number, arrays);
        } else {
            self.wrong += self.work(step.number, frames.each_mut().map(elements));
            step.frames = frames.map(Some);
        }
        Ok(())
    }

    /// Runs the job on `arrays`. Returns the number of wrong elements among those checked.
    fn work(&self, number: u64, arrays: [&mut [f64]; 3]) -> u64 {
        let round = number / self.runs;
        let original = |array, at| self.original(number, array, at);
        match self.job {
            Job::Triad { .. } => triad(arrays, round, original),
            Job::Pass { changed } => {
                let step = changed.then_some(self.page_bytes / size_of::<f64>());
                pass(arrays, round, step, original)
            }
        }
    }

    fn original(&self, number: u64, array: usize, at: usize) -> f64 {
        original(self.thread, self.run_of(number, array), at)
    }

    /// Polls the I/O queue, and sleeps until its next event if nothing has completed.
    fn poll(&mut self, done: &mut Vec<RunCompletion<(u64, usize), Local>>) -> Result<()> {
        self.io.poll();
        done.extend(iter::from_fn(|| self.io.take_ended()));
        if !done.is_empty() || self.io.in_flight() == 0 {
            return Ok(());
        }
        let mut fds = Vec::new();
        let until = self.io.wait(&mut fds);
        sleep_until(&mut fds, until)
    }
}

impl Drop for Worker<'_> {
    fn drop(&mut self) {
        self.space.unmap(self.region, self.geometry);
    }
}

fn elements(frame: &mut Local) -> &mut [f64] {
    cast_slice_mut(frame.as_mut())
}

/// Returns the initial value of an element: a whole number, so that arithmetic is exact.
fn original(thread: usize, run: u64, at: usize) -> f64 {
    (mix(run << 32 | (thread << 24) as u64 ^ at as u64) >> 24) as f64
}

/// Changes the first of every `step` elements, if any. Checks the first and the last element that
/// came in of each array, and returns the number of wrong ones.
fn pass(
    arrays: [&mut [f64]; 3],
    round: u64,
    step: Option<usize>,
    original: impl Fn(usize, usize) -> f64,
) -> u64 {
    let mut wrong = 0;
    for (array, elements) in arrays.into_iter().enumerate() {
        let last = elements.len() - 1;
        let first = original(array, 0) + step.map_or(0.0, |_| round as f64);
        wrong += u64::from(elements[0] != first);
        wrong += u64::from(elements[last] != original(array, last));
        if let Some(step) = step {
            for element in elements.iter_mut().step_by(step) {
                *element += 1.0;
            }
        }
    }
    wrong
}

/// Computes `a = b + (round + 1) * c`. Checks the first and the last element that came in of each
/// array, and returns the number of wrong ones.
fn triad([a, b, c]: [&mut [f64]; 3], round: u64, original: impl Fn(usize, usize) -> f64) -> u64 {
    let last = a.len() - 1;
    let mut wrong = 0;
    for at in [0, last] {
        let [in_a, in_b, in_c] = [0, 1, 2].map(|array| original(array, at));
        let in_a = match round {
            0 => in_a,
            _ => in_b + round as f64 * in_c,
        };
        let found = [a[at] != in_a, b[at] != in_b, c[at] != in_c];
        wrong += found.map(u64::from).iter().sum::<u64>();
    }
    let scalar = (round + 1) as f64;
    for ((a, b), c) in a.iter_mut().zip(&*b).zip(&*c) {
        *a = b + scalar * c;
    }
    wrong
}
