//! [`Through`]: a worker's push and pull.
//!
//! The rule it keeps: a worker copies neither its push nor its pull, and parameters that it takes
//! for a version have that version's number before and behind them.

use std::{
    fmt,
    ops::Range,
    thread,
    time::{Duration, Instant},
};

use farpage_fabric::{
    Op, SessionOptions, Verb,
    patterns::{self, SendError},
    regmem::{RegBuf, RegPool, RegPoolOptions},
};

use super::{
    error::AggregateError,
    layout::Layout,
    line::{Line, Parts, State},
    protocol::{
        FAREWELL, GRADIENT_AT, HEAD_BYTES, NAP_MAX, NAP_MIN, Party, SPIN, TOLD_AFTER, VERSION_AT,
        Word, area, board, parameters_at,
    },
};
use crate::station::{Address, Unreached, reach_each};

/// Number of floats of one operation.
const PIECE_FLOATS: usize = 256 << 10;

/// A worker's connections to aggregators, and its buffers.
pub struct Through {
    who: Party,
    lines: Vec<Line>,
    /// Lines that a round uses, by the number of its ring.
    rings: Vec<Range<usize>>,
    aggregators: usize,
    deadline: Duration,
    /// Pieces of both buffers, in the order of a ring's lines.
    cuts: Vec<Cut>,
    /// Party that this worker waits for, as the aggregators of other rings were told.
    told: Option<Party>,
    /// Number of pushes and pulls.
    serial_steps: u64,
    /// Memory registered with all adapters that the lines go through.
    pool: RegPool,
    bytes: usize,
    /// Buffer of gradients; `None` only during a step, and after one that failed.
    gradient: Option<RegBuf>,
    parameters: Option<RegBuf>,
}

/// Piece of a buffer that one operation moves.
#[derive(Clone, Copy, Debug)]
struct Cut {
    /// The first float's offset in the aggregator's part, in bytes.
    at: usize,
    bytes: usize,
}

impl Through {
    /// Reaches the aggregators that worker `rank` goes through. `addresses` has all of them by
    /// number. None is waited for longer than `deadline` and a quarter, now or later: by then it
    /// has said for whom it waits.
    pub fn join(
        layout: Layout,
        rank: usize,
        addresses: &[Address],
        options: &SessionOptions,
        deadline: Duration,
    ) -> Result<Self, AggregateError> {
        let who = Party::Worker(rank);
        let (mut cuts, mut plans, mut rings) = (Vec::new(), Vec::new(), Vec::new());
        // 1. Lines and cuts: those of each ring are cut like those of the first.
        for ring in 0..layout.plan.ring_count() {
            let (first, mut next) = (plans.len(), 0);
            for aggregator in layout.aggregators(ring, rank) {
                let part = layout.part(aggregator);
                let count = part.len().div_ceil(PIECE_FLOATS);
                if ring == 0 {
                    cuts.extend(part.clone().step_by(PIECE_FLOATS).map(|start| Cut {
                        at: 4 * (start - part.start),
                        bytes: 4 * (part.end - start).min(PIECE_FLOATS),
                    }));
                }
                plans.push((ring, aggregator, part.len(), next..next + count));
                next += count;
            }
            rings.push(first..plans.len());
        }
        // 2. Connections.
        let open = |at: usize| {
            let (ring, aggregator, part_floats, cuts) = plans[at].clone();
            let address = &addresses[aggregator];
            let names = [area(ring, rank), board(ring)];
            let line = Line::open(aggregator, names, address, options, deadline);
            let (mut line, registrar) = line.map_err(|reason| AggregateError::Refused {
                who,
                at: Party::Aggregator(aggregator),
                reason,
            })?;
            (line.part_floats, line.cuts) = (part_floats, cuts);
            Ok((line, registrar))
        };
        let aggregator = |number: usize| Party::Aggregator(plans[number].1);
        let tell = |reached: &mut [Option<(Line, _)>], missing: usize| {
            for (line, _) in reached.iter_mut().flatten() {
                line.say(Word::Waits(aggregator(missing)));
            }
        };
        let look_after = |(line, _): &mut (Line, _)| drop(line.sender.progress());
        let reached = reach_each(plans.len(), deadline / TOLD_AFTER, open, tell, look_after);
        let reached = reached.map_err(|unreached| {
            let Unreached {
                reached,
                number,
                error,
            } = unreached;
            let mut lines: Vec<_> = reached.into_iter().map(|(line, _)| line).collect();
            farewell(&mut lines, aggregator(number));
            error
        })?;
        let (lines, registrars): (Vec<_>, Vec<_>) = reached.into_iter().unzip();
        Ok(Self {
            who,
            lines,
            rings,
            aggregators: layout.aggregators,
            deadline,
            cuts,
            told: None,
            serial_steps: 0,
            pool: RegPool::new(registrars, RegPoolOptions::default()),
            bytes: 4 * layout.parameters,
            gradient: None,
            parameters: None,
        })
    }

