//! [`Turn`]: a writer's turn at a name, and the servers that hold the name meanwhile.
//!
//! The rule it keeps: the [register](farpage_fabric::register) decides. A binding that a majority of
//! the holders has not accepted may be the name's or not, until the next one is published. What a
//! binding says is left to [`publish`](super::publish) and [`open`](super::open).

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use farpage_fabric::{
    ExtentId, PublishError, ServerId, Session,
    host::Proposal,
    register::{self, Answer, Ballot, Epoch, Stamp},
};

use farpage_signals::Mutex;

use crate::Cluster;

/// Server that has been asked about a name, and its answer.
pub(crate) type Asked = (Arc<Session>, Answer);

/// A writer's turn at a name.
pub(crate) struct Turn {
    name: String,
    /// Holders that answer.
    holders: Vec<(ServerId, Arc<Session>)>,
    /// All holders: silent ones keep their say, so that the name outlives the death of another.
    ids: Vec<ServerId>,
    /// Servers that take part although they do not hold the name: their identities are in the
    /// binding.
    others: Vec<(ServerId, Arc<Session>)>,
    /// Holders of the binding before this turn.
    before: Vec<ServerId>,
    epoch: Epoch,
    /// Number of bindings that have been proposed.
    proposed: AtomicU64,
    /// Extents that each holder is known to keep for the name.
    kept: Mutex<HashMap<ServerId, Vec<ExtentId>>>,
    /// True once a binding of this turn is published: `before` has no say any more.
    has_published: AtomicBool,
}

/// Holder that has accepted a binding, and its answer.
pub(crate) struct Accepted {
    pub(crate) session: Arc<Session>,
    pub(crate) bound: farpage_fabric::host::Bound,
}

/// Failure to have a binding accepted by a majority.
pub(crate) struct Undecided {
    /// Number of holders that have accepted, and the number that is needed.
    pub(crate) have: usize,
    pub(crate) need: usize,
    /// First error of a holder.
    pub(crate) error: Option<PublishError>,
    /// True if the binding may be the name's nevertheless.
    pub(crate) is_unknown: bool,
}

impl Turn {
    /// Begins a turn at a name that this client has claimed at the servers `asked`. They hold the
    /// name from now on if a region with copies has it, or had; else the first one alone. `before`
    /// are the holders until now. Silent ones stay while there are fewer than `2m + 1` holders, of
    /// a region that is to outlive `m` deaths.
    ///
    /// # Errors
    /// A majority of the holders does not promise to follow this writer. Holds the first reason.
    pub(crate) fn begin(
        name: &str,
        asked: &[Asked],
        before: &[ServerId],
        copies: usize,
    ) -> Result<Self, Undecided> {
        let answers: Vec<Answer> = asked.iter().map(|(_, it)| it.clone()).collect();
        let all = asked.iter().map(|(session, it)| (it.0, session.clone()));
        let mut all: Vec<_> = all.collect();
        let is_shared = copies > 1 || before.len() > 1;
        let others = match is_shared {
            true => Vec::new(),
            false => all.split_off(1.min(all.len())),
        };
        let mut ids: Vec<ServerId> = all.iter().map(|(id, _)| *id).collect();
        let is_silent = |id: &&ServerId| !ids.contains(id);
        let silent: Vec<ServerId> = before.iter().filter(is_silent).copied().collect();
        let lacking = before.len().max(2 * copies - 1).saturating_sub(ids.len());
        if is_shared {
            ids.extend(silent.into_iter().take(lacking));
        }
        let turn = Self {
            name: name.to_owned(),
            holders: all,
            ids,
            others,
            before: before.to_vec(),
            epoch: register::next_epoch(&answers, RandomState::new().hash_one(name)),
            proposed: AtomicU64::new(0),
            kept: Mutex::default(),
            has_published: AtomicBool::new(false),
        };
        // A majority of one has no use for promises: the claim keeps others away.
        match is_shared {
            true => turn.promise(asked).map(|()| turn),
            false => Ok(turn),
        }
    }

    /// True if several servers hold the name, or have held it.
    pub(crate) fn is_shared(&self) -> bool {
        self.ids.len() > 1 || self.before.len() > 1
    }

    /// Returns the identity of the server of a session.
    pub(crate) fn id_of(&self, session: &Arc<Session>) -> Option<ServerId> {
        let mut all = self.holders.iter().chain(&self.others);
        let found = all.find(|(_, other)| Arc::ptr_eq(other, session));
        found.map(|(id, _)| *id)
    }

    /// True if a holder is known to keep these extents.
    pub(crate) fn keeps(&self, session: &Arc<Session>, extents: &[ExtentId]) -> bool {
        let kept = self.kept.lock();
        let its = self.id_of(session).and_then(|id| kept.get(&id));
        its.is_some_and(|its| its == extents)
    }

