//! [`resolve`]: the addresses of a host, asked for on a thread of its own.
//!
//! The rule it keeps: nobody waits for a name server longer than they said. The system's resolver
//! takes its time and cannot be stopped, so it is left behind.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr, ToSocketAddrs},
    sync::{Arc, LazyLock},
    thread,
    time::Instant,
};

use parking_lot::{Condvar, Mutex};

/// The addresses of a host. The system's resolver takes its time, and cannot be stopped: it is
/// asked on a thread of its own, by whoever asks first.
pub(crate) fn resolve(host: &str, port: u16, until: Instant) -> io::Result<Vec<SocketAddr>> {
    static RESOLVER: LazyLock<Resolver> = LazyLock::new(Resolver::default);
    if let Ok(address) = host.trim_matches(['[', ']']).parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let name = host.to_owned();
    let ask = move || Ok((name.as_str(), 0).to_socket_addrs()?.collect());
    let answer = RESOLVER.ask(host, until, ask).unwrap_or_else(|| {
        let why = format!("no name server answered for `{host}` in time");
        Err(io::Error::new(io::ErrorKind::TimedOut, why))
    });
    answer.map(|mut addresses: Vec<SocketAddr>| {
        addresses.iter_mut().for_each(|at| at.set_port(port));
        addresses
    })
}

/// Questions that were asked and not answered yet, each on one thread: asked again meanwhile, the
/// same answer is waited for.
#[derive(Default)]
struct Resolver {
    asked: Mutex<HashMap<String, Arc<Question>>>,
}

/// An error as its kind and its text: all who wait get it.
type Answer = Result<Vec<SocketAddr>, (io::ErrorKind, String)>;

#[derive(Default)]
struct Question {
    answer: Mutex<Option<Answer>>,
    answered: Condvar,
}

impl Resolver {
    /// What `ask` says of `host` on a thread of its own; `None` when it says nothing until then.
    fn ask(
        &'static self,
        host: &str,
        until: Instant,
        ask: impl FnOnce() -> io::Result<Vec<SocketAddr>> + Send + 'static,
    ) -> Option<io::Result<Vec<SocketAddr>>> {
        let mut asked = self.asked.lock();
        let question = match asked.get(host) {
            Some(question) => Arc::clone(question),
            None => {
                let (question, host) = (Arc::<Question>::default(), host.to_owned());
                let (asking, name) = (Arc::clone(&question), host.clone());
                let thread = thread::Builder::new().name("farpage-resolve".to_owned());
                let spawned = thread.spawn(move || {
                    let answer = ask().map_err(|error| (error.kind(), error.to_string()));
                    // Who asks from here on asks anew: addresses change.
                    self.asked.lock().remove(&name);
                    *asking.answer.lock() = Some(answer);
                    asking.answered.notify_all();
                });
                if let Err(error) = spawned {
                    return Some(Err(error));
                }
                asked.insert(host, Arc::clone(&question));
                question
            }
        };
        drop(asked);
        let mut answer = question.answer.lock();
        while answer.is_none() {
            if (question.answered.wait_until(&mut answer, until)).timed_out() && answer.is_none() {
                return None;
            }
        }
        let answer = answer.clone().expect("waited for");
        Some(answer.map_err(|(kind, why)| io::Error::new(kind, why)))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc,
    };
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_resolver_that_does_not_answer_is_left_behind_and_asked_once() {
        let resolver: &'static Resolver = Box::leak(Box::default());
        let (leash, released) = mpsc::channel::<()>();
        let released = Arc::new(Mutex::new(released));
        let asked = Arc::new(AtomicUsize::new(0));
        let ask = |until| {
            let (released, asked) = (Arc::clone(&released), Arc::clone(&asked));
            resolver.ask("far", until, move || {
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
        // Who still waits is answered by the one that was asked.
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
}
