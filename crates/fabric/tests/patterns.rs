//! The patterns: rings against a plain queue over a fabric that places bytes as late and as torn as
//! it likes, rings and engines over the real fabrics, and what becomes of the others when one
//! sender dies or lies.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests, which fail by panicking"
)]

use std::{
    collections::VecDeque,
    io,
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use farpage_fabric::{
    Busy, Channel, ChannelError, Completion, Endpoint, ExtentId, Op, Session, SessionOptions, Verb,
    Wait,
    memory::ExtentMemory,
    patterns::{
        CompletionEngine, Inbox, Landing, Notifier, RingPlace, RingReceiver, RingSender, SendError,
        Source, Waiter, Waiting,
    },
    regmem::{RegBuf, RegPool, RegPoolOptions},
    server::{Listener, Shutdown, SocketAccess, Traffic, serve},
    sim::{SimConfig, SimHost, SimServer},
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use proptest::prelude::*;

const EXTENT: ExtentId = ExtentId(1);
const PATIENCE: Duration = Duration::from_secs(30);

fn pool() -> RegPool {
    RegPool::new([], RegPoolOptions::default())
}

/// A fabric that places a few bytes at a time, of operations in any order unless it keeps it.
struct Scrambled {
    memory: Arc<ExtentMemory>,
    random: u64,
    /// With the bytes that were moved.
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

    fn wait(&self) -> Wait<'_> {
        Wait::default()
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
    let receiver = RingReceiver::new(Landing::extent(&memory).unwrap(), place);
    let channel = Scrambled {
        memory,
        random: seed | 1,
        flying: VecDeque::new(),
        in_order,
        claims_order,
    };
    (RingSender::new(Box::new(channel), &pool(), place), receiver)
}

/// What a program does with a ring.
#[derive(Clone, Copy, Debug)]
enum Step {
    Send(usize),
    Flush,
    Progress,
    Receive,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0usize..300).prop_map(Step::Send),
        2 => Just(Step::Flush),
        3 => Just(Step::Progress),
        3 => Just(Step::Receive),
    ];
    prop::collection::vec(step, 1..400)
}

/// Runs the steps on a ring and on a queue; says where they differ.
fn against_a_queue(
    steps: &[Step],
    (mut sender, mut receiver): (RingSender, RingReceiver),
) -> Result<(), String> {
    let mut queue = VecDeque::new();
    let mut message = vec![7; 3];
    let mut receive = |queue: &mut VecDeque<Vec<u8>>| match receiver.receive(&mut message) {
        Err(error) => Err(error.to_string()),
        Ok(false) => Ok(()),
        Ok(true) => match queue.pop_front() {
            Some(sent) if sent == message => Ok(()),
            sent => Err(format!("received {message:?} for {sent:?}")),
        },
    };
    for (number, step) in steps.iter().enumerate() {
        match *step {
            Step::Send(bytes) => {
                let sent: Vec<u8> = (0..bytes).map(|i| (number * 31 + i) as u8 | 1).collect();
                match sender.send(&sent) {
                    Ok(()) => queue.push_back(sent),
                    Err(SendError::Full) => {}
                    Err(SendError::TooLong { bytes, capacity }) => assert!(bytes + 8 > capacity),
                    Err(error) => return Err(error.to_string()),
                }
            }
            Step::Flush => sender.flush().unwrap(),
            Step::Progress => sender.progress().unwrap(),
            Step::Receive => receive(&mut queue)?,
        }
    }
    // Everything arrives in the end, without another word from the sender.
    sender.flush().unwrap();
    for _ in 0..100_000 {
        if queue.is_empty() {
            return Ok(());
        }
        sender.progress().unwrap();
        receive(&mut queue)?;
    }
    Err(format!("{} messages never arrived", queue.len()))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn messages_arrive_whole_and_in_order_however_bytes_are_placed(
        steps in steps(),
        lines in 1usize..12,
        seed in any::<u64>(),
        in_order in any::<bool>(),
    ) {
        against_a_queue(&steps, ring(lines * 64, seed, in_order, in_order)).map_err(TestCaseError::fail)?;
    }
}

