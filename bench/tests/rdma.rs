//! STREAM over RDMA, as a program against a memory server of its own: on one machine, and from one
//! host to another whose link is cut.
//!
//! The rule it keeps: no test speaks of speed in figures of time; an emulated device is compared
//! with an emulated one beside it. `cargo xtask test --rdma` runs these tests where there is a
//! device.
#![cfg(feature = "rdma")]

mod common;

use std::{
    env, fs,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use farpage_testkit::test_name;
use nix::sys::resource::{UsageWho, getrusage};
use serde_json::Value;

use common::{Serving, list, parsed};

const PROGRAM: &str = env!("CARGO_BIN_EXE_farpage-bench");
/// Upper bound of every wait, far beyond what a test takes.
const PATIENCE: Duration = Duration::from_secs(120);

/// Words before the program's name that start it on a host.
type Host = &'static [&'static str];
const HERE: Host = &[];
const HOST_1: Host = &["ip", "netns", "exec", "host1"];
const HOST_2: Host = &["ip", "netns", "exec", "host2"];

/// Returns the command of the program on a host, ended after [`PATIENCE`].
fn bench(host: Host, args: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command.arg(PATIENCE.as_secs().to_string());
    command.args(host).arg(PROGRAM).args(args);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    command
}

/// Starts STREAM with arrays four times its budget.
fn stream(host: Host, server: &Serving, args: &[&str]) -> Child {
    let fixed = ["stream", "--server", &server.url, "--format", "json"];
    let sizes = ["--size", "12MiB", "--budget", "25%"];
    let mut command = bench(host, &[&fixed[..], &sizes, args].concat());
    command.spawn().expect("`timeout` can be started")
}

/// Returns STREAM's report, which has to say that every element was verified.
fn report(stream: Child) -> Value {
    let report = parsed(&stream.wait_with_output().expect("it was started"));
    assert_eq!(report["verified"], true, "{report}");
    assert!(report["evictions"].as_u64() > Some(0), "{report}");
    report
}

fn moved_bytes(report: &Value) -> f64 {
    let bytes = |name: &str| report[name].as_f64().expect("a number of bytes");
    bytes("bytes_read") + bytes("bytes_written")
}

/// Starts a memory server on a host.
fn serve(host: Host, listen: &str) -> Serving {
    let words = [host, &[PROGRAM]].concat();
    let mut program = Command::new(words[0]);
    program.args(&words[1..]);
    Serving::start(program, listen, 64 << 20)
}

/// Ends a server. Returns how often its threads were given a processor.
fn end(server: Serving) -> i64 {
    let switches = || {
        let ended = getrusage(UsageWho::RUSAGE_CHILDREN).expect("a process may ask that");
        ended.voluntary_context_switches() + ended.involuntary_context_switches()
    };
    let before = switches();
    // Dropping it waits for its end.
    drop(server);
    switches() - before
}

/// Returns the address of this machine's device; if there is none, says that the running test is
/// skipped.
fn address() -> Option<String> {
    let address = env::var("FARPAGE_TEST_RDMA_ADDRESS").ok();
    if address.is_none() {
        let test = test_name();
        eprintln!(
            "SKIPPED: {test}: no FARPAGE_TEST_RDMA_ADDRESS; `cargo xtask test --rdma` has one"
        );
    }
    address
}

#[test]
fn stream_over_rdma_verifies_raw_and_compressed() {
    let Some(address) = address() else {
        return;
    };
    let server = serve(HERE, &format!("rdma://{address}:0"));
    for args in [
        &["--codec", "raw"][..],
        &["--codec", "lz4", "--data", "smooth"],
    ] {
        let args = [args, &["--iterations", "2"]].concat();
        let report = report(stream(HERE, &server, &args));
        println!("{args:?}: {} bytes moved", moved_bytes(&report));
    }
}

/// Returns how often the server's threads are given a processor per MB that moves: the difference
/// of a short run and a long one, so that connecting and leasing do not count. Processor time would
/// count the network's interrupts, too, which use the time of whichever process runs.
fn server_turns_per_mb(listen: &str) -> f64 {
    let [short, long] = ["2", "8"].map(|iterations| {
        let server = serve(HERE, listen);
        let report = report(stream(HERE, &server, &["--iterations", iterations]));
        let (turns, mb) = (end(server) as f64, moved_bytes(&report) / 1e6);
        println!("{listen}, {iterations} iterations: {turns} turns of the server for {mb:.0} MB");
        (turns, mb)
    });
    (long.0 - short.0) / (long.1 - short.1)
}

#[test]
fn rdma_leaves_the_servers_processor_alone() {
    let Some(address) = address() else {
        return;
    };
    let tcp = server_turns_per_mb("tcp://127.0.0.1:0");
    let rdma = server_turns_per_mb(&format!("rdma://{address}:0"));
    println!("turns of the server per MB moved: tcp {tcp:.3}, rdma {rdma:.3}");
    // Nothing but keeping sessions alive is left.
    assert!(rdma < tcp / 10.0, "rdma {rdma}, tcp {tcp}");
}

