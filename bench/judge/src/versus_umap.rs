//! farpage against LLNL's Umap: one C++ driver, written against Umap's interface alone, built
//! against an installed Umap and against farpage's `libumap`.
//!
//! The rule it keeps: both builds do the same work on the same data with the same buffer, in turns,
//! and a figure counts only if the driver has verified every word. The measurements are left to
//! `versus_umap/driver.cpp`.

use std::{
    collections::BTreeMap,
    env,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
use bytesize::ByteSize;
use clap::{Args, ValueEnum};
use serde::Serialize;
use serde_json::json;
use tempfile::TempDir;

use farpage_bench_kit::{
    options::{Printing, name_of, page_size, some_bytes},
    progress::Progress,
    report::{self, median, ranged_if_several, times_as_fast, yes},
    sitting::Sitting,
};

const DRIVER: &str = include_str!("versus_umap/driver.cpp");

/// Instructions to build and install Umap.
const HOW_TO_BUILD_UMAP: &str = "\
To compare with LLNL's Umap, build and install it, and say where it is:
  git clone https://github.com/LLNL/umap
  cmake -S umap -B umap/build -DCMAKE_BUILD_TYPE=Release -DENABLE_TESTS=Off -DCMAKE_INSTALL_PREFIX=$HOME/umap-llnl
  cmake --build umap/build --target install
  farpage-bench versus-umap --umap $HOME/umap-llnl";

/// Options of `versus-umap`.
#[derive(Args, Debug)]
pub struct VersusUmapOptions {
    /// Prefix of LLNL's Umap [default: measures farpage alone, and says how to build Umap]
    #[arg(long, value_name = "PREFIX")]
    umap: Option<PathBuf>,
    /// Prefix at which `cargo xtask install` put farpage's libumap [default: installs that of the
    /// source tree which this program was built from in a temporary directory]
    #[arg(long, value_name = "PREFIX")]
    farpage: Option<PathBuf>,
    /// Page sizes: powers of two, 4KiB to 2MiB
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "4KiB,64KiB,1MiB", value_parser = page_size)]
    page_sizes: Vec<ByteSize>,
    /// Stores that keep the data
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "file,own"
    )]
    stores: Vec<Store>,
    /// Threads of random accesses; sequential parts use the most of these that have a CPU each
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,2,8", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Vec<u16>,
    /// Parts to measure
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "fault,random,sequential,stream,unmap"
    )]
    parts: Vec<Part>,
    /// Size of the data [default: 1GiB, with --smoke a few pages]
    #[arg(long, value_name = "SIZE", value_parser = some_bytes)]
    size: Option<ByteSize>,
    /// Local memory for the data's pages [default: a quarter of the data]
    #[arg(long, value_name = "SIZE", value_parser = some_bytes)]
    buffer: Option<ByteSize>,
    /// Random accesses of each kind, by all threads together [default: 40000, fewer of pages above
    /// 64KiB; with --smoke 400]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 40))]
    accesses: Option<u64>,
    /// Directory of the file store's file: in memory by default, so that no disk is measured
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    folder: PathBuf,
    /// Number of times that everything is measured; medians count
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=100))]
    repeat: u16,
    #[command(flatten)]
    printing: Printing,
    /// Tiny sizes, once: checks that everything works; the figures mean nothing
    #[arg(long, conflicts_with = "repeat")]
    smoke: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
enum Store {
    /// A file
    File,
    /// A store of the program's own, which copies from memory and to it
    Own,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Part {
    /// Single faults while there is room
    Fault,
    /// Random reads and updates, 90 % of the reads in 10 % of the pages, and a read-only region
    Random,
    /// Reading everything in order, also in a read-only region
    Sequential,
    /// McCalpin's STREAM
    Stream,
    /// Unmapping resident pages, none or all of them changed
    Unmap,
}

impl VersusUmapOptions {
    fn size_bytes(&self) -> u64 {
        match self.size {
            Some(size) => size.as_u64(),
            None if self.smoke => 4 * self.buffer_pages_min() * self.largest_page_bytes(),
            None => 1 << 30,
        }
    }

    fn largest_page_bytes(&self) -> u64 {
        let page_bytes = self.page_sizes.iter().map(ByteSize::as_u64);
        page_bytes.max().expect("clap wants one at least")
    }

    /// Returns the fewest pages: LLNL's Umap 2.1 crashes in `evict_oldest_pages` with 32 and fewer.
    fn buffer_pages_min(&self) -> u64 {
        if self.umap.is_some() { 64 } else { 8 }
    }

