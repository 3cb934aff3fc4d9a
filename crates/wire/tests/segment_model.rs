//! Every interleaving of two clients that reach a chunk by themselves, an evictor that moves it out
//! of memory, the server's threads that bring it back, and the end of the lease, with the store
//! buffers of all processors.
//!
//! The rule: a READ gives what was written, whatever left meanwhile; no thread waits for ever; and
//! no memory stays behind uncounted. Each possible mistake is made here once, by a twin that must
//! be caught. `--nocapture` prints for each twin the shortest way to its harm.

#[path = "../../pager/tests/protocol_model/explore.rs"]
mod explore;

use std::fmt;

use explore::{Label, Model, Move, explore};
use farpage_wire::segment::{Look, SegmentWord};

/// The chunk's bit in its segment's word.
const CHUNK: u32 = 1;
/// Number of tries that a client makes by itself before it asks the server.
const TRIES: u8 = 2;
/// Value of another chunk's bytes, in a place that was used again.
const FOREIGN: u8 = 9;
/// Bytes of the chunk: two of the first client's slot, one of the second one's.
const CELLS: usize = 3;
type Bytes = [u8; CELLS];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Twin {
    Good,
    /// The client looks at the word while its stores are still in its buffer.
    LooksBeforeItsWriteIsComplete,
    /// The client does not look a second time.
    LooksOnce,
    /// The evictor reads the bytes while its change of the word is still in its buffer.
    CopiesBeforeTheWordIsSeen,
    /// The evictor changes the word after it has copied the bytes.
    CopiesBeforeItChangesTheWord,
    /// The evictor takes the memory away and changes the word then.
    PunchesBeforeItChangesTheWord,
    /// The word says that the chunk has come before its bytes have.
    SaysHotBeforeTheBytesAreThere,
    /// A chunk that came back has the version that it had before.
    VersionComesBack,
    /// The server answers from a place that another chunk's bytes have taken by now.
    AnswersFromAReusedPlace,
    /// The server does not look for memory that was touched after it had been taken away.
    LeavesTouchedHoles,
}

#[derive(Debug, PartialEq, Eq)]
enum Harm {
    WrongBytes,
    MemoryStays,
    Stuck,
}

/// Operation of a client. Each READ must give the value of the WRITE before it.
#[derive(Clone, Copy)]
enum Op {
    Write(u8),
    Read,
}

const PROGRAMS: [&[Op]; 2] = [
    &[Op::Write(1), Op::Read, Op::Write(2), Op::Read],
    &[Op::Write(1), Op::Read],
];

/// First and last cell of each client's slot.
const SLOTS: [(usize, usize); 2] = [(0, 1), (2, 2)];

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    /// Looks at the word.
    Look,
    /// Moves the cell of this number.
    Move(usize),
    /// Waits until the client's stores have left its buffer.
    Fence,
    LookAgain,
    /// Waits for the server, which was asked.
    Asked,
    /// The server has read where the bytes are, and does not own the chunk. Made by a twin only.
    AnswersFromThere,
    /// The server holds the chunk for the client.
    Held,
    Ended,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Client {
    op: usize,
    step: Step,
    look: Option<Look>,
    tries: u8,
    /// Bytes that a READ has found so far.
    found: Bytes,
    /// Value of the client's last complete WRITE.
    wrote: u8,
    /// Stores that no other actor sees yet: cell and value, oldest first.
    buffer: [Option<(usize, u8)>; 2],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Place {
    Hole,
    Hot,
    /// The evictor or the server owns the chunk.
    Busy,
    Stored,
    Released,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Evictor {
    Idle,
    Fence,
    Copy(usize),
    Word,
    Punch,
    WordAfterPunch,
    Publish,
}

/// Client that a fetch is for, and number of the cells that have been put back.
type Fetch = Option<(usize, usize)>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct World {
    word: SegmentWord,
    /// The evictor's change of the word, while the change is in the evictor's buffer.
    buffered: Option<SegmentWord>,
    place: Place,
    holds: u8,
    memory: Bytes,
    /// True if there is a page: a touched hole has one.
    is_backed: bool,
    stored: Bytes,
    evictor: Evictor,
    copy: Bytes,
    fetch: Fetch,
    evictions_left: u8,
    clients: [Client; 2],
}

impl fmt::Display for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            word,
            place,
            memory,
            stored,
            ..
        } = self;
        let (version, chunks) = (word.0 >> 32, word.chunks());
        write!(
            f,
            "{version}.{chunks} {place:?} memory {memory:?} stored {stored:?}"
        )
    }
}

