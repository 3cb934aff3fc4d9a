//! [`Link`]: makes a fast local fabric behave like a slower network.

/// A full-duplex link that several channels share.
#[derive(Debug)]
pub struct Link {
    _a: (),
}

impl Link {
    /// A link that moves `gbps` gigabits per second in each direction and adds `latency_us` to every operation.
    pub fn new(_gbps: f64, _latency_us: f64) -> Self {
        todo!()
    }
}
