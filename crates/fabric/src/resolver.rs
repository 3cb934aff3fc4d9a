//! [`resolve`]: the addresses of a host, asked for on a thread of its own.
//!
//! The rule it keeps: no caller waits for a name server longer than it said. The system's resolver
//! takes its time and cannot be stopped, so it is left behind. A lookup that hangs spoils no later
//! one, neither here nor in the child of a fork.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, SocketAddr, ToSocketAddrs},
    process,
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_signals::{Condvar, Mutex};
use farpage_tables::errand;

/// Age at which a lookup hangs: the system's resolver asks each server twice for 5 seconds.
const HANGS: Duration = Duration::from_secs(30);
/// Longest wait for the table of questions. The table is locked for moments, but the child of a
/// fork may find it locked by a thread that the child does not have.
const MOMENT: Duration = Duration::from_millis(20);

/// Returns the addresses of a host. The first caller that needs them asks.
pub(crate) fn resolve(host: &str, port: u16, until: Instant) -> io::Result<Vec<SocketAddr>> {
    static RESOLVER: Resolver = Resolver::new(HANGS);
    if let Ok(address) = host.trim_matches(['[', ']']).parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let name = host.to_owned();
    let ask = move || Ok((name.as_str(), 0).to_socket_addrs()?.collect());
    let answer = RESOLVER.ask(process::id(), host, until, ask);
    let answer = answer.unwrap_or_else(|| {
        let why = format!("no name server answered for `{host}` in time");
        Err(io::Error::new(io::ErrorKind::TimedOut, why))
    });
    answer.map(|mut addresses: Vec<SocketAddr>| {
        addresses.iter_mut().for_each(|at| at.set_port(port));
        addresses
    })
}

/// Questions that were asked and not answered yet, each on one thread. A caller that asks the same
/// meanwhile waits for the same answer.
struct Resolver {
    asked: Mutex<PendingLookups>,
    hangs: Duration,
}

struct PendingLookups {
    /// Process whose threads ask.
    process: u32,
    questions: BTreeMap<String, Arc<Question>>,
}

/// Addresses, or an error as its kind and its text, so that every waiting caller gets it.
type LookupResult = Result<Vec<SocketAddr>, (io::ErrorKind, String)>;

struct Question {
    asked: Instant,
    answer: Mutex<Option<LookupResult>>,
    answered: Condvar,
}

impl Resolver {
    const fn new(hangs: Duration) -> Self {
        let asked = PendingLookups {
            process: 0,
            questions: BTreeMap::new(),
        };
        Self {
            asked: Mutex::new(asked),
            hangs,
        }
    }

    /// Calls `ask` for `host` on a thread of its own. `None` if no answer comes before `until`.
    fn ask(
        &'static self,
        process: u32,
        host: &str,
        until: Instant,
        ask: impl FnOnce() -> io::Result<Vec<SocketAddr>> + Send + 'static,
    ) -> Option<io::Result<Vec<SocketAddr>>> {
        let question = match self.question(process, host, ask) {
            Ok(question) => question,
            Err(error) => return Some(Err(error)),
        };
        let mut answer = question.answer.lock();
        while answer.is_none() {
            if Instant::now() >= until {
                return None;
            }
            answer = question.answered.wait_until(answer, until);
        }
        let answer = answer.clone().expect("waited for");
        Some(answer.map_err(|(kind, why)| io::Error::new(kind, why)))
    }

    /// Returns the question that this process has asked about `host`, or a new one.
    fn question(
        &'static self,
        process: u32,
        host: &str,
        ask: impl FnOnce() -> io::Result<Vec<SocketAddr>> + Send + 'static,
    ) -> io::Result<Arc<Question>> {
        let mut asked = self.asked.try_lock_until(Instant::now() + MOMENT);
        if let Some(asked) = &mut asked {
            if asked.process != process {
                // The questions are those of the parent process, whose threads are not here.
                (asked.process, asked.questions) = (process, BTreeMap::new());
            }
            let question = asked.questions.get(host);
            if let Some(question) = question.filter(|one| one.asked.elapsed() < self.hangs) {
                return Ok(Arc::clone(question));
            }
        }
        let question = Arc::new(Question {
            asked: Instant::now(),
            answer: Mutex::new(None),
            answered: Condvar::new(),
        });
        let (asking, name) = (Arc::clone(&question), host.to_owned());
        errand("farpage-resolve", move || {
            let answer = ask().map_err(|error| (error.kind(), error.to_string()));
            self.forget(&name, &asking);
            *asking.answer.lock() = Some(answer);
            asking.answered.notify_all();
        })?;
        // If the table is locked for too long, this caller's question is not shared.
        if let Some(asked) = &mut asked {
            let asking = Arc::clone(&question);
            asked.questions.insert(host.to_owned(), asking);
        }
        Ok(question)
    }

