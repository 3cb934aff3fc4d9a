//! [`Kept`]: the checkpoint of an aggregator, and its reader.
//!
//! The rule it keeps: one piece of the state is local at a time, here as in a step. Bytes that were
//! read count as a state only when their hash has been compared.

use std::io::{self, Read, Write};

use super::{party::Party, state::State};
use crate::{
    checkpoint::{Content, Head, Trail},
    job::Job,
    optimizer::Decay,
};

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
        let decay = self.state.decay();
        for number in [
            self.state.len() as u64,
            decay.0.to_bits(),
            decay.1.to_bits(),
        ] {
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

/// Reads the checkpoint of `step` into `state`.
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
    state.set_decay(decay);
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
