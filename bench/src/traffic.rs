//! Fields that change step by step, as a simulation's do: each step writes the whole field to a
//! remote array, then reads it back.
//!
//! The rule it keeps: the data stays of its kind. STREAM's arithmetic would turn integers and text
//! into noise; here the next step is the same field, moved by a plane. Elements read are compared
//! with elements written while the clock runs, which costs a tenth of what paging does.

use clap::Args;
use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use farpage::Advice;
use serde_json::json;

use farpage_bench_kit::{
    arena::Arena,
    crew::each_share,
    data::{Dtype, Element, Source},
    options::{Paging, Threads, error_bound},
    progress::Progress,
    report::{Figures, Report, kernel_figures},
    yardsticks::{Plain, plain_bytes},
};

/// Number of elements that a line moves per step: about a plane's, and no divisor of any page.
const LINE_STEP: usize = 16_411;

#[derive(Args, Debug)]
pub(crate) struct TrafficOptions {
    #[command(flatten)]
    pub(crate) paging: Paging,
    #[command(flatten)]
    pub(crate) threads: Threads,
    /// Times that the field is written and read, after a first time that does not count
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=100))]
    pub(crate) steps: u16,
}

pub(crate) fn run(options: &TrafficOptions) -> Result<Report> {
    let source = options.paging.source()?;
    match source.dtype {
        Dtype::F32 => measure::<f32>(options, &source),
        Dtype::F64 => measure::<f64>(options, &source),
        Dtype::I32 => measure::<i32>(options, &source),
        Dtype::I64 => measure::<i64>(options, &source),
        Dtype::U8 => measure::<u8>(options, &source),
    }
}

/// Findings of a comparison of elements read with elements written.
#[derive(Default)]
struct Found {
    wrong: u64,
    error_max: f64,
}

fn measure<T: Element>(options: &TrafficOptions, source: &Source) -> Result<Report> {
    let paging = &options.paging;
    let arena = Arena::start(paging)?;
    let field: Vec<T> = source.field();
    // The array repeats the field along the field's slowest dimension.
    let shape = source.shape.trimmed();
    let slice: usize = shape[1..].iter().product();
    let slices = (paging.size_bytes() / (slice * size_of::<T>()) as u64).max(1);
    let len = slices * slice as u64;
    let shape = [&[slices as usize], &shape[1..]].concat();
    let mut array = arena.array_of_shape::<T>(&shape, Advice::Sequential)?;
    let work = Work {
        field: &field,
        step_elements: if slice == 1 { LINE_STEP } else { slice },
        threads: options.threads.count(),
        found: Mutex::new(Found::default()),
    };
    let steps = usize::from(options.steps);
    let progress = Progress::new(1 + steps as u64);
    let mut step = |step: usize| {
        progress.phase(if step == 0 { "filling" } else { "stepping" });
        work.step(&mut array, step)
    };

    // 1. First touch, which brings nothing in.
    step(0);

    // 2. The steps that count.
    let begin = arena.mark();
    let seconds: Vec<[f64; 2]> = (1..=steps)
        .map(|at| step(at).map(|time| time.as_secs_f64()))
        .collect();
    let paged = arena.since(&begin);
    drop(progress);

    // 3. Yardsticks. The array goes first, which makes room.
    drop(array);
    let bytes = len * size_of::<T>() as u64;
    let of_both: Vec<f64> = seconds.iter().map(|s| s[0] + s[1]).collect();
    let kernels = {
        let times = |of: usize| seconds.iter().map(|s| s[of]).collect::<Vec<f64>>();
        vec![
            kernel_figures("write", bytes, &times(0)),
            kernel_figures("read", bytes, &times(1)),
            kernel_figures("both", 2 * bytes, &of_both),
        ]
    };
    let all_seconds = of_both.iter().sum();
    let yardsticks = arena.compare(&paged, all_seconds, kernels[2].mb_per_s, || {
        Plain::PlainBothMbPerS(work.plain_mb_per_s(plain_bytes(&paging.common), steps))
    });

    let threads = work.threads;
    let found = (work.found.into_inner()).context("nothing panics under this lock")?;
    let bound = error_bound(paging.codec);
    if found.error_max > bound {
        let wrong = found.wrong;
        eprintln!("{wrong} elements were read other than they were written");
    }
    let mut figures = Figures {
        kernels: Some(kernels),
        yardsticks,
        ..Figures::default()
    };
    figures.add("error_max", found.error_max);
    let own = json!({ "threads": threads, "iterations": options.steps });
    Ok(Report {
        benchmark: "traffic",
        verified: found.error_max <= bound && (bound > 0.0 || found.wrong == 0),
        config: arena.config().with(own),
        figures,
        paging: paged,
    })
}

