//! Sizes as programs and users see them: capacities, limits of a program's own, and `--stats`.
//!
//! The rule it keeps: a size is asserted from outside, or by what a plain run does.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests, which fail by panicking"
)]

mod common;

use std::process::Output;

use common::{can_run, farpage, text};

const PYTHON: &str = "/usr/bin/python3";
const MODES: [&[&str]; 2] = [&[], &["--in-thread"]];

/// Runs a script in both modes, and looks at what came of it.
fn python(options: &[&str], script: &str, check: impl Fn(&Output, &str)) {
    for mode in MODES {
        let ended = farpage(&[mode, options].concat(), &[PYTHON, "-c", script]);
        let stats = text(&ended.stderr);
        println!("{mode:?} {options:?}: {stats}");
        check(&ended, &stats);
    }
}

fn assert_says(ended: &Output, expected: &str) {
    let (why) = (text(&ended.stdout), text(&ended.stderr));
    assert_eq!(
        (said.trim(), ended.status.code()),
        (expected, Some(0)),
        "{why}"
    );
}

/// A server's habit: it receives into a large block, and keeps what came.
#[test]
fn remnants_of_shrunk_blocks_take_no_page_each() {
    if !can_run("remnants_of_shrunk_blocks_take_no_page_each", &[PYTHON]) {
        return;
    }
    let script = "
import os
r, w = os.pipe(); kept = []
for i in range(8000):
    os.write(w, b'%0100d' % i); kept.append(os.read(r, 1 << 18))
assert [int(k) for k in kept] == list(range(8000))
print(sum(map(len, kept)))
";
    let options = ["--budget", "8MiB", "--capacity", "64MiB"];
    python(&options, script, |ended, _| assert_says(ended, "800000"));
}
