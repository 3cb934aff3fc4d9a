//! [`Optimizer`]: how a gradient changes parameters.
//!
//! The rule it keeps: each parameter changes by itself, in plain `f32` arithmetic, so that a vector
//! cut into shards changes exactly as a whole one does. The state is local to a worker.

/// Rule of an optimizer, with its constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// Stochastic gradient descent with momentum; plain with a momentum of 0.
    Sgd {
        /// Share of a gradient that is applied.
        rate: f32,
        /// Share of the last change that is applied again.
        momentum: f32,
    },
    /// Kingma and Ba, "Adam: a method for stochastic optimization", with the constants given there.
    Adam {
        /// Share of a normalised gradient that is applied.
        rate: f32,
    },
}

/// A rule and its state.
#[derive(Clone, Debug)]
pub struct Optimizer {
    rule: Rule,
    /// The velocity, or the mean of gradients.
    first: Vec<f32>,
    /// The mean of squared gradients; Adam only.
    second: Vec<f32>,
    decay: Decay,
}

const DECAYS: (f32, f32) = (0.9, 0.999);
const EPSILON: f32 = 1e-8;

impl Rule {
    /// Returns the number of floats that are remembered of each parameter.
    pub(crate) fn remembers(self) -> usize {
        match self {
            Self::Sgd { .. } => 1,
            Self::Adam { .. } => 2,
        }
    }
}

/// Adam's decays to the power of the steps so far.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Decay(pub(crate) f64, pub(crate) f64);

impl Default for Decay {
    fn default() -> Self {
        Self(1.0, 1.0)
    }
}

impl Decay {
    /// Advances by one step. Returns the step's change of each parameter.
    pub(crate) fn next(&mut self, rule: Rule) -> Change {
        if let Rule::Adam { .. } = rule {
            let (a, b) = DECAYS;
            // Powers by multiplication: a library's would differ between machines.
            self.0 *= f64::from(a);
            self.1 *= f64::from(b);
        }
        Change { rule, decay: *self }
    }
}

/// One step of a rule, for any part of the parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Change {
    rule: Rule,
    decay: Decay,
}

impl Change {
    /// Changes `parameters`, and what is remembered of them: `first` of each, and `second` for
    /// Adam.
    ///
    /// # Panics
    /// If the lengths differ from one another.
    pub(crate) fn apply(
        self,
        parameters: &mut [f32],
        first: &mut [f32],
        second: &mut [f32],
        gradient: &[f32],
    ) {
        let count = parameters.len();
        assert_eq!([first.len(), gradient.len()], [count; 2], "lengths");
        match self.rule {
            Rule::Sgd { rate, momentum } => {
                let state = first.iter_mut().zip(gradient);
                for (parameter, (velocity, slope)) in parameters.iter_mut().zip(state) {
                    *velocity = momentum * *velocity + slope;
                    *parameter -= rate * *velocity;
                }
            }
            Rule::Adam { rate } => {
                assert_eq!(second.len(), count, "what Adam remembers");
                let (a, b) = DECAYS;
                let whole = (1.0 / (1.0 - self.decay.0)) as f32;
                let whole_square = (1.0 / (1.0 - self.decay.1)) as f32;
                let state = first.iter_mut().zip(second).zip(gradient);
                for (parameter, ((mean, square), slope)) in parameters.iter_mut().zip(state) {
                    *mean = a * *mean + (1.0 - a) * slope;
                    *square = b * *square + (1.0 - b) * (slope * slope);
                    let spread = (*square * whole_square).sqrt() + EPSILON;
                    *parameter -= rate * (*mean * whole) / spread;
                }
            }
        }
    }
}

impl Optimizer {
    /// Makes an optimizer for `parameters` parameters.
    pub fn new(rule: Rule, parameters: usize) -> Self {
        Self {
            rule,
            first: vec![0.0; parameters],
            second: vec![0.0; (rule.remembers() - 1) * parameters],
            decay: Decay::default(),
        }
    }

    /// Returns the state after the steps so far.
    pub(crate) fn state(&self) -> (&[f32], &[f32], Decay) {
        (&self.first, &self.second, self.decay)
    }

    pub(crate) fn with_state(rule: Rule, first: Vec<f32>, second: Vec<f32>, decay: Decay) -> Self {
        Self {
            rule,
            first,
            second,
            decay,
        }
    }

    /// Changes `parameters` by one step.
    ///
    /// # Panics
    /// If the lengths differ from one another, or from that which the optimizer was made for.
    pub fn step(&mut self, parameters: &mut [f32], gradient: &[f32]) {
        let change = self.decay.next(self.rule);
        change.apply(parameters, &mut self.first, &mut self.second, gradient);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn momentum_repeats_a_share_of_the_last_change() {
        let rule = Rule::Sgd {
            rate: 0.5,
            momentum: 0.25,
        };
        let (mut optimizer, mut parameters) = (Optimizer::new(rule, 2), [8.0, 0.0]);
        optimizer.step(&mut parameters, &[4.0, 0.0]);
        assert_eq!(parameters, [6.0, 0.0]);
        optimizer.step(&mut parameters, &[0.0, 1.0]);
        // A quarter of 4, and half of that.
        assert_eq!(parameters, [5.5, -0.5]);
    }

    #[test]
    fn the_first_step_of_adam_is_its_rate_whatever_the_gradient_is() {
        let (mut optimizer, mut parameters) =
            (Optimizer::new(Rule::Adam { rate: 0.01 }, 3), [0.0; 3]);
        optimizer.step(&mut parameters, &[3.0, -1e-3, 1e4]);
        for (parameter, expected) in parameters.iter().zip([-0.01, 0.01, -0.01]) {
            assert!((parameter - expected).abs() < 1e-6, "{parameters:?}");
        }
    }

    #[test]
    fn every_rule_finds_the_bottom_of_a_bowl() {
        for rule in [
            Rule::Sgd {
                rate: 0.1,
                momentum: 0.0,
            },
            Rule::Sgd {
                rate: 0.05,
                momentum: 0.9,
            },
            Rule::Adam { rate: 0.05 },
        ] {
            let (mut optimizer, mut at) = (Optimizer::new(rule, 2), [1.0, -2.0]);
            for _ in 0..500 {
                let slope = [at[0] - 0.5, 3.0 * (at[1] + 0.25)];
                optimizer.step(&mut at, &slope);
            }
            assert!(
                (at[0] - 0.5).abs() + (at[1] + 0.25).abs() < 1e-2,
                "{rule:?}: {at:?}"
            );
        }
    }

    #[test]
    fn shards_change_as_the_whole_does() {
        let rule = Rule::Adam { rate: 0.1 };
        let mut whole = (Optimizer::new(rule, 5), [1.0, 2.0, 3.0, 4.0, 5.0]);
        let mut low = (Optimizer::new(rule, 2), [1.0, 2.0]);
        let mut high = (Optimizer::new(rule, 3), [3.0, 4.0, 5.0]);
        for step in 1..20u8 {
            let slopes = [1.0, -2.0, 0.3, 0.0, 1e-6].map(|slope| slope / f32::from(step));
            whole.0.step(&mut whole.1, &slopes);
            low.0.step(&mut low.1, &slopes[..2]);
            high.0.step(&mut high.1, &slopes[2..]);
        }
        assert_eq!(whole.1[..], [&low.1[..], &high.1[..]].concat());
    }
}
