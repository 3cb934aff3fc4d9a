//! Files of a crate that import each other in a circle: a reader of one has to read all.
//!
//! The rule it keeps: paths of `use`, and all from `crate` and `super`, lead to files, through
//! re-exports to those that define the names. The first file of a crate is in no circle, and
//! neither are tests. Sources are read as text; globs and macros are not followed.

use std::{
    collections::{BTreeMap, BTreeSet},
    iter,
};

use super::{
    Finding, Source,
    comments::{self, Syntax},
};

/// Modules that are files, by the file's path.
struct Modules<'a>(BTreeMap<&'a str, Module<'a>>);

#[derive(Default)]
struct Module<'a> {
    /// File that declares the module. `None` for the first file of a crate.
    parent: Option<&'a str>,
    is_test: bool,
    /// Files of the modules that this one declares, by name.
    children: BTreeMap<&'a str, &'a str>,
    /// Re-exported paths, by the name that others use.
    re_exports: BTreeMap<String, String>,
}

pub(super) fn check(files: &[Source], findings: &mut Vec<Finding>) {
    let of_crates = files.iter().filter(|file| file.path.contains("src/"));
    let codes: BTreeMap<&str, String> = of_crates
        .map(|file| (&*file.path, code(&file.text)))
        .collect();
    let modules = Modules::of(&codes);
    let mut imported: BTreeMap<&str, BTreeMap<&str, usize>> = BTreeMap::new();
    for (&file, code) in codes.iter().filter(|(file, _)| modules.is_checked(file)) {
        for (at, path) in imports(code) {
            let to = modules.resolve(file, &path);
            if to != file && modules.is_checked(to) {
                let line = code[..at].matches('\n').count() + 1;
                imported.entry(file).or_default().entry(to).or_insert(line);
            }
        }
    }
    for file in files {
        for (to, line) in imported.get(&*file.path).into_iter().flatten() {
            let mut reached = BTreeSet::from([*to]);
            let mut rest = vec![*to];
            while let Some(next) = rest.pop() {
                let more = imported.get(next).into_iter().flat_map(BTreeMap::keys);
                rest.extend(more.filter(|next| reached.insert(next)));
            }
            if reached.contains(&*file.path) {
                let what = format!("imports `{to}`, which leads back here");
                findings.push(file.finding(
                    *line,
                    format!("{what}: move what both need into a file of its own"),
                ));
            }
        }
    }
}

impl<'a> Modules<'a> {
    fn of(codes: &'a BTreeMap<&str, String>) -> Self {
        let mut modules: BTreeMap<&str, Module<'_>> = BTreeMap::new();
        for (&file, code) in codes {
            for item in code.split([';', '}']) {
                let Some((attributes, name)) = item.rsplit_once("mod ") else {
                    continue;
                };
                let mut places = places(file, attributes, name).into_iter();
                let Some((child, _)) = places.find_map(|place| codes.get_key_value(&*place)) else {
                    continue;
                };
                modules
                    .entry(file)
                    .or_default()
                    .children
                    .insert(name, child);
                let child = modules.entry(child).or_default();
                child.parent = Some(file);
                child.is_test = attributes.contains("#[cfg(test)]");
            }
            let module = modules.entry(file).or_default();
            for (at, path) in imports(code) {
                let before = code[..at].rsplit([';', '}', '\n']).next();
                let first = path.split("::").next().unwrap_or_default();
                let is_own = matches!(first, "crate" | "self" | "super")
                    || module.children.contains_key(first);
                if is_own && before.is_some_and(|before| before.contains("pub")) {
                    let name = path.rsplit([':', '=']).next().unwrap_or_default();
                    let path = path.split('=').next().unwrap_or_default();
                    module.re_exports.insert(name.to_owned(), path.to_owned());
                }
            }
        }
        Self(modules)
    }

    /// True if `file` is no test, and not the first file of its crate.
    fn is_checked(&self, file: &str) -> bool {
        let parent = |module: &&Module<'_>| module.parent.map(|parent| &self.0[parent]);
        let first = &self.0[file];
        first.parent.is_some() && !iter::successors(Some(first), parent).any(|it| it.is_test)
    }

