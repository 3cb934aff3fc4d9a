//! [`Station`]: a worker's way from serving its own memory to holding the rings.
//!
//! The rule it keeps: each worker lends an area per ring, which the member before it opens, and
//! opens the areas of those that it sends to. Nobody is waited for beyond the deadline, and who
//! cannot be reached is named.

use std::{
    fmt,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use farpage_fabric::{
    ConnectError, Endpoint, ExtentId, OpenError, Session, SessionOptions,
    areas::{Areas, OfferError},
    patterns::{RingPlace, RingReceiver, RingSender},
    regmem::{RegPool, RegPoolOptions},
    server::{BindError, Serving},
    sim::{SimConfig, SimServer},
};

use crate::{
    exchange::{Counted, Ends, Exchange, Moved, RING_BYTES},
    plan::{Plan, Ring},
};

/// Bytes of an area: a ring with its positions.
const AREA_BYTES: u64 = 128 + RING_BYTES as u64;
/// The pause between attempts to reach a worker that has not come yet.
const BETWEEN_TRIES: Duration = Duration::from_millis(5);

/// Where a worker is reached.
#[derive(Clone)]
pub enum Address {
    /// Over a fabric.
    Fabric(Endpoint),
    /// In this process, over a simulated fabric.
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

/// Why a worker cannot take part.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// It has no memory to lend.
    #[error("worker {rank} cannot take part: {source}")]
    Offer {
        /// The worker.
        rank: usize,
        /// Why not.
        r#source: OfferError,
    },
    /// It cannot serve.
    #[error("worker {rank} cannot be reached by the others: {source}")]
    Serve {
        /// The worker.
        rank: usize,
        /// Why not.
        r#source: BindError,
    },
    /// Another worker is not there.
    #[error("worker {rank} waited {deadline:?} for worker {missing} at {address}: {source}")]
    Missing {
        /// Who waited.
        rank: usize,
        /// Who is missing.
        missing: usize,
        /// Where it should be.
        address: String,
        /// For how long.
        deadline: Duration,
        /// Why it could not be reached.
        r#source: ConnectError,
    },
    /// Another worker does not come.
    #[error(
        "worker {rank} waited {deadline:?} for worker {missing} to reach it: it has not started, or cannot reach this worker"
    )]
    Absent {
        /// Who waited.
        rank: usize,
        /// Who is missing.
        missing: usize,
        /// For how long.
        deadline: Duration,
    },
    /// Another worker is there and lends no area to this one.
    #[error(
        "worker {rank} gets no memory of worker {at}: {source}; do all workers run the same job, each rank once?"
    )]
    Refused {
        /// Who asked.
        rank: usize,
        /// Who was asked.
        at: usize,
        /// What it said.
        r#source: OpenError,
    },
}

enum Home {
    Fabric(Serving),
    Simulated(Arc<SimServer>),
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
    /// Its rings.
    pub exchange: Exchange,
    _home: Home,
}

impl Member {
    /// Ends an orderly stay: closes the connections to others, and waits until those to this worker
    /// are closed. A worker that is dropped without takes the last acknowledgements of what it was
    /// sent with it, and others find it gone.
    pub fn leave(self) {
        self.exchange.leave();
    }
}

impl Station {
    /// Begins to serve the worker of this rank at `endpoint`; `sim:seed` is a simulated fabric. A
    /// peer that is silent for `lease` has gone.
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
        let host = Arc::clone(&areas);
        let home = match endpoint {
            Endpoint::Sim(seed) => {
                Home::Simulated(SimServer::with_host(SimConfig::new(*seed), host))
            }
            endpoint => Home::Fabric(
                Serving::start(endpoint, host)
                    .map_err(|source| JoinError::Serve { rank, source })?,
            ),
        };
        Ok(Self {
            rank,
            plan,
            areas,
            receivers,
            home,
        })
    }

    /// Where the others reach it.
    pub fn address(&self) -> Address {
        match &self.home {
            Home::Fabric(serving) => Address::Fabric(serving.endpoint().clone()),
            Home::Simulated(server) => Address::Simulated(Arc::clone(server)),
        }
    }

    /// Reaches the workers that this one sends to, and waits for those that it receives from.
    /// `addresses` are those of all workers, by rank. Nobody is waited for longer than `deadline`,
    /// now or later.
    ///
    /// # Errors
    /// [`JoinError`]
    pub fn join(
        self,
        addresses: &[Address],
        options: &SessionOptions,
        deadline: Duration,
    ) -> Result<Member, JoinError> {
        let moved = Arc::new(Moved::default());
        let rings = self.plan.rings(self.rank).into_iter().enumerate();
        let ends = rings.zip(self.receivers).map(|((number, ring), receiver)| {
            let sender = reach(
                self.rank, number, &ring, addresses, options, deadline, &moved,
            )?;
            Ok(Ends {
                ring,
                area: area(number),
                sender,
                receiver,
            })
        });
        let ends = ends.collect::<Result<_, JoinError>>()?;
        let exchange = Exchange::new(self.rank, ends, self.areas, deadline, moved);
        exchange.gather()?;
        Ok(Member {
            exchange,
            _home: self.home,
        })
    }
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

fn reach(
    rank: usize,
    number: usize,
    ring: &Ring,
    addresses: &[Address],
    options: &SessionOptions,
    deadline: Duration,
    moved: &Arc<Moved>,
) -> Result<RingSender<Counted>, JoinError> {
    let at = ring.next();
    let address = &addresses[at];
    let missing = |source| JoinError::Missing {
        rank,
        missing: at,
        address: address.to_string(),
        deadline,
        source,
    };
    let until = Instant::now() + deadline;
    let session = loop {
        let tried = match address {
            Address::Fabric(endpoint) => Session::connect(endpoint, options),
            Address::Simulated(server) => server.session(options),
        };
        match tried {
            Ok(session) => break session,
            // Workers start in any order.
            Err(ConnectError::Unreachable { .. }) if Instant::now() < until => {
                thread::sleep(BETWEEN_TRIES);
            }
            Err(error) => return Err(missing(error)),
        }
    };
    let opened = session.open(&area(number));
    let opened = opened.map_err(|source| JoinError::Refused { rank, at, source })?;
    let pool = RegPool::new([session.registrar()], RegPoolOptions::default());
    let channel = session.channel().map_err(missing)?;
    let counted = Counted {
        channel,
        moved: Arc::clone(moved),
    };
    // An area that is too small refuses what is beyond it.
    let extent = opened
        .extents
        .first()
        .map_or(ExtentId(0), |extent| extent.id);
    Ok(RingSender::new(Box::new(counted), &pool, place(extent)))
}
