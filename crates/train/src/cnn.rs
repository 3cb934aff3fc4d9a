//! [`Cnn`]: a convolutional network with its gradient.
//!
//! Each stage is a convolution of 3 by 3, batch normalisation (Ioffe and Szegedy, "Batch
//! normalization: accelerating deep network training by reducing internal covariate shift"), the
//! largest of 2 by 2 and rectified linear units. A fully connected layer follows the last one.
//! A pixel's channels lie next to each other. So a convolution is a matrix product: a row for each
//! pixel, with the values around it, times a column for each channel.

use std::ops::Range;

use crate::{
    data::Examples,
    layers::{self, Dense},
    product::{Left, Products},
    random::Random,
};

/// Pixels that a convolution looks at.
const AROUND: usize = 9;
/// Keeps a channel that is the same everywhere from being divided by zero.
const EPSILON: f32 = 1e-5;

/// A convolutional network for square pictures of one channel.
#[derive(Clone, Debug)]
pub struct Cnn {
    stages: Vec<Stage>,
    dense: Dense,
}

#[derive(Clone, Copy, Debug)]
struct Stage {
    /// Pixels of a side, before the stage.
    side: usize,
    inputs: usize,
    outputs: usize,
}

/// Memory for one thread's passes, kept from one to the next.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    products: Products,
    passes: Vec<Pass>,
    /// Of the last layer.
    outputs: Vec<f32>,
    /// The loss's derivatives by a stage's values, and by those of the stage before.
    slopes: Vec<f32>,
    slopes_before: Vec<f32>,
    /// The same by a stage's convolved values, and by the values around each pixel.
    convolved: Vec<f32>,
    around: Vec<f32>,
}

/// What a stage's way back needs of its way forward.
#[derive(Debug, Default)]
struct Pass {
    /// For each pixel the values around it.
    around: Vec<f32>,
    /// Convolved and normalised.
    normal: Vec<f32>,
    /// By what each channel was multiplied for that.
    scales: Vec<f32>,
    /// The stage's values, and which of the normalised ones each of them is made of.
    values: Vec<f32>,
    chosen: Vec<usize>,
}

/// Where a stage's parameters are.
struct Places {
    kernel: Range<usize>,
    gain: Range<usize>,
    shift: Range<usize>,
    /// The running statistics.
    mean: Range<usize>,
    variance: Range<usize>,
}

impl Cnn {
    /// For pictures of `side` by `side` pixels, with a stage for each of `channels`.
    ///
    /// # Panics
    /// If they do not fit, as [`fits`](Self::fits) says, or there are no classes.
    pub fn new(side: usize, channels: &[usize], classes: usize) -> Self {
        assert!(
            Self::fits(side, channels) && classes > 0,
            "stages of {channels:?} channels for {side} by {side} pixels and {classes} classes"
        );
        let (mut stages, mut side, mut inputs) = (Vec::new(), side, 1);
        for &outputs in channels {
            stages.push(Stage {
                side,
                inputs,
                outputs,
            });
            (side, inputs) = (side / 2, outputs);
        }
        let dense = Dense {
            inputs: side * side * inputs,
            outputs: classes,
        };
        Self { stages, dense }
    }

    /// Whether there is a stage, each has a channel, and each can halve the pictures' side.
    pub fn fits(side: usize, channels: &[usize]) -> bool {
        let halvings = channels.len();
        let is_even = (1..32).contains(&halvings) && side.is_multiple_of(1 << halvings);
        side > 0 && is_even && !channels.contains(&0)
    }

    pub(crate) fn inputs(&self) -> usize {
        self.stages[0].side.pow(2)
    }

    pub(crate) fn parameters(&self) -> usize {
        self.learnt() + self.statistics()
    }

    pub(crate) fn statistics(&self) -> usize {
        self.stages.iter().map(|stage| 2 * stage.outputs).sum()
    }

    /// How many parameters are no running statistics.
    fn learnt(&self) -> usize {
        let of = |stage: &Stage| stage.kernel() + 2 * stage.outputs;
        self.stages.iter().map(of).sum::<usize>() + self.dense.parameters()
    }

