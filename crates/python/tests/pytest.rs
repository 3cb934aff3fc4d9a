//! The Python tests, each reported as a test of this program in libtest's words.
//!
//! The rule it keeps: the tested library is the one that cargo has just built, beside the Python
//! files of the source tree. pip fetches pytest's packages once, below the target directory; where
//! that fails, the tests are skipped and the reason is told. Tests that are marked as long stand
//! for libtest's ignored ones: `--ignored` runs them, `--include-ignored` all.

use std::{
    env,
    error::Error,
    fs::{self, File},
    io::{BufRead, BufReader, ErrorKind, Read},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Upper bound of the tests' time: all together take a tenth of it.
const PATIENCE: Duration = Duration::from_secs(600);
/// Upper bound of the tests' time with those that are marked as long.
const LONG_PATIENCE: Duration = Duration::from_secs(3 * 3600);
/// Upper bound of pip's time: it tries again by itself, for minutes.
const PIP_PATIENCE: Duration = Duration::from_secs(240);

const PACKAGE: &str = env!("CARGO_MANIFEST_DIR");

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    if arguments.iter().any(|argument| argument == "--list") {
        // Python knows the single tests; this line says that there are some.
        println!("python: test");
        return ExitCode::SUCCESS;
    }
    let given = |option| arguments.iter().any(|it| it == option);
    let marks = match (given("--ignored"), given("--include-ignored")) {
        (true, _) => Some("long"),
        (false, true) => None,
        (false, false) => Some("not long"),
    };
    // Other options are for libtest: this program always shows what fails.
    let filter = arguments.iter().find(|it| !it.starts_with('-'));
    match packages() {
        Ok(packages) => match run(&packages, filter, marks) {
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => ExitCode::FAILURE,
            Err(error) => {
                println!("test python ... FAILED\n{error}");
                println!("test result: FAILED. 0 passed; 1 failed;");
                ExitCode::FAILURE
            }
        },
        Err(why) => {
            println!("SKIPPED: the tests of the Python package: {why}");
            println!("test result: ok. 1 passed; 0 failed;");
            ExitCode::SUCCESS
        }
    }
}

/// Returns the command of the interpreter: `PYTHON`, else the one in the path.
fn python() -> Command {
    let program = env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
    let mut command = Command::new(program);
    command.stdin(Stdio::null());
    command
}

/// Returns a folder with numpy and pytest for this interpreter.
fn packages() -> Result<PathBuf> {
    let mut version = python();
    version.args(["-c", "import sys; print('%d.%d' % sys.version_info[:2])"]);
    let version = match version.output() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err("there is no python3".into());
        }
        output => String::from_utf8(output?.stdout)?.trim().to_owned(),
    };
    let minor = version.strip_prefix("3.").and_then(|it| it.parse().ok());
    if minor.is_none_or(|minor: u32| minor < 9) {
        return Err(format!("python3 is Python {version}; they need 3.9 or newer").into());
    }
    let requirements = Path::new(PACKAGE).join("tests/requirements.txt");
    let wanted = fs::read_to_string(&requirements)?;
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("python");
    fs::create_dir_all(&target)?;
    let folder = target.join(&version);
    let stamp = folder.join("requirements.txt");
    // One at a time: two test runs may share the target directory.
    let lock = File::create(target.join("lock"))?;
    lock.lock()?;
    if fs::read_to_string(&stamp).is_ok_and(|there| there == wanted) {
        return Ok(folder);
    }
    let _ = fs::remove_dir_all(&folder);
    let mut pip = python();
    pip.args(["-m", "pip", "--disable-pip-version-check", "install"])
        .args(["--quiet", "--only-binary=:all:", "--target"])
        .arg(&folder)
        .arg("--requirement")
        .arg(&requirements);
    let mut printed = String::new();
    let ended = watch(&mut pip, PIP_PATIENCE, |line| {
        printed += line;
        printed.push('\n');
    })?;
    if !ended {
        let last = printed
            .trim()
            .lines()
            .last()
            .unwrap_or("it printed nothing");
        return Err(format!("pip cannot fetch what they need: {last}").into());
    }
    fs::write(stamp, wanted)?;
    Ok(folder)
}

/// Assembles the package `farpage` as if installed. Returns the folder to import it from.
fn assemble() -> Result<PathBuf> {
    let program = env::current_exe()?;
    let built = program.parent().ok_or("a test program lies in a folder")?;
    let site = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!(
        "{}-site",
        program.file_name().ok_or("it has a name")?.display()
    ));
    let _ = fs::remove_dir_all(&site);
    let package = site.join("farpage");
    fs::create_dir_all(&package)?;
    for file in fs::read_dir(Path::new(PACKAGE).join("python/farpage"))? {
        let file = file?;
        if file.file_type()?.is_file() {
            fs::copy(file.path(), package.join(file.file_name()))?;
        }
    }
    let library = built.join("libfarpage_python.so");
    fs::copy(&library, package.join("_farpage.abi3.so"))
        .map_err(|error| format!("{}: {error}", library.display()))?;
    Ok(site)
}

