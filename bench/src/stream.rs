//! STREAM by McCalpin's rules (<https://www.cs.virginia.edu/stream/ref.html>) on three arrays, remote or plain.
//!
//! The rule it keeps: bytes are those that the kernels read and write, not those that paging moves; the best iteration
//! after the first counts; and every element is compared bit by bit with what the kernels must have made of it.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    thread,
    time::Instant,
};

use anyhow::Result;
use farpage::Advice;

use crate::{
    arena::Arena,
    options::{StreamOptions, threads},
    progress::Progress,
    report::{Figures, Kernel, Report},
};

const SCALAR: f64 = 3.0;

/// A slice of each array, the same elements of each.
struct Part<'a> {
    a: &'a mut [f64],
    b: &'a mut [f64],
    c: &'a mut [f64],
}

/// Name, bytes per element, and the loop.
type KernelLoop = (&'static str, u64, fn(Part<'_>));

const KERNELS: [KernelLoop; 4] = [
    ("copy", 16, |part| {
        part.c.copy_from_slice(part.a);
    }),
    ("scale", 16, |part| {
        for (b, c) in part.b.iter_mut().zip(&*part.c) {
            *b = SCALAR * c;
        }
    }),
    ("add", 24, |part| {
        for ((c, a), b) in part.c.iter_mut().zip(&*part.a).zip(&*part.b) {
            *c = a + b;
        }
    }),
    ("triad", 24, |part| {
        for ((a, b), c) in part.a.iter_mut().zip(&*part.b).zip(&*part.c) {
            *a = b + SCALAR * c;
        }
    }),
];

/// What the kernels make of an element of `a` in so many iterations: the elements of a, b and c.
fn expected(mut a: f64, iterations: u16) -> [f64; 3] {
    let (mut b, mut c) = (0.0, 0.0);
    for _ in 0..iterations {
        c = a;
        b = SCALAR * c;
        c = a + b;
        a = b + SCALAR * c;
    }
    [a, b, c]
}

pub(crate) fn run(options: &StreamOptions) -> Result<Report> {
    let (common, paging) = (&options.common, &options.paging);
    let arena = Arena::start(options.plain, common, paging)?;
    let len = paging.size_bytes(common) / 3 / size_of::<f64>() as u64;
    let mut a = arena.array::<f64>(len, Advice::Sequential)?;
    let mut b = arena.array::<f64>(len, Advice::Sequential)?;
    let mut c = arena.array::<f64>(len, Advice::Sequential)?;
    let threads = threads(options.threads);
    let iterations = options.iterations;
    let progress = Progress::new(2 + u64::from(iterations) * KERNELS.len() as u64);

    // 1. First touch, by the threads that compute later.
    progress.phase("filling");
    for_each_part([&mut a, &mut b, &mut c], threads, |first, part| {
        for (index, a) in (first..).zip(part.a) {
            *a = paging.data.value(paging.seed, index);
        }
        part.b.fill(2.0);
        part.c.fill(0.0);
    });
    progress.step(1);

    // 2. The kernels, timed.
    let begin = arena.mark();
    let mut seconds = [const { Vec::new() }; KERNELS.len()];
    for _ in 0..iterations {
        for ((name, _, kernel), seconds) in KERNELS.iter().zip(&mut seconds) {
            progress.phase(*name);
            let start = Instant::now();
            for_each_part([&mut a, &mut b, &mut c], threads, |_, part| kernel(part));
            seconds.push(start.elapsed().as_secs_f64());
            progress.step(1);
        }
    }
    let end = arena.mark();

    // 3. Every element.
    progress.phase("verifying");
    let wrong = AtomicU64::new(0);
    for_each_part([&mut a, &mut b, &mut c], threads, |first, part| {
        let found = part
            .a
            .iter()
            .zip(&*part.b)
            .zip(&*part.c)
            .map(|((a, b), c)| [*a, *b, *c]);
        for (index, found) in (first..).zip(found) {
            let right = expected(paging.data.value(paging.seed, index), iterations);
            if found.map(f64::to_bits) != right.map(f64::to_bits)
                && wrong.fetch_add(1, Relaxed) == 0
            {
                eprintln!("element {index} of a, b, c is {found:?} and has to be {right:?}");
            }
        }
    });
    progress.step(1);
    drop(progress);
    let wrong = wrong.into_inner();
    if wrong > 0 {
        eprintln!("{wrong} of {len} elements are wrong");
    }

    let mut config = arena.config(common, paging);
    config.threads = Some(threads);
    config.iterations = Some(iterations);
    let kernels = KERNELS
        .iter()
        .zip(seconds)
        .map(|((name, bytes, _), s)| kernel_figures(name, bytes * len, &s[1..]));
    Ok(Report {
        benchmark: "stream",
        verified: wrong == 0,
        config,
        figures: Figures {
            kernels: Some(kernels.collect()),
            ..Figures::default()
        },
        paging: Arena::figures(&begin, &end),
    })
}

fn kernel_figures(name: &'static str, bytes: u64, seconds: &[f64]) -> Kernel {
    let min_s = seconds.iter().copied().fold(f64::INFINITY, f64::min);
    Kernel {
        name,
        mb_per_s: bytes as f64 / min_s / 1e6,
        min_s,
        avg_s: seconds.iter().sum::<f64>() / seconds.len() as f64,
        max_s: seconds.iter().copied().fold(0.0, f64::max),
    }
}

/// Gives each thread its share of the arrays, always the same one, with the index of its first element.
fn for_each_part(arrays: [&mut [f64]; 3], threads: usize, work: impl Fn(u64, Part<'_>) + Sync) {
    let share = arrays[0].len().div_ceil(threads);
    let [a, b, c] = arrays.map(|array| array.chunks_mut(share));
    thread::scope(|scope| {
        for (thread, ((a, b), c)) in a.zip(b).zip(c).enumerate() {
            let work = &work;
            scope.spawn(move || work((thread * share) as u64, Part { a, b, c }));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expected_values_are_what_the_kernels_compute() {
        let (mut a, mut b, mut c) = ([1.1, 1.7, 2.0], [2.0; 3], [0.0; 3]);
        for _ in 0..5 {
            for (_, _, kernel) in KERNELS {
                for_each_part([&mut a, &mut b, &mut c], 2, |_, part| kernel(part));
            }
        }
        for (index, first) in [1.1, 1.7, 2.0].into_iter().enumerate() {
            assert_eq!([a[index], b[index], c[index]], expected(first, 5));
        }
    }
}