/// The broken twin: the tail overtakes the bytes.
#[test]
fn a_fabric_that_breaks_its_word_about_order_is_found_out() {
    let steps: Vec<_> = (0..50)
        .flat_map(|i| [Step::Send(i), Step::Flush, Step::Progress, Step::Receive])
        .collect();
    let found = (1..50).any(|seed| against_a_queue(&steps, ring(512, seed, false, true)).is_err());
    assert!(found, "the tests above would see nothing");
}

/// A server with the memory that it lends in reach.
struct Server {
    endpoint: Endpoint,
    host: Arc<SimHost>,
    shutdown: Shutdown,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn start(endpoint: &Endpoint) -> Self {
        let listener = Listener::bind(endpoint, SocketAccess::Owner).unwrap();
        let endpoint = listener.endpoint().clone();
        let shutdown = Shutdown::new().unwrap();
        let host = Arc::new(SimHost::new(64 << 20));
        let (served, switch) = (Arc::clone(&host), shutdown.clone());
        let thread =
            thread::spawn(move || serve(listener, served, Arc::<Traffic>::default(), switch));
        Self {
            endpoint,
            host,
            shutdown,
            thread: Some(thread),
        }
    }

    fn stop(&mut self) {
        self.shutdown.begin();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }

    /// A new client with a ring of its own.
    fn ring(&self, capacity: usize) -> (RingSender, RingReceiver) {
        let session = Session::connect(&self.endpoint, &SessionOptions::default()).unwrap();
        let extent = session.grant(1 << 20).unwrap().id;
        let place = RingPlace {
            extent,
            offset: 0,
            capacity,
        };
        let memory = Landing::extent(&self.host.memory(extent).unwrap()).unwrap();
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
    test(Server::start(&"tcp://127.0.0.1:0".parse().unwrap()));
}

/// Sends, however long the receiver takes; it rings the notifier when there is room.
fn send(sender: &mut RingSender, message: &[u8], room: &Notifier) {
    let until = Instant::now() + PATIENCE;
    loop {
        room.clear();
        match sender.send(message) {
            Ok(()) => return,
            Err(SendError::Full) => rest(sender, room),
            Err(error) => panic!("{error}"),
        }
        assert!(Instant::now() < until, "nobody takes anything");
    }
}

/// Sleeps until the sender may have something to do.
fn rest(sender: &RingSender, room: &Notifier) {
    let wait = sender.wait();
    let mut fds = vec![PollFd::new(room.as_fd(), PollFlags::POLLIN)];
    fds.extend(wait.fd.map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
    poll(&mut fds, PollTimeout::from(1000u16)).unwrap();
}

/// The inbox as something to wait for.
struct Arrivals<'a> {
    inbox: &'a mut Inbox,
    notifier: &'a Notifier,
}

impl Source for Arrivals<'_> {
    type Item = (u64, Vec<u8>);

    fn poll(&mut self) -> Option<Self::Item> {
        let mut message = Vec::new();
        let sender = self.inbox.receive(&mut message).unwrap()?;
        Some((sender, message))
    }

    fn arm(&mut self) {
        self.notifier.clear();
    }

    fn sleep(&mut self, until: Option<Instant>) -> io::Result<()> {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let timeout = left.map_or(PollTimeout::NONE, |left| left.try_into().unwrap());
        poll(
            &mut [PollFd::new(self.notifier.as_fd(), PollFlags::POLLIN)],
            timeout,
        )?;
        Ok(())
    }
}

#[test]
fn many_senders_reach_one_receiver_that_waits_in_any_way() {
    const MESSAGES: u32 = 1000;
    on_real_fabrics(|server| {
        for waiting in [Waiting::Poll, Waiting::Event, Waiting::Adaptive] {
            let (mut inbox, notifier) = (Inbox::new(), Notifier::new().unwrap());
            let mut senders = Vec::new();
            for name in 0..3 {
                // Small enough to wrap often and to be full now and then.
                let (sender, receiver) = server.ring(4096);
                let room = Notifier::new().unwrap();
                inbox.add(name, receiver.with_notifier(room.clone()));
                senders.push((sender.with_notifier(notifier.clone()), room));
            }
            let threads = (0u64..).zip(senders).map(|(name, (mut sender, room))| {
                thread::spawn(move || {
                    for number in 0..MESSAGES {
                        let mut message = number.to_ne_bytes().to_vec();
                        message.resize(4 + (number as usize * 37) % 300, name as u8);
                        send(&mut sender, &message, &room);
                        if number % 7 == 0 {
                            sender.flush().unwrap();
                        }
                    }
                    sender.flush().unwrap();
                    let until = Instant::now() + PATIENCE;
                    while !sender.is_idle() {
                        assert!(Instant::now() < until);
                        rest(&sender, &room);
                        sender.progress().unwrap();
                    }
                })
            });
            let threads: Vec<_> = threads.collect();
            let mut expected = [0; 3];
            let mut waiter = Waiter::new(waiting);
            while expected != [MESSAGES; 3] {
                let mut arrivals = Arrivals {
                    inbox: &mut inbox,
                    notifier: &notifier,
                };
                let until = Instant::now() + PATIENCE;
                let arrived = waiter.wait(&mut arrivals, Some(until)).unwrap();
                let (sender, message) = arrived.expect("a message in time");
                let number = &mut expected[sender as usize];
                assert_eq!(message[..4], number.to_ne_bytes(), "{waiting:?}");
                assert!(message[4..].iter().all(|byte| *byte == sender as u8));
                *number += 1;
            }
            threads
                .into_iter()
                .for_each(|thread| thread.join().unwrap());
        }
    });
}

