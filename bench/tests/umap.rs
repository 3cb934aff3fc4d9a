//! `versus-umap` as a process. The libraries and the driver are built on the way, which takes a
//! while the first time.

mod common;

use std::process::{Command, Stdio};

use serde_json::Value;

use common::{can_page, run};

/// True if there is a C++ compiler. Says that `test` is skipped if not.
fn can_compile(test: &str) -> bool {
    let found = Command::new("c++")
        .arg("--version")
        .stdout(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if !found {
        eprintln!("SKIPPED: {test}: no `c++`; `cargo xtask setup` installs it");
    }
    found
}

#[test]
fn versus_umap_without_an_umap_measures_farpage_alone_and_says_how_to_build_one() {
    let test = "versus_umap_without_an_umap_measures_farpage_alone_and_says_how_to_build_one";
    if !can_page(test) || !can_compile(test) {
        return;
    }
    let output = run(&[
        "versus-umap",
        "--smoke",
        "--format=json",
        "--page-sizes=4KiB,64KiB",
    ]);
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!(report["benchmark"], "versus-umap");
    assert_eq!(report["verified"], true);
    let findings = report["findings"].as_array().expect("a list");
    for (store, kinds) in [("file", 20), ("own", 22)] {
        for page_size_bytes in [4 << 10, 64 << 10] {
            let mut what: Vec<&str> = findings
                .iter()
                .filter(|one| one["store"] == store && one["page_size_bytes"] == page_size_bytes)
                .map(|one| one["what"].as_str().expect("a text"))
                .collect();
            what.sort_unstable();
            what.dedup();
            assert_eq!(what.len(), kinds, "{what:?}");
        }
    }
    for finding in findings {
        assert!(finding["farpage"].as_f64().is_some(), "{finding}");
        assert_ne!(finding["against"], "Umap");
        let over_writable = finding["against"] == "farpage, writable";
        assert_eq!(finding["ratio"].is_f64(), over_writable, "{finding}");
    }

    let human = run(&[
        "versus-umap",
        "--smoke",
        "--page-sizes=64KiB",
        "--stores=own",
        "--parts=fault",
    ]);
    let text = String::from_utf8_lossy(&human.stdout);
    assert!(human.status.success(), "{human:?}");
    assert!(text.contains("single fault, p50, us"), "{text}");
    assert!(
        text.contains("versus-umap --umap $HOME/umap-llnl"),
        "{text}"
    );
}

#[test]
fn versus_umap_says_where_no_umap_is() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let prefix = folder.path().to_str().expect("a plain name");
    for option in ["--farpage", "--umap"] {
        let output = run(&["versus-umap", "--smoke", option, prefix]);
        assert_eq!(output.status.code(), Some(1));
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(error.contains("no Umap is installed at"), "{error}");
        assert!(error.contains("include/umap/umap.h"), "{error}");
    }
}
