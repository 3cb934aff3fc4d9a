//! SKELETON.
use std::{sync::Arc, time::Instant};
use farpage_fabric::{Buf, ConnectError};
use nix::poll::PollFd;
use crate::*;

/// The end of a fill or a write-back. The frame always comes back; after a failed fill its bytes are unspecified.
#[derive(Debug)]
pub struct Done<F> {
    /// As given.
    pub tag: u64,
    /// As given.
    pub frame: F,
    /// What happened.
    pub outcome: Result<Outcome, StoreError>,
}

/// What a page operation did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The frame holds the page; `wire_bytes` is 0 when no request was needed.
    Filled {
        /// Payload bytes moved.
        wire_bytes: u32,
    },
    /// The page was as its store knows it.
    Clean,
    /// The page's new bytes are stored.
    Written {
        /// Payload bytes moved; 0 for a page of one repeated value.
        wire_bytes: u32,
    },
}

/// What one worker thread moves pages with.
pub struct Lane<F: Buf> { _f: std::marker::PhantomData<F> }

impl<F: Buf> Lane<F> {
    /// A lane with a channel to each server.
    pub fn new(cluster: &Arc<Cluster>) -> Result<Self, ConnectError> { let _ = cluster; todo!() }
    /// Starts to bring `page` into `frame`. `Err`: busy; poll and try again.
    pub fn fill(&mut self, store: &Arc<PageStore>, page: u64, frame: F, tag: u64) -> Result<(), F> { let _ = (store, page, frame, tag); todo!() }
    /// Starts to write `page` back if it changed. `Err`: busy; poll and try again.
    pub fn write_back(&mut self, store: &Arc<PageStore>, page: u64, frame: F, tag: u64) -> Result<(), F> { let _ = (store, page, frame, tag); todo!() }
    /// Appends what has ended.
    pub fn poll(&mut self, done: &mut Vec<Done<F>>) { let _ = done; todo!() }
    /// Operations accepted and not yet handed back.
    pub fn in_flight(&self) -> usize { todo!() }
    /// Appends the descriptors to sleep on; returns when to poll at the latest (a time in the past: at once).
    pub fn wait<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) -> Option<Instant> { let _ = fds; todo!() }
}
