//! The names that a user's key has on the servers of a cluster: held, listed and removed.
//!
//! The rule it keeps: a region that lies on several servers is one name, and is held on all servers
//! of the cluster while it is open, so that no other client takes the name on any of them. The
//! region that a name is bound to is left to [`named`](crate::named).

use std::{collections::BTreeMap, sync::Arc};

use farpage_fabric::{
    ControlError, OpenNameError, Persistence, PublishError, Session,
    log::later,
    register::{self, Unusable},
};
use farpage_signals::Mutex;

use crate::{
    Cluster, CreateError, MixedServersError, Redundancy,
    turn::{Asked, Turn, Undecided, answers_of},
};

farpage_wire::debug_as_display!(NamesError);

/// Checks that all servers keep names on a disk, or none does. True if all do.
pub(crate) fn check_disks<'a>(
    sessions: impl IntoIterator<Item = &'a Arc<Session>>,
) -> Result<bool, MixedServersError> {
    let keeps = |session: &&Arc<Session>| session.persistence() != Persistence::Never;
    let (with, without): (Vec<_>, Vec<_>) = sessions.into_iter().partition(keeps);
    match (with.first(), without.first()) {
        (Some(with), Some(without)) => Err(MixedServersError {
            with: with.endpoint().to_string(),
            without: without.endpoint().to_string(),
        }),
        (with, _) => Ok(with.is_some()),
    }
}

/// Hold on the name of an open region, until the name is let go or the hold is dropped.
pub(crate) struct Claim {
    name: String,
    cluster: Arc<Cluster>,
    /// The sessions at which the name is held. `None` once the name was let go.
    held: Mutex<Option<Vec<Arc<Session>>>>,
}

impl Claim {
    /// Holds a name within this cluster; `None` if a region of that name is open. Servers cannot
    /// tell the regions of one client apart.
    pub(crate) fn here(cluster: &Arc<Cluster>, name: &str) -> Option<Self> {
        let is_new = cluster.names_open.lock().insert(name.to_owned());
        is_new.then(|| Self {
            name: name.to_owned(),
            cluster: cluster.clone(),
            held: Mutex::new(Some(Vec::new())),
        })
    }

    /// Holds the name of a new region on all servers, and begins the region's turn at it. What a
    /// removal has left behind goes.
    pub(crate) fn on_all(
        cluster: &Arc<Cluster>,
        name: &str,
        replace: bool,
        redundancy: Redundancy,
    ) -> Result<(Self, Turn), CreateError> {
        check_disks(&cluster.name_sessions()).map_err(|source| CreateError::Mixed {
            name: name.to_owned(),
            source,
        })?;
        let claim = Self::here(cluster, name).ok_or_else(|| CreateError::Held {
            name: name.to_owned(),
        })?;
        let turn = claim.begin(replace, redundancy.copies() > 1)?;
        Ok((claim, turn))
    }

