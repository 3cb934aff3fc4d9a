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

use std::{
    collections::VecDeque,
    fmt,
    ops::Range,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use farpage_fabric::{
    Busy, Channel, Completion, Endpoint, ExtentId, Op, SessionOptions, Verb,
    areas::{Areas, Board, OfferError, Presence},
    patterns::{Landing, RingPlace, RingReceiver, RingSender, SendError},
    regmem::{RegBuf, RegPool, RegPoolOptions},
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
/// Where a board has the number of its version, and the rank of who is at fault, plus one.
const VERSION_AT: usize = 0;
const CULPRIT_AT: usize = Board::NUMBER_BYTES;
const HEAD_BYTES: usize = CULPRIT_AT + Board::NUMBER_BYTES;
const PARAMETERS_AT: usize = 4096;
/// Floats of one operation.
const PIECE_FLOATS: usize = 64 << 10;
/// How long the others can hear of who is at fault.
const FAREWELL: Duration = Duration::from_secs(1);
/// Looks before a thread that waits sleeps, and how long it sleeps then.
const YIELDS: u32 = 64;
/// The same for looks over the fabric, each of which moves bytes.
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
        mut self,
        initial: &[f32],
        rule: Rule,
        steps: u64,
        deadline: Duration,
    ) -> Result<(), AggregateError> {
        let mut parameters = initial[self.part.clone()].to_vec();
        let mut optimizer = Optimizer::new(rule, self.learnt);
        let outcome = self.aggregate(&mut parameters, &mut optimizer, steps, deadline);
        let patience = match &outcome {
            Ok(()) => deadline,
            Err(
                AggregateError::Missing { missing: at, .. }
                | AggregateError::Gone { gone: at, .. }
                | AggregateError::Strange { from: at, .. },
            ) => {
                if let Party::Worker(rank) = at {
                    self.board.announce(CULPRIT_AT, *rank as u64 + 1);
                }
                FAREWELL
            }
            Err(_) => Duration::ZERO,
        };
        let until = Instant::now() + patience;
        let is_here = |rank| self.areas.presence(&area(rank)) == Presence::Here;
        while (0..self.workers.len()).any(is_here) && Instant::now() < until {
            thread::sleep(NAP_MAX);
        }
        outcome
    }

    fn aggregate(
        &mut self,
        parameters: &mut [f32],
        optimizer: &mut Optimizer,
        steps: u64,
        deadline: Duration,
    ) -> Result<(), AggregateError> {
        let mut sum = vec![0.0; parameters.len()];
        let share = 1.0 / self.workers.len() as f32;
        for step in 0..steps {
            for rank in 0..self.workers.len() {
                self.await_push(rank, step, deadline)?;
                self.workers[rank]
                    .1
                    .add_floats(GRADIENT_AT, &mut sum, rank == 0);
            }
            sum.iter_mut().for_each(|value| *value *= share);
            optimizer.step(parameters, &sum);
            let version = step + 1;
            self.board
                .write_floats(parameters_at(version, parameters.len()), parameters);
            self.board.announce(VERSION_AT, version);
        }
        Ok(())
    }

    /// Waits until a worker's gradient of this step is there.
    fn await_push(
        &mut self,
        rank: usize,
        step: u64,
        deadline: Duration,
    ) -> Result<(), AggregateError> {
        let (who, worker) = (self.who, Party::Worker(rank));
        let ring = &mut self.workers[rank].0;
        let strange = |detail| AggregateError::Strange {
            who,
            from: worker,
            step,
            detail,
        };
        let (began, mut message, mut looks) = (Instant::now(), Vec::new(), 0);
        loop {
            // Looked at first: what a worker sent before it went still counts.
            let presence = self.areas.presence(&area(rank));
            let received = ring.receive(&mut message);
            if received.map_err(|error| strange(error.to_string()))? {
                return match message == step.to_le_bytes() {
                    true => Ok(()),
                    false => Err(strange(format!("it announces {message:?}"))),
                };
            }
            if presence == Presence::Gone {
                return Err(AggregateError::Gone {
                    who,
                    gone: worker,
                    step,
                    reason: "its session has ended".to_owned(),
                });
            }
            if began.elapsed() >= deadline {
                return Err(AggregateError::Missing {
                    who,
                    missing: worker,
                    step,
                    deadline,
                });
            }
            rest(&mut looks, began, None);
        }
    }
}

/// A worker's way through aggregators.
pub struct Through {
    who: Party,
    lines: Vec<Line>,
    deadline: Duration,
}

/// Version and culprit, as a board shows them; `None` while they are being placed.
type Head = (Option<u64>, Option<u64>);

