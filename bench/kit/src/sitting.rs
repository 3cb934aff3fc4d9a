//! Several benchmarks in one sitting. Each runs in a fresh process of this program, so that its
//! figures are the ones of the same command typed by a user.
//!
//! The rule it keeps: no benchmark outlives the sitting. Ctrl-C ends a benchmark as an error, so
//! that guards take down what was set up.

use std::{
    collections::HashMap,
    io::Read,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use serde_json::Value;
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    flag,
};

use crate::server::this_program;

/// Upper bound of the time of a benchmark: one that takes longer hangs.
const TIME_MAX: Duration = Duration::from_secs(960);

/// A series of benchmarks.
pub struct Sitting {
    interrupted: Arc<AtomicBool>,
    smoke: bool,
    /// Results of this repetition, by command.
    results: HashMap<String, Value>,
    /// Results of all repetitions.
    reports: Vec<Value>,
}

impl Sitting {
    /// Begins a sitting: Ctrl-C, SIGTERM and SIGHUP end a benchmark from now on, not this process.
    pub fn new(smoke: bool) -> Result<Self> {
        let interrupted = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            flag::register(signal, interrupted.clone()).context("cannot listen for signals")?;
        }
        Ok(Self {
            interrupted,
            smoke,
            results: HashMap::new(),
            reports: Vec::new(),
        })
    }

    /// Measures everything afresh from now on.
    pub fn next_repetition(&mut self) {
        self.results.clear();
    }

    /// Measures this command afresh from now on.
    pub fn forget(&mut self, command: &str) {
        self.results.remove(command);
    }

    /// Returns the figure at `path`, such as `/fault_us/p50`, in the result of `command`. A command
    /// runs once in a repetition.
    pub fn figure(&mut self, command: &str, path: &str) -> Result<f64> {
        if !self.results.contains_key(command) {
            let result = self.run(command)?;
            self.reports.push(result.clone());
            self.results.insert(command.to_owned(), result);
        }
        let figure = self.results[command].pointer(path).and_then(Value::as_f64);
        figure.with_context(|| {
            format!("`farpage-bench {command}` cannot measure {path} on this machine")
        })
    }

    /// Returns all results so far.
    pub fn into_reports(self) -> Vec<Value> {
        self.reports
    }

    /// Runs a command to its end, whatever ran before.
    pub fn run(&self, command: &str) -> Result<Value> {
        self.run_as(this_program()?, command)
    }

    /// Appends `command` to the arguments of `program`, which has to run this program with them.
    pub fn run_as(&self, mut program: Command, command: &str) -> Result<Value> {
        program
            .args(command.split_whitespace())
            .args(["--format", "json"])
            .args(self.smoke.then_some("--smoke"));
        let stdout = self.output(program, &format!("farpage-bench {command}"))?;
        serde_json::from_str(&stdout)
            .with_context(|| format!("`farpage-bench {command}` printed no result"))
    }

    /// Runs a program, called `name` in errors, to its end; returns what it printed. Its standard
    /// input is empty, and ends when this process does.
    ///
    /// # Errors
    /// The program failed or took too long, or the sitting was interrupted.
    pub fn output(&self, mut program: Command, name: &str) -> Result<String> {
        let mut child = program
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start `{name}`"))?;
        let stdout = child.stdout.take().map(collect);
        let stderr = child.stderr.take().map(collect);
        let mut child = Running(child);
        let status = self
            .wait(&mut child.0)
            .with_context(|| format!("`{name}` was ended"))?;
        let [stdout, stderr] =
            [stdout, stderr].map(|text| text.and_then(|text| text.join().ok()).unwrap_or_default());
        if !status.success() {
            bail!("`{name}` failed ({status}): {}", stderr.trim());
        }
        Ok(stdout)
    }

    fn wait(&self, child: &mut Child) -> Result<ExitStatus> {
        let end = Instant::now() + TIME_MAX;
        loop {
            let ended = child.try_wait().context("cannot wait for it")?;
            if self.interrupted.load(Relaxed) {
                bail!("interrupted");
            }
            if let Some(status) = ended {
                return Ok(status);
            }
            if Instant::now() > end {
                bail!("it took longer than {} s", TIME_MAX.as_secs());
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Child process that ends with its owner.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // A child that has ended already is not affected; one that cannot be killed is beyond help.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Reads all that a child writes while the child runs, since a full pipe would stop it.
fn collect(mut from: impl Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // A pipe that breaks has said all that it will.
        let _ = from.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}