    fn begin(&self, replace: bool, has_copies: bool) -> Result<Turn, CreateError> {
        let name = || self.name.clone();
        let holders = |have, need, reason| CreateError::Holders {
            name: name(),
            have,
            need,
            reason,
        };
        let too_few = |it: Undecided| holders(it.have, it.need, it.reason());
        let take = || {
            self.take(replace, |_| true).map_err(|error| match error {
                PublishError::InUse { endpoint, name } => CreateError::InUse { name, endpoint },
                error => CreateError::Claim(error),
            })
        };
        let last_of = |asked: &[Asked]| {
            let answers = answers_of(asked);
            let last = register::to_write(&answers).map(|it| it.cloned());
            last.map_err(|why| match why {
                Unusable::Few { have, need } => {
                    holders(have, need, "the others do not answer".to_owned())
                }
                Unusable::Rivals => CreateError::OtherServers { name: name() },
            })
        };
        let mut asked = take()?;
        let mut last = last_of(&asked)?;
        // 1. A removed name is used again once all of its holders have forgotten it.
        if let Some(tombstone) = last.take_if(|last| last.removed) {
            let turn = Turn::begin(&self.name, &asked, Some(&tombstone)).map_err(too_few)?;
            let is_forgotten = turn.bury().map_err(too_few)?;
            if !is_forgotten {
                let need = tombstone.holders.len();
                let have = turn.holders().count().min(need - 1);
                return Err(holders(
                    have,
                    need,
                    "the name was removed while the others were away".to_owned(),
                ));
            }
            asked = take()?;
            last = last_of(&asked)?;
        }
        // 2. A region that is replaced keeps its holders. Its last version stays until the first
        //    one of the new region is published.
        let other = |has_copies| CreateError::OtherRedundancy {
            name: name(),
            has_copies,
        };
        match &last {
            Some(_) if !has_copies => return Err(other(true)),
            Some(last) => {
                let is_holder = |(_, it): &Asked| last.holders.contains(&it.vote.0);
                if asked.len() != last.holders.len() || !asked.iter().all(is_holder) {
                    return Err(CreateError::OtherServers { name: name() });
                }
            }
            None if has_copies && asked.iter().any(|(_, it)| it.is_bound) => {
                return Err(other(false));
            }
            None => {}
        }
        match has_copies {
            true => Turn::begin(&self.name, &asked, last.as_ref()).map_err(too_few),
            false => Ok(Turn::alone(&self.name, &asked[0].0)),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Notes that `session` has opened the name, and so holds it.
    pub(crate) fn opened(&self, session: &Arc<Session>) {
        let mut held = self.held.lock();
        let held = held.get_or_insert_default();
        if !held.iter().any(|other| Arc::ptr_eq(other, session)) {
            held.push(session.clone());
        }
    }

    /// Holds the name on all servers that are `wanted` until [`let_go`](Self::let_go), also on
    /// those without pages of the region. Returns their answers.
    pub(crate) fn take(
        &self,
        replace: bool,
        wanted: impl Fn(&Arc<Session>) -> bool,
    ) -> Result<Vec<Asked>, PublishError> {
        let mut asked = Vec::new();
        for session in self.cluster.name_sessions() {
            if wanted(&session) {
                let answer = session.claim(&self.name, replace)?;
                self.opened(&session);
                asked.push((session, answer));
            }
        }
        Ok(asked)
    }

    /// Forgets a region whose name several servers hold: a tombstone takes its place, so that a
    /// holder that comes back with it later does not bring it back. Once all holders have the
    /// tombstone, it goes, too.
    fn bury(&self, wanted: impl Fn(&Arc<Session>) -> bool) -> Result<(), NamesError> {
        let name = || self.name.clone();
        let holders = |have, need, reason| NamesError::Holders {
            name: name(),
            have,
            need,
            reason,
        };
        let too_few = |it: Undecided| holders(it.have, it.need, it.reason());
        let asked = self.take(true, wanted).map_err(|error| match error {
            PublishError::InUse { endpoint, name } => NamesError::InUse { name, endpoint },
            error => holders(0, 1, error.to_string()),
        })?;
        let answers = answers_of(&asked);
        let last = register::to_write(&answers).map_err(|why| match why {
            Unusable::Few { have, need } => {
                holders(have, need, "the others do not answer".to_owned())
            }
            Unusable::Rivals => NamesError::Rivals { name: name() },
        })?;
        let Some(last) = last else {
            return Err(NamesError::NotFound { name: name() });
        };
        let turn = Turn::begin(&self.name, &asked, Some(last)).map_err(too_few)?;
        turn.bury().map_err(too_few)?;
        match last.removed {
            false => Ok(()),
            true => Err(NamesError::NotFound { name: name() }),
        }
    }

    /// Lets other clients have the name. Published versions stay.
    pub(crate) fn let_go(&self) {
        let Some(held) = self.held.lock().take() else {
            return;
        };
        for session in held {
            if let Err(error) = session.disclaim(&self.name) {
                // The session's end lets the name go at the latest.
                let (endpoint, name) = (session.endpoint().clone(), self.name.clone());
                later(move || tracing::warn!(%endpoint, name, %error, "name not let go"));
            }
        }
        self.cluster.names_open.lock().remove(&self.name);
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.let_go();
    }
}

/// A named region as its servers know it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NamedRegion {
    /// The region's name.
    pub name: String,
    /// Bytes that the region takes on the servers of the runtime.
    pub bytes: u64,
    /// True if a program has the region open for writing now.
    pub in_use: bool,
    /// Number of times that the region is open for reading, all versions together.
    pub readers: u64,
    /// Number of replaced versions that are still read, and take memory.
    pub old_versions: u64,
    /// The public key that the name belongs to: the user's own, or any key if the user is the
    /// operator.
    pub owner: String,
}

/// Failure to list names, or to remove one.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum NamesError {
    /// The name is unknown to all servers of the runtime.
    #[error(
        "no server of this runtime has a region named `{name}` that belongs to this user's key"
    )]
    NotFound {
        /// The name.
        name: String,
    },
    /// The cluster has the region open.
    #[error("region `{name}` is open in this program: close it before it is removed")]
    Held {
        /// The name.
        name: String,
    },
    /// Another program has the region open.
    #[error(
        "region `{name}` on {endpoint} is in use by another client: it can be removed when that client closes it"
    )]
    InUse {
        /// The name.
        name: String,
        /// The endpoint of the server that says so.
        endpoint: String,
    },
    /// A server would not remove the name. Remove it again: other servers may have done so.
    #[error("removing region `{name}`: {source}")]
    Remove {
        /// The name.
        name: String,
        /// The server's answer.
        r#source: OpenNameError,
    },
    /// Too few of the servers that hold the name have removed it.
    #[error(
        "removing region `{name}`: {have} of the servers that hold its name agree, and {need} are needed ({reason}): remove it again when they answer"
    )]
    Holders {
        /// The name.
        name: String,
        /// Number of servers that agree.
        have: usize,
        /// Number of servers that are needed.
        need: usize,
        /// The first server's answer.
        reason: String,
    },
    /// Servers have regions of the name that were created apart from each other.
    #[error(
        "several servers have regions `{name}`, which were created apart from each other: remove each with a runtime of its own servers"
    )]
    Rivals {
        /// The name.
        name: String,
    },
    /// No server has told its names.
    #[error(transparent)]
    List(#[from] ControlError),
}

