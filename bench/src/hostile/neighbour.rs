//! End of a process beside the victim.

use std::{
    io::{self, Read},
    thread,
};

/// Ends this process, a neighbour, when the benchmark that started it is gone.
pub(super) fn end_with_parent() {
    thread::spawn(|| {
        // The benchmark writes nothing here: the read ends when the benchmark closes its end.
        let _ = io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(1);
    });
}
