//! `--small`: the allocator of requests below `--min-bytes`.

use std::{fmt, process::Command};

use clap::ValueEnum;

/// Option `--small`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Small {
    /// The program's own allocator first, and jemalloc once small objects pass a quarter of the
    /// budget.
    Auto,
    /// Jemalloc from the beginning.
    Yes,
    /// The program's own allocator: small objects are local.
    No,
}

impl Small {
    /// Passes the choice to the preloaded library.
    pub(crate) fn pass(self, command: &mut Command) {
        let small = match self {
            Small::Auto => "auto",
            Small::Yes => "yes",
            Small::No => return,
        };
        command.env("FARPAGE_RUN_SMALL", small);
    }
}

/// Text about small objects for `--explain`.
impl fmt::Display for Small {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Small::Auto => {
                "from when they pass a quarter of the budget; local before (--small no leaves all of them local)"
            }
            Small::Yes => "by jemalloc, from the beginning",
            Small::No => "which the budget does not count (--small auto and yes make them remote)",
        })
    }
}