    /// Each stage's places.
    fn places(&self) -> Vec<Places> {
        let (mut at, mut statistics) = (0, self.learnt());
        let mut take = |is_statistic, count| {
            let at = match is_statistic {
                true => &mut statistics,
                false => &mut at,
            };
            *at += count;
            *at - count..*at
        };
        let mut of = |stage: &Stage| Places {
            kernel: take(false, stage.kernel()),
            gain: take(false, stage.outputs),
            shift: take(false, stage.outputs),
            mean: take(true, stage.outputs),
            variance: take(true, stage.outputs),
        };
        self.stages.iter().map(&mut of).collect()
    }

    /// Where the last layer's parameters are.
    fn dense_place(&self) -> Range<usize> {
        self.learnt() - self.dense.parameters()..self.learnt()
    }

    pub(crate) fn initial(&self, random: &mut Random) -> Vec<f32> {
        let mut parameters = Vec::with_capacity(self.parameters());
        for stage in &self.stages {
            let around = AROUND * stage.inputs;
            layers::weights(around, stage.kernel(), random, &mut parameters);
            for start in [1.0, 0.0] {
                parameters.extend((0..stage.outputs).map(|_| start));
            }
        }
        self.dense.begin(random, &mut parameters);
        for stage in &self.stages {
            for start in [0.0, 1.0] {
                parameters.extend((0..stage.outputs).map(|_| start));
            }
        }
        parameters
    }

    pub(crate) fn gradient(
        &self,
        parameters: &[f32],
        examples: &Examples,
        scratch: &mut Scratch,
        gradient: &mut [f32],
    ) -> f32 {
        self.forward(parameters, &examples.features, scratch, Some(gradient));
        let Scratch {
            products,
            passes,
            outputs,
            slopes,
            slopes_before,
            convolved,
            around,
        } = scratch;
        let loss = layers::loss(outputs, &examples.labels, slopes);
        let (dense, last) = (self.dense_place(), &passes[passes.len() - 1]);
        let weights = &parameters[dense.clone()];
        self.dense
            .gradient(products, &last.values, slopes, &mut gradient[dense]);
        self.dense
            .backward(products, weights, slopes, slopes_before);
        std::mem::swap(slopes, slopes_before);
        let stages = self.stages.iter().zip(self.places()).zip(&*passes);
        for (number, ((stage, places), pass)) in stages.enumerate().rev() {
            let gain = &parameters[places.gain.clone()];
            let (by_gain, by_shift) = stage.convolved_slopes(pass, gain, slopes, convolved);
            gradient[places.gain].copy_from_slice(&by_gain);
            gradient[places.shift].copy_from_slice(&by_shift);
            let (width, transposed) = (AROUND * stage.inputs, &mut gradient[places.kernel.clone()]);
            let left = Left {
                data: &pass.around,
                row: 1,
                column: width,
            };
            let pixels = convolved.len() / stage.outputs;
            products.multiply(left, pixels, convolved, stage.outputs, transposed);
            if number > 0 {
                around.clear();
                around.resize(pixels * width, 0.0);
                let left = Left {
                    data: convolved,
                    row: stage.outputs,
                    column: 1,
                };
                let kernel = &parameters[places.kernel];
                products.multiply_by_transpose(left, stage.outputs, kernel, width, around);
                stage.fold(around, slopes);
            }
        }
        loss
    }

    pub(crate) fn right(
        &self,
        parameters: &[f32],
        examples: &Examples,
        scratch: &mut Scratch,
    ) -> usize {
        self.forward(parameters, &examples.features, scratch, None);
        layers::right(&scratch.outputs, &examples.labels)
    }