struct Segment(Twin);

impl Segment {
    /// Returns the word for when the chunk leaves, as the twin makes it.
    fn left(&self, word: SegmentWord) -> SegmentWord {
        match self.0 {
            Twin::VersionComesBack => SegmentWord(word.0 & !u64::from(CHUNK)),
            _ => word.without(CHUNK),
        }
    }
}

impl World {
    fn touch(&mut self, cell: usize) -> &mut u8 {
        self.is_backed = true;
        &mut self.memory[cell]
    }

    fn punch(&mut self) {
        (self.is_backed, self.memory) = (false, [0; CELLS]);
    }

    /// Completes the operation of client `i`, and checks the bytes of a READ.
    fn complete(&mut self, i: usize) -> Result<(), Harm> {
        let client = &mut self.clients[i];
        let (first, last) = SLOTS[i];
        match PROGRAMS[i][client.op] {
            Op::Write(value) => client.wrote = value,
            Op::Read => {
                let mut found = client.found[first..=last].iter();
                if found.any(|found| *found != client.wrote) {
                    return Err(Harm::WrongBytes);
                }
            }
        }
        client.op += 1;
        (client.look, client.tries, client.found) = (None, 0, [0; CELLS]);
        client.step = match client.op < PROGRAMS[i].len() {
            true => Step::Look,
            false => Step::Ended,
        };
        Ok(())
    }
}

type Moves = Vec<Move<World, Harm>>;

fn push(out: &mut Moves, actor: &'static str, does: &'static str, to: Result<World, Harm>) {
    add(out, true, actor, does, to);
}

fn add(
    out: &mut Moves,
    compulsory: bool,
    actor: &'static str,
    does: &'static str,
    to: Result<World, Harm>,
) {
    let label = Label {
        actor,
        does,
        page: 0,
    };
    out.push(Move {
        compulsory,
        label,
        to,
    });
}

impl Segment {
    fn client(&self, world: &World, i: usize, out: &mut Moves) {
        let name = ["client A", "client B"][i];
        let (first, last) = SLOTS[i];
        let client = world.clients[i];
        let mut next = *world;
        if let Some((cell, value)) = client.buffer[0] {
            let mut next = next;
            *next.touch(cell) = value;
            next.clients[i].buffer = [client.buffer[1], None];
            push(out, name, "has a store seen", Ok(next));
        }
        let me = &mut next.clients[i];
        match client.step {
            Step::Ended => {}
            Step::Look => {
                me.look = world.word.look(CHUNK);
                me.tries += 1;
                let alone = me.look.is_some() && me.tries <= TRIES;
                me.step = if alone {
                    Step::Move(first)
                } else {
                    Step::Asked
                };
                push(out, name, "looks at the word", Ok(next));
            }
            Step::Move(cell) => {
                me.step = if cell < last {
                    Step::Move(cell + 1)
                } else {
                    Step::Fence
                };
                match PROGRAMS[i][client.op] {
                    Op::Write(value) => {
                        if let Some(free) = me.buffer.iter_mut().find(|entry| entry.is_none()) {
                            *free = Some((cell, value));
                            push(out, name, "stores", Ok(next));
                        }
                    }
                    Op::Read => {
                        let mut own = client.buffer.iter().flatten().rev();
                        let own = own.find(|(at, _)| *at == cell).map(|(_, value)| *value);
                        let found = own.unwrap_or_else(|| *next.touch(cell));
                        next.clients[i].found[cell] = found;
                        push(out, name, "loads", Ok(next));
                    }
                }
            }
            Step::Fence => {
                let is_empty = client.buffer == [None; 2];
                if is_empty || self.0 == Twin::LooksBeforeItsWriteIsComplete {
                    me.step = Step::LookAgain;
                    push(out, name, "goes on after its fence", Ok(next));
                }
            }
            Step::LookAgain => {
                let look = client.look.expect("it looked before");
                let to = if look.judge(world.word) || self.0 == Twin::LooksOnce {
                    next.complete(i).map(|()| next)
                } else {
                    me.step = Step::Look;
                    Ok(next)
                };
                push(out, name, "looks at the word again", to);
            }
            // The evictor's lock is not free before its stores are seen.
            Step::Asked if world.buffered.is_some() => {}
            Step::Asked => self.ask(world, i, out),
            Step::AnswersFromThere => {
                next.clients[i].found = world.stored;
                let to = next.complete(i).map(|()| next);
                push(out, name, "is served from there", to);
            }
            Step::Held => {
                for cell in first..=last {
                    match PROGRAMS[i][client.op] {
                        Op::Write(value) => *next.touch(cell) = value,
                        Op::Read => next.clients[i].found[cell] = *next.touch(cell),
                    }
                }
                next.holds -= 1;
                let to = next.complete(i).map(|()| next);
                push(out, "server", "moves the bytes", to);
            }
        }
    }

