//! [`Aggregator`]: the process that sums, and steps, one part of the parameters.
//!
//! The rule it keeps: it ends when all workers have gone, and workers that it gives up hear why.

use std::{
    fmt,
    io::Read,
    ops::Range,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use farpage::Runtime;
use farpage_fabric::{
    Endpoint, ExtentId,
    areas::{Areas, OfferError, Presence},
    patterns::RingReceiver,
};

use super::{
    error::AggregateError,
    layout::Layout,
    link::OwnLink,
    protocol::{
        CULPRIT_AT, FAREWELL, GIVEN_UP, GRADIENT_AT, NAP_MAX, PARAMETERS_AT, Party, VERSION_AT,
        area, board, place,
    },
    state::{self, State, StateError},
    summing::{Group, Keeper, Member, Summing, Task, Turns, lost},
};
use crate::{
    checkpoint::Keeping,
    job::Job,
    optimizer::Rule,
    plan::Mode,
    station::{Address, Home},
};

/// A parameter server for one part of the parameters.
pub struct Aggregator {
    who: Party,
    number: usize,
    part: Range<usize>,
    areas: Arc<Areas>,
    groups: Vec<Group>,
    home: Home,
    runtime: Option<Runtime>,
    link_gbps: Option<f64>,
}

/// Beginning of an aggregator, and the checkpoints that it keeps.
#[derive(Default)]
pub struct AggregatorCourse<'a> {
    /// Number of steps that have been done.
    pub from: u64,
    /// The checkpoint of step `from`, if the aggregator has the optimizer. It is read once, and in
    /// order.
    pub checkpoint: Option<Box<dyn Read + Send + 'a>>,
    /// Keeper of checkpoints, if the aggregator has the optimizer; `None` keeps none.
    pub keeping: Option<Keeping<'a>>,
}

impl fmt::Debug for AggregatorCourse<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AggregatorCourse")
            .field("from", &self.from)
            .field("keeping", &self.keeping)
            .finish_non_exhaustive()
    }
}