/// A worker's connection to one aggregator.
struct Line {
    part: Range<usize>,
    landing: ExtentId,
    board: ExtentId,
    sender: RingSender<Counted>,
    channel: Counted,
    pool: RegPool,
    moved: Arc<Moved>,
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
            let pool = RegPool::new([session.registrar()], RegPoolOptions::default());
            let moved = Arc::new(Moved::default());
            let counted = || {
                let channel = session.channel().map_err(|error| refused(&error))?;
                Ok::<_, AggregateError>(Counted {
                    channel,
                    moved: Arc::clone(&moved),
                })
            };
            Ok(Line {
                part: layout.part(number),
                landing,
                board,
                sender: RingSender::new(Box::new(counted()?), &pool, place(landing)),
                channel: counted()?,
                pool,
                moved,
            })
        });
        Ok(Self {
            who,
            lines: lines.collect::<Result<_, AggregateError>>()?,
            deadline,
        })
    }

    /// Bytes that this worker has moved to and from each aggregator, as its fabric was told.
    pub fn moved_bytes(&self) -> impl Iterator<Item = u64> {
        self.lines.iter().map(|line| line.moved.bytes())
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
        let version = step + 1;
        // 1. Push, and announce what has been placed.
        let mut ops = Vec::new();
        for (number, line) in self.lines.iter().enumerate() {
            ops.push(self.pieces(number, step, Verb::Write, line.landing, GRADIENT_AT)?);
        }
        for op in ops.iter_mut().flatten() {
            let floats = &gradient[op.tag as usize..][..op.len as usize / 4];
            let bytes = op.buf.as_mut().as_chunks_mut().0.iter_mut();
            for (bytes, float) in bytes.zip(floats) {
                *bytes = float.to_le_bytes();
            }
        }
        self.transfer(step, ops, |_, _| {})?;
        self.announce(step)?;
        // 2. Pull the version that follows, and see that it was whole.
        self.await_version(step, version)?;
        let mut ops = Vec::new();
        for (number, line) in self.lines.iter().enumerate() {
            let at = parameters_at(version, line.part.len());
            ops.push(self.pieces(number, step, Verb::Read, line.board, at)?);
        }
        self.transfer(step, ops, |_, done| {
            let count = done.buf.as_ref().len() / 4;
            let floats = &mut parameters[done.tag as usize..][..count];
            let bytes = done.buf.as_ref().as_chunks().0;
            for (float, bytes) in floats.iter_mut().zip(bytes) {
                *float = f32::from_le_bytes(*bytes);
            }
        })?;
        let all = vec![true; self.lines.len()];
        for (number, (seen, _)) in self.look(step, &all)?.into_iter().enumerate() {
            if seen != Some(version) {
                return Err(self.strange(
                    number,
                    step,
                    format!("version {seen:?} after {version} was read"),
                ));
            }
        }
        Ok(())
    }

    fn strange(&self, number: usize, step: u64, detail: String) -> AggregateError {
        AggregateError::Strange {
            who: self.who,
            from: Party::Aggregator(number),
            step,
            detail,
        }
    }

    /// Operations on all of a line's part, which lies at `at` of `extent`. Their tags are the
    /// numbers of their first floats.
    fn pieces(
        &self,
        number: usize,
        step: u64,
        verb: Verb,
        extent: ExtentId,
        at: usize,
    ) -> Result<VecDeque<Op<RegBuf>>, AggregateError> {
        let line = &self.lines[number];
        let starts = line.part.clone().step_by(PIECE_FLOATS);
        let pieces = starts.map(|start| {
            let len = 4 * (line.part.end - start).min(PIECE_FLOATS);
            let buf = line.pool.acquire(len);
            Ok(Op {
                tag: start as u64,
                verb,
                extent,
                offset: (at + 4 * (start - line.part.start)) as u64,
                len: len as u32,
                buf: buf.map_err(|error| gone(self.who, number, step, &error))?,
            })
        });
        pieces.collect()
    }

    /// Does operations, those of each line in its own list.
    fn transfer(
        &mut self,
        step: u64,
        mut ops: Vec<VecDeque<Op<RegBuf>>>,
        mut take: impl FnMut(usize, &Completion<RegBuf>),
    ) -> Result<(), AggregateError> {
        let (mut began, mut looks, mut ended) = (Instant::now(), 0, Vec::new());
        loop {
            let (mut has_moved, mut due, mut slow) = (false, None, None);
            for (number, (line, ops)) in self.lines.iter_mut().zip(&mut ops).enumerate() {
                while let Some(op) = ops.pop_front() {
                    if let Err(Busy(op)) = line.channel.post(op) {
                        ops.push_front(op);
                        break;
                    }
                }
                has_moved |= line.channel.poll(&mut ended) > 0;
                for done in ended.drain(..) {
                    let result = done.result.as_ref();
                    result.map_err(|error| gone(self.who, number, step, error))?;
                    take(number, &done);
                }
                if line.channel.in_flight() + ops.len() > 0 {
                    slow = slow.or(Some(number));
                    due = [due, line.channel.wait().until].into_iter().flatten().min();
                }
            }
            let Some(number) = slow else {
                return Ok(());
            };
            if has_moved {
                (began, looks) = (Instant::now(), 0);
            }
            self.be_patient(number, step, began)?;
            rest(&mut looks, began, due);
        }
    }

    /// Announces the gradients of this step.
    fn announce(&mut self, step: u64) -> Result<(), AggregateError> {
        let (began, mut looks) = (Instant::now(), 0);
        for number in 0..self.lines.len() {
            loop {
                let sender = &mut self.lines[number].sender;
                let sent = sender.send(&step.to_le_bytes());
                match sent.and_then(|()| sender.flush()) {
                    Ok(()) => break,
                    // The aggregator has taken what came before. That it has is still on its way.
                    Err(SendError::Full) => {}
                    Err(error) => return Err(gone(self.who, number, step, &error)),
                }
                let due = sender.wait().until;
                self.be_patient(number, step, began)?;
                rest(&mut looks, began, due);
            }
        }
        for number in 0..self.lines.len() {
            loop {
                let sender = &mut self.lines[number].sender;
                let progress = sender.progress();
                progress.map_err(|error| gone(self.who, number, step, &error))?;
                if sender.is_idle() {
                    break;
                }
                let due = sender.wait().until;
                self.be_patient(number, step, began)?;
                rest(&mut looks, began, due);
            }
        }
        Ok(())
    }

    /// Waits until all aggregators show this version.
    fn await_version(&mut self, step: u64, version: u64) -> Result<(), AggregateError> {
        let (began, mut looks) = (Instant::now(), YIELDS - REMOTE_LOOKS);
        let mut awaited = vec![true; self.lines.len()];
        loop {
            let seen = self.look(step, &awaited)?;
            for (number, (seen, culprit)) in seen.into_iter().enumerate() {
                match (seen, culprit) {
                    _ if !awaited[number] => {}
                    (_, Some(rank @ 1..)) => {
                        return Err(AggregateError::Gone {
                            who: self.who,
                            gone: Party::Worker(rank as usize - 1),
                            step,
                            reason: format!("aggregator {number} gave up because of it"),
                        });
                    }
                    (Some(seen), _) if seen > version => {
                        let detail = format!("version {seen} where {version} belongs");
                        return Err(self.strange(number, step, detail));
                    }
                    (seen, _) => awaited[number] = seen != Some(version),
                }
            }
            let Some(number) = awaited.iter().position(|awaited| *awaited) else {
                return Ok(());
            };
            self.be_patient(number, step, began)?;
            rest(&mut looks, began, None);
        }
    }

    /// The numbers on the boards of those that are `asked`: version and culprit.
    fn look(&mut self, step: u64, asked: &[bool]) -> Result<Vec<Head>, AggregateError> {
        let mut ops = Vec::new();
        for (number, line) in self.lines.iter().enumerate() {
            ops.push(VecDeque::new());
            if asked[number] {
                let buf = line.pool.acquire(HEAD_BYTES);
                ops[number].push_back(Op {
                    tag: 0,
                    verb: Verb::Read,
                    extent: line.board,
                    offset: 0,
                    len: HEAD_BYTES as u32,
                    buf: buf.map_err(|error| gone(self.who, number, step, &error))?,
                });
            }
        }
        let mut seen = vec![(None, None); self.lines.len()];
        self.transfer(step, ops, |number, done| {
            let at = |at: usize| Board::announced(&done.buf.as_ref()[at..][..Board::NUMBER_BYTES]);
            seen[number] = (at(VERSION_AT), at(CULPRIT_AT));
        })?;
        Ok(seen)
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
}

fn gone(who: Party, number: usize, step: u64, error: &dyn fmt::Display) -> AggregateError {
    AggregateError::Gone {
        who,
        gone: Party::Aggregator(number),
        step,
        reason: error.to_string(),
    }
}

/// Lets others run for a little, or for a share of what was waited already: so looks at a board
/// cost few bytes and little time. What is `due` is not slept over.
fn rest(looks: &mut u32, began: Instant, due: Option<Instant>) {
    *looks += 1;
    let now = Instant::now();
    if *looks < YIELDS || due.is_some_and(|due| due <= now) {
        thread::yield_now();
        return;
    }
    let nap = (now.duration_since(began) / 16).clamp(NAP_MIN, NAP_MAX);
    thread::sleep(due.map_or(nap, |due| nap.min(due.duration_since(now))));
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
