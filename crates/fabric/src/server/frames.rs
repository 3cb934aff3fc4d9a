//! [`RequestBudget`]: the memory for long requests while they are received and answered.
//!
//! The rule it keeps: all long requests together, and those from one origin, hold a bounded number
//! of bytes. None of them is taken from the memory that is lent: a full server must still hear that
//! something is given back, or published anew. A request is charged for its bytes piece by piece,
//! before each piece is read, so that announcing a long request takes nothing from others.
//!
//! Requests that have all come in part could wait for each other. So the length of one request is
//! set aside for the oldest one, which never waits.

use std::{
    collections::{BTreeMap, HashMap, hash_map::Entry},
    time::Instant,
};

use farpage_wire::{Refusal, control::MAX_FRAME_BYTES};
use parking_lot::{Condvar, Mutex};

use crate::host::Origin;

/// Bytes for one origin: two requests of the greatest length, or tens of thousands of common ones.
const BYTES_PER_ORIGIN: u64 = 2 * MAX_FRAME_BYTES as u64;
/// Bytes for all requests, so that a few origins that send much do not keep the others out.
const BYTES: u64 = 8 * BYTES_PER_ORIGIN;

#[derive(Default)]
pub(super) struct RequestBudget {
    state: Mutex<BudgetState>,
    /// Signalled when room is given back, when waiting requests have to check whether they are
    /// still wanted, and at the end.
    changed: Condvar,
}

#[derive(Default)]
struct BudgetState {
    all: HeldBytes,
    by_origin: HashMap<Origin, HeldBytes>,
    /// Number of requests that were ever given room.
    rooms_ever: u64,
    is_closed: bool,
}

/// Bytes that a group of requests holds.
#[derive(Default)]
struct HeldBytes {
    bytes: u64,
    /// Bytes of each request by its number: the lowest is the oldest.
    rooms: BTreeMap<u64, u64>,
}

/// The room of one request, until it is dropped. It begins with nothing.
pub(super) struct RequestRoom<'a> {
    frames: &'a RequestBudget,
    origin: Origin,
    /// Number of the request, given with its first bytes.
    number: Option<u64>,
}

impl RequestBudget {
    /// Makes the room of a request from `origin`.
    pub(super) fn room(&self, origin: Origin) -> RequestRoom<'_> {
        RequestRoom {
            frames: self,
            origin,
            number: None,
        }
    }

    /// Returns the number of bytes that are held now.
    pub(super) fn bytes(&self) -> u64 {
        self.state.lock().all.bytes
    }

    /// Wakes all threads that wait for room, to check whether they still want it.
    pub(super) fn wake(&self) {
        // The lock keeps this out of the gap between a thread's check and its sleep.
        drop(self.state.lock());
        self.changed.notify_all();
    }

    /// Lets requests wait for room again, after [`close`](Self::close).
    pub(super) fn open(&self) {
        self.state.lock().is_closed = false;
    }

    /// Ends all waits for room, until [`open`](Self::open).
    pub(super) fn close(&self) {
        self.state.lock().is_closed = true;
        self.changed.notify_all();
    }
}

impl RequestRoom<'_> {
    /// Makes room for `bytes` more. Waits until `until` at most, and no longer than until `is_over`
    /// says that the request is not wanted any more.
    ///
    /// # Errors
    /// A text for the client: other requests had all the room until then.
    pub(super) fn grow(
        &mut self,
        bytes: u64,
        until: Instant,
        is_over: &dyn Fn() -> bool,
    ) -> Result<(), Refusal> {
        let mut state = self.frames.state.lock();
        let number = *self.number.get_or_insert_with(|| {
            state.rooms_ever += 1;
            let number = state.rooms_ever;
            state.all.rooms.insert(number, 0);
            let of_origin = state.by_origin.entry(self.origin).or_default();
            of_origin.rooms.insert(number, 0);
            number
        });
        while !state.has_room(self.origin, number, bytes) {
            if state.is_closed {
                return Err(Refusal::Draining);
            }
            if is_over()
                || self
                    .frames
                    .changed
                    .wait_until(&mut state, until)
                    .timed_out()
            {
                return Err(Refusal::Invalid(
                    "this server receives as many long requests as it may: ask again later"
                        .to_owned(),
                ));
            }
        }
        state.all.grow(number, bytes);
        let of_origin = state.by_origin.get_mut(&self.origin);
        of_origin.expect("this room is counted").grow(number, bytes);
        Ok(())
    }
}

impl BudgetState {
    fn has_room(&self, origin: Origin, number: u64, bytes: u64) -> bool {
        self.all.has_room(BYTES, number, bytes)
            && self.by_origin[&origin].has_room(BYTES_PER_ORIGIN, number, bytes)
    }
}

