//! [`Aggregator`] and [`Through`]: a mean gradient and an optimizer's step by a parameter server.
//!
//! The rule it keeps: gradients are summed in the order of ranks, never in that of arrival, so a
//! seed decides every bit, and the number of aggregators none. Nobody is waited for beyond the
//! deadline, and who is missing is named.
//!
//! Each aggregator keeps an equal part of the parameters. A worker WRITEs its part of the gradient
//! into an area that it alone holds there (*push*), and announces it by a ring in the same area.
//! When all have come, the aggregator changes its parameters and shows them on a board. Workers
//! READ them there by themselves (*pull*). The board has two versions: the next one is written
//! beside the one that is read, and begun only when all workers have pushed again. A worker reads
//! the version's number once more after the parameters, so what is torn is never taken.
//!
//! Where a READ can wait for a number ([`Channel::waits_for_numbers`]), a worker posts push and
//! pull together, and a step is one exchange of messages. Elsewhere it looks for the number.
//!
//! [`Channel::waits_for_numbers`]: farpage_fabric::Channel::waits_for_numbers

use std::{
    fmt,
    ops::Range,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use farpage_fabric::{
    ChannelError, Completion, Endpoint, ExtentId, Op, SessionOptions, Verb,
    areas::{Areas, Board, OfferError, Presence},
    patterns::{self, Landing, RingPlace, RingReceiver, RingSender, SendError},
    regmem::{RegBuf, RegError, RegPool, RegPoolOptions},
    server::BindError,
};

use crate::{
    exchange::{Counted, Moved, chunk},
    optimizer::{Optimizer, Rule},
    station::{Address, Home, connect},
};

/// Where a worker's area has the gradient, behind a ring for announcements.
const GRADIENT_AT: usize = 128 + RING_BYTES;
const RING_BYTES: usize = 1024;
/// Where a board has the number of its version, and the rank of who is at fault, plus one. READs
/// wait for the number at the beginning.
const VERSION_AT: usize = 0;
const CULPRIT_AT: usize = Board::NUMBER_BYTES;
const HEAD_BYTES: usize = CULPRIT_AT + Board::NUMBER_BYTES;
const PARAMETERS_AT: usize = 4096;
/// The version of a board whose aggregator has given up: nobody waits for it.
const GIVEN_UP: u64 = u64::MAX;
/// Floats of one operation.
const PIECE_FLOATS: usize = 256 << 10;
/// How long the others can hear of who is at fault.
const FAREWELL: Duration = Duration::from_secs(1);
/// How long a thread that waits lets others run before it sleeps: what waking it takes.
const SPIN: Duration = Duration::from_micros(100);
/// Looks over the fabric before a thread sleeps between them: each moves bytes.
const REMOTE_LOOKS: u32 = 8;
const NAP_MIN: Duration = Duration::from_micros(20);
const NAP_MAX: Duration = Duration::from_millis(10);

/// A worker or an aggregator, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Party {
    /// A worker.
    Worker(usize),
    /// An aggregator.
    Aggregator(usize),
}

impl fmt::Display for Party {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Worker(rank) => write!(f, "worker {rank}"),
            Self::Aggregator(number) => write!(f, "aggregator {number}"),
        }
    }
}