#[test]
fn a_sender_that_dies_half_way_holds_up_nobody_and_its_ring_serves_the_next() {
    let place = RingPlace {
        extent: EXTENT,
        offset: 0,
        capacity: 256,
    };
    let memory = ExtentMemory::create(EXTENT, place.bytes() as u64, false).unwrap();
    let landing = Landing::extent(&memory).unwrap();
    let sender = |seed| {
        let channel = Scrambled {
            memory: Arc::clone(&memory),
            random: seed,
            flying: VecDeque::new(),
            in_order: true,
            claims_order: true,
        };
        RingSender::new(Box::new(channel), &pool(), place)
    };
    let mut inbox = Inbox::new();
    inbox.add(1, RingReceiver::new(landing.clone(), place));
    let (mut other, receiver) = ring(256, 5, true, true);
    inbox.add(2, receiver);
    let mut dying = sender(3);
    let mut message = Vec::new();
    for number in 0..100u8 {
        // 1. One sends and dies, in each round with other bytes on their way.
        dying.send(&[number; 50]).unwrap();
        dying.flush().unwrap();
        for _ in 0..number {
            dying.progress().unwrap();
        }
        drop(dying);
        // 2. The other one's message arrives; of the dead one's, either all or nothing.
        let until = Instant::now() + PATIENCE;
        while other.send(&[number; 20]).is_err() {
            other.progress().unwrap();
            assert!(Instant::now() < until, "round {number}");
        }
        other.flush().unwrap();
        loop {
            other.progress().unwrap();
            match inbox.receive(&mut message).unwrap() {
                Some(2) => break,
                Some(_) => assert_eq!(message, [number; 50]),
                None => assert!(Instant::now() < until, "round {number}"),
            }
        }
        assert_eq!(message, [number; 20]);
        // 3. The next sender gets the ring, and finds it empty.
        inbox.remove(1).unwrap();
        inbox.add(1, RingReceiver::new(landing.clone(), place));
        dying = sender(u64::from(number) + 7);
    }
}

#[test]
fn a_sender_that_lies_loses_its_ring_and_the_others_go_on() {
    let (mut honest, receiver) = ring(1024, 9, true, true);
    let mut inbox = Inbox::new();
    inbox.add(1, receiver);
    // A tail with the check value that it must have, out of a ring that has been used.
    let lie = |at: u64, bytes: &[u8]| {
        let place = RingPlace {
            extent: EXTENT,
            offset: 0,
            capacity: 64,
        };
        let memory = ExtentMemory::create(EXTENT, 192, false).unwrap();
        let receiver = RingReceiver::new(Landing::extent(&memory).unwrap(), place);
        let channel = Scrambled {
            memory: Arc::clone(&memory),
            random: 1,
            flying: VecDeque::new(),
            in_order: true,
            claims_order: true,
        };
        let mut sender = RingSender::new(Box::new(channel), &pool(), place);
        sender.send(&[1; 8]).unwrap();
        sender.flush().unwrap();
        while !sender.is_idle() {
            sender.progress().unwrap();
        }
        memory.copy_in(at, bytes).unwrap();
        receiver
    };
    // A message that is longer than what was sent; one that is longer than memory is.
    inbox.add(2, lie(128, &9u64.to_ne_bytes()));
    inbox.add(3, lie(128, &u64::MAX.to_ne_bytes()));
    // A tail without its check value is not an error: it may be on its way.
    inbox.add(4, lie(0, &1u64.to_ne_bytes()));
    honest.send(b"honest").unwrap();
    honest.flush().unwrap();
    let (mut liars, mut message) = (Vec::new(), Vec::new());
    let until = Instant::now() + PATIENCE;
    loop {
        honest.progress().unwrap();
        match inbox.receive(&mut message) {
            Ok(Some(sender)) => {
                assert_eq!((sender, &message[..]), (1, &b"honest"[..]));
                break;
            }
            Ok(None) => assert!(Instant::now() < until),
            Err((sender, error)) => {
                assert!(error.to_string().contains("broke its protocol"), "{error}");
                liars.push(sender);
            }
        }
    }
    while let Err((sender, _)) = inbox.receive(&mut message) {
        liars.push(sender);
    }
    liars.sort_unstable();
    assert_eq!(liars, [2, 3]);
    assert!(inbox.remove(4).is_some());
}

