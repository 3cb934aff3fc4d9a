//! Standard output: what a benchmark found.
//!
//! The rule it keeps: a reader that has seen enough (`| head`) ends nothing and is no failure; what
//! cannot be written for any other reason is an error.

use std::{
    fmt::Display,
    io::{self, ErrorKind, Write},
};

use anyhow::{Context, Result};

/// Writes a text and ends its line.
///
/// # Errors
/// It cannot be written, though somebody reads.
pub fn say(text: impl Display) -> Result<()> {
    let mut stdout = io::stdout().lock();
    match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to standard output"),
    }
}