/// Why a step through aggregators failed. The job cannot go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AggregateError {
    /// There is no memory to lend.
    #[error("{who} cannot take part: {source}")]
    Offer {
        /// Who has none.
        who: Party,
        /// Why not.
        r#source: OfferError,
    },
    /// An aggregator cannot serve.
    #[error("{who} cannot be reached by workers: {source}")]
    Serve {
        /// Which.
        who: Party,
        /// Why not.
        r#source: BindError,
    },
    /// An aggregator cannot be reached, or lends nothing.
    #[error("{who} gets no memory of {at}: {reason}; do all run the same job, each rank once?")]
    Refused {
        /// Who asked.
        who: Party,
        /// Who was asked.
        at: Party,
        /// What came of it.
        reason: String,
    },
    /// There is no registered memory for a gradient or for parameters.
    #[error("{who} has no memory to exchange from: {source}")]
    Buffers {
        /// Who has none.
        who: Party,
        /// Why not.
        r#source: RegError,
    },
    /// Somebody did not do its part in time.
    #[error(
        "{who} waited {deadline:?} in step {step} for {missing}: it is stuck, or too slow for this deadline"
    )]
    Missing {
        /// Who waited.
        who: Party,
        /// For whom.
        missing: Party,
        /// In which step.
        step: u64,
        /// For how long.
        deadline: Duration,
    },
    /// Somebody has gone.
    #[error("{who} cannot go on in step {step}: {gone} is gone: {reason}")]
    Gone {
        /// Who noticed.
        who: Party,
        /// Who is gone.
        gone: Party,
        /// In which step.
        step: u64,
        /// How it was noticed.
        reason: String,
    },
    /// Somebody sent or showed something else than it should have.
    #[error(
        "{who} got something from {from} in step {step} that does not belong there: {detail}; do all run the same job?"
    )]
    Strange {
        /// Who got it.
        who: Party,
        /// Whose it was.
        from: Party,
        /// In which step.
        step: u64,
        /// What is wrong.
        detail: String,
    },
}

/// What all aggregators of a job and all its workers know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// How many aggregators there are.
    pub aggregators: usize,
    /// How many workers.
    pub workers: usize,
    /// How many parameters.
    pub parameters: usize,
    /// How many of them, at the end, are running statistics.
    pub statistics: usize,
}

impl Layout {
    /// The parameters that an aggregator keeps: as many as the others, or one more.
    fn part(&self, number: usize) -> Range<usize> {
        chunk(self.parameters, self.aggregators, number)
    }

    /// How many of a part are no running statistics.
    fn learnt(&self, part: &Range<usize>) -> usize {
        (self.parameters - self.statistics).clamp(part.start, part.end) - part.start
    }
}

/// A parameter server for one part of the parameters.
pub struct Aggregator {
    who: Party,
    part: Range<usize>,
    /// How many of the part are no running statistics.
    learnt: usize,
    areas: Arc<Areas>,
    workers: Vec<(RingReceiver, Landing)>,
    board: Board,
    home: Home,
}

impl Aggregator {
    /// Begins to serve at `endpoint`; `sim:seed` is a simulated fabric. A worker that is silent for
    /// `lease` has gone.
    ///
    /// # Errors
    /// [`AggregateError::Offer`], [`AggregateError::Serve`]
    pub fn open(
        layout: Layout,
        number: usize,
        endpoint: &Endpoint,
        lease: Duration,
    ) -> Result<Self, AggregateError> {
        let who = Party::Aggregator(number);
        let offer = |source| AggregateError::Offer { who, source };
        let (areas, part) = (Areas::new(lease), layout.part(number));
        let bytes = 4 * part.len();
        let workers = (0..layout.workers).map(|rank| {
            let landing = areas.offer(&area(rank), (GRADIENT_AT + bytes) as u64)?;
            let ring = RingReceiver::new(landing.clone(), place(ExtentId(0)));
            Ok((ring, landing))
        });
        let workers = workers.collect::<Result<_, _>>().map_err(offer)?;
        let shown = (PARAMETERS_AT + 2 * bytes).max(PARAMETERS_AT + 8) as u64;
        let board = areas.show(BOARD, shown).map_err(offer)?;
        let home =
            Home::open(endpoint, &areas).map_err(|source| AggregateError::Serve { who, source })?;
        Ok(Self {
            who,
            learnt: layout.learnt(&part),
            part,
            areas,
            workers,
            board,
            home,
        })
    }

    /// Where workers reach it.
    pub fn address(&self) -> Address {
        self.home.address()
    }

