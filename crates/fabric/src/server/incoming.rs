//! [`Incoming`]: bytes that a data connection's client sends, by as few system calls as possible.
//!
//! The rule it keeps: headers are read together with the bytes that have come behind them, since
//! only the headers tell how many follow. Those bytes are copied once, at most a buffer of them;
//! the rest of a payload goes straight to its place.

use std::{io, time::Duration};

use crate::stream::{PeerStream, SocketMessage};

/// Bytes of a small batch with its payloads. Copying them takes as long as another system call.
const BYTES: usize = 8 << 10;

pub(crate) struct Incoming<'a> {
    stream: &'a PeerStream,
    patience: Duration,
    buffer: Box<[u8]>,
    /// Bytes of the buffer that have been received.
    come: usize,
    /// Bytes of the buffer that have been taken.
    taken: usize,
}

impl<'a> Incoming<'a> {
    /// Receives from `stream`, and lets the caller do something else after a wait of `patience`.
    pub(super) fn new(stream: &'a PeerStream, patience: Duration) -> io::Result<Self> {
        stream.let_wait(patience)?;
        Ok(Self {
            stream,
            patience,
            buffer: vec![0; BYTES].into(),
            come: 0,
            taken: 0,
        })
    }

    /// Takes all bytes that have been received and not taken.
    pub(crate) fn take_all(&mut self) -> Vec<u8> {
        let bytes = self.buffer[self.taken..self.come].to_vec();
        self.taken = self.come;
        bytes
    }

    /// Puts `bytes` back, so that they are taken next.
    pub(crate) fn put_back(&mut self, bytes: &[u8]) {
        debug_assert_eq!(self.taken, self.come);
        if bytes.len() > self.buffer.len() {
            self.buffer = bytes.into();
        } else {
            self.buffer[..bytes.len()].copy_from_slice(bytes);
        }
        (self.come, self.taken) = (bytes.len(), 0);
    }

    /// Moves received bytes into `to`, as many as it holds. Returns their number.
    pub(super) fn take(&mut self, to: &mut [u8]) -> usize {
        let bytes = to.len().min(self.come - self.taken);
        to[..bytes].copy_from_slice(&self.buffer[self.taken..][..bytes]);
        self.taken += bytes;
        bytes
    }

    /// Receives more bytes, once all were taken. Returns their number, 0 at the end.
    pub(super) fn wait(&mut self) -> io::Result<usize> {
        debug_assert_eq!(self.taken, self.come);
        (self.come, self.taken) = (0, 0);
        let buffer = &mut self.buffer[..BYTES];
        self.come = self.stream.read_or_wait(buffer, self.patience)?;
        Ok(self.come)
    }

    /// Moves the next bytes to where `message` says, and never waits.
    ///
    /// # Safety
    /// As [`PeerStream::receive_message`].
    pub(super) unsafe fn receive_message(
        &mut self,
        message: &mut SocketMessage,
    ) -> io::Result<usize> {
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