#[test]
fn a_lost_connection_is_an_error_and_so_is_everything_after_it() {
    on_real_fabrics(|mut server| {
        let (mut sender, _receiver) = server.ring(1024);
        sender.send(b"before").unwrap();
        sender.flush().unwrap();
        server.stop();
        let until = Instant::now() + PATIENCE;
        loop {
            assert!(Instant::now() < until, "nobody noticed");
            match sender.send(b"after").and_then(|()| sender.flush()) {
                Ok(()) | Err(SendError::Full) => thread::yield_now(),
                Err(SendError::Lost(ChannelError::Disconnected { .. })) => break,
                Err(error) => panic!("{error}"),
            }
        }
        assert!(matches!(sender.flush(), Err(SendError::Lost(_))));
    });
}

#[test]
fn an_engine_hands_back_what_its_channels_finish_however_it_waits() {
    let check = |session: &Arc<Session>| {
        for waiting in [Waiting::Poll, Waiting::Event, Waiting::Adaptive] {
            let mut engine = CompletionEngine::new(waiting);
            assert_eq!(engine.wait(&mut Vec::new(), None).unwrap(), 0);
            let extent = session.grant(1 << 16).unwrap().id;
            for channel in 0..3 {
                assert_eq!(engine.add(session.channel().unwrap()), channel);
            }
            for tag in 0..12 {
                let op = Op {
                    tag,
                    verb: if tag % 2 == 0 {
                        Verb::Write
                    } else {
                        Verb::Read
                    },
                    extent,
                    offset: tag * 4096,
                    len: 4096,
                    buf: vec![1u8; 4096],
                };
                engine.post(tag as usize % 3, op).unwrap();
            }
            let (mut done, until) = (Vec::new(), Instant::now() + PATIENCE);
            while engine.in_flight() > 0 {
                engine.wait(&mut done, Some(until)).unwrap();
                assert!(Instant::now() < until, "{waiting:?}");
            }
            let mut ended: Vec<_> = (done.iter())
                .map(|(channel, completion)| {
                    assert!(completion.result.is_ok());
                    assert_eq!(completion.tag as usize % 3, *channel);
                    completion.tag
                })
                .collect();
            ended.sort_unstable();
            assert!(ended.iter().copied().eq(0..12), "{ended:?}");
        }
    };
    on_real_fabrics(|server| {
        check(&Session::connect(&server.endpoint, &SessionOptions::default()).unwrap());
    });
    let sim = SimServer::new(SimConfig::new(3));
    check(&sim.session(&SessionOptions::default()).unwrap());
}

