//! Results that are kept: with the day, the machine, its kernel and the commit.
//!
//! The rule it keeps: every figure that a finding was computed from is in the record, so that
//! `compare` can use it.

use std::{fs, path::Path, process::Command, thread, time::SystemTime};

use anyhow::{Context, Result};
use comfy_table::{Table, presets::ASCII_MARKDOWN};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::targets::Finding;

/// When and where something was measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Circumstances {
    pub(crate) date: String,
    pub(crate) machine: String,
    pub(crate) kernel: String,
    pub(crate) commit: String,
}

impl Circumstances {
    /// Those of this moment.
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

/// The file; its field `reports` is what [`crate::compare`] reads.
#[derive(Serialize)]
pub(crate) struct Record {
    benchmark: &'static str,
    #[serde(flatten)]
    circumstances: Circumstances,
    config: Value,
    targets: Vec<Finding>,
    reports: Vec<Value>,
}

impl Record {
    pub(crate) fn new(config: Value, targets: Vec<Finding>, reports: Vec<Value>) -> Self {
        Self {
            benchmark: "targets",
            circumstances: Circumstances::now(),
            config,
            targets,
            reports,
        }
    }

    pub(crate) fn json(&self) -> String {
        serde_json::to_string(self).expect("a record has string keys and finite figures")
    }

    /// Writes `DATE-TIME-targets.json`, and a `.md` with the table.
    pub(crate) fn write(&self, directory: &Path, table: &Table) -> Result<()> {
        fs::create_dir_all(directory)
            .with_context(|| format!("cannot make the directory {}", directory.display()))?;
        // Colons are awkward in file names.
        let Circumstances {
            date,
            machine,
            kernel,
            commit,
        } = &self.circumstances;
        let stem = format!("{}-targets", date.replace([':', 'Z'], ""));
        let json = directory.join(&stem).with_extension("json");
        let markdown = directory.join(&stem).with_extension("md");
        let mut table = table.clone();
        table.load_style(ASCII_MARKDOWN);
        let text = format!(
            "# {date}\n\n{machine}, Linux {kernel}, commit {commit}. Repetitions: {}; medians, lowest and highest in parentheses.\n\n{table}\n",
            self.config["repeat"]
        );
        for (path, text) in [(&json, self.json()), (&markdown, text)] {
            fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
            eprintln!("wrote {}", path.display());
        }
        Ok(())
    }
}

const UNKNOWN: &str = "unknown";

/// Processor, CPUs, memory.
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

/// Of the working directory, which is the repository where records are made.
fn commit() -> String {
    Command::new("git")
        .args(["describe", "--always", "--dirty", "--abbrev=12"])
        .output()
        .ok()
        .filter(|output| output.status.success())
        .map_or_else(
            || UNKNOWN.to_owned(),
            |output| String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        )
}
