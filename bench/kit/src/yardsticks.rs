//! Yardsticks for a figure: the raw fabric and plain memory, measured in the same run.
//!
//! The rule it keeps: a yardstick is a rate or time that no pager can beat, so 100 % is all that
//! there is to gain. Measuring yardsticks is left to `raw` and to the benchmarks.

use std::fmt;

use serde::Serialize;

use crate::{options::Common, paging::Counts};

/// Bytes of an array of ordinary memory to compare with: larger than caches are.
const PLAIN_BYTES: usize = 64 << 20;

/// Returns the bytes of an array of ordinary memory to compare with.
pub fn plain_bytes(common: &Common) -> usize {
    match common.run.smoke {
        true => 1 << 20,
        false => PLAIN_BYTES,
    }
}

/// Yardsticks of a benchmark, and how near its figures came to them.
#[derive(Debug, Serialize)]
pub struct Yardsticks {
    #[serde(flatten)]
    plain: Plain,
    plain_share: f64,
    #[serde(flatten)]
    fabric: Fabric,
    fabric_share: f64,
}

/// Figure of a benchmark's work in ordinary memory, by the same threads.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Plain {
    /// STREAM's triad.
    PlainTriadMbPerS(f64),
    /// A field that is written and read.
    PlainBothMbPerS(f64),
    /// A read or update anywhere.
    PlainUsPerAccess(f64),
    /// The median of single reads anywhere, each timed as faults are.
    PlainP50Us(f64),
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum Fabric {
    /// READs and WRITEs of pages, each alone and both together.
    Fabric(FabricRates),
    /// A READ of one page with no other under way.
    FabricReadUs(f64),
}

/// MB/s of the raw fabric with buffers that are in no cache.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct FabricRates {
    /// READs alone.
    pub raw_read_mb_per_s: f64,
    /// WRITEs alone.
    pub raw_write_mb_per_s: f64,
    /// READs and WRITEs at once, bytes of both directions added up.
    pub raw_read_write_mb_per_s: f64,
}

impl Plain {
    /// Returns `figure`'s share of a rate, or the part of the time `figure` that plain memory
    /// takes.
    fn share_of(self, figure: f64) -> f64 {
        match self {
            Self::PlainTriadMbPerS(rate) | Self::PlainBothMbPerS(rate) => figure / rate,
            Self::PlainUsPerAccess(time) | Self::PlainP50Us(time) => time / figure,
        }
    }
}

impl Yardsticks {
    /// Compares work that moved pages in `seconds`, long enough for several operations at once.
    /// `figure` is compared with plain memory.
    pub fn of_transfers(
        figure: f64,
        plain: Plain,
        moved: Counts,
        seconds: f64,
        fabric: FabricRates,
    ) -> Self {
        let least_seconds = fabric.seconds(moved.bytes_read, moved.bytes_written);
        Self {
            plain,
            plain_share: plain.share_of(figure),
            fabric: Fabric::Fabric(fabric),
            fabric_share: least_seconds / seconds,
        }
    }

    /// Compares single faults, of which `p50_us` is the median.
    pub fn of_faults(p50_us: f64, plain_p50_us: f64, fabric_read_us: f64) -> Self {
        let plain = Plain::PlainP50Us(plain_p50_us);
        Self {
            plain,
            plain_share: plain.share_of(p50_us),
            fabric: Fabric::FabricReadUs(fabric_read_us),
            fabric_share: fabric_read_us / p50_us,
        }
    }
}

impl FabricRates {
    /// Returns the least time for `read_bytes` and `written_bytes`.
    fn seconds(&self, read_bytes: u64, written_bytes: u64) -> f64 {
        let (read, written) = (read_bytes as f64 / 1e6, written_bytes as f64 / 1e6);
        [
            read / self.raw_read_mb_per_s,
            written / self.raw_write_mb_per_s,
            (read + written) / self.raw_read_write_mb_per_s,
        ]
        .into_iter()
        .fold(0.0, f64::max)
    }
}

