//! The targets, one entry each: name, bound, and the two commands whose figures are divided.
//!
//! The rule it keeps: every figure is one that a command prints, so that a target that is missed
//! can be looked into by typing the command. A command that several targets need runs once in a
//! repetition.

use anyhow::Result;

use super::{Measure, Measured, Row};
use crate::bound::Bound;
use farpage_bench_kit::sitting::Sitting;

/// Megabytes per second of a link of 10 Gb/s, in one direction.
const LINK_MB_PER_S: f64 = 10_000.0 / 8.0;
/// Page sizes of which the best counts where a target leaves the page size open.
const LARGE_PAGES: [&str; 3] = ["64KiB", "1MiB", "2MiB"];
/// Path of triad among `stream`'s kernels.
const TRIAD: &str = "/kernels/3/mb_per_s";
const FAULT: &str = "/fault_us/p50";
const PER_READ: &str = "/us_per_read";
/// Time of a fault's work that no pager can leave out.
const WORK_OF_FAULT: &str = "/uffd_read_round_trip_us/p50";
/// Command for the kernel's part of a fault, with threads wherever the kernel puts them.
const BARE: &str = "floor --faults --page-size 4KiB";
/// Command for the kernel's part of a fault, with both threads on one CPU.
const BARE_ONE_CPU: &str = "floor --faults --one-cpu --page-size 4KiB";