impl HeldBytes {
    /// True if request `number` may have `bytes` more where all together may have `most`.
    fn has_room(&self, most: u64, number: u64, bytes: u64) -> bool {
        let (oldest, of_oldest) = self.rooms.first_key_value().expect("this one is counted");
        *oldest == number || self.bytes - of_oldest + bytes <= most - MAX_FRAME_BYTES as u64
    }

    fn grow(&mut self, number: u64, bytes: u64) {
        *self.rooms.get_mut(&number).expect("it is counted") += bytes;
        self.bytes += bytes;
    }

    fn leave(&mut self, number: u64) {
        self.bytes -= self.rooms.remove(&number).expect("it is counted");
    }
}

impl Drop for RequestRoom<'_> {
    fn drop(&mut self) {
        let Some(number) = self.number else {
            return;
        };
        let mut state = self.frames.state.lock();
        state.all.leave(number);
        if let Entry::Occupied(mut of_origin) = state.by_origin.entry(self.origin) {
            of_origin.get_mut().leave(number);
            if of_origin.get().rooms.is_empty() {
                of_origin.remove();
            }
        }
        drop(state);
        self.frames.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicBool, Ordering},
        thread,
        time::Duration,
    };

    use super::*;

    const LONG: u64 = MAX_FRAME_BYTES as u64;

    fn room(
        frames: &RequestBudget,
        user: u32,
        bytes: u64,
        until: Instant,
    ) -> Result<RequestRoom<'_>, Refusal> {
        let mut room = frames.room(Origin::User(user));
        room.grow(bytes, until, &|| false).map(|()| room)
    }

    #[test]
    fn one_origin_leaves_room_to_others_and_waits_for_its_own() {
        let frames = RequestBudget::default();
        let now = |user, bytes| room(&frames, user, bytes, Instant::now());
        let (first, _second) = (now(1, LONG).unwrap(), now(1, LONG).unwrap());
        assert!(matches!(now(1, 1), Err(Refusal::Invalid(_))));
        assert!(now(2, LONG).is_ok());
        thread::scope(|scope| {
            let until = Instant::now() + Duration::from_secs(60);
            let frames = &frames;
            let waits = scope.spawn(move || room(frames, 1, LONG, until).map(drop));
            drop(first);
            assert_eq!(waits.join().unwrap(), Ok(()));
        });
        assert_eq!(frames.bytes(), LONG);
    }

    #[test]
    fn all_origins_together_are_bounded_and_nobody_waits_at_the_end() {
        let frames = RequestBudget::default();
        let _held: Vec<_> = (0..(BYTES / LONG) as u32)
            .map(|i| room(&frames, i / 2, LONG, Instant::now()).ok().unwrap())
            .collect();
        assert_eq!(frames.bytes(), BYTES);
        assert!(room(&frames, 100, LONG, Instant::now()).is_err());
        thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let until = Instant::now() + Duration::from_secs(60);
                room(&frames, 100, LONG, until).err()
            });
            frames.close();
            assert_eq!(waits.join().unwrap(), Some(Refusal::Draining));
        });
    }

    #[test]
    fn requests_that_have_all_come_in_part_do_not_wait_for_each_other() {
        let frames = RequestBudget::default();
        let mut parts: Vec<_> = (0..3)
            .map(|_| room(&frames, 1, LONG / 2, Instant::now()).unwrap())
            .collect();
        let mut grow = |i: usize| parts[i].grow(LONG / 2, Instant::now(), &|| false).is_ok();
        assert_eq!(
            [grow(2), grow(1), grow(0), grow(1)],
            [false, false, true, false]
        );
        assert_eq!(frames.bytes(), BYTES_PER_ORIGIN);
        drop(parts.remove(0));
        assert!(parts[0].grow(LONG / 2, Instant::now(), &|| false).is_ok());
        drop(parts);
        assert!(frames.state.lock().by_origin.is_empty() && frames.bytes() == 0);
    }

    #[test]
    fn whoever_is_not_wanted_any_more_does_not_wait() {
        let frames = RequestBudget::default();
        let _held = [(); 2].map(|()| room(&frames, 1, LONG, Instant::now()).unwrap());
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let begun = Instant::now();
            let waits = scope.spawn(|| {
                let until = Instant::now() + Duration::from_secs(60);
                let mut room = frames.room(Origin::User(1));
                room.grow(1, until, &|| is_over.load(Ordering::Relaxed))
            });
            thread::sleep(Duration::from_millis(10));
            is_over.store(true, Ordering::Relaxed);
            frames.wake();
            assert!(waits.join().unwrap().is_err());
            assert!(
                begun.elapsed() < Duration::from_secs(30),
                "{:?}",
                begun.elapsed()
            );
        });
    }
}
