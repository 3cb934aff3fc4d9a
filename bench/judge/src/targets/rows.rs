//! The targets, one entry each: name, bound, and the two commands whose figures are divided.
//!
//! The rule it keeps: every figure is one that a command prints, so that a target that is missed
//! can be looked into by typing the command. A command that several targets need runs once in a
//! repetition.

use anyhow::Result;

use super::{Measured, Row, Target};
use farpage_bench_kit::sitting::Sitting;

/// Megabytes per second of a link of 10 Gb/s, in one direction.
const LINK_MB_PER_S: f64 = 10_000.0 / 8.0;
/// Page sizes of which the best counts where a target leaves the page size open.
const LARGE_PAGES: [&str; 3] = ["64KiB", "1MiB", "2MiB"];
/// Path of triad among `stream`'s kernels.
const TRIAD: &str = "/kernels/3/mb_per_s";
/// Command for the kernel's part of a fault, with threads wherever the kernel puts them.
const BARE: &str = "floor --faults --page-size 4KiB";
/// Command for the kernel's part of a fault, with both threads on one CPU.
const BARE_ONE_CPU: &str = "floor --faults --one-cpu --page-size 4KiB";

/// Returns all targets, in the order of measuring: targets that share a command stand together.
pub(super) fn all(smoke: bool) -> Vec<Row> {
    let sizes = Sizes { smoke };
    let mut rows = defaults(sizes);
    rows.extend(faults(sizes));
    rows.extend(link(sizes));
    for (fabric, best, at_64_kib, at_4_kib) in [("tcp", 0.8, 0.65, 0.5), ("shm", 0.55, 0.4, 0.3)] {
        rows.extend(triad(sizes, fabric, best, at_64_kib, at_4_kib));
    }
    rows.extend(read_ahead(sizes));
    rows.extend(eviction(sizes));
    rows.extend(resident(sizes));
    rows.extend(growth(sizes));
    rows
}

/// Sizes that are large enough to be steady, small enough for a sitting of minutes.
#[derive(Clone, Copy)]
struct Sizes {
    smoke: bool,
}

impl Sizes {
    /// Returns an option `--size`; with `--smoke` none, as the benchmarks choose their own.
    fn size(self, size: &str) -> String {
        match self.smoke {
            true => String::new(),
            false => format!("--size {size}"),
        }
    }

    /// Returns the large page sizes; with `--smoke` only one, as larger pages make no tiny runs.
    fn large_pages(self) -> &'static [&'static str] {
        match self.smoke {
            true => &LARGE_PAGES[..1],
            false => &LARGE_PAGES,
        }
    }

    fn stream(self, fabric: &str, page_size: &str) -> String {
        // Small pages take longer for the same bytes.
        let size = self.size(if page_size == "4KiB" {
            "192MiB"
        } else {
            "384MiB"
        });
        format!("stream --fabric {fabric} --page-size {page_size} --iterations 3 {size}")
    }

    fn small_reads(self) -> String {
        let size = self.size("256MiB");
        format!("random --fabric shm --page-size 4KiB --threads 1 {size}")
    }
}

fn row(
    what: impl Into<String>,
    target: Target,
    unit: &'static str,
    measure: impl Fn(&mut Sitting) -> Result<[f64; 2]> + 'static,
) -> Row {
    row_with_floor(what, target, unit, move |sitting| {
        measure(sitting).map(Measured::from)
    })
}

fn row_with_floor(
    what: impl Into<String>,
    target: Target,
    unit: &'static str,
    measure: impl Fn(&mut Sitting) -> Result<Measured> + 'static,
) -> Row {
    Row {
        what: what.into(),
        target,
        unit,
        measure: Box::new(measure),
    }
}

/// Returns the targets of a user who chooses no fault mode and no CPUs: a fault, and random access
/// by one thread and by all.
fn defaults(sizes: Sizes) -> Vec<Row> {
    let latency = format!(
        "latency --fabric shm --page-size 4KiB {}",
        sizes.size("256MiB")
    );
    let evicting = latency.clone();
    let mut rows = vec![
        row_with_floor(
            "fault, 4 KiB, shm, p50 / bare userfaultfd",
            Target::AtMost(1.5),
            "us",
            move |sitting| {
                against_bare(
                    sitting,
                    BARE,
                    &latency,
                    "/fault_us/p50",
                    "/uffd_read_round_trip_us/p50",
                )
            },
        ),
        row(
            "fault, p99 while changed pages leave / p99 with room",
            Target::AtMost(1.5),
            "us",
            move |sitting| p99_while_pages_leave(sitting, &evicting),
        ),
    ];
    for (fabric, threads, by, most) in [
        ("shm", "--threads 1", "one thread", 2.0),
        ("shm", "", "all threads", 2.0),
        ("tcp", "--threads 1", "one thread", 1.3),
        ("tcp", "", "all threads", 1.3),
    ] {
        let size = sizes.size("256MiB");
        let default = format!("random --fabric {fabric} --page-size 4KiB {threads} {size}");
        let in_thread = format!("{default} --fault-mode in-thread");
        rows.push(row(
            format!("random 4 KiB read, {fabric}, {by}, default / in-thread"),
            Target::AtMost(most),
            "us",
            move |sitting| {
                Ok([
                    sitting.figure(&default, "/us_per_read")?,
                    sitting.figure(&in_thread, "/us_per_read")?,
                ])
            },
        ));
    }
    rows
}