    /// Changes the parameters, all of which begin as `initial`, in so many steps by `rule`. Waits
    /// for no worker longer than `deadline`, and returns when all have gone.
    ///
    /// # Errors
    /// [`AggregateError`]; workers are told whose fault it is.
    pub fn serve(
        self,
        initial: &[f32],
        rule: Rule,
        steps: u64,
        deadline: Duration,
    ) -> Result<(), AggregateError> {
        let Self {
            who,
            part,
            learnt,
            areas,
            workers: landings,
            board,
            home,
        } = self;
        let (parameters, workers) = (initial[part].to_vec(), landings.len());
        let turns = Arc::new(Turns::new(Summing {
            who,
            share: 1.0 / workers as f32,
            workers: landings,
            board: board.clone(),
            sum: vec![0.0; parameters.len()],
            parameters,
            optimizer: Optimizer::new(rule, learnt),
            steps,
            at: (0, 0),
            since: Instant::now(),
            failed: None,
            message: Vec::new(),
        }));
        let hears = home.hears_of_arrivals();
        if hears {
            let turns = Arc::clone(&turns);
            areas.on_arrival(Some(Arc::new(move || turns.turn())));
        }
        let outcome = turns.wait(&areas, hears, deadline);
        areas.on_arrival(None);
        let patience = match &outcome {
            Ok(()) => deadline,
            Err(
                AggregateError::Missing { missing: at, .. }
                | AggregateError::Gone { gone: at, .. }
                | AggregateError::Strange { from: at, .. },
            ) => {
                if let Party::Worker(rank) = at {
                    board.announce(CULPRIT_AT, *rank as u64 + 1);
                    board.announce(VERSION_AT, GIVEN_UP);
                }
                FAREWELL
            }
            Err(_) => Duration::ZERO,
        };
        let until = Instant::now() + patience;
        let is_here = |rank| areas.presence(&area(rank)) == Presence::Here;
        while (0..workers).any(is_here) && Instant::now() < until {
            thread::sleep(NAP_MAX);
        }
        outcome
    }
}

/// What an aggregator has done so far. It never waits.
struct Summing {
    who: Party,
    share: f32,
    workers: Vec<(RingReceiver, Landing)>,
    board: Board,
    parameters: Vec<f32>,
    sum: Vec<f32>,
    optimizer: Optimizer,
    steps: u64,
    /// The step, and the worker whose gradient comes next.
    at: (u64, usize),
    /// Since when it is waited for.
    since: Instant,
    failed: Option<AggregateError>,
    message: Vec<u8>,
}

impl Summing {
    fn is_over(&self) -> bool {
        self.failed.is_some() || self.at.0 == self.steps
    }

    /// Adds the gradients that have come, and does the steps that are complete.
    fn advance(&mut self) {
        while !self.is_over() {
            let ((step, rank), who) = (self.at, self.who);
            let (ring, landing) = &mut self.workers[rank];
            let strange = |detail| AggregateError::Strange {
                who,
                from: Party::Worker(rank),
                step,
                detail,
            };
            match ring.receive(&mut self.message) {
                Ok(false) => return,
                Ok(true) if self.message == step.to_le_bytes() => {}
                Ok(true) => {
                    let detail = format!("it announces {:?}", self.message);
                    self.failed = Some(strange(detail));
                    return;
                }
                Err(error) => {
                    self.failed = Some(strange(error.to_string()));
                    return;
                }
            }
            landing.add_floats(GRADIENT_AT, &mut self.sum, rank == 0);
            self.at = (step, rank + 1);
            if rank + 1 == self.workers.len() {
                self.finish(step + 1);
                self.at = (step + 1, 0);
            }
            self.since = Instant::now();
        }
    }

    /// Lets the optimizer do its step, and shows what it makes.
    fn finish(&mut self, version: u64) {
        let share = self.share;
        self.sum.iter_mut().for_each(|value| *value *= share);
        self.optimizer.step(&mut self.parameters, &self.sum);
        let at = parameters_at(version, self.parameters.len());
        self.board.write_floats(at, &self.parameters);
        self.board.announce(VERSION_AT, version);
    }
}

/// An aggregator's work, done by whoever finds some: the thread that serves, or one that has placed
/// a gradient.
struct Turns {
    summing: Mutex<Summing>,
    /// How often somebody came to look. Who comes while another is at it leaves it to that one.
    /// Sequentially consistent, as is the lock with respect to it: either the one who comes gets
    /// the lock, or the one who has it sees the number after it has let go.
    calls: AtomicU64,
    is_over: Mutex<bool>,
    over: Condvar,
}

