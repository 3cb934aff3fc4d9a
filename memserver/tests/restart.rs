//! A server that is replaced by its next process, and what its clients notice.
#![allow(clippy::unwrap_used, reason = "a test that fails here says where")]

mod common;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use common::{Daemon, Log, connect, stat, transfer};
use farpage_fabric::{Session, Verb};
use farpage_testkit::wait_until;
use farpage_wire::Endpoint;
use nix::sys::signal::Signal;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A daemon and the lines that it has logged.
struct Watched {
    daemon: Daemon,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Watched {
    fn start(arguments: &[&str]) -> Self {
        Self::of(Daemon::unread(arguments))
    }

    fn of((daemon, log): (Daemon, Log)) -> Self {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let written = Arc::clone(&lines);
        thread::spawn(move || {
            for line in log.map_while(Result::ok) {
                written.lock().unwrap().push(line);
            }
        });
        Self { daemon, lines }
    }

    fn count(&self, text: &str) -> usize {
        let lines = self.lines.lock().unwrap();
        lines.iter().filter(|line| line.contains(text)).count()
    }

    /// Replaces the process. Returns when the next one serves.
    fn restart(&self) {
        let before = self.count("\"listening\"");
        self.daemon.signal(Signal::SIGUSR2);
        wait_until("the next process listens", || {
            assert_eq!(self.count("SIGUSR2"), 0, "{:?}", self.lines.lock().unwrap());
            self.count("\"listening\"") >= before + 2
        });
    }

    /// Asks for a restart that fails. Returns the log line that says why.
    fn restart_in_vain(&self) -> String {
        let before = self.count("SIGUSR2");
        self.daemon.signal(Signal::SIGUSR2);
        wait_until("the daemon says why", || self.count("SIGUSR2") > before);
        let lines = self.lines.lock().unwrap();
        let mut said = lines.iter().filter(|line| line.contains("SIGUSR2"));
        said.next_back().unwrap().clone()
    }
}

/// Writes and reads random words of an extent of `words` words until `ended`. Returns the longest
/// time of an operation, and how often a connection was opened again.
fn work(session: &Arc<Session>, words: usize, seed: u64, ended: &AtomicBool) -> (Duration, usize) {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let extent = session.grant(words as u64 * 8).unwrap();
    let line = session.line();
    let mut channel = line.channel::<Vec<u8>>().unwrap();
    let mut model = vec![0u64; words];
    let (mut longest, mut reopened) = (Duration::ZERO, 0);
    let mut round = |last: bool, at: usize| {
        let offset = at as u64 * 8;
        let began = Instant::now();
        let (verb, bytes) = match last || random.random::<bool>() {
            true => (Verb::Read, vec![0xa5; 8]),
            false => {
                model[at] = random.random();
                (Verb::Write, model[at].to_le_bytes().to_vec())
            }
        };
        let found = loop {
            match transfer(&mut *channel, verb, extent.id, offset, bytes.clone()) {
                Ok(found) => break found,
                Err(_) => {
                    channel = line.channel().unwrap();
                    reopened += 1;
                }
            }
        };
        longest = longest.max(began.elapsed());
        assert_eq!(found, model[at].to_le_bytes(), "seed {seed}, word {at}");
    };
    let mut next = ChaCha8Rng::seed_from_u64(!seed);
    while !ended.load(Ordering::Relaxed) {
        round(false, next.random_range(0..words));
    }
    (0..words).for_each(|at| round(true, at));
    (longest, reopened)
}

/// Restarts a server ten times under the load of a client at each of `endpoints`.
fn ten_restarts(server: &Watched, words: usize) {
    let ended = AtomicBool::new(false);
    let endpoints: [&Endpoint; 2] = [&server.daemon.tcp, &server.daemon.shm];
    thread::scope(|scope| {
        let clients: Vec<_> = (endpoints.into_iter().zip(1..))
            .map(|(endpoint, seed)| {
                let (session, ended) = (connect(endpoint), &ended);
                scope.spawn(move || work(&session, words, seed, ended))
            })
            .collect();
        for _ in 0..10 {
            let written = stat(&server.daemon.tcp).bytes_written;
            wait_until("clients are at work", || {
                stat(&server.daemon.tcp).bytes_written > written
            });
            server.restart();
        }
        ended.store(true, Ordering::Relaxed);
        for (client, endpoint) in clients.into_iter().zip(endpoints) {
            let (longest, reopened) = client.join().unwrap();
            println!("{endpoint}: longest pause {longest:?}, {reopened} connections reopened");
        }
    });
    assert!(stat(&server.daemon.tcp).bytes_written > 0);
}

#[test]
fn two_clients_find_every_word_right_through_ten_restarts() {
    let server = Watched::start(&["--capacity", "64MiB"]);
    ten_restarts(&server, 4096);
}