    /// Normalises by the batch's statistics, and puts how far the running ones are from them into
    /// the `gradient`. Without one, normalises by the running ones.
    fn forward(
        &self,
        parameters: &[f32],
        features: &[f32],
        scratch: &mut Scratch,
        mut gradient: Option<&mut [f32]>,
    ) {
        let Scratch {
            products,
            passes,
            outputs,
            ..
        } = scratch;
        passes.resize_with(self.stages.len(), Pass::default);
        for (number, (stage, places)) in self.stages.iter().zip(self.places()).enumerate() {
            let (done, rest) = passes.split_at_mut(number);
            let before = done.last().map_or(features, |pass| &pass.values);
            let pass = &mut rest[0];
            stage.convolve(products, &parameters[places.kernel], before, pass);
            let running = [places.mean, places.variance];
            match &mut gradient {
                Some(gradient) => {
                    let batch = stage.statistics(&pass.normal);
                    for (place, batch) in running.into_iter().zip(&batch) {
                        let apart = parameters[place.clone()].iter().zip(batch);
                        let apart = apart.map(|(running, batch)| running - batch);
                        gradient[place]
                            .iter_mut()
                            .zip(apart)
                            .for_each(|(to, apart)| *to = apart);
                    }
                    stage.normalise(&batch[0], &batch[1], pass);
                }
                None => {
                    let [mean, variance] = running.map(|place| &parameters[place]);
                    stage.normalise(mean, variance, pass);
                }
            }
            stage.choose(&parameters[places.gain], &parameters[places.shift], pass);
        }
        let last = &passes[passes.len() - 1].values;
        self.dense
            .forward(products, &parameters[self.dense_place()], last, outputs);
    }
}

impl Stage {
    /// How many weights its convolution has.
    fn kernel(&self) -> usize {
        AROUND * self.inputs * self.outputs
    }

    /// Pairs of pixels next to each other, each by its number in a picture and its number around
    /// the other. Pixels outside the picture are left out, and stand for zeros.
    fn neighbours(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let side = self.side;
        let pixels = (0..side).flat_map(move |y| (0..side).map(move |x| (y, x)));
        pixels.flat_map(move |(y, x)| {
            (0..AROUND).filter_map(move |around| {
                let (row, column) = (y + around / 3, x + around % 3);
                let is_inside = (1..=side).contains(&row) && (1..=side).contains(&column);
                is_inside.then(|| (y * side + x, around, (row - 1) * side + column - 1))
            })
        })
    }

    /// Lists for each pixel the values around it.
    fn unfold(&self, values: &[f32], around: &mut Vec<f32>) {
        let (pixels, inputs) = (self.side * self.side, self.inputs);
        around.clear();
        around.resize(AROUND * values.len(), 0.0);
        let pictures = around.chunks_exact_mut(AROUND * pixels * inputs);
        for (around, values) in pictures.zip(values.chunks_exact(pixels * inputs)) {
            for (pixel, number, other) in self.neighbours() {
                around[(pixel * AROUND + number) * inputs..][..inputs]
                    .copy_from_slice(&values[other * inputs..][..inputs]);
            }
        }
    }

    /// Adds up what was listed of the same value.
    fn fold(&self, around: &[f32], values: &mut Vec<f32>) {
        let (pixels, inputs) = (self.side * self.side, self.inputs);
        values.clear();
        values.resize(around.len() / AROUND, 0.0);
        let pictures = around.chunks_exact(AROUND * pixels * inputs);
        for (around, values) in pictures.zip(values.chunks_exact_mut(pixels * inputs)) {
            for (pixel, number, other) in self.neighbours() {
                let listed = &around[(pixel * AROUND + number) * inputs..][..inputs];
                let sums = values[other * inputs..][..inputs].iter_mut();
                sums.zip(listed).for_each(|(sum, value)| *sum += value);
            }
        }
    }

    fn convolve(&self, products: &mut Products, kernel: &[f32], before: &[f32], pass: &mut Pass) {
        self.unfold(before, &mut pass.around);
        let width = AROUND * self.inputs;
        pass.normal.clear();
        pass.normal
            .resize(pass.around.len() / width * self.outputs, 0.0);
        let left = Left {
            data: &pass.around,
            row: width,
            column: 1,
        };
        products.multiply(left, width, kernel, self.outputs, &mut pass.normal);
    }

