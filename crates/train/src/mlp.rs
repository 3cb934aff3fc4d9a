//! [`Mlp`]: a multilayer perceptron with its gradient.
//!
//! The rule it keeps: the same parameters and examples give the same bits on every processor. All
//! sums are in a fixed order, and exponentials and logarithms are `libm`'s, in software. Parameters
//! are one flat vector that belongs to the caller, who exchanges it; layers are ranges of it.

use crate::{
    data::Examples,
    product::{Left, Products},
    random::Random,
};

/// A network of fully connected layers: rectified linear units within, softmax and cross-entropy at
/// the end.
#[derive(Clone, Debug)]
pub struct Mlp {
    /// Inputs, the units of each hidden layer, classes.
    widths: Vec<usize>,
}

/// Memory for one thread's passes, kept from one to the next.
#[derive(Debug, Default)]
pub struct Scratch {
    products: Products,
    /// Of each layer, for every example: first the inputs.
    values: Vec<Vec<f32>>,
    /// The loss's derivatives by a layer's values, and by those of the layer before.
    slopes: Vec<f32>,
    slopes_before: Vec<f32>,
}

impl Mlp {
    /// Of these widths: inputs, hidden layers, classes.
    ///
    /// # Panics
    /// If there are less than two, or one is 0.
    pub fn new(widths: &[usize]) -> Self {
        assert!(
            widths.len() >= 2 && widths.iter().all(|width| *width > 0),
            "a network of the widths {widths:?}"
        );
        Self {
            widths: widths.to_vec(),
        }
    }

    /// How many parameters it has.
    pub fn parameters(&self) -> usize {
        self.layers()
            .map(|(inputs, outputs)| (inputs + 1) * outputs)
            .sum()
    }

    fn layers(&self) -> impl Iterator<Item = (usize, usize)> {
        self.widths.windows(2).map(|pair| (pair[0], pair[1]))
    }

    /// Parameters to begin with: weights that keep the variance from layer to layer (He et al.,
    /// "Delving deep into rectifiers"), uniform; biases are zero.
    pub fn initial(&self, seed: u64) -> Vec<f32> {
        let mut random = Random::new(seed, u64::MAX);
        let mut parameters = Vec::with_capacity(self.parameters());
        for (inputs, outputs) in self.layers() {
            let range = (6.0 / inputs as f32).sqrt();
            parameters.extend((0..inputs * outputs).map(|_| range * random.signed_unit()));
            parameters.extend((0..outputs).map(|_| 0.0));
        }
        parameters
    }

    /// The mean loss over `examples`, and its gradient into `gradient`.
    ///
    /// # Panics
    /// If there are no examples, or lengths do not fit the network.
    pub fn gradient(
        &self,
        parameters: &[f32],
        examples: &Examples,
        scratch: &mut Scratch,
        gradient: &mut [f32],
    ) -> f32 {
        self.forward(parameters, examples, scratch);
        let count = examples.labels.len();
        assert!(count > 0, "a gradient of no examples");
        assert_eq!(gradient.len(), self.parameters(), "the gradient's length");
        let Scratch {
            products,
            values,
            slopes,
            slopes_before,
        } = scratch;
        // 1. Softmax and cross-entropy.
        let classes = self.classes();
        let outputs = values.last().expect("two widths at least");
        let mut loss = 0.0;
        slopes.clear();
        for (row, label) in outputs.chunks_exact(classes).zip(&examples.labels) {
            let (chances, row_loss) = softmax(row, usize::from(*label));
            loss += row_loss;
            slopes.extend(chances);
        }
        let share = 1.0 / count as f32;
        slopes.iter_mut().for_each(|slope| *slope *= share);
        // 2. Layer by layer, from the last to the first.
        let mut end = self.parameters();
        let layers: Vec<_> = self.layers().collect();
        for (layer, &(inputs, outputs)) in layers.iter().enumerate().rev() {
            let begin = end - (inputs + 1) * outputs;
            let (weights, biases) = gradient[begin..end].split_at_mut(inputs * outputs);
            let before = &values[layer];
            let transposed = Left {
                data: before,
                row: 1,
                column: inputs,
            };
            products.multiply(transposed, count, slopes, outputs, weights);
            biases.fill(0.0);
            for row in slopes.chunks_exact(outputs) {
                for (bias, slope) in biases.iter_mut().zip(row) {
                    *bias += slope;
                }
            }
            if layer > 0 {
                slopes_before.clear();
                slopes_before.resize(count * inputs, 0.0);
                let weights = &parameters[begin..begin + inputs * outputs];
                let rows = Left {
                    data: slopes,
                    row: outputs,
                    column: 1,
                };
                products.multiply_by_transpose(rows, outputs, weights, inputs, slopes_before);
                for (slope, value) in slopes_before.iter_mut().zip(before) {
                    if *value <= 0.0 {
                        *slope = 0.0;
                    }
                }
                std::mem::swap(slopes, slopes_before);
            }
            end = begin;
        }
        loss * share
    }

