//! Training on many workers over farpage's fabric.
//!
//! The rule it keeps: a seed decides every bit of the result, on every fabric and on every
//! processor. No part of it is `unsafe`, and none depends on the order in which messages arrive.

pub mod data;
mod exchange;
mod job;
mod mlp;
mod optimizer;
mod plan;
mod product;
mod random;
mod station;
mod team;

pub use self::{
    exchange::{Exchange, ExchangeError},
    job::{Job, Outcome, Snapshot, consensus, distance, hash},
    mlp::{Mlp, Scratch},
    optimizer::{Optimizer, Rule},
    plan::{Mode, Plan, PlanError, Ring},
    random::Random,
    station::{Address, JoinError, Member, Station},
    team::{Between, Network, TeamError, run},
};
