//! [`Register`]: what a server remembers of the writers of a name that several servers hold, and the
//! decisions that follow from the registers of several servers.
//!
//! A name's binding is a replicated register: *holders* accept bindings, each with a [`Stamp`]. A
//! writer first has a majority of the holders promise to accept nothing older than its epoch, takes
//! the newest binding that any of them has accepted, and has a majority accept that binding again
//! under its own epoch. Only then does the writer change anything. This is Multi-Paxos with a
//! stable leader (Lamport, "Paxos Made Simple", 2001): opening is phase 1, a publication is phase
//! 2.
//!
//! The holders of a name never change while it lives. Its *life* begins with a tombstone that all
//! holders accept, and ends when all holders have accepted a tombstone and forget the name. So a
//! holder that knows of nothing is no witness: it has never belonged to the life, or has lost it.
//!
//! The rule it keeps: **a binding that a majority has accepted is seen by every later writer and
//! reader.** Everything here is a pure function. Messages and disks are left to others.

use serde::{Deserialize, Serialize};

use crate::ServerId;

/// The most holders of one name.
pub const MAX_HOLDERS: usize = 256;

/// Number of a writer's turn. Later turns have higher counters; the writer's own number tells two
/// turns of one counter apart.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Epoch {
    /// Count of the turns so far.
    pub counter: u64,
    /// Number that the writer has drawn by chance.
    pub writer: u64,
}

/// Number of a binding: the turn in which it was proposed, and its place in the turn.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Stamp {
    /// Turn of the writer that proposed the binding.
    pub epoch: Epoch,
    /// Count of the writer's bindings in this turn.
    pub version: u64,
}

/// Proposal of a binding.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Ballot {
    /// Number of the name's life, drawn by chance when the name is created.
    pub life: u64,
    /// Number of the binding.
    pub stamp: Stamp,
    /// Holders of the name, for all of its life.
    pub holders: Vec<ServerId>,
    /// True if the name has no region: before its first publication, or after its removal.
    pub removed: bool,
}

/// Memory of one holder. It lasts as long as the binding that the holder has accepted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Register {
    /// Highest epoch that the holder has promised: nothing older is accepted.
    pub promised: Epoch,
    /// Ballot of the accepted binding. `None`: the holder knows of no binding. That says nothing
    /// about the name, since a holder that has lost its memory knows of none either.
    pub accepted: Option<Ballot>,
    /// True if the writer has said that a majority has accepted the binding.
    pub is_chosen: bool,
}

/// Refusal of a ballot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotAccepted {
    /// The writer's turn is over: the holder has promised itself to a later one.
    Outdated,
    /// The holder has a binding of another life of the name.
    OtherLife,
}

impl Register {
    /// Promises to accept nothing older than `epoch`.
    ///
    /// # Errors
    /// The holder has promised itself to a later epoch.
    pub fn promise(&mut self, epoch: Epoch) -> Result<(), NotAccepted> {
        if epoch < self.promised {
            return Err(NotAccepted::Outdated);
        }
        self.promised = epoch;
        Ok(())
    }

    /// Accepts a ballot. Accepting the same ballot again changes nothing but `is_chosen`, which is
    /// true if a majority is known to have accepted the ballot.
    ///
    /// # Errors
    /// [`NotAccepted`]
    pub fn accept(&mut self, ballot: &Ballot, is_chosen: bool) -> Result<(), NotAccepted> {
        let epoch = ballot.stamp.epoch;
        match &self.accepted {
            _ if epoch < self.promised => Err(NotAccepted::Outdated),
            Some(other) if other.life != ballot.life => Err(NotAccepted::OtherLife),
            Some(newer) if newer.stamp > ballot.stamp => Err(NotAccepted::Outdated),
            _ => {
                self.promised = epoch;
                self.accepted = Some(ballot.clone());
                self.is_chosen = is_chosen;
                Ok(())
            }
        }
    }

    /// True if the server holds the name together with others: it does not forget the binding, or
    /// the tombstone, alone.
    pub fn is_shared(&self) -> bool {
        self.accepted.is_some()
    }

    /// True if the accepted binding is a tombstone.
    pub fn is_removed(&self) -> bool {
        self.accepted.as_ref().is_some_and(|it| it.removed)
    }
}

/// Answer of a server about a name.
pub type Answer = (ServerId, Register);

/// Reason why a name cannot be used now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unusable {
    /// Too few holders answer, or agree.
    Few {
        /// Number of holders that have answered, or agree.
        have: usize,
        /// Number of holders that are needed.
        need: usize,
    },
    /// Servers have regions of the name that were created apart from each other.
    Rivals,
}

/// Returns the number of holders that make a majority.
pub fn majority(holders: usize) -> usize {
    holders / 2 + 1
}

