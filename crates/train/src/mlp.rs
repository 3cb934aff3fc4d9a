//! [`Mlp`]: a multilayer perceptron with its gradient.

use crate::{
    data::Examples,
    layers::{self, Dense},
    product::Products,
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
pub(crate) struct Scratch {
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

    pub(crate) fn inputs(&self) -> usize {
        self.widths[0]
    }

    pub(crate) fn parameters(&self) -> usize {
        self.layers().map(|layer| layer.parameters()).sum()
    }

    fn layers(&self) -> impl ExactSizeIterator<Item = Dense> + DoubleEndedIterator {
        self.widths.windows(2).map(|pair| Dense {
            inputs: pair[0],
            outputs: pair[1],
        })
    }

    pub(crate) fn initial(&self, random: &mut Random) -> Vec<f32> {
        let mut parameters = Vec::with_capacity(self.parameters());
        self.layers()
            .for_each(|layer| layer.begin(random, &mut parameters));
        parameters
    }

    pub(crate) fn gradient(
        &self,
        parameters: &[f32],
        examples: &Examples,
        scratch: &mut Scratch,
        gradient: &mut [f32],
    ) -> f32 {
        self.forward(parameters, &examples.features, scratch);
        let Scratch {
            products,
            values,
            slopes,
            slopes_before,
        } = scratch;
        let outputs = values.last().expect("two widths at least");
        let loss = layers::loss(outputs, &examples.labels, slopes);
        let mut end = self.parameters();
        for (number, layer) in self.layers().enumerate().rev() {
            let begin = end - layer.parameters();
            let before = &values[number];
            layer.gradient(products, before, slopes, &mut gradient[begin..end]);
            if number > 0 {
                layer.backward(products, &parameters[begin..end], slopes, slopes_before);
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

    pub(crate) fn right(
        &self,
        parameters: &[f32],
        examples: &Examples,
        scratch: &mut Scratch,
    ) -> usize {
        self.forward(parameters, &examples.features, scratch);
        let outputs = scratch.values.last().expect("two widths at least");
        layers::right(outputs, &examples.labels)
    }

    fn forward(&self, parameters: &[f32], features: &Vec<f32>, scratch: &mut Scratch) {
        let Scratch {
            products, values, ..
        } = scratch;
        values.resize_with(self.widths.len(), Vec::new);
        values[0].clone_from(features);
        let (mut begin, last) = (0, self.widths.len() - 2);
        for (number, layer) in self.layers().enumerate() {
            let end = begin + layer.parameters();
            let (before, after) = values.split_at_mut(number + 1);
            let (before, after) = (&before[number], &mut after[0]);
            layer.forward(products, &parameters[begin..end], before, after);
            if number < last {
                after.iter_mut().for_each(|value| *value = value.max(0.0));
            }
            begin = end;
        }
    }
}
