//! [`SessionOptions`] and [`RdmaOptions`]: how a session and its channels behave.

use std::{path::PathBuf, sync::Arc, time::Duration};

use crate::Link;

/// Settings of a session.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// The longest that one operation or one control call may take. A connection that owes an
    /// answer and is silent for a quarter of the deadline is taken for dead: its operations end,
    /// and control calls and new channels try another connection.
    pub deadline: Duration,
    /// Slower network that channels behave like. Sessions with the same `Link` share its rate.
    pub link: Option<Arc<Link>>,
    /// Name of this client in the server's log.
    pub client: String,
    /// Path of the user's key file: names belong to keys. The file is read, or made, when a name is
    /// first used. Default: [`Key::default_file`](crate::key::Key::default_file).
    pub key_file: Option<PathBuf>,
    /// Settings of channels over RDMA.
    pub rdma: RdmaOptions,
}

/// Settings of a channel over RDMA. The defaults suit every adapter that we know. Change them to
/// measure their effect, or for an adapter that works better with less.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RdmaOptions {
    /// READs of one channel in flight at a time, limited by what both devices support. At 1, each
    /// READ waits for the one before. (`initiator_depth` of the connection manager, `max_rd_atomic`
    /// of the queue pair.) Default: 255, which means as many as the devices support.
    pub reads_in_flight: u8,
    /// Operations handed to the adapter with one ring of its doorbell, clamped to 1 to 16. Default:
    /// 16.
    pub doorbell: usize,
    /// True if WRITEs of a few bytes travel inside their work requests, so that the adapter need
    /// not read them from memory: up to 220 bytes, or the device's limit. Default: true.
    pub inline: bool,
    /// True if WRITEs that [notify](crate::Channel::post_notifying) carry immediate data, at a
    /// server that hears of them. Default: true.
    pub immediate: bool,
}

impl Default for RdmaOptions {
    fn default() -> Self {
        Self {
            reads_in_flight: u8::MAX,
            doorbell: 16,
            inline: true,
            immediate: true,
        }
    }
}

impl Default for SessionOptions {
    /// Returns a deadline of 10 seconds, no shaping, and the process's id as the client.
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
