//! [`Frames`]: the memory for long requests while they are received and answered.
//!
//! The rule it keeps: all of them together, and those from one origin, hold a bounded number of
//! bytes, none of which is taken from the memory that is lent: a full server must still hear that
//! something is given back, or published anew. A request that does not fit waits before it is read.
//!
//! The downside: a peer that announces a long request and does not send it keeps the room until its
//! connection is closed for that, from others behind the same address.

use std::{collections::HashMap, time::Instant};

use farpage_wire::{Refusal, control::MAX_FRAME_BYTES};
use parking_lot::{Condvar, Mutex};

use crate::host::Origin;

/// Two requests of the greatest length, or tens of thousands of common ones.
const BYTES_PER_ORIGIN: u64 = 2 * MAX_FRAME_BYTES as u64;
/// So that a few origins that announce much do not keep the others out.
const BYTES: u64 = 8 * BYTES_PER_ORIGIN;

#[derive(Default)]
pub(super) struct Frames {
    state: Mutex<State>,
    /// Signalled when room is given back, and at the end.
    freed: Condvar,
}

#[derive(Default)]
struct State {
    bytes: u64,
    by_origin: HashMap<Origin, u64>,
    is_closed: bool,
}

/// Room for a request, until it is dropped.
pub(super) struct Room<'a> {
    frames: &'a Frames,
    origin: Origin,
    bytes: u64,
}

impl Frames {
    /// Room for a request of `bytes` bytes from `origin`, which is at most [`MAX_FRAME_BYTES`].
    ///
    /// # Errors
    /// In words for the client: others of its address had all the room until then.
    pub(super) fn room(
        &self,
        origin: Origin,
        bytes: u64,
        until: Instant,
    ) -> Result<Room<'_>, Refusal> {
        let mut state = self.state.lock();
        while !state.has_room(origin, bytes) {
            if state.is_closed {
                return Err(Refusal::Draining);
            }
            if self.freed.wait_until(&mut state, until).timed_out() {
                return Err(Refusal::Invalid(
                    "this server receives as many long requests as it may: ask again later"
                        .to_owned(),
                ));
            }
        }
        state.bytes += bytes;
        *state.by_origin.entry(origin).or_default() += bytes;
        Ok(Room {
            frames: self,
            origin,
            bytes,
        })
    }

    /// Bytes that are held now.
    pub(super) fn bytes(&self) -> u64 {
        self.state.lock().bytes
    }

    /// From now on nobody waits for room.
    pub(super) fn close(&self) {
        self.state.lock().is_closed = true;
        self.freed.notify_all();
    }
}

impl State {
    fn has_room(&self, origin: Origin, bytes: u64) -> bool {
        let of_origin = self.by_origin.get(&origin).copied().unwrap_or(0);
        of_origin + bytes <= BYTES_PER_ORIGIN && self.bytes + bytes <= BYTES
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        let mut state = self.frames.state.lock();
        state.bytes -= self.bytes;
        let of_origin = state.by_origin.get_mut(&self.origin);
        let of_origin = of_origin.expect("this room is counted");
        *of_origin -= self.bytes;
        if *of_origin == 0 {
            state.by_origin.remove(&self.origin);
        }
        drop(state);
        self.frames.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::{thread, time::Duration};

    use super::*;

    const LONG: u64 = MAX_FRAME_BYTES as u64;

    #[test]
    fn one_origin_leaves_room_to_others_and_waits_for_its_own() {
        let frames = Frames::default();
        let (one, other) = (Origin::User(1), Origin::User(2));
        let room = |origin, bytes| frames.room(origin, bytes, Instant::now());
        let (first, _second) = (room(one, LONG).unwrap(), room(one, LONG).unwrap());
        assert!(matches!(room(one, 1), Err(Refusal::Invalid(_))));
        assert!(room(other, LONG).is_ok());
        thread::scope(|scope| {
            let until = Instant::now() + Duration::from_secs(60);
            let frames = &frames;
            let waits = scope.spawn(move || frames.room(one, LONG, until).map(drop));
            drop(first);
            assert_eq!(waits.join().unwrap(), Ok(()));
        });
        assert_eq!(frames.bytes(), LONG);
    }

    #[test]
    fn all_origins_together_are_bounded_and_nobody_waits_at_the_end() {
        let frames = Frames::default();
        let room = |user, until| frames.room(Origin::User(user), LONG, until);
        let _held: Vec<_> = (0..(BYTES / LONG) as u32)
            .map(|i| room(i / 2, Instant::now()).ok().unwrap())
            .collect();
        assert_eq!(frames.bytes(), BYTES);
        assert!(room(100, Instant::now()).is_err());
        thread::scope(|scope| {
            let waits = scope.spawn(|| room(100, Instant::now() + Duration::from_secs(60)).err());
            frames.close();
            assert_eq!(waits.join().unwrap(), Some(Refusal::Draining));
        });
    }
}
