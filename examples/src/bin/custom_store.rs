//! An array whose pages come from a store of your own, with no memory server: squares that are
//! computed when they are first touched. Also shows how errors of a store reach the program.
//! `custom_store [size, such as 64MiB]`

use std::{
    collections::HashMap,
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use farpage::{Advice, ByteSize, RegionOptions, Runtime, Store};
use farpage_examples::{argument, report};

/// Size of the pieces that the store keeps: the smallest page's. A call may span one page or
/// several neighbouring ones.
const PIECE_BYTES: usize = 4096;

/// A store whose element `i` is `i * i` until it is changed. A map keeps the changed pieces.
///
/// A clone is a handle on the same store: the program can look into it while an array uses it.
#[derive(Clone, Default)]
struct Squares(Arc<Inner>);

#[derive(Default)]
struct Inner {
    /// Changed pieces, by offset.
    changed: Mutex<HashMap<u64, Box<[u8]>>>,
    /// Flag that makes writes fail, as if a disk were full or a cable out.
    writes_fail: AtomicBool,
    reads_fail: AtomicBool,
}

impl Store for Squares {
    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if self.0.reads_fail.load(Ordering::Relaxed) {
            return Err(io::Error::other("the cable is out"));
        }
        let changed = self.0.changed.lock().expect("no holder of the lock panics");
        for (offset, piece) in (offset..)
            .step_by(PIECE_BYTES)
            .zip(buf.chunks_mut(PIECE_BYTES))
        {
            match changed.get(&offset) {
                Some(kept) => piece.copy_from_slice(kept),
                None => {
                    for (i, bytes) in (offset / 8..).zip(piece.chunks_exact_mut(8)) {
                        bytes.copy_from_slice(&square(i).to_ne_bytes());
                    }
                }
            }
        }
        Ok(())
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        if self.0.writes_fail.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let mut changed = self.0.changed.lock().expect("no holder of the lock panics");
        for (offset, piece) in (offset..).step_by(PIECE_BYTES).zip(buf.chunks(PIECE_BYTES)) {
            changed.insert(offset, piece.into());
        }
        Ok(())
    }

    /// Returns false: the store waits for no device, so the runtime needs no more threads for it.
    fn may_block(&self) -> bool {
        false
    }

    /// Returns the store's name in errors.
    fn name(&self) -> String {
        "squares".to_owned()
    }
}

fn square(i: u64) -> u64 {
    i.wrapping_mul(i)
}

fn main() -> Result<()> {
    let size = argument("size", ByteSize::mib(64))?.as_u64();
    let len = size as usize / size_of::<u64>();
    let step = len.div_ceil(10);

    let runtime = Runtime::builder()
        .budget(ByteSize(size / 4))
        .deadline(Duration::from_secs(1)) // how long an operation that fails is tried again
        .build()?;
    let store = Squares::default();
    let options = RegionOptions::new().store(store.clone());
    let mut squares = runtime.array_with::<u64>(len, options)?;

    // Reads come out of the store, changes go into it.
    let started = Instant::now();
    for number in squares.iter_mut().step_by(step) {
        *number += 1;
    }
    for (i, &number) in squares.iter().enumerate() {
        let expected = square(i as u64) + u64::from(i % step == 0);
        ensure!(
            number == expected,
            "element {i} is {number}, but must be {expected}"
        );
    }
    squares.flush()?;
    report(&format!("read {len} squares"), started, &runtime);
    println!(
        "{} changed pieces are in the store",
        store
            .0
            .changed
            .lock()
            .expect("no holder of the lock panics")
            .len()
    );

    // A page that cannot be written stays in memory, and flush says why.
    store.0.writes_fail.store(true, Ordering::Relaxed);
    squares[0] = 7;
    match squares.flush() {
        Ok(()) => anyhow::bail!("flush hid an error of the store"),
        Err(error) => println!("flush: {error}"),
    }
    store.0.writes_fail.store(false, Ordering::Relaxed);
    squares.flush()?;

    // A page that cannot be read raises SIGBUS when it is touched. To get an error instead, ask for
    // it first.
    squares.advise(..step, Advice::DontNeed)?;
    store.0.reads_fail.store(true, Ordering::Relaxed);
    match squares.prefetch_now(..step) {
        Ok(()) => anyhow::bail!("prefetch_now hid an error of the store"),
        Err(error) => println!("prefetch: {error}"),
    }
    store.0.reads_fail.store(false, Ordering::Relaxed);
    squares.prefetch_now(..step)?;

    ensure!(
        squares[0] == 7 && squares[1] == 1,
        "a change was lost on the way"
    );
    squares.close()?;
    println!("every change survived the errors: correct");
    Ok(())
}
