//! [`Station`]: a worker's way from serving its own memory to holding the rings.
//!
//! The rule it keeps: each worker lends an area per ring, which the member before it opens, and
//! opens the areas of those that it sends to. No worker is waited for beyond the deadline, and one
//! that cannot be reached is named.

use std::{
    fmt,
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use farpage_fabric::{
    ConnectError, Endpoint, ExtentId, OpenNameError, Session, SessionOptions,
    areas::{Areas, OfferError, Presence},
    patterns::{RingPlace, RingReceiver, RingSender},
    regmem::{RegPool, RegPoolOptions},
    server::{BindError, ServerThread},
    sim::{SimConfig, SimServer},
};

use crate::{
    exchange::{
        Counted, Ends, Exchange, LeaveError, Moved, NAP_MAX, RING_BYTES, farewell, senders,
        tell_waiting,
    },
    plan::Plan,
};

farpage_fabric::debug_as_display!(JoinError);

/// Bytes of an area: a ring with its positions.
const AREA_BYTES: u64 = 128 + RING_BYTES as u64;
/// The pause between attempts to reach a worker that has not come yet.
const BETWEEN_TRIES: Duration = Duration::from_millis(5);

/// Address of a worker or an aggregator.
#[derive(Clone)]
pub enum Address {
    /// Endpoint on a fabric.
    Fabric(Endpoint),
    /// Server in this process, on a simulated fabric.
    Simulated(Arc<SimServer>),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fabric(endpoint) => endpoint.fmt(f),
            Self::Simulated(_) => f.write_str("a simulated server"),
        }
    }
}

/// Failure of a worker to take part.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "messages say what fields are")]
pub enum JoinError {
    /// The worker has no memory to lend.
    #[error("worker {rank} cannot take part: {source}")]
    Offer { rank: usize, r#source: OfferError },
    /// The worker cannot serve.
    #[error("worker {rank} cannot be reached by the others: {source}")]
    Serve { rank: usize, r#source: BindError },
    /// Another worker is not there.
    #[error("worker {rank} waited {deadline:?} for worker {missing} at {address}: {source}")]
    Missing {
        rank: usize,
        missing: usize,
        address: String,
        deadline: Duration,
        r#source: ConnectError,
    },
    /// Another worker does not come.
    #[error(
        "worker {rank} waited {deadline:?} for worker {missing} to reach it: it has not started, or cannot reach this worker"
    )]
    Absent {
        rank: usize,
        missing: usize,
        deadline: Duration,
    },
    /// Another worker is there and lends no area to this one.
    #[error(
        "worker {rank} gets no memory of worker {at}: {source}; do all workers run the same job, each rank once?"
    )]
    Refused {
        rank: usize,
        at: usize,
        r#source: OpenNameError,
    },
}

/// Server of areas.
pub(crate) enum Home {
    Fabric(ServerThread),
    Simulated(Arc<SimServer>),
}

impl Home {
    /// Begins to serve; `sim:seed` is a simulated fabric.
    pub(crate) fn open(endpoint: &Endpoint, areas: &Arc<Areas>) -> Result<Self, BindError> {
        let host = Arc::clone(areas);
        Ok(match endpoint {
            Endpoint::Sim(seed) => {
                Self::Simulated(SimServer::with_host(SimConfig::new(*seed), host))
            }
            endpoint => Self::Fabric(ServerThread::start(endpoint, host)?),
        })
    }

    /// True if this process learns of WRITEs by peers: it places them, or an adapter says so.
    pub(crate) fn hears_of_arrivals(&self) -> bool {
        match self {
            Self::Fabric(serving) => {
                let endpoint = serving.endpoint();
                matches!(endpoint, Endpoint::Tcp { .. } | Endpoint::Rdma { .. })
            }
            Self::Simulated(_) => false,
        }
    }

    pub(crate) fn address(&self) -> Address {
        match self {
            Self::Fabric(serving) => Address::Fabric(serving.endpoint().clone()),
            Self::Simulated(server) => Address::Simulated(Arc::clone(server)),
        }
    }
}

