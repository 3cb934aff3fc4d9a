//! `cargo xtask install`: the libraries for C and C++ with their headers, where compilers find them.
//!
//! The rule it keeps: a file that is there is replaced whole and at once, so that a program that runs with the old library goes on with it.
//! What is installed can be moved: nothing in it names the prefix.

use std::{
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::children;

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The number in the libraries' `soname`: it changes with the binary interface. `crates/capi/build.rs` has it, too.
const INTERFACE: &str = "0";

/// What `install` was told.
pub(crate) struct Install {
    prefix: PathBuf,
    /// Where the libraries lie, if they are built already.
    built: Option<PathBuf>,
}

impl Install {
    /// Reads `--prefix DIR [--built DIR]`.
    pub(crate) fn read(args: &[String]) -> Option<Install> {
        let (mut prefix, mut built) = (None, None);
        for pair in args.chunks(2) {
            let [option, value] = pair else { return None };
            match option.as_str() {
                "--prefix" => prefix = Some(value.into()),
                "--built" => built = Some(value.into()),
                _ => return None,
            }
        }
        Some(Install {
            prefix: prefix?,
            built,
        })
    }

    /// Builds what is not built and installs it.
    ///
    /// # Errors
    /// What could not be built or written.
    pub(crate) fn run(self) -> Result<()> {
        let built = match &self.built {
            Some(built) => built.clone(),
            None => build()?,
        };
        let capi = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/capi");
        let lib = self.prefix.join("lib");

        for headers in ["include", "umap/include"] {
            self.copy_tree(&capi.join(headers), Path::new("include"))?;
        }
        put(&built.join("libfarpage_capi.a"), &lib.join("libfarpage.a"))?;
        self.put_shared(&built.join("libfarpage_capi.so"), "libfarpage")?;
        self.build_umap(&capi)?;
        for (template, place) in [
            ("farpage.pc", "pkgconfig"),
            ("umap.pc", "pkgconfig"),
            ("farpage-config.cmake", "cmake/farpage"),
            ("farpage-config-version.cmake", "cmake/farpage"),
        ] {
            let text = fs::read_to_string(capi.join("package").join(template))
                .with_context(|| format!("cannot read {template}"))?;
            let place = lib.join(place);
            write(&place.join(template), &text.replace("@VERSION@", VERSION))?;
        }
        Ok(())
    }

    fn put_shared(&self, from: &Path, name: &str) -> Result<()> {
        let lib = self.prefix.join("lib");
        let full = format!("{name}.so.{VERSION}");
        put(from, &lib.join(&full))?;
        for link in [format!("{name}.so.{INTERFACE}"), format!("{name}.so")] {
            replace(&lib.join(&link), |new| symlink(&full, new))?;
        }
        Ok(())
    }

    /// The interface of Umap is C++ with virtual functions: its library is made by the compiler that makes its users.
    fn build_umap(&self, capi: &Path) -> Result<()> {
        let sources = fs::read_dir(capi.join("umap/src")).context("cannot read umap/src")?;
        let mut sources: Vec<PathBuf> = sources
            .map(|entry| Ok(entry?.path()))
            .collect::<io::Result<_>>()?;
        sources.retain(|path| path.extension().is_some_and(|it| it == "cpp"));
        sources.sort();
        let lib = self.prefix.join("lib");
        let made = lib.join("libumap.new");
        let status = children::status(
            Command::new("c++")
                .args(["-std=c++17", "-O2", "-g", "-fPIC", "-shared", "-pthread"])
                .args(["-Wall", "-Wextra", "-Werror", "-fvisibility-inlines-hidden"])
                .arg(format!("-Wl,-soname,libumap.so.{INTERFACE}"))
                .args(["-Wl,-rpath,$ORIGIN", "-Wl,--no-undefined"])
                .arg("-I")
                .arg(self.prefix.join("include"))
                .args(sources)
                .arg("-L")
                .arg(&lib)
                .args(["-lfarpage", "-o"])
                .arg(&made),
        )?;
        if !status.success() {
            bail!("libumap could not be compiled ({status}); what went wrong is printed above");
        }
        self.put_shared(&made, "libumap")?;
        fs::remove_file(&made).with_context(|| format!("cannot remove {}", made.display()))
    }

    fn copy_tree(&self, from: &Path, to: &Path) -> Result<()> {
        let entries =
            fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))?;
        for entry in entries {
            let entry = entry?;
            let to = to.join(entry.file_name());
            if entry.file_type()?.is_dir() {
                self.copy_tree(&entry.path(), &to)?;
            } else {
                put(&entry.path(), &self.prefix.join(to))?;
            }
        }
        Ok(())
    }
}

/// Builds the libraries; returns where they lie.
fn build() -> Result<PathBuf> {
    println!("Building the libraries (optimised; the first time takes a few minutes) ...");
    let mut command = children::cargo();
    command.args(["rustc", "--release", "--package", "farpage-capi", "--lib"]);
    command.args(["--crate-type", "cdylib,staticlib"]);
    if !children::status(&mut command)?.success() {
        bail!("the build failed; what went wrong is printed above");
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| root.join("target"), |dir| root.join(dir));
    Ok(target.join("release"))
}

fn put(from: &Path, to: &Path) -> Result<()> {
    replace(to, |new| fs::copy(from, new).map(drop))
        .with_context(|| format!("cannot copy {}", from.display()))
}

fn write(to: &Path, text: &str) -> Result<()> {
    replace(to, |new| fs::write(new, text))
}

/// Lets `make` make a file beside `to`, which then takes its place.
fn replace(to: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> Result<()> {
    let all = || {
        let mut new = to.as_os_str().to_owned();
        new.push(format!(".{}", std::process::id()));
        let new = PathBuf::from(new);
        fs::create_dir_all(to.parent().unwrap_or(Path::new(".")))?;
        make(&new)?;
        fs::rename(&new, to)
    };
    all().with_context(|| format!("cannot write {}", to.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefix_is_needed_and_nothing_unknown_is_taken() {
        let read =
            |line: &str| Install::read(&line.split(' ').map(str::to_owned).collect::<Vec<_>>());
        let install = read("--built b --prefix p").expect("both are known");
        assert_eq!(
            (install.prefix, install.built),
            ("p".into(), Some("b".into()))
        );
        assert!(read("--built b").is_none());
        assert!(read("--prefix").is_none());
        assert!(read("--prefix p --debug x").is_none());
    }
}
