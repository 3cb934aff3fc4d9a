//! [`RegError`]: reasons why there is no registered memory.

use std::io;

farpage_wire::debug_as_display!(RegError);

/// Reason why there is no registered memory.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum RegError {
    /// The system gave no memory.
    #[error("cannot map {bytes} bytes for registered memory: {source}")]
    Map {
        /// Bytes asked for.
        bytes: usize,
        /// Error from the system.
        r#source: io::Error,
    },
    /// The adapter did not take the memory.
    #[error("cannot register {bytes} bytes with {registrar}: {source}{advice}")]
    Register {
        /// Bytes of the memory.
        bytes: usize,
        /// Registrar that was asked.
        registrar: String,
        /// Error from the system.
        r#source: io::Error,
        /// Remedy, if it is known.
        advice: String,
    },
    /// The pool would exceed its cap.
    #[error(
        "registered memory is at its cap: {asked_bytes} more bytes do not fit into {bytes_max}, of which {used_bytes} are taken; drop \
         buffers of this size, or raise `bytes_max`"
    )]
    Full {
        /// Bytes asked for, as the pool rounds them.
        asked_bytes: usize,
        /// Bytes of the pool's slabs.
        used_bytes: usize,
        /// Cap of the pool.
        bytes_max: usize,
    },
}
