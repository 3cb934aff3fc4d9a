//! Waiting: engines, waiters and notifiers.

use super::*;

#[test]
fn an_engine_hands_back_what_its_channels_finish_however_it_waits() {
    let check = |session: &Arc<Session>| {
        for waiting in [WaitMode::Poll, WaitMode::Event, WaitMode::Adaptive] {
            let mut engine = CompletionEngine::new(waiting);
            assert_eq!(engine.wait(&mut Vec::new(), None).unwrap(), 0);
            let extent = session.grant(1 << 16).unwrap().id;
            for channel in 0..3 {
                assert_eq!(engine.add(session.channel().unwrap()), channel);
            }
            for tag in 0..12 {
                let verb = [Verb::Write, Verb::Read][tag as usize % 2];
                let op = Op {
                    tag,
                    ..op(verb, extent, tag * 4096, vec![1u8; 4096])
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
        check(&Session::connect(server.serving.endpoint(), &SessionOptions::default()).unwrap());
    });
    let sim = SimServer::new(SimConfig::new(3));
    check(&sim.session(&SessionOptions::default()).unwrap());
}

/// Writes and READs the bytes back over three channels to each of two servers, of which one dies
/// half way.
fn one_of_two_servers_dies(start: impl Fn(&str) -> Server) {
    const PAGES: usize = 16;
    const OPS: usize = 1000;
    const WINDOW: usize = 12;
    const BYTES: usize = 1024;
    for waiting in [WaitMode::Poll, WaitMode::Event, WaitMode::Adaptive] {
        let (staying, mut leaving) = (start("staying"), start("leaving"));
        let connect = |server: &Server| {
            Session::connect(server.serving.endpoint(), &SessionOptions::default()).unwrap()
        };
        let (a, b) = (connect(&staying), connect(&leaving));
        let sessions = [&a, &b, &a, &b, &b, &a].map(Arc::clone);
        let dies = [false, true, false, true, true, false];

        let mut engine = CompletionEngine::new(waiting);
        // The engine has another channel already.
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
                        let (offset, buf) = ((page * BYTES) as u64, vec![filled; BYTES]);
                        let op = Op {
                            tag: (channel * OPS + next[channel]) as u64,
                            ..op(verb, extents[channel], offset, buf)
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
                if !leaving.is_stopped && next[0] > OPS / 2 {
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
                let op = op(Verb::Read, extents[channel], 0, vec![0; BYTES]);
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
    one_of_two_servers_dies(|_| Server::start(&tcp()));
}

#[cfg(feature = "rdma")]
#[test]
fn rdma_channels_that_share_a_completion_queue_outlive_each_other() {
    let Some(endpoint) = farpage_testkit::rdma() else {
        return;
    };
    one_of_two_servers_dies(|_| Server::start(&endpoint));
}

/// A source with an event after some looks, or while it is being armed.
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
    for waiting in [WaitMode::Event, WaitMode::Adaptive] {
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
    let mut waiter = Waiter::new(WaitMode::Adaptive);
    // 1. Slow events teach the waiter not to spin at all.
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
    // 2. Fast events teach it to spin again.
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
    for waiting in [WaitMode::Poll, WaitMode::Event, WaitMode::Adaptive] {
        let mut script = Script {
            happens_at_look: Some(u32::MAX),
            asleep: Duration::from_millis(50),
            ..Script::default()
        };
        let until = Instant::now() + Duration::from_millis(5);
        let found = Waiter::new(waiting).wait(&mut script, Some(until)).unwrap();
        assert!(found.is_none() && Instant::now() >= until, "{waiting:?}");
        assert_eq!(script.sleeps == 0, waiting == WaitMode::Poll);
    }
}

#[test]
fn notifiers_are_shared_between_threads_and_remember_one_notification() {
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
