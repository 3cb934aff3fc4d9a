//! Tables out of the program's reach: a value that is held on one is used and dropped there.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests, which fail by panicking"
)]

use std::{
    fs::{self, File},
    io::{self, Read, Write, pipe},
    os::fd::{AsFd, AsRawFd},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Barrier},
    thread::Builder,
};

use farpage_tables::{Held, Keeper, Table, errand, run_outside, spawn};

/// Lists the files of the calling thread's table, by number.
fn open() -> Vec<(i32, String)> {
    let mut open: Vec<_> = (fs::read_dir("/proc/thread-self/fd").unwrap())
        .filter_map(|entry| {
            let entry = entry.unwrap();
            let target = fs::read_link(entry.path()).ok()?;
            let number = entry.file_name().to_str()?.parse().ok()?;
            Some((number, target.display().to_string()))
        })
        .filter(|(_, target)| !target.ends_with("/fd"))
        .collect();
    open.sort();
    open
}

#[test]
fn private_table_has_standard_error_and_nothing_else_of_the_programs() {
    let (mut reader, writer) = pipe().unwrap();
    let table = Table::private().unwrap();
    let inside = table.run(open);
    let numbers: Vec<_> = inside.iter().map(|(number, _)| *number).collect();
    assert_eq!(numbers[..3], [0, 1, 2], "{inside:?}");
    assert!(inside.iter().all(|(_, target)| {
        !target.starts_with("pipe:[")
            || *target
                == fs::read_link("/proc/self/fd/2")
                    .unwrap()
                    .display()
                    .to_string()
    }));
    // The end of the pipe is seen: no other table has it.
    drop(writer);
    assert_eq!(reader.read(&mut [0]).unwrap(), 0);
}

#[test]
fn value_is_used_and_dropped_on_the_table_that_it_was_made_on() {
    let table = Table::private().unwrap();
    let held = table.run(|| Held::new(tempfile()));
    let number = held.get().as_raw_fd();
    let before = open();
    held.with(|mut file| file.write_all(b"theirs")).unwrap();
    assert_eq!(held.with(|file| file.metadata().unwrap().len()), 6);
    // A file of the program's that has the same number stays open.
    let ours = tempfile();
    // SAFETY: the number is the test's own from here on, or is nobody's.
    let same = unsafe { libc::fcntl(ours.as_raw_fd(), libc::F_DUPFD, number) };
    drop(held);
    // SAFETY: looks at a descriptor.
    assert!(unsafe { libc::fcntl(same, libc::F_GETFD) } >= 0);
    assert!(table.run(open).iter().all(|(at, _)| *at != number));
    drop((ours, before));
}

fn tempfile() -> File {
    let path = std::env::temp_dir().join(format!("farpage-tables-{}", std::process::id()));
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&path);
    let _ = fs::remove_file(path);
    file.unwrap()
}

#[test]
fn calls_beyond_the_threads_that_exist_are_run_all_the_same() {
    let table = Table::private().unwrap();
    let all = Arc::new(Barrier::new(6));
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| table.run(|| all.wait()));
        }
    });
    let errands = Arc::new(Barrier::new(4));
    for _ in 0..3 {
        let errands = errands.clone();
        let wait = move || _ = errands.wait();
        table.run(|| errand("errand", wait)).unwrap();
    }
    errands.wait();
    let nested = table.run(|| Table::current().unwrap().run(|| 5));
    assert_eq!(nested, 5);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        table.run(|| panic!("as this test wants"))
    }));
    assert!(panicked.is_err());
}

#[test]
fn threads_know_their_table_and_the_programs_code_runs_outside() {
    let table = Table::private().unwrap();
    assert!(Table::current().is_none());
    let ours = Arc::as_ptr(&table) as usize;
    let seen = table.run(|| {
        let thread = spawn(Builder::new(), || {
            Table::current().map(|t| Arc::as_ptr(&t) as usize)
        });
        thread.unwrap().join().unwrap()
    });
    assert_eq!(seen, Some(ours));
    let file = tempfile();
    let number = file.as_raw_fd();
    let length = move || {
        assert!(Table::current().is_none());
        // SAFETY: the test's, open until its end.
        let borrowed = unsafe { std::os::fd::BorrowedFd::borrow_raw(number) };
        File::from(borrowed.try_clone_to_owned()?)
            .metadata()
            .map(|file| file.len())
    };
    let length = table
        .run(move || run_outside("outside", length))
        .unwrap()
        .unwrap();
    assert_eq!(length, 0);
}

#[test]
fn what_a_keeper_keeps_stays_open() -> io::Result<()> {
    let (mut reader, writer) = pipe()?;
    let keeper = Keeper::new(&[writer.as_fd()])?;
    let flags = nix::fcntl::OFlag::O_NONBLOCK;
    nix::fcntl::fcntl(&reader, nix::fcntl::FcntlArg::F_SETFL(flags))?;
    drop(writer);
    let kept = reader.read(&mut [0]);
    assert_eq!(kept.unwrap_err().kind(), io::ErrorKind::WouldBlock);
    drop(keeper);
    nix::fcntl::fcntl(
        &reader,
        nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::empty()),
    )?;
    assert_eq!(reader.read(&mut [0])?, 0, "and is closed with the keeper");
    Ok(())
}
