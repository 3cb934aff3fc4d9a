//! [`SimChannel`]: delays, reorders, loses and damages operations.
//!
//! The rule it keeps: what happens depends on the seed and the calls alone.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use farpage_wire::SessionId;

use super::server::{Late, Random, SimServer};
use crate::{
    Buf, Busy, Channel, ChannelError, Completion, Op, PollInterest, Verb,
    attachment::KeepAlive,
    channel::{check_len, refused},
    memory::ExtentMemory,
};

/// Channel of a session at a simulated server.
pub(super) struct SimChannel<B> {
    server: Arc<SimServer>,
    session: SessionId,
    line: u64,
    random: Random,
    step: u64,
    link_free_at: u64,
    /// Operations in flight, in the order of posting.
    flying: Vec<Flying<B>>,
    dead: Option<ChannelError>,
    _session: KeepAlive,
}

/// An operation in flight.
struct Flying<B> {
    op: Op<B>,
    due_step: u64,
    /// True if the operation is lost: it ends in `TimedOut` when due.
    lost: bool,
}

impl<B> SimChannel<B> {
    /// Makes the channel of a line. WRITEs of the line's earlier channels land now or never.
    pub(super) fn new(
        server: &Arc<SimServer>,
        id: SessionId,
        line: u64,
        session: KeepAlive,
    ) -> Self {
        let number = server.channels.fetch_add(1, Ordering::Relaxed);
        let mut random = Random(server.config.seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        server.late.lock().retain(|late| {
            let mine = (late.session, late.line) == (id, line);
            if mine && random.below(2) == 0 {
                server.land(late);
            }
            !mine
        });
        Self {
            server: Arc::clone(server),
            session: id,
            line,
            random,
            step: 0,
            link_free_at: 0,
            flying: Vec::new(),
            dead: None,
            _session: session,
        }
    }
}

impl<B: Buf> Channel<B> for SimChannel<B> {
    fn post(&mut self, op: Op<B>) -> Result<(), Busy<B>> {
        let config = &self.server.config;
        if self.flying.len() >= config.queue_depth {
            return Err(Busy(op));
        }
        check_len(&op);
        let number = self.server.ops.fetch_add(1, Ordering::Relaxed) + 1;
        if number == self.server.dies_at.load(Ordering::Relaxed) {
            self.server.kill();
        }
        let mut due_step = self.step + 1 + self.random.below(config.delay_steps);
        if let Some(rate) = config.bytes_per_step {
            self.link_free_at = self.link_free_at.max(self.step) + u64::from(op.len).div_ceil(rate);
            due_step += self.link_free_at - self.step;
        }
        if !config.reorder {
            due_step = due_step.max(self.flying.last().map_or(0, |last| last.due_step));
        }
        let lost = config
            .lose_one_in
            .is_some_and(|n| self.random.below(n) == 0);
        if lost {
            due_step = self.step + config.timeout_steps;
        }
        self.flying.push(Flying { op, due_step, lost });
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Completion<B>>) -> usize {
        let before = done.len();
        self.step += 1;
        if let Some(reason) = self.server.silence() {
            let endpoint = self.server.endpoint();
            self.dead
                .get_or_insert(ChannelError::Disconnected { endpoint, reason });
        }
        // 0. WRITEs that other channels gave up may land now.
        let mut late = self.server.late.lock();
        if !late.is_empty() && self.random.below(4) == 0 {
            let landed = self.random.below(late.len() as u64) as usize;
            self.server.land(&late.remove(landed));
        }
        drop(late);
        // 1. Operations that are due, in the order in which they are due.
        while self.dead.is_none() {
            let due =
                |flying: &Flying<B>| (flying.due_step <= self.step).then_some(flying.due_step);
            let next = self
                .flying
                .iter()
                .enumerate()
                .filter_map(|(i, flying)| Some((due(flying)?, i)))
                .min();
            let Some((_, i)) = next else { break };
            let mut flying = self.flying.remove(i);
            let result = if flying.lost {
                self.lose(&mut flying.op);
                let deadline = Duration::from_millis(self.server.config.timeout_steps);
                let error = ChannelError::TimedOut {
                    endpoint: self.server.endpoint(),
                    deadline,
                };
                self.dead = Some(error.clone());
                Err(error)
            } else {
                let result = self.carry_out(&mut flying.op);
                self.damage(&mut flying.op);
                result
            };
            done.push(flying.op.complete(result));
        }
        // 2. The rest of a dead channel. Some of it had reached the server.
        if let Some(error) = self.dead.clone() {
            for mut flying in std::mem::take(&mut self.flying) {
                self.lose(&mut flying.op);
                done.push(flying.op.complete(Err(error.clone())));
            }
        }
        done.len() - before
    }

    fn in_flight(&self) -> usize {
        self.flying.len()
    }

    fn wait(&self) -> PollInterest<'_> {
        // A step passes with every poll, so there is nothing to sleep for.
        PollInterest {
            until: (!self.flying.is_empty()).then(Instant::now),
            ..PollInterest::default()
        }
    }
}

impl<B: Buf> SimChannel<B> {
    /// Decides the fate of an operation of a dead channel: it takes place unnoticed, it may take
    /// place later if it is a WRITE, or it never does.
    fn lose(&mut self, op: &mut Op<B>) {
        match (self.random.below(3), op.verb) {
            (0, _) => {
                let _ = self.carry_out(op);
            }
            (1, Verb::Write) => self.server.late.lock().push(Late {
                session: self.session,
                line: self.line,
                extent: op.extent,
                offset: op.offset,
                bytes: op.buf.as_ref()[..op.len as usize].to_vec(),
            }),
            _ => {}
        }
    }

    /// Changes one byte of a READ's buffer, if the configuration wants it.
    fn damage(&mut self, op: &mut Op<B>) {
        let Some(one_in) = self.server.config.damage_one_in else {
            return;
        };
        if op.verb == Verb::Read && self.random.below(one_in) == 0 {
            let at = self.random.below(u64::from(op.len)) as usize;
            op.buf.as_mut()[at] ^= 1;
        }
    }

    fn carry_out(&self, op: &mut Op<B>) -> Result<(), ChannelError> {
        let lease = self.server.host.extent(self.session, op.extent);
        let bytes = op.len as usize;
        let takes = |lease: &Arc<ExtentMemory>| op.verb == Verb::Read || !lease.is_read_only();
        let moved = lease.filter(takes).map(|lease| match op.verb {
            Verb::Read => lease.copy_out(op.offset, &mut op.buf.as_mut()[..bytes]),
            Verb::Write => lease.copy_in(op.offset, &op.buf.as_ref()[..bytes]),
            Verb::Atomic(atomic) => lease.atomic(op.offset, atomic).map(|old| {
                op.buf.as_mut()[..bytes].copy_from_slice(&old.to_le_bytes());
            }),
        });
        match moved {
            Some(Ok(())) => Ok(()),
            _ => Err(refused(&self.server.endpoint(), op)),
        }
    }
}
