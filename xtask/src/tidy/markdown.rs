//! Rules of Markdown: prose is wrapped, and links and named source files exist.
//!
//! The rule it keeps: blocks of code and rows of tables are no prose, and code contains no links.

use std::{fs, path::Path};

use super::{Finding, Said, Source};

/// Returns the lines outside blocks of code, with their numbers.
pub(super) fn prose(text: &str) -> impl Iterator<Item = Said<'_>> {
    let mut fenced = false;
    text.lines().enumerate().filter_map(move |(at, line)| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        let (number, text) = (at + 1, line);
        (!fenced && !fence).then_some(Said { number, line, text })
    })
}

/// Finds links to files that do not exist, and to headings that no file has.
pub(super) fn links(file: &Source, said: &[Said<'_>], root: &Path, findings: &mut Vec<Finding>) {
    let folder = root.join(&file.path).with_file_name("");
    for said in said {
        let number = said.number;
        for target in targets(said.text) {
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
pub(super) fn source_files(
    file: &Source,
    said: &[Said<'_>],
    root: &Path,
    findings: &mut Vec<Finding>,
) {
    for said in said {
        let spans = said.text.split('`').skip(1).step_by(2);
        let named = spans.filter(|span| span.contains('/') && span.ends_with(".rs"));
        for path in named {
            if !root.join(path).exists() && !root.join("crates").join(path).exists() {
                findings.push(file.finding(said.number, format!("no such source file: {path}")));
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
pub(super) fn reference(line: &str) -> Option<&str> {
    let (_, target) = line.strip_prefix('[')?.split_once("]: ")?;
    Some(target.trim())
}

/// Returns the anchors of a document's headings, as GitHub makes them.
fn anchors(text: &str) -> impl Iterator<Item = String> {
    prose(text).filter_map(|said| {
        let title = said.text.trim_start_matches('#');
        (title.len() < said.text.len() && title.starts_with(' ')).then(|| {
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
    use super::{super::tests::found, *};

    #[test]
    fn source_files_that_are_not_there_are_found() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("crates/a/src")).unwrap();
        fs::write(folder.path().join("crates/a/src/lib.rs"), "").unwrap();
        let text = "see `a/src/lib.rs`, `crates/a/src/lib.rs`, `lib.rs` and `a / b`\n\
                    but not `a/src/gone.rs`\n";
        let rule = |file: &Source, said: &[Said<'_>], findings: &mut Vec<Finding>| {
            source_files(file, said, folder.path(), findings);
        };
        assert_eq!(
            found(rule, "x.md", text),
            ["x.md:2: no such source file: a/src/gone.rs"]
        );
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
        let rule = |file: &Source, said: &[Said<'_>], findings: &mut Vec<Finding>| {
            links(file, said, folder.path(), findings);
        };
        assert_eq!(
            found(rule, "docs/x.md", text),
            [
                "docs/x.md:2: no such file: gone.md",
                "docs/x.md:2: no such heading: there.md#gone",
                "docs/x.md:3: no such heading: #gone",
                "docs/x.md:8: no such file: gone-too.md",
            ]
        );
    }
}
