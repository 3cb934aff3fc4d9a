//! [`State`]: the parameters that an aggregator changes, its optimizer's state, and the checkpoint
//! of both.
//!
//! The rule it keeps: the place of the floats decides no bit. In a [`Runtime`] they may be larger
//! than its budget. Memory that has gone is an error: floats are pinned before they are touched.
//!
//! The floats lie in pieces, each with its parameters and behind them what the optimizer remembers
//! of them. So a step goes through memory once and in order, and asks for what comes next, and a
//! checkpoint is written and read with one piece local at a time.

use std::{
    io::{self, Read, Write},
    ops::Range,
};

use farpage::{
    Advice, Codec, CreateError, PageError, PinError, RegionOptions, RemoteArray, Runtime,
};

use super::protocol::Party;
use crate::{
    checkpoint::{Content, Head, Trail},
    job::Job,
    optimizer::{Decay, Rule},
};

farpage_fabric::debug_as_display!(StateError);

/// Number of parameters of a piece.
const PIECE_FLOATS: usize = 16 << 10;
/// Number of pieces that are asked for ahead of the one that is changed.
const AHEAD: usize = 8;

/// Parameters and what an optimizer remembers of them.
pub(super) struct State {
    rule: Rule,
    decay: Decay,
    parameters: usize,
    memory: Memory,
}

enum Memory {
    Local(Vec<f32>),
    Remote(RemoteArray<f32>),
}

impl Memory {
    /// Changes the floats of `range`, which stay in this process's memory meanwhile.
    fn with(
        &mut self,
        range: Range<usize>,
        change: impl FnOnce(&mut [f32]),
    ) -> Result<(), StateError> {
        match self {
            Self::Local(floats) => change(&mut floats[range]),
            Self::Remote(array) => {
                array.pin(range.clone())?;
                change(&mut array[range.clone()]);
                array.unpin(range);
            }
        }
        Ok(())
    }

    fn soon(&self, floats: Range<usize>) -> Result<(), StateError> {
        match self {
            Self::Local(_) => Ok(()),
            Self::Remote(array) => Ok(array.advise(floats, Advice::WillNeed)?),
        }
    }
}

/// The parameters of a piece, and the range of its floats in memory.
struct Piece {
    parameters: Range<usize>,
    floats: Range<usize>,
}

impl State {
    /// Makes the state of `initial` parameters. Uses this process's own memory without a `runtime`.
    pub(super) fn new(
        rule: Rule,
        initial: &[f32],
        runtime: Option<&Runtime>,
    ) -> Result<Self, StateError> {
        let floats = initial.len() * (1 + rule.remembers());
        let memory = match runtime {
            None => Memory::Local(vec![0.0; floats]),
            Some(runtime) => {
                // Whatever the runtime's own codec is: not one bit may change.
                let options = RegionOptions::new().codec(Codec::Raw);
                let array = runtime.array_with(floats, options);
                Memory::Remote(array.map_err(Box::new)?)
            }
        };
        let mut state = Self {
            rule,
            decay: Decay::default(),
            parameters: initial.len(),
            memory,
        };
        for number in 0..state.pieces() {
            let piece = state.piece(number);
            let initial = &initial[piece.parameters];
            let put = |floats: &mut [f32]| floats[..initial.len()].copy_from_slice(initial);
            state.memory.with(piece.floats, put)?;
        }
        Ok(state)
    }

    fn pieces(&self) -> usize {
        self.parameters.div_ceil(PIECE_FLOATS)
    }

    fn piece(&self, number: usize) -> Piece {
        let start = number * PIECE_FLOATS;
        let parameters = start..(start + PIECE_FLOATS).min(self.parameters);
        let each = 1 + self.rule.remembers();
        Piece {
            floats: each * parameters.start..each * parameters.end,
            parameters,
        }
    }

    /// Asks for the first pieces, before a step.
    pub(super) fn prepare(&self) -> Result<(), StateError> {
        (0..AHEAD.min(self.pieces()))
            .try_for_each(|number| self.memory.soon(self.piece(number).floats))
    }

    /// Counts the floats, including those that the optimizer remembers.
    pub(super) fn len(&self) -> usize {
        self.parameters * (1 + self.rule.remembers())
    }

