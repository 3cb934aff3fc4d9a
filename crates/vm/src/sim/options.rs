//! [`SimOptions`]: size of a simulated space, and probabilities of the injected faults.

/// Options of a [`SimSpace`](super::SimSpace).
#[derive(Clone, Debug)]
pub struct SimOptions {
    /// Number of shards. Default: 1.
    pub shards: usize,
    /// Seed of the injected faults. Default: 0.
    pub seed: u64,
    /// Probability that [`detach`](crate::AddressSpace::detach) meets a page that is
    /// [busy](crate::DetachError::Busy), 0 to 1. Default: 0.
    pub busy_probability: f64,
    /// Probability that a fault is reported a second time, later, 0 to 1. Default: 0.
    pub duplicate_probability: f64,
    /// True if pages of all regions leave by copying, too
    /// ([`copies_out`](crate::RegionMapping::copies_out)), and not only of regions whose program
    /// promises that no device writes there. Default: true.
    pub copies_out: bool,
    /// Upper bound of the pages of a [`new_frame`](crate::AddressSpace::new_frame): for more there
    /// is no room. Default: any number finds room.
    pub frame_pages_max: usize,
}

impl Default for SimOptions {
    fn default() -> Self {
        Self {
            shards: 1,
            seed: 0,
            busy_probability: 0.0,
            duplicate_probability: 0.0,
            copies_out: true,
            frame_pages_max: usize::MAX,
        }
    }
}
