//! [`Line`]: a worker's connection to one aggregator, for one of its rings.
//!
//! The rule it keeps: completions of the channel are taken here, and [`Through`](super::Through)
//! decides what follows.

use std::{
    fmt,
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_fabric::{
    ChannelError, Completion, ExtentId, Session, SessionOptions,
    areas::Board,
    patterns::RingSender,
    regmem::{RegBuf, RegPool, RegPoolOptions, Registrar},
};

use super::protocol::{AWAITED_AT, CULPRIT_AT, NAP_MAX, NAP_MIN, Party, VERSION_AT, Word, place};
use crate::{
    exchange::{Counted, Moved},
    station::{Address, connect},
};

/// Number of looks over the fabric before a thread sleeps between them: each moves bytes.
const REMOTE_LOOKS: u32 = 8;

/// Version, culprit and awaited party, as a board shows them; `None` while they are being placed.
#[derive(Clone, Copy, Default)]
pub(super) struct Head {
    pub(super) version: Option<u64>,
    pub(super) culprit: Option<u64>,
    pub(super) awaited: Option<u64>,
}

/// A worker's connection to one aggregator, for one of its rings.
pub(super) struct Line {
    pub(super) at: Party,
    pub(super) number: usize,
    pub(super) part_floats: usize,
    /// Numbers of the line's pieces.
    pub(super) cuts: Range<usize>,
    pub(super) landing: ExtentId,
    pub(super) board: ExtentId,
    pub(super) sender: RingSender<Counted>,
    pub(super) pool: RegPool,
    pub(super) session: Arc<Session>,
    pub(super) moved: Arc<Moved>,
    pub(super) state: State,
    /// Number of READs that have not ended.
    pub(super) reading: usize,
    /// The board's numbers, as the last READ found them.
    pub(super) head: Head,
    pub(super) looks: u32,
    /// Time at which the next look is due.
    pub(super) look_at: Instant,
}

/// The buffers of a step, in parts; `None` while a part's operation is posted.
pub(super) struct Parts {
    pub(super) gradient: Vec<Option<RegBuf>>,
    pub(super) parameters: Vec<Option<RegBuf>>,
    /// True for each part whose parameters have been read.
    pub(super) read: Vec<bool>,
}

/// Progress of a line in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The gradient is on its way.
    Pushing,
    /// The version is looked for.
    Looking,
    /// The parameters are on their way.
    Pulling,
    Done,
}

impl Line {
    /// Reaches an aggregator, and opens the area and the board of these names there. Returns the
    /// registrar of its memory, too.
    pub(super) fn open(
        number: usize,
        [area, board]: [String; 2],
        address: &Address,
        options: &SessionOptions,
        deadline: Duration,
    ) -> Result<(Self, Arc<dyn Registrar>), String> {
        let said = |error: &dyn fmt::Display| error.to_string();
        let session = connect(address, options, Instant::now() + deadline);
        let session = session.map_err(|error| said(&error))?;
        let open = |name: &str| {
            let opened = session.open(name).map_err(|error| said(&error))?;
            let extent = opened.extents.first().map(|extent| extent.id);
            extent.ok_or_else(|| "it lends an area without memory".to_owned())
        };
        let (landing, board) = (open(&area)?, open(&board)?);
        let moved = Arc::new(Moved::default());
        let channel = Counted {
            channel: session.channel().map_err(|error| said(&error))?,
            moved: Arc::clone(&moved),
        };
        // After the channel: before it, no adapter is known to register memory with.
        let registrar = session.registrar();
        let pool = RegPool::new([Arc::clone(&registrar)], RegPoolOptions::default());
        let line = Self {
            at: Party::Aggregator(number),
            number,
            part_floats: 0,
            cuts: 0..0,
            landing,
            board,
            sender: RingSender::new(Box::new(channel), &pool, place(landing)),
            pool,
            session,
            moved,
            state: State::Done,
            reading: 0,
            head: Head::default(),
            looks: 0,
            look_at: Instant::now(),
        };
        Ok((line, registrar))
    }

    /// Sends `word` if there is room. An aggregator that cannot be told will notice by itself.
    pub(super) fn say(&mut self, word: Word) {
        let sent = self.sender.send(&word.to_bytes());
        let _ = sent.and_then(|()| self.sender.flush());
    }

    /// Takes a completion. True if it moved parameters or a gradient.
    pub(super) fn take(
        &mut self,
        done: Completion<RegBuf>,
        cuts: usize,
        parts: &mut Parts,
    ) -> Result<bool, ChannelError> {
        let (at, is_read) = (done.tag as usize / 2, done.tag % 2 == 1);
        if at == cuts {
            self.reading -= 1;
            done.result?;
            let number = |at: usize| {
                let bytes = &done.buf.as_ref()[at..][..Board::NUMBER_BYTES];
                Board::announced(bytes)
            };
            self.head = Head {
                version: number(VERSION_AT),
                culprit: number(CULPRIT_AT),
                awaited: number(AWAITED_AT),
            };
            self.looks += 1;
            self.look_at = Instant::now();
            if self.looks > REMOTE_LOOKS {
                self.look_at += (NAP_MIN * (self.looks - REMOTE_LOOKS)).min(NAP_MAX);
            }
            return Ok(false);
        }
        if is_read {
            self.reading -= 1;
            parts.parameters[at] = Some(done.buf);
            return match done.result {
                Err(ChannelError::NotYet { .. }) => Ok(false),
                result => {
                    parts.read[at] = result.is_ok();
                    result.map(|()| true)
                }
            };
        }
        parts.gradient[at] = Some(done.buf);
        done.result.map(|()| true)
    }
}
