//! A server under attack: its effects on a client beside the attacker, and a check that no client
//! sees bytes of another.
//!
//! The rule it keeps: the attacker is a process of its own with a loopback address of its own, and
//! so is the server. The victim is measured twice with the same work: beside the attacker, and
//! beside a program that burns as much CPU as the attacker did. All traffic stays on loopback and
//! is bounded.

mod attack;
mod burn;
mod neighbour;
mod victim;

use clap::Args;
use std::{
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use farpage_fabric::{Session, SessionOptions};
use farpage_wire::Endpoint;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use self::{
    attack::{ATTACKER, Attack, Kind},
    burn::Burnt,
    victim::Victim,
};
pub(crate) use self::{
    attack::{AttackOptions, attack},
    burn::{BurnOptions, burn},
};
use farpage_bench_kit::{
    options::{Fabric, Run},
    report::{self, Percentiles, filled_table},
    server::{MemoryServer, ensure_room, this_program},
    sitting::Sitting,
};

/// Upper bound of the victim's fault p99 beside the attacker, over that beside the burner.
const P99_RATIO_MAX: f64 = 1.5;

/// Upper bound of an arm's time: a slower attacker has sent fewer requests by then.
const ARM_MAX: Duration = Duration::from_secs(900);

/// Findings of the benchmark `hostile`.
#[derive(Debug, Serialize)]
struct Report {
    benchmark: &'static str,
    /// True if no client saw or changed bytes of another, and the server lives.
    verified: bool,
    config: Value,
    attack: Attack,
    /// Words of the victim that differed from those written.
    damaged_words: u64,
    /// True if the server's process ran to the end and then served a new client.
    server_alive: bool,
    attacked: Arm,
    beside_burner: Arm,
    fault_p50_ratio: f64,
    fault_p99_ratio: f64,
    fault_p99_ratio_max: f64,
    fault_p99_met: bool,
}

/// Figures of the victim beside one neighbour.
#[derive(Debug, Serialize)]
struct Arm {
    seconds: f64,
    neighbour_cpu_s: f64,
    server_cpu_s: f64,
    fault_us: Percentiles,
    stream_mb_per_s: f64,
    words_checked: u64,
}

#[derive(Args, Debug)]
pub(crate) struct HostileOptions {
    /// Hostile requests [default: 1000000, with --smoke 3000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    pub(crate) requests: Option<u64>,
    /// Seed of everything random
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
    #[command(flatten)]
    pub(crate) run: Run,
}

pub(crate) fn run(options: &HostileOptions) -> Result<()> {
    let report = measure(options)?;
    let format = options.run.printing.format;
    report::conclude(&report, report.verified, format, Report::human)
}

fn measure(options: &HostileOptions) -> Result<Report> {
    let default = if options.run.smoke { 3_000 } else { 1_000_000 };
    let requests = options.requests.unwrap_or(default);
    let sizes = victim::Sizes::of(options.run.smoke);
    ensure_room(sizes.array_bytes * 3 + sizes.budget_bytes, false)?;
    let mut server = MemoryServer::own(Fabric::Tcp, sizes.array_bytes * 6 + (64 << 20))?;
    let mut victim = Victim::start(server.endpoint(), sizes)?;

    // Ctrl-C ends a neighbour and not this process from here on.
    let sitting = Sitting::new(false)?;

    // 1. Beside the attacker, until it has sent its requests.
    let attacker = format!(
        "hostile-attack --endpoint {} --requests {requests} --seed {} --seconds-max {}",
        server.endpoint(),
        options.seed,
        ARM_MAX.as_secs()
    );
    let (attacked, attack) =
        arm::<Attack>(&sitting, &server, &mut victim, &attacker, |it| it.cpu_s)?;

    // 2. Beside the burner, as long, with as much CPU.
    let burner = format!(
        "hostile-burn --seconds {} --cpu-seconds {}",
        attacked.seconds, attacked.neighbour_cpu_s
    );
    let (beside_burner, _) = arm::<Burnt>(&sitting, &server, &mut victim, &burner, |it| it.cpu_s)?;

    let damaged_words = victim.finish()?;
    let server_alive = server.is_running() && serves(server.endpoint());
    let ratio = |of: fn(&Percentiles) -> f64| of(&attacked.fault_us) / of(&beside_burner.fault_us);
    let p99 = ratio(|it| it.p99);
    Ok(Report {
        benchmark: "hostile",
        verified: damaged_words == 0 && attack.foreign_bytes == 0 && server_alive,
        config: json!({
            "server": server.endpoint().to_string(),
            "attacker": ATTACKER.to_string(),
            "smoke": options.run.smoke,
            "requests": requests,
            "array_bytes": sizes.array_bytes,
            "budget_bytes": sizes.budget_bytes,
            "page_size_bytes": sizes.page_bytes,
            "seed": options.seed,
        }),
        attack,
        damaged_words,
        server_alive,
        fault_p50_ratio: ratio(|it| it.p50),
        fault_p99_ratio: p99,
        fault_p99_ratio_max: P99_RATIO_MAX,
        fault_p99_met: p99 <= P99_RATIO_MAX,
        attacked,
        beside_burner,
    })
}

/// Runs the victim for as long as its neighbour. Returns figures and the neighbour's report.
fn arm<R: DeserializeOwned>(
    sitting: &Sitting,
    server: &MemoryServer,
    victim: &mut Victim,
    neighbour: &str,
    cpu_s: fn(&R) -> f64,
) -> Result<(Arm, R)> {
    let server_cpu_s = server.cpu_s()?;
    let begun = Instant::now();
    let mut program = this_program()?;
    program.args(neighbour.split(' '));
    let stop = AtomicBool::new(false);
    let (seen, said) = thread::scope(|scope| {
        let heard = scope.spawn(|| {
            let said = sitting.output(program, neighbour);
            stop.store(true, Relaxed);
            said
        });
        let seen = victim.work(&stop);
        let said = heard.join();
        (seen, said.expect("waiting for a process does not panic"))
    });
    let seconds = begun.elapsed().as_secs_f64();
    let said = said?;
    let report: R = serde_json::from_str(&said)
        .with_context(|| format!("a neighbour of the victim reports `{}`", said.trim()))?;
    let arm = Arm {
        seconds,
        neighbour_cpu_s: cpu_s(&report),
        server_cpu_s: server.cpu_s()? - server_cpu_s,
        fault_us: Percentiles::of(&seen.faults_ns),
        stream_mb_per_s: seen.stream_bytes as f64 / 1e6 / seconds,
        words_checked: seen.words_checked,
    };
    let faults = arm.fault_us.samples;
    ensure!(faults > 0, "the victim had no time for a single fault");
    Ok((arm, report))
}

/// True if a new client gets memory from the server at `endpoint`.
fn serves(endpoint: &Endpoint) -> bool {
    let session = Session::connect(endpoint, &SessionOptions::default());
    session.is_ok_and(|session| session.grant(4096).is_ok())
}

impl Report {
    fn human(&self) -> String {
        let kinds = self.attack.kinds.iter();
        let kinds = kinds.map(|(name, kind)| (name.as_str(), *kind));
        let row = |(name, kind): (&str, Kind)| {
            let (sent, refused) = (kind.sent, kind.refused);
            let (granted, unanswered) = (kind.granted, kind.unanswered);
            format!("{name} | {sent} | {refused} | {granted} | {unanswered}")
        };
        let kinds = filled_table(
            "what was sent | requests | refused | granted | no answer",
            kinds.chain([("all of it", self.attack.sum())]).map(row),
        );
        let (a, b) = (&self.attacked, &self.beside_burner);
        let (a_fault, b_fault) = (&a.fault_us, &b.fault_us);
        let victim = [
            ("fault p50, us", a_fault.p50, b_fault.p50),
            ("fault p99, us", a_fault.p99, b_fault.p99),
            ("STREAM, MB/s", a.stream_mb_per_s, b.stream_mb_per_s),
            (
                "its neighbour's CPU, s",
                a.neighbour_cpu_s,
                b.neighbour_cpu_s,
            ),
            ("CPU of the server, s", a.server_cpu_s, b.server_cpu_s),
            ("seconds", a.seconds, b.seconds),
        ];
        let victim = victim.map(|(name, a, b)| format!("{name} | {a:.2} | {b:.2} | {:.2}", a / b));
        let victim = filled_table("the victim | attacked | beside a burner | ratio", victim);
        let word = |met| if met { "met" } else { "MISSED" };
        let yes = |it| if it { "yes" } else { "NO: FAILED" };
        format!(
            "{kinds}\n{victim}\nbytes of others that the attacker saw or changed: {}\nwords of the victim that were \
             damaged: {} of {}\nthe server ran to the end: {}\nfault p99 at most {P99_RATIO_MAX} times as long: {} ({:.2})",
            self.attack.foreign_bytes,
            self.damaged_words,
            a.words_checked + b.words_checked,
            yes(self.server_alive),
            word(self.fault_p99_met),
            self.fault_p99_ratio,
        )
    }
}