    /// How many of `examples` the network puts into their class.
    ///
    /// # Panics
    /// If lengths do not fit the network.
    pub fn right(&self, parameters: &[f32], examples: &Examples, scratch: &mut Scratch) -> usize {
        self.forward(parameters, examples, scratch);
        let outputs = scratch.values.last().expect("two widths at least");
        let rows = outputs.chunks_exact(self.classes()).zip(&examples.labels);
        rows.filter(|(row, label)| {
            // The first of the largest, so that ties are settled in one way.
            let chosen = row[usize::from(**label)];
            (0..).zip(*row).all(|(class, value)| {
                *value < chosen || (*value == chosen && class >= usize::from(**label))
            })
        })
        .count()
    }

    fn classes(&self) -> usize {
        *self.widths.last().expect("two widths at least")
    }

    fn forward(&self, parameters: &[f32], examples: &Examples, scratch: &mut Scratch) {
        let count = examples.labels.len();
        assert_eq!(
            parameters.len(),
            self.parameters(),
            "the parameters' length"
        );
        assert_eq!(
            examples.features.len(),
            count * self.widths[0],
            "the examples' features"
        );
        let Scratch {
            products, values, ..
        } = scratch;
        values.resize_with(self.widths.len(), Vec::new);
        values[0].clone_from(&examples.features);
        let (mut begin, last) = (0, self.widths.len() - 2);
        for (layer, (inputs, outputs)) in self.layers().enumerate() {
            let end = begin + (inputs + 1) * outputs;
            let (weights, biases) = parameters[begin..end].split_at(inputs * outputs);
            let (before, after) = values.split_at_mut(layer + 1);
            let (before, after) = (&before[layer], &mut after[0]);
            after.clear();
            after.resize(count * outputs, 0.0);
            let rows = Left {
                data: before,
                row: inputs,
                column: 1,
            };
            products.multiply(rows, inputs, weights, outputs, after);
            for row in after.chunks_exact_mut(outputs) {
                for (value, bias) in row.iter_mut().zip(biases) {
                    *value += bias;
                }
            }
            if layer < last {
                after.iter_mut().for_each(|value| *value = value.max(0.0));
            }
            begin = end;
        }
    }
}

/// The derivatives of the cross-entropy of softmax by its inputs, and the cross-entropy.
fn softmax(row: &[f32], label: usize) -> (impl Iterator<Item = f32>, f32) {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers = move |value: &f32| libm::expf(value - most);
    let sum: f32 = row.iter().map(powers).fold(0.0, |sum, power| sum + power);
    let loss = libm::logf(sum) - (row[label] - most);
    let slopes = row.iter().enumerate().map(move |(class, value)| {
        let chance = powers(value) / sum;
        if class == label { chance - 1.0 } else { chance }
    });
    (slopes, loss)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn examples(inputs: usize, classes: usize, count: usize, seed: u64) -> Examples {
        let mut random = Random::new(seed, 0);
        Examples {
            features: (0..count * inputs).map(|_| random.signed_unit()).collect(),
            labels: (0..count).map(|_| random.below(classes) as u8).collect(),
        }
    }

    #[test]
    fn the_gradient_is_the_slope_of_the_loss() {
        let mlp = Mlp::new(&[5, 7, 6, 3]);
        let batch = examples(5, 3, 11, 1);
        let mut parameters = mlp.initial(2);
        let mut random = Random::new(3, 0);
        // Biases, too, or a mistake in theirs would not show.
        parameters
            .iter_mut()
            .for_each(|value| *value += 0.1 * random.signed_unit());
        let (mut scratch, mut gradient) = (Scratch::default(), vec![0.0; mlp.parameters()]);
        let mut ignored = gradient.clone();
        mlp.gradient(&parameters, &batch, &mut scratch, &mut gradient);
        let mut checked = 0;
        for at in 0..parameters.len() {
            let step = 1e-2;
            let mut loss = |by: f32| {
                let mut moved = parameters.clone();
                moved[at] += by;
                f64::from(mlp.gradient(&moved, &batch, &mut scratch, &mut ignored))
            };
            let (up, down, here) = (loss(step), loss(-step), loss(0.0));
            // A unit that switches within the step has no slope there.
            if (up + down - 2.0 * here).abs() > 2e-5 {
                continue;
            }
            let slope = (up - down) / f64::from(2.0 * step);
            let error = (slope - f64::from(gradient[at])).abs();
            assert!(
                error < 1e-3,
                "parameter {at}: {} against {slope}",
                gradient[at]
            );
            checked += 1;
        }
        assert!(
            checked * 10 > parameters.len() * 8,
            "{checked} of {}",
            parameters.len()
        );
    }

    #[test]
    fn a_network_that_is_certain_and_right_has_no_loss() {
        let (slopes, loss) = softmax(&[0.0, 200.0, -300.0], 1);
        assert_eq!((slopes.collect::<Vec<_>>(), loss), (vec![0.0; 3], 0.0));
        let (slopes, loss) = softmax(&[0.0, 200.0], 0);
        assert_eq!((slopes.collect::<Vec<_>>(), loss), (vec![-1.0, 1.0], 200.0));
    }

    #[test]
    fn what_is_right_is_counted_and_ties_go_to_the_first_class() {
        let mlp = Mlp::new(&[2, 2]);
        // The identity.
        let parameters = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0];
        let batch = Examples {
            features: vec![2.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0],
            labels: vec![0, 0, 0, 1],
        };
        assert_eq!(mlp.right(&parameters, &batch, &mut Scratch::default()), 2);
    }
}
