//! Sorts random numbers on all cores, in place, in an array four times larger than the memory it
//! may use here. `sort [size, such as 128MiB]`

use std::time::Instant;

use anyhow::{Result, ensure};
use farpage::ByteSize;
use farpage_examples::{Memory, argument, report};
use rayon::prelude::*;

fn main() -> Result<()> {
    let size = argument("size", ByteSize::mib(128))?.as_u64();
    let len = size as usize / size_of::<u64>();

    let memory = Memory::find()?;
    let runtime = memory.runtime().budget(ByteSize(size / 4)).build()?;
    let mut numbers = runtime.array::<u64>(len)?;

    let started = Instant::now();
    numbers
        .par_iter_mut()
        .enumerate()
        .for_each(|(i, number)| *number = random(i as u64));
    report(&format!("filled {len} numbers"), started, &runtime);

    // A quicksort works on ever smaller parts of the array: after a few rounds a part fits in local
    // memory and is sorted without any paging.
    let started = Instant::now();
    numbers.par_sort_unstable();
    report("sorted them", started, &runtime);

    // The numbers are in order and still the same: a lost, stale or doubled page would change the
    // sum.
    ensure!(
        numbers.par_windows(2).all(|pair| pair[0] <= pair[1]),
        "the numbers are not in order"
    );
    let sum = (numbers.par_iter().copied()).reduce(|| 0, u64::wrapping_add);
    let expected = (0..len as u64)
        .into_par_iter()
        .map(random)
        .reduce(|| 0, u64::wrapping_add);
    ensure!(sum == expected, "numbers were lost or changed");
    println!("the numbers are in order and complete: correct");
    Ok(())
}

/// Returns the `i`th number of the SplitMix64 generator, which any thread can make by itself.
fn random(i: u64) -> u64 {
    let z = i.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
