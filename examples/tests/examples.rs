//! Runs every example as a user would, on little data and less memory: each checks its own result.

use std::{
    io::Read,
    process::{Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use farpage_memserver::Server;

/// Time limit of an example. Each takes a second or two; a busy machine may need a few times as
/// long, and one that hangs must not stop the suite.
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Output of a program, and its success.
struct Run {
    output: String,
    errors: String,
    success: bool,
}

impl Run {
    /// Asserts that the program succeeded, printed all of `lines`, and evicted pages.
    #[track_caller]
    fn assert_correct(&self, lines: &[&str]) {
        let Run {
            output,
            errors,
            success,
        } = self;
        assert!(success, "it failed:\n{output}\n{errors}");
        for line in lines {
            assert!(output.contains(line), "no `{line}` in:\n{output}");
        }
        assert!(evictions(output) > 0, "nothing was evicted:\n{output}");
    }
}

/// Returns the figure in front of " out;" in the last line of figures.
fn evictions(output: &str) -> u64 {
    let (before, _) = output.rsplit_once(" out;").expect("a line of figures");
    let (_, figure) = before.rsplit_once(' ').expect("a figure");
    figure.parse().expect("a number")
}

/// Runs a program with its argument and `FARPAGE_SERVER`, and without any other setting of the
/// environment.
fn run(program: &str, argument: &str, server: Option<&str>) -> Run {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("FARPAGE_") {
            command.env_remove(name);
        }
    }
    if let Some(server) = server {
        command.env("FARPAGE_SERVER", server);
    }
    command.arg(argument);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("cargo built the examples");

    let output = read_all(child.stdout.take().expect("piped above"));
    let errors = read_all(child.stderr.take().expect("piped above"));
    let in_time = output.recv_timeout(TIME_LIMIT);
    let Ok(output) = in_time else {
        child.kill().expect("the child is ours");
        child.wait().expect("the child is ours");
        let printed = output.recv().expect("ends with the child");
        let errors = errors.recv().expect("ends with the child");
        panic!("{program} {argument} did not end within {TIME_LIMIT:?}:\n{printed}\n{errors}");
    };
    Run {
        output,
        errors: errors.recv().expect("ends with the child"),
        success: child.wait().expect("the child is ours").success(),
    }
}

/// Reads in a thread of its own, so that neither pipe fills up while the other is read.
fn read_all(mut pipe: impl Read + Send + 'static) -> mpsc::Receiver<String> {
    let (send, receive) = mpsc::channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes).expect("a pipe can be read");
        // The receiver is gone if the test has failed meanwhile.
        let _ = send.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    receive
}

#[test]
fn hello() {
    run(env!("CARGO_BIN_EXE_hello"), "8MiB", None).assert_correct(&[
        "filled and summed 1048576 numbers",
        "the sum is 549755289600: correct",
    ]);
}

#[test]
fn stencil() {
    run(env!("CARGO_BIN_EXE_stencil"), "512", None)
        .assert_correct(&["20 steps on 512 x 512 points", ": correct"]);
}

#[test]
fn pagerank() {
    run(env!("CARGO_BIN_EXE_pagerank"), "15", None).assert_correct(&[
        "made a graph of 32768 vertices and 524288 edges",
        "sum is 1.000000000, and all are as in local memory: correct",
    ]);
}

#[test]
fn sort() {
    run(env!("CARGO_BIN_EXE_sort"), "8MiB", None)
        .assert_correct(&["sorted them", "in order and complete: correct"]);
}

#[test]
fn custom_store() {
    run(env!("CARGO_BIN_EXE_custom_store"), "4MiB", None).assert_correct(&[
        "160 changed pieces are in the store",
        "flush: ",
        "prefetch: ",
        "every change survived the errors: correct",
    ]);
}

#[test]
fn parameter_server() {
    let ended = run(env!("CARGO_BIN_EXE_parameter_server"), "3", None);
    let Run { output, errors, .. } = &ended;
    assert!(ended.success, "it failed:\n{output}\n{errors}");
    for line in ["3 workers did 300 steps", "from the truth: correct"] {
        assert!(output.contains(line), "no `{line}` in:\n{output}");
    }
}

#[test]
fn the_server_in_the_environment_is_used() {
    let server = Server::builder()
        .listen("tcp://127.0.0.1:0".parse().expect("an endpoint"))
        .start()
        .expect("a free port");
    let endpoint = server.endpoints()[0].to_string();
    run(env!("CARGO_BIN_EXE_hello"), "8MiB", Some(&endpoint)).assert_correct(&[": correct"]);
    let written = server.stat().bytes_written;
    assert!(written > 4 << 20, "the server was sent {written} bytes");
}

#[test]
fn more_than_the_server_has_is_an_error() {
    let server = Server::builder()
        .listen("tcp://127.0.0.1:0".parse().expect("an endpoint"))
        .capacity(4 << 20)
        .start()
        .expect("a free port");
    let endpoint = server.endpoints()[0].to_string();
    let Run {
        output,
        errors,
        success,
    } = run(env!("CARGO_BIN_EXE_hello"), "8MiB", Some(&endpoint));
    assert!(!success, "{output}");
    assert!(
        errors.contains("no remote memory for array 1 (u64, 8.0 MiB)"),
        "{errors}"
    );
}

#[test]
fn a_bad_argument_is_an_error() {
    let Run {
        errors, success, ..
    } = run(env!("CARGO_BIN_EXE_hello"), "lots", None);
    assert!(!success);
    assert!(errors.contains("`lots` is no size"), "{errors}");
}