/// Trains two workers on `addresses` for a few steps. Returns the hashes of their parameters.
fn training_hashes(addresses: &str) -> Vec<Value> {
    let keys = env::temp_dir().join(format!("farpage-train-{}", std::process::id()));
    let start = |rank: &str| {
        let shape = ["--group", "2", "--data", "blobs", "--hidden", "16"];
        let run = ["--steps", "4", "--mode", "ds", "--rank", rank];
        let fixed = ["train", "--format", "json", "--addresses", addresses];
        let mut command = bench(HERE, &[&fixed[..], &shape, &run].concat());
        command.env("FARPAGE_KEY_FILE", &keys);
        command.spawn().expect("`timeout` can be started")
    };
    let workers = ["0", "1"].map(start);
    let hashes = workers.map(|worker| {
        let output = worker.wait_with_output().expect("it was started");
        parsed(&output)["hash"].clone()
    });
    let _ = fs::remove_file(keys);
    hashes.into()
}

#[test]
fn training_over_rdma_ends_with_the_bits_of_training_over_tcp() {
    let Some(address) = address() else {
        return;
    };
    let tcp = training_hashes("tcp://127.0.0.1:17500,tcp://127.0.0.1:17501");
    let rdma = format!("rdma://{address}:17502,rdma://{address}:17503");
    assert!(tcp.iter().all(Value::is_string), "{tcp:?}");
    assert_eq!(training_hashes(&rdma), tcp);
}

/// Returns the bytes that have gone over a host's cable, in both directions.
fn cable_bytes(host: u32) -> u64 {
    let count = |name: &str| {
        let path = format!("/sys/class/net/to-host{host}/statistics/{name}");
        let text = fs::read_to_string(&path).expect("the cable is there");
        text.trim().parse::<u64>().expect("a number of bytes")
    };
    count("rx_bytes") + count("tx_bytes")
}

fn set_cable(host: u32, state: &str) {
    let cable = format!("to-host{host}");
    let status = Command::new("ip")
        .args(["link", "set", &cable, state])
        .status();
    assert!(status.expect("there is `ip`").success());
}

/// Waits until `holds` returns true, while the program runs.
fn wait_until(what: &str, stream: &mut Child, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !holds() {
        let ended = stream.try_wait().expect("it was started");
        assert!(ended.is_none(), "it ended ({ended:?}) before {what}");
        assert!(Instant::now() < until, "waited in vain until {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_parameter_server_over_rdma_copies_nothing_on_the_way() {
    if address().is_none() {
        return;
    }
    let args = "parameter-server --fabric rdma --smoke --format=json";
    let output = bench(HERE, &args.split(' ').collect::<Vec<_>>()).output();
    let report = parsed(&output.expect("`timeout` can be started"));
    for row in list(&report, "/rows") {
        assert_eq!(row["bounced_bytes"].as_u64(), Some(0), "{row}");
        assert!(row["pulls"]["pull_us"].as_f64() > Some(0.0), "{row}");
    }
    let steps = list(&report, "/ladder/0/steps");
    assert_eq!(steps.len(), 6, "inline and immediate data, too: {report}");
}

#[test]
fn rdma_between_hosts_survives_a_link_that_is_cut_and_comes_back() {
    let test = "rdma_between_hosts_survives_a_link_that_is_cut_and_comes_back";
    let hosts = env::var("FARPAGE_TEST_HOSTS").map_or(0, |hosts| hosts.parse().unwrap_or(0));
    if hosts < 2 {
        eprintln!("SKIPPED: {test}: it takes two hosts, which `cargo xtask test --rdma` has");
        return;
    }
    const MIB: u64 = 1 << 20;
    let server = serve(HOST_1, "rdma://10.97.0.1:0");
    let before = cable_bytes(2);
    let mut stream = stream(HOST_2, &server, &["--iterations", "6"]);
    wait_until("the run is under way", &mut stream, || {
        cable_bytes(2) > before + 24 * MIB
    });

    set_cable(1, "down");
    let cut = Instant::now();
    let mut at_cut = cable_bytes(2);
    let mut quiet_since = cut;
    wait_until("nothing has moved for two seconds", &mut stream, || {
        let now = cable_bytes(2);
        // The bytes that still move are attempts without an answer.
        if now > at_cut + MIB {
            (at_cut, quiet_since) = (now, Instant::now());
        }
        quiet_since.elapsed() > Duration::from_secs(2)
    });
    set_cable(1, "up");
    println!("the link was cut for {:?}", cut.elapsed());
    let at_return = cable_bytes(2);
    wait_until("pages move again", &mut stream, || {
        cable_bytes(2) > at_return + 4 * MIB
    });
    let report = report(stream);
    println!("{} bytes moved in all", moved_bytes(&report));
}
