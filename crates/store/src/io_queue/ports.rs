//! [`Ports`]: the ways of an I/O queue to all servers, also to those that were added since the I/O
//! queue was made.
//!
//! The rule it keeps: a server whose port was not made yet has a closed one, in which requests wait
//! for the I/O queue's next look. Making ports is left to the [`IoQueue`](super::IoQueue), which
//! does so where memory may be allocated.

use std::{
    ops::{Index, IndexMut},
    slice,
};

use farpage_fabric::Buf;

use super::port::Port;

/// Ports by the numbers of the servers.
pub(super) struct Ports<B> {
    made: Vec<Port<B>>,
    /// Stand-in for all ports that were not made yet.
    pub(super) absent: Port<B>,
}

impl<B: Buf> Ports<B> {
    pub(super) fn new(made: Vec<Port<B>>) -> Self {
        Self {
            made,
            absent: Port::absent(),
        }
    }

    /// Returns the number of the ports that were made.
    pub(super) fn len(&self) -> usize {
        self.made.len()
    }

    /// Adds the port of the next server.
    pub(super) fn push(&mut self, port: Port<B>) {
        self.made.push(port);
    }

    pub(super) fn iter(&self) -> slice::Iter<'_, Port<B>> {
        self.made.iter()
    }

    pub(super) fn iter_mut(&mut self) -> slice::IterMut<'_, Port<B>> {
        self.made.iter_mut()
    }
}

impl<B> Index<usize> for Ports<B> {
    type Output = Port<B>;

    fn index(&self, server: usize) -> &Port<B> {
        self.made.get(server).unwrap_or(&self.absent)
    }
}

impl<B> IndexMut<usize> for Ports<B> {
    fn index_mut(&mut self, server: usize) -> &mut Port<B> {
        self.made.get_mut(server).unwrap_or(&mut self.absent)
    }
}
