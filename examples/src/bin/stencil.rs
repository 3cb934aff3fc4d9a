//! Heat spreads over a plate: two remote arrays seen as ndarray matrices, each step computed from
//! one into the other. `stencil [side, such as 2048]`

use std::{f64::consts::PI, mem, time::Instant};

use anyhow::{Result, ensure};
use farpage::{Advice, ByteSize};
use farpage_examples::{Memory, argument, report};
use ndarray::{ArrayView2, ArrayViewMut2, Axis, Zip, s};

/// Time step over the square of the grid's spacing; stable up to 1/4.
const ALPHA: f64 = 0.2;
const STEPS: i32 = 20;

fn main() -> Result<()> {
    let side: usize = argument("side of the plate", 2048)?;
    ensure!(side >= 64, "a plate of {side} x {side} points is too small");

    let memory = Memory::find()?;
    let size = 2 * side * side * size_of::<f64>();
    let runtime = memory.runtime().budget(ByteSize(size as u64 / 4)).build()?;
    let mut old = runtime.array::<f64>(side * side)?;
    let mut new = runtime.array::<f64>(side * side)?;
    for array in [&old, &new] {
        array.advise(.., Advice::Sequential)?;
    }

    // The edge is cold, and the heat lies in waves over the plate. Such waves keep their shape and
    // fade at a known rate.
    let waves = side / 16;
    let angle = waves as f64 * PI / (side - 1) as f64;
    let wave: Vec<f64> = (0..side).map(|i| (i as f64 * angle).sin()).collect();
    let mut plate = ArrayViewMut2::from_shape((side, side), &mut old)?;
    for (mut row, height) in plate.axis_iter_mut(Axis(0)).zip(&wave) {
        for (heat, width) in row.iter_mut().zip(&wave) {
            *heat = height * width;
        }
    }

    let started = Instant::now();
    for _ in 0..STEPS {
        let shape = (side, side);
        step(
            ArrayView2::from_shape(shape, &old)?,
            ArrayViewMut2::from_shape(shape, &mut new)?,
        );
        mem::swap(&mut old, &mut new);
    }
    let what = format!("{STEPS} steps on {side} x {side} points");
    report(&what, started, &runtime);

    // The height that the waves must have faded to.
    let faded = (1.0 - 8.0 * ALPHA * (angle / 2.0).sin().powi(2)).powi(STEPS);
    let plate = ArrayView2::from_shape((side, side), &old)?;
    let mut error: f64 = 0.0;
    for (row, height) in plate.axis_iter(Axis(0)).zip(&wave) {
        for (heat, width) in row.iter().zip(&wave) {
            error = error.max((heat - faded * height * width).abs());
        }
    }
    // Written so that a NaN fails.
    ensure!(error < 1e-10, "the heat is wrong by {error:e}");
    println!("the heat fell to {faded:.6} of what it was, to within {error:.0e}: correct");
    Ok(())
}

/// Moves every inner point towards the mean of its four neighbours. The edge stays as it is.
#[expect(
    clippy::reversed_empty_ranges,
    reason = "to ndarray -1 is the last row or column"
)]
fn step(old: ArrayView2<f64>, mut new: ArrayViewMut2<f64>) {
    Zip::from(new.slice_mut(s![1..-1, 1..-1]))
        .and(old.slice(s![1..-1, 1..-1]))
        .and(old.slice(s![..-2, 1..-1]))
        .and(old.slice(s![2.., 1..-1]))
        .and(old.slice(s![1..-1, ..-2]))
        .and(old.slice(s![1..-1, 2..]))
        .par_for_each(|new, &here, &north, &south, &west, &east| {
            *new = here + ALPHA * (north + south + west + east - 4.0 * here);
        });
}
