//! STREAM by McCalpin's rules (<https://www.cs.virginia.edu/stream/ref.html>) on three arrays,
//! remote or plain.
//!
//! The rule it keeps: bytes are those that the kernels read and write, not those that paging moves;
//! the best iteration after the first counts; and every element is compared bit by bit with what
//! the kernels must have made of it.

use clap::Args;
use std::{
    fmt,
    ops::{Add, Mul},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    thread,
    time::Instant,
};

use anyhow::{Result, bail};
use bytemuck::bytes_of;
use farpage::Advice;
use serde_json::json;

use farpage_bench_kit::{
    arena::Arena,
    data::{Dtype, Element, Source},
    options::{Paging, Threads},
    progress::Progress,
    report::{Figures, Report, kernel_figures},
    yardsticks::{Plain, plain_bytes},
};

const SCALAR: f32 = 3.0;

/// Number of times that the triad runs over ordinary memory, for comparison: a tenth of a second.
const PLAIN_TIMES: usize = 4;

/// Numbers that STREAM computes with.
trait Number: Element + fmt::Debug + Add<Output = Self> + Mul<Output = Self> + From<f32> {}

impl Number for f32 {}
impl Number for f64 {}

/// A slice of each array, the same elements of each.
type Part<'a, T> = [&'a mut [T]; 3];

/// A kernel: its name, the number of arrays that it reads or writes, and its loop.
type KernelLoop<T> = (&'static str, usize, fn(Part<'_, T>));

fn kernels<T: Number>() -> [KernelLoop<T>; 4] {
    [
        ("copy", 2, |[a, _, c]| c.copy_from_slice(a)),
        ("scale", 2, |[_, b, c]| {
            for (b, c) in b.iter_mut().zip(&*c) {
                *b = T::from(SCALAR) * *c;
            }
        }),
        ("add", 3, |[a, b, c]| {
            for ((c, a), b) in c.iter_mut().zip(&*a).zip(&*b) {
                *c = *a + *b;
            }
        }),
        ("triad", 3, |[a, b, c]| {
            for ((a, b), c) in a.iter_mut().zip(&*b).zip(&*c) {
                *a = *b + T::from(SCALAR) * *c;
            }
        }),
    ]
}

/// Returns the elements of a, b, c that the kernels make of element `a` in `iterations` rounds.
fn expected<T: Number>(mut a: T, iterations: u16) -> [T; 3] {
    let (mut b, mut c) = (T::default(), T::default());
    for _ in 0..iterations {
        c = a;
        b = T::from(SCALAR) * c;
        c = a + b;
        a = b + T::from(SCALAR) * c;
    }
    [a, b, c]
}

#[derive(Args, Debug)]
pub(crate) struct StreamOptions {
    #[command(flatten)]
    pub(crate) paging: Paging,
    #[command(flatten)]
    pub(crate) threads: Threads,
    /// Puts the arrays into ordinary memory that is never paged, to compare paging with
    #[arg(long, conflicts_with = "server")]
    pub(crate) plain: bool,
    /// Runs of each kernel; the first does not count
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(2..=100))]
    pub(crate) iterations: u16,
}

pub(crate) fn run(options: &StreamOptions) -> Result<Report> {
    let source = options.paging.source()?;
    match source.dtype {
        Dtype::F32 => measure::<f32>(options, &source),
        Dtype::F64 => measure::<f64>(options, &source),
        other => bail!(
            "STREAM computes with f32 or f64, and --data {} is of {other}: `farpage-bench traffic` moves data of any type",
            options.paging.data.name()
        ),
    }
}