    /// Adds the server's moves for a client that has asked.
    fn ask(&self, world: &World, i: usize, out: &mut Moves) {
        let mut next = *world;
        match world.place {
            Place::Hot => {
                next.holds += 1;
                next.clients[i].step = Step::Held;
                push(out, "server", "holds the chunk", Ok(next));
            }
            Place::Hole | Place::Stored => {
                let is_read = matches!(PROGRAMS[i][world.clients[i].op], Op::Read);
                let is_stored = world.place == Place::Stored;
                if self.0 == Twin::AnswersFromAReusedPlace && is_stored && is_read {
                    let mut next = *world;
                    next.clients[i].step = Step::AnswersFromThere;
                    push(out, "server", "finds the place of the bytes", Ok(next));
                }
                if !is_stored {
                    next.stored = [0; CELLS];
                }
                (next.place, next.fetch) = (Place::Busy, Some((i, 0)));
                if self.0 == Twin::SaysHotBeforeTheBytesAreThere {
                    next.word = next.word.with(CHUNK);
                }
                push(out, "server", "owns the chunk to fetch it", Ok(next));
            }
            Place::Busy => {}
            Place::Released => {
                next.clients[i].step = Step::Ended;
                push(out, "server", "refuses", Ok(next));
            }
        }
    }

    fn fetch(&self, world: &World, out: &mut Moves) {
        let Some((client, cell)) = world.fetch else {
            return;
        };
        let mut next = *world;
        if cell < CELLS {
            *next.touch(cell) = world.stored[cell];
            next.fetch = Some((client, cell + 1));
            push(out, "server", "puts a byte back", Ok(next));
        } else {
            (next.place, next.fetch, next.holds) = (Place::Hot, None, world.holds + 1);
            next.word = next.word.with(CHUNK);
            next.clients[client].step = Step::Held;
            // Another chunk takes the place next.
            next.stored = [FOREIGN; CELLS];
            push(out, "server", "says that the chunk has come", Ok(next));
        }
    }

    fn evict(&self, world: &World, out: &mut Moves) {
        let copies_first = self.0 == Twin::CopiesBeforeItChangesTheWord;
        let punches_first = self.0 == Twin::PunchesBeforeItChangesTheWord;
        let mut next = *world;
        if let Some(word) = world.buffered {
            let mut next = next;
            (next.word, next.buffered) = (word, None);
            push(out, "evictor", "has its word seen", Ok(next));
        }
        match world.evictor {
            Evictor::Idle => {
                if world.place == Place::Hot && world.holds == 0 && world.evictions_left > 0 {
                    next.evictions_left -= 1;
                    next.place = Place::Busy;
                    if !copies_first && !punches_first {
                        next.buffered = Some(self.left(world.word));
                    }
                    next.evictor = Evictor::Fence;
                    add(out, false, "evictor", "owns the chunk", Ok(next));
                }
            }
            Evictor::Fence => {
                if world.buffered.is_none() || self.0 == Twin::CopiesBeforeTheWordIsSeen {
                    next.evictor = Evictor::Copy(0);
                    push(out, "evictor", "goes on after its fence", Ok(next));
                }
            }
            Evictor::Copy(cell) => {
                next.copy[cell] = world.memory[cell];
                next.evictor = match cell + 1 < CELLS {
                    true => Evictor::Copy(cell + 1),
                    false if copies_first => Evictor::Word,
                    false => Evictor::Punch,
                };
                push(out, "evictor", "copies a byte", Ok(next));
            }
            Evictor::Word | Evictor::WordAfterPunch => {
                next.word = self.left(world.word);
                next.evictor = match world.evictor {
                    Evictor::Word => Evictor::Punch,
                    _ => Evictor::Publish,
                };
                push(out, "evictor", "changes the word late", Ok(next));
            }
            Evictor::Punch => {
                next.punch();
                next.evictor = match punches_first {
                    true => Evictor::WordAfterPunch,
                    false => Evictor::Publish,
                };
                push(out, "evictor", "punches", Ok(next));
            }
            Evictor::Publish => {
                if world.buffered.is_none() {
                    (next.place, next.stored) = (Place::Stored, world.copy);
                    (next.evictor, next.copy) = (Evictor::Idle, [0; CELLS]);
                    push(out, "evictor", "publishes", Ok(next));
                }
            }
        }
    }