/// Returns the number of holders that have one in common with every majority.
pub fn read_quorum(holders: usize) -> usize {
    holders + 1 - majority(holders)
}

/// Returns the epoch of a new turn of `writer`, which has heard `answers`.
pub fn next_epoch(answers: &[Answer], writer: u64) -> Epoch {
    let counters = answers.iter().map(|(_, it)| it.promised.counter);
    Epoch {
        counter: counters.max().unwrap_or(0) + 1,
        writer,
    }
}

/// Returns the binding that a writer goes on from: the newest that any holder has accepted. `None`
/// if no server knows of any.
///
/// # Errors
/// [`Unusable`]: a newer binding may exist.
pub fn to_write(answers: &[Answer]) -> Result<Option<&Ballot>, Unusable> {
    let Some(newest) = newest(answers)? else {
        return Ok(None);
    };
    let need = majority(newest.holders.len());
    let have = count(newest, answers, |it| life_of(it) == Some(newest.life));
    // Each holder is there, and none has a region: some have forgotten the name since it was
    // removed, or have never heard of it.
    let is_gone = newest.removed && count(newest, answers, |_| true) == newest.holders.len();
    match have >= need || is_gone {
        true => Ok(Some(newest)),
        false => Err(Unusable::Few { have, need }),
    }
}

/// Returns the binding that a reader reads: one that a majority has accepted, while no newer one
/// had been when the reader began. `None` if no server knows of any.
///
/// # Errors
/// [`Unusable`]: a binding is being published, or its writer has not finished, or holders are
/// missing.
pub fn to_read(answers: &[Answer]) -> Result<Option<&Ballot>, Unusable> {
    let Some(newest) = newest(answers)? else {
        return Ok(None);
    };
    // 1. A majority agrees: it has no member that knows of a newer binding.
    let need = majority(newest.holders.len());
    let agree = |ballot: &Ballot| count(ballot, answers, |it| it.accepted.as_ref() == Some(ballot));
    let mut ballots = accepted(answers).filter(|it| it.life == newest.life);
    if let Some(agreed) = ballots.find(|it| agree(it) >= need) {
        return Ok(Some(agreed));
    }
    // 2. The newest is known to be that of a majority, and so many holders answer that one of them
    //    would have a newer one.
    let is_chosen = count(newest, answers, |it| {
        it.is_chosen && it.accepted.as_ref() == Some(newest)
    });
    let heard = count(newest, answers, |it| life_of(it) == Some(newest.life));
    match is_chosen > 0 && heard >= read_quorum(newest.holders.len()) {
        true => Ok(Some(newest)),
        false => Err(Unusable::Few {
            have: agree(newest),
            need,
        }),
    }
}

/// True if a binding is published once the servers in `accepted` have accepted it.
pub fn is_published(ballot: &Ballot, accepted: &[ServerId]) -> bool {
    let have = ballot.holders.iter().filter(|id| accepted.contains(id));
    have.count() >= majority(ballot.holders.len())
}

/// True if slots that only a replaced version refers to may be written again. `said` has an entry
/// for each server on which they would be written: whether anybody reads an older version there,
/// as the server has said since it accepted a newer one. `None`: the server has not said.
pub fn is_unread(said: impl IntoIterator<Item = Option<bool>>) -> bool {
    said.into_iter().all(|is_read| is_read == Some(false))
}

/// Returns the newest binding of the name's life: that of a region, or if there is none, that of
/// the last tombstone. What other lives have left behind has no say.
fn newest(answers: &[Answer]) -> Result<Option<&Ballot>, Unusable> {
    let mut regions = accepted(answers).filter(|it| !it.removed);
    let life = match regions.next().map(|it| it.life) {
        Some(life) if regions.any(|it| it.life != life) => return Err(Unusable::Rivals),
        Some(life) => Some(life),
        None => accepted(answers)
            .max_by_key(|it| it.stamp)
            .map(|it| it.life),
    };
    let of_life = accepted(answers).filter(|it| Some(it.life) == life);
    Ok(of_life.max_by_key(|it| it.stamp))
}

fn accepted(answers: &[Answer]) -> impl Iterator<Item = &Ballot> {
    answers.iter().filter_map(|(_, it)| it.accepted.as_ref())
}

fn life_of(register: &Register) -> Option<u64> {
    Some(register.accepted.as_ref()?.life)
}

/// Counts the holders of a ballot whose answer `is_it`.
fn count(ballot: &Ballot, answers: &[Answer], is_it: impl Fn(&Register) -> bool) -> usize {
    let its = |id: &&ServerId| answers.iter().any(|(other, it)| other == *id && is_it(it));
    ballot.holders.iter().filter(its).count()
}
