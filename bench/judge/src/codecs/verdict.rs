//! Verdicts on ratios that were measured several times: a bound is met, missed, or too near to
//! tell.
//!
//! The rule it keeps: **noise decides nothing.** Three things keep it out:
//!
//! - Ratios are of neighbours: in each repetition the two runs that are compared were measured
//!   moments apart, so that a slow phase of the whole machine cancels out. Their geometric mean
//!   counts.
//! - The best of several rivals is chosen by the *other* repetitions. The largest of several noisy
//!   figures is too large by about the noise, and the more so the more there are; the rival that
//!   the others chose is as noisy in this repetition as any.
//! - The possible error of a mean follows from how the repetitions differ, by Student's t: each
//!   time that a hundred checks are looked at, noise decides one wrongly. An outlier makes the
//!   error larger. A mean that is further than its error from the bound is decided.
//!
//! A check that noise leaves undecided point by point may be decided for the mean of many points.

use serde::Serialize;

use crate::bound::Bound;

use farpage_bench_kit::report::median;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verdict {
    Met,
    Missed,
    /// The bound lies within the noise.
    Undecided,
}

/// Ratio over several repetitions.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ratio {
    /// Geometric mean of the repetitions' ratios.
    pub(super) mean: f64,
    /// Standard error of the mean's logarithm; unknown for a single repetition.
    error: Option<f64>,
    /// Degrees of freedom that the error was estimated with.
    freedom: usize,
}

/// Student's t, 98 % of both sides, for 1 to 16 degrees of freedom; for more the last is too
/// careful by a tenth.
const STUDENT: [f64; 16] = [
    31.82, 6.965, 4.541, 3.747, 3.365, 3.143, 2.998, 2.896, 2.821, 2.764, 2.72, 2.681, 2.650,
    2.624, 2.602, 2.583,
];

impl Ratio {
    pub(super) fn of(ratios: &[f64]) -> Self {
        let count = ratios.len() as f64;
        let logs = || ratios.iter().map(|ratio| ratio.ln());
        let mean = logs().sum::<f64>() / count;
        let error = || {
            let squares: f64 = logs().map(|log| (log - mean).powi(2)).sum();
            (squares / (count - 1.0) / count).sqrt()
        };
        Self {
            mean: mean.exp(),
            error: (ratios.len() > 1).then(error),
            freedom: ratios.len().saturating_sub(1),
        }
    }

    /// Returns the geometric mean of ratios that were measured apart: their errors add up as
    /// independent ones do. A ratio that was measured once is taken to have the largest error of
    /// the others.
    pub(super) fn mean(ratios: &[Self]) -> Self {
        let count = ratios.len().max(1) as f64;
        let logs: f64 = ratios.iter().map(|ratio| ratio.mean.ln()).sum();
        let errors = ratios.iter().filter_map(|ratio| ratio.error);
        let worst = errors.reduce(f64::max);
        let error = worst.map(|worst| {
            let errors = ratios.iter().map(|ratio| ratio.error.unwrap_or(worst));
            errors.map(|error| error.powi(2)).sum::<f64>().sqrt() / count
        });
        Self {
            mean: (logs / count).exp(),
            error,
            freedom: ratios.iter().map(|ratio| ratio.freedom).sum(),
        }
    }

    /// Returns the bound of the mean's error, at 98 % confidence; `None` after a single repetition.
    pub(super) fn off(self) -> Option<f64> {
        let student = STUDENT[self.freedom.clamp(1, STUDENT.len()) - 1];
        Some(self.mean * (self.error? * student).exp_m1())
    }

    pub(super) fn verdict(self, bound: Bound) -> Verdict {
        let Some(off) = self.off().filter(|off| off.is_finite()) else {
            return Verdict::Undecided;
        };
        let [low, high] = [self.mean - off, self.mean + off].map(|ratio| bound.is_met(ratio));
        match (low, high) {
            (true, true) => Verdict::Met,
            (false, false) => Verdict::Missed,
            _ => Verdict::Undecided,
        }
    }
}