/// Runs pytest on the tests with a name that contains `filter` and with `marks`, and reports each
/// in libtest's words. Returns true if all passed.
fn run(packages: &Path, filter: Option<&String>, marks: Option<&str>) -> Result<bool> {
    let path = env::join_paths([assemble()?.as_path(), packages])?;
    let mut pytest = python();
    pytest
        .current_dir(PACKAGE)
        .args(["-m", "pytest", "--color=no", "-vv", "-rs", "--durations=5"])
        .env("PYTHONPATH", path)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("COLUMNS", "160");
    if let Some(filter) = filter {
        pytest.args(["-k", filter]);
    }
    if let Some(marks) = marks {
        pytest.args(["-m", marks]);
    }
    let patience = match marks {
        Some("not long") => PATIENCE,
        _ => LONG_PATIENCE,
    };
    // The tests set these variables themselves.
    for (name, _) in env::vars_os() {
        if name.to_string_lossy().starts_with("FARPAGE_") && name != "FARPAGE_KEY_FILE" {
            pytest.env_remove(name);
        }
    }
    let (mut passed, mut failed) = (0, 0);
    let mut skipped = Vec::new();
    let succeeded = watch(&mut pytest, patience, |line| match outcome(line) {
        Some((test, Outcome::Passed)) => {
            passed += 1;
            println!("test {test} ... ok");
        }
        Some((test, Outcome::Failed)) => {
            failed += 1;
            println!("test {test} ... FAILED");
        }
        Some((test, Outcome::Skipped(why))) => {
            println!("test {test} ... ignored, {why}");
            skipped.push(test.to_owned());
        }
        None => println!("{line}"),
    })?;
    // No test has the name that was asked for.
    let nothing = filter.is_some() && passed + failed + skipped.len() == 0;
    if !succeeded && failed == 0 && !nothing {
        failed = 1;
        println!("test python ... FAILED");
    }
    println!(
        "test result: {}. {passed} passed; {failed} failed; {} ignored;",
        if failed == 0 { "ok" } else { "FAILED" },
        skipped.len()
    );
    Ok(failed == 0)
}

enum Outcome<'a> {
    Passed,
    Failed,
    Skipped(&'a str),
}

/// Parses a line of pytest about a test: `test_a.py::test_b PASSED [ 50%]`.
fn outcome(line: &str) -> Option<(&str, Outcome<'_>)> {
    let (test, rest) = line.split_once(' ')?;
    if !test.contains(".py::") {
        return None;
    }
    let rest = rest.rsplit_once('[').map_or(rest, |(rest, _)| rest).trim();
    let (word, why) = rest.split_once(' ').unwrap_or((rest, ""));
    let outcome = match word {
        "PASSED" => Outcome::Passed,
        "FAILED" | "ERROR" => Outcome::Failed,
        "SKIPPED" => Outcome::Skipped(why.trim_matches(['(', ')'])),
        _ => return None,
    };
    Some((test, outcome))
}

/// Runs `command`, hands each line that it prints to `line`, and ends it with all its descendants
/// after `patience`. Returns true if it succeeded.
fn watch(command: &mut Command, patience: Duration, mut line: impl FnMut(&str)) -> Result<bool> {
    let (mut reader, writer) = std::io::pipe()?;
    command
        .stdout(writer.try_clone()?)
        .stderr(writer)
        .process_group(0);
    let mut child = command.spawn()?;
    // The command holds the other end of the pipe.
    *command = Command::new("true");
    let group = Pid::from_raw(child.id() as i32);
    let (ended, over) = mpsc::channel::<()>();
    let watchdog = thread::spawn(move || {
        let late = over.recv_timeout(patience) == Err(mpsc::RecvTimeoutError::Timeout);
        if late {
            // The group is there: its leader has not been waited for.
            let _ = killpg(group, Signal::SIGKILL);
        }
        late
    });
    let mut lines = BufReader::new(reader.by_ref());
    let mut bytes = Vec::new();
    while lines.read_until(b'\n', &mut bytes)? > 0 {
        line(String::from_utf8_lossy(&bytes).trim_end());
        bytes.clear();
    }
    drop(ended);
    let late = watchdog.join().expect("the watchdog does not panic");
    let status = child.wait()?;
    if late {
        return Err(format!("it took longer than {} s", patience.as_secs()).into());
    }
    Ok(status.success())
}