fn p99_while_pages_leave(sitting: &mut Sitting, latency: &str) -> Result<[f64; 2]> {
    Ok([
        sitting.figure(latency, "/evicting_fault_us/p99")?,
        sitting.figure(latency, "/fault_us/p99")?,
    ])
}

/// Compares page faults with the kernel's same hand-over without a pager. All of it is on one CPU:
/// on two, both sides are mostly the time to wake an idle one.
fn faults(sizes: Sizes) -> Vec<Row> {
    let size = sizes.size("256MiB");
    let latency = format!("latency --fabric shm --page-size 4KiB --one-cpu {size}");
    let with_eviction = latency.clone();
    let in_thread = format!("{latency} --fault-mode in-thread");
    let reads = format!("{} --one-cpu", sizes.small_reads());
    let against_bare = |what, most, command: String, path, floor| {
        row_with_floor(what, Target::AtMost(most), "us", move |sitting| {
            against_bare(sitting, BARE_ONE_CPU, &command, path, floor)
        })
    };
    vec![
        against_bare(
            "fault, 4 KiB, shm, one CPU, p50 / bare userfaultfd",
            1.4,
            latency,
            "/fault_us/p50",
            "/uffd_read_round_trip_us/p50",
        ),
        row(
            "fault, one CPU, p99 while changed pages leave / p99 with room",
            Target::AtMost(1.5),
            "us",
            move |sitting| p99_while_pages_leave(sitting, &with_eviction),
        ),
        against_bare(
            "in-thread fault, one CPU, p50 / bare userfaultfd",
            0.7,
            in_thread,
            "/fault_us/p50",
            "/uffd_in_thread_read_round_trip_us/p50",
        ),
        against_bare(
            "random 4 KiB read that misses, shm, one CPU / bare userfaultfd",
            1.6,
            reads,
            "/us_per_read_miss",
            "/uffd_replace_us",
        ),
    ]
}

/// Compares a figure with the bare round trip right before and right after, which is different a
/// minute later. `floor` is the path of the time of the work that no pager can leave out.
fn against_bare(
    sitting: &mut Sitting,
    bare_command: &str,
    command: &str,
    path: &str,
    floor: &str,
) -> Result<Measured> {
    let bare = |sitting: &mut Sitting| -> Result<_> {
        sitting.forget(bare_command);
        let against = sitting.figure(bare_command, "/uffd_round_trip_us/p50")?;
        // Older kernels cannot move.
        let floor = sitting.figure(bare_command, floor).ok();
        Ok((against, floor))
    };
    let before = bare(sitting)?;
    let figure = sitting.figure(command, path)?;
    let after = bare(sitting)?;
    Ok(Measured {
        figure,
        against: (before.0 + after.0) / 2.0,
        floor: before.1.zip(after.1).map(|(a, b)| (a + b) / 2.0),
    })
}

/// Compares STREAM triad with a shaped link. Each of triad's three pages has to come in over the
/// same direction, so that STREAM's rate exceeds the link's only by the pages found in memory.
fn link(sizes: Sizes) -> Vec<Row> {
    let (small, large) = ([("4KiB", 0.85)], ["64KiB", "1MiB"]);
    let large = large
        .iter()
        .filter(|page_size| sizes.large_pages().contains(page_size));
    small
        .into_iter()
        .chain(large.map(|page_size| (*page_size, 0.95)))
        .map(|(page_size, least)| {
            let stream = format!("{} --link-gbps 10", sizes.stream("tcp", page_size));
            row(
                format!("triad, {page_size}, tcp at 10 Gb/s / the link"),
                Target::AtLeast(least),
                "MB/s",
                move |sitting| Ok([sitting.figure(&stream, TRIAD)?, LINK_MB_PER_S]),
            )
        })
        .collect()
}

