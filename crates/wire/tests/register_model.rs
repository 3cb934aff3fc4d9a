//! Every interleaving of two writers, a reader and three holders of one name, with messages lost,
//! sessions that end, and a holder that starts anew with and without its memory.
//!
//! The rule: what was published, removed or read stays in the history of all that is published or
//! read later, and a reader reads nothing older than what was published before it began. Each
//! possible mistake is made here once, by a twin that must be caught. `--nocapture` prints for each
//! twin the shortest way to its harm. Slots of versions that are read are left to
//! `store/src/tests/shared_names.rs`.

#[path = "../../pager/tests/protocol_model/explore.rs"]
#[expect(dead_code, reason = "nothing here is compulsory")]
mod explore;

use std::fmt;

use explore::{Label, Model, Move, explore};
use farpage_wire::{
    ServerId,
    register::{
        Answer, Ballot, Epoch, Register, Stamp, is_published, next_epoch, to_read, to_write,
    },
};

const HOLDERS: usize = 3;
/// Number of values that can exist, with none.
const VALUES: usize = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Twin {
    Good,
    /// A writer goes on from the first binding that it hears of.
    TakesAStaleBinding,
    /// A reader reads the newest binding that it hears of, whoever agrees.
    ReadsWhatFewAgreeOn,
    /// A reader takes the word of one holder that a binding is chosen, and asks no other.
    ReadsWhatOneKnows,
    /// A holder that starts anew with its binding has forgotten its promise.
    ForgetsThePromiseAtAStart,
    /// A holder that has lost its memory is taken for one that knows of no newer binding.
    TakesUnknownForNothing,
    /// Holders forget a removed name once a majority has the tombstone.
    ForgetsTooSoon,
}

#[derive(Debug, PartialEq, Eq)]
enum Harm {
    /// Something that was published or read is not in the history of what came later.
    Lost,
    /// A reader got something older than what was published before it began.
    Stale,
}

/// Number of a version or of a tombstone: 0 for none.
type Value = u8;

/// Counter and writer of an epoch: less than 256 of each.
type Turn = [u8; 2];

/// A binding: its life, turn and place in the turn, and the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Bound {
    life: u8,
    turn: Turn,
    version: u8,
    value: Value,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Holder {
    /// Number of times that the holder has lost its memory: part of its identity.
    lives: u8,
    promised: Turn,
    accepted: Option<Bound>,
    is_chosen: bool,
    /// Writer that has claimed the name here: 0 for none.
    claimed: u8,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Step {
    #[default]
    Claims,
    Promises,
    /// Makes all holders accept a tombstone of a new life.
    Founds,
    /// Makes holders accept the binding that was found again.
    Completes,
    Publishes,
    Removes,
    /// Says that the binding is published.
    Settles,
    Forgets,
    Ended,
}

/// Purpose of a writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Aim {
    Publish,
    Remove,
    /// Remove the region, and publish another of its name.
    Replace,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Writer {
    aim: Aim,
    step: Step,
    life: u8,
    epoch: Turn,
    /// Holders that have been asked in this step, as bits, and those that have answered.
    asked: u8,
    answered: u8,
    /// Holders at which the name is claimed, as bits, and their answers.
    claims: u8,
    heard: [(u8, Turn, Option<Bound>); HOLDERS],
    /// Value that is being accepted, or the last one of this turn.
    value: Value,
    version: u8,
    /// Number of turns after this one.
    turns_left: u8,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Reader {
    is_done: bool,
    /// Newest value that had been published or read before the reader began.
    floor: Value,
    asked: u8,
    heard: [Option<(u8, Bound, bool)>; HOLDERS],
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct World {
    holders: [Holder; HOLDERS],
    writers: [Writer; 2],
    reader: Reader,
    /// Value that each value follows, and the values that are tombstones, as bits.
    parents: [Value; VALUES],
    removed: u16,
    made: u8,
    lives: u8,
    /// The newest value that was published or read.
    floor: Value,
    faults: Faults,
}

/// Number of faults that are left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Faults {
    losses: u8,
    ends: u8,
    starts: u8,
    blank_starts: u8,
}

impl fmt::Display for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for holder in &self.holders {
            write!(f, "[{}: {:?} ", holder.lives, holder.promised)?;
            if let Some(it) = holder.accepted {
                let Bound {
                    life,
                    turn,
                    version,
                    value,
                } = it;
                write!(f, "life {life} {turn:?}.{version} = {value} ")?;
            }
            write!(f, "{} by {}] ", holder.is_chosen, holder.claimed)?;
        }
        let writers = self.writers.map(|it| (it.step, it.value, it.answered));
        write!(f, "{writers:?}")
    }
}