/// READs what they have written over three channels to each of two servers, of which one dies half
/// way.
fn one_of_two_servers_dies(start: impl Fn(&str) -> Server) {
    const PAGES: usize = 16;
    const OPS: usize = 1000;
    const WINDOW: usize = 12;
    const BYTES: usize = 1024;
    for waiting in [Waiting::Poll, Waiting::Event, Waiting::Adaptive] {
        let (staying, mut leaving) = (start("staying"), start("leaving"));
        let connect = |server: &Server| {
            Session::connect(&server.endpoint, &SessionOptions::default()).unwrap()
        };
        let (a, b) = (connect(&staying), connect(&leaving));
        let sessions = [&a, &b, &a, &b, &b, &a].map(Arc::clone);
        let dies = [false, true, false, true, true, false];

        let mut engine = CompletionEngine::new(waiting);
        // Beside others that are there already.
        assert_eq!(engine.add(a.channel().unwrap()), 0);
        assert_eq!(engine.open(&[]).unwrap(), 1..1);
        assert_eq!(engine.open(&sessions).unwrap(), 1..7);
        let extents = sessions
            .each_ref()
            .map(|session| session.grant((PAGES * BYTES) as u64).unwrap().id);
        let byte = |channel: usize, page: usize| (channel * PAGES + page + 1) as u8;

        let (mut ended, mut failed) = ([const { [false; OPS] }; 6], [0; 6]);
        let (mut done, until) = (Vec::new(), Instant::now() + PATIENCE);
        for (verb, range) in [(Verb::Write, 0..PAGES), (Verb::Read, PAGES..OPS)] {
            let (mut next, mut in_flight) = ([range.start; 6], [0; 6]);
            loop {
                for channel in 0..6 {
                    while next[channel] < range.end && in_flight[channel] < WINDOW {
                        let page = next[channel] % PAGES;
                        let filled = if verb == Verb::Write {
                            byte(channel, page)
                        } else {
                            0
                        };
                        let op = Op {
                            tag: (channel * OPS + next[channel]) as u64,
                            verb,
                            extent: extents[channel],
                            offset: (page * BYTES) as u64,
                            len: BYTES as u32,
                            buf: vec![filled; BYTES],
                        };
                        engine.post(1 + channel, op).unwrap();
                        next[channel] += 1;
                        in_flight[channel] += 1;
                    }
                }
                if engine.in_flight() == 0 {
                    break;
                }
                engine.wait(&mut done, Some(until)).unwrap();
                assert!(Instant::now() < until, "{waiting:?}: {in_flight:?}");
                for (number, completion) in done.drain(..) {
                    let (channel, op) = (number - 1, completion.tag as usize % OPS);
                    assert_eq!(completion.tag as usize / OPS, channel, "{waiting:?}");
                    assert!(
                        !ended[channel][op],
                        "{waiting:?}: {channel}, {op} ended twice"
                    );
                    ended[channel][op] = true;
                    in_flight[channel] -= 1;
                    match completion.result {
                        Ok(()) => assert_eq!(
                            completion.buf,
                            [byte(channel, op % PAGES); BYTES],
                            "{waiting:?}: {channel}, {op}"
                        ),
                        Err(error) => {
                            assert!(dies[channel] && error.is_transient(), "{error}");
                            failed[channel] += 1;
                        }
                    }
                }
                if leaving.thread.is_some() && next[0] > OPS / 2 {
                    leaving.stop();
                }
            }
            assert_eq!(in_flight, [0; 6], "{waiting:?}");
        }
        assert!(ended.iter().flatten().all(|ended| *ended), "{waiting:?}");
        // Memory over shm outlives its server: on each channel all may end well.
        let stays = matches!(a.endpoint(), Endpoint::Shm(_));
        // Elsewhere a channel may have been done before its server left, but does nothing more.
        let silent = |channel: &usize| !stays && dies[*channel] && failed[*channel] == 0;
        for channel in (0..6).filter(silent) {
            let failed = loop {
                let op = Op {
                    tag: 0,
                    verb: Verb::Read,
                    extent: extents[channel],
                    offset: 0,
                    len: BYTES as u32,
                    buf: vec![0; BYTES],
                };
                engine.post(1 + channel, op).unwrap();
                while done.is_empty() {
                    engine.wait(&mut done, Some(until)).unwrap();
                    assert!(Instant::now() < until, "{waiting:?}: {channel}");
                }
                if let Err(error) = done.drain(..).next().unwrap().1.result {
                    break error;
                }
            };
            assert!(failed.is_transient(), "{failed}");
        }
        assert_eq!(engine.wait(&mut done, Some(until)).unwrap(), 0);
    }
}

#[test]
fn channels_of_one_engine_outlive_each_other() {
    let folder = tempfile::tempdir().unwrap();
    one_of_two_servers_dies(|name| Server::start(&Endpoint::Shm(folder.path().join(name))));
    one_of_two_servers_dies(|_| Server::start(&"tcp://127.0.0.1:0".parse().unwrap()));
}

