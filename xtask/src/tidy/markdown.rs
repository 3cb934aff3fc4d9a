//! Rules of Markdown: prose is wrapped, and links and named source files exist.
//!
//! The rule it keeps: blocks of code and rows of tables are no prose, and code contains no links.

use std::{fs, path::Path};

use super::{COLUMNS, Finding, Source};

/// Returns the numbers of lines of prose behind column [`COLUMNS`]. Single words cannot be wrapped.
pub(super) fn long_lines(text: &str) -> Vec<usize> {
    prose(text)
        .filter(|(_, line)| {
            let said = line.trim_start_matches(['-', '*', '>', ' ']);
            line.chars().count() > COLUMNS
                && !said.starts_with('|')
                && reference(said).is_none()
                && said.trim().contains(' ')
        })
        .map(|(number, _)| number)
        .collect()
}

/// Returns the lines outside blocks of code, with their numbers.
pub(super) fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    text.lines().enumerate().filter_map(move |(at, line)| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        (!fenced && !fence).then_some((at + 1, line))
    })
}

/// Finds links to files that do not exist, and to headings that no file has.
pub(super) fn links(file: &Source, root: &Path, findings: &mut Vec<Finding>) {
    let folder = root.join(&file.path).with_file_name("");
    for (number, line) in prose(&file.text) {
        for target in targets(line) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (path, heading) = target.split_once('#').unwrap_or((target, ""));
            let found = match path {
                "" => Ok(file.text.clone()),
                _ if folder.join(path).is_dir() => Ok(String::new()),
                _ => fs::read(folder.join(path)).map(|b| String::from_utf8_lossy(&b).into_owned()),
            };
            match found {
                Err(_) => findings.push(file.finding(number, format!("no such file: {target}"))),
                Ok(text) if !heading.is_empty() && !anchors(&text).any(|a| a == heading) => {
                    findings.push(file.finding(number, format!("no such heading: {target}")));
                }
                Ok(_) => {}
            }
        }
    }
}

/// Finds source files that prose names, such as `pager/src/protocol.rs`, and that do not exist.
pub(super) fn source_files(file: &Source, root: &Path, findings: &mut Vec<Finding>) {
    for (number, line) in prose(&file.text) {
        let spans = line.split('`').skip(1).step_by(2);
        let named = spans.filter(|span| span.contains('/') && span.ends_with(".rs"));
        for path in named {
            if !root.join(path).exists() && !root.join("crates").join(path).exists() {
                findings.push(file.finding(number, format!("no such source file: {path}")));
            }
        }
    }
}

/// Returns the targets of a line's links.
fn targets(line: &str) -> Vec<&str> {
    // Text between backquotes is code.
    let spans = line.split('`').step_by(2);
    spans
        .flat_map(|span| {
            span.match_indices("](")
                .filter_map(|(at, _)| span[at + 2..].split_once(')'))
                .map(|(target, _)| target)
        })
        .chain(reference(line))
        .collect()
}

/// Returns the target of a line `[label]: target`.
fn reference(line: &str) -> Option<&str> {
    let (_, target) = line.strip_prefix('[')?.split_once("]: ")?;
    Some(target.trim())
}

/// Returns the anchors of a document's headings, as GitHub makes them.
fn anchors(text: &str) -> impl Iterator<Item = String> {
    prose(text).filter_map(|(_, line)| {
        let title = line.trim_start_matches('#');
        (title.len() < line.len() && title.starts_with(' ')).then(|| {
            title
                .trim()
                .to_lowercase()
                .chars()
                .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
                .map(|c| if c == ' ' { '-' } else { c })
                .collect()
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_prose_is_found_and_code_tables_and_addresses_are_not() {
        let words = "word ".repeat(21);
        assert_eq!(long_lines(&format!("short\n\n{words}")), [3]);
        assert_eq!(long_lines(&format!("- {words}")), [1]);
        assert_eq!(long_lines(&format!("```\n{words}\n```\n{words}")), [4]);
        let address = "x".repeat(120);
        for text in [
            format!("| {words} |"),
            format!("  | {words} |"),
            format!("[label]: https://{address}"),
            format!("- <https://{address}>"),
        ] {
            assert_eq!(long_lines(&text), [0; 0], "{text}");
        }
    }

    #[test]
    fn source_files_that_are_not_there_are_found() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("crates/a/src")).unwrap();
        fs::write(folder.path().join("crates/a/src/lib.rs"), "").unwrap();
        let text = "see `a/src/lib.rs`, `crates/a/src/lib.rs`, `lib.rs` and `a / b`\n\
                    but not `a/src/gone.rs`\n";
        let file = Source {
            path: "x.md".to_owned(),
            text: text.to_owned(),
        };
        let mut findings = Vec::new();
        source_files(&file, folder.path(), &mut findings);
        let found: Vec<String> = findings.iter().map(Finding::to_string).collect();
        assert_eq!(found, ["x.md:2: no such source file: a/src/gone.rs"]);
    }

    #[test]
    fn links_that_lead_nowhere_are_found() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("docs")).unwrap();
        fs::write(
            folder.path().join("docs/there.md"),
            "## What a page *costs*\n",
        )
        .unwrap();
        let text = "[a](there.md) [b](there.md#what-a-page-costs) `[c](code.md)` [d](https://x/y)\n\
                    [e](gone.md) [f](there.md#gone)\n\
                    [g](#gone) [h](../docs) [i](#here)\n\
                    # Here\n\
                    ```\n[j](code.md)\n```\n\
                    [k]: gone-too.md\n";
        let file = Source {
            path: "docs/x.md".to_owned(),
            text: text.to_owned(),
        };
        let mut findings = Vec::new();
        links(&file, folder.path(), &mut findings);
        let found: Vec<String> = findings.iter().map(Finding::to_string).collect();
        assert_eq!(
            found,
            [
                "docs/x.md:2: no such file: gone.md",
                "docs/x.md:2: no such heading: there.md#gone",
                "docs/x.md:3: no such heading: #gone",
                "docs/x.md:8: no such file: gone-too.md",
            ]
        );
    }
}