impl Turns {
    fn new(summing: Summing) -> Self {
        Self {
            summing: Mutex::new(summing),
            calls: AtomicU64::new(0),
            is_over: Mutex::new(false),
            over: Condvar::new(),
        }
    }

    /// Does what there is to do, unless somebody else is at it and will.
    fn turn(&self) {
        self.calls.fetch_add(1, Ordering::SeqCst);
        while let Ok(mut summing) = self.summing.try_lock() {
            let seen = self.calls.load(Ordering::SeqCst);
            summing.advance();
            let is_over = summing.is_over();
            drop(summing);
            if is_over {
                *self.is_over.lock().unwrap_or_else(PoisonError::into_inner) = true;
                self.over.notify_all();
            }
            if self.calls.load(Ordering::SeqCst) == seen {
                return;
            }
        }
    }

    /// Looks at the work, or changes it, and does afterwards what others have left to whoever held
    /// it.
    fn with<T>(&self, look: impl FnOnce(&mut Summing) -> T) -> T {
        let mut summing = self.summing.lock().expect("no gradient makes it panic");
        let seen = look(&mut summing);
        drop(summing);
        self.turn();
        seen
    }

    /// Waits until all steps are done or somebody is missing. `hears`: whether those who place
    /// gradients take turns, so that there is little to look for here.
    fn wait(&self, areas: &Areas, hears: bool, deadline: Duration) -> Result<(), AggregateError> {
        let (mut began, mut before) = (Instant::now(), (0, 0));
        loop {
            let waited = began.elapsed();
            if !hears && waited < SPIN {
                self.turn();
                thread::yield_now();
            } else {
                self.look_for_workers(areas, deadline);
                let nap = match hears {
                    true => NAP_MAX,
                    false => (waited / 16).clamp(NAP_MIN, NAP_MAX),
                };
                self.nap(nap);
            }
            let (at, is_over) = self.with(|summing| (summing.at, summing.is_over()));
            if is_over {
                return self.with(|summing| summing.failed.take().map_or(Ok(()), Err));
            }
            if at != before {
                (began, before) = (Instant::now(), at);
            }
        }
    }

    /// Sleeps for so long, or until it is over.
    fn nap(&self, nap: Duration) {
        let is_over = self.is_over.lock().unwrap_or_else(PoisonError::into_inner);
        if !*is_over {
            drop(self.over.wait_timeout(is_over, nap));
        }
    }

    /// Fails if the worker whose gradient comes next is gone, or has not come in time.
    fn look_for_workers(&self, areas: &Areas, deadline: Duration) {
        let (who, at) = self.with(|summing| (summing.who, summing.at));
        let presence = areas.presence(&area(at.1));
        // What a worker sent before it went still counts.
        self.turn();
        self.with(|summing| {
            if summing.at != at || summing.is_over() {
                return;
            }
            let (step, worker) = (at.0, Party::Worker(at.1));
            if presence == Presence::Gone {
                summing.failed = Some(AggregateError::Gone {
                    who,
                    gone: worker,
                    step,
                    reason: "its session has ended".to_owned(),
                });
            } else if summing.since.elapsed() >= deadline {
                summing.failed = Some(AggregateError::Missing {
                    who,
                    missing: worker,
                    step,
                    deadline,
                });
            }
        });
    }
}

/// A worker's way through aggregators.
pub struct Through {
    who: Party,
    lines: Vec<Line>,
    deadline: Duration,
    /// How both buffers are cut, in the order of lines.
    cuts: Vec<Cut>,
    /// Registered with all adapters that they go through.
    pool: RegPool,
    bytes: usize,
    /// `None` only during a step, and after one that failed.
    gradient: Option<RegBuf>,
    parameters: Option<RegBuf>,
}

/// What one operation moves.
#[derive(Clone, Copy, Debug)]
struct Cut {
    /// The first float's offset in the aggregator's part, in bytes.
    at: usize,
    bytes: usize,
}

/// Version and culprit, as a board shows them; `None` while they are being placed.
type Head = (Option<u64>, Option<u64>);

