//! Budget of this process's open files, and the numbers of extents and clients that follow.
//!
//! The rule it keeps: a client is refused before descriptors run out, since a server without
//! descriptors cannot even accept the connection that would tell it to stop.

use std::fs;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tracing::warn;

/// Files besides those of clients: standard streams, listeners, wake-ups, `/proc` files.
const RESERVED: u64 = 64;
/// Number of files below which a handful of clients can use up all: worth a warning.
const COMFORTABLE: u64 = 4096;

/// Numbers of extents and clients that the open files of this process allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Budget {
    /// Extents altogether.
    pub(crate) extents: usize,
    /// Extents of one client.
    pub(crate) extents_per_session: usize,
    /// Clients at once; each has one control connection and usually a few data connections.
    pub(crate) sessions: usize,
}

/// Raises the soft limit of open files to the hard one, shares it out, and warns if it is low. Each
/// extent takes `files_per_extent` files.
pub(crate) fn budget(files_per_extent: u64) -> Budget {
    let files = match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok((soft, hard))
            if soft < hard && setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_ok() =>
        {
            hard
        }
        Ok((soft, _)) => soft,
        Err(_) => 1024,
    };
    if files < COMFORTABLE {
        warn!(
            open_files = files,
            "this process may hold only {files} open files, so few extents and clients fit: raise it with `ulimit -n` or LimitNOFILE="
        );
    }
    share_out(files, mappings(), files_per_extent)
}

/// Returns the kernel's limit of mappings: each extent is a mapping, too.
fn mappings() -> u64 {
    let text = fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
    text.trim().parse().unwrap_or(65_530)
}

/// Shares out `files`: half for extents and half for connections. Half of `mappings` is left to
/// threads, heap and code.
fn share_out(files: u64, mappings: u64, files_per_extent: u64) -> Budget {
    let half = files.saturating_sub(RESERVED).max(8) / 2;
    let extents = (half.min(mappings / 2) / files_per_extent).max(1);
    Budget {
        extents: extents as usize,
        // A client alone on a server should get far, and must not keep the last quarter from the
        // others.
        extents_per_session: (extents * 3 / 4).max(1) as usize,
        sessions: (half / 4).max(1) as usize,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_client_cannot_take_every_descriptor() {
        for files in [0, 64, 256, 1024, 20_000, 1 << 20] {
            let budget = share_out(files, 65_530, 1);
            assert!(
                budget.extents >= 1 && budget.sessions >= 1,
                "{files} {budget:?}"
            );
            assert!(
                budget.extents_per_session <= budget.extents,
                "{files} {budget:?}"
            );
            if files >= 256 {
                assert!(
                    budget.extents_per_session < budget.extents,
                    "{files} {budget:?}"
                );
                assert!(
                    ((budget.extents + budget.sessions) as u64) < files,
                    "{files} {budget:?}"
                );
            }
        }
    }
}