    fn buffer_bytes(&self) -> u64 {
        self.buffer
            .map_or(self.size_bytes() / 4, |size| size.as_u64())
    }

    fn accesses(&self, page_bytes: u64) -> u64 {
        self.accesses.unwrap_or(match self.smoke {
            true => 400,
            false => (40_000 * (64 << 10) / page_bytes).min(40_000),
        })
    }

    fn repeat(&self) -> u16 {
        if self.smoke { 1 } else { self.repeat }
    }
}

/// Figures that the driver prints, by name and threads.
type Figures = BTreeMap<(String, u16), f64>;

/// Figures of the driver in the order of the table: `name: name for people`.
const KINDS: [&str; 20] = [
    "fault-p50-us: single fault, p50, us",
    "fault-p99-us: single fault, p99, us",
    "random-read-us: random read, us",
    "random-read-p99-us: random read, p99, us",
    "random-read-system-us: system CPU time of a random read, us",
    "random-read-store-reads: reads of the store per random read",
    "random-update-us: random update, us",
    "hot-cold-us: 90/10 hot-cold read, us",
    "hot-cold-p99-us: 90/10 hot-cold read, p99, us",
    "hot-cold-system-us: system CPU time of a hot-cold read, us",
    "hot-cold-store-reads: reads of the store per hot-cold read",
    "read-only-random-us: random read, read-only region, us",
    "sequential-mb-per-s: sequential read, MB/s",
    "read-only-sequential-mb-per-s: sequential read, read-only region, MB/s",
    "stream-copy-mb-per-s: STREAM copy, MB/s",
    "stream-scale-mb-per-s: STREAM scale, MB/s",
    "stream-add-mb-per-s: STREAM add, MB/s",
    "stream-triad-mb-per-s: STREAM triad, MB/s",
    "unmap-clean-ms: unmapping clean pages, ms",
    "unmap-changed-ms: unmapping changed pages, ms",
];

fn kinds() -> impl Iterator<Item = (&'static str, &'static str)> {
    KINDS.iter().filter_map(|kind| kind.split_once(": "))
}

/// Returns the name of the writable region's figure, for that of a read-only region.
fn writable(name: &str) -> Option<&'static str> {
    match name {
        "read-only-random-us" => Some("random-read-us"),
        "read-only-sequential-mb-per-s" => Some("sequential-mb-per-s"),
        _ => None,
    }
}

/// Returns the least speed of farpage as a multiple of Umap's, where there is a target.
fn target(name: &str, page_bytes: u64, threads: u16) -> Option<f64> {
    const SMALL: u64 = 4 << 10;
    const MIDDLE: u64 = 64 << 10;
    const LARGE: u64 = 1 << 20;
    match (name, page_bytes, threads) {
        ("random-read-us" | "random-update-us", SMALL, 1) => Some(2.5),
        ("random-read-us" | "random-update-us", SMALL, 2) => Some(1.5),
        ("random-read-us" | "random-update-us" | "random-read-p99-us", SMALL, 8) => Some(1.3),
        ("random-read-us" | "random-update-us", MIDDLE, 1 | 2) => Some(1.3),
        ("hot-cold-us", SMALL | MIDDLE, 1 | 2) => Some(1.3),
        ("random-read-system-us", SMALL, _) => Some(1.0),
        ("stream-triad-mb-per-s", MIDDLE, _) => Some(3.0),
        ("stream-triad-mb-per-s", LARGE, _) => Some(1.6),
        ("unmap-clean-ms", _, _) => Some(0.7),
        ("unmap-changed-ms", _, _) => Some(1.0),
        _ => None,
    }
}

/// Figure of both, or of farpage alone. Medians of the repetitions.
#[derive(Debug, PartialEq, Serialize)]
struct Finding {
    what: String,
    store: Store,
    page_size_bytes: u64,
    threads: u16,
    /// Name of what farpage is compared with.
    #[serde(skip_serializing_if = "Option::is_none")]
    against: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    other: Option<f64>,
    farpage: f64,
    /// Speed of farpage as a multiple of the other's.
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio: Option<f64>,
    /// Ratio of each repetition.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ratios: Vec<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    met: Option<bool>,
}

/// All repetitions of a store and page size, Umap's and farpage's.
struct Measured {
    store: Store,
    page_bytes: u64,
    umap: Vec<Figures>,
    farpage: Vec<Figures>,
}

