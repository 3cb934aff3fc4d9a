//! Findings of the benchmark `chaos`.

use farpage::ByteSize;
use farpage_bench_kit::report::{Percentiles, filled_table, run_table};
use hdrhistogram::Histogram;
use serde::Serialize;
use serde_json::Value;

use super::kind::Kind;

/// Times of faults.
#[derive(Debug, Serialize)]
pub(super) struct Faults {
    #[serde(flatten)]
    pub(super) us: Percentiles,
    /// Longest time.
    pub(super) max: f64,
}

impl Faults {
    pub(super) fn of(histogram: &Histogram<u64>) -> Self {
        Self {
            us: Percentiles::of(histogram),
            max: histogram.max() as f64 / 1000.0,
        }
    }
}

/// An event, and its effect on the program.
#[derive(Debug, Serialize)]
pub(super) struct Event {
    pub(super) kind: Kind,
    /// Addresses of the servers that were hit.
    pub(super) servers: Vec<String>,
    /// Time of the event since the start of the run.
    pub(super) at_s: f64,
    /// Time from the event until all copies were there again.
    pub(super) healed_s: f64,
    /// Faults that were under way in the second after the event.
    pub(super) fault_us: Faults,
    /// Words that were checked from the event until all copies were there again.
    pub(super) checked: u64,
    /// Bytes that were copied between servers meanwhile.
    pub(super) repaired_bytes: u64,
}

/// State of the run at one time.
#[derive(Debug, Serialize)]
pub(super) struct Moment {
    pub(super) at_s: f64,
    /// Words checked per second, since the moment before.
    pub(super) words_per_s: f64,
    /// Bytes of which copies are missing.
    pub(super) under_protected_bytes: u64,
    pub(super) sealed_bytes: u64,
}

/// Last act: more servers have died than pages outlive.
#[derive(Debug, Serialize)]
pub(super) struct End {
    /// Addresses of the servers that were killed.
    pub(super) killed: Vec<String>,
    /// Pages that came, and were right.
    pub(super) right_pages: u64,
    /// Pages that were an error.
    pub(super) failed_pages: u64,
    /// Longest time until an error came.
    pub(super) error_s_max: f64,
    /// Text of the first error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<String>,
}

/// Findings of a run.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) benchmark: &'static str,
    /// True if every word was what the program had written last.
    pub(super) verified: bool,
    pub(super) config: Value,
    pub(super) events: Vec<Event>,
    /// Faults of a second without an event.
    pub(super) quiet_fault_us: Faults,
    pub(super) timeline: Vec<Moment>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) end: Option<End>,
    pub(super) words_checked: u64,
    pub(super) wrong_words: u64,
    pub(super) failovers: u64,
    /// Pages that came back damaged, from one copy.
    pub(super) corrupt: u64,
    pub(super) repaired_bytes: u64,
}

impl Report {
    pub(super) fn human(&self) -> String {
        let row = |at: String, what: &str, faults: &Faults, healed: String| {
            let Percentiles { p50, p99, p999, .. } = faults.us;
            let max = faults.max;
            format!("{at} | {what} | {p50:.0} | {p99:.0} | {p999:.0} | {max:.0} | {healed}")
        };
        let quiet = row("-".into(), "no event", &self.quiet_fault_us, "-".into());
        let events = self.events.iter().map(|event| {
            let (at, healed) = (event.at_s, event.healed_s);
            let name = match event.servers.len() {
                1 => event.kind.name(),
                count => format!("{}, {count} servers", event.kind.name()),
            };
            row(
                format!("{at:.1}"),
                &name,
                &event.fault_us,
                format!("{healed:.1}"),
            )
        });
        let table = filled_table(
            "at s | event | fault p50, us | p99 | p99.9 | max | copies again after s",
            std::iter::once(quiet).chain(events),
        );
        let mut rows = vec![
            ("words checked", self.words_checked.to_string()),
            ("words that were wrong", self.wrong_words.to_string()),
            ("reads by another copy", self.failovers.to_string()),
            ("damaged copies that were read", self.corrupt.to_string()),
            ("copied again", ByteSize(self.repaired_bytes).to_string()),
        ];
        if let Some(end) = &self.end {
            let End {
                right_pages,
                failed_pages,
                error_s_max,
                ..
            } = end;
            let killed = end.killed.len();
            let pages = format!(
                "{right_pages} pages right, {failed_pages} an error, after {error_s_max:.1} s at most"
            );
            rows.push(("at the end", format!("{killed} servers killed: {pages}")));
        }
        let run = run_table(self.benchmark, self.verified, rows);
        format!("{table}\n{run}")
    }
}