impl World {
    fn is_before(&self, old: Value, mut new: Value) -> bool {
        while new != old && new != 0 {
            new = self.parents[usize::from(new)];
        }
        new == old
    }

    /// Notes a value that was published or read. False if it and the newest one so far have
    /// different histories.
    fn note(&mut self, value: Value) -> bool {
        if self.follows(self.floor, value) {
            self.floor = value;
            return true;
        }
        self.is_before(value, self.floor)
    }

    /// True if `new` loses nothing of `old`. A name that is removed once more is as before: a
    /// writer that has heard of a tombstone may bury a name that all holders have forgotten since.
    fn follows(&self, old: Value, new: Value) -> bool {
        let are_removed = [old, new].iter().all(|it| self.removed & 1 << it != 0);
        are_removed || self.is_before(old, new)
    }

    /// Makes a value that follows another.
    fn make(&mut self, parent: Value, removed: bool) -> Value {
        self.made += 1;
        let value = self.made;
        self.parents[usize::from(value)] = parent;
        self.removed |= u16::from(removed) << value;
        value
    }

    fn ballot(&self, bound: Bound) -> Ballot {
        Ballot {
            life: bound.life.into(),
            stamp: Stamp {
                epoch: epoch(bound.turn),
                version: bound.version.into(),
            },
            holders: (0..HOLDERS).map(|at| id(at, 0)).collect(),
            removed: self.removed & 1 << bound.value != 0,
        }
    }

    fn register(&self, promised: Turn, accepted: Option<Bound>, is_chosen: bool) -> Register {
        Register {
            promised: epoch(promised),
            accepted: accepted.map(|bound| self.ballot(bound)),
            is_chosen,
        }
    }
}

fn id(at: usize, lives: u8) -> ServerId {
    ServerId((at as u128) << 8 | u128::from(lives))
}

fn epoch([counter, writer]: Turn) -> Epoch {
    Epoch {
        counter: counter.into(),
        writer: writer.into(),
    }
}

fn bits(of: u8) -> impl Iterator<Item = usize> {
    (0..HOLDERS).filter(move |at| of & 1 << at != 0)
}

struct Name {
    twin: Twin,
    aims: [Aim; 2],
    faults: Faults,
    /// True if the first writer has two turns, and nobody reads.
    is_long: bool,
}

type Moves = Vec<Move<World, Harm>>;

fn push(
    out: &mut Moves,
    (actor, does): (&'static str, &'static str),
    page: usize,
    to: Result<World, Harm>,
) {
    out.push(Move {
        compulsory: false,
        label: Label { actor, does, page },
        to,
    });
}

const WRITERS: [&str; 2] = ["writer 1", "writer 2"];