fn measure<T: Number>(options: &StreamOptions, source: &Source) -> Result<Report> {
    let paging = &options.paging;
    let arena = Arena::of_kind(options.plain, paging)?;
    let len = paging.size_bytes() / 3 / size_of::<T>() as u64;
    let mut a = arena.array::<T>(len, Advice::Sequential)?;
    let mut b = arena.array::<T>(len, Advice::Sequential)?;
    let mut c = arena.array::<T>(len, Advice::Sequential)?;
    let threads = options.threads.count();
    let iterations = options.iterations;
    let kernels = kernels::<T>();
    let progress = Progress::new(2 + u64::from(iterations) * kernels.len() as u64);

    // 1. First touch, by the threads that compute later.
    progress.phase("filling");
    for_each_part([&mut a, &mut b, &mut c], threads, |first, [a, b, c]| {
        for (index, a) in (first..).zip(a) {
            *a = T::of(source.value(index));
        }
        b.fill(T::from(2.0));
        c.fill(T::default());
    });

    // 2. The kernels, timed.
    let begin = arena.mark();
    let mut seconds = kernels.map(|_| Vec::new());
    for _ in 0..iterations {
        for ((name, _, kernel), seconds) in kernels.iter().zip(&mut seconds) {
            progress.phase(*name);
            let start = Instant::now();
            for_each_part([&mut a, &mut b, &mut c], threads, |_, part| kernel(part));
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    let paged = arena.since(&begin);
    let all_seconds: f64 = seconds.iter().flatten().sum();

    // 3. Every element.
    progress.phase("verifying");
    let wrong = AtomicU64::new(0);
    for_each_part([&mut a, &mut b, &mut c], threads, |first, [a, b, c]| {
        let found = a.iter().zip(&*b).zip(&*c);
        for (index, ((a, b), c)) in (first..).zip(found) {
            let found = [*a, *b, *c];
            let right = expected(T::of(source.value(index)), iterations);
            // NaN equals nothing, so bytes are compared.
            if bytes_of(&found) != bytes_of(&right) && wrong.fetch_add(1, Relaxed) == 0 {
                eprintln!("element {index} of a, b, c is {found:?} and has to be {right:?}");
            }
        }
    });
    drop(progress);
    let wrong = wrong.into_inner();
    if wrong > 0 {
        eprintln!("{wrong} of {len} elements are wrong");
    }

    // 4. Yardsticks. The arrays go first, which makes room.
    drop((a, b, c));
    let triad = kernel_figures("triad", 3 * len * size_of::<T>() as u64, &seconds[3][1..]);
    let yardsticks = arena.compare(&paged, all_seconds, triad.mb_per_s, || {
        Plain::PlainTriadMbPerS(plain_triad::<T>(plain_bytes(&paging.common), threads))
    });

    let own = json!({ "threads": threads, "iterations": iterations });
    let array_bytes = len * size_of::<T>() as u64;
    let kernels = kernels.iter().zip(seconds);
    let kernels = kernels
        .map(|((name, arrays, _), s)| kernel_figures(name, *arrays as u64 * array_bytes, &s[1..]));
    Ok(Report {
        benchmark: "stream",
        verified: wrong == 0,
        config: arena.config().with(own),
        figures: Figures {
            kernels: Some(kernels.collect()),
            yardsticks,
            ..Figures::default()
        },
        paging: paged,
    })
}

/// Returns the MB/s of the triad by `threads` threads, on arrays of ordinary memory that are larger
/// than caches: the best of a few runs.
fn plain_triad<T: Number>(bytes: usize, threads: usize) -> f64 {
    let array = || vec![T::from(1.0); bytes / size_of::<T>()];
    let (mut a, mut b, mut c) = (array(), array(), array());
    let [.., (name, arrays, triad)] = kernels::<T>();
    let mut time = |_| {
        let start = Instant::now();
        for_each_part([&mut a, &mut b, &mut c], threads, |_, part| triad(part));
        start.elapsed().as_secs_f64()
    };
    let seconds: Vec<f64> = (0..PLAIN_TIMES).map(&mut time).collect();
    kernel_figures(name, (arrays * bytes) as u64, &seconds[1..]).mb_per_s
}

/// Gives each thread its share of the arrays, always the same one, with the index of its first
/// element.
fn for_each_part<T: Number>(
    arrays: [&mut [T]; 3],
    threads: usize,
    work: impl Fn(u64, Part<'_, T>) + Sync,
) {
    let share = arrays[0].len().div_ceil(threads);
    let [a, b, c] = arrays.map(|array| array.chunks_mut(share));
    thread::scope(|scope| {
        for (thread, ((a, b), c)) in a.zip(b).zip(c).enumerate() {
            let work = &work;
            scope.spawn(move || work((thread * share) as u64, [a, b, c]));
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
            for (_, _, kernel) in kernels::<f64>() {
                for_each_part([&mut a, &mut b, &mut c], 2, |_, part| kernel(part));
            }
        }
        for (index, first) in [1.1, 1.7, 2.0].into_iter().enumerate() {
            assert_eq!([a[index], b[index], c[index]], expected(first, 5));
        }
    }
}