/// One line under the tables: how good the figures are.
impl fmt::Display for Yardsticks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = |rate: f64| format!("{rate:.0} MB/s");
        let time = |us: f64| format!("{us:.3} us");
        let (what, all, figure) = match self.plain {
            Plain::PlainTriadMbPerS(x) => ("triad", "All kernels", rate(x)),
            Plain::PlainBothMbPerS(x) => ("both", "All steps", rate(x)),
            Plain::PlainUsPerAccess(x) => ("an access", "All accesses", time(x)),
            Plain::PlainP50Us(x) => ("a read, p50", "The same", time(x)),
        };
        let fabric = match &self.fabric {
            Fabric::Fabric(rates) => format!(
                "READ {:.0}, WRITE {:.0}, both {:.0} MB/s",
                rates.raw_read_mb_per_s, rates.raw_write_mb_per_s, rates.raw_read_write_mb_per_s,
            ),
            Fabric::FabricReadUs(time) => format!("{time:.2} us, one READ of a page at a time"),
        };
        let (plain, share) = (percent(self.plain_share), percent(self.fabric_share));
        write!(f, "{what}: {plain} % of plain memory ({figure}). ")?;
        write!(
            f,
            "{all}: {share} % of the raw fabric ({fabric}). Measured just now."
        )
    }
}

/// Formats `share` in whole percent, or with two decimals if small.
fn percent(share: f64) -> String {
    match 100.0 * share {
        percent if percent < 0.95 => format!("{percent:.2}"),
        percent => format!("{percent:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATES: FabricRates = FabricRates {
        raw_read_mb_per_s: 1000.0,
        raw_write_mb_per_s: 500.0,
        raw_read_write_mb_per_s: 1200.0,
    };

    fn transfers(figure: f64, plain: Plain, read: u64, written: u64, seconds: f64) -> Yardsticks {
        let moved = Counts {
            bytes_read: read,
            bytes_written: written,
            ..Counts::default()
        };
        Yardsticks::of_transfers(figure, plain, moved, seconds, RATES)
    }

    #[test]
    fn the_slowest_of_reads_writes_and_both_bounds_a_transfer() {
        assert_eq!(RATES.seconds(2_000_000_000, 0), 2.0);
        assert_eq!(RATES.seconds(0, 1_000_000_000), 2.0);
        assert_eq!(RATES.seconds(1_500_000_000, 900_000_000), 2.0);
    }

    #[test]
    fn a_rate_is_a_share_of_plain_memory_and_a_time_holds_a_share_of_it() {
        for (yardsticks, plain, share) in [
            (
                transfers(2_500.0, Plain::PlainTriadMbPerS(1e4), 2_000_000_000, 0, 4.0),
                "triad: 25 % of plain memory (10000 MB/s). All kernels:",
                50,
            ),
            (
                transfers(900.0, Plain::PlainBothMbPerS(9_000.0), 0, 500_000_000, 10.0),
                "both: 10 % of plain memory (9000 MB/s). All steps:",
                10,
            ),
            (
                transfers(20.0, Plain::PlainUsPerAccess(0.05), 300_000_000, 0, 2.0),
                "an access: 0.25 % of plain memory (0.050 us). All accesses:",
                15,
            ),
        ] {
            let fabric =
                "the raw fabric (READ 1000, WRITE 500, both 1200 MB/s). Measured just now.";
            let expected = format!("{plain} {share} % of {fabric}");
            assert_eq!(yardsticks.to_string(), expected);
        }
    }

    #[test]
    fn of_a_fault_one_read_of_its_page_is_all_that_the_fabric_needs() {
        let latency = Yardsticks::of_faults(25.0, 0.1, 5.0);
        assert_eq!(
            latency.to_string(),
            "a read, p50: 0.40 % of plain memory (0.100 us). The same: 20 % of the raw fabric (5.00 us, one READ of a page at a time). Measured just now."
        );
    }

    #[test]
    fn names_say_what_was_measured() {
        let json = serde_json::to_value(Yardsticks::of_faults(25.0, 0.1, 5.0)).unwrap();
        assert_eq!(json["plain_p50_us"], 0.1);
        assert_eq!(json["fabric_read_us"], 5.0);
        let stream = transfers(1.0, Plain::PlainTriadMbPerS(2.0), 0, 0, 1.0);
        let json = serde_json::to_value(stream).unwrap();
        assert_eq!(json["plain_triad_mb_per_s"], 2.0);
        assert_eq!(json["plain_share"], 0.5);
        assert_eq!(json["fabric"]["raw_write_mb_per_s"], 500.0);
        assert_eq!(json["fabric_share"], 0.0);
    }
}
