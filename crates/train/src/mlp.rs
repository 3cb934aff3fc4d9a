//! [`Mlp`]: a multilayer perceptron with its gradient.
//!
//! The rule it keeps: the same parameters and examples give the same bits on every processor. Sums
//! have a fixed order, and nothing looks at what the processor can do. Parameters are one flat
//! vector that belongs to the caller, who exchanges it; layers are ranges of it.

use crate::{
    data::Examples,
    layers::{self, Dense},
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
    /// Values of each layer, for every example: first the inputs.
    values: Vec<Vec<f32>>,
    /// The loss's derivatives by a layer's values, and by those of the layer before.
    slopes: Vec<f32>,
    slopes_before: Vec<f32>,
    /// Transposes of `slopes` and `slopes_before`.
    transposed: [Vec<f32>; 2],
}

impl Mlp {
    /// Makes a network of these widths: inputs, hidden layers, classes.
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

    /// Counts the parameters.
    pub fn parameters(&self) -> usize {
        self.layers().map(|layer| layer.parameters()).sum()
    }

    fn layers(&self) -> impl ExactSizeIterator<Item = Dense> + DoubleEndedIterator {
        self.widths.windows(2).map(|pair| Dense {
            inputs: pair[0],
            outputs: pair[1],
        })
    }

    /// Returns the initial parameters.
    pub fn initial(&self, seed: u64) -> Vec<f32> {
        let mut random = Random::new(seed, u64::MAX);
        let mut parameters = Vec::with_capacity(self.parameters());
        self.layers()
            .for_each(|layer| layer.begin(&mut random, &mut parameters));
        parameters
    }

    /// Returns the mean loss over `examples`, and writes its gradient to `gradient`.
    ///
    /// # Panics
    /// If there are no examples, or lengths do not fit the model.
    pub fn gradient(
        &self,
        parameters: &[f32],
        examples: &Examples,
        scratch: &mut Scratch,
        gradient: &mut [f32],
    ) -> f32 {
        assert_eq!(gradient.len(), self.parameters(), "the gradient's length");
        self.forward(parameters, examples, scratch);
        let Scratch {
            values,
            slopes,
            slopes_before,
            transposed,
        } = scratch;
        let outputs = values.last().expect("two widths at least");
        let loss = layers::loss(outputs, &examples.labels, slopes);
        let mut end = self.parameters();
        for (number, layer) in self.layers().enumerate().rev() {
            let begin = end - layer.parameters();
            let before = &values[number];
            layer.gradient(before, slopes, &mut gradient[begin..end]);
            if number > 0 {
                layer.backward(&parameters[begin..end], slopes, transposed, slopes_before);
                for (slope, value) in slopes_before.iter_mut().zip(before) {
                    if *value <= 0.0 {
                        *slope = 0.0;
                    }
                }
                std::mem::swap(slopes, slopes_before);
            }
            end = begin;
        }
        loss
    }

    /// Counts the `examples` that the model puts into their class.
    ///
    /// # Panics
    /// If there are no examples, or lengths do not fit the model.
    pub fn right(&self, parameters: &[f32], examples: &Examples, scratch: &mut Scratch) -> usize {
        self.forward(parameters, examples, scratch);
        let outputs = scratch.values.last().expect("two widths at least");
        layers::right(outputs, &examples.labels)
    }

    /// Sets `scratch.values` to the layers' values for `examples`.
    fn forward(&self, parameters: &[f32], examples: &Examples, scratch: &mut Scratch) {
        let Examples { features, labels } = examples;
        let (expected, count) = (self.parameters(), labels.len());
        assert_eq!(parameters.len(), expected, "the parameters' length");
        assert!(count > 0, "no examples");
        assert_eq!(features.len(), count * self.widths[0], "the features");
        let values = &mut scratch.values;
        values.resize_with(self.widths.len(), Vec::new);
        values[0].clone_from(features);
        let (mut begin, last) = (0, self.widths.len() - 2);
        for (number, layer) in self.layers().enumerate() {
            let end = begin + layer.parameters();
            let (before, after) = values.split_at_mut(number + 1);
            let (before, after) = (&before[number], &mut after[0]);
            layer.forward(&parameters[begin..end], before, after);
            if number < last {
                after.iter_mut().for_each(|value| *value = value.max(0.0));
            }
            begin = end;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares each derivative with the loss's difference when the parameter moves.
    #[test]
    fn the_gradient_is_the_slope_of_the_loss() {
        let (model, mut random) = (Mlp::new(&[5, 7, 6, 3]), Random::new(1, 0));
        let batch = Examples {
            features: (0..11 * 5).map(|_| random.signed_unit()).collect(),
            labels: (0..11).map(|_| random.below(3) as u8).collect(),
        };
        let mut parameters = model.initial(2);
        let mut random = Random::new(3, 0);
        // Biases, too, or a mistake in theirs would not show.
        parameters
            .iter_mut()
            .for_each(|value| *value += 0.1 * random.signed_unit());
        let (mut scratch, mut gradient) = (Scratch::default(), vec![0.0; parameters.len()]);
        let mut ignored = gradient.clone();
        model.gradient(&parameters, &batch, &mut scratch, &mut gradient);
        let (mut checked, mut largest) = (0, 0.0_f32);
        for at in 0..parameters.len() {
            let step = 4e-3;
            let mut loss = |by: f32| {
                let mut moved = parameters.clone();
                moved[at] += by;
                f64::from(model.gradient(&moved, &batch, &mut scratch, &mut ignored))
            };
            let (up, down, here) = (loss(step), loss(-step), loss(0.0));
            // A unit that switches within the step has no slope there.
            if (up + down - 2.0 * here).abs() > 6e-6 {
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
            largest = largest.max(gradient[at].abs());
        }
        assert!(largest > 0.1, "nothing to see: {largest}");
        assert!(
            checked * 10 > parameters.len() * 8,
            "{checked} of {}",
            parameters.len()
        );
    }
}
