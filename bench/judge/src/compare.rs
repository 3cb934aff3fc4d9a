//! Two sets of results, figure by figure.
//!
//! The rule it keeps: only figures of the same command with the same parameters are compared, and a
//! change counts only outside of what the repetitions themselves show to be noise.

use clap::Args;
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use comfy_table::Table;
use serde_json::{Deserializer, Map, Value};

use farpage_bench_kit::{
    out::say,
    report::{self, median, spread},
};

/// Number of repetitions on both sides from which on their ranges say what noise is. Two sets of
/// three from one distribution have disjoint ranges once in 10 times, of five once in 126.
const REPETITIONS_MIN: usize = 3;
/// Largest relative difference of medians that counts as noise with fewer repetitions.
const NOISE_SHARE: f64 = 0.1;

/// Options of `compare`.
#[derive(Args, Debug)]
pub struct CompareOptions {
    /// Results from before
    a: PathBuf,
    /// Results from after
    b: PathBuf,
}

/// Runs the subcommand `compare` and prints what it found.
///
/// # Errors
/// A path cannot be read, or nothing was measured in both.
pub fn run(options: &CompareOptions) -> Result<()> {
    let (a, b) = (groups(&options.a)?, groups(&options.b)?);
    let (path_a, path_b) = (options.a.display(), options.b.display());
    if !a.keys().any(|key| b.contains_key(key)) {
        bail!(
            "nothing to compare: no command was run with the same parameters on both sides\n{path_a} has\n{}\n{path_b} has\n{}",
            list(a.keys()),
            list(b.keys())
        );
    }
    for (path, only) in [
        (path_a, list(a.keys().filter(|key| !b.contains_key(*key)))),
        (path_b, list(b.keys().filter(|key| !a.contains_key(*key)))),
    ] {
        if !only.is_empty() {
            eprintln!("Not compared, since only {path} has them:\n{only}");
        }
    }
    for (key, a) in &a {
        if let Some(b) = b.get(key) {
            say(format_args!("{key}\n{}\n", table(a, b)))?;
        }
    }
    say(format_args!(
        "Changed: with {REPETITIONS_MIN} repetitions or more on both sides, their ranges do not overlap; with fewer, more than {:.0} %.",
        100.0 * NOISE_SHARE
    ))
}

/// Values of figures in all repetitions, by the figures' names.
type Figures = BTreeMap<String, Vec<f64>>;

/// Figures by command and parameters. Repetitions share a group.
pub(crate) type Groups = BTreeMap<String, Figures>;

/// Name of the field of a record that holds groups.
pub(crate) const GROUPS: &str = "figures_by_command";

fn groups(path: &Path) -> Result<Groups> {
    let mut groups = Groups::new();
    for file in files(path)? {
        let text = fs::read_to_string(&file)
            .with_context(|| format!("cannot read results from {}", file.display()))?;
        let of_file = read(&text).with_context(|| {
            let file = file.display();
            format!("{file} does not hold results of `farpage-bench --format json`")
        })?;
        add(&mut groups, of_file);
    }
    ensure!(!groups.is_empty(), "{} holds no results", path.display());
    Ok(groups)
}

/// Returns the file `path` itself, or the JSON files of a directory.
fn files(path: &Path) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let context = || format!("cannot list the directory {}", path.display());
    let mut files = Vec::new();
    for entry in fs::read_dir(path).with_context(context)? {
        files.push(entry.with_context(context)?.path());
    }
    files.retain(|file| file.extension().is_some_and(|name| name == "json"));
    let folder = path.display();
    ensure!(!files.is_empty(), "there is no .json file in {folder}");
    files.sort();
    Ok(files)
}