    /// The sum over all pixels of what `value` makes of each, by channels. `f64` keeps sums of many
    /// thousand pixels exact enough.
    fn sums(&self, values: &[f32], value: impl Fn(usize, usize) -> f32) -> Vec<f64> {
        let mut sums = vec![0.0; self.outputs];
        for first in (0..values.len()).step_by(self.outputs) {
            for (channel, sum) in sums.iter_mut().enumerate() {
                *sum += f64::from(value(first + channel, channel));
            }
        }
        sums
    }

    /// The mean and the variance of each channel.
    fn statistics(&self, values: &[f32]) -> [Vec<f32>; 2] {
        let share = self.outputs as f64 / values.len() as f64;
        let means =
            |sums: Vec<f64>| -> Vec<f32> { sums.iter().map(|sum| (sum * share) as f32).collect() };
        let mean = means(self.sums(values, |at, _| values[at]));
        let square = |apart: f32| apart * apart;
        let variance = means(self.sums(values, |at, channel| square(values[at] - mean[channel])));
        [mean, variance]
    }

    fn normalise(&self, mean: &[f32], variance: &[f32], pass: &mut Pass) {
        let scales = variance
            .iter()
            .map(|variance| 1.0 / (variance + EPSILON).sqrt());
        pass.scales.clear();
        pass.scales.extend(scales);
        for pixel in pass.normal.chunks_exact_mut(self.outputs) {
            for ((value, mean), scale) in pixel.iter_mut().zip(mean).zip(&pass.scales) {
                *value = (*value - mean) * scale;
            }
        }
    }

    /// Takes the largest of 2 by 2 pixels, or 0. The first of the largest is chosen.
    fn choose(&self, gain: &[f32], shift: &[f32], pass: &mut Pass) {
        let (side, outputs) = (self.side, self.outputs);
        pass.values.clear();
        pass.chosen.clear();
        for picture in (0..pass.normal.len()).step_by(side * side * outputs) {
            for (y, x) in (0..side)
                .step_by(2)
                .flat_map(|y| (0..side).step_by(2).map(move |x| (y, x)))
            {
                for channel in 0..outputs {
                    let first = picture + (y * side + x) * outputs + channel;
                    let of = |at: usize| gain[channel] * pass.normal[at] + shift[channel];
                    let (mut chosen, mut value) = (first, of(first));
                    for at in [
                        first + outputs,
                        first + side * outputs,
                        first + (side + 1) * outputs,
                    ] {
                        if of(at) > value {
                            (chosen, value) = (at, of(at));
                        }
                    }
                    pass.chosen.push(chosen);
                    pass.values.push(value.max(0.0));
                }
            }
        }
    }

