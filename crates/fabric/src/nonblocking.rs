//! Helpers for calls on non-blocking descriptors.
//!
//! The rule it keeps: every wait has an end, and a call that found nothing ready is no error.

use std::{io, time::Instant};

use nix::poll::PollTimeout;

/// Describes an I/O error of a wait for a peer.
pub(crate) fn describe(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => "the peer closed the connection".to_owned(),
        io::ErrorKind::TimedOut => "the peer did not answer in time".to_owned(),
        _ => error.to_string(),
    }
}

/// True if a call on a non-blocking socket is to be repeated once the socket is ready.
pub(crate) fn retry(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

/// Returns a poll timeout that does not end before `until`.
pub(crate) fn timeout_until(until: Instant) -> PollTimeout {
    let left = until.saturating_duration_since(Instant::now());
    // Rounded up: otherwise the last millisecond would be spent spinning.
    let ms = left.as_micros().div_ceil(1000).min(i32::MAX as u128) as i32;
    PollTimeout::try_from(ms).expect("not negative")
}
