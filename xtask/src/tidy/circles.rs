//! Files of a crate that import each other in a circle: a reader of one has to read all.
//!
//! The rule it keeps: only `use crate::...` counts, read as text, and in files beside `lib.rs` `use
//! super::...`, which is equal. A folder counts as one file. Names that `lib.rs` hands on are
//! followed to the files that define them. Tests may import any file.

use std::collections::{BTreeMap, BTreeSet};

use super::{Finding, Source};

/// Crates without circles. A crate that has lost its last circle joins the list.
const CRATES: [&str; 18] = [
    "bench/apps/src/",
    "bench/judge/src/",
    "bench/kit/src/",
    "bench/src/",
    "crates/capi/src/",
    "crates/codec/src/",
    "crates/fabric/measure/src/",
    "crates/fabric/src/",
    "crates/farpage/src/",
    "crates/pager/src/",
    "crates/python/src/",
    "crates/store/measure/src/",
    "crates/signals/src/",
    "crates/store/src/",
    "crates/tables/src/",
    "crates/vm/src/",
    "crates/wire/src/",
    "memserver/src/",
];

/// Names that a file imports, with the line of each.
type Imports = BTreeMap<String, usize>;

pub(super) fn check(files: &[Source], findings: &mut Vec<Finding>) {
    for root in CRATES {
        let of_crate: Vec<(&str, &Source)> = files
            .iter()
            .filter_map(|file| Some((module_of(file.path.strip_prefix(root)?)?, file)))
            .collect();
        let modules: BTreeSet<&str> = of_crate.iter().map(|(module, _)| *module).collect();
        let handed_on = of_crate
            .iter()
            .find(|(module, _)| *module == "lib")
            .map_or_else(BTreeMap::new, |(_, lib)| handed_on(&lib.text));
        let mut graph: BTreeMap<&str, Vec<(String, usize, &Source)>> = BTreeMap::new();
        for (module, file) in of_crate
            .iter()
            .filter(|(module, _)| !matches!(*module, "lib" | "main"))
        {
            let root_is_super = !file.path[root.len()..].contains('/');
            for (name, line) in imports(&file.text, root_is_super) {
                let to = handed_on.get(&name).unwrap_or(&name);
                if modules.contains(to.as_str()) && to != module {
                    graph
                        .entry(module)
                        .or_default()
                        .push((to.clone(), line, file));
                }
            }
        }
        for edges in in_circles(graph).values() {
            for (to, line, file) in edges {
                findings.push(file.finding(
                    *line,
                    format!("imports `{to}`, which imports it in turn: break the circle"),
                ));
            }
        }
    }
}

/// Returns the module at the top of the crate that a file belongs to. `None` for files of tests.
fn module_of(path: &str) -> Option<&str> {
    let module = path.split(['/', '.']).next()?;
    let is_of_tests = matches!(module, "simulation" | "tests") || path.ends_with("/tests.rs");
    (path.ends_with(".rs") && !is_of_tests).then_some(module)
}

/// Returns the names that `lib.rs` has from its modules, with the module of each.
fn handed_on(lib: &str) -> BTreeMap<String, String> {
    let mut names = BTreeMap::new();
    for statement in lib.split("pub use ").skip(1) {
        let statement = statement.split(';').next().unwrap_or_default();
        if let Some((module, rest)) = statement.split_once("::") {
            let name = |name: &str| name.trim().to_owned();
            let list = rest.trim_matches(['{', '}', '\n', ' ']).split(',');
            let named = list.filter(|item| !item.trim().is_empty());
            names.extend(named.map(|item| (name(item), name(module))));
        }
    }
    names
}

/// Returns the first names behind `crate::`, or an equal root, in imports before the file's tests.
fn imports(text: &str, root_is_super: bool) -> Imports {
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or(text);
    let mut names = Imports::new();
    let roots = ["use crate::", "use super::"];
    for root in &roots[..1 + usize::from(root_is_super)] {
        for (at, _) in text.match_indices(root) {
            let line = text[..at].lines().count() + 1;
            let statement = text[at + root.len()..].split(';').next();
            for item in items(statement.unwrap_or_default()) {
                names.entry(item).or_insert(line);
            }
        }
    }
    names
}

