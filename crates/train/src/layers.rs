//! Parts of a model: [`Dense`], and the loss and the decision at their end.
//!
//! The rule it keeps: all sums are in a fixed order, and exponentials and logarithms are `libm`'s,
//! in software. So the same numbers give the same bits on every processor.

use crate::random::Random;

/// A fully connected layer. Its parameters are the weights, a row for each input, and then the
/// biases.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dense {
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
}

impl Dense {
    pub(crate) fn parameters(&self) -> usize {
        (self.inputs + 1) * self.outputs
    }

    /// Appends initial parameters: uniform weights that keep the variance of sums (He et al.,
    /// "Delving deep into rectifiers"), and biases of zero.
    pub(crate) fn begin(&self, random: &mut Random, parameters: &mut Vec<f32>) {
        let range = (6.0 / self.inputs as f32).sqrt();
        parameters.extend((0..self.inputs * self.outputs).map(|_| range * random.signed_unit()));
        parameters.extend((0..self.outputs).map(|_| 0.0));
    }

    /// Sets `after` to the layer's values for the examples whose values before it are `before`.
    pub(crate) fn forward(&self, parameters: &[f32], before: &[f32], after: &mut Vec<f32>) {
        let (weights, biases) = parameters.split_at(self.inputs * self.outputs);
        after.resize(before.len() / self.inputs * self.outputs, 0.0);
        let left = |example, input| before[example * self.inputs + input];
        multiply(left, weights, self.outputs, after);
        for row in after.chunks_exact_mut(self.outputs) {
            for (value, bias) in row.iter_mut().zip(biases) {
                *value += bias;
            }
        }
    }

    /// Sets `gradient` to the loss's derivatives by the parameters. `slopes` has those by the
    /// values.
    pub(crate) fn gradient(&self, before: &[f32], slopes: &[f32], gradient: &mut [f32]) {
        let (weights, biases) = gradient.split_at_mut(self.inputs * self.outputs);
        let left = |input, example| before[example * self.inputs + input];
        multiply(left, slopes, self.outputs, weights);
        biases.fill(0.0);
        for row in slopes.chunks_exact(self.outputs) {
            for (bias, slope) in biases.iter_mut().zip(row) {
                *bias += slope;
            }
        }
    }

    /// Sets `slopes_before` to the loss's derivatives by the values before the layer. Transposes
    /// the slopes, because transposing the weights of a wide layer takes longer than its product.
    pub(crate) fn backward(
        &self,
        parameters: &[f32],
        slopes: &[f32],
        [transposed, product]: &mut [Vec<f32>; 2],
        slopes_before: &mut Vec<f32>,
    ) {
        let count = slopes.len() / self.outputs;
        transpose(slopes, self.outputs, transposed);
        product.resize(self.inputs * count, 0.0);
        let left = |input, output| parameters[input * self.outputs + output];
        multiply(left, transposed, count, product);
        transpose(product, count, slopes_before);
    }
}

/// Sets `out` to the product of a matrix with the elements `left(i, k)` and of `right`, which has
/// rows of `columns` elements. An element is the sum of its products in ascending order of `k`,
/// each product rounded and then each sum.
fn multiply(left: impl Fn(usize, usize) -> f32, right: &[f32], columns: usize, out: &mut [f32]) {
    out.fill(0.0);
    for (i, sums) in out.chunks_exact_mut(columns).enumerate() {
        for (k, values) in right.chunks_exact(columns).enumerate() {
            let factor = left(i, k);
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum += factor * value;
            }
        }
    }
}

/// Sets `to` to the transpose of `from`, which has rows of `columns` elements.
fn transpose(from: &[f32], columns: usize, to: &mut Vec<f32>) {
    to.clear();
    for column in 0..columns {
        to.extend(from[column..].iter().step_by(columns));
    }
}

/// Returns the mean loss of examples for which a model gives `outputs`. Sets `slopes` to its
/// derivatives by `outputs`.
pub(crate) fn loss(outputs: &[f32], labels: &[u8], slopes: &mut Vec<f32>) -> f32 {
    let mut loss = 0.0;
    slopes.clear();
    for (row, label) in outputs
        .chunks_exact(outputs.len() / labels.len())
        .zip(labels)
    {
        let (chances, row_loss) = softmax(row, usize::from(*label));
        loss += row_loss;
        slopes.extend(chances);
    }
    let share = 1.0 / labels.len() as f32;
    slopes.iter_mut().for_each(|slope| *slope *= share);
    loss * share
}

/// Counts the examples whose label has the largest output. The first of the largest is taken, so
/// that ties are settled in one way.
pub(crate) fn right(outputs: &[f32], labels: &[u8]) -> usize {
    let rows = outputs
        .chunks_exact(outputs.len() / labels.len())
        .zip(labels);
    rows.filter(|(row, label)| {
        let chosen = row[usize::from(**label)];
        (0..).zip(*row).all(|(class, value)| {
            *value < chosen || (*value == chosen && class >= usize::from(**label))
        })
    })
    .count()
}

/// Returns the derivatives of the cross-entropy of softmax by its inputs, and the cross-entropy.
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

    /// Compares each pass with its definition, one element after the other.
    #[test]
    fn products_are_the_plain_ones_bit_for_bit() {
        let sum = |count, product: &dyn Fn(usize) -> f32| {
            (0..count).fold(0.0, |sum: f32, k| sum + product(k))
        };
        let mut random = Random::new(3, 0);
        for (count, inputs, outputs) in
            [(1, 1, 1), (4, 8, 8), (5, 7, 9), (33, 64, 10), (3, 100, 17)]
        {
            let layer = Dense { inputs, outputs };
            let mut draw =
                |count| -> Vec<f32> { (0..count).map(|_| random.signed_unit()).collect() };
            let (parameters, before) = (draw(layer.parameters()), draw(count * inputs));
            let (weights, biases) = parameters.split_at(inputs * outputs);
            let slopes = draw(count * outputs);
            // Memory that was in use before has anything in it.
            let (mut after, mut slopes_before) = (vec![9.0; 2], vec![9.0; 5000]);
            let (mut gradient, mut transposed) = (
                vec![9.0; parameters.len()],
                [vec![9.0; 5000], vec![9.0; 5000]],
            );
            layer.forward(&parameters, &before, &mut after);
            layer.gradient(&before, &slopes, &mut gradient);
            layer.backward(&parameters, &slopes, &mut transposed, &mut slopes_before);
            let all = |rows, columns, element: &dyn Fn(usize, usize) -> f32| -> Vec<f32> {
                let place = |at: usize| element(at / columns, at % columns);
                (0..rows * columns).map(place).collect()
            };
            let forward = all(count, outputs, &|i, j| {
                let product = |k| before[i * inputs + k] * weights[k * outputs + j];
                sum(inputs, &product) + biases[j]
            });
            let by_parameters = all(inputs + 1, outputs, &|i, j| {
                let slope = |k| slopes[k * outputs + j];
                match i == inputs {
                    true => sum(count, &slope),
                    false => sum(count, &|k| before[k * inputs + i] * slope(k)),
                }
            });
            let by_before = all(count, inputs, &|i, j| {
                sum(outputs, &|k| {
                    slopes[i * outputs + k] * weights[j * outputs + k]
                })
            });
            assert_eq!(after, forward, "{count} by {layer:?}");
            assert_eq!(gradient, by_parameters, "{count} by {layer:?}");
            assert_eq!(slopes_before, by_before, "{count} by {layer:?}");
        }
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
        let outputs = [2.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0];
        assert_eq!(right(&outputs, &[0, 0, 0, 1]), 2);
    }
}
