//! Where a benchmark's arrays are: remote under a budget, or in ordinary memory, which is what
//! paging is compared with.
//!
//! The rule it keeps: a benchmark runs the same loops over the same slices in both.

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

/// Where arrays are.
pub enum Arena {
    /// On a memory server.
    Remote(Remote),
    /// Nothing of farpage is started.
    Plain,
}

/// An array there.
pub enum Array<T: Pod> {
    /// Pages on a memory server.
    Remote(RemoteArray<T>),
    /// Ordinary memory.
    Plain(Vec<T>),
}

impl Arena {
    /// Starts what remote arrays need, unless they are to be plain.
    pub fn start(plain: bool, common: &Common, paging: &Paging) -> Result<Self> {
        if plain {
            server::ensure_room(paging.size_bytes(common), common.force)?;
            return Ok(Self::Plain);
        }
        Remote::start(common, paging).map(Self::Remote)
    }

    /// A new array of zeros, whose use is known.
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

    /// What the run was told to do.
    pub fn config(&self, common: &Common, paging: &Paging) -> Config {
        match self {
            Self::Remote(remote) => remote.config(common, paging),
            Self::Plain => Config::new(common, Some(paging), "none, plain memory"),
        }
    }

    /// As [`Remote::yardsticks`], for what paging moved; none of ordinary memory.
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

    /// Remembers the counters.
    pub fn mark(&self) -> Option<Mark> {
        match self {
            Self::Remote(remote) => Some(remote.mark()),
            Self::Plain => None,
        }
    }

    /// What happened from `begin` to `end`; nothing in plain memory.
    pub fn figures(begin: &Option<Mark>, end: &Option<Mark>) -> Option<PagingFigures> {
        Some(Remote::figures(begin.as_ref()?, end.as_ref()?))
    }
}

impl<T: Pod> Array<T> {
    /// Says how all of it will be used.
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