    /// Passes all floats to `change`, piece by piece and in order.
    pub(super) fn each(
        &mut self,
        mut change: impl FnMut(&mut [f32]) -> io::Result<()>,
    ) -> io::Result<()> {
        for number in 0..self.pieces() {
            self.ahead(number).map_err(io::Error::other)?;
            let (floats, mut changed) = (self.piece(number).floats, Ok(()));
            let with = self.memory.with(floats, |floats| changed = change(floats));
            with.map_err(io::Error::other)?;
            changed?;
        }
        Ok(())
    }

    /// Passes each piece's parameters to `show`, with the number of the first.
    pub(super) fn show(&mut self, mut show: impl FnMut(usize, &[f32])) -> Result<(), StateError> {
        for number in 0..self.pieces() {
            let piece = self.piece(number);
            let count = piece.parameters.len();
            let show = |floats: &mut [f32]| show(piece.parameters.start, &floats[..count]);
            self.memory.with(piece.floats, show)?;
        }
        Ok(())
    }

    /// Asks for a piece that is needed after some others.
    fn ahead(&self, number: usize) -> Result<(), StateError> {
        match number + AHEAD < self.pieces() {
            true => self.memory.soon(self.piece(number + AHEAD).floats),
            false => Ok(()),
        }
    }

    /// Changes all parameters by one step, and passes them to `show` as [`show`](Self::show) does.
    pub(super) fn step(
        &mut self,
        gradient: &[f32],
        mut show: impl FnMut(usize, &[f32]),
    ) -> Result<(), StateError> {
        let change = self.decay.next(self.rule);
        for number in 0..self.pieces() {
            self.ahead(number)?;
            let Piece { parameters, floats } = self.piece(number);
            self.memory.with(floats, |floats| {
                let (values, remembered) = floats.split_at_mut(parameters.len());
                let (first, second) = remembered.split_at_mut(parameters.len());
                change.apply(values, first, second, &gradient[parameters.clone()]);
                show(parameters.start, values);
            })?;
        }
        Ok(())
    }
}

/// State of an aggregator after a step, as the bytes of a checkpoint.
pub(super) struct Kept<'a> {
    head: Head,
    state: &'a mut State,
}

impl<'a> Kept<'a> {
    pub(super) fn new(job: &Job, number: usize, step: u64, state: &'a mut State) -> Self {
        let head = Head::of(job, Party::Aggregator(number), step);
        Self { head, state }
    }
}

impl Content for Kept<'_> {
    fn bytes(&self) -> u64 {
        self.head.bytes() + 24 + 4 * self.state.len() as u64 + Trail::<()>::BYTES
    }

    fn write_to(&mut self, to: &mut dyn Write) -> io::Result<()> {
        let mut to = Trail::new(to);
        self.head.write_to(&mut to)?;
        let Decay(first, second) = self.state.decay;
        for number in [self.state.len() as u64, first.to_bits(), second.to_bits()] {
            to.write_all(&number.to_le_bytes())?;
        }
        let mut bytes = Vec::new();
        self.state.each(|floats| {
            bytes.clear();
            bytes.extend(floats.iter().flat_map(|value| value.to_le_bytes()));
            to.write_all(&bytes)
        })?;
        to.end()
    }
}

/// Reads the checkpoint of `step` into `state`. Its bytes count only when their hash has been
/// compared.
pub(super) fn read(
    job: &Job,
    number: usize,
    step: u64,
    state: &mut State,
    from: &mut dyn Read,
) -> io::Result<()> {
    let mut from = Trail::new(from);
    Head::of(job, Party::Aggregator(number), step).expect_in(&mut from)?;
    let mut word = || -> io::Result<u64> {
        let mut bytes = [0; 8];
        from.read_exact(&mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    };
    let (len, decay) = (
        word()?,
        Decay(f64::from_bits(word()?), f64::from_bits(word()?)),
    );
    if len != state.len() as u64 {
        let why = format!("it has {len} floats where {} belong", state.len());
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    state.decay = decay;
    let mut bytes = Vec::new();
    state.each(|floats| {
        bytes.resize(4 * floats.len(), 0);
        from.read_exact(&mut bytes)?;
        for (float, word) in floats.iter_mut().zip(bytes.as_chunks().0) {
            *float = f32::from_le_bytes(*word);
        }
        Ok(())
    })?;
    from.expect_end()
}

/// Lack or loss of memory for parameters and an optimizer's state.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// The memory could not be made.
    #[error(transparent)]
    Create(#[from] Box<CreateError>),
    /// The memory is out of reach.
    #[error(transparent)]
    Page(#[from] PageError),
    /// The memory is out of reach, or the budget has no room for a piece of each aggregator.
    #[error(transparent)]
    Pin(#[from] PinError),
}
