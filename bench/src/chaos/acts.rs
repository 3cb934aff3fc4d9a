//! [`Scene::act`]: lets an event happen to the servers of a program, and waits until all copies are
//! there again.
//!
//! The rule it keeps: an event begins once the one before has healed, so that no more servers lack
//! bytes at a time than pages outlive.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use farpage::{ByteSize, Runtime, StoreStatsSnapshot};
use farpage_bench_kit::{options::Fabric, pick::Random};

use super::{
    flip::Fixed,
    kind::Kind,
    report::{Event, Faults},
    servers::Servers,
    work::{MEASURED, Work},
};

/// Upper bound of the time until all copies are there again, and until something begins that a
/// server is to die in.
const PATIENCE: Duration = Duration::from_secs(120);
/// Time after which a server that has died is given up: three seconds after the first request that
/// fails, which is made within a second, and as long again for a busy machine.
const KNOWN_AFTER: Duration = Duration::from_secs(6);
/// Time after which a copy that missed a write counts as missing: a request to a silent server
/// waits for a quarter of the deadline.
const MISSED_AFTER: Duration = Duration::from_secs(4);
/// Interval of looks at the statistics where a server is to die in the midst of something short.
const LOOK: Duration = Duration::from_micros(200);

/// A program, and all that can happen to it.
pub(super) struct Scene<'a> {
    pub(super) runtime: &'a Runtime,
    pub(super) work: &'a Work,
    pub(super) fixed: &'a Fixed,
    pub(super) servers: &'a mut Servers,
    /// Number of servers that may die at once.
    pub(super) spare: usize,
    /// True if pages get parity.
    pub(super) has_parity: bool,
    /// True if the death of a server must be noticed: it takes memory with it.
    pub(super) tells_death: bool,
    /// Added to the least time of the long events, in milliseconds: a random one below this.
    pub(super) longer_ms: u64,
}

/// Beginning of an event.
struct Begun {
    at: Instant,
    servers: Vec<String>,
    /// True if a server has died.
    is_death: bool,
}

