//! The lines for C and C++ of README.md and docs/c.md, as they are printed there: their commands,
//! in a folder with only their programs.
//!
//! The rule it keeps: only the words that a reader has to replace are replaced here, the prefix,
//! the server and the sizes, and the text must contain each.

mod common;

use std::{collections::BTreeSet, fs, path::Path, process::Command, time::Duration};

use common::{have, prefix, scratch, serve};
use farpage_testkit::{run, text};

const PATIENCE: Duration = Duration::from_secs(120);

/// Returns the code block in `language` of a file that contains `word`.
fn block(file: &str, language: &str, word: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(file);
    let text = fs::read_to_string(path).expect("the checkout has its texts");
    let start = format!("\n```{language}\n");
    let blocks = text.split(&start).skip(1);
    let mut blocks = blocks.map(|block| block.split("```").next().unwrap_or_default());
    let found = blocks.find(|block| block.contains(word));
    found
        .unwrap_or_else(|| panic!("{file} has no block of {language} with `{word}`"))
        .to_owned()
}

/// Replaces the words that a reader replaces. The text must contain each.
fn adapted(text: String, words: &[(&str, &str)]) -> String {
    words.iter().fold(text, |text, (word, instead)| {
        assert!(text.contains(word), "`{word}` is not in\n{text}");
        text.replace(word, instead)
    })
}

#[test]
fn lines_that_are_printed_build_programs_that_run() {
    if !have(&["cc", "c++", "pkg-config"]) {
        return;
    }
    let server = serve("tcp://127.0.0.1:0");
    let endpoint = server.endpoints()[0].to_string();
    let (here, folder) = (prefix().display().to_string(), scratch("folder"));

    // 1. The programs. 32 GiB exceed the server of this test.
    let host = ("tcp://10.0.0.2:7400", endpoint.as_str());
    let size = ("1ull << 35", "1ull << 24");
    let c = block("README.md", "c", "farpage_runtime_new");
    let c = adapted(c, &[host, size, ("1ull << 32", "1ull << 22")]);
    fs::write(folder.join("program.c"), c).expect("the folder is ours");
    let cpp = adapted(block("docs/c.md", "cpp", "NetworkClient"), &[host, size]);
    fs::write(folder.join("umap.cpp"), cpp).expect("the folder is ours");

    // 2. The commands. `cargo xtask install` has already installed the libraries for this test.
    let readme = block("README.md", "sh", "cargo xtask install");
    let (install, readme) = readme.split_once('\n').expect("several commands");
    assert!(install.starts_with("cargo xtask install --prefix /opt/farpage "));
    let more = block("docs/c.md", "sh", "pkg-config");
    let mut made = BTreeSet::new();
    for commands in [readme.to_owned(), more] {
        let commands = adapted(commands, &[("/opt/farpage", here.as_str())]);
        let mut shell = Command::new("sh");
        shell.current_dir(&folder).args(["-e", "-c", &commands]);
        run(shell.env_remove("LD_LIBRARY_PATH"), PATIENCE);

        // 3. The programs that they made.
        for entry in fs::read_dir(&folder).expect("the folder is ours") {
            let path = entry.expect("it can be read").path();
            if path.extension().is_none() {
                let mut program = Command::new(&path);
                program.current_dir(&folder).env_remove("LD_LIBRARY_PATH");
                program.env("UMAP_BUFSIZE", "64");
                let printed = text(&run(&mut program, PATIENCE).stdout);
                assert_eq!(printed, "49\n", "{path:?}");
                fs::remove_file(&path).expect("the folder is ours");
                made.insert(
                    path.file_name()
                        .map(|name| name.to_string_lossy().into_owned()),
                );
            }
        }
    }
    let expected = ["program", "program-static", "umap", "umap-static"];
    assert_eq!(made, expected.map(|name| Some(name.to_owned())).into());
}
