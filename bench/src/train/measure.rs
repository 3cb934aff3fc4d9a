//! Training with all workers, and all aggregators, as threads of this process: each mode and seed
//! in turn, and the results.

use anyhow::{Context, Result, ensure};
use farpage_bench_kit::report::median;
use farpage_train::{
    Between, Courses, Job, Mode, Network, Outcome, Scratch, consensus, distance, hash, run_on,
};

use super::{
    checkpoint::Checkpoints,
    options::{Jobs, TrainFabric, TrainOptions},
    report::{Figures, Paired, Point, Report},
};

/// Upper bound of the bytes beyond those of the parameters, as a share: headers, announcements.
const OVERHEAD_MAX: f64 = 0.01;
/// Bytes of a message below which announcements weigh more than [`OVERHEAD_MAX`].
const CHECKED_BYTES: f64 = 64_000.0;
/// The 95 % quantile of Student's distribution, by degrees of freedom from 1.
const STUDENT_95: [f64; 19] = [
    6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771,
    1.761, 1.753, 1.746, 1.740, 1.734, 1.729,
];

/// Results of one run.
struct Ran {
    curve: Vec<Point>,
    worst_accuracy: f64,
    bytes_per_step: f64,
    bytes_over_theory: Option<f64>,
    serial_steps_per_step: f64,
    exchange_share: f64,
    hash: u128,
    worker_hashes: Vec<u128>,
    is_right: bool,
}

/// Trains in each mode, and compares the modes.
pub(super) fn measure(options: TrainOptions) -> Result<Report> {
    ensure!(
        options.checkpoint.is_none() || (options.mode.len(), options.seeds) == (1, 1),
        "--checkpoint: checkpoints belong to one run, so choose one --mode and one seed"
    );
    let jobs = Jobs::new(&options)?;
    let parameters = jobs.model.parameters();
    let mut ran: Vec<Vec<Ran>> = options.mode.iter().map(|_| Vec::new()).collect();
    for seed in options.seed..options.seed + options.seeds {
        for (mode, ran) in options.mode.iter().zip(&mut ran) {
            let job = jobs.job(*mode, seed)?;
            ran.push(one(&job, &options).with_context(|| format!("mode {mode}, seed {seed}"))?);
        }
    }
    let verified = ran.iter().flatten().all(|ran| ran.is_right);
    let mut all = options.mode.iter().zip(&ran);
    let bsp = all.clone().find(|(mode, _)| **mode == Mode::Bsp);
    let goal = bsp.map(|(_, ran)| ran[0].last().accuracy);
    let modes = all
        .by_ref()
        .map(|(mode, ran)| Figures::of(*mode, ran, goal));
    let modes: Vec<_> = modes.collect();
    Ok(Report {
        benchmark: "train",
        verified,
        parameters,
        parameter_bytes: 4 * parameters,
        ds_minus_bsp: paired(&modes),
        modes,
        config: options,
    })
}

