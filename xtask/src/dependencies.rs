//! `cargo xtask dependencies`: origins and licences of all dependencies.
//!
//! The rule it keeps: `deny.toml` has the rules, for this command as for cargo-deny, which takes
//! minutes to install and is needed for security advisories alone. Cargo lists the dependencies,
//! including those of every feature and of every target.

use std::{collections::BTreeMap, fs, process::ExitCode};

use anyhow::{Context, Result, bail};
use serde_json::Value;
use spdx::{Expression, LicenseReq, ParseMode};

use crate::children;

/// The registry of all dependencies, as cargo names it.
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Prints dependencies that `deny.toml` does not allow.
///
/// # Errors
/// A cargo that fails or a `deny.toml` that cannot be read. Findings are an exit code.
pub(crate) fn run() -> Result<ExitCode> {
    let rules = concat!(env!("CARGO_MANIFEST_DIR"), "/../deny.toml");
    let rules = fs::read_to_string(rules).context("cannot read deny.toml")?;
    let rules = Rules::read(&rules)?;
    let mut cargo = children::cargo();
    cargo.args(["metadata", "--format-version=1", "--locked"]);
    let output = cargo.arg("--all-features").output();
    let output = output.context("cannot start cargo")?;
    if !output.status.success() {
        bail!(
            "cargo metadata: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    let metadata: Value =
        serde_json::from_slice(&output.stdout).context("cargo's metadata is not JSON")?;
    let packages = metadata["packages"].as_array().context("no packages")?;
    let findings: Vec<String> = packages.iter().flat_map(|it| rules.check(it)).collect();
    for finding in &findings {
        println!("{finding}");
    }
    if !findings.is_empty() {
        println!(
            "\n{} to mend; deny.toml says what is allowed",
            findings.len()
        );
        return Ok(ExitCode::FAILURE);
    }
    println!(
        "{} packages: sources and licences are allowed",
        packages.len()
    );
    Ok(ExitCode::SUCCESS)
}

/// The part of `deny.toml` that is checked here.
struct Rules {
    allowed: Vec<String>,
    /// Licences that a package may have beside the allowed ones.
    exceptions: BTreeMap<String, Vec<String>>,
    /// Licences of packages that do not name theirs.
    clarified: BTreeMap<String, String>,
}

impl Rules {
    fn read(text: &str) -> Result<Rules> {
        let rules: toml::Table = text.parse().context("deny.toml is not TOML")?;
        let licenses = rules
            .get("licenses")
            .context("deny.toml has no [licenses]")?;
        let texts = |list: Option<&toml::Value>| -> Vec<String> {
            let list = list.and_then(toml::Value::as_array).into_iter().flatten();
            list.filter_map(|it| it.as_str().map(str::to_owned))
                .collect()
        };
        let text = |table: &toml::Value, key: &str| -> Result<String> {
            let text = table.get(key).and_then(toml::Value::as_str);
            let text = text.with_context(|| format!("deny.toml: an entry has no `{key}`"))?;
            Ok(text.to_owned())
        };
        let tables = |key: &str| {
            let list = licenses.get(key).and_then(toml::Value::as_array);
            list.into_iter().flatten()
        };
        Ok(Rules {
            allowed: texts(licenses.get("allow")),
            exceptions: tables("exceptions")
                .map(|it| Ok((text(it, "crate")?, texts(it.get("allow")))))
                .collect::<Result<_>>()?,
            clarified: tables("clarify")
                .map(|it| Ok((text(it, "crate")?, text(it, "expression")?)))
                .collect::<Result<_>>()?,
        })
    }

    /// Returns a line for each rule that a package of cargo's metadata breaks.
    fn check(&self, package: &Value) -> Vec<String> {
        let name = package["name"].as_str().unwrap_or_default();
        let mut findings = Vec::new();
        match package["source"].as_str() {
            Some(REGISTRY) => {}
            Some(other) => findings.push(format!("{name}: comes from {other}")),
            // A package of the workspace.
            None => {
                for dependency in package["dependencies"].as_array().into_iter().flatten() {
                    if dependency["req"] == "*" && dependency["path"].is_null() {
                        let wild = dependency["name"].as_str().unwrap_or_default();
                        findings.push(format!("{name}: any version of {wild} would do"));
                    }
                }
            }
        }
        let clarified = self.clarified.get(name).map(String::as_str);
        let Some(license) = clarified.or(package["license"].as_str()) else {
            findings.push(format!("{name}: names no licence"));
            return findings;
        };
        let allowed = |wanted: &LicenseReq| {
            let wanted = wanted.to_string();
            let mut own = self.exceptions.get(name).into_iter().flatten();
            self.allowed.contains(&wanted) || own.any(|it| *it == wanted)
        };
        match Expression::parse_mode(license, ParseMode::LAX) {
            Ok(expression) if expression.evaluate(allowed) => {}
            Ok(_) => findings.push(format!("{name}: {license} is not allowed")),
            Err(error) => findings.push(format!("{name}: {}", error.reason)),
        }
        findings
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const RULES: &str = r#"
        [licenses]
        allow = ["MIT", "Apache-2.0 WITH LLVM-exception"]
        exceptions = [{ crate = "header", allow = ["MPL-2.0"] }]
        [[licenses.clarify]]
        crate = "silent"
        expression = "MIT"
    "#;

    #[test]
    fn what_is_not_allowed_is_found() {
        let rules = Rules::read(RULES).expect("it is TOML");
        let findings = |package: Value| rules.check(&package).len();
        let of = |name: &str, license: &str| {
            findings(json!({ "name": name, "license": license, "source": REGISTRY }))
        };
        for (name, license, wrong) in [
            ("a", "MIT", 0),
            ("a", "GPL-3.0 OR MIT", 0),
            ("a", "Apache-2.0/MIT", 0),
            ("a", "GPL-3.0-only", 1),
            ("a", "MIT AND GPL-3.0-only", 1),
            ("a", "Apache-2.0 WITH LLVM-exception", 0),
            ("a", "Apache-2.0", 1),
            ("a", "MPL-2.0", 1),
            ("header", "MPL-2.0", 0),
            ("a", "no licence of this name", 1),
        ] {
            assert_eq!(of(name, license), wrong, "{name}: {license}");
        }
        let silent = |name| findings(json!({ "name": name, "source": REGISTRY }));
        assert_eq!((silent("silent"), silent("a")), (0, 1));
        let git = json!({ "name": "a", "license": "MIT", "source": "git+https://example.org/a" });
        assert_eq!(findings(git), 1);
        let wild = json!({ "name": "a", "license": "MIT",
            "dependencies": [{ "name": "b", "req": "*" }, { "name": "c", "req": "*", "path": "/c" }] });
        assert_eq!(findings(wild), 1);
    }
}