    /// Notes that a holder keeps these extents until it is told of others.
    pub(crate) fn note_kept(&self, session: &Arc<Session>, extents: &[ExtentId]) {
        if let Some(id) = self.id_of(session) {
            self.kept.lock().insert(id, extents.to_vec());
        }
    }

    /// Returns the number of holders that are needed.
    pub(crate) fn need(&self) -> usize {
        register::majority(self.ids.len())
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

    /// Returns the sessions at the holders.
    pub(crate) fn holders(&self) -> impl Iterator<Item = &Arc<Session>> {
        self.holders.iter().map(|(_, session)| session)
    }

    /// True if the holders that are `wanted` can publish a binding.
    pub(crate) fn is_enough(&self, wanted: impl Fn(&Arc<Session>) -> bool) -> bool {
        let wanted = self.holders.iter().filter(|(_, session)| wanted(session));
        let wanted: Vec<ServerId> = wanted.map(|(id, _)| *id).collect();
        register::is_published(&self.ballot(0, false), self.voters_before(), &wanted)
    }

    /// Has the holders that are `wanted` accept a binding. `proposal` makes the manifest and the
    /// extents of each. Returns the answers once the binding is published.
    ///
    /// # Errors
    /// [`Undecided`]
    pub(crate) fn propose(
        &self,
        removed: bool,
        wanted: impl Fn(&Arc<Session>) -> bool,
        part: impl Fn(&Arc<Session>) -> (Vec<u8>, Vec<ExtentId>),
    ) -> Result<Vec<Accepted>, Undecided> {
        let version = self.proposed.fetch_add(1, Ordering::Relaxed) + 1;
        let ballot = self.ballot(version, removed);
        let (mut accepted, mut ids) = (Vec::new(), Vec::new());
        let (mut first, mut may_have_happened) = (None, false);
        for (id, session) in &self.holders {
            if !wanted(session) {
                continue;
            }
            let (manifest, extents) = part(session);
            let proposal = Proposal {
                manifest,
                extents: &extents,
                ballot: Some(ballot.clone()),
                keeps: self.is_shared() && !removed,
            };
            match session.propose(&self.name, proposal) {
                Ok(bound) => {
                    ids.push(*id);
                    accepted.push(Accepted {
                        session: session.clone(),
                        bound,
                    });
                }
                Err(error) => {
                    may_have_happened |=
                        super::may_have_happened(&error) && !session.has_outlived_server();
                    first.get_or_insert(error);
                }
            }
        }
        if register::is_published(&ballot, self.voters_before(), &ids) {
            self.has_published.store(true, Ordering::Relaxed);
            return Ok(accepted);
        }
        Err(Undecided {
            have: ids.len(),
            need: register::majority(ballot.holders.len()),
            error: first,
            is_unknown: may_have_happened || !ids.is_empty(),
        })
    }

    /// Lets holders forget what only the version before has.
    pub(crate) fn settle(
        &self,
        accepted: &[Accepted],
        part: impl Fn(&Arc<Session>) -> (Vec<u8>, Vec<ExtentId>),
    ) -> Vec<(Arc<Session>, PublishError)> {
        let ballot = self.ballot(self.proposed.load(Ordering::Relaxed), false);
        let more = accepted.iter().filter(|it| it.bound.keeps_more);
        let failed = more.filter_map(|it| {
            let (manifest, extents) = part(&it.session);
            let proposal = Proposal {
                manifest,
                extents: &extents,
                ballot: Some(ballot.clone()),
                keeps: false,
            };
            let error = it.session.propose(&self.name, proposal).err()?;
            Some((it.session.clone(), error))
        });
        failed.collect()
    }

    /// Has a majority of the holders promise to follow this writer.
    fn promise(&self, asked: &[Asked]) -> Result<(), Undecided> {
        let mut first = None;
        let mut promised = Vec::new();
        for (session, (id, _)) in asked {
            match session.promise(&self.name, self.epoch) {
                Ok(()) => promised.push(*id),
                Err(error) => _ = first.get_or_insert(error),
            }
        }
        let ballot = self.ballot(0, false);
        match register::is_published(&ballot, &self.before, &promised) {
            true => Ok(()),
            false => Err(Undecided {
                have: promised.len(),
                need: register::majority(ballot.holders.len()),
                error: first,
                is_unknown: false,
            }),
        }
    }

    fn voters_before(&self) -> &[ServerId] {
        match self.has_published.load(Ordering::Relaxed) {
            true => &[],
            false => &self.before,
        }
    }

    fn ballot(&self, version: u64, removed: bool) -> Ballot {
        let epoch = self.epoch;
        Ballot {
            stamp: Stamp { epoch, version },
            holders: self.ids.clone(),
            removed,
        }
    }
}
