//! [`ServerTraffic`]: counters of the bytes that a server's CPU moves.

use std::sync::atomic::{AtomicU64, Ordering};

/// Payload bytes moved by the server's CPU; one for all listeners of a daemon.
#[derive(Debug, Default)]
pub struct ServerTraffic {
    /// Bytes of READs. Only ever added to; read for display, so relaxed.
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
}

impl ServerTraffic {
    /// Adds payload bytes of READs and of WRITEs.
    pub fn count(&self, read_bytes: u64, written_bytes: u64) {
        self.read_bytes.fetch_add(read_bytes, Ordering::Relaxed);
        self.written_bytes
            .fetch_add(written_bytes, Ordering::Relaxed);
    }

    /// Returns the payload bytes of READs.
    pub fn bytes_read(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }

    /// Returns the payload bytes of WRITEs.
    pub fn bytes_written(&self) -> u64 {
        self.written_bytes.load(Ordering::Relaxed)
    }
}
