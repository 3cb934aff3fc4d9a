//! [`HandoverError`]: the reason why a server's next process cannot take over.
//!
//! The rule it keeps: each message says what is to be done, or that the server goes on.

farpage_wire::debug_as_display!(HandoverError);

/// Reason why a server's next process cannot take over.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum HandoverError {
    /// The state cannot be used.
    #[error("cannot take over from the earlier process: {0}")]
    State(String),
    /// The settings decide where lent bytes are, and have changed.
    #[error(
        "cannot take over from the earlier process: {setting} was {before:?} and is {now:?} now; stop the server and start it anew to change that, which loses what it lends"
    )]
    Setting {
        /// The setting.
        setting: &'static str,
        /// Value at the earlier process.
        before: String,
        /// Value now.
        now: String,
    },
    /// The server cannot hand over now.
    #[error("cannot hand over to a next process: {0}")]
    Refused(String),
    /// The next process has found, before anything was handed over, that it could not serve.
    #[error("the new process would not serve, so this one goes on: {0}")]
    Rehearsal(String),
}
