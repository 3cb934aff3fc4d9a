//! [`Bound`]: a target for a ratio.

/// A bound for a ratio.
#[derive(Clone, Copy)]
pub(crate) enum Bound {
    AtLeast(f64),
    AtMost(f64),
    Above(f64),
    Below(f64),
}

impl Bound {
    pub(crate) fn is_met(self, ratio: f64) -> bool {
        match self {
            Self::AtLeast(least) => ratio >= least,
            Self::AtMost(most) => ratio <= most,
            Self::Above(least) => ratio > least,
            Self::Below(most) => ratio < most,
        }
    }

    pub(crate) fn text(self) -> String {
        match self {
            Self::AtLeast(least) => format!("at least {least}"),
            Self::AtMost(most) => format!("at most {most}"),
            Self::Above(least) => format!("above {least}"),
            Self::Below(most) => format!("below {most}"),
        }
    }
}
