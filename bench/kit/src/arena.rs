//! Places for a benchmark's arrays: remote under a budget, or ordinary memory to compare with.
//!
//! The rule it keeps: a benchmark runs the same loops over the same slices in both places.

use std::ops::{Deref, DerefMut};

use anyhow::{Context, Result};
use farpage::{Advice, Pod, RemoteArray};

use crate::{
    options::{Common, Paging},
    remote::{Mark, Remote},
    report::{Config, PagingFigures},
    server::{self, MemoryServer},
    yardsticks::{Moved, Yardsticks},
};

/// Place of a benchmark's arrays.
pub enum Arena {
    /// A memory server.
    Remote(Remote),
    /// Ordinary memory. Nothing of farpage is started.
    Plain,
}

/// Array in an [`Arena`].
pub enum Array<T: Pod> {
    /// Pages on a memory server.
    Remote(RemoteArray<T>),
    /// Ordinary memory.
    Plain(Vec<T>),
}

impl Arena {
    /// Starts a runtime with its memory server, unless the arrays are to be `plain`.
    pub fn start(plain: bool, common: &Common, paging: &Paging) -> Result<Self> {
        if plain {
            server::ensure_room(paging.size_bytes(common), common.force)?;
            return Ok(Self::Plain);
        }
        Remote::start(common, paging).map(Self::Remote)
    }

    /// Makes an array of `len` zeros. `advice` says how a remote one is used.
    pub fn array<T: Pod + Default>(&self, len: u64, advice: Advice) -> Result<Array<T>> {
        match self {
            Self::Remote(remote) => remote.array(len, advice).map(Array::Remote),
            Self::Plain => {
                let len =
                    usize::try_from(len).context("the array is larger than the address space")?;
                Ok(Array::Plain(vec![T::default(); len]))
            }
        }
    }

    /// Returns the settings of the run.
    pub fn config(&self, common: &Common, paging: &Paging) -> Config {
        match self {
            Self::Remote(remote) => remote.config(common, paging),
            Self::Plain => Config::new(common, Some(paging), "none, plain memory"),
        }
    }

    /// Calls [`Remote::yardsticks`] with the bytes that paging moved; `None` for ordinary memory.
    pub fn yardsticks(
        &self,
        paging: &Option<PagingFigures>,
        seconds: f64,
        measure: impl FnOnce(&MemoryServer, Moved) -> Result<Yardsticks>,
    ) -> Option<Yardsticks> {
        match (self, paging) {
            (Self::Remote(remote), Some(paging)) => {
                remote.yardsticks(|server| measure(server, paging.moved(seconds)))
            }
            _ => None,
        }
    }

    /// Returns a copy of the counters; `None` for ordinary memory.
    pub fn mark(&self) -> Option<Mark> {
        match self {
            Self::Remote(remote) => Some(remote.mark()),
            Self::Plain => None,
        }
    }

    /// Returns the pager's work from `begin` to `end`; `None` for ordinary memory.
    pub fn figures(begin: &Option<Mark>, end: &Option<Mark>) -> Option<PagingFigures> {
        Some(Remote::figures(begin.as_ref()?, end.as_ref()?))
    }
}

impl<T: Pod> Array<T> {
    /// Says how the whole array will be used.
    pub fn advise(&self, advice: Advice) -> Result<()> {
        match self {
            Self::Remote(array) => array.advise(.., advice).context("cannot advise"),
            Self::Plain(_) => Ok(()),
        }
    }
}

impl<T: Pod> Deref for Array<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::Remote(array) => array,
            Self::Plain(array) => array,
        }
    }
}

impl<T: Pod> DerefMut for Array<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::Remote(array) => array,
            Self::Plain(array) => array,
        }
    }
}
