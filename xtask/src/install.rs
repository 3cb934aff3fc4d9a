//! `cargo xtask install`: puts the programs where shells find them, and the libraries for C and C++
//! with their headers where compilers find them.
//!
//! The rule it keeps: an existing file is replaced as a whole and at once, so that a program that
//! runs with the old library goes on with it. Installed files can be moved: none names the prefix.

use std::{
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::children;

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Number in the libraries' `soname`: it changes with the binary interface. `crates/capi/build.rs`
/// has it, too.
const INTERFACE: &str = "0";

/// Packages of the programs: the memory server, `farpage run` with the library that it preloads,
/// and the benchmark, which has `doctor`.
const PACKAGES: [&str; 3] = ["farpage-memserver", "farpage-run", "farpage-bench"];
/// Files that cargo makes of these packages, and their folders: `farpage` looks for its library in
/// `../lib`.
const PROGRAMS: [(&str, &str); 4] = [
    ("farpage-memserver", "bin"),
    ("farpage", "bin"),
    ("farpage-bench", "bin"),
    ("libfarpage_preload.so", "lib"),
];

/// Arguments of `install`.
pub(crate) struct Install {
    prefix: PathBuf,
    /// Folder of libraries, and perhaps programs, that are built already.
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

    /// Builds libraries and programs, unless they are built, and installs them.
    ///
    /// # Errors
    /// A file that could not be built or written.
    pub(crate) fn run(self) -> Result<()> {
        let built = match &self.built {
            Some(built) => built.clone(),
            None => build()?,
        };
        self.put_programs(&built)?;
        let capi = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/capi");
        let lib = self.prefix.join("lib");

        for headers in ["include", "umap/include"] {
            self.copy_tree(&capi.join(headers), Path::new("include"))?;
        }
        put(&built.join("libfarpage_capi.a"), &lib.join("libfarpage.a"))?;
        self.put_shared(&built.join("libfarpage_capi.so"), "libfarpage")?;
        self.build_umap(&capi).context("cannot make libumap")?;
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

    /// Installs the programs. Programs that `--built` does not have are named and left out.
    fn put_programs(&self, built: &Path) -> Result<()> {
        for (name, place) in PROGRAMS {
            let from = built.join(name);
            if self.built.is_some() && !from.is_file() {
                println!("{name} is not installed: {} has none", built.display());
                continue;
            }
            put(&from, &self.prefix.join(place).join(name))?;
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

    /// Builds the library of Umap's interface. The interface is C++ with virtual functions, so the
    /// compiler that makes its users makes the library.
    fn build_umap(&self, capi: &Path) -> Result<()> {
        let lib = fs::canonicalize(self.prefix.join("lib"))?;
        let include = fs::canonicalize(self.prefix.join("include"))?;
        let work = Scratch::new(&lib)?;
        let sources = fs::read_dir(capi.join("umap/src"))?;
        let mut sources: Vec<PathBuf> = sources
            .map(|entry| fs::canonicalize(entry?.path()))
            .collect::<io::Result<_>>()?;
        sources.retain(|path| path.extension().is_some_and(|it| it == "cpp"));
        sources.sort();
        let objects: Vec<PathBuf> = sources
            .iter()
            .filter_map(|path| Some(Path::new(path.file_name()?).with_extension("o")))
            .collect();
        work.run(
            Command::new("c++")
                .args(["-std=c++17", "-O2", "-g", "-fPIC", "-pthread", "-c"])
                .args(["-Wall", "-Wextra", "-Werror", "-fvisibility-inlines-hidden"])
                .arg("-I")
                .arg(include)
                .args(sources),
        )?;
        work.run(
            Command::new("c++")
                .args(["-shared", "-pthread"])
                .arg(format!("-Wl,-soname,libumap.so.{INTERFACE}"))
                .args(["-Wl,-rpath,$ORIGIN", "-Wl,--no-undefined"])
                .args(&objects)
                .arg("-L")
                .arg(&lib)
                .args(["-lfarpage", "-o", "libumap.so"]),
        )?;
        // The library is complete: programs written for Umap name `libumap.a` and no other library.
        let mut script = String::from("create libumap.a\naddlib ../libfarpage.a\n");
        for object in &objects {
            script += &format!("addmod {}\n", object.display());
        }
        fs::write(work.0.join("script"), script + "save\nend\n")?;
        // Not `ar`: with clang's plugin installed, its index leaves out files that the plugin
        // cannot read.
        work.run(Command::new("sh").args(["-c", "gcc-ar -M <script"]))?;
        put(&work.0.join("libumap.a"), &lib.join("libumap.a"))?;
        self.put_shared(&work.0.join("libumap.so"), "libumap")
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

/// A folder for intermediate files, removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(lib: &Path) -> Result<Self> {
        let folder = lib.join(format!(".umap-{}", std::process::id()));
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        Ok(Self(folder))
    }

    /// Runs a command in the folder.
    fn run(&self, command: &mut Command) -> Result<()> {
        let status = children::status(command.current_dir(&self.0))?;
        if !status.success() {
            bail!("{command:?}: {status}; what went wrong is printed above");
        }
        Ok(())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A folder that stays does no harm.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Builds the libraries and the programs. Returns their folder.
fn build() -> Result<PathBuf> {
    println!("Building libraries and programs (optimised; the first time takes a few minutes) ...");
    let mut libraries = children::cargo();
    libraries.args(["rustc", "--release", "--package", "farpage-capi", "--lib"]);
    libraries.args(["--crate-type", "cdylib,staticlib"]);
    let mut programs = children::cargo();
    programs.args(["build", "--release"]);
    for package in PACKAGES {
        programs.args(["--package", package]);
    }
    for mut command in [libraries, programs] {
        children::must(&mut command, crate::BUILD_FAILED)?;
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

/// Lets `make` make a file beside `to`, which then replaces `to`.
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
    fn programs_are_installed_where_they_find_each_other() {
        let folder = tempfile::tempdir().expect("a folder for temporary files");
        let [built, prefix] = ["built", "prefix"].map(|name| folder.path().join(name));
        fs::create_dir_all(&built).expect("writes into its own folder");
        for (name, _) in PROGRAMS {
            fs::write(built.join(name), name).expect("writes into its own folder");
        }
        let install = Install {
            prefix: prefix.clone(),
            built: Some(built.clone()),
        };
        install.put_programs(&built).expect("all are there");
        for name in ["farpage-memserver", "farpage", "farpage-bench"] {
            assert!(prefix.join("bin").join(name).is_file(), "{name}");
        }
        let library = prefix.join("bin/../lib/libfarpage_preload.so");
        assert!(library.is_file(), "`farpage` looks there");
        // Without `--built` all programs have been built, or something is wrong.
        fs::remove_file(built.join("farpage")).expect("written above");
        let all = Install {
            built: None,
            ..install
        };
        assert!(all.put_programs(&built).is_err());
    }

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
