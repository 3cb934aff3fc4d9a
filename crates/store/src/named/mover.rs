//! [`Mover`]: reads and writes pieces of a page map.
//!
//! The rule it keeps: a mover waits for servers, so no worker uses one.

use farpage_fabric::{
    Channel, ChannelError, ConnectError, Op, Verb,
    regmem::{RegBuf, RegError},
};

use crate::{place::SlotPlace, pool::SlotPool, transfer::transfer};

/// Mover of pieces of a map, one after another.
pub(super) struct Mover<'a> {
    pool: &'a SlotPool,
    channels: Vec<Option<Box<dyn Channel<RegBuf>>>>,
}

pub(super) enum MoveError {
    Memory(RegError),
    Connect(ConnectError),
    Channel(ChannelError),
}

impl<'a> Mover<'a> {
    pub(super) fn new(pool: &'a SlotPool) -> Self {
        Self {
            pool,
            channels: pool.servers().iter().map(|_| None).collect(),
        }
    }

    pub(super) fn read(&mut self, place: SlotPlace, len: usize) -> Result<RegBuf, MoveError> {
        let buf = (self.pool.registered.acquire(len)).map_err(MoveError::Memory)?;
        self.transfer(Verb::Read, place, buf)
    }

    pub(super) fn write(&mut self, place: SlotPlace, piece: &[u8]) -> Result<(), MoveError> {
        let mut buf = (self.pool.registered.acquire(piece.len())).map_err(MoveError::Memory)?;
        buf.as_mut().copy_from_slice(piece);
        self.transfer(Verb::Write, place, buf).map(drop)
    }

    fn transfer(&mut self, verb: Verb, place: SlotPlace, buf: RegBuf) -> Result<RegBuf, MoveError> {
        let server = place.server as usize;
        let channel = match &mut self.channels[server] {
            Some(channel) => channel,
            none => none.insert(
                self.pool.servers()[server]
                    .1
                    .channel()
                    .map_err(MoveError::Connect)?,
            ),
        };
        let len = buf.as_ref().len() as u32;
        let op = Op {
            tag: 0,
            verb,
            extent: self.pool.extent(place),
            offset: place.offset,
            len,
            buf,
        };
        transfer(&mut **channel, op).map_err(MoveError::Channel)
    }
}