impl Aggregator {
    /// Begins to serve as aggregator `number` at `endpoint`; `sim:seed` is a simulated fabric. A
    /// worker that is silent for `lease` has gone.
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
        let (areas, part) = (Areas::new(lease), layout.part(number));
        let bytes = 4 * part.len();
        // Before anybody can write.
        let group = |ring: usize| -> Result<Group, OfferError> {
            let member = |rank: usize| {
                let landing = areas.offer(&area(ring, rank), (GRADIENT_AT + bytes) as u64)?;
                Ok(Member {
                    rank,
                    ring: RingReceiver::new(landing.clone(), place(ExtentId(0))),
                    landing,
                    arrives: None,
                    waits_for: None,
                })
            };
            let members = layout.members(ring, number).into_iter().map(member);
            let shown = (PARAMETERS_AT + 2 * bytes).max(PARAMETERS_AT + 8) as u64;
            Ok(Group {
                members: members.collect::<Result<_, OfferError>>()?,
                board: areas.show(&board(ring), shown)?,
            })
        };
        let groups = (0..layout.plan.ring_count()).map(group);
        let groups = groups
            .collect::<Result<_, _>>()
            .map_err(|source| AggregateError::Offer { who, source })?;
        let home =
            Home::open(endpoint, &areas).map_err(|source| AggregateError::Serve { who, source })?;
        Ok(Self {
            who,
            number,
            part,
            areas,
            groups,
            home,
            runtime: None,
            link_gbps: None,
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

    /// Delays results as if all workers reached the aggregator by one link of `gbps` gigabits per
    /// second in each direction. Not one bit differs.
    pub fn behind_link(self, gbps: f64) -> Self {
        Self {
            link_gbps: Some(gbps),
            ..self
        }
    }

    /// Returns the address at which workers reach the aggregator.
    pub fn address(&self) -> Address {
        self.home.address()
    }

    /// Changes the parameters, all of which begin as `initial`, by `rule` in `steps` steps. Waits
    /// for no worker longer than `deadline`, and returns when all have gone.
    ///
    /// # Errors
    /// [`AggregateError`]; workers are told the party at fault.
    pub fn serve(
        self,
        initial: &[f32],
        rule: Rule,
        steps: u64,
        deadline: Duration,
    ) -> Result<(), AggregateError> {
        let who = self.who;
        let state = self.state(initial, rule).map_err(|why| lost(who, why));
        self.run(
            state.map(Task::Step),
            0..steps,
            deadline,
            None,
            &mut |_, _| Ok(()),
        )
    }

    /// Runs the aggregator's part of `job`: the steps of the optimizer for [`Mode::Bsp`], and the
    /// means of parameters for groups. Waits for no worker longer than `deadline`, and returns when
    /// all have gone.
    ///
    /// # Errors
    /// [`AggregateError`]; workers are told the party at fault.
    pub fn serve_job(
        self,
        job: &Job,
        course: AggregatorCourse<'_>,
        deadline: Duration,
    ) -> Result<(), AggregateError> {
        let (who, number) = (self.who, self.number);
        let AggregatorCourse {
            from,
            checkpoint,
            mut keeping,
        } = course;
        let task = match job.plan.mode() {
            Mode::Bsp => {
                let initial = job.model.initial(job.seed);
                let state = self.state(&initial, job.rule);
                let state = state.map_err(|why| lost(who, why));
                state.and_then(|mut state| {
                    if let Some(mut source) = checkpoint {
                        let read = state::read(job, number, from, &mut state, &mut *source);
                        read.map_err(|source| AggregateError::Resume { who, source })?;
                    }
                    Ok(Task::Step(state))
                })
            }
            _ => Ok(Task::Mean),
        };
        let every = keeping.as_ref().map(|keeping| keeping.every);
        let mut keep = |step, state: &mut State| match &mut keeping {
            None => Ok(()),
            Some(keeping) => {
                let mut content = state::Kept::new(job, number, step, state);
                let kept = (keeping.keep)(step, &mut content);
                kept.map_err(|source| AggregateError::Keep { who, step, source })
            }
        };
        self.run(task, from..job.rounds(), deadline, every, &mut keep)
    }

    fn state(&self, initial: &[f32], rule: Rule) -> Result<State, StateError> {
        let initial = &initial[self.part.clone()];
        State::new(rule, initial, self.runtime.as_ref())
    }

    fn run(
        self,
        task: Result<Task, AggregateError>,
        rounds: Range<u64>,
        deadline: Duration,
        every: Option<u64>,
        keeper: &mut Keeper<'_>,
    ) -> Result<(), AggregateError> {
        let Self {
            who,
            part,
            areas,
            groups,
            home,
            link_gbps,
            ..
        } = self;
        let boards: Vec<_> = groups.iter().map(|group| group.board.clone()).collect();
        let names: Vec<_> = (groups.iter().enumerate())
            .flat_map(|(ring, group)| {
                let members = group.members.iter();
                members.map(move |member| area(ring, member.rank))
            })
            .collect();
        let began = task.and_then(|task| {
            let mut summing = Summing {
                who,
                groups,
                task,
                sum: vec![0.0; part.len()],
                rounds: rounds.end,
                at: (rounds.start, 0),
                since: Instant::now(),
                link: link_gbps.map(|gbps| OwnLink::new(gbps, 4 * part.len())),
                held: None,
                due: None,
                every,
                keep: None,
                failed: None,
                message: Vec::new(),
            };
            if rounds.start > 0 {
                summing.resume(rounds.start)?;
            }
            Ok(Arc::new(Turns::new(summing)))
        });
        let outcome = began.and_then(|turns| {
            let hears = home.hears_of_arrivals();
            if hears {
                let turns = Arc::clone(&turns);
                areas.on_arrival(Some(Arc::new(move || turns.turn())));
            }
            let outcome = turns.wait(&areas, hears, deadline, keeper);
            areas.on_arrival(None);
            outcome
        });
        let culprit = outcome.as_ref().err().map(|error| error.culprit(who));
        if let Some(culprit) = culprit {
            for board in &boards {
                board.announce(CULPRIT_AT, culprit.code());
                board.announce(VERSION_AT, GIVEN_UP);
            }
        }
        // Workers that have not come yet shall hear of a failure, too.
        let hears = |name: &String| match areas.presence(name) {
            Presence::Here => true,
            Presence::Awaited => culprit.is_some(),
            Presence::Gone => false,
        };
        let until = Instant::now() + culprit.map_or(deadline, |_| FAREWELL);
        while names.iter().any(hears) && Instant::now() < until {
            thread::sleep(NAP_MAX);
        }
        outcome
    }
}
