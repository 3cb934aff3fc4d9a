//! The program's table: the threads that run errands exist from the first one on. Alone in its
//! process, whose threads are counted.

use std::{fs, io, sync::mpsc::channel};

use farpage_tables::{Table, errand};

/// Counts the threads of this process with a name.
fn threads_called(name: &str) -> io::Result<usize> {
    let mut count = 0;
    for task in fs::read_dir("/proc/self/task")? {
        count += usize::from(fs::read_to_string(task?.path().join("comm"))?.trim() == name);
    }
    Ok(count)
}

#[test]
fn threads_of_the_programs_table_start_with_the_first_errand() -> io::Result<()> {
    const ERRANDS: &str = "farpage-errand";
    let table = Table::programs()?;
    assert_eq!(threads_called(ERRANDS)?, 0);
    let (done, wait) = channel();
    table.run(|| errand("an errand", move || done.send(()).expect("awaited below")))?;
    wait.recv().expect("the errand is run");
    assert_eq!(threads_called(ERRANDS)?, 2);
    table.start()?;
    assert_eq!(threads_called(ERRANDS)?, 2, "they are there already");
    Ok(())
}
