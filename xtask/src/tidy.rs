//! `cargo xtask tidy`: rules of form that no compiler checks, and the test of that name.
//!
//! The rule it keeps: a finding names file and line and the remedy. Rules read the files of the
//! checkout, except those that `.gitignore` names. The contents of comments are left to readers.

mod circles;
mod comments;
mod markdown;
mod openings;
mod words;

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result};

/// Last column of comments and Markdown prose, so that two files fit side by side.
const COLUMNS: usize = 100;

/// Upper bound of lines of ARCHITECTURE.md, which newcomers read first, and whole.
const ARCHITECTURE_LINES: usize = 200;

/// Folder of records, which are kept as the benchmark printed them.
const RECORDS: &str = "bench/record/";

/// One line that breaks a rule.
#[derive(Debug, PartialEq)]
struct Finding {
    file: String,
    line: usize,
    what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.what)
    }
}

/// A file of the checkout.
struct Source {
    /// Path relative to the root, with `/`.
    path: String,
    text: String,
}

impl Source {
    fn finding(&self, line: usize, what: impl Into<String>) -> Finding {
        Finding {
            file: self.path.clone(),
            line,
            what: what.into(),
        }
    }
}

/// Prints findings.
///
/// # Errors
/// A checkout that cannot be read. Findings are an exit code.
pub(crate) fn run() -> Result<ExitCode> {
    let findings = check(&root())?;
    for finding in &findings {
        println!("{finding}");
    }
    if findings.is_empty() {
        println!("tidy");
        return Ok(ExitCode::SUCCESS);
    }
    println!("\n{} to mend", findings.len());
    Ok(ExitCode::FAILURE)
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn check(root: &Path) -> Result<Vec<Finding>> {
    let files = files(root).context("cannot read the checkout")?;
    let mut findings = Vec::new();
    for file in &files {
        findings.extend(long_lines(file));
        words::check(file, &mut findings);
        openings::check(file, &mut findings);
        if file.path.ends_with(".md") {
            markdown::links(file, root, &mut findings);
            markdown::source_files(file, root, &mut findings);
        }
    }
    documents(&files, &mut findings);
    circles::check(&files, &mut findings);
    findings.sort_by(|a, b| (&a.file, a.line).cmp(&(&b.file, b.line)));
    Ok(findings)
}

/// Finds lines of comments and of prose that are too long.
fn long_lines(file: &Source) -> Vec<Finding> {
    let what = if file.path.ends_with(".md") {
        "prose"
    } else {
        "a comment"
    };
    let lines = match (comments::Syntax::of(file), file.path.ends_with(".md")) {
        (_, true) if file.path.starts_with(RECORDS) => Vec::new(),
        (_, true) => markdown::long_lines(&file.text),
        (Some(syntax), _) => comments::long_lines(syntax, &file.text),
        (None, _) => Vec::new(),
    };
    lines
        .into_iter()
        .map(|line| {
            file.finding(
                line,
                format!("{what} of more than {COLUMNS} columns: wrap it"),
            )
        })
        .collect()
}

/// Checks rules of single documents.
fn documents(files: &[Source], findings: &mut Vec<Finding>) {
    for file in files {
        let lines = file.text.lines().count();
        if file.path == "ARCHITECTURE.md" && lines > ARCHITECTURE_LINES {
            findings.push(file.finding(
                ARCHITECTURE_LINES + 1,
                format!(
                    "{lines} lines, {ARCHITECTURE_LINES} at most: move reasons to docs/decisions.md, figures to \
                     docs/measurements.md"
                ),
            ));
        }
        if file.path == "CHANGELOG.md"
            && !file.text.lines().any(|l| l.starts_with("## [Unreleased]"))
        {
            findings.push(file.finding(1, "no section `## [Unreleased]`: add it on top"));
        }
    }
}

/// Reads every text file of the checkout, except files that `.gitignore` names.
fn files(root: &Path) -> io::Result<Vec<Source>> {
    let ignored: Vec<PathBuf> = fs::read_to_string(root.join(".gitignore"))?
        .lines()
        .map(|line| root.join(line.trim_matches('/')))
        .chain([root.join(".git")])
        .collect();
    let mut files = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let (path, kind) = (entry.path(), entry.file_type()?);
            if ignored.contains(&path) {
                continue;
            }
            if kind.is_dir() {
                folders.push(path);
            } else if kind.is_file()
                && let Ok(text) = String::from_utf8(fs::read(&path)?)
            {
                let below = path.strip_prefix(root).expect("the walk starts there");
                let path = below.to_string_lossy().into_owned();
                files.push(Source { path, text });
            }
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, text: &str) -> Source {
        Source {
            path: path.to_owned(),
            text: text.to_owned(),
        }
    }

    #[test]
    fn tidy() {
        let findings = check(&root()).unwrap();
        let list: Vec<String> = findings.iter().map(Finding::to_string).collect();
        assert!(list.is_empty(), "to mend:\n{}", list.join("\n"));
    }

    #[test]
    fn long_comment_is_found() {
        let long = format!("let x = 1;\n// {}\n", "word ".repeat(20));
        let list: Vec<String> = (long_lines(&source("a.rs", &long)).iter())
            .map(Finding::to_string)
            .collect();
        assert_eq!(
            list,
            ["a.rs:2: a comment of more than 100 columns: wrap it"]
        );
        assert_eq!(long_lines(&source("b.rs", "// short\n")), []);
    }

    #[test]
    fn records_and_other_kinds_of_files_may_have_long_lines() {
        let long = "word ".repeat(30);
        assert_eq!(long_lines(&source("bench/record/x.md", &long)), []);
        assert_eq!(long_lines(&source("data.json", &long)), []);
        assert_eq!(long_lines(&source("docs/x.md", &long)).len(), 1);
    }

    #[test]
    fn architecture_has_a_length_and_the_changelog_a_section_for_what_comes() {
        let mut findings = Vec::new();
        let files = [
            source("ARCHITECTURE.md", &"line\n".repeat(200)),
            source("CHANGELOG.md", "# Changelog\n\n## [Unreleased]\n"),
        ];
        documents(&files, &mut findings);
        assert_eq!(findings, []);

        let files = [
            source("ARCHITECTURE.md", &"line\n".repeat(201)),
            source("CHANGELOG.md", "# Changelog\n\n## [1.0.0]\n"),
        ];
        documents(&files, &mut findings);
        let places: Vec<_> = findings.iter().map(|f| (f.file.as_str(), f.line)).collect();
        assert_eq!(places, [("ARCHITECTURE.md", 201), ("CHANGELOG.md", 1)]);
    }
}
