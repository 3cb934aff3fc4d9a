//! [`Turn`]: a writer's turn at a name, and the servers that hold the name meanwhile.
//!
//! The rule it keeps: the [register](farpage_fabric::register) decides. A binding that a majority
//! of the holders has not accepted may be the name's or not, until the next one is published. What
//! a binding says is left to [`named`](crate::named).

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use farpage_fabric::{
    ControlError, ExtentId, PublishError, ServerId, Session,
    host::{Bound, ClaimedName, Proposal},
    log::later,
    register::{self, Answer, Ballot, Epoch, Stamp},
};

use farpage_signals::Mutex;

use crate::Cluster;

/// Server at which a name was claimed, and its answer.
pub(crate) type Asked = (Arc<Session>, ClaimedName);

/// Manifest and extents of a binding at one server.
type Part = (Vec<u8>, Vec<ExtentId>);

/// A writer's turn at a name.
pub(crate) struct Turn {
    name: String,
    /// Holders that answer. A region without copies has one, the first server.
    holders: Vec<(ServerId, Arc<Session>)>,
    /// The register of a region with copies.
    shared: Option<Shared>,
}

/// A writer's part of the register of a name that several servers hold.
struct Shared {
    life: u64,
    /// All holders: silent ones keep their say.
    ids: Vec<ServerId>,
    epoch: Epoch,
    /// True once all holders know of the life.
    is_founded: AtomicBool,
    /// Number of bindings that have been proposed.
    proposed: AtomicU64,
    /// Extents that each holder is known to keep for the name.
    kept: Mutex<HashMap<ServerId, Vec<ExtentId>>>,
}

/// Holder that has accepted a binding, and its answer.
pub(crate) struct Accepted {
    pub(crate) session: Arc<Session>,
    pub(crate) bound: Bound,
}

/// Failure to have a binding accepted by the holders that are needed.
pub(crate) struct Undecided {
    /// Number of holders that have accepted, and the number that is needed.
    pub(crate) have: usize,
    pub(crate) need: usize,
    /// First error of a holder.
    pub(crate) error: Option<PublishError>,
    /// True if the binding may be the name's nevertheless.
    pub(crate) is_unknown: bool,
}

impl Undecided {
    /// Returns the first holder's answer, for people.
    pub(crate) fn reason(&self) -> String {
        let error = self.error.as_ref();
        error.map_or_else(
            || "the others do not answer".to_owned(),
            ToString::to_string,
        )
    }
}

impl Turn {
    /// Makes the turn of a region without copies, whose name `first` alone holds. The claim keeps
    /// other writers away.
    pub(crate) fn alone(name: &str, first: &Arc<Session>) -> Self {
        Self {
            name: name.to_owned(),
            holders: vec![(ServerId::default(), first.clone())],
            shared: None,
        }
    }

    /// Begins a turn at the name of a region with copies, which this client has claimed at the
    /// servers `asked`. `last` is the binding that the turn goes on from. Without one, a new life
    /// of the name begins, and all servers that were asked hold the name.
    ///
    /// # Errors
    /// A majority of the holders does not promise to follow this writer. Holds the first reason.
    pub(crate) fn begin(
        name: &str,
        asked: &[Asked],
        last: Option<&Ballot>,
    ) -> Result<Self, Undecided> {
        let answers = answers_of(asked);
        let draw = || RandomState::new().hash_one(name);
        let all = asked.iter().map(|(session, it)| (it.vote.0, session));
        let (life, ids) = match last {
            Some(last) => (last.life, last.holders.clone()),
            None => (draw(), all.clone().map(|(id, _)| id).collect()),
        };
        let its = all.filter(|(id, _)| ids.contains(id));
        let turn = Self {
            name: name.to_owned(),
            holders: its.map(|(id, session)| (id, session.clone())).collect(),
            shared: Some(Shared {
                life,
                ids,
                epoch: register::next_epoch(&answers, draw()),
                is_founded: AtomicBool::new(last.is_some()),
                proposed: AtomicU64::new(0),
                kept: Mutex::default(),
            }),
        };
        turn.promise().map(|()| turn)
    }

    /// True if several servers hold the name.
    pub(crate) fn is_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// Returns the identity of the server of a session, if it holds the name with others.
    pub(crate) fn id_of(&self, session: &Arc<Session>) -> Option<ServerId> {
        self.shared.as_ref()?;
        let mut all = self.holders.iter();
        let found = all.find(|(_, other)| Arc::ptr_eq(other, session));
        found.map(|(id, _)| *id)
    }

    /// True if a holder is known to keep these extents.
    pub(crate) fn keeps(&self, session: &Arc<Session>, extents: &[ExtentId]) -> bool {
        let id = self.shared.as_ref().zip(self.id_of(session));
        id.is_some_and(|(shared, id)| {
            let kept = shared.kept.lock();
            kept.get(&id).is_some_and(|its| its == extents)
        })
    }

