//! What models are made of: [`Dense`], and the loss and the decision at their end.
//!
//! The rule it keeps: all sums are in a fixed order, and exponentials and logarithms are `libm`'s,
//! in software. So the same numbers give the same bits on every processor.

use crate::{
    product::{Left, Products},
    random::Random,
};

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

    /// Appends parameters to begin with; biases are zero.
    pub(crate) fn begin(&self, random: &mut Random, parameters: &mut Vec<f32>) {
        weights(self.inputs, self.inputs * self.outputs, random, parameters);
        parameters.extend((0..self.outputs).map(|_| 0.0));
    }

    /// Sets `after` to the layer's values for the examples whose values before it are `before`.
    pub(crate) fn forward(
        &self,
        products: &mut Products,
        parameters: &[f32],
        before: &[f32],
        after: &mut Vec<f32>,
    ) {
        let (weights, biases) = parameters.split_at(self.inputs * self.outputs);
        after.clear();
        after.resize(before.len() / self.inputs * self.outputs, 0.0);
        let rows = Left {
            data: before,
            row: self.inputs,
            column: 1,
        };
        products.multiply(rows, self.inputs, weights, self.outputs, after);
        for row in after.chunks_exact_mut(self.outputs) {
            for (value, bias) in row.iter_mut().zip(biases) {
                *value += bias;
            }
        }
    }

    /// Sets `gradient` to the loss's derivatives by the parameters, of which `slopes` are those by
    /// the values.
    pub(crate) fn gradient(
        &self,
        products: &mut Products,
        before: &[f32],
        slopes: &[f32],
        gradient: &mut [f32],
    ) {
        let (weights, biases) = gradient.split_at_mut(self.inputs * self.outputs);
        let transposed = Left {
            data: before,
            row: 1,
            column: self.inputs,
        };
        let count = before.len() / self.inputs;
        products.multiply(transposed, count, slopes, self.outputs, weights);
        biases.fill(0.0);
        for row in slopes.chunks_exact(self.outputs) {
            for (bias, slope) in biases.iter_mut().zip(row) {
                *bias += slope;
            }
        }
    }

    /// Sets `slopes_before` to the loss's derivatives by the values before the layer.
    pub(crate) fn backward(
        &self,
        products: &mut Products,
        parameters: &[f32],
        slopes: &[f32],
        slopes_before: &mut Vec<f32>,
    ) {
        slopes_before.clear();
        slopes_before.resize(slopes.len() / self.outputs * self.inputs, 0.0);
        let weights = &parameters[..self.inputs * self.outputs];
        let rows = Left {
            data: slopes,
            row: self.outputs,
            column: 1,
        };
        products.multiply_by_transpose(rows, self.outputs, weights, self.inputs, slopes_before);
    }
}

/// Appends `count` weights that keep the variance of sums of `inputs` values (He et al., "Delving
/// deep into rectifiers"), uniform.
pub(crate) fn weights(inputs: usize, count: usize, random: &mut Random, parameters: &mut Vec<f32>) {
    let range = (6.0 / inputs as f32).sqrt();
    parameters.extend((0..count).map(|_| range * random.signed_unit()));
}

/// The mean loss of examples for which a model gives `outputs`; sets `slopes` to its derivatives by
/// them.
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

/// Of how many examples the label has the largest output. The first of the largest is taken, so
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
