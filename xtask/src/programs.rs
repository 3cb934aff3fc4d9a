//! Test programs: built by cargo, then run one by one by us.
//!
//! The rule it keeps: a program runs as `cargo test` would run it, in the folder of its package.
//! Cargo says which programs there are, so none can be forgotten.

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
    /// How it is run, without arguments.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.executable);
        command
            .current_dir(&self.package)
            .env("CARGO_MANIFEST_DIR", &self.package);
        command
    }

    /// Whether it holds tests whose name contains one of `filters`.
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

/// Builds what `cargo`, a `cargo test --no-run` with its options, names, and the programs that the
/// tests start. The compiler's progress and errors reach the terminal as they are.
///
/// # Errors
/// When it does not build.
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
    messages.lines().filter_map(program).collect()
}

/// The test program that a message of cargo is about, if it is about one.
fn program(message: &str) -> Option<Result<Program>> {
    let message: Value = match serde_json::from_str(message) {
        Ok(message) => message,
        Err(error) => return Some(Err(error).context("cargo's message is not JSON")),
    };
    if message["profile"]["test"] != true {
        return None;
    }
    let executable = message["executable"].as_str()?;
    let package = Path::new(message["manifest_path"].as_str()?).parent()?;
    let name = message["target"]["name"].as_str()?;
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent()?;
    let folder = package.strip_prefix(root).unwrap_or(package);
    Some(Ok(Program {
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
    fn only_test_programs_are_run() {
        let artifact = r#"{"reason":"compiler-artifact","manifest_path":"/a/Cargo.toml","target":{"name":"kill"},"profile":{"test":true},"executable":"/t/deps/a-1"}"#;
        let program_of = |message: &str| program(message).map(|it| it.expect("it is JSON"));
        let found = program_of(artifact).expect("it is a test program");
        assert_eq!(found.executable, PathBuf::from("/t/deps/a-1"));
        assert_eq!(found.package, PathBuf::from("/a"));
        assert_eq!(found.label, "/a kill");
        assert!(program_of(&artifact.replace("true", "false")).is_none());
        assert!(program_of(&artifact.replace("\"/t/deps/a-1\"", "null")).is_none());
        assert!(program_of(r#"{"reason":"build-finished","success":true}"#).is_none());
    }
}