    /// Notes that a holder keeps these extents until it is told of others.
    pub(crate) fn note_kept(&self, session: &Arc<Session>, extents: &[ExtentId]) {
        if let Some((shared, id)) = self.shared.as_ref().zip(self.id_of(session)) {
            shared.kept.lock().insert(id, extents.to_vec());
        }
    }

    /// Returns the number of holders that are needed.
    pub(crate) fn need(&self) -> usize {
        let ids = self.shared.as_ref().map_or(1, |it| it.ids.len());
        register::majority(ids)
    }

    /// Returns the holders' sessions, each with its place among `ports` of the cluster.
    pub(crate) fn numbered(&self, cluster: &Cluster, ports: &[usize]) -> Vec<(u8, Arc<Session>)> {
        let number = |session: &Arc<Session>| {
            let is_it = |port: &usize| Arc::ptr_eq(&cluster.sessions()[*port], session);
            let number = ports.iter().position(is_it)?;
            Some((number as u8, session.clone()))
        };
        self.holders().filter_map(number).collect()
    }

    /// Returns the sessions at the holders that answer.
    pub(crate) fn holders(&self) -> impl Iterator<Item = &Arc<Session>> {
        self.holders.iter().map(|(_, session)| session)
    }

    /// True if the holders that are `wanted` can publish a binding.
    pub(crate) fn is_enough(&self, wanted: impl Fn(&Arc<Session>) -> bool) -> bool {
        self.holders().filter(|session| wanted(session)).count() >= self.need()
    }

    /// True once all holders know of the name, so that a majority of them decides.
    pub(crate) fn is_founded(&self) -> bool {
        let shared = self.shared.as_ref();
        shared.is_none_or(|it| it.is_founded.load(Ordering::Relaxed))
    }

    /// Begins the life of the name: has all holders accept a tombstone, and keep the extents of
    /// their `part`. A holder that knows of nothing is no witness later on, so each has to answer.
    ///
    /// # Errors
    /// A holder does not answer. The name has no region.
    pub(crate) fn found(
        &self,
        part: impl Fn(&Arc<Session>) -> Part,
    ) -> Result<Vec<Accepted>, Undecided> {
        let ballot = self.ballot(0, true);
        let (accepted, error, _) = self.ask(ballot.as_ref(), true, |_| true, part);
        let need = self.shared.as_ref().map_or(1, |it| it.ids.len());
        if accepted.len() < need {
            return Err(Undecided {
                have: accepted.len(),
                need,
                error,
                is_unknown: false,
            });
        }
        if let Some(shared) = &self.shared {
            shared.is_founded.store(true, Ordering::Relaxed);
        }
        Ok(accepted)
    }

    /// Makes the holders that are `wanted` accept a binding. `part` makes the manifest and the
    /// extents of each. What holders keep of earlier bindings stays until it is
    /// [settled](Self::settle). Returns the answers once the binding is published.
    ///
    /// # Errors
    /// [`Undecided`]
    pub(crate) fn propose(
        &self,
        removed: bool,
        wanted: impl Fn(&Arc<Session>) -> bool,
        part: impl Fn(&Arc<Session>) -> Part,
    ) -> Result<Vec<Accepted>, Undecided> {
        let shared = self.shared.as_ref();
        let version = shared.map_or(0, |it| it.proposed.fetch_add(1, Ordering::Relaxed) + 1);
        let ballot = self.ballot(version, removed);
        let keeps = ballot.is_some();
        let (accepted, error, is_unknown) = self.ask(ballot.as_ref(), keeps, wanted, part);
        let (have, need) = (accepted.len(), self.need());
        match have >= need {
            true => Ok(accepted),
            false => Err(Undecided {
                have,
                need,
                error,
                is_unknown: is_unknown || have > 0,
            }),
        }
    }

    /// Tells holders that the binding that they have accepted last is published. They forget what
    /// only earlier ones have. Failures are logged: the memory stays until the next flush, and
    /// readers need a majority that agrees until then.
    pub(crate) fn settle(
        &self,
        removed: bool,
        accepted: &[Accepted],
        part: impl Fn(&Arc<Session>) -> Part,
    ) {
        let Some(shared) = &self.shared else {
            return;
        };
        let ballot = self.ballot(shared.proposed.load(Ordering::Relaxed), removed);
        for session in accepted.iter().map(|it| &it.session) {
            let (manifest, extents) = part(session);
            let proposal = Proposal {
                manifest,
                extents: &extents,
                ballot: ballot.clone(),
                keeps: false,
            };
            if let Err(error) = session.propose(&self.name, proposal) {
                let (endpoint, name) = (session.endpoint().clone(), self.name.clone());
                later(move || {
                    tracing::warn!(%endpoint, name, %error, "memory of the version before stays until the next flush");
                });
            }
        }
    }