/// Runs the subcommand `versus-umap` and prints what it found.
pub fn run(options: &VersusUmapOptions) -> Result<()> {
    let pages_min = options.buffer_pages_min();
    ensure!(
        options.buffer_bytes() >= pages_min * options.largest_page_bytes(),
        "--buffer has to hold {pages_min} of the largest pages: LLNL's Umap crashes with few"
    );
    let is_larger = options.size_bytes() >= options.buffer_bytes();
    ensure!(is_larger, "--size has to be no less than --buffer");
    let mut sitting = Sitting::new(options.smoke)?;
    let folder = TempDir::new().context("cannot make a temporary directory")?;
    let runs = options.page_sizes.len() * options.stores.len() * usize::from(options.repeat());
    let sides = 1 + usize::from(options.umap.is_some());
    let progress = Progress::new(1 + (runs * sides) as u64);
    progress.phase("building");
    // Umap's driver comes first, since farpage's library takes longer to come by.
    let theirs = (options.umap.as_deref())
        .map(|prefix| build(&sitting, prefix, &folder.path().join("with-umap")))
        .transpose()?;
    let farpage = match &options.farpage {
        Some(prefix) => prefix.clone(),
        None => install(&sitting, folder.path())?,
    };
    let ours = build(&sitting, &farpage, &folder.path().join("with-farpage"))?;

    let mut all: Vec<Measured> = Vec::new();
    for page_size in &options.page_sizes {
        all.extend(options.stores.iter().map(|store| Measured {
            store: *store,
            page_bytes: page_size.as_u64(),
            umap: Vec::new(),
            farpage: Vec::new(),
        }));
    }
    for _ in 0..options.repeat() {
        sitting.next_repetition();
        for measured in &mut all {
            let take = |who: &str, program: &Path| -> Result<Figures> {
                let page_size = ByteSize::b(measured.page_bytes);
                let store = name_of(&measured.store);
                progress.phase(format!("{who}, {page_size} pages, {store}"));
                drive(&sitting, options, program, measured)
                    .with_context(|| format!("cannot measure {who} ({})", program.display()))
            };
            let of_umap = (theirs.as_deref())
                .map(|theirs| take("Umap", theirs))
                .transpose()?;
            let of_farpage = take("farpage", &ours)?;
            measured.umap.extend(of_umap);
            measured.farpage.push(of_farpage);
        }
    }
    drop(progress);

    let findings: Vec<Finding> = all.iter().flat_map(findings).collect();
    let (size, buffer, repeat) = (
        options.size_bytes(),
        options.buffer_bytes(),
        options.repeat(),
    );
    let report = json!({
        "benchmark": "versus-umap",
        "verified": true,
        "config": {
            "size_bytes": size,
            "buffer_bytes": buffer,
            "repeat": repeat,
            "smoke": options.smoke,
        },
        "findings": findings,
    });
    report::print(&report, options.printing.format, |_| {
        let how = match options.umap {
            Some(_) => String::new(),
            None => format!("\n\n{HOW_TO_BUILD_UMAP}"),
        };
        format!(
            "{}\n{} MiB of data, {} MiB of local memory; medians of {repeat} repetitions; every word was verified.{how}",
            table(&findings),
            size >> 20,
            buffer >> 20,
        )
    })
}

/// Installs the libumap of this program's source tree, built in this program's profile, below
/// `folder`; returns its prefix.
fn install(sitting: &Sitting, folder: &Path) -> Result<PathBuf> {
    let tree = Path::new(env!("CARGO_MANIFEST_DIR"));
    let prefix = folder.join("farpage");
    let cargo = || {
        let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.current_dir(tree);
        cargo
    };
    let mut install = cargo();
    install
        .args(["run", "--quiet", "--package", "xtask", "--"])
        .arg("install")
        .arg("--prefix")
        .arg(&prefix);
    let install_all = || -> Result<()> {
        if cfg!(debug_assertions) {
            let program = env::current_exe().context("cannot find this program's own file")?;
            let folder = program.parent().context("it lies in no directory")?;
            // A build of the tests has left the libraries there.
            let mut built = folder.join("deps");
            if !built.join("libfarpage_capi.so").is_file() {
                let mut build = cargo();
                build.args(["build", "--quiet", "--package", "farpage-capi"]);
                sitting.output(build, "cargo build --package farpage-capi")?;
                built = folder.to_owned();
            }
            install.arg("--built").arg(built);
        }
        sitting.output(install, "cargo xtask install")?;
        Ok(())
    };
    install_all().context(
        "cannot install farpage's libumap; --farpage PREFIX takes one that is installed already",
    )?;
    Ok(prefix)
}