    /// Returns the file that defines what `path` names in `file`: `file` itself if none is found.
    fn resolve(&self, file: &'a str, path: &str) -> &'a str {
        let module = &self.0[file];
        let path = path.split_once('=').map_or(path, |(path, _)| path);
        let (first, rest) = path.split_once("::").unwrap_or((path, ""));
        match (first, module.parent, module.children.get(first)) {
            ("self", ..) | ("crate", None, _) => self.resolve(file, rest),
            ("crate", Some(parent), _) => self.resolve(parent, path),
            ("super", Some(parent), _) => self.resolve(parent, rest),
            (_, _, Some(child)) => self.resolve(child, rest),
            _ => match module.re_exports.get(first) {
                Some(path) => self.resolve(file, &format!("{path}::{rest}")),
                None => file,
            },
        }
    }
}

/// Lists the paths in `code` that may lead to other files, with their offsets: `a::b` and `a::C=D`
/// for `use a::{b, C as D}`.
fn imports(code: &str) -> Vec<(usize, String)> {
    let mut imports = Vec::new();
    for start in ["use ", "crate::", "super::"] {
        for (at, _) in code.match_indices(start) {
            let before = &code[..at];
            let is_part = |before: char| before.is_alphanumeric() || "_:$".contains(before);
            if before.ends_with(is_part) || before.ends_with("(in ") {
                continue;
            }
            let tree = match code[at..].strip_prefix("use ") {
                Some(tree) => tree.split(';').next(),
                None => code[at..].split(|c| !is_part(c)).next(),
            };
            let leaves = leaves(tree.unwrap_or_default());
            imports.extend(leaves.into_iter().map(|path| (at, path)));
        }
    }
    imports
}

/// Returns the paths of a tree of imports.
fn leaves(tree: &str) -> Vec<String> {
    let (mut leaves, mut prefixes, mut path) = (Vec::new(), vec![String::new()], String::new());
    for character in tree.replace(" as ", "=").chars().chain([',']) {
        match character {
            '{' => prefixes.push(path.clone()),
            ',' | '}' => {
                if !path.is_empty() && !path.ends_with("::") {
                    leaves.push(path);
                }
                path = match character {
                    ',' => prefixes.last().cloned().unwrap_or_default(),
                    _ => prefixes.pop().map(|_| String::new()).unwrap_or_default(),
                };
            }
            other if other.is_whitespace() => {}
            other => path.push(other),
        }
    }
    leaves
}

/// Returns the places where the file of a module may lie that `file` declares.
fn places(file: &str, attributes: &str, name: &str) -> [String; 2] {
    let (folder, own) = file.rsplit_once('/').unwrap_or(("", file));
    if let Some((_, path)) = attributes.split_once("#[path = \"") {
        let path = path.split('"').next().unwrap_or_default();
        return [format!("{folder}/{path}"), String::new()];
    }
    let inside = match own {
        "lib.rs" | "main.rs" | "mod.rs" => folder,
        _ => file.trim_end_matches(".rs"),
    };
    [
        format!("{inside}/{name}.rs"),
        format!("{inside}/{name}/mod.rs"),
    ]
}

/// Returns a file's text without comments and without the tests at its end, line by line.
fn code(text: &str) -> String {
    let tests = "#[cfg(test)]\nmod ";
    let is_inside = |at: &usize| {
        let declared = text[at + tests.len()..].lines().next();
        declared.is_some_and(|declared| declared.ends_with('{'))
    };
    let end = text.match_indices(tests).map(|(at, _)| at).find(is_inside);
    let text = &text[..end.unwrap_or(text.len())];
    let lines = text.lines().zip(comments::starts(Syntax::Rust, text));
    let code = lines.map(|(line, comment)| comment.map_or(line, |start| &line[..start]));
    code.flat_map(|line| [line, "\n"]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the beginnings of all findings.
    #[track_caller]
    fn expect(files: &[(&str, &str)], expected: &[&str]) {
        let source = |&(path, text): &(&str, &str)| {
            super::super::tests::source(&format!("crates/some/src/{path}"), text)
        };
        let files: Vec<Source> = files.iter().map(source).collect();
        let mut findings = Vec::new();
        check(&files, &mut findings);
        let short = |finding: &Finding| finding.to_string().replace("crates/some/src/", "");
        let found: Vec<String> = findings.iter().map(short).collect();
        let starts = |(found, start): (&String, &&str)| found.starts_with(start);
        let fits = found.len() == expected.len() && found.iter().zip(expected).all(starts);
        assert!(fits, "{found:#?}");
    }

    #[test]
    fn a_circle_names_its_files_and_a_chain_none() {
        let lib = "mod a;\nmod b;\nmod c;\nmod d;\nmod e;\npub use a::{Face, Other};\n";
        let chain = [
            ("lib.rs", lib),
            ("a.rs", "use crate::b;\n"),
            ("b.rs", "use crate::{\n    c::{A, B},\n};\n"),
            ("c.rs", "#[cfg(test)]\nmod tests {\n    use crate::a;\n}\n"),
        ];
        expect(&chain, &[]);
        let circle = [
            ("lib.rs", lib),
            ("a.rs", "use crate::{b::X, d};\n"),
            ("b.rs", "//! Text.\n\nuse crate::Face as Shape;\n"),
            ("d.rs", "fn d() {}\n"),
            ("e.rs", "use crate::a;\n"),
        ];
        expect(
            &circle,
            &["a.rs:1: imports `b.rs`", "b.rs:3: imports `a.rs`"],
        );
    }

    #[test]
    fn a_circle_within_a_folder_is_found() {
        let lib = ("lib.rs", "mod a;\n");
        let (b, c) = (
            ("a/b.rs", "use super::c::C;\n"),
            ("a/c.rs", "use crate::a::B;\n"),
        );
        expect(
            &[
                lib,
                ("a.rs", "mod b;\nmod c;\npub(crate) use self::b::B;\n"),
                b,
                c,
            ],
            &["a/b.rs:1: imports `a/c.rs`", "a/c.rs:1: imports `a/b.rs`"],
        );
        let child = ("a/b.rs", "fn b() {\n    super::helper();\n}\n");
        expect(
            &[lib, ("a/mod.rs", "mod b;\n\nuse b::{B};\n"), child],
            &[
                "a/mod.rs:3: imports `a/b.rs`",
                "a/b.rs:2: imports `a/mod.rs`",
            ],
        );
    }

    #[test]
    fn tests_and_the_first_file_of_a_crate_may_import_any_file() {
        let files = [
            (
                "lib.rs",
                "mod a;\nmod b;\n#[cfg(test)]\nmod simulation;\nuse a::A;\n",
            ),
            ("a.rs", "use crate::{\n    b,\n    Root,\n};\n"),
            (
                "b.rs",
                "pub(in crate::a) fn b() {}\n\n#[cfg(test)]\nmod tests;\n",
            ),
            ("b/tests.rs", "use crate::a;\nuse super::b;\n"),
            ("simulation/mod.rs", "mod c;\nuse c::C;\n"),
            ("simulation/c.rs", "use super::D;\n"),
        ];
        expect(&files, &[]);
    }

    #[test]
    fn files_with_a_path_belong_to_the_file_that_names_it() {
        let files = [
            ("main.rs", "mod report;\nmod state;\n"),
            ("report.rs", "use crate::state;\n"),
            ("state.rs", ""),
            (
                "preload.rs",
                "#[path = \"preload/report.rs\"]\nmod report;\n#[path = \"preload/state.rs\"]\nmod state;\n",
            ),
            ("preload/report.rs", "use crate::state;\n"),
            ("preload/state.rs", "use crate::report;\n"),
        ];
        expect(
            &files,
            &[
                "preload/report.rs:1: imports `preload/state.rs`",
                "preload/state.rs:1: imports `preload/report.rs`",
            ],
        );
    }
}
