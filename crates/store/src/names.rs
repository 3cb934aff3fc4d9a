//! The names that a user's key has on the servers of a cluster: listed and removed.
//!
//! The rule it keeps: a region that lies on several servers is one name. What a name is bound to is
//! left to [`named`](crate::named).

use std::collections::BTreeMap;

use farpage_fabric::{ControlError, OpenError};

use crate::Cluster;

/// A named region as its servers know it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NamedRegion {
    /// Its name.
    pub name: String,
    /// Bytes that it takes on the servers of the runtime.
    pub bytes: u64,
    /// Whether a program has it open now.
    pub in_use: bool,
    /// The public key that it belongs to: the user's own, or any where that is an operator's.
    pub owner: String,
}

/// Why names were not listed, or one was not removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NamesError {
    /// No server of the runtime has it.
    #[error(
        "no server of this runtime has a region named `{name}` that belongs to this user's key"
    )]
    NotFound {
        /// The name.
        name: String,
    },
    /// A server would not remove it. What it has on other servers may be gone: removing it once
    /// more ends that.
    #[error("removing region `{name}`: {source}")]
    Remove {
        /// The name.
        name: String,
        /// What the server said.
        source: OpenError,
    },
    /// A server did not tell its names.
    #[error(transparent)]
    List(#[from] ControlError),
}

impl Cluster {
    /// The named regions that belong to the user's key, in their order; those of all keys where it
    /// is an operator's.
    ///
    /// # Errors
    /// [`NamesError::List`]
    pub fn names(&self) -> Result<Vec<NamedRegion>, NamesError> {
        let mut all = BTreeMap::new();
        for session in self.sessions() {
            for named in session.names()? {
                let (bytes, in_use) = all
                    .entry((named.owner, named.name))
                    .or_insert((0u64, false));
                *bytes = bytes.saturating_add(named.bytes);
                *in_use |= named.in_use;
            }
        }
        let regions = all.into_iter();
        Ok(regions
            .map(|((owner, name), (bytes, in_use))| NamedRegion {
                name,
                bytes,
                in_use,
                owner: owner.to_string(),
            })
            .collect())
    }

    /// Forgets a region of the user's key that no other program has open, and frees its memory.
    ///
    /// # Errors
    /// [`NamesError::NotFound`], [`NamesError::Remove`].
    pub fn remove(&self, name: &str) -> Result<(), NamesError> {
        let mut found = false;
        for session in self.sessions() {
            match session.remove(name) {
                Ok(()) => found = true,
                Err(OpenError::NotFound { .. }) => {}
                Err(source) => {
                    return Err(NamesError::Remove {
                        name: name.to_owned(),
                        source,
                    });
                }
            }
        }
        match found {
            true => Ok(()),
            false => Err(NamesError::NotFound {
                name: name.to_owned(),
            }),
        }
    }
}