/// Reads all results in a text: one or several after another, each a result, a command's list of
/// `reports`, or a record.
fn read(text: &str) -> Result<Groups> {
    let mut groups = Groups::new();
    let mut reports = Vec::new();
    for value in Deserializer::from_str(text).into_iter::<Value>() {
        let mut value = value?;
        if let Some(recorded) = value.get_mut(GROUPS) {
            let recorded: Groups = serde_json::from_value(recorded.take())
                .with_context(|| format!("its `{GROUPS}` are no figures"))?;
            add(&mut groups, recorded);
            continue;
        }
        match value.get_mut("reports").map(Value::take) {
            Some(Value::Array(several)) => reports.extend(several),
            Some(_) => bail!("its `reports` are no list"),
            None => reports.push(value),
        }
    }
    add(&mut groups, grouped(&reports)?);
    Ok(groups)
}

/// Adds the repetitions of `more` to `groups`.
fn add(groups: &mut Groups, more: Groups) {
    for (key, figures) in more {
        let group = groups.entry(key).or_default();
        for (name, values) in figures {
            group.entry(name).or_default().extend(values);
        }
    }
}

/// Returns the figures of results by command and parameters.
pub(crate) fn grouped(reports: &[Value]) -> Result<Groups> {
    let mut groups = Groups::new();
    for report in reports {
        let named = report["benchmark"].is_string() && report["config"].is_object();
        ensure!(named, "no `benchmark` and `config` in it");
        let failed = "a result in it failed verification: its figures are worthless";
        ensure!(report["verified"] == true, failed);
        let group = groups.entry(key(report)?).or_default();
        for (name, value) in flat(report) {
            group.entry(name).or_default().push(five_digits(value));
        }
    }
    Ok(groups)
}

/// Rounds to five digits, beyond which there is only noise. Counts stay as they are.
fn five_digits(value: f64) -> f64 {
    if value == value.trunc() {
        return value;
    }
    let digits = format!("{value:.4e}");
    digits.parse().expect("a number that was just written")
}

/// Returns the command and the parameters of a result as text.
fn key(report: &Value) -> Result<String> {
    let key = report["benchmark"].as_str();
    let mut key = key.context("a result without a name")?.to_owned();
    let config = report["config"].as_object();
    for (name, value) in config.context("a result without parameters")? {
        let text = value.as_str().map(str::to_owned);
        let mut value = text.unwrap_or_else(|| value.to_string());
        if name == "server" {
            // Ports and process ids change from run to run.
            value.truncate(value.find("://").unwrap_or(value.len()));
        }
        key += &format!(" {name}={value}");
    }
    Ok(key)
}

/// Returns all numbers outside of the parameters, by names such as `triad.mb_per_s`.
fn flat(report: &Value) -> Vec<(String, f64)> {
    fn visit(name: &str, value: &Value, figures: &mut Vec<(String, f64)>) {
        match value {
            Value::Number(number) => {
                figures.extend(number.as_f64().map(|number| (name.to_owned(), number)));
            }
            Value::Object(object) => {
                for (key, value) in object {
                    let dot = if name.is_empty() { "" } else { "." };
                    visit(&format!("{name}{dot}{key}"), value, figures);
                }
            }
            Value::Array(array) => {
                for value in array {
                    let key = value["name"].as_str().unwrap_or("?");
                    visit(key, value, figures);
                }
            }
            Value::Null | Value::Bool(_) | Value::String(_) => {}
        }
    }
    let mut figures = Vec::new();
    let empty = Map::new();
    for (key, value) in report.as_object().unwrap_or(&empty) {
        if key != "config" {
            visit(key, value, &mut figures);
        }
    }
    figures
}

fn table(a: &Figures, b: &Figures) -> Table {
    let rows = a.iter().filter_map(|(name, a)| {
        let b = b.get(name)?;
        let (from, to) = (median(a), median(b));
        let ratio = if from == to { 1.0 } else { to / from };
        let (from, to, verdict) = (digits(from), digits(to), verdict(name, a, b));
        Some(format!("{name} | {from} | {to} | {ratio:.3} | {verdict}"))
    });
    report::filled_table("figure | A | B | B / A | changed", rows)
}

