//! [`Copier`]: bytes on their way from one copy of an extent to another.
//!
//! The rule it keeps: bytes are copied no faster than asked for, and by channels of their own, so
//! that I/O queues wait for nothing. The choice of the copies is left to the
//! [repairs](crate::repair).

use std::{
    thread,
    time::{Duration, Instant},
};

use farpage_fabric::{
    Channel, ChannelError, ConnectError, ExtentId, Op, Verb,
    regmem::{RegBuf, RegPool},
};

use crate::{Cluster, groups::Member, health::ServerHealth, pool::SlotPool, transfer::transfer};

/// Bytes that are copied at a time: as many as a run of pages has.
const PIECE_BYTES: u64 = 512 << 10;

/// Copies bytes from one server to another through channels of its own, at a bounded rate.
pub(crate) struct Copier<'a> {
    registered: &'a RegPool,
    health: &'a ServerHealth,
    /// Ports of the source's server and of the copy's.
    ports: [usize; 2],
    from: Box<dyn Channel<RegBuf>>,
    to: Box<dyn Channel<RegBuf>>,
    /// Upper bound of the bytes per second.
    rate: Option<u64>,
    began: Instant,
    copied_bytes: u64,
}

impl<'a> Copier<'a> {
    /// Opens channels to the server of a source and to that of the copy.
    ///
    /// # Errors
    /// The reason why a server cannot be reached.
    pub(crate) fn new(
        cluster: &'a Cluster,
        pool: &'a SlotPool,
        source: Member,
        server: u8,
    ) -> Result<Self, String> {
        let open = |server: u8| {
            let port = pool.port(server);
            let channel = cluster.sessions()[port].channel();
            channel.map_err(|error: ConnectError| {
                cluster.health.failed(port);
                error.to_string()
            })
        };
        Ok(Self {
            registered: &pool.registered,
            health: &cluster.health,
            ports: [source.server, server].map(|server| pool.port(server)),
            from: open(source.server)?,
            to: open(server)?,
            rate: cluster.repair_rate,
            began: Instant::now(),
            copied_bytes: 0,
        })
    }

    /// Copies the pieces of an extent, each given by its start and length.
    ///
    /// # Errors
    /// The error of a server.
    pub(crate) fn copy_all(
        &mut self,
        source: Member,
        target: (u8, ExtentId),
        pieces: &[(u64, u64)],
    ) -> Result<(), String> {
        for &(mut offset, mut left) in pieces {
            while left > 0 {
                let len = left.min(PIECE_BYTES);
                self.copy(source, target, offset, len as u32)?;
                (offset, left) = (offset + len, left - len);
            }
        }
        Ok(())
    }

    fn copy(
        &mut self,
        source: Member,
        (_, id): (u8, ExtentId),
        offset: u64,
        len: u32,
    ) -> Result<(), String> {
        let buf = self.registered.acquire(len as usize);
        let buf = buf.map_err(|error| error.to_string())?;
        let op = |verb, extent, buf| Op {
            tag: 0,
            verb,
            extent,
            offset,
            len,
            buf,
        };
        let (health, [from, to]) = (self.health, self.ports);
        let failed = |port| {
            move |error: ChannelError| {
                if error.is_transient() {
                    health.failed(port);
                }
                error.to_string()
            }
        };
        let read = op(Verb::Read, source.id, buf);
        let buf = transfer(&mut *self.from, read).map_err(failed(from))?;
        transfer(&mut *self.to, op(Verb::Write, id, buf)).map_err(failed(to))?;
        self.copied_bytes += u64::from(len);
        if let Some(rate) = self.rate {
            let due = Duration::from_secs_f64(self.copied_bytes as f64 / rate as f64);
            thread::sleep(due.saturating_sub(self.began.elapsed()));
        }
        Ok(())
    }
}