/// Compares STREAM triad with the fabric alone, with the same threads, pages and local memory. The
/// floor is triad with all work that each page needs, by the same threads without a pager.
fn triad(sizes: Sizes, fabric: &'static str, best: f64, at_64_kib: f64, at_4_kib: f64) -> Vec<Row> {
    let against_raw = move |sitting: &mut Sitting, page_size: &str| -> Result<Measured> {
        let triad = sitting.figure(&sizes.stream(fabric, page_size), TRIAD)?;
        let floor = format!("floor --fabric {fabric} --page-size {page_size}");
        let read = sitting.figure(&floor, "/raw_cold_read_mb_per_s")?;
        let write = sitting.figure(&floor, "/raw_cold_write_mb_per_s")?;
        Ok(Measured {
            figure: triad,
            against: raw_triad(read, write),
            floor: Some(sitting.figure(&floor, "/moved_work_mb_per_s")?),
        })
    };
    vec![
        row_with_floor(
            format!("triad, best page size, {fabric} / raw READ and WRITE"),
            Target::AtLeast(best),
            "MB/s",
            move |sitting| {
                let mut best = Measured::from([0.0, 1.0]);
                for page_size in sizes.large_pages() {
                    let one = against_raw(sitting, page_size)?;
                    if one.figure > best.figure {
                        best = one;
                    }
                }
                Ok(best)
            },
        ),
        row_with_floor(
            format!("triad, 64KiB, {fabric} / raw READ and WRITE"),
            Target::AtLeast(at_64_kib),
            "MB/s",
            move |sitting| against_raw(sitting, "64KiB"),
        ),
        row_with_floor(
            format!("triad, 4KiB, {fabric} / raw READ and WRITE"),
            Target::AtLeast(at_4_kib),
            "MB/s",
            move |sitting| against_raw(sitting, "4KiB"),
        ),
    ]
}

/// Returns STREAM's rate if only the fabric took time: for three pages that triad counts, three
/// come in (the overwritten one, too) and one goes out. Pages that triad finds in memory are
/// counted as if they came in.
fn raw_triad(read: f64, write: f64) -> f64 {
    3.0 / (3.0 / read + 1.0 / write)
}

/// Compares read-ahead on random reads, where it finds nothing, with no read-ahead.
fn read_ahead(sizes: Sizes) -> Vec<Row> {
    let on = format!("{} --no-advice", sizes.small_reads());
    let off = format!("{on} --read-ahead 0");
    vec![row(
        "random 4 KiB read, read-ahead on / off",
        Target::AtMost(1.03),
        "us",
        move |sitting| {
            Ok([
                sitting.figure(&on, "/us_per_read")?,
                sitting.figure(&off, "/us_per_read")?,
            ])
        },
    )]
}

fn eviction(sizes: Sizes) -> Vec<Row> {
    let command = format!(
        "eviction --fabric shm --page-size 4KiB {}",
        sizes.size("256MiB")
    );
    vec![row(
        "CPU time to evict a clean 4 KiB page / 1 us",
        Target::AtMost(1.0),
        "us",
        move |sitting| Ok([sitting.figure(&command, "/evictor_cpu_us_per_page")?, 1.0]),
    )]
}

/// Compares triad over resident pages with triad over ordinary memory.
fn resident(sizes: Sizes) -> Vec<Row> {
    // Loops of milliseconds need many to find their best.
    let stream = format!("stream --iterations 20 {}", sizes.size("384MiB"));
    let (resident, plain) = (
        format!("{stream} --budget 150%"),
        format!("{stream} --plain"),
    );
    vec![row(
        "triad, all resident / plain memory",
        Target::AtLeast(0.98),
        "MB/s",
        move |sitting| {
            Ok([
                sitting.figure(&resident, TRIAD)?,
                sitting.figure(&plain, TRIAD)?,
            ])
        },
    )]
}

/// Compares regions of which the same number of pages is used: all of the small one's. Both run on
/// one CPU, since pages of the small one leave with their neighbours, which would spare another CPU
/// interruptions, whatever the region's size.
fn growth(sizes: Sizes) -> Vec<Row> {
    let (small, large, small_bytes, budget) = match sizes.smoke {
        true => ("64MiB", "256MiB", 64 << 20, "4MiB"),
        false => ("1GiB", "64GiB", 1u64 << 30, "64MiB"),
    };
    let sparse =
        move |size| format!("sparse --one-cpu --page-size 64KiB --size {size} --budget {budget}");
    let touched = if sizes.smoke { 1024 } else { 16_384 };
    let all_of_small = format!("{} --touches {touched}", sparse(small));
    let few_of_large = format!("{} --touches {touched}", sparse(large));
    let small_again = all_of_small.clone();
    vec![
        row(
            format!("a page of a sparse region, one CPU, {large} / {small}"),
            Target::AtMost(1.1),
            "us",
            move |sitting| {
                Ok([
                    sitting.figure(&few_of_large, "/us_per_sparse_page")?,
                    sitting.figure(&all_of_small, "/us_per_sparse_page")?,
                ])
            },
        ),
        row(
            "page metadata, 64 KiB, every page used / the region",
            Target::AtMost(0.001),
            "bytes",
            move |sitting| {
                Ok([
                    sitting.figure(&small_again, "/metadata_bytes")?,
                    small_bytes as f64,
                ])
            },
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn raw_triad_is_what_four_transfers_in_a_row_allow() {
        // 1 s for each of three pages in, 1 s for one out: three pages in four seconds.
        assert_eq!(raw_triad(1.0, 1.0), 0.75);
    }
}
