//! `cargo xtask`: one command for each task that a person or a machine does with this repository.
//!
//! The rule it keeps: a command either does all of its task or stops with the remedy; nothing has
//! to be installed or started by hand before. Measurements and tests are left to the crates
//! themselves.

mod bench;
mod children;
mod data;
mod dependencies;
mod install;
mod programs;
mod rdma;
mod sanitize;
mod setup;
mod tests;
mod tidy;
mod unmodified;
mod vm;

use std::{env, process::ExitCode};

use anyhow::{Result, bail};

const USAGE: &str = "\
Usage: cargo xtask <COMMAND>

Commands:
  demo                            set up this machine, build, and run STREAM on remote arrays four times the local budget
  test [CARGO-OPTIONS] [-- ARGS]  set up this machine, then run the whole test suite; CARGO-OPTIONS (such as
                                  `-p farpage-pager`) go to `cargo test`, ARGS (such as a filter) to the test programs;
                                  without any, every benchmark runs once, too, and the tests of RDMA run in a virtual machine
  test --quick                    what takes less than three minutes once built: no virtual machine, optimised programs or
                                  benchmarks, and no long tests, which it names
  test --again N --beside K ...   the same N times while K threads compute; says which test failed how often
  test --rdma [FILTER...]         only the tests of RDMA, in a virtual machine
  test --programs [NAME...]       programs of the distribution and of Python's packages under `farpage run` at a quarter of their
                                  memory, beside plain runs and swap; minutes, and installs them
  bench --smoke                   run every benchmark once with tiny sizes: do they work? (`farpage-bench` measures)
  sanitize [--seconds N]          run the tests of all decoders, codecs and page states with the address sanitizer, then fuzz what
                                  reads strangers' bytes, each target for N seconds [15]
  data                            fetch the examples that training is measured with (out of Python packages, by pip) [part of `test`]
  install --prefix DIR            build the programs, libfarpage and libumap, and put them, headers, pkg-config and CMake
                                  files below DIR; with `--built DIR` the libraries are taken from there
  dependencies                    sources and licences of all dependencies, held against deny.toml
  tidy                            lines that are too long, links that lead nowhere, and other rules of form (part of `test`)
  vm [OPTIONS] COMMAND...         run COMMAND in a virtual machine that has RDMA; `vm --help` says more
  setup [--all]                   only set up: install missing system packages, check kernel permissions; with `--all` the packages
                                  that the tests of RDMA need, too
  help                            print this";

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<ExitCode> {
    let args: Vec<String> = env::args().skip(1).collect();
    let (command, rest) = match args.split_first() {
        Some((command, rest)) => (command.as_str(), rest),
        None => return Ok(misused("no command given")),
    };
    // `vm` has options of its own.
    let asks_for_help = |arg: &String| matches!(&**arg, "--help" | "-h");
    if command != "vm" && rest.first().is_some_and(asks_for_help) {
        println!("{USAGE}");
        return Ok(ExitCode::SUCCESS);
    }
    let success = Ok(ExitCode::SUCCESS);
    match command {
        "demo" if rest.is_empty() => demo(),
        "setup" if rest.is_empty() || rest == ["--all"] => {
            children::end_with_us()?;
            let of_tests = [&rdma::NEEDS[..], &vm::NEEDS, &data::NEEDS];
            match rest.first() {
                None => setup::prepare()?,
                Some(_) => setup::prepare_with(of_tests.into_iter().flatten())?,
            }
            println!("This machine is ready: `cargo xtask demo` and `cargo xtask test` will run.");
            success
        }
        "test" => {
            get_ready()?;
            match rest.split_first() {
                Some((option, filters)) if option == "--rdma" => tests::run_rdma(filters),
                Some((option, names)) if option == "--programs" => unmodified::run(names),
                _ => tests::run(rest),
            }
        }
        "bench" if rest == ["--smoke"] => {
            get_ready()?;
            bench::run()
        }
        "sanitize" => match sanitize::seconds(rest) {
            Some(seconds) => {
                get_ready()?;
                sanitize::run(seconds)
            }
            None => Ok(misused("`sanitize` takes `--seconds N`")),
        },
        "bench" => Ok(misused(
            "`bench` takes `--smoke`; to measure: cargo run --release -p farpage-bench -- --help",
        )),
        "install" => match install::Install::read(rest) {
            Some(install) => {
                get_ready()?;
                install.run()?;
                success
            }
            None => Ok(misused("`install` takes `--prefix DIR`")),
        },
        "data" if rest.is_empty() => {
            children::end_with_us()?;
            data::fetch()?;
            success
        }
        "dependencies" if rest.is_empty() => dependencies::run(),
        "tidy" if rest.is_empty() => tidy::run(),
        "vm" if rest == ["--help"] || rest == ["-h"] => {
            println!("{}", vm::USAGE);
            success
        }
        "vm" => {
            children::end_with_us()?;
            Ok(vm::run(rest))
        }
        "help" | "--help" | "-h" => {
            println!("{USAGE}");
            success
        }
        "data" | "demo" | "dependencies" | "setup" | "tidy" => {
            Ok(misused(&format!("`{command}` does not take {rest:?}")))
        }
        other => Ok(misused(&format!("no such command: `{other}`"))),
    }
}

/// Lets children end with this process, and gets this machine ready for the build.
fn get_ready() -> Result<()> {
    children::end_with_us()?;
    setup::prepare()
}

fn misused(what: &str) -> ExitCode {
    eprintln!("error: {what}\n\n{USAGE}");
    ExitCode::from(2)
}

/// Message about a build whose errors cargo has printed.
const BUILD_FAILED: &str = "the build failed; what went wrong is printed above";

/// Size of all arrays together. The local budget is a quarter: large enough that the pager works
/// for seconds, small enough for a laptop, since server and client share the machine here.
const DEMO_ARRAYS_MIB: u64 = 768;

fn demo() -> Result<ExitCode> {
    get_ready()?;
    // The arrays on the server, the budget, and a reserve for other programs.
    setup::require_memory(DEMO_ARRAYS_MIB * 3 / 2)?;

    println!("\nBuilding the benchmark (optimised; the first time takes a few minutes) ...");
    let mut build = children::cargo();
    build.args(["build", "--release", "--package", "farpage-bench"]);
    children::must(&mut build, BUILD_FAILED)?;

    println!(
        "\nSTREAM on {DEMO_ARRAYS_MIB} MiB of remote arrays with {} MiB of local memory for their pages, four times less.\n\
         The arrays live in a memory server, a process of its own that this run starts and ends.\n",
        DEMO_ARRAYS_MIB / 4
    );
    let size = format!("{DEMO_ARRAYS_MIB}MiB");
    let mut bench = children::cargo();
    bench.args(["run", "--quiet", "--release", "--package", "farpage-bench"]);
    bench.args(["--", "stream", "--size", &size, "--budget", "25%"]);
    let ran = children::status(&mut bench)?;
    if !ran.success() {
        bail!(
            "the benchmark failed ({ran}); `cargo run --release -p farpage-bench -- doctor` says what this machine can do"
        );
    }
    println!(
        "\nEvery element was verified. More to measure: cargo run --release -p farpage-bench -- --help"
    );
    Ok(ExitCode::SUCCESS)
}