/// A worker's connection to one aggregator.
struct Line {
    part_floats: usize,
    /// The numbers of its cuts.
    cuts: Range<usize>,
    landing: ExtentId,
    board: ExtentId,
    sender: RingSender<Counted>,
    pool: RegPool,
    moved: Arc<Moved>,
    state: State,
    /// READs that have not ended.
    reading: usize,
    /// The board's numbers, as the last READ found them.
    head: Head,
    looks: u32,
    /// When the next look is due.
    look_at: Instant,
}

/// How far a line is in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The gradient is on its way.
    Pushing,
    /// The version is looked for.
    Looking,
    /// The parameters are on their way.
    Pulling,
    Done,
}

/// The buffers of a step, in parts: what has come back, or has not been posted.
struct Parts {
    gradient: Vec<Option<RegBuf>>,
    parameters: Vec<Option<RegBuf>>,
    /// Whether the parameters of a part have been read.
    read: Vec<bool>,
}

impl Through {
    /// Reaches the aggregators, whose addresses are those of all of them, by number. None is waited
    /// for longer than `deadline` and a quarter, now or later: by then it has said for whom it
    /// waits.
    ///
    /// # Errors
    /// [`AggregateError`]
    pub fn join(
        layout: Layout,
        rank: usize,
        addresses: &[Address],
        options: &SessionOptions,
        deadline: Duration,
    ) -> Result<Self, AggregateError> {
        let who = Party::Worker(rank);
        let mut cuts = Vec::new();
        let mut registrars = Vec::new();
        let lines = addresses.iter().enumerate().map(|(number, address)| {
            let refused = |error: &dyn fmt::Display| AggregateError::Refused {
                who,
                at: Party::Aggregator(number),
                reason: error.to_string(),
            };
            let session = connect(address, options, Instant::now() + deadline);
            let session = session.map_err(|error| refused(&error))?;
            let open = |name: &str| {
                let opened = session.open(name).map_err(|error| refused(&error))?;
                let extent = opened.extents.first().map(|extent| extent.id);
                extent.ok_or_else(|| refused(&"it lends an area without memory"))
            };
            let (landing, board) = (open(&area(rank))?, open(BOARD)?);
            registrars.push(session.registrar());
            let pool = RegPool::new([session.registrar()], RegPoolOptions::default());
            let moved = Arc::new(Moved::default());
            let channel = Counted {
                channel: session.channel().map_err(|error| refused(&error))?,
                moved: Arc::clone(&moved),
            };
            let (part, first) = (layout.part(number), cuts.len());
            cuts.extend(part.clone().step_by(PIECE_FLOATS).map(|start| Cut {
                at: 4 * (start - part.start),
                bytes: 4 * (part.end - start).min(PIECE_FLOATS),
            }));
            Ok(Line {
                part_floats: part.len(),
                cuts: first..cuts.len(),
                landing,
                board,
                sender: RingSender::new(Box::new(channel), &pool, place(landing)),
                pool,
                moved,
                state: State::Done,
                reading: 0,
                head: (None, None),
                looks: 0,
                look_at: Instant::now(),
            })
        });
        let lines = lines.collect::<Result<_, AggregateError>>()?;
        Ok(Self {
            who,
            lines,
            deadline,
            cuts,
            pool: RegPool::new(registrars, RegPoolOptions::default()),
            bytes: 4 * layout.parameters,
            gradient: None,
            parameters: None,
        })
    }

    /// Bytes that this worker has moved to and from each aggregator, as its fabric was told.
    pub fn moved_bytes(&self) -> impl Iterator<Item = u64> {
        self.lines.iter().map(|line| line.moved.bytes())
    }

    /// Registered memory for the parameters and for the gradient, which
    /// [`step_in_place`](Self::step_in_place) moves from and to without a copy. Both hold what was
    /// left in them last, and zeros at first.
    ///
    /// # Errors
    /// [`AggregateError::Buffers`]
    pub fn buffers(&mut self) -> Result<(&mut [f32], &mut [f32]), AggregateError> {
        let who = self.who;
        for buffer in [&mut self.parameters, &mut self.gradient] {
            if buffer.is_none() {
                let mut fresh = self
                    .pool
                    .acquire(self.bytes.max(4))
                    .map_err(|source| AggregateError::Buffers { who, source })?;
                fresh.as_mut().fill(0);
                *buffer = Some(fresh);
            }
        }
        Ok((
            floats(&mut self.parameters, self.bytes),
            floats(&mut self.gradient, self.bytes),
        ))
    }

