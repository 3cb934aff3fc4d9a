//! Rings over real fabrics: many senders, and some that die or lie.

use super::*;

/// Sends, however long the receiver takes. The receiver rings `room` when it has taken something.
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

/// A source whose items are the messages of an inbox.
struct Arrivals<'a> {
    inbox: &'a mut RingInbox,
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
        for waiting in [WaitMode::Poll, WaitMode::Event, WaitMode::Adaptive] {
            let (mut inbox, notifier) = (RingInbox::new(), Notifier::new().unwrap());
            let mut senders = Vec::new();
            for name in 0..3 {
                // Rings are small enough to wrap often and to be full now and then.
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
    let landing = RingMemory::extent(&memory).unwrap();
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
    let mut inbox = RingInbox::new();
    inbox.add(1, RingReceiver::new(landing.clone(), place));
    let (mut other, receiver) = ring(256, 5, true, true);
    inbox.add(2, receiver);
    let mut dying = sender(3);
    let mut message = Vec::new();
    for number in 0..100u8 {
        // 1. One sender sends and dies, in each round with other bytes on their way.
        dying.send(&[number; 50]).unwrap();
        dying.flush().unwrap();
        for _ in 0..number {
            dying.progress().unwrap();
        }
        drop(dying);
        // 2. The other sender's message arrives; of the dead one's, either all or nothing.
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
    let mut inbox = RingInbox::new();
    inbox.add(1, receiver);
    // Makes a tail with the check value that it must have, out of a ring that has been used.
    let lie = |at: u64, bytes: &[u8]| {
        let place = RingPlace {
            extent: EXTENT,
            offset: 0,
            capacity: 64,
        };
        let memory = ExtentMemory::create(EXTENT, 192, false).unwrap();
        let receiver = RingReceiver::new(RingMemory::extent(&memory).unwrap(), place);
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
    // One message is longer than the bytes that were sent, the other longer than memory is.
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
