//! Test programs: built by cargo, then run one by one by `xtask`.
//!
//! The rule it keeps: a program runs as `cargo test` would run it, in the folder of its package.
//! Cargo lists the programs, so none can be forgotten.

use std::{
    ffi::OsStr,
    io::{self, Read},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::children;

/// A program that holds tests.
pub(crate) struct Program {
    /// Folder of the package and name of the target, such as `crates/farpage kill`.
    pub(crate) label: String,
    /// Name of the target.
    pub(crate) name: String,
    pub(crate) executable: PathBuf,
    /// The folder in which cargo would run it.
    pub(crate) package: PathBuf,
}

impl Program {
    /// Returns a command that runs the program, without arguments.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.executable);
        command
            .current_dir(&self.package)
            .env("CARGO_MANIFEST_DIR", &self.package);
        command
    }

    /// True if the program holds tests whose name contains one of `filters`.
    pub(crate) fn has_tests(&self, filters: &[&OsStr]) -> Result<bool> {
        let mut list = self.command();
        list.args(filters).args(["--list", "--format", "terse"]);
        let list = list.stdin(Stdio::null()).output();
        let list = list.with_context(|| format!("cannot start {}", self.executable.display()))?;
        if !list.status.success() {
            let why = String::from_utf8_lossy(&list.stderr);
            bail!("{} lists no tests: {why}", self.executable.display());
        }
        Ok(!list.stdout.is_empty())
    }
}

/// Builds the test programs that `cargo`, a `cargo test --no-run` with its options, names, and the
/// programs that the tests start. The compiler's progress and errors reach the terminal unchanged.
///
/// # Errors
/// A build that fails.
pub(crate) fn build(cargo: &mut Command) -> Result<Vec<Program>> {
    cargo.args(["--message-format", "json-render-diagnostics"]);
    let mut child = children::spawn(cargo.stdout(Stdio::piped()))?;
    let mut messages = String::new();
    let output = child.stdout.take().expect("it was set to a pipe above");
    io::BufReader::new(output)
        .read_to_string(&mut messages)
        .context("cannot read what cargo says")?;
    if !children::wait(child)?.success() {
        bail!("the tests do not build; what went wrong is printed above");
    }
    let programs = messages.lines().map(program);
    programs.filter_map(Result::transpose).collect()
}

/// Returns the test program that a message of cargo is about, if it is about one.
fn program(message: &str) -> Result<Option<Program>> {
    let message: Value = serde_json::from_str(message).context("cargo's message is not JSON")?;
    let (Some(executable), Some(manifest), Some(name), true) = (
        message["executable"].as_str(),
        message["manifest_path"].as_str(),
        message["target"]["name"].as_str(),
        message["profile"]["test"] == true,
    ) else {
        return Ok(None);
    };
    let package = Path::new(manifest).parent();
    let package = package.context("a manifest lies in a folder")?;
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    let root = root.context("xtask lies in the workspace")?;
    let folder = package.strip_prefix(root).unwrap_or(package);
    Ok(Some(Program {
        label: format!("{} {name}", folder.display()),
        name: name.to_owned(),
        executable: executable.into(),
        package: package.to_owned(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_told_from_what_they_start() {
        let artifact = r#"{"reason":"compiler-artifact","package_id":"path+file:///a#kill@0.1.0","manifest_path":"/a/Cargo.toml","target":{"name":"kill"},"profile":{"test":true},"executable":"/t/deps/a-1"}"#;
        let found = program(artifact).expect("it is JSON").expect("a test");
        assert_eq!(found.executable, PathBuf::from("/t/deps/a-1"));
        assert_eq!(found.package, PathBuf::from("/a"));
        assert_eq!(found.label, "/a kill");
        for nothing in [
            artifact.replace("true", "false"),
            artifact.replace("\"/t/deps/a-1\"", "null"),
            r#"{"reason":"build-finished","success":true}"#.to_owned(),
        ] {
            assert!(program(&nothing).expect("it is JSON").is_none());
        }
    }
}
