//! Words that do not belong in the repository: they are true only here and now, or for one person.
//!
//! The rule it keeps: the words themselves do not stand in this file either.

use super::{Finding, Said, Source};

/// Marks of unfinished work, which belongs in a tracker, or is done.
const MARKS: [&str; 2] = [concat!("TO", "DO"), concat!("FIX", "ME")];

/// Paths of one person's machine.
const PATHS: [&str; 4] = [
    concat!("/wo", "rk/"),
    concat!("/ho", "me/"),
    concat!("/Us", "ers/"),
    concat!("/ro", "ot/."),
];

/// Hosts of package managers. The machine's own settings say which one is near.
const REGISTRIES: [&str; 5] = [
    concat!("debian", ".org"),
    concat!("ubuntu", ".com"),
    concat!("index.", "crates.io"),
    concat!("static.", "crates.io"),
    concat!("pypi", ".org"),
];

/// Hosts that links may lead to. Names without a dot, numbers, and names below `example` are made
/// up.
const HOSTS: [&str; 9] = [
    "docs.rs",
    "github.com",
    "keepachangelog.com",
    "sdrbench.github.io",
    "semver.org",
    "www.apache.org",
    "www.cs.virginia.edu",
    "www.w3.org",
    "zfp.readthedocs.io",
];

pub(super) fn check(file: &Source, said: &[Said<'_>], findings: &mut Vec<Finding>) {
    for (at, line) in file.text.lines().enumerate() {
        let mut found = |what: String| findings.push(file.finding(at + 1, what));
        for mark in MARKS.iter().filter(|mark| has_word(line, mark)) {
            found(format!("{mark}: do it, or leave it out"));
        }
        for path in PATHS.iter().filter(|path| has_path(line, path)) {
            found(format!("`{path}` is a path of one machine"));
        }
        for host in REGISTRIES.iter().filter(|host| line.contains(**host)) {
            found(format!(
                "`{host}`: leave registries and mirrors to the machine's settings"
            ));
        }
        for host in hosts(line).filter(|host| !is_allowed(host)) {
            found(format!(
                "`{host}` is no host that xtask/src/tidy/words.rs knows: does the link belong here?"
            ));
        }
    }
    for said in said {
        if let Some(issue) = issue(said.text) {
            let what = format!("`{issue}`: say what it says instead");
            findings.push(file.finding(said.number, what));
        }
    }
}

fn has_word(line: &str, word: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word)
        .any(|(at, _)| !line[..at].ends_with(part) && !line[at + word.len()..].starts_with(part))
}

/// True if `line` has a path that begins with `start`, and is not the end of a relative path.
fn has_path(line: &str, start: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || matches!(c, '.' | '_' | '-' | '}' | '*');
    line.match_indices(start)
        .any(|(at, _)| !line[..at].ends_with(part))
}

/// Returns the hosts of the line's web addresses.
fn hosts(line: &str) -> impl Iterator<Item = &str> {
    ["http://", "https://"].into_iter().flat_map(move |scheme| {
        line.match_indices(scheme).map(move |(at, _)| {
            let rest = &line[at + scheme.len()..];
            let name = |c: char| c.is_alphanumeric() || matches!(c, '.' | '-');
            rest.split(|c| !name(c)).next().unwrap_or_default()
        })
    })
}

fn is_allowed(host: &str) -> bool {
    let made_up = !host.contains('.')
        || host.starts_with(|c: char| c.is_ascii_digit())
        || host.split('.').any(|part| part == "example");
    made_up || HOSTS.contains(&host)
}

/// Returns the number of an issue in `text`: a reader cannot look it up.
fn issue(text: &str) -> Option<&str> {
    let number = |rest: &str| {
        rest.find(|c: char| !c.is_ascii_digit())
            .unwrap_or(rest.len())
    };
    let marked = text.match_indices('#').find_map(|(at, _)| {
        let digits = number(&text[at + 1..]);
        let end = at + 1 + digits;
        let is_name = text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '&');
        // A colour has letters or six digits, an anchor goes on with a word.
        let goes_on =
            text[end..].starts_with(|c: char| c.is_alphanumeric() || c == '-' || c == '"');
        (1..=5).contains(&digits).then_some(())?;
        (!is_name && !goes_on).then(|| &text[at..end])
    });
    let lower = ["issue ", "Issue "].into_iter();
    marked.or_else(|| {
        lower
            .flat_map(|word| text.match_indices(word))
            .find_map(|(at, word)| {
                let digits = number(&text[at + word.len()..]);
                (digits > 0).then(|| &text[at..at + word.len() + digits])
            })
    })
}

#[cfg(test)]
mod tests {
    use super::{super::tests, *};

    fn found(path: &str, text: &str) -> Vec<String> {
        tests::found(check, path, text)
    }

    #[test]
    fn marks_paths_registries_and_hosts_are_found_in_any_file() {
        for bad in [
            format!("// {}: later", MARKS[0]),
            format!("let a = 1; // {}", MARKS[1]),
            format!("let a = \"{}me/file\";", PATHS[0]),
            format!("cd {}me", PATHS[1]),
            format!("deb http://{}/debian stable", REGISTRIES[0]),
            format!("index = \"sparse+https://{}/\"", REGISTRIES[2]),
            format!("[mirror](https://{}/x)", "mirror.net"),
        ] {
            for path in ["a.rs", "b.md", "c.toml", "d.json", "e"] {
                let findings = found(path, &format!("fine\n{bad}\n"));
                assert!(!findings.is_empty(), "{path}: {bad}");
                let place = format!("{path}:2: ");
                assert!(findings.iter().all(|found| found.starts_with(&place)));
            }
        }
    }

    #[test]
    fn words_that_look_alike_are_not() {
        for good in [
            format!("let {}S = 1;", MARKS[0]),
            format!("open(\"a{}b\")", PATHS[0]),
            "http://10.0.0.2:7400 http://localhost https://host/x http://mirror.example/debian"
                .to_owned(),
            "https://github.com/LLNL/umap".to_owned(),
        ] {
            assert_eq!(found("a.rs", &good), [""; 0], "{good}");
        }
    }

    #[test]
    fn numbers_of_issues_are_found_where_somebody_reads() {
        for bad in [
            format!("see {}7", "#"),
            format!("({}123)", "#"),
            format!("as {} 12 says", "issue"),
        ] {
            assert_eq!(found("a.md", &bad).len(), 1, "{bad}");
            assert_eq!(found("a.rs", &format!("f(); // {bad}")).len(), 1, "{bad}");
            assert_eq!(found("a.toml", &format!("# {bad}")).len(), 1, "{bad}");
            assert_eq!(found("a.rs", &format!("f(\"{bad}\");")), [""; 0], "{bad}");
        }
        for good in [
            "C# 7",
            "[a](#7-steps)",
            "an issue of 12 pages",
            "&#39;",
            "color #1f77b4",
        ] {
            assert_eq!(found("a.md", good), [""; 0], "{good}");
        }
    }
}