    /// Adds the server's other moves: it looks for touched holes, and ends the lease.
    fn keep(&self, world: &World, out: &mut Moves) {
        let is_out = matches!(world.place, Place::Hole | Place::Stored | Place::Released);
        if is_out && world.is_backed && self.0 != Twin::LeavesTouchedHoles {
            let mut next = *world;
            next.punch();
            push(out, "server", "punches a touched hole", Ok(next));
        }
        if matches!(world.place, Place::Hot | Place::Stored) && world.holds == 0 {
            let mut next = *world;
            next.word = next.word.without(CHUNK);
            next.place = Place::Released;
            next.punch();
            add(out, false, "server", "ends the lease", Ok(next));
        }
    }
}

impl Model for Segment {
    type World = World;
    type Harm = Harm;

    fn start(&self) -> World {
        let client = Client {
            op: 0,
            step: Step::Look,
            look: None,
            tries: 0,
            found: [0; CELLS],
            wrote: 0,
            buffer: [None; 2],
        };
        World {
            word: SegmentWord::default(),
            buffered: None,
            place: Place::Hole,
            holds: 0,
            memory: [0; CELLS],
            is_backed: false,
            stored: [0; CELLS],
            evictor: Evictor::Idle,
            copy: [0; CELLS],
            fetch: None,
            evictions_left: 3,
            clients: [client; 2],
        }
    }

    fn moves(&self, world: &World, out: &mut Moves) {
        self.client(world, 0, out);
        self.client(world, 1, out);
        self.fetch(world, out);
        self.evict(world, out);
        self.keep(world, out);
    }

    fn judge(&self, world: &World, at_rest: bool) -> Result<(), Harm> {
        if !at_rest {
            return Ok(());
        }
        if world
            .clients
            .iter()
            .any(|client| client.step != Step::Ended)
        {
            return Err(Harm::Stuck);
        }
        match world.place {
            Place::Hot => Ok(()),
            _ if world.is_backed => Err(Harm::MemoryStays),
            _ => Ok(()),
        }
    }

    fn never_rests(&self) -> Harm {
        Harm::Stuck
    }
}

#[test]
fn a_read_gives_what_was_written_whatever_leaves_meanwhile() {
    match explore(&Segment(Twin::Good)) {
        Ok(summary) => {
            println!("{summary}");
            assert!(summary.worlds > 10_000 && summary.rests > 0);
            assert!(summary.always_comes_to_rest);
        }
        Err(counterexample) => panic!("{counterexample}"),
    }
}

#[test]
fn each_mistake_is_caught() {
    for (twin, harm) in [
        (Twin::LooksBeforeItsWriteIsComplete, Harm::WrongBytes),
        (Twin::LooksOnce, Harm::WrongBytes),
        (Twin::CopiesBeforeTheWordIsSeen, Harm::WrongBytes),
        (Twin::CopiesBeforeItChangesTheWord, Harm::WrongBytes),
        (Twin::PunchesBeforeItChangesTheWord, Harm::WrongBytes),
        (Twin::SaysHotBeforeTheBytesAreThere, Harm::WrongBytes),
        (Twin::VersionComesBack, Harm::WrongBytes),
        (Twin::AnswersFromAReusedPlace, Harm::WrongBytes),
        (Twin::LeavesTouchedHoles, Harm::MemoryStays),
    ] {
        match explore(&Segment(twin)) {
            Ok(summary) => panic!("{twin:?} does no harm: {summary}"),
            Err(counterexample) => {
                println!("{twin:?}: {counterexample}");
                assert_eq!(counterexample.harm, harm, "{twin:?}");
            }
        }
    }
}