/// Returns all targets, in the order of measuring: targets that share a command stand together.
/// With `smoke`, the benchmarks choose sizes of their own.
pub(super) fn all(smoke: bool) -> Vec<Row> {
    // Sizes that are large enough to be steady, small enough for a sitting of minutes.
    let size = |bytes: &str| match smoke {
        true => String::new(),
        false => format!(" --size {bytes}"),
    };
    let small = size("256MiB");
    let mut rows = Vec::new();

    // 1. A user who chooses no fault mode and no CPUs: a fault, and random access by one thread and
    //    by all.
    let latency = format!("latency --fabric shm --page-size 4KiB{small}");
    let p99_while_pages_leave = |latency: &str| {
        let evicting = [latency, "/evicting_fault_us/p99"];
        over(evicting, [latency, "/fault_us/p99"])
    };
    let what = "fault, 4 KiB, shm, p50 / bare userfaultfd";
    let measure = over_bare(BARE, [&latency, FAULT], WORK_OF_FAULT);
    rows.push(us(what, 1.5, measure));
    let what = "fault, p99 while changed pages leave / p99 with room";
    let measure = p99_while_pages_leave(&latency);
    rows.push(us(what, 1.5, measure));
    for (fabric, threads, by, most) in [
        ("shm", " --threads 1", "one thread", 2.0),
        ("shm", "", "all threads", 2.0),
        ("tcp", " --threads 1", "one thread", 1.3),
        ("tcp", "", "all threads", 1.3),
    ] {
        let default = format!("random --fabric {fabric} --page-size 4KiB{threads}{small}");
        let in_thread = format!("{default} --fault-mode in-thread");
        let what = &format!("random 4 KiB read, {fabric}, {by}, default / in-thread");
        let measure = over([&default, PER_READ], [&in_thread, PER_READ]);
        rows.push(us(what, most, measure));
    }

    // 2. Faults beside the kernel's same hand-over without a pager. All of it is on one CPU: on
    //    two, both sides are mostly the time to wake an idle one.
    let latency = format!("latency --fabric shm --page-size 4KiB --one-cpu{small}");
    let in_thread = format!("{latency} --fault-mode in-thread");
    let small_reads = format!("random --fabric shm --page-size 4KiB --threads 1{small}");
    let reads = format!("{small_reads} --one-cpu");
    let what = "fault, 4 KiB, shm, one CPU, p50 / bare userfaultfd";
    let measure = over_bare(BARE_ONE_CPU, [&latency, FAULT], WORK_OF_FAULT);
    rows.push(us(what, 1.4, measure));
    let what = "fault, one CPU, p99 while changed pages leave / p99 with room";
    let measure = p99_while_pages_leave(&latency);
    rows.push(us(what, 1.5, measure));
    let work_in_thread = "/uffd_in_thread_read_round_trip_us/p50";
    let what = "in-thread fault, one CPU, p50 / bare userfaultfd";
    let measure = over_bare(BARE_ONE_CPU, [&in_thread, FAULT], work_in_thread);
    rows.push(us(what, 0.7, measure));
    let misses = [reads.as_str(), "/us_per_read_miss"];
    let what = "random 4 KiB read that misses, shm, one CPU / bare userfaultfd";
    let measure = over_bare(BARE_ONE_CPU, misses, "/uffd_replace_us");
    rows.push(us(what, 1.6, measure));

    // 3. STREAM triad over a shaped link. Each of triad's three pages has to come in over the same
    //    direction, so that STREAM's rate exceeds the link's only by the pages found in memory.
    let stream = |fabric: &str, page_size: &str| {
        // Small pages take longer for the same bytes.
        let size = size(match page_size {
            "4KiB" => "192MiB",
            _ => "384MiB",
        });
        format!("stream --fabric {fabric} --page-size {page_size} --iterations 3{size}")
    };
    // Larger pages make no tiny runs.
    let large_pages = if smoke {
        &LARGE_PAGES[..1]
    } else {
        &LARGE_PAGES
    };
    for (page_size, least) in [("4KiB", 0.85), ("64KiB", 0.95), ("1MiB", 0.95)] {
        if page_size == "4KiB" || large_pages.contains(&page_size) {
            let shaped = format!("{} --link-gbps 10", stream("tcp", page_size));
            let what = &format!("triad, {page_size}, tcp at 10 Gb/s / the link");
            let measure = over_constant([&shaped, TRIAD], LINK_MB_PER_S);
            rows.push(mb_per_s(what, least, measure));
        }
    }

    // 4. STREAM triad beside the fabric alone, with the same threads, pages and local memory.
    for (fabric, best, at_64_kib, at_4_kib) in [("tcp", 0.8, 0.65, 0.5), ("shm", 0.55, 0.4, 0.3)] {
        for (what, least, page_sizes) in [
            ("best page size", best, large_pages),
            ("64KiB", at_64_kib, &["64KiB"]),
            ("4KiB", at_4_kib, &["4KiB"]),
        ] {
            let commands = page_sizes.iter().map(|page_size| {
                let floor = format!("floor --fabric {fabric} --page-size {page_size}");
                [stream(fabric, page_size), floor]
            });
            let what = &format!("triad, {what}, {fabric} / raw READ and WRITE");
            let measure = best_over_raw(commands.collect());
            rows.push(mb_per_s(what, least, measure));
        }
    }

    // 5. Read-ahead on random reads, where it finds nothing, and the rest.
    let on = format!("{small_reads} --no-advice");
    let off = format!("{on} --read-ahead 0");
    let what = "random 4 KiB read, read-ahead on / off";
    let measure = over([&on, PER_READ], [&off, PER_READ]);
    rows.push(us(what, 1.03, measure));
    let eviction = format!("eviction --fabric shm --page-size 4KiB{small}");
    let what = "CPU time to evict a clean 4 KiB page / 1 us";
    let measure = over_constant([&eviction, "/evictor_cpu_us_per_page"], 1.0);
    rows.push(us(what, 1.0, measure));
    // Loops of milliseconds need many to find their best.
    let stream = format!("stream --iterations 20{}", size("384MiB"));
    let [resident, plain] = ["--budget 150%", "--plain"].map(|more| format!("{stream} {more}"));
    let what = "triad, all resident / plain memory";
    let measure = over([&resident, TRIAD], [&plain, TRIAD]);
    rows.push(mb_per_s(what, 0.98, measure));

    // 6. Regions of which the same number of pages is used: all of the small one's. Both run on one
    //    CPU, since pages of the small one leave with their neighbours, which would spare another
    //    CPU interruptions, whatever the region's size.
    let (small, large, small_bytes, budget, touched) = match smoke {
        true => ("64MiB", "256MiB", 64 << 20, "4MiB", 1024),
        false => ("1GiB", "64GiB", 1u64 << 30, "64MiB", 16_384),
    };
    let [all_of_small, few_of_large] = [small, large].map(|size| {
        format!(
            "sparse --one-cpu --page-size 64KiB --size {size} --budget {budget} --touches {touched}"
        )
    });
    let per_page = "/us_per_sparse_page";
    let what = &format!("a page of a sparse region, one CPU, {large} / {small}");
    let measure = over([&few_of_large, per_page], [&all_of_small, per_page]);
    rows.push(us(what, 1.1, measure));
    rows.push(Row {
        unit: "bytes",
        ..us(
            "page metadata, 64 KiB, every page used / the region",
            0.001,
            over_constant([&all_of_small, "/metadata_bytes"], small_bytes as f64),
        )
    });
    rows
}

