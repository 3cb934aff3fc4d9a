//! Every interleaving of two writers, a reader and three holders of one name, with messages lost,
//! and with a holder that starts anew with and without its memory.
//!
//! The rule: a version that was published, or read, stays in the history of all later ones; a
//! reader reads no version older than one that was published before it began; and the bytes of the
//! version that it reads stay as they are. Each possible mistake is made here once, by a twin that
//! must be caught. `--nocapture` prints for each twin the shortest way to its harm.

#[path = "../../pager/tests/protocol_model/explore.rs"]
#[expect(dead_code, reason = "nothing here is compulsory")]
mod explore;

use std::fmt;

use explore::{Label, Model, Move, explore};
use farpage_wire::{
    ServerId,
    register::{
        Answer, Ballot, Epoch, Register, Stamp, is_published, is_unread, next_epoch, to_read,
        to_write,
    },
};

const HOLDERS: usize = 3;
/// Number of slots: of the published version, and of the next one.
const SLOTS: usize = 2;
/// Number of versions that can exist.
const VALUES: usize = 5;
/// Number of versions that each writer publishes.
const PUBLICATIONS: [u8; 2] = [1, 1];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Twin {
    Good,
    /// A writer goes on from the first binding that it hears of.
    TakesAStaleBinding,
    /// A reader reads the newest binding that it hears of, whoever agrees.
    ReadsWhatFewAgreeOn,
    /// A holder that starts anew with its binding has forgotten its promise.
    ForgetsThePromiseAtAStart,
    /// A holder accepts whatever comes, as if a new version erased its promise.
    ForgetsThePromiseAtAVersion,
    /// A holder that has lost its memory is taken for one that knows of no newer binding.
    TakesUnknownForNothing,
    /// A writer changes the bytes before its turn has a binding of its own.
    DoesNotComplete,
    /// A writer asks nobody who reads.
    ReusesWhatIsRead,
}

#[derive(Debug, PartialEq, Eq)]
enum Harm {
    /// A published or read version is not in the history of a later one.
    Lost,
    /// A reader got an older version than was published before it began.
    Stale,
    /// The bytes of a version have changed under its reader.
    WrongBytes,
}

/// Number of a version: 0 for none. Its slot is chosen by its writer.
type Value = u8;

/// Counter and writer of an epoch: less than 256 of each.
type Turn = [u8; 2];