/// A worker that the others can reach, and that has not reached them yet.
pub struct Station {
    rank: usize,
    plan: Plan,
    areas: Arc<Areas>,
    receivers: Vec<RingReceiver>,
    home: Home,
}

/// A worker that has reached all others. It serves them until it is dropped.
pub struct Member {
    /// Rings of the worker.
    pub exchange: Exchange,
    _home: Home,
}

impl Member {
    /// Ends an orderly stay: closes the connections to others, and waits until those to this worker
    /// are closed. Dropping the member instead loses the last acknowledgements of messages that it
    /// received, and others find it gone.
    ///
    /// # Errors
    /// [`LeaveError`]: one of the others does not end.
    pub fn leave(self) -> Result<(), LeaveError> {
        self.exchange.leave()
    }
}

impl Station {
    /// Begins to serve worker `rank` at `endpoint`; `sim:seed` is a simulated fabric. A peer that
    /// is silent for `lease` has gone.
    ///
    /// # Errors
    /// [`JoinError::Offer`], [`JoinError::Serve`]
    pub fn open(
        plan: Plan,
        rank: usize,
        endpoint: &Endpoint,
        lease: Duration,
    ) -> Result<Self, JoinError> {
        let areas = Areas::new(lease);
        // Before anybody can write.
        let receivers = (0..plan.rings(rank).len()).map(|number| {
            let landing = areas.offer(&area(number), AREA_BYTES)?;
            Ok(RingReceiver::new(landing, place(ExtentId(0))))
        });
        let receivers = receivers
            .collect::<Result<_, OfferError>>()
            .map_err(|source| JoinError::Offer { rank, source })?;
        let home =
            Home::open(endpoint, &areas).map_err(|source| JoinError::Serve { rank, source })?;
        Ok(Self {
            rank,
            plan,
            areas,
            receivers,
            home,
        })
    }

    /// Returns the address at which others reach this worker.
    pub fn address(&self) -> Address {
        self.home.address()
    }

    /// Reaches the workers that this one sends to, and waits for those that it receives from.
    /// `addresses` are those of all workers, by rank. No worker is waited for longer than
    /// `deadline`, now or later.
    pub fn join(
        self,
        addresses: &[Address],
        options: &SessionOptions,
        deadline: Duration,
    ) -> Result<Member, JoinError> {
        let moved = Arc::new(Moved::default());
        let (rank, rings) = (self.rank, self.plan.rings(self.rank));
        // 1. The next members of all rings.
        let reach = |number: usize| {
            let at = rings[number].next();
            let address = &addresses[at];
            let missing = |source| JoinError::Missing {
                rank,
                missing: at,
                address: address.to_string(),
                deadline,
                source,
            };
            let session = connect(address, options, Instant::now() + deadline).map_err(missing)?;
            let opened = session.open(&area(number));
            let opened = opened.map_err(|source| JoinError::Refused { rank, at, source })?;
            let pool = RegPool::new([session.registrar()], RegPoolOptions::default());
            let counted = Counted {
                channel: session.channel().map_err(missing)?,
                moved: Arc::clone(&moved),
            };
            // An area that is too small refuses what is beyond it.
            let extent = opened.extents.first();
            let extent = extent.map_or(ExtentId(0), |extent| extent.id);
            Ok(RingSender::new(Box::new(counted), &pool, place(extent)))
        };
        let tell = |senders: &mut [Option<RingSender<Counted>>], number: usize| {
            tell_waiting(senders.iter_mut().flatten(), rings[number].next());
        };
        let progress = |sender: &mut RingSender<Counted>| drop(sender.progress());
        let reached = reach_each(rings.len(), deadline / 4, reach, tell, progress);
        let senders = reached.map_err(|mut unreached| {
            let missing = rings[unreached.number].next();
            farewell(unreached.reached.iter_mut(), missing);
            unreached.error
        })?;
        // 2. The members before.
        let ends = rings.into_iter().zip(senders).zip(self.receivers);
        let mut ends: Vec<Ends> = ends
            .enumerate()
            .map(|(number, ((ring, sender), receiver))| Ends {
                ring,
                area: area(number),
                sender,
                receiver,
            })
            .collect();
        gather(rank, &mut ends, &self.areas, deadline)?;
        Ok(Member {
            exchange: Exchange::new(rank, ends, self.areas, deadline, moved),
            _home: self.home,
        })
    }
}