impl Name {
    /// Sends the writer's message to a holder. True if the holder does what it says.
    fn tell(&self, world: &mut World, w: usize, at: usize) -> bool {
        let (writer, holder) = (world.writers[w], world.holders[at]);
        let me = w as u8 + 1;
        if writer.step == Step::Claims {
            world.holders[at].claimed = match holder.claimed {
                0 => me,
                other => other,
            };
            return holder.claimed == 0 || holder.claimed == me;
        }
        if holder.claimed != me || writer.heard[at].0 != holder.lives {
            return false;
        }
        if writer.step == Step::Forgets {
            world.holders[at] = Holder {
                lives: holder.lives,
                claimed: me,
                ..Holder::default()
            };
            return true;
        }
        let mut register = world.register(holder.promised, holder.accepted, holder.is_chosen);
        let is_taken = match writer.step {
            Step::Promises => register.promise(epoch(writer.epoch)).is_ok(),
            step => {
                let bound = writer.bound();
                let accepted = register.accept(&world.ballot(bound), step == Step::Settles);
                world.holders[at].accepted = match accepted {
                    Ok(()) => Some(bound),
                    Err(_) => holder.accepted,
                };
                accepted.is_ok()
            }
        };
        let holder = &mut world.holders[at];
        holder.promised = [
            register.promised.counter as u8,
            register.promised.writer as u8,
        ];
        holder.is_chosen = register.is_chosen;
        is_taken
    }

    fn answers(&self, world: &World, w: usize) -> Vec<Answer> {
        let writer = &world.writers[w];
        let mut heard: Vec<_> = bits(writer.claims)
            .map(|at| (at, writer.heard[at]))
            .collect();
        if self.twin == Twin::TakesUnknownForNothing {
            let known = heard.iter().find_map(|(_, it)| it.2);
            for (_, it) in &mut heard {
                *it = (0, it.1, it.2.or(known));
            }
        }
        let answer = |(at, (lives, promised, accepted))| {
            (id(at, lives), world.register(promised, accepted, false))
        };
        heard.into_iter().map(answer).collect()
    }

    fn writer(&self, world: &World, w: usize, out: &mut Moves) {
        let writer = world.writers[w];
        if writer.step == Step::Ended {
            return;
        }
        // The writers ask the holders in opposite orders.
        let order = if w == 0 { [0, 1, 2] } else { [2, 1, 0] };
        let is_wanted = |at: &usize| {
            let is_claimed = writer.claims & 1 << at != 0;
            (writer.step == Step::Claims || is_claimed) && writer.asked & 1 << at == 0
        };
        if let Some(at) = order.into_iter().find(is_wanted) {
            let mut next = *world;
            next.writers[w].asked |= 1 << at;
            let mut lost = next;
            if world.faults.losses > 0 {
                lost.faults.losses -= 1;
                push(out, (WRITERS[w], "loses a request to"), at, Ok(lost));
            }
            let is_taken = self.tell(&mut next, w, at);
            if is_taken && world.faults.losses > 0 {
                let mut lost = next;
                lost.faults.losses -= 1;
                push(out, (WRITERS[w], "loses the answer of"), at, Ok(lost));
            }
            if is_taken {
                let holder = next.holders[at];
                let it = &mut next.writers[w];
                it.answered |= 1 << at;
                if it.step == Step::Claims {
                    it.claims |= 1 << at;
                    it.heard[at] = (holder.lives, holder.promised, holder.accepted);
                }
            }
            push(out, (WRITERS[w], "asks"), at, Ok(next));
            return;
        }
        let mut next = *world;
        let to = self.decide(&mut next, w);
        let it = &mut next.writers[w];
        (it.asked, it.answered) = (0, 0);
        if it.step == Step::Ended {
            // What an ended writer knew makes no difference.
            let new = Writer::new(it.aim);
            *it = match it.turns_left.checked_sub(1) {
                Some(turns_left) => Writer { turns_left, ..new },
                None => Writer {
                    step: Step::Ended,
                    ..new
                },
            };
            for holder in &mut next.holders {
                holder.claimed = if holder.claimed == w as u8 + 1 {
                    0
                } else {
                    holder.claimed
                };
            }
        }
        push(out, (WRITERS[w], "goes on"), 0, to.map(|()| next));
    }