    /// Returns the bytes moved to and from each aggregator, as this worker's fabric was told.
    pub fn moved_bytes(&self) -> Vec<u64> {
        let mut moved = vec![0; self.aggregators];
        for line in &self.lines {
            moved[line.number] += line.moved.bytes();
        }
        moved
    }

    /// Returns the bytes that were copied on this worker's side between its buffers and the
    /// aggregators', because they do not lie in registered memory: none over any fabric
    /// ([`Session::bounced_bytes`]).
    ///
    /// [`Session::bounced_bytes`]: farpage_fabric::Session::bounced_bytes
    pub fn bounced_bytes(&self) -> u64 {
        let lines = self.lines.iter();
        lines.map(|line| line.session.bounced_bytes()).sum()
    }

    /// Returns how often this worker had to wait for others before it could go on: for its push,
    /// and for its pull.
    pub fn serial_steps(&self) -> u64 {
        self.serial_steps
    }

    /// Tells the aggregators that this worker goes, for a reason that is not theirs.
    pub(crate) fn give_up(&mut self) {
        farewell(&mut self.lines, self.who);
    }

    /// Returns registered memory for the parameters and for the gradient, which
    /// [`step_in_place`](Self::step_in_place) moves from and to without a copy. Both hold their
    /// last contents, and zeros at first.
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

    /// Pushes `gradient`, and replaces `parameters` by what the optimizer makes of the mean of all
    /// workers' gradients. Steps are counted from 0.
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

    /// Runs a [`step`](Self::step) in the [`buffers`](Self::buffers). An error loses their
    /// contents.
    pub fn step_in_place(&mut self, step: u64) -> Result<(), AggregateError> {
        self.exchange(step, true)
    }

    /// Replaces the parameters in [`buffers`](Self::buffers) by their mean over the group of this
    /// round. The contents of the gradient are lost, and after an error both.
    pub fn mean_in_place(&mut self, round: u64) -> Result<(), AggregateError> {
        self.buffers()?;
        // Push and pull are on their way at the same time.
        std::mem::swap(&mut self.gradient, &mut self.parameters);
        self.exchange(round, true)
    }

    /// Replaces the parameters in [`buffers`](Self::buffers) by those that the aggregators go on
    /// with after `from` steps, one at least.
    pub fn resume(&mut self, from: u64) -> Result<(), AggregateError> {
        self.exchange(from - 1, false)
    }

