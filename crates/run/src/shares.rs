//! The budget of several programs at once: [`Shares`].
//!
//! Each interposed program connects. When it allocates, it reports how much it would use, and
//! receives its share. A program that wants little gets that; the rest is divided evenly, and so is
//! what nobody wants. When programs come and go, or want more, shares change.
//!
//! The rule: the shares never exceed the budget together. A share counts at its old size until its
//! program reports that it has shrunk to the smaller one, or has ended. Other programs get only the
//! remainder.
//!
//! A program that has the whole budget need not report. It counts as one that wants all of it until
//! it has been told a smaller share and reports again, which it does before it keeps to that share.
//!
//! The wire, on a socket of this machine: a program sends how much it wants and how much it has at
//! most, and receives its share, each as a number of 8 bytes behind a byte for its kind. A share of
//! 0 is a refusal.

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    os::{
        fd::AsRawFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

use anyhow::{Context, Result};

/// Smallest share of a program: a runtime works with a few pages of any size.
pub(crate) const LEAST_BYTES: u64 = 4 << 20;

/// Part of the budget by whose multiples shares exceed what programs want.
const STEPS: u64 = 16;

/// Message of a program: bytes that it would use.
const WANTS: u8 = 1;
/// Message of a program: the most bytes that it has.
const HAS: u8 = 2;
/// Message to a program: its share.
const SHARE: u8 = 3;

/// Parts of the budget by program.
#[derive(Default)]
struct Ledger {
    budget: u64,
    programs: BTreeMap<u64, Program>,
    next: u64,
    /// True once no program is let in any more.
    is_closed: bool,
}

struct Program {
    stream: Option<UnixStream>,
    wants: u64,
    /// Share that the program was told last.
    share: u64,
    /// Bytes that the program may still have: more than its share until it reports less.
    has: u64,
}

/// Server of shares, for as long as it lives.
pub(crate) struct Shares {
    ledger: Arc<Mutex<Ledger>>,
}

impl Shares {
    /// Shares `budget` between the programs that connect to `socket`.
    pub(crate) fn start(socket: &Path, budget: u64) -> Result<Shares> {
        let listener = UnixListener::bind(socket).context("cannot make a socket for shares")?;
        let ledger = Arc::new(Mutex::new(Ledger {
            budget,
            ..Ledger::default()
        }));
        let shares = Shares {
            ledger: ledger.clone(),
        };
        let serve = move || {
            for stream in listener.incoming().flatten() {
                let ledger = ledger.clone();
                let _ = thread::Builder::new()
                    .name("share".into())
                    .spawn(move || serve(stream, &ledger));
            }
        };
        let thread = thread::Builder::new().name("shares".into()).spawn(serve);
        thread.context("cannot start a thread for shares")?;
        Ok(shares)
    }

    /// True if all programs that had a share have ended. No other is let in from then on.
    pub(crate) fn are_over(&self) -> bool {
        let mut ledger = lock(&self.ledger);
        ledger.is_closed |= ledger.programs.is_empty();
        ledger.is_closed
    }

    /// Returns the bytes that all programs may have together.
    #[cfg(test)]
    fn held(&self) -> u64 {
        lock(&self.ledger).held()
    }
}

impl Drop for Shares {
    fn drop(&mut self) {
        lock(&self.ledger).programs.clear();
    }
}

fn lock(ledger: &Mutex<Ledger>) -> MutexGuard<'_, Ledger> {
    ledger.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Listens to one program until it ends.
fn serve(mut stream: UnixStream, ledger: &Mutex<Ledger>) {
    let Ok(writer) = stream.try_clone() else {
        return;
    };
    // A program has no part until it wants something: shells that only start others take none.
    if read(&mut stream).is_none() {
        return;
    }
    let number = {
        let mut ledger = lock(ledger);
        if ledger.is_closed {
            return;
        }
        ledger.add(writer)
    };
    let Some(number) = number else {
        let _ = stream.write_all(&message(SHARE, 0));
        return;
    };
    while let Some((kind, bytes)) = read(&mut stream) {
        let mut ledger = lock(ledger);
        let budget = ledger.budget;
        let Some(program) = ledger.programs.get_mut(&number) else {
            break;
        };
        match kind {
            // Sent before the program was told that it has all.
            WANTS if program.share == budget => {}
            WANTS => program.wants = bytes,
            // The share may have changed meanwhile.
            HAS if bytes <= program.share => program.has = program.share,
            _ => {}
        }
        ledger.settle();
    }
    let mut ledger = lock(ledger);
    ledger.programs.remove(&number);
    ledger.settle();
}

fn message(kind: u8, bytes: u64) -> [u8; 9] {
    let mut message = [kind; 9];
    message[1..].copy_from_slice(&bytes.to_le_bytes());
    message
}

fn read(stream: &mut UnixStream) -> Option<(u8, u64)> {
    let mut message = [0; 9];
    stream.read_exact(&mut message).ok()?;
    let (kind, bytes) = message.split_first()?;
    Some((*kind, u64::from_le_bytes(*bytes.as_array()?)))
}

impl Ledger {
    /// Adds a program. Returns `None` if there are too many already.
    fn add(&mut self, stream: impl Into<Option<UnixStream>>) -> Option<u64> {
        if !self.has_room() {
            // Threads that listen to programs may not have noticed their ends yet.
            self.programs.retain(|_, program| !program.has_ended());
        }
        if !self.has_room() {
            return None;
        }
        let number = self.next;
        self.next += 1;
        let program = Program {
            stream: stream.into(),
            wants: 0,
            share: 0,
            has: 0,
        };
        self.programs.insert(number, program);
        self.settle();
        Some(number)
    }

    /// True if one more program can get the least share.
    fn has_room(&self) -> bool {
        (self.programs.len() as u64 + 1) * LEAST_BYTES <= self.budget
    }

    fn held(&self) -> u64 {
        self.programs.values().map(|program| program.has).sum()
    }

    /// Tells programs their shares, as far as other programs have given theirs back.
    fn settle(&mut self) {
        let wants = self.programs.values().map(|program| program.wants);
        let fair = fair(self.budget, wants.collect());
        // First the programs that give: the others get their bytes.
        for (program, &fair) in self.programs.values_mut().zip(&fair) {
            if fair < program.share {
                program.tell(fair);
            }
        }
        let mut left = self.budget - self.held();
        for (program, &fair) in self.programs.values_mut().zip(&fair) {
            // A program may keep bytes until it gives them back. A first share is whole or none.
            let share = fair.min(program.has + left);
            if share > program.share && share >= LEAST_BYTES {
                left -= share.saturating_sub(program.has);
                program.has = program.has.max(share);
                program.tell(share);
            }
            if program.share == self.budget {
                program.wants = self.budget;
            }
        }
        debug_assert!(self.held() <= self.budget, "more is given than there is");
    }
}

impl Program {
    /// True if the program has closed its connection.
    fn has_ended(&self) -> bool {
        self.stream.as_ref().is_some_and(|stream| {
            let mut fd = libc::pollfd {
                fd: stream.as_raw_fd(),
                events: libc::POLLRDHUP,
                revents: 0,
            };
            // SAFETY: one descriptor, which is looked at and not waited for.
            unsafe { libc::poll(&raw mut fd, 1, 0) > 0 }
        })
    }

    fn tell(&mut self, share: u64) {
        self.share = share;
        if let Some(stream) = &mut self.stream {
            // If the program has ended, its thread notices.
            let _ = stream.write_all(&message(SHARE, share));
        }
    }
}

/// Divides `budget`. Programs that want less than an even part get that, the others even parts.
/// The rest, which nobody wants, is divided evenly, in steps: few shares change with each wish.
fn fair(budget: u64, wants: Vec<u64>) -> Vec<u64> {
    let mut order: Vec<usize> = (0..wants.len()).collect();
    order.sort_by_key(|&at| wants[at]);
    let (mut left, mut shares) = (budget, vec![0; wants.len()]);
    for (done, &at) in order.iter().enumerate() {
        let even = left / (wants.len() - done) as u64;
        shares[at] = wants[at].max(LEAST_BYTES).min(even);
        left -= shares[at];
    }
    let part = match shares.len() as u64 {
        1 => left,
        programs => {
            let step = (budget / STEPS).max(1);
            left / programs.max(1) / step * step
        }
    };
    shares.iter_mut().for_each(|share| *share += part);
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn what_nobody_wants_is_divided_too() {
        assert_eq!(fair(100 * MIB, vec![0]), [100 * MIB]);
        assert_eq!(
            fair(160 * MIB, vec![0, 20 * MIB]),
            [4 * MIB + 60 * MIB, 20 * MIB + 60 * MIB]
        );
    }

    #[test]
    fn who_wants_little_keeps_little_and_the_rest_is_divided_evenly() {
        assert_eq!(fair(100 * MIB, vec![1000 * MIB]), [100 * MIB]);
        assert_eq!(
            fair(100 * MIB, vec![0, 20 * MIB, 90 * MIB, 500 * MIB]),
            [4 * MIB, 20 * MIB, 38 * MIB, 38 * MIB]
        );
        assert_eq!(fair(8 * MIB, vec![9 * MIB, 9 * MIB]), [4 * MIB, 4 * MIB]);
    }

    /// Parts that nobody needs are added to the others.
    #[test]
    fn nobody_gets_less_than_an_even_part_of_what_all_need() {
        for seed in 1..1000u64 {
            let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let programs = 1 + below(&mut state, 8);
            let budget = (4 * programs + below(&mut state, 100)) * MIB;
            let wants: Vec<u64> = (0..programs).map(|_| below(&mut state, 60) * MIB).collect();
            let shares = fair(budget, wants.clone());
            assert!(shares.iter().sum::<u64>() <= budget, "seed {seed}");
            for (&share, &want) in shares.iter().zip(&wants) {
                assert!(
                    share >= want.clamp(LEAST_BYTES, budget / programs),
                    "seed {seed}"
                );
            }
        }
    }

    /// Returns a number below `end` by xorshift64 (Marsaglia, 2003).
    fn below(state: &mut u64, end: u64) -> u64 {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        *state % end
    }

    /// Programs come, want, keep to their shares late or never, and go.
    #[test]
    fn shares_never_exceed_the_budget_however_programs_behave() {
        for seed in 1..200u64 {
            let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let budget = (4 + below(&mut state, 60)) * MIB;
            let mut ledger = Ledger {
                budget,
                ..Ledger::default()
            };
            // Bytes that each program really has.
            let mut real: BTreeMap<u64, u64> = BTreeMap::new();
            for _ in 0..400 {
                let numbers: Vec<u64> = ledger.programs.keys().copied().collect();
                let some = |state: &mut u64| {
                    (!numbers.is_empty())
                        .then(|| numbers[below(state, numbers.len() as u64) as usize])
                };
                match below(&mut state, 6) {
                    0 => {
                        if let Some(number) = ledger.add(None) {
                            real.insert(number, 0);
                        }
                    }
                    1 => {
                        if let Some(number) = some(&mut state) {
                            ledger.programs.remove(&number);
                            real.remove(&number);
                            ledger.settle();
                        }
                    }
                    2 => {
                        if let Some(number) = some(&mut state) {
                            let wants = below(&mut state, 80) * MIB;
                            ledger.programs.get_mut(&number).expect("it is there").wants = wants;
                            ledger.settle();
                        }
                    }
                    _ => {
                        if let Some(number) = some(&mut state) {
                            // The program grows to its share at once, and shrinks at any time.
                            let program = ledger.programs.get_mut(&number).expect("it is there");
                            real.insert(number, program.share);
                            program.has = program.share;
                            ledger.settle();
                        }
                    }
                }
                for (number, program) in &ledger.programs {
                    let has = real.get_mut(number).expect("it is there");
                    *has = (*has).max(program.share);
                }
                assert!(real.values().sum::<u64>() <= budget, "seed {seed}");
            }
            // In the end all programs keep to their shares, and no bytes are left over that a
            // program wants.
            for _ in 0..3 {
                ledger
                    .programs
                    .values_mut()
                    .for_each(|program| program.has = program.share);
                ledger.settle();
            }
            let wanted = ledger
                .programs
                .values()
                .any(|program| program.wants > program.share);
            assert!(
                !wanted || ledger.held() + ledger.programs.len() as u64 >= budget,
                "seed {seed}"
            );
        }
    }

    #[test]
    fn a_program_that_has_the_whole_budget_keeps_all_that_a_new_one_does_not_need() {
        let mut ledger = Ledger {
            budget: 64 * MIB,
            ..Ledger::default()
        };
        let first = ledger.add(None).expect("there is room for one");
        let second = ledger.add(None).expect("there is room for two");
        assert_eq!(ledger.programs[&first].share, 60 * MIB);
        let program = ledger.programs.get_mut(&first).expect("it is there");
        (program.wants, program.has) = (8 * MIB, 60 * MIB);
        ledger.settle();
        assert_eq!(ledger.programs[&second].share, LEAST_BYTES);
        assert_eq!(ledger.programs[&first].share, (8 + 24) * MIB);
    }

    #[test]
    fn a_program_that_has_just_ended_leaves_room_for_another() {
        let mut ledger = Ledger {
            budget: 8 * MIB,
            ..Ledger::default()
        };
        let pair = || UnixStream::pair().expect("there is room for a socket");
        let ((_first, of_first), (second, of_second)) = (pair(), pair());
        ledger.add(of_first).expect("there is room for one");
        let second_number = ledger.add(of_second).expect("there is room for two");
        assert_eq!(ledger.add(None), None);
        drop(second);
        assert!(ledger.add(None).is_some());
        assert!(!ledger.programs.contains_key(&second_number));
    }

    fn say(stream: &mut UnixStream, kind: u8, bytes: u64) {
        stream.write_all(&message(kind, bytes)).expect("sent");
    }

    /// Connects a program that asks for a share.
    fn connect(socket: &Path) -> UnixStream {
        let mut stream = UnixStream::connect(socket).expect("somebody listens");
        say(&mut stream, WANTS, 0);
        stream
    }

    fn share(stream: &mut UnixStream) -> u64 {
        read(stream).expect("a share").1
    }

    #[test]
    fn a_first_share_is_a_part_of_what_others_do_not_need() {
        let folder = tempfile::tempdir().expect("there is room for a folder");
        let socket = folder.path().join("shares");
        let _shares = Shares::start(&socket, 64 * MIB).expect("the socket is free");
        let connect = || connect(&socket);
        let mut first = connect();
        assert_eq!(share(&mut first), 64 * MIB);
        let mut second = connect();
        // The first reports before it keeps to the smaller share.
        assert_eq!(share(&mut first), 60 * MIB);
        say(&mut first, WANTS, 8 * MIB);
        say(&mut first, HAS, 60 * MIB);
        assert_eq!(share(&mut first), (8 + 24) * MIB);
        say(&mut first, HAS, (8 + 24) * MIB);
        assert_eq!(share(&mut second), (4 + 24) * MIB);
    }

    #[test]
    fn no_program_is_let_in_after_the_last_one() {
        let folder = tempfile::tempdir().expect("there is room for a folder");
        let socket = folder.path().join("shares");
        let shares = Shares::start(&socket, 10 * MIB).expect("the socket is free");
        assert!(shares.are_over());
        assert_eq!(read(&mut connect(&socket)), None);
        assert!(shares.are_over());
    }

    #[test]
    fn a_program_that_ends_leaves_its_share_to_others() {
        let folder = tempfile::tempdir().expect("there is room for a folder");
        let socket = folder.path().join("shares");
        let shares = Shares::start(&socket, 10 * MIB).expect("the socket is free");
        let connect = || connect(&socket);
        let mut first = connect();
        assert_eq!(share(&mut first), 10 * MIB);
        say(&mut first, WANTS, 50 * MIB);
        // The second waits until the first gives something back.
        let mut second = connect();
        assert_eq!(share(&mut first), 6 * MIB);
        assert_eq!(shares.held(), 10 * MIB);
        say(&mut first, HAS, 6 * MIB);
        assert_eq!(share(&mut second), LEAST_BYTES);
        // A third program would leave too little to each.
        assert_eq!(share(&mut connect()), 0);
        drop(second);
        assert_eq!(share(&mut first), 10 * MIB);
    }
}