    /// Goes on to the next step, as the answers say.
    fn decide(&self, world: &mut World, w: usize) -> Result<(), Harm> {
        let writer = world.writers[w];
        let answers = self.answers(world, w);
        let accepted: Vec<ServerId> = bits(writer.answered)
            .map(|at| id(at, writer.heard[at].0))
            .collect();
        let has_all = writer.answered == 0b111;
        let is_published = is_published(&world.ballot(writer.bound()), &accepted);
        let step = match writer.step {
            Step::Claims => {
                // Too few answers, or those of two lives, are an error.
                let mut last = to_write(&answers).ok().flatten();
                if self.twin == Twin::TakesAStaleBinding {
                    last = answers.iter().find_map(|(_, it)| it.accepted.as_ref());
                }
                let last = last.map(|it| it.stamp);
                let heard = bits(writer.claims).filter_map(|at| writer.heard[at].2);
                let last = heard
                    .into_iter()
                    .find(|it| Some(world.ballot(*it).stamp) == last);
                let it = next_epoch(&answers, w as u64 + 1);
                let it = [it.counter as u8, it.writer as u8];
                world.writers[w].epoch = it;
                world.writers[w].version = 0;
                match last {
                    Some(last) => {
                        world.writers[w].life = last.life;
                        world.writers[w].value = last.value;
                        Step::Promises
                    }
                    // A new life, after the name was forgotten.
                    None if writer.aim == Aim::Replace && writer.value != 0 => {
                        let is_free = |at: usize| writer.heard[at].2.is_none();
                        if !(writer.claims == 0b111 && bits(writer.claims).all(is_free)) {
                            world.writers[w].step = Step::Ended;
                            return Ok(());
                        }
                        world.lives += 1;
                        world.writers[w].life = world.lives;
                        let value = world.make(writer.value, true);
                        world.writers[w].value = value;
                        Step::Promises
                    }
                    None => Step::Ended,
                }
            }
            Step::Promises if !has_two(writer.answered) => Step::Ended,
            Step::Promises => {
                let is_new = !bits(writer.claims).any(|at| writer.heard[at].2.is_some());
                match writer.aim {
                    _ if is_new => Step::Founds,
                    Aim::Publish => {
                        world.writers[w].version = 1;
                        Step::Completes
                    }
                    Aim::Remove | Aim::Replace => self.propose(world, w, true),
                }
            }
            Step::Founds => {
                if !has_all {
                    world.writers[w].step = Step::Ended;
                    return Ok(());
                }
                self.note(world, writer.value)?;
                self.propose(world, w, false)
            }
            Step::Completes if is_published => {
                self.note(world, writer.value)?;
                match world.removed & 1 << writer.value != 0 {
                    true => Step::Ended,
                    false => self.propose(world, w, false),
                }
            }
            Step::Publishes | Step::Removes if is_published => {
                self.note(world, writer.value)?;
                let few = self.twin == Twin::ForgetsTooSoon;
                match writer.step {
                    Step::Removes if has_all || few => Step::Forgets,
                    _ => {
                        world.writers[w].claims = writer.answered;
                        Step::Settles
                    }
                }
            }
            // The name is claimed anew: the records are gone.
            Step::Forgets if has_all && writer.aim == Aim::Replace => {
                world.writers[w].claims = 0;
                Step::Claims
            }
            _ => Step::Ended,
        };
        world.writers[w].step = step;
        Ok(())
    }

    /// Makes the next value of the writer's turn.
    fn propose(&self, world: &mut World, w: usize, removed: bool) -> Step {
        let value = world.make(world.writers[w].value, removed);
        let it = &mut world.writers[w];
        it.value = value;
        it.version += 1;
        match removed {
            true => Step::Removes,
            false => Step::Publishes,
        }
    }

    fn note(&self, world: &mut World, value: Value) -> Result<(), Harm> {
        world.note(value).then_some(()).ok_or(Harm::Lost)
    }

