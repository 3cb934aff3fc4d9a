//! [`SimServer`], and the faults that its [`SimConfig`] orders.
//!
//! The rule it keeps: a server that was killed stays dead, for all of its sessions.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use farpage_wire::{ExtentId, SessionId};
use parking_lot::Mutex;

use super::host::SimHost;
use crate::{ConnectError, attachment::Death, host::Host};

/// Faults and limits of a simulated server.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// The seed of the random numbers.
    pub seed: u64,
    /// The most bytes that the server grants.
    pub capacity_bytes: u64,
    /// Upper bound of the steps that an operation takes; each takes a random number from 1.
    pub delay_steps: u64,
    /// True if completions come in the order of their delays rather than of their operations.
    pub reorder: bool,
    /// One operation in `lose_one_in` is lost and ends in `TimedOut` after
    /// [`timeout_steps`](Self::timeout_steps).
    pub lose_one_in: Option<u64>,
    /// One READ in `damage_one_in` brings a wrong byte. The server has the right one.
    pub damage_one_in: Option<u64>,
    /// The operation deadline.
    pub timeout_steps: u64,
    /// Number of the operation at which the server dies, counted over all channels.
    pub die_at_op: Option<u64>,
    /// Payload bytes that a channel moves per step. `None`: unlimited.
    pub bytes_per_step: Option<u64>,
    /// Upper bound of operations in flight per channel.
    pub queue_depth: usize,
}

impl SimConfig {
    /// Returns delays of up to 8 steps with reordering, no loss, damage or death, no rate, queues
    /// of 64 operations, and 1 GiB.
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            capacity_bytes: 1 << 30,
            delay_steps: 8,
            reorder: true,
            lose_one_in: None,
            damage_one_in: None,
            timeout_steps: 100,
            die_at_op: None,
            bytes_per_step: None,
            queue_depth: 64,
        }
    }
}

/// A simulated server that any number of sessions can use.
pub struct SimServer {
    pub(super) config: SimConfig,
    pub(super) host: Arc<dyn Host>,
    pub(super) death: Arc<Death>,
    /// Number of the operation at which the server dies.
    pub(super) dies_at: AtomicU64,
    /// True while clients cannot reach the server.
    cut: AtomicBool,
    pub(super) ops: AtomicU64,
    pub(super) channels: AtomicU64,
    pub(super) lose_answer: AtomicBool,
    /// WRITEs that seemed lost and may still land.
    pub(super) late: Mutex<Vec<Late>>,
}

impl fmt::Debug for SimServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimServer({})", self.config.seed)
    }
}

/// A WRITE of a channel that is dead, on its way to the server.
#[derive(Debug)]
pub(super) struct Late {
    pub(super) session: SessionId,
    pub(super) line: u64,
    pub(super) extent: ExtentId,
    pub(super) offset: u64,
    pub(super) bytes: Vec<u8>,
}

impl SimServer {
    /// Makes a server with nothing granted.
    pub fn new(config: SimConfig) -> Arc<Self> {
        let host = Arc::new(SimHost::new(config.capacity_bytes));
        Self::with_host(config, host)
    }

    /// Makes a server that lends the memory of `host`. The capacity of `config` does not apply.
    pub fn with_host(config: SimConfig, host: Arc<dyn Host>) -> Arc<Self> {
        Arc::new(Self {
            host,
            dies_at: AtomicU64::new(config.die_at_op.unwrap_or(u64::MAX)),
            config,
            death: Arc::default(),
            cut: AtomicBool::new(false),
            ops: AtomicU64::new(0),
            channels: AtomicU64::new(0),
            lose_answer: AtomicBool::new(false),
            late: Mutex::default(),
        })
    }

    /// Kills the server: all operations in flight end with an error at the next poll.
    pub fn kill(&self) {
        self.death.declare("the simulated server was killed");
    }

    /// Kills the server at the `ops`-th operation from now on, counted over all channels.
    pub fn kill_after(&self, ops: u64) {
        self.dies_at
            .store(self.operations() + ops, Ordering::Relaxed);
    }

    /// Cuts the server off: channels end at their next poll, and no other opens until
    /// [`heal`](Self::heal). Sessions go on.
    pub fn cut(&self) {
        self.cut.store(true, Ordering::Relaxed);
    }

    /// Ends a [`cut`](Self::cut): channels can be opened again.
    pub fn heal(&self) {
        self.cut.store(false, Ordering::Relaxed);
    }

    /// Returns the reason why nothing reaches the server.
    pub(super) fn silence(&self) -> Option<String> {
        let cut = || self.cut.load(Ordering::Relaxed);
        let why = || "the simulated server was cut off".to_owned();
        self.death.reason().or_else(|| cut().then(why))
    }

    /// Loses the answer to the next publication, which takes place all the same.
    pub fn lose_next_publish_answer(&self) {
        self.lose_answer.store(true, Ordering::Relaxed);
    }

    /// Returns the number of operations posted so far, over all channels.
    pub fn operations(&self) -> u64 {
        self.ops.load(Ordering::Relaxed)
    }

    /// Places the bytes of a WRITE that seemed lost.
    pub(super) fn land(&self, late: &Late) {
        if let Some(lease) = self.host.extent(late.session, late.extent) {
            // A WRITE outside of a lease is refused without a notice.
            let _ = lease.copy_in(late.offset, &late.bytes);
        }
    }

    /// Returns the seed of the server's random numbers, which is also its endpoint.
    pub(crate) fn seed(&self) -> u64 {
        self.config.seed
    }

    pub(super) fn endpoint(&self) -> String {
        format!("sim:{}", self.config.seed)
    }

    pub(crate) fn alive(&self) -> Result<(), ConnectError> {
        match self.silence() {
            None => Ok(()),
            Some(reason) => {
                let source = std::io::Error::new(std::io::ErrorKind::ConnectionRefused, reason);
                Err(ConnectError::Unreachable {
                    endpoint: self.endpoint(),
                    source,
                })
            }
        }
    }
}

/// A random number generator, SplitMix64: small, and the same on every machine for ever.
#[derive(Debug)]
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (bits ^ (bits >> 31)) % limit.max(1)
    }
}
