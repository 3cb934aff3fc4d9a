//! The command line: every subcommand, and its help.
//!
//! The rule it keeps: a subcommand's options are beside its `run`; options of several subcommands
//! are in `farpage_bench_kit::options`.

use clap::{Parser, Subcommand};
use farpage_bench_apps::AppsOptions;
use farpage_bench_judge::{
    codecs::CodecsOptions, compare::CompareOptions, figures::FiguresOptions,
    targets::TargetsOptions, versus_numpy::VersusNumpyOptions, versus_swap::VersusSwapOptions,
    versus_umap::VersusUmapOptions,
};
use farpage_bench_kit::{options::Paging, server::ServeOptions};
use farpage_fabric_measure::{regmem::RegmemOptions, ring::RingOptions, verbs::VerbsOptions};
use farpage_store_measure::pages::PagesOptions;

use crate::{
    chaos::ChaosOptions,
    floor::FloorOptions,
    hostile::{AttackOptions, BurnOptions, HostileOptions},
    parameter_server::ParameterServerOptions,
    random::RandomOptions,
    sparse::SparseOptions,
    stream::StreamOptions,
    tiers::TiersOptions,
    traffic::TrafficOptions,
    train::TrainOptions,
};

/// Measures farpage: STREAM on remote arrays, random access, fault latency, and the floor of each.
///
/// Each benchmark starts a memory server of its own, a separate process on this machine, unless
/// --server names one. Every run verifies its data. Exit status: 0 verified, 1 failed, 2 wrong
/// usage.
#[derive(Debug, Parser)]
#[command(name = "farpage-bench", version)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Explanation of the tables' words, for `--help`.
const WORDS: &str = "\
Words of the tables:
  page faults           accesses to a page that was not in local memory
  pages brought in      for a fault, or ahead of one because accesses were in order
  pages sent away       to make room; unchanged ones need no WRITE, and ones that were wanted again while they left came back without a READ
  waited for room       faults that found the budget full: pages had to leave first, which costs time
  peak resident         the most local memory that pages took; never more than the budget
  plain memory          the same loop on ordinary arrays that fit into memory: what paging cannot beat
  the raw fabric        READs and WRITEs of whole pages with nothing else to do: what paging can reach at most
  floor, best possible  in other benchmarks, a figure of the same work without a pager: nothing can be faster on this machine";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// McCalpin's STREAM on three remote arrays: copy, scale, add, triad
    #[command(after_help = WORDS)]
    Stream(StreamOptions),
    /// Random 8-byte reads and updates, uniform or Zipf
    #[command(after_help = WORDS)]
    Random(RandomOptions),
    /// Steps of a field that is written and read back whole: throughput and bytes on the network,
    /// by what the field holds and by codec
    #[command(after_help = WORDS)]
    Traffic(TrafficOptions),
    /// One page fault at a time: with room in the budget, and while dirty pages have to leave
    #[command(after_help = WORDS)]
    Latency(Paging),
    /// CPU time of the evictors for a page that did not change
    #[command(after_help = WORDS)]
    Eviction(Paging),
    /// A large region of which few pages are used: their cost, and the memory that the region takes
    /// beside them
    #[command(after_help = WORDS)]
    Sparse(SparseOptions),
    /// A server that lends more than its memory, over tcp: latency by where the bytes are, and the
    /// slowdown over memory
    Tiers(TiersOptions),
    /// Speed of this machine without paging: its own faults, a bare userfaultfd, memcpy, the raw
    /// fabric
    #[command(after_help = WORDS)]
    Floor(FloorOptions),
    /// Cost of registered memory for a transfer: from a pool, by registering each time, from a
    /// cache by address
    ///
    /// Registers with the fabric's adapter. Without an adapter, memory is locked and unlocked,
    /// which is the pinning part of a registration alone, and the report says so.
    Regmem(RegmemOptions),
    /// Messages through a ring in the receiver's memory: against a buffer for one message, woken by
    /// events or polling
    ///
    /// Sender and receiver are threads of this program, and the fabric between them is the real
    /// one.
    Ring(RingOptions),
    /// A million hostile requests from another loopback address, beside a victim that works and
    /// checks each word
    ///
    /// Garbage, half frames, wrong secrets, floods of connections, requests for memory of others.
    /// Server, attacker and victim are processes of this machine; nothing leaves it. The victim is
    /// measured twice: beside the attacker, and beside a program that burns as much CPU. Exit
    /// status 1: a client saw or changed bytes of another, or the server died. The report says if
    /// the victim's faults met their target. Takes some minutes.
    Hostile(HostileOptions),
    /// Servers that die, stall, are cut off, fall silent, are drained and forget bits at random
    /// moments, beside a program that checks each word
    ///
    /// Three servers or more, copies or parity of each page, a quarter of the array in local
    /// memory. One thread goes through its words in order, one accesses them at random. Each event
    /// begins once all copies are there again. The report has the fault times of the second after
    /// each event. Exit status 1: a word was wrong, or copies were not made again. A page that is
    /// lost ends the program by SIGBUS.
    Chaos(ChaosOptions),
    /// Codecs by themselves: ratio and CPU time, page by page, of farpage's codecs, DEFLATE and
    /// plain LZ4
    Pages(PagesOptions),
    /// Measures the figures of the poster that farpage realises: CSV, SVG and PNG
    ///
    /// Workers, LZ4 on and off over links of several rates, network traffic with and without loss,
    /// fields that grow under LZ4, and DEFLATE against the other codecs. Ctrl-C keeps what has been
    /// measured; the same command goes on from there.
    Figures(FiguresOptions),
    /// Every codec with every field over links of 1, 10 and 40 Gbit/s and without limit, and the
    /// checks that compression has to pass
    ///
    /// Each check is measured five times, or more until noise no longer decides it: an hour or more
    /// on two cores. Exit status 1: a check is missed; the last line names checks that are not
    /// decided. Ctrl-C keeps what has been measured; the same command goes on from there.
    Codecs(CodecsOptions),
    /// Gain of an RDMA adapter by several READs in flight, by one doorbell for several operations,
    /// and by one completion queue for several connections
    Verbs(VerbsOptions),
    /// Trains a network on many workers: all of them in step, by divide and shuffle (DS-Sync), in
    /// fixed groups, and alone
    ///
    /// Loss, accuracy, distance between the workers, bytes and serial steps of each mode, from the
    /// same parameters, batches and rates. Workers are threads of this process, with a real fabric
    /// between them.
    Train(TrainOptions),
    /// Push and pull through a parameter server, beside a program that does the same over TCP and
    /// copies: 1 KiB to 16 MiB, 1 to 3 workers
    ///
    /// Workers and both servers are threads of this program, and the servers take turns. Target:
    /// push and pull are faster than copying from 4 KiB on, over shm and tcp. The report says if
    /// the target is met. Exit status 1: parameters differ, or something cannot be measured.
    ParameterServer(ParameterServerOptions),
    #[command(after_help = WORDS)]
    Apps(AppsOptions),
    /// Measures farpage beside what bounds it, and says which of its targets are met
    ///
    /// Each target is a ratio of two figures that are measured one right after the other. A
    /// repetition measures all targets; the median of the repetitions is printed. Takes some
    /// minutes per repetition.
    Targets(TargetsOptions),
    /// Compares earlier results figure by figure: B / A
    ///
    /// A and B are results that `--format json` printed or `targets --record` wrote: a file, or a
    /// directory of such files. A file may hold several results, one after the other: those of the
    /// same command and parameters count as repetitions of each other.
    ///
    /// Noise: where both sides have three repetitions or more, a figure has changed when their
    /// ranges do not overlap; with fewer, when the medians differ by more than 10 %.
    Compare(CompareOptions),
    /// Compares with the kernel's own swap to compressed memory (zram, lz4) in a memory cgroup;
    /// needs root
    ///
    /// Runs `stream` and `random` with ordinary arrays in a cgroup whose memory.max is the budget,
    /// swapping to a zram device, and the same with remote arrays. Sets cgroup and device up, and
    /// removes both however the run ends; the next run removes the leftovers of a killed one.
    VersusSwap(VersusSwapOptions),
    /// Compares numpy on a remote array with numpy.memmap and with swap to compressed memory
    /// (zram), both in memory cgroups; needs root
    ///
    /// Fills, sums, scales, averages, gathers and sorts an array of which a quarter fits. Exit
    /// status 1: results differ.
    VersusNumpy(VersusNumpyOptions),
    /// Compares with LLNL's Umap, through Umap's own interface
    ///
    /// Builds one C++ driver, which needs a C++ compiler, against an installed Umap and against
    /// farpage's libumap, and runs both in turns: single faults, random reads and updates, nine
    /// accesses of ten in a tenth of the pages, everything in order, STREAM, and unmapping. Every
    /// word is verified.
    ///
    /// A whole run takes an hour or so; --page-sizes, --stores, --parts and --repeat take a part.
    VersusUmap(VersusUmapOptions),
    /// Says what this machine lacks for farpage, and how to mend it
    Doctor,
    /// The memory server that the benchmarks start
    #[command(hide = true)]
    Serve(ServeOptions),
    /// The attacker that `hostile` starts
    #[command(hide = true)]
    HostileAttack(AttackOptions),
    /// The burner that `hostile` compares the attacker with
    #[command(hide = true)]
    HostileBurn(BurnOptions),
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }
}