    fn reader(&self, world: &World, out: &mut Moves) {
        let reader = world.reader;
        if reader.is_done {
            return;
        }
        let mut order = [1, 2, 0].into_iter();
        if let Some(at) = order.find(|at| reader.asked & 1 << at == 0) {
            let mut next = *world;
            let it = &mut next.reader;
            if it.asked == 0 {
                it.floor = world.floor;
            }
            it.asked |= 1 << at;
            if world.faults.losses > 0 {
                let mut lost = next;
                lost.faults.losses -= 1;
                push(out, ("reader", "loses a request to"), at, Ok(lost));
            }
            let holder = world.holders[at];
            next.reader.heard[at] =
                (holder.accepted).map(|it| (holder.lives, it, holder.is_chosen));
            push(out, ("reader", "asks"), at, Ok(next));
            return;
        }
        let heard = (0..HOLDERS).filter_map(|at| Some((at, reader.heard[at]?)));
        let heard: Vec<_> = heard.collect();
        let answers: Vec<Answer> = (heard.iter())
            .map(|&(at, (lives, bound, is_chosen))| {
                (
                    id(at, lives),
                    world.register(bound.turn, Some(bound), is_chosen),
                )
            })
            .collect();
        let accepted = || answers.iter().filter(|(_, it)| it.accepted.is_some());
        let ballot = |it: &&Answer| it.1.accepted.as_ref().map(|it| it.stamp);
        let found = match self.twin {
            Twin::ReadsWhatFewAgreeOn => accepted().max_by_key(ballot),
            Twin::ReadsWhatOneKnows => accepted().find(|(_, it)| it.is_chosen),
            _ => None,
        };
        let found = found.and_then(|it| it.1.accepted.as_ref());
        let found = found.or_else(|| to_read(&answers).ok().flatten());
        let mut next = *world;
        // What an ended reader knew makes no difference.
        next.reader = Reader {
            is_done: true,
            ..Reader::default()
        };
        let Some(found) = found else {
            push(out, ("reader", "gives up"), 0, Ok(next));
            return;
        };
        let is_it =
            |(_, (_, bound, _)): &&(usize, (u8, Bound, bool))| world.ballot(*bound) == *found;
        let (_, (_, bound, _)) = heard.iter().find(is_it).expect("it was heard of");
        let to = match world.follows(reader.floor, bound.value) {
            false => Err(Harm::Stale),
            true => self.note(&mut next, bound.value).map(|()| next),
        };
        push(out, ("reader", "reads"), 0, to);
    }

    fn faults(&self, world: &World, out: &mut Moves) {
        for at in 0..HOLDERS {
            if world.faults.ends > 0 && world.holders[at].claimed != 0 {
                let mut next = *world;
                next.faults.ends -= 1;
                next.holders[at].claimed = 0;
                push(out, ("holder", "ends the session at"), at, Ok(next));
            }
            if world.faults.starts == 0 {
                continue;
            }
            let mut next = *world;
            next.faults.starts -= 1;
            next.holders[at].claimed = 0;
            if world.faults.blank_starts > 0 {
                let mut blank = next;
                blank.faults.blank_starts -= 1;
                blank.holders[at] = Holder {
                    lives: world.holders[at].lives + 1,
                    ..Holder::default()
                };
                let does = "starts anew without its memory";
                push(out, ("holder", does), at, Ok(blank));
            }
            if self.twin == Twin::ForgetsThePromiseAtAStart {
                let accepted = next.holders[at].accepted;
                next.holders[at].promised = accepted.map_or([0; 2], |it| it.turn);
            }
            push(out, ("holder", "starts anew"), at, Ok(next));
        }
    }
}

fn has_two(of: u8) -> bool {
    of.count_ones() >= 2
}

