//! The patterns: rings against a plain queue over a fabric that places bytes as late and as torn as
//! it likes, rings and engines over the real fabrics, and the other senders when one dies or lies.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests, which fail by panicking"
)]

mod model;
mod rings;
mod waiting;

use std::{
    collections::VecDeque,
    io,
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use farpage_fabric::{
    Busy, Channel, ChannelError, Completion, Endpoint, ExtentId, Op, PollInterest, Session,
    SessionOptions, Verb,
    memory::ExtentMemory,
    patterns::{
        CompletionEngine, Notifier, RingInbox, RingMemory, RingPlace, RingReceiver, RingSender,
        SendError, Source, WaitMode, Waiter,
    },
    regmem::{RegBuf, RegPool, RegPoolOptions},
    server::ServerThread,
    sim::{SimConfig, SimHost, SimServer},
};
use farpage_testkit::{op, tcp};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use proptest::prelude::*;

const EXTENT: ExtentId = ExtentId(1);

const PATIENCE: Duration = Duration::from_secs(30);

fn pool() -> RegPool {
    RegPool::new([], RegPoolOptions::default())
}

/// A fabric that places a few bytes at a time, of operations in any order unless `in_order`.
struct Scrambled {
    memory: Arc<ExtentMemory>,
    random: u64,
    /// Operations in flight, each with the number of bytes that were moved.
    flying: VecDeque<(Op<RegBuf>, usize)>,
    in_order: bool,
    claims_order: bool,
}

impl Scrambled {
    fn below(&mut self, end: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 16) as usize % end
    }
}

impl Channel<RegBuf> for Scrambled {
    fn post(&mut self, op: Op<RegBuf>) -> Result<(), Busy<RegBuf>> {
        if self.flying.len() == 5 {
            return Err(Busy(op));
        }
        self.flying.push_back((op, 0));
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Completion<RegBuf>>) -> usize {
        if self.flying.is_empty() || self.below(3) == 0 {
            return 0;
        }
        let at = if self.in_order {
            0
        } else {
            self.below(self.flying.len())
        };
        let step = [1, 3, 8, 1000][self.below(4)];
        let (op, moved) = &mut self.flying[at];
        let (begin, end) = (*moved, (op.len as usize).min(*moved + step));
        let offset = op.offset + begin as u64;
        match op.verb {
            Verb::Write => self.memory.copy_in(offset, &op.buf.as_ref()[begin..end]),
            Verb::Read => self
                .memory
                .copy_out(offset, &mut op.buf.as_mut()[begin..end]),
            Verb::Atomic(_) => unreachable!("rings have no atomics"),
        }
        .unwrap();
        *moved = end;
        if end < op.len as usize {
            return 0;
        }
        let (op, _) = self.flying.remove(at).unwrap();
        done.push(Completion {
            tag: op.tag,
            verb: op.verb,
            buf: op.buf,
            result: Ok(()),
        });
        1
    }

    fn writes_in_order(&self) -> bool {
        self.claims_order
    }

    fn in_flight(&self) -> usize {
        self.flying.len()
    }

    fn wait(&self) -> PollInterest<'_> {
        PollInterest::default()
    }
}

fn ring(
    capacity: usize,
    seed: u64,
    in_order: bool,
    claims_order: bool,
) -> (RingSender, RingReceiver) {
    let place = RingPlace {
        extent: EXTENT,
        offset: 64,
        capacity,
    };
    let memory = ExtentMemory::create(EXTENT, 64 + place.bytes() as u64, false).unwrap();
    let receiver = RingReceiver::new(RingMemory::extent(&memory).unwrap(), place);
    let channel = Scrambled {
        memory,
        random: seed | 1,
        flying: VecDeque::new(),
        in_order,
        claims_order,
    };
    (RingSender::new(Box::new(channel), &pool(), place), receiver)
}

/// A server with the memory that it lends in reach.
struct Server {
    serving: ServerThread,
    host: Arc<SimHost>,
    is_stopped: bool,
}

impl Server {
    fn start(endpoint: &Endpoint) -> Self {
        let host = Arc::new(SimHost::new(64 << 20));
        let serving = ServerThread::start(endpoint, Arc::clone(&host) as _).unwrap();
        let is_stopped = false;
        Self {
            serving,
            host,
            is_stopped,
        }
    }

    fn stop(&mut self) {
        self.is_stopped = true;
        self.serving.end().unwrap();
    }

    /// Makes a new client with a ring of its own.
    fn ring(&self, capacity: usize) -> (RingSender, RingReceiver) {
        let session =
            Session::connect(self.serving.endpoint(), &SessionOptions::default()).unwrap();
        let extent = session.grant(1 << 20).unwrap().id;
        let place = RingPlace {
            extent,
            offset: 0,
            capacity,
        };
        let memory = RingMemory::extent(&self.host.memory(extent).unwrap()).unwrap();
        let receiver = RingReceiver::new(memory, place);
        let sender = RingSender::new(session.channel().unwrap(), &pool(), place);
        (sender, receiver)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

fn on_real_fabrics(test: impl Fn(Server)) {
    let folder = tempfile::tempdir().unwrap();
    test(Server::start(&Endpoint::Shm(folder.path().join("socket"))));
    test(Server::start(&tcp()));
}