/// Returns the first names of a list of imports: `a` and `D` for `{a::{b, c}, D}`.
fn items(statement: &str) -> Vec<String> {
    let mut items = vec![String::new()];
    let mut depth = i32::from(!statement.starts_with('{'));
    for character in statement.chars() {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 1 => items.push(String::new()),
            other if depth == 1 => items.last_mut().expect("there is one").push(other),
            _ => {}
        }
    }
    let first = |item: String| {
        let item = item.trim();
        item.split("::").next().unwrap_or(item).to_owned()
    };
    items.into_iter().map(first).collect()
}

/// Removes files that import none of the rest, or that none of the rest imports, again and again.
/// Returns the files that are left.
fn in_circles<T: Clone>(
    mut graph: BTreeMap<&str, Vec<(String, usize, T)>>,
) -> BTreeMap<&str, Vec<(String, usize, T)>> {
    loop {
        let before: usize = graph.values().map(Vec::len).sum();
        let importers: BTreeSet<String> = graph.keys().map(|&from| from.to_owned()).collect();
        let imported: BTreeSet<String> = graph
            .values()
            .flatten()
            .map(|(to, ..)| to.clone())
            .collect();
        graph.retain(|from, edges| {
            edges.retain(|(to, ..)| importers.contains(to));
            imported.contains(*from) && !edges.is_empty()
        });
        if graph.values().map(Vec::len).sum::<usize>() == before {
            return graph;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let source = |&(path, text): &(&str, &str)| Source {
            path: format!("{}{path}", CRATES[0]),
            text: text.to_owned(),
        };
        let files: Vec<Source> = files.iter().map(source).collect();
        let mut findings = Vec::new();
        check(&files, &mut findings);
        findings.iter().map(Finding::to_string).collect()
    }

    #[test]
    fn a_circle_names_its_files_and_a_chain_none() {
        let lib = ("lib.rs", "mod a;\npub use a::{Face, Other};\n");
        let chain = [
            lib,
            ("a.rs", "use crate::b;\n"),
            ("b.rs", "use crate::{\n    c::{A, B},\n};\n"),
            ("c.rs", "#[cfg(test)]\nmod tests {\n    use crate::a;\n}\n"),
        ];
        assert_eq!(found(&chain), Vec::<String>::new());
        let circle = [
            lib,
            ("a.rs", "use crate::{b::X, d};\n"),
            ("b.rs", "//! Text.\n\nuse crate::Face;\n"),
            ("d.rs", "fn d() {}\n"),
            ("e.rs", "use crate::a;\n"),
        ];
        let found = found(&circle);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("a.rs:1: imports `b`"), "{found:?}");
        assert!(found[1].contains("b.rs:3: imports `a`"), "{found:?}");
    }

    #[test]
    fn a_comma_at_the_end_and_tests_in_a_folder_import_nothing() {
        let files = [
            (
                "lib.rs",
                "mod a;\nmod b;\npub use a::{\n    X,\n    Y,\n};\n",
            ),
            ("a.rs", "use crate::b;\n"),
            ("b.rs", "use crate::{\n    c,\n    d,\n};\n"),
            ("b/tests.rs", "use crate::a;\n"),
        ];
        assert_eq!(found(&files), Vec::<String>::new());
    }

    #[test]
    fn the_file_above_is_the_root_only_beside_it() {
        let beside = [
            ("lib.rs", "mod a;\nmod b;\n"),
            ("a.rs", "use super::b;\n"),
            ("b.rs", "use crate::a;\n"),
        ];
        assert_eq!(found(&beside).len(), 2);
        let below = [
            ("lib.rs", "mod a;\nmod b;\n"),
            ("a/c.rs", "use super::b;\n"),
            ("b.rs", "use crate::a;\n"),
        ];
        assert_eq!(found(&below), Vec::<String>::new());
    }
}