#[cfg(feature = "rdma")]
#[test]
fn rdma_channels_that_share_a_completion_queue_outlive_each_other() {
    let Ok(host) = std::env::var("FARPAGE_TEST_RDMA_ADDRESS") else {
        eprintln!(
            "SKIPPED: rdma_channels_that_share_a_completion_queue_outlive_each_other: FARPAGE_TEST_RDMA_ADDRESS does not name an RDMA device's \
             address; `cargo xtask vm` runs a test with one"
        );
        return;
    };
    one_of_two_servers_dies(|_| Server::start(&format!("rdma://{host}:0").parse().unwrap()));
}

/// Something that happens after so many looks, or while it is being armed.
#[derive(Default)]
struct Script {
    looks: u32,
    happens_at_look: Option<u32>,
    happens_when_armed: bool,
    happened: bool,
    sleeps: u32,
    asleep: Duration,
}

impl Source for Script {
    type Item = ();

    fn poll(&mut self) -> Option<()> {
        self.looks += 1;
        let now = self.happened || self.happens_at_look.is_some_and(|at| self.looks >= at);
        now.then_some(())
    }

    fn arm(&mut self) {
        self.happened |= self.happens_when_armed;
    }

    fn sleep(&mut self, until: Option<Instant>) -> io::Result<()> {
        self.sleeps += 1;
        let left = until.map_or(self.asleep, |until| {
            until.saturating_duration_since(Instant::now())
        });
        thread::sleep(self.asleep.min(left));
        self.happened |= self.happens_at_look.is_none() && !self.asleep.is_zero();
        Ok(())
    }
}

#[test]
fn what_happens_while_it_is_armed_is_not_slept_through() {
    for waiting in [Waiting::Event, Waiting::Adaptive] {
        let mut script = Script {
            happens_when_armed: true,
            ..Script::default()
        };
        let found = Waiter::new(waiting).wait(&mut script, None).unwrap();
        assert_eq!((found, script.sleeps), (Some(()), 0), "{waiting:?}");
    }
}

#[test]
fn adaptive_waiters_spin_for_what_comes_soon_and_sleep_for_what_does_not() {
    let mut waiter = Waiter::new(Waiting::Adaptive);
    // 1. What takes long teaches it not to spin at all.
    let slow = |waiter: &mut Waiter| {
        let mut script = Script {
            asleep: Duration::from_millis(2),
            ..Script::default()
        };
        waiter.wait(&mut script, None).unwrap().unwrap();
        (script.looks, script.sleeps)
    };
    for _ in 0..4 {
        slow(&mut waiter);
    }
    assert_eq!(
        slow(&mut waiter),
        (3, 1),
        "one look, one when armed, one when woken"
    );
    // 2. What comes at once teaches it to spin again.
    for _ in 0..100 {
        let mut script = Script {
            happens_at_look: Some(3),
            ..Script::default()
        };
        waiter.wait(&mut script, None).unwrap().unwrap();
    }
    assert!(slow(&mut waiter).0 > 60, "it did not spin");
}

#[test]
fn a_deadline_ends_every_way_of_waiting() {
    for waiting in [Waiting::Poll, Waiting::Event, Waiting::Adaptive] {
        let mut script = Script {
            happens_at_look: Some(u32::MAX),
            asleep: Duration::from_millis(50),
            ..Script::default()
        };
        let until = Instant::now() + Duration::from_millis(5);
        let found = Waiter::new(waiting).wait(&mut script, Some(until)).unwrap();
        assert!(found.is_none() && Instant::now() >= until, "{waiting:?}");
        assert_eq!(script.sleeps == 0, waiting == Waiting::Poll);
    }
}

#[test]
fn bells_are_shared_between_threads_and_remember_one_ring() {
    let notifier = Notifier::new().unwrap();
    let rung = Arc::new(AtomicBool::new(false));
    let (theirs, flag) = (notifier.clone(), Arc::clone(&rung));
    let thread = thread::spawn(move || {
        flag.store(true, Ordering::Relaxed);
        theirs.notify();
    });
    let wait = |timeout: u16| {
        let mut fds = [PollFd::new(notifier.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::from(timeout)).unwrap()
    };
    assert_eq!(wait(30_000), 1);
    assert!(rung.load(Ordering::Relaxed));
    thread.join().unwrap();
    notifier.clear();
    assert_eq!(wait(0), 0);
}
