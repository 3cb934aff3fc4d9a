//! [`Incoming`]: what a data connection's client sends, by as few system calls as possible.
//!
//! The rule it keeps: what headers announce is not known before they are read, so they are read
//! together with what has come behind them. That is copied once, and never more than a buffer of
//! it; the rest of a payload goes straight to its place.

use std::{io, time::Duration};

use crate::stream::{Message, Stream};

/// A small batch with its payloads. Copying so many bytes takes as long as another system call.
const BYTES: usize = 8 << 10;

pub(super) struct Incoming<'a> {
    stream: &'a Stream,
    patience: Duration,
    buffer: Box<[u8]>,
    /// What of it has come.
    come: usize,
    /// What of that was taken.
    taken: usize,
}

impl<'a> Incoming<'a> {
    /// `patience`: how long it waits for the client before its caller may look for something else.
    pub(super) fn new(stream: &'a Stream, patience: Duration) -> io::Result<Self> {
        stream.let_wait(patience)?;
        Ok(Self {
            stream,
            patience,
            buffer: vec![0; BYTES].into(),
            come: 0,
            taken: 0,
        })
    }

    /// All that has come and was not taken.
    pub(super) fn take_all(&mut self) -> Vec<u8> {
        let bytes = self.buffer[self.taken..self.come].to_vec();
        self.taken = self.come;
        bytes
    }

    /// What comes next has come already.
    pub(super) fn put_back(&mut self, bytes: &[u8]) {
        debug_assert_eq!(self.taken, self.come);
        if bytes.len() > self.buffer.len() {
            self.buffer = bytes.into();
        } else {
            self.buffer[..bytes.len()].copy_from_slice(bytes);
        }
        (self.come, self.taken) = (bytes.len(), 0);
    }

    /// Takes as many of the bytes that have come as `to` holds. How many.
    pub(super) fn take(&mut self, to: &mut [u8]) -> usize {
        let bytes = to.len().min(self.come - self.taken);
        to[..bytes].copy_from_slice(&self.buffer[self.taken..][..bytes]);
        self.taken += bytes;
        bytes
    }

    /// Waits until more has come, once all was taken. 0: the client sends no more.
    pub(super) fn wait(&mut self) -> io::Result<usize> {
        debug_assert_eq!(self.taken, self.come);
        (self.come, self.taken) = (0, 0);
        let buffer = &mut self.buffer[..BYTES];
        self.come = self.stream.read_or_wait(buffer, self.patience)?;
        Ok(self.come)
    }

    /// Moves what comes next to where `message` says, and never waits.
    ///
    /// # Safety
    /// As [`Stream::receive_message`].
    pub(super) unsafe fn receive_message(&mut self, message: &mut Message) -> io::Result<usize> {
        if self.taken == self.come {
            // SAFETY: promised by the caller.
            return unsafe { self.stream.receive_message(message) };
        }
        // SAFETY: promised by the caller.
        let bytes = unsafe { message.fill(&self.buffer[self.taken..self.come]) };
        self.taken += bytes;
        Ok(bytes)
    }
}