/// Says how a figure changed from `a` to `b`; empty if the change is noise.
fn verdict(name: &str, a: &[f64], b: &[f64]) -> &'static str {
    let (from, to) = (median(a), median(b));
    let changed = if a.len().min(b.len()) >= REPETITIONS_MIN {
        let ([_, low_a, high_a], [_, low_b, high_b]) = (spread(a), spread(b));
        high_a < low_b || high_b < low_a
    } else {
        (to - from).abs() > NOISE_SHARE * from.abs()
    };
    // The unit says which way is better; counts have no better way.
    let more_is_better = name.ends_with("mb_per_s");
    let less_is_better = name.contains("us_per_") || name.contains("_us.") || name.ends_with("_s");
    match (changed, to > from) {
        (false, _) => "",
        (true, more) if more_is_better => ["WORSE", "better"][usize::from(more)],
        (true, more) if less_is_better => ["better", "WORSE"][usize::from(more)],
        (true, true) => "more",
        (true, false) => "less",
    }
}

/// Formats `x` with four digits, or all of a large count.
fn digits(x: f64) -> String {
    match x.abs() {
        x_abs if x_abs >= 1000.0 || x == x.trunc() => format!("{x:.0}"),
        x_abs if x_abs >= 10.0 => format!("{x:.2}"),
        _ => format!("{x:.4}"),
    }
}

fn list<'a>(keys: impl Iterator<Item = &'a String>) -> String {
    let lines: Vec<String> = keys.map(|key| format!("  {key}")).collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_overlap_are_noise() {
        let of = |after: [f64; 3]| verdict("triad.mb_per_s", &[100.0, 90.0, 110.0], &after);
        assert_eq!(of([109.0, 150.0, 160.0]), "");
        assert_eq!(of([111.0, 112.0, 113.0]), "better");
    }

    #[test]
    fn of_single_runs_small_differences_are_noise() {
        assert_eq!(verdict("us_per_read", &[10.0], &[10.9]), "");
        assert_eq!(verdict("us_per_read", &[10.0], &[11.1]), "WORSE");
        assert_eq!(verdict("fault_us.p50", &[10.0], &[8.0]), "better");
        assert_eq!(verdict("faults", &[10.0], &[8.0]), "less");
    }

    #[test]
    fn repetitions_share_a_group_whatever_their_port() {
        let text = r#"
            {"benchmark":"stream","verified":true,"config":{"server":"tcp://a:1"},"kernels":[{"name":"triad","mb_per_s":5}]}
            {"benchmark":"stream","verified":true,"config":{"server":"tcp://a:2"},"kernels":[{"name":"triad","mb_per_s":6}]}"#;
        let groups = read(text).unwrap();
        let figures: Vec<&Figures> = groups.values().collect();
        assert_eq!(figures.len(), 1, "{groups:?}");
        assert_eq!(figures[0]["triad.mb_per_s"], [5.0, 6.0]);
    }

    #[test]
    fn a_record_is_compared_like_the_results_it_was_made_of() {
        let result = r#"{"benchmark":"stream","verified":true,"config":{"server":"shm:///a"},"kernels":[{"name":"triad","mb_per_s":5}]}"#;
        let groups = read(&format!("{result}{result}")).unwrap();
        let record = serde_json::json!({ "benchmark": "targets", GROUPS: groups });
        assert_eq!(read(&record.to_string()).unwrap(), groups);
        assert_eq!(groups["stream server=shm"]["triad.mb_per_s"], [5.0, 5.0]);
        assert!(read(&format!(r#"{{"{GROUPS}":[1]}}"#)).is_err());
    }

    #[test]
    fn what_was_not_verified_is_refused() {
        let text = r#"{"benchmark":"stream","verified":false,"config":{}}"#;
        assert!(read(text).is_err());
    }
}
