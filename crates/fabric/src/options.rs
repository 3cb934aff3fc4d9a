//! [`SessionOptions`] and [`RdmaOptions`]: how a session and its channels behave.

use std::{path::PathBuf, sync::Arc, time::Duration};

use crate::Link;

/// How a session behaves.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// The longest that one operation or one control call may take. A connection that is silent for
    /// a quarter of it while an answer is expected is taken for dead: its operations end, and
    /// control calls and new channels try another one.
    pub deadline: Duration,
    /// Makes channels behave like a slower network; shared by all sessions that are to share the
    /// link.
    pub link: Option<Arc<Link>>,
    /// Who we are, for the server's log.
    pub client: String,
    /// The user's key file: names belong to keys. Read, or made, when a name is first used.
    /// Default: [`Key::default_file`](crate::key::Key::default_file).
    pub key_file: Option<PathBuf>,
    /// For channels over RDMA.
    pub rdma: RdmaOptions,
}

/// How a channel uses an RDMA adapter. The defaults are right for all that we know of: this is here
/// to measure what they bring, and for adapters that would rather have less.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RdmaOptions {
    /// READs of one channel that may be on their way at a time, as far as both devices can; at 1
    /// each waits for the one before. (`initiator_depth` of the connection manager, `max_rd_atomic`
    /// of the queue pair.) Default: 255, which is what the devices can.
    pub reads_in_flight: u8,
    /// Operations that are handed to the adapter with one ring of its doorbell; what is beyond 1 to
    /// 16 counts as these. Default: 16.
    pub doorbell: usize,
}

impl Default for RdmaOptions {
    fn default() -> Self {
        Self {
            reads_in_flight: u8::MAX,
            doorbell: 16,
        }
    }
}

impl Default for SessionOptions {
    /// A deadline of 10 seconds, no shaping, the process's id as the client.
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(10),
            link: None,
            client: format!("pid {}", std::process::id()),
            key_file: None,
            rdma: RdmaOptions::default(),
        }
    }
}