/// Waits for all workers that send to this one. Names the one that is missing to the others.
fn gather(
    rank: usize,
    ends: &mut [Ends],
    areas: &Areas,
    deadline: Duration,
) -> Result<(), JoinError> {
    let (began, mut told) = (Instant::now(), None);
    let is_awaited = |ends: &&Ends| areas.presence(&ends.area) == Presence::Awaited;
    while let Some(awaited) = ends.iter().find(is_awaited) {
        let missing = awaited.ring.before();
        if began.elapsed() >= deadline {
            farewell(senders(ends), missing);
            return Err(JoinError::Absent {
                rank,
                missing,
                deadline,
            });
        }
        if began.elapsed() >= deadline / 4 && told != Some(missing) {
            told = Some(missing);
            tell_waiting(senders(ends), missing);
        }
        // A worker that cannot be told will notice by itself.
        senders(ends).for_each(|sender| drop(sender.progress()));
        thread::sleep(NAP_MAX);
    }
    Ok(())
}

fn area(number: usize) -> String {
    format!("ring-{number}")
}

fn place(extent: ExtentId) -> RingPlace {
    RingPlace {
        extent,
        offset: 0,
        capacity: RING_BYTES,
    }
}

/// Opens a session at `address`. Workers start in any order, so tries again until `until`.
pub(crate) fn connect(
    address: &Address,
    options: &SessionOptions,
    until: Instant,
) -> Result<Arc<Session>, ConnectError> {
    loop {
        let tried = match address {
            Address::Fabric(endpoint) => Session::connect(endpoint, options),
            Address::Simulated(server) => server.session(options),
        };
        match tried {
            Err(ConnectError::Unreachable { .. }) if Instant::now() < until => {
                thread::sleep(BETWEEN_TRIES);
            }
            tried => return tried,
        }
    }
}

/// Failure to reach one of several others.
pub(crate) struct Unreached<T, E> {
    /// Connections to the others that were reached.
    pub(crate) reached: Vec<T>,
    /// Number of the other that was not reached.
    pub(crate) number: usize,
    pub(crate) error: E,
}

/// Reaches `count` others, each on a thread of its own: if one is missing, the rest are reached and
/// hear of it. After `patience`, `tell` gets those that have been reached and the number of the
/// missing one. Meanwhile `look_after` gets each of them.
pub(crate) fn reach_each<T: Send, E: Send>(
    count: usize,
    patience: Duration,
    reach: impl Fn(usize) -> Result<T, E> + Sync,
    mut tell: impl FnMut(&mut [Option<T>], usize),
    look_after: impl Fn(&mut T),
) -> Result<Vec<T>, Unreached<T, E>> {
    let began = Instant::now();
    let mut reached: Vec<Option<T>> = (0..count).map(|_| None).collect();
    let mut failed: Option<(usize, E)> = None;
    thread::scope(|scope| {
        let (to, from) = mpsc::channel();
        for number in 0..count {
            let (to, reach) = (to.clone(), &reach);
            scope.spawn(move || {
                to.send((number, reach(number)))
                    .expect("it is received until all have ended");
            });
        }
        drop(to);
        let mut told = None;
        loop {
            match from.recv_timeout(BETWEEN_TRIES) {
                Ok((number, Ok(one))) => reached[number] = Some(one),
                Ok((number, Err(error))) => {
                    failed.get_or_insert((number, error));
                }
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {}
            }
            let missing = reached.iter().position(Option::is_none);
            if let Some(missing) = missing
                && began.elapsed() >= patience
                && told != Some(missing)
            {
                told = Some(missing);
                tell(&mut reached, missing);
            }
            reached.iter_mut().flatten().for_each(&look_after);
        }
    });
    let reached = reached.into_iter().flatten().collect();
    match failed {
        None => Ok(reached),
        Some((number, error)) => Err(Unreached {
            reached,
            number,
            error,
        }),
    }
}