/// A binding: its turn and its place there, and the version.
type Bound = (Turn, u8, Value);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Holder {
    /// Number of times that the holder has lost its memory: part of its identity.
    lives: u8,
    promised: Turn,
    accepted: Option<Bound>,
    /// Version that the reader has open here.
    read: Value,
    /// Bytes of the slots: the versions that were written there last.
    slots: [Value; SLOTS],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Step {
    #[default]
    Idle,
    /// Asks for promises.
    Opens,
    /// Has its own turn's binding accepted.
    Completes,
    /// Writes the bytes of the next version.
    Writes,
    Publishes,
    Ended,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Writer {
    step: Step,
    epoch: Turn,
    /// Holders that have been asked in this step, as bits, and those that have answered.
    asked: u8,
    answered: u8,
    /// What each holder has accepted, as of its promise.
    heard: [Option<Bound>; HOLDERS],
    /// Identities of the holders that have promised: sessions end with a holder's start.
    sessions: [Option<u8>; HOLDERS],
    /// Version that is being accepted, and the last one of this turn.
    value: Value,
    version: u8,
    /// What holders have said since they accepted the version: whether older ones are read.
    said: [Option<bool>; HOLDERS],
    left: u8,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Reader {
    has_begun: bool,
    /// The newest version that had been published or read before.
    floor: Value,
    asked: u8,
    heard: [Option<(u8, Bound)>; HOLDERS],
    reads: Value,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct World {
    holders: [Holder; HOLDERS],
    writers: [Writer; 2],
    reader: Reader,
    /// Version that each version was made from, and its slot.
    parents: [Value; VALUES],
    slots: [u8; VALUES],
    made: u8,
    /// The newest binding that was published or read.
    floor: Bound,
    losses_left: u8,
    starts_left: u8,
    blank_starts_left: u8,
}

impl fmt::Display for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for holder in &self.holders {
            write!(
                f,
                "[{}: {:?} {:?} read {} {:?}] ",
                holder.lives, holder.promised, holder.accepted, holder.read, holder.slots
            )?;
        }
        let writers = self.writers.map(|it| (it.step, it.value, it.answered));
        write!(f, "{writers:?} reads {}", self.reader.reads)
    }
}

impl World {
    /// True if `old` is `new`, or in its history.
    fn is_before(&self, old: Value, mut new: Value) -> bool {
        while new != old && new != 0 {
            new = self.parents[usize::from(new)];
        }
        new == old
    }

    /// Notes a binding that was published or read. False if a newer one lacks an older one.
    fn note(&mut self, bound: Bound) -> bool {
        let floor = self.floor;
        match stamp(bound) < stamp(floor) {
            true => self.is_before(bound.2, floor.2),
            false => {
                self.floor = bound;
                self.is_before(floor.2, bound.2)
            }
        }
    }

    fn slot(&self, value: Value) -> usize {
        usize::from(self.slots[usize::from(value)])
    }

    /// True if the bytes of the version that is read have changed where it is open. A holder that
    /// has lost its memory has no copy.
    fn has_wrong_bytes(&self) -> bool {
        let value = self.reader.reads;
        let is_wrong = |holder: &Holder| {
            let found = holder.slots[self.slot(value)];
            holder.read == value && found != 0 && found != value
        };
        value != 0 && self.holders.iter().any(is_wrong)
    }
}

fn id(at: usize, lives: u8) -> ServerId {
    ServerId((at as u128) << 8 | u128::from(lives))
}

fn all_holders() -> Vec<ServerId> {
    (0..HOLDERS).map(|at| id(at, 0)).collect()
}

fn epoch([counter, writer]: Turn) -> Epoch {
    Epoch {
        counter: counter.into(),
        writer: writer.into(),
    }
}

fn turn(epoch: Epoch) -> Turn {
    [epoch.counter as u8, epoch.writer as u8]
}

fn stamp((turn, version, _): Bound) -> Stamp {
    Stamp {
        epoch: epoch(turn),
        version: version.into(),
    }
}

fn ballot(stamp: Stamp) -> Ballot {
    Ballot {
        stamp,
        holders: all_holders(),
        removed: false,
    }
}

fn register(promised: Turn, accepted: Option<Bound>) -> Register {
    Register {
        promised: epoch(promised),
        accepted: accepted.map(|bound| ballot(stamp(bound))),
    }
}

struct Name(Twin);

type Moves = Vec<Move<World, Harm>>;

fn push(
    out: &mut Moves,
    actor: &'static str,
    does: &'static str,
    page: usize,
    to: Result<World, Harm>,
) {
    out.push(Move {
        compulsory: false,
        label: Label { actor, does, page },
        to,
    });
}

const WRITERS: [&str; 2] = ["writer 0", "writer 1"];

impl Name {
    /// Sends the writer's message to a holder. Returns the holder's answer, if it takes part.
    fn tell(&self, world: &mut World, w: usize, at: usize) -> bool {
        let writer = world.writers[w];
        let holder = &mut world.holders[at];
        let mut register = register(holder.promised, holder.accepted);
        match writer.step {
            Step::Opens => {
                if register.promise(epoch(writer.epoch)).is_err() {
                    return false;
                }
                holder.promised = writer.epoch;
                true
            }
            Step::Completes | Step::Publishes => {
                if writer.sessions[at] != Some(holder.lives) {
                    return false;
                }
                let bound = (writer.epoch, writer.version, writer.value);
                if self.0 == Twin::ForgetsThePromiseAtAVersion {
                    register = Register::default();
                }
                if register.accept(&ballot(stamp(bound))).is_err() {
                    return false;
                }
                holder.promised = turn(register.promised);
                holder.accepted = Some(bound);
                true
            }
            _ => unreachable!("nothing is sent"),
        }
    }

    /// Takes the answer of a holder.
    fn hear(&self, world: &mut World, w: usize, at: usize) {
        let holder = world.holders[at];
        let writer = &mut world.writers[w];
        writer.answered |= 1 << at;
        match writer.step {
            Step::Opens => {
                writer.heard[at] = holder.accepted;
                writer.sessions[at] = Some(holder.lives);
            }
            _ => {
                let is_read = holder.read != 0 && holder.read != writer.value;
                writer.said[at] = Some(is_read);
            }
        }
    }

    fn answers(&self, world: &World, w: usize) -> Vec<Answer> {
        let writer = &world.writers[w];
        let answered = (0..HOLDERS).filter(|at| writer.answered & (1 << at) != 0);
        answered
            .map(|at| {
                let lives = writer.sessions[at].expect("it has answered");
                let (id, mut heard) = (id(at, lives), writer.heard[at]);
                if self.0 == Twin::TakesUnknownForNothing && heard.is_none() {
                    heard = Some(([0; 2], 0, 1));
                    return (self::id(at, 0), register(writer.epoch, heard));
                }
                (id, register(writer.epoch, heard))
            })
            .collect()
    }

    fn writer(&self, world: &World, w: usize, out: &mut Moves) {
        let name = WRITERS[w];
        let writer = world.writers[w];
        let mut next = *world;
        match writer.step {
            Step::Idle => {
                // The counters are heard before the promise is asked for; they may be out of date.
                for bits in [0b011u8, 0b110] {
                    let heard: Vec<Answer> = (0..HOLDERS)
                        .filter(|at| bits & (1 << at) != 0)
                        .map(|at| {
                            let holder = world.holders[at];
                            (
                                id(at, holder.lives),
                                register(holder.promised, holder.accepted),
                            )
                        })
                        .collect();
                    let mut next = *world;
                    next.writers[w].epoch = turn(next_epoch(&heard, w as u64 + 1));
                    next.writers[w].step = Step::Opens;
                    next.writers[w].left = PUBLICATIONS[w];
                    push(out, name, "draws an epoch", 0, Ok(next));
                }
            }
            Step::Opens | Step::Completes | Step::Publishes => {
                // The writers ask the holders in opposite orders.
                let order = if w == 0 { [0, 1, 2] } else { [2, 1, 0] };
                let left = order.into_iter().find(|at| writer.asked & (1 << at) == 0);
                if let Some(at) = left {
                    let mut next = *world;
                    next.writers[w].asked |= 1 << at;
                    if world.losses_left > 0 {
                        let mut lost = next;
                        lost.losses_left -= 1;
                        push(out, name, "loses a request to", at, Ok(lost));
                    }
                    let is_taken = self.tell(&mut next, w, at);
                    if is_taken && world.losses_left > 0 {
                        let mut lost = next;
                        lost.losses_left -= 1;
                        push(out, name, "loses the answer of", at, Ok(lost));
                    }
                    if is_taken {
                        self.hear(&mut next, w, at);
                    }
                    push(out, name, "asks", at, Ok(next));
                }
                self.decide(world, w, out);
            }
            Step::Writes => {
                // A slot that the last version does not have, on all servers that answer.
                let parent = writer.value;
                let slot = 1 - world.slot(parent);
                let connected = |at: &usize| writer.sessions[*at] == Some(world.holders[*at].lives);
                let said = (0..HOLDERS).filter(connected).map(|at| writer.said[at]);
                if is_unread(said) || self.0 == Twin::ReusesWhatIsRead {
                    next.made += 1;
                    let value = next.made;
                    next.parents[usize::from(value)] = parent;
                    next.slots[usize::from(value)] = slot as u8;
                    for at in (0..HOLDERS).filter(connected) {
                        next.holders[at].slots[slot] = value;
                    }
                    let it = &mut next.writers[w];
                    it.value = value;
                    it.version += 1;
                    it.left -= 1;
                    (it.step, it.asked, it.answered, it.said) =
                        (Step::Publishes, 0, 0, [None; HOLDERS]);
                    let to = match next.has_wrong_bytes() {
                        true => Err(Harm::WrongBytes),
                        false => Ok(next),
                    };
                    push(out, name, "writes the slot", slot, to);
                }
            }
            Step::Ended => {}
        }
    }

    /// Goes on to the next step, if enough holders have answered.
    fn decide(&self, world: &World, w: usize, out: &mut Moves) {
        let name = WRITERS[w];
        let writer = world.writers[w];
        let mut next = *world;
        let it = &mut next.writers[w];
        match writer.step {
            Step::Opens => {
                let answers = self.answers(world, w);
                let newest = match to_write(&answers) {
                    Ok(Some(newest)) => newest.stamp,
                    _ if self.0 == Twin::TakesAStaleBinding => {
                        let mut accepted = answers.iter().filter_map(|it| it.1.accepted.as_ref());
                        match accepted.next() {
                            Some(first) => first.stamp,
                            None => return,
                        }
                    }
                    _ => return,
                };
                let heard = writer.heard.iter().flatten();
                let value = heard
                    .filter(|it| stamp(**it) == newest)
                    .map(|it| it.2)
                    .next();
                let value = value.unwrap_or(1);
                (it.step, it.value, it.version) = (Step::Completes, value, 1);
                (it.asked, it.answered) = (0, 0);
                // A holder that was silent has no part in the turn.
                if self.0 == Twin::DoesNotComplete {
                    it.step = Step::Writes;
                    it.said = [Some(false); HOLDERS];
                }
                push(out, name, "takes the newest binding", 0, Ok(next));
            }
            Step::Completes | Step::Publishes => {
                let servers: Vec<ServerId> = (0..HOLDERS)
                    .filter(|at| writer.answered & (1 << at) != 0)
                    .map(|at| id(at, writer.sessions[at].unwrap_or(0)))
                    .collect();
                if !is_published(&ballot(Stamp::default()), &[], &servers) {
                    return;
                }
                it.step = match it.left {
                    0 => Step::Ended,
                    _ => Step::Writes,
                };
                let bound = (writer.epoch, writer.version, writer.value);
                let to = match next.note(bound) {
                    true => Ok(next),
                    false => Err(Harm::Lost),
                };
                push(out, name, "has published", 0, to);
            }
            _ => {}
        }
    }

    fn reader(&self, world: &World, out: &mut Moves) {
        let reader = world.reader;
        if reader.reads != 0 {
            return;
        }
        if let Some(at) = [1, 2, 0]
            .into_iter()
            .find(|at| reader.asked & (1 << at) == 0)
        {
            let mut next = *world;
            let it = &mut next.reader;
            if !it.has_begun {
                (it.has_begun, it.floor) = (true, world.floor.2);
            }
            it.asked |= 1 << at;
            let holder = &mut next.holders[at];
            if let Some(bound) = holder.accepted {
                holder.read = bound.2;
                it.heard[at] = Some((holder.lives, bound));
            }
            let mut lost = *world;
            lost.reader = next.reader;
            lost.reader.heard[at] = None;
            if world.losses_left > 0 {
                lost.losses_left -= 1;
                push(out, "reader", "loses a request to", at, Ok(lost));
            }
            push(out, "reader", "asks", at, Ok(next));
        }
        let heard = (0..HOLDERS).filter_map(|at| Some((at, reader.heard[at]?)));
        let heard: Vec<_> = heard.collect();
        let answers: Vec<Answer> = (heard.iter())
            .map(|&(at, (lives, bound))| (id(at, lives), register(bound.0, Some(bound))))
            .collect();
        let chosen = match to_read(&answers) {
            Ok(Some(chosen)) => chosen.stamp,
            _ if self.0 == Twin::ReadsWhatFewAgreeOn => {
                match answers
                    .iter()
                    .filter_map(|it| it.1.accepted.as_ref())
                    .map(|it| it.stamp)
                    .max()
                {
                    Some(stamp) => stamp,
                    None => return,
                }
            }
            _ => return,
        };
        let mut next = *world;
        let mut read = None;
        for &(at, (_, bound)) in &heard {
            match stamp(bound) == chosen {
                true => read = Some(bound),
                // Another version is not what the reader wants.
                false => next.holders[at].read = 0,
            }
        }
        let read = read.expect("a binding that was heard of");
        next.reader.reads = read.2;
        // Answers that come later are of no use.
        next.reader.asked = 0b111;
        let is_fresh = world.is_before(reader.floor, read.2);
        let to = match (is_fresh, next.has_wrong_bytes(), next.note(read)) {
            (false, ..) => Err(Harm::Stale),
            (_, true, _) => Err(Harm::WrongBytes),
            (.., false) => Err(Harm::Lost),
            _ => Ok(next),
        };
        push(out, "reader", "chooses", 0, to);
    }

    fn starts(&self, world: &World, out: &mut Moves) {
        for at in 0..HOLDERS {
            if world.starts_left == 0 {
                return;
            }
            let mut next = *world;
            next.starts_left -= 1;
            // Sessions and readings end with the process.
            for writer in &mut next.writers {
                if writer.sessions[at].is_some() {
                    writer.sessions[at] = Some(u8::MAX);
                }
            }
            next.holders[at].read = 0;
            if world.blank_starts_left > 0 {
                let mut blank = next;
                blank.blank_starts_left -= 1;
                blank.holders[at] = Holder {
                    lives: world.holders[at].lives + 1,
                    ..Holder::default()
                };
                push(
                    out,
                    "holder",
                    "starts anew without its memory",
                    at,
                    Ok(blank),
                );
            }
            if self.0 == Twin::ForgetsThePromiseAtAStart {
                let accepted = next.holders[at].accepted;
                next.holders[at].promised = accepted.map_or([0; 2], |it| it.0);
            }
            push(out, "holder", "starts anew", at, Ok(next));
        }
    }
}

impl Model for Name {
    type World = World;
    type Harm = Harm;

    fn start(&self) -> World {
        let holder = Holder {
            accepted: Some(([0; 2], 0, 1)),
            slots: [1, 0],
            ..Holder::default()
        };
        World {
            holders: [holder; HOLDERS],
            writers: [Writer::default(); 2],
            reader: Reader::default(),
            parents: [0; VALUES],
            slots: [0; VALUES],
            made: 1,
            floor: ([0; 2], 0, 1),
            losses_left: 1,
            starts_left: 1,
            blank_starts_left: 1,
        }
    }

    fn moves(&self, world: &World, out: &mut Moves) {
        self.writer(world, 0, out);
        self.writer(world, 1, out);
        self.reader(world, out);
        self.starts(world, out);
    }

    fn judge(&self, _: &World, _: bool) -> Result<(), Harm> {
        Ok(())
    }

    fn never_rests(&self) -> Harm {
        unreachable!("nothing is compulsory")
    }
}

#[test]
#[ignore = "takes minutes, and needs gigabytes"]
fn what_was_published_or_read_stays_whatever_is_lost_and_starts_anew() {
    match explore(&Name(Twin::Good)) {
        Ok(summary) => {
            println!("{summary}");
            assert!(summary.worlds > 100_000);
        }
        Err(counterexample) => panic!("{counterexample}"),
    }
}

#[test]
#[ignore = "takes minutes, and needs gigabytes"]
fn each_mistake_is_caught() {
    for twin in [
        Twin::TakesAStaleBinding,
        Twin::ReadsWhatFewAgreeOn,
        Twin::ForgetsThePromiseAtAStart,
        Twin::ForgetsThePromiseAtAVersion,
        Twin::TakesUnknownForNothing,
        Twin::DoesNotComplete,
        Twin::ReusesWhatIsRead,
    ] {
        match explore(&Name(twin)) {
            Ok(summary) => panic!("{twin:?} does no harm: {summary}"),
            Err(counterexample) => println!("{twin:?}: {counterexample}"),
        }
    }
}