/// Returns for each repetition `judged` divided by the rival that is best in all others, on the
/// median. One repetition alone chooses by itself.
///
/// Rivals that were not measured in every repetition are left out.
pub(super) fn against_best(judged: &[f64], rivals: &[Vec<f64>]) -> Vec<f64> {
    let repetitions = judged.len();
    let rivals = rivals.iter().filter(|rival| rival.len() >= repetitions);
    let ratios = |rival: &Vec<f64>| rival.iter().zip(judged).map(|(a, b)| b / a).collect();
    let ratios: Vec<Vec<f64>> = rivals.map(ratios).collect();
    let of_others = |ratios: &[f64], left_out: usize| {
        let others = ratios.iter().enumerate();
        let others = others.filter(|(at, _)| *at != left_out || repetitions == 1);
        median(&others.map(|(_, ratio)| *ratio).collect::<Vec<f64>>())
    };
    (0..repetitions)
        .filter_map(|at| {
            let by_others =
                |a: &&Vec<f64>, b: &&Vec<f64>| of_others(a, at).total_cmp(&of_others(b, at));
            Some(ratios.iter().min_by(by_others)?[at])
        })
        .collect()
}

/// Returns true for each rival that is worth another repetition: one that was at most once more
/// than a fifth behind the best, and never had less than a fifth of the best's speed.
pub(super) fn contenders(rivals: &[Vec<f64>]) -> Vec<bool> {
    let repetitions = rivals.iter().map(Vec::len).max().unwrap_or(0);
    // Number of repetitions in which `rival` had less than this part of the best.
    let behind = |rival: &Vec<f64>, part: f64| {
        let is_behind = |at: &usize| {
            let best = rivals.iter().filter_map(|rival| rival.get(*at));
            let best = best.copied().fold(0.0, f64::max);
            rival.get(*at).is_none_or(|figure| *figure < part * best)
        };
        (0..repetitions).filter(is_behind).count()
    };
    let contends = |rival| behind(rival, 0.8) < 2 && behind(rival, 0.2) < 1;
    rivals.iter().map(contends).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes noise of `parts` of one, always the same.
    fn noise(parts: f64) -> impl FnMut() -> f64 {
        let mut state = 7u64;
        move || {
            // The sum of twelve is nearly normal.
            let mut sum = 0.0;
            for _ in 0..12 {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                sum += (state >> 33) as f64 / (1u64 << 31) as f64;
            }
            1.0 + (sum - 6.0) * parts
        }
    }

    /// Counts met, missed and undecided checks of 400 if `judged` is truly `truth` times its
    /// rivals.
    fn verdicts(truth: f64, parts: f64, repetitions: usize) -> [usize; 3] {
        let mut noise = noise(parts);
        let mut counts = [0; 3];
        for _ in 0..400 {
            let judged: Vec<f64> = (0..repetitions).map(|_| truth * noise()).collect();
            let mut rival = || (0..repetitions).map(|_| noise()).collect::<Vec<f64>>();
            let rivals = [rival(), rival(), rival()];
            let ratio = Ratio::of(&against_best(&judged, &rivals));
            counts[ratio.verdict(Bound::AtLeast(0.97)) as usize] += 1;
        }
        counts
    }

    #[test]
    fn what_is_clear_is_decided_and_what_is_not_is_called_so() {
        let [met, missed, _] = verdicts(1.1, 0.02, 5);
        assert!(met > 390 && missed == 0, "{met} {missed}");
        let [met, missed, _] = verdicts(0.85, 0.02, 5);
        assert!(met == 0 && missed > 390, "{met} {missed}");
        // The noise is larger than the difference; a command as good as the best of three is seldom
        // called worse.
        for repetitions in [5, 7] {
            let [met, missed, undecided] = verdicts(1.0, 0.1, repetitions);
            assert!(undecided > 300 && missed < 12, "{met} {missed} {undecided}");
        }
    }

    #[test]
    fn the_best_rival_is_not_the_luckiest() {
        let mut noise = noise(0.1);
        let mut ratios = Vec::new();
        for _ in 0..400 {
            let mut run = || (0..5).map(|_| noise()).collect::<Vec<f64>>();
            let (judged, rivals) = (run(), [run(), run(), run(), run()]);
            ratios.push(Ratio::of(&against_best(&judged, &rivals)).mean);
        }
        // All commands are alike. Against the best of means the ratio would be 0.95.
        let middle = median(&ratios);
        assert!((0.985..1.03).contains(&middle), "{middle}");
    }

    #[test]
    fn what_slows_a_repetition_down_cancels_out() {
        let machine = [1.0, 0.7, 1.3, 0.8, 1.1];
        let judged = machine.map(|x| 0.99 * x);
        let rivals = [machine, machine.map(|x| 0.5 * x)].map(Vec::from);
        let ratio = Ratio::of(&against_best(&judged, &rivals));
        assert!((ratio.mean - 0.99).abs() < 1e-9 && ratio.off().unwrap() < 1e-9);
        for (bound, verdict) in [
            (Bound::AtLeast(0.97), Verdict::Met),
            (Bound::AtLeast(0.995), Verdict::Missed),
            (Bound::Below(1.0), Verdict::Met),
            (Bound::Above(1.0), Verdict::Missed),
        ] {
            assert_eq!(ratio.verdict(bound), verdict);
        }
    }

    #[test]
    fn how_far_a_mean_may_be_off_shrinks_with_repetitions_and_is_unknown_for_one() {
        let once = Ratio::of(&[1.0]);
        assert_eq!(once.verdict(Bound::AtLeast(0.5)), Verdict::Undecided);
        // Logarithms of -0.1, 0 and 0.1: the standard deviation is 0.1.
        let three = [-0.1f64, 0.0, 0.1].map(f64::exp);
        let off = Ratio::of(&three).off().unwrap();
        assert!((off - (6.965 * 0.1 / 3f64.sqrt()).exp_m1()).abs() < 1e-9);
        let six = Ratio::of(&[three, three].concat()).off().unwrap();
        assert!(six < off / 2.0);
        let [high, low] = [2.0, 0.5].map(|times| Ratio::of(&three.map(|ratio| times * ratio)));
        let mean = Ratio::mean(&[high, low]);
        assert!((mean.mean - 1.0).abs() < 1e-9);
        let error = 0.1 / 3f64.sqrt() / 2f64.sqrt();
        assert!((mean.off().unwrap() - (3.747 * error).exp_m1()).abs() < 1e-9);
        let with_one = Ratio::mean(&[high, once]);
        let off = with_one.off().unwrap() / with_one.mean;
        assert!((off - (6.965 * error).exp_m1()).abs() < 1e-9);
        assert_eq!(Ratio::mean(&[once, once]).off(), None);
        let none = Ratio::of(&[0.0, 0.0]).verdict(Bound::Below(1.0));
        assert_eq!(none, Verdict::Undecided);
    }

    #[test]
    fn who_is_far_behind_is_not_measured_again() {
        for (third, contends) in [(0.9, true), (0.7, false)] {
            let rivals = [vec![1.0; 3], vec![0.7, 0.7], vec![0.7, 0.9, third]];
            assert_eq!(contenders(&rivals), [true, false, contends]);
        }
        let once = [1.0, 0.4, 0.1].map(|figure| vec![figure]);
        assert_eq!(contenders(&once), [true, true, false]);
        // Only rivals that were measured every time count.
        let ratios = against_best(&[1.0; 3], &[vec![2.0; 2], vec![0.5; 3]]);
        assert_eq!(ratios, [2.0; 3]);
    }
}