/// Steps over an array, of which each thread has a part.
struct Work<'a, T> {
    /// Field that is written, again and again.
    field: &'a [T],
    /// Number of elements that the field moves from step to step.
    step_elements: usize,
    threads: usize,
    found: Mutex<Found>,
}

impl<T: Element> Work<'_, T> {
    /// Writes all of the array, then reads it. Returns the time of each.
    fn step(&self, array: &mut [T], step: usize) -> [Duration; 2] {
        let (field, found) = (self.field, &self.found);
        let place = |first: usize| (first + step * self.step_elements) % field.len();
        let start = Instant::now();
        each_share(array, self.threads, |first, part| {
            write(part, field, place(first));
        });
        let written = Instant::now();
        each_share(array, self.threads, |first, part| {
            let part = compare(part, field, place(first));
            let mut found = found.lock().expect("nothing panics under this lock");
            found.wrong += part.wrong;
            found.error_max = found.error_max.max(part.error_max);
        });
        [written - start, written.elapsed()]
    }

    /// Returns the MB/s of the same steps in ordinary memory, writing and reading together.
    fn plain_mb_per_s(&self, plain_bytes: usize, steps: usize) -> f64 {
        let mut plain = vec![self.field[0]; plain_bytes / size_of::<T>()];
        let seconds: Vec<f64> = (0..=steps)
            .map(|step| {
                let times = self.step(&mut plain, step);
                times.iter().map(Duration::as_secs_f64).sum()
            })
            .collect();
        let bytes = 2 * size_of_val(&plain[..]) as u64;
        kernel_figures("both", bytes, &seconds[1..]).mb_per_s
    }
}

/// Cuts a part of `len` elements, from `at` on in an endless `field`, into (part, field, count).
fn stretches(len: usize, field: usize, at: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let from = (at + done) % field;
        let count = (field - from).min(len - done);
        let stretch = (done, from, count);
        done += count;
        (count > 0).then_some(stretch)
    })
}

fn write<T: Element>(part: &mut [T], field: &[T], at: usize) {
    for (to, from, count) in stretches(part.len(), field.len(), at) {
        part[to..to + count].copy_from_slice(&field[from..from + count]);
    }
}

fn compare<T: Element>(part: &[T], field: &[T], at: usize) -> Found {
    let mut found = Found::default();
    for (to, from, count) in stretches(part.len(), field.len(), at) {
        let (part, field) = (&part[to..to + count], &field[from..from + count]);
        // Slices of plain values are compared at memory speed.
        if bytemuck::cast_slice::<T, u8>(part) == bytemuck::cast_slice::<T, u8>(field) {
            continue;
        }
        for (&is, &was) in part.iter().zip(field) {
            if bytemuck::bytes_of(&is) != bytemuck::bytes_of(&was) {
                found.wrong += 1;
                found.error_max = found.error_max.max(is.distance(was));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_holds_the_endless_field_from_its_place_on() {
        let field = [0u8, 1, 2, 3, 4];
        let mut part = [9; 13];
        write(&mut part, &field, 3);
        assert_eq!(part, [3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0]);
        assert_eq!(compare(&part, &field, 3).wrong, 0);
        part[12] = 4;
        let found = compare(&part, &field, 3);
        assert_eq!((found.wrong, found.error_max), (1, 4.0));
        assert_eq!(compare(&part[..12], &field, 4).wrong, 12);
    }
}