impl Cluster {
    /// Returns the named regions of the user's key, in order. An operator's key gets the regions of
    /// all keys. What servers have that do not answer is lacking, which the log says.
    ///
    /// # Errors
    /// [`NamesError::List`]
    pub fn names(&self) -> Result<Vec<NamedRegion>, NamesError> {
        let mut all: BTreeMap<_, NamedRegion> = BTreeMap::new();
        let (mut has_answered, mut failure) = (false, None);
        for session in self.name_sessions() {
            let names = match session.names() {
                Ok(names) => names,
                Err(error) => {
                    let (endpoint, reason) = (session.endpoint().clone(), error.clone());
                    later(move || {
                        tracing::warn!(%endpoint, %reason, "the names of a server are not listed");
                    });
                    failure.get_or_insert(error);
                    continue;
                }
            };
            has_answered = true;
            for named in names {
                let owner = named.owner.to_string();
                let region = all
                    .entry((named.owner, named.name.clone()))
                    .or_insert(NamedRegion {
                        name: named.name,
                        bytes: 0,
                        in_use: false,
                        readers: 0,
                        old_versions: 0,
                        owner,
                    });
                region.bytes = region.bytes.saturating_add(named.bytes);
                region.in_use |= named.in_use;
                // A reader of a region on several servers reads on each.
                region.readers = region.readers.max(named.readers);
                region.old_versions = region.old_versions.max(named.old_versions);
            }
        }
        match failure {
            Some(error) if !has_answered => Err(error.into()),
            _ => Ok(all.into_values().collect()),
        }
    }

    /// Forgets a region of the user's key that no program has open for writing, and frees its
    /// memory, except versions that are still read.
    ///
    /// # Errors
    /// [`NamesError::NotFound`], [`NamesError::Held`], [`NamesError::InUse`],
    /// [`NamesError::Remove`], [`NamesError::Holders`], [`NamesError::Rivals`].
    pub fn remove(self: &Arc<Self>, name: &str) -> Result<(), NamesError> {
        // Servers would remove a name under an open region of this cluster: holding it prevents
        // that.
        let claim = Claim::here(self, name).ok_or_else(|| NamesError::Held {
            name: name.to_owned(),
        })?;
        let (mut found, mut is_shared) = (false, false);
        let mut silent = Vec::new();
        for session in self.name_sessions() {
            match session.remove(name) {
                Ok(()) => found = true,
                Err(OpenNameError::NotFound { .. }) => {}
                Err(OpenNameError::InUse { endpoint, name }) => {
                    return Err(NamesError::InUse { name, endpoint });
                }
                Err(OpenNameError::Shared { .. }) => is_shared = true,
                Err(error) => silent.push((session, error)),
            }
        }
        if is_shared {
            let answers = |session: &Arc<Session>| {
                let mut silent = silent.iter();
                !silent.any(|(other, _)| Arc::ptr_eq(other, session))
            };
            return claim.bury(answers);
        }
        match silent.pop() {
            Some((_, source)) => Err(NamesError::Remove {
                name: name.to_owned(),
                source,
            }),
            None if found => Ok(()),
            None => Err(NamesError::NotFound {
                name: name.to_owned(),
            }),
        }
    }
}