    fn exchange(&mut self, step: u64, pushes: bool) -> Result<(), AggregateError> {
        self.buffers()?;
        let Some(ring) = step.checked_rem(self.rings.len() as u64) else {
            return Ok(());
        };
        let lines = self.rings[ring as usize].clone();
        let cut = |buffer: &mut Option<RegBuf>, cuts: &[Cut]| match cuts.is_empty() {
            true => Vec::new(),
            false => {
                let whole = buffer.take().expect("made above");
                let parts = whole.split(cuts.iter().map(|cut| cut.bytes));
                parts.into_iter().map(Some).collect()
            }
        };
        let mut parts = Parts {
            gradient: cut(&mut self.gradient, &self.cuts),
            parameters: cut(&mut self.parameters, &self.cuts),
            read: vec![false; self.cuts.len()],
        };
        self.told = None;
        if let Err(error) = self.complete(lines, step, pushes, &mut parts) {
            let culprit = error.culprit(self.who);
            farewell(&mut self.lines, culprit);
            return Err(error);
        }
        let whole = |parts: Vec<Option<RegBuf>>| {
            let parts = parts
                .into_iter()
                .map(|part| part.expect("it has come back"));
            Some(RegBuf::join(parts.collect()))
        };
        if !self.cuts.is_empty() {
            self.gradient = whole(parts.gradient);
            self.parameters = whole(parts.parameters);
        }
        Ok(())
    }

