//! Training on many workers over farpage's fabric.
//!
//! The rule it keeps: a seed decides every bit of the result, on every fabric and on every
//! processor. No part of it is `unsafe`, and none depends on the order in which messages arrive.

mod aggregator;
mod checkpoint;
pub mod data;
mod exchange;
mod job;
mod layers;
mod meeting;
mod mlp;
mod optimizer;
mod plan;
mod random;
mod station;
mod team;
mod work;

pub use self::{
    aggregator::{
        AggregateError, Aggregator, AggregatorCourse, Layout, Party, StateError, Through,
    },
    checkpoint::{Checkpoint, CheckpointError, Content, Course, Keep, KeepError, Keeping},
    exchange::{Exchange, ExchangeError, LeaveError},
    job::{Job, consensus, distance, hash},
    meeting::WorkError,
    mlp::{Mlp, Scratch},
    optimizer::{Optimizer, Rule},
    plan::{Mode, Plan, PlanError, Ring},
    random::Random,
    station::{Address, JoinError, Member, Station},
    team::{Between, Courses, Network, TeamError, run, run_on},
    work::{Outcome, Snapshot},
};