    /// Pushes `gradient`, and puts what the optimizer makes of the mean of all workers' in the
    /// place of `parameters`. Steps are counted from 0.
    ///
    /// # Errors
    /// [`AggregateError`]
    ///
    /// # Panics
    /// If a length is not that of the layout.
    pub fn step(
        &mut self,
        step: u64,
        gradient: &[f32],
        parameters: &mut [f32],
    ) -> Result<(), AggregateError> {
        self.buffers()?.1.copy_from_slice(gradient);
        self.step_in_place(step)?;
        parameters.copy_from_slice(self.buffers()?.0);
        Ok(())
    }

    /// As [`step`](Self::step), with the [`buffers`](Self::buffers). After an error what was in
    /// them is lost.
    ///
    /// # Errors
    /// [`AggregateError`]
    pub fn step_in_place(&mut self, step: u64) -> Result<(), AggregateError> {
        self.buffers()?;
        let cut = |buffer: &mut Option<RegBuf>, cuts: &[Cut]| {
            let whole = buffer.take().expect("made above");
            let parts = whole.split(cuts.iter().map(|cut| cut.bytes));
            parts.into_iter().map(Some).collect()
        };
        if self.cuts.is_empty() {
            return self.exchange(step, &mut Parts::none());
        }
        let mut parts = Parts {
            gradient: cut(&mut self.gradient, &self.cuts),
            parameters: cut(&mut self.parameters, &self.cuts),
            read: vec![false; self.cuts.len()],
        };
        self.exchange(step, &mut parts)?;
        let whole = |parts: Vec<Option<RegBuf>>| {
            let parts = parts
                .into_iter()
                .map(|part| part.expect("it has come back"));
            Some(RegBuf::join(parts.collect()))
        };
        self.gradient = whole(parts.gradient);
        self.parameters = whole(parts.parameters);
        Ok(())
    }

    fn exchange(&mut self, step: u64, parts: &mut Parts) -> Result<(), AggregateError> {
        for number in 0..self.lines.len() {
            self.push(number, step, parts)?;
        }
        let mut began = Instant::now();
        loop {
            let (mut slow, mut has_moved) = (None, false);
            for number in 0..self.lines.len() {
                has_moved |= self.advance(number, step, parts)?;
                if self.lines[number].state != State::Done {
                    slow = slow.or(Some(number));
                }
            }
            let Some(number) = slow else {
                return Ok(());
            };
            if has_moved {
                began = Instant::now();
                continue;
            }
            self.be_patient(number, step, began)?;
            self.rest(began);
        }
    }

    /// Posts a line's gradient and announces it. Where a READ can wait for the version, the pull
    /// travels with it.
    fn push(&mut self, number: usize, step: u64, parts: &mut Parts) -> Result<(), AggregateError> {
        let (who, began) = (self.who, Instant::now());
        let line = &mut self.lines[number];
        for at in line.cuts.clone() {
            let Cut { at: offset, bytes } = self.cuts[at];
            line.sender.operate(Op {
                tag: 2 * at as u64,
                verb: Verb::Write,
                extent: line.landing,
                offset: (GRADIENT_AT + offset) as u64,
                len: bytes as u32,
                buf: parts.gradient[at].take().expect("here between steps"),
            });
        }
        loop {
            let sender = &mut self.lines[number].sender;
            let sent = sender.send(&step.to_le_bytes());
            match sent.and_then(|()| sender.hand_over()) {
                Ok(()) => break,
                // The aggregator has taken what came before. That it has is still on its way.
                Err(SendError::Full) => {}
                Err(error) => return Err(gone(who, number, step, &error)),
            }
            self.be_patient(number, step, began)?;
            thread::yield_now();
        }
        let line = &mut self.lines[number];
        (line.state, line.looks, line.look_at) = (State::Pushing, 0, began);
        if line.sender.waits_for_numbers() && line.sender.writes_in_order() {
            line.state = State::Pulling;
            self.pull(number, step, parts)?;
        }
        Ok(())
    }

