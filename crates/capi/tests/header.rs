//! Comparison of `include/farpage.h` with the output of cbindgen.

use std::{env, fs, path::Path};

#[test]
fn header_is_current() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).expect("its own file");
    let bindings = cbindgen::Builder::new()
        .with_crate(root)
        .with_config(config)
        .generate()
        .expect("the sources compile");
    let mut made = Vec::new();
    bindings.write(&mut made);
    // The promises of a Rust caller are told to C callers by the text under the heading.
    let made = without_safety(&String::from_utf8(made).expect("sources are UTF-8"));
    let path = root.join("include/farpage.h");
    if env::var_os("FARPAGE_RENEW").is_some() {
        fs::write(&path, &made).expect("the checkout can be written");
    }
    let kept = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        kept == made,
        "include/farpage.h is not current: run `FARPAGE_RENEW=1 cargo test -p farpage-capi --test header` and commit it"
    );
}

/// Removes the headings `# Safety`, which are Rust's, and keeps their text.
fn without_safety(header: &str) -> String {
    let mut lines: Vec<&str> = header.lines().collect();
    lines.retain(|line| line.trim() != "* # Safety");
    lines.join("\n") + "\n"
}
