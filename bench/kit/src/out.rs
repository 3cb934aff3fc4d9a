//! Standard output, for a benchmark's results.
//!
//! The rule it keeps: a reader that closes the pipe early (`| head`) ends nothing and is no
//! failure; any other failed write is an error.

use std::{
    fmt::Display,
    io::{self, ErrorKind, Write},
};

use anyhow::{Context, Result};

/// Writes `text` and ends the line.
///
/// # Errors
/// The write fails for another reason than a closed pipe.
pub fn say(text: impl Display) -> Result<()> {
    let mut stdout = io::stdout().lock();
    match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to standard output"),
    }
}
