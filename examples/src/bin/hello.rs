//! The first program: an array four times larger than the memory it may use here.
//! `hello [size, such as 256MiB]`

use std::time::Instant;

use anyhow::{Result, ensure};
use farpage::ByteSize;
use farpage_examples::{Memory, argument, report};

fn main() -> Result<()> {
    let size = argument("size", ByteSize::mib(256))?.as_u64();
    let len = size / size_of::<u64>() as u64;

    let memory = Memory::find()?;
    let runtime = memory.runtime().budget(ByteSize(size / 4)).build()?;

    // The array is full of zeros. Nothing moves until it is touched.
    let started = Instant::now();
    let mut numbers = runtime.array::<u64>(len as usize)?;

    // The array is a slice, so everything that works on slices works on it.
    for (i, number) in numbers.iter_mut().enumerate() {
        *number = i as u64;
    }
    let sum: u64 = numbers.iter().sum();
    report(
        &format!("filled and summed {len} numbers"),
        started,
        &runtime,
    );

    let expected = len * len.saturating_sub(1) / 2;
    ensure!(sum == expected, "the sum is {sum}, but must be {expected}");
    println!("the sum is {sum}: correct");
    Ok(())
}