/// Trains once, and verifies the results.
fn one(job: &Job, options: &TrainOptions) -> Result<Ran> {
    let network = Network {
        between: match options.fabric {
            TrainFabric::Sim => Between::Sim,
            TrainFabric::Shm => Between::Shm,
            TrainFabric::Tcp => Between::Tcp,
        },
        link: options.link(),
        deadline: options.patience(),
    };
    let state = options.state_memory()?;
    let checkpoints = options.checkpoints(job, options.workers)?;
    let parties = 0..Checkpoints::parties(job);
    let from = options.from(checkpoints.as_ref(), parties)?;
    let mut courses = match &checkpoints {
        Some(checkpoints) => checkpoints.courses(job, from)?,
        None => Courses::default(),
    };
    courses.state = state.as_ref();
    let outcomes = run_on(job, &network, courses)?;
    let count = outcomes.len() as f64;
    let mut scratch = Scratch::default();
    let mut accuracy = |parameters: &[f32]| {
        let right = job.model.right(parameters, &job.data.test, &mut scratch);
        right as f64 / job.data.test.labels.len() as f64
    };
    // 1. The curve.
    let mut curve = Vec::new();
    for at in 0..outcomes[0].snapshots.len() {
        let all = || outcomes.iter().map(|outcome| &outcome.snapshots[at]);
        let parameters = || all().map(|snapshot| &*snapshot.parameters);
        let mean = consensus(parameters());
        curve.push(Point {
            step: outcomes[0].snapshots[at].step,
            seconds: all().map(|snapshot| snapshot.seconds).fold(0.0, f64::max),
            loss: all().map(|snapshot| snapshot.loss).sum::<f64>() / count,
            accuracy: accuracy(&mean),
            distance: distance(parameters(), &mean),
        });
    }
    let worst = outcomes.iter().map(|outcome| accuracy(&outcome.settled));
    let worst_accuracy = worst.fold(1.0, f64::min);
    // 2. Bytes and serial steps, against theory.
    let steps = (job.steps - outcomes[0].from) as f64;
    let total = |of: fn(&Outcome) -> f64| outcomes.iter().map(of).sum::<f64>();
    let bytes_per_step = total(|outcome| outcome.moved_bytes as f64) / count / steps;
    let rings = job.plan.rings(0);
    let members = rings.first().map_or(1, |ring| ring.members.len()) as f64;
    let parameter_bytes = 4.0 * job.model.parameters() as f64;
    let (expected, serial, parts) = match job.aggregators {
        0 => {
            let serial = 2.0 * (members - 1.0);
            (serial * parameter_bytes / members, serial, members)
        }
        _ if job.plan.groups() == 0 => (0.0, 0.0, 1.0),
        // A push and a pull, through the aggregators of one group.
        count => {
            let parts = (count / job.plan.groups()) as f64;
            (2.0 * parameter_bytes, 2.0, parts)
        }
    };
    let bytes_over_theory = (expected > 0.0).then(|| bytes_per_step / expected);
    let are_bytes_right = match bytes_over_theory {
        None => bytes_per_step == 0.0,
        Some(over) => {
            let is_small = parameter_bytes / parts < CHECKED_BYTES;
            over >= 1.0 && (is_small || over <= 1.0 + OVERHEAD_MAX)
        }
    };
    let are_steps_right =
        (outcomes.iter()).all(|outcome| outcome.serial_steps as f64 == serial * steps);
    // 3. Equal parameters at all workers, where the mode asks for that.
    let settled = || outcomes.iter().map(|outcome| &*outcome.settled);
    let apart = distance(settled(), &consensus(settled()));
    let have_met = matches!(job.plan.mode(), Mode::Fixed | Mode::Nothing) || apart == 0.0;
    let last = |outcome: &'_ Outcome| outcome.snapshots.len() - 1;
    let ends = outcomes
        .iter()
        .map(|outcome| &*outcome.snapshots[last(outcome)].parameters);
    let (compute, exchange) = (total(|o| o.compute_s), total(|o| o.exchange_s));
    Ok(Ran {
        worker_hashes: ends.clone().map(|worker| hash([worker])).collect(),
        hash: hash(ends),
        curve,
        worst_accuracy,
        bytes_per_step,
        bytes_over_theory,
        serial_steps_per_step: total(|outcome| outcome.serial_steps as f64) / count / steps,
        exchange_share: exchange / (compute + exchange),
        is_right: are_bytes_right && are_steps_right && have_met,
    })
}

impl Ran {
    fn last(&self) -> &Point {
        self.curve.last().expect("a run has a beginning and an end")
    }
}

impl Figures {
    fn of(mode: Mode, ran: &[Ran], goal: Option<f64>) -> Self {
        let mean = |of: &dyn Fn(&Ran) -> f64| ran.iter().map(of).sum::<f64>() / ran.len() as f64;
        let seconds: Vec<_> = ran.iter().map(|ran| ran.last().seconds).collect();
        let reached = |goal| ran[0].curve.iter().find(|point| point.accuracy >= goal);
        Self {
            mode: mode.to_string(),
            accuracy: mean(&|ran| ran.last().accuracy),
            worst_accuracy: mean(&|ran| ran.worst_accuracy),
            loss: mean(&|ran| ran.last().loss),
            distance: mean(&|ran| ran.last().distance),
            bytes_per_step: mean(&|ran| ran.bytes_per_step),
            bytes_over_theory: ran[0].bytes_over_theory,
            serial_steps_per_step: mean(&|ran| ran.serial_steps_per_step),
            seconds: median(&seconds),
            exchange_share: mean(&|ran| ran.exchange_share),
            seconds_to_bsp: goal.and_then(reached).map(|point| point.seconds),
            hashes: ran.iter().map(|ran| format!("{:032x}", ran.hash)).collect(),
            worker_hashes: (ran[0].worker_hashes.iter())
                .map(|hash| format!("{hash:032x}"))
                .collect(),
            accuracies: ran.iter().map(|ran| ran.last().accuracy).collect(),
            curve: ran[0].curve.clone(),
        }
    }
}

/// Compares ds with bsp, if both were run.
fn paired(modes: &[Figures]) -> Option<Paired> {
    let of = |mode: Mode| modes.iter().find(|it| it.mode == mode.to_string());
    let (ds, bsp) = (of(Mode::Ds)?, of(Mode::Bsp)?);
    let pairs = ds.accuracies.iter().zip(&bsp.accuracies);
    let points: Vec<_> = pairs.map(|(ds, bsp)| 100.0 * (ds - bsp)).collect();
    let count = points.len();
    let mean_points = points.iter().sum::<f64>() / count as f64;
    let above_points = (count > 1).then(|| {
        let squares = points.iter().map(|point| (point - mean_points).powi(2));
        let squares = squares.sum::<f64>();
        let error = (squares / (count - 1) as f64 / count as f64).sqrt();
        mean_points - STUDENT_95[count - 2] * error
    });
    Some(Paired {
        mean_points,
        above_points,
        pairs: count,
    })
}