/// Builds the driver against the Umap or farpage at `prefix`.
fn build(sitting: &Sitting, prefix: &Path, program: &Path) -> Result<PathBuf> {
    let header = prefix.join("include/umap/umap.h");
    let (at, lacking) = (prefix.display(), header.display());
    let is_there = header.is_file();
    ensure!(
        is_there,
        "no Umap is installed at {at}: it has no {lacking}"
    );
    let libs = ["lib", "lib64"].map(|lib| prefix.join(lib));
    let mut libs = libs.iter().filter(|lib| lib.join("libumap.so").is_file());
    let lib = libs.next().with_context(|| {
        let prefix = prefix.display();
        format!("no Umap is installed at {prefix}: neither lib/ nor lib64/ there has a libumap.so")
    })?;
    let lib = lib.canonicalize();
    let lib = lib.with_context(|| format!("cannot find libumap.so at {}", prefix.display()))?;
    let source = program.with_extension("cpp");
    std::fs::write(&source, DRIVER)
        .with_context(|| format!("cannot write {}", source.display()))?;
    let mut compile = Command::new("c++");
    compile
        .args(["-std=c++17", "-O2", "-pthread", "-I"])
        .arg(prefix.join("include"))
        .arg(&source)
        .arg("-L")
        .arg(&lib)
        .arg("-lumap")
        .arg(format!("-Wl,-rpath,{}", lib.display()))
        .arg("-o")
        .arg(program);
    sitting
        .output(compile, "c++")
        .with_context(|| format!("cannot build the driver against {}", prefix.display()))?;
    Ok(program.to_owned())
}

/// Runs the driver for a store and page size.
fn drive(
    sitting: &Sitting,
    options: &VersusUmapOptions,
    program: &Path,
    measured: &Measured,
) -> Result<Figures> {
    let (store, page_bytes) = (&measured.store, measured.page_bytes);
    let mut threads = options.threads.clone();
    threads.sort_unstable();
    threads.dedup();
    let threads: Vec<_> = threads.iter().map(u16::to_string).collect();
    let parts: Vec<_> = options.parts.iter().map(name_of).collect();
    let buffer_pages = options.buffer_bytes() / page_bytes;
    let mut command = Command::new(program);
    command
        .env("UMAP_PAGESIZE", page_bytes.to_string())
        .env("UMAP_BUFSIZE", buffer_pages.to_string())
        .env("UMAP_LOG_LEVEL", "ERROR")
        .args([
            name_of(store),
            options.size_bytes().to_string(),
            options.buffer_bytes().to_string(),
            options.accesses(page_bytes).to_string(),
            threads.join(","),
            parts.join(","),
        ])
        .arg(&options.folder);
    parse(&sitting.output(command, "the driver")?)
}

/// Parses lines of name, threads and value.
fn parse(text: &str) -> Result<Figures> {
    text.lines()
        .map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let [name, threads, value] = words[..] else {
                bail!("the driver printed `{line}`, which is no figure");
            };
            let known = kinds().any(|(kind, _)| kind == name);
            ensure!(known, "the driver printed `{line}`, which nobody knows");
            let number = || format!("the driver printed `{line}`, which is no number");
            let threads = threads.parse().with_context(number)?;
            let value = value.parse().with_context(number)?;
            Ok(((name.to_owned(), threads), value))
        })
        .collect()
}

/// Returns the findings of a store and page size: every figure beside Umap's, and those of
/// read-only regions also beside those of writable ones.
fn findings(measured: &Measured) -> Vec<Finding> {
    let (umap, farpage) = (&measured.umap, &measured.farpage);
    let mut findings = Vec::new();
    let names = farpage.first().map(|first| first.keys().cloned().collect());
    let names: Vec<(String, u16)> = names.unwrap_or_default();
    for (kind, what) in kinds() {
        for (name, threads) in names.iter().filter(|(name, _)| name == kind) {
            let of = |all: &[Figures], name: &str| -> Vec<f64> {
                let key = (name.to_owned(), *threads);
                all.iter()
                    .filter_map(|figures| figures.get(&key).copied())
                    .collect()
            };
            let figures = of(farpage, name);
            let mut add = |what: String, against, others: Vec<f64>, target| {
                let ratios = times_as_fast(&figures, &others, name.ends_with("mb-per-s"));
                let ratio = (!ratios.is_empty()).then(|| median(&ratios));
                findings.push(Finding {
                    what,
                    store: measured.store,
                    page_size_bytes: measured.page_bytes,
                    threads: *threads,
                    against: ratio.map(|_| against),
                    other: ratio.map(|_| median(&others)),
                    farpage: median(&figures),
                    ratio,
                    ratios,
                    target,
                    met: ratio.zip(target).map(|(ratio, least)| ratio >= least),
                });
            };
            let target = target(name, measured.page_bytes, *threads);
            add(what.to_owned(), "Umap", of(umap, name), target);
            if let Some(writable) = writable(name) {
                let what = format!("{what}, over a writable one");
                add(what, "farpage, writable", of(farpage, writable), Some(1.0));
            }
        }
    }
    findings
}

