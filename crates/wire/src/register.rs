//! [`Register`]: what a server remembers of the writers of a name that several servers hold, and the
//! decisions that follow from the registers of several servers.
//!
//! A name's binding is a replicated register: *holders* accept bindings, each with a [`Stamp`]. A
//! writer first has a majority of the holders promise to accept nothing older than its epoch, takes
//! the newest binding that any of them has accepted, and has a majority accept that binding again
//! under its own epoch. Only then does the writer change anything. This is Multi-Paxos with a stable
//! leader (Lamport, "Paxos Made Simple", 2001): opening is phase 1, a publication is phase 2.
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
    /// Number of the binding.
    pub stamp: Stamp,
    /// Holders of the name from this binding on.
    pub holders: Vec<ServerId>,
    /// True if the name is removed: the binding is a tombstone.
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
}

/// Refusal of a writer whose turn is over, since the holder has promised itself to a later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outdated {
    /// Epoch that the holder has promised.
    pub promised: Epoch,
}

impl Register {
    /// Promises to accept nothing older than `epoch`.
    ///
    /// # Errors
    /// The holder has promised itself to a later epoch.
    pub fn promise(&mut self, epoch: Epoch) -> Result<(), Outdated> {
        self.check(epoch)?;
        self.promised = epoch;
        Ok(())
    }

    /// Accepts a ballot. Accepting the same ballot again changes nothing.
    ///
    /// # Errors
    /// The holder has promised itself to a later epoch, or has accepted a later ballot.
    pub fn accept(&mut self, ballot: &Ballot) -> Result<(), Outdated> {
        self.check(ballot.stamp.epoch)?;
        match &self.accepted {
            Some(newer) if newer.stamp > ballot.stamp => Err(Outdated {
                promised: newer.stamp.epoch,
            }),
            _ => {
                self.promised = ballot.stamp.epoch;
                self.accepted = Some(ballot.clone());
                Ok(())
            }
        }
    }

    /// True if the accepted binding, or tombstone, is one that several servers hold: a server does
    /// not forget it alone.
    pub fn is_shared(&self) -> bool {
        let accepted = self.accepted.as_ref();
        accepted.is_some_and(|it| it.holders.len() > 1)
    }

    /// True if the accepted binding is a tombstone.
    pub fn is_removed(&self) -> bool {
        self.accepted.as_ref().is_some_and(|it| it.removed)
    }

    fn check(&self, epoch: Epoch) -> Result<(), Outdated> {
        match epoch < self.promised {
            true => Err(Outdated {
                promised: self.promised,
            }),
            false => Ok(()),
        }
    }

    fn stamp(&self) -> Option<Stamp> {
        Some(self.accepted.as_ref()?.stamp)
    }
}

/// Answer of a server about a name.
pub type Answer = (ServerId, Register);

/// Reason why a name cannot be used now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// Number of holders that have answered and agree.
    pub have: usize,
    /// Number of holders that are needed.
    pub need: usize,
    /// All holders.
    pub holders: Vec<ServerId>,
}

/// Returns the number of holders that make a majority.
pub fn majority(holders: usize) -> usize {
    holders / 2 + 1
}

/// Returns the number of holders that have one in common with every majority.
pub fn read_quorum(holders: usize) -> usize {
    holders + 1 - majority(holders)
}

/// True if `count` says so of a majority of `holders`.
pub fn is_majority(holders: &[ServerId], count: impl Fn(&ServerId) -> bool) -> bool {
    holders.iter().filter(|it| count(it)).count() >= majority(holders.len())
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
/// Fewer than a majority of the binding's holders have answered, so that a newer one may exist.
pub fn to_write(answers: &[Answer]) -> Result<Option<&Ballot>, Missing> {
    let Some(newest) = newest(answers) else {
        return Ok(None);
    };
    let knows = |holder: &ServerId| {
        let mut answers = answers.iter();
        answers.any(|(id, it)| id == holder && it.accepted.is_some())
    };
    match is_majority(&newest.holders, knows) {
        true => Ok(Some(newest)),
        false => Err(Missing {
            have: newest.holders.iter().filter(|it| knows(it)).count(),
            need: majority(newest.holders.len()),
            holders: newest.holders.clone(),
        }),
    }
}

/// Returns the binding that a reader reads: the newest that so many holders agree on that every
/// later writer will have seen it. `None` if no server knows of any.
///
/// # Errors
/// Too few holders agree on any binding: one is being published, or a writer has not finished.
pub fn to_read(answers: &[Answer]) -> Result<Option<&Ballot>, Missing> {
    let Some(newest) = newest(answers) else {
        return Ok(None);
    };
    let agree = |ballot: &Ballot| {
        let same =
            |(id, it): &&Answer| it.stamp() == Some(ballot.stamp) && ballot.holders.contains(id);
        answers.iter().filter(same).count()
    };
    let ballots = answers.iter().filter_map(|(_, it)| it.accepted.as_ref());
    let agreed = ballots.filter(|it| agree(it) >= read_quorum(it.holders.len()));
    match agreed.max_by_key(|it| it.stamp) {
        Some(ballot) => Ok(Some(ballot)),
        None => Err(Missing {
            have: agree(newest),
            need: read_quorum(newest.holders.len()),
            holders: newest.holders.clone(),
        }),
    }
}

/// True if a binding is published once the servers in `accepted` have accepted it: a majority of
/// its own holders, and one of those `before`, who tell others of the change.
pub fn is_published(ballot: &Ballot, before: &[ServerId], accepted: &[ServerId]) -> bool {
    let has = |id: &ServerId| accepted.contains(id);
    is_majority(&ballot.holders, has) && (before.is_empty() || is_majority(before, has))
}

/// Returns the newest binding that any holder has accepted: there may be a newer one at holders that
/// have not answered.
pub fn newest(answers: &[Answer]) -> Option<&Ballot> {
    let ballots = answers.iter().filter_map(|(_, it)| it.accepted.as_ref());
    ballots.max_by_key(|it| it.stamp)
}

/// True if slots that only a replaced version refers to may be written again. `said` has an entry
/// for each server on which they would be written: whether anybody reads an older version there,
/// as the server has said since it accepted a newer one. `None`: the server has not said.
pub fn is_unread(said: impl IntoIterator<Item = Option<bool>>) -> bool {
    said.into_iter().all(|is_read| is_read == Some(false))
}
