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

use self::comments::Syntax;

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

/// A line that somebody reads: of a comment, or of Markdown prose.
struct Said<'a> {
    number: usize,
    line: &'a str,
    /// Part of the line from the comment's beginning on.
    text: &'a str,
}

impl Source {
    /// Returns the lines of the file's comments or prose.
    fn said(&self) -> Vec<Said<'_>> {
        if self.path.ends_with(".md") {
            return markdown::prose(&self.text).collect();
        }
        let Some(syntax) = Syntax::of(&self.path, &self.text) else {
            return Vec::new();
        };
        let starts = comments::starts(syntax, &self.text);
        let lines = self.text.lines().zip(starts).enumerate();
        let said = lines.filter_map(|(at, (line, start))| {
            let (number, text) = (at + 1, &line[start?..]);
            Some(Said { number, line, text })
        });
        said.collect()
    }

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
        let said = file.said();
        long_lines(file, &said, &mut findings);
        words::check(file, &said, &mut findings);
        if file.path.ends_with(".rs") {
            openings::check(file, &said, &mut findings);
        }
        if file.path.ends_with(".md") {
            markdown::links(file, &said, root, &mut findings);
            markdown::source_files(file, &said, root, &mut findings);
        }
    }
    documents(&files, &mut findings);
    circles::check(&files, &mut findings);
    findings.sort_by(|a, b| (&a.file, a.line).cmp(&(&b.file, b.line)));
    Ok(findings)
}

/// Finds lines of comments and of prose behind column [`COLUMNS`]. Rows of a table, and single
/// words such as a link's address, cannot be wrapped.
fn long_lines(file: &Source, said: &[Said<'_>], findings: &mut Vec<Finding>) {
    let what = match file.path.ends_with(".md") {
        true if file.path.starts_with(RECORDS) => return,
        true => "prose",
        false => "a comment",
    };
    let marks = ['/', '!', '#', '-', '*', '>', ' '];
    for Said { number, line, text } in said {
        let text = text.trim_start_matches(marks).trim();
        let can_wrap = !text.starts_with('|') && text.contains(' ');
        if line.chars().count() > COLUMNS && can_wrap && markdown::reference(text).is_none() {
            let what = format!("{what} of more than {COLUMNS} columns: wrap it");
            findings.push(file.finding(*number, what));
        }
    }
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

    pub(super) fn source(path: &str, text: &str) -> Source {
        Source {
            path: path.to_owned(),
            text: text.to_owned(),
        }
    }

    /// Returns the findings of a rule in one file.
    pub(super) fn found(
        rule: impl Fn(&Source, &[Said<'_>], &mut Vec<Finding>),
        path: &str,
        text: &str,
    ) -> Vec<String> {
        let file = source(path, text);
        let mut findings = Vec::new();
        rule(&file, &file.said(), &mut findings);
        findings.iter().map(Finding::to_string).collect()
    }

    #[test]
    fn tidy() {
        let findings = check(&root()).unwrap();
        let list: Vec<String> = findings.iter().map(Finding::to_string).collect();
        assert!(list.is_empty(), "to mend:\n{}", list.join("\n"));
    }

    #[test]
    fn long_lines_of_comments_and_prose_are_found() {
        let said = "a.rs:2: a comment of more than 100 columns: wrap it";
        let words = "word ".repeat(21);
        let text = format!("let x = 1;\n// {words}\n");
        assert_eq!(found(long_lines, "a.rs", &text), [said]);
        for (path, text) in [
            ("a.rs", format!("/// {words}")),
            ("a.rs", format!("    let a = 1; // {words}")),
            ("a.rs", format!("// ä {} b", "─".repeat(94))),
            ("a.c", format!("/*\n * {words}\n */")),
            ("a.toml", format!("a = 1 # {words}")),
            ("a.md", format!("short\n\n{words}")),
            ("a.md", format!("- {words}")),
            ("a.md", format!("```\n{words}\n```\n{words}")),
            ("docs/a.md", words.clone()),
        ] {
            assert_eq!(found(long_lines, path, &text).len(), 1, "{path}: {text}");
        }
    }

    #[test]
    fn code_tables_addresses_records_and_other_kinds_of_files_may_have_long_lines() {
        let words = "word ".repeat(30);
        let address = format!("https://{}", "x".repeat(120));
        for (path, text) in [
            ("a.rs", "// short\n".to_owned()),
            ("a.rs", format!("let a = \"// {words}\";")),
            ("a.rs", format!("//! | {words} |")),
            ("a.rs", format!("// {address}")),
            ("a.rs", format!("// {}", "x".repeat(97))),
            ("a.rs", format!("// ä {} b", "─".repeat(93))),
            ("a.md", format!("| {words} |")),
            ("a.md", format!("  | {words} |")),
            ("a.md", format!("[label]: {address}")),
            ("a.md", format!("- <{address}>")),
            ("bench/record/x.md", words.clone()),
            ("data.json", words),
        ] {
            assert_eq!(found(long_lines, path, &text), [""; 0], "{path}: {text}");
        }
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
