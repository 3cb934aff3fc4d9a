//! [`Aggregator`]: the process that sums and steps one part of the parameters.
//!
//! The rule it keeps: it ends when all workers have gone, and workers that it gives up hear why.

use std::{
    ops::Range,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use farpage::Runtime;
use farpage_fabric::{
    Endpoint, ExtentId,
    areas::{Areas, Board, Presence},
    patterns::{Landing, RingReceiver},
};

use super::{
    AggregateError, BOARD, CULPRIT_AT, FAREWELL, GIVEN_UP, GRADIENT_AT, ITS_OWN_FAULT, Layout,
    NAP_MAX, PARAMETERS_AT, Party, VERSION_AT, area, place,
    state::State,
    summing::{Summing, Turns},
};
use crate::{
    optimizer::Rule,
    station::{Address, Home},
};

/// A parameter server for one part of the parameters.
pub struct Aggregator {
    who: Party,
    part: Range<usize>,
    /// How many of the part are no running statistics.
    learnt: usize,
    areas: Arc<Areas>,
    workers: Vec<(RingReceiver, Landing)>,
    board: Board,
    home: Home,
    runtime: Option<Runtime>,
}

impl Aggregator {
    /// Begins to serve at `endpoint`; `sim:seed` is a simulated fabric. A worker that is silent for
    /// `lease` has gone.
    ///
    /// # Errors
    /// [`AggregateError::Offer`], [`AggregateError::Serve`]
    pub fn open(
        layout: Layout,
        number: usize,
        endpoint: &Endpoint,
        lease: Duration,
    ) -> Result<Self, AggregateError> {
        let who = Party::Aggregator(number);
        let offer = |source| AggregateError::Offer { who, source };
        let (areas, part) = (Areas::new(lease), layout.part(number));
        let bytes = 4 * part.len();
        let workers = (0..layout.workers).map(|rank| {
            let landing = areas.offer(&area(rank), (GRADIENT_AT + bytes) as u64)?;
            let ring = RingReceiver::new(landing.clone(), place(ExtentId(0)));
            Ok((ring, landing))
        });
        let workers = workers.collect::<Result<_, _>>().map_err(offer)?;
        let shown = (PARAMETERS_AT + 2 * bytes).max(PARAMETERS_AT + 8) as u64;
        let board = areas.show(BOARD, shown).map_err(offer)?;
        let home =
            Home::open(endpoint, &areas).map_err(|source| AggregateError::Serve { who, source })?;
        Ok(Self {
            who,
            learnt: layout.learnt(&part),
            part,
            areas,
            workers,
            board,
            home,
            runtime: None,
        })
    }

    /// Keeps the parameters and the optimizer's state in remote memory, of which the runtime's
    /// budget is local at a time. Not one bit differs.
    pub fn keep_in(self, runtime: &Runtime) -> Self {
        Self {
            runtime: Some(runtime.clone()),
            ..self
        }
    }

    /// Where workers reach it.
    pub fn address(&self) -> Address {
        self.home.address()
    }

    /// Changes the parameters, all of which begin as `initial`, in so many steps by `rule`. Waits
    /// for no worker longer than `deadline`, and returns when all have gone.
    ///
    /// # Errors
    /// [`AggregateError`]; workers are told whose fault it is.
    pub fn serve(
        self,
        initial: &[f32],
        rule: Rule,
        steps: u64,
        deadline: Duration,
    ) -> Result<(), AggregateError> {
        let Self {
            who,
            part,
            learnt,
            areas,
            workers: landings,
            board,
            home,
            runtime,
        } = self;
        let (initial, workers) = (&initial[part], landings.len());
        let state = State::new(rule, initial, learnt, runtime.as_ref());
        let outcome = match state {
            Err(why) => {
                let source = Box::new(why);
                Err(AggregateError::State { who, source })
            }
            Ok(state) => {
                let turns = Arc::new(Turns::new(Summing {
                    who,
                    share: 1.0 / workers as f32,
                    workers: landings,
                    board: board.clone(),
                    sum: vec![0.0; initial.len()],
                    state,
                    steps,
                    at: (0, 0),
                    since: Instant::now(),
                    failed: None,
                    message: Vec::new(),
                }));
                let hears = home.hears_of_arrivals();
                if hears {
                    let turns = Arc::clone(&turns);
                    areas.on_arrival(Some(Arc::new(move || turns.turn())));
                }
                let outcome = turns.wait(&areas, hears, deadline);
                areas.on_arrival(None);
                outcome
            }
        };
        let (culprit, patience) = match &outcome {
            Ok(()) => (None, deadline),
            Err(
                AggregateError::Missing { missing: at, .. }
                | AggregateError::Gone { gone: at, .. }
                | AggregateError::Strange { from: at, .. },
            ) => match at {
                Party::Worker(rank) => (Some(*rank as u64 + 1), FAREWELL),
                Party::Aggregator(_) => (Some(ITS_OWN_FAULT), FAREWELL),
            },
            Err(_) => (Some(ITS_OWN_FAULT), FAREWELL),
        };
        if let Some(culprit) = culprit {
            board.announce(CULPRIT_AT, culprit);
            board.announce(VERSION_AT, GIVEN_UP);
        }
        // Who has not come yet shall hear of a failure, too.
        let hears = |rank| match areas.presence(&area(rank)) {
            Presence::Here => true,
            Presence::Awaited => culprit.is_some(),
            Presence::Gone => false,
        };
        let until = Instant::now() + patience;
        while (0..workers).any(hears) && Instant::now() < until {
            thread::sleep(NAP_MAX);
        }
        outcome
    }
}