/// Makes a target of times.
fn us(what: &str, most: f64, measure: Measure) -> Row {
    Row {
        what: what.to_owned(),
        target: Bound::AtMost(most),
        unit: "us",
        measure,
    }
}

/// Makes a target of rates.
fn mb_per_s(what: &str, least: f64, measure: Measure) -> Row {
    Row {
        what: what.to_owned(),
        target: Bound::AtLeast(least),
        unit: "MB/s",
        measure,
    }
}

/// Compares figures, each a command and a path in its result.
fn over(figure: [&str; 2], against: [&str; 2]) -> Measure {
    let [figure, against] = [figure, against].map(|it| it.map(str::to_owned));
    Box::new(move |sitting| {
        let figure = sitting.figure(&figure[0], &figure[1])?;
        Ok([figure, sitting.figure(&against[0], &against[1])?].into())
    })
}

fn over_constant(figure: [&str; 2], against: f64) -> Measure {
    let [command, path] = figure.map(str::to_owned);
    Box::new(move |sitting| Ok([sitting.figure(&command, &path)?, against].into()))
}

/// Compares a figure with the bare round trip right before and right after, which is different a
/// minute later. `floor` is the path of the time of the work that no pager can leave out.
fn over_bare(bare_command: &'static str, figure: [&str; 2], floor: &'static str) -> Measure {
    let bare = move |sitting: &mut Sitting| -> Result<_> {
        sitting.forget(bare_command);
        let against = sitting.figure(bare_command, "/uffd_round_trip_us/p50")?;
        // Older kernels cannot move.
        let floor = sitting.figure(bare_command, floor).ok();
        Ok((against, floor))
    };
    let [command, path] = figure.map(str::to_owned);
    Box::new(move |sitting| {
        let before = bare(sitting)?;
        let figure = sitting.figure(&command, &path)?;
        let after = bare(sitting)?;
        Ok(Measured {
            figure,
            against: (before.0 + after.0) / 2.0,
            floor: before.1.zip(after.1).map(|(a, b)| (a + b) / 2.0),
        })
    })
}

/// Compares the best triad of `commands`, each with the command of its floor, with the raw fabric.
/// The floor is triad with all work that each page needs, by the same threads without a pager.
fn best_over_raw(commands: Vec<[String; 2]>) -> Measure {
    Box::new(move |sitting| {
        let mut best = Measured::from([0.0, 1.0]);
        for [stream, floor] in &commands {
            let figure = sitting.figure(stream, TRIAD)?;
            let read = sitting.figure(floor, "/raw_cold_read_mb_per_s")?;
            let write = sitting.figure(floor, "/raw_cold_write_mb_per_s")?;
            let work = sitting.figure(floor, "/moved_work_mb_per_s")?;
            if figure > best.figure {
                best = Measured {
                    figure,
                    against: raw_triad(read, write),
                    floor: Some(work),
                };
            }
        }
        Ok(best)
    })
}

/// Returns STREAM's rate if only the fabric took time: for three pages that triad counts, three
/// come in (the overwritten one, too) and one goes out. Pages that triad finds in memory are
/// counted as if they came in.
fn raw_triad(read: f64, write: f64) -> f64 {
    3.0 / (3.0 / read + 1.0 / write)
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