    /// Sets `convolved` to the loss's derivatives by the convolution's values, of which `slopes`
    /// are those by the stage's; returns those by gain and shift.
    fn convolved_slopes(
        &self,
        pass: &Pass,
        gain: &[f32],
        slopes: &[f32],
        convolved: &mut Vec<f32>,
    ) -> (Vec<f32>, Vec<f32>) {
        convolved.clear();
        convolved.resize(pass.normal.len(), 0.0);
        for ((slope, value), chosen) in slopes.iter().zip(&pass.values).zip(&pass.chosen) {
            if *value > 0.0 {
                convolved[*chosen] = *slope;
            }
        }
        let floats = |sums: Vec<f64>| -> Vec<f32> { sums.iter().map(|sum| *sum as f32).collect() };
        let by_gain = floats(self.sums(convolved, |at, _| convolved[at] * pass.normal[at]));
        let by_shift = floats(self.sums(convolved, |at, _| convolved[at]));
        // The batch's mean and variance depend on every value, too.
        let share = self.outputs as f32 / convolved.len() as f32;
        let pixels = convolved.chunks_exact_mut(self.outputs);
        for (slopes, normal) in pixels.zip(pass.normal.chunks_exact(self.outputs)) {
            for (channel, (slope, normal)) in slopes.iter_mut().zip(normal).enumerate() {
                let common = (by_shift[channel] + normal * by_gain[channel]) * share;
                *slope = gain[channel] * pass.scales[channel] * (*slope - common);
            }
        }
        (by_gain, by_shift)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition, one pixel after the other.
    fn naive(stage: &Stage, kernel: &[f32], before: &[f32]) -> Vec<f32> {
        let (side, mut values) = (stage.side as isize, Vec::new());
        for picture in before.chunks_exact(stage.side * stage.side * stage.inputs) {
            for (y, x) in (0..side).flat_map(|y| (0..side).map(move |x| (y, x))) {
                for output in 0..stage.outputs {
                    let mut sum = 0.0;
                    for (around, input) in
                        (0..9).flat_map(|k| (0..stage.inputs).map(move |i| (k, i)))
                    {
                        let (row, column) = (y + around / 3 - 1, x + around % 3 - 1);
                        if (0..side).contains(&row) && (0..side).contains(&column) {
                            let pixel = (row * side + column) as usize;
                            let weight = (around as usize * stage.inputs + input) * stage.outputs;
                            sum += picture[pixel * stage.inputs + input] * kernel[weight + output];
                        }
                    }
                    values.push(sum);
                }
            }
        }
        values
    }

    #[test]
    fn a_convolution_is_the_plain_one() {
        let mut random = Random::new(4, 0);
        for (side, inputs, outputs) in [(2, 1, 1), (4, 3, 2), (6, 2, 9)] {
            let stage = Stage {
                side,
                inputs,
                outputs,
            };
            let mut draw =
                |count| -> Vec<f32> { (0..count).map(|_| random.signed_unit()).collect() };
            let (before, kernel) = (draw(3 * side * side * inputs), draw(stage.kernel()));
            let mut pass = Pass::default();
            stage.convolve(&mut Products::default(), &kernel, &before, &mut pass);
            for (value, expected) in pass.normal.iter().zip(naive(&stage, &kernel, &before)) {
                assert!(
                    (value - expected).abs() < 1e-5,
                    "{value} against {expected}"
                );
            }
        }
    }

    #[test]
    fn a_batch_is_normalised_by_its_own_statistics_and_the_running_ones_move_there() {
        let cnn = Cnn::new(4, &[3], 2);
        let mut random = Random::new(5, 0);
        let mut parameters = cnn.initial(&mut random);
        let examples = Examples {
            features: (0..6 * 16).map(|_| 3.0 + random.signed_unit()).collect(),
            labels: vec![0, 1, 0, 1, 1, 0],
        };
        let (mut scratch, mut gradient) = (Scratch::default(), vec![0.0; parameters.len()]);
        cnn.gradient(&parameters, &examples, &mut scratch, &mut gradient);
        let by_batch = scratch.outputs.clone();
        // Each channel has the mean 0 and the variance 1.
        let [mean, variance] = cnn.stages[0].statistics(&scratch.passes[0].normal);
        assert!(mean.iter().all(|mean| mean.abs() < 1e-4), "{mean:?}");
        assert!(
            variance.iter().all(|of| (of - 1.0).abs() < 1e-3),
            "{variance:?}"
        );
        // The running ones are at their start, and judge otherwise.
        cnn.right(&parameters, &examples, &mut scratch);
        assert_ne!(scratch.outputs, by_batch);
        // When they are where the batch's are, they judge as the batch was.
        let learnt = cnn.learnt();
        for (running, apart) in parameters[learnt..].iter_mut().zip(&gradient[learnt..]) {
            *running -= apart;
        }
        cnn.right(&parameters, &examples, &mut scratch);
        for (judged, trained) in scratch.outputs.iter().zip(&by_batch) {
            assert!(
                (judged - trained).abs() < 1e-3,
                "{judged} against {trained}"
            );
        }
    }

    #[test]
    fn stages_halve_the_side() {
        assert_eq!(Cnn::new(28, &[8, 16], 10).dense.inputs, 7 * 7 * 16);
        for (side, channels) in [
            (28, &[4, 4, 4][..]),
            (8, &[]),
            (8, &[4, 0]),
            (0, &[4]),
            (7, &[4]),
        ] {
            assert!(!Cnn::fits(side, channels), "{side} {channels:?}");
        }
    }
}
