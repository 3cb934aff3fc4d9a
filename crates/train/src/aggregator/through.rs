//! [`Through`]: a worker's push and pull.
//!
//! The rule it keeps: a worker copies neither gradient nor parameters, and what it takes for a
//! version has that version's number before and behind it.

use std::{
    fmt,
    ops::Range,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use farpage_fabric::{
    ChannelError, Completion, ExtentId, Op, SessionOptions, Verb,
    areas::Board,
    patterns::{self, RingSender, SendError},
    regmem::{RegBuf, RegPool, RegPoolOptions},
};

use super::{
    AggregateError, BOARD, CULPRIT_AT, GRADIENT_AT, HEAD_BYTES, ITS_OWN_FAULT, Layout, NAP_MAX,
    NAP_MIN, Party, SPIN, VERSION_AT, area, parameters_at, place,
};
use crate::{
    exchange::{Counted, Moved},
    station::{Address, connect},
};

/// Floats of one operation.
const PIECE_FLOATS: usize = 256 << 10;
/// Looks over the fabric before a thread sleeps between them: each moves bytes.
const REMOTE_LOOKS: u32 = 8;

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
            (_, Some(ITS_OWN_FAULT)) => {
                let why = "it gave up, and says itself why";
                Err(gone(self.who, number, step, &why))
            }
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