fn table(findings: &[Finding]) -> comfy_table::Table {
    let digits = |x: f64| match x {
        x if x < 10.0 => format!("{x:.2}"),
        x if x < 100.0 => format!("{x:.1}"),
        x => format!("{x:.0}"),
    };
    let rows = findings.iter().map(|finding| {
        let (what, store) = (&finding.what, name_of(&finding.store));
        let pages = ByteSize::b(finding.page_size_bytes);
        let other = finding.other.map_or(String::new(), digits);
        let (threads, farpage) = (finding.threads, digits(finding.farpage));
        let ratio = finding.ratio.map(|_| ranged_if_several(&finding.ratios, 2));
        let target = finding.target.map(|target| target.to_string());
        let [ratio, target] = [ratio, target].map(Option::unwrap_or_default);
        let met = finding.met.map_or("", yes);
        let figures = format!("{other} | {farpage} | {ratio} | {target} | {met}");
        format!("{what} | {store} | {pages} | {threads} | {figures}")
    });
    let header = "what | store | pages | threads | Umap | farpage | times as fast | target | met";
    report::filled_table(header, rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(lines: &str) -> Figures {
        parse(lines).expect("they are figures")
    }

    fn measured(umap: &[&str], farpage: &[&str]) -> Measured {
        Measured {
            store: Store::Own,
            page_bytes: 4 << 10,
            umap: umap.iter().map(|lines| figures(lines)).collect(),
            farpage: farpage.iter().map(|lines| figures(lines)).collect(),
        }
    }

    #[test]
    fn a_ratio_says_how_many_times_as_fast_and_its_median_counts() {
        let of = |(us, mb)| format!("random-read-us 2 {us}\nstream-triad-mb-per-s 2 {mb}");
        let umap = of((30, 100));
        let farpage = [(20, 250), (10, 150), (60, 300)].map(of);
        let farpage = farpage.each_ref().map(String::as_str);
        let all = findings(&measured(&[umap.as_str(); 3], &farpage));
        let [read, triad] = &all[..] else {
            panic!("two figures: {all:?}");
        };
        assert_eq!(read.ratios, [1.5, 3.0, 0.5]);
        assert_eq!((read.other, read.farpage), (Some(30.0), 20.0));
        assert_eq!((read.ratio, read.target), (Some(1.5), Some(1.5)));
        assert_eq!(read.met, Some(true));
        assert_eq!((triad.ratio, triad.target), (Some(2.5), None));
        assert_eq!(triad.met, None);
    }

    #[test]
    fn without_umap_a_read_only_region_still_has_a_target() {
        let farpage = "random-read-us 1 20\nread-only-random-us 1 25";
        let all = findings(&measured(&[], &[farpage]));
        let [read, read_only, over_writable] = &all[..] else {
            panic!("three figures: {all:?}");
        };
        for alone in [read, read_only] {
            assert_eq!((alone.ratio, alone.against, alone.met), (None, None, None));
        }
        assert_eq!(over_writable.against, Some("farpage, writable"));
        assert_eq!(over_writable.ratio, Some(0.8));
        assert_eq!(over_writable.met, Some(false));
    }

    #[test]
    fn what_the_driver_prints_is_a_figure_or_an_error() {
        let key = ("hot-cold-us".to_owned(), 8);
        assert_eq!(figures("hot-cold-us 8 1.5")[&key], 1.5);
        for wrong in ["random-read-us 1", "random-read-us x 1", "surprise 1 1"] {
            let error = parse(wrong).expect_err("it is no figure").to_string();
            assert!(error.contains(wrong), "{error}");
        }
    }
}