impl Writer {
    fn new(aim: Aim) -> Self {
        Self {
            aim,
            step: Step::Claims,
            life: 0,
            epoch: [0; 2],
            asked: 0,
            answered: 0,
            claims: 0,
            heard: [(0, [0; 2], None); HOLDERS],
            value: 0,
            version: 0,
            turns_left: 0,
        }
    }

    fn bound(&self) -> Bound {
        Bound {
            life: self.life,
            turn: self.epoch,
            version: self.version,
            value: self.value,
        }
    }
}

impl Model for Name {
    type World = World;
    type Harm = Harm;

    fn start(&self) -> World {
        let holder = Holder {
            accepted: Some(Bound {
                life: 1,
                turn: [0; 2],
                version: 0,
                value: 1,
            }),
            is_chosen: true,
            ..Holder::default()
        };
        let mut writers = self.aims.map(Writer::new);
        writers[0].turns_left = u8::from(self.is_long);
        World {
            holders: [holder; HOLDERS],
            writers,
            reader: Reader {
                is_done: self.is_long,
                ..Reader::default()
            },
            parents: [0; VALUES],
            removed: 0,
            made: 1,
            lives: 1,
            floor: 1,
            faults: self.faults,
        }
    }

    fn moves(&self, world: &World, out: &mut Moves) {
        self.writer(world, 0, out);
        self.writer(world, 1, out);
        self.reader(world, out);
        self.faults(world, out);
    }

    fn judge(&self, _: &World, _: bool) -> Result<(), Harm> {
        Ok(())
    }

    fn never_rests(&self) -> Harm {
        unreachable!("nothing is compulsory")
    }
}

/// Models of two writers, one for each kind of faults that they meet.
fn models(twin: Twin, aims: [Aim; 2]) -> Vec<Name> {
    let faults = [
        [2, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 1],
        [0, 1, 1, 0],
        [0, 0, 2, 0],
    ];
    let model = |[losses, ends, starts, blank_starts]: [u8; 4]| Name {
        twin,
        aims,
        faults: Faults {
            losses,
            ends,
            starts,
            blank_starts,
        },
        is_long: starts == 2,
    };
    faults.map(model).into()
}

const PUBLISH: [Aim; 2] = [Aim::Publish, Aim::Publish];
const REMOVE: [Aim; 2] = [Aim::Publish, Aim::Remove];
const REPLACE: [Aim; 2] = [Aim::Publish, Aim::Replace];
const REMOVE_TWICE: [Aim; 2] = [Aim::Replace, Aim::Remove];

#[test]
fn what_was_published_or_read_stays_whatever_is_lost_and_starts_anew() {
    let mut worlds = 0;
    let aims = [PUBLISH, REMOVE, REPLACE, REMOVE_TWICE];
    for model in aims.into_iter().flat_map(|aims| models(Twin::Good, aims)) {
        let (aims, faults) = (model.aims, model.faults);
        match explore(&model) {
            Ok(summary) => {
                println!("{aims:?}, {faults:?}: {summary}");
                worlds += summary.worlds;
            }
            Err(counterexample) => panic!("{aims:?}, {faults:?}: {counterexample}"),
        }
    }
    assert!(worlds > 100_000, "{worlds}");
}

#[test]
fn each_mistake_is_caught() {
    for (twin, aims) in [
        (Twin::TakesAStaleBinding, PUBLISH),
        (Twin::ReadsWhatFewAgreeOn, PUBLISH),
        (Twin::ReadsWhatOneKnows, PUBLISH),
        (Twin::ForgetsThePromiseAtAStart, PUBLISH),
        (Twin::TakesUnknownForNothing, REMOVE),
        (Twin::ForgetsTooSoon, REMOVE),
    ] {
        // The smallest model comes first.
        let harms = models(twin, aims).into_iter().rev();
        match harms.filter_map(|it| explore(&it).err()).next() {
            None => panic!("{twin:?} does no harm"),
            Some(counterexample) => println!("{twin:?}: {counterexample}"),
        }
    }
}