impl Scene<'_> {
    /// Lets an event happen. `None` if what it needs was not there, which is said.
    pub(super) fn act(&mut self, kind: Kind, random: &mut Random) -> Result<Option<Event>> {
        let checked = self.work.checked();
        let repaired_before = self.repaired();
        let Some(begun) = self.begin(kind, random)? else {
            return Ok(None);
        };
        let ended = Instant::now();
        let fault_us = Faults::of(&self.work.faults()?);
        // Copies count as missing once their server is given up, or has missed a write.
        let known_after = match begun.is_death && self.tells_death {
            true => KNOWN_AFTER,
            false => MISSED_AFTER,
        };
        let is_whole =
            |store: &StoreStatsSnapshot| store.under_protected_bytes + store.draining_bytes == 0;
        self.wait(|store| is_whole(store) && ended.elapsed() > known_after)
            .with_context(|| {
                let (servers, kind) = (begun.servers.join(", "), kind.name());
                format!("copies are missing {PATIENCE:?} after `{kind}` of {servers}")
            })?;
        let healed = self.work.last_lack().max(begun.at) - begun.at;
        Ok(Some(Event {
            kind,
            servers: begun.servers,
            at_s: self.work.time_of(begun.at).as_secs_f64(),
            healed_s: healed.as_secs_f64(),
            fault_us,
            checked: self.work.checked() - checked,
            repaired_bytes: self.repaired() - repaired_before,
        }))
    }

    /// Waits until all words were written, and a part of their pages has parity if pages get it.
    pub(super) fn wait_for_pages(&self, bytes: u64) -> Result<()> {
        let sealed_min = if self.has_parity { bytes / 4 } else { 0 };
        self.wait(|store| self.work.is_filled() && store.sealed_bytes >= sealed_min)
            .context("pages are not written, or get no parity")
    }

    fn begin(&mut self, kind: Kind, random: &mut Random) -> Result<Option<Begun>> {
        let short = Duration::from_millis(100 + random.below(2_000));
        let long = Duration::from_millis(3_500 + random.below(self.longer_ms));
        let some = self.servers.any(random);
        let one = |at| Begun {
            at,
            servers: vec![some.url.clone()],
            is_death: false,
        };
        Ok(Some(match kind {
            Kind::ShortStop | Kind::LongStop => {
                let at = self.work.measure();
                let stopped = some.stop()?;
                thread::sleep(if kind == Kind::ShortStop { short } else { long });
                drop(stopped);
                one(at)
            }
            Kind::Cut => {
                let at = self.work.measure();
                some.relay().cut();
                one(at)
            }
            Kind::Unplug => {
                let at = self.work.measure();
                some.relay().refuse(true);
                some.relay().cut();
                thread::sleep(long);
                some.relay().refuse(false);
                one(at)
            }
            Kind::ShortLoss | Kind::LongLoss => {
                let at = self.work.measure();
                some.relay().hold(true);
                thread::sleep(if kind == Kind::ShortLoss { short } else { long });
                some.relay().hold(false);
                one(at)
            }
            Kind::Forget => {
                let at = self.work.measure();
                some.relay().silence();
                one(at)
            }
            Kind::Flip => {
                let flipped = self.fixed.flip(
                    self.servers,
                    self.runtime,
                    self.work,
                    self.has_parity,
                    random,
                )?;
                let Some(url) = flipped else {
                    eprintln!("no page lies at one server alone: no bit was flipped");
                    return Ok(None);
                };
                Begun {
                    at: Instant::now(),
                    servers: vec![url],
                    is_death: false,
                }
            }
            Kind::Kill => {
                let count = 1 + random.below(self.spare as u64) as usize;
                let killed = self.servers.some(count, random);
                let begun = self.kill(killed)?;
                thread::sleep(MEASURED);
                for _ in 0..count {
                    self.add()?;
                }
                begun
            }
            Kind::KillInRebuild => {
                let first = self.servers.some(1, random);
                let repaired = self.repaired();
                self.kill(first)?;
                // Where pages outlive one death, only a server without a last copy may die.
                let new = self.add()?;
                let begin = Instant::now();
                self.wait(|store| {
                    // The first one may have been new, and empty.
                    store.repaired_bytes > repaired || begin.elapsed() > KNOWN_AFTER
                })?;
                let second = match self.spare {
                    1 => vec![new],
                    _ => self.servers.some(1, random),
                };
                let begun = self.kill(second)?;
                thread::sleep(MEASURED);
                self.add()?;
                if self.spare > 1 {
                    self.add()?;
                }
                begun
            }
            Kind::KillInSealing => {
                self.work.write_everywhere(true);
                thread::sleep(MEASURED);
                self.work.write_everywhere(false);
                let mut least = u64::MAX;
                self.wait(|store| {
                    least = least.min(store.sealed_bytes);
                    store.sealed_bytes > least
                })
                .context("no memory gets parity")?;
                let killed = self.servers.some(1, random);
                let begun = self.kill(killed)?;
                thread::sleep(MEASURED);
                self.add()?;
                begun
            }
            Kind::Drain => {
                let url = some.url.clone();
                self.add()?;
                let at = self.work.measure();
                let drained = self.runtime.drain_server(&url);
                let drained = drained.with_context(|| format!("{url} cannot be emptied"))?;
                eprintln!("{} moved from {url}", ByteSize(drained.moved_bytes));
                self.servers.remove(&url);
                Begun {
                    at,
                    servers: vec![url],
                    is_death: false,
                }
            }
            Kind::KillInDrain => {
                let url = some.url.clone();
                self.add()?;
                let runtime = self.runtime;
                let (begun, drained) = thread::scope(|scope| {
                    let drain = scope.spawn(|| runtime.drain_server(&url));
                    while runtime.stats().store.draining_bytes == 0 && !drain.is_finished() {
                        thread::sleep(LOOK);
                    }
                    let killed = self.servers.some(1, random);
                    let begun = self.kill(killed)?;
                    thread::sleep(MEASURED);
                    if !begun.servers.contains(&url) {
                        self.add()?;
                    }
                    let drained = drain.join().expect("a drain does not panic");
                    anyhow::Ok((begun, drained))
                })?;
                if !begun.servers.contains(&url) {
                    if let Err(error) = drained {
                        eprintln!("{error}");
                        let drained = self.runtime.drain_server(&url);
                        drained.with_context(|| format!("{url} cannot be emptied"))?;
                    }
                    self.servers.remove(&url);
                }
                begun
            }
        }))
    }

    /// Kills servers at once, and begins to measure.
    fn kill(&mut self, urls: Vec<String>) -> Result<Begun> {
        let at = self.work.measure();
        self.servers.kill(&urls)?;
        let now = self.work.time_of(at).as_secs_f64();
        eprintln!("{now:7.1} s: killed {}", urls.join(", "));
        Ok(Begun {
            at,
            servers: urls,
            is_death: true,
        })
    }

    /// Starts a server, and adds it to the program's. Returns its address.
    fn add(&mut self) -> Result<String> {
        let url = self.servers.add()?;
        self.runtime.add_server(&url)?;
        let now = self.work.now().as_secs_f64();
        eprintln!("{now:7.1} s: added {url}");
        Ok(url)
    }

    fn repaired(&self) -> u64 {
        self.runtime.stats().store.repaired_bytes
    }

    /// Waits until `is_reached`, or until a word is wrong.
    fn wait(&self, mut is_reached: impl FnMut(&StoreStatsSnapshot) -> bool) -> Result<()> {
        let begin = Instant::now();
        while self.work.wrong() == 0 {
            let stats = self.runtime.stats();
            self.work.note_lack(&stats.store);
            if is_reached(&stats.store) {
                break;
            }
            ensure!(
                begin.elapsed() < PATIENCE,
                "the statistics: {stats}, {:?}",
                stats.store
            );
            thread::sleep(LOOK);
        }
        Ok(())
    }
}

/// True if the death of a server over `fabric` is noticed. Memory that is shared with a server
/// outlives it, unless some of it is elsewhere.
pub(super) fn tells_death(fabric: Fabric, has_tiers: bool) -> bool {
    fabric != Fabric::Shm || has_tiers
}