    /// Buries a name whose last binding is a tombstone, or is to be one: once a majority has
    /// accepted the tombstone, holders free the region's memory; once all have, they forget the
    /// name. Returns true then.
    ///
    /// # Errors
    /// Too few holders answer. The region may be there or not.
    pub(crate) fn bury(&self) -> Result<bool, Undecided> {
        let nothing = |_: &Arc<Session>| (Vec::new(), Vec::new());
        let accepted = self.propose(true, |_| true, nothing)?;
        self.settle(true, &accepted, nothing);
        let all = self.shared.as_ref().map_or(1, |it| it.ids.len());
        if accepted.len() < all {
            return Ok(false);
        }
        let mut is_forgotten = true;
        for session in accepted.iter().map(|it| &it.session) {
            if let Err(error) = session.remove(&self.name) {
                is_forgotten = false;
                let (endpoint, name) = (session.endpoint().clone(), self.name.clone());
                later(move || {
                    tracing::warn!(%endpoint, name, %error, "the tombstone of a name stays");
                });
            }
        }
        Ok(is_forgotten)
    }

    /// Sends a binding to the holders that are `wanted`. Returns the answers, the first error, and
    /// true if a holder that has not answered may have accepted.
    fn ask(
        &self,
        ballot: Option<&Ballot>,
        keeps: bool,
        wanted: impl Fn(&Arc<Session>) -> bool,
        part: impl Fn(&Arc<Session>) -> Part,
    ) -> (Vec<Accepted>, Option<PublishError>, bool) {
        let (mut accepted, mut first, mut is_unknown) = (Vec::new(), None, false);
        for session in self.holders().filter(|session| wanted(session)) {
            let (manifest, extents) = part(session);
            let proposal = Proposal {
                manifest,
                extents: &extents,
                ballot: ballot.cloned(),
                keeps,
            };
            match session.propose(&self.name, proposal) {
                Ok(bound) => accepted.push(Accepted {
                    session: session.clone(),
                    bound,
                }),
                Err(error) => {
                    is_unknown |= match ballot {
                        // Also after a refusal: it may be on the disk, and be found by the next
                        // start.
                        Some(_) => !matches!(error, PublishError::NotAsked(_)),
                        None => may_have_happened(&error) && !session.has_outlived_server(),
                    };
                    first.get_or_insert(error);
                }
            }
        }
        (accepted, first, is_unknown)
    }

    /// Makes a majority of the holders promise to follow this writer.
    fn promise(&self) -> Result<(), Undecided> {
        let Some(shared) = &self.shared else {
            return Ok(());
        };
        let (mut have, mut error) = (0, None);
        for session in self.holders() {
            match session.promise(&self.name, shared.epoch) {
                Ok(()) => have += 1,
                Err(reason) => _ = error.get_or_insert(reason),
            }
        }
        let need = self.need();
        match have >= need {
            true => Ok(()),
            false => Err(Undecided {
                have,
                need,
                error,
                is_unknown: false,
            }),
        }
    }

    fn ballot(&self, version: u64, removed: bool) -> Option<Ballot> {
        let shared = self.shared.as_ref()?;
        let epoch = shared.epoch;
        Some(Ballot {
            life: shared.life,
            stamp: Stamp { epoch, version },
            holders: shared.ids.clone(),
            removed,
        })
    }
}

/// Returns what servers remember of a name's writers.
pub(crate) fn answers_of(asked: &[Asked]) -> Vec<Answer> {
    asked.iter().map(|(_, it)| it.vote.clone()).collect()
}

/// True if the name may be bound despite the error. A request whose connection broke is sent again
/// on the next connection, where proving the user's key may fail.
pub(crate) fn may_have_happened(error: &PublishError) -> bool {
    matches!(
        error,
        PublishError::Control(ControlError::Disconnected { .. } | ControlError::Key { .. })
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_answer_says_that_nothing_was_published() {
        let (endpoint, name) = ("tcp://a:1".to_owned(), "x".to_owned());
        let (attempt, reason) = ("publish".to_owned(), "because".to_owned());
        let said = |source: PublishError| may_have_happened(&source);
        let refused = ControlError::Refused {
            endpoint: endpoint.clone(),
            attempt: attempt.clone(),
            reason: reason.clone(),
        };
        let disconnected = ControlError::Disconnected {
            endpoint: endpoint.clone(),
            attempt: attempt.clone(),
            reason: reason.clone(),
        };
        let key = ControlError::Key {
            endpoint: endpoint.clone(),
            attempt,
            reason,
        };
        assert!(!said(PublishError::InUse { endpoint, name }));
        assert!(!said(refused.into()));
        assert!(!said(PublishError::NotAsked(disconnected.clone())));
        assert!(said(disconnected.into()));
        assert!(said(key.into()));
    }
}
