//! Results that outlive an interrupted run: a file in a directory, a line for each benchmark that
//! has ended.
//!
//! The rule it keeps: a result in the file was measured by the command beside it, on the machine
//! named at the file's beginning. A line is written when its benchmark has ended, at once and
//! whole; one that was torn by a crash is measured again.

use std::{
    collections::HashMap,
    fs::{self, File, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::record::Circumstances;
use farpage_bench_kit::sitting::Sitting;

const FILE: &str = "points.jsonl";

/// Results measured so far.
pub(crate) struct Points {
    path: PathBuf,
    file: File,
    reports: HashMap<(String, u16), Value>,
    pub(crate) circumstances: Circumstances,
}

#[derive(Serialize, Deserialize)]
struct Line {
    command: String,
    /// Number of the repetition, which tells results of one command apart.
    repetition: u16,
    report: Value,
}

impl Points {
    /// Opens the results that an earlier run left in `directory`, or begins `afresh`.
    ///
    /// # Errors
    /// The directory cannot be made or written to, or holds results of another machine.
    pub(crate) fn open(directory: &Path, afresh: bool) -> Result<Self> {
        fs::create_dir_all(directory)
            .with_context(|| format!("cannot make the directory {}", directory.display()))?;
        let path = directory.join(FILE);
        let shown = path.display();
        let text = match fs::exists(&path) {
            Ok(true) if !afresh => fs::read_to_string(&path),
            other => other.map(|_| String::new()),
        };
        let text = text.with_context(|| format!("cannot read the results so far, {shown}"))?;
        // A last line without its end was not written whole.
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        let mut lines = text[..whole].lines();
        let here = Circumstances::now();
        let circumstances: Circumstances = match lines.next() {
            None => here.clone(),
            Some(line) => serde_json::from_str(line)
                .with_context(|| format!("{shown} is not of this program: choose another --out"))?,
        };
        let mut reports = HashMap::new();
        for line in lines {
            let line: Line = serde_json::from_str(line)
                .with_context(|| format!("{shown} has a line that is no result: remove it"))?;
            reports.insert((line.command, line.repetition), line.report);
        }
        ensure!(
            circumstances.machine == here.machine && circumstances.kernel == here.kernel,
            "{shown} holds results of another machine ({}, Linux {}): choose another --out, or remove the file to measure afresh",
            circumstances.machine,
            circumstances.kernel
        );
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .with_context(|| format!("cannot write to {shown}"))?;
        let mut truncate = || {
            file.set_len(whole as u64)?;
            std::io::Seek::seek(&mut file, std::io::SeekFrom::End(0))?;
            match whole {
                0 => write_line(&mut file, &circumstances),
                _ => Ok(()),
            }
        };
        truncate().with_context(|| format!("cannot write to {shown}"))?;
        Ok(Self {
            path,
            file,
            reports,
            circumstances,
        })
    }

    /// Measures a repetition of a command, unless an earlier run has done so.
    ///
    /// # Errors
    /// The benchmark fails, finds wrong data, or is interrupted.
    pub(crate) fn measure(
        &mut self,
        sitting: &Sitting,
        command: &str,
        repetition: u16,
    ) -> Result<()> {
        let key = (command.to_owned(), repetition);
        if self.reports.contains_key(&key) {
            return Ok(());
        }
        let report = sitting.run(command).with_context(|| {
            let kept = self.reports.len();
            format!("{kept} results are kept; the same command goes on from there")
        })?;
        let line = Line {
            command: key.0.clone(),
            repetition,
            report,
        };
        write_line(&mut self.file, &line)
            .with_context(|| format!("cannot write to {}", self.path.display()))?;
        self.reports.insert(key, line.report);
        Ok(())
    }

    /// Returns the figure at `path`, such as `/kernels/3/mb_per_s`, of a command in all its
    /// repetitions.
    pub(crate) fn figures(&self, command: &str, path: &str) -> Result<Vec<f64>> {
        let report = |repetition| self.reports.get(&(command.to_owned(), repetition));
        let figures = (0..).map_while(report);
        let figures = figures.filter_map(|report| report.pointer(path)?.as_f64());
        let figures: Vec<f64> = figures.collect();
        if figures.is_empty() {
            bail!("`farpage-bench {command}` has no figure {path}");
        }
        Ok(figures)
    }
}

fn write_line(file: &mut File, line: &impl Serialize) -> std::io::Result<()> {
    let mut text = serde_json::to_string(line)?;
    text.push('\n');
    file.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torn_line_is_measured_again_and_another_machine_is_refused() {
        let directory = std::env::temp_dir().join(format!("farpage-points-{}", std::process::id()));
        let path = directory.join(FILE);
        drop(Points::open(&directory, false).unwrap());
        let line = |command: &str| {
            format!(r#"{{"command":"{command}","repetition":0,"report":{{"x":7}}}}"#)
        };
        let begin = fs::read_to_string(&path).unwrap();
        fs::write(&path, format!("{begin}{}\n{}", line("a"), line("b"))).unwrap();
        let points = Points::open(&directory, false).unwrap();
        assert_eq!(points.figures("a", "/x").unwrap(), [7.0]);
        points.figures("b", "/x").unwrap_err();
        points.figures("a", "/y").unwrap_err();
        drop(points);
        // The torn line is gone, so that the next one stands by itself.
        let kept = fs::read_to_string(&path).unwrap();
        assert_eq!(kept, format!("{begin}{}\n", line("a")));

        let machine = Circumstances::now().machine;
        fs::write(&path, begin.replace(&machine, "another machine")).unwrap();
        let refused = Points::open(&directory, false).err().unwrap().to_string();
        let afresh = Points::open(&directory, true);
        fs::remove_dir_all(&directory).unwrap();
        assert!(refused.contains("another machine"), "{refused}");
        assert!(afresh.unwrap().reports.is_empty());
    }
}
