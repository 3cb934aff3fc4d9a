//! Whether a ratio that was measured several times meets a bound, misses it, or cannot be told from it.
//!
//! The rule it keeps: **noise decides nothing.** Three things keep it out:
//!
//! - Ratios are of neighbours: in each repetition the two runs that are compared were measured moments apart, so that what slows the whole machine down
//!   for a while cancels out. The median of the repetitions counts.
//! - The best of several rivals is chosen by the *other* repetitions. The largest of several noisy figures is too large by about the noise, and the more so the more
//!   there are; what the others chose is as noisy in this repetition as anything else.
//! - A median may be off: by twice the distance of the quartiles over the square root of the number of repetitions, which for 3 to 7 ratios with noise
//!   of the usual kind is between 1.5 and 2 standard errors. What is further than that from the bound is decided.

use serde::Serialize;

use crate::report::median;

/// A bound for a ratio.
#[derive(Clone, Copy)]
pub(super) enum Bound {
    AtLeast(f64),
    Above(f64),
    Below(f64),
}

impl Bound {
    fn is_met(self, ratio: f64) -> bool {
        match self {
            Self::AtLeast(least) => ratio >= least,
            Self::Above(least) => ratio > least,
            Self::Below(most) => ratio < most,
        }
    }

    pub(super) fn text(self) -> String {
        match self {
            Self::AtLeast(least) => format!("at least {least}"),
            Self::Above(least) => format!("above {least}"),
            Self::Below(most) => format!("below {most}"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verdict {
    Met,
    Missed,
    /// The bound lies within the noise.
    Undecided,
}

/// A ratio of several repetitions.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ratio {
    pub(super) median: f64,
    /// How far the median may be off. Nothing is known of a single one.
    pub(super) off: Option<f64>,
}

impl Ratio {
    pub(super) fn of(ratios: &[f64]) -> Self {
        let off = || {
            let quartiles = quantile(ratios, 0.75) - quantile(ratios, 0.25);
            2.0 * quartiles / (ratios.len() as f64).sqrt()
        };
        Self {
            median: median(ratios),
            off: (ratios.len() > 1).then(off),
        }
    }

    /// The geometric mean of ratios that were measured apart: what they are off by adds up as independent errors do.
    pub(super) fn mean(ratios: &[Self]) -> Self {
        let count = ratios.len().max(1) as f64;
        let logs: f64 = ratios.iter().map(|ratio| ratio.median.ln()).sum();
        let mean = (logs / count).exp();
        let squares = ratios
            .iter()
            .map(|ratio| Some((ratio.off? / ratio.median).powi(2)));
        let sum: Option<f64> = squares.sum();
        Self {
            median: mean,
            off: sum.map(|sum| mean * sum.sqrt() / count),
        }
    }

    pub(super) fn verdict(self, bound: Bound) -> Verdict {
        let Some(off) = self.off else {
            return Verdict::Undecided;
        };
        let [low, high] = [self.median - off, self.median + off].map(|ratio| bound.is_met(ratio));
        match (low, high) {
            (true, true) => Verdict::Met,
            (false, false) => Verdict::Missed,
            _ => Verdict::Undecided,
        }
    }
}

/// In each repetition: `judged` over that rival which is best in all others, on the median. One repetition alone chooses by itself.
///
/// Rivals that were not measured in every repetition are left out.
pub(super) fn against_best(judged: &[f64], rivals: &[Vec<f64>]) -> Vec<f64> {
    let repetitions = judged.len();
    let rivals = rivals.iter().filter(|rival| rival.len() >= repetitions);
    let ratios: Vec<Vec<f64>> = rivals
        .map(|rival| {
            rival
                .iter()
                .zip(judged)
                .map(|(rival, judged)| judged / rival)
                .collect()
        })
        .collect();
    let of_others = |ratios: &[f64], left_out: usize| {
        let others = ratios.iter().enumerate();
        let others: Vec<f64> = others
            .filter(|(at, _)| *at != left_out || repetitions == 1)
            .map(|(_, ratio)| *ratio)
            .collect();
        median(&others)
    };
    (0..repetitions)
        .filter_map(|at| {
            let best = ratios
                .iter()
                .min_by(|a, b| of_others(a, at).total_cmp(&of_others(b, at)))?;
            Some(best[at])
        })
        .collect()
}

/// Which rivals are worth another repetition: whoever was more than a fifth behind the best of them in two repetitions is not.
pub(super) fn contenders(rivals: &[Vec<f64>]) -> Vec<bool> {
    let repetitions = rivals.iter().map(Vec::len).max().unwrap_or(0);
    let behind = |rival: &Vec<f64>| {
        let is_behind = |at: &usize| {
            let best = rivals.iter().filter_map(|rival| rival.get(*at));
            let best = best.copied().fold(0.0, f64::max);
            rival.get(*at).is_none_or(|figure| *figure < 0.8 * best)
        };
        (0..repetitions).filter(is_behind).count()
    };
    rivals.iter().map(|rival| behind(rival) < 2).collect()
}

/// Between the figures that are nearest, as far as it is from them.
fn quantile(figures: &[f64], part: f64) -> f64 {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    let place = part * (sorted.len() - 1) as f64;
    let (below, above) = (place.floor() as usize, place.ceil() as usize);
    sorted[below] + (sorted[above] - sorted[below]) * place.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Noise of so many parts of one, always the same.
    fn noise(parts: f64) -> impl FnMut() -> f64 {
        let mut state = 7u64;
        move || {
            // The sum of twelve is nearly normal.
            let sum: f64 = (0..12)
                .map(|_| {
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1);
                    (state >> 33) as f64 / (1u64 << 31) as f64
                })
                .sum();
            1.0 + (sum - 6.0) * parts
        }
    }

    /// How many of 400 checks are met, missed and undecided where `judged` is truly so much of three rivals that are alike.
    fn verdicts(truth: f64, parts: f64, repetitions: usize) -> [usize; 3] {
        let mut noise = noise(parts);
        let mut counts = [0; 3];
        for _ in 0..400 {
            let judged: Vec<f64> = (0..repetitions).map(|_| truth * noise()).collect();
            let rivals: Vec<Vec<f64>> = (0..3)
                .map(|_| (0..repetitions).map(|_| noise()).collect())
                .collect();
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
        // Noise that is larger than what there is to see; whoever is as good as the best of three is called worse one time in twenty.
        let [met, missed, undecided] = verdicts(1.0, 0.1, 7);
        assert!(undecided > 200 && missed < 30, "{met} {missed} {undecided}");
    }

    #[test]
    fn the_best_rival_is_not_the_luckiest() {
        let mut noise = noise(0.1);
        let mut ratios = Vec::new();
        for _ in 0..400 {
            let mut run = || (0..5).map(|_| noise()).collect::<Vec<f64>>();
            let (judged, rivals) = (run(), [run(), run(), run(), run()]);
            ratios.push(Ratio::of(&against_best(&judged, &rivals)).median);
        }
        // All are alike. Against the best of medians it would be 0.95.
        let middle = median(&ratios);
        assert!((0.985..1.03).contains(&middle), "{middle}");
    }

    #[test]
    fn what_slows_a_repetition_down_cancels_out() {
        let machine = [1.0, 0.7, 1.3, 0.8, 1.1];
        let judged = machine.map(|x| 0.99 * x);
        let ratio = Ratio::of(&against_best(
            &judged,
            &[machine.to_vec(), machine.map(|x| 0.5 * x).to_vec()],
        ));
        assert!((ratio.median - 0.99).abs() < 1e-9 && ratio.off.unwrap() < 1e-9);
        assert_eq!(ratio.verdict(Bound::AtLeast(0.97)), Verdict::Met);
        assert_eq!(ratio.verdict(Bound::AtLeast(0.995)), Verdict::Missed);
        assert_eq!(ratio.verdict(Bound::Below(1.0)), Verdict::Met);
        assert_eq!(ratio.verdict(Bound::Above(1.0)), Verdict::Missed);
    }

    #[test]
    fn how_far_a_median_may_be_off_shrinks_with_repetitions_and_is_unknown_for_one() {
        assert_eq!(
            Ratio::of(&[1.0]).verdict(Bound::AtLeast(0.5)),
            Verdict::Undecided
        );
        let three = Ratio::of(&[0.9, 1.0, 1.1]).off.unwrap();
        assert!((three - 0.2 / 3f64.sqrt()).abs() < 1e-9);
        let six = Ratio::of(&[0.9, 0.95, 1.0, 1.0, 1.05, 1.1]).off.unwrap();
        assert!(six < three);
        let mean = Ratio::mean(&[Ratio::of(&[1.8, 2.0, 2.2]), Ratio::of(&[0.45, 0.5, 0.55])]);
        assert!((mean.median - 1.0).abs() < 1e-9);
        assert!((mean.off.unwrap() - three / 2f64.sqrt()).abs() < 1e-9);
    }

    #[test]
    fn who_is_far_behind_twice_is_not_measured_again() {
        let rivals =
            |third: f64| contenders(&[vec![1.0, 1.0, 1.0], vec![0.7, 0.7], vec![0.7, 0.9, third]]);
        assert_eq!(rivals(0.9), [true, false, true]);
        assert_eq!(rivals(0.7), [true, false, false]);
        // Only those count that were measured every time.
        let ratios = against_best(&[1.0; 3], &[vec![2.0; 2], vec![0.5; 3]]);
        assert_eq!(ratios, [2.0; 3]);
    }
}