    /// Begins the step, with a push or with the pull alone, and waits until all `lines` have done
    /// their part of it.
    fn complete(
        &mut self,
        lines: Range<usize>,
        step: u64,
        pushes: bool,
        parts: &mut Parts,
    ) -> Result<(), AggregateError> {
        for number in lines.clone() {
            if pushes {
                self.push(number, step, parts)?;
            } else {
                let line = &mut self.lines[number];
                (line.state, line.looks, line.look_at) = (State::Looking, 0, Instant::now());
            }
        }
        let mut began = Instant::now();
        loop {
            let (mut slow, mut has_moved) = (None, false);
            for number in lines.clone() {
                has_moved |= self.advance(number, lines.len() == 1, step, parts)?;
                if self.lines[number].state != State::Done {
                    slow = slow.or(Some(number));
                }
            }
            let Some(number) = slow else {
                self.serial_steps += 2 * u64::from(pushes);
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

    /// Posts a line's gradient and announces it. Posts the pull along with it where a READ can wait
    /// for the version.
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
            let sent = sender.send(&Word::Placed(step).to_bytes());
            match sent.and_then(|()| sender.hand_over()) {
                Ok(()) => break,
                // The aggregator's news that it took earlier ones is still on its way.
                Err(SendError::Full) => {}
                Err(error) => return Err(gone(who, self.lines[number].at, step, &error)),
            }
            self.be_patient(number, step, began)?;
            thread::yield_now();
        }
        let line = &mut self.lines[number];
        (line.state, line.looks, line.look_at) = (State::Pushing, 0, began);
        line.head.awaited = None;
        if line.sender.waits_for_numbers() && line.sender.writes_in_order() {
            line.state = State::Pulling;
            self.pull(number, step, parts)?;
        }
        Ok(())
    }

    /// Posts READs of all parts that have not been read, and of the board's numbers behind them.
    fn pull(&mut self, number: usize, step: u64, parts: &mut Parts) -> Result<(), AggregateError> {
        let (version, turn) = (step + 1, step / self.rings.len() as u64);
        let line = &mut self.lines[number];
        for at in line.cuts.clone().filter(|at| !parts.read[*at]) {
            let Cut { at: offset, bytes } = self.cuts[at];
            let op = Op {
                tag: 2 * at as u64 + 1,
                verb: Verb::Read,
                extent: line.board,
                offset: (parameters_at(turn, line.part_floats) + offset) as u64,
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
            buf: buf.map_err(|error| gone(who, line.at, step, &error))?,
        });
        line.reading += 1;
        Ok(())
    }

    /// Lets a line's operations make progress, and posts what follows from those that have ended.
    /// True if parameters or a gradient have moved.
    fn advance(
        &mut self,
        number: usize,
        is_alone: bool,
        step: u64,
        parts: &mut Parts,
    ) -> Result<bool, AggregateError> {
        let (who, line) = (self.who, &mut self.lines[number]);
        if line.state == State::Done {
            return Ok(false);
        }
        let progress = match is_alone {
            // There is nothing else to do meanwhile.
            true => line.sender.progress_within(NAP_MAX),
            false => line.sender.progress(),
        };
        progress.map_err(|error| gone(who, line.at, step, &error))?;
        let mut has_moved = false;
        while let Some(done) = line.sender.ended() {
            let at = line.at;
            has_moved |= line.take(done, self.cuts.len(), parts).map_err(|error| {
                // The channel says why, the ring only that there is none.
                gone(who, at, step, &error)
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
                    let seen = self.lines[number].head.version;
                    let detail = format!("version {seen:?} after {version} was read");
                    return Err(self.strange(number, step, detail));
                }
                let line = &mut self.lines[number];
                if line.sender.is_idle() {
                    line.state = State::Done;
                }
            }
            State::Pulling => {
                // The wait was long enough to look whether a party has given up.
                self.is_shown(number, step)?;
                self.pull(number, step, parts)?;
            }
            State::Pushing | State::Looking | State::Done => {}
        }
        Ok(has_moved)
    }

    /// True if the board's numbers are those of the version that follows `step`.
    fn is_shown(&mut self, number: usize, step: u64) -> Result<bool, AggregateError> {
        let (version, Line { at, head, .. }) = (step + 1, &self.lines[number]);
        if let Some(culprit) = head.culprit.and_then(Party::of_code) {
            return Err(AggregateError::given_up(self.who, *at, culprit, step));
        }
        match head.version {
            Some(seen) if seen > version => {
                let detail = format!("version {seen} where {version} belongs");
                Err(self.strange(number, step, detail))
            }
            seen => Ok(seen == Some(version)),
        }
    }

    fn strange(&self, number: usize, step: u64, detail: String) -> AggregateError {
        AggregateError::Strange {
            who: self.who,
            from: self.lines[number].at,
            step,
            detail,
        }
    }

    /// Fails if the time for an aggregator is over. After a share of it, tells the aggregators that
    /// are done for whom this worker waits.
    fn be_patient(
        &mut self,
        number: usize,
        step: u64,
        began: Instant,
    ) -> Result<(), AggregateError> {
        let (waited, deadline) = (began.elapsed(), self.deadline + self.deadline / 4);
        let Line { at, head, .. } = &self.lines[number];
        let missing = head.awaited.and_then(Party::of_code).unwrap_or(*at);
        if waited >= deadline {
            return Err(AggregateError::Missing {
                who: self.who,
                missing,
                step,
                deadline,
            });
        }
        // The aggregator itself takes as long to say something.
        if waited >= self.deadline / TOLD_AFTER && self.told != Some(missing) {
            self.told = Some(missing);
            let idle = self
                .lines
                .iter_mut()
                .filter(|line| line.state == State::Done);
            idle.for_each(|line| line.say(Word::Waits(missing)));
        }
        for line in self
            .lines
            .iter_mut()
            .filter(|line| line.state == State::Done)
        {
            // An aggregator that cannot be told will notice by itself.
            let _ = line.sender.progress();
        }
        Ok(())
    }

    /// Sleeps until something may have come, or for a share of the time waited already. Where
    /// waking takes long, lets others run for a little before.
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

/// Tells aggregators that this worker gives up because of `culprit`, and makes sure for a while
/// that they hear of it.
fn farewell(lines: &mut [Line], culprit: Party) {
    for line in &mut *lines {
        line.say(Word::GivesUp(culprit));
    }
    let until = Instant::now() + FAREWELL;
    for line in lines {
        while line.sender.progress().is_ok() && !line.sender.is_idle() && Instant::now() < until {
            thread::sleep(NAP_MIN);
        }
    }
}

fn floats(buffer: &mut Option<RegBuf>, bytes: usize) -> &mut [f32] {
    let buffer = buffer.as_mut().expect("made before");
    bytemuck::cast_slice_mut(&mut buffer.as_mut()[..bytes])
}

fn gone(who: Party, gone: Party, step: u64, error: &dyn fmt::Display) -> AggregateError {
    AggregateError::Gone {
        who,
        gone,
        step,
        reason: error.to_string(),
    }
}
