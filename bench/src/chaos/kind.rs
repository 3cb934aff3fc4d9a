//! [`Kind`]: events that happen to memory servers and to the ways to them.
//!
//! The rule it keeps: each event is one that pages survive by the promise of `docs/redundancy.md`.

use clap::ValueEnum;
use farpage::Redundancy;
use farpage_bench_kit::{
    options::{Fabric, name_of},
    pick::Random,
};
use serde::Serialize;

/// Kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Kind {
    /// SIGKILL of as many servers at once as pages outlive, or of fewer, and new servers
    Kill,
    /// SIGSTOP of a server, for less than the three seconds after which it is given up
    ShortStop,
    /// SIGSTOP of a server, for longer
    LongStop,
    /// All connections of a server end by RST, and new ones are served
    Cut,
    /// All connections of a server end by RST, and none is served for more than three seconds
    Unplug,
    /// All packets from and to a server are lost, for less than three seconds
    ShortLoss,
    /// All packets from and to a server are lost, for longer
    LongLoss,
    /// Connections of a server stay open and carry nothing any more; new ones are served
    Forget,
    /// A new server, and a drain of an old one
    Drain,
    /// SIGKILL of a second server while the copies of the first are made again
    KillInRebuild,
    /// SIGKILL of any server while one is drained
    KillInDrain,
    /// SIGKILL of a server while pages get parity instead of copies
    KillInSealing,
    /// A bit of a page flips in a server's memory
    Flip,
}

impl Kind {
    /// Returns the reason why the event cannot happen in such a run.
    pub(super) fn why_not(
        self,
        fabric: Fabric,
        redundancy: Redundancy,
        has_tiers: bool,
    ) -> Option<&'static str> {
        match self {
            _ if self.is_of_links() && fabric != Fabric::Tcp => {
                Some("only links of --fabric tcp pass through a relay")
            }
            Self::KillInSealing if !matches!(redundancy, Redundancy::Parity { .. }) => {
                Some("pages get parity only with --redundancy parity=k+m")
            }
            Self::KillInRebuild if matches!(redundancy, Redundancy::Parity { parity: 1, .. }) => {
                Some("one parity outlives one death, and the first one is not healed yet")
            }
            Self::Flip if has_tiers => Some("with --memory, pages may be compressed or on a disk"),
            _ => None,
        }
    }

    /// True if the event happens to the connections of a server.
    pub(super) fn is_of_links(self) -> bool {
        matches!(
            self,
            Self::Cut | Self::Unplug | Self::ShortLoss | Self::LongLoss | Self::Forget
        )
    }

    /// Returns the word for the event in tables and options.
    pub(super) fn name(self) -> String {
        name_of(&self)
    }

    /// Returns all kinds of `kinds`, each once, in a random order.
    pub(super) fn shuffled(kinds: &[Self], random: &mut Random) -> Vec<Self> {
        let mut deck = kinds.to_vec();
        for at in (1..deck.len()).rev() {
            deck.swap(at, random.below(at as u64 + 1) as usize);
        }
        deck
    }
}