    /// Posts READs of all that has not been read, and of the board's numbers behind them.
    fn pull(&mut self, number: usize, step: u64, parts: &mut Parts) -> Result<(), AggregateError> {
        let (version, line) = (step + 1, &mut self.lines[number]);
        for at in line.cuts.clone().filter(|at| !parts.read[*at]) {
            let Cut { at: offset, bytes } = self.cuts[at];
            let op = Op {
                tag: 2 * at as u64 + 1,
                verb: Verb::Read,
                extent: line.board,
                offset: (parameters_at(version, line.part_floats) + offset) as u64,
                len: bytes as u32,
                buf: parts.parameters[at].take().expect("it has not been read"),
            };
            line.sender.operate_when(op, version);
            line.reading += 1;
        }
        self.look(number, step)
    }

    /// Posts a READ of the board's numbers.
    fn look(&mut self, number: usize, step: u64) -> Result<(), AggregateError> {
        let (who, line) = (self.who, &mut self.lines[number]);
        let buf = line.pool.acquire(HEAD_BYTES);
        line.sender.operate(Op {
            tag: 2 * self.cuts.len() as u64,
            verb: Verb::Read,
            extent: line.board,
            offset: VERSION_AT as u64,
            len: HEAD_BYTES as u32,
            buf: buf.map_err(|error| gone(who, number, step, &error))?,
        });
        line.reading += 1;
        Ok(())
    }

    /// Lets a line's operations make progress, and posts what follows from those that have ended.
    /// Whether parameters or a gradient have moved.
    fn advance(
        &mut self,
        number: usize,
        step: u64,
        parts: &mut Parts,
    ) -> Result<bool, AggregateError> {
        // Then there is nothing else to do meanwhile.
        let (who, is_alone) = (self.who, self.lines.len() == 1);
        let line = &mut self.lines[number];
        if line.state == State::Done {
            return Ok(false);
        }
        let progress = match is_alone {
            true => line.sender.progress_within(NAP_MAX),
            false => line.sender.progress(),
        };
        progress.map_err(|error| gone(who, number, step, &error))?;
        let mut has_moved = false;
        while let Some(done) = line.sender.ended() {
            has_moved |= line.take(done, self.cuts.len(), parts).map_err(|error| {
                // The channel says why, the ring only that there is none.
                gone(who, number, step, &error)
            })?;
        }
        if line.reading > 0 {
            return Ok(has_moved);
        }
        let (version, state, is_due) = (step + 1, line.state, Instant::now() >= line.look_at);
        match state {
            State::Pushing if line.sender.is_idle() => {
                line.state = State::Looking;
                self.look(number, step)?;
            }
            State::Looking if self.is_shown(number, step)? => {
                self.lines[number].state = State::Pulling;
                self.pull(number, step, parts)?;
            }
            State::Looking if is_due => self.look(number, step)?,
            State::Pulling if self.lines[number].cuts.clone().all(|at| parts.read[at]) => {
                if !self.is_shown(number, step)? {
                    let seen = self.lines[number].head.0;
                    let detail = format!("version {seen:?} after {version} was read");
                    return Err(self.strange(number, step, detail));
                }
                let line = &mut self.lines[number];
                if line.sender.is_idle() {
                    line.state = State::Done;
                }
            }
            State::Pulling => {
                // It has been waited for long enough to see whether somebody has given up.
                self.is_shown(number, step)?;
                self.pull(number, step, parts)?;
            }
            State::Pushing | State::Looking | State::Done => {}
        }
        Ok(has_moved)
    }

    /// Whether the board's numbers are those of the version that follows this step.
    fn is_shown(&mut self, number: usize, step: u64) -> Result<bool, AggregateError> {
        let version = step + 1;
        match self.lines[number].head {
            (_, Some(rank @ 1..)) => Err(AggregateError::Gone {
                who: self.who,
                gone: Party::Worker(rank as usize - 1),
                step,
                reason: format!("aggregator {number} gave up because of it"),
            }),
            (Some(seen), _) if seen > version => {
                let detail = format!("version {seen} where {version} belongs");
                Err(self.strange(number, step, detail))
            }
            (seen, _) => Ok(seen == Some(version)),
        }
    }

