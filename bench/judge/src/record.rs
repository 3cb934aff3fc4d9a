//! Results that are kept, with the day, the machine, its kernel and the commit.
//!
//! The rule it keeps: a record has every figure that a finding was computed from, in the form that
//! `compare` reads, and nothing else.

use std::{fs, path::Path, process::Command, thread, time::SystemTime};

use anyhow::{Context, Result};
use comfy_table::{Table, presets::ASCII_MARKDOWN};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::compare::{self, GROUPS};

/// Day and place of a measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Circumstances {
    pub(crate) date: String,
    pub(crate) machine: String,
    pub(crate) kernel: String,
    pub(crate) commit: String,
}

impl Circumstances {
    /// Returns the circumstances of this moment.
    pub(crate) fn now() -> Self {
        Self {
            date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            machine: machine(),
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease")
                .map_or_else(|_| UNKNOWN.to_owned(), |text| text.trim().to_owned()),
            commit: commit(),
        }
    }
}

/// Record as printed, with all results whole.
#[derive(Serialize)]
pub(crate) struct Record<F> {
    benchmark: &'static str,
    #[serde(flatten)]
    circumstances: Circumstances,
    config: Value,
    targets: Vec<F>,
    reports: Vec<Value>,
}

impl<F: Serialize> Record<F> {
    pub(crate) fn new(config: Value, targets: Vec<F>, reports: Vec<Value>) -> Self {
        Self {
            benchmark: "targets",
            circumstances: Circumstances::now(),
            config,
            targets,
            reports,
        }
    }

    /// Returns the record as kept, with figures in place of results.
    fn compact(&self) -> Result<String> {
        let groups = compare::grouped(&self.reports)?;
        let mut compact = json!(self);
        let fields = compact.as_object_mut().expect("a record is an object");
        fields.remove("reports");
        fields.insert(GROUPS.to_owned(), json!(groups));
        Ok(compact.to_string())
    }

    /// Writes `DATE-TIME-targets.json`, and a `.md` with the table.
    pub(crate) fn write(&self, directory: &Path, table: &Table) -> Result<()> {
        fs::create_dir_all(directory)
            .with_context(|| format!("cannot make the directory {}", directory.display()))?;
        // Colons are awkward in file names.
        let at = &self.circumstances;
        let stem = format!("{}-targets", at.date.replace([':', 'Z'], ""));
        let mut table = table.clone();
        table.load_style(ASCII_MARKDOWN);
        let text = format!(
            "# {}\n\n{}, Linux {}, commit {}. Repetitions: {}; medians, lowest and highest in parentheses.\n\n{table}\n",
            at.date, at.machine, at.kernel, at.commit, self.config["repeat"]
        );
        for (extension, text) in [("json", self.compact()?), ("md", text)] {
            let path = directory.join(&stem).with_extension(extension);
            let shown = path.display();
            fs::write(&path, text).with_context(|| format!("cannot write {shown}"))?;
            eprintln!("wrote {shown}");
        }
        Ok(())
    }
}

const UNKNOWN: &str = "unknown";

/// Names this machine's processor, CPUs and memory.
fn machine() -> String {
    let value = |path, name: &str| {
        let text = fs::read_to_string(path).ok()?;
        let line = text.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let processor = value("/proc/cpuinfo", "model name").unwrap_or_else(|| UNKNOWN.to_owned());
    let cpus = thread::available_parallelism().map_or(0, usize::from);
    let memory = value("/proc/meminfo", "MemTotal").unwrap_or_else(|| UNKNOWN.to_owned());
    format!("{processor}, {cpus} CPUs, {memory} of memory")
}

/// Returns the commit of the working directory, which is the repository where records are made.
fn commit() -> String {
    let described = Command::new("git")
        .args(["describe", "--always", "--dirty", "--abbrev=12"])
        .output();
    match described {
        Ok(output) if output.status.success() => {
            String::from_utf8_lossy(&output.stdout).trim().to_owned()
        }
        _ => UNKNOWN.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_has_the_figures_of_all_repetitions_and_no_results() {
        let result = |us: f64| json!({"benchmark": "random", "verified": true, "config": {"threads": 1}, "us_per_read": us});
        let results = vec![result(12.345678), result(123_456.0)];
        let record = Record::new(json!({"repeat": 2}), vec![json!({"what": "x"})], results);
        let kept: Value = serde_json::from_str(&record.compact().unwrap()).unwrap();
        assert_eq!(kept["targets"], json!([{"what": "x"}]));
        assert_eq!(kept.get("reports"), None);
        let figures = json!({"random threads=1": {"us_per_read": [12.346, 123_456.0]}});
        assert_eq!(kept[GROUPS], figures);
    }
}
