//! [`Model`]: what a job trains.
//!
//! The rule it keeps: the same parameters and examples give the same bits on every processor. Sums
//! have a fixed order, and nothing looks at what the processor can do. Parameters are one flat
//! vector that belongs to the caller, who exchanges it; layers are ranges of it.
//!
//! The vector ends with the model's *running statistics*, where it has some. They are no part of
//! what the loss is minimised over, and all else treats them as parameters: they are exchanged,
//! averaged, kept and hashed with the others. Their place in a gradient has how far they are from
//! the batch's, so that a mean over workers is that of all workers' batches.

use crate::{
    cnn::{self, Cnn},
    data::Examples,
    mlp::{self, Mlp},
    random::Random,
};

/// Examples that are judged at once: their values fit into the cache.
const JUDGED: usize = 50;

/// A network with its gradient.
#[derive(Clone, Debug)]
pub enum Model {
    /// Fully connected layers.
    Mlp(Mlp),
    /// Convolutions, and a fully connected layer.
    Cnn(Cnn),
}

/// Memory for one thread's passes, kept from one to the next.
#[derive(Debug, Default)]
pub struct Scratch {
    mlp: mlp::Scratch,
    cnn: cnn::Scratch,
}

impl From<Mlp> for Model {
    fn from(mlp: Mlp) -> Self {
        Self::Mlp(mlp)
    }
}

impl From<Cnn> for Model {
    fn from(cnn: Cnn) -> Self {
        Self::Cnn(cnn)
    }
}

impl Model {
    /// How many parameters it has, running statistics included.
    pub fn parameters(&self) -> usize {
        match self {
            Self::Mlp(mlp) => mlp.parameters(),
            Self::Cnn(cnn) => cnn.parameters(),
        }
    }

    /// How many of them, at the end, are running statistics.
    pub fn statistics(&self) -> usize {
        match self {
            Self::Mlp(_) => 0,
            Self::Cnn(cnn) => cnn.statistics(),
        }
    }

    fn inputs(&self) -> usize {
        match self {
            Self::Mlp(mlp) => mlp.inputs(),
            Self::Cnn(cnn) => cnn.inputs(),
        }
    }

    /// Parameters to begin with.
    pub fn initial(&self, seed: u64) -> Vec<f32> {
        let mut random = Random::new(seed, u64::MAX);
        match self {
            Self::Mlp(mlp) => mlp.initial(&mut random),
            Self::Cnn(cnn) => cnn.initial(&mut random),
        }
    }

    /// The mean loss over `examples`, and its gradient into `gradient`.
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
        self.check(parameters, examples);
        assert!(!examples.labels.is_empty(), "a gradient of no examples");
        assert_eq!(gradient.len(), self.parameters(), "the gradient's length");
        match self {
            Self::Mlp(mlp) => mlp.gradient(parameters, examples, &mut scratch.mlp, gradient),
            Self::Cnn(cnn) => cnn.gradient(parameters, examples, &mut scratch.cnn, gradient),
        }
    }

    /// How many of `examples` the model puts into their class.
    ///
    /// # Panics
    /// If lengths do not fit the model.
    pub fn right(&self, parameters: &[f32], examples: &Examples, scratch: &mut Scratch) -> usize {
        self.check(parameters, examples);
        let width = self.inputs();
        let parts = examples.features.chunks(JUDGED * width);
        let parts = parts.zip(examples.labels.chunks(JUDGED));
        let right = parts.map(|(features, labels)| {
            let part = Examples {
                features: features.to_vec(),
                labels: labels.to_vec(),
            };
            match self {
                Self::Mlp(mlp) => mlp.right(parameters, &part, &mut scratch.mlp),
                Self::Cnn(cnn) => cnn.right(parameters, &part, &mut scratch.cnn),
            }
        });
        right.sum()
    }

    fn check(&self, parameters: &[f32], examples: &Examples) {
        assert_eq!(
            parameters.len(),
            self.parameters(),
            "the parameters' length"
        );
        assert_eq!(
            examples.features.len(),
            examples.labels.len() * self.inputs(),
            "the examples' features"
        );
    }
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

    /// Compares each derivative with the loss's difference when the parameter moves.
    fn check_gradient(model: &Model, batch: &Examples) {
        let mut parameters = model.initial(2);
        let mut random = Random::new(3, 0);
        let learnt = parameters.len() - model.statistics();
        // Biases, too, or a mistake in theirs would not show.
        parameters[..learnt]
            .iter_mut()
            .for_each(|value| *value += 0.1 * random.signed_unit());
        let (mut scratch, mut gradient) = (Scratch::default(), vec![0.0; parameters.len()]);
        let mut ignored = gradient.clone();
        model.gradient(&parameters, batch, &mut scratch, &mut gradient);
        let (mut checked, mut largest) = (0, 0.0_f32);
        for at in 0..learnt {
            let step = 4e-3;
            let mut loss = |by: f32| {
                let mut moved = parameters.clone();
                moved[at] += by;
                f64::from(model.gradient(&moved, batch, &mut scratch, &mut ignored))
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
        assert!(checked * 10 > learnt * 8, "{checked} of {learnt}");
    }

    #[test]
    fn the_gradient_is_the_slope_of_the_loss() {
        let mlp = Mlp::new(&[5, 7, 6, 3]);
        check_gradient(&mlp.into(), &examples(5, 3, 11, 1));
        let cnn = Cnn::new(8, &[3, 4], 3);
        check_gradient(&cnn.into(), &examples(64, 3, 7, 1));
    }
}