    /// Forgets an answered question. Later callers ask anew, because addresses change.
    fn forget(&self, host: &str, answered: &Arc<Question>) {
        let mut asked = self.asked.lock();
        let known = asked.questions.get(host);
        if known.is_some_and(|known| Arc::ptr_eq(known, answered)) {
            asked.questions.remove(host);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            atomic::{AtomicUsize, Ordering},
            mpsc,
        },
        thread,
    };

    use super::*;

    #[test]
    fn a_resolver_that_does_not_answer_is_left_behind_and_asked_once() {
        let resolver: &'static Resolver = Box::leak(Box::new(Resolver::new(HANGS)));
        let (leash, released) = mpsc::channel::<()>();
        let released = Arc::new(Mutex::new(released));
        let asked = Arc::new(AtomicUsize::new(0));
        let ask = |until| {
            let (released, asked) = (Arc::clone(&released), Arc::clone(&asked));
            resolver.ask(1, "far", until, move || {
                asked.fetch_add(1, Ordering::SeqCst);
                // Until the leash is dropped.
                let _ = released.lock().recv();
                Ok(vec![SocketAddr::from(([10, 0, 0, 7], 0))])
            })
        };
        for _ in 0..5 {
            let begun = Instant::now();
            let answer = ask(begun + Duration::from_millis(20));
            assert!(answer.is_none() && begun.elapsed() >= Duration::from_millis(20));
        }
        // A caller that still waits is answered by the question that was asked.
        let until = Instant::now() + Duration::from_secs(20);
        let answer = thread::scope(|scope| {
            let waits = scope.spawn(|| ask(until));
            drop(leash);
            waits.join().expect("no panic")
        });
        let addresses = answer.expect("in time").expect("it answers");
        assert_eq!(addresses.len(), 1);
        assert!(
            asked.load(Ordering::SeqCst) <= 2,
            "a question beside one that is not answered yet"
        );
        let local = resolve("localhost", 5, until).expect("every machine knows itself");
        assert!(
            local
                .iter()
                .all(|address| address.port() == 5 && address.ip().is_loopback())
        );
        assert!(
            resolve("[::1]", 5, Instant::now()).is_ok(),
            "no question is asked"
        );
    }

    #[test]
    fn a_lookup_that_hangs_spoils_no_later_one() {
        let (_leash, released) = mpsc::channel::<()>();
        let released = Arc::new(Mutex::new(released));
        let hang = || {
            let released = Arc::clone(&released);
            move || {
                let _ = released.lock().recv();
                Ok(Vec::new())
            }
        };
        let soon = || Instant::now() + Duration::from_millis(20);
        let until = Instant::now() + Duration::from_secs(20);
        let found = || Ok(vec![SocketAddr::from(([10, 0, 0, 7], 0))]);
        // 1. In the child of a fork, whose parent's threads it does not have.
        let patient: &'static Resolver = Box::leak(Box::new(Resolver::new(HANGS)));
        assert!(patient.ask(1, "far", soon(), hang()).is_none());
        assert!(patient.ask(2, "far", until, found).is_some());
        // 2. Also where it was forked while the table was locked.
        let locked = patient.asked.lock();
        assert!(patient.ask(3, "far", soon(), hang()).is_none());
        drop(locked);
        // 3. In the same process, after a while.
        let hasty: &'static Resolver = Box::leak(Box::new(Resolver::new(Duration::ZERO)));
        assert!(hasty.ask(1, "far", soon(), hang()).is_none());
        let answer = hasty.ask(1, "far", until, found).expect("in time");
        assert_eq!(answer.expect("it answers").len(), 1);
    }
}
