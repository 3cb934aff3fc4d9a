//! Fields, codecs and figures, as people and scripts use them.

mod common;

use std::fs;

use serde_json::Value;
use tempfile::tempdir;

use common::{
    assert_has, assert_positive, assert_refused, can_page, interrupt, list, printed, report, said,
    start, wait_until,
};

#[test]
fn fields_of_every_type_come_back_as_they_were_or_within_their_bound() {
    if !can_page() {
        return;
    }
    for (data, codec) in [
        ("text", "lz4 --fabric tcp"),
        ("graph-columns", "shuffle"),
        ("graph-offsets", "zfp:reversible"),
        ("turbulence", "raw"),
        ("climate", "zfp:accuracy=1e-2"),
    ] {
        let report = report(&format!("traffic --data {data} --codec {codec}"));
        assert_positive(&report, "/kernels/2/mb_per_s /bytes_read");
        let error = report["error_max"].as_f64().unwrap();
        match codec {
            "zfp:accuracy=1e-2" => assert!(error > 0.0 && error <= 1e-2, "{report}"),
            _ => assert_eq!(error, 0.0, "{report}"),
        }
        if codec != "raw" {
            let ratio = report["compression_ratio"].as_f64().unwrap();
            assert!(ratio > 1.1, "{report}");
        }
    }
}

#[test]
fn a_file_takes_the_place_of_a_field() {
    let directory = tempdir().unwrap();
    let path = directory.path().join("waves.f32");
    let waves = (0..3 * 64 * 512).map(|i| ((i % 512) as f32 * 0.01).sin());
    let bytes: Vec<u8> = waves.flat_map(f32::to_le_bytes).collect();
    fs::write(&path, bytes).unwrap();
    let path = path.to_str().unwrap();
    let shaped = |shape| format!("pages --data-file {path} --dtype f32 --shape {shape}");
    assert_refused(&shaped("3x64x513"), 1, "makes 393984");
    assert_refused(&shaped("0"), 2, "above 0");
    assert_refused(&format!("pages --data-file {path}"), 2, "--dtype");
    let text = "stream --smoke --data text";
    assert_refused(text, 1, "STREAM computes with f32 or f64");
    let file = format!("--data-file {path} --dtype f32 --shape 3x64x512");
    assert_eq!(report(&format!("pages {file}"))["data"], path);
    if can_page() {
        assert_eq!(report(&format!("stream {file}"))["config"]["data"], path);
    }
}

#[test]
fn pages_tells_ratio_time_growth_and_error_of_each_codec() {
    let codecs = "deflate6+plain-lz4+lz4+shuffle+zfp:accuracy=1e-2";
    let of = |data: &str| report(&format!("pages --data {data} --codecs {codecs}"));
    let figure = |findings: &[Value], at: usize, name: &str| findings[at][name].as_f64().unwrap();
    let climate = of("climate");
    let climate = list(&climate, "/findings");
    assert_eq!(climate.len(), 5);
    for (at, finding) in climate.iter().enumerate() {
        assert_positive(finding, "/encode_mb_per_s /decode_mb_per_s");
        assert_eq!(figure(climate, at, "error_max") > 0.0, at == 4, "{finding}");
    }
    assert!(figure(climate, 4, "ratio") > figure(climate, 0, "ratio"));
    let random = of("random");
    let random = list(&random, "/findings");
    assert_eq!(figure(random, 1, "grown_share"), 1.0);
    assert!(figure(random, 1, "ratio") < 1.0);
    // farpage's pages never grow.
    assert_eq!(figure(random, 2, "ratio"), 1.0);
    assert_refused("pages --codecs zip", 1, "deflate1 to deflate9");
}

#[test]
fn figures_are_drawn_as_tables_and_pictures() {
    if !can_page() {
        return;
    }
    let directory = tempdir().unwrap();
    let out = directory.path().display();
    printed(&format!("figures --smoke --out {out}"));
    let traffic = "lz4-throughput lz4-traffic lossy-traffic";
    let codecs = "growth ratio encode-time decode-time";
    for figure in format!("workers {traffic} {codecs}").split(' ') {
        let read = |extension| fs::read(format!("{out}/{figure}.{extension}")).unwrap();
        let [csv, svg, png] = ["csv", "svg", "png"].map(read);
        let csv = String::from_utf8(csv).unwrap();
        assert!(csv.lines().count() >= 2, "{figure}");
        let svg = String::from_utf8(svg).unwrap();
        assert_has(&svg, &["The poster", "Measured on"]);
        assert!(png.starts_with(b"\x89PNG"), "{figure}");
    }
}

#[test]
fn figures_that_were_interrupted_go_on() {
    if !can_page() {
        return;
    }
    let directory = tempdir().unwrap();
    let out = directory.path().to_str().unwrap();
    let points = || fs::read_to_string(format!("{out}/points.jsonl")).unwrap_or_default();
    let mut kept = String::new();
    for round in 1..=2 {
        let child = start(&format!("figures --quick --out {out}"));
        wait_until("there is a result", || points().lines().count() > round);
        let output = interrupt(child);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert_has(&said(&output), &["results are kept"]);
        assert!(points().starts_with(&kept), "a result is measured again");
        kept = points();
    }
    let line = |line: &str| serde_json::from_str::<Value>(line).unwrap()["command"].clone();
    let mut commands: Vec<Value> = kept.lines().skip(1).map(line).collect();
    let count = commands.len();
    commands.dedup();
    assert_eq!(commands.len(), count, "no command ran twice");
}

#[test]
fn codecs_are_compared_and_judged() {
    if !can_page() {
        return;
    }
    let directory = tempdir().unwrap();
    let report = report(&format!("codecs --out {}", directory.path().display()));
    let sweep = list(&report, "/sweep");
    // Three fields over two links; bytes of text are not shuffled.
    assert_eq!(sweep.len(), 6, "{report}");
    assert_eq!(sweep[5]["data"], "text");
    assert_eq!(report["codecs"][2], "shuffle");
    assert!(sweep[5]["mb_per_s"][2].is_null(), "{report}");
    assert_positive(&sweep[5], "/mb_per_s/1");
    let checks = list(&report, "/checks");
    let is_of_lz4 = checks.iter().any(|check| check["target"] == "at least 1.5");
    assert!(is_of_lz4, "{report}");
    let is_of_zfp = |check: &&Value| {
        let what = check["what"].as_str().unwrap();
        what.starts_with("bytes moved, turbulence")
    };
    assert_positive(checks.iter().find(is_of_zfp).unwrap(), "/ratio");
}
