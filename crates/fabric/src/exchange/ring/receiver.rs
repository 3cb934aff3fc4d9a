//! [`RingReceiver`] takes messages out of one sender's ring, [`RingInbox`] out of the rings of
//! many.
//!
//! The rule it keeps: a sender's bytes are used only after they were copied and checked. A ring
//! whose sender breaks the protocol ends; the others go on.

use super::layout::{
    CONSUMED_AT, HEADER_BYTES, LENGTH_BYTES, Notifier, RingError, RingMemory, RingPlace, room_of,
};

/// The receiver's end of one sender's ring.
pub struct RingReceiver {
    memory: RingMemory,
    place: RingPlace,
    /// Notifier that tells the sender of new room.
    notifier: Option<Notifier>,
    /// The last tail that the sender announced.
    tail: u64,
    taken: u64,
    /// The consumed position that the sender can read.
    published: u64,
}

impl RingReceiver {
    /// Makes a receiver for the ring at `place` and clears the ring. No sender may WRITE to it yet,
    /// and a sender that used it before must be disconnected.
    ///
    /// # Panics
    /// If `place` is not in `memory`, and when [`RingSender::new`](super::RingSender::new) does.
    pub fn new(memory: RingMemory, place: RingPlace) -> Self {
        place.check();
        memory.at(place.offset as usize, place.bytes());
        let receiver = Self {
            memory,
            place,
            notifier: None,
            tail: 0,
            taken: 0,
            published: 0,
        };
        receiver.memory.store(receiver.at(0), 0);
        receiver.memory.store(receiver.at(CONSUMED_AT), 0);
        receiver
    }

    /// Sets `notifier`, which is notified whenever the sender gets room. Default: none, and the
    /// sender asks.
    pub fn with_notifier(mut self, notifier: Notifier) -> Self {
        self.notifier = Some(notifier);
        self
    }

    /// Replaces `message` by the next one. Returns false if there is none. Never waits.
    ///
    /// # Errors
    /// [`RingError`]: now and from now on.
    pub fn receive(&mut self, message: &mut Vec<u8>) -> Result<bool, RingError> {
        if !self.has_message()? {
            return Ok(false);
        }
        let available = (self.tail - self.taken) as usize;
        let mut length = [0; LENGTH_BYTES];
        self.copy_out(self.taken, &mut length);
        let length = u64::from_ne_bytes(length);
        if length > (available - LENGTH_BYTES) as u64 {
            return Err(self.broken(format!("a message of {length} bytes in {available}")));
        }
        message.resize(length as usize, 0);
        self.copy_out(self.taken + LENGTH_BYTES as u64, message);
        self.taken += room_of(length as usize) as u64;
        // Published often enough that a sender seldom runs out of room, and seldom enough that the
        // cache line stays here.
        let worth_telling = self.place.capacity as u64 / 4;
        if self.taken == self.tail || self.taken - self.published >= worth_telling {
            self.publish();
        }
        Ok(true)
    }

    /// True if [`receive`](Self::receive) has a message to take. Never waits.
    ///
    /// # Errors
    /// [`RingError`]: now and from now on.
    pub fn has_message(&mut self) -> Result<bool, RingError> {
        Ok(self.tail != self.taken || self.look()?)
    }

    /// True if the sender has announced more bytes, which can then be read.
    fn look(&mut self) -> Result<bool, RingError> {
        let Some(tail) = self.memory.load(self.at(0)) else {
            return Ok(false);
        };
        let sent = tail.wrapping_sub(self.taken);
        if sent > self.place.capacity as u64 || !sent.is_multiple_of(8) {
            return Err(self.broken(format!("a tail of {tail} where {} is taken", self.taken)));
        }
        self.tail = tail;
        Ok(sent > 0)
    }

    fn publish(&mut self) {
        self.memory.store(self.at(CONSUMED_AT), self.taken);
        self.published = self.taken;
        if let Some(notifier) = &self.notifier {
            notifier.notify();
        }
    }

    /// Copies bytes from `position` on, around the end of the ring if need be.
    fn copy_out(&self, position: u64, to: &mut [u8]) {
        let begin = (position % self.place.capacity as u64) as usize;
        let (first, second) = to.split_at_mut(to.len().min(self.place.capacity - begin));
        self.memory.copy_out(self.at(HEADER_BYTES + begin), first);
        self.memory.copy_out(self.at(HEADER_BYTES), second);
    }

    fn at(&self, offset: usize) -> usize {
        self.place.offset as usize + offset
    }

    fn broken(&self, detail: String) -> RingError {
        RingError {
            capacity: self.place.capacity,
            detail,
        }
    }
}

/// The rings of many senders, each in its turn.
#[derive(Default)]
pub struct RingInbox {
    rings: Vec<(u64, RingReceiver)>,
    /// Index of the ring that is looked at first next time.
    next: usize,
}

impl RingInbox {
    /// Makes an inbox without senders.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a sender's ring under a number of the caller's choice.
    pub fn add(&mut self, sender: u64, ring: RingReceiver) {
        self.rings.push((sender, ring));
    }

    /// Removes and returns a sender's ring, for example when the sender has died. Untaken messages
    /// are still in it.
    pub fn remove(&mut self, sender: u64) -> Option<RingReceiver> {
        let at = self.rings.iter().position(|(name, _)| *name == sender)?;
        Some(self.rings.remove(at).1)
    }

    /// Takes the next message of any sender and returns that sender's number. Senders take turns,
    /// so that none keeps others waiting. Never waits.
    ///
    /// # Errors
    /// A sender that broke the protocol; its ring has been removed, and the others go on.
    pub fn receive(&mut self, message: &mut Vec<u8>) -> Result<Option<u64>, (u64, RingError)> {
        let count = self.rings.len();
        for turn in 0..count {
            let at = (self.next + turn) % count;
            let (sender, ring) = &mut self.rings[at];
            let sender = *sender;
            match ring.receive(message) {
                Ok(false) => {}
                Ok(true) => {
                    self.next = at + 1;
                    return Ok(Some(sender));
                }
                Err(error) => {
                    self.rings.remove(at);
                    self.next = at;
                    return Err((sender, error));
                }
            }
        }
        Ok(None)
    }
}
