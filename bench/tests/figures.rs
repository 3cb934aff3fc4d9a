//! Fields, codecs and figures, as people and scripts use them.

mod common;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

use common::{bench, can_page, run};

/// A place for results, removed at the end.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("farpage-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).expect("the directory for temporary files can be written to");
        Self(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("its name was made from text above")
    }

    fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn json(args: &[&str]) -> Value {
    let output = run(&[args, &["--smoke", "--format", "json"]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {stderr}");
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

fn refused(args: &[&str], status: i32, says: &str) {
    let output = run(args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{args:?}: {stderr}");
    assert!(stderr.contains(says), "{args:?}: {stderr}");
}

#[test]
fn fields_of_every_type_come_back_as_they_were_or_within_their_bound() {
    if !can_page("fields_of_every_type_come_back_as_they_were_or_within_their_bound") {
        return;
    }
    for (data, codec) in [
        ("text", "lz4"),
        ("graph-columns", "shuffle"),
        ("graph-offsets", "zfp:reversible"),
        ("turbulence", "raw"),
        ("climate", "zfp:accuracy=1e-2"),
    ] {
        let report = json(&["traffic", "--data", data, "--codec", codec]);
        assert_eq!(report["verified"], true, "{report}");
        let figure = |pointer: &str| report.pointer(pointer).and_then(Value::as_f64).unwrap();
        assert!(figure("/kernels/2/mb_per_s") > 0.0 && figure("/bytes_read") > 0.0);
        let error = figure("/error_max");
        match codec {
            "zfp:accuracy=1e-2" => assert!(error > 0.0 && error <= 1e-2, "{report}"),
            _ => assert_eq!(error, 0.0, "{report}"),
        }
        if codec != "raw" {
            assert!(figure("/compression_ratio") > 1.1, "{report}");
        }
    }
}

#[test]
fn a_file_takes_the_place_of_a_field() {
    let directory = Directory::new("file");
    let path = directory.join("waves.f32");
    let waves = (0..3 * 64 * 512).map(|i| ((i % 512) as f32 * 0.01).sin());
    let bytes: Vec<u8> = waves.flat_map(f32::to_le_bytes).collect();
    fs::write(&path, bytes).unwrap();
    let path = path.to_str().unwrap();
    let file = ["--data-file", path, "--dtype", "f32", "--shape"];
    refused(
        &[&["pages"], &file[..], &["3x64x513"]].concat(),
        1,
        "makes 393984",
    );
    refused(&["pages", "--data-file", path], 2, "--dtype");
    refused(&[&["pages"], &file[..], &["0"]].concat(), 2, "above 0");
    refused(
        &["stream", "--smoke", "--data", "text"],
        1,
        "STREAM computes with f32 or f64",
    );
    let report = json(&[&["pages"], &file[..], &["3x64x512"]].concat());
    assert_eq!(report["data"], path);
    if can_page("a_file_takes_the_place_of_a_field") {
        let report = json(&[&["stream"], &file[..], &["3x64x512"]].concat());
        assert_eq!(report["verified"], true, "{report}");
        assert_eq!(report["config"]["data"], path);
    }
}

#[test]
fn pages_tells_ratio_time_growth_and_error_of_each_codec() {
    let codecs = "deflate6+plain-lz4+lz4+shuffle+zfp:accuracy=1e-2";
    let of = |data: &str| json(&["pages", "--data", data, "--codecs", codecs])["findings"].clone();
    let figure = |findings: &Value, at: usize, name: &str| findings[at][name].as_f64().unwrap();
    let climate = of("climate");
    for at in 0..5 {
        assert!(figure(&climate, at, "encode_mb_per_s") > 0.0, "{climate}");
        assert!(figure(&climate, at, "decode_mb_per_s") > 0.0, "{climate}");
        assert_eq!(
            figure(&climate, at, "error_max") > 0.0,
            at == 4,
            "{climate}"
        );
    }
    assert!(
        figure(&climate, 4, "ratio") > figure(&climate, 0, "ratio"),
        "{climate}"
    );
    let random = of("random");
    assert_eq!(figure(&random, 1, "grown_share"), 1.0, "{random}");
    assert!(figure(&random, 1, "ratio") < 1.0, "{random}");
    // farpage's pages never grow.
    assert_eq!(figure(&random, 2, "ratio"), 1.0, "{random}");
    refused(&["pages", "--codecs", "zip"], 1, "deflate1 to deflate9");
}

#[test]
fn figures_are_drawn_as_tables_and_pictures() {
    if !can_page("figures_are_drawn_as_tables_and_pictures") {
        return;
    }
    let directory = Directory::new("figures");
    let output = run(&["figures", "--smoke", "--out", directory.path()]);
    assert!(output.status.success(), "{output:?}");
    for figure in [
        "workers",
        "lz4-throughput",
        "lz4-traffic",
        "lossy-traffic",
        "growth",
        "ratio",
        "encode-time",
        "decode-time",
    ] {
        let read = |extension| fs::read(directory.join(figure).with_extension(extension));
        let [csv, svg, png] = ["csv", "svg", "png"].map(|extension| read(extension).unwrap());
        assert!(
            String::from_utf8(csv).unwrap().lines().count() >= 2,
            "{figure}"
        );
        let svg = String::from_utf8(svg).unwrap();
        assert!(
            svg.contains("The poster") && svg.contains("Measured on"),
            "{svg}"
        );
        assert!(png.starts_with(b"\x89PNG"), "{figure}");
    }
}

#[test]
fn figures_that_were_interrupted_go_on() {
    if !can_page("figures_that_were_interrupted_go_on") {
        return;
    }
    let directory = Directory::new("interrupted");
    let points = directory.join("points.jsonl");
    let lines = |points: &Path| {
        fs::read_to_string(points)
            .unwrap_or_default()
            .lines()
            .count()
    };
    let mut kept = String::new();
    for round in 1..=2 {
        let child = bench(&["figures", "--quick", "--out", directory.path()])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let end = Instant::now() + Duration::from_secs(60);
        while lines(&points) < 1 + round {
            assert!(Instant::now() < end, "no result in a minute");
            std::thread::sleep(Duration::from_millis(5));
        }
        kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains("results are kept"), "{stderr}");
        let found = fs::read_to_string(&points).unwrap();
        assert!(
            found.starts_with(&kept),
            "what was measured is not measured again"
        );
        kept = found;
    }
    let mut commands: Vec<Value> = kept
        .lines()
        .skip(1)
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["command"].clone())
        .collect();
    let count = commands.len();
    commands.dedup();
    assert_eq!(commands.len(), count, "no command ran twice");
}

#[test]
fn codecs_are_compared_and_judged() {
    if !can_page("codecs_are_compared_and_judged") {
        return;
    }
    let directory = Directory::new("codecs");
    let report = json(&["codecs", "--out", directory.path()]);
    let sweep = report["sweep"].as_array().unwrap();
    // Three fields over two links; bytes of text are not shuffled.
    assert_eq!(sweep.len(), 6, "{report}");
    let (codecs, text) = (report["codecs"].as_array().unwrap(), &sweep[5]);
    assert_eq!(
        (&text["data"], &codecs[2]),
        (&"text".into(), &"shuffle".into())
    );
    assert!(text["mb_per_s"][2].is_null(), "{report}");
    assert!(text["mb_per_s"][1].as_f64().unwrap() > 0.0, "{report}");
    let checks = report["checks"].as_array().unwrap();
    assert!(
        checks.iter().any(|check| check["target"] == "at least 1.5"),
        "{report}"
    );
    let zfp = checks.iter().find(|check| {
        check["what"]
            .as_str()
            .unwrap()
            .starts_with("bytes moved, turbulence")
    });
    assert!(zfp.unwrap()["ratio"].as_f64().unwrap() > 0.0, "{report}");
}
