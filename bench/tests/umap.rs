//! `versus-umap` as a process. The libraries and the driver are built on the way, which takes a
//! while the first time.

mod common;

use std::{
    collections::BTreeSet,
    process::{Command, Stdio},
};

use farpage_testkit::test_name;

use common::{assert_has, assert_refused, can_page, list, printed, report};

/// True if there is a C++ compiler. Says that the running test is skipped if not.
fn can_compile() -> bool {
    let found = Command::new("c++")
        .arg("--version")
        .stdout(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if !found {
        let test = test_name();
        eprintln!("SKIPPED: {test}: no `c++`; `cargo xtask setup` installs it");
    }
    found
}

#[test]
fn versus_umap_without_an_umap_measures_farpage_alone_and_says_how_to_build_one() {
    if !can_page() || !can_compile() {
        return;
    }
    let report = report("versus-umap --page-sizes=4KiB,64KiB");
    let findings = list(&report, "/findings");
    for (store, kinds) in [("file", 20), ("own", 22)] {
        for page_size_bytes in [4 << 10, 64 << 10] {
            let what: BTreeSet<&str> = findings
                .iter()
                .filter(|one| one["store"] == store && one["page_size_bytes"] == page_size_bytes)
                .map(|one| one["what"].as_str().unwrap())
                .collect();
            assert_eq!(what.len(), kinds, "{what:?}");
        }
    }
    for finding in findings {
        assert!(finding["farpage"].as_f64().is_some(), "{finding}");
        assert_ne!(finding["against"], "Umap");
        let over_writable = finding["against"] == "farpage, writable";
        assert_eq!(finding["ratio"].is_f64(), over_writable, "{finding}");
    }
    let text = printed("versus-umap --smoke --page-sizes=64KiB --stores=own --parts=fault");
    let how_to_build = "versus-umap --umap $HOME/umap-llnl";
    assert_has(&text, &["single fault, p50, us", how_to_build]);
}

#[test]
fn versus_umap_says_where_no_umap_is() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().to_str().unwrap();
    for option in ["--farpage", "--umap"] {
        let args = format!("versus-umap --smoke {option} {prefix}");
        assert_refused(&args, 1, "no Umap is installed at");
        assert_refused(&args, 1, "include/umap/umap.h");
    }
}
