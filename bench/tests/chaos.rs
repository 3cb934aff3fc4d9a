//! Memory servers that die, stall, are cut off and forget bits, for a quarter of a minute with
//! copies and with parity, beside a program that checks each word.
//!
//! The rule it keeps: a wrong word, a copy that is not made again, and an access that does not end
//! fail the run.

mod common;

use serde_json::Value;

use common::{assert_positive, assert_refused, can_page, list, report};

/// Runs `chaos` with the events `kinds` and `args`, and asserts that each happened and healed.
fn survives(kinds: &str, args: &str) -> Option<Value> {
    if !can_page() {
        return None;
    }
    let report = report(&format!("chaos --only {kinds} {args}"));
    assert_positive(&report, "/quiet_fault_us/samples /failovers /words_checked");
    assert_eq!(report["wrong_words"], 0);
    let events = list(&report, "/events").iter();
    let happened: Vec<_> = events.map(|event| text(&event["kind"])).collect();
    assert_eq!(happened.join(","), kinds);
    for event in list(&report, "/events") {
        assert_positive(event, "/checked /fault_us/max");
        // The one that dies in a drain may be new, and empty.
        let has_lost =
            ["kill", "kill-in-rebuild", "kill-in-sealing"].contains(&text(&event["kind"]));
        assert!(!has_lost || event["repaired_bytes"] != 0, "{event}");
    }
    assert!(list(&report, "/timeline").len() > 10);
    let flips = list(&report, "/events").iter();
    let flips = flips.filter(|event| event["kind"] == "flip").count();
    assert_eq!(report["corrupt"], flips, "a flipped bit counts once");
    Some(report)
}

fn text(value: &Value) -> &str {
    value.as_str().expect("a text")
}

#[test]
fn pages_with_copies_outlive_every_fault_and_are_errors_once_all_copies_are_gone() {
    let kinds = "kill,short-loss,cut,kill-in-rebuild,flip";
    let Some(report) = survives(kinds, "--to-the-end") else {
        return;
    };
    assert_eq!(
        report["end"]["killed"].as_array().expect("servers").len(),
        2
    );
    let pages = ["right_pages", "failed_pages"].map(|name| report["end"][name].as_u64());
    assert!(pages > [Some(0), Some(0)], "{report}");
}

#[test]
fn pages_with_parity_outlive_every_fault_in_the_threads_that_fault() {
    let kinds = "long-stop,kill-in-drain,kill-in-sealing,flip";
    survives(kinds, "--redundancy parity=2+1 --fault-mode in-thread");
}

#[test]
fn events_that_cannot_happen_are_refused_with_the_reason() {
    assert_refused("chaos --fabric shm --only kill,cut", 1, "--fabric tcp");
    assert_refused("chaos --only kill-in-sealing", 1, "--redundancy parity=k+m");
    assert_refused("chaos --only flip --memory 64MiB", 1, "with --memory");
    assert_refused("chaos --redundancy none", 1, "--redundancy copies=2");
}