    fn strange(&self, number: usize, step: u64, detail: String) -> AggregateError {
        AggregateError::Strange {
            who: self.who,
            from: Party::Aggregator(number),
            step,
            detail,
        }
    }

    /// Whether there is time left for an aggregator.
    fn be_patient(&self, number: usize, step: u64, began: Instant) -> Result<(), AggregateError> {
        let deadline = self.deadline + self.deadline / 4;
        match began.elapsed() < deadline {
            true => Ok(()),
            false => Err(AggregateError::Missing {
                who: self.who,
                missing: Party::Aggregator(number),
                step,
                deadline,
            }),
        }
    }

    /// Sleeps until something may have come, or for a share of what was waited already. Where
    /// waking takes long, it lets others run for a little before.
    fn rest(&self, began: Instant) {
        let now = Instant::now();
        let waited = now.duration_since(began);
        let busy = self.lines.iter().filter(|line| line.state != State::Done);
        let naps = busy.clone().any(|line| line.sender.wait().fd.is_none());
        // Where the answer itself wakes a thread, looking for it first gains nothing, and costs
        // the rest of a time slice where others want the processor.
        let is_woken = busy.clone().all(|line| line.sender.waits_for_numbers());
        if waited < SPIN && (naps || !is_woken) {
            return thread::yield_now();
        }
        let nap = match naps {
            true => (waited / 16).clamp(NAP_MIN, NAP_MAX),
            false => NAP_MAX,
        };
        // The system has no reason to refuse; a thread that could not sleep looks more often.
        let waits = busy.map(|line| line.sender.wait());
        let _ = patterns::sleep(waits, Some(now + nap));
    }
}

impl Line {
    /// Takes what has ended. Whether it moved parameters or a gradient.
    fn take(
        &mut self,
        done: Completion<RegBuf>,
        cuts: usize,
        parts: &mut Parts,
    ) -> Result<bool, ChannelError> {
        let (at, is_read) = (done.tag as usize / 2, done.tag % 2 == 1);
        if at == cuts {
            self.reading -= 1;
            done.result?;
            let number = |at: usize| {
                let bytes = &done.buf.as_ref()[at..][..Board::NUMBER_BYTES];
                Board::announced(bytes)
            };
            self.head = (number(VERSION_AT), number(CULPRIT_AT));
            self.looks += 1;
            self.look_at = Instant::now();
            if self.looks > REMOTE_LOOKS {
                self.look_at += (NAP_MIN * (self.looks - REMOTE_LOOKS)).min(NAP_MAX);
            }
            return Ok(false);
        }
        if is_read {
            self.reading -= 1;
            parts.parameters[at] = Some(done.buf);
            return match done.result {
                Err(ChannelError::NotYet { .. }) => Ok(false),
                result => {
                    parts.read[at] = result.is_ok();
                    result.map(|()| true)
                }
            };
        }
        parts.gradient[at] = Some(done.buf);
        done.result.map(|()| true)
    }
}

impl Parts {
    fn none() -> Self {
        Self {
            gradient: Vec::new(),
            parameters: Vec::new(),
            read: Vec::new(),
        }
    }
}

/// The floats of a buffer.
fn floats(buffer: &mut Option<RegBuf>, bytes: usize) -> &mut [f32] {
    let buffer = buffer.as_mut().expect("made before");
    bytemuck::cast_slice_mut(&mut buffer.as_mut()[..bytes])
}

fn gone(who: Party, number: usize, step: u64, error: &dyn fmt::Display) -> AggregateError {
    AggregateError::Gone {
        who,
        gone: Party::Aggregator(number),
        step,
        reason: error.to_string(),
    }
}

const BOARD: &str = "parameters";

fn area(rank: usize) -> String {
    format!("worker-{rank}")
}

fn place(extent: ExtentId) -> RingPlace {
    RingPlace {
        extent,
        offset: 0,
        capacity: RING_BYTES,
    }
}

/// Where a board has a version's parameters, of which it has so many.
fn parameters_at(version: u64, count: usize) -> usize {
    PARAMETERS_AT + 4 * count * (version % 2) as usize
}
